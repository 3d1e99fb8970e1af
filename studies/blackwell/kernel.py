"""A forward for compute capability 10.0 in Gluon: a skeleton that compiles and has never run.

A program owns the state [K, V] of one sequence and value head, K = V = 128. All matrices are
transposed, so rows are channels of V, as in the kernel for compute capability 9.0
(gdn_triton/chunk/triton/hopper). This kernel uses the gates role and the frame of the state of that
kernel. Its roles are

    state      4 warps  tensor memory to registers and back: operands, x', u, o
    triangles  4 warps  T and P of each chunk, which need no state
    products   1 warp   issues the products of the state
    gates      1 warp   factors of the tokens
    loader     1 warp   copies q, k and v of a chunk to shared memory, by TMA

The state stays in tensor memory, and the matrix products accumulate into it there. k and q of a
chunk form one tile of 128 rows. Therefore S k^T and S q^T are one product, and k k^T and q k^T are
another.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    get_tmem_reg_layout,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tma,
)

from gdn_triton._triton.views import viewed
from gdn_triton.chunk.triton.hopper.gates import (
    BETA_VECTOR,
    C_VECTOR,
    D_VECTOR,
    DECAY,
    END,
    ENTER,
    EXPONENTS,
    F_VECTOR,
    FLAGS,
    R_VECTOR,
    STEEP,
    VECTORS,
    gates_walk,
)
from gdn_triton.chunk.triton.hopper.names import (
    CHUNK,
    advance,
    load_tile,
    opaque,
    scalar_of,
    store_tile,
)

# Channels of K and of V; also the rows of a tile of k and q.
DIM = gl.constexpr(128)
DTYPE = gl.constexpr(gl.bfloat16)
STAGES = gl.constexpr(3)
T_STAGES = gl.constexpr(2)


@gluon.jit
def loader_role(memory, descs, place, n_chunks):
    kq_s, v_s, tile_full, empty = memory
    q_desc, k_desc, v_desc = descs
    i_b, i_h, i_hv = place
    dtype: gl.constexpr = k_desc.dtype
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for i in range(n_chunks):
        row = i * CHUNK
        mbarrier.wait(empty.index(stage), phase ^ 1)
        full = tile_full.index(stage)
        mbarrier.expect(full, 3 * CHUNK * DIM * 2)
        kq = kq_s.index(stage)
        k = viewed(kq.slice(0, CHUNK, 0), dtype, [1, CHUNK, 1, DIM], ROWS)
        q = viewed(kq.slice(CHUNK, CHUNK, 0), dtype, [1, CHUNK, 1, DIM], ROWS)
        v = viewed(v_s.index(stage), dtype, [1, CHUNK, 1, DIM], ROWS)
        load_tile(k_desc, [i_b, row, i_h, 0], full, k)
        load_tile(q_desc, [i_b, row, i_h, 0], full, q)
        load_tile(v_desc, [i_b, row, i_hv, 0], full, v)
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def products_role(memory, n_chunks):
    kq_s, t_s, ap_s, S, S_op, xo, x_op, u_op, pairs, barriers = memory
    tile_full, t_full, s_ready, xo_ready, x_ready = barriers[0]
    u_ready, uo_ready, done, pairs_ready, pairs_free = barriers[1]
    dtype: gl.constexpr = kq_s.dtype
    KEYS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x = xo.slice(0, CHUNK)
    o = xo.slice(CHUNK, CHUNK)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    t_stage = gl.to_tensor(0)
    t_phase = gl.to_tensor(0)
    mbarrier.wait(tile_full.index(0), 0, pred=n_chunks > 0)
    first = kq_s.index(0)
    tcgen05_mma(first, first.slice(0, CHUNK, 0).permute((1, 0)), pairs, use_acc=False)
    tcgen05_commit(pairs_ready)
    for i in range(n_chunks):
        kq = kq_s.index(stage)
        k = kq.slice(0, CHUNK, 0)
        mbarrier.wait(s_ready, i & 1)
        tcgen05_mma(S_op, kq.permute((1, 0)), xo, use_acc=False)
        tcgen05_commit(xo_ready)
        stage, phase = advance(stage, phase, STAGES)
        if i + 1 < n_chunks:
            # This is the accumulator of k k^T and q k^T of the next chunk, which the triangles
            # read.
            after = kq_s.index(stage)
            mbarrier.wait(tile_full.index(stage), phase)
            mbarrier.wait(pairs_free, i & 1)
            tcgen05_mma(after, after.slice(0, CHUNK, 0).permute((1, 0)), pairs, use_acc=False)
            tcgen05_commit(pairs_ready)
        mbarrier.wait(x_ready, i & 1)
        mbarrier.wait(t_full.index(t_stage), t_phase)
        tcgen05_mma(x_op, t_s.index(t_stage).permute((1, 0)), x)
        tcgen05_commit(u_ready)
        mbarrier.wait(uo_ready, i & 1)
        P = viewed(ap_s.index(t_stage).slice(CHUNK, CHUNK, 0), dtype, [CHUNK, CHUNK], KEYS)
        tcgen05_mma(u_op, P.permute((1, 0)), o)
        tcgen05_mma(u_op, k, S)
        tcgen05_commit(done)
        t_stage, t_phase = advance(t_stage, t_phase, T_STAGES)


@gluon.jit
def triangles_role(memory, n_chunks):
    """Computes T' = (I + A')^-1 without its diagonal, and P', for each chunk (gates.py of the
    Hopper kernel has the formulas). The inverse is built from blocks of 1, doubled until one block
    has 64."""
    t_s, ap_s, pairs, vectors, flags, gates_full, t_full, pairs_ready, pairs_free, empty = memory
    dtype: gl.constexpr = t_s.dtype
    KEYS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PAIRS: gl.constexpr = get_tmem_reg_layout(gl.float32, (DIM, CHUNK), pairs.layout, 4)
    ONE: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    # The first 64 rows are k k^T, the others q k^T.
    o_p = gl.arange(0, DIM, gl.SliceLayout(1, PAIRS))[:, None]
    o_c = gl.arange(0, CHUNK, gl.SliceLayout(0, PAIRS))[None, :]
    o_r = gl.arange(0, CHUNK, gl.SliceLayout(1, MMA))[:, None]
    column = gl.arange(0, CHUNK, gl.SliceLayout(0, MMA))[None, :]
    zeros = gl.zeros([CHUNK, CHUNK], gl.float32, MMA)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    t_stage = gl.to_tensor(0)
    for i in range(n_chunks):
        # The compiler does not know that row and last are the same in all chunks. If it knew, it
        # would keep each element of their masks in a register.
        row = gl.where(n_chunks > i, o_r, -1)
        last = gl.where(o_p < CHUNK, o_p - 1, o_p - CHUNK)
        inside = gl.where(n_chunks > i, last, -1) >= o_c
        base = stage * VECTORS
        mbarrier.wait(gates_full.index(stage), phase)
        steep = scalar_of(flags.index(stage).load(ONE), STEEP)
        mbarrier.wait(pairs_ready, i & 1)
        made = pairs.load(PAIRS)
        mbarrier.arrive(pairs_free, count=1)
        if steep != 0:
            # These are d for the rows of k, then y + d for the rows of q, adjacent in shared
            # memory. The square is 1.
            both = viewed(vectors.index(base + D_VECTOR), gl.float32, [DIM], FLAT)
            d_row = both.load(gl.SliceLayout(1, PAIRS)) * opaque(steep * steep)
            d_column = vectors.index(base + D_VECTOR).load(gl.SliceLayout(0, PAIRS))
            made *= gl.exp2(gl.where(inside, d_row[:, None] - d_column[None, :], 0.0))
        # The second 64 numbers belong to another vector. The rows of q load them but do not use
        # them.
        b_row = viewed(vectors.index(base + BETA_VECTOR), gl.float32, [DIM], FLAT)
        factor = gl.where(o_p < CHUNK, b_row.load(gl.SliceLayout(1, PAIRS))[:, None], 1.0)
        made = gl.where(inside, made * factor, 0.0)
        bits = gl.where(
            o_p < CHUNK,
            made.to(gl.float16).to(gl.int16, bitcast=True),
            made.to(dtype).to(gl.int16, bitcast=True),
        )
        # The state warps free a chunk after they have read T and P of all earlier chunks.
        past = gl.maximum(i - T_STAGES, 0)
        mbarrier.wait(empty.index(past % STAGES), (past // STAGES) & 1, pred=i >= T_STAGES)
        ap = ap_s.index(t_stage)
        ap.store(bits)
        A = viewed(ap.slice(0, CHUNK, 0), gl.float16, [CHUNK, CHUNK], KEYS)
        X = gl.where(row == column, 1.0, zeros)
        for level in gl.static_range(6):
            Xh = X.to(gl.float16)
            Y = mma_v2(gl.convert_layout(Xh, LEFT), A.load(RIGHT), zeros)
            Z = mma_v2(
                gl.convert_layout(Y.to(gl.float16), LEFT), gl.convert_layout(Xh, RIGHT), zeros
            )
            block = row >> level
            grows = (block == (column >> level) + 1) & (block % 2 == 1)
            X = gl.where(grows, -Z, X)
        t_s.index(t_stage).store(gl.where(row > column, X, 0.0).to(dtype))
        fence_async_shared()
        mbarrier.arrive(t_full.index(t_stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
        t_stage = (t_stage + 1) % T_STAGES


@gluon.jit
def state_role(memory, barriers, o_desc, p_ht, place, n_chunks):
    v_s, o_s, S, S_op, xo, x_op, u_op, vectors, flags = memory
    tile_full, gates_full, s_ready, xo_ready, x_ready, u_ready, uo_ready, done, empty = barriers
    i_b, _, i_hv = place
    dtype: gl.constexpr = v_s.dtype
    x_t = xo.slice(0, CHUNK)
    o_t = xo.slice(CHUNK, CHUNK)
    # Loop over columns of K: a thread then holds few elements of its row of the state at once.
    PART: gl.constexpr = 32
    STATE: gl.constexpr = get_tmem_reg_layout(gl.float32, (DIM, PART), S.slice(0, PART).layout, 4)
    S_OP: gl.constexpr = get_tmem_reg_layout(
        gl.bfloat16, (DIM, PART), S_op.slice(0, PART).layout, 4
    )
    PRODUCT: gl.constexpr = get_tmem_reg_layout(gl.float32, (DIM, CHUNK), x_t.layout, 4)
    X_OP: gl.constexpr = get_tmem_reg_layout(gl.bfloat16, (DIM, CHUNK), x_op.layout, 4)
    TOKEN: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    ONE: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    for part in gl.static_range(DIM // PART):
        S.slice(part * PART, PART).store(gl.zeros([DIM, PART], gl.float32, STATE))
    end = gl.to_tensor(1.0)
    o_tile = o_s.index(0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for i in range(n_chunks):
        mbarrier.wait(gates_full.index(stage), phase)
        base = stage * VECTORS
        numbers = flags.index(stage).load(ONE)
        enter = scalar_of(numbers, ENTER)
        decay = scalar_of(numbers, DECAY)
        end = scalar_of(numbers, END)
        for part in gl.static_range(DIM // PART):
            columns = S.slice(part * PART, PART)
            state = columns.load(STATE) * enter
            S_op.slice(part * PART, PART).store(gl.convert_layout(state.to(dtype), S_OP))
            if (enter != 1.0) | (decay != 1.0):
                columns.store(state * opaque(decay))
        mbarrier.arrive(s_ready, count=1)

        mbarrier.wait(tile_full.index(stage), phase)
        v = v_s.index(stage).permute((1, 0)).load(PRODUCT).to(gl.float32)
        c = vectors.index(base + C_VECTOR).load(TOKEN)
        f = vectors.index(base + F_VECTOR).load(TOKEN)
        mbarrier.wait(xo_ready, i & 1)
        x = v * c[None, :] - x_t.load(PRODUCT) * f[None, :]
        # The diagonal term of T x' is added in fp32, in the accumulator of the product.
        x_t.store(x)
        x_op.store(gl.convert_layout(x.to(dtype), X_OP))
        mbarrier.arrive(x_ready, count=1)

        mbarrier.wait(u_ready, i & 1)
        u_op.store(gl.convert_layout(x_t.load(PRODUCT).to(dtype), X_OP))
        mbarrier.arrive(uo_ready, count=1)

        r = vectors.index(base + R_VECTOR).load(TOKEN)
        mbarrier.wait(done, i & 1)
        o = o_t.load(PRODUCT) * r[None, :]
        tma.store_wait(0)
        o_tile.permute((1, 0)).store(o.to(dtype))
        fence_async_shared()
        mbarrier.arrive(empty.index(stage), count=1)
        out = viewed(o_tile, dtype, [1, CHUNK, 1, DIM], ROWS)
        store_tile(o_desc, [i_b, i * CHUNK, i_hv, 0], out)
        stage, phase = advance(stage, phase, STAGES)
    tma.store_wait(0)
    row = gl.arange(0, DIM, gl.SliceLayout(1, STATE))
    column = gl.arange(0, PART, gl.SliceLayout(0, STATE))
    for part in gl.static_range(DIM // PART):
        state = S.slice(part * PART, PART).load(STATE) * end
        gl.store(p_ht + (column[None, :] + part * PART) * DIM + row[:, None], state)


@gluon.jit(do_not_specialize=["scale", "T"])
def blackwell_fwd_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    g,
    beta,
    ht,
    scale,
    T,
    H,
    HV,
    RCP_LN2: gl.constexpr,
    FLOOR: gl.constexpr,
    THRESHOLD: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = k_desc.dtype
    pid = gl.program_id(0)
    i_hv = pid % HV
    i_b = pid // HV
    i_h = i_hv // (HV // H)
    n_chunks = (T + CHUNK - 1) // CHUNK

    KEYS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    kq_s = gl.allocate_shared_memory(dtype, [STAGES, DIM, DIM], KEYS)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, DIM], KEYS)
    t_s = gl.allocate_shared_memory(dtype, [T_STAGES, CHUNK, CHUNK], KEYS)
    ap_s = gl.allocate_shared_memory(gl.int16, [T_STAGES, DIM, CHUNK], KEYS)
    o_s = gl.allocate_shared_memory(dtype, [1, CHUNK, DIM], KEYS)
    vectors = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], FLAT)
    exponents = gl.allocate_shared_memory(gl.int16, [STAGES * EXPONENTS, CHUNK], FLAT)
    flags = gl.allocate_shared_memory(gl.float32, [STAGES, FLAGS], FLAT)
    tile_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    gates_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    t_full = gl.allocate_shared_memory(gl.int64, [T_STAGES, 1], BARRIER)
    # Each of these barriers has one phase per chunk.
    each = gl.allocate_shared_memory(gl.int64, [8, 1], BARRIER)
    for s in gl.static_range(STAGES):
        mbarrier.init(tile_full.index(s), count=1)
        mbarrier.init(gates_full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    for s in gl.static_range(T_STAGES):
        mbarrier.init(t_full.index(s), count=1)
    for s in gl.static_range(8):
        mbarrier.init(each.index(s), count=1)
    s_ready, xo_ready, x_ready = each.index(0), each.index(1), each.index(2)
    u_ready, uo_ready, done = each.index(3), each.index(4), each.index(5)
    pairs_ready, pairs_free = each.index(6), each.index(7)

    # These allocations use 128, 64, 128, 32, 32 and 64 columns of tensor memory, of 512.
    WIDE: gl.constexpr = TensorMemoryLayout([DIM, DIM], col_stride=1)
    HALF: gl.constexpr = TensorMemoryLayout([DIM, CHUNK], col_stride=1)
    S = allocate_tensor_memory(gl.float32, [DIM, DIM], WIDE)
    S_op = allocate_tensor_memory(dtype, [DIM, DIM], WIDE)
    xo = allocate_tensor_memory(gl.float32, [DIM, DIM], WIDE)
    x_op = allocate_tensor_memory(dtype, [DIM, CHUNK], HALF)
    u_op = allocate_tensor_memory(dtype, [DIM, CHUNK], HALF)
    pairs = allocate_tensor_memory(gl.float32, [DIM, CHUNK], HALF)

    batch = i_b.to(gl.int64) * T * HV + i_hv
    place = (i_b, i_h, i_hv)
    gl.warp_specialize(
        [
            (
                state_role,
                (
                    (v_s, o_s, S, S_op, xo, x_op, u_op, vectors, flags),
                    (
                        tile_full,
                        gates_full,
                        s_ready,
                        xo_ready,
                        x_ready,
                        u_ready,
                        uo_ready,
                        done,
                        empty,
                    ),
                    o_desc,
                    ht + (i_b.to(gl.int64) * HV + i_hv) * (DIM * DIM),
                    place,
                    n_chunks,
                ),
            ),
            (
                triangles_role,
                (
                    (
                        t_s,
                        ap_s,
                        pairs,
                        vectors,
                        flags,
                        gates_full,
                        t_full,
                        pairs_ready,
                        pairs_free,
                        empty,
                    ),
                    n_chunks,
                ),
            ),
            (
                products_role,
                (
                    (
                        kq_s,
                        t_s,
                        ap_s,
                        S,
                        S_op,
                        xo,
                        x_op,
                        u_op,
                        pairs,
                        (
                            (tile_full, t_full, s_ready, xo_ready, x_ready),
                            (u_ready, uo_ready, done, pairs_ready, pairs_free),
                        ),
                    ),
                    n_chunks,
                ),
            ),
            (
                gates_walk,
                (
                    (vectors, exponents, flags, gates_full, empty),
                    (g + batch, beta + batch, HV, HV),
                    g,
                    g,
                    (n_chunks, T, T),
                    (0, 0),
                    scale,
                    DTYPE,
                    RCP_LN2,
                    FLOOR,
                    THRESHOLD,
                    STAGES,
                    False,
                    False,
                    False,
                    1.0,
                ),
            ),
            (
                loader_role,
                (
                    (kq_s, v_s, tile_full, empty),
                    (q_desc, k_desc, v_desc),
                    place,
                    n_chunks,
                ),
            ),
        ],
        [4, 1, 1, 1],
        [208, 40, 40, 40],
    )
