"""The last step for the decays and write strengths: it adds the shares of the blocks of K,

    dg_t = sum_(i >= t) ahead_i + sum_(i < t) behind_i + across       in each chunk

and, with the activations in the kernel, z = g_raw + dt_bias,

    dg_raw = -exp(A_log) sigmoid(z) dg        dbeta_raw = beta (1 - sigmoid(beta_raw)) dbeta
    dA_log = sum of g dg                      ddt_bias  = sum of dg_raw

A decay below the floor of g_cumsum is exactly 0 and has no gradient. The sums over all tokens have
two stages of a fixed order: the tokens of a chunk, then the chunks.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from gdn_triton._triton.activations import log_decay
from gdn_triton._triton.launch import Launch
from gdn_triton._triton.strides import head_arguments, head_strides, named
from gdn_triton.chunk.triton.shared.chunks import ChunkTable
from gdn_triton.chunk.triton.shared.places import chunk_span, store_zeros
from gdn_triton.constants import LOG2_DECAY_FLOOR, RCP_LN2, SOFTPLUS_THRESHOLD

# The value heads of a program: their numbers of a token lie side by side in g, beta and their
# gradients, and fill the 32 bytes that memory moves.
HEADS = 8
# The chunks whose sums a program of the second stage adds at a time, and the number of its heads.
SUM_BLOCK = 64
SUM_WIDTH = 8
# The channels of v and dv that a program reads at a time. With all of them at once the kernel has
# 247 registers a thread instead of 92, in the chunks that read none too.
VALUE_BLOCK = 16
# Rows of dv with a smaller |beta| are dx instead of beta dx until gate_bwd has read them. dbeta of
# the other rows comes from v_new / beta. A row of T is proportional to beta, and the inverse has
# fp16 operands, which lose digits below 2^-14: with beta = 2^-18 dbeta has 5 times the error.
LEAST_BETA = 2.0**-12


class ChunkGradients(NamedTuple):
    """The gradients of the chunks. dq, dk: [B, T, H, K]; dv: [B, T, HV, V]. The other tensors are
    fp32 operands of ``gate_bwd``: shares and across as in ``QueryKeyGradients``; pair_shares: [3,
    B, HV, T] as in ``Pairs``, or [4, B, HV, T] in the order of hopper/gradients/kernel.py."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    pair_shares: torch.Tensor
    shares: torch.Tensor
    across: torch.Tensor


# The compiler chooses the register layout of the sums over a chunk by the alignment of these
# operands, and the layout fixes the order of the sums. The compiler must not know the alignment:
# the sequences of a padded call begin at aligned addresses if the number of tokens is a multiple of
# 16, and those of a packed call may begin anywhere.
OPERANDS = ("beta_used", "g", "beta")
STRIDES = tuple(f"stride_{name}{d}" for name in ("g", "beta", "used") for d in "bth")


