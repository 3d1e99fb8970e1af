"""The gates warp of the walks: factors of each chunk's tokens from the sums of their decays."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gdn_triton.chunk.triton.hopper.names import CHUNK, advance

# The vectors of a chunk in shared memory, 64 numbers each. With g the sum of the chunk's log2
# decays:
#     scale (q . k),   2^(g_last - g),   scale 2^g,   -beta 2^g
OWN_VECTOR, TO_END_VECTOR = gl.constexpr(0), gl.constexpr(1)
QUERY_VECTOR, KEY_VECTOR = gl.constexpr(2), gl.constexpr(3)
VECTORS = gl.constexpr(4)
# Copies of 2^g_last.
FLAGS = gl.constexpr(4)


@gluon.jit
def gates_back_role(
    memory,
    inputs,
    walk,
    scale,
    STAGES: gl.constexpr,
):
    vectors, flags, gates_full, empty = memory
    p_g, p_own, p_beta, stride_gt, stride_betat = inputs
    n_chunks, n_rows = walk
    LANES: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    ONE: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    o_t = gl.arange(0, CHUNK, LANES)
    o_f = gl.arange(0, FLAGS, ONE)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    first = (n_chunks - 1) * CHUNK
    rows = (first + o_t).to(gl.int64)
    valid = (rows < n_rows) & (rows >= 0)
    g_next = gl.load(p_g + rows * stride_gt, mask=valid, other=0)
    own_next = gl.load(p_own + rows * stride_gt, mask=valid, other=0)
    beta_next = gl.load(p_beta + rows * stride_betat, mask=valid, other=0).to(gl.float32)
    for i in range(n_chunks):
        g = g_next
        own = own_next
        beta = beta_next
        left = n_rows - first
        valid = o_t < left
        # Load the next chunk's gates while this chunk's gates are used.
        first -= CHUNK
        rows = (first + o_t).to(gl.int64)
        exists = rows >= 0
        g_next = gl.load(p_g + rows * stride_gt, mask=exists, other=0)
        own_next = gl.load(p_own + rows * stride_gt, mask=exists, other=0)
        beta_next = gl.load(p_beta + rows * stride_betat, mask=exists, other=0).to(gl.float32)

        last = gl.sum(gl.where(o_t == gl.minimum(left, CHUNK) - 1, g, 0.0), 0)
        start = gl.exp2(g)
        # A row past the end must not have a positive exponent.
        to_end = gl.exp2(gl.where(valid, last - g, float("-inf")))
        mbarrier.wait(empty.index(stage), phase ^ 1)
        base = stage * VECTORS
        vectors.index(base + OWN_VECTOR).store(own)
        vectors.index(base + TO_END_VECTOR).store(to_end)
        vectors.index(base + QUERY_VECTOR).store(scale * start)
        vectors.index(base + KEY_VECTOR).store(-beta * start)
        flags.index(stage).store(gl.exp2(gl.where(o_f >= 0, last, 0.0)))
        mbarrier.arrive(gates_full.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
