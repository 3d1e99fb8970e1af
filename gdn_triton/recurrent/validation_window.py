"""Validates the window of a step, and the calls that fold or restart a window."""

import functools
from itertools import pairwise
from typing import Any, Final

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
    check_rank,
    check_shape,
    check_state,
    check_tensors,
    must,
    shape_of,
    type_of,
    value_of,
)
from gdn_triton._host.memory import Apart, Layout, layout_of
from gdn_triton._host.slots import (
    LAST_SKIPPED,
    check_once,
    check_skip,
    final_writes,
)
from gdn_triton._host.tensors import check_written, why_unreadable
from gdn_triton.recurrent.problem import (
    WINDOW,
    WINDOW_AND_SCALES,
    FoldCall,
    FoldOperands,
    FoldProblem,
    Operands,
    RecurrentProblem,
    fold_period,
)

# The limit of positions. The kernels compute positions in 32 bits.
MOST_POSITION: Final = 2**30

# The names of a window's tensors in errors, and the names of the tensors that a step writes.
WINDOW_NAMES: Final = {field: f"window.{name}" for field, name in WINDOW_AND_SCALES.items()}
STEP_WRITES: Final = ("window.u", "window.k", "window.g", "window.calls", "window.scales")


def check_pool_dtype(state: Tensor, scales: Tensor | None) -> None:
    """Checks that an int8 pool has scales, and that other pools have none."""
    if scales is None and state.dtype == torch.int8:
        expected = "be torch.float64, torch.float32, torch.bfloat16 or torch.float16, or have the "
        expected += "scales of a window (make_window(with_scales=True))"
        raise ValueError(must("state", expected, str(state.dtype)))
    if scales is None:
        check_dtype("state", state, FLOAT_DTYPES, FLOATS)
    elif state.dtype != torch.int8:
        raise ValueError(must("state", "be torch.int8 with window.scales", str(state.dtype)))


def check_window_step(
    x: Operands,
    max_tokens: object,
    *,
    first: str,
    H: int,
    HV: int,
    K: int,
    V: int,
    T: int,
    is_varlen: bool,
) -> tuple[int, int]:
    """Checks the window of a step whose other arguments are valid, and returns R and max_tokens, or
    (0, 0) without a window. first: the name of the token tensor in errors."""
    if max_tokens is None:
        if x.positions is not None:
            raise ValueError(must("positions", "be None without window", type_of(x.positions)))
        return 0, 0
    if x.positions is None:
        raise TypeError(must("positions", "be a torch.Tensor with window", "NoneType"))
    for name, given in (
        ("num_accepted_tokens", x.num_accepted_tokens),
        ("write_slots", x.write_slots),
    ):
        if given is not None:
            raise ValueError(must(name, "be None with window", "a tensor"))
    assert x.state is not None and x.read_slots is not None
    # In a mixed call x.k is mixed_qkv, so its dtype is the dtype of k.
    slots, k_dtype = x.state.shape[0], x.k.dtype
    rows, most = _check_window(x, max_tokens, slots=slots, H=H, HV=HV, K=K, V=V, k_dtype=k_dtype)
    check_shape("positions", x.positions, N=x.read_slots.shape[0])
    if not is_varlen and T > most:
        expected = f"have at most window.max_tokens={most} tokens a sequence"
        raise ValueError(must(first, expected, f"T={T}"))
    return rows, most


def _check_window(
    x: Operands | FoldOperands,
    max_tokens: object,
    *,
    slots: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    k_dtype: torch.dtype,
) -> tuple[int, int]:
    """Checks a window and returns R and max_tokens."""
    u, k, g, calls, start = (getattr(x, field) for field in WINDOW)
    check_rank("window.u", u, "slots", "R", "HV", "V")
    R = u.shape[1]
    check_shape("window.u", u, slots=slots, R=R, HV=HV, V=V)
    check_shape("window.k", k, slots=slots, R=R, H=H, K=K)
    check_shape("window.g", g, slots=slots, R=R, HV=HV)
    check_shape("window.calls", calls, slots=slots, R=R)
    check_shape("window.start", start, slots=slots)
    check_shape("window.scales", x.scales, slots=slots, HV=HV, V=V)
    for name, y, dtype, why in (
        ("window.u", u, torch.float32, ""),
        ("window.k", k, k_dtype, ", as k is"),
        ("window.g", g, torch.float32, ""),
        ("window.calls", calls, torch.int32, ""),
        ("window.start", start, torch.int32, ""),
        ("window.scales", x.scales, torch.float32, ""),
    ):
        if y is None:
            continue
        if y.dtype != dtype:
            raise ValueError(must(name, f"be {dtype}{why}", str(y.dtype)))
        check_written(name, y)
        # The kernels compute the places of records in a slot only from R and the heads.
        is_dense = y.is_contiguous() if y is x.scales or slots == 0 else y[0].is_contiguous()
        if y is not start and not is_dense:
            expected = "be contiguous" if y is x.scales else "have contiguous slots"
            raise ValueError(must(name, expected, f"strides {list(y.stride())}"))
    if type(max_tokens) is not int:
        raise TypeError(must("window.max_tokens", "be an int", value_of(max_tokens)))
    if max_tokens < 1 or fold_period(R, max_tokens) < 1:
        expected = f"be at least 1 and at most half of the R={R} rows of window.u"
        raise ValueError(must("window.max_tokens", expected, str(max_tokens)))
    return R, max_tokens


