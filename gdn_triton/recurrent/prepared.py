"""`prepare_step`: a decode step that stores the tensors and options that all calls of a layer
share."""

from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from gdn_triton._host.arguments import STRIDED, check_flags, check_tensors, real_or_none
from gdn_triton._host.device import on_device
from gdn_triton._host.launches import Again, recording
from gdn_triton._host.memory import count_writes
from gdn_triton._host.slots import check_skip
from gdn_triton._host.tensors import PLAIN_TENSORS, is_traced, is_transformed
from gdn_triton.recurrent.api import recurrent_step
from gdn_triton.recurrent.window import StepWindow, check_kind

# The largest number of layouts that a step remembers, and of address sets for each layout. Callers
# reuse their buffers, so the actual numbers are normally small.
MOST_PLACES: Final = 512
MOST_LAYOUTS: Final = 512

# The arguments of a call in the order of `PreparedStep.__call__`, with `out` first.
_Given = tuple[Tensor | None, ...]
# The dtype, shape, strides, device and negative bit of a tensor; None for an argument that is not
# given.
_Layout = tuple[torch.dtype, torch.Size, tuple[int, ...], torch.device, bool] | None


class _Known(NamedTuple):
    """A validated layout of calls. types: the types of all arguments. present: selects the
    arguments that are tensors. guards: the guards of `torch.compile` for these tensors, which one
    call into torch checks in 0.4 microseconds; `_layouts_of` takes 3. launches: the recorded
    launches, by the addresses of all tensors of the call. Without `out` the address of the output
    is not among them, because the step allocates the output: a new allocation overlaps no other
    tensor and has the alignment of every allocation."""

    layouts: tuple[_Layout, ...]
    types: tuple[type, ...]
    present: Callable[[_Given], tuple[Tensor, ...]]
    guards: TensorGuards
    out: tuple[torch.Size, torch.dtype]
    launches: dict[tuple[int, ...], Again]


def prepare_step(
    state: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    allow_neg_eigval: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    scale: float | None = None,
    state_v_first: bool = False,
    skip: str = "negative",
    window: StepWindow | None = None,
) -> "PreparedStep":
    """Returns a callable that runs `gdn_triton.recurrent_step` on one pool with less host time.

        step = prepare_step(state, A_log=A_log, dt_bias=dt_bias, state_v_first=True)
        o = step(slots, mixed_qkv=mixed_qkv, a=a, b=b)

    Args:
        state, A_log, dt_bias, window: as `gdn_triton.recurrent_step`. The step holds references to
            the tensors, and each call reads their current contents. Their shapes and strides must
            not change.
        allow_neg_eigval, use_qk_l2norm_in_kernel: as `gdn_triton.recurrent_step`.
        scale, state_v_first, skip: as `gdn_triton.recurrent_step`.

    Returns:
        A `PreparedStep`, whose calls accept the other arguments. Nothing has been launched or
        written.

    Raises:
        TypeError, ValueError: an argument that does not fit by itself. Each call of the step checks
            how the tensors fit together.
    """
    check_tensors({"state": state}, {"A_log": A_log, "dt_bias": dt_bias})
    check_flags(
        allow_neg_eigval=allow_neg_eigval,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
    )
    check_skip(skip)
    real_or_none("scale", scale)
    if window is not None:
        check_kind(window)
    options = {
        "A_log": A_log,
        "dt_bias": dt_bias,
        "allow_neg_eigval": allow_neg_eigval,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "scale": scale,
        "state_v_first": state_v_first,
        "skip": skip,
        "window": window,
    }
    return PreparedStep(state, options)


