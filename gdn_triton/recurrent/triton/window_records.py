"""Helpers of the kernels with a window: which tokens rows and states hold, and the products of
states, records and tokens."""

import triton
import triton.language as tl
from triton.language.target_info import is_hip

from gdn_triton import constants
from gdn_triton._triton.activations import log_decay
from gdn_triton.recurrent.triton.kernel import strength

INT8_MAX = tl.constexpr(constants.INT8_MAX)
LEAST_RANGE = tl.constexpr(constants.LEAST_INT8_RANGE)


@triton.jit
def boundary(x, turn, PERIOD: tl.constexpr):
    """Returns the largest b <= x with b = turn modulo PERIOD. x >= 0 and turn < PERIOD."""
    return x - ((x - turn + PERIOD).to(tl.uint32) % PERIOD).to(tl.int32)


@triton.jit
def turn_of(i_hv, PERIOD: tl.constexpr, TURNS: tl.constexpr):
    """Returns the turn of value head i_hv, the place in a period where the head folds. With few
    turns most calls have no fold, whose latency a small batch cannot hide. Sequences at equal
    positions fold 1 / TURNS of their heads at once."""
    return (i_hv % TURNS) * PERIOD // TURNS


@triton.jit
def age_of(o_r, position, R: tl.constexpr):
    """Returns [BR]: the age of the token in each row. The last token, position - 1, has age 0. Rows
    that do not exist get an age above the age of every token that is read."""
    age = (position + (R - 1) - o_r).to(tl.uint32) % R
    return tl.where(o_r < R, age, R)


@triton.jit
def rows_to_load(o_r, position, i_hv, R: tl.constexpr, D: tl.constexpr, PERIOD: tl.constexpr,
                 TURNS: tl.constexpr):  # fmt: skip
    """Returns (turn, age, is_read): the turn of value head i_hv, and for each row the age of its
    token and whether the row may hold a record that the head's state does not include. The position
    of the previous call, which decides that, is not loaded yet, but is at least position - D.
    Therefore the state includes at least the tokens before `least`."""
    turn = turn_of(i_hv.to(tl.int32), PERIOD, TURNS)
    least = tl.maximum(boundary(tl.maximum(position - D, 0), turn, PERIOD), 0)
    age = age_of(o_r, position, R)
    return turn, age, age < (position - least).to(tl.uint32)


@triton.jit
def folds_of(position, last_call, b_start, turn, PERIOD: tl.constexpr):
    """Returns (held, due): the state in memory includes the tokens before `held`, and must include
    the tokens before `due` after this call. last_call: the position of the previous call, which has
    no meaning if no token has come since b_start."""
    due = tl.maximum(boundary(position, turn, PERIOD), b_start)
    last_call = tl.where(position > b_start, last_call, position)
    return tl.maximum(boundary(last_call, turn, PERIOD), b_start), due


@triton.jit
def path_bits(p_parents, stride, node, BT: tl.constexpr):
    """Returns the path of each element's node as bits: bit t is set if token t is the node or an
    ancestor of the node. There are at most BT nodes; -1 is no node."""
    bits = node * 0
    for _ in range(BT):
        is_node = node >= 0
        bits |= tl.where(is_node, 1 << tl.maximum(node, 0), 0)
        p_node = p_parents + node * tl.cast(stride, tl.int64)
        node = tl.load(p_node, mask=is_node, other=-1).to(tl.int32)
    return bits


@triton.jit
def has_bit(bits, i):
    return ((bits >> i) & 1) != 0


