"""The walk back in Gluon: the gradient of the state from a sequence's last chunk to its first.

A program owns the columns of one or two gradients dh, 64 each, of one sequence and value head, and
computes the results that ``walk_back`` of gradients/state.py defines. Its warps have three roles:

    state   64 columns of dh in registers, dx and the stores
    gates   factors of the tokens (gates.py)
    loader  copies q, k, do, A_qk and A_inv of a chunk to shared memory, by TMA

All matrices of the state warps are transposed: rows are channels of V, and columns are channels of
K in dh and tokens elsewhere. The fp32 dh is the accumulator of its own update and, rounded, the
register operand of its product with k.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gdn_triton.chunk.triton.hopper.names import (
    CHUNK,
    advance,
    here,
    load_tile,
    scalar_of,
    store_tile,
    viewed,
)
from gdn_triton.chunk.triton.hopper.places import sequence_of
from gdn_triton.chunk.triton.hopper.state import store_rows
from gdn_triton.chunk.triton.hopper.walks.gates import (
    FLAGS,
    KEY_VECTOR,
    OWN_VECTOR,
    QUERY_VECTOR,
    TO_END_VECTOR,
    VECTORS,
    gates_back_role,
)


@gluon.jit
def clear_rows(tile, first, COLUMNS: gl.constexpr):
    """Sets the rows of a tile [64, COLUMNS] from ``first`` on to zero."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_t = gl.arange(0, 8, gl.SliceLayout(1, LANES))
    for c in gl.static_range(COLUMNS // 64):
        part = tile.slice(c * 64, 64, 1)
        for r in gl.static_range(CHUNK // 8):
            piece = part.slice(r * 8, 8, 0)
            x = piece.load(LANES)
            piece.store(gl.where((o_t + r * 8 < first)[:, None], x, gl.zeros_like(x)))


@gluon.jit
def loader_back_role(
    memory,
    descs,
    place,
    walk,
    dtype: gl.constexpr,
    BK: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    IS_VARLEN: gl.constexpr,
):
    q_s, k_s, do_s, p_s, a_s, tile_full, cleared, empty = memory
    q_desc, k_desc, do_desc, p_desc, a_desc = descs
    i_b, first_row, i_h, i_hv, first_v = place
    n_chunks, n_rows = walk
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    row = first_row + (n_chunks - 1) * CHUNK
    for i in range(n_chunks):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        full = tile_full.index(stage)
        mbarrier.expect(full, (BK * 2 + COLUMNS + CHUNK * 2) * CHUNK * 2)
        k = viewed(k_s.index(stage), dtype, [1, CHUNK, 1, BK], ROWS)
        q = viewed(q_s.index(stage), dtype, [1, CHUNK, 1, BK], ROWS)
        do = viewed(do_s.index(stage), dtype, [1, CHUNK, 1, COLUMNS], ROWS)
        p = viewed(p_s.index(stage), dtype, [1, CHUNK, 1, CHUNK], ROWS)
        a = viewed(a_s.index(stage), dtype, [1, CHUNK, 1, CHUNK], ROWS)
        load_tile(k_desc, [i_b, row, i_h, 0], full, k)
        load_tile(do_desc, [i_b, row, i_hv, first_v], full, do)
        load_tile(p_desc, [i_b, row, i_hv, 0], full, p)
        load_tile(a_desc, [i_b, row, i_hv, 0], full, a)
        load_tile(q_desc, [i_b, row, i_h, 0], full, q)
        if IS_VARLEN:
            # Rows past the end belong to another sequence, and may be NaN.
            left = n_rows - (n_chunks - 1 - i) * CHUNK
            if left < CHUNK:
                mbarrier.wait(full, phase)
                clear_rows(k_s.index(stage), left, BK)
                clear_rows(q_s.index(stage), left, BK)
                clear_rows(do_s.index(stage), left, COLUMNS)
                clear_rows(p_s.index(stage), left, CHUNK)
                clear_rows(a_s.index(stage), left, CHUNK)
                fence_async_shared()
                mbarrier.arrive(cleared, count=1)
        row -= CHUNK
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def state_back_role(
    memory,
    fulls,
    descs,
    ends,
    strides,
    place,
    walk,
    dtype: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    NUMBER: gl.constexpr,
    STATES: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_DHT: gl.constexpr,
    STORE_DH0: gl.constexpr,
    IS_VARLEN: gl.constexpr,
):
    q_s, k_s, do_s, p_s, a_s, dx_s, dh_s, vectors, flags, empty = memory
    tile_full, cleared, gates_full = fulls
    dx_desc, dh_desc = descs
    p_dx, p_dht, p_dh0 = ends
    stride_dxt, stride_dhtk, stride_dhtv, stride_dh0k, stride_dh0v = strides
    i_b, first_row, i_hv, first_v, first_slot = place
    n_chunks, n_rows = walk
    first_v += NUMBER * BV
    p_dx += NUMBER * BV
    WARPS: gl.constexpr = gl.num_warps()
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BK, 16])
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 64, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    UPDATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    TOKEN: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    ONE: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    o_v = first_v + gl.arange(0, BV, gl.SliceLayout(1, STATE))
    o_k = gl.arange(0, BK, gl.SliceLayout(0, STATE))
    dh = gl.zeros([BV, BK], gl.float32, STATE)
    if HAS_DHT:
        inside = (o_v < V)[:, None] & (o_k < K)[None, :]
        offsets = o_v[:, None] * stride_dhtv + o_k[None, :] * stride_dhtk
        dh = gl.load(p_dht + offsets, mask=inside, other=0).to(gl.float32)
    # The accumulator of the first product, which overwrites it.
    x = gl.zeros([BV, CHUNK], gl.float32, PRODUCT)
    dx_tile = dx_s.index(NUMBER)
    dh_tile = dh_s.index(NUMBER)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    row = first_row + (n_chunks - 1) * CHUNK
    left = n_rows - (n_chunks - 1) * CHUNK
    slot = first_slot + n_chunks - 1
    for i in range(n_chunks):
        base = stage * VECTORS
        dhb = dh.to(dtype)
        # At most the newest copy to memory, that of the other tile, still reads its tile.
        tma.store_wait(1)
        dh_tile.permute((1, 0)).store(dhb)
        fence_async_shared()
        dh_block = viewed(dh_tile, dtype, [1, 1, BK, BV], ROWS)
        store_tile(dh_desc, [slot, i_hv, 0, first_v], dh_block)
        mbarrier.wait(tile_full.index(stage), phase)
        if IS_VARLEN:
            mbarrier.wait(cleared, 0, pred=left < CHUNK)
        k = k_s.index(stage)
        q = q_s.index(stage)
        dho = gl.convert_layout(dhb, OPERAND, assert_trivial=True)
        x = warpgroup_mma(dho, k.permute((1, 0)), x, use_acc=False, is_async=True)
        do_tile = do_s.index(stage)
        if STATES > 1:
            do_tile = do_tile.slice(NUMBER * BV, BV, 1)
        do = do_tile.permute((1, 0)).load(PRODUCT)
        mbarrier.wait(gates_full.index(stage), phase)
        own = vectors.index(base + OWN_VECTOR).load(TOKEN)
        to_end = vectors.index(base + TO_END_VECTOR).load(TOKEN)
        factor = vectors.index(base + QUERY_VECTOR).load(TOKEN)
        last = scalar_of(flags.index(stage).load(ONE), 0)
        do_scaled = (do.to(gl.float32) * factor[None, :]).to(dtype)
        x = warpgroup_mma_wait(0, deps=[x])
        dh = dh * last
        x = x * to_end[None, :] + do.to(gl.float32) * own[None, :]
        doo = gl.convert_layout(do, OPERAND, assert_trivial=True)
        x = warpgroup_mma(doo, p_s.index(stage), x, is_async=True)
        dos = gl.convert_layout(do_scaled, UPDATE, assert_trivial=True)
        dh = warpgroup_mma(dos, q, dh, is_async=True)
        x = warpgroup_mma_wait(1, deps=[x])
        xo = gl.convert_layout(x.to(dtype), OPERAND, assert_trivial=True)
        x = warpgroup_mma(xo, a_s.index(stage), x, is_async=True)
        factor = vectors.index(base + KEY_VECTOR).load(TOKEN)
        x = warpgroup_mma_wait(0, deps=[x])
        dxo = gl.convert_layout((x * factor[None, :]).to(dtype), UPDATE, assert_trivial=True)
        dh = warpgroup_mma(dxo, k, dh, is_async=True)
        tma.store_wait(1)
        dx_tile.permute((1, 0)).store(x.to(dtype))
        if IS_VARLEN:
            if left < CHUNK:
                p_row = p_dx + row.to(gl.int64) * stride_dxt
                store_rows(p_row, dx_tile, here(stride_dxt), left, V - first_v, BV)
                tma.store_wait(0)
            else:
                fence_async_shared()
                block = viewed(dx_tile, dtype, [1, CHUNK, 1, BV], ROWS)
                store_tile(dx_desc, [i_b, row, i_hv, first_v], block)
        else:
            fence_async_shared()
            block = viewed(dx_tile, dtype, [1, CHUNK, 1, BV], ROWS)
            store_tile(dx_desc, [i_b, row, i_hv, first_v], block)
        dh = warpgroup_mma_wait(0, deps=[dh])
        mbarrier.arrive(empty.index(stage), count=1)
        row -= CHUNK
        left += CHUNK
        slot -= 1
        stage, phase = advance(stage, phase, STAGES)
    tma.store_wait(0)
    if STORE_DH0:
        stored = (o_v < V)[:, None] & (o_k < K)[None, :]
        offsets = o_v[:, None] * stride_dh0v + o_k[None, :] * stride_dh0k
        gl.store(p_dh0 + offsets, dh, mask=stored)


