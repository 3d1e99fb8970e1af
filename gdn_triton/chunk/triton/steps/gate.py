"""Gates: activation of the decay, its chunk-local cumulative sum, and beta's sigmoid.

    g        = -exp(A_log) * softplus(g_raw + dt_bias)             (when the gate is in the kernel)
    g_cumsum = chunk-local inclusive sum of max(g / ln 2, floor)   (log2 units)

A program owns one chunk of BH neighbouring heads: the sum over its rows is a scan in registers.
"""

import functools

import torch
import triton
import triton.language as tl

from gdn_triton._triton.activations import log_decay, sigmoid
from gdn_triton._triton.launch import Launch
from gdn_triton._triton.strides import head_arguments, head_strides
from gdn_triton.chunk.triton.shared.chunks import ChunkTable
from gdn_triton.chunk.triton.shared.places import chunk_span, decay_cumsum
from gdn_triton.constants import LOG2_DECAY_FLOOR, RCP_LN2, SOFTPLUS_THRESHOLD

# 64 rows x 8 heads of fp32 are one 32-byte sector for each row, and 4 values for each thread of 4
# warps.
HEADS_PER_PROGRAM = 8
# The heads of a tile of decays, if a call has as many: 16 values for each thread of 2 warps need
# fewer exchanges between threads. Decays are summed in integers, so the tile changes no bit.
DECAY_HEADS_PER_PROGRAM = 16
SIGMOID_BLOCK = 1024


