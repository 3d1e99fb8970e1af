"""The causal depthwise convolution of each channel c over the tokens of a sequence,

    y_t = silu(bias + sum over j of weight[c, W - 1 - j] x_(t - j))        j = W - 1 ... 0

alone, or in one pass with the preparation after it (`gdn_triton.kernels.post_conv`). Tokens before
a sequence's first come from its state, the last W - 1 tokens of what went before, or are 0.

- `conv_kernel`: all tokens in parallel. A program has one part of a block of tokens: some columns,
  or the gates. Each thread has R tokens after one another of its channels, so that a token is
  loaded (R + W - 1) / R times. States are read, and not written.
- `conv_state_kernel`: a program has some channels of one sequence and walks over its tokens, the
  last W - 1 in registers: the step of decoding, or, without an output, what leaves the states of
  a longer call behind. It runs after the other kernel, whose programs read the states in any order.

A sum is W fused multiplications and additions in fp32, the oldest token first, in both kernels: the
same token has the same bits in each. It is rounded to the input's dtype before the norm.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from gdn_triton.config import UNFUSED, target
from gdn_triton.constants import L2NORM_EPS, SOFTPLUS_THRESHOLD
from gdn_triton.conv_problem import ConvOperands, ConvProblem, PrepOperands
from gdn_triton.kernels._strides import named
from gdn_triton.kernels.l2norm import normalized
from gdn_triton.kernels.post_conv import GATE_TILE, prepare_gates
from gdn_triton.launch import Launch

MAX_WIDTH = 4


class Config(NamedTuple):
    """tokens: R, of a thread. lanes: threads' rows side by side in a program, at 128 channels of 16
    bits. columns: bytes of a row that a program reads."""

    tokens: int
    lanes: int
    columns: int
    num_warps: int


TOKEN_MAJOR = Config(tokens=8, lanes=8, columns=256, num_warps=4)
# Neighbours in memory are tokens, which belong to neighbouring threads.
CHANNEL_MAJOR = Config(tokens=1, lanes=64, columns=128, num_warps=4)
# Bytes of channels of a program that walks: one warp, 16 bytes a thread.
WALK_COLUMNS = 512


# ------------------------------------------------------------------------------------------ helpers


# What kernels hand to their helpers together. In a record Triton makes a value of a compile-time
# constant: those go apart.


class Filter(NamedTuple):
    """weight [D, W], bias [D] or None."""

    weight: Any
    bias: Any
    stride_c: Any
    stride_w: Any
    stride_bias: Any


class Packed(NamedTuple):
    """cu_seqlens [N + 1], or None. STEPS: enough to halve N to nothing."""

    cu_seqlens: Any
    N: Any
    STEPS: Any


class States(NamedTuple):
    """What sequences start from: state [slots, D, W - 1], read_slots and has_initial_state [N];
    each may be None."""

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
    """1 / (1 + e^-x). A division is seven instructions, of which one is the hardware's reciprocal:
    exact to the last bit but one, and its argument is at least 1."""
    u = 1.0 + tl.exp2(x * -1.4426950408889634)
    if NVIDIA:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / u


@triton.jit
def tap(f, o_c, in_c, BACK: tl.constexpr, W: tl.constexpr, AS_ROW: tl.constexpr):
    """What multiplies the token BACK before: fp32 [channels], or [1, channels]."""
    p_w = f.weight + o_c.to(tl.int64) * f.stride_c + (W - 1 - BACK) * f.stride_w
    w = tl.load(p_w, mask=in_c, other=0).to(tl.float32)
    return w[None, :] if AS_ROW else w


@triton.jit
def taps(f, o_c, in_c, W: tl.constexpr, AS_ROW: tl.constexpr):
    """What multiplies a token and each before it, a tuple of W; and the bias, or 0."""
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
    """The convolution of a token x0 and the W - 1 before it, the latest first. All of one shape, or
    broadcast to it."""
    acc = b_bias
    for i in tl.static_range(1, W):
        acc = tl.fma(before[W - 1 - i], w[W - i], acc)
    return tl.fma(x0, w[0], acc)


@triton.jit
def sequence_of(row, packed):
    """The packed sequence of a row, N for the rows of none; empty sequences are passed over."""
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
    """The slot of sequence i_n, whether it is not padding, and whether it starts from its state."""
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


# --------------------------------------------------------------------------- all tokens in parallel


@triton.jit
def token(x, row, stride_t, p_c, in_c, first, end):
    """A row of each lane as it is stored, [lanes, channels]: 0 before `first` and from `end` on."""
    inside = (row >= first) & (row < end)
    p_x = x + (row.to(tl.int64) * stride_t)[:, None] + p_c[None, :]
    return tl.load(p_x, mask=inside[:, None] & in_c[None, :], other=0)


@triton.jit
def or_before(b_x, row, first, p_state, p_c, stride_w, in_c, known, W: tl.constexpr):
    """A row of each lane, fp32; before its sequence's `first` what the state has, or 0."""
    before = row < first
    old = 0.0
    if p_state is not None:
        i_w = W - 1 + row - first
        kept = before & (i_w >= tl.where(known, 0, W))
        p = p_state + (i_w.to(tl.int64) * stride_w)[:, None] + p_c[None, :]
        old = tl.load(p, mask=kept[:, None] & in_c[None, :], other=0).to(tl.float32)
    return tl.where(before[:, None], old, b_x)


