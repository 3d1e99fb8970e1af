"""The state warps: columns of a state through all chunks of a sequence, their o, and P'.

All matrices are transposed: rows are channels of V, and columns are channels of K in the state and
tokens elsewhere. The fp32 state is the accumulator of its own update and, rounded, the register
operand of its reads. gates.py explains the frame in which the state is stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from gdn_triton._triton.views import viewed
from gdn_triton.chunk.triton.hopper.gates import (
    C_VECTOR,
    COLUMN_EXPONENTS,
    D_VECTOR,
    DECAY,
    END,
    ENTER,
    EXPONENTS,
    F_VECTOR,
    R_VECTOR,
    SCORE_EXPONENTS,
    SCORE_VECTOR,
    STEEP,
    VECTORS,
)
from gdn_triton.chunk.triton.hopper.names import (
    CHUNK,
    COPIES,
    ONE,
    OPERAND,
    PRODUCT,
    TOKEN,
    advance,
    halves,
    here,
    opaque,
    power,
    rounded,
    scalar_of,
    store_tile,
    times_power,
)

# The largest difference between states that count as equal, relative to the largest entry. Two
# walks of the same tokens round differently where their frames differ, and end 2^-8 apart (float16:
# 2^-11), or 2^-6 (2^-8.5) where all keys are equal.
SAME_START, SAME_START_16 = gl.constexpr(0.0625), gl.constexpr(0.015625)


@gluon.jit
def store_state(p_ht, S, first, end, stride_v, stride_k, tile, K: gl.constexpr):
    """Stores S [64, 128], whose channels of V are contiguous in memory, through a tile of 8 KB: a
    warp then stores whole lines, and not 8 channels of V of 4 channels of K."""
    LINES: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, gl.num_warps()], [0, 1])
    PIECE: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    piece_s = viewed(tile, gl.float32, [32, 64], PIECE).permute((1, 0))
    o_v = first + gl.arange(0, 64, gl.SliceLayout(1, LINES))
    left, right = halves(S)
    pieces = halves(left) + halves(right)
    for j in gl.static_range(4):
        piece_s.store(pieces[j])
        piece = piece_s.load(LINES)
        o_k = j * 32 + gl.arange(0, 32, gl.SliceLayout(0, LINES))
        stored = (o_v < end)[:, None] & (o_k < K)[None, :]
        gl.store(p_ht + (o_v[:, None] * stride_v + o_k[None, :] * stride_k), piece, mask=stored)


@gluon.jit
def store_rows(p_o, tile, stride_t, n_rows, n_columns, COLUMNS: gl.constexpr):
    """Stores the first rows and columns of a tile [64, COLUMNS] to memory."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_t = gl.arange(0, CHUNK, gl.SliceLayout(1, LANES))
    o_v = gl.arange(0, COLUMNS, gl.SliceLayout(0, LANES))
    mask = (o_t < n_rows)[:, None] & (o_v < n_columns)[None, :]
    gl.store(p_o + (o_t.to(gl.int64)[:, None] * stride_t + o_v[None, :]), tile.load(LANES), mask)


