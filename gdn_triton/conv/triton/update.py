"""The convolution token by token, and the states after a call.

A program has some channels of one sequence and walks over its tokens, with the last W - 1 tokens in
registers. This is the step of decoding. Without an output the kernel only writes the states after a
longer call, and reads only the tokens that stay in them. It then runs after `conv_kernel`, whose
programs read the states in any order.
"""

import functools

import torch
import triton
import triton.language as tl

from gdn_triton._host.memory import count_writes
from gdn_triton._triton.launch import Launch
from gdn_triton._triton.strides import named
from gdn_triton._triton.taps import Filter, logistic, on_nvidia, taps, weighted
from gdn_triton._triton.tiles import UNFUSED
from gdn_triton.conv.problem import ConvOperands, ConvProblem
from gdn_triton.conv.triton.rows import States, state_of, strides
from gdn_triton.conv.triton.runs import load_columns, store_columns

# The threads of a program that walks (one warp), and the bytes of a token of x, or of the state,
# that each thread has.
THREADS = 32
BYTES = 16
# The most columns of a slot, with num_accepted_tokens, that a thread holds in registers.
MOST_COLUMNS = 12


@triton.jit
def keep_tokens(
    before, states, slot, o_run, o_c, D: tl.constexpr, W: tl.constexpr, LAST_SKIPPED: tl.constexpr,
    DENSE: tl.constexpr,
):  # fmt: skip
    """Stores the last W - 1 tokens, given the latest first, to a slot that is not padding."""
    end = tl.where(slot > LAST_SKIPPED, D, 0)
    if DENSE:
        oldest_first = ()
        for i in tl.static_range(W - 1):
            oldest_first += (before[W - 2 - i],)
        p = states.state + slot * states.stride_n
        store_columns(p, oldest_first, o_run, end, W - 1, o_c.shape[1])
    else:
        p = states.state + slot * states.stride_n + o_c * states.stride_c
        stride_w = tl.cast(states.stride_w, tl.int64)
        for i in tl.static_range(W - 1):
            tl.store(p + stride_w * (W - 2 - i), before[i], mask=o_c < end)


@triton.jit
def known_tokens(
    states, slot, o_run, o_c, end, last, W: tl.constexpr, DENSE: tl.constexpr
):  # fmt: skip
    """Loads the W - 1 tokens that end with column `last` of a slot, the latest first; 0 from
    channel `end` on."""
    before = ()
    if DENSE:
        p = states.state + slot * states.stride_n
        columns = load_columns(p, o_run, end, W - 1, o_c.shape[1])
        for i in tl.static_range(W - 1):
            before += (columns[W - 2 - i],)
    else:
        stride_w = tl.cast(states.stride_w, tl.int64)
        p = states.state + slot * states.stride_n + o_c * states.stride_c + last * stride_w
        for i in tl.static_range(W - 1):
            before += (tl.load(p - i * stride_w, mask=o_c < end, other=0),)
    return before


@triton.jit
def columns_before(columns, first, W: tl.constexpr):
    """Selects W - 1 of a slot's columns, from column `first` on, the latest first."""
    before = ()
    for i in tl.static_range(W - 1):
        token = columns[W - 2 - i]
        for c in tl.static_range(W - 1 - i, len(columns)):
            token = tl.where(first + W - 2 - i == c, columns[c], token)
        before += (token,)
    return before


@triton.jit
def columns_after(columns, before, W: tl.constexpr):
    """Moves the W - 2 latest of the tokens `before` to the first columns."""
    found = ()
    for c in tl.static_range(W - 2):
        found += (before[W - 3 - c],)
    for c in tl.static_range(W - 2, len(columns)):
        found += (columns[c],)
    return found


@triton.jit
def columns_with(columns, token, place, W: tl.constexpr):
    """Replaces column `place`, which is at least W - 2, by a token, if there is such a column."""
    found = ()
    for c in tl.static_range(W - 2):
        found += (columns[c],)
    for c in tl.static_range(W - 2, len(columns)):
        found += (tl.where(place == c, token, columns[c]),)
    return found


@triton.jit
def dense_taps(f, o_run, o_c, W: tl.constexpr, D: tl.constexpr):
    """Does the same as `taps` for a dense weight."""
    columns = load_columns(f.weight, o_run, D, W, o_c.shape[1])
    w = ()
    for i in tl.static_range(W):
        w += (columns[W - 1 - i].to(tl.float32),)
    b_bias = 0.0
    if f.bias is not None:
        b_bias = tl.load(f.bias + o_c * f.stride_bias, mask=o_c < D, other=0).to(tl.float32)
    return w, b_bias


@triton.jit
def left_behind(
    p_x, p_state, o_c, n_tokens, known, stride_xt, stride_sw, BACK: tl.constexpr, D: tl.constexpr, W
):
    """Loads the token BACK places from the end of a sequence, in the state's dtype. A sequence with
    fewer tokens takes it from the state that it starts from."""
    own = n_tokens >= BACK
    p_own = p_x + (n_tokens - BACK) * stride_xt
    p_old = p_state + (W - 1 - BACK + n_tokens) * stride_sw
    b_own = tl.load(p_own, mask=o_c < tl.where(own, D, 0), other=0)
    b_old = tl.load(p_old, mask=o_c < tl.where(known & (own == 0), D, 0), other=0)
    return tl.where(own, b_own.to(b_old.dtype), b_old)


