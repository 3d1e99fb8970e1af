"""L2 norm of each query and key: x / sqrt(sum x^2 + eps), in fp32, rounded to the input's dtype.

q and k go through one launch: program (i, 0) owns BR rows of q, program (i, 1) the same rows of k.
A row is one head of one token.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from gdn_triton._triton.activations import norm_factors, normalized
from gdn_triton._triton.launch import Launch
from gdn_triton._triton.strides import in_elements, row_arguments, row_strides
from gdn_triton.constants import L2NORM_EPS

# Elements of a tile: 16 for each thread of 4 warps keep enough loads in flight.
TILE_ELEMENTS = 2048


@triton.jit
def row_place(i, T, H):
    """Returns the place of row i of [B, T, H] rows: (batch entry, token, head)."""
    i_t = i // H
    i_b = i_t // T
    i_t = i_t - i_b * T
    i_h = i % H
    return i_b, i_t, i_h


@triton.jit(do_not_specialize=["n", "T"])
def l2norm_kernel(
    q,
    k,
    q_out,
    k_out,
    factors,
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
        tl.store(q_out + o_out, normalized(b_q, EPS), mask=mask)
        if factors is not None:
            tl.store(factors + i, norm_factors(b_q, EPS), mask=i < n)
    else:
        p_k = k + (i_b * stride_kb + i_t * stride_kt + i_h * stride_kh)[:, None] + o_k[None, :]
        b_k = tl.load(p_k, mask=mask, other=0)
        tl.store(k_out + o_out, normalized(b_k, EPS), mask=mask)
        if factors is not None:
            tl.store(factors + n.to(tl.int64) + i, norm_factors(b_k, EPS), mask=i < n)


@functools.lru_cache(maxsize=256, typed=True)
def rows_launch(
    kernel: Any, q_strides: tuple[int, ...], k_strides: tuple[int, ...], H: int, K: int
) -> Launch:
    BK = triton.next_power_of_2(K)
    return Launch(
        kernel,
        H=H,
        **row_arguments("q", q_strides),
        **row_arguments("k", k_strides),
        EPS=L2NORM_EPS,
        K=K,
        BK=BK,
        BR=rows_of_tile(BK),
    )


def rows_of_tile(BK: int) -> int:
    return max(1, TILE_ELEMENTS // BK)


def launch_rows(
    kernel: Any, q: torch.Tensor, k: torch.Tensor, **others: torch.Tensor | None
) -> None:
    """others: the kernel's tensors after q and k, in its order."""
    B, T, H, K = q.shape
    n = B * T * H
    if n == 0:
        return
    launch = rows_launch(kernel, row_strides(q), row_strides(k), H, K)
    grid = -(-n // rows_of_tile(1 << (K - 1).bit_length()))
    launch((grid, 2, 1), q=q, k=k, **others, n=n, T=T)


def l2norm_fwd(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalises q and k [B, T, H, K] over K (last stride 1). Returns both contiguous in their
    dtypes."""
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    launch_rows(l2norm_kernel, q, k, q_out=q_out, k_out=k_out, factors=None)
    return q_out, k_out


def l2norm_with_factors(
    q: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Also returns what the rows of q and those of k were multiplied by: [2, B, T, H], fp32."""
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    factors = torch.empty(2, *q.shape[:3], dtype=torch.float32, device=q.device)
    launch_rows(l2norm_kernel, q, k, q_out=q_out, k_out=k_out, factors=factors)
    return q_out, k_out, factors
