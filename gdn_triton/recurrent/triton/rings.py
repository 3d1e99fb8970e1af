"""Kernels on an engine's rings: one token, or the drafted tokens, of each sequence, and folds.

    u_t = beta_t (v_t - x_t(k_t)),    o_t = scale (x_t(q_t) + (k_t . q_t) u_t),
    x_t(y) = exp(G) S^T y + sum over the records j of exp(G_j) (k_j . y) u_j

as in `window.py`. The records differ: the engine says how many of a ring count, keys are stored
after their normalisation, and all heads of a slot are folded in the same call. A record is u, k and
g. Where a ring has low parts, u and k are sums of two numbers.

Rows without a record may hold NaN. They are not loaded.
"""

import triton
import triton.language as tl

from gdn_triton._triton.activations import log_decay
from gdn_triton.recurrent.triton.kernel import strength
from gdn_triton.recurrent.triton.window_records import (
    below,
    inner,
    load_pieces,
    records_dot,
    state_dot,
    sums_after,
    weighted,
)


@triton.jit
def load_record(p, p_low, at, mask):
    """Loads a record's number in float32: one part, or the sum of two. 0 where not `mask`."""
    x = tl.load(p + at, mask=mask, other=0).to(tl.float32)
    if p_low is not None:
        x += tl.load(p_low + at, mask=mask, other=0).to(tl.float32)
    return x


@triton.jit
def store_record(p, p_low, at, x, mask):
    high = x.to(p.dtype.element_ty)
    tl.store(p + at, high, mask=mask)
    if p_low is not None:
        low = x - high.to(tl.float32)
        tl.store(p_low + at, low.to(p_low.dtype.element_ty), mask=mask)


