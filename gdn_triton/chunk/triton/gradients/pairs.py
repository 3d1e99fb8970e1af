"""The gradients of the products of pairs of tokens in a chunk, by value head:

    S_ij  = scale (do_i . v_new_j) 2^(g_i - g_j)         j < i: the gradient of q_i . k_j
    N_ij  = -beta_i (dx_i . v_new_j) 2^(g_i - g_j)       j < i: the gradient of k_i . k_j
    own_i = scale (do_i . v_new_i)                       which no decay reaches: fp32

and, after products with q k^T and k k^T, their parts of dbeta and of the decays' gradient. A
program owns N, or S and own, of one chunk of one key head, and adds its value heads one after the
other in registers, because dq and dk need only the sums. Every loaded tile is an operand of a
product and of nothing else; dbeta's dx . v is the diagonal of a product. Triton does not load ahead
a tile that other operations read.
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
from gdn_triton._triton.tiles import FUSED, dot_precision, gpu_of, pairs_bwd_config
from gdn_triton.chunk.triton.shared.chunks import ChunkTable
from gdn_triton.chunk.triton.shared.places import chunk_span, decay_of_pairs, diagonal


@triton.jit
def query_pairs(
    p_q,
    p_k,
    p_do,
    p_v_new,
    p_g,
    p_share,
    scale,
    valid,
    o_t,
    T,
    G,
    HV,
    stride_qt,
    stride_kt,
    stride_gt,
    stride_gh,
    dtype: tl.constexpr,
    K_ROW: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns S [BT, BT] and own [BT]. Pointers are to the chunk's first row and the first of G
    heads."""
    below = (o_t[:, None] > o_t[None, :]) & valid[:, None]
    b_qk = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in range(0, K_ROW, BK):
        o_k = i_k + tl.arange(0, BK)[None, :]
        in_keys = valid[:, None] & (o_k < K_ROW)
        b_q = tl.load(p_q + (o_t[:, None] * stride_qt + o_k), mask=in_keys, other=0).to(dtype)
        b_k = tl.load(p_k + (o_t[:, None] * stride_kt + o_k), mask=in_keys, other=0).to(dtype)
        b_qk = tl.dot(b_q, tl.trans(b_k), b_qk, input_precision=PRECISION)
    sum_S = tl.zeros([BT, BT], dtype=tl.float32)
    own = tl.zeros([BT], dtype=tl.float32)
    for _ in range(0, G):
        b_S = tl.zeros([BT, BT], dtype=tl.float32)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)[None, :]
            in_values = valid[:, None] & (o_v < V)
            o_value = o_t[:, None] * HV * V + o_v
            b_do = tl.load(p_do + o_value, mask=in_values, other=0).to(dtype)
            b_v_new = tl.load(p_v_new + o_value, mask=in_values, other=0)
            b_S = tl.dot(b_do, tl.trans(b_v_new), b_S, input_precision=PRECISION)
        b_g = tl.load(p_g + o_t * stride_gt, mask=valid, other=0)
        own += diagonal(b_S, o_t) * scale
        # 0 * inf or 0 * NaN of a product above the diagonal must not survive: select.
        between = decay_of_pairs(b_g, below)
        b_S = tl.where(below, b_S * (between * scale), 0.0)
        sum_S += b_S
        # A pair is part of the gradients of the decays between its tokens: with a plus for the
        # decays up to the later token, and a minus for the decays up to the earlier one.
        b_S = tl.where(below, b_S * b_qk, 0.0)
        tl.store(p_share + o_t, tl.sum(b_S, 1) - tl.sum(b_S, 0), mask=valid)
        p_g += stride_gh
        p_do += V
        p_v_new += V
        p_share += T
    return sum_S, own


