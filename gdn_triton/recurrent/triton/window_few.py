"""Decoding with a window, for one token in each sequence and few states, whose programs all run at
once. The time of a call is that of one program, so a program has few columns, waits for memory
twice, and has few barriers between its warps. `window_early.py` computes the same bits for many
states, and `window.py` has the equations."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from gdn_triton.recurrent.triton.window_early import fold_early, not_before
from gdn_triton.recurrent.triton.window_records import (
    age_of,
    below,
    factors_of,
    folds_of,
    in_float32,
    load_pieces,
    record_products,
    sums_after,
    token_products,
    turn_of,
)


@triton.jit(do_not_specialize=["N"])
def window_few_fwd_kernel(
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
    DEPENDENT: tl.constexpr, stride_ur: tl.constexpr, stride_kr: tl.constexpr,
    stride_gr: tl.constexpr, stride_cr: tl.constexpr,
):  # fmt: skip
    """A program has BV columns of the state of one sequence and value head. It loads all rows of
    the records except the one that the call writes, so no load waits for the arithmetic that finds
    the rows with records. All channels of the records' keys are one tile, which moves to an operand
    of `tl.dot` with one barrier. DOT: the matrix units multiply the state, and KI is BK. DEPENDENT:
    see `dependent_launch`."""
    tl.static_assert(D == 1)
    pid = tl.program_id(0).to(tl.int64)
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    KO: tl.constexpr = BK // KI
    i_v, i_nh = (pid % V_BLOCKS).to(tl.int32), pid // V_BLOCKS
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    o_k, o_i, o_r = tl.arange(0, BK), tl.arange(0, KI), tl.arange(0, BR)
    # Each warp computes the sums of q and k from pieces of NI elements, so no sum needs a barrier.
    NI: tl.constexpr = min(BK, 32)
    LINES: tl.constexpr = 2 if DOT and BK > NI else 1
    o_n = tl.arange(0, NI)
    o_v = i_v * BV + tl.arange(0, BV)
    in_v = below(tl.arange(0, BV), i_v * BV, V, BV)

    if DEPENDENT:
        gdc_wait()
    slot = tl.load(slots + i_n * stride_s).to(tl.int64)
    position = tl.load(positions + i_n * stride_p).to(tl.int32)
    p_q = q + i_n * stride_qb + i_h * stride_qh
    p_k = k + K_OFFSET * stride_kk + i_n * stride_kb + i_h * stride_kh
    p_v = v + V_OFFSET * stride_vv + i_n * stride_vb + i_hv * stride_vh + o_v * stride_vv
    # Columns 0 and 1 of y are q and k; the matrix units multiply at least 8.
    o_y = tl.arange(0, 8)
    in_k = below(o_k, 0, K, BK)
    q_y = tl.load(p_q + o_y[:, None] * 0 + o_k[None, :] * stride_qk,
                  mask=(o_y == 0)[:, None] & in_k[None, :], other=0)  # fmt: skip
    k_y = tl.load(p_k + o_y[:, None] * 0 + o_k[None, :] * stride_kk,
                  mask=(o_y == 1)[:, None] & in_k[None, :], other=0)  # fmt: skip
    q_loads, k_loads = (), ()
    for i in tl.static_range(BK // NI):
        in_n = below(o_n, i * NI, K, BK)
        i_k = o_n + i * NI
        q_loads += (tl.load(p_q + i_k * stride_qk, mask=in_n, other=0),)
        k_loads += (tl.load(p_k + i_k * stride_kk, mask=in_n, other=0),)
    # Only one of the programs whose value heads share a key head writes the key's record.
    stored_k = tl.where((i_v == 0) & (i_hv % (HV // H) == 0), K, 0)
    raw_k = tl.load(p_k + o_k * stride_kk, mask=o_k < stored_k, other=0)
    raw_v = tl.load(p_v, mask=in_v, other=0)
    raw_g = tl.load(g + i_n * stride_gb + i_hv * stride_gh)
    b_A, bias = 0.0, 0.0
    if A_log is not None:
        b_A = tl.load(A_log + i_hv * stride_A).to(tl.float32)
        if dt_bias is not None:
            bias = tl.load(dt_bias + i_hv * stride_dt).to(tl.float32)
    raw_beta = tl.load(beta + i_n * stride_bb + i_hv * stride_bh)
    p_o = o + i_n * stride_ob + i_hv * stride_oh + o_v * stride_ov
    tl.debug_barrier()
    is_here = slot > LAST_SKIPPED
    if slot <= LAST_SKIPPED:
        tl.store(p_o, tl.zeros([BV], dtype=o.dtype.element_ty), mask=in_v)
        return

    p_state = state + slot * stride_hn + i_hv * stride_hh
    p_tile = p_state + o_v[:, None] * stride_hv + o_i[None, :] * stride_hk
    new_r = position % R
    # Other programs write the row of the token itself.
    in_r = (o_r < R) & (o_r != new_r)
    p_u = u_rows + slot * stride_ur + i_hv * V + o_v
    p_kr = k_rows + slot * stride_kr + i_h * K
    p_gr = g_rows + slot * stride_gr + i_hv
    row_loads = tl.load(p_kr + o_k[None, :] + o_r[:, None] * (H * K),
                        mask=in_r[:, None] & in_k[None, :], other=0)  # fmt: skip
    loads = load_pieces(p_tile, in_v, stride_hk, K, BK, KI, "")
    b_u = tl.load(p_u[:, None] + o_r[None, :] * (HV * V), mask=in_r[None, :] & in_v[:, None])
    b_gr = tl.load(p_gr + o_r * HV, mask=in_r)
    b_start = tl.load(start + slot * stride_start).to(tl.int32)
    tl.debug_barrier()
    # No program returns here, because N is the number of sequences. ptxas moves instructions that
    # wait for the token up across a barrier, to before the loads of the state, but not across a
    # branch.
    if i_n >= N:
        return

    q_pieces, k_pieces = in_float32(q_loads, BK // NI), in_float32(k_loads, BK // NI)
    b_beta, b_g, of_q, of_k, qk = factors_of(
        q_pieces, k_pieces, raw_beta, raw_g, A_log, b_A, bias, scale, BK // NI, EPS, THRESHOLD,
        USE_QK_L2NORM, BETA_FACTOR, LINES
    )  # fmt: skip
    turn = turn_of(i_hv.to(tl.int32), PERIOD, TURNS)
    age = age_of(o_r, position, R)
    of_y = tl.where(o_y == 0, of_q, of_k)
    held, due = folds_of(position, position - 1, b_start, turn, PERIOD)
    alive = age < (position - held).to(tl.uint32)
    b_gr = tl.where(alive, b_gr, 0.0)
    b_u = tl.where(alive[None, :], b_u, 0.0)
    pieces = ()
    for i in tl.static_range(KO):
        pieces += (not_before(loads[i], is_here),)
    keys = not_before(row_loads, is_here)
    y = tl.trans(tl.where((o_y == 1)[:, None], k_y, q_y))
    of_state = tl.exp2((tl.sum(b_gr, 0) + b_g) * RCP_LN2)
    w = tl.exp2((sums_after(b_gr, age) + b_g) * RCP_LN2)
    records = record_products((keys,), (y,), w, of_y, alive, 1)
    b_o, stored = token_products(
        pieces, (y,), q_pieces, k_pieces, records, b_u, None, of_state, of_q, of_k, of_y, BV, KO,
        DOT, q.dtype.element_ty
    )  # fmt: skip
    # The u of a window contains the factor that normalises k.
    new_u = (raw_v.to(tl.float32) - stored) * (of_k * b_beta)
    b_o = tl.fma(new_u, qk, b_o)
    new_r = new_r.to(tl.int64)
    tl.store(p_o, b_o.to(o.dtype.element_ty), mask=in_v)
    tl.store(p_u + new_r * (HV * V), new_u, mask=in_v)
    if i_v == 0:
        tl.store(p_gr + new_r * HV, b_g)
        tl.store(p_kr + o_k + new_r * (H * K), raw_k, mask=o_k < stored_k)
        if i_hv == 0:
            tl.store(call_rows + slot * stride_cr + new_r, position)
    if held < due:
        to_fold = alive & (age >= (position - due).to(tl.uint32))
        fold_early(p_state, p_kr, b_u, b_gr, age, to_fold, o_v, in_v, stride_hk, stride_hv,
                   H * K, K, BK, FI, RCP_LN2, is_here)  # fmt: skip
