"""What the output's gradient says of a chunk's written values, before any state is known:

    dv_local_j = sum_{i >= j} scale (q_i . k_j) 2^(g_i - g_j) do_i

A program owns one chunk of one value head. A token's own part, i = j, is added in fp32.
"""

import torch
import triton
import triton.language as tl

from gdn_triton.config import dot_precision, output_bwd_config
from gdn_triton.kernels._device import chunk_span, decay_between
from gdn_triton.kernels._strides import head_arguments, row_arguments, row_strides
from gdn_triton.varlen import Chunks


@triton.jit(do_not_specialize=["scale", "T", "NT"])
def output_bwd_kernel(
    q,
    k,
    do,
    g_cumsum,
    dv_local,
    chunk_rows,
    scale,
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
    stride_gb,
    stride_gt,
    stride_gh,
    ALIGN_Q: tl.constexpr,
    ALIGN_K: tl.constexpr,
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
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    i_b, row, n_rows = chunk_span(i_c, chunk_rows, T, NT, BT, IS_VARLEN)
    if n_rows <= 0:
        return
    dtype: tl.constexpr = dv_local.dtype.element_ty
    o_t = tl.arange(0, BT)
    valid = o_t < n_rows
    # Bases are 64-bit scalars; offsets inside a chunk fit 32 bits (ops/chunk_fwd.py sees to it).
    p_q = q + i_b * stride_qb + row * stride_qt + i_h * stride_qh
    p_k = k + i_b * stride_kb + row * stride_kt + i_h * stride_kh
    b_P = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in tl.static_range(0, K_ROW, BK):
        o_k = i_k + tl.arange(0, BK)[None, :]
        mask = valid[:, None] & (o_k < K_ROW)
        b_q = tl.load(p_q + (o_t[:, None] * stride_qt + o_k), mask=mask, other=0).to(dtype)
        b_k = tl.load(p_k + (o_t[:, None] * stride_kt + o_k), mask=mask, other=0).to(dtype)
        b_P = tl.dot(b_k, tl.trans(b_q), b_P, input_precision=PRECISION)
    b_P *= scale
    p_g = g_cumsum + i_b * stride_gb + row * stride_gt + i_hv * stride_gh
    b_g = tl.load(p_g + o_t * stride_gt, mask=valid, other=0)
    own = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_P, 0.0), 1)
    later = (o_t[:, None] < o_t[None, :]) & valid[None, :]
    b_P = tl.where(later, b_P * decay_between(b_g[None, :], b_g[:, None], later), 0.0).to(dtype)
    base = ((i_b * T + row) * HV + i_hv) * V
    for i_v in tl.static_range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)[None, :]
        mask = valid[:, None] & (o_v < V)
        o_o = o_t[:, None] * HV * V + o_v
        b_do = tl.load(do + base + o_o, mask=mask, other=0).to(dtype)
        b_dv = own[:, None] * b_do.to(tl.float32)
        b_dv = tl.dot(b_P, b_do, b_dv, input_precision=PRECISION)
        tl.store(dv_local + base + o_o, b_dv.to(dtype), mask=mask)


def output_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    do: torch.Tensor,
    g_cumsum: torch.Tensor,
    chunks: Chunks,
    scale: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """dv_local [B, T, HV, V] in ``dtype``, the one that products are computed in. q, k: [B, T, H,
    K], last stride 1; do: [B, T, HV, V], contiguous; g_cumsum: [B, T, HV] fp32."""
    B, T, H, K_row = k.shape
    HV, V = do.shape[2:]
    dv_local = torch.empty(B, T, HV, V, dtype=dtype, device=do.device)
    grid = chunks.slots * HV
    if grid == 0:
        return dv_local
    config = output_bwd_config(K_row, V, dtype)
    output_bwd_kernel[(grid,)](
        q=q,
        k=k,
        do=do,
        g_cumsum=g_cumsum,
        dv_local=dv_local,
        chunk_rows=chunks.chunk_rows,
        scale=scale,
        T=T,
        NT=chunks.NT,
        H=H,
        HV=HV,
        **row_arguments("q", row_strides(q)),
        **row_arguments("k", row_strides(k)),
        **head_arguments("g", g_cumsum.stride()),
        K_ROW=K_row,
        V=V,
        BT=chunks.chunk_size,
        BK=config.BK,
        BV=config.BV,
        PRECISION=dot_precision(dtype),
        IS_VARLEN=chunks.chunk_rows is not None,
        **config.options,
    )
    return dv_local