@triton.jit(do_not_specialize=["T", "NT"])
def chunk_cumsum_kernel(
    x,
    out,
    A_log,
    dt_bias,
    chunk_rows,
    T,
    NT,
    HV,
    stride_xb,
    stride_xt,
    stride_xh,
    scale,
    FLOOR: tl.constexpr,
    THRESHOLD: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    IS_DECAY: tl.constexpr,
    REVERSE: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    head_blocks = tl.cdiv(HV, BH)
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_hb = pid // head_blocks, pid % head_blocks
    i_b, row, n_rows = chunk_span(i_c, chunk_rows, T, NT, BT, IS_VARLEN)
    if n_rows <= 0:
        return
    o_t = tl.arange(0, BT)
    o_h = i_hb * BH + tl.arange(0, BH)
    mask = (o_t[:, None] < n_rows) & (o_h[None, :] < HV)
    p_x = x + i_b * stride_xb + (row + o_t[:, None]) * stride_xt + o_h[None, :] * stride_xh
    b_x = tl.load(p_x, mask=mask, other=0).to(tl.float32)
    if HAS_GATE:
        b_A = tl.load(A_log + o_h, mask=o_h < HV, other=0).to(tl.float32)
        if HAS_DT_BIAS:
            b_x += tl.load(dt_bias + o_h, mask=o_h < HV, other=0).to(tl.float32)[None, :]
        b_x = log_decay(b_x, b_A[None, :], tl.exp(b_A)[None, :], THRESHOLD)
    b_x *= scale
    if IS_DECAY:
        # A comparison keeps a NaN; a maximum would drop it.
        b_x = tl.where(b_x < FLOOR, FLOOR, b_x)
        b_x = decay_cumsum(tl.where(mask, b_x, 0.0))
    else:
        b_x = tl.cumsum(tl.where(mask, b_x, 0.0), axis=0, reverse=REVERSE)
    p_out = out + ((i_b * T + row + o_t[:, None]) * HV + o_h[None, :])
    tl.store(p_out, b_x, mask=mask)


@functools.lru_cache(maxsize=256, typed=True)
def cumsum_launch(
    strides: tuple[int, ...],
    HV: int,
    BH: int,
    BT: int,
    scale: float,
    floor: float | None,
    *,
    has_gate: bool,
    has_dt_bias: bool,
    reverse: bool,
    is_varlen: bool,
) -> Launch:
    return Launch(
        chunk_cumsum_kernel,
        HV=HV,
        **head_arguments("x", strides),
        scale=scale,
        FLOOR=0.0 if floor is None else floor,
        THRESHOLD=SOFTPLUS_THRESHOLD,
        BT=BT,
        BH=BH,
        HAS_GATE=has_gate,
        HAS_DT_BIAS=has_dt_bias,
        IS_DECAY=floor is not None,
        REVERSE=reverse,
        IS_VARLEN=is_varlen,
        num_warps=2 if BH == DECAY_HEADS_PER_PROGRAM else 4,
    )


def chunk_local_cumsum(
    x: torch.Tensor,
    chunks: ChunkTable,
    *,
    scale: float = 1.0,
    reverse: bool = False,
    floor: float | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the inclusive sums of ``scale * x`` [B, T, HV] over each chunk, fp32 [B, T, HV].
    ``reverse`` sums from the chunk's end. With ``A_log``, x is the raw gate, which is activated
    first. With ``floor`` the terms are log2 decays, each limited to the floor, and summed forward
    in fixed point (``decay_cumsum``)."""
    assert floor is None or not reverse, "only sums of gradients run backward"
    B, T, HV = x.shape
    out = torch.empty(B, T, HV, dtype=torch.float32, device=x.device)
    many = floor is not None and HV >= DECAY_HEADS_PER_PROGRAM
    BH = DECAY_HEADS_PER_PROGRAM if many else HEADS_PER_PROGRAM
    grid = chunks.slots * -(-HV // BH)
    if grid == 0:
        return out
    launch = cumsum_launch(
        head_strides(x),
        HV,
        BH,
        chunks.chunk_size,
        scale,
        floor,
        has_gate=A_log is not None,
        has_dt_bias=dt_bias is not None,
        reverse=reverse,
        is_varlen=chunks.chunk_rows is not None,
    )
    launch(
        (grid, 1, 1),
        x=x,
        out=out,
        A_log=A_log,
        dt_bias=dt_bias,
        chunk_rows=chunks.chunk_rows,
        T=T,
        NT=chunks.NT,
    )
    return out


def gate_cumsum_fwd(
    g: torch.Tensor,
    chunks: ChunkTable,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``g_cumsum`` [B, T, HV], fp32 in log2 units, from ``g`` [B, T, HV], the natural-log
    decay or (with ``A_log`` [HV]) the raw gate. A decay of -inf is limited to the floor, where 2^x
    is 0 in fp32."""
    return chunk_local_cumsum(
        g,
        chunks,
        scale=RCP_LN2,
        floor=LOG2_DECAY_FLOOR[torch.float32],
        A_log=A_log,
        dt_bias=dt_bias,
    )


@triton.jit
def beta_sigmoid_kernel(
    beta,
    out,
    n,
    T,
    HV,
    stride_b,
    stride_t,
    stride_h,
    BLOCK: tl.constexpr,
    FACTOR: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i_t = i // HV
    p = beta + (i_t // T) * stride_b + (i_t % T) * stride_t + (i % HV) * stride_h
    b_x = tl.load(p, mask=i < n, other=0).to(tl.float32)
    tl.store(out + i, sigmoid(b_x, FACTOR), mask=i < n)


@functools.lru_cache(maxsize=256, typed=True)
def sigmoid_launch(n: int, T: int, HV: int, strides: tuple[int, ...], factor: float) -> Launch:
    return Launch(
        beta_sigmoid_kernel,
        n=n,
        T=T,
        HV=HV,
        stride_b=strides[0],
        stride_t=strides[1],
        stride_h=strides[2],
        BLOCK=SIGMOID_BLOCK,
        FACTOR=factor,
    )


def beta_sigmoid_fwd(beta: torch.Tensor, allow_neg_eigval: bool = False) -> torch.Tensor:
    """Computes sigmoid(beta), fp32, of the logits ``beta`` [B, T, HV], or twice that with negative
    eigenvalues."""
    B, T, HV = beta.shape
    out = torch.empty(B, T, HV, dtype=torch.float32, device=beta.device)
    n = out.numel()
    if n == 0:
        return out
    launch = sigmoid_launch(n, T, HV, beta.stride(), 2.0 if allow_neg_eigval else 1.0)
    launch((-(-n // SIGMOID_BLOCK), 1, 1), beta=beta, out=out)
    return out