def check_positions(p: RecurrentProblem, x: Operands) -> None:
    """Checks the contents of positions and offsets of a valid step, if they are CPU tensors."""
    if p.device.type != "cpu" or not p.window_rows:
        return
    assert x.read_slots is not None and x.positions is not None
    lengths = [p.T] * p.N
    if x.cu_seqlens is not None:
        lengths = [end - begin for begin, end in pairwise(x.cu_seqlens.tolist())]
    slots = x.read_slots.tolist()
    for n, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        if slot > p.last_skipped and length > p.max_tokens:
            expected = f"give a sequence at most window.max_tokens={p.max_tokens} tokens"
            raise ValueError(must("cu_seqlens", expected, f"{length} for sequence {n}"))
    used = [n for n, length in enumerate(lengths) if slots[n] > p.last_skipped and length > 0]
    _check_positions(x, slots, x.positions.tolist(), used, p.window_rows, p.max_tokens)


def _check_positions(
    x: Operands | FoldOperands,
    slots: list[int],
    positions: list[int],
    used: list[int],
    rows: int,
    max_tokens: int,
) -> None:
    """Checks positions. used: the sequences that have tokens and no padding slot. A valid position
    equals `start`, or exceeds the position of the call that wrote the last record by 1 to
    max_tokens."""
    _check_range(positions, used)
    assert x.start is not None and x.call_rows is not None
    for n in used:
        position, start = positions[n], int(x.start[slots[n]])
        if position < start:
            expected = f"not be less than window.start of its slot, {start}"
            raise ValueError(must("positions", expected, f"{position} at index {n}"))
        if position > start:
            call = int(x.call_rows[slots[n], (position - 1) % rows])
            if not call < position <= call + max_tokens:
                expected = (
                    f"be 1 to window.max_tokens={max_tokens} more than in the call that wrote the "
                    f"last record, {call}"
                )
                raise ValueError(must("positions", expected, f"{position} at index {n}"))


def _check_path(
    x: FoldOperands,
    slots: list[int],
    positions: list[int],
    path: list[list[int]],
    used: list[int],
    p: FoldProblem,
) -> None:
    """Checks that a path has increasing tokens of the call at its position, and then only -1."""
    _check_range(positions, used)
    for n in used:
        tokens = [token for token in path[n] if token != -1]
        rising = all(a < b for a, b in pairwise([-1, *tokens]))
        if not rising or tokens != path[n][: len(tokens)]:
            expected = "have increasing tokens in each row, then -1"
            raise ValueError(must("path", expected, f"{path[n]} at index {n}"))
        for token in tokens:
            call = int(x.call_rows[slots[n], (positions[n] + token) % p.window_rows])
            if token >= p.max_tokens or call != positions[n]:
                expected = "have tokens of the call at its position"
                raise ValueError(must("path", expected, f"{token} at index {n}"))


def _check_range(positions: list[int], used: list[int]) -> None:
    for n in used:
        if not 0 <= positions[n] < MOST_POSITION:
            given = f"{positions[n]} at index {n}"
            raise ValueError(must("positions", f"be at least 0 and below {MOST_POSITION}", given))


# ------------------------------------------------------------------------------- folds and restarts


def _named(x: FoldOperands) -> dict[str, Any]:
    return {WINDOW_NAMES.get(name, name): given for name, given in x._asdict().items()}


