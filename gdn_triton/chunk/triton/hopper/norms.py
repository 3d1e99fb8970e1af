"""The norm of keys and queries, x / sqrt(sum x^2 + eps), in shared memory.

The tiles that TMA has loaded are rewritten: those of the queries by two norm warps, and those of
the keys by the triangles warpgroup (triangles.py). Two warps alone take longer for both than the
states take for a chunk. Squares are summed in the order of the kernel that normalises
in global memory (steps/l2norm.py), so both give the same bits: over 8 neighbours, then over sums
that are 64, 32, 16 and 8 channels apart.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from gdn_triton._triton.views import viewed
from gdn_triton.chunk.triton.hopper.names import CHUNK, advance, here, rounded, widened

# Each of so many warps normalises its own queries.
NORM_WARPS = gl.constexpr(2)
# The queries that a warp holds in its registers at once.
ROWS = gl.constexpr(8)


@gluon.jit
def sums_of_eight(x):
    """Sums of the squares of 8 neighbours of x [rows, 64]."""
    x = widened(x, 0)
    return gl.sum(gl.reshape(x * x, [x.shape[0], 8, 8]), 2)


@gluon.jit
def factors_of(sums, EPS: gl.constexpr):
    """1 / sqrt(sum x^2 + EPS) of each row, from sums [rows, 8]."""
    sums = gl.sum(gl.reshape(sums, [sums.shape[0], 2, 4]), 1)
    sums = gl.sum(gl.reshape(sums, [sums.shape[0], 2, 2]), 1)
    return gl.rsqrt(gl.sum(sums, 1) + EPS)


@gluon.jit
def scaled(x, factors, nothing):
    LAYOUT: gl.constexpr = x.type.layout
    factors = gl.convert_layout(factors, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    return rounded(widened(x, nothing) * factors[:, None], x.dtype)


@gluon.jit
def normalize_rows(
    left, right, n_rows, PARTS: gl.constexpr, LAYOUT: gl.constexpr, EPS: gl.constexpr
):
    """Normalises rows of which ``left`` is the first part of 64 columns, and ``right`` the second
    where there are two."""
    # The number 0, which the assembler does not know to be 0.
    nothing = (here(n_rows) < 0).to(gl.int32)
    x = left.load(LAYOUT)
    sums = sums_of_eight(x)
    if PARTS == 2:
        y = right.load(LAYOUT)
        sums += sums_of_eight(y)
    factors = factors_of(sums, EPS)
    left.store(scaled(x, factors, nothing))
    if PARTS == 2:
        right.store(scaled(y, factors, nothing))


@gluon.jit
def normalize_keys(k, n_rows, BK: gl.constexpr, EPS: gl.constexpr):
    """Normalises a tile [64, BK] by four warps."""
    # Eight lanes have one part of 16 bytes of eight rows each, in different banks.
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]],
        [[1, 0], [2, 0], [4, 0], [0, 8], [0, 16]],
        [[16, 0], [32, 0]],
        [],
        [CHUNK, 64],
    )
    if BK == 128:
        left = k.slice(0, 64, 1)
        normalize_rows(left, k.slice(64, 64, 1), n_rows, 2, LAYOUT, EPS)
    else:
        normalize_rows(k, k, n_rows, 1, LAYOUT, EPS)
    fence_async_shared()


@gluon.jit
def norm_walk(
    memory,
    walk,
    ring,
    dtype: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    NORM: gl.constexpr,
    EPS: gl.constexpr,
    NUMBER: gl.constexpr,
):
    q_s, tile_full, ready = memory
    n_chunks, n_rows, _ = walk
    PARTS: gl.constexpr = BK // 64
    STEPS: gl.constexpr = CHUNK // ROWS
    PART: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # The layout of `normalize_keys`, with the rows of one warp.
    stage, phase = ring
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32]],
        [[1, 0], [2, 0], [4, 0], [0, 8], [0, 16]],
        [],
        [],
        [ROWS, 64],
    )
    if NORM:
        # A tile is stored as parts of 64 columns.
        parts = viewed(q_s, dtype, [STAGES * PARTS * STEPS, ROWS, 64], PART)
        for _ in range(n_chunks):
            mbarrier.wait(tile_full.index(stage), phase)
            first = stage * (PARTS * STEPS) + NUMBER * (STEPS // NORM_WARPS)
            for i in range(STEPS // NORM_WARPS):
                left = parts.index(first + i)
                right = parts.index(first + i + (STEPS if PARTS == 2 else 0))
                normalize_rows(left, right, n_rows, PARTS, LAYOUT, EPS)
            fence_async_shared()
            mbarrier.arrive(ready.index(stage), count=1)
            stage, phase = advance(stage, phase, STAGES)
    return stage, phase
