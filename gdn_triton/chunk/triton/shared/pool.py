"""States in memory in the form that kernels read: tensors with one state for each sequence, and the
slots of a pool, as `gdn_triton.chunk.problem.Pool` describes. Without a pool its pointers are None,
and the code that needs them is left out."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from gdn_triton._triton.strides import named, row_strides, state_strides
from gdn_triton.chunk.problem import Pool

# The properties of a pool that a kernel is compiled for: strides, and which slots are padding.
PoolLayout = tuple[int, ...]

# Replaces the pool of a call without one.
_POINTERS = ("read_slots", "write_slots", "has_state", "checkpoints", "checkpoint_slots")
_NO_POINTERS: dict[str, torch.Tensor | None] = dict.fromkeys(_POINTERS)
_NO_NUMBERS = {"every": 0, "M": 0}


class StateMemory(NamedTuple):
    """The place of states [K, V] of sequences or slots, by head: p, a pointer or None without
    states, and the strides between sequences, heads, rows and columns."""

    p: Any
    stride_n: Any
    stride_h: Any
    stride_k: Any
    stride_v: Any


class Checkpoints(NamedTuple):
    """The place of the states after every ``every`` tokens of a sequence. slots: [N, M], by
    checkpoint, or None if the checkpoints of a sequence have consecutive rows."""

    states: Any
    slots: Any
    every: Any
    M: Any


@triton.jit
def state_pointers(x, i_n, i_hv, o_k, o_v):
    """Returns pointers [BK, BV] to rows o_k [BK] and columns o_v [1, BV] of a state of the memory
    x. i_n and i_hv are int64, so no offset of a state overflows."""
    p = x.p + i_n * x.stride_n + i_hv * x.stride_h
    return p + (o_k[:, None] * x.stride_k + o_v * x.stride_v)


@triton.jit
def state_mask(has_state, i_n, o_v, in_state, V: tl.constexpr):
    """Returns ``in_state``, or no memory where ``has_state`` [N] is given and False for sequence
    ``i_n``."""
    if has_state is not None:
        in_state = in_state & (o_v < tl.where(tl.load(has_state + i_n), V, 0))
    return in_state


@triton.jit
def store_final_state(
    b_h,
    x,
    write_slots,
    i_n,
    i_nh,
    i_hv,
    o_k,
    o_v,
    in_state,
    K: tl.constexpr,
    V: tl.constexpr,
    LAST_SKIPPED: tl.constexpr,
):
    """Stores b_h [BK, BV] as the columns o_v of the final state of sequence ``i_n`` in the memory
    x: in its slot of a pool, unless that is padding; without ``write_slots`` x holds a dense state
    for each of the sequences and heads, i_nh = i_n HV + i_hv."""
    if write_slots is None:
        p_ht = x.p + i_nh * (K * V)
    else:
        slot = tl.load(write_slots + i_n).to(tl.int64)
        in_state = in_state & (o_v < tl.where(slot > LAST_SKIPPED, V, 0))
        p_ht = x.p + slot * x.stride_n + i_hv * x.stride_h
    p_ht = p_ht + o_k[:, None] * x.stride_k + o_v * x.stride_v
    tl.store(p_ht, b_h.to(x.p.dtype.element_ty), mask=in_state)


@triton.jit
def store_checkpoint(
    b_h,
    x,
    tokens,
    is_whole,
    i_n,
    i_hv,
    row,
    o_k,
    o_v,
    K: tl.constexpr,
    V: tl.constexpr,
    LAST_SKIPPED: tl.constexpr,
):
    """Stores b_h [BK, BV], the columns o_v of the state after ``tokens`` tokens of sequence
    ``i_n``, where a checkpoint is due and the last chunk ``is_whole``. row: the row of the
    sequence's first checkpoint, if checkpoints have consecutive rows."""
    if is_whole & (tokens % x.every == 0):
        index = tokens // x.every - 1
        in_v = o_v < V
        if x.slots is None:
            row += index
        else:
            p_slot = x.slots + i_n * x.M + index
            row = tl.load(p_slot, mask=index < x.M, other=LAST_SKIPPED).to(tl.int64)
            in_v = o_v < tl.where(row > LAST_SKIPPED, V, 0)
        p_c = state_pointers(x.states, row, i_hv, o_k, o_v)
        tl.store(p_c, b_h.to(x.states.p.dtype.element_ty), mask=(o_k < K)[:, None] & in_v)


def pool_pointers(pool: Pool | None) -> dict[str, torch.Tensor | None]:
    """The pointers to the states of a walk, in the order of the kernels' parameters."""
    if pool is None:
        return _NO_POINTERS
    flags = pool.has_initial_state
    tensors = (pool.read_slots, pool.write_slots, flags, pool.checkpoints, pool.checkpoint_slots)
    return dict(zip(_POINTERS, tensors, strict=True))


def pool_layout(pool: Pool | None, state_v_first: bool) -> PoolLayout:
    """The layout of a pool, from which ``pool_arguments`` makes compile-time arguments."""
    if pool is None:
        return -1, 0, 0, 0, 0, 0, 0
    slot, head, _, _ = state_strides(pool.state, state_v_first)
    kept = state_strides(pool.checkpoints, state_v_first)
    return pool.last_skipped, slot, head, *kept


def pool_arguments(layout: PoolLayout) -> dict[str, int]:
    """The compile-time arguments of a kernel."""
    last_skipped, *strides = layout
    return {"LAST_SKIPPED": last_skipped, **named("htn hth cn ch ck cv", tuple(strides))}


def pool_numbers(pool: Pool | None) -> dict[str, int]:
    """The tokens from one checkpoint to the next, and the columns of checkpoint_slots."""
    if pool is None:
        return _NO_NUMBERS
    slots = pool.checkpoint_slots
    return {"every": pool.every, "M": 0 if slots is None else slots.shape[1]}


def out_strides(pool: Pool | None) -> tuple[int, int, int, int]:
    """``row_strides`` of the given o; zeros if o is a new, dense tensor."""
    return (0, 0, 0, 0) if pool is None else row_strides(pool.out)
