"""Helpers of the kernels of steps in Gluon: layouts and sums; for windows, sums in the orders of
`window_early.py`, and the fold of a state in shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from gdn_triton._triton.views import meet
from gdn_triton.recurrent.triton.window_records import (
    age_of,
    parts_of,
    rows_to_load,
    upper_bits,
)

K = gl.constexpr(128)
# The rows of a window.
ROWS = gl.constexpr(16)
# The number of columns of K whose state and keys a fold moves at once.
FOLDED = gl.constexpr(32)


@gluon.constexpr_function
def whole_warps(NW):
    """Returns the bases of a layout whose warps hold the same elements of a matrix."""
    return [[0, 0]] * (NW.bit_length() - 1)


@gluon.constexpr_function
def own_columns(NW):
    """Returns the bases of a layout [BV, ..] whose warps have 16 columns of a state each."""
    return [[16 << i, 0] for i in range(NW.bit_length() - 1)]


@gluon.constexpr_function
def with_columns(NW, BV, *bases):
    """Returns the bases of the registers of a layout of `own_columns`: `bases`, and those of the
    columns past the first 16 of each warp."""
    return [*bases] + [[16 * NW << i, 0] for i in range((BV // (16 * NW)).bit_length() - 1)]


@gluon.jit
def sum_of_channels(x):
    """Returns the sum of x [N, K, ..] over K, in the order of `sum_of_channels` of `sums.py`."""
    for i in gl.static_range(7):
        x = gl.sum(gl.reshape(x, [x.shape[0], K >> (i + 1), 2] + x.shape[2:]), 2)
    return gl.reshape(x, [x.shape[0]] + x.shape[2:])


@gluon.jit
def sums_after(b_g, age, of_row):
    """Returns [ROWS]: the sum of b_g over the tokens after the token of each row. age, of_row: the
    ages along the columns and along the rows of one layout."""
    return gl.sum(gl.where(age[None, :] < of_row[:, None], b_g[None, :], 0.0), 1)


@gluon.jit
def halves(x, HALF: gl.constexpr):
    return gl.split(gl.permute(gl.reshape(x, [2, HALF]), (1, 0)))


@gluon.jit
def inner(x, y, LINES: gl.constexpr):
    """Returns the sum of x times y, both [K], as `inner` of `window_records.py` computes it from
    pieces of 32 elements."""
    x_first, x_last = halves(x, 64)
    y_first, y_last = halves(y, 64)
    if LINES == 2:
        b_sum = gl.fma(x_last, y_last, x_first * y_first)
        total = gl.sum(gl.sum(gl.reshape(b_sum, [2, 32]), 1), 0)
    else:
        x0, x1 = halves(x_first, 32)
        x2, x3 = halves(x_last, 32)
        y0, y1 = halves(y_first, 32)
        y2, y3 = halves(y_last, 32)
        b_sum = gl.fma(x2, y2, gl.fma(x1, y1, x0 * y0))
        total = gl.sum(gl.fma(x3, y3, b_sum), 0)
    return total


@gluon.jit
def sum_of_rows(x):
    """Returns the sum of x [ROWS] in the order in which the lanes of a warp add their numbers."""
    x = gl.sum(gl.reshape(x, [2, 8]), 0)
    x = gl.sum(gl.reshape(x, [2, 4]), 0)
    return gl.sum(x, 0)


@gluon.jit
def lane_sums_after(b_g, age, of_row):
    """Does the same as `sums_after` in the order of `sum_of_rows`."""
    x = gl.where(age[None, :] < of_row[:, None], b_g[None, :], 0.0)
    x = gl.sum(gl.reshape(x, [ROWS, 2, 8]), 1)
    x = gl.sum(gl.reshape(x, [ROWS, 2, 4]), 1)
    return gl.sum(x, 1)


@gluon.jit
def add_product(left, right, added):
    """Adds the product of float32 operands to `added`, as `records_dot` of `window_records.py`
    does."""
    l_upper, r_upper = upper_bits(left), upper_bits(right)
    added = mma_v2(left - l_upper, r_upper, added, input_precision="tf32")
    added = mma_v2(l_upper, right - r_upper, added, input_precision="tf32")
    return mma_v2(l_upper, r_upper, added, input_precision="tf32")


@gluon.jit
def is_alive(o_r, position, limit, R: gl.constexpr):
    """Returns whether the token of each row is one of the `limit` last tokens."""
    return age_of(o_r, position, R).to(gl.uint32) < limit


@gluon.jit
def is_read_of(o_r, position, i_hv, R: gl.constexpr, PERIOD: gl.constexpr, TURNS: gl.constexpr,
               RING: gl.constexpr):  # fmt: skip
    """Returns whether a row may hold a record that the head's state does not include."""
    if RING:
        return is_alive(o_r, position, position.to(gl.uint32), R)
    else:
        return rows_to_load(o_r, position, i_hv, R, 1, PERIOD, TURNS)[2]


