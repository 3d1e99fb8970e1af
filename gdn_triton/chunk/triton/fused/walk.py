"""Computes state and output in one pass over a sequence's chunks; w, u, v_new and the chunk states
are not written to memory:

    x     = beta (v - 2^g (k h))
    v_new = x + A_inv x
    o_i   = scale (2^g_i q_i h + (q_i . k_i) v_new_i) + sum_{j < i} A_qk_ij v_new_j
    h     = 2^g_last h + sum_i 2^(g_last - g_i) k_i (x) v_new_i

A program owns BV columns of the state [K, V] of one sequence and value head, in fp32 registers. The
walk is serial, so all that needs no state is computed before, by prepare.py. A token's own part (x
in v_new, and v_new in o) is added in fp32, because A_inv and A_qk are strictly lower.
"""

import functools

import torch
import triton
import triton.language as tl

from gdn_triton._triton.launch import Launch
from gdn_triton._triton.states import empty_state
from gdn_triton._triton.strides import in_elements, named, row_arguments, row_strides, state_strides
from gdn_triton._triton.tiles import Tile, dot_precision, fused_config, gpu_of
from gdn_triton.chunk.problem import Pool
from gdn_triton.chunk.triton.fused.prepare import ChunkFactors
from gdn_triton.chunk.triton.fused.segments import segment_starts
from gdn_triton.chunk.triton.shared.chunks import ChunkTable
from gdn_triton.chunk.triton.shared.places import (
    chunk_span,
    segment_place,
    sequence_rows,
    store_zeros,
)
from gdn_triton.chunk.triton.shared.pool import (
    Checkpoints,
    PoolLayout,
    StateMemory,
    out_strides,
    pool_arguments,
    pool_layout,
    pool_numbers,
    pool_pointers,
    state_mask,
    state_pointers,
    store_checkpoint,
    store_final_state,
)
from gdn_triton.chunk.triton.shared.update import solve_values, write_values