@triton.jit
def below(o_x, offset, END: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the mask offset + o_x < END for blocks of BLOCK. The mask is a constant where BLOCK
    divides END."""
    if END % BLOCK == 0:
        return tl.full(o_x.shape, True, tl.int1)
    return o_x + offset < END


@triton.jit
def padded_with_zeros(x, in_i, K: tl.constexpr, BK: tl.constexpr):
    """Sets the columns past K of x [BR, KI] to zeros. A load leaves these columns undefined. They
    could be NaN, and the product of NaN with the zeros of q and k is NaN."""
    if K % BK != 0:
        x = tl.where(in_i[None, :], x, 0.0).to(x.dtype)
    return x


@triton.jit
def sums_after(b_g, age):
    """Returns [BR]: the sum of b_g over the tokens after the token of each row."""
    return tl.sum(tl.where(age[None, :] < age[:, None], b_g[None, :], 0.0), 1)


@triton.jit
def load_pieces(p, in_v, stride_hk: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
                KI: tl.constexpr, CACHE: tl.constexpr):  # fmt: skip
    """Loads a tile [BV, BK] of a state as tiles [BV, KI]. p: the pointers of the first tile.
    CACHE: the cache modifier of the loads."""
    o_i = tl.arange(0, KI)
    pieces = ()
    for i in tl.static_range(BK // KI):
        mask = in_v[:, None] & below(o_i, i * KI, K, BK)[None, :]
        p_i = p + i * KI * stride_hk
        pieces += (tl.load(p_i, mask=mask, other=0, cache_modifier=CACHE),)
    return pieces


@triton.jit
def widened(b_h, LIKE: tl.constexpr):
    """Converts an int8 state to LIKE, a float type that represents all numbers of int8. Returns
    other states unchanged."""
    if b_h.dtype == tl.int8:
        b_h = b_h.to(LIKE)
    return b_h


@triton.jit
def weighted(pieces, x, KO: tl.constexpr):
    """Returns [BV]: the sum over K of a tile times x. Both come in KO pieces."""
    b_sum = pieces[0].to(tl.float32) * x[0][None, :]
    for i in tl.static_range(1, KO):
        b_sum = tl.fma(pieces[i].to(tl.float32), x[i][None, :], b_sum)
    return tl.sum(b_sum, 1)


@triton.jit
def in_float32(pieces, KO: tl.constexpr):
    wide = ()
    for i in tl.static_range(KO):
        wide += (pieces[i].to(tl.float32),)
    return wide


@triton.jit
def inner(x, y, KO: tl.constexpr, LINES: tl.constexpr):
    """Returns the sum of x times y, which come in KO pieces. LINES: every LINES-th piece belongs to
    one sum. Two sums of pieces of 32 elements have the bits of one sum of pieces of 64 elements
    that two warps share."""
    total = 0.0
    for line in tl.static_range(LINES):
        b_sum = x[line] * y[line]
        for i in tl.static_range(1, KO // LINES):
            b_sum = tl.fma(x[line + i * LINES], y[line + i * LINES], b_sum)
        if line == 0:
            total = tl.sum(b_sum, 0)
        else:
            total += tl.sum(b_sum, 0)
    return total


@triton.jit
def parts_of(x):
    """Splits x, float32, into three bf16 numbers whose sum has all 24 bits of x."""
    a = x.to(tl.bfloat16)
    x -= a.to(tl.float32)
    b = x.to(tl.bfloat16)
    return a, b, (x - b.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def upper_bits(x):
    """Returns the upper 11 significant bits of x, float32. tf32 represents them."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def records_dot(b_u, b_x, LIKE: tl.constexpr):
    """Returns b_u times b_x, both float32. LIKE: the dtype of the tokens. With 16-bit tokens the
    product is three tf32 products of upper and lower bits, whose error of 22 bits is below the
    rounding of the output. AMD's matrix units multiply float32."""
    if LIKE == tl.float32 or is_hip():
        product = tl.dot(b_u, b_x, input_precision="ieee")
    else:
        u_upper, x_upper = upper_bits(b_u), upper_bits(b_x)
        product = tl.dot(b_u - u_upper, x_upper, input_precision="tf32")
        product = tl.dot(u_upper, b_x - x_upper, product, input_precision="tf32")
        product = tl.dot(u_upper, x_upper, product, input_precision="tf32")
    return product


@triton.jit
def factors_of(
    q_pieces, k_pieces, b_beta, b_g, A_log, b_A, bias, scale, KO: tl.constexpr, EPS: tl.constexpr,
    THRESHOLD: tl.constexpr, USE_QK_L2NORM: tl.constexpr, BETA_FACTOR: tl.constexpr,
    LINES: tl.constexpr = 1
):  # fmt: skip
    """Returns (beta, g, of_q, of_k, qk) of one token: beta and the log decay after their
    activations, the factors of q and k, and the product of k and the scaled q. q_pieces, k_pieces:
    float32. A_log: None if b_g is the log decay already."""
    b_beta = strength(b_beta, BETA_FACTOR)
    b_g = b_g.to(tl.float32)
    if A_log is not None:
        b_g = log_decay(b_g + bias, b_A, tl.exp(b_A), THRESHOLD)
    of_q, of_k = scale, 1.0
    qk = inner(q_pieces, k_pieces, KO, LINES)
    if USE_QK_L2NORM:
        of_q = scale * tl.rsqrt(inner(q_pieces, q_pieces, KO, LINES) + EPS)
        of_k = tl.rsqrt(inner(k_pieces, k_pieces, KO, LINES) + EPS)
    return b_beta, b_g, of_q, of_k, qk * of_q


@triton.jit
def record_products(r_pieces, y_pieces, of_row, of_y, alive, KO: tl.constexpr):
    """Returns [BR, 8] float32: the keys of the records, r_pieces [BR, KI], times q and k of one
    token, and times the factors of the rows and of q and k; 0 in rows that are not alive."""
    y_first, r_first = y_pieces[0], r_pieces[0]
    records = tl.dot(r_first.to(y_first.dtype), y_first, input_precision="ieee")
    for i in tl.static_range(1, KO):
        records = tl.dot(
            r_pieces[i].to(y_first.dtype), y_pieces[i], records, input_precision="ieee"
        )
    return tl.where(alive[:, None], records * (of_row[:, None] * of_y[None, :]), 0.0)


@triton.jit
def token_products(
    pieces, y_pieces, q_pieces, k_pieces, records, b_u, b_scale, of_state, of_q, of_k, of_y,
    BV: tl.constexpr, KO: tl.constexpr, DOT: tl.constexpr, LIKE: tl.constexpr
):  # fmt: skip
    """Returns the products of one token's q and k with a head's state and its records, float32
    [BV] each. pieces: the state in memory. y_pieces [KI, 8]: q and k are columns 0 and 1, and the
    other columns are zero. records: the products of the records' keys with y. b_scale: the scales
    of an int8 state, otherwise None. DOT: the matrix units multiply the state. LIKE: the dtype of
    the tokens."""
    y_first = y_pieces[0]
    if DOT:
        both = tl.dot(widened(pieces[0], y_first.dtype), y_first)
        for i in tl.static_range(1, KO):
            both = tl.dot(widened(pieces[i], y_first.dtype), y_pieces[i], both)
        both *= (of_y * of_state)[None, :]
        if b_scale is not None:
            both *= b_scale[:, None]
        both += records_dot(b_u, records, LIKE)
    else:
        state_q = weighted(pieces, q_pieces, KO) * (of_state * of_q)
        state_k = weighted(pieces, k_pieces, KO) * (of_state * of_k)
        if b_scale is not None:
            state_q *= b_scale
            state_k *= b_scale
        both = records_dot(b_u, records, LIKE)
    b_q, b_k = tl.split(tl.sum(tl.reshape(both, [BV, 4, 2]), 1))
    if not DOT:
        b_q += state_q
        b_k += state_k
    return b_q, b_k


@triton.jit
def outer(b_u, b_k, NARROW: tl.constexpr):
    """Returns [BV, KI] float32: b_u [BV, BR], float32, times b_k [BR, KI] of the tokens' dtype.
    Products of bf16 are exact on matrix units. b_u is split into three bf16 numbers; two are enough
    for a state of 8 or 11 bits (NARROW)."""
    if b_k.dtype == tl.bfloat16:
        u1, u2, u3 = parts_of(b_u)
        if NARROW:
            added = tl.dot(u1, b_k, tl.dot(u2, b_k))
        else:
            added = tl.dot(u1, b_k, tl.dot(u2, b_k, tl.dot(u3, b_k)))
    else:
        added = records_dot(b_u, b_k.to(tl.float32), b_k.dtype)
    return added


@triton.jit
def state_dot(b_h, b_y):
    """Returns [BV, N] float32: b_h [BV, KI] of the states times b_y [KI, N] of the tokens. A
    float32 state is the sum of its upper 11 significant bits and the other 13, of which tf32
    represents 11. 16-bit tokens are exact in tf32."""
    b_h = widened(b_h, b_y.dtype)
    if b_h.dtype == b_y.dtype and b_y.dtype != tl.float32:
        b_sum = tl.dot(b_h, b_y)
    elif b_y.dtype == tl.float32 or is_hip():
        b_sum = tl.dot(b_h.to(tl.float32), b_y.to(tl.float32), input_precision="ieee")
    else:
        b_h, b_y = b_h.to(tl.float32), b_y.to(tl.float32)
        upper = upper_bits(b_h)
        b_sum = tl.dot(b_h - upper, b_y, input_precision="tf32")
        b_sum = tl.dot(upper, b_y, b_sum, input_precision="tf32")
    return b_sum


@triton.jit
def folded_piece(p_h, p_kr, f_u, of_old, to_fold, in_v, in_f, stride_kr: tl.constexpr):
    """Returns [BV, FI] float32: a piece of the state times of_old, plus the records selected by
    to_fold."""
    o_r, o_f = tl.arange(0, to_fold.shape[0]), tl.arange(0, in_f.shape[0])
    b_k = tl.load(p_kr + o_f[None, :] + o_r[:, None] * stride_kr,
                  mask=to_fold[:, None] & in_f[None, :], other=0)  # fmt: skip
    b_h = tl.load(p_h, mask=in_v[:, None] & in_f[None, :], other=0)
    added = outer(f_u, b_k, b_h.dtype != tl.float32)
    return tl.fma(b_h.to(tl.float32), of_old, added)


@triton.jit
def fold_records(
    p_state, p_kr, p_scale, b_u, b_gr, age, to_fold, o_v, in_v, stride_hk: tl.constexpr,
    stride_hv: tl.constexpr, stride_kr: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    FI: tl.constexpr, RCP_LN2: tl.constexpr
):  # fmt: skip
    """Adds the records selected by to_fold to a tile of the state and stores the tile. The state
    and the keys are loaded again, from the cache: holding them in registers would lower the
    occupancy of all programs, and only few programs fold. p_scale: for an int8 state the pointers
    to the scales of the columns o_v, otherwise None. The scale of a column is derived from its
    largest number, so the products are computed twice; holding them between the two passes would
    take BK registers for each column."""
    o_f = tl.arange(0, FI)
    b_g = tl.where(to_fold, b_gr, 0.0)
    decay = tl.exp2(tl.sum(b_g, 0) * RCP_LN2)
    w = tl.exp2(sums_after(b_g, age) * RCP_LN2)
    f_u = tl.where(to_fold[None, :], b_u * w[None, :], 0.0)
    p_tile = p_state + o_v[:, None] * stride_hv + o_f[None, :] * stride_hk
    of_old, of_new = decay, 1.0
    if p_scale is not None:
        of_old = tl.load(p_scale, mask=in_v, other=0)[:, None] * decay
        largest = tl.zeros([in_v.shape[0]], dtype=tl.float32)
        for i in tl.static_range(BK // FI):
            in_f = below(o_f, i * FI, K, BK)
            b_h = folded_piece(p_tile + i * FI * stride_hk, p_kr + i * FI, f_u, of_old, to_fold,
                               in_v, in_f, stride_kr)  # fmt: skip
            largest = tl.maximum(largest, tl.max(tl.abs(b_h), 1))
            # A maximum ignores NaN, so set the scale of a channel that is not finite to NaN here.
            largest += tl.sum(b_h * 0.0, 1)
        is_small = largest <= LEAST_RANGE
        scale = tl.where(is_small, 0.0, largest / INT8_MAX)
        of_new = tl.where(is_small, 0.0, INT8_MAX / largest)[:, None]
        # All warps have read the old scales before one warp stores the new scales.
        tl.debug_barrier()
        tl.store(p_scale, scale, mask=in_v)
    for i in tl.static_range(BK // FI):
        in_f = below(o_f, i * FI, K, BK)
        p_i = p_tile + i * FI * stride_hk
        b_h = folded_piece(p_i, p_kr + i * FI, f_u, of_old, to_fold, in_v, in_f, stride_kr)
        if p_scale is not None:
            b_h = tl.floor(tl.fma(b_h, of_new, 0.5))
        tl.store(p_i, b_h.to(p_state.dtype.element_ty), mask=in_v[:, None] & in_f[None, :])
