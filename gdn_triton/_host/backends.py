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
import traceback
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch
from packaging.version import Version

from gdn_triton._host.contents import Contents
from gdn_triton._host.environment import variable
from gdn_triton.constants import MAX_K, MAX_ROW_STRIDE, MAX_STATE_SPAN


class Placed(Protocol):
    """The fields that every problem has and that the choice of a backend reads."""

    @property
    def device(self) -> torch.device: ...


P = TypeVar("P", bound=Placed)
F = TypeVar("F")

# The backends that `GDN_BACKEND` may name, in the order in which `auto` tries them.
NAMES = ("cuda", "triton", "reference")
_PLACES = {name: place for place, name in enumerate(NAMES)}

MIN_TRITON = "3.6"

_logger = logging.getLogger("gdn_triton")


@dataclass(frozen=True, slots=True, eq=False)
class GradientKernels:
    """Kernels that make the gradients of a call. load: imports their modules and returns the
    functions that run them. sentence: the text of `Explanation.gradients`; None where the backend's
    name says as much. These records are compared by identity, so a backend returns the same record
    for the same sentence."""

    load: Callable[[], Any]
    sentence: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Backend(Generic[P, F]):
    """A backend of one operator. name: its name in `GDN_BACKEND`. supports: returns a sentence if
    the backend cannot run a call, else the kernels that make its gradients, or None where the call
    needs no gradient or autograd differentiates the forward. load: imports the backend's modules,
    which may be heavy or absent, and returns the function that runs a call. exists: False where the
    operator has no such backend (`missing`)."""

    name: str
    supports: Callable[[P], str | GradientKernels | None]
    load: Callable[[], F]
    exists: bool = True


@dataclass(frozen=True, eq=False)
class Choice(Generic[F]):
    """The backend that runs a call, and why. One object serves all calls with the same decision.

    made_by: the kernels that make the gradients, with the sentence on them, or None as in
    `Backend.supports`. refusals: each backend that was asked before this one, with its reason.
    """

    backend: Backend[Any, F]
    made_by: GradientKernels | None
    refusals: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return self.backend.name

    # Both results of `load` are kept, because even the import statement of a loaded module takes
    # longer than an attribute.

    @functools.cached_property
    def run(self) -> F:
        """The function that runs the call; for the chunked op it is the forward without a
        gradient."""
        return self.backend.load()

    @functools.cached_property
    def gradients(self) -> Any:
        """The functions of `made_by`, or None."""
        return None if self.made_by is None else self.made_by.load()


# The choices that were made, by their decision. Each choice is logged once.
_choices: dict[Hashable, Choice[Any]] = {}


def _keep(key: Hashable, choice: Choice[F]) -> Choice[F]:
    _choices[key] = choice
    return choice


def load_nothing() -> NoReturn:
    raise AssertionError("a backend that refuses every call was chosen")