@triton.jit(
    do_not_specialize=["B", "T", "NT", "SLOTS"],
    do_not_specialize_on_alignment=[*OPERANDS, *STRIDES],
)
def gate_bwd_kernel(
    pair_shares,
    shares,
    across,
    beta_used,
    g,
    beta,
    A_log,
    dt_bias,
    v,
    dv,
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
    stride_vb,
    stride_vt,
    stride_vh,
    V: tl.constexpr,
    BV: tl.constexpr,
    LEAST_BETA: tl.constexpr,
    K_BLOCKS: tl.constexpr,
    FROM_HOPPER: tl.constexpr,
    RCP_LN2: tl.constexpr,
    FLOOR: tl.constexpr,
    THRESHOLD: tl.constexpr,
    BETA_FACTOR: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    USE_SIGMOID: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(HV, BH)
    i_c = pid // blocks
    heads = pid % blocks * BH + tl.arange(0, BH)
    i_b, row, n_rows = chunk_span(i_c, chunk_rows, T, NT, BT, IS_VARLEN)
    exists = heads < HV
    o_h = heads[:, None]
    o_t = tl.arange(0, BT)[None, :]
    o_sums = i_c * 2 * HV + heads
    o_out = (i_b * T + row + o_t) * HV + o_h
    if n_rows <= 0:
        outside = exists[:, None] & (o_t < -n_rows)
        store_zeros(dg + o_out, outside)
        store_zeros(dbeta + o_out, outside)
        if FROM_HOPPER:
            first = pid % blocks * BH
            for h in range(first, tl.minimum(first + BH, HV)):
                rows = (i_b * T + row + tl.arange(0, BT)) * HV + h
                for start in range(0, V, BV):
                    o_v = start + tl.arange(0, BV)[None, :]
                    mask = (tl.arange(0, BT) < -n_rows)[:, None] & (o_v < V)
                    store_zeros(dv + (rows[:, None] * V + o_v), mask)
        if HAS_GATE:
            store_zeros(sums + o_sums, exists)
            store_zeros(sums + o_sums + HV, exists)
        return
    valid = exists[:, None] & (o_t < n_rows)
    plane = tl.cast(B, tl.int64) * HV * T
    o_s = (i_b * HV + o_h) * T + row + o_t
    p_used = beta_used + i_b * stride_usedb + (row + o_t) * stride_usedt + o_h * stride_usedh
    b_used = tl.load(p_used, mask=valid, other=0).to(tl.float32)
    b_dbeta = tl.load(pair_shares + o_s, mask=valid, other=0)
    b_ahead = tl.load(pair_shares + plane + o_s, mask=valid, other=0)
    b_third = tl.load(pair_shares + 2 * plane + o_s, mask=valid, other=0)
    b_rest = b_used
    if FROM_HOPPER:
        # Elsewhere the rows of dv that the kernels read have this factor.
        small = tl.abs(b_used) < LEAST_BETA
        b_rest = tl.where(small, b_used, 1.0)
        b_ahead += b_rest * b_third
        b_ahead -= tl.load(pair_shares + 3 * plane + o_s, mask=valid, other=0)
    else:
        b_ahead += b_third
    b_read = tl.zeros([BH, BT], dtype=tl.float32)
    b_behind = tl.zeros([BH, BT], dtype=tl.float32)
    total = tl.zeros([BH], dtype=tl.float32)
    for i in tl.static_range(K_BLOCKS):
        p_share = shares + 3 * i * plane + o_s
        b_ahead += tl.load(p_share, mask=valid, other=0)
        b_read += tl.load(p_share + plane, mask=valid, other=0)
        # Those of the token before, because a token's own part does not count.
        b_behind += tl.load(p_share + 2 * plane - 1, mask=valid & (o_t > 0), other=0)
        p_across = across + (tl.cast(SLOTS, tl.int64) * i + i_c) * HV + heads
        total += tl.load(p_across, mask=exists, other=0)
    b_ahead -= b_read * b_rest
    if FROM_HOPPER:
        # v_new is beta times the vector whose product with dx is dbeta.
        b_dbeta /= tl.where(small, 1.0, b_used * b_used)
        small &= valid
        if tl.max(small.to(tl.int32)) > 0:
            b_own = b_third - b_read
            for n in range(BH):
                of_head = tl.arange(0, BH)[:, None] == n
                in_head = tl.max((small & of_head).to(tl.int32), 0) > 0
                if tl.max(in_head.to(tl.int32), 0) > 0:
                    h = pid % blocks * BH + n
                    rows = row + tl.arange(0, BT)
                    p_v = v + i_b * stride_vb + h * stride_vh + rows * stride_vt
                    p_dv = dv + ((i_b * T + rows) * HV + h) * V
                    used = tl.sum(tl.where(of_head, b_used, 0.0), 0)
                    own = tl.zeros([BT], dtype=tl.float32)
                    for start in range(0, V, BV):
                        o_v = start + tl.arange(0, BV)[None, :]
                        in_values = in_head[:, None] & (o_v < V)
                        b_v = tl.load(p_v[:, None] + o_v, mask=in_values, other=0).to(tl.float32)
                        b_dx = tl.load(p_dv[:, None] + o_v, mask=in_values, other=0).to(tl.float32)
                        own += tl.sum(b_v * b_dx, 1)
                        b_dv = (b_dx * used[:, None]).to(dv.dtype.element_ty)
                        tl.store(p_dv[:, None] + o_v, b_dv, mask=in_values)
                    b_own += tl.where(of_head, own[None, :], 0.0)
            b_dbeta = tl.where(small, b_own, b_dbeta)
    else:
        b_dbeta -= b_read
    b_dg = tl.cumsum(b_ahead, 1, reverse=True) + tl.cumsum(b_behind, 1) + total[:, None]

    p_g = g + i_b * stride_gb + (row + o_t) * stride_gt + o_h * stride_gh
    b_g = tl.load(p_g, mask=valid, other=0).to(tl.float32)
    if HAS_GATE:
        b_A = tl.load(A_log + heads, mask=exists, other=0).to(tl.float32)[:, None]
        rate = tl.exp(b_A)
        if HAS_DT_BIAS:
            b_g += tl.load(dt_bias + heads, mask=exists, other=0).to(tl.float32)[:, None]
        is_exp = b_g < -2 * THRESHOLD
        b_slope = -rate * tl.where(b_g > THRESHOLD, 1.0, 1 / (1 + tl.exp(-b_g)))
        b_g = log_decay(b_g, b_A, rate, THRESHOLD)
        # Where softplus is an exponential, the decay is its own derivative.
        b_slope = tl.where(is_exp, b_g, b_slope)
        # A NaN fails both comparisons and therefore stays a NaN.
        closed = (b_g * RCP_LN2 < FLOOR) | (o_t >= n_rows)
        tl.store(sums + o_sums, tl.sum(tl.where(closed, 0.0, b_dg * b_g), 1), mask=exists)
        b_dg = tl.where(closed, 0.0, b_slope * b_dg)
        tl.store(sums + o_sums + HV, tl.sum(b_dg, 1), mask=exists)
    else:
        b_dg = tl.where(b_g * RCP_LN2 < FLOOR, 0.0, b_dg)
    tl.store(dg + o_out, b_dg.to(dg.dtype.element_ty), mask=valid)
    if USE_SIGMOID:
        p_beta = beta + i_b * stride_betab + (row + o_t) * stride_betat + o_h * stride_betah
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


@functools.lru_cache(maxsize=256, typed=True)
def gate_launch(
    HV: int,
    g_strides: tuple[int, ...],
    beta_strides: tuple[int, ...],
    used_strides: tuple[int, ...],
    v_strides: tuple[int, ...],
    V: int,
    K_blocks: int,
    BT: int,
    *,
    from_hopper: bool,
    neg_eigval: bool,
    has_gate: bool,
    has_dt_bias: bool,
    use_sigmoid: bool,
    is_varlen: bool,
) -> Launch:
    return Launch(
        gate_bwd_kernel,
        HV=HV,
        **head_arguments("g", g_strides),
        **head_arguments("beta", beta_strides),
        **head_arguments("used", used_strides),
        **named("vb vt vh", v_strides),
        V=V,
        BV=VALUE_BLOCK,
        LEAST_BETA=LEAST_BETA,
        K_BLOCKS=K_blocks,
        FROM_HOPPER=from_hopper,
        RCP_LN2=RCP_LN2,
        FLOOR=LOG2_DECAY_FLOOR[torch.float32],
        THRESHOLD=SOFTPLUS_THRESHOLD,
        BETA_FACTOR=2.0 if neg_eigval else 1.0,
        BT=BT,
        BH=heads_of_program(HV),
        HAS_GATE=has_gate,
        HAS_DT_BIAS=has_dt_bias,
        USE_SIGMOID=use_sigmoid,
        IS_VARLEN=is_varlen,
        num_warps=4,
    )


def heads_of_program(HV: int) -> int:
    return min(HEADS, triton.next_power_of_2(HV))


@functools.lru_cache(maxsize=64)
def sum_launch(width: int) -> Launch:
    return Launch(gate_sum_kernel, WIDTH=width, BLOCK=SUM_BLOCK, BW=SUM_WIDTH)


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
    v: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    *,
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
) -> GateGradients:
    """pair_shares, shares and across: as in ``ChunkGradients``. beta_used: [B, T, HV], after its
    sigmoid; g, beta: the caller's own. For the pair_shares of hopper/gradients also v and dv [B, T,
    HV, V], last strides 1 and dv contiguous; its rows with a small |beta| and those of no sequence
    are completed."""
    B, T, HV = g.shape
    dg = torch.empty(B, T, HV, dtype=g.dtype, device=g.device)
    dbeta = torch.empty(B, T, HV, dtype=beta.dtype, device=g.device)
    sums = total = None
    if A_log is not None:
        sums = torch.empty(chunks.slots, 2 * HV, dtype=torch.float32, device=g.device)
        total = torch.empty(2 * HV, dtype=torch.float32, device=g.device)
    grid = chunks.slots * -(-HV // heads_of_program(HV))
    if grid != 0:
        launch = gate_launch(
            HV,
            head_strides(g),
            head_strides(beta),
            head_strides(beta_used),
            (0, 0, 0) if v is None else v.stride()[:3],
            0 if dv is None else dv.shape[3],
            across.shape[0],
            chunks.chunk_size,
            from_hopper=pair_shares.shape[0] == 4,
            neg_eigval=allow_neg_eigval,
            has_gate=A_log is not None,
            has_dt_bias=dt_bias is not None,
            use_sigmoid=use_beta_sigmoid,
            is_varlen=chunks.chunk_rows is not None,
        )
        launch(
            (grid, 1, 1),
            pair_shares=pair_shares,
            shares=shares,
            across=across,
            beta_used=beta_used,
            g=g,
            beta=beta,
            A_log=A_log,
            dt_bias=dt_bias,
            v=v,
            dv=dv,
            dg=dg,
            dbeta=dbeta,
            sums=sums,
            chunk_rows=chunks.chunk_rows,
            B=B,
            T=T,
            NT=chunks.NT,
            SLOTS=chunks.slots,
        )
    if total is None:
        return GateGradients(dg, dbeta, None, None)
    if HV > 0:
        width = -(-2 * HV // SUM_WIDTH)
        sum_launch(2 * HV)((width, 1, 1), sums=sums, out=total, n=chunks.slots)
    return GateGradients(dg, dbeta, total[:HV], total[HV:])
