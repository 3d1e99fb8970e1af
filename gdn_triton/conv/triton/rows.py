"""Functions that the kernels of the convolution share: the taps, the sequences and states of a
call, and the layout of x."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from gdn_triton._triton.tiles import compiler

# These records group values that kernels pass to their helpers. Compile-time constants are passed
# separately, because Triton turns them into run-time values inside of a record.


class Filter(NamedTuple):
    """weight [D, W], bias [D] or None."""

    weight: Any
    bias: Any
    stride_c: Any
    stride_w: Any
    stride_bias: Any


class Packed(NamedTuple):
    """cu_seqlens [N + 1], or None. STEPS: the steps of a bisection of N sequences."""

    cu_seqlens: Any
    N: Any
    STEPS: Any


class States(NamedTuple):
    """The states that sequences start from: state [slots, D, W - 1], read_slots and
    has_initial_state [N]; each may be None."""

    state: Any
    read_slots: Any
    has_initial_state: Any
    stride_n: Any
    stride_c: Any
    stride_w: Any
    stride_r: Any
    stride_i: Any


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
def sequence_of(row, packed):
    """The packed sequence of a row by bisection; N for rows of no sequence. Empty sequences are
    skipped."""
    low = row * 0
    high = low + packed.N
    for _ in range(packed.STEPS):
        middle = (low + high) // 2
        more = low < high
        end = tl.load(packed.cu_seqlens + middle + 1, mask=more, other=0).to(tl.int64)
        after = more & (end <= row)
        low = tl.where(after, middle + 1, low)
        high = tl.where(after, high, middle)
    return low


@triton.jit
def state_of(i_n, states, valid, LAST_SKIPPED: tl.constexpr):
    """Returns the slot of sequence i_n, whether the slot is not padding, and whether the sequence
    starts from its state."""
    slot = i_n
    live = valid
    if states.read_slots is not None:
        p_slot = states.read_slots + i_n * states.stride_r
        slot = tl.load(p_slot, mask=valid, other=LAST_SKIPPED).to(tl.int64)
        live = live & (slot > LAST_SKIPPED)
    known = live
    if states.has_initial_state is not None:
        p_flag = states.has_initial_state + i_n * states.stride_i
        known = known & (tl.load(p_flag, mask=valid, other=0) != 0)
    return slot, live, known


@triton.jit
def token(x, row, stride_t, p_c, in_c, first, end):
    """Loads a row of each lane, [lanes, channels], in its dtype in memory. Rows before `first` and
    from `end` on are 0."""
    inside = (row >= first) & (row < end)
    p_x = x + (row.to(tl.int64) * stride_t)[:, None] + p_c[None, :]
    return tl.load(p_x, mask=inside[:, None] & in_c[None, :], other=0)


class Layout(NamedTuple):
    """x [B, T, D] in the form that the kernel reads. Strides are in units of `align` elements,
    except that the stride that is 1 is passed as 0."""

    channel_major: bool
    align: int
    batch: int
    token: int
    channel: int


def layout_of(x: torch.Tensor) -> tuple[torch.Tensor, Layout]:
    """Returns x and its layout. x is copied first unless its channels or its tokens are dense."""
    if x.stride(2) != 1 and x.stride(1) != 1:
        x = x.contiguous()
    batch, token, channel = x.stride()
    batch = 0 if x.shape[0] == 1 else batch
    channel_major = channel != 1
    # The width of a load is the largest power of two up to 16 that divides the distances of runs.
    runs = batch | (channel if channel_major else token) | 16
    align = runs & -runs
    if channel_major:
        return x, Layout(True, align, batch // align, 0, channel // align)
    return x, Layout(False, align, batch // align, token // align, 0)


def strides(x: torch.Tensor | None, count: int) -> tuple[int, ...]:
    """Returns `count` strides of x; 0 for dimensions that x does not have."""
    return (0,) * count if x is None else (*x.stride(), *(0,) * (count - x.dim()))


def on_nvidia() -> bool:
    """Whether kernels may use NVIDIA's instructions. They may not in the interpreter and on other
    GPUs."""
    return compiler() == "cuda"
