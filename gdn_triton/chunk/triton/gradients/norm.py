"""Gradient of the L2 norm of each query and key: with r = (sum x^2 + eps)^(-1/2) and y = r x,

    dx = r (dy - y (y . dy))

in fp32. Program (i, 0) owns BR rows of q, program (i, 1) the same rows of k; a row is one head of
one token.
"""

import torch
import triton
import triton.language as tl

from gdn_triton._triton.strides import in_elements
from gdn_triton.chunk.triton.steps.l2norm import launch_rows, row_place


@triton.jit
def norm_gradient(b_x, b_dy, EPS: tl.constexpr):
    x, dy = b_x.to(tl.float32), b_dy.to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, 1) + EPS)[:, None]
    y = x * r
    # A row with a gradient of 0 gets 0, whatever it holds: tokens of no sequence may be NaN.
    none = tl.max((dy != 0).to(tl.int32), 1)[:, None] == 0
    return tl.where(none, 0.0, r * (dy - y * tl.sum(y * dy, 1)[:, None]))


@triton.jit(do_not_specialize=["n", "T"])
def l2norm_bwd_kernel(
    q,
    k,
    dq_in,
    dk_in,
    dq,
    dk,
    n,
    T,
    H,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    ALIGN_Q: tl.constexpr,
    ALIGN_K: tl.constexpr,
    EPS: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
):
    stride_kb, stride_kt, stride_kh = in_elements(stride_kb, stride_kt, stride_kh, ALIGN_K)
    stride_qb, stride_qt, stride_qh = in_elements(stride_qb, stride_qt, stride_qh, ALIGN_Q)
    i = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_k = tl.arange(0, BK)
    mask = (i[:, None] < n) & (o_k[None, :] < K)
    i_b, i_t, i_h = row_place(i, T, H)
    o_out = i[:, None] * K + o_k[None, :]
    if tl.program_id(1) == 0:
        p_q = q + (i_b * stride_qb + i_t * stride_qt + i_h * stride_qh)[:, None] + o_k[None, :]
        b_q = tl.load(p_q, mask=mask, other=0)
        b_dq = norm_gradient(b_q, tl.load(dq_in + o_out, mask=mask, other=0), EPS)
        tl.store(dq + o_out, b_dq.to(dq.dtype.element_ty), mask=mask)
    else:
        p_k = k + (i_b * stride_kb + i_t * stride_kt + i_h * stride_kh)[:, None] + o_k[None, :]
        b_k = tl.load(p_k, mask=mask, other=0)
        b_dk = norm_gradient(b_k, tl.load(dk_in + o_out, mask=mask, other=0), EPS)
        tl.store(dk + o_out, b_dk.to(dk.dtype.element_ty), mask=mask)


def l2norm_bwd(
    q: torch.Tensor, k: torch.Tensor, dq_in: torch.Tensor, dk_in: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the caller's q and k [B, T, H, K] (last stride 1), in their dtypes, from those
    of the normalised ones, contiguous."""
    dq, dk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    launch_rows(l2norm_bwd_kernel, q, k, dq_in=dq_in, dk_in=dk_in, dq=dq, dk=dk)
    return dq, dk
