"""Gradients of the causal convolution that starts from no state.

    dz_t = dy_t silu'(z_t),  z the convolution before its activation, computed again from x
    dx_t = sum over j of weight[c, W - 1 - j] dz_(t + j)
    dweight[c, W - 1 - j] = sum over t of dz_t x_(t - j)         dbias[c] = sum over t of dz_t

Tokens of other sequences are left out of the sums. A program has some channels and a run of blocks
of tokens. As in `gdn_triton.conv.triton.kernel` a thread has R consecutive tokens. It loads the x
of these tokens and of the W - 1 before and after them, and the dy of these tokens and of the W - 1
after them. A program stores its sums over tokens in fp32, and a second step adds the sums of all
programs. There are no atomics, so the same call gives the same bits.
"""

import functools

import torch
import triton
import triton.language as tl

from gdn_triton._triton.launch import Launch
from gdn_triton._triton.strides import named
from gdn_triton._triton.taps import Filter, logistic, on_nvidia, taps, weighted
from gdn_triton.conv.problem import ConvProblem
from gdn_triton.conv.triton.forward import TOKEN_MAJOR
from gdn_triton.conv.triton.rows import Packed, layout_of, sequence_of, strides, token

# The most runs of tokens that a call is cut into. Each run has its own sum in memory.
MOST_RUNS = 32


@triton.jit
def gradient_columns(
    x,
    f,
    dy,
    dx,
    row,
    o_c,
    in_c,
    first,
    end,
    n_rows,
    sums,
    s_bias,
    stride_xt,
    stride_xc,
    stride_yt,
    stride_yc,
    D: tl.constexpr,
    NVIDIA: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    SILU: tl.constexpr,
):
    """Adds R rows of each lane to the sums, and returns the sums. sums: W tiles [lanes, channels],
    one for each tap; first the tap of the token itself, then the taps of the W - 1 tokens before
    it."""
    p_c = o_c.to(tl.int64) * stride_xc
    p_y = o_c.to(tl.int64) * stride_yc
    w, b_bias = taps(f, o_c, in_c, W, True)
    before = (token(x, row - 1, stride_xt, p_c, in_c, first, end).to(tl.float32),)
    for i in tl.static_range(1, W - 1):
        before += (token(x, row - (1 + i), stride_xt, p_c, in_c, first, end).to(tl.float32),)
    # z_before is dz of the W - 1 tokens before the current one.
    zeros = tl.zeros(before[0].shape, dtype=tl.float32)
    z_before = (zeros,)
    for _ in tl.static_range(1, W - 1):
        z_before += (zeros,)
    for r in tl.static_range(R + W - 1):
        x0 = token(x, row + r, stride_xt, p_c, in_c, first, end).to(tl.float32)
        z0 = token(dy, row + r, stride_yt, p_y, in_c, first, end).to(tl.float32)
        if SILU:
            z = weighted(x0, before, w, b_bias, W)
            s = logistic(z, NVIDIA)
            z0 = z0 * (s * (1 + z * (1 - s)))
        if r < R:
            added = (sums[0] + z0 * x0,)
            for i in tl.static_range(1, W):
                added += (sums[i] + z0 * before[i - 1],)
            sums = added
            if f.bias is not None:
                s_bias += z0
        if r >= W - 1:
            # Store dx of the token W - 1 before this one. It depends on dz of all tokens in
            # between.
            b_dx = z0 * w[W - 1]
            of_before = z_before[0] * w[W - 2]
            for i in tl.static_range(1, W - 1):
                of_before += z_before[i] * w[W - 2 - i]
            b_dx += of_before
            o_t = row + r - (W - 1)
            written = (o_t < n_rows)[:, None] & in_c[None, :]
            p_dx = dx + (o_t.to(tl.int64) * D)[:, None] + o_c[None, :]
            tl.store(p_dx, b_dx.to(dx.dtype.element_ty), mask=written)
        before = (x0,) + before[: W - 2]
        z_before = (z0,) + z_before[: W - 2]
    return sums, s_bias


