"""State and output in one pass over a sequence's chunks; w, u, v_new and the chunk states never
leave the chip:

    x     = beta (v - 2^g (k h))
    v_new = x + A_inv x
    o_i   = scale (2^g_i q_i h + (q_i . k_i) v_new_i) + sum_{j < i} A_qk_ij v_new_j
    h     = 2^g_last h + sum_i 2^(g_last - g_i) k_i (x) v_new_i

A program owns BV columns of the state [K, V] of one sequence and value head, in fp32 registers.
What needs no state comes from prepare.py: the walk is serial, so all that can be done beside it is
done before it. A token's own part (x in v_new, its own v_new in o) is added in fp32: A_inv and A_qk
are strictly lower.
"""

import torch
import triton
import triton.language as tl

from gdn_triton.config import dot_precision, fused_config
from gdn_triton.kernels._device import decay_between, sequence_span
from gdn_triton.kernels._strides import row_strides
from gdn_triton.kernels.prepare import Prepared
from gdn_triton.kernels.state import empty_state, state_strides
from gdn_triton.varlen import Chunks


@triton.jit(do_not_specialize=["B", "T", "N", "NT"])
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
    chunk_offsets,
    scale,
    B,
    T,
    N,
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
    stride_h0n,
    stride_h0h,
    stride_h0k,
    stride_h0v,
    stride_htk,
    stride_htv,
    ALIGN_Q: tl.constexpr,
    ALIGN_K: tl.constexpr,
    ALIGN_V: tl.constexpr,
    K: tl.constexpr,
    K_ROW: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_H0: tl.constexpr,
    STORE_HT: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    stride_vb, stride_vt = stride_vb * ALIGN_V, stride_vt * ALIGN_V
    stride_vh = stride_vh * ALIGN_V
    stride_kb, stride_kt = stride_kb * ALIGN_K, stride_kt * ALIGN_K
    stride_kh = stride_kh * ALIGN_K
    stride_qb, stride_qt = stride_qb * ALIGN_Q, stride_qt * ALIGN_Q
    stride_qh = stride_qh * ALIGN_Q
    pid = tl.program_id(0).to(tl.int64)
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    i_v, i_nh = pid % V_BLOCKS, pid // V_BLOCKS
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    o_t = tl.arange(0, BT)[:, None]
    o_c = tl.arange(0, BT)[None, :]
    o_k = tl.arange(0, BK)
    o_v = (i_v * BV + tl.arange(0, BV))[None, :]
    in_k, in_v = o_k < K, o_v < V
    in_row = o_k[None, :] < K_ROW
    if IS_VARLEN:
        if i_n == N:
            # Rows that belong to no sequence: o is zero there.
            first = tl.load(cu_seqlens + N).to(tl.int64)
            zeros = tl.zeros([BT, BV], dtype=o.dtype.element_ty)
            for start in range(first, T, BT):
                p_o = o + (start * HV + i_hv) * V
                tl.store(p_o + (o_t * HV * V + o_v), zeros, mask=(o_t < T - start) & in_v)
            return
    i_b, row, n_rows, _ = sequence_span(i_n, cu_seqlens, chunk_offsets, T, NT, IS_VARLEN)
    dtype: tl.constexpr = A_inv.dtype.element_ty
    in_state = in_k[:, None] & in_v
    if HAS_H0:
        p_h0 = h0 + i_n * stride_h0n + i_hv * stride_h0h
        p_h0 += o_k[:, None] * stride_h0k + o_v * stride_h0v
        b_h = tl.load(p_h0, mask=in_state, other=0).to(tl.float32)
    else:
        b_h = tl.zeros([BK, BV], dtype=tl.float32)

    # Bases are 64-bit scalars; offsets inside a chunk fit 32 bits (ops/chunk_fwd.py sees to it).
    base = (i_b * T + row) * HV + i_hv
    p_q = q + i_b * stride_qb + row * stride_qt + i_h * stride_qh
    p_k = k + i_b * stride_kb + row * stride_kt + i_h * stride_kh
    p_v = v + i_b * stride_vb + row * stride_vt + i_hv * stride_vh
    p_A, p_P = A_inv + base * BT, A_qk + base * BT
    p_o = o + base * V
    p_s = scalars + (i_b * HV + i_hv) * T + row
    plane = tl.cast(B, tl.int64) * HV * T
    step = tl.cast(HV, tl.int64) * BT
    # A token's q.k enters no product, so the compiler would not load it ahead: it is loaded a chunk
    # ahead by hand.
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
        b_v = b_beta * (b_v - b_kh * tl.exp2(b_g))
        b_v = tl.dot(b_A, b_v.to(dtype), b_v, input_precision=PRECISION)
        b_o = b_qh * (tl.exp2(b_g) * scale) + b_qk * b_v
        b_o = tl.dot(b_P, b_v.to(dtype), b_o, input_precision=PRECISION)
        tl.store(p_o + (o_t * HV * V + o_v), b_o.to(o.dtype.element_ty), mask=in_values)

        b_v = (b_v * decay_between(g_last, b_g, valid)).to(dtype)
        b_h = tl.dot(tl.trans(b_k), b_v, b_h * tl.exp2(g_last), input_precision=PRECISION)
        p_q += tl.cast(stride_qt, tl.int64) * BT
        p_k += tl.cast(stride_kt, tl.int64) * BT
        p_v += tl.cast(stride_vt, tl.int64) * BT
        p_A += step * BT
        p_P += step * BT
        p_o += step * V
        p_s += BT

    if STORE_HT:
        p_ht = ht + i_nh * (K * V) + o_k[:, None] * stride_htk + o_v * stride_htv
        tl.store(p_ht, b_h, mask=in_state)