class PreparedStep:
    """The result of `gdn_triton.prepare_step`. One object may be used for any batches and streams.

    A call has the bits and the errors of `gdn_triton.recurrent_step`. The first call with each
    combination of shapes, strides, dtypes and addresses of the tensors runs `recurrent_step`; later
    calls only compare these properties and launch. The address of an output that the step allocates
    is not compared. The step remembers launches, but no tensors of a call. The first call reads
    `GDN_BACKEND` and `GDN_GLUON`, and later calls run the same kernel. Under a compiler, on a CPU
    and in the reference backend every call runs `gdn_triton.recurrent_step`.
    """

    __slots__ = ("_has_memory", "_held", "_known", "_last", "_options", "_state", "_written")

    def __init__(self, state: Tensor, options: dict[str, Any]) -> None:
        self._state, self._options = state, options
        window = options["window"]
        rows = () if window is None else (*window[:5], window.scales)
        optional = (state, options["A_log"], options["dt_bias"], *rows)
        self._held = tuple(x for x in optional if x is not None)
        self._written = (state, *rows[:4], *rows[5:])
        plain = all(type(x) in PLAIN_TENSORS for x in self._held)
        self._has_memory = plain and state.device.type == "cuda"
        self._known: dict[tuple[_Layout, ...], _Known] = {}
        self._last: _Known | None = None

    def __call__(
        self,
        read_slots: Tensor,
        write_slots: Tensor | None = None,
        *,
        num_accepted_tokens: Tensor | None = None,
        parents: Tensor | None = None,
        q: Tensor | None = None,
        k: Tensor | None = None,
        v: Tensor | None = None,
        mixed_qkv: Tensor | None = None,
        g: Tensor | None = None,
        beta: Tensor | None = None,
        a: Tensor | None = None,
        b: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        out: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Returns o of `gdn_triton.recurrent_step` with these arguments and those of
        `prepare_step`."""
        # fmt: off
        given = (
            out, read_slots, write_slots, num_accepted_tokens, parents, q, k, v, mixed_qkv, g, beta,
            a, b, cu_seqlens, positions,
        )
        # fmt: on
        if not self._has_memory or is_traced(self._state) or is_transformed():
            return self._whole(given)
        known = self._last
        if known is None or not _fits(given, known):
            layouts = _layouts_of(given)
            if layouts is None:
                return self._whole(given)
            known = self._known.get(layouts)
            if known is None:
                o = self._whole(given)
                if _has_launch(given):
                    if len(self._known) >= MOST_LAYOUTS:
                        self._known.clear()
                    known = _known(given, layouts, o)
                    self._known[layouts] = self._last = known
                return o
            self._last = known
        if torch.is_grad_enabled() and self._needs_grad(given):
            return self._whole(given)
        return self._again(given, known)

    def _again(self, given: _Given, known: _Known) -> Tensor:
        """Runs a call whose layout is known."""
        out = given[0]
        places = (*map(_address, self._held), *map(_address, known.present(given)))
        again = known.launches.get(places)
        o = out
        if o is None:
            o = self._state.new_empty(known.out[0], dtype=known.out[1])
        if again is None:
            with recording() as launches:
                self._whole((o, *given[1:]))
            self._keep(known, places, launches)
            return o
        count_writes(*self._written, out)
        with on_device(self._state.device):
            # The recorded launch has the address of `out`, which is one of its places.
            again(o.data_ptr() if out is None else None)
        return o

    def _needs_grad(self, given: _Given) -> bool:
        present = [x for x in given if x is not None]
        return True in map(_requires_grad, (*self._held, *present))

    def _whole(self, given: _Given) -> Tensor:
        out, read_slots, write_slots, num_accepted_tokens, parents, q, k, v, *rest = given
        mixed_qkv, g, beta, a, b, cu_seqlens, positions = rest
        return recurrent_step(
            self._state,
            read_slots,  # type: ignore[arg-type]
            write_slots,
            num_accepted_tokens=num_accepted_tokens,
            parents=parents,
            q=q,
            k=k,
            v=v,
            mixed_qkv=mixed_qkv,
            g=g,
            beta=beta,
            a=a,
            b=b,
            cu_seqlens=cu_seqlens,
            out=out,
            positions=positions,
            **self._options,
        )

    @staticmethod
    def _keep(known: _Known, places: tuple[int, ...], launches: list[Again | None]) -> None:
        if len(launches) == 1 and launches[0] is not None:
            if len(known.launches) >= MOST_PLACES:
                known.launches.clear()
            known.launches[places] = launches[0]


_requires_grad = attrgetter("requires_grad")
_address: Callable[[Tensor], int] = Tensor.data_ptr


def _known(given: _Given, layouts: tuple[_Layout, ...], o: Tensor) -> _Known:
    """Returns the record of a layout, without launches. o: the output of a call."""
    present = itemgetter(*(i for i, x in enumerate(given) if x is not None))
    tensors = present(given)
    sizes: list[Any] = [list(x.shape) for x in tensors]
    strides: list[Any] = [list(x.stride()) for x in tensors]
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return _Known(
        layouts=layouts,
        types=tuple(map(type, given)),
        present=present,
        guards=guards,
        out=(o.shape, o.dtype),
        launches={},
    )


def _fits(given: _Given, known: _Known) -> bool:
    """Returns whether the arguments have the known layout, by their types and the guards. The
    guards also compare which tensors require a gradient and whether inference mode is on. If they
    fail, the caller compares the layouts."""
    if tuple(map(type, given)) != known.types:
        return False
    fits: bool = known.guards.check(*known.present(given))
    return fits


_GIVEN_TYPES: Final = frozenset((Tensor, type(None)))


def _layouts_of(given: _Given) -> tuple[_Layout, ...] | None:
    """Returns the layouts of the tensors, or None if one is not a plain tensor with strides."""
    if not _GIVEN_TYPES.issuperset(map(type, given)):
        return None
    try:
        return tuple(
            [
                None if x is None else (x.dtype, x.shape, x.stride(), x.device, x.is_neg())
                for x in given
            ]
        )
    except RuntimeError:
        # A sparse or nested tensor has no strides or no shape.
        return None


def _has_launch(given: _Given) -> bool:
    """Returns whether a launch with these tensors can be repeated: all are in memory, and none has
    a negative bit."""
    return not any(
        x.layout is not STRIDED or x.is_nested or x.is_neg() for x in given if x is not None
    )
