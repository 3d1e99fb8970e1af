"""Decoding with a window, for one token in each sequence: `gdn_triton.recurrent_step`, or a whole
`gdn_triton.layer_step`. `window.py` has the equations."""

import triton
import triton.language as tl

from gdn_triton._triton.taps import Filter, convolved, earlier, keep, taps
from gdn_triton.recurrent.triton.layer import finish_layer, is_last
from gdn_triton.recurrent.triton.window_records import (
    below,
    factors_of,
    fold_records,
    folds_of,
    in_float32,
    load_pieces,
    padded_with_zeros,
    record_products,
    rows_to_load,
    sums_after,
    token_products,
)


@triton.jit(do_not_specialize=["N"])
def window_one_fwd_kernel(
    q, k, v, g, beta, A_log, dt_bias, o, state, u_rows, k_rows, g_rows, call_rows, start, slots,
    positions, scales, conv_state, conv_weight, conv_bias, gate, norm_weight, tickets, N, scale,
    stride_qb, stride_qh, stride_qk, stride_kb, stride_kh, stride_kk, stride_vb, stride_vh,
    stride_vv, stride_gb, stride_gh, stride_bb, stride_bh, stride_A, stride_dt, stride_ob,
    stride_oh, stride_ov,
    stride_hn, stride_hh, stride_start, stride_s, stride_p, stride_cn, stride_cc, stride_cw,
    stride_bias, stride_zn, stride_zh, stride_zv, stride_norm,
    stride_wc: tl.constexpr, stride_ww: tl.constexpr, stride_hk: tl.constexpr,
    stride_hv: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    D: tl.constexpr, PERIOD: tl.constexpr,
    TURNS: tl.constexpr, K_OFFSET: tl.constexpr, V_OFFSET: tl.constexpr, RCP_LN2: tl.constexpr,
    EPS: tl.constexpr, THRESHOLD: tl.constexpr, USE_QK_L2NORM: tl.constexpr,
    BETA_FACTOR: tl.constexpr, LAST_SKIPPED: tl.constexpr, KI: tl.constexpr, FI: tl.constexpr,
    DOT: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, NORM_EPS: tl.constexpr, SIGMOID: tl.constexpr, NVIDIA: tl.constexpr,
    stride_ur: tl.constexpr, stride_kr: tl.constexpr, stride_gr: tl.constexpr,
    stride_cr: tl.constexpr,
):  # fmt: skip
    """Each sequence has one token. A program has BV columns of the state of one sequence and value
    head. All loads precede the first barrier. The compiler moves no load across a barrier, and a
    load after the barrier would wait for memory once more. DOT: the matrix units multiply the
    state, which has the 16-bit dtype of q and k, or int8. The rows of a slot are contiguous in
    u_rows, k_rows, g_rows and call_rows.

    conv_weight: q, k and v are the token before the convolution. Each program convolves all
    channels of its q and k. The last program of a key head to finish writes the convolution's state
    of these channels, which the other programs read before. norm_weight: the last program replaces
    o, which all programs have written, by its gated norm. tickets [slots, H], contiguous, counts
    the programs that have finished; None: q, k and v have been convolved, and there is no norm."""
    pid = tl.program_id(0).to(tl.int64)
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    KO: tl.constexpr = BK // KI
    i_v, i_nh = (pid % V_BLOCKS).to(tl.int32), pid // V_BLOCKS
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    o_k, o_i, o_r = tl.arange(0, BK), tl.arange(0, KI), tl.arange(0, BR)
    o_v = i_v * BV + tl.arange(0, BV)
    in_v = below(tl.arange(0, BV), i_v * BV, V, BV)

    slot = tl.load(slots + i_n * stride_s).to(tl.int64)
    position = tl.load(positions + i_n * stride_p).to(tl.int32)
    p_o = o + i_n * stride_ob + i_hv * stride_oh + o_v * stride_ov
    if slot <= LAST_SKIPPED:
        tl.store(p_o, tl.zeros([BV], dtype=o.dtype.element_ty), mask=in_v)
        return

    turn, age, is_read = rows_to_load(o_r, position, i_hv, R, D, PERIOD, TURNS)
    p_u = u_rows + slot * stride_ur + i_hv * V + o_v
    p_kr = k_rows + slot * stride_kr + i_h * K
    p_gr = g_rows + slot * stride_gr + i_hv
    b_u = tl.load(p_u[:, None] + o_r[None, :] * (HV * V), mask=is_read[None, :] & in_v[:, None])
    b_gr = tl.load(p_gr + o_r * HV, mask=is_read)
    b_start = tl.load(start + slot * stride_start).to(tl.int32)
    last_call = position - 1
    if D > 1:
        last_call = tl.load(call_rows + slot * stride_cr + (position + R - 1) % R)
    p_q = q + i_n * stride_qb + i_h * stride_qh
    p_k = k + K_OFFSET * stride_kk + i_n * stride_kb + i_h * stride_kh
    p_v = v + V_OFFSET * stride_vv + i_n * stride_vb + i_hv * stride_vh + o_v * stride_vv
    x_v = tl.load(p_v, mask=in_v, other=0)
    if conv_weight is not None:
        f = Filter(conv_weight, conv_bias, stride_wc, stride_ww, stride_bias)
        p_conv = conv_state + slot * stride_cn
        c_q, c_k, c_v = i_h * K, (H + i_h) * K, 2 * H * K + i_hv * V + o_v
        old_v = earlier(p_conv, c_v, in_v, stride_cc, stride_cw, W)
        w_v, bias_v = taps(f, c_v, in_v, W, False)
    # Columns 0 and 1 of y are q and k; the matrix units multiply at least 8.
    o_y = tl.arange(0, 8)
    y_pieces, r_pieces, q_pieces, k_pieces, before_q, before_k = (), (), (), (), (), ()
    for i in tl.static_range(KO):
        in_i = below(o_i, i * KI, K, BK)
        i_k = o_i + i * KI
        if conv_weight is None:
            y_q = tl.load(p_q + o_y[:, None] * 0 + i_k[None, :] * stride_qk,
                          mask=(o_y == 0)[:, None] & in_i[None, :], other=0)  # fmt: skip
            y_k = tl.load(p_k + o_y[:, None] * 0 + i_k[None, :] * stride_kk,
                          mask=(o_y == 1)[:, None] & in_i[None, :], other=0)  # fmt: skip
            y_pieces += (tl.trans(tl.where((o_y == 1)[:, None], y_k, y_q)),)
        else:
            before_q += (earlier(p_conv, c_q + i_k, in_i, stride_cc, stride_cw, W),)
            before_k += (earlier(p_conv, c_k + i_k, in_i, stride_cc, stride_cw, W),)
            before_q += (taps(f, c_q + i_k, in_i, W, False),)
            before_k += (taps(f, c_k + i_k, in_i, W, False),)
        old_k = tl.load(p_kr + i_k[None, :] + o_r[:, None] * (H * K),
                        mask=is_read[:, None] & in_i[None, :])  # fmt: skip
        r_pieces += (padded_with_zeros(old_k, in_i, K, BK),)
        q_pieces += (tl.load(p_q + i_k * stride_qk, mask=in_i, other=0),)
        k_pieces += (tl.load(p_k + i_k * stride_kk, mask=in_i, other=0),)
    b_g = tl.load(g + i_n * stride_gb + i_hv * stride_gh).to(tl.float32)
    b_beta = tl.load(beta + i_n * stride_bb + i_hv * stride_bh)
    b_A, bias = 0.0, 0.0
    if A_log is not None:
        b_A = tl.load(A_log + i_hv * stride_A).to(tl.float32)
        if dt_bias is not None:
            bias = tl.load(dt_bias + i_hv * stride_dt).to(tl.float32)
    # Only one of the programs whose value heads share a key head writes the key's record.
    stored_k = tl.where((i_v == 0) & (i_hv % (HV // H) == 0), K, 0)
    if conv_weight is None:
        raw_k = tl.load(p_k + o_k * stride_kk, mask=o_k < stored_k, other=0)
    p_state = state + slot * stride_hn + i_hv * stride_hh
    p_tile = p_state + o_v[:, None] * stride_hv + o_i[None, :] * stride_hk
    pieces = load_pieces(p_tile, in_v, stride_hk, K, BK, KI, "")
    p_scale, b_scale = None, None
    if scales is not None:
        p_scale = scales + slot * (HV * V) + i_hv * V + o_v
        b_scale = tl.load(p_scale, mask=in_v, other=0)

    if conv_weight is not None:
        x_new = x_v
        x_v = convolved(x_v, old_v, w_v, bias_v, W, SILU, NVIDIA)
        given_q, given_k, q_pieces, k_pieces = q_pieces, k_pieces, (), ()
        for i in tl.static_range(KO):
            taps_q = before_q[2 * i + 1]  # type: ignore[var-annotated]
            taps_k = before_k[2 * i + 1]  # type: ignore[var-annotated]
            x_q = convolved(given_q[i], before_q[2 * i], taps_q[0], taps_q[1], W, SILU, NVIDIA)
            x_k = convolved(given_k[i], before_k[2 * i], taps_k[0], taps_k[1], W, SILU, NVIDIA)
            # A channel that does not exist has the bias 0, so its convolution is 0.
            y_q = tl.where((o_y == 0)[:, None], x_q[None, :], 0.0).to(x_q.dtype)
            y_pieces += (tl.trans(tl.where((o_y == 1)[:, None], x_k[None, :], y_q)),)
            q_pieces += (x_q,)
            k_pieces += (x_k,)
    new_k = k_pieces
    b_v = x_v.to(tl.float32)
    q_pieces, k_pieces = in_float32(q_pieces, KO), in_float32(k_pieces, KO)

    b_beta, b_g, of_q, of_k, qk = factors_of(
        q_pieces, k_pieces, b_beta, b_g, A_log, b_A, bias, scale, KO, EPS, THRESHOLD,
        USE_QK_L2NORM, BETA_FACTOR
    )  # fmt: skip

    held, due = folds_of(position, last_call, b_start, turn, PERIOD)
    alive = age < (position - held).to(tl.uint32)
    b_gr = tl.where(alive, b_gr, 0.0)
    b_u = tl.where(alive[None, :], b_u, 0.0)
    of_state = tl.exp2((tl.sum(b_gr, 0) + b_g) * RCP_LN2)
    w = tl.exp2((sums_after(b_gr, age) + b_g) * RCP_LN2)
    of_y = tl.where(o_y == 0, of_q, of_k)
    records = record_products(r_pieces, y_pieces, w, of_y, alive, KO)
    b_o, stored = token_products(
        pieces, y_pieces, q_pieces, k_pieces, records, b_u, b_scale, of_state, of_q, of_k, of_y,
        BV, KO, DOT, q.dtype.element_ty
    )  # fmt: skip
    new_u = (b_v - stored) * (of_k * b_beta)
    b_o = tl.fma(new_u, qk, b_o)
    new_r = (position % R).to(tl.int64)
    tl.store(p_o, b_o.to(o.dtype.element_ty), mask=in_v)
    tl.store(p_u + new_r * (HV * V), new_u, mask=in_v)
    if i_v == 0:
        tl.store(p_gr + new_r * HV, b_g)
        if conv_weight is None:
            tl.store(p_kr + o_k + new_r * (H * K), raw_k, mask=o_k < stored_k)
        else:
            for i in tl.static_range(KO):
                i_k = o_i + i * KI
                tl.store(p_kr + i_k + new_r * (H * K), new_k[i], mask=i_k < stored_k)
        if i_hv == 0:
            tl.store(call_rows + slot * stride_cr + new_r, position)
    if conv_weight is not None:
        keep(p_conv, x_new, old_v, c_v, in_v, stride_cc, stride_cw, W)
    if tickets is not None:
        if is_last(tickets + slot * H + i_h, (HV // H) * V_BLOCKS):
            p_gate, p_slot = None, None
            if norm_weight is not None:
                p_gate = gate + i_n * stride_zn + i_h * (HV // H) * stride_zh
            if conv_weight is not None:
                p_slot = p_conv
            finish_layer(
                o + i_n * stride_ob + i_h * (HV // H) * stride_oh, p_q, p_k, p_slot, p_gate,
                norm_weight, i_h * K, stride_oh, stride_ov, stride_qk, stride_kk, stride_cc,
                stride_cw, stride_zh, stride_zv, stride_norm, HV // H, H * K, K, V, BK,
                GROUP_BLOCK, V_BLOCK, W, NORM_EPS, SIGMOID
            )  # fmt: skip
    if held < due:
        to_fold = alive & (age >= (position - due).to(tl.uint32))
        fold_records(p_state, p_kr, p_scale, b_u, b_gr, age, to_fold, o_v, in_v, stride_hk,
                     stride_hv, H * K, K, BK, FI, RCP_LN2)  # fmt: skip
