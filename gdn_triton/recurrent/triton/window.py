"""Decoding with a window of records: every step reads a slot's state, and few steps write it.

    u_t = beta_t (v_t - x_t(k_t)),    o_t = scale (x_t(q_t) + (k_t . q_t) u_t),
    x_t(y) = exp(G) S^T y + sum over the records j of exp(G_j) (k_j . y) u_j

S is the state in memory. G is the sum of the log decays of the tokens that S does not include, and
G_j is the sum of the log decays of the tokens after record j. The record of token t is u_t, k_t and
g_t, in row t modulo R of the window. k_t is stored before its normalisation, and u_t contains the
factor that normalises k_t. A
fold moves records into the state:

    S = exp(G) S + sum over the records j of exp(G_j) k_j u_j^T

Each head folds once in PERIOD = R + 1 - 2 D tokens, where D is the largest number of tokens of a
call. A call reads the state of a head and at most R - D records, computes the outputs from these,
and folds last: it writes the folded state, which the next call reads. A call never writes a row
that it reads.

A program derives the tokens that a head's state includes from numbers that a step does not change:
the position of the sequence at this call, the position at the previous call, which is stored with
the record of the last token, and the start of the window. Therefore a position must grow by at
least one token from call to call. A call without tokens writes nothing.

All factors are exponentials of sums of log decays. Each sum adds the tokens after a record; it is
never a difference of two sums, because a log decay may be -inf. Rows without a record may hold NaN,
so they are masked by a select, not multiplied by zero.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import is_hip

from gdn_triton._triton.activations import log_decay
from gdn_triton.recurrent.triton.kernel import strength
from gdn_triton.recurrent.triton.sums import sum_of_channels
from gdn_triton.recurrent.triton.window_early import fold_early, not_before
from gdn_triton.recurrent.triton.window_records import (
    below,
    fold_records,
    folds_of,
    has_bit,
    load_pieces,
    padded_with_zeros,
    path_bits,
    records_dot,
    rows_to_load,
    state_dot,
    sums_after,
)


@triton.jit
def load_tokens(
    p_q, p_k, y_t, is_k, with_token, i_k, in_k, stride_qt, stride_kt, stride_qk, stride_kk,
    ONE_LOAD: tl.constexpr
):  # fmt: skip
    """Loads rows of q and, where is_k is True, of k. ONE_LOAD: both have one dtype and one channel
    stride, and one load has both."""
    if ONE_LOAD:
        p_y = tl.where(is_k, p_k + y_t * stride_kt, p_q + y_t * stride_qt)
        b_y = tl.load(p_y[:, None] + i_k[None, :] * stride_qk,
                      mask=with_token[:, None] & in_k[None, :], other=0)  # fmt: skip
    else:
        in_q = (with_token & (is_k == 0))[:, None] & in_k[None, :]
        y_q = tl.load(p_q + y_t[:, None] * stride_qt + i_k[None, :] * stride_qk, mask=in_q, other=0)
        y_k = tl.load(p_k + y_t[:, None] * stride_kt + i_k[None, :] * stride_kk,
                      mask=(with_token & is_k)[:, None] & in_k[None, :], other=0)  # fmt: skip
        b_y = tl.where(is_k[:, None], y_k, y_q)
    return b_y


@triton.jit
def key_products(b_r, b_y, in_k, K: tl.constexpr, BK: tl.constexpr):
    """Returns [BR, 2 * BT] float32: the keys b_r [BR, BK] times q and k of the tokens."""
    b_r = padded_with_zeros(b_r, in_k, K, BK)
    return tl.dot(b_r.to(b_y.dtype), tl.trans(b_y), input_precision="ieee")


@triton.jit
def sum_of_tokens(x):
    """Returns the sum of x [N, BT] over the tokens. Each step adds two numbers, so the register
    layout, which follows the tensors of a call, does not change a bit."""
    for _ in tl.static_range(5):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), 1)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def store_parts(p, p_low, x, mask):
    """Stores x, float32, at p in its dtype, and the rest at p_low, if that is not None."""
    high = x.to(p.dtype.element_ty)
    tl.store(p, high, mask=mask)
    if p_low is not None:
        tl.store(p_low, (x - high.to(tl.float32)).to(p_low.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["N", "T"])
def window_fwd_kernel(
    q, k, v, g, beta, A_log, dt_bias, o, state, u_rows, k_rows, g_rows, call_rows, start, slots,
    positions, scales, cu_seqlens, parents, u_low, k_low, rings, bases, N, T, scale,
    stride_qb, stride_qt, stride_qh, stride_qk, stride_kb, stride_kt, stride_kh, stride_kk,
    stride_vb, stride_vt, stride_vh, stride_vv, stride_gb, stride_gt, stride_gh, stride_bb,
    stride_bt, stride_bh, stride_A, stride_dt, stride_ob, stride_ot, stride_oh, stride_ov,
    stride_hn, stride_hh, stride_start, stride_s, stride_p, stride_c, stride_ab, stride_at,
    stride_ring: tl.constexpr, stride_base: tl.constexpr, stride_ur: tl.constexpr,
    stride_kr: tl.constexpr, stride_gr: tl.constexpr, stride_cr: tl.constexpr,
    stride_hk: tl.constexpr, stride_hv: tl.constexpr, H: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, R: tl.constexpr,
    BR: tl.constexpr, BT: tl.constexpr, D: tl.constexpr, PERIOD: tl.constexpr, TURNS: tl.constexpr,
    K_OFFSET: tl.constexpr, V_OFFSET: tl.constexpr, RCP_LN2: tl.constexpr, EPS: tl.constexpr,
    THRESHOLD: tl.constexpr, USE_QK_L2NORM: tl.constexpr, BETA_FACTOR: tl.constexpr,
    LAST_SKIPPED: tl.constexpr, KI: tl.constexpr, FI: tl.constexpr, STAGES: tl.constexpr,
    ONE_LOAD: tl.constexpr, EARLY: tl.constexpr, DEPENDENT: tl.constexpr,
    RELEASE: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Runs at most BT tokens per sequence: T each, or packed by cu_seqlens. ONE_LOAD: q and k have
    one dtype and one channel stride, and one load has both. In a packed call
    program N of a head writes the zeros of the rows after the last sequence. Each token follows the
    one before it, or its parent. The products of the state and of the records with all q and k are
    matrix products. The tokens then follow one another, and each u is subtracted from the columns
    of the tokens after it. A program takes several us, because most of its 2000 instructions need
    the result of the one before. The state is therefore loaded into shared memory: with few
    registers more programs run at once. EARLY: a program uses no loaded number of a record or of
    the state before all loads are issued. If also KI is BK, the state is loaded into registers, the
    numbers that depend on the tokens alone are computed meanwhile, and those of the records before
    the products of the state, whose loads take longest. DEPENDENT: see `dependent_launch`.
    RELEASE: the programs of the next dependent launch may start once every program has issued its
    loads.

    RING: the records are those of an engine's rings of R rows, which `gdn_triton.recurrent.rings`
    describes, with the strides ur, kr and gr of a ring. rings: the ring of each sequence.
    positions, bases, start: by ring, its records, the row of the oldest one, and not 0 where the
    sequence is left out. u_low, k_low: what u_rows and k_rows round off, or None. k is stored after
    its normalisation, and no head folds. Program N does not run, and EARLY is False."""
    pid = tl.program_id(0).to(tl.int64)
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    KO: tl.constexpr = BK // KI
    IN_REGISTERS: tl.constexpr = EARLY and KO == 1
    i_v, i_nh = (pid % V_BLOCKS).to(tl.int32), pid // V_BLOCKS
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    o_k, o_i, o_r, o_t = tl.arange(0, BK), tl.arange(0, KI), tl.arange(0, BR), tl.arange(0, BT)
    o_v = i_v * BV + tl.arange(0, BV)
    in_v = below(tl.arange(0, BV), i_v * BV, V, BV)

    if DEPENDENT:
        gdc_wait()
    live = i_n < N
    slot = tl.load(slots + i_n * stride_s, mask=live, other=LAST_SKIPPED).to(tl.int64)
    if RING:
        ring = tl.load(rings + i_n * stride_ring).to(tl.int64)
    else:
        position = tl.load(positions + i_n * stride_p, mask=live, other=0).to(tl.int32)
    if cu_seqlens is None:
        i_b = i_n
        row = i_n * 0
        n_tokens = T
    else:
        i_b = i_n * 0
        p_end = cu_seqlens + (i_n + 1) * stride_c
        row = tl.load(p_end - stride_c).to(tl.int64)
        end = tl.load(p_end, mask=live, other=T).to(tl.int64)
        n_tokens = (end - row).to(tl.int32)
    p_o = o + i_b * stride_ob + row * stride_ot + i_hv * stride_oh + o_v * stride_ov
    p_q = q + i_b * stride_qb + row * stride_qt + i_h * stride_qh
    p_k = k + K_OFFSET * stride_kk
    p_k += i_b * stride_kb + row * stride_kt + i_h * stride_kh
    p_v = v + V_OFFSET * stride_vv
    p_v += i_b * stride_vb + row * stride_vt + i_hv * stride_vh + o_v * stride_vv
    in_t = o_t < n_tokens
    p_g = g + i_b * stride_gb + row * stride_gt + i_hv * stride_gh + o_t.to(tl.int64) * stride_gt
    p_beta = (
        beta + i_b * stride_bb + row * stride_bt + i_hv * stride_bh + o_t.to(tl.int64) * stride_bt
    )
    # Columns 2 t and 2 t + 1 of y are q and k of token t.
    o_y = tl.arange(0, 2 * BT)
    y_t, is_q, is_k = o_y // 2, o_y % 2 == 0, o_y % 2 == 1
    with_token = y_t < n_tokens
    wide_t = y_t.to(tl.int64)
    in_y = in_v[:, None] & (with_token & is_k)[None, :]
    b_v = tl.load(p_v[:, None] + wide_t[None, :] * stride_vt, mask=in_y, other=0)
    b_g = tl.load(p_g, mask=in_t, other=0).to(tl.float32)
    b_beta = tl.load(p_beta, mask=in_t, other=0)
    b_A, bias = 0.0, 0.0
    if A_log is not None:
        b_A = tl.load(A_log + i_hv * stride_A).to(tl.float32)
        if dt_bias is not None:
            bias = tl.load(dt_bias + i_hv * stride_dt).to(tl.float32)
    in_k = below(o_k, 0, K, BK)
    if EARLY:
        b_y = load_tokens(p_q, p_k, wide_t, is_k, with_token, o_k, in_k, stride_qt, stride_kt,
                          stride_qk, stride_kk, ONE_LOAD)  # fmt: skip
        tl.debug_barrier()
    if slot <= LAST_SKIPPED:
        for _ in range(0, n_tokens):
            tl.store(p_o, tl.zeros([BV], dtype=o.dtype.element_ty), mask=in_v)
            p_o += stride_ot
        return

    p_state = state + slot * stride_hn + i_hv * stride_hh
    p_tile = p_state + o_v[:, None] * stride_hv + o_i[None, :] * stride_hk
    if IN_REGISTERS:
        loads = load_pieces(p_tile, in_v, stride_hk, K, BK, KI, "")
    ROW_U: tl.constexpr = V if RING else HV * V
    ROW_K: tl.constexpr = K if RING else H * K
    ROW_G: tl.constexpr = 1 if RING else HV
    # `own`: the token of this call whose record is written to a row. The k of this token is read
    # from the call's k.
    if RING:
        if tl.load(start + ring * stride_start) != 0:
            return
        position = tl.load(positions + ring * stride_p).to(tl.int32)
        base = tl.load(bases + ring * stride_base).to(tl.int32)
        # The number of the record in a row, 0 for the oldest.
        number = tl.where(o_r < R, (o_r + R - base) % R, R)
        is_read = number < position
        age = tl.where(is_read, position - 1 - number, BR)
        own = tl.where(o_r < R, number - position, -1)
        is_own = (own >= 0) & (own < n_tokens)
        position += base
        p_u = u_rows + ring * stride_ur + i_hv * (R * V) + o_v
        p_kr = k_rows + ring * stride_kr + i_h * (R * K)
        p_gr = g_rows + ring * stride_gr + i_hv * R
    else:
        turn, age, is_read = rows_to_load(o_r, position, i_hv, R, D, PERIOD, TURNS)
        own = (R - 1) - age.to(tl.int32)
        is_own = (own >= 0) & (own < n_tokens)
        p_u = u_rows + slot * stride_ur + i_hv * V + o_v
        p_kr = k_rows + slot * stride_kr + i_h * K
        p_gr = g_rows + slot * stride_gr + i_hv
    b_gr = tl.load(p_gr + o_r * ROW_G, mask=is_read)
    if not RING:
        b_start = tl.load(start + slot * stride_start).to(tl.int32)
        last_call = position - 1
        if D > 1:
            last_call = tl.load(call_rows + slot * stride_cr + (position + R - 1) % R)
    b_u = tl.load(p_u[:, None] + o_r[None, :] * ROW_U, mask=is_read[None, :] & in_v[:, None])
    if u_low is not None:
        p_ul = u_low + ring * stride_ur + i_hv * (R * V) + o_v
        b_ul = tl.load(p_ul[:, None] + o_r[None, :] * ROW_U, mask=is_read[None, :] & in_v[:, None])
    if not EARLY:
        b_y = load_tokens(p_q, p_k, wide_t, is_k, with_token, o_k, in_k, stride_qt, stride_kt,
                          stride_qk, stride_kk, ONE_LOAD)  # fmt: skip
    # A record's key and k of a token are loads of the same tile: two tiles would take twice the
    # registers.
    own_k = p_k + own.to(tl.int64)[:, None] * stride_kt + o_k[None, :] * stride_kk
    old_k = p_kr + o_r[:, None] * ROW_K + o_k[None, :]
    if k_rows.dtype.element_ty != k.dtype.element_ty:
        b_r = tl.load(old_k, mask=is_read[:, None] & in_k[None, :], other=0).to(tl.float32)
        b_r += tl.load(own_k, mask=is_own[:, None] & in_k[None, :], other=0).to(tl.float32)
    elif is_hip():
        # Triton 3.6 and 3.7 cannot compile a choice between two pointers for AMD's GPUs.
        b_r = tl.load(old_k, mask=(is_read & (is_own == 0))[:, None] & in_k[None, :], other=0)
        b_own = tl.load(own_k, mask=is_own[:, None] & in_k[None, :], other=0)
        b_r = tl.where(is_own[:, None], b_own, b_r)
    else:
        p_r = tl.where(is_own[:, None], own_k, old_k)
        b_r = tl.load(p_r, mask=(is_read | is_own)[:, None] & in_k[None, :])
    if k_low is not None:
        p_rl = k_low + ring * stride_kr + i_h * (R * K) + o_r[:, None] * ROW_K + o_k[None, :]
        b_rl = tl.load(p_rl, mask=is_read[:, None] & in_k[None, :], other=0)
    p_scale = None
    if scales is not None:
        p_scale = scales + slot * (HV * V) + i_hv * V + o_v
        b_scale = tl.load(p_scale, mask=in_v, other=0)
    if IN_REGISTERS:
        # ptxas moves the instructions that wait for the tokens up across a barrier, to before the
        # loads of the state, but not across a branch.
        tl.debug_barrier()
        if RELEASE:
            gdc_launch_dependents()
        if n_tokens <= 0:
            return
    else:
        # The pipeline copies all pieces of the state to shared memory before the first product. A
        # second use of b_h would keep the compiler from copying 16 bytes at once, or from the
        # pipeline.
        both = tl.zeros([BV, 2 * BT], dtype=tl.float32)
        for i in tl.range(0, KO, num_stages=STAGES):
            in_i = below(o_i, i * KI, K, BK)
            b_h = tl.load(p_tile + i * KI * stride_hk, mask=in_v[:, None] & in_i[None, :], other=0)
            y_i = load_tokens(p_q, p_k, wide_t, is_k, with_token, o_i + i * KI, in_i, stride_qt,
                              stride_kt, stride_qk, stride_kk, ONE_LOAD)  # fmt: skip
            both += state_dot(b_h, tl.trans(y_i))
        if EARLY:
            tl.debug_barrier()
        elif k_rows.dtype.element_ty != k.dtype.element_ty:
            records = state_dot(padded_with_zeros(b_r, in_k, K, BK), tl.trans(b_y))
        else:
            records = key_products(b_r, b_y, in_k, K, BK)
    if k_low is not None:
        records += state_dot(b_rl, tl.trans(b_y))

    # The numbers up to the next barrier depend on the tokens alone.
    # Find the tokens on the path to the token of a column, which includes that token itself.
    if parents is not None:
        p_parents = parents + i_b * stride_ab + row * stride_at
        path = path_bits(p_parents, stride_at, tl.where(with_token, y_t, -1), BT)
    b_beta = strength(b_beta, BETA_FACTOR)
    if A_log is not None:
        b_g = tl.where(in_t, log_decay(b_g + bias, b_A, tl.exp(b_A), THRESHOLD), 0.0)
        # The compiler would compute an activation once for each layout in which it is used, but
        # computes a sum only once.
        b_g = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_g[None, :], 0.0), 1)
    # Sum the log decays of the tokens after the token of a row, up to the token of a column.
    owned = tl.where(is_own, own, -1)
    between = (o_t > owned[:, None, None]) & (o_t <= y_t[None, :, None])
    if parents is not None:
        between = between & has_bit(path[None, :, None], o_t)
    own_w = tl.sum(tl.where(between, b_g, 0.0), 2)
    is_before = o_t[None, :] <= y_t[:, None]
    if parents is not None:
        is_before = is_before & has_bit(path[:, None], o_t[None, :])
    log_s = sum_of_tokens(tl.where(is_before, b_g[None, :], 0.0))
    # u = beta of_k (v - of_k x), where of_k is the inverse norm of k: the columns of k are
    # multiplied by beta of_k^2, and v by beta of_k.
    of_y = tl.where(is_k, 1.0, scale)
    is_here = slot > LAST_SKIPPED
    if EARLY:
        b_y = not_before(b_y, is_here)
    if USE_QK_L2NORM:
        f_y = b_y.to(tl.float32)
        of_y *= tl.rsqrt(sum_of_channels(f_y * f_y, 1) + EPS)
    of_token = y_t[:, None] == o_t[None, :]
    y_beta = tl.sum(tl.where(of_token, b_beta[None, :], 0.0), 1)
    if RING:
        # Keys are stored after their normalisation, and u does not contain its factor.
        is_key = is_k[None, :] & (owned[:, None] == y_t[None, :])
        of_row = tl.sum(tl.where(is_key, of_y[None, :], 0.0), 1)
        records *= tl.where(is_own, of_row, 1.0)[:, None]
        of_key = tl.sum(tl.where(of_token & is_k[:, None], of_y[:, None], 0.0), 0)
        of_v = tl.where(is_k, y_beta, 0.0)
        of_y *= tl.where(is_k, y_beta, 1.0)
    else:
        of_v = tl.where(is_k, of_y * y_beta, 0.0)
        of_y *= tl.where(is_k, of_y * y_beta, 1.0)
    last = tl.where(is_k, y_t - 1, y_t)
    is_above = owned[:, None] <= last[None, :]
    if parents is not None:
        is_above = is_above & has_bit(path[None, :], tl.maximum(owned, 0)[:, None])

    if IN_REGISTERS:
        tl.debug_barrier()
    TWO_PARTS: tl.constexpr = u_low is not None and u_rows.dtype.element_ty == tl.bfloat16
    if RING:
        alive = is_read
        if not TWO_PARTS:
            b_u = b_u.to(tl.float32)
            if u_low is not None:
                b_u += b_ul.to(tl.float32)
    else:
        held, due = folds_of(position, last_call, b_start, turn, PERIOD)
        alive = age < (position - held).to(tl.uint32)
    b_gr = tl.where(alive, b_gr, 0.0)
    if TWO_PARTS:
        b_ul = tl.where(alive[None, :], b_ul, 0.0)
    log_w = tl.where(is_own, 0.0, sums_after(b_gr, age))[:, None] + own_w
    log_s += tl.sum(b_gr, 0)
    if EARLY:
        records = key_products(not_before(b_r, is_here), b_y, in_k, K, BK)
    used = alive[:, None] | (is_own[:, None] & is_above)
    records = tl.where(used, records * tl.exp2(log_w * RCP_LN2) * of_y[None, :], 0.0)
    if IN_REGISTERS:
        both = state_dot(not_before(loads[0], is_here), tl.trans(b_y))
    both *= (tl.exp2(log_s * RCP_LN2) * of_y)[None, :]
    b_u = tl.where(alive[None, :], b_u, 0.0)
    if scales is not None:
        both *= b_scale[:, None]
    if TWO_PARTS:
        # u has 16 bits, and so have the products of two parts.
        held_records = tl.where(alive[:, None], records, 0.0)
        high = held_records.to(tl.bfloat16)
        both = tl.dot(b_u, high, both)
        both = tl.dot(b_u, (held_records - high.to(tl.float32)).to(tl.bfloat16), both)
        both = tl.dot(b_ul, high, both)
    else:
        both += records_dot(b_u, tl.where(alive[:, None], records, 0.0), q.dtype.element_ty)
    # From here on a column of k is u of its token, and a column of q is -o, once the u of the
    # tokens before it have been subtracted.
    both = b_v.to(tl.float32) * of_v[None, :] - both
    for t in tl.static_range(BT):
        to_later = tl.sum(tl.where((own == t)[:, None], records, 0.0), 0)
        new_u = tl.sum(tl.where((o_y == 2 * t + 1)[None, :], both, 0.0), 1)
        # Select the later columns. `to_later` is 0 in earlier columns, and 0 times a NaN of this
        # token would be NaN.
        is_later = last >= t
        if parents is not None:
            is_later = is_later & has_bit(path, t)
        both = tl.where(is_later[None, :], both - new_u[:, None] * to_later[None, :], both)
    tl.store(p_o[:, None] + wide_t[None, :] * stride_ot, (0.0 - both).to(o.dtype.element_ty),
             mask=in_v[:, None] & (with_token & is_q)[None, :])  # fmt: skip
    if RING:
        at_u = (position + y_t) % R * ROW_U
        p_rest = None
        if u_low is not None:
            p_rest = p_ul[:, None] + at_u[None, :]
        store_parts(p_u[:, None] + at_u[None, :], p_rest, both, in_y)
        if i_v == 0:
            new_r = (position + o_t) % R
            tl.store(p_gr + new_r, b_g, mask=in_t)
            if i_hv % (HV // H) == 0:
                in_new = in_t[:, None] & in_k[None, :]
                new_k = p_k + o_t.to(tl.int64)[:, None] * stride_kt + o_k[None, :] * stride_kk
                new_k = tl.load(new_k, mask=in_new, other=0).to(tl.float32) * of_key[:, None]
                at_k = o_k[None, :] + new_r[:, None] * ROW_K
                p_more = None
                if k_low is not None:
                    p_more = k_low + ring * stride_kr + i_h * (R * K) + at_k
                store_parts(p_kr + at_k, p_more, new_k, in_new)
    else:
        tl.store(p_u[:, None] + ((position + y_t) % R)[None, :] * (HV * V), both, mask=in_y)
        if i_v == 0:
            new_r = (position + o_t) % R
            tl.store(p_gr + new_r * HV, b_g, mask=in_t)
            if i_hv % (HV // H) == 0:
                in_new = in_t[:, None] & in_k[None, :]
                new_k = p_k + o_t.to(tl.int64)[:, None] * stride_kt + o_k[None, :] * stride_kk
                p_new = p_kr + o_k[None, :] + new_r[:, None] * (H * K)
                tl.store(p_new, tl.load(new_k, mask=in_new), mask=in_new)
            if i_hv == 0:
                tl.store(call_rows + slot * stride_cr + new_r, position + o_t * 0, mask=in_t)
        if (held < due) & (n_tokens > 0):
            to_fold = alive & (age >= (position - due).to(tl.uint32))
            if EARLY and scales is None:
                fold_early(p_state, p_kr, b_u, b_gr, age, to_fold, o_v, in_v, stride_hk, stride_hv,
                           H * K, K, BK, FI, RCP_LN2, is_here)  # fmt: skip
            else:
                fold_records(p_state, p_kr, p_scale, b_u, b_gr, age, to_fold, o_v, in_v, stride_hk,
                             stride_hv, H * K, K, BK, FI, RCP_LN2)  # fmt: skip