@triton.jit
def all_or_before(before, row, first, p_state, p_c, stride_w, in_c, known, W: tl.constexpr):
    """`or_before` of the W - 1 tokens before `row`."""
    found = (or_before(before[0], row - 1, first, p_state, p_c, stride_w, in_c, known, W),)
    for i in tl.static_range(1, W - 1):
        x = or_before(before[i], row - (1 + i), first, p_state, p_c, stride_w, in_c, known, W)
        found += (x,)
    return found


@triton.jit
def heads_normalized(y, HEAD: tl.constexpr, EPS: tl.constexpr):
    """Every HEAD columns of y over their norm."""
    HEADS: tl.constexpr = y.shape[1] // HEAD
    if HEADS == 1:
        return normalized(y, EPS)
    else:
        heads = tl.reshape(y, [y.shape[0] * HEADS, HEAD])
        return tl.reshape(normalized(heads, EPS), [y.shape[0], y.shape[1]])


@triton.jit
def starts_of(i_row, packed, BT: tl.constexpr):
    """Bit t: row t of a block is the first of a sequence, or of the rows of none."""
    tl.static_assert(BT <= 64, "a bit for each row of a block")
    o_t = tl.arange(0, BT)
    n = sequence_of(i_row + o_t, packed)
    starts = tl.load(packed.cu_seqlens + n).to(tl.int64) == i_row + o_t
    return tl.sum(starts.to(tl.int64) << o_t, 0)


@triton.jit
def convolve(
    x0,
    before,
    w,
    b_bias,
    live,
    p_out,
    written,
    HEAD: tl.constexpr,
    EPS: tl.constexpr,
    NVIDIA: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    SELECT: tl.constexpr,
):
    """A row of each lane. HEAD: channels of a head, each of which goes over its norm; 0: no norm.
    SELECT: rows that are not live are 0."""
    y = weighted(x0, before, w, b_bias, W)
    if SILU:
        y = y * logistic(y, NVIDIA)
    if SELECT:
        y = tl.where(live[:, None], y, 0.0)
    y = y.to(p_out.dtype.element_ty)
    if HEAD > 0:
        y = heads_normalized(y, HEAD, EPS)
    tl.store(p_out, y, mask=written)