def validate_fold(call: FoldCall, *, folds: bool) -> FoldProblem:
    """Checks the arguments of `gdn_triton.fold_window`, of `gdn_triton.restart_window` if there is
    no state, or of `gdn_triton.accept_window` if there is a path."""
    x, named = call.inputs, _named(call.inputs)
    if not folds:
        del named["state"]
    if x.path is None:
        del named["path"]
    scales = {"window.scales": x.scales}
    check_tensors({name: y for name, y in named.items() if name not in scales}, scales)
    check_flags(state_v_first=call.state_v_first)
    check_skip(call.skip)
    check_devices("slots", x.slots.device, named)
    check_rank("slots", x.slots, "N")
    check_shape("positions", x.positions, N=x.slots.shape[0])
    if x.path is not None:
        check_rank("path", x.path, "N", "L")
        check_shape("path", x.path, N=x.slots.shape[0], L=x.path.shape[1])
    for name in ("slots", "positions", "path"):
        if name in named:
            check_dtype(name, named[name], INDEX_DTYPES, INDICES)
    check_rank("window.u", x.u_rows, "slots", "R", "HV", "V")
    check_rank("window.k", x.k_rows, "slots", "R", "H", "K")
    (count, _, HV, V), (H, K) = x.u_rows.shape, x.k_rows.shape[2:]
    check_dtype("window.k", x.k_rows, FLOAT_DTYPES, FLOATS)
    if H < 1 or HV % H != 0:
        expected = f"have heads of which the HV={HV} of window.u are a multiple"
        raise ValueError(must("window.k", expected, shape_of(x.k_rows)))
    rows, max_tokens = _check_window(
        x, call.max_tokens, slots=count, H=H, HV=HV, K=K, V=V, k_dtype=x.k_rows.dtype
    )
    tiles = [x.u_rows, x.k_rows, x.g_rows]
    if x.state is not None:
        v_first = call.state_v_first
        check_state("state", x.state, "slots", count, HV=HV, K=K, V=V, state_v_first=v_first)
        check_pool_dtype(x.state, x.scales)
        check_written("state", x.state)
        tiles.append(x.state[:, 0] if HV > 0 else x.state)
    if torch.is_grad_enabled() and any(isinstance(y, Tensor) and y.requires_grad for y in x):
        raise NotImplementedError(
            "gdn_triton.fold_window updates states in place and has no gradient; an input requires "
            "one. Call under torch.no_grad()"
        )
    return FoldProblem(
        N=x.slots.shape[0],
        H=H,
        HV=HV,
        K=K,
        V=V,
        k_dtype=x.k_rows.dtype,
        state_dtype=None if x.state is None else x.state.dtype,
        tile_span=max(map(window_span, tiles)),
        device=x.slots.device,
        state_v_first=call.state_v_first,
        last_skipped=LAST_SKIPPED[call.skip],
        window_rows=rows,
        max_tokens=max_tokens,
        unreadable=why_unreadable(named, tuple(named.values())),
    )


def window_span(x: Tensor) -> int:
    """Returns the number of elements from the first to the last of one slot."""
    return sum((n - 1) * s for n, s in zip(x.shape[1:], x.stride()[1:], strict=True))


def fold_memory(call: FoldCall) -> Apart:
    """Returns the memory check of such calls. The check takes the inputs."""
    named = _named(call.inputs)
    if call.inputs.path is None:
        del named["path"]
    return _apart(tuple(named), tuple(map(layout_of, named.values())))


@functools.lru_cache(1024)
def _apart(names: tuple[str, ...], layouts: tuple[Layout | None, ...]) -> Apart:
    written = ("state", "window.start", "window.scales")
    if "path" in names:
        written = STEP_WRITES[:3]
    return Apart(dict(zip(names, layouts, strict=True)), written)


def check_folds(p: FoldProblem, x: FoldOperands) -> None:
    """Checks the contents of slots and positions of a valid call, if they are CPU tensors."""
    if p.device.type != "cpu":
        return
    slots, positions = x.slots.tolist(), x.positions.tolist()
    if slots and max(slots) >= x.start.shape[0]:
        given = f"{max(slots)} at index {slots.index(max(slots))}"
        raise ValueError(must("slots", f"be less than the {x.start.shape[0]} slots", given))
    check_once("slots", final_writes(slots, slots, p.last_skipped))
    used = [n for n, slot in enumerate(slots) if slot > p.last_skipped]
    if x.path is not None:
        _check_path(x, slots, positions, x.path.tolist(), used, p)
    elif x.state is None:
        _check_range(positions, used)
    else:
        _check_positions(x, slots, positions, used, p.window_rows, p.max_tokens)
