"""The window of a decode step: made, folded into the states, restarted, and left with one path of
a tree. `docs/decode.md` says when each of these is called."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn_triton._host.arguments import must, type_of, value_of
from gdn_triton._host.tensors import is_traced
from gdn_triton.recurrent.operators import traced_fold
from gdn_triton.recurrent.plans import run_fold
from gdn_triton.recurrent.problem import FoldCall, FoldOperands


class StepWindow(NamedTuple):
    """The records of the last tokens of each slot, for `gdn_triton.recurrent_step`.

    The record of the token at position t of a sequence, counted from 0, lies in row t mod R of its
    slot. All tensors but `start` are contiguous. Rows that no token of the slot's sequence has
    written may hold anything.

    Attributes:
        u: [slots, R, HV, V], float32: u_t, of which S_t = exp(g_t) S_(t-1) + k_t (x) u_t for the
            key k_t before its normalisation.
        k: [slots, R, H, K], the dtype of the step's k (or mixed_qkv): k_t before its normalisation.
        g: [slots, R, HV], float32: the natural logarithm of the decay, after its activation.
        calls: [slots, R], int32: the position at the start of the call that wrote the row.
        start: [slots], int32: the state in memory holds at least the tokens before this position,
            and no row of the sequence is older.
        max_tokens: the most tokens of a sequence in one step: 1 to R / 2. Each head is folded once
            in R + 1 - 2 * max_tokens tokens.
    """

    u: Tensor
    k: Tensor
    g: Tensor
    calls: Tensor
    start: Tensor
    max_tokens: int


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
) -> StepWindow:
    """A window for a pool of states, whose slots hold no token yet: each `start` is 0.

    Args:
        slots: of the pool.
        H, HV, K, V: heads of k, heads of v, channels of a key and of a value.
        dtype: of k, or of mixed_qkv, in the steps.
        device: of the pool.
        rows: R, the records of a slot. More make folds rarer and each step longer.
        max_tokens: the most tokens of a sequence in one step, 1 to R / 2.

    Returns:
        A `StepWindow` of new tensors: slots * R * (4 * HV * (V + 1) + 4) + 4 * slots bytes, and
        slots * R * H * K numbers of `dtype`.

    Raises:
        TypeError, ValueError: a size that is no int or too small, or a max_tokens above R / 2.
    """
    sizes = {"slots": slots, "H": H, "HV": HV, "K": K, "V": V}
    for name, size in {**sizes, "rows": rows, "max_tokens": max_tokens}.items():
        if type(size) is not int:
            raise TypeError(must(name, "be an int", value_of(size)))
        if size < (0 if name == "slots" else 1):
            raise ValueError(must(name, f"be at least {int(name != 'slots')}", str(size)))
    if 2 * max_tokens > rows:
        raise ValueError(must("max_tokens", f"be at most half of rows={rows}", str(max_tokens)))
    return StepWindow(
        u=torch.empty(slots, rows, HV, V, dtype=torch.float32, device=device),
        k=torch.empty(slots, rows, H, K, dtype=dtype, device=device),
        g=torch.empty(slots, rows, HV, dtype=torch.float32, device=device),
        calls=torch.zeros(slots, rows, dtype=torch.int32, device=device),
        start=torch.zeros(slots, dtype=torch.int32, device=device),
        max_tokens=max_tokens,
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
    """Makes the states of some slots whole: afterwards the pool alone holds their sequences.

    To be called before a state is read by anything but a step with this window: a copy of the slot,
    a prefill that goes on from it, a step without the window. Steps with the window may go on
    afterwards, at the same position.

    Args:
        state: [slots, HV, K, V], or [slots, HV, V, K] with `state_v_first`; float. Written in
            place.
        window: of this pool. `start` of the slots is written.
        slots: [N], int32 or int64: which slots; each at most once. Those that are padding (`skip`)
            are passed over.
        positions: [N], int32 or int64: how many tokens of each slot's sequence count. As in a step,
            drafted tokens of the last call beyond them are dropped.
        state_v_first, skip: as in `gdn_triton.recurrent_step`.

    Returns:
        Nothing.

    No contents are read by the host on an accelerator, so the call can be part of a CUDA graph.

    Raises:
        TypeError, ValueError: an argument that does not fit, with its name, what was expected and
            what came; nothing has been launched or written. The contents of slots and positions are
            judged where they are CPU tensors.
        NotImplementedError: an input requires a gradient.
        RuntimeError: the backend that `GDN_BACKEND` asks for cannot run this call.
    """
    _run(fold_call(state, window, slots, positions, state_v_first, skip), folds=True)


def restart_window(
    window: StepWindow, slots: Tensor, positions: Tensor, *, skip: str = "negative"
) -> None:
    """Says that the states of some slots are whole, and hold the tokens before `positions`.

    To be called when a state was written by anything but a step with this window: by a prefill, by
    a copy of another slot, or with zeros for a new sequence, at position 0. The slot's records are
    dropped.

    Args:
        window: `start` of the slots is written.
        slots: [N], int32 or int64: which slots; each at most once. Those that are padding (`skip`)
            are passed over.
        positions: [N], int32 or int64: how many tokens each slot's state holds.
        skip: as in `gdn_triton.recurrent_step`.

    Returns:
        Nothing.

    Raises:
        As `gdn_triton.fold_window`.
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
    """Keeps one path of the trees that a step with `parents` has left in the window.

    The records of the path's tokens move together: afterwards the window is that of a call that had
    these tokens alone. The next step has the position `positions` plus the path's length. A path
    that begins with the first tokens of the call, in their order, needs no such move.

    Args:
        window: its u, k and g are written.
        slots: [N], int32 or int64: which slots; each at most once. Those that are padding (`skip`)
            are passed over.
        positions: [N], int32 or int64: those of the step with the trees.
        path: [N, L], int32 or int64: the accepted tokens of each sequence, from a root on, by their
            numbers in the step: increasing, then -1. On an accelerator this is not checked, and is
            undefined behaviour otherwise.
        skip: as in `gdn_triton.recurrent_step`.

    Returns:
        Nothing.

    No contents are read by the host on an accelerator, so the call can be part of a CUDA graph.

    Raises:
        As `gdn_triton.fold_window`. The contents of path are judged where it is a CPU tensor.
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