@gluon.jit
def zero_rows(p_o, stride_t, n_rows, n_columns, COLUMNS: gl.constexpr):
    """Stores zeros in the first columns of ``n_rows`` rows of memory."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_t = gl.arange(0, CHUNK, gl.SliceLayout(1, LANES))
    o_v = gl.arange(0, COLUMNS, gl.SliceLayout(0, LANES))
    zeros = gl.zeros([CHUNK, COLUMNS], p_o.dtype.element_ty, LANES)
    offsets = o_t.to(gl.int64)[:, None] * stride_t + o_v[None, :]
    for start in range(0, n_rows, CHUNK):
        mask = (o_t < n_rows - start)[:, None] & (o_v < n_columns)[None, :]
        gl.store(p_o + offsets, zeros, mask)
        p_o += CHUNK * gl.cast(stride_t, gl.int64)


@gluon.jit
def differ(a, b, limit: gl.constexpr):
    """1 if states a and b [64, BK] differ by more than the limit, relative to the largest entry of
    b in 16 rows, or if one of these numbers is not finite; else 0."""
    difference = gl.abs(a - b)
    broken = gl.max(gl.where(difference < float("inf"), 0, 1), 1)
    most = gl.max(gl.reshape(gl.max(difference, 1), [4, 16]), 1)
    largest = gl.max(gl.reshape(gl.max(gl.abs(b), 1), [4, 16]), 1)
    return gl.maximum(gl.max(broken, 0), gl.max((most > limit * largest).to(gl.int32), 0))


@gluon.jit
def scores(q, k, accumulator, vectors, base, steep, ROW_VECTOR: gl.constexpr, layout: gl.constexpr):
    """P' [64, 64] in fp32, not masked. The accumulator is overwritten. ROW_VECTOR: the exponents of
    the rows."""
    o_r = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    o_c = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    P = warpgroup_mma(q, k.permute((1, 0)), accumulator, use_acc=False, is_async=True)
    P = warpgroup_mma_wait(0, deps=[P])
    if steep > 0:
        # Masked before the power, as it may overflow above the diagonal.
        score = vectors.index(base + ROW_VECTOR).load(o_r.type.layout) * opaque(steep)
        d = vectors.index(base + D_VECTOR).load(o_c.type.layout)
        lower = (o_r + here(base * 0))[:, None] >= o_c[None, :]
        P = P * power(gl.where(lower, score[:, None] - d[None, :], 0.0))
    return P


@gluon.jit
def decayed(S, decay):
    if decay != 1.0:
        S = S * opaque(decay)
    return S


@gluon.jit
def operand_of(Sb, enter, OPERAND: gl.constexpr):
    """The rounded state as an operand. In bfloat16 it enters the chunk's frame here; in float16 the
    state has entered it before."""
    if Sb.dtype != gl.float16:
        if enter != 1.0:
            Sb = Sb * opaque(enter).to(Sb.dtype)
    return gl.convert_layout(Sb, OPERAND, assert_trivial=True)


@gluon.jit
def start_copy(desc, tile, place, COLUMNS: gl.constexpr):
    """Starts the copy of a tile [64, COLUMNS] to memory."""
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    i_b, row, i_hv, first_v = place
    fence_async_shared()
    block = viewed(tile, tile.dtype, [1, CHUNK, 1, COLUMNS], ROWS)
    store_tile(desc, [i_b, row, i_hv, first_v], block)


@gluon.jit
def store_values(
    desc,
    p,
    tile,
    place,
    left,
    stride_t,
    V: gl.constexpr,
    BV: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    COPIES_FOLLOW: gl.constexpr = False,
):
    """Stores values of a chunk, such as o, from shared memory: the whole tile, or the rows that are
    ``left`` of a sequence. place: the tile's batch entry, first row, head and first column.
    COPIES_FOLLOW: later code counts the copies that have not ended, so where no copy starts, the
    function waits for the earlier ones."""
    if IS_VARLEN:
        if left < CHUNK:
            _, row, _, first_v = place
            p_row = p + row.to(gl.int64) * stride_t
            store_rows(p_row, tile, here(stride_t), left, V - first_v, BV)
            if COPIES_FOLLOW:
                tma.store_wait(0)
        else:
            start_copy(desc, tile, place, BV)
    else:
        start_copy(desc, tile, place, BV)


@gluon.jit
def slot_of_stop(
    p_stop_slots,
    first_stop,
    row,
    M,
    V: gl.constexpr,
    HAS_STOP_SLOTS: gl.constexpr,
    LAST_SKIPPED: gl.constexpr,
):
    """The slot of checkpoint ``row`` of a sequence, and the columns of it that are stored: none of
    a slot that is skipped."""
    stop_end = gl.to_tensor(V)
    slot = first_stop + row
    if HAS_STOP_SLOTS:
        slot = gl.load(p_stop_slots + row, mask=row < M, other=LAST_SKIPPED).to(gl.int64)
        stop_end = gl.where(slot > LAST_SKIPPED, V, 0)
    return slot, stop_end


@gluon.jit
def read_error(v, x, c, f, o_t, left, IS_VARLEN: gl.constexpr):
    """x' = C v - F (k S') of a chunk (gates.py), from k S' in x."""
    x = v.to(gl.float32) * c[None, :] - x * f[None, :]
    if IS_VARLEN:
        if left < CHUNK:
            # Rows past the end belong to another sequence and may be NaN.
            x = gl.where((o_t < left)[None, :], x, 0.0)
    return x