def fused_fwd(
    prepared: Prepared,
    v: torch.Tensor,
    chunks: Chunks,
    scale: float,
    dtype: torch.dtype,
    initial_state: torch.Tensor | None = None,
    *,
    N: int,
    K: int,
    output_final_state: bool = False,
    state_v_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o [B, T, HV, V] in ``dtype`` and the final state fp32, laid out as ``state_v_first`` says.
    ``prepared`` is what ``prepare_fwd`` made with the same ``scale``; K is the keys' own width,
    which its copies may exceed. v: [B, T, HV, V], last stride 1."""
    q, k, scalars, A_inv, A_qk = prepared
    B, T, H, K_row = k.shape
    HV, V = v.shape[2:]
    o = torch.empty(B, T, HV, V, dtype=dtype, device=q.device)
    final_state = None
    if output_final_state:
        final_state = empty_state(N, HV, K, V, state_v_first, k.device)
    assert A_inv.dtype.itemsize == 2, "four-byte tiles do not fit shared memory"
    short = B * T <= 2 * chunks.chunk_size * N
    config = fused_config(K, V, N * HV, short)
    is_varlen = chunks.cu_seqlens is not None
    # One sequence more than there are: the rows that belong to none.
    grid = triton.cdiv(V, config.BV) * HV * (N + 1 if is_varlen else N)
    if grid == 0:
        return o, final_state
    stride_h0n, stride_h0h, stride_h0k, stride_h0v = state_strides(initial_state, state_v_first)
    _, _, stride_htk, stride_htv = state_strides(final_state, state_v_first)
    align_q, stride_qb, stride_qt, stride_qh = row_strides(q)
    align_k, stride_kb, stride_kt, stride_kh = row_strides(k)
    align_v, stride_vb, stride_vt, stride_vh = row_strides(v)
    fused_fwd_kernel[(grid,)](
        q=q,
        k=k,
        v=v,
        A_inv=A_inv,
        A_qk=A_qk,
        scalars=scalars,
        h0=initial_state,
        o=o,
        ht=final_state,
        cu_seqlens=chunks.cu_seqlens,
        chunk_offsets=chunks.chunk_offsets,
        scale=scale,
        B=B,
        T=T,
        N=N,
        NT=chunks.NT,
        H=H,
        HV=HV,
        stride_qb=stride_qb,
        stride_qt=stride_qt,
        stride_qh=stride_qh,
        ALIGN_Q=align_q,
        stride_kb=stride_kb,
        stride_kt=stride_kt,
        stride_kh=stride_kh,
        ALIGN_K=align_k,
        stride_vb=stride_vb,
        stride_vt=stride_vt,
        stride_vh=stride_vh,
        ALIGN_V=align_v,
        stride_h0n=stride_h0n,
        stride_h0h=stride_h0h,
        stride_h0k=stride_h0k,
        stride_h0v=stride_h0v,
        stride_htk=stride_htk,
        stride_htv=stride_htv,
        K=K,
        K_ROW=K_row,
        V=V,
        BT=chunks.chunk_size,
        BK=config.BK,
        BV=config.BV,
        PRECISION=dot_precision(A_inv.dtype),
        HAS_H0=initial_state is not None,
        STORE_HT=output_final_state,
        IS_VARLEN=is_varlen,
        **config.options,
    )
    return o, final_state
