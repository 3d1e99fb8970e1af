"""The triangles warpgroup: T = strict-lower((I + A')^-1) of each chunk, in the state's frame
(gates.py).

The inverse is built from 8 x 8 diagonal blocks, by substitution in fp32, and from blocks of twice
the size by
    [[X, 0], [L, Y]]^-1 = [[X^-1, 0], [-Y^-1 L X^-1, Y^-1]]
where two products of fp16 operands with fp32 sums compute all blocks of one size. A' is not masked,
because only its elements below the diagonal blocks are used.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gdn_triton._triton.views import viewed
from gdn_triton.chunk.triton.hopper.gates import (
    BETA_VECTOR,
    COLUMN_EXPONENTS,
    D_VECTOR,
    EXPONENTS,
    STEEP,
    VECTORS,
)
from gdn_triton.chunk.triton.hopper.names import (
    CHUNK,
    ONE,
    PRODUCT,
    TOKEN,
    advance,
    either,
    masked,
    opaque,
    power,
    rounded,
    scalar_of,
    times_power,
)
from gdn_triton.chunk.triton.hopper.norms import normalize_keys

# The place of element (row, column) of A' in the scratch tile: blocks of 8 x 8, ordered by the
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


# The layouts of products [64, 32] and [64, 16].
HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
QUARTER = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))


@gluon.jit
def clear_rows(tile, first, COLUMNS: gl.constexpr):
    """Sets the rows of a tile [64, COLUMNS] from ``first`` on to zero."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_t = gl.arange(0, CHUNK, gl.SliceLayout(1, LANES))
    x = tile.load(LANES)
    tile.store(gl.where((o_t < first)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def key_products(
    k,
    ready,
    is_chunk,
    left,
    zero,
    BK: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    NORM: gl.constexpr,
    EPS: gl.constexpr,
):
    """Issues k k^T. First normalises k, if NORM, unless this is no chunk: the states may still read
    the old keys there. Then sets the rows of k past the sequence's end to zero, because a NaN of
    another sequence would survive a product with 0."""
    if NORM:
        if is_chunk:
            normalize_keys(k, left, BK, EPS)
            mbarrier.arrive(ready, count=1)
    if IS_VARLEN:
        if left < CHUNK:
            clear_rows(k, left, BK)
    return warpgroup_mma(k, k.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def in_registers(x, n: gl.constexpr, o_n, axis: gl.constexpr):
    """Returns number n of an axis of x of which every thread has all elements in registers. o_n: 0,
    1, ... along that axis, in the shape of x. The function sums bits, which the compiler turns into
    a move."""
    bits = gl.where(o_n == n, x.to(gl.int32, bitcast=True), 0)
    return gl.sum(bits, axis).to(gl.float32, bitcast=True)


@gluon.jit
def inverses_of_blocks(tile):
    """Returns (I + L)^-1 [8, 8, 8], fp32, for the strictly lower triangles L of the diagonal blocks
    of A'.

    It solves x (I + L) = e for each row x of an inverse, from the last column to the first.
    """
    # The layout [block, row, column] gives each thread one row x and all of L.
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
    L = viewed(tile, gl.float16, [64, 8, 8], FLAT).slice(0, 8).load(L_LAYOUT).to(gl.float32)
    X = gl.where(x_r == x_c, gl.full([8, 8, 8], 1.0, gl.float32, X_LAYOUT), 0.0)
    for n in gl.static_range(7, 0, -1):
        line = in_registers(L, n, l_r, 1)
        line = gl.convert_layout(line, gl.SliceLayout(1, X_LAYOUT), assert_trivial=True)
        taken = gl.expand_dims(in_registers(X, n, x_c, 2), 2) * gl.expand_dims(line, 1)
        X = gl.where(x_c < n, X - taken, X)
    return X


@gluon.jit
def block_diagonal(X, layout: gl.constexpr):
    """Returns the diagonal blocks of 16 x 16, whose own diagonal blocks are X [8, 8, 8], as a
    matrix [64, 16]."""
    o_r = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))[:, None]
    o_c = gl.arange(0, 16, gl.SliceLayout(0, layout))[None, :]
    own = o_r // 8 % 2 == o_c // 8
    FOUR: gl.constexpr = gl.reshape(own, [8, 8, 2, 8]).type.layout
    X = gl.convert_layout(X, gl.SliceLayout(2, FOUR))
    X = gl.reshape(gl.expand_dims(X, 2).broadcast_to([8, 8, 2, 8]), [CHUNK, 16])
    return gl.where(own, gl.convert_layout(X, layout, assert_trivial=True), 0.0)


@gluon.jit
def block_of(tile, row: gl.constexpr, column: gl.constexpr, SIZE: gl.constexpr):
    """Returns the square block of SIZE at a row and a column of a tile [64, 64]."""
    return tile.slice(row, SIZE, 0).slice(column, SIZE, 1)


@gluon.jit
def columns_of(tile, column: gl.constexpr, SIZE: gl.constexpr):
    """Returns SIZE columns of a tile [64, 64]."""
    return tile.slice(column, SIZE, 1)


@gluon.jit
def side_by_side(a, b, c, d):
    """Returns a matrix [64, 64] of four with 16 columns each. Before a store the compiler waits for
    earlier stores to the same tile, also to other columns, so one store takes fewer barriers."""
    x = gl.join(gl.join(a, c), gl.join(b, d))
    x = gl.reshape(gl.permute(x, (0, 2, 3, 1)), [CHUNK, CHUNK])
    return gl.convert_layout(x, PRODUCT, assert_trivial=True)


@gluon.jit
def own_blocks(x, block, b: gl.constexpr):
    """x [64, 16], of a 16-bit dtype, in the rows of block b, and 0 in the other rows."""
    return masked(x, gl.where(block == b, -1, 0).to(gl.int16))


@gluon.jit
def with_gates(A, vectors, base, exponents, stage, steep, beta, row, o_c, HAS_NARROW: gl.constexpr):
    """A' of k k^T [64, 64], in fp16, not masked. row, o_c: the rows [64, 1] and columns [1, 64]."""
    ROW: gl.constexpr = gl.SliceLayout(1, A.type.layout)
    COLUMN: gl.constexpr = gl.SliceLayout(0, A.type.layout)
    A = A * beta[:, None]
    if steep > 0:
        d_row = vectors.index(base + D_VECTOR).load(ROW) * opaque(steep)
        d_column = vectors.index(base + D_VECTOR).load(COLUMN)
        A = A * power(gl.where(row > o_c, d_row[:, None] - d_column[None, :], 0.0))
    Ah = rounded(A, gl.float16)
    if HAS_NARROW:
        if steep < 0:
            # Above the diagonal the power is 2 at most, because a greater one may overflow.
            at = stage * EXPONENTS + COLUMN_EXPONENTS
            column = exponents.index(at).load(COLUMN)
            biased = 15 - exponents.index(at).load(ROW)
            Ah = times_power(Ah, biased[:, None], column[None, :])
    return Ah


@gluon.jit
def places_in_quarter():
    """The rows [64, 1] and columns [1, 16] of a matrix [64, 16], and the blocks of 16 rows."""
    x_r = gl.arange(0, CHUNK, gl.SliceLayout(1, QUARTER))[:, None]
    x_c = gl.arange(0, 16, gl.SliceLayout(0, QUARTER))[None, :]
    return x_r, x_c, x_r // 16 + x_c * 0


@gluon.jit
def blocks_of_inverse(Ah, a_s, x_s, blocks_s, x_r, x_c, block):
    """Blocks of (I + A')^-1, which take the rows of a matrix [64, 16]: those of 16 x 16 on the
    diagonal, those below the first and the third of them, and, negated and not waited for, the two
    halves of what is below the first block of 32. x_r, x_c, block: `places_in_quarter`."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, QUARTER, 2)
    half_zero = gl.zeros([CHUNK, 32], gl.float32, HALF)
    quarter_zero = gl.zeros([CHUNK, 16], gl.float32, QUARTER)
    a_s.store(Ah)
    blocks_s.store(Ah)
    D = block_diagonal(inverses_of_blocks(blocks_s), QUARTER)
    # From blocks of 8 to blocks of 16. D has for each row of the matrix the 16 columns of its
    # own diagonal block, and so one sum of four products is that of all four blocks.
    Dh = D.to(gl.float16)
    D0, D1 = own_blocks(Dh, block, 0), own_blocks(Dh, block, 1)
    D2, D3 = own_blocks(Dh, block, 2), own_blocks(Dh, block, 3)
    x_s.store(side_by_side(D0, D1, D2, D3))
    fence_async_shared()
    Y = quarter_zero
    for b in gl.static_range(4):
        Y = warpgroup_mma(
            columns_of(x_s, 16 * b, 16),
            block_of(a_s, 16 * b, 16 * b, 16),
            Y,
            use_acc=b > 0,
            is_async=True,
        )
    Y = warpgroup_mma_wait(0, deps=[Y])
    Yh = Y.to(gl.float16)
    Z = quarter_zero
    for b in gl.static_range(4):
        Yb = masked(Yh, gl.where(block == b, -1, 0).to(gl.int16))
        Yo = gl.convert_layout(Yb, OPERAND, assert_trivial=True)
        Z = warpgroup_mma(Yo, block_of(x_s, 16 * b, 16 * b, 16), Z, use_acc=b > 0, is_async=True)
    Z = warpgroup_mma_wait(0, deps=[Z])
    D = gl.where((x_r // 8 % 2 == 1) & (x_c < 8), -Z, D)

    # Blocks of 32: L is what lies below the first and the third block of 16.
    Dh = D.to(gl.float16)
    D0, D1 = own_blocks(Dh, block, 0), own_blocks(Dh, block, 1)
    D2, D3 = own_blocks(Dh, block, 2), own_blocks(Dh, block, 3)
    x_s.store(side_by_side(D0, D1, D2, D3))
    fence_async_shared()
    Y = quarter_zero
    for b in gl.static_range(0, 4, 2):
        Y = warpgroup_mma(
            columns_of(x_s, 16 * b + 16, 16),
            block_of(a_s, 16 * b + 16, 16 * b, 16),
            Y,
            use_acc=b > 0,
            is_async=True,
        )
    Y = warpgroup_mma_wait(0, deps=[Y])
    Yh = Y.to(gl.float16)
    Z = quarter_zero
    for b in gl.static_range(0, 4, 2):
        Yb = masked(Yh, gl.where(block == b + 1, -1, 0).to(gl.int16))
        Yo = gl.convert_layout(Yb, OPERAND, assert_trivial=True)
        Z = warpgroup_mma(Yo, block_of(x_s, 16 * b, 16 * b, 16), Z, use_acc=b > 0, is_async=True)
    L = -warpgroup_mma_wait(0, deps=[Z])

    # The whole matrix.
    Lh = L.to(gl.float16)
    D0 = either(D0, own_blocks(Lh, block, 1))
    D2 = either(D2, own_blocks(Lh, block, 3))
    x_s.store(side_by_side(D0, D1, D2, D3))
    fence_async_shared()
    Y = warpgroup_mma(
        columns_of(x_s, 32, 32),
        block_of(a_s, 32, 0, 32),
        half_zero,
        use_acc=False,
        is_async=True,
    )
    Yh = warpgroup_mma_wait(0, deps=[Y]).to(gl.float16)
    Yo = gl.convert_layout(Yh, OPERAND, assert_trivial=True)
    upper = x_s.slice(0, 32, 0)
    Z0 = warpgroup_mma(Yo, columns_of(upper, 0, 16), quarter_zero, use_acc=False, is_async=True)
    Z1 = warpgroup_mma(Yo, columns_of(upper, 16, 16), quarter_zero, use_acc=False, is_async=True)
    return D, L, Z0, Z1


@gluon.jit
def triangle_of(D, L, Z0, Z1, x_r, x_c, block, dtype: gl.constexpr):
    """T of these blocks."""
    D = gl.where(x_r % 16 > x_c, D, 0.0)
    T0 = gl.where(block == 0, D, gl.where(block == 1, L, -Z0))
    T1 = gl.where(block == 1, D, -Z1)
    T2 = gl.where(block == 2, D, gl.where(block == 3, L, 0.0))
    T3 = gl.where(block == 3, D, 0.0)
    return side_by_side(T0.to(dtype), T1.to(dtype), T2.to(dtype), T3.to(dtype))


@gluon.jit
def triangles_walk(
    memory,
    scratch,
    walk,
    ring,
    dtype: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    T_STAGES: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    HAS_NARROW: gl.constexpr = False,
    NORM: gl.constexpr = False,
    EPS: gl.constexpr = 0.0,
    SEVERAL: gl.constexpr = False,
):
    """SEVERAL: other walks follow, whose loads overwrite the keys once these warps, too, have
    arrived at ``empty``."""
    k_s, t_s, vectors, flags, tile_full, ready, gates_full, t_full, empty = memory
    if HAS_NARROW:
        a_s, x_s, blocks_s, exponents = scratch
    else:
        a_s, x_s, blocks_s = scratch
        exponents = vectors
    n_chunks, n_rows, _ = walk
    ROW: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    o_r = gl.arange(0, CHUNK, ROW)
    o_c = gl.arange(0, CHUNK, TOKEN)[None, :]
    x_r, x_c, block = places_in_quarter()
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, PRODUCT)

    stage, phase, t_stage, done = ring
    last = gl.to_tensor(0)
    mbarrier.wait(tile_full.index(stage), phase, pred=n_chunks > 0)
    kk = key_products(
        k_s.index(stage), ready.index(stage), n_chunks > 0, n_rows, zero, BK, IS_VARLEN, NORM, EPS
    )
    for i in range(n_chunks):
        mbarrier.wait(gates_full.index(stage), phase)
        base = stage * VECTORS
        steep = scalar_of(flags.index(stage).load(ONE), STEEP)
        beta = vectors.index(base + BETA_VECTOR).load(ROW)
        # The compiler does not know that these numbers are the same in all chunks. If it knew, it
        # would keep each element of their masks in a register.
        row = gl.where(n_rows > i, o_r, -1)[:, None]
        A = warpgroup_mma_wait(0, deps=[kk])
        if SEVERAL:
            if i > 0:
                async_copy.mbarrier_arrive(empty.index(last), increment_count=False)
        Ah = with_gates(A, vectors, base, exponents, stage, steep, beta, row, o_c, HAS_NARROW)
        D, L, Z0, Z1 = blocks_of_inverse(Ah, a_s, x_s, blocks_s, x_r, x_c, block)

        # k k^T of the next chunk runs while T is stored. After the last chunk this product reads
        # old keys, and its result is not used. Where loads follow, these are the same keys again.
        last = stage
        stage, phase = advance(stage, phase, STAGES)
        mbarrier.wait(tile_full.index(stage), phase, pred=i + 1 < n_chunks)
        left = gl.where(i + 1 < n_chunks, n_rows - (i + 1) * CHUNK, CHUNK)
        kk = key_products(
            k_s.index(gl.where(i + 1 < n_chunks, stage, last) if SEVERAL else stage),
            ready.index(stage),
            i + 1 < n_chunks,
            left,
            zero,
            BK,
            IS_VARLEN,
            NORM,
            EPS,
        )
        Z0, Z1 = warpgroup_mma_wait(1, deps=[Z0, Z1])
        past = done + i - T_STAGES
        past_stage = gl.maximum(past, 0) % STAGES
        past_phase = (gl.maximum(past, 0) // STAGES) & 1
        mbarrier.wait(empty.index(past_stage), past_phase, pred=past >= 0)
        t = t_s.index(t_stage)
        t.store(triangle_of(D, L, Z0, Z1, x_r, x_c, block, dtype))
        fence_async_shared()
        mbarrier.arrive(t_full.index(t_stage), count=1)
        t_stage = (t_stage + 1) % T_STAGES
    warpgroup_mma_wait(0, deps=[kk])
    if SEVERAL:
        async_copy.mbarrier_arrive(empty.index(last), increment_count=False)
    return stage, phase, t_stage, done + n_chunks
