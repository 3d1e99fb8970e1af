"""The triangles warpgroup: T = strict-lower((I + A')^-1) and P' = lower(q k^T) of each chunk, in
the state's frame (gates.py).

The inverse is built from 8 x 8 diagonal blocks, by substitution in fp32, and from blocks of twice
the size by
    [[X, 0], [L, Y]]^-1 = [[X^-1, 0], [-Y^-1 L X^-1, Y^-1]]
all blocks of a size in two products of fp16 operands with fp32 sums. Of A' only what lies below the
blocks is used, so it is not masked.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gdn_triton.chunk.triton.hopper.gates import (
    BETA_VECTOR,
    D_VECTOR,
    SCORE_VECTOR,
    STEEP,
    VECTORS,
)
from gdn_triton.chunk.triton.hopper.names import CHUNK, advance, opaque, scalar_of, viewed

# Where the scratch tile of A' has element (row, column): blocks of 8 x 8, one after another by the
# exclusive or of their row and column. The diagonal blocks are the first eight.
BLOCKED_TILE = gl.constexpr(
    gl.SharedLinearLayout(
        [
            *([0, 1], [0, 2], [0, 4]),
            *([1, 0], [2, 0], [4, 0]),
            *([8, 8], [16, 16], [32, 32]),
            *([0, 8], [0, 16], [0, 32]),
        ]
    )
)


@gluon.jit
def clear_rows(tile, first, COLUMNS: gl.constexpr):
    """Zeroes the rows of a tile [64, COLUMNS] from ``first`` on."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_t = gl.arange(0, CHUNK, gl.SliceLayout(1, LANES))
    x = tile.load(LANES)
    tile.store(gl.where((o_t < first)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def key_products(k, left, zero, BK: gl.constexpr, IS_VARLEN: gl.constexpr):
    """Issues k k^T. Rows of k past the sequence's end become zero before, as another sequence's NaN
    would survive a product with 0."""
    if IS_VARLEN:
        if left < CHUNK:
            clear_rows(k, left, BK)
    return warpgroup_mma(k, k.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def in_registers(x, n: gl.constexpr, o_n, axis: gl.constexpr):
    """Number n of an axis of x that lies in each thread's registers. o_n: 0, 1, ... along that
    axis, in the shape of x. A sum of bits, which the compiler makes a move."""
    bits = gl.where(o_n == n, x.to(gl.int32, bitcast=True), 0)
    return gl.sum(bits, axis).to(gl.float32, bitcast=True)


@gluon.jit
def inverses_of_blocks(tile):
    """(I + L)^-1 [8, 8, 8] of the strictly lower triangles L of the diagonal blocks of A', fp32.

    x (I + L) = e for each row x of an inverse, from the last column to the first.
    """
    # [block, row, column]: a thread has one row x, and all of L.
    X_LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4]],
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [1, 0, 0], [0, 0, 0]],
        [[2, 0, 0], [4, 0, 0]],
        [],
        [8, 8, 8],
    )
    L_LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]],
        [[2, 0, 0], [4, 0, 0]],
        [],
        [8, 8, 8],
    )
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    x_r = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, X_LAYOUT)))[None, :, None]
    x_c = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, X_LAYOUT)))[None, None, :]
    l_r = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, L_LAYOUT)))[None, :, None]
    L = viewed(tile, gl.float16, [8, 8, 8], FLAT).load(L_LAYOUT).to(gl.float32)
    X = gl.where(x_r == x_c, gl.full([8, 8, 8], 1.0, gl.float32, X_LAYOUT), 0.0)
    for n in gl.static_range(7, 0, -1):
        line = in_registers(L, n, l_r, 1)
        line = gl.convert_layout(line, gl.SliceLayout(1, X_LAYOUT), assert_trivial=True)
        taken = gl.expand_dims(in_registers(X, n, x_c, 2), 2) * gl.expand_dims(line, 1)
        X = gl.where(x_c < n, X - taken, X)
    return X


@gluon.jit
def spread(X, same, layout: gl.constexpr):
    """The matrix [64, 64] with the blocks X [8, 8, 8] where ``same``, else 0."""
    FOUR: gl.constexpr = gl.reshape(same, [8, 8, 8, 8]).type.layout
    X = gl.convert_layout(X, gl.SliceLayout(2, FOUR))
    X = gl.reshape(gl.expand_dims(X, 2).broadcast_to([8, 8, 8, 8]), [64, 64])
    X = gl.convert_layout(X, layout, assert_trivial=True)
    return gl.where(same, X, 0.0)


