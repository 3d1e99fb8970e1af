"""A sequence in segments that run at the same time, for calls with too few states to fill a GPU.

The effect of a segment on the state is an affine map, S_out = M S_in + b, with M [K, K] and b [K,
V]. `segment_maps_kernel` finds the maps of all segments in parallel: b is the walk from a state of
zeros, and M is the same walk from the identity with values of zero, so both are columns of one
recurrence. `segment_starts_kernel` then folds the maps of each sequence, in order, into the state
that each segment starts from. The walk over each segment (walk.py) follows. Nothing is truncated.

Segments are numbered like chunks and stored in the same tables: a segment is a chunk of many tokens
(shared/chunks.py). The map of a sequence's last segment is not needed and not made; neither is the
M of the first segment if it starts from zeros.
"""

import functools

import torch
import triton
import triton.language as tl

from gdn_triton._triton.launch import Launch
from gdn_triton._triton.strides import in_elements, named, row_arguments, row_strides, state_strides
from gdn_triton._triton.tiles import Tile, dot_precision, gpu_of, maps_config, starts_config
from gdn_triton.chunk.problem import Pool
from gdn_triton.chunk.triton.fused.prepare import ChunkFactors
from gdn_triton.chunk.triton.shared.chunks import ChunkTable
from gdn_triton.chunk.triton.shared.places import chunk_span, segment_place
from gdn_triton.chunk.triton.shared.pool import (
    StateMemory,
    state_mask,
    state_pointers,
    store_final_state,
)
from gdn_triton.chunk.triton.shared.update import solve_values, write_values


