"""The warps of products: dq and dk, and the sums for the gradients of beta and of the decays.

With u = v_new, the state h before the chunk and the gradient dh of the state after it, for each
value head of a key head:

    S_ij  = scale (do_i . u_j) 2^(g_i - g_j)       j < i
    N_ij  = -beta_i (dx_i . u_j) 2^(g_i - g_j)     j < i
    own_i = scale (do_i . u_i)
    dq    = own k + S k + scale 2^g do h^T
    dk    = own q + S^T q + (N + N^T) k - beta 2^g dx h^T + 2^(g_last - g) u dh^T

Here beta dx is dv, except in rows with a small |beta| (gradients/gate.py). Eight warps compute dq
and dk at once. The operands lie one above the other in shared memory, q above k, do above dv, u
above u and S above N, and dq lies above dk in the accumulator. A product that only dk needs is
computed for the rows of dq too, where it is multiplied by 0 or selected away.
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
    PART,
    REST_VECTOR,
    SHARE_VECTORS,
    VECTORS,
    chunk_place,
    store_zeros,
    tile_of,
)
from gdn_triton.chunk.triton.hopper.names import CHUNK, advance, here, power, rounded, viewed

PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))
ROW = gl.constexpr(gl.SliceLayout(1, PRODUCT.value))
COLUMN = gl.constexpr(gl.SliceLayout(0, PRODUCT.value))


@gluon.jit
def below_of(tile):
    """Returns the lower half of a pair."""
    return tile.slice(CHUNK, CHUNK, 0)


@gluon.jit
def product(left, right, accumulator):
    """Issues left right^T. The accumulator is overwritten."""
    return warpgroup_mma(left, right.permute((1, 0)), accumulator, use_acc=False, is_async=True)


@gluon.jit
def with_state(total, x, tile, factor):
    """Returns the total with factor times x, a product with a state, and the row sums of x times
    the tile of q and k."""
    sums = gl.sum(x * tile.load(x.type.layout).to(gl.float32), 1)
    return total + x * factor[:, None], sums


@gluon.jit
def products_role(
    memory,
    inputs,
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
    IS_VARLEN: gl.constexpr,
):
    qk_s, ring_s, own_s, qk_ready, qk_empty, full, empty = memory
    q, stride_qb, stride_qt, stride_qh, k, stride_kb, stride_kt, stride_kh = inputs
    dq, dk, shares, plane = outputs
    vectors_s, vectors_full, vectors_empty = vectors
    first_item, n_items, step, chunk_rows = place
    T, NT, H, G, K = sizes
    K_BLOCKS: gl.constexpr = BK // PART
    V_BLOCKS: gl.constexpr = BV // PART
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BK, 16])
    WIDE_OPERAND: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    WIDE_ROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    o_r = gl.arange(0, PAIR, ROW)
    o_c = gl.arange(0, CHUNK, COLUMN)
    w_r = gl.arange(0, PAIR, WIDE_ROW)
    o_k = gl.arange(0, BK, gl.SliceLayout(0, WIDE))
    zero = gl.zeros([PAIR, PART], gl.float32, PRODUCT)
    x = gl.zeros([PAIR, BK], gl.float32, WIDE)
    item_phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    heads = gl.to_tensor(0)
    for i in range(first_item, n_items, step):
        _, i_h, i_b, row, n_rows = chunk_place(i, chunk_rows, T, NT, H, IS_VARLEN)
        first = (i_b.to(gl.int64) * T + row) * H + i_h
        p_dq = dq + first * K
        p_dk = dk + first * K
        if n_rows > 0:
            p_share = shares + (i_b.to(gl.int64) * H + i_h) * G * T + row
            own = gl.zeros([PAIR], gl.float32, ROW)
            total = gl.zeros([PAIR, BK], gl.float32, WIDE)
            for _ in range(G):
                base = (heads & 1) * VECTORS
                mbarrier.wait(vectors_full.index(heads & 1), (heads >> 1) & 1)
                mbarrier.wait(qk_ready, item_phase)
                p_state = p_share + 6 * plane
                # First u dh^T, then do h^T above dv h^T. A loop, because the loops of all roles
                # share the instruction cache.
                unit = slot + 0
                unit_phase = phase + 0
                for m in range(2):
                    state_slot, state_phase = advance(unit, unit_phase, RING)
                    mbarrier.wait(full.index(unit), unit_phase)
                    mbarrier.wait(full.index(state_slot), state_phase)
                    tile = tile_of(ring_s, unit * V_BLOCKS, dtype, PAIR, BV)
                    state = tile_of(ring_s, state_slot * V_BLOCKS, dtype, BK, BV)
                    x = product(tile, state, x)
                    factor = vectors_s.index(base + FACTOR_VECTORS + m).load(WIDE_ROW)
                    share = vectors_s.index(base + SHARE_VECTORS + m).load(WIDE_ROW)
                    x = warpgroup_mma_wait(0, deps=[x])
                    mbarrier.arrive(empty.index(state_slot), count=1)
                    total, sums = with_state(total, x, tile_of(qk_s, 0, dtype, PAIR, BK), factor)
                    # The compiler does not know that these numbers are the same each time, and so
                    # keeps no masks or addresses in registers.
                    o_h = w_r + here(heads * 0)
                    o_t = o_h % CHUNK
                    is_key = o_h >= CHUNK
                    stored = (o_t < n_rows) & (is_key | (m > 0))
                    gl.store(p_state + o_t + gl.where(is_key, 0, -plane), sums * share, mask=stored)
                    p_state -= plane
                    unit, unit_phase = advance(state_slot, state_phase, RING)

                next_slot, next_phase = advance(slot, phase, RING)
                slot_do, _ = advance(next_slot, next_phase, RING)
                nothing = here(heads * 0)
                u = below_of(tile_of(ring_s, slot * V_BLOCKS + nothing, dtype, PAIR, BV))
                tile = tile_of(ring_s, slot_do * V_BLOCKS + nothing, dtype, PAIR, BV)
                qk = tile_of(qk_s, nothing, dtype, PAIR, BK)
                P = product(tile, u, zero)
                inner = product(qk, below_of(qk), zero)
                P, inner = warpgroup_mma_wait(0, deps=[P, inner])
                mbarrier.arrive(empty.index(slot), count=1)
                mbarrier.arrive(empty.index(slot_do), count=1)
                slot = unit
                phase = unit_phase
                g_row = vectors_s.index(base + G_VECTOR).load(ROW)
                g_column = vectors_s.index(base + G_VECTOR).slice(0, CHUNK, 0).load(COLUMN)
                weight = vectors_s.index(base + REST_VECTOR).load(ROW)
                mbarrier.arrive(vectors_empty.index(heads & 1), count=1)
                o_h = o_r + here(heads * 0)
                is_query = o_h < CHUNK
                o_t = o_h % CHUNK
                row_number = gl.where(o_t < n_rows, o_t, -1)[:, None]
                # Products above the diagonal may be infinite or NaN, so they are selected away.
                strict = row_number > o_c[None, :]
                on_diagonal = row_number == o_c[None, :]
                sign = gl.where(is_query, scale, -1.0)
                P = P * (power(g_row[:, None] - g_column[None, :]) * sign[:, None])
                diagonal = gl.sum(gl.where(on_diagonal, P, 0.0), 1)
                own += diagonal
                # The lower half has -dv . u.
                is_key = (o_h >= CHUNK) & (o_t < n_rows)
                gl.store(p_share + o_t, -diagonal, mask=is_key)
                P = gl.where(strict, P, 0.0)
                # A pair is part of the gradients of the decays between its tokens: with a plus for
                # the decays up to the later token, and a minus for those up to the earlier one.
                inner = gl.where(strict, P * inner, 0.0)
                p_pairs = p_share + o_t + gl.where(is_query, plane, 2 * plane)
                gl.store(p_pairs, gl.sum(inner, 1), mask=o_t < n_rows)
                columns = gl.sum(inner * weight[:, None], 0)
                o_column = o_c + here(heads * 0)
                gl.store(p_share + 3 * plane + o_column, columns, mask=o_column < n_rows)
                P = P * weight[:, None]
                P = rounded(P, dtype)
                nothing = here(heads * 0)
                qk = tile_of(qk_s, nothing, dtype, PAIR, BK)
                # The right half of this operand is S on N. The left half is a block of q and k,
                # whose product is not used.
                joined = tile_of(qk_s, K_BLOCKS - 1 + nothing, dtype, PAIR, 2 * PART)
                qk_s.index(K_BLOCKS).store(P)
                fence_async_shared()
                operand = gl.convert_layout(P, WIDE_OPERAND, assert_trivial=True)
                total = warpgroup_mma(operand, below_of(qk), total, is_async=True)
                x = warpgroup_mma(joined.permute((1, 0)), qk, x, use_acc=False, is_async=True)
                total, x = warpgroup_mma_wait(0, deps=[total, x])
                o_h = w_r + here(heads * 0)
                total += gl.where((o_h < CHUNK)[:, None], 0.0, x)
                p_share += T
                heads += 1

            mbarrier.arrive(qk_empty, count=1)
            item_phase ^= 1
            # The upper half has the diagonal of S. The second store copies it to the lower half.
            viewed(own_s.index(0), gl.float32, [PAIR], FLAT).store(own)
            viewed(own_s.index(1), gl.float32, [PAIR], FLAT).store(own)
            own = viewed(own_s.index(0), gl.float32, [PAIR], FLAT).load(WIDE_ROW)
            p_q = q + i_b.to(gl.int64) * stride_qb + row.to(gl.int64) * stride_qt
            p_q += i_h.to(gl.int64) * stride_qh
            p_k = k + i_b.to(gl.int64) * stride_kb + row.to(gl.int64) * stride_kt
            p_k += i_h.to(gl.int64) * stride_kh
            o_h = w_r + here(heads * 0)
            o_t = o_h % CHUNK
            is_query = o_h < CHUNK
            mask = (o_t < n_rows)[:, None]
            if not WHOLE:
                mask = mask & (o_k < K)[None, :]
            p_other = gl.where(is_query, p_k + o_t * stride_kt, p_q + o_t * stride_qt)
            other = gl.load(p_other[:, None] + o_k[None, :], mask=mask, other=0)
            total += own[:, None] * other.to(gl.float32)
            p = gl.where(is_query, p_dq + o_t * (H * K), p_dk + o_t * (H * K))
            gl.store(p[:, None] + o_k[None, :], total.to(dq.dtype.element_ty), mask=mask)
        else:
            if IS_VARLEN:
                store_zeros(p_dq, H * K, -n_rows, K, BK)
                store_zeros(p_dk, H * K, -n_rows, K, BK)
