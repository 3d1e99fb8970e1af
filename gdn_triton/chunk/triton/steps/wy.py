"""Computes the WY pair of a chunk from its keys and values, in one kernel:

    A     = strict-lower(beta_i (k_i . k_j) 2^(g_i - g_j))
    A_inv = (I + A)^-1
    u     = (A_inv diag(beta)) v     = beta v + strict-lower(A_inv diag(beta)) v
    w     = (A_inv diag(beta 2^g)) k = beta 2^g k + strict-lower(A_inv diag(beta 2^g)) k

A program owns one chunk of one value head. A stays in registers; only ``A_inv`` is written to
memory, and only for training. The factors beta and 2^g multiply the columns of ``A_inv`` in fp32,
so k and v enter the tensor cores without a rounding. The diagonal, a token's own part and often
most of the result, is added in fp32.
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
from gdn_triton._triton.tiles import FUSED, dot_precision, wy_config
from gdn_triton.chunk.triton.shared.chunks import ChunkTable
from gdn_triton.chunk.triton.shared.inverse import invert_unit_lower
from gdn_triton.chunk.triton.shared.places import chunk_span, decay_of_pairs


@triton.jit(do_not_specialize=["T", "NT"])
def wy_fwd_kernel(
    k,
    v,
    g_cumsum,
    beta,
    w,
    u,
    A_inv,
    chunk_rows,
    T,
    NT,
    H,
    HV,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_betab,
    stride_betat,
    stride_betah,
    ALIGN_K: tl.constexpr,
    ALIGN_V: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    STORE_A_INV: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    stride_vb, stride_vt, stride_vh = in_elements(stride_vb, stride_vt, stride_vh, ALIGN_V)
    stride_kb, stride_kt, stride_kh = in_elements(stride_kb, stride_kt, stride_kh, ALIGN_K)
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    i_b, row, n_rows = chunk_span(i_c, chunk_rows, T, NT, BT, IS_VARLEN)
    if n_rows <= 0:
        return
    dtype: tl.constexpr = w.dtype.element_ty
    o_t = tl.arange(0, BT)
    valid = o_t < n_rows
    # Bases are 64-bit scalars; offsets inside of a chunk fit 32 bits (forward.py ensures it).
    base = (i_b * T + row) * HV + i_hv
    b_g = tl.load(g_cumsum + base + o_t * HV, mask=valid, other=0)
    p_beta = beta + i_b * stride_betab + row * stride_betat + i_hv * stride_betah
    b_beta = tl.load(p_beta + o_t.to(tl.int64) * stride_betat, mask=valid, other=0).to(tl.float32)
    p_k = k + i_b * stride_kb + row * stride_kt + i_h * stride_kh
    p_v = v + i_b * stride_vb + row * stride_vt + i_hv * stride_vh

    b_A = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in tl.static_range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)[None, :]
        b_k = tl.load(
            p_k + (o_t[:, None] * stride_kt + o_k), mask=valid[:, None] & (o_k < K), other=0
        ).to(dtype)
        b_A = tl.dot(b_k, tl.trans(b_k), b_A, input_precision=PRECISION)
    # Mask the rows past the end: their g is 0, and 2^(0 - g_j) may be inf.
    below = (o_t[:, None] > o_t[None, :]) & valid[:, None]
    b_A *= b_beta[:, None] * decay_of_pairs(b_g, below)
    # 0 * inf or 0 * NaN of a key's product with itself or a later key must not survive the mask.
    b_A = tl.where(below, b_A, 0.0)
    b_X = invert_unit_lower(b_A, BT, PRECISION, False)

    if STORE_A_INV:
        p_A = A_inv + base * BT
        tl.store(
            p_A + (o_t[:, None] * HV * BT + o_t[None, :]),
            b_X.to(A_inv.dtype.element_ty),
            mask=valid[:, None],
        )

    b_X = tl.where(below, b_X * b_beta[None, :], 0.0)
    b_Xu = b_X.to(dtype)
    for i_v in tl.static_range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)[None, :]
        mask = valid[:, None] & (o_v < V)
        b_v = tl.load(p_v + (o_t[:, None] * stride_vt + o_v), mask=mask, other=0).to(dtype)
        b_u = b_beta[:, None] * b_v.to(tl.float32)
        b_u = tl.dot(b_Xu, b_v, b_u, input_precision=PRECISION)
        tl.store(u + base * V + (o_t[:, None] * HV * V + o_v), b_u.to(dtype), mask=mask)
    b_beta *= tl.exp2(b_g)
    b_Xw = (b_X * tl.exp2(b_g)[None, :]).to(dtype)
    for i_k in tl.static_range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)[None, :]
        mask = valid[:, None] & (o_k < K)
        b_k = tl.load(p_k + (o_t[:, None] * stride_kt + o_k), mask=mask, other=0).to(dtype)
        b_w = b_beta[:, None] * b_k.to(tl.float32)
        b_w = tl.dot(b_Xw, b_k, b_w, input_precision=PRECISION)
        tl.store(w + base * K + (o_t[:, None] * HV * K + o_k), b_w.to(dtype), mask=mask)


def wy_fwd(
    k: torch.Tensor,
    v: torch.Tensor,
    g_cumsum: torch.Tensor,
    beta: torch.Tensor,
    chunks: ChunkTable,
    dtype: torch.dtype,
    store_A_inv: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns w [B, T, HV, K], u [B, T, HV, V] and, if asked for, A_inv [B, T, HV, chunk_size], all
    in ``dtype``, the dtype of products. k, v: last stride 1."""
    B, T, H, K = k.shape
    HV, V = v.shape[2:]
    BT = chunks.chunk_size
    w = torch.empty(B, T, HV, K, dtype=dtype, device=k.device)
    u = torch.empty(B, T, HV, V, dtype=dtype, device=k.device)
    A_inv = torch.empty(B, T, HV, BT, dtype=dtype, device=k.device) if store_A_inv else None
    grid = chunks.slots * HV
    if grid == 0:
        return w, u, A_inv
    config = wy_config(K, V, dtype)
    wy_fwd_kernel[(grid,)](
        k=k,
        v=v,
        g_cumsum=g_cumsum,
        beta=beta,
        w=w,
        u=u,
        A_inv=A_inv,
        chunk_rows=chunks.chunk_rows,
        T=T,
        NT=chunks.NT,
        H=H,
        HV=HV,
        **row_arguments("k", row_strides(k)),
        **row_arguments("v", row_strides(v)),
        **head_arguments("beta", head_strides(beta)),
        K=K,
        V=V,
        BT=BT,
        BK=config.BK,
        BV=config.BV,
        PRECISION=dot_precision(dtype),
        STORE_A_INV=store_A_inv,
        IS_VARLEN=chunks.chunk_rows is not None,
        **config.options,
        **FUSED,
    )
    return w, u, A_inv
