"""The fused forward of a sequence, for compute capability 9.0 (docs/gluon.md).

A program owns the columns of one or two states, BV each, of one sequence, or segment of one, and
value head. Its warps have five roles, which exchange chunks through rings of buffers in shared
memory:

    state      BV columns of the state in registers, P', x, u, o and the update (state.py)
    triangles  T of each chunk, which needs no state (triangles.py), and the norm of k
    gates      factors of the tokens, and the frame of the state (gates.py)
    loader     copies q, k and v of a chunk to shared memory, by TMA (loader.py)
    norm       two warps that normalise q there, if the call asks for it (norms.py)

Each buffer has a barrier that says it is full. The states are the last to read a chunk, so one more
barrier for each stage, at which only they arrive, says that all buffers of that chunk are empty.

PART: whole sequences, or a part of a call in segments (segments.py). The states of maps begin with
zeros or with columns of the identity, for which columns of v beyond V are zeros; there is no o.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gdn_triton.chunk.triton.hopper import places
from gdn_triton.chunk.triton.hopper.gates import EXPONENTS, FLAGS, VECTORS, gates_walk
from gdn_triton.chunk.triton.hopper.loader import loader_walk
from gdn_triton.chunk.triton.hopper.names import CHUNK
from gdn_triton.chunk.triton.hopper.norms import NORM_WARPS, norm_walk
from gdn_triton.chunk.triton.hopper.roles import run_roles, run_wide_roles
from gdn_triton.chunk.triton.hopper.state import state_walk
from gdn_triton.chunk.triton.hopper.tiles import (
    gates_tiles,
    loader_tiles,
    norm_tiles,
    state_tiles,
    tile_barriers,
    triangles_tiles,
)
from gdn_triton.chunk.triton.hopper.triangles import BLOCKED_TILE, triangles_walk
from gdn_triton.chunk.triton.hopper.wide import (
    keys_role,
    pairs_role,
    queries_barriers,
    queries_role,
    wide_state_role,
)


@gluon.jit(
    do_not_specialize=[
        *("scale", "T", "N", "NS", "first", "segment", "every", "M"),
        *("stride_gb", "stride_betab", "stride_ob"),
    ]
)
def hopper_fwd_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    h0_desc,
    g,
    beta,
    A_log,
    dt_bias,
    h0,
    o,
    ht,
    starts,
    shifts,
    windows,
    cu_seqlens,
    read_slots,
    write_slots,
    has_state,
    checkpoints,
    checkpoint_slots,
    taken,
    scale,
    T,
    N,
    NS,
    first,
    segment,
    every,
    M,
    H,
    HV,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_betab,
    stride_betat,
    stride_betah,
    stride_h0n,
    stride_h0h,
    stride_h0k,
    stride_h0v,
    stride_htn,
    stride_hth,
    stride_htk,
    stride_htv,
    stride_cn,
    stride_ch,
    stride_ck,
    stride_cv,
    stride_ob,
    stride_ot,
    stride_oh,
    RCP_LN2: gl.constexpr,
    FLOOR: gl.constexpr,
    THRESHOLD: gl.constexpr,
    BETA_FACTOR: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    STATES: gl.constexpr,
    STAGES: gl.constexpr,
    T_STAGES: gl.constexpr,
    STATE_REGISTERS: gl.constexpr,
    TRIANGLES_REGISTERS: gl.constexpr,
    SINGLE: gl.constexpr,
    USE_SIGMOID: gl.constexpr,
    BN: gl.constexpr,
    BS: gl.constexpr,
    PART: gl.constexpr,
    ORDERED: gl.constexpr,
    LAST_SKIPPED: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    NORM: gl.constexpr,
    DEALT: gl.constexpr,
    LOADED: gl.constexpr,
    LINES: gl.constexpr,
    EPS: gl.constexpr,
    num_warps: gl.constexpr,
):
    OUTPUT: gl.constexpr = PART != "maps"
    IN_SEGMENTS: gl.constexpr = PART != "whole" and PART != "first"
    if PART != "whole" and PART != "again":
        # The next kernel of the stream may begin when all programs of this one have.
        gdc_launch_dependents()
    if PART == "again":
        gdc_wait()
    COLUMNS: gl.constexpr = STATES * BV
    # A block of a map has columns of b, or after them columns of M.
    V_BLOCKS: gl.constexpr = (V + COLUMNS - 1) // COLUMNS
    BLOCKS: gl.constexpr = V_BLOCKS + (0 if OUTPUT else (K + COLUMNS - 1) // COLUMNS)
    dtype: gl.constexpr = k_desc.dtype
    pid = gl.program_id(0)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if DEALT:
        PLACES: gl.constexpr = 128 if ORDERED else 2
        order_s = gl.allocate_shared_memory(gl.int32, [PLACES, 1], FLAT)
        if ORDERED:
            places.find_order(order_s, cu_seqlens, N, BN, PLACES)
    else:
        block = pid % BLOCKS
        first_v = block * COLUMNS
        i_hv, i_w = pid // BLOCKS % HV, pid // BLOCKS // HV
        i_h = i_hv // (HV // H)
        # The columns that this block stores: the first, and the end. A map of keys begins with 0.
        first_out, end_out = first_v, first_v * 0 + V
        of_keys, end_next, n_rest = first_v * 0, first_v * 0, 0
        i_n, i_state = i_w, i_w
        # Of a segment: its window, and by columns whether its end differs from the next start.
        MARKS: gl.constexpr = 1 + (V + BV - 1) // BV
        WINDOWS: gl.constexpr = IN_SEGMENTS and windows is not None
        p_marks = windows + i_hv * MARKS if WINDOWS else o
        if IN_SEGMENTS:
            if PART == "again":
                if places.none_differs(i_w, p_marks, block + 1, HV * MARKS, NS, BS, IS_VARLEN):
                    return
                i_b, i_n, i_state, tokens, first_row, n_rows = places.rest_of(
                    *(i_w, p_marks, block + 1, HV * MARKS, cu_seqlens, read_slots, T, N, NS),
                    *(first, segment, BN, BS, LAST_SKIPPED, IS_VARLEN),
                )
            else:
                i_b, i_n, tokens, first_row, n_rows, is_last = places.segment_of(
                    *(i_w, cu_seqlens, read_slots, T, N, NS, first, segment),
                    *(BN, LAST_SKIPPED, IS_VARLEN),
                )
                inner = (1 - is_last) * (n_rows > 0).to(gl.int32)
                if WINDOWS:
                    p_marks += i_w * (HV * MARKS)
            if PART == "maps":
                of_keys = (block >= V_BLOCKS).to(gl.int32)
                first_out = first_v - of_keys * (V_BLOCKS * COLUMNS)
                n_rows *= inner
                if WINDOWS:
                    p_log2 = g + i_b.to(gl.int64) * stride_gb + i_hv.to(gl.int64) * stride_gh
                    first_row, n_rows = places.in_window(
                        *(p_marks, block, of_keys, first_row, n_rows, p_log2, stride_gt),
                        *(A_log, dt_bias, i_hv, RCP_LN2, FLOOR, THRESHOLD),
                    )
                end_out = gl.where(of_keys == 1, K, V)
            if PART == "later":
                end_out, end_next = is_last * V, inner * V
            if n_rows == 0:
                # The slot of a sequence that does not exist may lie past the last state.
                if PART == "later":  # The next kernel waits for this one alone, not for the fold.
                    gdc_wait()
                return
        else:
            if ORDERED:
                i_n, i_b, first_row, n_rows, n_rest = places.longest_first(
                    i_w, cu_seqlens, T, N, BN
                )
            else:
                i_b, first_row, n_rows, n_rest = places.sequence_of(
                    i_n, cu_seqlens, T, N, IS_VARLEN
                )
            i_state, tokens = i_n, n_rows * 0
        # Columns of the initial state that are not zeros; the number of the state to begin with.
        end_in = first_v * 0 + V
        i_h0, i_ht = i_state.to(gl.int64), i_n.to(gl.int64)
        if read_slots is not None and not IN_SEGMENTS:
            i_h0 = gl.load(read_slots + i_n).to(gl.int64)
            kept = (i_h0 > LAST_SKIPPED).to(gl.int32)
            n_rest += n_rows * (1 - kept)
            n_rows *= kept
            end_out *= kept
            end_in *= kept
            if has_state is not None:
                end_in *= gl.load(has_state + i_n).to(gl.int32)
        rest_row = first_row + n_rows
        next_slot = i_w + 1
        if PART == "first":
            order = (cu_seqlens, read_slots, N, NS, first, segment)
            next_slot = places.slot_of(i_n, *order, BN, LAST_SKIPPED, IS_VARLEN)
            end_next = gl.where(n_rows > first, V, 0)
            end_out *= (n_rows <= first).to(gl.int32)
            n_rows = gl.minimum(n_rows, first)
        if write_slots is not None and OUTPUT:
            i_ht = gl.load(write_slots + i_n, mask=end_out > 0, other=LAST_SKIPPED).to(gl.int64)
            end_out *= (i_ht > LAST_SKIPPED).to(gl.int32)
        n_chunks = (n_rows + CHUNK - 1) // CHUNK
    # With K above 128, queries and values have a ring of their own, whose full barrier is `ready`.
    Q_STAGES: gl.constexpr = STAGES if BK < 256 else T_STAGES
    KEYS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, BK], KEYS)
    q_s = gl.allocate_shared_memory(dtype, [Q_STAGES, CHUNK, BK], KEYS)
    v_s = gl.allocate_shared_memory(dtype, [Q_STAGES, CHUNK, COLUMNS], KEYS)
    t_s = gl.allocate_shared_memory(dtype, [T_STAGES, CHUNK, CHUNK], KEYS)
    p_s = gl.allocate_shared_memory(dtype, [T_STAGES, CHUNK, CHUNK], KEYS)
    o_s = gl.allocate_shared_memory(dtype, [STATES, CHUNK, BV], KEYS)
    a_s, x_s, blocks_s = p_s, p_s, p_s
    if BK < 256:
        a_s = gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], KEYS)
        x_s = gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], KEYS)
        blocks_s = gl.allocate_shared_memory(gl.float16, [CHUNK, CHUNK], BLOCKED_TILE)
    vectors = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], FLAT)
    exponents = gl.allocate_shared_memory(gl.int16, [STAGES * EXPONENTS, CHUNK], FLAT)
    flags = gl.allocate_shared_memory(gl.float32, [STAGES, FLAGS], FLAT)
    tile_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    gates_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ready = tile_full
    if NORM or BK == 256:
        ready = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
        for s in gl.static_range(Q_STAGES):
            mbarrier.init(ready.index(s), count=NORM_WARPS + 1 if NORM else 1)
    t_full = gl.allocate_shared_memory(gl.int64, [T_STAGES, 1], BARRIER)
    # A barrier that no role uses would be wrong: the compiler gives its memory to the arguments of
    # the roles, and the initialisation of the barrier may overwrite one of them.
    p_full = t_full
    if OUTPUT:
        p_full = gl.allocate_shared_memory(gl.int64, [T_STAGES, 1], BARRIER)
    for s in gl.static_range(STAGES):
        mbarrier.init(tile_full.index(s), count=1)
        mbarrier.init(gates_full.index(s), count=1)
        # All threads of the states arrive, and of the triangles.
        mbarrier.init(empty.index(s), count=1 if BK == 256 else (STATES + DEALT) * 128)
    for s in gl.static_range(T_STAGES):
        mbarrier.init(t_full.index(s), count=1)
        if OUTPUT:
            mbarrier.init(p_full.index(s), count=1)
    # TMA arrives at these barriers, and overwrites memory through which sums of the whole block
    # have passed, as in `segment_of`.
    fence_async_shared()

    fulls = (ready, gates_full, t_full, p_full)
    states = (k_s, q_s, v_s, t_s, p_s, o_s, vectors, exponents, flags, empty)
    inverses = (k_s, t_s, vectors, flags, tile_full, ready, gates_full, t_full, empty)
    scratch = (a_s, x_s, blocks_s, exponents)
    tiles = (k_s, q_s, v_s, tile_full, empty)
    norms = (q_s, tile_full, ready)
    factors = (vectors, exponents, flags, gates_full, empty)
    if DEALT:
        dealt = tile_barriers(STATES, NORM)
        run_roles(
            (
                state_tiles,
                (
                    states,
                    fulls,
                    dealt,
                    o_desc,
                    T,
                    (o, h0, ht),
                    (read_slots, write_slots, has_state),
                    (checkpoints, checkpoint_slots, every, M),
                    (stride_ob, stride_ot, stride_oh),
                    (stride_h0n, stride_h0h, stride_h0k, stride_h0v),
                    (stride_htn, stride_hth, stride_htk, stride_htv),
                    (stride_cn, stride_ch, stride_ck, stride_cv),
                ),
                (dtype, K, V, BK, BV, STATES, STAGES, T_STAGES),
                (LAST_SKIPPED, IS_VARLEN, LOADED, LINES),
            ),
            (
                triangles_tiles,
                (inverses, scratch, dealt),
                (dtype, BK, STAGES, T_STAGES),
                (IS_VARLEN, NORM, EPS, LOADED),
            ),
            (
                gates_tiles,
                (
                    factors,
                    dealt,
                    scale,
                    (g, beta, A_log, dt_bias),
                    (stride_gb, stride_gt, stride_gh, stride_betab, stride_betat, stride_betah),
                ),
                (dtype, RCP_LN2, FLOOR, THRESHOLD, STAGES),
                (USE_SIGMOID, BETA_FACTOR, IS_VARLEN, LOADED),
            ),
            (
                loader_tiles,
                (
                    tiles,
                    dealt,
                    order_s,
                    pid,
                    gl.num_programs(0),
                    (taken, cu_seqlens, read_slots),
                    (T, N, HV, HV // H),
                    (q_desc, k_desc, v_desc, h0_desc),
                ),
                (dtype, BK, COLUMNS, BLOCKS, STAGES),
                (ORDERED, LAST_SKIPPED, IS_VARLEN, LOADED),
            ),
            (norm_tiles, (norms, dealt), (dtype, BK, STAGES), (NORM, EPS)),
            *(STATES, STATE_REGISTERS, TRIANGLES_REGISTERS, SINGLE),
        )
    else:
        batch, head = i_b.to(gl.int64), i_hv.to(gl.int64)
        walk_row = first_row.to(gl.int64)
        p_g = g + batch * stride_gb + walk_row * stride_gt + head * stride_gh
        p_beta = beta + batch * stride_betab + walk_row * stride_betat + head * stride_betah
        p_o = o + batch * stride_ob + head * stride_oh + first_v
        # A tuple with a name holds no None, so an unused pointer stands in its place.
        p_h0 = h0 + i_h0 * stride_h0n + head * stride_h0h if h0 is not None else o
        p_ht = ht + i_ht * stride_htn + head * stride_hth if ht is not None else o
        p_next = o
        if PART == "first" or PART == "later":
            p_next = starts + (next_slot.to(gl.int64) * HV + head) * (K * V)
        MAP: gl.constexpr = K * (K if K > V else V)
        p_end = shifts + (i_w.to(gl.int64) * HV + head) * MAP if PART == "later" else o
        p_stops, p_stop_slots = o, cu_seqlens if IS_VARLEN else g
        first_stop = i_h0
        if checkpoints is not None:
            p_stops = checkpoints + head * stride_ch
            first_stop = (batch * T + first_row - tokens) // every
            if checkpoint_slots is not None:
                p_stop_slots = checkpoint_slots + gl.minimum(i_n, N - 1).to(gl.int64) * M
        if not OUTPUT:
            slot = i_w.to(gl.int64) * HV + head
            stride_htk = gl.where(of_keys == 1, K, V)
            # b goes where the fold makes the next segment's start of it.
            p_ht = gl.where(of_keys == 1, shifts + slot * MAP, starts + (slot + HV) * (K * V))

        gate_inputs = (p_g, p_beta, stride_gt, stride_betat)
        p_A_log = A_log + i_hv if A_log is not None else g
        p_dt_bias = dt_bias + i_hv if dt_bias is not None else g

        walk = (n_chunks, n_rows, n_rest)
        strides = (stride_ot, stride_h0k, stride_h0v, stride_htk, stride_htv)
        heads = (i_b, first_row, i_h, i_hv, first_v)
        columns = (first_v, first_out, end_in, end_out, of_keys, end_next)
        place = (i_b, first_row, i_hv) + columns + (rest_row,)
        ends = (p_o, p_h0, p_ht, p_next, p_end, p_marks)
        stops = (p_stops, p_stop_slots, first_stop, tokens, every, M)
        stops = stops + (stride_cn, stride_ck, stride_cv)
        HAS_H0: gl.constexpr = h0 is not None
        STORE_HT: gl.constexpr = ht is not None or not OUTPUT
        HAS_GATE: gl.constexpr = A_log is not None
        HAS_DT_BIAS: gl.constexpr = dt_bias is not None
        HAS_STOPS: gl.constexpr = checkpoints is not None and OUTPUT
        HAS_STOP_SLOTS: gl.constexpr = checkpoint_slots is not None
        ZERO_ROWS: gl.constexpr = (IS_VARLEN or read_slots is not None) and not IN_SEGMENTS
        if BK == 256:
            q_empty = queries_barriers()
            run_wide_roles(
                (
                    wide_state_role,
                    (states, fulls, tile_full, q_empty, o_desc, ends, stops, strides, place, walk),
                    (dtype, K, V, BK, BV, STAGES, T_STAGES, HAS_H0),
                    (STORE_HT, HAS_STOPS, HAS_STOP_SLOTS, LAST_SKIPPED, ZERO_ROWS, IS_VARLEN),
                ),
                (
                    pairs_role,
                    (states, fulls, tile_full, q_empty, walk),
                    (dtype, BK, STAGES),
                    (IS_VARLEN,),
                ),
                (
                    gates_walk,
                    (factors, gate_inputs, p_A_log, p_dt_bias, walk, (0, 0), scale),
                    (dtype, RCP_LN2, FLOOR, THRESHOLD, STAGES),
                    (HAS_GATE, HAS_DT_BIAS, USE_SIGMOID, BETA_FACTOR),
                ),
                (keys_role, (k_s, tile_full, empty, k_desc, heads, walk), (dtype, BK, STAGES), ()),
                (
                    queries_role,
                    (q_s, v_s, ready, q_empty, q_desc, v_desc, heads, walk),
                    (dtype, BK, BV),
                    (),
                ),
                *(TRIANGLES_REGISTERS, SINGLE),
            )
        else:
            run_roles(
                (
                    state_walk,
                    (states, fulls, o_desc, ends, stops, strides, place, walk, (0, 0, 0, 0, 0)),
                    (dtype, K, V, BK, BV, STATES, STAGES, T_STAGES, PART, WINDOWS, HAS_H0),
                    (STORE_HT, HAS_STOPS, HAS_STOP_SLOTS, LAST_SKIPPED, ZERO_ROWS, IS_VARLEN),
                ),
                (
                    triangles_walk,
                    (inverses, scratch, walk, (0, 0, 0, 0)),
                    (dtype, BK, STAGES, T_STAGES),
                    (IS_VARLEN, True, NORM, EPS),
                ),
                (
                    gates_walk,
                    (factors, gate_inputs, p_A_log, p_dt_bias, walk, (0, 0), scale),
                    (dtype, RCP_LN2, FLOOR, THRESHOLD, STAGES),
                    (HAS_GATE, HAS_DT_BIAS, USE_SIGMOID, BETA_FACTOR),
                ),
                (
                    loader_walk,
                    (tiles, (q_desc, k_desc, v_desc), heads, walk, (0, 0)),
                    (dtype, BK, COLUMNS, STAGES),
                    (OUTPUT,),
                ),
                (norm_walk, (norms, walk, (0, 0)), (dtype, BK, STAGES), (NORM, EPS)),
                *(STATES, STATE_REGISTERS, TRIANGLES_REGISTERS, SINGLE),
            )
        if PART == "first":  # The next kernel waits for this one alone, not for that of the maps.
            if pid == gl.num_programs(0) - 1:
                gdc_wait()
