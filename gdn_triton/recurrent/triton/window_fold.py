"""Kernels that fold the records of slots into their states outside of a step, restart a window, or
accept a path."""

import triton
import triton.language as tl

from gdn_triton.recurrent.triton.window_records import (
    age_of,
    below,
    fold_records,
    folds_of,
    turn_of,
)


@triton.jit
def window_fold_kernel(
    state, u_rows, k_rows, g_rows, call_rows, start, slots, positions,
    scales, stride_hn, stride_hh, stride_start, stride_s, stride_p,
    stride_hk: tl.constexpr, stride_hv: tl.constexpr, H: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, R: tl.constexpr,
    BR: tl.constexpr, D: tl.constexpr, PERIOD: tl.constexpr, TURNS: tl.constexpr,
    RCP_LN2: tl.constexpr, LAST_SKIPPED: tl.constexpr, FI: tl.constexpr, stride_ur: tl.constexpr,
    stride_kr: tl.constexpr, stride_gr: tl.constexpr, stride_cr: tl.constexpr,
):  # fmt: skip
    """Folds the records of all tokens before positions into the states. The caller then sets start
    to positions. The programs do not set it, because the other programs of the sequence read
    start."""
    pid = tl.program_id(0).to(tl.int64)
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    i_v, i_nh = (pid % V_BLOCKS).to(tl.int32), pid // V_BLOCKS
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    o_r = tl.arange(0, BR)
    o_v = i_v * BV + tl.arange(0, BV)
    in_v = below(tl.arange(0, BV), i_v * BV, V, BV)
    slot = tl.load(slots + i_n * stride_s).to(tl.int64)
    position = tl.load(positions + i_n * stride_p).to(tl.int32)
    if slot <= LAST_SKIPPED:
        return
    turn = turn_of(i_hv.to(tl.int32), PERIOD, TURNS)
    b_start = tl.load(start + slot * stride_start).to(tl.int32)
    last_call = position - 1
    if D > 1:
        last_call = tl.load(call_rows + slot * stride_cr + (position + R - 1) % R)
    held, _ = folds_of(position, last_call, b_start, turn, PERIOD)
    if held >= position:
        return
    age = age_of(o_r, position, R)
    alive = age < (position - held).to(tl.uint32)
    p_u = u_rows + slot * stride_ur + i_hv * V + o_v
    p_gr = g_rows + slot * stride_gr + i_hv
    b_u = tl.load(p_u[:, None] + o_r[None, :] * (HV * V), mask=alive[None, :] & in_v[:, None],
                  other=0)  # fmt: skip
    b_gr = tl.load(p_gr + o_r * HV, mask=alive, other=0)
    p_state = state + slot * stride_hn + i_hv * stride_hh
    p_kr = k_rows + slot * stride_kr + i_h * K
    p_scale = None
    if scales is not None:
        p_scale = scales + slot * (HV * V) + i_hv * V + o_v
    fold_records(p_state, p_kr, p_scale, b_u, b_gr, age, alive, o_v, in_v, stride_hk,
                 stride_hv, H * K, K, BK, FI, RCP_LN2)  # fmt: skip


@triton.jit
def move_row(p, target, source, o_x, moves, SIZE: tl.constexpr):
    """Copies elements o_x of row `source` of a slot to row `target` if `moves`. SIZE: elements of a
    row."""
    mask = o_x < tl.where(moves, SIZE, 0)
    tl.store(p + target * SIZE + o_x, tl.load(p + source * SIZE + o_x, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["LENGTH"])
def window_accept_kernel(
    u_rows, k_rows, g_rows, slots, positions, path, stride_s, stride_p, stride_ln, stride_lt,
    LENGTH, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    LAST_SKIPPED: tl.constexpr, BLOCK: tl.constexpr, stride_ur: tl.constexpr,
    stride_kr: tl.constexpr, stride_gr: tl.constexpr
):  # fmt: skip
    """Moves the records of a path to the rows from that of `positions` on. A program moves some
    elements of all rows of a slot. No earlier token of the path is moved to the row of a later
    token. The rows of a slot are contiguous in u_rows, k_rows and g_rows."""
    i_n, i_x = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_x = i_x * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + i_n * stride_s).to(tl.int64)
    if slot <= LAST_SKIPPED:
        return
    position = tl.load(positions + i_n * stride_p).to(tl.int64)
    p_path = path + i_n * stride_ln
    for j in range(0, LENGTH):
        token = tl.load(p_path).to(tl.int64)
        p_path += stride_lt
        moves = token > j
        target, source = (position + j) % R, (position + token) % R
        move_row(u_rows + slot * stride_ur, target, source, o_x, moves, HV * V)
        move_row(k_rows + slot * stride_kr, target, source, o_x, moves, H * K)
        move_row(g_rows + slot * stride_gr, target, source, o_x, moves, HV)
        # The next iteration may write the row of this token, in another thread than the one that
        # read it.
        tl.debug_barrier()


@triton.jit(do_not_specialize=["N"])
def window_start_kernel(
    start,
    slots,
    positions,
    N,
    stride_start,
    stride_s,
    stride_p,
    LAST_SKIPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sets start to positions for a block of slots."""
    o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + o_n * stride_s, mask=o_n < N, other=LAST_SKIPPED).to(tl.int64)
    position = tl.load(positions + o_n * stride_p, mask=o_n < N, other=0).to(tl.int32)
    tl.store(start + slot * stride_start, position, mask=slot > LAST_SKIPPED)
