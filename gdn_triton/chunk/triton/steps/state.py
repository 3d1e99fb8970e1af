"""State passing, the only serial step: from chunk to chunk of a sequence,

    v_new = u - w h
    h     = 2^g_last h + sum_i 2^(g_last - g_i) k_i (x) v_new_i

A program owns BV columns of the state [K, V] of one sequence and value head, in fp32 registers, and
walks the sequence's chunks. Every tile is read and written in its layout in memory. With a
transposed state its products would need no copy of the state in shared memory, but u and v_new
would have to be transposed, which costs more (docs/tried.md).
"""

import torch
import triton
import triton.language as tl

from gdn_triton._triton.states import empty_state
from gdn_triton._triton.strides import in_elements, named, row_arguments, row_strides, state_strides
from gdn_triton._triton.tiles import FUSED, dot_precision, gpu_of, state_config
from gdn_triton.chunk.problem import Pool
from gdn_triton.chunk.triton.shared.chunks import ChunkTable
from gdn_triton.chunk.triton.shared.places import sequence_span
from gdn_triton.chunk.triton.shared.pool import (
    Checkpoints,
    StateMemory,
    pool_arguments,
    pool_layout,
    pool_numbers,
    pool_pointers,
    state_mask,
    state_pointers,
    store_checkpoint,
    store_final_state,
)
from gdn_triton.chunk.triton.shared.update import add_values, decayed_values


