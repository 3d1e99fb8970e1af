"""Jit functions for the short convolution of one token, which kernels of several operators call."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gdn_triton._triton.tiles import compiler


class Filter(NamedTuple):
    """weight [D, W], bias [D] or None."""

    weight: Any
    bias: Any
    stride_c: Any
    stride_w: Any
    stride_bias: Any


@triton.jit
def logistic(x, NVIDIA: tl.constexpr):
    """1 / (1 + e^-x). NVIDIA: use the hardware's reciprocal instead of a division of seven
    instructions. Its error is at most one unit in the last place, and its argument is at least
    1."""
    u = 1.0 + tl.exp2(x * -1.4426950408889634)
    if NVIDIA:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / u


@triton.jit
def tap(f, o_c, in_c, BACK: tl.constexpr, W: tl.constexpr, AS_ROW: tl.constexpr):
    """The weights of the token BACK places before, in fp32 [channels], or [1, channels] if
    AS_ROW."""
    p_w = f.weight + o_c.to(tl.int64) * f.stride_c + tl.cast(f.stride_w, tl.int64) * (W - 1 - BACK)
    w = tl.load(p_w, mask=in_c, other=0).to(tl.float32)
    return w[None, :] if AS_ROW else w


@triton.jit
def taps(f, o_c, in_c, W: tl.constexpr, AS_ROW: tl.constexpr):
    """Returns a tuple of the W weights, first the weight of the token itself and then those of the
    tokens before it, and the bias or 0."""
    w = (tap(f, o_c, in_c, 0, W, AS_ROW),)
    for back in tl.static_range(1, W):
        w += (tap(f, o_c, in_c, back, W, AS_ROW),)
    b_bias = 0.0
    if f.bias is not None:
        p_b = f.bias + o_c.to(tl.int64) * f.stride_bias
        b_bias = tl.load(p_b, mask=in_c, other=0).to(tl.float32)
        if AS_ROW:
            b_bias = b_bias[None, :]
    return w, b_bias


@triton.jit
def weighted(x0, before, w, b_bias, W: tl.constexpr):
    """The convolution of a token x0 and the W - 1 tokens before it, the latest first. The arguments
    have one shape, or broadcast to it."""
    acc = b_bias
    for i in tl.static_range(1, W):
        acc = tl.fma(before[W - 1 - i], w[W - i], acc)
    return tl.fma(x0, w[0], acc)


@triton.jit
def earlier(p, o_c, mask, stride_c, stride_w, W: tl.constexpr):
    """Loads the W - 1 tokens of a state, the latest first."""
    before = ()
    for i in tl.static_range(W - 1):
        p_c = p + o_c.to(tl.int64) * stride_c + tl.cast(stride_w, tl.int64) * (W - 2 - i)
        before += (tl.load(p_c, mask=mask, other=0),)
    return before


@triton.jit
def keep(p, x, before, o_c, mask, stride_c, stride_w, W: tl.constexpr):
    """Stores the state after token x."""
    kept = (x.to(p.dtype.element_ty),)
    for i in tl.static_range(W - 2):
        kept += (before[i],)
    for i in tl.static_range(W - 1):
        p_c = p + o_c.to(tl.int64) * stride_c + tl.cast(stride_w, tl.int64) * (W - 2 - i)
        tl.store(p_c, kept[i], mask=mask)


@triton.jit
def convolved(x, before, w, b_bias, W: tl.constexpr, SILU: tl.constexpr, NVIDIA: tl.constexpr):
    """The convolution at token x, in the dtype of x. before: the tokens before x, the latest
    first. w, b_bias: the result of `taps`."""
    wide = ()
    for i in tl.static_range(W - 1):
        wide += (before[i].to(tl.float32),)
    b_y = weighted(x.to(tl.float32), wide, w, b_bias, W)
    if SILU:
        b_y = b_y * logistic(b_y, NVIDIA)
    return b_y.to(x.dtype)


def on_nvidia() -> bool:
    """Whether kernels may use NVIDIA's instructions. They may not in the interpreter and on other
    GPUs."""
    return compiler() == "cuda"
