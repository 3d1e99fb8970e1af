"""The roles of a block for K from 136 to 256, of one state and whole sequences.

The state [64, 256] takes 128 registers of each thread of its warps, which have no room for its
rounded copy. These warps round 32 columns at a time, and multiply each piece by keys and queries.
Two warpgroups make T and P' of alternate chunks: with 256 channels of K, a single one takes longer
for a chunk than the state. Shared memory holds keys of three chunks, and queries and values of two,
each loaded by a warp of its own.
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

from gdn_triton._triton.views import viewed
from gdn_triton.chunk.triton.hopper.gates import (
    BETA_VECTOR,
    C_VECTOR,
    D_VECTOR,
    DECAY,
    END,
    ENTER,
    F_VECTOR,
    R_VECTOR,
    SCORE_VECTOR,
    STEEP,
    VECTORS,
)
from gdn_triton.chunk.triton.hopper.names import (
    CHUNK,
    ONE,
    OPERAND,
    PRODUCT,
    TOKEN,
    advance,
    halves,
    here,
    load_tile,
    opaque,
    power,
    rounded,
    scalar_of,
)
from gdn_triton.chunk.triton.hopper.state import (
    decayed,
    narrow_scores,
    read_error,
    scores,
    slot_of_stop,
    store_values,
    zero_rows,
)
from gdn_triton.chunk.triton.hopper.triangles import (
    BLOCKED_TILE,
    blocks_of_inverse,
    clear_rows,
    places_in_quarter,
    triangle_of,
    with_gates,
)

# Columns of the state that are rounded at once.
PIECE = gl.constexpr(32)


@gluon.jit
def queries_barriers():
    """The barriers that say that the two buffers of queries and values are empty."""
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(2):
        mbarrier.init(q_empty.index(s), count=2)
    return q_empty


@gluon.jit
def pieces_of(S):
    """The columns of S [64, 256], 32 at a time."""
    a, b = halves(S)
    a, c = halves(a)
    b, d = halves(b)
    a0, a1 = halves(a)
    c0, c1 = halves(c)
    b0, b1 = halves(b)
    d0, d1 = halves(d)
    return a0, a1, c0, c1, b0, b1, d0, d1


@gluon.jit
def store_columns(p_state, S, factor, first, end, stride_v, stride_k, K: gl.constexpr):
    """Stores the rows ``first`` to ``end`` of factor S [BV, 256], 32 columns at a time: addresses
    of the whole state would spill."""
    pieces = pieces_of(S)
    LAYOUT: gl.constexpr = pieces[0].type.layout
    for j in gl.static_range((K + PIECE - 1) // PIECE):
        o_v = here(first) + gl.arange(0, S.shape[0], gl.SliceLayout(1, LAYOUT))
        o_k = j * PIECE + gl.arange(0, PIECE, gl.SliceLayout(0, LAYOUT))
        stored = (o_v < end)[:, None] & (o_k < K)[None, :]
        offsets = o_v[:, None] * stride_v + o_k[None, :] * stride_k
        gl.store(p_state + offsets, (pieces[j] * factor).to(p_state.dtype.element_ty), stored)


@gluon.jit
def reads_of(S, k, q, x, o, K: gl.constexpr, dtype: gl.constexpr, OPERAND: gl.constexpr):
    """S k^T and S q^T. x and o are overwritten."""
    pieces = pieces_of(S)
    for j in gl.static_range((K + PIECE - 1) // PIECE):
        if j >= 2:
            x, o = warpgroup_mma_wait(2, deps=[x, o])
        piece = gl.convert_layout(rounded(pieces[j], dtype), OPERAND, assert_trivial=True)
        k_piece = k.slice(j * PIECE, PIECE, 1).permute((1, 0))
        q_piece = q.slice(j * PIECE, PIECE, 1).permute((1, 0))
        x = warpgroup_mma(piece, k_piece, x, use_acc=j > 0, is_async=True)
        o = warpgroup_mma(piece, q_piece, o, use_acc=j > 0, is_async=True)
    return warpgroup_mma_wait(0, deps=[x, o])


@gluon.jit
def wide_state_role(
    memory,
    fulls,
    k_full,
    q_empty,
    o_desc,
    ends,
    stops,
    strides,
    place,
    walk,
    dtype: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    STAGES: gl.constexpr,
    T_STAGES: gl.constexpr,
    HAS_H0: gl.constexpr,
    STORE_HT: gl.constexpr,
    HAS_STOPS: gl.constexpr,
    HAS_STOP_SLOTS: gl.constexpr,
    LAST_SKIPPED: gl.constexpr,
    ZERO_ROWS: gl.constexpr,
    IS_VARLEN: gl.constexpr,
):
    k_s, q_s, v_s, t_s, p_s, o_s, vectors, _, flags, empty = memory
    q_full, gates_full, t_full, p_full = fulls
    stride_ot, stride_h0k, stride_h0v, stride_htk, stride_htv = strides
    i_b, first_row, i_hv, first_v, first_out, end_in, end_out, _, _, rest_row = place
    p_o, p_h0, p_ht, _, _, _ = ends
    p_stops, p_stop_slots, first_stop, tokens, every, M, stride_cn, stride_ck, stride_cv = stops
    n_chunks, n_rows, n_rest = walk
    # With the 128 registers of a thread at launch, the assembler refuses products of 256 columns.
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    UPDATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    o_t = gl.arange(0, CHUNK, TOKEN)
    o_v = first_v + gl.arange(0, BV, gl.SliceLayout(1, STATE))
    o_k = gl.arange(0, BK, gl.SliceLayout(0, STATE))

    IS_HALF: gl.constexpr = dtype == gl.float16
    # Every sequence begins in the frame TOP (gates.py): 2^TOP, and its inverse.
    UP: gl.constexpr = 16.0 if IS_HALF else 16777216.0
    DOWN: gl.constexpr = 0.0625 if IS_HALF else 5.9604644775390625e-08
    S = gl.zeros([BV, BK], gl.float32, STATE)
    end = gl.to_tensor(1.0)
    if HAS_H0:
        inside = (o_v < end_in)[:, None] & (o_k < K)[None, :]
        offsets = o_v[:, None] * stride_h0v + o_k[None, :] * stride_h0k
        S = gl.load(p_h0 + offsets, mask=inside, other=0).to(gl.float32)
        S *= DOWN
        end = gl.full([], UP, gl.float32)
    o_tile = o_s.index(0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    t_stage = gl.to_tensor(0)
    t_phase = gl.to_tensor(0)
    for i in range(n_chunks):
        left = n_rows - i * CHUNK
        mbarrier.wait(gates_full.index(stage), phase)
        base = stage * VECTORS
        numbers = flags.index(stage).load(ONE)
        enter = scalar_of(numbers, ENTER)
        decay = scalar_of(numbers, DECAY)
        end = scalar_of(numbers, END)
        if IS_HALF:
            # Before S is rounded, because float16 may not hold S in the old frame.
            S = decayed(S, enter)
        mbarrier.wait(k_full.index(stage), phase)
        if IS_VARLEN:
            # T is written after the rows of k past the end have been set to zero (triangles.py).
            mbarrier.wait(t_full.index(t_stage), t_phase, pred=left < CHUNK)
        mbarrier.wait(q_full.index(t_stage), t_phase)
        k = k_s.index(stage)
        q = q_s.index(t_stage)
        x = gl.zeros([BV, CHUNK], gl.float32, PRODUCT)
        o = gl.zeros([BV, CHUNK], gl.float32, PRODUCT)
        x, o = reads_of(S, k, q, x, o, K, dtype, OPERAND)
        if not IS_HALF:
            if enter != 1.0:
                x = x * opaque(enter)
                o = o * opaque(enter)
        S = decayed(S, decay)
        if IS_HALF:
            # With the number 0, which the assembler does not know to be 0.
            same = stage + (here(n_rows) < 0).to(gl.int32)
            is_steep = scalar_of(flags.index(stage).load(ONE), STEEP)
            if is_steep != 0:
                d = vectors.index(same * VECTORS + D_VECTOR).load(TOKEN)
                o = o * power(d)[None, :]
        c = vectors.index(base + C_VECTOR).load(TOKEN)
        f = vectors.index(base + F_VECTOR).load(TOKEN)
        v = v_s.index(t_stage).permute((1, 0)).load(PRODUCT)
        x = read_error(v, x, c, f, o_t, left, IS_VARLEN)
        xb = gl.convert_layout(x.to(dtype), OPERAND, assert_trivial=True)
        # The loader may overwrite the tile of v once all of it is loaded. An arrival does not wait
        # for loads that precede it. The fence does.
        fence_async_shared()
        mbarrier.arrive(q_empty.index(t_stage), count=1)
        mbarrier.wait(t_full.index(t_stage), t_phase)
        t = t_s.index(t_stage)
        p = p_s.index(t_stage)
        x = warpgroup_mma(xb, t.permute((1, 0)), x, is_async=True)
        x = warpgroup_mma_wait(0, deps=[x])
        u = x.to(dtype)
        uo = gl.convert_layout(u, OPERAND, assert_trivial=True)
        mbarrier.wait(p_full.index(t_stage), t_phase)
        o = warpgroup_mma(uo, p.permute((1, 0)), o, is_async=True)
        if IS_HALF:
            # The factor overwrites u, because two copies of u would spill.
            o = warpgroup_mma_wait(0, deps=[o])
            if is_steep != 0:
                w = vectors.index(same * VECTORS + SCORE_VECTOR).load(TOKEN)
                u = (u.to(gl.float32) * power(w)[None, :]).to(dtype)
        S = warpgroup_mma(gl.convert_layout(u, UPDATE, assert_trivial=True), k, S, is_async=True)
        r = vectors.index(base + R_VECTOR).load(TOKEN)
        o = warpgroup_mma_wait(1, deps=[o])
        tma.store_wait(0)
        o_tile.permute((1, 0)).store((o * r[None, :]).to(dtype))
        o_place = (i_b, first_row + i * CHUNK, i_hv, first_v)
        store_values(o_desc, p_o, o_tile, o_place, left, stride_ot, V, BV, IS_VARLEN)
        S = warpgroup_mma_wait(0, deps=[S])
        if HAS_STOPS:
            tokens += CHUNK
            if (left >= CHUNK) & (tokens % every == 0):
                row = tokens // every - 1
                slot, stop_end = slot_of_stop(
                    p_stop_slots, first_stop, row, M, V, HAS_STOP_SLOTS, LAST_SKIPPED
                )
                p_stop = p_stops + slot * stride_cn
                store_columns(p_stop, S, end, first_v, stop_end, stride_cv, stride_ck, K)
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
        t_stage, t_phase = advance(t_stage, t_phase, T_STAGES)
    tma.store_wait(0)
    if ZERO_ROWS:
        # Rows that belong to no sequence, after the last one.
        p_rest = p_o + rest_row.to(gl.int64) * stride_ot
        zero_rows(p_rest, stride_ot, n_rest, V - first_v, BV)
    if STORE_HT:
        store_columns(p_ht, S, end, first_out, end_out, stride_htv, stride_htk, K)


@gluon.jit
def pairs_role(
    memory,
    fulls,
    k_full,
    q_empty,
    walk,
    dtype: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    NUMBER: gl.constexpr,
):
    """T and P' of every second chunk. The inverse is made where T will be, and A' is stored where
    P' will be."""
    k_s, q_s, _, t_s, p_s, _, vectors, exponents, flags, empty = memory
    q_full, gates_full, t_full, p_full = fulls
    n_chunks, n_rows, _ = walk
    ROW: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    KEYS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ROW_VECTOR: gl.constexpr = D_VECTOR if dtype == gl.float16 else SCORE_VECTOR
    o_r = gl.arange(0, CHUNK, ROW)
    o_c = gl.arange(0, CHUNK, TOKEN)
    x_r, x_c, block = places_in_quarter()
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    # t_stage is always NUMBER where it is used. The compiler does not know this, and computes
    # addresses where it needs them. Else it would keep all in registers of the whole loop.
    t_stage = gl.to_tensor(0)
    t_phase = gl.to_tensor(0)
    for i in range(n_chunks):
        if i % 2 == NUMBER:
            left = n_rows - i * CHUNK
            base = stage * VECTORS
            # These warps skip the other warpgroup's phases of the full barriers, two of which look
            # the same. They therefore first wait until the state has freed the buffers.
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.wait(gates_full.index(stage), phase)
            mbarrier.wait(k_full.index(stage), phase)
            k = k_s.index(stage)
            if IS_VARLEN:
                if left < CHUNK:
                    clear_rows(k, left, BK)
            zero = gl.zeros([CHUNK, CHUNK], gl.float32, PRODUCT)
            A = warpgroup_mma(k, k.permute((1, 0)), zero, use_acc=False, is_async=True)
            steep = scalar_of(flags.index(stage).load(ONE), STEEP)
            beta = vectors.index(base + BETA_VECTOR).load(ROW)
            # The compiler does not know that these numbers are the same in all chunks. If it knew,
            # it would keep each element of their masks in a register.
            row = gl.where(n_rows > i, o_r, -1)[:, None]
            A = warpgroup_mma_wait(0, deps=[A])
            Ah = with_gates(
                A, vectors, base, exponents, stage, steep, beta, row, o_c[None, :], True
            )
            # The state has read T and P' of chunk i - 2.
            past = gl.maximum(i - 2, 0)
            mbarrier.wait(empty.index(past % STAGES), (past // STAGES) & 1, pred=i >= 2)
            t = t_s.index(t_stage)
            p = p_s.index(t_stage)
            products = viewed(p, gl.float16, [CHUNK, CHUNK], KEYS)
            inverse = viewed(t, gl.float16, [CHUNK, CHUNK], KEYS)
            diagonal = viewed(t, gl.float16, [CHUNK, CHUNK], BLOCKED_TILE)
            D, L, Z0, Z1 = blocks_of_inverse(Ah, products, inverse, diagonal, x_r, x_c, block)
            Z0, Z1 = warpgroup_mma_wait(0, deps=[Z0, Z1])
            t.store(triangle_of(D, L, Z0, Z1, x_r, x_c, block, dtype))
            fence_async_shared()
            mbarrier.arrive(t_full.index(t_stage), count=1)

            mbarrier.wait(q_full.index(t_stage), t_phase)
            P = scores(q_s.index(t_stage), k, zero, vectors, base, steep, ROW_VECTOR, PRODUCT)
            mbarrier.arrive(q_empty.index(t_stage), count=1)
            P = gl.where(row >= o_c[None, :], P, 0.0)
            p.store(narrow_scores(rounded(P, dtype), exponents, stage, steep))
            fence_async_shared()
            mbarrier.arrive(p_full.index(t_stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
        t_stage, t_phase = advance(t_stage, t_phase, 2)


@gluon.jit
def keys_role(
    k_s,
    k_full,
    empty,
    k_desc,
    place,
    walk,
    dtype: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Loads k of each chunk."""
    i_b, first_row, i_h, _, _ = place
    n_chunks, _, _ = walk
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for i in range(n_chunks):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        full = k_full.index(stage)
        mbarrier.expect(full, BK * CHUNK * 2)
        k = viewed(k_s.index(stage), dtype, [1, CHUNK, 1, BK], ROWS)
        load_tile(k_desc, [i_b, first_row + i * CHUNK, i_h, 0], full, k)
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def queries_role(
    q_s,
    v_s,
    q_full,
    q_empty,
    q_desc,
    v_desc,
    place,
    walk,
    dtype: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
):
    """Loads q and v of each chunk."""
    i_b, first_row, i_h, i_hv, first_v = place
    n_chunks, _, _ = walk
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for i in range(n_chunks):
        row = first_row + i * CHUNK
        mbarrier.wait(q_empty.index(stage), phase ^ 1)
        full = q_full.index(stage)
        mbarrier.expect(full, (BK + BV) * CHUNK * 2)
        q = viewed(q_s.index(stage), dtype, [1, CHUNK, 1, BK], ROWS)
        v = viewed(v_s.index(stage), dtype, [1, CHUNK, 1, BV], ROWS)
        load_tile(q_desc, [i_b, row, i_h, 0], full, q)
        load_tile(v_desc, [i_b, row, i_hv, first_v], full, v)
        stage, phase = advance(stage, phase, 2)
