"""The parts of a layer's step of several tokens around the recurrence, for kernels that run a whole
step in one launch.

A program of the recurrence has a part of one value head. It first convolves all tokens of its own
channels, and writes them to memory of its own, from which it then loads one token after another. No
program writes the convolution's state of q and k before the last program of the key head, which
finds that all programs have finished, and which then also computes the norms.
"""

import triton
import triton.language as tl

from gdn_triton._triton.taps import convolved
from gdn_triton.recurrent.triton.layer import head_norms, is_last


@triton.jit
def start_slot(
    p_slot, num_accepted_tokens, i_n, known, stride_sc, stride_n, S: tl.constexpr,
    LAST_SKIPPED: tl.constexpr
):  # fmt: skip
    """Returns the slot of the state from which sequence i_n starts. p_slot: its first of S slots,
    or its slot without num_accepted_tokens. known: whether there is such a sequence; otherwise, and
    for a number that is not in 1 to S, the slot is padding."""
    if num_accepted_tokens is None:
        slot = tl.load(p_slot, mask=known, other=LAST_SKIPPED)
    else:
        p_accepted = num_accepted_tokens + i_n * stride_n
        column = tl.load(p_accepted, mask=known, other=0).to(tl.int64) - 1
        known = (column >= 0) & (column < S)
        slot = tl.load(p_slot + column * stride_sc, mask=known, other=LAST_SKIPPED)
    return slot.to(tl.int64)


@triton.jit
def own_rows(
    p_x, o_c, in_c, n_tokens, stride_xt, stride_xc, FIRST: tl.constexpr, BT: tl.constexpr,
    W: tl.constexpr
):  # fmt: skip
    """Returns W tiles [BT, channels]: the tokens from FIRST on, and the tokens 1 to W - 1 places
    before each, 0 where these are tokens of the convolution's state."""
    o_t = FIRST + tl.arange(0, BT)[:, None]
    p_c = p_x + o_c.to(tl.int64)[None, :] * stride_xc
    rows = ()
    for back in tl.static_range(W):
        t = o_t - back
        mask = (t >= 0) & (o_t < n_tokens) & in_c[None, :]
        rows += (tl.load(p_c + t.to(tl.int64) * stride_xt, mask=mask, other=0),)
    return rows


@triton.jit
def old_rows(p_conv, o_c, in_c, stride_cc, stride_cw, BT: tl.constexpr, W: tl.constexpr):
    """Returns W - 1 tiles [BT, channels]: the tokens of the convolution's state 1 to W - 1 places
    before each token, 0 where these are tokens of the call."""
    o_t = tl.arange(0, BT)[:, None]
    p_c = p_conv + o_c.to(tl.int64)[None, :] * stride_cc
    rows = ()
    for back in tl.static_range(1, W):
        t = o_t - back
        p_old = p_c + (t + (W - 1)).to(tl.int64) * stride_cw
        rows += (tl.load(p_old, mask=(t < 0) & in_c[None, :], other=0),)
    return rows


@triton.jit
def convolved_rows(own, old, w, b_bias, W: tl.constexpr, SILU: tl.constexpr, NVIDIA: tl.constexpr):
    """Returns the convolution of the tokens, in their dtype. own, old: the results of the functions
    above; None for old if the first token has W - 1 tokens of the call before it. w, b_bias: the
    result of `taps`, as rows."""
    o_t = tl.arange(0, own[0].shape[0])[:, None]
    before = ()
    for back in tl.static_range(1, W):
        row = own[back].to(tl.float32)
        if old is not None:
            row = tl.where(o_t < back, old[back - 1].to(tl.float32), row)
        before += (row,)
    return convolved(own[0], before, w, b_bias, W, SILU, NVIDIA)


