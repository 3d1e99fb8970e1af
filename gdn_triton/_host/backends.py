"""Which backend runs a call: an operator's ordered list, each entry with its reason to refuse.

`GDN_BACKEND`, read at every call, is `auto` (the default) or the name of a backend. `auto` takes
the first backend of the operator that does not refuse, and logs the choice and the refusals before
it once. A name holds for the operators that have such a backend: if it refuses a call, the call
raises RuntimeError with the reason. For an operator that has no backend of that name at all, the
name means `auto`, which is logged once. Every refusal is a sentence.
"""

import functools
import importlib
import logging
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch
from packaging.version import Version

from gdn_triton._host.contents import Contents
from gdn_triton.constants import MAX_K, MAX_ROW_STRIDE


class Placed(Protocol):
    """A validated call, as far as a choice among backends looks at all of them alike."""

    @property
    def device(self) -> torch.device: ...


P = TypeVar("P", bound=Placed)
F = TypeVar("F")

# What `GDN_BACKEND` may name, in the order in which `auto` tries them.
NAMES = ("cuda", "triton", "reference")

MIN_TRITON = "3.6"

_logger = logging.getLogger("gdn_triton")
_logged: set[tuple[str, str, tuple[tuple[str, str], ...], int]] = set()


@dataclass(frozen=True, slots=True)
class Backend(Generic[P, F]):
    """name: as `GDN_BACKEND` spells it. supports: a sentence why not, or None. load: imports the
    backend's modules, which may be heavy or absent, and returns what runs a call. exists: False
    where the operator has no such backend (`missing`)."""

    name: str
    supports: Callable[[P], str | None]
    load: Callable[[], F]
    exists: bool = True


def load_nothing() -> NoReturn:
    raise AssertionError("a backend that refuses every call was chosen")