@triton.jit
def conv_block(
    x,
    f,
    states,
    packed,
    out,
    o_c,
    in_c,
    o_out,
    i_b,
    i_row,
    n_rows,
    T,
    stride_xt,
    stride_xc,
    OUT_WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    EPS: tl.constexpr,
    NVIDIA: tl.constexpr,
    W: tl.constexpr,
    LANES: tl.constexpr,
    R: tl.constexpr,
    LAST_SKIPPED: tl.constexpr,
    SILU: tl.constexpr,
):
    """Some columns of a block of LANES * R rows, of which it has n_rows, R of them a lane; x and
    out start at its first, row i_row of batch entry i_b. o_c: the channels; o_out: their columns in
    out. A lane walks over its rows with the W - 1 before in registers."""
    BT: tl.constexpr = LANES * R
    IS_PACKED: tl.constexpr = packed.cu_seqlens is not None
    # Bit 0 of each lane's rows.
    FIRST_ROWS: tl.constexpr = ((1 << BT) - 1) // ((1 << R) - 1) if R > 1 else 0
    row = tl.arange(0, LANES) * R
    p_c = o_c.to(tl.int64) * stride_xc
    p_sc = o_c.to(tl.int64) * states.stride_c
    p_out = out + (row * OUT_WIDTH)[:, None] + o_out[None, :]
    # All loads of x before any use, before the search for the sequences, and before the barriers
    # that spread the taps.
    oldest = tl.maximum(-i_row, -W).to(tl.int32)
    stored = (token(x, row - 1, stride_xt, p_c, in_c, oldest, n_rows),)
    for i in tl.static_range(1, W - 1):
        stored += (token(x, row - (1 + i), stride_xt, p_c, in_c, oldest, n_rows),)
    rows = (token(x, row, stride_xt, p_c, in_c, oldest, n_rows),)
    for r in tl.static_range(1, R):
        rows += (token(x, row + r, stride_xt, p_c, in_c, oldest, n_rows),)

    if IS_PACKED:
        i_n = sequence_of(i_row, packed)
        first = tl.load(packed.cu_seqlens + i_n).to(tl.int64) - i_row
        # The rows of no sequence end with the last.
        p_end = packed.cu_seqlens + i_n + 1
        whole = tl.load(p_end, mask=i_n < packed.N, other=T).to(tl.int64) >= i_row + n_rows
        valid = i_n < packed.N
    else:
        i_n = i_b
        first = -i_row
        whole = True
        valid = True
    slot, live, known = state_of(i_n, states, valid, LAST_SKIPPED)
    before = (stored[0].to(tl.float32),)
    for i in tl.static_range(1, W - 1):
        before += (stored[i].to(tl.float32),)
    if whole & live:
        if (states.state is not None) | IS_PACKED:
            if first > -W:
                p_state = states.state
                if states.state is not None:
                    p_state += slot * states.stride_n
                near = first.to(tl.int32)
                before = all_or_before(
                    before, row, near, p_state, p_sc, states.stride_w, in_c, known, W
                )
        w, b_bias = taps(f, o_c, in_c, W, True)
        for r in tl.static_range(R):
            x0 = rows[r].to(tl.float32)
            p_row = p_out + r * OUT_WIDTH
            written = (row + r < n_rows)[:, None] & in_c[None, :]
            convolve(x0, before, w, b_bias, live, p_row, written, HEAD, EPS, NVIDIA, W, SILU, False)
            before = (x0,) + before[: W - 2]
    elif IS_PACKED | (states.read_slots is not None):
        if whole:
            nothing = tl.zeros([LANES, o_out.shape[0]], dtype=out.dtype.element_ty)
            for i_r in range(R):
                written = (row + i_r < n_rows)[:, None] & in_c[None, :]
                tl.store(p_out + i_r * OUT_WIDTH, nothing, mask=written)
        elif IS_PACKED:
            # The block has several sequences, or their end. Its rows are in the L1 cache now.
            starts = starts_of(i_row, packed, BT)
            are_live = row < 0
            w, b_bias = taps(f, o_c, in_c, W, True)
            for i_r in range(R):
                o_t = row + i_r
                if (i_r == 0) | (((starts >> i_r) & FIRST_ROWS) != 0):
                    # A lane starts, or goes on to another sequence. What a row's sequence starts
                    # from may be put in its place again.
                    n = sequence_of(i_row + o_t, packed)
                    firsts = tl.load(packed.cu_seqlens + n).to(tl.int64) - i_row
                    firsts = tl.maximum(firsts, -W).to(tl.int32)
                    slots, are_live, are_known = state_of(n, states, n < packed.N, LAST_SKIPPED)
                    p_states = states.state
                    if states.state is not None:
                        p_states += (slots * states.stride_n)[:, None]
                    before = all_or_before(
                        before, o_t, firsts, p_states, p_sc, states.stride_w, in_c, are_known, W
                    )
                if R == 1:
                    x0 = rows[0].to(tl.float32)
                else:
                    x0 = token(x, o_t, stride_xt, p_c, in_c, oldest, n_rows).to(tl.float32)
                p_row = p_out + i_r * OUT_WIDTH
                written = (o_t < n_rows)[:, None] & in_c[None, :]
                convolve(
                    x0,
                    before,
                    w,
                    b_bias,
                    are_live,
                    p_row,
                    written,
                    HEAD,
                    EPS,
                    NVIDIA,
                    W,
                    SILU,
                    True,
                )
                before = (x0,) + before[: W - 2]


