"""States in the slots of a pool, as kernels take them: `gdn_triton.chunk.problem.Pool` says what is
read and written. Without a pool the pointers are None, and the code that needs them is left out."""

import torch
import triton
import triton.language as tl

from gdn_triton._triton.strides import named, row_strides, state_strides
from gdn_triton.chunk.problem import Pool

# The properties of a pool that a kernel is compiled for: strides, and which slots are padding.
PoolLayout = tuple[int, ...]

# Stands for the pool of a call that has none.
_POINTERS = ("read_slots", "write_slots", "has_state", "checkpoints", "checkpoint_slots")
_NO_POINTERS: dict[str, torch.Tensor | None] = dict.fromkeys(_POINTERS)
_NO_NUMBERS = {"every": 0, "M": 0}


@triton.jit
def store_checkpoint(
    b_h,
    o_k,
    o_v,
    i_n,
    i_hv,
    row,
    index,
    checkpoints,
    checkpoint_slots,
    M,
    stride_cn,
    stride_ch,
    stride_ck,
    stride_cv,
    K: tl.constexpr,
    V: tl.constexpr,
    LAST_SKIPPED: tl.constexpr,
):
    """Stores b_h as checkpoint ``index`` of sequence ``i_n``, whose first one has row ``row``."""
    in_v = o_v < V
    if checkpoint_slots is None:
        row += index
    else:
        p_slot = checkpoint_slots + i_n * M + index
        row = tl.load(p_slot, mask=index < M, other=LAST_SKIPPED).to(tl.int64)
        in_v = o_v < tl.where(row > LAST_SKIPPED, V, 0)
    p_c = checkpoints + row * stride_cn + i_hv * stride_ch
    p_c += o_k[:, None] * stride_ck + o_v * stride_cv
    tl.store(p_c, b_h.to(checkpoints.dtype.element_ty), mask=(o_k < K)[:, None] & in_v)


def pool_pointers(pool: Pool | None) -> dict[str, torch.Tensor | None]:
    """The pointers that say where the states of a walk are, in the order of the kernels'
    parameters."""
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
    """Tokens from a checkpoint to the next, and columns of checkpoint_slots."""
    if pool is None:
        return _NO_NUMBERS
    slots = pool.checkpoint_slots
    return {"every": pool.every, "M": 0 if slots is None else slots.shape[1]}


def out_strides(pool: Pool | None) -> tuple[int, int, int, int]:
    """``row_strides`` of the o that was given; zeros where o is a new, dense tensor."""
    return (0, 0, 0, 0) if pool is None else row_strides(pool.out)
