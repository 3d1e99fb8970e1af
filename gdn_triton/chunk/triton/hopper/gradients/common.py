"""The place of a chunk, and the places of its tiles and vectors, for all roles of the gradients."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gdn_triton._triton.views import viewed
from gdn_triton.chunk.triton.gradients import gate
from gdn_triton.chunk.triton.hopper.names import CHUNK

# The rows of a pair: two tiles of a chunk, one above the other.
PAIR = gl.constexpr(128)
# The columns of a block, which is the unit of TMA and of the layout in shared memory.
PART = gl.constexpr(64)
# The rows of a piece, which the warps of <h, dh> load at a time.
PIECE = gl.constexpr(16)

LEAST_BETA = gl.constexpr(gate.LEAST_BETA)

# The vectors of a value head in shared memory, a number of each token. g is the sum of the chunk's
# log2 decays, and rest times a row of dv is beta dx:
#     G                  g
#     REST               rest
#     SHARE for dh       2^(g_last - g)
#     SHARE + 1 for h    2^g
#     FACTOR for dh      2^(g_last - g)
#     FACTOR + 1 for h   -rest 2^g
#     QUERY              scale 2^g
#     LAST               2^g_last in each element
# The factors are those of dk, and QUERY has that of dq.
G_VECTOR, REST_VECTOR, SHARE_VECTORS = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
FACTOR_VECTORS, QUERY_VECTOR, LAST_VECTOR = gl.constexpr(4), gl.constexpr(6), gl.constexpr(7)
VECTORS = gl.constexpr(8)


@gluon.jit
def tile_of(blocks, unit, dtype: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Returns the first rows of a unit, as many blocks of 64 columns as a tile has, as one tile."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SPLIT: gl.constexpr = PAIR // ROWS
    TILES: gl.constexpr = blocks.shape[0] * PART // COLUMNS * SPLIT
    return viewed(blocks, dtype, [TILES, ROWS, COLUMNS], LAYOUT).index(unit * SPLIT)


@gluon.jit
def chunk_place(i, chunk_rows, T, NT, H, IS_VARLEN: gl.constexpr):
    """Returns the chunk slot and the key head of item i, and, like ``chunk_span`` of
    shared/places.py, the batch entry, the first row there and the number of rows."""
    i_c = i // H
    if IS_VARLEN:
        i_b = i_c * 0
        row = gl.load(chunk_rows + i_c * 2)
        n_rows = gl.load(chunk_rows + i_c * 2 + 1)
    else:
        i_b = i_c // NT
        row = (i_c % NT) * CHUNK
        n_rows = gl.minimum(T - row, CHUNK)
    return i_c, i % H, i_b, row, n_rows


@gluon.jit
def store_zeros(p, stride_t, n_rows, n_columns, COLUMNS: gl.constexpr):
    """Stores zeros in rows of p that belong to no sequence."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_t = gl.arange(0, PIECE, gl.SliceLayout(1, LANES))
    o_v = gl.arange(0, COLUMNS, gl.SliceLayout(0, LANES))
    zeros = gl.zeros([PIECE, COLUMNS], p.dtype.element_ty, LANES)
    offsets = o_t[:, None] * stride_t + o_v[None, :]
    for start in range(0, n_rows, PIECE):
        mask = (o_t < n_rows - start)[:, None] & (o_v < n_columns)[None, :]
        gl.store(p + offsets, zeros, mask=mask)
        p += PIECE * gl.cast(stride_t, gl.int64)
