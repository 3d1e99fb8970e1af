"""The gradients of a chunk's q, k and v, and the states' parts of the gradients of beta and of the
decays:

    dq = own k + S k + scale 2^g do h^T
    dk = own q + S^T q + (N + N^T) k - beta 2^g dx h^T + 2^(g_last - g) v_new dh^T
    dv = beta dx

with h the state before the chunk, dh the gradient of the state after it, and S, N and own, summed
over the value heads of the key head, from pairs.py. A program owns BK columns of dq or of dk, of
one chunk of one key head, and adds the value heads, one after the other, in registers. The programs
of one chunk are neighbours in the launch, so the second one reads h from the cache. The parts of
dbeta and of the decays' gradient are sums over all of K, of which each block of columns writes its
share. The programs of dk also have the blocks of V of dv.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from gdn_triton._triton.strides import (
    head_arguments,
    head_strides,
    in_elements,
    row_arguments,
    row_strides,
)
from gdn_triton._triton.tiles import FUSED, dot_precision, query_key_bwd_config
from gdn_triton.chunk.triton.gradients.pairs import Pairs
from gdn_triton.chunk.triton.gradients.state import States
from gdn_triton.chunk.triton.shared.chunks import ChunkTable
from gdn_triton.chunk.triton.shared.places import chunk_span, decay_between, store_zeros


@triton.jit
def as_product(b_x, PRECISION: tl.constexpr, BT: tl.constexpr):
    """Returns b_x [BT, BK] of 16 bits in the layout of products, exactly, as I b_x: a move through
    shared memory takes three times the instructions. Wider values are moved."""
    if b_x.dtype.primitive_bitwidth == 16:
        o_t = tl.arange(0, BT)
        eye = (o_t[:, None] == o_t[None, :]).to(tl.float32).to(b_x.dtype)
        return tl.dot(eye, b_x, input_precision=PRECISION).to(b_x.dtype)
    return b_x


@triton.jit
def query_columns(
    p_q,
    p_k,
    p_do,
    p_h,
    p_S,
    p_own,
    p_g,
    p_share,
    scale,
    valid,
    o_t,
    o_k,
    T,
    G,
    HV,
    stride_qt,
    stride_kt,
    stride_gt,
    stride_gh,
    K_ROW: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns dq [BT, BK]. Pointers are to the chunk's first row and the first of G value heads."""
    dtype: tl.constexpr = p_S.dtype.element_ty
    in_keys = valid[:, None] & (o_k < K_ROW)[None, :]
    o_q, o_key = o_t[:, None] * stride_qt, o_t[:, None] * stride_kt
    b_q = tl.load(p_q + (o_q + o_k[None, :]), mask=in_keys, other=0).to(dtype)
    b_k = tl.load(p_k + (o_key + o_k[None, :]), mask=in_keys, other=0).to(dtype)
    b_S = tl.load(p_S, mask=valid[:, None], other=0)
    own = tl.load(p_own + o_t, mask=valid, other=0)
    b_dq = own[:, None] * as_product(b_k, PRECISION, BT).to(tl.float32)
    b_dq = tl.dot(b_S, b_k, b_dq, input_precision=PRECISION)
    b_q = as_product(b_q, PRECISION, BT)
    for _ in range(0, G):
        b_doh = tl.zeros([BT, BK], dtype=tl.float32)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            in_values = valid[:, None] & (o_v < V)[None, :]
            in_state = (o_k < K)[:, None] & (o_v < V)[None, :]
            o_value = o_t[:, None] * HV * V + o_v[None, :]
            b_do = tl.load(p_do + o_value, mask=in_values, other=0).to(dtype)
            b_h = tl.load(p_h + (o_k[:, None] * V + o_v[None, :]), mask=in_state, other=0)
            b_doh = tl.dot(b_do, tl.trans(b_h), b_doh, input_precision=PRECISION)
        b_g = tl.load(p_g + o_t * stride_gt, mask=valid, other=0)
        b_doh *= (tl.exp2(b_g) * scale)[:, None]
        tl.store(p_share + o_t, tl.sum(b_doh * b_q.to(tl.float32), 1), mask=valid)
        b_dq += b_doh
        p_do += V
        p_h += K * V
        p_g += stride_gh
        p_share += T
    return b_dq


