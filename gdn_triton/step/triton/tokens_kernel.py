"""A layer's decode step in one launch, for few sequences of one or several tokens.

A program has a part of one value head, so a few sequences are enough to occupy a GPU. It first
convolves all tokens of its own channels and computes their norms, decays and strengths, which do
not depend on the state, and writes these to memory of its own. Then it loads one token after
another: the time from token to token is that of the products with the state alone. The last program
of a key head to finish writes the convolution's state of q and k, which the other programs read
before, and computes the norms, which need all parts of a head. Tickets count the finished programs.
No program waits for another program.

With num_accepted_tokens a program also stores its part of the state after each token. Nodes of
trees have slots of their own, which no program reads, so one program stores the convolution's state
of q and k at once; a node whose parent is not the node before it loads its part of the parent's
state, which the same program has stored.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from gdn_triton._triton.activations import log_decay
from gdn_triton._triton.taps import Filter, taps
from gdn_triton.recurrent.triton.kernel import decay_of, normalizer, strength, tiles_of_parent
from gdn_triton.recurrent.triton.sums import column_sums, products
from gdn_triton.step.triton.tokens import (
    convolved_nodes,
    convolved_rows,
    finish_tokens,
    first_columns,
    keep_columns,
    keep_drafts,
    keep_nodes,
    last_tokens,
    node_rows,
    old_rows,
    own_rows,
    start_slot,
)


@triton.jit(do_not_specialize=["N", "ROWS"])
def layer_tokens_kernel(
    x, a, b, A_log, dt_bias, state, slots, conv_state, conv_weight, conv_bias, gate, norm_weight, y,
    tickets, num_accepted_tokens, write_slots, parents, cu_seqlens, rows, factors, N, ROWS, scale,
    stride_xn, stride_xt, stride_xc, stride_an, stride_at, stride_ah, stride_bn, stride_bt,
    stride_bh, stride_A, stride_dt, stride_hn, stride_hh, stride_s, stride_sc, stride_acc,
    stride_wb, stride_wt, stride_pb, stride_pt, stride_seq, stride_ob, stride_ot, stride_oh,
    stride_ov, stride_cn, stride_cc, stride_cw, stride_bias, stride_zn, stride_zt, stride_zh,
    stride_zv, stride_norm, stride_wc: tl.constexpr, stride_ww: tl.constexpr,
    stride_hk: tl.constexpr, stride_hv: tl.constexpr, H: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, T: tl.constexpr, S: tl.constexpr, W: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, FOLD: tl.constexpr, SHARED: tl.constexpr, STATE_V_FIRST: tl.constexpr,
    RCP_LN2: tl.constexpr, EPS: tl.constexpr, THRESHOLD: tl.constexpr, USE_QK_L2NORM: tl.constexpr,
    BETA_FACTOR: tl.constexpr, LAST_SKIPPED: tl.constexpr, SILU: tl.constexpr,
    NORM_EPS: tl.constexpr, SIGMOID: tl.constexpr, NVIDIA: tl.constexpr, POLICY: tl.constexpr,
    DEPENDENT: tl.constexpr
):  # fmt: skip
    """conv_weight None: x has been convolved. norm_weight None: y is o. tickets: [slots, H]. rows
    [programs, BT, 2 * BK + BV] and factors [programs, BT, 8] are memory of the programs. S: the
    columns of slots, with num_accepted_tokens; otherwise 0. write_slots [N, T] with or without
    parents [N, T]: every token is a node of a tree, and no read slot is written, except that of a
    state by its first node. cu_seqlens: the ROWS tokens of all sequences are packed, at most T of
    each sequence, and program N of a part writes zeros to the rows after the last sequence. FOLD:
    see `RecurrentForm`. SHARED: see `column_sums`. DEPENDENT: see `dependent_launch`."""
    pid = tl.program_id(0).to(tl.int64)
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    GROUP: tl.constexpr = HV // H
    KEPT: tl.constexpr = state.dtype.element_ty
    NODES: tl.constexpr = write_slots is not None
    i_v, i_nh = (pid % V_BLOCKS).to(tl.int32), pid // V_BLOCKS
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // GROUP
    o_k, o_c, o_t = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BT)
    o_v = i_v * BV + o_c
    in_k, in_v = o_k < K, o_v < V
    c_q = i_h * K + o_k
    c_k, c_v = c_q + H * K, 2 * H * K + i_hv * V + o_v
    if DEPENDENT:
        gdc_wait()
    i_b, row, n_tokens, known = i_n, i_n * 0, T, True
    if cu_seqlens is not None:
        known = i_n < N
        p_end = cu_seqlens + (i_n + 1) * stride_seq
        i_b, row = i_n * 0, tl.load(p_end - stride_seq).to(tl.int64)
        n_tokens = (tl.load(p_end, mask=known, other=ROWS).to(tl.int64) - row).to(tl.int32)
    p_x = x + i_b * stride_xn + row * stride_xt
    p_y = y + i_b * stride_ob + row * stride_ot + i_hv * stride_oh + o_v.to(tl.int64) * stride_ov
    p_slot = slots + i_n * stride_s
    slot = start_slot(p_slot, num_accepted_tokens, i_n, known, stride_sc, stride_acc, S,
                      LAST_SKIPPED)  # fmt: skip
    in_t, wide_t = o_t < n_tokens, o_t.to(tl.int64)
    p_a = a + i_b * stride_an + (row + wide_t) * stride_at + i_hv * stride_ah
    p_b = b + i_b * stride_bn + (row + wide_t) * stride_bt + i_hv * stride_bh
    b_g, b_beta = tl.load(p_a, mask=in_t, other=0), tl.load(p_b, mask=in_t, other=0)
    b_A, bias = tl.load(A_log + i_hv * stride_A).to(tl.float32), 0.0
    if dt_bias is not None:
        bias = tl.load(dt_bias + i_hv * stride_dt).to(tl.float32)
    if conv_weight is not None:
        f = Filter(conv_weight, conv_bias, stride_wc, stride_ww, stride_bias)
        w_q, bias_q = taps(f, c_q, in_k, W, True)
        w_k, bias_k = taps(f, c_k, in_k, W, True)
        w_v, bias_v = taps(f, c_v, in_v, W, True)
    if not NODES or conv_weight is None:
        x_q = own_rows(p_x, c_q, in_k, n_tokens, stride_xt, stride_xc, 0, BT, W)
        x_k = own_rows(p_x, c_k, in_k, n_tokens, stride_xt, stride_xc, 0, BT, W)
        x_v = own_rows(p_x, c_v, in_v, n_tokens, stride_xt, stride_xc, 0, BT, W)
    if (slot <= LAST_SKIPPED) | (n_tokens <= 0):
        for _ in range(0, n_tokens):
            tl.store(p_y, tl.zeros([BV], dtype=y.dtype.element_ty), mask=in_v)
            p_y += stride_ot
        return

    p_head = state + i_hv * stride_hh + o_k[:, None] * stride_hk + o_v[None, :] * stride_hv
    p_tile = p_head + slot * stride_hn
    first, conv_slot = 0, slot
    if S > 0:
        first = tl.load(num_accepted_tokens + i_n * stride_acc).to(tl.int64) - 1
        conv_slot = tl.load(p_slot).to(tl.int64)
    in_tile = in_k[:, None] & in_v[None, :]
    p_parent, p_write, p_conv = None, None, None
    if NODES:
        p_write = write_slots + i_b * stride_wb + row * stride_wt
        if parents is not None:
            p_parent = parents + i_b * stride_pb + row * stride_pt
    if conv_weight is not None and NODES:
        p_old = conv_state + slot * stride_cn
        x_q = node_rows(p_x, p_old, p_parent, c_q, in_k, n_tokens, stride_xt, stride_xc,
                        stride_cc, stride_cw, stride_pt, BT, W)  # fmt: skip
        x_k = node_rows(p_x, p_old, p_parent, c_k, in_k, n_tokens, stride_xt, stride_xc,
                        stride_cc, stride_cw, stride_pt, BT, W)  # fmt: skip
        x_v = node_rows(p_x, p_old, p_parent, c_v, in_v, n_tokens, stride_xt, stride_xc,
                        stride_cc, stride_cw, stride_pt, BT, W)  # fmt: skip
    elif conv_weight is not None:
        p_conv = conv_state + conv_slot * stride_cn
        p_old = p_conv + first * tl.cast(stride_cw, tl.int64)
        old_q = old_rows(p_old, c_q, in_k, stride_cc, stride_cw, BT, W)
        old_k = old_rows(p_old, c_k, in_k, stride_cc, stride_cw, BT, W)
        old_v = old_rows(p_old, c_v, in_v, stride_cc, stride_cw, BT, W)
        if S > 0:
            columns = first_columns(p_old, c_v, in_v, stride_cc, stride_cw, W)
        else:
            columns = last_tokens(p_x, p_conv, c_v, in_v, n_tokens, stride_xt, stride_xc, stride_cc,
                                  stride_cw, W)  # fmt: skip
    tile = tl.load(p_tile, mask=in_tile, other=0, eviction_policy=POLICY)
    # The loads precede the first use of a loaded number, because a program issues its instructions
    # in order.
    tl.debug_barrier()

    b_q, b_k, b_v = x_q[0], x_k[0], x_v[0]
    if conv_weight is not None and NODES:
        b_q = convolved_nodes(x_q, w_q, bias_q, W, SILU, NVIDIA)
        b_k = convolved_nodes(x_k, w_k, bias_k, W, SILU, NVIDIA)
        b_v = convolved_nodes(x_v, w_v, bias_v, W, SILU, NVIDIA)
        # No program reads a slot that is written here.
        node_slots = tl.load(p_write + wide_t * stride_wt, mask=in_t, other=LAST_SKIPPED)
        node_slots = node_slots.to(tl.int64)
        keep_nodes(conv_state, node_slots, x_v, c_v, in_v, stride_cn, stride_cc, stride_cw,
                   LAST_SKIPPED, W)  # fmt: skip
        if (i_hv % GROUP == 0) & (i_v == 0):
            keep_nodes(conv_state, node_slots, x_q, c_q, in_k, stride_cn, stride_cc, stride_cw,
                       LAST_SKIPPED, W)  # fmt: skip
            keep_nodes(conv_state, node_slots, x_k, c_k, in_k, stride_cn, stride_cc, stride_cw,
                       LAST_SKIPPED, W)  # fmt: skip
    elif conv_weight is not None:
        b_q = convolved_rows(x_q, old_q, w_q, bias_q, W, SILU, NVIDIA)
        b_k = convolved_rows(x_k, old_k, w_k, bias_k, W, SILU, NVIDIA)
        b_v = convolved_rows(x_v, old_v, w_v, bias_v, W, SILU, NVIDIA)
    p_row = rows + pid * (BT * (2 * BK + BV))
    p_rows = p_row + o_t[:, None] * (2 * BK + BV)
    tl.store(p_rows + o_k[None, :], b_q)
    tl.store(p_rows + (BK + o_k)[None, :], b_k)
    tl.store(p_rows + (2 * BK + o_c)[None, :], b_v)
    # Multiply the sums of q or k, not their elements, by a scalar factor of q or k.
    of_q, of_k = tl.zeros([BT], dtype=tl.float32) + scale, tl.full([BT], 1.0, tl.float32)
    qq, kk, qk = products(b_q.to(tl.float32), b_k.to(tl.float32))
    if USE_QK_L2NORM:
        of_q = normalizer(qq, scale, EPS)
        of_k = normalizer(kk, 1.0, EPS)
    b_g = b_g.to(tl.float32)
    if dt_bias is not None:
        b_g += bias
    decays = decay_of(log_decay(b_g, b_A, tl.exp(b_A), THRESHOLD), RCP_LN2)
    p_factor = factors + pid * (BT * 8)
    tl.store(p_factor + o_t * 8, of_q * decays)
    tl.store(p_factor + o_t * 8 + 1, of_k * decays)
    tl.store(p_factor + o_t * 8 + 2, of_k)
    tl.store(p_factor + o_t * 8 + 3, strength(b_beta, BETA_FACTOR))
    tl.store(p_factor + o_t * 8 + 4, qk * of_q)
    tl.store(p_factor + o_t * 8 + 5, decays)
    # Wait here, because other threads of the program load what one thread has written, and because
    # several threads may read a channel that one of them writes.
    tl.debug_barrier()
    token_q, token_k, token_v, of_token = (), (), (), ()
    for t in tl.static_range(T):
        p_t = p_row + t * (2 * BK + BV)
        token_q += (tl.load(p_t + o_k),)
        token_k += (tl.load(p_t + BK + o_k),)
        token_v += (tl.load(p_t + 2 * BK + o_c),)
        for i in tl.static_range(6):
            of_token += (tl.load(p_factor + t * 8 + i),)
    if conv_weight is not None and not NODES:
        if S > 0:
            keep_drafts(p_x, p_conv, columns, c_v, in_v, n_tokens, stride_xt, stride_xc, stride_cc,
                        stride_cw, S, BT, W)  # fmt: skip
        else:
            keep_columns(p_conv, columns, c_v, in_v, stride_cc, stride_cw, W)

    for t in tl.static_range(T):
        # A sequence of fewer than T tokens computes the others, and stores nothing of them.
        in_row, is_token = in_v, True
        if cu_seqlens is not None:
            is_token = t < n_tokens
            in_row = o_v < tl.where(is_token, V, 0)
        if parents is not None and t > 0:
            p_own = p_parent + t * tl.cast(stride_pt, tl.int64)
            parent = tl.load(p_own, mask=is_token, other=t - 1).to(tl.int32)
            p_above = p_write + parent * tl.cast(stride_wt, tl.int64)
            tiles = tiles_of_parent((tile,), p_head, p_above, slot, parent, t, stride_hn, o_k, o_v,
                                    stride_hk, stride_hv, K, V, 1, 1, LAST_SKIPPED)  # fmt: skip
            tile = tiles[0]
        b_k = token_k[t].to(tl.float32)
        b_o, stored = column_sums((tile,), 0, (token_q[t].to(tl.float32),), (b_k,), 1, FOLD,
                                  STATE_V_FIRST, K == BK, SHARED)  # fmt: skip
        b_o, stored = b_o * of_token[6 * t], stored * of_token[6 * t + 1]
        b_v = (token_v[t].to(tl.float32) - stored) * of_token[6 * t + 2]
        b_v *= of_token[6 * t + 3]
        b_o = tl.fma(b_v, of_token[6 * t + 4], b_o)
        p_o = p_y + t * tl.cast(stride_ot, tl.int64)
        tl.store(p_o, b_o.to(y.dtype.element_ty), mask=in_row)
        # Round the state between two tokens as a store would.
        kept = tl.fma(tile.to(tl.float32), of_token[6 * t + 5], b_k[:, None] * b_v[None, :])
        if cu_seqlens is None or NODES or S > 0:
            tile = kept.to(KEPT)
        else:
            tile = tl.where(is_token, kept.to(KEPT), tile)
        if NODES or t < S:
            if NODES:
                p_kept = p_write + t * tl.cast(stride_wt, tl.int64)
            else:
                p_kept = p_slot + t * tl.cast(stride_sc, tl.int64)
            kept_slot = tl.load(p_kept, mask=is_token, other=LAST_SKIPPED).to(tl.int64)
            in_slot = in_k[:, None] & (o_v < tl.where(kept_slot > LAST_SKIPPED, V, 0))[None, :]
            tl.store(p_head + kept_slot * stride_hn, tile, mask=in_slot, eviction_policy=POLICY)
    if S == 0 and not NODES:
        tl.store(p_tile, tile, mask=in_tile, eviction_policy=POLICY)
    p_gate = None
    if norm_weight is not None:
        p_gate = gate + i_b * stride_zn + row * stride_zt + i_h * GROUP * stride_zh
    # Several sequences may read a slot that none of them writes.
    i_ticket = i_n if NODES else conv_slot
    finish_tokens(
        tickets + i_ticket * H + i_h,
        y + i_b * stride_ob + row * stride_ot + i_h * GROUP * stride_oh, p_x, p_conv, p_gate,
        norm_weight, i_h, n_tokens, first, stride_ot, stride_oh, stride_ov, stride_xt, stride_xc,
        stride_cc, stride_cw, stride_zt, stride_zh, stride_zv, stride_norm, GROUP * V_BLOCKS,
        GROUP, H, K, V, BK, BT, GROUP_BLOCK, V_BLOCK, W, S, NORM_EPS, SIGMOID
    )  # fmt: skip
