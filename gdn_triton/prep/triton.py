"""All operations between the causal convolution and the gated delta rule, in one pass:

    q, k = x / sqrt(sum x^2 + eps) of each head, or as they are        v = as it is
    g    = -exp(A_log) softplus(a + dt_bias), or exp of that           beta = sigmoid(b)

A program has one part of a block of BT tokens: some heads of q, some of k, a run of v's columns, or
the gates. The parts of a block are neighbours in the grid, so that programs that run at the same
time read neighbouring memory. Every value is read once and written once.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from gdn_triton._triton.activations import log_decay, normalized, sigmoid
from gdn_triton._triton.launch import Launch
from gdn_triton._triton.tiles import UNFUSED
from gdn_triton.constants import L2NORM_EPS, SOFTPLUS_THRESHOLD

BLOCK_TOKENS = 64
GATE_TILE = 256


class Config(NamedTuple):
    """tile_bytes: the bytes of x that a program reads at a time."""

    tile_bytes: int
    num_warps: int


# Each thread makes one load of 16 bytes: more warps keep more loads in flight than more loads in
# each warp.
TOKEN_MAJOR = Config(4096, num_warps=8)
# The program transposes: it loads runs of 64 tokens and stores runs of 128 16-bit channels.
CHANNEL_MAJOR = Config(16384, num_warps=4)


@triton.jit
def copy_columns(
    x,
    out,
    part,
    n_rows,
    stride,
    W: tl.constexpr,
    BT: tl.constexpr,
    TILE: tl.constexpr,
    CHANNEL_MAJOR: tl.constexpr,
):
    """Copies a part of x's first W columns to out, whose rows have W columns."""
    if CHANNEL_MAJOR:
        BC: tl.constexpr = TILE // BT
        o_t = tl.arange(0, BT)[:, None]
        o_c = part * BC + tl.arange(0, BC)[None, :]
        mask = (o_t < n_rows) & (o_c < W)
        b_x = tl.load(x + o_c.to(tl.int64) * stride + o_t, mask=mask)
        tl.store(out + (o_t * W + o_c), b_x, mask=mask)
    else:
        i = part * TILE + tl.arange(0, TILE)
        o_t = i // W
        mask = o_t < n_rows
        b_x = tl.load(x + o_t.to(tl.int64) * stride + i % W, mask=mask)
        tl.store(out + i, b_x, mask=mask)


@triton.jit
def normalize_heads(
    x,
    out,
    part,
    n_rows,
    stride,
    H: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    CHANNEL_MAJOR: tl.constexpr,
):
    """Divides BR rows (token, head) of x's first H K columns by their norms, and stores them to
    out."""
    o_k = tl.arange(0, BK)[None, :]
    if CHANNEL_MAJOR:
        # The tile has one head: its neighbouring rows are tokens, which are neighbours in memory.
        tl.static_assert(BR == BT)
        o_t, i_h = tl.arange(0, BT)[:, None], part
        p_x = x + (i_h * K + o_k).to(tl.int64) * stride + o_t
    else:
        i = part * BR + tl.arange(0, BR)[:, None]
        o_t, i_h = i // H, i % H
        p_x = x + o_t.to(tl.int64) * stride + (i_h * K + o_k)
    mask = (o_t < n_rows) & (o_k < K)
    b_x = normalized(tl.load(p_x, mask=mask, other=0), EPS)
    tl.store(out + ((o_t * H + i_h) * K + o_k), b_x, mask=mask)