@gluon.jit
def narrow_scores(P, exponents, stage, steep):
    """P' of a narrow chunk, from P [64, 64] of a 16-bit dtype; of another chunk P itself."""
    if steep < 0:
        at = stage * EXPONENTS
        row = exponents.index(at + SCORE_EXPONENTS).load(gl.SliceLayout(1, P.type.layout))
        column = exponents.index(at + COLUMN_EXPONENTS).load(gl.SliceLayout(0, P.type.layout))
        P = times_power(P, row[:, None], column[None, :])
    return P


@gluon.jit
def state_walk(
    memory,
    fulls,
    o_desc,
    ends,
    stops,
    strides,
    place,
    walk,
    ring,
    dtype: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    STATES: gl.constexpr,
    STAGES: gl.constexpr,
    T_STAGES: gl.constexpr,
    PART: gl.constexpr,
    WINDOWS: gl.constexpr,
    HAS_H0: gl.constexpr,
    STORE_HT: gl.constexpr,
    HAS_STOPS: gl.constexpr,
    HAS_STOP_SLOTS: gl.constexpr,
    LAST_SKIPPED: gl.constexpr,
    ZERO_ROWS: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    NUMBER: gl.constexpr,
    LINES: gl.constexpr = False,
    start=None,
    LOADED: gl.constexpr = False,
):
    k_s, q_s, v_s, t_s, p_s, o_s, vectors, exponents, flags, empty = memory
    tile_full, gates_full, t_full, p_full = fulls
    stride_ot, stride_h0k, stride_h0v, stride_htk, stride_htv = strides
    i_b, first_row, i_hv, first_v, first_out, end_in, end_out, of_keys, end_next, rest_row = place
    p_o, p_h0, p_ht, p_next, p_end, p_marks = ends
    OUTPUT: gl.constexpr = PART != "maps"
    first_v += NUMBER * BV
    first_out += NUMBER * BV
    p_o += NUMBER * BV
    p_stops, p_stop_slots, first_stop, tokens, every, M, stride_cn, stride_ck, stride_cv = stops
    n_chunks, n_rows, n_rest = walk
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    UPDATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    o_t = gl.arange(0, CHUNK, TOKEN)
    o_r = gl.arange(0, CHUNK, gl.SliceLayout(1, PRODUCT))
    o_v = first_v + gl.arange(0, BV, gl.SliceLayout(1, STATE))
    o_out = first_out + gl.arange(0, BV, gl.SliceLayout(1, STATE))
    o_k = gl.arange(0, BK, gl.SliceLayout(0, STATE))
    inside = (o_v < end_in)[:, None] & (o_k < K)[None, :]

    IS_HALF: gl.constexpr = dtype == gl.float16
    ROW_VECTOR: gl.constexpr = D_VECTOR if IS_HALF else SCORE_VECTOR
    # Every sequence begins in the frame TOP (gates.py): 2^TOP, and its inverse.
    UP: gl.constexpr = 16.0 if IS_HALF else 16777216.0
    DOWN: gl.constexpr = 0.0625 if IS_HALF else 5.9604644775390625e-08
    S = gl.zeros([BV, BK], gl.float32, STATE)
    end = gl.to_tensor(1.0)
    if PART == "later":
        # For the starts. The other warps read inputs alone, and begin before the fold has ended.
        gdc_wait()
        if WINDOWS:
            end_next = gl.where(gl.load(p_marks, mask=end_next > 0, other=0) > 0, end_next, 0)
    if HAS_H0:
        if LOADED:
            S = start
        else:
            offsets = o_v[:, None] * stride_h0v + o_k[None, :] * stride_h0k
            S = gl.load(p_h0 + offsets, mask=inside, other=0).to(gl.float32)
        S *= DOWN
        end = gl.full([], UP, gl.float32)
    if not OUTPUT:
        # 2^-TOP times columns of the identity, or zeros.
        ones = (o_out[:, None] == o_k[None, :]) & (of_keys == 1)
        S = gl.where(ones, DOWN, S)
    # The accumulator of the first product, which overwrites it. Later the registers of other dead
    # accumulators are given: zeros would be live at the same time, and spill.
    x = gl.zeros([BV, CHUNK], gl.float32, PRODUCT)
    o_tile = o_s.index(NUMBER)
    stage, phase, t_stage, t_phase, done = ring
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
        mbarrier.wait(tile_full.index(stage), phase)
        if IS_VARLEN:
            # T is written after the rows of k past the end have been set to zero (triangles.py).
            mbarrier.wait(t_full.index(t_stage), t_phase, pred=left < CHUNK)
        k = k_s.index(stage)
        q = q_s.index(stage)
        if OUTPUT:
            # Where a block has two states, each makes P' of every second chunk.
            if (done + i + NUMBER) % STATES == 0:
                if STATES > 1:
                    # The other state has read P' of chunk i - T_STAGES.
                    past = gl.maximum(done + i - T_STAGES, 0)
                    past_phase = (past // STAGES) & 1
                    mbarrier.wait(empty.index(past % STAGES), past_phase, pred=done + i >= T_STAGES)
                steep = scalar_of(numbers, STEEP)
                # With the number 0, which the assembler does not know to be 0. It would else take
                # the addresses of q from this branch in chunks without it, too (docs/tried.md).
                this = stage + (here(n_rows) < 0).to(gl.int32)
                q_here, k_here = q_s.index(this), k_s.index(this)
                x = scores(q_here, k_here, x, vectors, base, steep, ROW_VECTOR, PRODUCT)
                o_row = o_r + here(i * 0)
                P = gl.where(o_row[:, None] >= o_t[None, :], x, 0.0)
                P = narrow_scores(rounded(P, dtype), exponents, this, steep)
                p_s.index(t_stage).store(P)
                fence_async_shared()
                mbarrier.arrive(p_full.index(t_stage), count=1)
        if OUTPUT:
            # Of the last chunk's o. The compiler places a barrier of the warps after this wait, so
            # o_tile needs none, nor the products that follow the branch.
            tma.store_wait(0)
        Sb = operand_of(S.to(dtype), enter, OPERAND)
        x = warpgroup_mma(Sb, k.permute((1, 0)), x, use_acc=False, is_async=True)
        if OUTPUT and not COPIES:
            S = decayed(S, decay)
        c = vectors.index(base + C_VECTOR).load(TOKEN)
        f = vectors.index(base + F_VECTOR).load(TOKEN)
        v_tile = v_s.index(stage)
        if STATES > 1:
            v_tile = v_tile.slice(NUMBER * BV, BV, 1)
        v = v_tile.permute((1, 0)).load(PRODUCT)
        x = warpgroup_mma_wait(0, deps=[x])
        if not OUTPUT:
            # Before this wait, the assembler would insert another one for S (C7517).
            S = decayed(S, decay)
        x = read_error(v, x, c, f, o_t, left, IS_VARLEN)
        xb = gl.convert_layout(x.to(dtype), OPERAND, assert_trivial=True)
        mbarrier.wait(t_full.index(t_stage), t_phase)
        t = t_s.index(t_stage)
        p = p_s.index(t_stage)
        x = warpgroup_mma(xb, t.permute((1, 0)), x, is_async=True)
        x = warpgroup_mma_wait(0, deps=[x])
        u = x.to(dtype)
        if IS_HALF:
            # With the number 0, as above.
            same = stage + (here(n_rows) < 0).to(gl.int32)
            is_steep = scalar_of(flags.index(stage).load(ONE), STEEP)
        if OUTPUT:
            if COPIES:
                Sb = operand_of(rounded(S, dtype, AGAIN=True), enter, OPERAND)
            o = warpgroup_mma(Sb, q.permute((1, 0)), x, use_acc=False, is_async=True)
            if IS_HALF:
                o = warpgroup_mma_wait(0, deps=[o])
                if is_steep != 0:
                    d = vectors.index(same * VECTORS + D_VECTOR).load(TOKEN)
                    o = o * power(d)[None, :]
            uo = gl.convert_layout(u, OPERAND, assert_trivial=True)
            mbarrier.wait(p_full.index(t_stage), t_phase)
            o = warpgroup_mma(uo, p.permute((1, 0)), o, is_async=True)
            if COPIES:
                S = decayed(S, decay)
        if IS_HALF:
            # The factor overwrites u, because two copies of u would spill.
            if OUTPUT:
                o = warpgroup_mma_wait(0, deps=[o])
            if is_steep != 0:
                w = vectors.index(same * VECTORS + SCORE_VECTOR).load(TOKEN)
                u = (u.to(gl.float32) * power(w)[None, :]).to(dtype)
        S = warpgroup_mma(gl.convert_layout(u, UPDATE, assert_trivial=True), k, S, is_async=True)
        if OUTPUT:
            r = vectors.index(base + R_VECTOR).load(TOKEN)
            x = warpgroup_mma_wait(1, deps=[o])
            o_tile.permute((1, 0)).store((x * r[None, :]).to(dtype))
            row = first_row + i * CHUNK
            o_place = (i_b, row, i_hv, first_v)
            store_values(o_desc, p_o, o_tile, o_place, left, stride_ot, V, BV, IS_VARLEN)
        S = warpgroup_mma_wait(0, deps=[S])
        if HAS_STOPS:
            tokens += CHUNK
            if (left >= CHUNK) & (tokens % every == 0):
                row = tokens // every - 1
                slot, stop_end = slot_of_stop(
                    p_stop_slots, first_stop, row, M, V, HAS_STOP_SLOTS, LAST_SKIPPED
                )
                nothing = here(stop_end * 0)
                o_sv = o_v + nothing
                o_sk = o_k + nothing
                stored = (o_sv < stop_end)[:, None] & (o_sk < K)[None, :]
                offsets = o_sv[:, None] * stride_cv + o_sk[None, :] * stride_ck
                stop = (S * end).to(p_stops.dtype.element_ty)
                gl.store(p_stops + slot * stride_cn + offsets, stop, mask=stored)
        # Each thread arrives by itself, as `mbarrier.arrive` takes barriers of the warps before and
        # after it. No thread has copies of its own, for which this arrival would wait.
        async_copy.mbarrier_arrive(empty.index(stage), increment_count=False)
        stage, phase = advance(stage, phase, STAGES)
        t_stage, t_phase = advance(t_stage, t_phase, T_STAGES)
    tma.store_wait(0)
    if ZERO_ROWS:
        # Rows that belong to no sequence, after the last one.
        p_rest = p_o + rest_row.to(gl.int64) * stride_ot
        zero_rows(p_rest, stride_ot, n_rest, V - first_v, BV)
    if STORE_HT and LINES:
        store_state(p_ht, S * end, first_out, end_out, stride_htv, stride_htk, o_tile, K)
    if STORE_HT and not LINES:
        stored = (o_out < end_out)[:, None] & (o_k < K)[None, :]
        offsets = o_out[:, None] * stride_htv + o_k[None, :] * stride_htk
        gl.store(p_ht + offsets, (S * end).to(p_ht.dtype.element_ty), mask=stored)
    if PART == "first":
        stored = (o_v < end_next)[:, None] & (o_k < K)[None, :]
        gl.store(p_next + (o_k[None, :] * V + o_v[:, None]), S * end, mask=stored)
    if PART == "later" and WINDOWS:
        if end_next > 0:
            S = S * end
            inside = (o_v < V)[:, None] & (o_k < K)[None, :]
            offsets = o_k[None, :] * V + o_v[:, None]
            following = gl.load(p_next + offsets, mask=inside, other=0)
            differs = differ(S, following, SAME_START_16 if IS_HALF else SAME_START)
            gl.store(p_marks + (1 + first_v // BV), differs, mask=first_v < V)
            if differs > 0:
                gl.store(p_end + offsets, S, mask=inside)
    return stage, phase, t_stage, t_phase, done + n_chunks
