"""The scores of a chunk, for the backward by steps (fused/prepare.py makes them for 16-bit inputs):

    A_qk_ij = scale (q_i . k_j) 2^(g_i - g_j)      j < i
    own_i   = scale (q_i . k_i)                    which no decay reaches: fp32

A program owns one chunk of one value head.
"""

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
from gdn_triton._triton.tiles import FUSED, dot_precision, scores_config
from gdn_triton.chunk.triton.shared.chunks import ChunkTable
from gdn_triton.chunk.triton.shared.places import chunk_span, decay_of_pairs, diagonal


@triton.jit(do_not_specialize=["scale", "T", "NT"])
def scores_kernel(
    q,
    k,
    g_cumsum,
    A_qk,
    own,
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
    BT: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    stride_kb, stride_kt, stride_kh = in_elements(stride_kb, stride_kt, stride_kh, ALIGN_K)
    stride_qb, stride_qt, stride_qh = in_elements(stride_qb, stride_qt, stride_qh, ALIGN_Q)
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    i_b, row, n_rows = chunk_span(i_c, chunk_rows, T, NT, BT, IS_VARLEN)
    if n_rows <= 0:
        return
    dtype: tl.constexpr = A_qk.dtype.element_ty
    o_t = tl.arange(0, BT)
    valid = o_t < n_rows
    # Bases are 64-bit scalars; offsets inside of a chunk fit 32 bits (forward.py ensures it).
    p_q = q + i_b * stride_qb + row * stride_qt + i_h * stride_qh
    p_k = k + i_b * stride_kb + row * stride_kt + i_h * stride_kh
    b_P = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in tl.static_range(0, K_ROW, BK):
        o_k = i_k + tl.arange(0, BK)[None, :]
        mask = valid[:, None] & (o_k < K_ROW)
        b_q = tl.load(p_q + (o_t[:, None] * stride_qt + o_k), mask=mask, other=0).to(dtype)
        b_k = tl.load(p_k + (o_t[:, None] * stride_kt + o_k), mask=mask, other=0).to(dtype)
        b_P = tl.dot(b_q, tl.trans(b_k), b_P, input_precision=PRECISION)
    b_P *= scale
    o_g = i_b * stride_gb + (row + o_t) * stride_gt + i_hv * stride_gh
    b_g = tl.load(g_cumsum + o_g, mask=valid, other=0)
    b_own = diagonal(b_P, o_t)
    tl.store(own + o_g, b_own, mask=valid)
    below = o_t[:, None] > o_t[None, :]
    # 0 * inf or 0 * NaN of a product above the diagonal must not survive: select.
    b_P = tl.where(below, b_P * decay_of_pairs(b_g, below), 0.0)
    base = ((i_b * T + row) * HV + i_hv) * BT
    p_P = A_qk + base + (o_t[:, None] * HV * BT + o_t[None, :])
    tl.store(p_P, b_P.to(dtype), mask=valid[:, None])


def scores(
    q: torch.Tensor,
    k: torch.Tensor,
    g_cumsum: torch.Tensor,
    chunks: ChunkTable,
    scale: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns A_qk [B, T, HV, chunk_size] in ``dtype``, the dtype of products, and own [B, T, HV],
    fp32. q, k: [B, T, H, K], last stride 1; g_cumsum: [B, T, HV] fp32, dense."""
    B, T, H, K_row = k.shape
    HV, BT = g_cumsum.shape[2], chunks.chunk_size
    A_qk = torch.empty(B, T, HV, BT, dtype=dtype, device=k.device)
    own = torch.empty_like(g_cumsum)
    grid = chunks.slots * HV
    if grid == 0:
        return A_qk, own
    config = scores_config(K_row, dtype)
    scores_kernel[(grid,)](
        q=q,
        k=k,
        g_cumsum=g_cumsum,
        A_qk=A_qk,
        own=own,
        chunk_rows=chunks.chunk_rows,
        scale=scale,
        T=T,
        NT=chunks.NT,
        H=H,
        HV=HV,
        **row_arguments("q", row_strides(q)),
        **row_arguments("k", row_strides(k)),
        **head_arguments("g", head_strides(g_cumsum)),
        K_ROW=K_row,
        BT=BT,
        BK=config.BK,
        PRECISION=dot_precision(dtype),
        IS_VARLEN=chunks.chunk_rows is not None,
        **config.options,
        **FUSED,
    )
    return A_qk, own
