"""The gradient of a chunk's q:

    dq = own k + S k + scale 2^g do h^T

with h the state before the chunk, and S and own from backward_pairs.py. A program owns BK columns
of one chunk of one key head and adds up its value heads, one after the other, in registers. What
the decays' gradient needs, q . (scale 2^g do h^T), is a sum over all of K: each block of columns
writes its share.
"""

import torch
import triton
import triton.language as tl

from gdn_triton.config import dot_precision, query_bwd_config
from gdn_triton.kernels._device import chunk_span
from gdn_triton.kernels._strides import head_arguments, row_arguments, row_strides
from gdn_triton.kernels.backward_pairs import Pairs
from gdn_triton.varlen import Chunks


@triton.jit(do_not_specialize=["scale", "B", "T", "NT"])
def query_bwd_kernel(
    q,
    k,
    do,
    h,
    S,
    scalars,
    g_cumsum,
    dq,
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
    stride_gb,
    stride_gt,
    stride_gh,
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
    stride_kb, stride_kt = stride_kb * ALIGN_K, stride_kt * ALIGN_K
    stride_kh = stride_kh * ALIGN_K
    stride_qb, stride_qt = stride_qb * ALIGN_Q, stride_qt * ALIGN_Q
    stride_qh = stride_qh * ALIGN_Q
    pid = tl.program_id(0).to(tl.int64)
    K_BLOCKS: tl.constexpr = (K + BK - 1) // BK
    i_k, i_ch = pid % K_BLOCKS, pid // K_BLOCKS
    i_c, i_h = i_ch // H, i_ch % H
    G = HV // H
    i_b, row, n_rows = chunk_span(i_c, chunk_rows, T, NT, BT, IS_VARLEN)
    dtype: tl.constexpr = S.dtype.element_ty
    o_t = tl.arange(0, BT)
    o_k = (i_k * BK).to(tl.int32) + tl.arange(0, BK)
    in_k = o_k < K
    # Bases are 64-bit scalars; offsets inside a chunk fit 32 bits (ops/chunk_fwd.py sees to it).
    base = (i_b * T + row) * HV + i_h * G
    first = ((i_b * T + row) * H + i_h) * K
    o_o = o_t[:, None] * H * K + o_k[None, :]
    # Scalars are [4, B, HV, T], shares [K_BLOCKS, B, HV, T].
    plane = tl.cast(B, tl.int64) * HV * T
    o_s = (i_b * HV + i_h * G) * T + row
    if n_rows <= 0:
        # Tokens of no sequence have no gradient.
        outside = o_t < -n_rows
        nothing = tl.zeros([BT, BK], dtype=tl.float32)
        mask = outside[:, None] & in_k[None, :]
        tl.store(dq + first + o_o, nothing.to(dq.dtype.element_ty), mask=mask)
        return
    valid = o_t < n_rows
    in_keys = valid[:, None] & (o_k < K_ROW)[None, :]
    p_q = q + i_b * stride_qb + row * stride_qt + i_h * stride_qh
    p_k = k + i_b * stride_kb + row * stride_kt + i_h * stride_kh
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    for i_g in range(0, G):
        head = base + i_g
        p_do, p_h = do + head * V, h + (i_c * HV + i_h * G + i_g) * (K * V)
        b_doh = tl.zeros([BT, BK], dtype=tl.float32)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            mask = valid[:, None] & (o_v < V)[None, :]
            b_do = tl.load(p_do + (o_t[:, None] * HV * V + o_v[None, :]), mask=mask, other=0).to(
                dtype
            )
            in_state = in_k[:, None] & (o_v < V)[None, :]
            b_h = tl.load(p_h + (o_k[:, None] * V + o_v[None, :]), mask=in_state, other=0)
            b_doh = tl.dot(b_do, tl.trans(b_h), b_doh, input_precision=PRECISION)
        p_g = g_cumsum + i_b * stride_gb + row * stride_gt + (i_h * G + i_g) * stride_gh
        b_g = tl.load(p_g + o_t * stride_gt, mask=valid, other=0)
        o_head = o_s + tl.cast(i_g, tl.int64) * T + o_t
        own = tl.load(scalars + o_head, mask=valid, other=0)
        # Loaded for each head anew: held from head to head, they would take the registers that
        # keep a second program on the multiprocessor.
        o_q, o_key = (
            o_t[:, None] * stride_qt + o_k[None, :],
            o_t[:, None] * stride_kt + o_k[None, :],
        )
        b_q = tl.load(p_q + o_q, mask=in_keys, other=0).to(dtype)
        b_k = tl.load(p_k + o_key, mask=in_keys, other=0).to(dtype)
        b_doh *= (tl.exp2(b_g) * scale)[:, None]
        b_share = tl.sum(b_doh * b_q.to(tl.float32), 1)
        tl.store(shares + i_k * plane + o_head, b_share, mask=valid)
        b_dq += b_doh + own[:, None] * b_k.to(tl.float32)
        p_S = S + head * BT + (o_t[:, None] * HV * BT + o_t[None, :])
        b_S = tl.load(p_S, mask=valid[:, None], other=0)
        b_dq = tl.dot(b_S, b_k, b_dq, input_precision=PRECISION)
    mask = valid[:, None] & in_k[None, :]
    tl.store(dq + first + o_o, b_dq.to(dq.dtype.element_ty), mask=mask)


def query_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    do: torch.Tensor,
    h: torch.Tensor,
    pairs: Pairs,
    g_cumsum: torch.Tensor,
    chunks: Chunks,
    scale: float,
    dtype: torch.dtype,
    *,
    K: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dq [B, T, H, K] in ``dtype``, and shares fp32 [blocks of K, B, HV, T], nothing for tokens of
    no sequence. q, k: [B, T, H, K_row], zero beyond the keys' own width K, last stride 1; do:
    [B, T, HV, V], contiguous; g_cumsum: [B, T, HV]."""
    B, T, H, K_row = k.shape
    HV, V = do.shape[2:]
    config = query_bwd_config(K, V, h.dtype)
    blocks = triton.cdiv(K, config.BK)
    dq = torch.empty(B, T, H, K, dtype=dtype, device=k.device)
    shares = torch.empty(blocks, B, HV, T, dtype=torch.float32, device=k.device)
    grid = blocks * chunks.slots * H
    if grid == 0:
        return dq, shares
    query_bwd_kernel[(grid,)](
        q=q,
        k=k,
        do=do,
        h=h,
        S=pairs.S,
        scalars=pairs.scalars,
        g_cumsum=g_cumsum,
        dq=dq,
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
        **head_arguments("g", g_cumsum.stride()),
        K_ROW=K_row,
        K=K,
        V=V,
        BT=chunks.chunk_size,
        BK=config.BK,
        BV=config.BV,
        PRECISION=dot_precision(h.dtype),
        IS_VARLEN=chunks.chunk_rows is not None,
        **config.options,
    )
    return dq, shares
