"""The gradient of a chunk's k, and the state's part of that of beta:

    dk    = own q + S^T q + (N + N^T) k - beta 2^g dx h^T + 2^(g_last - g) v_new dh^T
    dbeta = (the pairs' part) - 2^g k . (dx h^T)

with h the state before the chunk, dh the gradient of the one after it, and S, N and own from
backward_pairs.py. A program owns BK columns of one chunk of one key head and adds up its value
heads, one after the other, in registers. What dbeta and the decays' gradient need are sums over all
of K: each block of columns writes its share.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from gdn_triton.config import dot_precision, key_bwd_config
from gdn_triton.kernels._device import chunk_span, decay_between
from gdn_triton.kernels._strides import head_arguments, row_arguments, row_strides
from gdn_triton.kernels.backward_pairs import Pairs
from gdn_triton.kernels.backward_state import States
from gdn_triton.varlen import Chunks


@triton.jit(do_not_specialize=["B", "T", "NT", "SLOTS"])
def key_bwd_kernel(
    q,
    k,
    v_new,
    dx,
    h,
    dh,
    S,
    N,
    scalars,
    g_cumsum,
    beta,
    dk,
    shares,
    across,
    chunk_rows,
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
    dtype: tl.constexpr = v_new.dtype.element_ty
    o_t = tl.arange(0, BT)
    o_k = (i_k * BK).to(tl.int32) + tl.arange(0, BK)
    in_k = o_k < K
    # Bases are 64-bit scalars; offsets inside a chunk fit 32 bits (ops/chunk_fwd.py sees to it).
    base = (i_b * T + row) * HV + i_h * G
    first = ((i_b * T + row) * H + i_h) * K
    o_o = o_t[:, None] * H * K + o_k[None, :]
    # Scalars are [4, B, HV, T], shares [K_BLOCKS, 3, B, HV, T].
    plane = tl.cast(B, tl.int64) * HV * T
    o_s = (i_b * HV + i_h * G) * T + row
    if n_rows <= 0:
        # Tokens of no sequence have no gradient.
        outside = o_t < -n_rows
        nothing = tl.zeros([BT, BK], dtype=tl.float32)
        mask = outside[:, None] & in_k[None, :]
        tl.store(dk + first + o_o, nothing.to(dk.dtype.element_ty), mask=mask)
        return
    valid = o_t < n_rows
    in_keys = valid[:, None] & (o_k < K_ROW)[None, :]
    p_q = q + i_b * stride_qb + row * stride_qt + i_h * stride_qh
    p_k = k + i_b * stride_kb + row * stride_kt + i_h * stride_kh
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    for i_g in range(0, G):
        head = base + i_g
        p_v_new, p_dx = v_new + head * V, dx + head * V
        state = (i_c * HV + i_h * G + i_g) * (K * V)
        p_h, p_dh = h + state, dh + state
        b_dxh = tl.zeros([BT, BK], dtype=tl.float32)
        b_vdh = tl.zeros([BT, BK], dtype=tl.float32)
        b_across = tl.zeros([BK], dtype=tl.float32)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            mask = valid[:, None] & (o_v < V)[None, :]
            o_value = o_t[:, None] * HV * V + o_v[None, :]
            in_state = in_k[:, None] & (o_v < V)[None, :]
            o_state = o_k[:, None] * V + o_v[None, :]
            b_dx = tl.load(p_dx + o_value, mask=mask, other=0)
            b_v_new = tl.load(p_v_new + o_value, mask=mask, other=0)
            b_h = tl.load(p_h + o_state, mask=in_state, other=0)
            b_dh = tl.load(p_dh + o_state, mask=in_state, other=0)
            b_dxh = tl.dot(b_dx, tl.trans(b_h), b_dxh, input_precision=PRECISION)
            b_vdh = tl.dot(b_v_new, tl.trans(b_dh), b_vdh, input_precision=PRECISION)
            b_across += tl.sum(b_dh.to(tl.float32) * b_h.to(tl.float32), 1)

        i_hv = i_h * G + i_g
        p_g = g_cumsum + i_b * stride_gb + row * stride_gt + i_hv * stride_gh
        p_beta = beta + i_b * stride_betab + row * stride_betat + i_hv * stride_betah
        b_g = tl.load(p_g + o_t * stride_gt, mask=valid, other=0)
        g_last = tl.load(p_g + (n_rows - 1) * stride_gt)
        b_beta = tl.load(p_beta + o_t * stride_betat, mask=valid, other=0).to(tl.float32)
        p_s = scalars + o_s + tl.cast(i_g, tl.int64) * T + o_t
        own = tl.load(p_s, mask=valid, other=0)
        # Loaded for each head anew: held from head to head, they would take the registers that
        # keep a second program on the multiprocessor.
        o_q, o_key = (
            o_t[:, None] * stride_qt + o_k[None, :],
            o_t[:, None] * stride_kt + o_k[None, :],
        )
        b_q = tl.load(p_q + o_q, mask=in_keys, other=0).to(dtype)
        b_k = tl.load(p_k + o_key, mask=in_keys, other=0).to(dtype)
        b_dxh *= tl.exp2(b_g)[:, None]
        b_vdh *= decay_between(g_last, b_g, valid)[:, None]
        b_read = tl.sum(b_dxh * b_k.to(tl.float32), 1)
        b_written = tl.sum(b_vdh * b_k.to(tl.float32), 1)
        b_dk += own[:, None] * b_q.to(tl.float32) - b_dxh * b_beta[:, None] + b_vdh

        p_pair = head * BT + (o_t[:, None] * HV * BT + o_t[None, :])
        b_S = tl.load(S + p_pair, mask=valid[:, None], other=0)
        b_N = tl.load(N + p_pair, mask=valid[:, None], other=0)
        b_dk = tl.dot(tl.trans(b_S), b_q, b_dk, input_precision=PRECISION)
        b_dk = tl.dot(b_N, b_k, b_dk, input_precision=PRECISION)
        b_dk = tl.dot(tl.trans(b_N), b_k, b_dk, input_precision=PRECISION)

        p_share = shares + i_k * 3 * plane + o_s + tl.cast(i_g, tl.int64) * T + o_t
        tl.store(p_share, b_read, mask=valid)
        tl.store(p_share + plane, b_beta * b_read, mask=valid)
        tl.store(p_share + 2 * plane, b_written, mask=valid)
        total = tl.sum(b_across, 0) * tl.exp2(g_last)
        tl.store(across + (i_k * SLOTS + i_c) * HV + i_hv, total)
    mask = valid[:, None] & in_k[None, :]
    tl.store(dk + first + o_o, b_dk.to(dk.dtype.element_ty), mask=mask)


class KeyGradients(NamedTuple):
    """dk: [B, T, H, K]. The rest is fp32, to be added up over the blocks of K; nothing for tokens
    of no sequence. shares: [blocks, 3, B, HV, T]: a token's 2^g k . (dx h^T), beta times that, and
    2^(g_last - g) k . (v_new dh^T). across: [blocks, slots, HV], 2^g_last (h . dh) of a chunk."""

    dk: torch.Tensor
    shares: torch.Tensor
    across: torch.Tensor


def key_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    states: States,
    pairs: Pairs,
    g_cumsum: torch.Tensor,
    beta: torch.Tensor,
    chunks: Chunks,
    dtype: torch.dtype,
    *,
    K: int,
) -> KeyGradients:
    """dk in ``dtype``. q, k: [B, T, H, K_row], zero beyond the keys' own width K, last stride 1;
    g_cumsum, beta: [B, T, HV]."""
    B, T, H, K_row = k.shape
    HV, V = states.dx.shape[2:]
    device = k.device
    config = key_bwd_config(K, V, states.h.dtype)
    blocks = triton.cdiv(K, config.BK)
    dk = torch.empty(B, T, H, K, dtype=dtype, device=device)
    shares = torch.empty(blocks, 3, B, HV, T, dtype=torch.float32, device=device)
    across = torch.empty(blocks, chunks.slots, HV, dtype=torch.float32, device=device)
    grid = blocks * chunks.slots * H
    if grid == 0:
        return KeyGradients(dk, shares, across)
    key_bwd_kernel[(grid,)](
        q=q,
        k=k,
        v_new=states.v_new,
        dx=states.dx,
        h=states.h,
        dh=states.dh,
        S=pairs.S,
        N=pairs.N,
        scalars=pairs.scalars,
        g_cumsum=g_cumsum,
        beta=beta,
        dk=dk,
        shares=shares,
        across=across,
        chunk_rows=chunks.chunk_rows,
        B=B,
        T=T,
        NT=chunks.NT,
        SLOTS=chunks.slots,
        H=H,
        HV=HV,
        **row_arguments("q", row_strides(q)),
        **row_arguments("k", row_strides(k)),
        **head_arguments("g", g_cumsum.stride()),
        **head_arguments("beta", beta.stride()),
        K_ROW=K_row,
        K=K,
        V=V,
        BT=chunks.chunk_size,
        BK=config.BK,
        BV=config.BV,
        PRECISION=dot_precision(states.h.dtype),
        IS_VARLEN=chunks.chunk_rows is not None,
        **config.options,
    )
    return KeyGradients(dk, shares, across)