def missing(name: str, why: str) -> Backend[Any, Any]:
    """Stands in the list for a backend that an operator does not have. why: a sentence."""
    return Backend(name, lambda _: why, load_nothing, exists=False)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which backend would run a call, and why (`gdn_triton.explain`, `gdn_triton.explain_call`).

    requested: the value of `GDN_BACKEND`. chosen: the backend that would run, or None when the one
    asked for by name refuses. reasons: for each backend in order, None if it is the chosen one,
    else a sentence why it would not run. operator: the name of the function that was asked about.
    as_auto: whether `requested` names a backend that this function does not have, so that the
    choice is that of `auto`. gradients: a sentence on what makes the gradients where that is not
    the chosen backend's name alone, else None. kernels: likewise on which of the chosen backend's
    forwards would run, where it has several for a GPU. contents: what the tensors hold, where
    `explain` was asked to read it.
    """

    requested: str
    chosen: str | None
    reasons: dict[str, str | None]
    operator: str = "chunk_gated_delta_rule"
    as_auto: bool = False
    gradients: str | None = None
    kernels: str | None = None
    contents: Contents | None = None

    def __str__(self) -> str:
        chosen = f"{self.chosen} would run" if self.chosen else "no backend would run"
        if self.as_auto:
            chosen = f"{self.operator} has no such backend; as with auto, {chosen}"
        lines = [f"GDN_BACKEND={self.requested}: {chosen}"]
        lines += [f"  {name}: {reason or 'chosen'}" for name, reason in self.reasons.items()]
        lines += [f"  {text}" for text in (self.kernels, self.gradients) if text is not None]
        lines += [str(self.contents)] if self.contents else []
        return "\n".join(lines)


@dataclass(slots=True, eq=False)
class Operator(Generic[P, F]):
    """A public function and its backends. name: the function's. backends: one of each of `NAMES`,
    in that order; the last one refuses nothing. gradients: of a problem and the backend that is
    chosen for it, `Explanation.gradients`. kernels: likewise `Explanation.kernels`."""

    name: str
    backends: tuple[Backend[P, F], ...]
    gradients: Callable[[P, str], str | None] = lambda problem, name: None
    kernels: Callable[[P, str], str | None] = lambda problem, name: None

    def choose(self, problem: P) -> Backend[P, F]:
        """The backend that runs this problem.

        ValueError for an unknown `GDN_BACKEND`; RuntimeError with the reason if the operator has
        the backend that is asked for by name and it refuses.
        """
        requested = requested_backend()
        refusals: list[tuple[str, str]] = []
        if requested != "auto":
            backend = self._named(requested)
            if backend.exists:
                reason = backend.supports(problem)
                if reason is not None:
                    raise RuntimeError(f"GDN_BACKEND={requested} cannot run this call. {reason}")
                return backend
            # The log names this refusal whether the backend comes before or after the chosen one.
            requested = f"{requested}, which {self.name} does not have and so takes for auto,"
        for backend in self.backends:
            reason = backend.supports(problem)
            if reason is None:
                _log_once(requested, backend.name, tuple(refusals), problem.device.type)
                return backend
            refusals.append((backend.name, reason))
        # The reference is last in the list and refuses nothing.
        raise AssertionError("no backend took the problem")

    def explain(self, problem: P) -> Explanation:
        """What `choose` would do, and why not otherwise. Raises only for an unknown
        `GDN_BACKEND`."""
        requested = requested_backend()
        as_auto = requested != "auto" and not self._named(requested).exists
        reasons = {backend.name: backend.supports(problem) for backend in self.backends}
        if requested == "auto" or as_auto:
            chosen = next((name for name, reason in reasons.items() if reason is None), None)
            passed_over = f"It could run this call, but {chosen} comes before it."
        else:
            chosen = requested if reasons[requested] is None else None
            passed_over = f"It could run this call, but GDN_BACKEND asks for {requested}."
        for name, reason in reasons.items():
            if reason is None and name != chosen:
                reasons[name] = passed_over
        gradients = None if chosen is None else self.gradients(problem, chosen)
        kernels = None if chosen is None else self.kernels(problem, chosen)
        return Explanation(
            requested=requested,
            chosen=chosen,
            reasons=reasons,
            operator=self.name,
            as_auto=as_auto,
            gradients=gradients,
            kernels=kernels,
        )

    def _named(self, name: str) -> Backend[P, F]:
        return self.backends[NAMES.index(name)]


def requested_backend() -> str:
    """The value of `GDN_BACKEND`; ValueError if it is none of the known ones."""
    name = os.environ.get("GDN_BACKEND", "auto")
    if name != "auto" and name not in NAMES:
        names = ", ".join(["auto", *sorted(NAMES)])
        raise ValueError(f"GDN_BACKEND must be one of {names}, got {name!r}")
    return name


def _log_once(
    requested: str, name: str, refusals: tuple[tuple[str, str], ...], device_type: str
) -> None:
    # On an accelerator the reference is right but far slower than kernels: worth a warning.
    slow = name == "reference" and device_type != "cpu"
    level = logging.WARNING if slow else logging.INFO
    if (requested, name, refusals, level) in _logged:
        return
    _logged.add((requested, name, refusals, level))
    _logger.log(
        level,
        "GDN_BACKEND=%s chose %s%s.%s",
        requested,
        name,
        f", which is slow on {device_type}" if slow else "",
        "".join(f" Not {refused}: {reason}" for refused, reason in refusals),
    )


# --------------------------------------------------------- what backends of several ops refuse


@functools.cache
def _triton_missing() -> str | None:
    """A sentence why Triton cannot be used, or None. It cannot change within a process."""
    needed = f"Triton {MIN_TRITON} or newer is needed"
    try:
        import triton

        if Version(triton.__version__) < Version(MIN_TRITON):
            return f"{needed}; {triton.__version__} is installed."
        importlib.import_module("triton.knobs")
    except Exception as error:
        # A broken Triton raises any exception. A folder of that name imports and has no version.
        why = " ".join(traceback.format_exception_only(error)[-1].split())
        return f"{needed} and cannot be imported ({why})."
    return None


def _interpreting() -> bool:
    """Whether Triton kernels run in the interpreter (TRITON_INTERPRET=1), on the CPU."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def triton_refusal(dtypes: tuple[torch.dtype, ...], device_type: str, K: int) -> str | None:
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


def states_refusal(dtype: torch.dtype) -> str | None:
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
    refusal = triton_refusal(dtypes, device_type, K)
    if refusal is not None:
        return refusal
    row = HV * max(K, V)
    if row >= MAX_ROW_STRIDE:
        return (
            f"The Triton kernels take rows of less than {MAX_ROW_STRIDE} elements; a token's "
            f"HV * max(K, V) is {row}."
        )
    return None


def reference_supports(problem: Placed) -> str | None:
    """The reference takes every valid problem, on every device."""
    return None