@gluon.jit
def triangles_role(
    memory,
    scratch,
    walk,
    dtype: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    T_STAGES: gl.constexpr,
    IS_VARLEN: gl.constexpr,
):
    k_s, q_s, t_s, p_s, vectors, flags, tile_full, gates_full, t_full, empty = memory
    a_s, x_s, blocks_s = scratch
    n_chunks, n_rows, _ = walk
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    COLUMN: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    ONE: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    o_r = gl.arange(0, CHUNK, ROW)
    o_c = gl.arange(0, CHUNK, COLUMN)
    block_r = (o_r // 8)[:, None]
    block_c = (o_c // 8)[None, :]
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, PRODUCT)

    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    t_stage = gl.to_tensor(0)
    mbarrier.wait(tile_full.index(0), 0, pred=n_chunks > 0)
    kk = key_products(k_s.index(0), n_rows, zero, BK, IS_VARLEN)
    for i in range(n_chunks):
        mbarrier.wait(gates_full.index(stage), phase)
        base = stage * VECTORS
        steep = scalar_of(flags.index(stage).load(ONE), STEEP)
        beta = vectors.index(base + BETA_VECTOR).load(ROW)
        # Numbers that the compiler does not know to be the same in all chunks: it would keep each
        # element of their masks in a register.
        row = gl.where(n_rows > i, o_r, -1)[:, None]
        A = warpgroup_mma_wait(0, deps=[kk])
        A = A * beta[:, None]
        if steep > 0:
            d_row = vectors.index(base + D_VECTOR).load(ROW) * opaque(steep)
            d_column = vectors.index(base + D_VECTOR).load(COLUMN)
            A = A * gl.exp2(gl.where(row > o_c[None, :], d_row[:, None] - d_column[None, :], 0.0))
        Ah = A.to(gl.float16)
        a_s.store(Ah)
        blocks_s.store(Ah)
        k = k_s.index(stage)
        q = q_s.index(stage)
        qk = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)

        X = spread(inverses_of_blocks(blocks_s), block_r == block_c, PRODUCT)
        # P' is finished here, since T is what the next products wait for: the state that frees its
        # tile has read T of chunk i - T_STAGES, too.
        past = i - T_STAGES
        past_stage = gl.maximum(past, 0) % STAGES
        past_phase = (gl.maximum(past, 0) // STAGES) & 1
        mbarrier.wait(empty.index(past_stage), past_phase, pred=past >= 0)
        P = warpgroup_mma_wait(0, deps=[qk])
        if steep > 0:
            score = vectors.index(base + SCORE_VECTOR).load(ROW) * opaque(steep)
            d_column = vectors.index(base + D_VECTOR).load(COLUMN)
            P = P * gl.exp2(gl.where(row >= o_c[None, :], score[:, None] - d_column[None, :], 0.0))
        p_s.index(t_stage).store(gl.where(row >= o_c[None, :], P, 0.0).to(dtype))

        # From blocks of 8 to one of 64.
        for level in gl.static_range(3):
            Xh = X.to(gl.float16)
            x_s.store(Xh)
            fence_async_shared()
            Xo = gl.convert_layout(Xh, OPERAND, assert_trivial=True)
            Y = warpgroup_mma(Xo, a_s, zero, use_acc=False, is_async=True)
            Y = warpgroup_mma_wait(0, deps=[Y])
            Yo = gl.convert_layout(Y.to(gl.float16), OPERAND, assert_trivial=True)
            Z = warpgroup_mma(Yo, x_s, zero, use_acc=False, is_async=True)
            Z = warpgroup_mma_wait(0, deps=[Z])
            made = ((block_r >> level) == (block_c >> level) + 1) & ((block_r >> level) % 2 == 1)
            X = gl.where(made, -Z, X)
        t_s.index(t_stage).store(gl.where(row > o_c[None, :], X, 0.0).to(dtype))
        fence_async_shared()
        mbarrier.arrive(t_full.index(t_stage), count=1)
        t_stage = (t_stage + 1) % T_STAGES

        # After the last chunk this product is of stale keys, and unused.
        stage, phase = advance(stage, phase, STAGES)
        mbarrier.wait(tile_full.index(stage), phase, pred=i + 1 < n_chunks)
        left = gl.where(i + 1 < n_chunks, n_rows - (i + 1) * CHUNK, CHUNK)
        kk = key_products(k_s.index(stage), left, zero, BK, IS_VARLEN)
    warpgroup_mma_wait(0, deps=[kk])
