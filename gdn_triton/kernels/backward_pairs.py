"""What the pairs of tokens of a chunk have to do with each other in the backward:

    S_ij  = scale (do_i . v_new_j) 2^(g_i - g_j)         j < i: the gradient of q_i . k_j
    N_ij  = -beta_i (dx_i . v_new_j) 2^(g_i - g_j)       j < i: the gradient of k_i . k_j
    own_i = scale (do_i . v_new_i)                       which no decay reaches: fp32

and what they leave once they have met q k^T and k k^T: their part of dbeta and of the decays'
gradient. dv = beta dx comes along, as dx is here. A program owns one chunk of one value head.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from gdn_triton.config import dot_precision, pairs_bwd_config
from gdn_triton.kernels._device import chunk_span, decay_between
from gdn_triton.kernels._strides import head_arguments, row_arguments, row_strides
from gdn_triton.varlen import Chunks


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
    dv,
    scalars,
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
    stride_kb, stride_kt = stride_kb * ALIGN_K, stride_kt * ALIGN_K
    stride_kh = stride_kh * ALIGN_K
    stride_qb, stride_qt = stride_qb * ALIGN_Q, stride_qt * ALIGN_Q
    stride_qh = stride_qh * ALIGN_Q
    stride_vb, stride_vt = stride_vb * ALIGN_V, stride_vt * ALIGN_V
    stride_vh = stride_vh * ALIGN_V
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    i_b, row, n_rows = chunk_span(i_c, chunk_rows, T, NT, BT, IS_VARLEN)
    # Bases are 64-bit scalars; offsets inside a chunk fit 32 bits (ops/chunk_fwd.py sees to it).
    base = (i_b * T + row) * HV + i_hv
    o_t = tl.arange(0, BT)
    p_dv = dv + base * V
    if n_rows <= 0:
        # Tokens of no sequence have no gradient.
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)[None, :]
            mask = (o_t < -n_rows)[:, None] & (o_v < V)
            nothing = tl.zeros([BT, BV], dtype=dv.dtype.element_ty)
            tl.store(p_dv + (o_t[:, None] * HV * V + o_v), nothing, mask=mask)
        return
    dtype: tl.constexpr = S.dtype.element_ty
    valid = o_t < n_rows
    p_g = g_cumsum + i_b * stride_gb + row * stride_gt + i_hv * stride_gh
    p_beta = beta + i_b * stride_betab + row * stride_betat + i_hv * stride_betah
    b_beta = tl.load(p_beta + o_t * stride_betat, mask=valid, other=0).to(tl.float32)
    p_v = v + i_b * stride_vb + row * stride_vt + i_hv * stride_vh
    p_do, p_v_new, p_dx = do + base * V, v_new + base * V, dx + base * V
    b_S = tl.zeros([BT, BT], dtype=tl.float32)
    b_N = tl.zeros([BT, BT], dtype=tl.float32)
    b_dbeta = tl.zeros([BT], dtype=tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)[None, :]
        mask = valid[:, None] & (o_v < V)
        o_value = o_t[:, None] * HV * V + o_v
        b_do = tl.load(p_do + o_value, mask=mask, other=0).to(dtype)
        b_dx = tl.load(p_dx + o_value, mask=mask, other=0)
        b_v_new = tl.load(p_v_new + o_value, mask=mask, other=0)
        b_S = tl.dot(b_do, tl.trans(b_v_new), b_S, input_precision=PRECISION)
        b_N = tl.dot(b_dx, tl.trans(b_v_new), b_N, input_precision=PRECISION)
        b_v = tl.load(p_v + (o_t[:, None] * stride_vt + o_v), mask=mask, other=0).to(tl.float32)
        b_dx = b_dx.to(tl.float32)
        b_dbeta += tl.sum(b_dx * b_v, 1)
        tl.store(p_dv + o_value, (b_beta[:, None] * b_dx).to(dv.dtype.element_ty), mask=mask)

    b_g = tl.load(p_g + o_t * stride_gt, mask=valid, other=0)
    below = (o_t[:, None] > o_t[None, :]) & valid[:, None]
    own = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_S, 0.0), 1) * scale
    between = decay_between(b_g[:, None], b_g[None, :], below)
    # 0 * inf or 0 * NaN of a product above the diagonal must not survive: select.
    b_S = tl.where(below, b_S * (between * scale), 0.0)
    b_N = tl.where(below, b_N * -between, 0.0)
    p_pair = base * BT + (o_t[:, None] * HV * BT + o_t[None, :])
    tl.store(S + p_pair, b_S.to(dtype), mask=valid[:, None])
    tl.store(N + p_pair, (b_N * b_beta[:, None]).to(dtype), mask=valid[:, None])

    p_q = q + i_b * stride_qb + row * stride_qt + i_h * stride_qh
    p_k = k + i_b * stride_kb + row * stride_kt + i_h * stride_kh
    b_qk = tl.zeros([BT, BT], dtype=tl.float32)
    b_kk = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in tl.static_range(0, K_ROW, BK):
        o_k = i_k + tl.arange(0, BK)[None, :]
        mask = valid[:, None] & (o_k < K_ROW)
        b_q = tl.load(p_q + (o_t[:, None] * stride_qt + o_k), mask=mask, other=0).to(dtype)
        b_k = tl.load(p_k + (o_t[:, None] * stride_kt + o_k), mask=mask, other=0).to(dtype)
        b_qk = tl.dot(b_q, tl.trans(b_k), b_qk, input_precision=PRECISION)
        b_kk = tl.dot(b_k, tl.trans(b_k), b_kk, input_precision=PRECISION)
    b_kk = tl.where(below, b_N * b_kk, 0.0)
    b_dbeta += tl.sum(b_kk, 1)
    b_M = tl.where(below, b_S * b_qk, 0.0) + b_beta[:, None] * b_kk
    # A pair counts in the gradients of the decays between its tokens: plus for the later one's and
    # all before it, minus for the earlier one's and all before it.
    later, earlier = tl.sum(b_M, 1), tl.sum(b_M, 0)
    p_s = scalars + (i_b * HV + i_hv) * T + row + o_t
    plane = tl.cast(B, tl.int64) * HV * T
    tl.store(p_s, own, mask=valid)
    tl.store(p_s + plane, b_dbeta, mask=valid)
    tl.store(p_s + 2 * plane, later, mask=valid)
    tl.store(p_s + 3 * plane, earlier, mask=valid)


class Pairs(NamedTuple):
    """S, N: [B, T, HV, chunk_size], strictly lower, in the dtype of products. dv: [B, T, HV, V].
    scalars: fp32 [4, B, HV, T]: own, and the pairs' parts of dbeta and of the decays' gradient, as
    the later token of a pair and as the earlier one."""

    S: torch.Tensor
    N: torch.Tensor
    dv: torch.Tensor
    scalars: torch.Tensor


def pairs_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    v_new: torch.Tensor,
    dx: torch.Tensor,
    g_cumsum: torch.Tensor,
    beta: torch.Tensor,
    chunks: Chunks,
    scale: float,
    dv_dtype: torch.dtype,
) -> Pairs:
    """q, k: [B, T, H, K_row], v: [B, T, HV, V], last strides 1; do, v_new, dx: [B, T, HV, V],
    contiguous; g_cumsum, beta: [B, T, HV]."""
    B, T, H, K_row = k.shape
    HV, V = do.shape[2:]
    BT, dtype, device = chunks.chunk_size, v_new.dtype, k.device
    S = torch.empty(B, T, HV, BT, dtype=dtype, device=device)
    N = torch.empty_like(S)
    dv = torch.empty(B, T, HV, V, dtype=dv_dtype, device=device)
    scalars = torch.empty(4, B, HV, T, dtype=torch.float32, device=device)
    pairs = Pairs(S, N, dv, scalars)
    grid = chunks.slots * HV
    if grid == 0:
        return pairs
    config = pairs_bwd_config(K_row, V, dtype)
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
        dv=dv,
        scalars=scalars,
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
        **head_arguments("g", g_cumsum.stride()),
        **head_arguments("beta", beta.stride()),
        K_ROW=K_row,
        V=V,
        BT=BT,
        BK=config.BK,
        BV=config.BV,
        PRECISION=dot_precision(dtype),
        IS_VARLEN=chunks.chunk_rows is not None,
        **config.options,
    )
    return pairs
