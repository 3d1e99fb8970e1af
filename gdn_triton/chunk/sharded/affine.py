"""The effect of a stretch of a sequence on the state, found without the state, for sequences that
are split over ranks: an affine map S_out = M S_in + b, and its gradient dS_in = M^T dS_out + c.

b is the walk from a state of zeros, and M is the same walk from the identity with values of zero.
Both are columns of one recurrence. c is the walk back from a gradient of zero. If the state at the
stretch's start is known, the walk starts from that state, b is the state at the end, and no M is
needed; the same holds for c. The host makes a table of the stretches (`Stretch`), each of which may
have any number of tokens.
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
from gdn_triton._triton.tiles import FUSED, affine_bwd_config, affine_config, dot_precision, gpu_of
from gdn_triton.chunk.triton.shared.update import (
    solve_values,
    solve_values_bwd,
    write_values,
    write_values_bwd,
)


class Stretch(NamedTuple):
    """row, n_rows: the tokens of the stretch in the one row of a packed call. shift: the index of
    its M among the maps that are needed, or -1. known: the index of the state that it starts from
    (or of the gradient of the state that it ends with) among the given ones, or -1 for zeros."""

    row: int
    n_rows: int
    shift: int
    known: int


@triton.jit
def affine_fwd_kernel(
    k,
    v,
    A_inv,
    g_cumsum,
    beta,
    starts,
    offsets,
    shifts,
    stretches,
    H,
    HV,
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
    ALIGN_K: tl.constexpr,
    ALIGN_V: tl.constexpr,
    K: tl.constexpr,
    K_ROW: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
    PRECISION: tl.constexpr,
    A_IS_STRICT: tl.constexpr,
    HAS_SHIFTS: tl.constexpr,
):
    """A program owns BC columns of b, or of M, of one stretch and value head."""
    stride_kb, stride_kt, stride_kh = in_elements(stride_kb, stride_kt, stride_kh, ALIGN_K)
    stride_vb, stride_vt, stride_vh = in_elements(stride_vb, stride_vt, stride_vh, ALIGN_V)
    pid = tl.program_id(0).to(tl.int64)
    V_BLOCKS: tl.constexpr = (V + BC - 1) // BC
    C_BLOCKS: tl.constexpr = V_BLOCKS + HAS_SHIFTS * ((K + BC - 1) // BC)
    i_c, i_jh = pid % C_BLOCKS, pid // C_BLOCKS
    i_j, i_hv = i_jh // HV, i_jh % HV
    i_h = i_hv // (HV // H)
    row = tl.load(stretches + i_j * 4).to(tl.int64)
    n_rows = tl.load(stretches + i_j * 4 + 1)
    i_shift = tl.load(stretches + i_j * 4 + 2).to(tl.int64)
    i_known = tl.load(stretches + i_j * 4 + 3).to(tl.int64)
    of_keys = i_c >= V_BLOCKS
    if HAS_SHIFTS:
        if of_keys & (i_shift < 0):
            return
    o_t = tl.arange(0, BT)[:, None]
    o_s = tl.arange(0, BT)[None, :]
    o_k = tl.arange(0, BK)
    o_c = tl.arange(0, BC)[None, :] + tl.where(of_keys, i_c - V_BLOCKS, i_c) * BC
    in_v = o_c < tl.where(of_keys, 0, V)
    dtype: tl.constexpr = A_inv.dtype.element_ty
    # Columns of the identity, or of the known state; else zeros.
    b_h = tl.where(o_k[:, None] == tl.where(of_keys, o_c, -1), 1.0, 0.0)
    in_known = (o_k[:, None] < tl.where(i_known >= 0, K, 0)) & in_v
    p_known = starts + (i_known * HV + i_hv) * (K * V) + (o_k[:, None] * V + o_c)
    b_h += tl.load(p_known, mask=in_known, other=0)

    base = row * HV + i_hv
    p_k = k + row * stride_kt + i_h * stride_kh
    p_v = v + row * stride_vt + i_hv * stride_vh
    p_g = g_cumsum + row * stride_gt + i_hv * stride_gh
    p_beta = beta + row * stride_betat + i_hv * stride_betah
    p_A = A_inv + base * BT
    for start in range(0, n_rows, BT):
        left = n_rows - start
        valid = o_t < left
        b_g = tl.load(p_g + o_t * stride_gt, mask=valid, other=0)
        g_last = tl.load(p_g + (tl.minimum(left, BT) - 1) * stride_gt)
        b_beta = tl.load(p_beta + o_t * stride_betat, mask=valid, other=0).to(tl.float32)
        in_keys = valid & (o_k[None, :] < K_ROW)
        b_k = tl.load(p_k + (o_t * stride_kt + o_k[None, :]), mask=in_keys, other=0).to(dtype)
        b_v = tl.load(p_v + (o_t * stride_vt + o_c), mask=valid & in_v, other=0).to(tl.float32)
        b_A = tl.load(p_A + (o_t * HV * BT + o_s), mask=valid, other=0)

        b_kh = tl.dot(b_k, b_h.to(dtype), input_precision=PRECISION)
        b_v = solve_values(b_kh, b_v, b_A, b_g, b_beta, PRECISION, A_IS_STRICT)
        b_h = write_values(b_h, b_k, b_v, b_g, g_last, valid, PRECISION)
        p_k += tl.cast(stride_kt, tl.int64) * BT
        p_v += tl.cast(stride_vt, tl.int64) * BT
        p_g += tl.cast(stride_gt, tl.int64) * BT
        p_beta += tl.cast(stride_betat, tl.int64) * BT
        p_A += tl.cast(HV, tl.int64) * BT * BT

    o_k = o_k[:, None]
    if of_keys:
        p_M = shifts + (i_shift * HV + i_hv) * (K * K) + (o_k * K + o_c)
        tl.store(p_M, b_h, mask=(o_k < K) & (o_c < K))
    else:
        p_b = offsets + i_jh * (K * V) + (o_k * V + o_c)
        tl.store(p_b, b_h, mask=(o_k < K) & (o_c < V))


@triton.jit(do_not_specialize=["scale"])
def affine_bwd_kernel(
    q,
    k,
    do,
    A_inv,
    A_qk,
    g_cumsum,
    own,
    beta,
    ends,
    offsets,
    stretches,
    scale,
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
    K: tl.constexpr,
    K_ROW: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    A_IS_STRICT: tl.constexpr,
):
    """A program owns BV columns of c of one stretch and value head."""
    stride_kb, stride_kt, stride_kh = in_elements(stride_kb, stride_kt, stride_kh, ALIGN_K)
    stride_qb, stride_qt, stride_qh = in_elements(stride_qb, stride_qt, stride_qh, ALIGN_Q)
    pid = tl.program_id(0).to(tl.int64)
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    i_v, i_jh = pid % V_BLOCKS, pid // V_BLOCKS
    i_j, i_hv = i_jh // HV, i_jh % HV
    i_h = i_hv // (HV // H)
    row = tl.load(stretches + i_j * 4).to(tl.int64)
    n_rows = tl.load(stretches + i_j * 4 + 1)
    i_known = tl.load(stretches + i_j * 4 + 3).to(tl.int64)
    dtype: tl.constexpr = A_inv.dtype.element_ty
    o_t = tl.arange(0, BT)[:, None]
    o_s = tl.arange(0, BT)[None, :]
    o_k = tl.arange(0, BK)
    o_v = (i_v * BV + tl.arange(0, BV))[None, :]
    in_v = o_v < V
    in_state = (o_k[:, None] < K) & in_v
    o_h = o_k[:, None] * V + o_v
    p_known = ends + (i_known * HV + i_hv) * (K * V) + o_h
    in_known = (o_k[:, None] < tl.where(i_known >= 0, K, 0)) & in_v
    b_dh = tl.load(p_known, mask=in_known, other=0)

    count = tl.cdiv(n_rows, BT)
    last = row + (count - 1).to(tl.int64) * BT
    base = last * HV + i_hv
    step = tl.cast(HV, tl.int64) * BT
    p_q = q + last * stride_qt + i_h * stride_qh
    p_k = k + last * stride_kt + i_h * stride_kh
    p_g = g_cumsum + last * stride_gt + i_hv * stride_gh
    p_beta = beta + last * stride_betat + i_hv * stride_betah
    p_own = own + last * stride_gt + i_hv * stride_gh
    p_A, p_P = A_inv + base * BT, A_qk + base * BT
    p_do = do + base * V
    for i_t in range(0, count):
        left = n_rows - (count - 1 - i_t) * BT
        valid = o_t < left
        in_values = valid & in_v
        in_keys = valid & (o_k[None, :] < K_ROW)
        b_g = tl.load(p_g + o_t * stride_gt, mask=valid, other=0)
        g_last = tl.load(p_g + (tl.minimum(left, BT) - 1) * stride_gt)
        b_beta = tl.load(p_beta + o_t * stride_betat, mask=valid, other=0).to(tl.float32)
        b_k = tl.load(p_k + (o_t * stride_kt + o_k[None, :]), mask=in_keys, other=0).to(dtype)
        b_q = tl.load(p_q + (o_t * stride_qt + o_k[None, :]), mask=in_keys, other=0).to(dtype)
        b_A = tl.load(p_A + (o_t * HV * BT + o_s), mask=valid, other=0)
        b_P = tl.load(p_P + (o_t * HV * BT + o_s), mask=valid, other=0)
        b_own = tl.load(p_own + o_t * stride_gt, mask=valid, other=0)
        b_do = tl.load(p_do + (o_t * HV * V + o_v), mask=in_values, other=0).to(dtype)

        b_kdh = tl.dot(b_k, b_dh.to(dtype), input_precision=PRECISION)
        b_dx = solve_values_bwd(
            b_kdh, b_do, b_P, b_A, b_own, b_g, g_last, valid, PRECISION, A_IS_STRICT
        )
        b_dh = write_values_bwd(b_dh, b_q, b_k, b_do, b_dx, b_g, g_last, b_beta, scale, PRECISION)
        p_q -= tl.cast(stride_qt, tl.int64) * BT
        p_k -= tl.cast(stride_kt, tl.int64) * BT
        p_g -= tl.cast(stride_gt, tl.int64) * BT
        p_beta -= tl.cast(stride_betat, tl.int64) * BT
        p_own -= tl.cast(stride_gt, tl.int64) * BT
        p_A -= step * BT
        p_P -= step * BT
        p_do -= step * V
    tl.store(offsets + i_jh * (K * V) + o_h, b_dh, mask=in_state)


def affine_fwd(
    k: torch.Tensor,
    v: torch.Tensor,
    A_inv: torch.Tensor,
    g_cumsum: torch.Tensor,
    beta: torch.Tensor,
    starts: torch.Tensor,
    table: torch.Tensor,
    n_shifts: int,
    *,
    K: int,
    A_is_strict: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """b [stretches, HV, K, V] and M [n_shifts, HV, K, K], fp32. k: [1, T, H, K_row], zero beyond K,
    v: [1, T, HV, V], last strides 1; A_inv: [1, T, HV, chunk_size], contiguous, without its
    diagonal if ``A_is_strict``; g_cumsum, beta: [1, T, HV]; starts: fp32 [_, HV, K, V], contiguous;
    table: int32 [stretches, 4], of `Stretch`. A stretch begins where a chunk does."""
    H, K_row = k.shape[2:]
    HV, V = v.shape[2:]
    dtype = A_inv.dtype
    offsets = torch.empty(len(table), HV, K, V, dtype=torch.float32, device=k.device)
    shifts = torch.empty(n_shifts, HV, K, K, dtype=torch.float32, device=k.device)
    config = affine_config(gpu_of(v.device), K, dtype)
    columns = triton.cdiv(V, config.BV)
    if n_shifts > 0:
        columns += triton.cdiv(K, config.BV)
    grid = len(table) * HV * columns
    if grid == 0:
        return offsets, shifts
    affine_fwd_kernel[(grid,)](
        k=k,
        v=v,
        A_inv=A_inv,
        g_cumsum=g_cumsum,
        beta=beta,
        starts=starts,
        offsets=offsets,
        shifts=shifts,
        stretches=table,
        H=H,
        HV=HV,
        **row_arguments("k", row_strides(k)),
        **row_arguments("v", row_strides(v)),
        **head_arguments("g", head_strides(g_cumsum)),
        **head_arguments("beta", head_strides(beta)),
        K=K,
        K_ROW=K_row,
        V=V,
        BT=A_inv.shape[3],
        BK=config.BK,
        BC=config.BV,
        PRECISION=dot_precision(dtype),
        A_IS_STRICT=A_is_strict,
        HAS_SHIFTS=n_shifts > 0,
        **config.options,
        **FUSED,
    )
    return offsets, shifts


def affine_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    do: torch.Tensor,
    A_inv: torch.Tensor,
    A_qk: torch.Tensor,
    g_cumsum: torch.Tensor,
    own: torch.Tensor,
    beta: torch.Tensor,
    ends: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    *,
    K: int,
    A_is_strict: bool,
) -> torch.Tensor:
    """c [stretches, HV, K, V], fp32. As ``affine_fwd``; do: [1, T, HV, V], A_qk: [1, T, HV,
    chunk_size] without its diagonal, contiguous; own: [1, T, HV], of the strides of g_cumsum; ends:
    fp32 [_, HV, K, V], contiguous."""
    assert own.stride() == g_cumsum.stride()
    H, K_row = k.shape[2:]
    HV, V = do.shape[2:]
    dtype = A_inv.dtype
    offsets = torch.empty(len(table), HV, K, V, dtype=torch.float32, device=k.device)
    config = affine_bwd_config(gpu_of(do.device), K, V, dtype, len(table) * HV)
    grid = len(table) * HV * triton.cdiv(V, config.BV)
    if grid == 0:
        return offsets
    affine_bwd_kernel[(grid,)](
        q=q,
        k=k,
        do=do,
        A_inv=A_inv,
        A_qk=A_qk,
        g_cumsum=g_cumsum,
        own=own,
        beta=beta,
        ends=ends,
        offsets=offsets,
        stretches=table,
        scale=scale,
        H=H,
        HV=HV,
        **row_arguments("q", row_strides(q)),
        **row_arguments("k", row_strides(k)),
        **head_arguments("g", head_strides(g_cumsum)),
        **head_arguments("beta", head_strides(beta)),
        K=K,
        K_ROW=K_row,
        V=V,
        BT=A_inv.shape[3],
        BK=config.BK,
        BV=config.BV,
        PRECISION=dot_precision(dtype),
        A_IS_STRICT=A_is_strict,
        **config.options,
        **FUSED,
    )
    return offsets