@triton.jit
def node_rows(
    p_x, p_conv, p_parent, o_c, in_c, n_tokens, stride_xt, stride_xc, stride_cc, stride_cw,
    stride_pt, BT: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Returns W tiles [BT, channels]: the nodes of trees, in the dtype of x, and then, in the dtype
    of the state, the tokens 1 to W - 1 places before each on the way to its root and in the
    convolution's state. p_parent: the parents of the nodes; None: each follows the one before."""
    o_t, wide_c = tl.arange(0, BT)[:, None], o_c.to(tl.int64)[None, :]
    node, old = o_t.to(tl.int64), o_t * 0 + (W - 2)
    in_rows = (o_t < n_tokens) & in_c[None, :]
    p_c, p_old = p_x + wide_c * stride_xc, p_conv + wide_c * stride_cc
    rows = (tl.load(p_c + node * stride_xt, mask=in_rows, other=0),)
    for _ in tl.static_range(1, W):
        if p_parent is None:
            node = tl.where(node >= 0, node - 1, -1)
        else:
            p_next = p_parent + node * stride_pt
            node = tl.load(p_next, mask=(node >= 0) & (o_t < n_tokens), other=-1).to(tl.int64)
        own = node >= 0
        b_own = tl.load(p_c + node * stride_xt, mask=in_rows & own, other=0)
        p_column = p_old + old.to(tl.int64) * stride_cw
        b_old = tl.load(p_column, mask=in_rows & (node < 0), other=0)
        rows += (tl.where(own, b_own.to(b_old.dtype), b_old),)
        old -= tl.where(own, 0, 1)
    return rows


@triton.jit
def convolved_nodes(rows, w, b_bias, W: tl.constexpr, SILU: tl.constexpr, NVIDIA: tl.constexpr):
    """Returns the convolution of the nodes, in their dtype. rows: the result of `node_rows`."""
    before = ()
    for back in tl.static_range(1, W):
        before += (rows[back].to(tl.float32),)
    return convolved(rows[0], before, w, b_bias, W, SILU, NVIDIA)


@triton.jit
def keep_nodes(
    conv_state, slots, rows, o_c, in_c, stride_cn, stride_cc, stride_cw, LAST_SKIPPED: tl.constexpr,
    W: tl.constexpr
):  # fmt: skip
    """Stores the convolution's state after each node. slots: [BT]. rows: the result of
    `node_rows`."""
    p = conv_state + slots[:, None] * stride_cn + o_c.to(tl.int64)[None, :] * stride_cc
    mask = (slots > LAST_SKIPPED)[:, None] & in_c[None, :]
    for back in tl.static_range(W - 1):
        column = rows[back].to(conv_state.dtype.element_ty)
        tl.store(p + (W - 2 - back) * tl.cast(stride_cw, tl.int64), column, mask=mask)


@triton.jit
def last_tokens(
    p_x, p_conv, o_c, in_c, n_tokens, stride_xt, stride_xc, stride_cc, stride_cw, W: tl.constexpr
):
    """Loads the columns of the convolution's state after all tokens, the oldest first."""
    wide_c = o_c.to(tl.int64)
    columns = ()
    for i in tl.static_range(W - 1):
        t = n_tokens - (W - 1) + i
        is_own = o_c * 0 + t >= 0
        p_own = p_x + t * tl.cast(stride_xt, tl.int64) + wide_c * stride_xc
        p_old = p_conv + wide_c * stride_cc + (n_tokens + i) * tl.cast(stride_cw, tl.int64)
        own = tl.load(p_own, mask=in_c & is_own, other=0)
        old = tl.load(p_old, mask=in_c & (is_own == 0), other=0)
        columns += (tl.where(is_own, own.to(old.dtype), old),)
    return columns


@triton.jit
def keep_columns(p_conv, columns, o_c, in_c, stride_cc, stride_cw, W: tl.constexpr):
    for i in tl.static_range(W - 1):
        p = p_conv + o_c.to(tl.int64) * stride_cc + tl.cast(stride_cw, tl.int64) * i
        tl.store(p, columns[i], mask=in_c)


@triton.jit
def first_columns(p_conv, o_c, in_c, stride_cc, stride_cw, W: tl.constexpr):
    """Loads the tokens that are the first W - 2 columns of the convolution's state after a call
    with num_accepted_tokens. p_conv: the first of the columns from which the call starts."""
    columns = ()
    for i in tl.static_range(1, W - 1):
        p = p_conv + o_c.to(tl.int64) * stride_cc + tl.cast(stride_cw, tl.int64) * i
        columns += (tl.load(p, mask=in_c, other=0),)
    return columns


@triton.jit
def keep_drafts(
    p_x, p_conv, columns, o_c, in_c, n_tokens, stride_xt, stride_xc, stride_cc, stride_cw,
    S: tl.constexpr, BT: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Stores the convolution's state after a call with num_accepted_tokens: columns, the result of
    `first_columns`, and then the first S tokens of the call. p_conv: the first column."""
    o_t, wide_c = tl.arange(0, BT)[:, None], o_c.to(tl.int64)
    p_own = p_x + o_t.to(tl.int64) * stride_xt + wide_c[None, :] * stride_xc
    mask = (o_t < n_tokens) & (o_t < S) & in_c[None, :]
    own = tl.load(p_own, mask=mask, other=0)
    for i in tl.static_range(W - 2):
        p = p_conv + wide_c * stride_cc + tl.cast(stride_cw, tl.int64) * i
        tl.store(p, columns[i], mask=in_c)
    p = p_conv + wide_c[None, :] * stride_cc + (o_t + (W - 2)).to(tl.int64) * stride_cw
    tl.store(p, own.to(p_conv.dtype.element_ty), mask=mask)


@triton.jit
def finish_tokens(
    p_ticket, p_o, p_x, p_conv, p_gate, norm_weight, i_h, n_tokens, first, stride_ot, stride_oh,
    stride_ov, stride_xt, stride_xc, stride_cc, stride_cw, stride_zt, stride_zh, stride_zv,
    stride_norm,
    PROGRAMS: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BT: tl.constexpr, GROUP_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    W: tl.constexpr, S: tl.constexpr, NORM_EPS: tl.constexpr, SIGMOID: tl.constexpr
):  # fmt: skip
    """The work of the last of the PROGRAMS programs of a key head. p_o, p_gate: pointers to the
    first token of the first of the GROUP value heads. first: the column of the convolution's state
    from which the call starts, with num_accepted_tokens, which are at most S; otherwise S is 0."""
    if is_last(p_ticket, PROGRAMS):
        if p_gate is not None:
            o_d = tl.arange(0, V_BLOCK)[:, None]
            o_x = tl.arange(0, GROUP_BLOCK * BT)[None, :]
            o_t, o_g = (o_x // GROUP_BLOCK).to(tl.int64), (o_x % GROUP_BLOCK).to(tl.int64)
            in_d = (o_d < V) & (o_g < GROUP) & (o_t < n_tokens)
            p_y = p_o + o_t * stride_ot + o_g * stride_oh + o_d.to(tl.int64) * stride_ov
            # Other programs have written o, so bypass the first cache, which may hold an old line.
            b_y = tl.load(p_y, mask=in_d, other=0, cache_modifier=".cg")
            p_z = p_gate + o_t * stride_zt + o_g * stride_zh + o_d.to(tl.int64) * stride_zv
            b_z = tl.load(p_z, mask=in_d, other=0)
            b_w = tl.load(
                norm_weight + o_d.to(tl.int64) * stride_norm + o_x * 0, mask=in_d, other=0
            )
        if p_conv is not None:
            o_k = tl.arange(0, BK)
            in_k = o_k < K
            c_q = i_h * K + o_k
            c_k = c_q + H * K
            # Wait before a store, because several threads may read a channel that one of them
            # writes.
            if S > 0:
                p_old = p_conv + first * stride_cw
                of_q = first_columns(p_old, c_q, in_k, stride_cc, stride_cw, W)
                of_k = first_columns(p_old, c_k, in_k, stride_cc, stride_cw, W)
                tl.debug_barrier()
                keep_drafts(p_x, p_conv, of_q, c_q, in_k, n_tokens, stride_xt, stride_xc, stride_cc,
                            stride_cw, S, BT, W)  # fmt: skip
                keep_drafts(p_x, p_conv, of_k, c_k, in_k, n_tokens, stride_xt, stride_xc, stride_cc,
                            stride_cw, S, BT, W)  # fmt: skip
            else:
                of_q = last_tokens(p_x, p_conv, c_q, in_k, n_tokens, stride_xt, stride_xc,
                                   stride_cc, stride_cw, W)  # fmt: skip
                of_k = last_tokens(p_x, p_conv, c_k, in_k, n_tokens, stride_xt, stride_xc,
                                   stride_cc, stride_cw, W)  # fmt: skip
                tl.debug_barrier()
                keep_columns(p_conv, of_q, c_q, in_k, stride_cc, stride_cw, W)
                keep_columns(p_conv, of_k, c_k, in_k, stride_cc, stride_cw, W)
        if p_gate is not None:
            b_y = head_norms(b_y, in_d, b_w, b_z, V, 1, NORM_EPS, SIGMOID)
            tl.store(p_y, b_y, mask=in_d)
