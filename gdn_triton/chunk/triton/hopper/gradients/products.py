"""The warpgroups of dq and of dk. They also make the parts of the gradients of beta and of the
decays that come from pairs of tokens and from products with states.

For a value head, with E_ij = 2^(g_i - g_j) for i > j, else 0,

    S = scale E o (do u^T),     own_i = scale do_i . u_i
    N = -E o (dv u^T)
    dq = scale 2^g do h^T + S k + own k
    dk = 2^(g_last - g) u dh^T - beta 2^g dx h^T + S^T q + (beta N + (beta N)^T) k + own q

where beta dx is rest times dv (common.py). dq and dk are the sums over the value heads of a key
head. The warps of dq leave S, own and their column sums in shared memory for the warps of dk. Two
warpgroups that wait for each other only there overlap their products with their arithmetic, unlike
one role of eight warps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gdn_triton.chunk.triton.hopper.gradients.common import (
    FACTOR_VECTORS,
    G_VECTOR,
    PAIR,
    QUERY_VECTOR,
    REST_VECTOR,
    SHARE_VECTORS,
    VECTORS,
    chunk_place,
    store_zeros,
    tile_of,
)
from gdn_triton.chunk.triton.hopper.names import CHUNK, advance, here, power, rounded

PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
ROW = gl.constexpr(gl.SliceLayout(1, PRODUCT.value))
COLUMN = gl.constexpr(gl.SliceLayout(0, PRODUCT.value))
# The sums of the columns, one column in each thread.
COLUMNS = gl.constexpr(gl.BlockedLayout([8, 1], [1, 32], [1, 4], [1, 0]))


@gluon.jit
def half_of(tile, half: gl.constexpr):
    """Returns the upper (0) or lower half (1) of a pair."""
    return tile.slice(half * CHUNK, CHUNK, 0)


@gluon.jit
def product(left, right, accumulator):
    """Issues left right^T. The accumulator is overwritten."""
    return warpgroup_mma(left, right.permute((1, 0)), accumulator, use_acc=False, is_async=True)


@gluon.jit
def with_state(total, x, tile, factor):
    """Returns the total with factor times x, a product with a state, and the row sums of x times
    the tile of q or k."""
    sums = gl.sum(x * tile.load(x.type.layout).to(gl.float32), 1)
    return total + x * factor[:, None], sums


@gluon.jit
def place_after(slot, phase, n, RING: gl.constexpr):
    """Returns the place n units after another in the ring, with n up to RING."""
    slot += n
    wraps = (slot >= RING).to(gl.int32)
    return slot - RING * wraps, phase ^ wraps


@gluon.jit
def sums_of_warps(x):
    """Returns the column sums of the 16 rows of each of four warps, [4, 64]."""
    return gl.sum(gl.reshape(x, [4, CHUNK // 4, CHUNK]), 1)


@gluon.jit
def with_decays(P, vectors_s, base, n_rows, factor, nothing):
    """Multiplies a product P [64, 64] by the decays and by the factor. Returns its elements below
    the diagonal, its diagonal and the mask of the former. nothing: the number 0, which the compiler
    does not know."""
    o_r = gl.arange(0, CHUNK, ROW) + nothing
    o_c = gl.arange(0, CHUNK, COLUMN)
    g_row = vectors_s.index(base + G_VECTOR).load(ROW)
    g_column = vectors_s.index(base + G_VECTOR).load(COLUMN)
    row_number = gl.where(o_r < n_rows, o_r, -1)[:, None]
    P = P * (power(g_row[:, None] - g_column[None, :]) * factor)
    diagonal = gl.sum(gl.where(row_number == o_c[None, :], P, 0.0), 1)
    # Products above the diagonal may be infinite or NaN, so they are selected away.
    strict = row_number > o_c[None, :]
    return gl.where(strict, P, 0.0), diagonal, strict


@gluon.jit
def completed(
    total,
    own,
    factor,
    qk_s,
    nothing,
    HALF: gl.constexpr,
    dtype: gl.constexpr,
    BK: gl.constexpr,
    NORM: gl.constexpr,
):
    """Returns dq (HALF = 0) or dk (1) from the total of all value heads. factor: that of the norm
    of q or k, if NORM. nothing: the number 0, which the compiler does not know."""
    WIDE: gl.constexpr = total.type.layout
    qk = tile_of(qk_s, nothing, dtype, PAIR, BK)
    total += own[:, None] * half_of(qk, 1 - HALF).load(WIDE).to(gl.float32)
    if NORM:
        # The gradient of the norm (gradients/norm.py).
        y = half_of(qk, HALF).load(WIDE).to(gl.float32)
        total -= y * gl.sum(total * y, 1)[:, None]
        total *= factor[:, None]
    return total


@gluon.jit
def store_tile(p, x, stride_t, n_rows, n_columns, nothing, WHOLE: gl.constexpr):
    """Stores the first rows of x, and its first columns unless it is WHOLE."""
    WIDE: gl.constexpr = x.type.layout
    o_t = gl.arange(0, CHUNK, gl.SliceLayout(1, WIDE)) + nothing
    o_k = gl.arange(0, x.shape[1], gl.SliceLayout(0, WIDE))
    mask = (o_t < n_rows)[:, None]
    if not WHOLE:
        mask = mask & (o_k < n_columns)[None, :]
    gl.store(p + (o_t * stride_t)[:, None] + o_k[None, :], x.to(p.dtype.element_ty), mask=mask)


@gluon.jit
def queries_role(
    memory,
    exchange,
    outputs,
    vectors,
    place,
    sizes,
    scale,
    dtype: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    RING: gl.constexpr,
    WHOLE: gl.constexpr,
    NORM: gl.constexpr,
    IS_VARLEN: gl.constexpr,
):
    qk_s, ring_s, qk_ready, qk_empty, full, empty = memory
    joined_s, own_s, columns_s, s_full, s_empty = exchange
    dq, factors, shares, plane = outputs
    vectors_s, vectors_full, vectors_empty = vectors
    first_item, n_items, step, chunk_rows = place
    T, NT, H, G, K = sizes
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    WIDE_OPERAND: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    WIDE_ROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    o_r = gl.arange(0, CHUNK, ROW)
    w_r = gl.arange(0, CHUNK, WIDE_ROW)
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, PRODUCT)
    wide_zero = gl.zeros([CHUNK, BK], gl.float32, WIDE)
    item_phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    heads = gl.to_tensor(0)
    for i in range(first_item, n_items, step):
        _, i_h, i_b, row, n_rows = chunk_place(i, chunk_rows, T, NT, H, IS_VARLEN)
        first = (i_b.to(gl.int64) * T + row) * H + i_h
        p_dq = dq + first * K
        if n_rows > 0:
            p_share = shares + (i_b.to(gl.int64) * H + i_h) * G * T + row
            own = gl.zeros([CHUNK], gl.float32, ROW)
            factor = gl.zeros([CHUNK], gl.float32, WIDE_ROW)
            if NORM:
                factor = gl.load(factors + first + w_r * H, mask=w_r < n_rows, other=0)
            total = gl.zeros([CHUNK, BK], gl.float32, WIDE)
            for _ in range(G):
                base = (heads & 1) * VECTORS
                slot_dh, phase_dh = place_after(slot, phase, 1, RING)
                slot_u, phase_u = place_after(slot, phase, 2, RING)
                slot_do, phase_do = place_after(slot, phase, 3, RING)
                # This role does not read dh.
                mbarrier.wait(full.index(slot_dh), phase_dh)
                mbarrier.arrive(empty.index(slot_dh), count=1)
                mbarrier.wait(vectors_full.index(heads & 1), (heads >> 1) & 1)
                mbarrier.wait(qk_ready, item_phase)
                mbarrier.wait(full.index(slot_u), phase_u)
                mbarrier.wait(full.index(slot_do), phase_do)
                nothing = here(heads * 0)
                u = half_of(tile_of(ring_s, slot_u + nothing, dtype, PAIR, BV), 1)
                do = half_of(tile_of(ring_s, slot_do + nothing, dtype, PAIR, BV), 0)
                qk = tile_of(qk_s, nothing, dtype, PAIR, BK)
                P = product(do, u, zero)
                inner = product(half_of(qk, 0), half_of(qk, 1), zero)
                P, inner = warpgroup_mma_wait(0, deps=[P, inner])
                mbarrier.arrive(empty.index(slot_u), count=1)
                P, diagonal, strict = with_decays(
                    P, vectors_s, base, n_rows, scale, here(heads * 0)
                )
                own += diagonal
                # A pair is part of the gradients of the decays between its tokens: with a plus for
                # the decays up to the later token, and a minus for those up to the earlier one.
                inner = gl.where(strict, P * inner, 0.0)
                # The compiler does not know that these numbers are the same each time, and so
                # keeps no masks or addresses in registers.
                o_t = o_r + here(heads * 0)
                gl.store(p_share + plane + o_t, gl.sum(inner, 1), mask=o_t < n_rows)
                sums = sums_of_warps(inner)
                P = rounded(P, dtype)
                mbarrier.wait(s_empty, (heads & 1) ^ 1)
                half_of(joined_s.index(0), 0).store(P)
                own_s.store(own)
                columns_s.slice(0, 4, 0).store(sums)
                fence_async_shared()
                mbarrier.arrive(s_full, count=1)

                nothing = here(heads * 0)
                qk = tile_of(qk_s, nothing, dtype, PAIR, BK)
                start = vectors_s.index(base + QUERY_VECTOR).load(WIDE_ROW)
                operand = gl.convert_layout(P, WIDE_OPERAND, assert_trivial=True)
                total = warpgroup_mma(operand, half_of(qk, 1), total, is_async=True)
                mbarrier.wait(full.index(slot), phase)
                do = half_of(tile_of(ring_s, slot_do + nothing, dtype, PAIR, BV), 0)
                h = tile_of(ring_s, slot + nothing, dtype, BK, BV)
                x = product(do, h, wide_zero)
                total, x = warpgroup_mma_wait(0, deps=[total, x])
                mbarrier.arrive(empty.index(slot), count=1)
                mbarrier.arrive(empty.index(slot_do), count=1)
                mbarrier.arrive(vectors_empty.index(heads & 1), count=1)
                slot, phase = advance(slot_do, phase_do, RING)
                q = half_of(tile_of(qk_s, here(heads * 0), dtype, PAIR, BK), 0)
                total, sums = with_state(total, x, q, start)
                o_t = w_r + here(heads * 0)
                gl.store(p_share + 4 * plane + o_t, sums * start, mask=o_t < n_rows)
                p_share += T
                heads += 1

            own = gl.convert_layout(own, WIDE_ROW, assert_trivial=True)
            nothing = here(heads * 0)
            total = completed(total, own, factor, qk_s, nothing, 0, dtype, BK, NORM)
            fence_async_shared()
            mbarrier.arrive(qk_empty, count=1)
            item_phase ^= 1
            store_tile(p_dq, total, H * K, n_rows, K, nothing, WHOLE)
        else:
            if IS_VARLEN:
                store_zeros(p_dq, H * K, -n_rows, K, BK)


@gluon.jit
def keys_role(
    memory,
    exchange,
    outputs,
    vectors,
    place,
    sizes,
    dtype: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    RING: gl.constexpr,
    WHOLE: gl.constexpr,
    NORM: gl.constexpr,
    IS_VARLEN: gl.constexpr,
):
    qk_s, ring_s, qk_ready, qk_empty, full, empty = memory
    joined_s, own_s, columns_s, s_full, s_empty = exchange
    dk, factors, shares, plane = outputs
    vectors_s, vectors_full, vectors_empty = vectors
    first_item, n_items, step, chunk_rows = place
    T, NT, H, G, K = sizes
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    WIDE_OPERAND: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    WIDE_ROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    o_r = gl.arange(0, CHUNK, ROW)
    w_r = gl.arange(0, CHUNK, WIDE_ROW)
    o_c = gl.arange(0, CHUNK, gl.SliceLayout(0, COLUMNS))
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, PRODUCT)
    x = gl.zeros([CHUNK, BK], gl.float32, WIDE)
    item_phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    heads = gl.to_tensor(0)
    for i in range(first_item, n_items, step):
        _, i_h, i_b, row, n_rows = chunk_place(i, chunk_rows, T, NT, H, IS_VARLEN)
        first = (i_b.to(gl.int64) * T + row) * H + i_h
        p_dk = dk + first * K
        if n_rows > 0:
            p_share = shares + (i_b.to(gl.int64) * H + i_h) * G * T + row
            own = gl.zeros([CHUNK], gl.float32, WIDE_ROW)
            factor = gl.zeros([CHUNK], gl.float32, WIDE_ROW)
            if NORM:
                factor = gl.load(factors + first + w_r * H, mask=w_r < n_rows, other=0)
            total = gl.zeros([CHUNK, BK], gl.float32, WIDE)
            for _ in range(G):
                base = (heads & 1) * VECTORS
                mbarrier.wait(vectors_full.index(heads & 1), (heads >> 1) & 1)
                mbarrier.wait(qk_ready, item_phase)
                p_state = p_share + 6 * plane
                # First u dh^T, then dv h^T. A loop, because the loops of all roles share the
                # instruction cache.
                for m in range(2):
                    state_slot, state_phase = place_after(slot, phase, 1 - m, RING)
                    unit, unit_phase = place_after(slot, phase, 2 + m, RING)
                    mbarrier.wait(full.index(unit), unit_phase)
                    mbarrier.wait(full.index(state_slot), state_phase)
                    tile = half_of(tile_of(ring_s, unit, dtype, PAIR, BV), 1)
                    state = tile_of(ring_s, state_slot, dtype, BK, BV)
                    x = product(tile, state, x)
                    start = vectors_s.index(base + FACTOR_VECTORS + m).load(WIDE_ROW)
                    share = vectors_s.index(base + SHARE_VECTORS + m).load(WIDE_ROW)
                    x = warpgroup_mma_wait(0, deps=[x])
                    mbarrier.arrive(empty.index(state_slot), count=1)
                    k = half_of(tile_of(qk_s, 0, dtype, PAIR, BK), 1)
                    total, sums = with_state(total, x, k, start)
                    o_t = w_r + here(heads * 0)
                    gl.store(p_state + o_t, sums * share, mask=o_t < n_rows)
                    p_state -= plane

                slot_u, _ = place_after(slot, phase, 2, RING)
                slot_do, phase_do = place_after(slot, phase, 3, RING)
                nothing = here(heads * 0)
                u = half_of(tile_of(ring_s, slot_u + nothing, dtype, PAIR, BV), 1)
                dv = half_of(tile_of(ring_s, slot_do + nothing, dtype, PAIR, BV), 1)
                k = half_of(tile_of(qk_s, nothing, dtype, PAIR, BK), 1)
                P = product(dv, u, zero)
                inner = product(k, k, zero)
                P, inner = warpgroup_mma_wait(0, deps=[P, inner])
                mbarrier.arrive(empty.index(slot_u), count=1)
                mbarrier.arrive(empty.index(slot_do), count=1)
                slot, phase = advance(slot_do, phase_do, RING)
                weight = vectors_s.index(base + REST_VECTOR).load(ROW)
                P, diagonal, strict = with_decays(P, vectors_s, base, n_rows, -1.0, here(heads * 0))
                o_t = o_r + here(heads * 0)
                inside = o_t < n_rows
                gl.store(p_share + o_t, -diagonal, mask=inside)
                inner = gl.where(strict, P * inner, 0.0)
                gl.store(p_share + 2 * plane + o_t, gl.sum(inner, 1), mask=inside)
                columns_s.slice(4, 4, 0).store(sums_of_warps(inner * weight[:, None]))
                P = rounded(P * weight[:, None], dtype)
                nothing = here(heads * 0)
                qk = tile_of(qk_s, nothing, dtype, PAIR, BK)
                joined = joined_s.index(nothing)
                half_of(joined, 1).store(P)
                fence_async_shared()
                operand = gl.convert_layout(P, WIDE_OPERAND, assert_trivial=True)
                total = warpgroup_mma(operand, half_of(qk, 1), total, is_async=True)
                mbarrier.wait(s_full, heads & 1)
                # S on N.
                total = warpgroup_mma(joined.permute((1, 0)), qk, total, is_async=True)
                # Until the wait the registers of P must not be written, and the compiler believes
                # that they are free.
                total = warpgroup_mma_wait(0, deps=[total])
                own = own_s.load(WIDE_ROW)
                columns = gl.sum(columns_s.load(COLUMNS), 0)
                o_column = o_c + here(heads * 0)
                gl.store(p_share + 3 * plane + o_column, columns, mask=o_column < n_rows)
                # An arrival does not wait for loads that precede it. The fence does.
                fence_async_shared()
                mbarrier.arrive(s_empty, count=1)
                mbarrier.arrive(vectors_empty.index(heads & 1), count=1)
                p_share += T
                heads += 1

            nothing = here(heads * 0)
            total = completed(total, own, factor, qk_s, nothing, 1, dtype, BK, NORM)
            fence_async_shared()
            mbarrier.arrive(qk_empty, count=1)
            item_phase ^= 1
            store_tile(p_dk, total, H * K, n_rows, K, nothing, WHOLE)
        else:
            if IS_VARLEN:
                store_zeros(p_dk, H * K, -n_rows, K, BK)
