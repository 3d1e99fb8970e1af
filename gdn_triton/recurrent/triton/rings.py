"""Kernels that fold the records of an engine's rings into their states. `window_early.py` and
`window.py` have the kernels of tokens on rings.

Rows without a record may hold NaN. They are not loaded.
"""

import triton
import triton.language as tl

from gdn_triton.recurrent.triton.window_early import fold_ring
from gdn_triton.recurrent.triton.window_records import below, sums_after


@triton.jit
def ring_fold_kernel(
    state, d_rows, k_rows, g_rows, d_low, k_low, slots, rings, counts, bases, folding, accepted,
    track_slots, track_steps, stride_hl, stride_hn, stride_hh, stride_dl, stride_dn, stride_kl,
    stride_kn, stride_gl, stride_gn, stride_s, stride_r, stride_c, stride_e, stride_f, stride_a,
    stride_t, stride_ts, stride_hv: tl.constexpr, stride_hk: tl.constexpr, H: tl.constexpr,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
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
    number = tl.where(o_r < R, (o_r + R - base) % R, R)
    at_u = o_v[:, None] + o_r[None, :] * V
    d_rows += i_l * stride_dl + ring * stride_dn + i_hv * (R * V)
    k_rows += i_l * stride_kl + ring * stride_kn + i_h * (R * K)
    g_rows += i_l * stride_gl + ring * stride_gn + i_hv * R
    if d_low is not None:
        d_low += i_l * stride_dl + ring * stride_dn + i_hv * (R * V)
        k_low += i_l * stride_kl + ring * stride_kn + i_h * (R * K)
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
            in_u = is_held[None, :] & in_v[:, None]
            b_u = tl.load(d_rows + at_u, mask=in_u, other=0).to(tl.float32)
            if d_low is not None:
                b_u += tl.load(d_low + at_u, mask=in_u, other=0).to(tl.float32)
            b_gr = tl.load(g_rows + o_r, mask=is_held, other=0)
            age = tl.where(is_held, end - 1 - number, BR)
            w = tl.exp2(sums_after(b_gr, age) * RCP_LN2)
            decay = tl.exp2(tl.sum(b_gr, 0) * RCP_LN2)
            fold_ring(p_from, p_to, k_rows, k_low, b_u * w[None, :], decay, is_held, in_v, None,
                      None, 0, stride_hk, K, BK, FI, k_rows.dtype.element_ty,
                      slot > LAST_SKIPPED)  # fmt: skip


@triton.jit(do_not_specialize=["N"])
def ring_restart_kernel(
    slots, rings, counts, bases, folding, N, stride_s, stride_r, stride_c, stride_e, stride_f,
    R: tl.constexpr, LAST_SKIPPED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Empties the rings that were folded: their records end where they began."""
    o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + o_n * stride_s, mask=o_n < N, other=LAST_SKIPPED).to(tl.int64)
    is_live = slot > LAST_SKIPPED
    ring = tl.load(rings + o_n * stride_r, mask=is_live, other=0).to(tl.int64)
    is_live = is_live & (tl.load(folding + ring * stride_f, mask=is_live, other=0) != 0)
    count = tl.load(counts + ring * stride_c, mask=is_live, other=0)
    base = tl.load(bases + ring * stride_e, mask=is_live, other=0)
    tl.store(bases + ring * stride_e, (base + count) % R, mask=is_live)
    tl.store(counts + ring * stride_c, count * 0, mask=is_live)
    tl.store(folding + ring * stride_f, (count * 0).to(folding.dtype.element_ty), mask=is_live)