@triton.jit
def key_pairs(
    p_k,
    p_v,
    p_v_new,
    p_dx,
    p_g,
    p_beta,
    p_share,
    plane,
    valid,
    o_t,
    T,
    G,
    HV,
    stride_kt,
    stride_vt,
    stride_vh,
    stride_gt,
    stride_gh,
    stride_betat,
    stride_betah,
    K_ROW: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns N [BT, BT]. Pointers are to the chunk's first row and the first of G heads."""
    dtype: tl.constexpr = p_dx.dtype.element_ty
    below = (o_t[:, None] > o_t[None, :]) & valid[:, None]
    b_kk = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in range(0, K_ROW, BK):
        o_k = i_k + tl.arange(0, BK)[None, :]
        in_keys = valid[:, None] & (o_k < K_ROW)
        b_k = tl.load(p_k + (o_t[:, None] * stride_kt + o_k), mask=in_keys, other=0).to(dtype)
        b_kk = tl.dot(b_k, tl.trans(b_k), b_kk, input_precision=PRECISION)
    sum_N = tl.zeros([BT, BT], dtype=tl.float32)
    for _ in range(0, G):
        b_beta = tl.load(p_beta + o_t * stride_betat, mask=valid, other=0).to(tl.float32)
        b_N = tl.zeros([BT, BT], dtype=tl.float32)
        b_dxv = tl.zeros([BT, BT], dtype=tl.float32)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)[None, :]
            in_values = valid[:, None] & (o_v < V)
            o_value = o_t[:, None] * HV * V + o_v
            b_dx = tl.load(p_dx + o_value, mask=in_values, other=0)
            b_v_new = tl.load(p_v_new + o_value, mask=in_values, other=0)
            b_N = tl.dot(b_dx, tl.trans(b_v_new), b_N, input_precision=PRECISION)
            b_v = tl.load(p_v + (o_t[:, None] * stride_vt + o_v), mask=in_values, other=0)
            b_dxv = tl.dot(b_dx, tl.trans(b_v.to(dtype)), b_dxv, input_precision=PRECISION)
        b_g = tl.load(p_g + o_t * stride_gt, mask=valid, other=0)
        # 0 * inf or 0 * NaN of a product above the diagonal must not survive: select.
        between = decay_of_pairs(b_g, below)
        b_N = tl.where(below, b_N * -between, 0.0)
        sum_N += b_N * b_beta[:, None]
        b_N = tl.where(below, b_N * b_kk, 0.0)
        later = tl.sum(b_N, 1)
        b_dbeta = diagonal(b_dxv, o_t)
        tl.store(p_share + o_t, b_dbeta + later, mask=valid)
        # As in query_pairs.
        earlier = tl.sum(b_N * b_beta[:, None], 0)
        tl.store(p_share + plane + o_t, b_beta * later - earlier, mask=valid)
        p_g += stride_gh
        p_beta += stride_betah
        p_v += stride_vh
        p_v_new += V
        p_dx += V
        p_share += T
    return sum_N


