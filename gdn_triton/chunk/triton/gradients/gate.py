"""The last step for the decays and write strengths: it adds the shares of the blocks of K,

    dg_t = sum_(i >= t) ahead_i + sum_(i < t) behind_i + across       in each chunk

and, with the activations in the kernel, z = g_raw + dt_bias,

    dg_raw = -exp(A_log) sigmoid(z) dg        dbeta_raw = beta (1 - sigmoid(beta_raw)) dbeta
    dA_log = sum of g dg                      ddt_bias  = sum of dg_raw

A decay below the floor of g_cumsum is exactly 0 and has no gradient. The sums over all tokens have
two stages of a fixed order: the tokens of a chunk, then the chunks.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from gdn_triton._triton.activations import log_decay
from gdn_triton._triton.strides import head_arguments, head_strides
from gdn_triton.chunk.triton.shared.chunks import ChunkTable
from gdn_triton.chunk.triton.shared.places import chunk_span, store_zeros
from gdn_triton.constants import LOG2_DECAY_FLOOR, RCP_LN2, SOFTPLUS_THRESHOLD

# The chunks whose sums a program of the second stage adds at a time, and the number of its heads.
SUM_BLOCK = 64
SUM_WIDTH = 8


@triton.jit(do_not_specialize=["B", "T", "NT", "SLOTS"])
def gate_bwd_kernel(
    pair_shares,
    shares,
    across,
    beta_used,
    g,
    beta,
    A_log,
    dt_bias,
    dg,
    dbeta,
    sums,
    chunk_rows,
    B,
    T,
    NT,
    SLOTS,
    HV,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_betab,
    stride_betat,
    stride_betah,
    stride_usedb,
    stride_usedt,
    stride_usedh,
    K_BLOCKS: tl.constexpr,
    RCP_LN2: tl.constexpr,
    FLOOR: tl.constexpr,
    THRESHOLD: tl.constexpr,
    BETA_FACTOR: tl.constexpr,
    BT: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    USE_SIGMOID: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_hv = pid // HV, pid % HV
    i_b, row, n_rows = chunk_span(i_c, chunk_rows, T, NT, BT, IS_VARLEN)
    o_t = tl.arange(0, BT)
    o_sums = i_c * 2 * HV + i_hv
    o_out = (i_b * T + row + o_t) * HV + i_hv
    if n_rows <= 0:
        outside = o_t < -n_rows
        store_zeros(dg + o_out, outside)
        store_zeros(dbeta + o_out, outside)
        if HAS_GATE:
            tl.store(sums + o_sums, 0.0)
            tl.store(sums + o_sums + HV, 0.0)
        return
    valid = o_t < n_rows
    plane = tl.cast(B, tl.int64) * HV * T
    o_s = (i_b * HV + i_hv) * T + row + o_t
    b_dbeta = tl.load(pair_shares + o_s, mask=valid, other=0)
    b_ahead = tl.load(pair_shares + plane + o_s, mask=valid, other=0)
    b_ahead += tl.load(pair_shares + 2 * plane + o_s, mask=valid, other=0)
    b_read = tl.zeros([BT], dtype=tl.float32)
    b_behind = tl.zeros([BT], dtype=tl.float32)
    total = 0.0
    for i in tl.static_range(K_BLOCKS):
        p_share = shares + 3 * i * plane + o_s
        b_ahead += tl.load(p_share, mask=valid, other=0)
        b_read += tl.load(p_share + plane, mask=valid, other=0)
        b_behind += tl.load(p_share + 2 * plane, mask=valid, other=0)
        total += tl.load(across + (tl.cast(SLOTS, tl.int64) * i + i_c) * HV + i_hv)
    p_used = beta_used + i_b * stride_usedb + (row + o_t) * stride_usedt + i_hv * stride_usedh
    b_ahead -= b_read * tl.load(p_used, mask=valid, other=0).to(tl.float32)
    b_dbeta -= b_read
    from_here = o_t[:, None] >= o_t[None, :]
    b_dg = tl.sum(tl.where(from_here, b_ahead[:, None], b_behind[:, None]), 0) + total

    p_g = g + i_b * stride_gb + (row + o_t) * stride_gt + i_hv * stride_gh
    b_g = tl.load(p_g, mask=valid, other=0).to(tl.float32)
    if HAS_GATE:
        b_A = tl.load(A_log + i_hv).to(tl.float32)
        rate = tl.exp(b_A)
        if HAS_DT_BIAS:
            b_g += tl.load(dt_bias + i_hv).to(tl.float32)
        is_exp = b_g < -2 * THRESHOLD
        b_slope = -rate * tl.where(b_g > THRESHOLD, 1.0, 1 / (1 + tl.exp(-b_g)))
        b_g = log_decay(b_g, b_A, rate, THRESHOLD)
        # Where softplus is an exponential, the decay is its own derivative.
        b_slope = tl.where(is_exp, b_g, b_slope)
        # A NaN fails both comparisons and therefore stays a NaN.
        closed = (b_g * RCP_LN2 < FLOOR) | (o_t >= n_rows)
        tl.store(sums + o_sums, tl.sum(tl.where(closed, 0.0, b_dg * b_g), 0))
        b_dg = tl.where(closed, 0.0, b_slope * b_dg)
        tl.store(sums + o_sums + HV, tl.sum(b_dg, 0))
    else:
        b_dg = tl.where(b_g * RCP_LN2 < FLOOR, 0.0, b_dg)
    tl.store(dg + o_out, b_dg.to(dg.dtype.element_ty), mask=valid)
    if USE_SIGMOID:
        p_beta = beta + i_b * stride_betab + (row + o_t) * stride_betat + i_hv * stride_betah
        b_x = tl.load(p_beta, mask=valid, other=0).to(tl.float32)
        b_dbeta *= BETA_FACTOR / (1 + tl.exp(-b_x)) / (1 + tl.exp(b_x))
    tl.store(dbeta + o_out, b_dbeta.to(dbeta.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["n"])
def gate_sum_kernel(sums, out, n, WIDTH, BLOCK: tl.constexpr, BW: tl.constexpr):
    """out[j] = sum of sums[i, j] over i < n, in a fixed order."""
    o_n = tl.arange(0, BLOCK)
    o_w = tl.program_id(0) * BW + tl.arange(0, BW)
    b_sum = tl.zeros([BLOCK, BW], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        rows = (start + o_n).to(tl.int64)[:, None]
        mask = (rows < n) & (o_w < WIDTH)[None, :]
        b_sum += tl.load(sums + rows * WIDTH + o_w[None, :], mask=mask, other=0)
    tl.store(out + o_w, tl.sum(b_sum, 0), mask=o_w < WIDTH)


class GateGradients(NamedTuple):
    """dg, dbeta: [B, T, HV], contiguous, in the dtypes of g and beta. dA_log, ddt_bias: [HV], fp32;
    None without the gate's activation."""

    dg: torch.Tensor
    dbeta: torch.Tensor
    dA_log: torch.Tensor | None
    ddt_bias: torch.Tensor | None


