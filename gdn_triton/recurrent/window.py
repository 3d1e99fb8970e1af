"""The window of a decode step: functions that make it, fold it into the states, restart it, and
accept one path of a tree. `docs/decode.md` explains when to call each function."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn_triton._host.arguments import (
    FLOAT_DTYPES,
    FLOATS,
    INDEX_DTYPES,
    INDICES,
    check_devices,
    check_dtype,
    check_flags,
    check_float_dtype,
    check_rank,
    check_state,
    check_tensors,
    must,
    shape_of,
    type_of,
    value_of,
)
from gdn_triton._host.slots import check_once, final_writes
from gdn_triton._host.tensors import check_written, host_reads, is_traced, writing
from gdn_triton.recurrent.operators import traced_fold
from gdn_triton.recurrent.plans import run_fold
from gdn_triton.recurrent.problem import FoldCall, FoldOperands
from gdn_triton.recurrent.validation_window import check_pool_dtype


class StepWindow(NamedTuple):
    """The records of the last tokens of each slot, for `gdn_triton.recurrent_step`.

    The record of the token at position t of a sequence, counted from 0, is in row t mod R of its
    slot. The numbers of a slot are contiguous in each tensor, and `scales` is contiguous. Rows that
    no token of the slot's sequence has written are undefined.

    Attributes:
        u: [slots, R, HV, V], float32: the u_t of S_t = exp(g_t) S_(t-1) + k_t (x) u_t, with the key
            k_t before its normalisation.
        k: [slots, R, H, K], the dtype of the step's k (or mixed_qkv): k_t before its normalisation.
        g: [slots, R, HV], float32: the natural logarithm of the decay, after its activation.
        calls: [slots, R], int32: the position at the start of the call that wrote the row.
        start: [slots], int32: the state in memory includes at least the tokens before this
            position, and no row of the sequence holds an earlier token.
        max_tokens: the largest number of tokens of a sequence in one step, 1 to R / 2. Each head is
            folded once in R + 1 - 2 * max_tokens tokens.
        scales: [slots, HV, V], float32, for a pool of int8, and otherwise None: element (k, v) of a
            state is the pool's number times the scale of value channel v. A fold writes both.
        tickets: [slots, H], int32, or None: counters with which a `gdn_triton.layer_step` of one
            launch counts its programs. They are 0 before and after a step. Without tickets a step
            is three launches.
    """

    u: Tensor
    k: Tensor
    g: Tensor
    calls: Tensor
    start: Tensor
    max_tokens: int
    scales: Tensor | None = None
    tickets: Tensor | None = None

    def unpacked(self, state: Tensor, slots: Tensor, *, state_v_first: bool = False) -> Tensor:
        """Returns the states of some slots of an int8 pool as a new float32 tensor [N, HV, K, V],
        or [N, HV, V, K] with `state_v_first`. A prefill can continue from these states, or a
        checkpoint can store them.

        Call `gdn_triton.fold_window` first, so that the pool includes all tokens.

        Args:
            state: the pool, int8.
            slots: [N], int32 or int64, none of which is padding.

        Raises:
            TypeError, ValueError: an argument that does not fit, with its name, the expected and
                the given value. Slots are checked if they are CPU tensors; on an accelerator a slot
                outside of the pool is undefined behaviour.
        """
        scales = self._check_packed(state, slots, state_v_first)
        factors = scales[slots].unsqueeze(-1 if state_v_first else -2)
        return state[slots] * factors

    def pack(
        self, state: Tensor, slots: Tensor, states: Tensor, *, state_v_first: bool = False
    ) -> None:
        """Rounds states of a prefill or of a checkpoint into slots of an int8 pool and writes their
        scales. Call `gdn_triton.restart_window` afterwards.

        Each value channel's largest magnitude becomes 127 times its scale, and every number is
        rounded to the nearest multiple of the scale. A channel whose magnitudes are all at most
        1e-30 becomes 0, and a channel that is not finite becomes NaN.

        Args:
            state, slots, state_v_first: as in `unpacked`; each slot at most once.
            states: float, [N, HV, K, V] or, with `state_v_first`, [N, HV, V, K].

        Raises:
            TypeError, ValueError: as for `unpacked`.
            NotImplementedError: states requires a gradient.
        """
        scales = self._check_packed(state, slots, state_v_first)
        expected = (slots.shape[0], *state.shape[1:])
        check_tensors({"states": states}, {})
        if states.shape != expected:
            raise ValueError(must("states", f"have shape {list(expected)}", shape_of(states)))
        check_dtype("states", states, FLOAT_DTYPES, FLOATS)
        check_devices("states", states.device, {"state": state})
        check_written("state", state)
        check_written("window.scales", scales)
        if torch.is_grad_enabled() and states.requires_grad:
            raise NotImplementedError(
                "gdn_triton.StepWindow.pack rounds states to int8 and has no gradient; states "
                "requires one. Call under torch.no_grad()"
            )
        if host_reads(slots):
            named = slots.tolist()
            check_once("slots", final_writes(named, named, -1))
        # Import here, because `import gdn_triton` does not import the reference.
        from gdn_triton.reference.window import scaled_to_int8

        with torch.no_grad(), writing(state), writing(scales):
            wide = states.mT if state_v_first else states
            numbers, factors = scaled_to_int8(wide.float())
            state[slots] = numbers.mT if state_v_first else numbers
            scales[slots] = factors

    def _check_packed(self, state: Tensor, slots: Tensor, state_v_first: bool) -> Tensor:
        """Checks that the pool fits this window, and returns the scales."""
        if self.scales is None:
            raise ValueError(must("window.scales", "be a tensor, of an int8 pool", "None"))
        tensors = {"window.scales": self.scales, "window.k": self.k}
        check_tensors({"state": state, "slots": slots, **tensors}, {})
        check_flags(state_v_first=state_v_first)
        check_pool_dtype(state, self.scales)
        check_rank("window.scales", self.scales, "slots", "HV", "V")
        if self.scales.dtype != torch.float32:
            raise ValueError(must("window.scales", "be torch.float32", str(self.scales.dtype)))
        check_rank("window.k", self.k, "slots", "R", "H", "K")
        count, HV, V = self.scales.shape
        check_rank("slots", slots, "N")
        check_dtype("slots", slots, INDEX_DTYPES, INDICES)
        check_state(
            "state", state, "slots", count, HV=HV, K=self.k.shape[-1], V=V,
            state_v_first=state_v_first,
        )  # fmt: skip
        check_devices("state", state.device, {"slots": slots, "window.scales": self.scales})
        if host_reads(slots):
            for n, slot in enumerate(slots.tolist()):
                if not 0 <= slot < count:
                    expected = f"be at least 0 and less than the {count} slots"
                    raise ValueError(must("slots", expected, f"{slot} at index {n}"))
        return self.scales


def make_window(
    slots: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    *,
    rows: int = 16,
    max_tokens: int = 1,
    with_scales: bool = False,
) -> StepWindow:
    """Makes a window for a pool of states whose slots include no token yet. Each `start` is 0.

    Args:
        slots: the number of slots of the pool.
        H, HV, K, V: heads of k, heads of v, channels of a key and of a value.
        dtype: the dtype of k, or of mixed_qkv, in the steps.
        device: the device of the pool.
        rows: R, the records of a slot. With more rows folds are rarer and each step is longer.
        max_tokens: the largest number of tokens of a sequence in one step, 1 to R / 2.
        with_scales: the pool is int8, whose states need a scale for each value channel. The scales
            start at 0, as the states of new sequences do.

    Returns:
        A `StepWindow` of new tensors: slots * (R * (4 * HV * (V + 1) + 4) + 4 * H + 4)
        bytes, and slots * R * H * K numbers of `dtype`. The scales take 4 * slots * HV * V bytes
        more.

    Raises:
        TypeError, ValueError: a size that is not an int or too small, an HV that is not a multiple
            of H, a dtype that is not a float, or a max_tokens above R / 2.
    """
    sizes = {"slots": slots, "H": H, "HV": HV, "K": K, "V": V}
    for name, size in {**sizes, "rows": rows, "max_tokens": max_tokens}.items():
        if type(size) is not int:
            raise TypeError(must(name, "be an int", value_of(size)))
        if size < (0 if name == "slots" else 1):
            raise ValueError(must(name, f"be at least {int(name != 'slots')}", str(size)))
    if HV % H != 0:
        raise ValueError(must("HV", f"be a multiple of H={H}", str(HV)))
    check_float_dtype("dtype", dtype)
    check_flags(with_scales=with_scales)
    if 2 * max_tokens > rows:
        raise ValueError(must("max_tokens", f"be at most half of rows={rows}", str(max_tokens)))
    return StepWindow(
        u=torch.empty(slots, rows, HV, V, dtype=torch.float32, device=device),
        k=torch.empty(slots, rows, H, K, dtype=dtype, device=device),
        g=torch.empty(slots, rows, HV, dtype=torch.float32, device=device),
        calls=torch.zeros(slots, rows, dtype=torch.int32, device=device),
        start=torch.zeros(slots, dtype=torch.int32, device=device),
        max_tokens=max_tokens,
        scales=torch.zeros(slots, HV, V, device=device) if with_scales else None,
        tickets=torch.zeros(slots, H, dtype=torch.int32, device=device),
    )


def fold_window(
    state: Tensor,
    window: StepWindow,
    slots: Tensor,
    positions: Tensor,
    *,
    state_v_first: bool = False,
    skip: str = "negative",
) -> None:
    """Folds all records of some slots into their states. Afterwards the pool alone holds the
    states.

    Call this function before code other than a step with this window reads a state: a copy of the
    slot, a prefill that continues from the slot, or a step without the window. Afterwards steps
    with the window may continue at the same position.

    Args:
        state: [slots, HV, K, V], or [slots, HV, V, K] with `state_v_first`; float, or int8 where
            the window has scales. Written in place.
        window: of this pool. `start` of the slots is written.
        slots: [N], int32 or int64: which slots; each at most once. Slots that are padding (`skip`)
            are skipped.
        positions: [N], int32 or int64: the number of tokens of each slot's sequence that the state
            will include. As in a step, later drafted tokens of the last call are dropped.
        state_v_first, skip: as in `gdn_triton.recurrent_step`.

    Returns:
        Nothing.

    The host reads no contents on an accelerator, so the call can be part of a CUDA graph.

    Raises:
        TypeError, ValueError: an argument that does not fit, with its name, the expected and the
            given value; nothing has been launched or written. The contents of slots and positions
            are checked where they are CPU tensors.
        NotImplementedError: an input requires a gradient.
        RuntimeError: the backend that `GDN_BACKEND` asks for cannot run this call.
    """
    _run(fold_call(state, window, slots, positions, state_v_first, skip), folds=True)


def restart_window(
    window: StepWindow, slots: Tensor, positions: Tensor, *, skip: str = "negative"
) -> None:
    """Declares that the states of some slots include all tokens before `positions`.

    Call this function after code other than a step with this window has written a state: a prefill,
    a copy of another slot, or zeros for a new sequence at position 0. The slot's records are
    dropped.

    Args:
        window: `start` of the slots is written.
        slots: [N], int32 or int64: which slots; each at most once. Slots that are padding (`skip`)
            are skipped.
        positions: [N], int32 or int64: the number of tokens that each slot's state includes.
        skip: as in `gdn_triton.recurrent_step`.

    Returns:
        Nothing.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `gdn_triton.fold_window`.
    """
    _run(fold_call(None, window, slots, positions, False, skip), folds=False)


def accept_window(
    window: StepWindow,
    slots: Tensor,
    positions: Tensor,
    path: Tensor,
    *,
    skip: str = "negative",
) -> None:
    """Reduces the trees that a step with `parents` has written to the window to one path.

    The records of the path's tokens are moved to consecutive rows. Afterwards the window equals
    that of a call with only these tokens. The next step has the position `positions` plus the
    path's length. A path that consists of the first tokens of the call, in order, needs no call of
    this function.

    Args:
        window: its u, k and g are written.
        slots: [N], int32 or int64: which slots; each at most once. Padding slots (`skip`) are
            skipped.
        positions: [N], int32 or int64: the positions of the step with the trees.
        path: [N, L], int32 or int64: the accepted tokens of each sequence, from a root on, by their
            numbers in the step. The numbers increase and are padded with -1. On an accelerator this
            is not checked, and other numbers are undefined behaviour.
        skip: as in `gdn_triton.recurrent_step`.

    Returns:
        Nothing.

    The host reads no contents on an accelerator, so the call can be part of a CUDA graph.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `gdn_triton.fold_window`. The
            contents of path are checked if it is a CPU tensor.
    """
    call = fold_call(None, window, slots, positions, False, skip, path, has_path=True)
    _run(call, folds=False)


def check_kind(window: object) -> None:
    if not isinstance(window, StepWindow):
        raise TypeError(must("window", "be a gdn_triton.StepWindow", type_of(window)))


def fold_call(
    state: Any,
    window: Any,
    slots: Any,
    positions: Any,
    state_v_first: Any,
    skip: Any,
    path: Any = None,
    *,
    has_path: bool = False,
) -> FoldCall:
    check_kind(window)
    if has_path and path is None:
        raise TypeError(must("path", "be a torch.Tensor", "NoneType"))
    inputs = FoldOperands(
        state=state,
        u_rows=window.u,
        k_rows=window.k,
        g_rows=window.g,
        call_rows=window.calls,
        start=window.start,
        slots=slots,
        positions=positions,
        scales=window.scales,
        path=path,
    )
    return FoldCall(
        inputs=inputs, max_tokens=window.max_tokens, state_v_first=state_v_first, skip=skip
    )


def _run(call: FoldCall, *, folds: bool) -> None:
    if is_traced(call.inputs.start):
        traced_fold(call, folds=folds)
        return
    run_fold(call, folds=folds)
