"""Functions that the kernels of the convolution share: the sequences and states of a call, and the
layout of x."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

# These records group values that kernels pass to their helpers. Compile-time constants are passed
# separately, because Triton turns them into run-time values inside of a record.


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