@triton.jit
def key_columns(
    p_q,
    p_k,
    p_v_new,
    p_dx,
    p_h,
    p_dh,
    p_S,
    p_N,
    p_own,
    p_g,
    p_beta,
    p_share,
    p_across,
    p_dv,
    plane,
    n_rows,
    valid,
    o_t,
    i_k,
    o_k,
    T,
    G,
    HV,
    stride_qt,
    stride_kt,
    stride_gt,
    stride_gh,
    stride_betat,
    stride_betah,
    K_ROW: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    K_BLOCKS: tl.constexpr,
):
    """Returns dk [BT, BK], and a share of dv. Pointers are to the chunk's first row and the first
    of G value heads."""
    dtype: tl.constexpr = p_S.dtype.element_ty
    in_keys = valid[:, None] & (o_k < K_ROW)[None, :]
    o_q, o_key = o_t[:, None] * stride_qt, o_t[:, None] * stride_kt
    b_q = tl.load(p_q + (o_q + o_k[None, :]), mask=in_keys, other=0).to(dtype)
    b_k = tl.load(p_k + (o_key + o_k[None, :]), mask=in_keys, other=0).to(dtype)
    b_S = tl.load(p_S, mask=valid[:, None], other=0)
    b_N = tl.load(p_N, mask=valid[:, None], other=0)
    own = tl.load(p_own + o_t, mask=valid, other=0)
    b_dk = own[:, None] * as_product(b_q, PRECISION, BT).to(tl.float32)
    b_dk = tl.dot(tl.trans(b_S), b_q, b_dk, input_precision=PRECISION)
    b_dk = tl.dot(b_N, b_k, b_dk, input_precision=PRECISION)
    b_dk = tl.dot(tl.trans(b_N), b_k, b_dk, input_precision=PRECISION)
    b_k = as_product(b_k, PRECISION, BT)
    o_pair = tl.arange(0, 2)[None, :] * plane + o_t[:, None]
    for _ in range(0, G):
        b_beta = tl.load(p_beta + o_t * stride_betat, mask=valid, other=0).to(tl.float32)
        b_dxh = tl.zeros([BT, BK], dtype=tl.float32)
        b_vdh = tl.zeros([BT, BK], dtype=tl.float32)
        b_across = tl.zeros([BK], dtype=tl.float32)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            in_values = valid[:, None] & (o_v < V)[None, :]
            in_state = (o_k < K)[:, None] & (o_v < V)[None, :]
            o_value = o_t[:, None] * HV * V + o_v[None, :]
            o_state = o_k[:, None] * V + o_v[None, :]
            b_dx = tl.load(p_dx + o_value, mask=in_values, other=0)
            b_v_new = tl.load(p_v_new + o_value, mask=in_values, other=0)
            b_h = tl.load(p_h + o_state, mask=in_state, other=0)
            b_dh = tl.load(p_dh + o_state, mask=in_state, other=0)
            b_dxh = tl.dot(b_dx, tl.trans(b_h), b_dxh, input_precision=PRECISION)
            b_vdh = tl.dot(b_v_new, tl.trans(b_dh), b_vdh, input_precision=PRECISION)
            b_across += tl.sum(b_dh.to(tl.float32) * b_h.to(tl.float32), 1)
            mine = (o_v // BV % K_BLOCKS == i_k)[None, :]
            b_dv = (b_beta[:, None] * b_dx.to(tl.float32)).to(p_dv.dtype.element_ty)
            tl.store(p_dv + o_value, b_dv, mask=in_values & mine)
        b_g = tl.load(p_g + o_t * stride_gt, mask=valid, other=0)
        g_last = tl.load(p_g + (n_rows - 1) * stride_gt)
        b_dxh *= tl.exp2(b_g)[:, None]
        b_vdh *= decay_between(g_last, b_g, valid)[:, None]
        b_read = tl.sum(b_dxh * b_k.to(tl.float32), 1)
        b_written = tl.sum(b_vdh * b_k.to(tl.float32), 1)
        tl.store(p_share + o_pair, tl.join(b_read, b_written), mask=valid[:, None])
        tl.store(p_across, tl.sum(b_across, 0) * tl.exp2(g_last))
        b_dk += b_vdh - b_dxh * b_beta[:, None]
        p_dx += V
        p_dv += V
        p_v_new += V
        p_h += K * V
        p_dh += K * V
        p_g += stride_gh
        p_beta += stride_betah
        p_share += T
        p_across += 1
    return b_dk


@triton.jit(do_not_specialize=["scale", "B", "T", "NT", "SLOTS"])
def query_key_bwd_kernel(
    q,
    k,
    do,
    v_new,
    dx,
    h,
    dh,
    S,
    N,
    own,
    g_cumsum,
    beta,
    dq,
    dk,
    dv,
    shares,
    across,
    chunk_rows,
    scale,
    B,
    T,
    NT,
    SLOTS,
    H,
    HV,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_betab,
    stride_betat,
    stride_betah,
    ALIGN_Q: tl.constexpr,
    ALIGN_K: tl.constexpr,
    K_ROW: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    stride_kb, stride_kt, stride_kh = in_elements(stride_kb, stride_kt, stride_kh, ALIGN_K)
    stride_qb, stride_qt, stride_qh = in_elements(stride_qb, stride_qt, stride_qh, ALIGN_Q)
    pid = tl.program_id(0).to(tl.int64)
    K_BLOCKS: tl.constexpr = (K + BK - 1) // BK
    of_keys = pid % 2 == 0
    i_k, i_ch = (pid // 2) % K_BLOCKS, pid // (2 * K_BLOCKS)
    i_c, i_h = i_ch // H, i_ch % H
    G = HV // H
    i_b, row, n_rows = chunk_span(i_c, chunk_rows, T, NT, BT, IS_VARLEN)
    o_t = tl.arange(0, BT)
    o_k = (i_k * BK).to(tl.int32) + tl.arange(0, BK)
    in_k = o_k < K
    # Bases are 64-bit scalars; offsets inside of a chunk fit 32 bits (forward.py ensures it).
    base = ((i_b * T + row) * HV + i_h * G) * V
    o_out = ((i_b * T + row) * H + i_h) * K + (o_t[:, None] * H * K + o_k[None, :])
    if n_rows <= 0:
        # Tokens of no sequence have no gradient.
        mask = (o_t < -n_rows)[:, None] & in_k[None, :]
        if of_keys:
            store_zeros(dk + o_out, mask)
            for i_v in range(i_k * BV, G * V, K_BLOCKS * BV):
                o_v = i_v + tl.arange(0, BV)
                in_values = (o_t < -n_rows)[:, None] & (o_v < G * V)[None, :]
                o_value = o_t[:, None] * HV * V + o_v[None, :]
                store_zeros(dv + base + o_value, in_values)
        else:
            store_zeros(dq + o_out, mask)
        return
    valid = o_t < n_rows
    first = i_c * HV + i_h * G
    p_q = q + i_b * stride_qb + row * stride_qt + i_h * stride_qh
    p_k = k + i_b * stride_kb + row * stride_kt + i_h * stride_kh
    p_g = g_cumsum + i_b * stride_gb + row * stride_gt + i_h * G * stride_gh
    p_beta = beta + i_b * stride_betab + row * stride_betat + i_h * G * stride_betah
    p_own = own + (i_b * H + i_h) * T + row
    o_pair = ((i_b * T + row) * H + i_h) * BT + (o_t[:, None] * H * BT + o_t[None, :])
    # Shares are [K_BLOCKS, 3, B, HV, T].
    plane = tl.cast(B, tl.int64) * HV * T
    p_share = shares + i_k * 3 * plane + (i_b * HV + i_h * G) * T + row
    mask = valid[:, None] & in_k[None, :]
    if of_keys:
        b_dk = key_columns(
            p_q,
            p_k,
            v_new + base,
            dx + base,
            h + first * (K * V),
            dh + first * (K * V),
            S + o_pair,
            N + o_pair,
            p_own,
            p_g,
            p_beta,
            p_share + plane,
            across + i_k * SLOTS * HV + first,
            dv + base,
            plane,
            n_rows,
            valid,
            o_t,
            i_k,
            o_k,
            T,
            G,
            HV,
            stride_qt,
            stride_kt,
            stride_gt,
            stride_gh,
            stride_betat,
            stride_betah,
            K_ROW,
            K,
            V,
            BT,
            BK,
            BV,
            PRECISION,
            K_BLOCKS,
        )
        tl.store(dk + o_out, b_dk.to(dk.dtype.element_ty), mask=mask)
    else:
        b_dq = query_columns(
            p_q,
            p_k,
            do + base,
            h + first * (K * V),
            S + o_pair,
            p_own,
            p_g,
            p_share,
            scale,
            valid,
            o_t,
            o_k,
            T,
            G,
            HV,
            stride_qt,
            stride_kt,
            stride_gt,
            stride_gh,
            K_ROW,
            K,
            V,
            BT,
            BK,
            BV,
            PRECISION,
        )
        tl.store(dq + o_out, b_dq.to(dq.dtype.element_ty), mask=mask)


class QueryKeyGradients(NamedTuple):
    """dq, dk: [B, T, H, K]; dv: [B, T, HV, V]. The other tensors are fp32 shares of the blocks of
    K, undefined for tokens of no sequence. shares: [blocks, 3, B, HV, T]: a token's q . (scale 2^g
    do h^T), 2^g k . (dx h^T) and 2^(g_last - g) k . (v_new dh^T). across: [blocks, slots, HV],
    2^g_last (h . dh) of a chunk."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    shares: torch.Tensor
    across: torch.Tensor


def query_key_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    do: torch.Tensor,
    states: States,
    pairs: Pairs,
    g_cumsum: torch.Tensor,
    beta: torch.Tensor,
    chunks: ChunkTable,
    scale: float,
    dq_dtype: torch.dtype,
    dk_dtype: torch.dtype,
    dv_dtype: torch.dtype,
    *,
    K: int,
) -> QueryKeyGradients:
    """q, k: [B, T, H, K_row], zero beyond the keys' own width K, last stride 1; do: [B, T, HV, V],
    contiguous; g_cumsum, beta: [B, T, HV]."""
    B, T, H, K_row = k.shape
    HV, V = do.shape[2:]
    device = k.device
    config = query_key_bwd_config(K, V, states.h.dtype)
    blocks = triton.cdiv(K, config.BK)
    dq = torch.empty(B, T, H, K, dtype=dq_dtype, device=device)
    dk = torch.empty(B, T, H, K, dtype=dk_dtype, device=device)
    dv = torch.empty(B, T, HV, V, dtype=dv_dtype, device=device)
    shares = torch.empty(blocks, 3, B, HV, T, dtype=torch.float32, device=device)
    across = torch.empty(blocks, chunks.slots, HV, dtype=torch.float32, device=device)
    found = QueryKeyGradients(dq, dk, dv, shares, across)
    grid = 2 * blocks * chunks.slots * H
    if grid == 0:
        return found
    query_key_bwd_kernel[(grid,)](
        q=q,
        k=k,
        do=do,
        v_new=states.v_new,
        dx=states.dx,
        h=states.h,
        dh=states.dh,
        S=pairs.S,
        N=pairs.N,
        own=pairs.own,
        g_cumsum=g_cumsum,
        beta=beta,
        dq=dq,
        dk=dk,
        dv=dv,
        shares=shares,
        across=across,
        chunk_rows=chunks.chunk_rows,
        scale=scale,
        B=B,
        T=T,
        NT=chunks.NT,
        SLOTS=chunks.slots,
        H=H,
        HV=HV,
        **row_arguments("q", row_strides(q)),
        **row_arguments("k", row_strides(k)),
        **head_arguments("g", head_strides(g_cumsum)),
        **head_arguments("beta", head_strides(beta)),
        K_ROW=K_row,
        K=K,
        V=V,
        BT=chunks.chunk_size,
        BK=config.BK,
        BV=config.BV,
        PRECISION=dot_precision(states.h.dtype),
        IS_VARLEN=chunks.chunk_rows is not None,
        **config.options,
        **FUSED,
    )
    return found
