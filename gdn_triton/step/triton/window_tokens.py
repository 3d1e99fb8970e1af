"""A layer's step of several tokens with a window in one launch: the kernel of
`gdn_triton.recurrent_step` with the convolution before it and the gated norm after it, as in
`tokens_kernel.py`."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from gdn_triton._triton.taps import Filter, taps
from gdn_triton.recurrent.triton.window import window_fwd_kernel
from gdn_triton.step.triton.tokens import (
    convolved_rows,
    finish_tokens,
    first_columns,
    keep_columns,
    keep_drafts,
    last_tokens,
    old_rows,
    own_rows,
)

# The bytes of a line of the cache.
LINE = tl.constexpr(128)


@triton.jit
def fetch_rows(p_rows, in_v, itemsize: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Brings the rows [K] of a state into the cache. The loads are volatile, because the compiler
    removes another load whose result is unused. No instruction waits for these loads."""
    STEP: tl.constexpr = LINE // itemsize
    o_line = tl.arange(0, max(1, BK // STEP)) * STEP
    mask = in_v[:, None] & (o_line < K)[None, :]
    tl.load(p_rows[:, None] + o_line[None, :], mask=mask, other=0, volatile=True)


@triton.jit(do_not_specialize=["N", "T"])
def layer_window_kernel(
    x, a, b, A_log, dt_bias, y, state, u_rows, k_rows, g_rows, call_rows, start, slots, positions,
    conv_state, conv_weight, conv_bias, gate, norm_weight, tickets, num_accepted_tokens, cu_seqlens,
    rows, N, T, scale,
    stride_xn, stride_xt, stride_xc, stride_gb, stride_gt, stride_gh, stride_bb, stride_bt,
    stride_bh, stride_A, stride_dt, stride_ob, stride_ot, stride_oh, stride_ov, stride_hn,
    stride_hh, stride_start, stride_s, stride_p, stride_c, stride_acc, stride_cn, stride_cc,
    stride_cw, stride_bias, stride_zn, stride_zt, stride_zh, stride_zv, stride_norm,
    stride_wc: tl.constexpr, stride_ww: tl.constexpr, stride_ur: tl.constexpr,
    stride_kr: tl.constexpr, stride_gr: tl.constexpr, stride_cr: tl.constexpr,
    stride_hk: tl.constexpr, stride_hv: tl.constexpr, H: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, S: tl.constexpr, W: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, PERIOD: tl.constexpr, TURNS: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, RCP_LN2: tl.constexpr, EPS: tl.constexpr, THRESHOLD: tl.constexpr,
    USE_QK_L2NORM: tl.constexpr, BETA_FACTOR: tl.constexpr, LAST_SKIPPED: tl.constexpr,
    KI: tl.constexpr, FI: tl.constexpr, STAGES: tl.constexpr, ONE_LOAD: tl.constexpr,
    EARLY: tl.constexpr, DEPENDENT: tl.constexpr, SILU: tl.constexpr, NORM_EPS: tl.constexpr,
    SIGMOID: tl.constexpr, NVIDIA: tl.constexpr
):  # fmt: skip
    """rows [programs, ROWS, 2 * BK + BV]: memory of the programs for the tokens after the
    convolution, whose last program of a key head is found by tickets [slots, H]. conv_weight None:
    x has been convolved. norm_weight None: y is o. S: the most num_accepted_tokens, 0 without. The
    other arguments are those of `window_fwd_kernel`."""
    pid = tl.program_id(0).to(tl.int64)
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    GROUP: tl.constexpr = HV // H
    WIDTH: tl.constexpr = 2 * BK + BV
    K_OFFSET: tl.constexpr = H * K if conv_weight is None else 0
    V_OFFSET: tl.constexpr = 2 * H * K if conv_weight is None else 0
    BLOCK: tl.constexpr = min(ROWS, 4)
    i_v, i_nh = (pid % V_BLOCKS).to(tl.int32), pid // V_BLOCKS
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // GROUP
    o_k, o_c = tl.arange(0, BK), tl.arange(0, BV)
    o_v = i_v * BV + o_c
    in_k, in_v = o_k < K, o_v < V
    c_q = i_h * K + o_k
    c_k, c_v = c_q + H * K, 2 * H * K + i_hv * V + o_v
    p_conv = None
    if DEPENDENT:
        gdc_wait()
    i_b, row, n_tokens, known = i_n, i_n * 0, i_v * 0 + T, True
    if cu_seqlens is not None:
        known = i_n < N
        p_end = cu_seqlens + (i_n + 1) * stride_c
        i_b, row = i_n * 0, tl.load(p_end - stride_c).to(tl.int64)
        n_tokens = (tl.load(p_end, mask=known, other=T).to(tl.int64) - row).to(tl.int32)
    p_x = x + i_b * stride_xn + row * stride_xt
    slot = tl.load(slots + i_n * stride_s, mask=known, other=LAST_SKIPPED).to(tl.int64)
    live = (slot > LAST_SKIPPED) & (n_tokens > 0)
    p_row, first_column = None, 0
    if conv_weight is not None:
        p_row = rows + pid * (ROWS * WIDTH)
        # These loads do not depend on the slot.
        x_q = own_rows(p_x, c_q, in_k, n_tokens, stride_xt, stride_xc, 0, BLOCK, W)
        x_k = own_rows(p_x, c_k, in_k, n_tokens, stride_xt, stride_xc, 0, BLOCK, W)
        x_v = own_rows(p_x, c_v, in_v, n_tokens, stride_xt, stride_xc, 0, BLOCK, W)
        f = Filter(conv_weight, conv_bias, stride_wc, stride_ww, stride_bias)
        w_q, bias_q = taps(f, c_q, in_k, W, True)
        w_k, bias_k = taps(f, c_k, in_k, W, True)
        w_v, bias_v = taps(f, c_v, in_v, W, True)
        p_conv = conv_state + slot * stride_cn
        if S > 0:
            p_accepted = num_accepted_tokens + i_n * stride_acc
            first_column = tl.load(p_accepted, mask=known, other=0).to(tl.int64) - 1
            # The caller breaks a rule with another number, which then reads and writes no memory
            # outside of the slot.
            live = live & (first_column >= 0) & (first_column < S)
        p_old = p_conv + first_column * tl.cast(stride_cw, tl.int64)
        in_k, in_v = o_k < tl.where(live, K, 0), o_v < tl.where(live, V, 0)
        old_q = old_rows(p_old, c_q, in_k, stride_cc, stride_cw, BLOCK, W)
        old_k = old_rows(p_old, c_k, in_k, stride_cc, stride_cw, BLOCK, W)
        old_v = old_rows(p_old, c_v, in_v, stride_cc, stride_cw, BLOCK, W)
        if S > 0:
            columns = first_columns(p_old, c_v, in_v, stride_cc, stride_cw, W)
        else:
            columns = last_tokens(p_x, p_conv, c_v, in_v, n_tokens, stride_xt, stride_xc, stride_cc,
                                  stride_cw, W)  # fmt: skip
        if stride_hk == 1:
            p_state = state + slot * stride_hn + i_hv * stride_hh + o_v * stride_hv
            fetch_rows(p_state, in_v, state.dtype.element_ty.primitive_bitwidth // 8, K, BK)
        for first in tl.static_range(0, ROWS, BLOCK):
            if first > 0:
                # The registers do not suffice for the tiles of more tokens.
                x_q = own_rows(p_x, c_q, in_k, n_tokens, stride_xt, stride_xc, first, BLOCK, W)
                x_k = own_rows(p_x, c_k, in_k, n_tokens, stride_xt, stride_xc, first, BLOCK, W)
                x_v = own_rows(p_x, c_v, in_v, n_tokens, stride_xt, stride_xc, first, BLOCK, W)
                old_q, old_k, old_v = None, None, None
            b_q = convolved_rows(x_q, old_q, w_q, bias_q, W, SILU, NVIDIA)
            b_k = convolved_rows(x_k, old_k, w_k, bias_k, W, SILU, NVIDIA)
            b_v = convolved_rows(x_v, old_v, w_v, bias_v, W, SILU, NVIDIA)
            p_rows = p_row + (first + tl.arange(0, BLOCK))[:, None] * WIDTH
            tl.store(p_rows + o_k[None, :], b_q)
            tl.store(p_rows + (BK + o_k)[None, :], b_k)
            tl.store(p_rows + (2 * BK + o_c)[None, :], b_v)
        # Wait here, because other threads of the program load what one thread has written, and
        # because several threads may read a channel that one of them writes.
        tl.debug_barrier()
        if S > 0:
            keep_drafts(p_x, p_conv, columns, c_v, in_v, n_tokens, stride_xt, stride_xc, stride_cc,
                        stride_cw, S, ROWS, W)  # fmt: skip
        else:
            keep_columns(p_conv, columns, c_v, in_v, stride_cc, stride_cw, W)
        # The pointers belong to this program, so the strides of sequences and heads are 0.
        stride_t: tl.constexpr = WIDTH
        p_row -= row * WIDTH
        p_q, p_k, p_v = p_row, p_row + BK, p_row + (2 * BK - i_v * BV)
        stride_n, stride_kh, stride_vh, stride_ch = 0, 0, 0, 1
    else:
        p_q, p_k, p_v = x, x, x
        stride_n, stride_t, stride_ch = stride_xn, stride_xt, stride_xc
        stride_kh, stride_vh = tl.cast(stride_xc, tl.int64) * K, tl.cast(stride_xc, tl.int64) * V
    window_fwd_kernel(
        p_q, p_k, p_v, a, b, A_log, dt_bias, y, state, u_rows, k_rows, g_rows, call_rows, start,
        slots, positions, None, cu_seqlens, None, None, None, None, None, N, T, scale,
        stride_n, stride_t, stride_kh, stride_ch, stride_n, stride_t, stride_kh, stride_ch,
        stride_n, stride_t, stride_vh, stride_ch, stride_gb, stride_gt, stride_gh, stride_bb,
        stride_bt, stride_bh, stride_A, stride_dt, stride_ob, stride_ot, stride_oh, stride_ov,
        stride_hn, stride_hh, stride_start, stride_s, stride_p, stride_c, 0, 0,
        0, 0, stride_ur, stride_kr, stride_gr, stride_cr, stride_hk, stride_hv, H, HV, K, V, BK,
        BV, R, BR, BT, D, PERIOD, TURNS, K_OFFSET, V_OFFSET, RCP_LN2, EPS, THRESHOLD, USE_QK_L2NORM,
        BETA_FACTOR, LAST_SKIPPED, KI, FI, STAGES, ONE_LOAD, EARLY, DEPENDENT, False, False
    )  # fmt: skip
    if live:
        p_gate = None
        if norm_weight is not None:
            p_gate = gate + i_b * stride_zn + row * stride_zt + i_h * GROUP * stride_zh
        finish_tokens(
            tickets + slot * H + i_h,
            y + i_b * stride_ob + row * stride_ot + i_h * GROUP * stride_oh, p_x, p_conv, p_gate,
            norm_weight, i_h, n_tokens, first_column, stride_ot, stride_oh, stride_ov,
            stride_xt, stride_xc, stride_cc, stride_cw, stride_zt, stride_zh, stride_zv,
            stride_norm, GROUP * V_BLOCKS, GROUP, H, K, V, BK, ROWS, GROUP_BLOCK, V_BLOCK, W, S,
            NORM_EPS, SIGMOID
        )  # fmt: skip
