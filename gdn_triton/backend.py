"""Which backend runs a call: an ordered list, each entry with its reason to refuse.

`GDN_BACKEND`, read at every call, is `auto` (the default) or the name of a backend. `auto` takes
the first backend of `BACKENDS` that does not refuse and is not passed over, and logs the choice and
the refusals before it once. A backend asked for by name never falls back: if it refuses, the call
raises RuntimeError with the reason. Every refusal is a sentence.
"""

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
from packaging.version import Version
from torch import Tensor

from gdn_triton.constants import MAX_K, MAX_ROW_STRIDE
from gdn_triton.fast import support as fast_support
from gdn_triton.problem import Inputs, Pool, Problem
from gdn_triton.recurrent_problem import Operands, RecurrentProblem, Run


class Forward(Protocol):
    """What runs a call of the chunked op: o and the final states, or None. With a `pool`, which is
    there if and only if the problem has a `pool_dtype`, o and the states are written into it."""

    def __call__(
        self, problem: Problem, x: Inputs, cu_seqlens: Tensor | None, pool: Pool | None = None
    ) -> tuple[Tensor, Tensor | None]: ...


if TYPE_CHECKING:
    from gdn_triton.ops.context_parallel import ShardOps

# plan(problem, operands): what runs that call of the recurrence, and those like it.
Plan = Callable[[RecurrentProblem, Operands], Run]

P = TypeVar("P", Problem, RecurrentProblem)
F = TypeVar("F", Forward, Plan, "ShardOps")

MIN_TRITON = "3.6"

_logger = logging.getLogger("gdn_triton")
_logged: set[tuple[str, tuple[tuple[str, str], ...], int]] = set()


@dataclass(frozen=True, slots=True)
class Backend(Generic[P, F]):
    """name: as `GDN_BACKEND` spells it. supports: a sentence why not, or None. load: imports the
    backend's modules, which may be heavy or absent, and returns its forward or its plan."""

    name: str
    supports: Callable[[P], str | None]
    load: Callable[[], F]


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


def _triton_refusal(dtypes: tuple[torch.dtype, ...], device_type: str, K: int) -> str | None:
    """What no Triton kernel of this package can run."""
    missing = _triton_missing()
    if missing is not None:
        return missing
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
    if K > MAX_K:
        return f"The Triton kernels take keys of up to {MAX_K} channels; K is {K}."
    return None


def _states_refusal(dtype: torch.dtype) -> str | None:
    """What no Triton kernel of this package can keep states in."""
    if dtype == torch.float64:
        return "The Triton kernels compute in float32 at most; the states are float64."
    if dtype == torch.bfloat16 and _interpreting():
        return "Triton's interpreter is not used with bfloat16; the states are."
    return None


def triton_limits(
    dtypes: tuple[torch.dtype, ...], device_type: str, HV: int, K: int, V: int
) -> str | None:
    """A sentence why the Triton kernels cannot take such q, k and v, or None."""
    refusal = _triton_refusal(dtypes, device_type, K)
    if refusal is not None:
        return refusal
    row = HV * max(K, V)
    if row >= MAX_ROW_STRIDE:
        return (
            f"The Triton kernels take rows of less than {MAX_ROW_STRIDE} elements; a token's "
            f"HV * max(K, V) is {row}."
        )
    return None


def triton_supports(problem: Problem) -> str | None:
    """A sentence why the Triton kernels cannot run this problem, or None."""
    p = problem
    refusal = triton_limits((p.q_dtype, p.k_dtype, p.v_dtype), p.device.type, p.HV, p.K, p.V)
    return refusal or (None if p.pool_dtype is None else _states_refusal(p.pool_dtype))


def cuda_supports(problem: Problem) -> str | None:
    """A sentence why the CUDA library, or Triton for its gradients, cannot run this, or None."""
    refusal = fast_support.supports(problem)
    if refusal is not None or not problem.needs_grad:
        return refusal
    refusal = triton_supports(problem)
    if refusal is None:
        return None
    return (
        "The CUDA library has no backward of its own, an input requires a gradient, and the Triton "
        f"backward cannot run: {refusal}"
    )


def recurrent_cuda_supports(problem: RecurrentProblem) -> str | None:
    """A sentence why the CUDA library cannot run this call of the recurrence."""
    return "The CUDA library has no kernel for the recurrence token by token."


def recurrent_triton_supports(problem: RecurrentProblem) -> str | None:
    """A sentence why the Triton kernel cannot run this call of the recurrence, or None."""
    dtypes = (problem.q_dtype, problem.k_dtype, problem.v_dtype)
    refusal = _triton_refusal(dtypes, problem.device.type, problem.K)
    if refusal is not None:
        return refusal
    refusal = _states_refusal(problem.state_dtype)
    if refusal is not None:
        return refusal
    if problem.tile_span >= 2**31:
        return (
            "The Triton kernel takes rows and states of which the last element is less than 2^31 "
            f"elements from the first; one is {problem.tile_span} from it."
        )
    if problem.needs_grad:
        return (
            "The Triton kernel of the recurrence has no backward; an input requires a gradient. "
            "Call under torch.no_grad() if none is wanted."
        )
    return None


