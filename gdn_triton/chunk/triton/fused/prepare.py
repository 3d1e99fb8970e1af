"""Computes the parts of a chunk that need no state, in one kernel, for the fused walk (walk.py):

    scalars  = g_cumsum, beta and scale (q_i . k_i) of each token
    q, k     -> copies, when the norm is in the kernel or their rows are not whole multiples of 16
    A_inv    = strict-lower((I + A)^-1),  A = strict-lower(beta_i (k_i . k_j) 2^(g_i - g_j))
    A_qk     = strict-lower(scale (q_i . k_j) 2^(g_i - g_j))

A program owns one chunk of one value head. The first value head of each key head writes its q and
k. The diagonals belong to a token's own part, which is often most of the result, and stay in fp32:
the diagonal of A_inv is 1, and that of A_qk is among the scalars.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from gdn_triton._triton.activations import log_decay, normalized, sigmoid
from gdn_triton._triton.launch import Launch
from gdn_triton._triton.strides import (
    head_arguments,
    head_strides,
    in_elements,
    row_arguments,
    row_strides,
)
from gdn_triton._triton.tiles import dot_precision, prepare_config
from gdn_triton.chunk.triton.shared.chunks import ChunkTable
from gdn_triton.chunk.triton.shared.inverse import fits_half, invert_unit_lower
from gdn_triton.chunk.triton.shared.places import chunk_span, decay_cumsum, decay_of_pairs, diagonal
from gdn_triton.constants import (
    L2NORM_EPS,
    LINE,
    LOG2_DECAY_FLOOR,
    RCP_LN2,
    SOFTPLUS_THRESHOLD,
)


@triton.jit(do_not_specialize=["scale", "B", "T", "NT"])
def prepare_fwd_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    q_out,
    k_out,
    scalars,
    A_inv,
    A_qk,
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
    stride_betab,
    stride_betat,
    stride_betah,
    ALIGN_Q: tl.constexpr,
    ALIGN_K: tl.constexpr,
    RCP_LN2: tl.constexpr,
    FLOOR: tl.constexpr,
    THRESHOLD: tl.constexpr,
    EPS: tl.constexpr,
    BETA_FACTOR: tl.constexpr,
    K: tl.constexpr,
    K_OUT: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    USE_SIGMOID: tl.constexpr,
    USE_L2NORM: tl.constexpr,
    COPY_QK: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    stride_kb, stride_kt, stride_kh = in_elements(stride_kb, stride_kt, stride_kh, ALIGN_K)
    stride_qb, stride_qt, stride_qh = in_elements(stride_qb, stride_qt, stride_qh, ALIGN_Q)
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_hv = pid // HV, pid % HV
    G = HV // H
    i_h = i_hv // G
    i_b, row, n_rows = chunk_span(i_c, chunk_rows, T, NT, BT, IS_VARLEN)
    if n_rows <= 0:
        return
    dtype: tl.constexpr = A_inv.dtype.element_ty
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)[None, :]
    valid = o_t < n_rows
    # Bases are 64-bit scalars; offsets inside of a chunk fit 32 bits (forward.py ensures it).
    base = (i_b * T + row) * HV + i_hv
    p_g = g + i_b * stride_gb + row * stride_gt + i_hv * stride_gh
    b_g = tl.load(p_g + o_t.to(tl.int64) * stride_gt, mask=valid, other=0).to(tl.float32)
    if HAS_GATE:
        if HAS_DT_BIAS:
            b_g += tl.load(dt_bias + i_hv).to(tl.float32)
        b_A = tl.load(A_log + i_hv).to(tl.float32)
        b_g = log_decay(b_g, b_A, tl.exp(b_A), THRESHOLD)
    b_g *= RCP_LN2
    b_g = tl.where(b_g < FLOOR, FLOOR, b_g)
    b_g = decay_cumsum(tl.where(valid, b_g, 0.0))
    p_beta = beta + i_b * stride_betab + row * stride_betat + i_hv * stride_betah
    b_beta = tl.load(p_beta + o_t.to(tl.int64) * stride_betat, mask=valid, other=0).to(tl.float32)
    if USE_SIGMOID:
        b_beta = tl.where(valid, sigmoid(b_beta, BETA_FACTOR), 0.0)

    p_k = k + i_b * stride_kb + row * stride_kt + i_h * stride_kh
    p_q = q + i_b * stride_qb + row * stride_qt + i_h * stride_qh
    mask = valid[:, None] & (o_k < K)
    b_k = tl.load(p_k + (o_t[:, None] * stride_kt + o_k), mask=mask, other=0)
    b_q = tl.load(p_q + (o_t[:, None] * stride_qt + o_k), mask=mask, other=0)
    if USE_L2NORM:
        b_k = normalized(b_k, EPS)
        b_q = normalized(b_q, EPS)
    if COPY_QK:
        if i_hv % G == 0:
            o_out = ((i_b * T + row) * H + i_h) * K_OUT
            o_row = o_t[:, None] * H * K_OUT + o_k
            mask_out = valid[:, None] & (o_k < K_OUT)
            tl.store(k_out + o_out + o_row, b_k, mask=mask_out)
            tl.store(q_out + o_out + o_row, b_q, mask=mask_out)
    b_k = b_k.to(dtype)
    b_q = b_q.to(dtype)
    below = o_t[:, None] > o_t[None, :]
    decay = decay_of_pairs(b_g, below)
    p_A = base * BT + (o_t[:, None] * HV * BT + o_t[None, :])
    # 0 * inf or 0 * NaN of a product above the diagonal must not survive: select, not multiply.
    b_P = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
    b_qk = diagonal(b_P, o_t)
    b_P = tl.where(below, b_P * decay, 0.0)
    tl.store(A_qk + p_A, b_P.to(dtype), mask=valid[:, None])
    p_s = scalars + (i_b * HV + i_hv) * T + row + o_t
    plane = tl.cast(B, tl.int64) * HV * T
    tl.store(p_s, b_g, mask=valid)
    tl.store(p_s + plane, b_beta, mask=valid)
    tl.store(p_s + 2 * plane, b_qk, mask=valid)
    b_A = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    IS_16_BIT: tl.constexpr = dtype.primitive_bitwidth == 16
    half = IS_16_BIT and fits_half(b_A, b_beta, BT)
    b_A = tl.where(below, b_A * (decay * b_beta[:, None]), 0.0)
    # Each branch stores its own tile: a tile that left the branches would need one layout in both.
    if half:
        b_X = invert_unit_lower(b_A, BT, PRECISION, True)
        b_X = tl.where(below, b_X, 0.0)
        tl.store(A_inv + p_A, b_X.to(dtype), mask=valid[:, None])
    else:
        b_X = invert_unit_lower(b_A, BT, PRECISION, False)
        b_X = tl.where(below, b_X, 0.0)
        tl.store(A_inv + p_A, b_X.to(dtype), mask=valid[:, None])


class ChunkFactors(NamedTuple):
    """q, k: [B, T, H, K] as given, or copies with K rounded up to a multiple of 16, zero beyond.
    scalars: fp32 [3, B, HV, T]. A_inv, A_qk: [B, T, HV, chunk_size]."""

    q: torch.Tensor
    k: torch.Tensor
    scalars: torch.Tensor
    A_inv: torch.Tensor
    A_qk: torch.Tensor


def whole_lines(x: torch.Tensor) -> bool:
    """Whether every row of x [B, T, heads, D] starts and ends on a multiple of LINE elements."""
    return (x.shape[3] | x.stride(2) | x.stride(1)) % LINE == 0


@functools.lru_cache(maxsize=256, typed=True)
def prepare_launch(
    q_strides: tuple[int, ...],
    k_strides: tuple[int, ...],
    g_strides: tuple[int, ...],
    beta_strides: tuple[int, ...],
    H: int,
    HV: int,
    K: int,
    K_out: int,
    BT: int,
    dtype: torch.dtype,
    has_gate: bool,
    has_dt_bias: bool,
    use_sigmoid: bool,
    beta_factor: float,
    use_l2norm: bool,
    copy: bool,
    is_varlen: bool,
) -> Launch:
    """The kernel with all arguments that do not depend on lengths. Strides: ``row_strides`` of q
    and k, ``head_strides`` of g and beta."""
    config = prepare_config(K, dtype)
    return Launch(
        prepare_fwd_kernel,
        H=H,
        HV=HV,
        **row_arguments("q", q_strides),
        **row_arguments("k", k_strides),
        **head_arguments("g", g_strides),
        **head_arguments("beta", beta_strides),
        RCP_LN2=RCP_LN2,
        FLOOR=LOG2_DECAY_FLOOR[torch.float32],
        THRESHOLD=SOFTPLUS_THRESHOLD,
        EPS=L2NORM_EPS,
        BETA_FACTOR=beta_factor,
        K=K,
        K_OUT=K_out,
        BT=BT,
        BK=config.BK,
        PRECISION=dot_precision(dtype),
        HAS_GATE=has_gate,
        HAS_DT_BIAS=has_dt_bias,
        USE_SIGMOID=use_sigmoid,
        USE_L2NORM=use_l2norm,
        COPY_QK=copy,
        IS_VARLEN=is_varlen,
        **config.options,
    )


def prepare_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunks: ChunkTable,
    scale: float,
    dtype: torch.dtype,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_qk_l2norm: bool = False,
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
) -> ChunkFactors:
    """q, k: [B, T, H, K], last stride 1; g, beta: [B, T, HV], natural-log decay and write strength,
    or the inputs of their activations. ``dtype``: the dtype of products."""
    B, T, H, K = k.shape
    HV = g.shape[2]
    BT = chunks.chunk_size
    device = k.device
    scalars = torch.empty(3, B, HV, T, dtype=torch.float32, device=device)
    A_inv = torch.empty(B, T, HV, BT, dtype=dtype, device=device)
    A_qk = torch.empty_like(A_inv)
    copy = use_qk_l2norm or not (whole_lines(q) and whole_lines(k))
    K_out = -(-K // LINE) * LINE if copy else K
    q_out = q.new_empty(B, T, H, K_out) if copy else q
    k_out = k.new_empty(B, T, H, K_out) if copy else k
    prepared = ChunkFactors(q_out, k_out, scalars, A_inv, A_qk)
    grid = chunks.slots * HV
    if grid == 0:
        return prepared
    launch = prepare_launch(
        row_strides(q),
        row_strides(k),
        head_strides(g),
        head_strides(beta),
        H,
        HV,
        K,
        K_out,
        BT,
        dtype,
        A_log is not None,
        dt_bias is not None,
        use_sigmoid=use_beta_sigmoid,
        beta_factor=2.0 if allow_neg_eigval else 1.0,
        use_l2norm=use_qk_l2norm,
        copy=copy,
        is_varlen=chunks.chunk_rows is not None,
    )
    launch(
        (grid, 1, 1),
        q=q,
        k=k,
        g=g,
        beta=beta,
        A_log=A_log,
        dt_bias=dt_bias,
        q_out=q_out,
        k_out=k_out,
        scalars=scalars,
        A_inv=A_inv,
        A_qk=A_qk,
        chunk_rows=chunks.chunk_rows,
        scale=scale,
        B=B,
        T=T,
        NT=chunks.NT,
    )
    return prepared