@gluon.jit(do_not_specialize=["scale", "T", "N", "NT", "stride_gb", "stride_betab"])
def hopper_walk_back_kernel(
    q_desc,
    k_desc,
    do_desc,
    p_desc,
    a_desc,
    dx_desc,
    dh_desc,
    g_cumsum,
    own,
    beta,
    dx,
    dht,
    dh0,
    cu_seqlens,
    chunk_offsets,
    scale,
    T,
    N,
    NT,
    H,
    HV,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_betab,
    stride_betat,
    stride_betah,
    stride_dhtn,
    stride_dhth,
    stride_dhtk,
    stride_dhtv,
    stride_dh0n,
    stride_dh0h,
    stride_dh0k,
    stride_dh0v,
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    STATES: gl.constexpr,
    STAGES: gl.constexpr,
    STATE_REGISTERS: gl.constexpr,
    SINGLE_REGISTERS: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    num_warps: gl.constexpr,
):
    COLUMNS: gl.constexpr = STATES * BV
    BLOCKS: gl.constexpr = (V + COLUMNS - 1) // COLUMNS
    dtype: gl.constexpr = k_desc.dtype
    pid = gl.program_id(0)
    first_v = pid % BLOCKS * COLUMNS
    i_hv = pid // BLOCKS % HV
    i_n = pid // BLOCKS // HV
    i_h = i_hv // (HV // H)
    i_b, first_row, n_rows, _ = sequence_of(i_n, cu_seqlens, T, N, IS_VARLEN)
    n_chunks = (n_rows + CHUNK - 1) // CHUNK
    first_slot = i_n * NT
    if IS_VARLEN:
        first_slot = gl.load(chunk_offsets + i_n)

    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, BK], TILE)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, BK], TILE)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, COLUMNS], TILE)
    p_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, CHUNK], TILE)
    a_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, CHUNK], TILE)
    dx_s = gl.allocate_shared_memory(dtype, [STATES, CHUNK, BV], TILE)
    dh_s = gl.allocate_shared_memory(dtype, [STATES, BK, BV], TILE)
    vectors = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], FLAT)
    flags = gl.allocate_shared_memory(gl.float32, [STAGES, FLAGS], FLAT)
    tile_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    gates_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    cleared = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for s in gl.static_range(STAGES):
        mbarrier.init(tile_full.index(s), count=1)
        mbarrier.init(gates_full.index(s), count=1)
        mbarrier.init(empty.index(s), count=STATES)
    mbarrier.init(cleared, count=1)

    batch = i_b.to(gl.int64)
    head = i_hv.to(gl.int64)
    start = first_row.to(gl.int64)
    gates_at = batch * stride_gb + start * stride_gt + head * stride_gh
    p_beta = beta + batch * stride_betab + start * stride_betat + head * stride_betah
    stride_dxt = HV * V
    p_dx = dx + batch * T * stride_dxt + head * V + first_v
    # A role takes no None: in its place a pointer that the role does not use.
    p_dht = g_cumsum
    if dht is not None:
        p_dht = dht + i_n.to(gl.int64) * stride_dhtn + head * stride_dhth
    p_dh0 = g_cumsum
    if dh0 is not None:
        p_dh0 = dh0 + i_n.to(gl.int64) * stride_dh0n + head * stride_dh0h
    HAS_DHT: gl.constexpr = dht is not None
    STORE_DH0: gl.constexpr = dh0 is not None

    walk = (n_chunks, n_rows)
    inputs = (g_cumsum + gates_at, own + gates_at, p_beta, stride_gt, stride_betat)
    states = (q_s, k_s, do_s, p_s, a_s, dx_s, dh_s, vectors, flags, empty)
    fulls = (tile_full, cleared, gates_full)
    outputs = (dx_desc, dh_desc)
    ends = (p_dx, p_dht, p_dh0)
    strides = (stride_dxt, stride_dhtk, stride_dhtv, stride_dh0k, stride_dh0v)
    place = (i_b, first_row, i_hv, first_v, first_slot)
    factors = (vectors, flags, gates_full, empty)
    tiles = (q_s, k_s, do_s, p_s, a_s, tile_full, cleared, empty)
    sources = (q_desc, k_desc, do_desc, p_desc, a_desc)
    heads = (i_b, first_row, i_h, i_hv, first_v)
    if STATES == 1:
        gl.warp_specialize(
            [
                (
                    state_back_role,
                    (
                        states,
                        fulls,
                        outputs,
                        ends,
                        strides,
                        place,
                        walk,
                        dtype,
                        K,
                        V,
                        BK,
                        BV,
                        0,
                        STATES,
                        STAGES,
                        HAS_DHT,
                        STORE_DH0,
                        IS_VARLEN,
                    ),
                ),
                (
                    gates_back_role,
                    (factors, inputs, walk, scale, STAGES),
                ),
                (
                    loader_back_role,
                    (tiles, sources, heads, walk, dtype, BK, COLUMNS, STAGES, IS_VARLEN),
                ),
            ],
            [1, 1],
            [SINGLE_REGISTERS, SINGLE_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (
                    state_back_role,
                    (
                        states,
                        fulls,
                        outputs,
                        ends,
                        strides,
                        place,
                        walk,
                        dtype,
                        K,
                        V,
                        BK,
                        BV,
                        0,
                        STATES,
                        STAGES,
                        HAS_DHT,
                        STORE_DH0,
                        IS_VARLEN,
                    ),
                ),
                (
                    state_back_role,
                    (
                        states,
                        fulls,
                        outputs,
                        ends,
                        strides,
                        place,
                        walk,
                        dtype,
                        K,
                        V,
                        BK,
                        BV,
                        1,
                        STATES,
                        STAGES,
                        HAS_DHT,
                        STORE_DH0,
                        IS_VARLEN,
                    ),
                ),
                (
                    gates_back_role,
                    (factors, inputs, walk, scale, STAGES),
                ),
                (
                    loader_back_role,
                    (tiles, sources, heads, walk, dtype, BK, COLUMNS, STAGES, IS_VARLEN),
                ),
            ],
            [4, 1, 1],
            [STATE_REGISTERS, SINGLE_REGISTERS, SINGLE_REGISTERS],
        )
