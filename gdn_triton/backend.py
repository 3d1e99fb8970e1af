"""Which backend runs a call: an ordered list, each entry with its reason to refuse.

`GDN_BACKEND`, read at every call, is `auto` (the default) or the name of a backend. `auto` takes
the first backend of `BACKENDS` that does not refuse, and logs the choice and the refusals before it
once. A backend asked for by name never falls back: if it refuses, the call raises RuntimeError with
the reason. Every refusal is a sentence.
"""

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from packaging.version import Version
from torch import Tensor

from gdn_triton.constants import MAX_K, MAX_ROW_STRIDE
from gdn_triton.fast import support as fast_support
from gdn_triton.problem import Problem

# forward(problem, q, k, v, g, beta, initial_state, cu_seqlens, chunk_indices, A_log, dt_bias)
Forward = Callable[
    [
        Problem,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor | None,
        Tensor | None,
        Tensor | None,
        Tensor | None,
        Tensor | None,
    ],
    tuple[Tensor, Tensor | None],
]

MIN_TRITON = "3.6"

_logger = logging.getLogger("gdn_triton")
_logged: set[tuple[str, tuple[tuple[str, str], ...], int]] = set()


@dataclass(frozen=True, slots=True)
class Backend:
    """name: as `GDN_BACKEND` spells it. supports: a sentence why not, or None. load: imports the
    backend's modules, which may be heavy or absent, and returns its forward."""

    name: str
    supports: Callable[[Problem], str | None]
    load: Callable[[], Forward]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `gdn_triton.explain` found.

    requested: the value of `GDN_BACKEND`. chosen: the backend that would run, or None when the one
    asked for by name refuses. reasons: for each backend in order, None if it is the chosen one,
    else a sentence why it would not run.
    """

    requested: str
    chosen: str | None
    reasons: dict[str, str | None]

    def __str__(self) -> str:
        chosen = f"{self.chosen} would run" if self.chosen else "no backend would run"
        lines = [f"GDN_BACKEND={self.requested}: {chosen}"]
        lines += [f"  {name}: {reason or 'chosen'}" for name, reason in self.reasons.items()]
        return "\n".join(lines)


@functools.cache
def _triton_missing() -> str | None:
    """A sentence why Triton cannot be used, or None. It cannot change within a process."""
    try:
        import triton
    except ImportError as error:
        return f"Triton {MIN_TRITON} or newer is needed and cannot be imported ({error})."
    if Version(triton.__version__) < Version(MIN_TRITON):
        return f"Triton {MIN_TRITON} or newer is needed; {triton.__version__} is installed."
    return None


def _interpreting() -> bool:
    """Whether Triton kernels run in the interpreter (TRITON_INTERPRET=1), on the CPU."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def triton_supports(problem: Problem) -> str | None:
    """A sentence why the Triton kernels cannot run this problem, or None."""
    missing = _triton_missing()
    if missing is not None:
        return missing
    dtypes = (problem.q_dtype, problem.k_dtype, problem.v_dtype)
    device_type = problem.device.type
    if _interpreting():
        if torch.bfloat16 in dtypes:
            return (
                "Triton's interpreter multiplies bfloat16 matrices wrongly; use float16 or "
                "float32, or unset TRITON_INTERPRET."
            )
    elif device_type == "cpu":
        return "The tensors are on the CPU, where Triton only runs with TRITON_INTERPRET=1."
    elif device_type not in ("cuda", "xpu"):
        return f"Triton runs on cuda and xpu devices; the tensors are on {device_type}."
    if torch.float64 in dtypes:
        return "The Triton kernels compute in float32 at most; one of q, k, v is float64."
    if problem.K > MAX_K:
        return f"The Triton kernels take keys of up to {MAX_K} channels; K is {problem.K}."
    row = problem.HV * max(problem.K, problem.V)
    if row >= MAX_ROW_STRIDE:
        return (
            f"The Triton kernels take rows of less than {MAX_ROW_STRIDE} elements; a token's "
            f"HV * max(K, V) is {row}."
        )
    if problem.needs_grad:
        return (
            "The Triton backend has no backward yet; an input requires a gradient. Call under "
            "torch.no_grad() if none is wanted."
        )
    return None


def reference_supports(problem: Problem) -> str | None:
    """The reference takes every valid problem, on every device."""
    return None


def _load_cuda() -> Forward:
    # A name, not a static import: the module is only there in builds that have the CUDA library.
    import importlib

    forward: Forward = importlib.import_module("gdn_triton.fast.chunk").forward
    return forward


def _load_triton() -> Forward:
    from gdn_triton.ops import chunk_fwd

    return chunk_fwd.forward


def _load_reference() -> Forward:
    from gdn_triton.ops import reference_chunk

    return reference_chunk.forward


# In the order in which `auto` tries them.
BACKENDS: tuple[Backend, ...] = (
    Backend("cuda", fast_support.supports, _load_cuda),
    Backend("triton", triton_supports, _load_triton),
    Backend("reference", reference_supports, _load_reference),
)


def requested_backend() -> str:
    """The value of `GDN_BACKEND`; ValueError if it is none of the known ones."""
    name = os.environ.get("GDN_BACKEND", "auto")
    if name != "auto" and all(name != backend.name for backend in BACKENDS):
        names = ", ".join(["auto", *sorted(backend.name for backend in BACKENDS)])
        raise ValueError(f"GDN_BACKEND must be one of {names}, got {name!r}")
    return name


def choose(problem: Problem) -> Backend:
    """The backend that runs this problem.

    ValueError for an unknown `GDN_BACKEND`; RuntimeError with the reason if a backend is asked for
    by name and refuses.
    """
    requested = requested_backend()
    if requested != "auto":
        backend = next(backend for backend in BACKENDS if backend.name == requested)
        reason = backend.supports(problem)
        if reason is not None:
            raise RuntimeError(f"GDN_BACKEND={requested} cannot run this call. {reason}")
        return backend
    refusals: list[tuple[str, str]] = []
    for backend in BACKENDS:
        reason = backend.supports(problem)
        if reason is None:
            _log_once(backend.name, tuple(refusals), problem.device.type)
            return backend
        refusals.append((backend.name, reason))
    # The reference is last in the list and refuses nothing.
    raise AssertionError("no backend took the problem")


def explain_choice(problem: Problem) -> Explanation:
    """What `choose` would do, and why not otherwise. Raises only for an unknown `GDN_BACKEND`."""
    requested = requested_backend()
    reasons = {backend.name: backend.supports(problem) for backend in BACKENDS}
    if requested == "auto":
        chosen = next((name for name, reason in reasons.items() if reason is None), None)
        passed_over = f"It could run this call, but {chosen} comes before it."
    else:
        chosen = requested if reasons[requested] is None else None
        passed_over = f"It could run this call, but GDN_BACKEND asks for {requested}."
    for name, reason in reasons.items():
        if reason is None and name != chosen:
            reasons[name] = passed_over
    return Explanation(requested, chosen, reasons)


def _log_once(name: str, refusals: tuple[tuple[str, str], ...], device_type: str) -> None:
    # On an accelerator the reference is right but far slower than kernels: worth a warning.
    slow = name == "reference" and device_type != "cpu"
    level = logging.WARNING if slow else logging.INFO
    if (name, refusals, level) in _logged:
        return
    _logged.add((name, refusals, level))
    _logger.log(
        level,
        "GDN_BACKEND=auto chose %s%s.%s",
        name,
        f", which is slow on {device_type}" if slow else "",
        "".join(f" Not {refused}: {reason}" for refused, reason in refusals),
    )