@gluon.jit
def fold(
    state_s, keys_s, tokens, p_state, b_u, b_gr, b_g, new_u, position, limit, since,
    stride_hk: gl.constexpr, stride_hv: gl.constexpr, BV: gl.constexpr, R: gl.constexpr,
    RCP_LN2: gl.constexpr, PRODUCT: gl.constexpr, SUMS: gl.constexpr, RING: gl.constexpr
):  # fmt: skip
    """Does the same as `fold_early` of `window_early.py` for the tokens of the ages from `since` to
    `limit`, with the state and the keys in shared memory. p_state: the pointer of the tile. b_u: a
    left operand of float32. b_gr: a vector along the columns of SUMS, 0 where its row is not
    alive. RING: the token, whose k is tokens [2 K] after q, is folded too. b_g, new_u: its log
    decay, and its u times the factor of its k."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    U: gl.constexpr = gl.SliceLayout(0, gl.DotOperandLayout(0, PRODUCT, 1))
    KEY_FIRST: gl.constexpr = stride_hv == 1
    dtype: gl.constexpr = p_state.dtype.element_ty
    WIDE: gl.constexpr = keys_s.dtype == gl.float32
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 1 if WIDE else 2)

    age = age_of(gl.arange(0, ROWS, gl.SliceLayout(0, SUMS)), position, R).to(gl.uint32)
    of_row = age_of(gl.arange(0, ROWS, gl.SliceLayout(1, SUMS)), position, R).to(gl.uint32)
    b_gr = gl.where(age >= since, b_gr, 0.0)
    decay, w = sum_of_rows(b_gr), lane_sums_after(b_gr, age, of_row)
    if RING:
        decay, w = decay + b_g, w + b_g
    decay, w = gl.exp2(decay * RCP_LN2), gl.exp2(w * RCP_LN2)
    age = age_of(gl.arange(0, ROWS, U), position, R).to(gl.uint32)
    f_u = gl.where((age >= since)[None, :], b_u * gl.convert_layout(w, U)[None, :], 0.0)
    if WIDE:
        u_upper = upper_bits(f_u)
    else:
        u1, u2, u3 = parts_of(gl.convert_layout(f_u, LEFT))
    age = age_of(gl.arange(0, ROWS, gl.SliceLayout(1, RIGHT)), position, R).to(gl.uint32)
    to_fold = (age >= since) & (age < limit)
    p_state += gl.arange(0, BV, gl.SliceLayout(1, PRODUCT))[:, None] * stride_hv
    p_state += gl.arange(0, FOLDED, gl.SliceLayout(0, PRODUCT))[None, :] * stride_hk
    for i in gl.static_range(K // FOLDED):
        # Without a barrier ptxas loads several pieces at once and spills.
        meet()
        b_k = keys_s.slice(i * FOLDED, FOLDED, 1).load(RIGHT)
        b_k = gl.where(to_fold[:, None], b_k, gl.full_like(b_k, 0.0))
        if KEY_FIRST:
            b_h = state_s.slice(i * FOLDED, FOLDED, 0).permute((1, 0)).load(PRODUCT)
        else:
            b_h = state_s.slice(i * FOLDED, FOLDED, 1).load(PRODUCT)
        added = gl.zeros([BV, FOLDED], gl.float32, PRODUCT)
        if WIDE:
            k_upper = upper_bits(b_k)
            added = mma_v2(f_u - u_upper, k_upper, added, input_precision="tf32")
            added = mma_v2(u_upper, b_k - k_upper, added, input_precision="tf32")
            added = mma_v2(u_upper, k_upper, added, input_precision="tf32")
        else:
            if dtype == gl.float32:
                added = mma_v2(u3, b_k, added)
            added = mma_v2(u1, b_k, mma_v2(u2, b_k, added))
        b_h = gl.fma(b_h.to(gl.float32), gl.full_like(added, 0.0) + decay, added)
        if RING:
            k_i = tokens.slice(K + i * FOLDED, FOLDED, 0).load(gl.SliceLayout(0, PRODUCT))
            k_i = gl.full_like(b_h, 0.0) + k_i.to(gl.float32)[None, :]
            b_h = gl.fma(gl.full_like(b_h, 0.0) + new_u[:, None], k_i, b_h)
        gl.store(p_state + i * FOLDED * stride_hk, b_h.to(dtype))