def missing(name: str, why: str) -> Backend[Any, Any]:
    """Returns an entry of the list for a backend that an operator does not have. why: a
    sentence."""
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
    in that order; the last one refuses nothing. kernels: of a problem and the backend that is
    chosen for it, `Explanation.kernels`."""

    name: str
    backends: tuple[Backend[P, F], ...]
    kernels: Callable[[P, str], str | None] = lambda problem, name: None

    def choose(self, problem: P) -> Choice[F]:
        """Returns the backend that runs this problem.

        ValueError for an unknown `GDN_BACKEND`; RuntimeError with the reason if the operator has
        the backend that is asked for by name and it refuses.
        """
        requested = requested_backend()
        if requested != "auto":
            named = self.backends[_PLACES[requested]]
            if named.exists:
                found = named.supports(problem)
                if isinstance(found, str):
                    raise RuntimeError(f"GDN_BACKEND={requested} cannot run this call. {found}")
                return _choices.get((named, found)) or _keep((named, found), Choice(named, found))
            # The log names this refusal whether the backend comes before the chosen one or not.
            requested = f"{requested}, which {self.name} does not have and so takes for auto,"
        backend, gradients, refusals = _first(self.backends, problem)
        # The reference is last in the list and refuses nothing.
        assert backend is not None, "no backend took the problem"
        # On an accelerator the reference is right but far slower than kernels.
        slow_on = problem.device.type if backend.name == "reference" else "cpu"
        key = requested, backend, gradients, refusals, slow_on
        choice = _choices.get(key)
        if choice is None:
            choice = _keep(key, Choice(backend, gradients, refusals))
            _log(requested, choice, slow_on)
        return choice

    def explain(self, problem: P) -> Explanation:
        """Returns the choice of `choose` and each backend's reason. Raises only for an unknown
        `GDN_BACKEND`."""
        requested = requested_backend()
        asked, as_auto = self.backends, False
        if requested != "auto":
            named = self.backends[_PLACES[requested]]
            asked, as_auto = (named,) if named.exists else self.backends, not named.exists
        chosen, gradients, refusals = _first(asked, problem)
        if chosen is not None and asked is self.backends:
            passed_over = f"It could run this call, but {chosen.name} comes before it."
        else:
            passed_over = f"It could run this call, but GDN_BACKEND asks for {requested}."
        reasons: dict[str, str | None] = dict.fromkeys(NAMES)
        reasons.update(refusals)
        for backend in self.backends:
            if backend is not chosen and reasons[backend.name] is None:
                _, _, refused = _first((backend,), problem)
                reasons[backend.name] = refused[0][1] if refused else passed_over
        return Explanation(
            requested=requested,
            chosen=None if chosen is None else chosen.name,
            reasons=reasons,
            operator=self.name,
            as_auto=as_auto,
            gradients=None if gradients is None else gradients.sentence,
            kernels=None if chosen is None else self.kernels(problem, chosen.name),
        )


def _first(
    backends: tuple[Backend[P, F], ...], problem: P
) -> tuple[Backend[P, F] | None, GradientKernels | None, tuple[tuple[str, str], ...]]:
    """Returns the first backend that runs the problem, or None; the kernels that make its gradients
    in that backend; and the backends that refused before, each with its reason."""
    refusals: tuple[tuple[str, str], ...] = ()
    for backend in backends:
        found = backend.supports(problem)
        if not isinstance(found, str):
            return backend, found, refusals
        refusals = (*refusals, (backend.name, found))
    return None, None, refusals


def requested_backend() -> str:
    """Returns the value of `GDN_BACKEND`. Raises ValueError if the value is unknown."""
    name = variable("GDN_BACKEND")
    if name is None:
        return "auto"
    if name != "auto" and name not in NAMES:
        names = ", ".join(["auto", *sorted(NAMES)])
        raise ValueError(f"GDN_BACKEND must be one of {names}, got {name!r}")
    return name


def _log(requested: str, choice: Choice[Any], slow_on: str) -> None:
    slow = slow_on != "cpu"
    _logger.log(
        logging.WARNING if slow else logging.INFO,
        "GDN_BACKEND=%s chose %s%s.%s",
        requested,
        choice.name,
        f", which is slow on {slow_on}" if slow else "",
        "".join(f" Not {refused}: {reason}" for refused, reason in choice.refusals),
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
        # A broken Triton may raise any exception. A folder named `triton` can be imported, but has
        # no version.
        why = " ".join(traceback.format_exception_only(error)[-1].split())
        return f"{needed} and cannot be imported ({why})."
    return None


@functools.cache
def _knobs() -> Any:
    """Triton's settings. The import statement of a loaded module takes longer than this cache."""
    from triton import knobs

    return knobs


def _interpreting() -> bool:
    """Whether Triton kernels run in the interpreter (TRITON_INTERPRET=1), on the CPU."""
    return bool(_knobs().runtime.interpret)


def triton_refusal(dtypes: tuple[torch.dtype, ...], device_type: str, K: int) -> str | None:
    """A sentence why no Triton kernel of this package can run such a call, or None."""
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
    """A sentence why no Triton kernel of this package can keep states of this dtype, or None."""
    if dtype == torch.float64:
        return "The Triton kernels compute in float32 at most; the states are float64."
    if dtype == torch.bfloat16 and _interpreting():
        return "Triton's interpreter is not used with bfloat16; the states are."
    return None


def span_refusal(tile_span: int) -> str | None:
    """A sentence why no Triton kernel of the recurrence can take these tensors, or None. tile_span:
    the most elements from the first to the last of a row or a state that a program reads."""
    if tile_span < MAX_STATE_SPAN:
        return None
    return (
        "The Triton kernel takes rows and states of which the last element is less than 2^31 "
        f"elements from the first; one is {tile_span} from it."
    )


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