@triton.jit
def prepare_gates(
    a,
    b,
    A_log,
    dt_bias,
    g,
    beta,
    part,
    n_rows,
    stride_at,
    stride_ah,
    stride_bt,
    stride_bh,
    HV: tl.constexpr,
    THRESHOLD: tl.constexpr,
    BG: tl.constexpr,
    G_EXP: tl.constexpr,
):
    """Computes BG of the gates of n_rows tokens. a, b, g and beta point to the first token."""
    i = part * BG + tl.arange(0, BG)
    i_h = i % HV
    mask = i // HV < n_rows
    o_t, o_h = (i // HV).to(tl.int64), i_h.to(tl.int64)
    b_a = tl.load(a + (o_t * stride_at + o_h * stride_ah), mask=mask, other=0).to(tl.float32)
    b_b = tl.load(b + (o_t * stride_bt + o_h * stride_bh), mask=mask, other=0).to(tl.float32)
    b_A = tl.load(A_log + i_h).to(tl.float32)
    b_dt = tl.load(dt_bias + i_h).to(tl.float32)
    b_g = log_decay(b_a + b_dt, b_A, tl.exp(b_A), THRESHOLD)
    if G_EXP:
        b_g = tl.exp(b_g)
    tl.store(g + i, b_g, mask=mask)
    tl.store(beta + i, sigmoid(b_b, 1.0), mask=mask)


@triton.jit(do_not_specialize=["L", "stride_x"])
def post_conv_kernel(
    x,
    a,
    b,
    A_log,
    dt_bias,
    q,
    k,
    v,
    g,
    beta,
    L,
    stride_x,
    stride_at,
    stride_ah,
    stride_bt,
    stride_bh,
    ALIGN: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    EPS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    BT: tl.constexpr,
    TILE: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BG: tl.constexpr,
    QK_PARTS: tl.constexpr,
    V_PARTS: tl.constexpr,
    GATE_PARTS: tl.constexpr,
    USE_L2NORM: tl.constexpr,
    G_EXP: tl.constexpr,
    CHANNEL_MAJOR: tl.constexpr,
):
    PARTS: tl.constexpr = 2 * QK_PARTS + V_PARTS + GATE_PARTS
    pid = tl.program_id(0)
    part = pid % PARTS
    row = (pid // PARTS).to(tl.int64) * BT
    # Base addresses are 64-bit. Offsets inside of a block of outputs fit 32 bits.
    n_rows = tl.minimum(L - row, BT).to(tl.int32)
    if CHANNEL_MAJOR:
        n_rows = tl.multiple_of(n_rows, ALIGN)
    stride = stride_x.to(tl.int64) * ALIGN
    x += row if CHANNEL_MAJOR else row * stride
    if part < 2 * QK_PARTS:
        out = q
        if part >= QK_PARTS:
            out = k
            x += H * K * (stride if CHANNEL_MAJOR else 1)
            part -= QK_PARTS
        out += row * (H * K)
        if USE_L2NORM:
            normalize_heads(x, out, part, n_rows, stride, H, K, EPS, BT, BR, BK, CHANNEL_MAJOR)
        else:
            copy_columns(x, out, part, n_rows, stride, H * K, BT, TILE, CHANNEL_MAJOR)
    elif part < 2 * QK_PARTS + V_PARTS:
        x += 2 * H * K * (stride if CHANNEL_MAJOR else 1)
        part -= 2 * QK_PARTS
        copy_columns(x, v + row * (HV * V), part, n_rows, stride, HV * V, BT, TILE, CHANNEL_MAJOR)
    else:
        part -= 2 * QK_PARTS + V_PARTS
        prepare_gates(
            a + row * stride_at,
            b + row * stride_bt,
            A_log,
            dt_bias,
            g + row * HV,
            beta + row * HV,
            part,
            n_rows,
            stride_at,
            stride_ah,
            stride_bt,
            stride_bh,
            HV,
            THRESHOLD,
            BG,
            G_EXP,
        )


@functools.lru_cache(maxsize=256, typed=True)
def post_conv_launch(
    H: int,
    HV: int,
    K: int,
    V: int,
    itemsize: int,
    align: int,
    a_strides: tuple[int, ...],
    b_strides: tuple[int, ...],
    use_l2norm: bool,
    g_exp: bool,
    channel_major: bool,
) -> tuple[int, Launch]:
    """Returns the programs of a block of tokens, and the kernel with all arguments that do not
    depend on lengths."""
    config = CHANNEL_MAJOR if channel_major else TOKEN_MAJOR
    TILE = config.tile_bytes // itemsize
    BK = triton.next_power_of_2(K)
    # Where neighbours in memory are tokens, a program has a whole block of tokens, for runs of 128
    # bytes.
    BR = BLOCK_TOKENS if channel_major else max(1, TILE // BK)

    def copies(columns: int) -> int:
        return triton.cdiv(BLOCK_TOKENS * columns, TILE)

    qk_parts = triton.cdiv(BLOCK_TOKENS * H, BR) if use_l2norm else copies(H * K)
    v_parts = copies(HV * V)
    gate_parts = triton.cdiv(BLOCK_TOKENS * HV, GATE_TILE)
    launch = Launch(
        post_conv_kernel,
        stride_at=a_strides[0],
        stride_ah=a_strides[1],
        stride_bt=b_strides[0],
        stride_bh=b_strides[1],
        ALIGN=align,
        H=H,
        HV=HV,
        K=K,
        V=V,
        EPS=L2NORM_EPS,
        THRESHOLD=SOFTPLUS_THRESHOLD,
        BT=BLOCK_TOKENS,
        TILE=TILE,
        BR=BR,
        BK=BK,
        BG=GATE_TILE,
        QK_PARTS=qk_parts,
        V_PARTS=v_parts,
        GATE_PARTS=gate_parts,
        USE_L2NORM=use_l2norm,
        G_EXP=g_exp,
        CHANNEL_MAJOR=channel_major,
        **UNFUSED,
        num_warps=config.num_warps,
    )
    return 2 * qk_parts + v_parts + gate_parts, launch


def post_conv_fwd(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    H: int,
    K: int,
    V: int,
    use_l2norm: bool = True,
    g_exp: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x: [L, 2 H K + HV V], copied first unless its rows or its columns are dense; a, b: [L, HV];
    A_log, dt_bias: [HV].

    Returns q, k [L, H, K] and v [L, HV, V] in x's dtype, g and beta [L, HV] in fp32."""
    L, HV = a.shape
    q = x.new_empty((L, H, K))
    k = torch.empty_like(q)
    v = x.new_empty((L, HV, V))
    g = x.new_empty((L, HV), dtype=torch.float32)
    beta = torch.empty_like(g)
    if L == 0:
        return q, k, v, g, beta
    stride_x, stride_c = x.stride()
    if stride_c != 1 and stride_x != 1:
        x = x.contiguous()
        stride_x, stride_c = x.stride()
    # The width of a load is the largest power of two up to 16 that divides the runs and their
    # distance.
    runs = stride_x | 16
    channel_major = stride_c != 1
    if channel_major:
        stride_x = stride_c
        runs = stride_x | L | 16
    align = runs & -runs
    parts, launch = post_conv_launch(
        H,
        HV,
        K,
        V,
        x.element_size(),
        align,
        a.stride(),
        b.stride(),
        use_l2norm,
        g_exp,
        channel_major,
    )
    launch(
        (-(-L // BLOCK_TOKENS) * parts, 1, 1),
        x=x,
        a=a,
        b=b,
        A_log=A_log.contiguous(),
        dt_bias=dt_bias.contiguous(),
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        L=L,
        stride_x=stride_x // align,
    )
    return q, k, v, g, beta