@triton.jit
def fold_into(
    p_from, p_to, k_rows, k_low, at_k, is_held, k_new, stride_kk, of_new, is_new, f_u, decay, in_v,
    stride_hk: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, FI: tl.constexpr,
    LIKE: tl.constexpr,
):  # fmt: skip
    """Stores decay times the state at p_from, plus the records f_u, at p_to. The state and the keys
    are loaded again, from the cache: only few programs fold, and registers for both would lower the
    occupancy of all. k_new: the key of the call's token, whose row is_new, or None."""
    o_f = tl.arange(0, FI)
    for i in tl.static_range(BK // FI):
        in_f, i_k = below(o_f, i * FI, K, BK)[None, :], (o_f + i * FI)[None, :]
        b_k = load_record(k_rows, k_low, at_k + i_k, is_held[:, None] & in_f)
        if k_new is not None:
            b_new = tl.load(k_new + at_k * 0 + i_k * stride_kk, mask=is_new[:, None] & in_f,
                            other=0)  # fmt: skip
            b_k = tl.where(is_new[:, None], b_new.to(tl.float32) * of_new, b_k)
        mask = in_v[:, None] & in_f
        b_h = tl.load(p_from + i_k * stride_hk, mask=mask, other=0).to(tl.float32)
        b_h = tl.fma(b_h, decay, records_dot(f_u, b_k, LIKE))
        tl.store(p_to + i_k * stride_hk, b_h.to(p_to.dtype.element_ty), mask=mask)


@triton.jit
def ring_one_kernel(
    q, k, v, a, b, A_log, dt_bias, o, state, d_rows, k_rows, g_rows, slots, counts, forced, scale,
    stride_qt, stride_qh, stride_qk, stride_kt, stride_kh, stride_kk, stride_vt, stride_vh,
    stride_vv, stride_at, stride_ah, stride_bt, stride_bh, stride_A, stride_dt, stride_ot,
    stride_oh, stride_ov, stride_hn, stride_hh, stride_dn, stride_kn, stride_gn, stride_s, stride_c,
    stride_f, stride_hv: tl.constexpr, stride_hk: tl.constexpr, H: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BR: tl.constexpr, KI: tl.constexpr, FI: tl.constexpr, DOT: tl.constexpr,
    USE_QK_L2NORM: tl.constexpr, RCP_LN2: tl.constexpr, EPS: tl.constexpr, THRESHOLD: tl.constexpr,
    LAST_SKIPPED: tl.constexpr,
):  # fmt: skip
    """One token of each sequence. Its record goes to row `counts`. If that is the ring's last row,
    or `forced` is not 0, the records and the token are folded into the state instead. DOT: the
    matrix units multiply the state, which has the 16-bit dtype of q and k. All loads precede the
    first barrier, because the compiler moves no load across a barrier."""
    pid = tl.program_id(0).to(tl.int64)
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    KO: tl.constexpr = BK // KI
    LIKE: tl.constexpr = q.dtype.element_ty
    i_v, i_nh = (pid % V_BLOCKS).to(tl.int32), pid // V_BLOCKS
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    o_i, o_r, o_y = tl.arange(0, KI), tl.arange(0, BR), tl.arange(0, 8)
    o_v = i_v * BV + tl.arange(0, BV)
    in_v = below(tl.arange(0, BV), i_v * BV, V, BV)

    slot = tl.load(slots + i_n * stride_s).to(tl.int64)
    count = tl.load(counts + i_n * stride_c).to(tl.int32)
    folds = count == L - 1
    if forced is not None:
        folds = folds | (tl.load(forced + i_n * stride_f) != 0)
    p_o = o + i_n * stride_ot + i_hv * stride_oh + o_v * stride_ov
    if slot <= LAST_SKIPPED:
        tl.store(p_o, tl.zeros([BV], dtype=o.dtype.element_ty), mask=in_v)
        return

    is_held, is_new = o_r < count, o_r == count
    p_d = d_rows + slot * stride_dn + i_hv * (L * V) + o_v
    p_kr = k_rows + slot * stride_kn + i_h * (L * K)
    p_gr = g_rows + slot * stride_gn + i_hv * L
    at_k = o_r[:, None] * K
    b_u = load_record(p_d[:, None], None, o_r[None, :] * V, is_held[None, :] & in_v[:, None])
    b_gr = tl.load(p_gr + o_r, mask=is_held, other=0)
    p_q = q + i_n * stride_qt + i_h * stride_qh
    p_k = k + i_n * stride_kt + i_h * stride_kh
    p_v = v + i_n * stride_vt + i_hv * stride_vh + o_v * stride_vv
    b_v = tl.load(p_v, mask=in_v, other=0).to(tl.float32)
    # Columns 0 and 1 of y are q and k; the matrix units multiply at least 8.
    y_pieces, r_pieces, q_pieces, k_pieces = (), (), (), ()
    for i in tl.static_range(KO):
        in_i = below(o_i, i * KI, K, BK)
        i_k = o_i + i * KI
        y_q = tl.load(p_q + o_y[:, None] * 0 + i_k[None, :] * stride_qk,
                      mask=(o_y == 0)[:, None] & in_i[None, :], other=0)  # fmt: skip
        y_k = tl.load(p_k + o_y[:, None] * 0 + i_k[None, :] * stride_kk,
                      mask=(o_y == 1)[:, None] & in_i[None, :], other=0)  # fmt: skip
        y_pieces += (tl.trans(tl.where((o_y == 1)[:, None], y_k, y_q)),)
        r_pieces += (load_record(p_kr, None, at_k + i_k[None, :],
                                 is_held[:, None] & in_i[None, :]),)  # fmt: skip
        q_pieces += (tl.load(p_q + i_k * stride_qk, mask=in_i, other=0).to(tl.float32),)
        k_pieces += (tl.load(p_k + i_k * stride_kk, mask=in_i, other=0).to(tl.float32),)
    b_g = tl.load(a + i_n * stride_at + i_hv * stride_ah).to(tl.float32)
    b_beta = tl.load(b + i_n * stride_bt + i_hv * stride_bh)
    b_A = tl.load(A_log + i_hv * stride_A).to(tl.float32)
    bias = tl.load(dt_bias + i_hv * stride_dt).to(tl.float32)
    p_tile = state + slot * stride_hn + i_hv * stride_hh + o_v[:, None] * stride_hv
    pieces = load_pieces(p_tile + o_i[None, :] * stride_hk, in_v, stride_hk, K, BK, KI)

    b_beta = strength(b_beta, 1.0, True)
    b_g = log_decay(b_g + bias, b_A, tl.exp(b_A), THRESHOLD)
    of_q, of_k = scale, 1.0
    qk = inner(q_pieces, k_pieces, KO)
    if USE_QK_L2NORM:
        of_q = scale * tl.rsqrt(inner(q_pieces, q_pieces, KO) + EPS)
        of_k = tl.rsqrt(inner(k_pieces, k_pieces, KO) + EPS)
    age = tl.where(is_held, count - 1 - o_r, BR)
    of_state = tl.exp2((tl.sum(b_gr, 0) + b_g) * RCP_LN2)
    w = tl.exp2((sums_after(b_gr, age) + b_g) * RCP_LN2)
    of_y = tl.where(o_y == 0, of_q, of_k)
    y_first, r_first = y_pieces[0], r_pieces[0]  # type: ignore[misc]
    records = records_dot(r_first, y_first.to(tl.float32), LIKE)
    for i in tl.static_range(1, KO):
        records += records_dot(r_pieces[i], y_pieces[i].to(tl.float32), LIKE)
    both = records_dot(b_u, records * (w[:, None] * of_y[None, :]), LIKE)
    if DOT:
        of_pool = tl.dot(pieces[0], y_first)
        for i in tl.static_range(1, KO):
            of_pool = tl.dot(pieces[i], y_pieces[i], of_pool)
        both += of_pool * (of_y * of_state)[None, :]
    # All columns except 0 and 1 are zero.
    b_o, stored = tl.split(tl.sum(tl.reshape(both, [BV, 4, 2]), 1))
    if not DOT:
        b_o += weighted(pieces, q_pieces, KO) * (of_state * of_q)
        stored += weighted(pieces, k_pieces, KO) * (of_state * of_k)
    new_u = (b_v - stored) * b_beta
    b_o = tl.fma(new_u, qk * (of_q * of_k), b_o)
    tl.store(p_o, b_o.to(o.dtype.element_ty), mask=in_v)
    if folds:
        f_u = tl.where(is_new[None, :], new_u[:, None], b_u * w[None, :])
        fold_into(p_tile, p_tile, p_kr, None, at_k, is_held, p_k, stride_kk, of_k, is_new, f_u,
                  of_state, in_v, stride_hk, K, BK, FI, LIKE)  # fmt: skip
    else:
        tl.store(p_d + count * V, new_u.to(d_rows.dtype.element_ty), mask=in_v)
        if i_v == 0:
            tl.store(p_gr + count, b_g)
            if i_hv % (HV // H) == 0:
                for i in tl.static_range(KO):
                    i_k = o_i + i * KI
                    store_record(p_kr + count * K, None, i_k, k_pieces[i] * of_k,
                                 below(o_i, i * KI, K, BK))  # fmt: skip


@triton.jit
def ring_drafts_kernel(
    q, k, v, a, b, A_log, dt_bias, o, state, d_rows, k_rows, g_rows, d_low, k_low, slots, rings,
    counts, bases, idle, cu_seqlens, scale,
    stride_qt, stride_qh, stride_qk, stride_kt, stride_kh, stride_kk, stride_vt, stride_vh,
    stride_vv, stride_at, stride_ah, stride_bt, stride_bh, stride_A, stride_dt, stride_ot,
    stride_oh, stride_ov, stride_hn, stride_hh, stride_dn, stride_kn, stride_gn, stride_s, stride_r,
    stride_c, stride_e, stride_f, stride_u, stride_hv: tl.constexpr, stride_hk: tl.constexpr,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr, KI: tl.constexpr,
    USE_QK_L2NORM: tl.constexpr, RCP_LN2: tl.constexpr, EPS: tl.constexpr, THRESHOLD: tl.constexpr,
    LAST_SKIPPED: tl.constexpr,
):  # fmt: skip
    """At most BT tokens of each sequence, packed by cu_seqlens. Token t has the row that follows
    the ring's records and the tokens before it. Nothing is folded. A sequence whose ring is `idle`
    has no output. As in `window_fwd_kernel`, the products with all q and k are matrix products, and
    each token in turn adds its u to the columns of the tokens after it."""
    pid = tl.program_id(0).to(tl.int64)
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    KO: tl.constexpr = BK // KI
    LIKE: tl.constexpr = q.dtype.element_ty
    i_v, i_nh = (pid % V_BLOCKS).to(tl.int32), pid // V_BLOCKS
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    o_i, o_r, o_t = tl.arange(0, KI), tl.arange(0, BR), tl.arange(0, BT)
    o_v = i_v * BV + tl.arange(0, BV)
    in_v = below(tl.arange(0, BV), i_v * BV, V, BV)

    slot = tl.load(slots + i_n * stride_s).to(tl.int64)
    row = tl.load(cu_seqlens + i_n * stride_u).to(tl.int64)
    n_tokens = (tl.load(cu_seqlens + (i_n + 1) * stride_u).to(tl.int64) - row).to(tl.int32)
    p_o = o + row * stride_ot + i_hv * stride_oh + o_v * stride_ov
    if slot <= LAST_SKIPPED:
        for _ in range(0, n_tokens):
            tl.store(p_o, tl.zeros([BV], dtype=o.dtype.element_ty), mask=in_v)
            p_o += stride_ot
        return
    ring = tl.load(rings + i_n * stride_r).to(tl.int64)
    if tl.load(idle + ring * stride_f) != 0:
        return

    p_tile = state + slot * stride_hn + i_hv * stride_hh + o_v[:, None] * stride_hv
    pieces = load_pieces(p_tile + o_i[None, :] * stride_hk, in_v, stride_hk, K, BK, KI)
    count = tl.load(counts + ring * stride_c).to(tl.int32)
    base = tl.load(bases + ring * stride_e).to(tl.int32)
    in_t = o_t < n_tokens
    p_q, p_k = q + row * stride_qt + i_h * stride_qh, k + row * stride_kt + i_h * stride_kh
    p_v = v + row * stride_vt + i_hv * stride_vh + o_v * stride_vv
    p_a = a + row * stride_at + i_hv * stride_ah + o_t.to(tl.int64) * stride_at
    p_b = b + row * stride_bt + i_hv * stride_bh + o_t.to(tl.int64) * stride_bt
    b_g = tl.load(p_a, mask=in_t, other=0).to(tl.float32)
    b_beta = tl.load(p_b, mask=in_t, other=0)
    b_A = tl.load(A_log + i_hv * stride_A).to(tl.float32)
    bias = tl.load(dt_bias + i_hv * stride_dt).to(tl.float32)
    values = ()
    for t in tl.static_range(BT):
        end_v = tl.where(t < n_tokens, V, 0)
        values += (tl.load(p_v + t * tl.cast(stride_vt, tl.int64), mask=o_v < end_v, other=0),)

    # The number of the record in each row, 0 for the oldest. `own`: the token of this call whose
    # record the row will hold.
    number = tl.where(o_r < L, (o_r + L - base) % L, L)
    is_held = number < count
    own = tl.where(o_r < L, number - count, -1)
    is_own = (own >= 0) & (own < n_tokens)
    own = tl.where(is_own, own, -1)
    at_d = i_hv * (L * V) + o_v[:, None] + o_r[None, :] * V
    at_k = i_h * (L * K) + o_r[:, None] * K
    d_rows += ring * stride_dn
    k_rows += ring * stride_kn
    if d_low is not None:
        d_low += ring * stride_dn
        k_low += ring * stride_kn
    p_gr = g_rows + ring * stride_gn + i_hv * L
    b_u = load_record(d_rows, d_low, at_d, is_held[None, :] & in_v[:, None])
    b_gr = tl.load(p_gr + o_r, mask=is_held, other=0)

    # Columns 2 t and 2 t + 1 of y are q and k of token t.
    o_y = tl.arange(0, 2 * BT)
    y_t, is_q, is_k = o_y // 2, o_y % 2 == 0, o_y % 2 == 1
    with_token = y_t < n_tokens
    wide_t, wide_own = y_t.to(tl.int64)[:, None], own.to(tl.int64)[:, None]
    y_pieces, r_pieces, own_pieces = (), (), ()
    for i in tl.static_range(KO):
        in_i, i_k = below(o_i, i * KI, K, BK)[None, :], (o_i + i * KI)[None, :]
        y_q = tl.load(p_q + wide_t * stride_qt + i_k * stride_qk,
                      mask=(with_token & is_q)[:, None] & in_i, other=0)  # fmt: skip
        y_k = tl.load(p_k + wide_t * stride_kt + i_k * stride_kk,
                      mask=(with_token & is_k)[:, None] & in_i, other=0)  # fmt: skip
        y_pieces += (tl.where(is_k[:, None], y_k, y_q),)
        own_k = tl.load(p_k + wide_own * stride_kt + i_k * stride_kk,
                        mask=is_own[:, None] & in_i, other=0)  # fmt: skip
        own_pieces += (own_k.to(tl.float32),)
        r_pieces += (load_record(k_rows, k_low, at_k + i_k, is_held[:, None] & in_i),)

    of_y = tl.where(is_k, 1.0, scale)
    y_first = y_pieces[0]  # type: ignore[misc]
    if USE_QK_L2NORM:
        squares = y_first.to(tl.float32) * y_first.to(tl.float32)
        for i in tl.static_range(1, KO):
            squares += y_pieces[i].to(tl.float32) * y_pieces[i].to(tl.float32)
        of_y *= tl.rsqrt(tl.sum(squares, 1) + EPS)
    of_own = tl.sum(tl.where((own[:, None] == y_t[None, :]) & is_k[None, :], of_y[None, :], 0.0), 1)
    keys = ()
    for i in tl.static_range(KO):
        keys += (tl.where(is_own[:, None], own_pieces[i] * of_own[:, None], r_pieces[i]),)
    both = state_dot(pieces[0], tl.trans(y_first))
    records = records_dot(keys[0], tl.trans(y_first.to(tl.float32)), LIKE)  # type: ignore[misc]
    for i in tl.static_range(1, KO):
        both += state_dot(pieces[i], tl.trans(y_pieces[i]))
        records += records_dot(keys[i], tl.trans(y_pieces[i].to(tl.float32)), LIKE)

    b_beta = strength(b_beta, 1.0, True)
    b_g = tl.where(in_t, log_decay(b_g + bias, b_A, tl.exp(b_A), THRESHOLD), 0.0)
    # The log decay after the token of a row and up to the token of a column.
    between = (o_t > own[:, None, None]) & (o_t <= y_t[None, :, None])
    age = tl.where(is_held, count - 1 - number, BR)
    log_w = tl.where(is_own, 0.0, sums_after(b_gr, age))[:, None]
    log_w += tl.sum(tl.where(between, b_g[None, None, :], 0.0), 2)
    log_s = tl.sum(tl.where(o_t[None, :] <= y_t[:, None], b_g[None, :], 0.0), 1)
    log_s += tl.sum(b_gr, 0)
    y_beta = tl.sum(tl.where(y_t[:, None] == o_t[None, :], b_beta[None, :], 0.0), 1)
    of_y *= tl.where(is_k, y_beta, 1.0)
    last = tl.where(is_k, y_t - 1, y_t)
    used = is_held[:, None] | (is_own[:, None] & (own[:, None] <= last[None, :]))
    records = tl.where(used, records * tl.exp2(log_w * RCP_LN2) * of_y[None, :], 0.0)
    both *= (tl.exp2(log_s * RCP_LN2) * of_y)[None, :]
    both += records_dot(b_u, tl.where(is_held[:, None], records, 0.0), LIKE)
    for t in tl.static_range(BT):
        if t < n_tokens:
            to_later = tl.sum(tl.where((own == t)[:, None], records, 0.0), 0)
            t_beta = tl.sum(tl.where(o_t == t, b_beta, 0.0), 0)
            stored = tl.sum(tl.where((o_y == 2 * t + 1)[None, :], both, 0.0), 1)
            new_u = values[t].to(tl.float32) * t_beta - stored
            # NaN of this token times the zeros of earlier ones would be NaN.
            is_later = last >= t
            both = tl.where(is_later[None, :], both + new_u[:, None] * to_later[None, :], both)
            at = i_hv * (L * V) + ((base + count + t) % L) * V + o_v
            store_record(d_rows, d_low, at, new_u, in_v)
    tl.store(p_o[:, None] + y_t.to(tl.int64)[None, :] * stride_ot, both.to(o.dtype.element_ty),
             mask=in_v[:, None] & (with_token & is_q)[None, :])  # fmt: skip
    if i_v == 0:
        tl.store(p_gr + (base + count + o_t) % L, b_g, mask=in_t)
        if i_hv % (HV // H) == 0:
            for i in tl.static_range(KO):
                in_i, i_k = below(o_i, i * KI, K, BK)[None, :], (o_i + i * KI)[None, :]
                store_record(k_rows, k_low, at_k + i_k, keys[i], is_own[:, None] & in_i)


@triton.jit
def ring_fold_kernel(
    state, d_rows, k_rows, g_rows, d_low, k_low, slots, rings, counts, bases, folding, accepted,
    track_slots, track_steps, stride_hl, stride_hn, stride_hh, stride_dl, stride_dn, stride_kl,
    stride_kn, stride_gl, stride_gn, stride_s, stride_r, stride_c, stride_e, stride_f, stride_a,
    stride_t, stride_ts, stride_hv: tl.constexpr, stride_hk: tl.constexpr, H: tl.constexpr,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BR: tl.constexpr, FI: tl.constexpr, RCP_LN2: tl.constexpr,
    LAST_SKIPPED: tl.constexpr,
):  # fmt: skip
    """Folds the records of rings into the states of all layers where `folding` is not 0, and
    stores the states after earlier tokens in track_slots. The cursors stay, because other programs
    still read them."""
    pid = tl.program_id(0).to(tl.int64)
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    i_v, i_nh = (pid % V_BLOCKS).to(tl.int32), pid // V_BLOCKS
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_l, i_h = tl.program_id(1).to(tl.int64), i_hv // (HV // H)
    o_r = tl.arange(0, BR)
    o_v = i_v * BV + tl.arange(0, BV)
    in_v = below(tl.arange(0, BV), i_v * BV, V, BV)
    slot = tl.load(slots + i_n * stride_s).to(tl.int64)
    if slot <= LAST_SKIPPED:
        return
    ring = tl.load(rings + i_n * stride_r).to(tl.int64)
    count = tl.load(counts + ring * stride_c).to(tl.int32)
    base = tl.load(bases + ring * stride_e).to(tl.int32)
    number = tl.where(o_r < L, (o_r + L - base) % L, L)
    at_d = o_v[:, None] + o_r[None, :] * V
    at_k = o_r[:, None] * K
    d_rows += i_l * stride_dl + ring * stride_dn + i_hv * (L * V)
    k_rows += i_l * stride_kl + ring * stride_kn + i_h * (L * K)
    g_rows += i_l * stride_gl + ring * stride_gn + i_hv * L
    if d_low is not None:
        d_low += i_l * stride_dl + ring * stride_dn + i_hv * (L * V)
        k_low += i_l * stride_kl + ring * stride_kn + i_h * (L * K)
    state += i_l * stride_hl + i_hv * stride_hh + o_v[:, None] * stride_hv
    p_from = state + slot * stride_hn
    # The state of an earlier token is made first, from the records and the state before its fold.
    for i in tl.static_range(2):
        p_to, end, makes = p_from, count, tl.load(folding + ring * stride_f) != 0
        if i == 0:
            makes = False
            if track_slots is not None:
                track_slot = tl.load(track_slots + i_n * stride_t).to(tl.int64)
                step = tl.load(track_steps + i_n * stride_ts).to(tl.int32)
                makes = (track_slot > LAST_SKIPPED) & (step >= 0)
                end = count - tl.load(accepted + i_n * stride_a).to(tl.int32) + step + 1
                p_to = state + track_slot * stride_hn
        if makes:
            is_held = number < end
            b_u = load_record(d_rows, d_low, at_d, is_held[None, :] & in_v[:, None])
            b_gr = tl.load(g_rows + o_r, mask=is_held, other=0)
            age = tl.where(is_held, end - 1 - number, BR)
            w = tl.exp2(sums_after(b_gr, age) * RCP_LN2)
            decay = tl.exp2(tl.sum(b_gr, 0) * RCP_LN2)
            fold_into(p_from, p_to, k_rows, k_low, at_k, is_held, None, 0, 1.0, is_held,
                      b_u * w[None, :], decay, in_v, stride_hk, K, BK, FI,
                      k_rows.dtype.element_ty)  # fmt: skip


@triton.jit(do_not_specialize=["N"])
def ring_restart_kernel(
    slots, rings, counts, bases, folding, N, stride_s, stride_r, stride_c, stride_e, stride_f,
    L: tl.constexpr, LAST_SKIPPED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Empties the rings that were folded: their records end where they began."""
    o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + o_n * stride_s, mask=o_n < N, other=LAST_SKIPPED).to(tl.int64)
    is_live = slot > LAST_SKIPPED
    ring = tl.load(rings + o_n * stride_r, mask=is_live, other=0).to(tl.int64)
    is_live = is_live & (tl.load(folding + ring * stride_f, mask=is_live, other=0) != 0)
    count = tl.load(counts + ring * stride_c, mask=is_live, other=0)
    base = tl.load(bases + ring * stride_e, mask=is_live, other=0)
    tl.store(bases + ring * stride_e, (base + count) % L, mask=is_live)
    tl.store(counts + ring * stride_c, count * 0, mask=is_live)
    tl.store(folding + ring * stride_f, (count * 0).to(folding.dtype.element_ty), mask=is_live)