@triton.jit(
    do_not_specialize=["T", "N", "STEPS", "run", "blocks", "stride_xb", "stride_xt", "stride_xc"]
)
def conv_bwd_kernel(
    x,
    weight,
    bias,
    cu_seqlens,
    dy,
    dx,
    sums,
    T,
    N,
    STEPS,
    run,
    blocks,
    stride_xb,
    stride_xt,
    stride_xc,
    stride_bc,
    stride_yb,
    stride_yt,
    stride_yc,
    stride_wc: tl.constexpr,
    stride_ww: tl.constexpr,
    ALIGN: tl.constexpr,
    NVIDIA: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    LANES: tl.constexpr,
    R: tl.constexpr,
    BC: tl.constexpr,
    SILU: tl.constexpr,
    CHANNEL_MAJOR: tl.constexpr,
):
    """run: the number of blocks of tokens of one program. blocks: the number of all blocks."""
    PARTS: tl.constexpr = (D + BC - 1) // BC
    BT: tl.constexpr = LANES * R
    pid = tl.program_id(0).to(tl.int64)
    i_run = pid // PARTS
    o_c = (pid % PARTS).to(tl.int32) * BC + tl.arange(0, BC)
    in_c = o_c < D
    lane = tl.arange(0, LANES)
    if CHANNEL_MAJOR:
        stride_t = 1
        stride_c = stride_xc.to(tl.int64) * ALIGN
    else:
        stride_t = stride_xt.to(tl.int64) * ALIGN
        stride_c = 1
    f = Filter(weight, bias, stride_wc, stride_ww, stride_bc)
    packed = Packed(cu_seqlens, N, STEPS)
    s = (tl.zeros([LANES, BC], dtype=tl.float32),)
    for _ in tl.static_range(1, W):
        s += (s[0],)
    s_bias = s[0]
    in_row = tl.cdiv(tl.cast(T, tl.int64), BT)
    for i_block in range(i_run * run, tl.minimum((i_run + 1) * run, blocks)):
        i_b, i_row = i_block // in_row, (i_block % in_row) * BT
        n_rows = tl.minimum(T - i_row, BT).to(tl.int32)
        p_x = x + i_b * stride_xb.to(tl.int64) * ALIGN + i_row * stride_t
        p_dy = dy + i_b * stride_yb + i_row * stride_yt
        p_dx = dx + (i_b * T + i_row) * D
        if cu_seqlens is None:
            first = -i_row
            end = T - i_row
            whole = True
        else:
            i_n = sequence_of(i_row, packed)
            first = tl.load(cu_seqlens + i_n).to(tl.int64) - i_row
            end = tl.load(cu_seqlens + i_n + 1, mask=i_n < N, other=0).to(tl.int64) - i_row
            whole = end >= n_rows
        first = tl.maximum(first, -W).to(tl.int32)
        end = tl.maximum(tl.minimum(end, BT + W), -W).to(tl.int32)
        if whole:
            s, s_bias = gradient_columns(
                p_x,
                f,
                p_dy,
                p_dx,
                lane * R,
                o_c,
                in_c,
                first,
                end,
                n_rows,
                s,
                s_bias,
                stride_t,
                stride_c,
                stride_yt,
                stride_yc,
                D,
                NVIDIA,
                W,
                R,
                SILU,
            )
        elif cu_seqlens is not None:
            for r in range(R):
                row = lane * R + r
                n = sequence_of(i_row + row, packed)
                bos = tl.load(cu_seqlens + n).to(tl.int64) - i_row
                eos = tl.load(cu_seqlens + n + 1, mask=n < N, other=0).to(tl.int64) - i_row
                s, s_bias = gradient_columns(
                    p_x,
                    f,
                    p_dy,
                    p_dx,
                    row,
                    o_c,
                    in_c,
                    tl.maximum(bos, -W).to(tl.int32),
                    tl.maximum(tl.minimum(eos, BT + W), -W).to(tl.int32),
                    n_rows,
                    s,
                    s_bias,
                    stride_t,
                    stride_c,
                    stride_yt,
                    stride_yc,
                    D,
                    NVIDIA,
                    W,
                    1,
                    SILU,
                )
    # The shape of sums is [runs, W + 1, D]: the weight's taps in their order, then the bias.
    p_sums = sums + i_run * ((W + 1) * D) + o_c
    for i in tl.static_range(W):
        tl.store(p_sums + (W - 1 - i) * D, tl.sum(s[i], 0), mask=in_c)
    if bias is not None:
        tl.store(p_sums + W * D, tl.sum(s_bias, 0), mask=in_c)


@functools.lru_cache(maxsize=256, typed=True)
def backward_launch(
    D: int,
    W: int,
    itemsize: int,
    align: int,
    channel_major: bool,
    weight_strides: tuple[int, ...],
    bias_strides: tuple[int, ...],
    dy_strides: tuple[int, ...],
    silu: bool,
) -> tuple[int, int, Launch]:
    """Returns the tokens of a block, the programs of a run, and the kernel."""
    config = TOKEN_MAJOR
    BC = config.columns // itemsize
    launch = Launch(
        conv_bwd_kernel,
        **named("bc", bias_strides),
        **named("yb yt yc", dy_strides),
        **named("wc ww", weight_strides),
        ALIGN=align,
        NVIDIA=on_nvidia(),
        D=D,
        W=W,
        LANES=config.lanes,
        R=config.tokens,
        BC=BC,
        SILU=silu,
        CHANNEL_MAJOR=channel_major,
        num_warps=config.num_warps,
    )
    return config.lanes * config.tokens, triton.cdiv(D, BC), launch


def conv_bwd(
    problem: ConvProblem,
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns dx [B, T, D], dweight [D, W] and dbias [D] in the dtypes of x, weight and bias."""
    p = problem
    dx = x.new_empty((p.B, p.T, p.D))
    if p.B * p.T == 0:
        return dx, torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias)
    x, layout = layout_of(x)
    BT, parts, launch = backward_launch(
        p.D,
        p.W,
        x.element_size(),
        layout.align,
        layout.channel_major,
        weight.stride(),
        strides(bias, 1),
        (0 if p.B == 1 else dy.stride(0), *dy.stride()[1:]),
        p.silu,
    )
    blocks = p.B * -(-p.T // BT)
    run = -(-blocks // MOST_RUNS)
    runs = -(-blocks // run)
    sums = x.new_empty((runs, p.W + 1, p.D), dtype=torch.float32)
    launch(
        (runs * parts, 1, 1),
        x=x,
        weight=weight,
        bias=bias,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.contiguous(),
        dy=dy,
        dx=dx,
        sums=sums,
        T=p.T,
        N=p.N,
        STEPS=p.N.bit_length(),
        run=run,
        blocks=blocks,
        stride_xb=layout.batch,
        stride_xt=layout.token,
        stride_xc=layout.channel,
    )
    dweight = sums[:, : p.W].sum(0).t().to(weight.dtype)
    dbias = None if bias is None else sums[:, p.W].sum(0).to(bias.dtype)
    return dx, dweight, dbias