@triton.jit(do_not_specialize=["B", "T", "N", "NS", "segment"])
def segment_maps_kernel(
    k,
    v,
    A_inv,
    scalars,
    offsets,
    shifts,
    chunk_rows,
    chunk_offsets,
    B,
    T,
    N,
    NS,
    segment,
    H,
    HV,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    ALIGN_K: tl.constexpr,
    ALIGN_V: tl.constexpr,
    K: tl.constexpr,
    K_ROW: tl.constexpr,
    V: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_H0: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    stride_kb, stride_kt, stride_kh = in_elements(stride_kb, stride_kt, stride_kh, ALIGN_K)
    stride_vb, stride_vt, stride_vh = in_elements(stride_vb, stride_vt, stride_vh, ALIGN_V)
    pid = tl.program_id(0).to(tl.int64)
    V_BLOCKS: tl.constexpr = (V + BC - 1) // BC
    C_BLOCKS: tl.constexpr = V_BLOCKS + (K + BC - 1) // BC
    i_c, i_sh = pid % C_BLOCKS, pid // C_BLOCKS
    i_s, i_hv = i_sh // HV, i_sh % HV
    i_h = i_hv // (HV // H)
    i_b, row, n_rows = chunk_span(i_s, chunk_rows, T, NS, segment, IS_VARLEN)
    _, is_first, is_last = segment_place(i_s, chunk_offsets, N, NS, BN, IS_VARLEN)
    of_keys = i_c >= V_BLOCKS
    if is_last or n_rows <= 0:
        return
    if not HAS_H0:
        if is_first and of_keys:
            return
    o_t = tl.arange(0, BT)[:, None]
    o_s = tl.arange(0, BT)[None, :]
    o_k = tl.arange(0, BK)
    o_c = tl.arange(0, BC)[None, :] + tl.where(of_keys, i_c - V_BLOCKS, i_c) * BC
    in_row = o_k[None, :] < K_ROW
    in_v = o_c < tl.where(of_keys, 0, V)
    dtype: tl.constexpr = A_inv.dtype.element_ty
    # Columns of the identity, or zeros.
    b_h = tl.where(o_k[:, None] == tl.where(of_keys, o_c, -1), 1.0, 0.0)

    base = (i_b * T + row) * HV + i_hv
    p_k = k + i_b * stride_kb + row * stride_kt + i_h * stride_kh
    p_v = v + i_b * stride_vb + row * stride_vt + i_hv * stride_vh
    p_A = A_inv + base * BT
    p_s = scalars + (i_b * HV + i_hv) * T + row
    plane = tl.cast(B, tl.int64) * HV * T
    # A segment ends after whole chunks, except the last one of a sequence, and for that one the
    # program has already returned.
    for _ in range(0, n_rows, BT):
        b_g = tl.load(p_s + o_t)
        b_beta = tl.load(p_s + plane + o_t)
        g_last = tl.load(p_s + BT - 1)
        b_k = tl.load(p_k + (o_t * stride_kt + o_k[None, :]), mask=in_row, other=0).to(dtype)
        b_v = tl.load(p_v + (o_t * stride_vt + o_c), mask=in_v, other=0).to(tl.float32)
        b_A = tl.load(p_A + (o_t * HV * BT + o_s))
        b_kh = tl.dot(b_k, b_h.to(dtype), input_precision=PRECISION)
        b_v = solve_values(b_kh, b_v, b_A, b_g, b_beta, PRECISION, True)
        b_h = write_values(b_h, b_k, b_v, b_g, g_last, o_t >= 0, PRECISION)
        p_k += tl.cast(stride_kt, tl.int64) * BT
        p_v += tl.cast(stride_vt, tl.int64) * BT
        p_A += tl.cast(HV, tl.int64) * BT * BT
        p_s += BT

    o_k = o_k[:, None]
    if of_keys:
        tl.store(shifts + i_sh * (K * K) + (o_k * K + o_c), b_h, mask=(o_k < K) & (o_c < K))
    else:
        tl.store(offsets + i_sh * (K * V) + (o_k * V + o_c), b_h, mask=(o_k < K) & (o_c < V))


@triton.jit(do_not_specialize=["N", "NS"])
def segment_starts_kernel(
    offsets,
    shifts,
    h0,
    ht,
    chunk_offsets,
    read_slots,
    write_slots,
    has_state,
    N,
    NS,
    HV,
    stride_h0n,
    stride_h0h,
    stride_h0k,
    stride_h0v,
    stride_htn,
    stride_hth,
    stride_htk,
    stride_htv,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_H0: tl.constexpr,
    STORE_HT: tl.constexpr,
    LAST_SKIPPED: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    BACK: tl.constexpr,
):
    """BACK: fold from a sequence's last segment to its first, with M transposed, from the gradient
    ``h0`` of the final state to the gradients ``offsets`` of the segments' ends."""
    pid = tl.program_id(0).to(tl.int64)
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    i_v, i_nh = pid % V_BLOCKS, pid // V_BLOCKS
    i_n, i_hv = i_nh // HV, i_nh % HV
    if IS_VARLEN:
        first = tl.load(chunk_offsets + i_n).to(tl.int64)
        count = tl.load(chunk_offsets + i_n + 1).to(tl.int64) - first
    else:
        first = i_n * NS
        count = i_n * 0 + NS
    o_k = tl.arange(0, BK)
    o_v = (i_v * BV + tl.arange(0, BV))[None, :]
    in_state = (o_k[:, None] < K) & (o_v < V)
    in_shift = (o_k[:, None] < K) & (o_k[None, :] < K)
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
    step = tl.cast(HV, tl.int64)
    base = first * HV + i_hv
    p_M = shifts + (o_k[:, None] * K + o_k[None, :])
    if BACK:
        base += (count - 1) * step
        step = -step
        p_M = shifts + (o_k[None, :] * K + o_k[:, None])
    p_b = offsets + base * (K * V) + (o_k[:, None] * V + o_v)
    p_M += base * (K * K)
    for i_s in range(0, count - 1):
        b_b = tl.load(p_b, mask=in_state, other=0)
        tl.store(p_b, b_h, mask=in_state)
        if HAS_H0 or i_s > 0:
            b_M = tl.load(p_M, mask=in_shift, other=0)
            b_b = tl.dot(b_M, b_h, b_b, input_precision=PRECISION)
        b_h = b_b
        p_b += step * (K * V)
        p_M += step * (K * K)
    if count > 0:
        tl.store(p_b, b_h, mask=in_state)
    elif STORE_HT:
        # Do not reuse the name `states`, whose type may differ: see fused_fwd_kernel.
        final = StateMemory(ht, stride_htn, stride_hth, stride_htk, stride_htv)
        store_final_state(
            b_h, final, write_slots, i_n, i_nh, i_hv, o_k, o_v, in_state, K, V, LAST_SKIPPED
        )


@functools.lru_cache(maxsize=256, typed=True)
def maps_launch(
    config: Tile,
    k_strides: tuple[int, ...],
    v_strides: tuple[int, ...],
    H: int,
    HV: int,
    K: int,
    K_row: int,
    V: int,
    BN: int,
    BT: int,
    dtype: torch.dtype,
    has_h0: bool,
    is_varlen: bool,
) -> Launch:
    return Launch(
        segment_maps_kernel,
        H=H,
        HV=HV,
        **row_arguments("k", k_strides),
        **row_arguments("v", v_strides),
        K=K,
        K_ROW=K_row,
        V=V,
        BN=BN,
        BT=BT,
        BK=config.BK,
        BC=config.BV,
        PRECISION=dot_precision(dtype),
        HAS_H0=has_h0,
        IS_VARLEN=is_varlen,
        **config.options,
    )


@functools.lru_cache(maxsize=256, typed=True)
def starts_launch(
    config: Tile,
    h0_strides: tuple[int, ...],
    ht_strides: tuple[int, ...],
    last_skipped: int,
    HV: int,
    K: int,
    V: int,
    has_h0: bool,
    store_ht: bool,
    is_varlen: bool,
    back: bool,
) -> Launch:
    return Launch(
        segment_starts_kernel,
        HV=HV,
        **named("h0n h0h h0k h0v", h0_strides),
        **named("htn hth htk htv", ht_strides),
        K=K,
        V=V,
        BK=config.BK,
        BV=config.BV,
        PRECISION=dot_precision(torch.float32),
        HAS_H0=has_h0,
        STORE_HT=store_ht,
        LAST_SKIPPED=last_skipped,
        IS_VARLEN=is_varlen,
        BACK=back,
        **config.options,
    )


def segment_starts(
    prepared: ChunkFactors,
    v: torch.Tensor,
    chunks: ChunkTable,
    segments: ChunkTable,
    initial_state: torch.Tensor | None,
    final_state: torch.Tensor | None,
    *,
    N: int,
    K: int,
    state_v_first: bool,
    pool: Pool | None = None,
) -> torch.Tensor:
    """Returns the state that each segment starts from, fp32 [segments.slots, HV, K, V]; slots of no
    sequence are undefined. Each of ``segments`` is a whole number of chunks. This function
    writes the ``final_state`` only of sequences without a token, since the walk writes the others.
    With a ``pool`` both states are in the pool."""
    _, k, scalars, A_inv, _ = prepared
    B, T, H, K_row = k.shape
    HV, V = v.shape[2:]
    starts = torch.empty(segments.slots, HV, K, V, dtype=torch.float32, device=k.device)
    shifts = torch.empty(segments.slots, HV, K, K, dtype=torch.float32, device=k.device)
    is_varlen = segments.chunk_rows is not None
    has_h0 = initial_state is not None
    gpu = gpu_of(v.device)
    tile = maps_config(gpu, K)
    columns = -(-V // tile.BV) + -(-K // tile.BV)
    maps = maps_launch(
        tile,
        row_strides(k),
        row_strides(v),
        H,
        HV,
        K,
        K_row,
        V,
        triton.next_power_of_2(N + 1),
        chunks.chunk_size,
        A_inv.dtype,
        has_h0,
        is_varlen,
    )
    maps(
        (segments.slots * HV * columns, 1, 1),
        k=k,
        v=v,
        A_inv=A_inv,
        scalars=scalars,
        offsets=starts,
        shifts=shifts,
        chunk_rows=segments.chunk_rows,
        chunk_offsets=segments.chunk_offsets,
        B=B,
        T=T,
        N=N,
        NS=segments.NT,
        segment=segments.chunk_size,
    )
    fold_maps(
        starts,
        shifts,
        segments,
        initial_state,
        final_state,
        N=N,
        state_v_first=state_v_first,
        pool=pool,
    )
    return starts


def fold_maps(
    offsets: torch.Tensor,
    shifts: torch.Tensor,
    segments: ChunkTable,
    initial_state: torch.Tensor | None,
    final_state: torch.Tensor | None,
    *,
    N: int,
    state_v_first: bool,
    pool: Pool | None = None,
    back: bool = False,
) -> None:
    """Replaces the b of each segment in ``offsets`` [segments.slots, HV, K, V] by the state that
    the segment starts from. ``shifts`` [segments.slots, HV, K, K] are their M. back: of the walk
    back, from the gradient of the final state, to that of the state after each segment."""
    HV, K, V = offsets.shape[1:]
    has_h0 = initial_state is not None
    tile = starts_config(gpu_of(offsets.device), K, V)
    fold = starts_launch(
        tile,
        state_strides(initial_state, state_v_first),
        state_strides(final_state, state_v_first),
        -1 if pool is None else pool.last_skipped,
        HV,
        K,
        V,
        has_h0,
        final_state is not None,
        segments.chunk_rows is not None,
        back,
    )
    fold(
        (N * HV * -(-V // tile.BV), 1, 1),
        offsets=offsets,
        shifts=shifts,
        h0=initial_state,
        ht=final_state,
        chunk_offsets=segments.chunk_offsets,
        read_slots=None if pool is None else pool.read_slots,
        write_slots=None if pool is None else pool.write_slots,
        has_state=None if pool is None else pool.has_initial_state,
        N=N,
        NS=segments.NT,
    )
