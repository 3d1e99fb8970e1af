"""How the roles of a block that walks whole sequences go from one tile to the next. A tile is a
sequence, a value head and a block of columns of V.

The loader finds the tiles of its block and announces the numbers of each in shared memory. Loads,
gates and triangles of the next tile begin while the states still walk the present one. Of a packed
call a block takes the next tile when the loads of the present one have been issued, the longest
first, from a counter of all blocks; the tiles of a padded call are equally long, and each block has
every n-th.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gdn_triton._triton.views import viewed
from gdn_triton.chunk.triton.hopper.gates import gates_walk
from gdn_triton.chunk.triton.hopper.loader import loader_walk
from gdn_triton.chunk.triton.hopper.names import (
    CHUNK,
    advance,
    joined,
    load_tile,
    opaque,
)
from gdn_triton.chunk.triton.hopper.norms import NORM_WARPS, norm_walk
from gdn_triton.chunk.triton.hopper.state import state_walk
from gdn_triton.chunk.triton.hopper.triangles import triangles_walk

# The tiles that may be announced at once.
TILE_STAGES = gl.constexpr(4)
# The numbers of a tile: its value head, or -1 after the last tile; its sequence; the block of
# columns of V; the first row, the rows, and the rows of no sequence that follow.
HEAD, SEQUENCE, BLOCK = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
ROW, ROWS, REST = gl.constexpr(3), gl.constexpr(4), gl.constexpr(5)
NUMBERS = gl.constexpr(8)


@gluon.jit
def number_of(numbers, n: gl.constexpr):
    """Element n of a vector of which every thread holds all elements (`scalar_of`)."""
    o_n = gl.arange(0, numbers.shape[0], numbers.type.layout)
    return gl.sum(gl.where(o_n == n, numbers, 0), 0)


@gluon.jit
def enter_tile(dealt, turn):
    """The numbers of the block's tile number ``turn``, once the loader has announced them."""
    tiles_s, tile_known, tile_read = dealt
    ALL: gl.constexpr = gl.BlockedLayout([NUMBERS], [32], [gl.num_warps()], [0])
    slot = turn % TILE_STAGES
    mbarrier.wait(tile_known.index(slot), (turn // TILE_STAGES) & 1)
    numbers = tiles_s.index(slot).load(ALL)
    # An arrival does not wait for loads. This one needs the loaded numbers, of which none is below
    # -1.
    slot += (gl.min(numbers, 0) < -1).to(gl.int32)
    mbarrier.arrive(tile_read.index(slot), count=1)
    i_hv, i_n = number_of(numbers, HEAD), number_of(numbers, SEQUENCE)
    block, first_row = number_of(numbers, BLOCK), number_of(numbers, ROW)
    return i_hv, i_n, block, first_row, number_of(numbers, ROWS), number_of(numbers, REST)


@gluon.jit
def announce_tile(
    dealt,
    turn,
    tile,
    order_s,
    tables,
    sizes,
    BLOCKS: gl.constexpr,
    ORDERED: gl.constexpr,
    LAST_SKIPPED: gl.constexpr,
    IS_VARLEN: gl.constexpr,
):
    """Announces a tile by its number in the call, and returns its numbers."""
    tiles_s, tile_known, tile_read = dealt
    T, N, HV, _ = sizes
    _, cu_seqlens, read_slots = tables
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    ALL: gl.constexpr = gl.BlockedLayout([NUMBERS], [32], [1], [0])
    block = tile % BLOCKS
    i_hv = tile // BLOCKS % HV
    i_w = tile // BLOCKS // HV
    i_hv = gl.where(i_w < N, i_hv, -1)
    i_n = gl.minimum(i_w, N - 1)
    if ORDERED:
        i_n = gl.sum(order_s.index(i_n).load(ONE), 0)
    first_row = i_n * 0
    end = first_row + T
    if IS_VARLEN:
        first_row = gl.load(cu_seqlens + i_n).to(gl.int32)
        end = gl.load(cu_seqlens + i_n + 1).to(gl.int32)
    n_rows = end - first_row
    n_rest = i_n * 0
    if IS_VARLEN:
        n_rest = gl.where(i_n == N - 1, T - end, 0)
    if read_slots is not None:
        kept = (gl.load(read_slots + i_n) > LAST_SKIPPED).to(gl.int32)
        n_rest += n_rows * (1 - kept)
        n_rows *= kept
    o_n = gl.arange(0, NUMBERS, ALL)
    numbers = gl.where(o_n == HEAD, i_hv, gl.where(o_n == SEQUENCE, i_n, block))
    numbers = gl.where(o_n == ROW, first_row, numbers)
    numbers = gl.where(o_n == ROWS, n_rows, gl.where(o_n == REST, n_rest, numbers))
    slot = turn % TILE_STAGES
    mbarrier.wait(tile_read.index(slot), ((turn // TILE_STAGES) & 1) ^ 1)
    tiles_s.index(slot).store(numbers)
    mbarrier.arrive(tile_known.index(slot), count=1)
    return i_hv, i_n, block, first_row, n_rows


@gluon.jit
def loader_tiles(
    memory,
    dealt,
    order_s,
    pid,
    blocks,
    tables,
    sizes,
    descs,
    dtype: gl.constexpr,
    BK: gl.constexpr,
    COLUMNS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    ORDERED: gl.constexpr,
    LAST_SKIPPED: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    LOADED: gl.constexpr,
):
    """sizes: T, N, HV and the number of value heads of a key head."""
    k_s, q_s, _, tile_full, empty = memory
    taken, _, _ = tables
    _, _, _, G = sizes
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 4)
    zero = gl.to_tensor(0)
    stage, phase, turn = zero, zero, zero
    tile = pid
    i_hv, i_n, block, first_row, n_rows = announce_tile(
        *(dealt, turn, tile, order_s, tables, sizes),
        *(BLOCKS, ORDERED, LAST_SKIPPED, IS_VARLEN),
    )
    while i_hv >= 0:
        i_b = i_n
        if IS_VARLEN:
            i_b = i_n * 0
        place = (i_b, first_row, i_hv // G, i_hv, block * COLUMNS)
        walk = ((n_rows + CHUNK - 1) // CHUNK, n_rows, n_rows)
        if LOADED:
            for n in gl.static_range(2):
                mbarrier.wait(empty.index(stage), phase ^ 1)
                full = tile_full.index(stage)
                mbarrier.expect(full, 32768)
                upper = viewed(k_s.index(stage), gl.float32, [1, 1, 64, 64], ROWS)
                lower = viewed(q_s.index(stage), gl.float32, [1, 1, 64, 64], ROWS)
                column = block * COLUMNS + n * 64
                load_tile(descs[3], [i_n, i_hv, 0, column], full, upper)
                load_tile(descs[3], [i_n, i_hv, 64, column], full, lower)
                stage, phase = advance(stage, phase, STAGES)
        stage, phase = loader_walk(
            *(memory, (descs[0], descs[1], descs[2]), place, walk, (stage, phase)),
            *(dtype, BK, COLUMNS, STAGES, True),
        )
        turn += 1
        if taken is not None:
            tile = blocks + gl.atomic_add(taken, 1, sem="relaxed")
        else:
            tile += blocks
        i_hv, i_n, block, first_row, n_rows = announce_tile(
            *(dealt, turn, tile, order_s, tables, sizes),
            *(BLOCKS, ORDERED, LAST_SKIPPED, IS_VARLEN),
        )


@gluon.jit
def gates_tiles(
    memory,
    dealt,
    scale,
    inputs,
    strides,
    dtype: gl.constexpr,
    RCP_LN2: gl.constexpr,
    FLOOR: gl.constexpr,
    THRESHOLD: gl.constexpr,
    STAGES: gl.constexpr,
    USE_SIGMOID: gl.constexpr,
    BETA_FACTOR: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    LOADED: gl.constexpr,
):
    _, _, _, gates_full, empty = memory
    g, beta, A_log, dt_bias = inputs
    stride_gb, stride_gt, stride_gh, stride_betab, stride_betat, stride_betah = strides
    zero = gl.to_tensor(0)
    stage, phase, turn = zero, zero, zero
    i_hv, i_n, _, first_row, n_rows, _ = enter_tile(dealt, turn)
    while i_hv >= 0:
        row, head = first_row.to(gl.int64), i_hv.to(gl.int64)
        p_g = g + row * stride_gt + head * stride_gh
        p_beta = beta + row * stride_betat + head * stride_betah
        if not IS_VARLEN:
            p_g += i_n.to(gl.int64) * stride_gb
            p_beta += i_n.to(gl.int64) * stride_betab
        p_A_log = A_log + i_hv if A_log is not None else g
        p_dt_bias = dt_bias + i_hv if dt_bias is not None else g
        walk = ((n_rows + CHUNK - 1) // CHUNK, n_rows, n_rows)
        own = (p_g, p_beta, stride_gt, stride_betat)
        if LOADED:
            for _ in gl.static_range(2):
                mbarrier.wait(empty.index(stage), phase ^ 1)
                mbarrier.arrive(gates_full.index(stage), count=1)
                stage, phase = advance(stage, phase, STAGES)
        stage, phase = gates_walk(
            *(memory, own, p_A_log, p_dt_bias, walk, (stage, phase), scale),
            *(dtype, RCP_LN2, FLOOR, THRESHOLD, STAGES),
            *(A_log is not None, dt_bias is not None, USE_SIGMOID, BETA_FACTOR),
        )
        turn += 1
        i_hv, i_n, _, first_row, n_rows, _ = enter_tile(dealt, turn)


@gluon.jit
def triangles_tiles(
    memory,
    scratch,
    dealt,
    dtype: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    T_STAGES: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    NORM: gl.constexpr,
    EPS: gl.constexpr,
    LOADED: gl.constexpr,
):
    zero = gl.to_tensor(0)
    _, _, _, _, tile_full, _, _, _, empty = memory
    stage, phase, t_stage, done, turn = zero, zero, zero, zero, zero
    i_hv, _, _, _, n_rows, _ = enter_tile(dealt, turn)
    while i_hv >= 0:
        if LOADED:
            for _ in gl.static_range(2):
                mbarrier.wait(tile_full.index(stage), phase)
                mbarrier.arrive(empty.index(stage), count=128)
                stage, phase = advance(stage, phase, STAGES)
            done += 2
        # Without a chunk there are no keys that are not used by others.
        if n_rows > 0:
            walk = ((n_rows + CHUNK - 1) // CHUNK, n_rows, n_rows)
            stage, phase, t_stage, done = triangles_walk(
                *(memory, scratch, walk, (stage, phase, t_stage, done)),
                *(dtype, BK, STAGES, T_STAGES, IS_VARLEN, True, NORM, EPS, True),
            )
        turn += 1
        i_hv, _, _, _, n_rows, _ = enter_tile(dealt, turn)


@gluon.jit
def norm_tiles(
    memory,
    dealt,
    dtype: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    NORM: gl.constexpr,
    EPS: gl.constexpr,
    NUMBER: gl.constexpr,
):
    if NORM:
        zero = gl.to_tensor(0)
        stage, phase, turn = zero, zero, zero
        i_hv, _, _, _, n_rows, _ = enter_tile(dealt, turn)
        while i_hv >= 0:
            walk = ((n_rows + CHUNK - 1) // CHUNK, n_rows, n_rows)
            stage, phase = norm_walk(
                *(memory, walk, (stage, phase), dtype, BK, STAGES, NORM, EPS, NUMBER)
            )
            turn += 1
            i_hv, _, _, _, n_rows, _ = enter_tile(dealt, turn)


@gluon.jit
def state_tiles(
    memory,
    fulls,
    dealt,
    o_desc,
    T,
    states,
    slots,
    checkpoints,
    o_strides,
    h0_strides,
    ht_strides,
    stop_strides,
    dtype: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    STATES: gl.constexpr,
    STAGES: gl.constexpr,
    T_STAGES: gl.constexpr,
    LAST_SKIPPED: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    LOADED: gl.constexpr,
    LINES: gl.constexpr,
    NUMBER: gl.constexpr,
):
    k_s, q_s, _, _, _, _, _, _, _, empty = memory
    tile_full, gates_full, _, _ = fulls
    o, h0, ht = states
    read_slots, write_slots, has_state = slots
    stop_states, stop_slots, every, M = checkpoints
    stride_ob, stride_ot, stride_oh = o_strides
    stride_cn, stride_ch, stride_ck, stride_cv = stop_strides
    stride_h0n, stride_h0h, stride_h0k, stride_h0v = h0_strides
    stride_htn, stride_hth, stride_htk, stride_htv = ht_strides
    zero = gl.to_tensor(0)
    stage, phase, t_stage, t_phase, done, turn = zero, zero, zero, zero, zero, zero
    i_hv, i_n, block, first_row, n_rows, n_rest = enter_tile(dealt, turn)
    while i_hv >= 0:
        i_b = i_n
        if IS_VARLEN:
            i_b = i_n * 0
        first_v = block * (STATES * BV)
        end_in, end_out = i_n * 0 + V, i_n * 0 + V
        i_h0, i_ht = i_n.to(gl.int64), i_n.to(gl.int64)
        if read_slots is not None:
            i_h0 = gl.load(read_slots + i_n).to(gl.int64)
            kept = (i_h0 > LAST_SKIPPED).to(gl.int32)
            end_in *= kept
            end_out *= kept
            if has_state is not None:
                end_in *= gl.load(has_state + i_n).to(gl.int32)
        if write_slots is not None:
            i_ht = gl.load(write_slots + i_n, mask=end_out > 0, other=LAST_SKIPPED).to(gl.int64)
            end_out *= (i_ht > LAST_SKIPPED).to(gl.int32)
        batch, head = i_b.to(gl.int64), i_hv.to(gl.int64)
        p_o = o + batch * stride_ob + head * stride_oh + first_v
        p_h0 = h0 + i_h0 * stride_h0n + head * stride_h0h if h0 is not None else o
        p_ht = ht + i_ht * stride_htn + head * stride_hth if ht is not None else o
        p_stops, p_stop_slots, first_stop = o, o, i_h0
        if stop_states is not None:
            p_stops = stop_states + head * stride_ch
            first_stop = (batch * T + first_row) // every
            if stop_slots is not None:
                p_stop_slots = stop_slots + i_n.to(gl.int64) * M
        nothing = first_row * 0
        start = nothing
        if LOADED:
            STATE: gl.constexpr = gl.NVMMADistributedLayout(
                [3, 0], [gl.num_warps(), 1], [16, BK, 16]
            )
            HALF: gl.constexpr = gl.NVMMADistributedLayout(
                [3, 0], [gl.num_warps(), 1], [16, 64, 16]
            )
            SQUARE: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
            for n in gl.static_range(2):
                mbarrier.wait(gates_full.index(stage), phase)
                mbarrier.wait(tile_full.index(stage), phase)
                own = stage
                if n == NUMBER:
                    upper = viewed(k_s.index(stage), gl.float32, [64, 64], SQUARE)
                    lower = viewed(q_s.index(stage), gl.float32, [64, 64], SQUARE)
                    start = joined(
                        upper.permute((1, 0)).load(HALF), lower.permute((1, 0)).load(HALF)
                    )
                    start = gl.convert_layout(start, STATE, assert_trivial=True)
                    # An arrival does not wait for loads. This one needs the loaded values.
                    most = gl.max(gl.max(gl.abs(start), 1), 0)
                    own += (opaque(most) < 0).to(gl.int32)
                mbarrier.arrive(empty.index(own), count=128)
                stage, phase = advance(stage, phase, STAGES)
            done += 2
        rest_row = first_row + n_rows
        columns = (first_v, first_v, end_in, end_out, nothing, nothing)
        place = (i_b, first_row, i_hv) + columns + (rest_row,)
        ends = (p_o, p_h0, p_ht, o, o, o)
        stops = (p_stops, p_stop_slots, first_stop, nothing, every, M)
        stops = stops + (stride_cn, stride_ck, stride_cv)
        walk = ((n_rows + CHUNK - 1) // CHUNK, n_rows, n_rest)
        stage, phase, t_stage, t_phase, done = state_walk(
            *(memory, fulls, o_desc, ends, stops),
            *((stride_ot, stride_h0k, stride_h0v, stride_htk, stride_htv), place, walk),
            *((stage, phase, t_stage, t_phase, done), dtype, K, V, BK, BV),
            *(STATES, STAGES, T_STAGES, "whole", False, h0 is not None, ht is not None),
            *(stop_states is not None, stop_slots is not None, LAST_SKIPPED),
            *(IS_VARLEN or read_slots is not None, IS_VARLEN, NUMBER, LINES, start, LOADED),
        )
        turn += 1
        i_hv, i_n, block, first_row, n_rows, n_rest = enter_tile(dealt, turn)


@gluon.jit
def tile_barriers(STATES: gl.constexpr, NORM: gl.constexpr):
    """Memory of the tiles that are announced."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    READERS: gl.constexpr = STATES + 2 + (NORM_WARPS if NORM else 0)
    tiles_s = gl.allocate_shared_memory(gl.int32, [TILE_STAGES, NUMBERS], FLAT)
    tile_known = gl.allocate_shared_memory(gl.int64, [TILE_STAGES, 1], BARRIER)
    tile_read = gl.allocate_shared_memory(gl.int64, [TILE_STAGES, 1], BARRIER)
    for s in gl.static_range(TILE_STAGES):
        mbarrier.init(tile_known.index(s), count=1)
        mbarrier.init(tile_read.index(s), count=READERS)
    return tiles_s, tile_known, tile_read