@triton.jit(do_not_specialize=["scale", "B", "T", "NT"])
def pairs_bwd_kernel(
    q,
    k,
    v,
    do,
    v_new,
    dx,
    g_cumsum,
    beta,
    S,
    N,
    own,
    shares,
    chunk_rows,
    scale,
    B,
    T,
    NT,
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
    stride_gb,
    stride_gt,
    stride_gh,
    stride_betab,
    stride_betat,
    stride_betah,
    ALIGN_Q: tl.constexpr,
    ALIGN_K: tl.constexpr,
    ALIGN_V: tl.constexpr,
    K_ROW: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    stride_kb, stride_kt, stride_kh = in_elements(stride_kb, stride_kt, stride_kh, ALIGN_K)
    stride_qb, stride_qt, stride_qh = in_elements(stride_qb, stride_qt, stride_qh, ALIGN_Q)
    stride_vb, stride_vt, stride_vh = in_elements(stride_vb, stride_vt, stride_vh, ALIGN_V)
    pid = tl.program_id(0).to(tl.int64)
    of_keys = pid % 2 == 0
    i_ch = pid // 2
    i_c, i_h = i_ch // H, i_ch % H
    G = HV // H
    i_b, row, n_rows = chunk_span(i_c, chunk_rows, T, NT, BT, IS_VARLEN)
    # Bases are 64-bit scalars; offsets inside of a chunk fit 32 bits (forward.py ensures it).
    base = ((i_b * T + row) * HV + i_h * G) * V
    o_t = tl.arange(0, BT)
    if n_rows <= 0:
        return
    dtype: tl.constexpr = S.dtype.element_ty
    valid = o_t < n_rows
    p_q = q + i_b * stride_qb + row * stride_qt + i_h * stride_qh
    p_k = k + i_b * stride_kb + row * stride_kt + i_h * stride_kh
    p_v = v + i_b * stride_vb + row * stride_vt + i_h * G * stride_vh
    p_g = g_cumsum + i_b * stride_gb + row * stride_gt + i_h * G * stride_gh
    p_beta = beta + i_b * stride_betab + row * stride_betat + i_h * G * stride_betah
    o_pair = ((i_b * T + row) * H + i_h) * BT + (o_t[:, None] * H * BT + o_t[None, :])
    # Shares are [3, B, HV, T].
    plane = tl.cast(B, tl.int64) * HV * T
    p_share = shares + (i_b * HV + i_h * G) * T + row
    if of_keys:
        b_N = key_pairs(
            p_k,
            p_v,
            v_new + base,
            dx + base,
            p_g,
            p_beta,
            p_share,
            plane,
            valid,
            o_t,
            T,
            G,
            HV,
            stride_kt,
            stride_vt,
            stride_vh,
            stride_gt,
            stride_gh,
            stride_betat,
            stride_betah,
            K_ROW,
            V,
            BT,
            BK,
            BV,
            PRECISION,
        )
        tl.store(N + o_pair, b_N.to(dtype), mask=valid[:, None])
    else:
        b_S, b_own = query_pairs(
            p_q,
            p_k,
            do + base,
            v_new + base,
            p_g,
            p_share + 2 * plane,
            scale,
            valid,
            o_t,
            T,
            G,
            HV,
            stride_qt,
            stride_kt,
            stride_gt,
            stride_gh,
            dtype,
            K_ROW,
            V,
            BT,
            BK,
            BV,
            PRECISION,
        )
        tl.store(S + o_pair, b_S.to(dtype), mask=valid[:, None])
        tl.store(own + (i_b * H + i_h) * T + row + o_t, b_own, mask=valid)


class Pairs(NamedTuple):
    """Sums over the value heads of a key head: S, N: [B, T, H, chunk_size], strictly lower, in the
    dtype of products; own: fp32 [B, H, T]. shares: fp32 [3, B, HV, T], the pairs' parts of dbeta,
    of the gradients of a token's decay, and of the gradients of the decays before it in its chunk.
    """

    S: torch.Tensor
    N: torch.Tensor
    own: torch.Tensor
    shares: torch.Tensor


def pairs_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    v_new: torch.Tensor,
    dx: torch.Tensor,
    g_cumsum: torch.Tensor,
    beta: torch.Tensor,
    chunks: ChunkTable,
    scale: float,
) -> Pairs:
    """q, k: [B, T, H, K_row], v: [B, T, HV, V], last strides 1; do, v_new, dx: [B, T, HV, V],
    contiguous; g_cumsum, beta: [B, T, HV]."""
    B, T, H, K_row = k.shape
    HV, V = do.shape[2:]
    BT, dtype, device = chunks.chunk_size, v_new.dtype, k.device
    S = torch.empty(B, T, H, BT, dtype=dtype, device=device)
    N = torch.empty_like(S)
    own = torch.empty(B, H, T, dtype=torch.float32, device=device)
    shares = torch.empty(3, B, HV, T, dtype=torch.float32, device=device)
    pairs = Pairs(S, N, own, shares)
    grid = 2 * chunks.slots * H
    if grid == 0:
        return pairs
    config = pairs_bwd_config(gpu_of(v.device), K_row, V, dtype)
    pairs_bwd_kernel[(grid,)](
        q=q,
        k=k,
        v=v,
        do=do,
        v_new=v_new,
        dx=dx,
        g_cumsum=g_cumsum,
        beta=beta,
        S=S,
        N=N,
        own=own,
        shares=shares,
        chunk_rows=chunks.chunk_rows,
        scale=scale,
        B=B,
        T=T,
        NT=chunks.NT,
        H=H,
        HV=HV,
        **row_arguments("q", row_strides(q)),
        **row_arguments("k", row_strides(k)),
        **row_arguments("v", row_strides(v)),
        **head_arguments("g", head_strides(g_cumsum)),
        **head_arguments("beta", head_strides(beta)),
        K_ROW=K_row,
        V=V,
        BT=BT,
        BK=config.BK,
        BV=config.BV,
        PRECISION=dot_precision(dtype),
        IS_VARLEN=chunks.chunk_rows is not None,
        **config.options,
        **FUSED,
    )
    return pairs