def gate_bwd(
    pair_shares: torch.Tensor,
    shares: torch.Tensor,
    across: torch.Tensor,
    beta_used: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunks: ChunkTable,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    *,
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
) -> GateGradients:
    """pair_shares: from ``pairs_bwd``; shares and across: from ``query_key_bwd``. beta_used: [B, T,
    HV], after its sigmoid; g, beta: the caller's own."""
    B, T, HV = g.shape
    dg = torch.empty(B, T, HV, dtype=g.dtype, device=g.device)
    dbeta = torch.empty(B, T, HV, dtype=beta.dtype, device=g.device)
    sums = total = None
    if A_log is not None:
        sums = torch.empty(chunks.slots, 2 * HV, dtype=torch.float32, device=g.device)
        total = torch.empty(2 * HV, dtype=torch.float32, device=g.device)
    grid = chunks.slots * HV
    if grid != 0:
        gate_bwd_kernel[(grid,)](
            pair_shares=pair_shares,
            shares=shares,
            across=across,
            beta_used=beta_used,
            g=g,
            beta=beta,
            A_log=A_log,
            dt_bias=dt_bias,
            dg=dg,
            dbeta=dbeta,
            sums=sums,
            chunk_rows=chunks.chunk_rows,
            B=B,
            T=T,
            NT=chunks.NT,
            SLOTS=chunks.slots,
            HV=HV,
            **head_arguments("g", head_strides(g)),
            **head_arguments("beta", head_strides(beta)),
            **head_arguments("used", head_strides(beta_used)),
            K_BLOCKS=across.shape[0],
            RCP_LN2=RCP_LN2,
            FLOOR=LOG2_DECAY_FLOOR[torch.float32],
            THRESHOLD=SOFTPLUS_THRESHOLD,
            BETA_FACTOR=2.0 if allow_neg_eigval else 1.0,
            BT=chunks.chunk_size,
            HAS_GATE=A_log is not None,
            HAS_DT_BIAS=dt_bias is not None,
            USE_SIGMOID=use_beta_sigmoid,
            IS_VARLEN=chunks.chunk_rows is not None,
            num_warps=2,
        )
    if total is None:
        return GateGradients(dg, dbeta, None, None)
    if HV > 0:
        gate_sum_kernel[(triton.cdiv(2 * HV, SUM_WIDTH),)](
            sums=sums,
            out=total,
            n=chunks.slots,
            WIDTH=2 * HV,
            BLOCK=SUM_BLOCK,
            BW=SUM_WIDTH,
        )
    return GateGradients(dg, dbeta, total[:HV], total[HV:])