@triton.jit(do_not_specialize=["T", "N", "STEPS", "stride_xb", "stride_xt", "stride_xc"])
def conv_kernel(
    x,
    weight,
    bias,
    state,
    read_slots,
    has_initial_state,
    cu_seqlens,
    a,
    b,
    A_log,
    dt_bias,
    q,
    k,
    v,
    g,
    beta,
    T,
    N,
    STEPS,
    stride_xb,
    stride_xt,
    stride_xc,
    stride_bc,
    stride_sn,
    stride_sc,
    stride_sw,
    stride_r,
    stride_i,
    stride_ab,
    stride_at,
    stride_ah,
    stride_bb,
    stride_bt,
    stride_bh,
    stride_wc: tl.constexpr,
    stride_ww: tl.constexpr,
    ALIGN: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    EPS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    NVIDIA: tl.constexpr,
    W: tl.constexpr,
    LANES: tl.constexpr,
    R: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    BG: tl.constexpr,
    QK_PARTS: tl.constexpr,
    V_PARTS: tl.constexpr,
    GATE_PARTS: tl.constexpr,
    LAST_SKIPPED: tl.constexpr,
    SILU: tl.constexpr,
    USE_L2NORM: tl.constexpr,
    G_EXP: tl.constexpr,
    CHANNEL_MAJOR: tl.constexpr,
):
    """Alone, v is the output and all columns are its own: H and HV are 0. Of the strides of x, the
    one that is 1 is given as 0."""
    PARTS: tl.constexpr = 2 * QK_PARTS + V_PARTS + GATE_PARTS
    BT: tl.constexpr = LANES * R
    pid = tl.program_id(0).to(tl.int64)
    part = (pid % PARTS).to(tl.int32)
    i_block = pid // PARTS
    blocks = tl.cdiv(T, BT)
    i_b, i_row = i_block // blocks, (i_block % blocks) * BT
    n_rows = tl.minimum(T - i_row, BT).to(tl.int32)
    i_out = i_b * T + i_row
    if GATE_PARTS > 0:
        if part >= 2 * QK_PARTS + V_PARTS:
            prepare_gates(
                a + i_b * stride_ab + i_row * stride_at,
                b + i_b * stride_bb + i_row * stride_bt,
                A_log,
                dt_bias,
                g + i_out * HV,
                beta + i_out * HV,
                part - 2 * QK_PARTS - V_PARTS,
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
            return
    if CHANNEL_MAJOR:
        stride_t = 1
        stride_c = stride_xc.to(tl.int64) * ALIGN
    else:
        stride_t = stride_xt.to(tl.int64) * ALIGN
        stride_c = 1
    x += i_b * stride_xb.to(tl.int64) * ALIGN + i_row * stride_t
    f = Filter(weight, bias, stride_wc, stride_ww, stride_bc)
    states = States(
        state,
        read_slots,
        has_initial_state,
        stride_sn,
        stride_sc,
        stride_sw,
        stride_r,
        stride_i,
    )
    packed = Packed(cu_seqlens, N, STEPS)
    i_f = tl.arange(0, BC)
    if QK_PARTS > 0:
        if part < 2 * QK_PARTS:
            out = q
            start = 0
            if part >= QK_PARTS:
                out = k
                start = H * K
                part -= QK_PARTS
            if USE_L2NORM:
                # Whole heads, each in BK columns.
                i_h = part * (BC // BK) + i_f // BK
                in_c = (i_h < H) & (i_f % BK < K)
                o_out = i_h * K + i_f % BK
            else:
                o_out = part * BC + i_f
                in_c = o_out < H * K
            conv_block(
                x,
                f,
                states,
                packed,
                out + i_out * (H * K),
                start + o_out,
                in_c,
                o_out,
                i_b,
                i_row,
                n_rows,
                T,
                stride_t,
                stride_c,
                H * K,
                BK if USE_L2NORM else 0,
                EPS,
                NVIDIA,
                W,
                LANES,
                R,
                LAST_SKIPPED,
                SILU,
            )
            return
    o_v = (part - 2 * QK_PARTS) * BC + i_f
    conv_block(
        x,
        f,
        states,
        packed,
        v + i_out * V_COLUMNS,
        2 * H * K + o_v,
        o_v < V_COLUMNS,
        o_v,
        i_b,
        i_row,
        n_rows,
        T,
        stride_t,
        stride_c,
        V_COLUMNS,
        0,
        EPS,
        NVIDIA,
        W,
        LANES,
        R,
        LAST_SKIPPED,
        SILU,
    )


# ------------------------------------------------------------------------ one token after the other


@triton.jit
def keep_tokens(
    before, states, slot, o_c, D: tl.constexpr, W: tl.constexpr, LAST_SKIPPED: tl.constexpr
):
    """The last W - 1 tokens, the latest first, to a slot, unless that is padding."""
    mask = o_c < tl.where(slot > LAST_SKIPPED, D, 0)
    p = states.state + slot * states.stride_n + o_c * states.stride_c
    for i in tl.static_range(W - 1):
        tl.store(p + (W - 2 - i) * states.stride_w, before[i], mask=mask)


@triton.jit
def left_behind(
    p_x, p_state, o_c, n_tokens, known, stride_xt, stride_sw, BACK: tl.constexpr, D: tl.constexpr, W
):
    """The token that is BACK from the end of a sequence: its own, or of the state that it starts
    from, in the state's dtype."""
    own = n_tokens >= BACK
    p_own = p_x + (n_tokens - BACK) * stride_xt
    p_old = p_state + (W - 1 - BACK + n_tokens) * stride_sw
    b_own = tl.load(p_own, mask=o_c < tl.where(own, D, 0), other=0)
    b_old = tl.load(p_old, mask=o_c < tl.where(known & (own == 0), D, 0), other=0)
    return tl.where(own, b_own.to(b_old.dtype), b_old)


@triton.jit(do_not_specialize=["T", "N"])
def conv_state_kernel(
    x,
    weight,
    bias,
    y,
    state,
    read_slots,
    write_slots,
    has_initial_state,
    cu_seqlens,
    T,
    N,
    stride_xb,
    stride_xt,
    stride_xc,
    stride_bc,
    stride_sn,
    stride_sc,
    stride_sw,
    stride_r,
    stride_wb,
    stride_wt,
    stride_i,
    stride_wc: tl.constexpr,
    stride_ww: tl.constexpr,
    NVIDIA: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    BC: tl.constexpr,
    EVERY_TOKEN: tl.constexpr,
    LAST_SKIPPED: tl.constexpr,
    SILU: tl.constexpr,
):
    """y None: no output, so that only the tokens that stay in a state are read, all at once."""
    WALKS: tl.constexpr = (y is not None) or EVERY_TOKEN
    PARTS: tl.constexpr = (D + BC - 1) // BC
    pid = tl.program_id(0).to(tl.int64)
    i_n = pid // PARTS
    o_c = pid % PARTS * BC + tl.arange(0, BC)
    in_c = o_c < D
    if cu_seqlens is None:
        i_b = i_n
        i_row = i_n * 0
        n_tokens = i_row + T
    else:
        # Program N of a part writes the zeros of the rows after the last sequence.
        i_b = i_n * 0
        i_row = tl.load(cu_seqlens + i_n).to(tl.int64)
        end = tl.load(cu_seqlens + i_n + 1, mask=i_n < N, other=T).to(tl.int64)
        n_tokens = end - i_row
    f = Filter(weight, bias, stride_wc, stride_ww, stride_bc)
    states = States(
        state,
        read_slots,
        has_initial_state,
        stride_sn,
        stride_sc,
        stride_sw,
        stride_r,
        stride_i,
    )
    slot, live, known = state_of(i_n, states, i_n < N, LAST_SKIPPED)
    if y is not None:
        p_y = y + (i_b * T + i_row) * D + o_c
        if not live:
            nothing = tl.zeros([BC], dtype=y.dtype.element_ty)
            for _ in range(0, n_tokens):
                tl.store(p_y, nothing, mask=in_c)
                p_y += D
    if live:
        kept: tl.constexpr = state.dtype.element_ty
        p_0 = state + slot * stride_sn + o_c * stride_sc
        p_x = x + i_b * stride_xb + i_row * stride_xt + o_c * stride_xc
        if WALKS:
            in_state = o_c < tl.where(known, D, 0)
            before = (tl.load(p_0 + (W - 2) * stride_sw, mask=in_state, other=0),)
            for i in tl.static_range(1, W - 1):
                before += (tl.load(p_0 + (W - 2 - i) * stride_sw, mask=in_state, other=0),)
        else:
            before = (left_behind(p_x, p_0, o_c, n_tokens, known, stride_xt, stride_sw, 1, D, W),)
            for i in tl.static_range(2, W):
                before += (
                    left_behind(p_x, p_0, o_c, n_tokens, known, stride_xt, stride_sw, i, D, W),
                )
        # A thread may write what another one reads.
        tl.debug_barrier()
        if y is not None:
            w, b_bias = taps(f, o_c, in_c, W, False)
        if write_slots is not None:
            p_slot = write_slots + i_b * stride_wb
            if EVERY_TOKEN:
                p_slot += i_row * stride_wt
            else:
                slot = tl.load(write_slots + i_n * stride_wb).to(tl.int64)
        if WALKS:
            for i_t in range(0, n_tokens):
                x0 = tl.load(p_x, mask=in_c, other=0)
                p_x += stride_xt
                if y is not None:
                    wide = (before[0].to(tl.float32),)
                    for i in tl.static_range(1, W - 1):
                        wide += (before[i].to(tl.float32),)
                    b_y = weighted(x0.to(tl.float32), wide, w, b_bias, W)
                    if SILU:
                        b_y = b_y * logistic(b_y, NVIDIA)
                    tl.store(p_y, b_y.to(y.dtype.element_ty), mask=in_c)
                    p_y += D
                before = (x0.to(kept),) + before[: W - 2]
                if EVERY_TOKEN:
                    slot = tl.load(p_slot + i_t * stride_wt).to(tl.int64)
                    keep_tokens(before, states, slot, o_c, D, W, LAST_SKIPPED)
        if not EVERY_TOKEN:
            keep_tokens(before, states, slot, o_c, D, W, LAST_SKIPPED)


# ------------------------------------------------------------------------------------------- launch


class Layout(NamedTuple):
    """x [B, T, D] as the kernel reads it: strides in units of `align` elements but for the one that
    is 1, which is given as 0."""

    channel_major: bool
    align: int
    batch: int
    token: int
    channel: int


def layout_of(x: torch.Tensor) -> tuple[torch.Tensor, Layout]:
    """x, copied first unless its channels or its tokens are dense, and how it lies."""
    if x.stride(2) != 1 and x.stride(1) != 1:
        x = x.contiguous()
    batch, token, channel = x.stride()
    batch = 0 if x.shape[0] == 1 else batch
    channel_major = channel != 1
    # The largest power of two up to 16 that divides the distances of runs: a load's width.
    runs = batch | (channel if channel_major else token) | 16
    align = runs & -runs
    if channel_major:
        return x, Layout(True, align, batch // align, 0, channel // align)
    return x, Layout(False, align, batch // align, token // align, 0)


def strides(x: torch.Tensor | None, count: int) -> tuple[int, ...]:
    """`count` strides of x, 0 for those that it does not have."""
    return (0,) * count if x is None else (*x.stride(), *(0,) * (count - x.dim()))


def on_nvidia() -> bool:
    """Whether NVIDIA's instructions are there: not in the interpreter, nor on other GPUs."""
    return not triton.knobs.runtime.interpret and target()[0] == "cuda"


@functools.lru_cache(maxsize=256, typed=True)
def conv_launch(
    D: int,
    W: int,
    itemsize: int,
    align: int,
    channel_major: bool,
    heads: tuple[int, int, int] | None,
    V_COLUMNS: int,
    weight_strides: tuple[int, ...],
    bias_strides: tuple[int, ...],
    state_strides: tuple[int, ...],
    slot_strides: tuple[int, ...],
    flag_strides: tuple[int, ...],
    a_strides: tuple[int, ...],
    b_strides: tuple[int, ...],
    last_skipped: int,
    silu: bool,
    use_l2norm: bool,
    g_exp: bool,
) -> tuple[int, int, Launch]:
    """The tokens of a block, its programs, and the kernel with all that is the same in calls of
    other lengths. heads: H, HV, K, or None for the convolution alone."""
    config = CHANNEL_MAJOR if channel_major else TOKEN_MAJOR
    H, HV, K = heads or (0, 0, 1)
    BK = triton.next_power_of_2(K)
    columns = config.columns // itemsize
    BC = max(columns, BK) if use_l2norm else columns
    LANES = max(1, config.lanes * columns // BC)
    BT = LANES * config.tokens
    qk_parts = triton.cdiv(H, BC // BK) if use_l2norm else triton.cdiv(H * K, BC)
    v_parts = triton.cdiv(V_COLUMNS, BC)
    gate_parts = triton.cdiv(BT * HV, GATE_TILE)
    launch = Launch(
        conv_kernel,
        **named("bc", bias_strides),
        **named("sn sc sw", state_strides),
        **named("r", slot_strides),
        **named("i", flag_strides),
        **named("ab at ah", a_strides),
        **named("bb bt bh", b_strides),
        **named("wc ww", weight_strides),
        ALIGN=align,
        H=H,
        HV=HV,
        K=K,
        V_COLUMNS=V_COLUMNS,
        EPS=L2NORM_EPS,
        THRESHOLD=SOFTPLUS_THRESHOLD,
        NVIDIA=on_nvidia(),
        W=W,
        LANES=LANES,
        R=config.tokens,
        BC=BC,
        BK=BK,
        BG=GATE_TILE,
        QK_PARTS=qk_parts,
        V_PARTS=v_parts,
        GATE_PARTS=gate_parts,
        LAST_SKIPPED=last_skipped,
        SILU=silu,
        USE_L2NORM=use_l2norm,
        G_EXP=g_exp,
        CHANNEL_MAJOR=channel_major,
        **UNFUSED,
        num_warps=config.num_warps,
    )
    return BT, 2 * qk_parts + v_parts + gate_parts, launch


def launch_conv(
    problem: ConvProblem,
    given: ConvOperands,
    outputs: tuple[torch.Tensor | None, ...],
    prep: PrepOperands | None,
) -> None:
    """outputs: q, k, v, g, beta, of which the convolution alone has v."""
    p = problem
    if p.B * p.T > 0:
        x, layout = layout_of(given.x)
        a, b = (prep.a, prep.b) if prep is not None else (None, None)
        BT, parts, launch = conv_launch(
            p.D,
            p.W,
            x.element_size(),
            layout.align,
            layout.channel_major,
            None if prep is None else (prep.H, prep.HV, prep.K),
            p.D if prep is None else prep.HV * prep.V,
            given.weight.stride(),
            strides(given.bias, 1),
            strides(given.state, 3),
            strides(given.read_slots, 1),
            strides(given.has_initial_state, 1),
            strides(a, 3),
            strides(b, 3),
            p.last_skipped,
            p.silu,
            prep is not None and prep.use_l2norm,
            prep is not None and prep.g_exp,
        )
        q, k, v, g, beta = outputs
        launch(
            (p.B * -(-p.T // BT) * parts, 1, 1),
            x=x,
            weight=given.weight,
            bias=given.bias,
            state=given.state,
            read_slots=given.read_slots,
            has_initial_state=given.has_initial_state,
            cu_seqlens=None if given.cu_seqlens is None else given.cu_seqlens.contiguous(),
            a=a,
            b=b,
            A_log=None if prep is None else prep.A_log.contiguous(),
            dt_bias=None if prep is None else prep.dt_bias.contiguous(),
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            T=p.T,
            N=p.N,
            STEPS=p.N.bit_length(),
            stride_xb=layout.batch,
            stride_xt=layout.token,
            stride_xc=layout.channel,
        )
    if given.state is not None:
        conv_walk(p, given, None)


def conv_fwd(problem: ConvProblem, given: ConvOperands) -> torch.Tensor:
    """The convolution of x, [B, T, D], contiguous; the states are written."""
    y = given.x.new_empty((problem.B, problem.T, problem.D))
    launch_conv(problem, given, (None, None, y, None, None), None)
    return y


def conv_prep_fwd(
    problem: ConvProblem, given: ConvOperands, prep: PrepOperands
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k [B, T, H, K] and v [B, T, HV, V] in x's dtype, g and beta [B, T, HV] in fp32; the states
    are written."""
    lead, x = (problem.B, problem.T), given.x
    q = x.new_empty((*lead, prep.H, prep.K))
    k = torch.empty_like(q)
    v = x.new_empty((*lead, prep.HV, prep.V))
    g = x.new_empty((*lead, prep.HV), dtype=torch.float32)
    beta = torch.empty_like(g)
    launch_conv(problem, given, (q, k, v, g, beta), prep)
    return q, k, v, g, beta


@functools.lru_cache(maxsize=256, typed=True)
def walk_launch(
    D: int,
    W: int,
    itemsize: int,
    x_strides: tuple[int, ...],
    weight_strides: tuple[int, ...],
    bias_strides: tuple[int, ...],
    state_strides: tuple[int, ...],
    read_strides: tuple[int, ...],
    write_strides: tuple[int, ...],
    flag_strides: tuple[int, ...],
    every_token: bool,
    last_skipped: int,
    silu: bool,
) -> tuple[int, Launch]:
    """The programs of a sequence, and the kernel."""
    BC = WALK_COLUMNS // itemsize
    launch = Launch(
        conv_state_kernel,
        **named("xb xt xc", x_strides),
        **named("bc", bias_strides),
        **named("sn sc sw", state_strides),
        **named("r", read_strides),
        **named("wb wt", write_strides),
        **named("i", flag_strides),
        **named("wc ww", weight_strides),
        NVIDIA=on_nvidia(),
        D=D,
        W=W,
        BC=BC,
        EVERY_TOKEN=every_token,
        LAST_SKIPPED=last_skipped,
        SILU=silu,
        **UNFUSED,
        num_warps=1,
    )
    return triton.cdiv(D, BC), launch


def conv_walk(problem: ConvProblem, given: ConvOperands, y: torch.Tensor | None) -> None:
    """The states after the call, and y [B, T, D], contiguous, if it is given."""
    p, x = problem, given.x
    packed = given.cu_seqlens is not None
    parts, launch = walk_launch(
        p.D,
        p.W,
        x.element_size(),
        (0 if p.B == 1 else x.stride(0), *x.stride()[1:]),
        given.weight.stride(),
        strides(given.bias, 1),
        strides(given.state, 3),
        strides(given.read_slots, 1),
        strides(given.write_slots, 2),
        strides(given.has_initial_state, 1),
        p.every_token,
        p.last_skipped,
        p.silu,
    )
    programs = (p.N + (packed and y is not None)) * parts
    if programs == 0:
        return
    launch(
        (programs, 1, 1),
        x=x,
        weight=given.weight,
        bias=given.bias,
        y=y,
        state=given.state,
        read_slots=given.read_slots,
        write_slots=given.write_slots,
        has_initial_state=given.has_initial_state,
        cu_seqlens=None if given.cu_seqlens is None else given.cu_seqlens.contiguous(),
        T=p.T,
        N=p.N,
    )


def conv_update_fwd(problem: ConvProblem, given: ConvOperands) -> torch.Tensor:
    """`conv_fwd` token by token, for few tokens a sequence."""
    y = given.x.new_empty((problem.B, problem.T, problem.D))
    conv_walk(problem, given, y)
    return y