@triton.jit(do_not_specialize=["scale", "B", "T", "N", "NW", "segment", "every", "M"])
def fused_fwd_kernel(
    q,
    k,
    v,
    A_inv,
    A_qk,
    scalars,
    h0,
    o,
    ht,
    cu_seqlens,
    walk_rows,
    walk_offsets,
    read_slots,
    write_slots,
    has_state,
    checkpoints,
    checkpoint_slots,
    scale,
    B,
    T,
    N,
    NW,
    segment,
    every,
    M,
    H,
    HV,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
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
    stride_ob,
    stride_ot,
    stride_oh,
    ALIGN_Q: tl.constexpr,
    ALIGN_K: tl.constexpr,
    ALIGN_V: tl.constexpr,
    ALIGN_O: tl.constexpr,
    K: tl.constexpr,
    K_ROW: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    STORE_HT: tl.constexpr,
    IN_SEGMENTS: tl.constexpr,
    BN: tl.constexpr,
    LAST_SKIPPED: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """ALIGN_O: 0 if o is dense, without strides."""
    stride_vb, stride_vt, stride_vh = in_elements(stride_vb, stride_vt, stride_vh, ALIGN_V)
    stride_kb, stride_kt, stride_kh = in_elements(stride_kb, stride_kt, stride_kh, ALIGN_K)
    stride_qb, stride_qt, stride_qh = in_elements(stride_qb, stride_qt, stride_qh, ALIGN_Q)
    pid = tl.program_id(0).to(tl.int64)
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    i_v, i_wh = pid % V_BLOCKS, pid // V_BLOCKS
    i_w, i_hv = i_wh // HV, i_wh % HV
    i_h = i_hv // (HV // H)
    o_t = tl.arange(0, BT)[:, None]
    o_c = tl.arange(0, BT)[None, :]
    o_k = tl.arange(0, BK)
    o_v = (i_v * BV + tl.arange(0, BV))[None, :]
    in_k, in_v = o_k < K, o_v < V
    in_row = o_k[None, :] < K_ROW
    # A walk is a sequence, or a segment of one. The rows after the last sequence form walk number N
    # of a head, whose count is negative.
    ends = True
    if IN_SEGMENTS:
        i_b, row, n_rows = chunk_span(i_w, walk_rows, T, NW, segment, IS_VARLEN)
        i_n, _, ends = segment_place(i_w, walk_offsets, N, NW, BN, IS_VARLEN)
    else:
        i_n = i_w
        i_b, row, n_rows = sequence_rows(i_n, cu_seqlens, N, T, IS_VARLEN)
    if ALIGN_O > 0:
        stride_ob, stride_ot, stride_oh = in_elements(stride_ob, stride_ot, stride_oh, ALIGN_O)
        o += i_b * stride_ob + i_hv * stride_oh
    i_h0 = i_w
    if read_slots is not None:
        slot = tl.load(read_slots + i_n, mask=i_n < N, other=LAST_SKIPPED).to(tl.int64)
        if slot <= LAST_SKIPPED:
            n_rows = tl.abs(n_rows)
            for start in range(0, n_rows, BT):
                p_o = o + (row + start) * stride_ot + (o_t * stride_ot + o_v)
                store_zeros(p_o, (o_t < n_rows - start) & in_v)
            return
        if not IN_SEGMENTS:
            i_h0 = slot
    elif IS_VARLEN:
        if i_n == N:
            # These rows belong to no sequence: their o is zero.
            for start in range(0, -n_rows, BT):
                p_o = o + ((row + start) * HV + i_hv) * V
                outside = (o_t < -n_rows - start) & in_v
                store_zeros(p_o + (o_t * HV * V + o_v), outside)
            return
    dtype: tl.constexpr = A_inv.dtype.element_ty
    in_state = in_k[:, None] & in_v
    # A segment always has a state to start from, because segments.py has read the flags.
    flags = None if IN_SEGMENTS else has_state
    states = StateMemory(h0, stride_h0n, stride_h0h, stride_h0k, stride_h0v)
    if h0 is None:
        b_h = tl.zeros([BK, BV], dtype=tl.float32)
    else:
        in_h0 = state_mask(flags, i_n, o_v, in_state, V)
        p_h0 = state_pointers(states, i_h0, i_hv, o_k, o_v)
        b_h = tl.load(p_h0, mask=in_h0, other=0).to(tl.float32)

    # Bases are 64-bit scalars; offsets inside of a chunk fit 32 bits (forward.py ensures it).
    base = (i_b * T + row) * HV + i_hv
    p_q = q + i_b * stride_qb + row * stride_qt + i_h * stride_qh
    p_k = k + i_b * stride_kb + row * stride_kt + i_h * stride_kh
    p_v = v + i_b * stride_vb + row * stride_vt + i_hv * stride_vh
    p_A, p_P = A_inv + base * BT, A_qk + base * BT
    p_o = o + (base * V if ALIGN_O == 0 else row * stride_ot)
    o_o = (o_t * HV * V if ALIGN_O == 0 else o_t * stride_ot) + o_v
    p_s = scalars + (i_b * HV + i_hv) * T + row
    plane = tl.cast(B, tl.int64) * HV * T
    step = tl.cast(HV, tl.int64) * BT
    if checkpoints is not None:
        # The sequence's first row, its tokens before this walk, its first checkpoint's row.
        bos = row
        if IN_SEGMENTS:
            bos = tl.load(cu_seqlens + i_n).to(tl.int64) if IS_VARLEN else row * 0
        before = (row - bos).to(tl.int32)
        i_c = (i_b * T + bos) // every
        states = StateMemory(checkpoints, stride_cn, stride_ch, stride_ck, stride_cv)
        kept = Checkpoints(states, checkpoint_slots, every, M)
    # A token's q.k is no operand of a product, so the compiler would not load it ahead. It is
    # therefore loaded one chunk ahead by hand.
    b_qk_next = tl.load(p_s + 2 * plane + o_t, mask=o_t < n_rows, other=0)
    for start in range(0, n_rows, BT):
        left = n_rows - start
        valid = o_t < left
        in_keys = valid & in_row
        in_values = valid & in_v
        b_qk = b_qk_next
        b_qk_next = tl.load(p_s + BT + 2 * plane + o_t, mask=o_t < left - BT, other=0)
        b_g = tl.load(p_s + o_t, mask=valid, other=0)
        b_beta = tl.load(p_s + plane + o_t, mask=valid, other=0)
        g_last = tl.load(p_s + tl.minimum(left, BT) - 1)
        b_k = tl.load(p_k + (o_t * stride_kt + o_k[None, :]), mask=in_keys, other=0).to(dtype)
        b_q = tl.load(p_q + (o_t * stride_qt + o_k[None, :]), mask=in_keys, other=0).to(dtype)
        b_v = tl.load(p_v + (o_t * stride_vt + o_v), mask=in_values, other=0).to(tl.float32)
        b_A = tl.load(p_A + (o_t * HV * BT + o_c), mask=valid, other=0)
        b_P = tl.load(p_P + (o_t * HV * BT + o_c), mask=valid, other=0)

        b_hd = b_h.to(dtype)
        b_kh = tl.dot(b_k, b_hd, input_precision=PRECISION)
        b_qh = tl.dot(b_q, b_hd, input_precision=PRECISION)
        b_v = solve_values(b_kh, b_v, b_A, b_g, b_beta, PRECISION, True)
        b_o = b_qh * (tl.exp2(b_g) * scale) + b_qk * b_v
        b_o = tl.dot(b_P, b_v.to(dtype), b_o, input_precision=PRECISION)
        tl.store(p_o + o_o, b_o.to(o.dtype.element_ty), mask=in_values)

        b_h = write_values(b_h, b_k, b_v, b_g, g_last, valid, PRECISION)
        if checkpoints is not None:
            tokens = before + start + BT
            store_checkpoint(
                b_h, kept, tokens, left >= BT, i_n, i_hv, i_c, o_k, o_v, K, V, LAST_SKIPPED
            )
        p_q += tl.cast(stride_qt, tl.int64) * BT
        p_k += tl.cast(stride_kt, tl.int64) * BT
        p_v += tl.cast(stride_vt, tl.int64) * BT
        p_A += step * BT
        p_P += step * BT
        p_o += step * V if ALIGN_O == 0 else tl.cast(stride_ot, tl.int64) * BT
        p_s += BT

    if STORE_HT:
        if ends:
            # `states` may hold None or a pointer to another dtype. Triton refuses a name whose type
            # changes in a branch on a value of the device.
            final = StateMemory(ht, stride_htn, stride_hth, stride_htk, stride_htv)
            i_nh = i_n * HV + i_hv
            store_final_state(
                b_h, final, write_slots, i_n, i_nh, i_hv, o_k, o_v, in_state, K, V, LAST_SKIPPED
            )


@functools.lru_cache(maxsize=256, typed=True)
def fused_launch(
    config: Tile,
    q_strides: tuple[int, ...],
    k_strides: tuple[int, ...],
    v_strides: tuple[int, ...],
    h0_strides: tuple[int, ...],
    ht_strides: tuple[int, ...],
    o_strides: tuple[int, ...],
    layout: PoolLayout,
    H: int,
    HV: int,
    K: int,
    K_row: int,
    V: int,
    BT: int,
    dtype: torch.dtype,
    store_ht: bool,
    in_segments: bool,
    BN: int,
    is_varlen: bool,
) -> Launch:
    """The kernel with all arguments that do not depend on lengths. Strides: ``row_strides``,
    ``state_strides``, ``out_strides``. BN: a power of two above the number of sequences, if they
    are cut."""
    return Launch(
        fused_fwd_kernel,
        H=H,
        HV=HV,
        **row_arguments("q", q_strides),
        **row_arguments("k", k_strides),
        **row_arguments("v", v_strides),
        **named("h0n h0h h0k h0v", h0_strides),
        **named("htk htv", ht_strides[2:]),
        **row_arguments("o", o_strides),
        **pool_arguments(layout),
        K=K,
        K_ROW=K_row,
        V=V,
        BT=BT,
        BK=config.BK,
        BV=config.BV,
        PRECISION=dot_precision(dtype),
        STORE_HT=store_ht,
        IN_SEGMENTS=in_segments,
        BN=BN,
        IS_VARLEN=is_varlen,
        **config.options,
    )


def fused_fwd(
    prepared: ChunkFactors,
    v: torch.Tensor,
    chunks: ChunkTable,
    scale: float,
    dtype: torch.dtype,
    initial_state: torch.Tensor | None = None,
    *,
    N: int,
    K: int,
    output_final_state: bool = False,
    state_v_first: bool = False,
    segments: ChunkTable | None = None,
    pool: Pool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns o [B, T, HV, V] in ``dtype`` and the final state in fp32, laid out as
    ``state_v_first`` says. ``prepared``: the result of ``prepare_fwd`` with the same ``scale``. K:
    the width of the keys, which the copies in ``prepared`` may exceed. v: [B, T, HV, V], last
    stride 1. segments: the sequences cut into pieces of a whole number of chunks, which are walked
    at the same time (segments.py). pool: the memory of states and o, in place of ``initial_state``
    and new tensors; then ``chunks`` and ``segments`` know the sequences to skip."""
    q, k, scalars, A_inv, A_qk = prepared
    B, T, H, K_row = k.shape
    HV, V = v.shape[2:]
    BT = chunks.chunk_size
    assert A_inv.dtype.itemsize == 2, "four-byte tiles do not fit shared memory"
    final_state = None
    if pool is not None:
        o, initial_state, final_state = pool.out, pool.state, pool.state
    else:
        o = torch.empty(B, T, HV, V, dtype=dtype, device=q.device)
        if output_final_state:
            final_state = empty_state(N, HV, K, V, state_v_first, k.device)
    is_varlen = chunks.cu_seqlens is not None
    h0, h0_strides = initial_state, state_strides(initial_state, state_v_first)
    gpu = gpu_of(v.device)
    if segments is None:
        # There is one more walk than sequences: it writes the rows that belong to no sequence.
        walks, segment, BN = N + 1 if is_varlen else N, 0, 1
        config = fused_config(gpu, K, V, N * HV, short=B * T <= 2 * BT * N)
    else:
        walks, segment, BN = segments.slots, segments.chunk_size, triton.next_power_of_2(N + 1)
        config = fused_config(gpu, K, V, walks * HV, short=False)
        h0 = segment_starts(
            prepared,
            v,
            chunks,
            segments,
            initial_state,
            final_state,
            N=N,
            K=K,
            state_v_first=state_v_first,
            pool=pool,
        )
        h0_strides = state_strides(h0, False)
    grid = -(-V // config.BV) * HV * walks
    if grid == 0:
        return o, final_state
    launch = fused_launch(
        config,
        row_strides(q),
        row_strides(k),
        row_strides(v),
        h0_strides,
        state_strides(final_state, state_v_first),
        out_strides(pool),
        pool_layout(pool, state_v_first),
        H,
        HV,
        K,
        K_row,
        V,
        BT,
        A_inv.dtype,
        final_state is not None,
        segments is not None,
        BN,
        is_varlen,
    )
    launch(
        (grid, 1, 1),
        q=q,
        k=k,
        v=v,
        A_inv=A_inv,
        A_qk=A_qk,
        scalars=scalars,
        h0=h0,
        o=o,
        ht=final_state,
        cu_seqlens=chunks.cu_seqlens,
        walk_rows=None if segments is None else segments.chunk_rows,
        walk_offsets=None if segments is None else segments.chunk_offsets,
        **pool_pointers(pool),
        scale=scale,
        B=B,
        T=T,
        N=N,
        NW=0 if segments is None else segments.NT,
        segment=segment,
        **pool_numbers(pool),
    )
    return o, final_state