@triton.jit
def tokens_above(
    i_t, p_parents, stride_pt, p_x, stride_xt, p_last, stride_sw, o_c, known, D: tl.constexpr,
    W: tl.constexpr
):  # fmt: skip
    """The W - 1 tokens before node i_t on the way to its root, the latest first, in the state's
    dtype. p_x: the sequence's first token. p_last: the last token of its state, which comes before
    a root."""
    node = tl.cast(i_t, tl.int64)
    back = node * 0
    before = ()
    for _ in tl.static_range(W - 1):
        node = tl.load(p_parents + node * stride_pt, mask=node >= 0, other=-1).to(tl.int64)
        own = node >= 0
        b_own = tl.load(p_x + node * stride_xt, mask=o_c < tl.where(own, D, 0), other=0)
        in_state = o_c < tl.where(known & (own == 0), D, 0)
        b_old = tl.load(p_last - back * stride_sw, mask=in_state, other=0)
        before += (tl.where(own, b_own.to(b_old.dtype), b_old),)
        back += tl.where(own, 0, 1)
    return before


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
    num_accepted_tokens,
    parents,
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
    stride_n,
    stride_pb,
    stride_pt,
    stride_wc: tl.constexpr,
    stride_ww: tl.constexpr,
    NVIDIA: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    BT: tl.constexpr,
    RUN: tl.constexpr,
    DENSE_TAPS: tl.constexpr,
    DENSE_STATE: tl.constexpr,
    EVERY_TOKEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAST_SKIPPED: tl.constexpr,
    SILU: tl.constexpr,
):
    """y None: there is no output, and only the tokens that stay in a state are read, all at once.
    COLUMNS: the columns of a slot, with num_accepted_tokens, which come with y only. A program has
    BT runs of RUN channels. DENSE_TAPS, DENSE_STATE: the taps, or the tokens of a state, are dense
    for all channels of a run, and the kernel loads them in words of 16 bytes. Strided loads of two
    bytes would be bound by the number of requests to the cache, not by memory."""
    WALKS: tl.constexpr = (y is not None) or EVERY_TOKEN
    PARTS: tl.constexpr = (D + BT * RUN - 1) // (BT * RUN)
    pid = tl.program_id(0).to(tl.int64)
    i_n = pid // PARTS
    o_run = pid % PARTS * BT + tl.arange(0, BT)
    o_c = (o_run * RUN)[:, None] + tl.arange(0, RUN)[None, :]
    in_c = o_c < D
    # Widen the stride to 64 bits, because a multiple of it may not fit 32 bits.
    stride_sw = tl.cast(stride_sw, tl.int64)
    if cu_seqlens is None:
        i_b = i_n
        i_row = i_n * 0
        n_tokens = i_row + T
    else:
        # Program N of a part writes zeros to the rows after the last sequence.
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
    first = i_n * 0
    if num_accepted_tokens is not None:
        first = tl.load(num_accepted_tokens + i_n * stride_n, mask=live, other=0).to(tl.int64) - 1
        live = live & (first >= 0) & (first + W - 1 <= COLUMNS)
        known = live
    p_x = x + i_b * stride_xb + i_row * stride_xt + o_c * stride_xc
    if y is not None:
        # Load the first token and the taps here, because they do not depend on the slot. The loop
        # loads one token ahead.
        next_x = tl.load(p_x, mask=o_c < tl.where(n_tokens > 0, D, 0), other=0)
        if DENSE_TAPS:
            w, b_bias = dense_taps(f, o_run, o_c, W, D)
        else:
            w, b_bias = taps(f, o_c, in_c, W, False)
        p_y = y + (i_b * T + i_row) * D + o_c
        if not live:
            nothing = tl.zeros([BT, RUN], dtype=y.dtype.element_ty)
            for _ in range(0, n_tokens):
                tl.store(p_y, nothing, mask=in_c)
                p_y += D
    if live:
        kept: tl.constexpr = state.dtype.element_ty
        p_0 = state + slot * stride_sn + o_c * stride_sc
        if WALKS:
            end_c = tl.where(known, D, 0)
            if DENSE_STATE and COLUMNS > 0:
                columns = load_columns(state + slot * stride_sn, o_run, end_c, COLUMNS, RUN)
                before = columns_before(columns, first, W)
            else:
                before = known_tokens(
                    states, slot, o_run, o_c, end_c, first + W - 2, W, DENSE_STATE
                )
        else:
            before = (left_behind(p_x, p_0, o_c, n_tokens, known, stride_xt, stride_sw, 1, D, W),)
            for i in tl.static_range(2, W):
                before += (
                    left_behind(p_x, p_0, o_c, n_tokens, known, stride_xt, stride_sw, i, D, W),
                )
        # Wait here, because a thread may write an element that another one reads.
        tl.debug_barrier()
        if write_slots is not None:
            p_slot = write_slots + i_b * stride_wb
            if EVERY_TOKEN:
                p_slot += i_row * stride_wt
            else:
                slot = tl.load(write_slots + i_n * stride_wb).to(tl.int64)
        if DENSE_STATE and COLUMNS > 0:
            columns = columns_after(columns, before, W)
        elif num_accepted_tokens is not None:
            in_kept = o_c < tl.where(n_tokens > 0, D, 0)
            for i in tl.static_range(W - 2):
                tl.store(p_0 + (W - 3 - i) * stride_sw, before[i], mask=in_kept)
        if WALKS:
            p_first = p_x
            for i_t in range(0, n_tokens):
                if y is None:
                    x0 = tl.load(p_x, mask=in_c, other=0)
                else:
                    x0 = next_x
                    more = o_c < tl.where(i_t + 1 < n_tokens, D, 0)
                    next_x = tl.load(p_x + stride_xt, mask=more, other=0)
                if parents is not None:
                    p_parents = parents + i_b * stride_pb + i_row * stride_pt
                    before = tokens_above(
                        i_t, p_parents, stride_pt, p_first, stride_xt, p_0 + (W - 2) * stride_sw,
                        stride_sw, o_c, known, D, W
                    )  # fmt: skip
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
                if DENSE_STATE and COLUMNS > 0:
                    columns = columns_with(columns, x0.to(kept), W - 2 + i_t, W)
                elif num_accepted_tokens is not None:
                    in_kept = o_c < tl.where(W - 2 + i_t < COLUMNS, D, 0)
                    tl.store(p_0 + (W - 2 + i_t) * stride_sw, x0.to(kept), mask=in_kept)
                if EVERY_TOKEN:
                    slot = tl.load(p_slot + i_t * stride_wt).to(tl.int64)
                    keep_tokens(before, states, slot, o_run, o_c, D, W, LAST_SKIPPED, DENSE_STATE)
        if DENSE_STATE and COLUMNS > 0:
            end_c = tl.where(n_tokens > 0, D, 0)
            store_columns(state + slot * stride_sn, columns, o_run, end_c, COLUMNS, RUN)
        elif not EVERY_TOKEN and num_accepted_tokens is None:
            keep_tokens(before, states, slot, o_run, o_c, D, W, LAST_SKIPPED, DENSE_STATE)


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
    accepted_strides: tuple[int, ...],
    parent_strides: tuple[int, ...],
    every_token: bool,
    columns: int,
    last_skipped: int,
    silu: bool,
) -> tuple[int, Launch]:
    """Returns the number of programs of a sequence, and the kernel. itemsize: the larger one of x
    and the state."""
    run = BYTES // itemsize
    dense = weight_strides == (W, 1), state_strides[1:] == (columns or W - 1, 1)
    launch = Launch(
        conv_state_kernel,
        **named("xb xt xc", x_strides),
        **named("bc", bias_strides),
        **named("sn sc sw", state_strides),
        **named("r", read_strides),
        **named("wb wt", write_strides),
        **named("i", flag_strides),
        **named("n", accepted_strides),
        **named("pb pt", parent_strides),
        **named("wc ww", weight_strides),
        NVIDIA=on_nvidia(),
        D=D,
        W=W,
        BT=THREADS,
        RUN=run,
        DENSE_TAPS=dense[0],
        DENSE_STATE=dense[1] and columns <= MOST_COLUMNS,
        EVERY_TOKEN=every_token,
        COLUMNS=columns,
        LAST_SKIPPED=last_skipped,
        SILU=silu,
        **UNFUSED,
        num_warps=1,
    )
    return triton.cdiv(D, THREADS * run), launch