@triton.jit(do_not_specialize=["T", "NT", "every", "M"])
def state_fwd_kernel(
    k,
    w,
    u,
    g_cumsum,
    h0,
    h,
    v_new,
    ht,
    cu_seqlens,
    chunk_offsets,
    read_slots,
    write_slots,
    has_state,
    checkpoints,
    checkpoint_slots,
    T,
    NT,
    every,
    M,
    H,
    HV,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_h0n,
    stride_h0h,
    stride_h0k,
    stride_h0v,
    stride_htn,
    stride_hth,
    stride_htk,
    stride_htv,
    stride_cn,
    stride_ch,
    stride_ck,
    stride_cv,
    ALIGN_K: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    STORE_H: tl.constexpr,
    STORE_HT: tl.constexpr,
    LAST_SKIPPED: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    stride_kb, stride_kt, stride_kh = in_elements(stride_kb, stride_kt, stride_kh, ALIGN_K)
    pid = tl.program_id(0).to(tl.int64)
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    i_v, i_nh = pid % V_BLOCKS, pid // V_BLOCKS
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    i_b, row, n_rows, slot = sequence_span(i_n, cu_seqlens, chunk_offsets, T, NT, IS_VARLEN)
    dtype: tl.constexpr = w.dtype.element_ty
    o_t = tl.arange(0, BT)[:, None]
    o_k = tl.arange(0, BK)
    o_v = (i_v * BV + tl.arange(0, BV))[None, :]
    in_k, in_v = o_k < K, o_v < V
    in_state = in_k[:, None] & in_v
    i_h0 = i_n
    if read_slots is not None:
        i_h0 = tl.load(read_slots + i_n).to(tl.int64)
        if i_h0 <= LAST_SKIPPED:
            return
    states = StateMemory(h0, stride_h0n, stride_h0h, stride_h0k, stride_h0v)
    if h0 is None:
        b_h = tl.zeros([BK, BV], dtype=tl.float32)
    else:
        in_h0 = state_mask(has_state, i_n, o_v, in_state, V)
        p_h0 = state_pointers(states, i_h0, i_hv, o_k, o_v)
        b_h = tl.load(p_h0, mask=in_h0, other=0).to(tl.float32)

    # Bases are 64-bit scalars; offsets inside of a chunk fit 32 bits (forward.py ensures it).
    base = (i_b * T + row) * HV + i_hv
    p_k = k + i_b * stride_kb + row * stride_kt + i_h * stride_kh
    p_w, p_u, p_v_new, p_g = w + base * K, u + base * V, v_new + base * V, g_cumsum + base
    if STORE_H:
        p_h = h + (slot * HV + i_hv) * (K * V)
    step = tl.cast(HV, tl.int64) * BT
    if checkpoints is not None:
        # The row of the sequence's first checkpoint.
        i_c = (i_b * T + row) // every
        states = StateMemory(checkpoints, stride_cn, stride_ch, stride_ck, stride_cv)
        kept = Checkpoints(states, checkpoint_slots, every, M)
    for start in range(0, n_rows, BT):
        left = n_rows - start
        valid = o_t < left
        in_keys = valid & in_k[None, :]
        in_values = valid & in_v
        b_hd = b_h.to(dtype)
        if STORE_H:
            tl.store(p_h + (o_k[:, None] * V + o_v), b_hd, mask=in_state)
            p_h += tl.cast(HV, tl.int64) * (K * V)
        b_w = tl.load(p_w + (o_t * HV * K + o_k[None, :]), mask=in_keys, other=0)
        b_v = tl.load(p_u + (o_t * HV * V + o_v), mask=in_values, other=0).to(tl.float32)
        b_v -= tl.dot(b_w, b_hd, input_precision=PRECISION)
        tl.store(p_v_new + (o_t * HV * V + o_v), b_v.to(dtype), mask=in_values)

        b_g = tl.load(p_g + o_t * HV, mask=valid, other=0)
        g_last = tl.load(p_g + (tl.minimum(left, BT) - 1) * HV)
        b_v = decayed_values(b_v, b_g, g_last, valid).to(dtype)
        b_k = tl.load(p_k + (o_t * stride_kt + o_k[None, :]), mask=in_keys, other=0).to(dtype)
        b_h = add_values(b_h, b_k, b_v, g_last, PRECISION)
        if checkpoints is not None:
            store_checkpoint(
                b_h, kept, start + BT, left >= BT, i_n, i_hv, i_c, o_k, o_v, K, V, LAST_SKIPPED
            )
        p_w += step * K
        p_u += step * V
        p_v_new += step * V
        p_g += step
        p_k += tl.cast(stride_kt, tl.int64) * BT

    if STORE_HT:
        states = StateMemory(ht, stride_htn, stride_hth, stride_htk, stride_htv)
        store_final_state(
            b_h, states, write_slots, i_n, i_nh, i_hv, o_k, o_v, in_state, K, V, LAST_SKIPPED
        )


def state_fwd(
    k: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    g_cumsum: torch.Tensor,
    chunks: ChunkTable,
    initial_state: torch.Tensor | None = None,
    *,
    N: int,
    store_h: bool = True,
    output_final_state: bool = False,
    state_v_first: bool = False,
    pool: Pool | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """Returns h [slots, HV, K, V] (each chunk's starting state, in w's dtype; None if not asked
    for), v_new [B, T, HV, V], and the final state in fp32, laid out as ``state_v_first`` says.
    pool: the memory of the states, in place of ``initial_state`` and a new tensor; for the
    sequences that it skips nothing is written, h and v_new included."""
    T, H, K = k.shape[1:]
    HV, V = u.shape[2:]
    dtype = w.dtype
    h = torch.empty(chunks.slots, HV, K, V, dtype=dtype, device=k.device) if store_h else None
    v_new = torch.empty_like(u)
    final_state = None
    if pool is not None:
        initial_state, final_state = pool.state, pool.state
    elif output_final_state:
        final_state = empty_state(N, HV, K, V, state_v_first, k.device)
    config = state_config(gpu_of(u.device), K, V, dtype, N * HV)
    grid = triton.cdiv(V, config.BV) * N * HV
    if grid == 0:
        return h, v_new, final_state
    state_fwd_kernel[(grid,)](
        k=k,
        w=w,
        u=u,
        g_cumsum=g_cumsum,
        h0=initial_state,
        h=h,
        v_new=v_new,
        ht=final_state,
        cu_seqlens=chunks.cu_seqlens,
        chunk_offsets=chunks.chunk_offsets,
        **pool_pointers(pool),
        T=T,
        NT=chunks.NT,
        **pool_numbers(pool),
        H=H,
        HV=HV,
        **row_arguments("k", row_strides(k)),
        **named("h0n h0h h0k h0v", state_strides(initial_state, state_v_first)),
        **named("htk htv", state_strides(final_state, state_v_first)[2:]),
        **pool_arguments(pool_layout(pool, state_v_first)),
        K=K,
        V=V,
        BT=chunks.chunk_size,
        BK=config.BK,
        BV=config.BV,
        PRECISION=dot_precision(dtype),
        STORE_H=store_h,
        STORE_HT=final_state is not None,
        IS_VARLEN=chunks.cu_seqlens is not None,
        **config.options,
        **FUSED,
    )
    return h, v_new, final_state