def reference_supports(problem: Problem | RecurrentProblem) -> str | None:
    """The reference takes every valid problem, on every device."""
    return None


def _load_cuda() -> Forward:
    from gdn_triton.ops import cuda_chunk

    return cuda_chunk.forward


def _load_triton() -> Forward:
    from gdn_triton.ops import chunk

    return chunk.forward


def _load_reference() -> Forward:
    from gdn_triton.ops import reference_chunk

    return reference_chunk.forward


def sharded_cuda_supports(problem: Problem) -> str | None:
    """A sentence why the CUDA library cannot run a rank's part of a split call."""
    return "The CUDA library does not serve cp_context."


def _load_no_shard() -> "ShardOps":
    raise AssertionError("a backend that refuses every call was chosen")


def _load_triton_shard() -> "ShardOps":
    from gdn_triton.ops import shard_triton

    return shard_triton


def _load_reference_shard() -> "ShardOps":
    from gdn_triton.ops import shard_reference

    return shard_reference


def _load_no_plan() -> Plan:
    raise AssertionError("a backend that refuses every call was chosen")


def _load_triton_plan() -> Plan:
    from gdn_triton.ops import recurrent

    return recurrent.plan


def _load_reference_plan() -> Plan:
    from gdn_triton.ops import reference_recurrent

    return reference_recurrent.plan


# In the order in which `auto` tries them.
BACKENDS: tuple[Backend[Problem, Forward], ...] = (
    Backend("cuda", cuda_supports, _load_cuda),
    Backend("triton", triton_supports, _load_triton),
    Backend("reference", reference_supports, _load_reference),
)

# The same for a call that is split over ranks.
SHARDED_BACKENDS: tuple[Backend[Problem, "ShardOps"], ...] = (
    Backend("cuda", sharded_cuda_supports, _load_no_shard),
    Backend("triton", triton_supports, _load_triton_shard),
    Backend("reference", reference_supports, _load_reference_shard),
)

# The same for the recurrence.
RECURRENT_BACKENDS: tuple[Backend[RecurrentProblem, Plan], ...] = (
    Backend("cuda", recurrent_cuda_supports, _load_no_plan),
    Backend("triton", recurrent_triton_supports, _load_triton_plan),
    Backend("reference", reference_supports, _load_reference_plan),
)


def requested_backend() -> str:
    """The value of `GDN_BACKEND`; ValueError if it is none of the known ones."""
    name = os.environ.get("GDN_BACKEND", "auto")
    if name != "auto" and all(name != backend.name for backend in BACKENDS):
        names = ", ".join(["auto", *sorted(backend.name for backend in BACKENDS)])
        raise ValueError(f"GDN_BACKEND must be one of {names}, got {name!r}")
    return name


def choose(problem: Problem) -> Backend[Problem, Forward]:
    """The backend that runs this problem.

    ValueError for an unknown `GDN_BACKEND`; RuntimeError with the reason if a backend is asked for
    by name and refuses.
    """
    return _choose(BACKENDS, problem)


def choose_sharded(problem: Problem) -> Backend[Problem, "ShardOps"]:
    """The backend that runs a rank's part of a split call. Raises as `choose` does."""
    return _choose(SHARDED_BACKENDS, problem)


def choose_recurrent(problem: RecurrentProblem) -> Backend[RecurrentProblem, Plan]:
    """The backend that runs this call of the recurrence. Raises as `choose` does."""
    return _choose(RECURRENT_BACKENDS, problem)


def _choose(backends: tuple[Backend[P, F], ...], problem: P) -> Backend[P, F]:
    requested = requested_backend()
    if requested != "auto":
        backend = next(backend for backend in backends if backend.name == requested)
        reason = backend.supports(problem)
        if reason is not None:
            raise RuntimeError(f"GDN_BACKEND={requested} cannot run this call. {reason}")
        return backend
    refusals: list[tuple[str, str]] = []
    for backend in backends:
        reason = backend.supports(problem)
        if reason is None:
            _log_once(backend.name, tuple(refusals), problem.device.type)
            return backend
        refusals.append((backend.name, reason))
    # The reference is last in the list and refuses nothing.
    raise AssertionError("no backend took the problem")


def explain_choice(problem: Problem, is_sharded: bool = False) -> Explanation:
    """What `choose`, or `choose_sharded`, would do, and why not otherwise. Raises only for an
    unknown `GDN_BACKEND`."""
    requested = requested_backend()
    backends = SHARDED_BACKENDS if is_sharded else BACKENDS
    reasons = {backend.name: backend.supports(problem) for backend in backends}
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
