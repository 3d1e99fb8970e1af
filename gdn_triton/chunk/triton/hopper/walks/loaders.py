"""The loader warps of the walks, which copy tiles of each chunk to shared memory, by TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from gdn_triton._triton.views import viewed
from gdn_triton.chunk.triton.hopper.names import CHUNK, advance, load_tile


@gluon.jit
def clear_rows(tile, first, COLUMNS: gl.constexpr):
    """Sets the rows of a tile [64, COLUMNS] from ``first`` on to zero. They belong to another
    sequence, whose NaN would survive a product with 0."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_t = gl.arange(0, 8, gl.SliceLayout(1, LANES))
    for c in gl.static_range(COLUMNS // 64):
        part = tile.slice(c * 64, 64, 1)
        for r in gl.static_range(CHUNK // 8):
            piece = part.slice(r * 8, 8, 0)
            x = piece.load(LANES)
            piece.store(gl.where((o_t + r * 8 < first)[:, None], x, gl.zeros_like(x)))


@gluon.jit
def copies_at(full, n_bytes, stage, left, STAGES: gl.constexpr, IS_VARLEN: gl.constexpr):
    """Returns the barrier at which copies of ``n_bytes`` to a stage end: one of its own, number
    STAGES, for the last chunk of a packed sequence, whose rows past the end are then cleared."""
    number = stage
    if IS_VARLEN:
        number = gl.where(left < CHUNK, STAGES, stage)
    mbarrier.expect(full.index(number), n_bytes)
    return full.index(number)


@gluon.jit
def back_loader_role(
    memory,
    descs,
    heads,
    walk,
    dtype: gl.constexpr,
    BK: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    Q_STAGES: gl.constexpr,
):
    q_s, k_s, do_s, k_full, q_full, empty = memory
    q_desc, k_desc, do_desc = descs
    i_b, first_row, i_h, i_hv, first_v = heads
    n_chunks, n_rows, _ = walk
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    q_stage = gl.to_tensor(0)
    for i in range(n_chunks):
        start = (n_chunks - 1 - i) * CHUNK
        row = first_row + start
        left = n_rows - start
        mbarrier.wait(empty.index(stage), phase ^ 1)
        full = copies_at(k_full, BK * CHUNK * 2, stage, left, STAGES, IS_VARLEN)
        k = viewed(k_s.index(stage), dtype, [1, CHUNK, 1, BK], ROWS)
        load_tile(k_desc, [i_b, row, i_h, 0], full, k)
        # The states have read q and do of chunk i - Q_STAGES.
        past = gl.maximum(i - Q_STAGES, 0)
        past_phase = (past // STAGES) & 1
        mbarrier.wait(empty.index(past % STAGES), past_phase, pred=i >= Q_STAGES)
        full = copies_at(q_full, (BK + COLUMNS) * CHUNK * 2, q_stage, left, Q_STAGES, IS_VARLEN)
        do = viewed(do_s.index(q_stage), dtype, [1, CHUNK, 1, COLUMNS], ROWS)
        q = viewed(q_s.index(q_stage), dtype, [1, CHUNK, 1, BK], ROWS)
        load_tile(q_desc, [i_b, row, i_h, 0], full, q)
        load_tile(do_desc, [i_b, row, i_hv, first_v], full, do)
        if IS_VARLEN:
            if left < CHUNK:
                mbarrier.wait(k_full.index(STAGES), 0)
                mbarrier.wait(q_full.index(Q_STAGES), 0)
                clear_rows(k_s.index(stage), left, BK)
                clear_rows(q_s.index(q_stage), left, BK)
                clear_rows(do_s.index(q_stage), left, COLUMNS)
                fence_async_shared()
                mbarrier.arrive(k_full.index(stage), count=1)
                mbarrier.arrive(q_full.index(q_stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
        q_stage = (q_stage + 1) % Q_STAGES


@gluon.jit
def forward_loader_role(
    memory,
    descs,
    heads,
    walk,
    dtype: gl.constexpr,
    BK: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    IS_VARLEN: gl.constexpr,
):
    k_s, v_s, k_full, empty = memory
    k_desc, v_desc = descs
    i_b, first_row, i_h, i_hv, first_v = heads
    n_chunks, n_rows, _ = walk
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for i in range(n_chunks):
        row = first_row + i * CHUNK
        left = n_rows - i * CHUNK
        mbarrier.wait(empty.index(stage), phase ^ 1)
        full = copies_at(k_full, (BK + COLUMNS) * CHUNK * 2, stage, left, STAGES, IS_VARLEN)
        k = viewed(k_s.index(stage), dtype, [1, CHUNK, 1, BK], ROWS)
        v = viewed(v_s.index(stage), dtype, [1, CHUNK, 1, COLUMNS], ROWS)
        load_tile(k_desc, [i_b, row, i_h, 0], full, k)
        load_tile(v_desc, [i_b, row, i_hv, first_v], full, v)
        if IS_VARLEN:
            if left < CHUNK:
                mbarrier.wait(k_full.index(STAGES), 0)
                clear_rows(k_s.index(stage), left, BK)
                clear_rows(v_s.index(stage), left, COLUMNS)
                fence_async_shared()
                mbarrier.arrive(k_full.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
