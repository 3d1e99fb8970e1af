"""Decoding with a window, for one token in each sequence, where a program issues all loads before
it uses the first loaded number. `window_one.py` has the kernel of a layer's step, of key-first
float32 states, and of other sizes and dtypes, in which a program waits for memory several times.
Both kernels give the same bits. `window.py` has the equations."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import is_hip

from gdn_triton.recurrent.triton.window_records import (
    below,
    factors_of,
    fold_records,
    folds_of,
    in_float32,
    load_pieces,
    outer,
    padded_with_zeros,
    parts_of,
    record_products,
    records_dot,
    rows_to_load,
    state_dot,
    sums_after,
    token_products,
)


@triton.jit
def not_before(x, is_here):
    """Returns x, a loaded tile. is_here: a number of the program that is true wherever this call is
    reached. Without this function the compiler moves the conversion of a loaded tile to an operand
    of `tl.dot` up to the load, and waits for memory there before it issues the next load. The
    compiler does not move a conversion across a select by such a number. The select costs no
    instruction, because the program has already branched on is_here."""
    return tl.where(is_here, x, tl.zeros_like(x))


@triton.jit
def fold_early(
    p_state, p_kr, b_u, b_gr, age, to_fold, o_v, in_v, stride_hk: tl.constexpr,
    stride_hv: tl.constexpr, stride_kr: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    FI: tl.constexpr, RCP_LN2: tl.constexpr, is_here
):  # fmt: skip
    """Does the same as `fold_records` for float states, with all loads before the first product."""
    o_f, o_r = tl.arange(0, FI), tl.arange(0, to_fold.shape[0])
    p_tile = p_state + o_v[:, None] * stride_hv + o_f[None, :] * stride_hk
    p_keys = p_kr + o_f[None, :] + o_r[:, None] * stride_kr
    h_pieces, k_pieces = (), ()
    for i in tl.static_range(BK // FI):
        in_f = below(o_f, i * FI, K, BK)
        h_pieces += (tl.load(p_tile + i * FI * stride_hk, mask=in_v[:, None] & in_f[None, :],
                             other=0),)  # fmt: skip
        k_pieces += (tl.load(p_keys + i * FI, mask=to_fold[:, None] & in_f[None, :], other=0),)
    tl.debug_barrier()
    b_g = tl.where(to_fold, b_gr, 0.0)
    decay = tl.exp2(tl.sum(b_g, 0) * RCP_LN2)
    w = tl.exp2(sums_after(b_g, age) * RCP_LN2)
    f_u = tl.where(to_fold[None, :], b_u * w[None, :], 0.0)
    for i in tl.static_range(BK // FI):
        in_f = below(o_f, i * FI, K, BK)
        b_h, b_k = not_before(h_pieces[i], is_here), not_before(k_pieces[i], is_here)
        added = outer(f_u, b_k, b_h.dtype != tl.float32)
        b_h = tl.fma(b_h.to(tl.float32), decay, added)
        tl.store(p_tile + i * FI * stride_hk, b_h.to(p_state.dtype.element_ty),
                 mask=in_v[:, None] & in_f[None, :])  # fmt: skip


@triton.jit
def with_parts(f_u, k_high, k_low, NARROW: tl.constexpr):
    """Returns [BV, KI] float32: f_u [BV, BR], float32, times the keys k_high + k_low [BR, KI],
    bf16. NARROW: the result is added to a state of 8 or 11 bits."""
    u1, u2, u3 = parts_of(f_u)
    added = tl.dot(u1, k_low)
    if NARROW:
        added = tl.dot(u2, k_high, added)
    else:
        added = tl.dot(u2, k_low, added)
        added = tl.dot(u3, k_high, added)
        added = tl.dot(u2, k_high, added)
    return tl.dot(u1, k_high, added)


@triton.jit
def fold_ring(
    p_from, p_to, p_kr, p_low, f_u, decay, is_held, in_v, new_u, p_k, stride_kk,
    stride_hk: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, FI: tl.constexpr,
    LIKE: tl.constexpr, is_here
):  # fmt: skip
    """Stores decay times the state at p_from, plus the records f_u, at p_to, with all loads before
    the first product. p_from, p_to: the pointers of the first column [BV, 1]. p_kr: the keys of a
    ring [.., K], and p_low what they round off, or None. new_u [BV], p_k: u, and the pointer to k,
    of one more record, or None."""
    o_f, o_r = tl.arange(0, FI), tl.arange(0, is_held.shape[0])
    h_pieces, k_pieces, low_pieces, new_pieces = (), (), (), ()
    for i in tl.static_range(BK // FI):
        in_f, i_k = below(o_f, i * FI, K, BK)[None, :], (o_f + i * FI)[None, :]
        in_rows = is_held[:, None] & in_f
        h_pieces += (tl.load(p_from + i_k * stride_hk, mask=in_v[:, None] & in_f, other=0),)
        k_pieces += (tl.load(p_kr + o_r[:, None] * K + i_k, mask=in_rows, other=0),)
        if p_low is not None:
            low_pieces += (tl.load(p_low + o_r[:, None] * K + i_k, mask=in_rows, other=0),)
        if p_k is not None:
            in_k = below(o_f, i * FI, K, BK)
            new_pieces += (tl.load(p_k + (o_f + i * FI) * stride_kk, mask=in_k, other=0),)
    tl.debug_barrier()
    for i in tl.static_range(BK // FI):
        in_f, i_k = below(o_f, i * FI, K, BK)[None, :], (o_f + i * FI)[None, :]
        b_h, b_k = not_before(h_pieces[i], is_here), not_before(k_pieces[i], is_here)
        if p_low is not None:
            b_low = not_before(low_pieces[i], is_here)
            if b_k.dtype == tl.bfloat16:
                added = with_parts(f_u, b_k, b_low, b_h.dtype != tl.float32)
            else:
                added = records_dot(f_u, b_k.to(tl.float32) + b_low.to(tl.float32), LIKE)
        elif b_k.dtype == tl.bfloat16:
            added = outer(f_u, b_k, b_h.dtype != tl.float32)
        else:
            added = records_dot(f_u, b_k.to(tl.float32), LIKE)
        b_h = tl.fma(b_h.to(tl.float32), decay, added)
        if p_k is not None:
            b_h = tl.fma(new_u[:, None], new_pieces[i].to(tl.float32)[None, :], b_h)
        tl.store(p_to + i_k * stride_hk, b_h.to(p_to.dtype.element_ty),
                 mask=in_v[:, None] & in_f)  # fmt: skip


@triton.jit(do_not_specialize=["N"])
def window_early_fwd_kernel(
    q, k, v, g, beta, A_log, dt_bias, o, state, u_rows, k_rows, g_rows, call_rows, start, slots,
    positions, scales, N, scale,
    stride_qb, stride_qh, stride_qk, stride_kb, stride_kh, stride_kk, stride_vb, stride_vh,
    stride_vv, stride_gb, stride_gh, stride_bb, stride_bh, stride_A, stride_dt, stride_ob,
    stride_oh, stride_ov,
    stride_hn, stride_hh, stride_start, stride_s, stride_p,
    stride_hk: tl.constexpr, stride_hv: tl.constexpr, H: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, R: tl.constexpr,
    BR: tl.constexpr, D: tl.constexpr, PERIOD: tl.constexpr, TURNS: tl.constexpr,
    K_OFFSET: tl.constexpr, V_OFFSET: tl.constexpr, RCP_LN2: tl.constexpr, EPS: tl.constexpr,
    THRESHOLD: tl.constexpr, USE_QK_L2NORM: tl.constexpr, BETA_FACTOR: tl.constexpr,
    LAST_SKIPPED: tl.constexpr, KI: tl.constexpr, FI: tl.constexpr, DOT: tl.constexpr,
    DEPENDENT: tl.constexpr, RELEASE: tl.constexpr, RECORDS_FIRST: tl.constexpr,
    RING: tl.constexpr, stride_ur: tl.constexpr, stride_kr: tl.constexpr, stride_gr: tl.constexpr,
    stride_cr: tl.constexpr,
):  # fmt: skip
    """A program has BV columns of the state of one sequence and value head. It waits for memory
    twice: for the slot, and for the token, the state and its records. A program issues its
    instructions in order, so all loads must precede the instructions that wait for the token. A
    barrier keeps the loads there in Triton's code. ptxas moves some instructions up across a
    barrier, but not across a branch, which programs with many columns have. DOT: the matrix units
    multiply the state, which has the 16-bit dtype of q and k, or int8. DEPENDENT: see
    `dependent_launch`. RELEASE: the programs of the next dependent launch may start once every
    program has issued its loads, and the state is not kept in the first-level cache. RECORDS_FIRST:
    the records are loaded before the state. The rows of a slot are contiguous in u_rows, k_rows,
    g_rows and call_rows, whose slots have the strides ur, kr, gr and cr.

    RING: the records are those of an engine's ring of R rows, which `gdn_triton.recurrent.rings`
    describes. positions: the records of each sequence.
    start: not 0 where a sequence folds before its ring is full; None: nowhere. k is stored after
    its normalisation, and all heads of a sequence fold in the same call."""
    pid = tl.program_id(0).to(tl.int64)
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    KO: tl.constexpr = BK // KI
    i_v, i_nh = (pid % V_BLOCKS).to(tl.int32), pid // V_BLOCKS
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    o_k, o_i, o_r = tl.arange(0, BK), tl.arange(0, KI), tl.arange(0, BR)
    # With pieces of 32 elements each warp computes the sums of q and k itself, and no sum needs a
    # barrier. This was faster with few states, and slower with more. `inner` says what LINES is.
    NI: tl.constexpr = min(KI, 32) if RECORDS_FIRST else KI
    LINES: tl.constexpr = KI // NI
    o_n = tl.arange(0, NI)
    o_v = i_v * BV + tl.arange(0, BV)
    in_v = below(tl.arange(0, BV), i_v * BV, V, BV)

    if DEPENDENT:
        gdc_wait()
    slot = tl.load(slots + i_n * stride_s).to(tl.int64)
    position = tl.load(positions + i_n * stride_p).to(tl.int32)
    if RING:
        folds = position == R - 1
        if start is not None:
            folds = folds | (tl.load(start + i_n * stride_start) != 0)
    p_q = q + i_n * stride_qb + i_h * stride_qh
    p_k = k + K_OFFSET * stride_kk + i_n * stride_kb + i_h * stride_kh
    p_v = v + V_OFFSET * stride_vv + i_n * stride_vb + i_hv * stride_vh + o_v * stride_vv
    # Columns 0 and 1 of y are q and k; the matrix units multiply at least 8.
    o_y = tl.arange(0, 8)
    # Keys of another dtype than k, those of float32 states, would spill next to the states.
    # Therefore both are copied to shared memory, and matrix units multiply both.
    PIPELINED: tl.constexpr = RING and k_rows.dtype.element_ty != q.dtype.element_ty
    yq_loads, yk_loads, q_loads, k_loads = (), (), (), ()
    for i in tl.static_range(KO):
        in_i = below(o_i, i * KI, K, BK)
        i_k = o_i + i * KI
        if not PIPELINED:
            yq_loads += (tl.load(p_q + o_y[:, None] * 0 + i_k[None, :] * stride_qk,
                                 mask=(o_y == 0)[:, None] & in_i[None, :], other=0),)  # fmt: skip
            yk_loads += (tl.load(p_k + o_y[:, None] * 0 + i_k[None, :] * stride_kk,
                                 mask=(o_y == 1)[:, None] & in_i[None, :], other=0),)  # fmt: skip
    for i in tl.static_range(BK // NI):
        in_n = below(o_n, i * NI, K, BK)
        q_loads += (tl.load(p_q + (o_n + i * NI) * stride_qk, mask=in_n, other=0),)
        k_loads += (tl.load(p_k + (o_n + i * NI) * stride_kk, mask=in_n, other=0),)
    # Only one of the programs whose value heads share a key head writes the key's record.
    stored_k = tl.where((i_v == 0) & (i_hv % (HV // H) == 0), K, 0)
    raw_k = tl.load(p_k + o_k * stride_kk, mask=o_k < stored_k, other=0)
    raw_v = tl.load(p_v, mask=in_v, other=0)
    raw_g = tl.load(g + i_n * stride_gb + i_hv * stride_gh)
    raw_beta = tl.load(beta + i_n * stride_bb + i_hv * stride_bh)
    b_A, bias = 0.0, 0.0
    if A_log is not None:
        b_A = tl.load(A_log + i_hv * stride_A).to(tl.float32)
        if dt_bias is not None:
            bias = tl.load(dt_bias + i_hv * stride_dt).to(tl.float32)
    p_o = o + i_n * stride_ob + i_hv * stride_oh + o_v * stride_ov
    tl.debug_barrier()
    if slot <= LAST_SKIPPED:
        tl.store(p_o, tl.zeros([BV], dtype=o.dtype.element_ty), mask=in_v)
        return

    p_state = state + slot * stride_hn + i_hv * stride_hh
    p_tile = p_state + o_v[:, None] * stride_hv + o_i[None, :] * stride_hk
    CACHE: tl.constexpr = ".cg" if RELEASE else ""
    if not PIPELINED and not RECORDS_FIRST:
        loads = load_pieces(p_tile, in_v, stride_hk, K, BK, KI, CACHE)
    ROW_U: tl.constexpr = V if RING else HV * V
    ROW_K: tl.constexpr = K if RING else H * K
    ROW_G: tl.constexpr = 1 if RING else HV
    if RING:
        is_read = o_r < position
        age = tl.where(is_read, position - 1 - o_r, BR)
        p_u = u_rows + slot * stride_ur + i_hv * (R * V) + o_v
        p_kr = k_rows + slot * stride_kr + i_h * (R * K)
        p_gr = g_rows + slot * stride_gr + i_hv * R
    else:
        turn, age, is_read = rows_to_load(o_r, position, i_hv, R, D, PERIOD, TURNS)
        p_u = u_rows + slot * stride_ur + i_hv * V + o_v
        p_kr = k_rows + slot * stride_kr + i_h * K
        p_gr = g_rows + slot * stride_gr + i_hv
    b_u = tl.load(p_u[:, None] + o_r[None, :] * ROW_U, mask=is_read[None, :] & in_v[:, None])
    row_loads = ()
    for i in tl.static_range(0 if PIPELINED else KO):
        in_i = below(o_i, i * KI, K, BK)
        p_i = p_kr + (o_i + i * KI)[None, :] + o_r[:, None] * ROW_K
        row_loads += (tl.load(p_i, mask=is_read[:, None] & in_i[None, :]),)
    b_gr = tl.load(p_gr + o_r * ROW_G, mask=is_read)
    if not RING:
        b_start = tl.load(start + slot * stride_start).to(tl.int32)
        last_call = position - 1
        if D > 1:
            last_call = tl.load(call_rows + slot * stride_cr + (position + R - 1) % R)
    p_scale, b_scale = None, None
    if scales is not None:
        p_scale = scales + slot * (HV * V) + i_hv * V + o_v
        b_scale = tl.load(p_scale, mask=in_v, other=0)
    if not PIPELINED and RECORDS_FIRST:
        loads = load_pieces(p_tile, in_v, stride_hk, K, BK, KI, CACHE)
    tl.debug_barrier()
    if RELEASE:
        gdc_launch_dependents()
    if (DOT or not RING) and BV > 32:
        # No program returns here, because N is the number of sequences. The programs for float32
        # states of rings have half the registers and would spill. With few columns the branch takes
        # more time than the instructions moved up.
        if i_n >= N:
            return

    y_pieces = ()
    for i in tl.static_range(0 if PIPELINED else KO):
        y_pieces += (tl.trans(tl.where((o_y == 1)[:, None], yk_loads[i], yq_loads[i])),)
    q_pieces, k_pieces = in_float32(q_loads, BK // NI), in_float32(k_loads, BK // NI)
    b_beta, b_g, of_q, of_k, qk = factors_of(
        q_pieces, k_pieces, raw_beta, raw_g, A_log, b_A, bias, scale, BK // NI, EPS,
        THRESHOLD, USE_QK_L2NORM, BETA_FACTOR, LINES
    )  # fmt: skip

    if RING:
        alive = is_read
        b_u = not_before(b_u, slot > LAST_SKIPPED).to(tl.float32)
    else:
        held, due = folds_of(position, last_call, b_start, turn, PERIOD)
        alive = age < (position - held).to(tl.uint32)
    b_gr = tl.where(alive, b_gr, 0.0)
    b_u = tl.where(alive[None, :], b_u, 0.0)
    pieces, r_pieces = (), ()
    for i in tl.static_range(KO):
        in_i = below(o_i, i * KI, K, BK)
        if not PIPELINED:
            pieces += (not_before(loads[i], slot > LAST_SKIPPED),)
            r_pieces += (
                padded_with_zeros(not_before(row_loads[i], slot > LAST_SKIPPED), in_i, K, BK),
            )
    of_state = tl.exp2((tl.sum(b_gr, 0) + b_g) * RCP_LN2)
    w = tl.exp2((sums_after(b_gr, age) + b_g) * RCP_LN2)
    of_y = tl.where(o_y == 0, of_q, of_k)
    if PIPELINED:
        records = tl.zeros([BR, 8], dtype=tl.float32)
        both = tl.zeros([BV, 8], dtype=tl.float32)
        for i in tl.range(0, KO, num_stages=KO + 1):
            in_row = below(o_i, i * KI, K, BK)[None, :]
            o_row = (o_i + i * KI)[None, :]
            b_h = tl.load(p_tile + i * KI * stride_hk, mask=in_v[:, None] & in_row, other=0)
            old_k = tl.load(p_kr + o_row + o_r[:, None] * ROW_K, mask=is_read[:, None] & in_row,
                            other=0)  # fmt: skip
            row_q, row_k = p_q + o_row * stride_qk, p_k + o_row * stride_kk
            if is_hip():
                # Triton 3.6 cannot compile a choice between two pointers for AMD's GPUs.
                row_q, row_k = row_q + o_y[:, None] * 0, row_k + o_y[:, None] * 0
                b_q = tl.load(row_q, mask=(o_y == 0)[:, None] & in_row, other=0)
                b_y = b_q + tl.load(row_k, mask=(o_y == 1)[:, None] & in_row, other=0)
            else:
                p_y = tl.where((o_y == 1)[:, None], row_k, row_q)
                b_y = tl.load(p_y, mask=(o_y < 2)[:, None] & in_row, other=0)
            b_y = tl.trans(b_y)
            both += state_dot(b_h, b_y)
            records += state_dot(old_k, b_y)
        records = tl.where(alive[:, None], records * (w[:, None] * of_y[None, :]), 0.0)
        both *= (of_y * of_state)[None, :]
        both += records_dot(b_u, records, q.dtype.element_ty)
        b_o, stored = tl.split(tl.sum(tl.reshape(both, [BV, 4, 2]), 1))
    else:
        records = record_products(r_pieces, y_pieces, w, of_y, alive, KO)
        b_o, stored = token_products(
            pieces, y_pieces, q_pieces, k_pieces, records, b_u, b_scale, of_state, of_q, of_k, of_y,
            BV, KO, DOT, q.dtype.element_ty
        )  # fmt: skip
    # The u of a window contains the factor that normalises k.
    of_new = of_k
    if RING:
        of_new = 1.0
        qk *= of_k
    new_u = (raw_v.to(tl.float32) - stored) * (of_new * b_beta)
    b_o = tl.fma(new_u, qk, b_o)
    new_r = (position if RING else position % R).to(tl.int64)
    tl.store(p_o, b_o.to(o.dtype.element_ty), mask=in_v)
    if RING:
        if folds:
            p_rows = p_state + o_v[:, None] * stride_hv
            fold_ring(p_rows, p_rows, p_kr, None, b_u * w[None, :], of_state, alive, in_v,
                      new_u * of_k, p_k, stride_kk, stride_hk, K, BK, FI, q.dtype.element_ty,
                      slot > LAST_SKIPPED)  # fmt: skip
        else:
            new_k = (raw_k.to(tl.float32) * of_k).to(k_rows.dtype.element_ty)
            tl.store(p_u + new_r * ROW_U, new_u.to(u_rows.dtype.element_ty), mask=in_v)
            tl.store(p_kr + o_k + new_r * ROW_K, new_k, mask=o_k < stored_k)
            if i_v == 0:
                tl.store(p_gr + new_r, b_g)
    else:
        tl.store(p_u + new_r * (HV * V), new_u, mask=in_v)
        if i_v == 0:
            tl.store(p_gr + new_r * HV, b_g)
            tl.store(p_kr + o_k + new_r * (H * K), raw_k, mask=o_k < stored_k)
            if i_hv == 0:
                tl.store(call_rows + slot * stride_cr + new_r, position)
        if held < due:
            to_fold = alive & (age >= (position - due).to(tl.uint32))
            if scales is None:
                fold_early(p_state, p_kr, b_u, b_gr, age, to_fold, o_v, in_v, stride_hk, stride_hv,
                           H * K, K, BK, FI, RCP_LN2, slot > LAST_SKIPPED)  # fmt: skip
            else:
                fold_records(p_state, p_kr, p_scale, b_u, b_gr, age, to_fold, o_v, in_v, stride_hk,
                             stride_hv, H * K, K, BK, FI, RCP_LN2)  # fmt: skip
