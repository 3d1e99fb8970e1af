"""The sums of a token over K: products of q and k, and products of a state's columns with q and
k."""

import triton
import triton.language as tl


@triton.jit
def sum_of_channels(x, AXIS: tl.constexpr):
    """Returns the sum of x over an axis of at most 256 channels. Each step adds two numbers.
    Therefore the register layout, which differs between compiled variants, does not change a bit.
    The first steps add neighbours, which one thread has loaded."""
    for _ in tl.static_range(8):
        if x.shape[AXIS] > 1:
            x = tl.sum(
                tl.reshape(x, x.shape[:AXIS] + [x.shape[AXIS] // 2, 2] + x.shape[AXIS + 1 :]),
                AXIS + 1,
            )
    return tl.sum(x, AXIS)


@triton.jit
def products(b_q, b_k):
    """Returns the sums of q q, k k and q k, where q and k are [K] or [T, K]."""
    AXIS: tl.constexpr = len(b_q.shape) - 1
    qq, kk = tl.split(sum_of_channels(tl.join(b_q * b_q, b_k * b_k), AXIS))
    return qq, kk, sum_of_channels(b_q * b_k, AXIS)


@triton.jit
def halves(x, STATE_V_FIRST: tl.constexpr):
    """Splits x [K, V] into two tensors [K / 2, V]: the even and the odd rows, or the first and the
    last half of the rows."""
    if STATE_V_FIRST:
        return tl.split(tl.permute(tl.reshape(x, [x.shape[0] // 2, 2, x.shape[1]]), (0, 2, 1)))
    return tl.split(tl.permute(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), (1, 2, 0)))


@triton.jit
def pieces_of(x, FOLD: tl.constexpr, STATE_V_FIRST: tl.constexpr):
    """Splits x [K, V] into 2^FOLD tensors [K / 2^FOLD, V]."""
    pieces = (x,)
    for level in tl.static_range(FOLD):
        finer = ()
        for i in tl.static_range(2**level):
            first, second = halves(pieces[i], STATE_V_FIRST)
            finer += (first, second)
        pieces = finer
    return pieces


@triton.jit
def column_sums(
    tiles, FIRST: tl.constexpr, q, k, ROWS: tl.constexpr, FOLD: tl.constexpr,
    STATE_V_FIRST: tl.constexpr, WHOLE: tl.constexpr, SHARED: tl.constexpr = False
):  # fmt: skip
    """Returns S^T q and S^T k, where S is the ROWS tiles from tile FIRST on, and q and k come in as
    many pieces. A thread first adds its own rows with fused multiply-adds in the order written
    here. Then threads share their sums. WHOLE: K fills its block. SHARED: warps share their sums
    too, which changes no bit."""
    sum_q, sum_k = 0.0, 0.0
    for i in tl.static_range(ROWS):
        b_h = tiles[FIRST + i].to(tl.float32)
        b_q, b_k = q[i].to(tl.float32)[:, None], k[i].to(tl.float32)[:, None]
        h = pieces_of(b_h, FOLD, STATE_V_FIRST)
        q_pieces = pieces_of(tl.broadcast_to(b_q, b_h.shape), FOLD, STATE_V_FIRST)
        k_pieces = pieces_of(tl.broadcast_to(b_k, b_h.shape), FOLD, STATE_V_FIRST)
        for j in tl.static_range(2**FOLD):
            if i + j == 0:
                sum_q, sum_k = h[0] * q_pieces[0], h[0] * k_pieces[0]
            else:
                sum_q = tl.fma(h[j], q_pieces[j], sum_q)
                sum_k = tl.fma(h[j], k_pieces[j], sum_k)
    if STATE_V_FIRST and WHOLE:
        return sum_of_lanes(sum_q), sum_of_lanes(sum_k)
    sums = tl.join(sum_q, sum_k)
    return tl.split(sum_of_shared_rows(sums) if SHARED else sum_of_rows(sums))


@triton.jit
def sum_of_lanes(x):
    """Returns the sums of x [ROWS, BV] over its rows, of which there are at most 256. Each step
    adds the last half of the rows to the first half, as the lanes of a warp that have a row each
    add their numbers. Therefore a pool whose strides or address let a thread load fewer rows at
    once has the bits of other pools."""
    for _ in tl.static_range(8):
        if x.shape[0] > 1:
            x = tl.sum(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), 0)
    return tl.reshape(x, [x.shape[1]])


@triton.jit
def sum_of_rows(x):
    """Returns the sums of x [ROWS, BV, 2] over its rows, of which there are at most 256. Each step
    adds two numbers. Therefore the register layout, which decides whether one thread, one warp or
    several warps have the rows of a column, does not change a bit."""
    BV: tl.constexpr = x.shape[1]
    # The threads that share a column in the widest tiles have odd and even rows.
    if x.shape[0] > 1:
        x = tl.sum(tl.reshape(x, [x.shape[0] // 2, 2, BV, 2]), 1)
    for _ in tl.static_range(7):
        if x.shape[0] > 1:
            x = tl.sum(tl.reshape(x, [2, x.shape[0] // 2, BV, 2]), 0)
    return tl.reshape(x, [BV, 2])


@triton.jit
def sum_of_shared_rows(x):
    """Does the same as `sum_of_rows` for at least 4 rows that several warps share. There each step
    of `sum_of_rows` is an exchange through shared memory with its barriers. Here one exchange adds
    the pairs of the second step, each in a column of its own, and the further steps add columns,
    which one thread has. In the column of another pair a row is -0, which changes no sum."""
    BV: tl.constexpr = x.shape[1]
    x = tl.sum(tl.reshape(x, [x.shape[0] // 2, 2, BV, 2]), 1)
    PAIRS: tl.constexpr = x.shape[0] // 2
    o_row = tl.arange(0, x.shape[0])[:, None, None, None]
    o_pair = tl.arange(0, PAIRS)[None, None, None, :]
    # Triton compiles the literal -0.0 to +0, and a sum of -0 and +0 is +0.
    nothing = tl.full([], -(2**31), tl.int32).to(tl.float32, bitcast=True)
    x = tl.sum(tl.where(o_row % PAIRS == o_pair, x[:, :, :, None], nothing), 0)
    for _ in tl.static_range(6):
        if x.shape[2] > 1:
            x = tl.sum(tl.reshape(x, [BV, 2, 2, x.shape[2] // 2]), 2)
    return tl.reshape(x, [BV, 2])
