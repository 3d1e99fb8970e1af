"""The gradients of each chunk from the states and their gradients, for compute capability 9.0
(docs/gluon.md): dq, dk, and the parts of the gradients of beta and of the decays.

One kernel computes the results of pairs.py and query_key.py of the portable backward, and loads
each input once. An item is a chunk of a key head. A program computes every n-th item, the value
heads one after the other. Its warps have five roles:

    queries   dq (products.py)
    keys      dk (products.py)
    values    <h, dh> (values.py)
    gates     factors of the tokens
    loader    copies tiles to shared memory, by TMA

The tiles of a value head are four units of a ring, in the order in which they become free: h, dh,
u, do and dv. q and k have one buffer, and are loaded after the first units of their item.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from gdn_triton._triton.views import viewed
from gdn_triton.chunk.triton.hopper.gradients.common import (
    FACTOR_VECTORS,
    G_VECTOR,
    LAST_VECTOR,
    LEAST_BETA,
    PAIR,
    PART,
    QUERY_VECTOR,
    REST_VECTOR,
    SHARE_VECTORS,
    VECTORS,
    chunk_place,
)
from gdn_triton.chunk.triton.hopper.gradients.products import keys_role, queries_role
from gdn_triton.chunk.triton.hopper.gradients.values import values_role
from gdn_triton.chunk.triton.hopper.names import CHUNK, advance, load_tile


@gluon.jit
def gates_role(vectors, gates, betas, place, sizes, scale, IS_VARLEN: gl.constexpr):
    vectors_s, vectors_full, vectors_empty = vectors
    p_gates, stride_gb, stride_gt, stride_gh = gates
    p_betas, stride_betab, stride_betat, stride_betah = betas
    first_item, n_items, step, chunk_rows = place
    T, NT, H, G = sizes
    LANES: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    o_t = gl.arange(0, CHUNK, LANES)
    heads = gl.to_tensor(0)
    for i in range(first_item, n_items, step):
        _, i_h, i_b, row, n_rows = chunk_place(i, chunk_rows, T, NT, H, IS_VARLEN)
        if n_rows > 0:
            valid = o_t < n_rows
            p_g = p_gates + i_b.to(gl.int64) * stride_gb + row.to(gl.int64) * stride_gt
            p_g += (i_h * G).to(gl.int64) * stride_gh
            p_beta = p_betas + i_b.to(gl.int64) * stride_betab + row.to(gl.int64) * stride_betat
            p_beta += (i_h * G).to(gl.int64) * stride_betah
            for _ in range(G):
                g = gl.load(p_g + o_t * stride_gt, mask=valid, other=0)
                beta = gl.load(p_beta + o_t * stride_betat, mask=valid, other=0).to(gl.float32)
                # Times a row of dv it is beta dx.
                rest = gl.where(gl.abs(beta) >= LEAST_BETA, 1.0, beta)
                last = gl.sum(gl.where(o_t == n_rows - 1, g, 0.0), 0)
                start = gl.exp2(g)
                # A row past the end must not have a positive exponent.
                to_end = gl.exp2(gl.where(valid, last - g, float("-inf")))
                stage = heads & 1
                base = stage * VECTORS
                mbarrier.wait(vectors_empty.index(stage), ((heads >> 1) & 1) ^ 1)
                vectors_s.index(base + G_VECTOR).store(g)
                vectors_s.index(base + REST_VECTOR).store(rest)
                vectors_s.index(base + SHARE_VECTORS).store(to_end)
                vectors_s.index(base + SHARE_VECTORS + 1).store(start)
                vectors_s.index(base + FACTOR_VECTORS).store(to_end)
                vectors_s.index(base + FACTOR_VECTORS + 1).store(-rest * start)
                vectors_s.index(base + QUERY_VECTOR).store(scale * start)
                vectors_s.index(base + LAST_VECTOR).store(gl.exp2(gl.where(o_t >= 0, last, g)))
                mbarrier.arrive(vectors_full.index(stage), count=1)
                p_g += stride_gh
                p_beta += stride_betah
                heads += 1


@gluon.jit
def load_halves(desc, at, barrier, ring_s, slot, half: gl.constexpr, N: gl.constexpr):
    """Copies N blocks of 64 columns of a chunk to the upper (0) or lower half (1) of a unit."""
    dtype: gl.constexpr = desc.dtype
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    i_b, row, head = at
    halves = viewed(ring_s, dtype, [2 * ring_s.shape[0], CHUNK, PART], PAIRS)
    for c in gl.static_range(N):
        half_block = halves.index((slot * N + c) * 2 + half)
        tile = viewed(half_block, dtype, [1, CHUNK, 1, PART], ROWS)
        load_tile(desc, [i_b, row, head, c * PART], barrier, tile)


@gluon.jit
def load_pair(upper, lower, at, ring, slot, phase, BV: gl.constexpr, N: gl.constexpr):
    """Copies N blocks of 64 columns of a chunk of two tensors to the halves of a unit."""
    ring_s, full, empty = ring
    mbarrier.wait(empty.index(slot), phase ^ 1)
    barrier = full.index(slot)
    mbarrier.expect(barrier, PAIR * BV * 2)
    load_halves(upper, at, barrier, ring_s, slot, 0, N)
    load_halves(lower, at, barrier, ring_s, slot, 1, N)


@gluon.jit
def load_lower(desc, at, ring, slot, phase, BV: gl.constexpr, N: gl.constexpr):
    """Copies N blocks of 64 columns of a chunk to the lower half of a unit."""
    ring_s, full, empty = ring
    mbarrier.wait(empty.index(slot), phase ^ 1)
    barrier = full.index(slot)
    mbarrier.expect(barrier, CHUNK * BV * 2)
    load_halves(desc, at, barrier, ring_s, slot, 1, N)


@gluon.jit
def load_state(desc, at, ring, slot, phase, BK: gl.constexpr, N: gl.constexpr):
    """Copies N blocks of 64 columns of a state to a unit."""
    ring_s, full, empty = ring
    dtype: gl.constexpr = desc.dtype
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    i_c, head = at
    mbarrier.wait(empty.index(slot), phase ^ 1)
    barrier = full.index(slot)
    mbarrier.expect(barrier, N * BK * PART * 2)
    SPLIT: gl.constexpr = PAIR // BK
    blocks = viewed(ring_s, dtype, [ring_s.shape[0] * SPLIT, BK, PART], PAIRS)
    for c in gl.static_range(N):
        tile = viewed(blocks.index(slot * N * SPLIT + c), dtype, [1, 1, BK, PART], ROWS)
        load_tile(desc, [i_c, head, 0, c * PART], barrier, tile)


@gluon.jit
def loader_role(
    memory,
    descs,
    place,
    sizes,
    BK: gl.constexpr,
    BV: gl.constexpr,
    RING: gl.constexpr,
    IS_VARLEN: gl.constexpr,
):
    qk_s, ring_s, qk_full, qk_empty, full, empty = memory
    q_desc, k_desc, do_desc, u_desc, dv_desc, h_desc, dh_desc = descs
    first_item, n_items, step, chunk_rows = place
    T, NT, H, G = sizes
    V_BLOCKS: gl.constexpr = BV // PART
    K_BLOCKS: gl.constexpr = BK // PART
    ring = (ring_s, full, empty)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    item_phase = gl.to_tensor(0)
    for i in range(first_item, n_items, step):
        i_c, i_h, i_b, row, n_rows = chunk_place(i, chunk_rows, T, NT, H, IS_VARLEN)
        if n_rows > 0:
            for j in range(G):
                at = (i_b, row, i_h * G + j)
                state = (i_c, i_h * G + j)
                load_state(h_desc, state, ring, slot, phase, BK, V_BLOCKS)
                slot, phase = advance(slot, phase, RING)
                load_state(dh_desc, state, ring, slot, phase, BK, V_BLOCKS)
                slot, phase = advance(slot, phase, RING)
                load_lower(u_desc, at, ring, slot, phase, BV, V_BLOCKS)
                slot, phase = advance(slot, phase, RING)
                load_pair(do_desc, dv_desc, at, ring, slot, phase, BV, V_BLOCKS)
                slot, phase = advance(slot, phase, RING)
                if j == 0:
                    # The buffer of q and k becomes free later than the units of a value head.
                    mbarrier.wait(qk_empty, item_phase ^ 1)
                    mbarrier.expect(qk_full, PAIR * BK * 2)
                    load_halves(q_desc, (i_b, row, i_h), qk_full, qk_s, 0, 0, K_BLOCKS)
                    load_halves(k_desc, (i_b, row, i_h), qk_full, qk_s, 0, 1, K_BLOCKS)
            item_phase ^= 1


@gluon.jit(do_not_specialize=["scale", "n_items", "B", "T", "NT"])
def hopper_gradients_kernel(
    q_desc,
    k_desc,
    do_desc,
    u_desc,
    dv_desc,
    h_desc,
    dh_desc,
    g_cumsum,
    beta,
    factors,
    dq,
    dk,
    shares,
    across,
    chunk_rows,
    scale,
    n_items,
    B,
    T,
    NT,
    H,
    HV,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_betab,
    stride_betat,
    stride_betah,
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    RING: gl.constexpr,
    KEY_REGISTERS: gl.constexpr,
    VALUE_REGISTERS: gl.constexpr,
    SINGLE_REGISTERS: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    num_warps: gl.constexpr,
):
    """shares: [7, B, HV, T], numbers of a token and value head in this order: dv . u; the sums over
    the earlier tokens of its pairs with a query, and with a key without the factor rest; the sum
    over the later tokens of its pairs; q . (scale 2^g do h^T), 2^g k . (dv h^T) and
    2^(g_last - g) k . (u dh^T)."""
    dtype: gl.constexpr = k_desc.dtype
    G = HV // H
    NORM: gl.constexpr = factors is not None
    V_BLOCKS: gl.constexpr = BV // PART
    K_BLOCKS: gl.constexpr = BK // PART
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ONE_BY_ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    # q on k, and S on N.
    qk_s = gl.allocate_shared_memory(dtype, [K_BLOCKS, PAIR, PART], ROWS)
    joined_s = gl.allocate_shared_memory(dtype, [1, PAIR, PART], ROWS)
    ring_s = gl.allocate_shared_memory(dtype, [RING * V_BLOCKS, PAIR, PART], ROWS)
    vectors_s = gl.allocate_shared_memory(gl.float32, [2 * VECTORS, CHUNK], FLAT)
    own_s = gl.allocate_shared_memory(gl.float32, [CHUNK], FLAT)
    columns_s = gl.allocate_shared_memory(gl.float32, [8, CHUNK], ONE_BY_ONE)
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], BARRIER)
    vectors_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    vectors_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    qk_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    qk_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    s_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    s_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for s in gl.static_range(RING):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=3)
    for s in gl.static_range(2):
        mbarrier.init(vectors_full.index(s), count=1)
        mbarrier.init(vectors_empty.index(s), count=3)
    mbarrier.init(qk_full, count=1)
    mbarrier.init(qk_empty, count=2)
    mbarrier.init(s_full, count=1)
    mbarrier.init(s_empty, count=1)
    qk_ready = qk_full
    if IS_VARLEN:
        qk_ready = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        mbarrier.init(qk_ready, count=1)
    fence_async_shared()  # TMA arrives at these barriers.

    # A role takes no None, so a pointer that the role does not use stands in its place.
    p_chunk_rows = g_cumsum
    if IS_VARLEN:
        p_chunk_rows = chunk_rows
    place = (gl.program_id(0), n_items, gl.num_programs(0), p_chunk_rows)
    plane = gl.cast(B, gl.int64) * HV * T
    gates = (g_cumsum, stride_gb, stride_gt, stride_gh)
    vectors = (vectors_s, vectors_full, vectors_empty)
    betas = (beta, stride_betab, stride_betat, stride_betah)
    memory = (qk_s, ring_s, qk_ready, qk_empty, full, empty)
    exchange = (joined_s, own_s, columns_s, s_full, s_empty)
    factors_q = g_cumsum
    factors_k = g_cumsum
    if NORM:
        factors_q = factors
        factors_k = factors + gl.cast(B, gl.int64) * T * H
    gl.warp_specialize(
        [
            (
                queries_role,
                (
                    memory,
                    exchange,
                    (dq, factors_q, shares, plane),
                    vectors,
                    place,
                    (T, NT, H, G, K),
                    scale,
                    dtype,
                    BK,
                    BV,
                    RING,
                    K == BK,
                    NORM,
                    IS_VARLEN,
                ),
            ),
            (
                keys_role,
                (
                    memory,
                    exchange,
                    (dk, factors_k, shares, plane),
                    vectors,
                    place,
                    (T, NT, H, G, K),
                    dtype,
                    BK,
                    BV,
                    RING,
                    K == BK,
                    NORM,
                    IS_VARLEN,
                ),
            ),
            (
                values_role,
                (
                    (qk_s, ring_s, qk_full, qk_ready, full, empty),
                    across,
                    vectors,
                    place,
                    (T, NT, H, G),
                    dtype,
                    BK,
                    BV,
                    RING,
                    IS_VARLEN,
                ),
            ),
            (
                gates_role,
                (vectors, gates, betas, place, (T, NT, H, G), scale, IS_VARLEN),
            ),
            (
                loader_role,
                (
                    (qk_s, ring_s, qk_full, qk_empty, full, empty),
                    (q_desc, k_desc, do_desc, u_desc, dv_desc, h_desc, dh_desc),
                    place,
                    (T, NT, H, G),
                    BK,
                    BV,
                    RING,
                    IS_VARLEN,
                ),
            ),
        ],
        [4, 4, 1, 1],
        [KEY_REGISTERS, VALUE_REGISTERS, SINGLE_REGISTERS, SINGLE_REGISTERS],
    )
