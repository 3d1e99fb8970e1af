"""The norm warps: x / sqrt(sum x^2 + eps) of each key and query of a chunk, in shared memory.

They rewrite the tiles that TMA has loaded, keys first, as the triangles need those first. Squares
are summed in the order of the kernel that normalises in global memory (steps/l2norm.py), so both
give the same bits: over 8 neighbours, then over sums that are 64, 32, 16 and 8 channels apart.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from gdn_triton.chunk.triton.hopper.names import CHUNK, advance, here, rounded, viewed, widened

# Each of so many warps normalises its own rows.
NORM_WARPS = gl.constexpr(2)


@gluon.jit
def sums_of_eight(x, ROWS: gl.constexpr):
    """Sums of the squares of 8 neighbours of x [ROWS, 64]."""
    x = widened(x, 0)
    return gl.sum(gl.reshape(x * x, [ROWS, 8, 8]), 2)


@gluon.jit
def factors_of(sums, EPS: gl.constexpr, ROWS: gl.constexpr):
    """1 / sqrt(sum x^2 + EPS) of each row, from sums [ROWS, 8]."""
    sums = gl.sum(gl.reshape(sums, [ROWS, 2, 4]), 1)
    sums = gl.sum(gl.reshape(sums, [ROWS, 2, 2]), 1)
    return gl.rsqrt(gl.sum(sums, 1) + EPS)


@gluon.jit
def scaled(x, factors, nothing, layout: gl.constexpr):
    factors = gl.convert_layout(factors, gl.SliceLayout(1, layout), assert_trivial=True)
    return rounded(widened(x, nothing) * factors[:, None], x.dtype)


@gluon.jit
def normalize_rows(
    tile,
    stage,
    n_rows,
    dtype: gl.constexpr,
    BK: gl.constexpr,
    NUMBER: gl.constexpr,
    STAGES: gl.constexpr,
    EPS: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Normalises this warp's rows of stage ``stage`` of ``tile`` [STAGES, CHUNK, BK], ROWS at a
    time."""
    # A tile is stored as parts of 64 columns.
    PARTS: gl.constexpr = BK // 64
    STEPS: gl.constexpr = CHUNK // ROWS
    PART: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # Eight lanes have one chunk of 16 bytes of eight rows each, in different banks.
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32]]
        if ROWS == 8
        else [[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]],
        [[1, 0], [2, 0], [4, 0], [0, 8], [0, 16]],
        [],
        [],
        [ROWS, 64],
    )
    nothing = (here(n_rows) < 0).to(gl.int32)
    parts = viewed(tile, dtype, [STAGES * PARTS * STEPS, ROWS, 64], PART)
    first = stage * (PARTS * STEPS) + NUMBER * (STEPS // NORM_WARPS)
    for i in range(STEPS // NORM_WARPS):
        left = parts.index(first + i)
        x = left.load(LAYOUT)
        sums = sums_of_eight(x, ROWS)
        if PARTS == 2:
            right = parts.index(first + i + STEPS)
            y = right.load(LAYOUT)
            sums += sums_of_eight(y, ROWS)
        factors = factors_of(sums, EPS, ROWS)
        left.store(scaled(x, factors, nothing, LAYOUT))
        if PARTS == 2:
            right.store(scaled(y, factors, nothing, LAYOUT))


@gluon.jit
def norm_role(
    memory,
    walk,
    dtype: gl.constexpr,
    BK: gl.constexpr,
    NUMBER: gl.constexpr,
    STAGES: gl.constexpr,
    OUTPUT: gl.constexpr,
    NORM: gl.constexpr,
    EPS: gl.constexpr,
    ROWS: gl.constexpr,
):
    k_s, q_s, tile_full, k_ready, q_ready = memory
    n_chunks, n_rows, _ = walk
    if NORM:
        stage = gl.to_tensor(0)
        phase = gl.to_tensor(0)
        for _ in range(n_chunks):
            mbarrier.wait(tile_full.index(stage), phase)
            normalize_rows(k_s, stage, n_rows, dtype, BK, NUMBER, STAGES, EPS, ROWS)
            fence_async_shared()
            mbarrier.arrive(k_ready.index(stage), count=1)
            if OUTPUT:
                normalize_rows(q_s, stage, n_rows, dtype, BK, NUMBER, STAGES, EPS, ROWS)
                fence_async_shared()
                mbarrier.arrive(q_ready.index(stage), count=1)
            stage, phase = advance(stage, phase, STAGES)