def conv_walk(problem: ConvProblem, given: ConvOperands, y: torch.Tensor | None) -> None:
    """Writes the states after the call, and y [B, T, D], contiguous, if y is given."""
    p, x = problem, given.x
    packed = given.cu_seqlens is not None
    parts, launch = walk_launch(
        p.D,
        p.W,
        max(x.element_size(), 0 if given.state is None else given.state.element_size()),
        (0 if p.B == 1 else x.stride(0), *x.stride()[1:]),
        given.weight.stride(),
        strides(given.bias, 1),
        strides(given.state, 3),
        strides(given.read_slots, 1),
        strides(given.write_slots, 2),
        strides(given.has_initial_state, 1),
        strides(given.num_accepted_tokens, 1),
        strides(given.parents, 2),
        p.every_token,
        p.columns,
        p.last_skipped,
        p.silu,
    )
    programs = (p.N + (packed and y is not None)) * parts
    if programs == 0:
        return
    count_writes(given.state)
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
        num_accepted_tokens=given.num_accepted_tokens,
        parents=given.parents,
        T=p.T,
        N=p.N,
    )


def conv_update_fwd(problem: ConvProblem, given: ConvOperands) -> torch.Tensor:
    """Does the same as `conv_fwd` token by token, for few tokens in each sequence."""
    y = given.x.new_empty((problem.B, problem.T, problem.D))
    conv_walk(problem, given, y)
    return y
