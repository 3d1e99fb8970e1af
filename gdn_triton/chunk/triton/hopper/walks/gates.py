"""The gates warp of the walks: factors of each chunk's tokens from the sums of their decays.

With g_i the sum of the log2 decays of a chunk up to token i, g_last that of all, any d and e = g -
d, the equations of gradients/state.py become, for v_new_i = 2^e_i u_i, dv_new_i = 2^-e_i y_i and
dx_i = 2^-e_i z_i,

    u  = (I + A')^-1 beta (2^-e v - 2^d k h),    A'_ij = beta_i (k_i . k_j) 2^(d_i - d_j),  i > j
    h  = 2^g_last h + sum_i 2^(g_last - d_i) k_i (x) u_i
    y  = P'^T (scale 2^e do) + 2^(g_last - d) k dh,    P'_ij = (q_i . k_j) 2^(d_i - d_j),  i >= j
    z  = y + T^T y,    T = (I + A')^-1 - I
    dh = 2^g_last dh + sum_i q_i (x) scale 2^g_i do_i - beta_i 2^d_i k_i (x) z_i

In most chunks d = 0, so no matrix is multiplied by a decay. A chunk in which a sum is below -RANGE
is steep: there d = g, since 2^-e might leave the range of bfloat16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gdn_triton.chunk.triton.hopper.gates import BETA_VECTOR, D_VECTOR, FLAGS, STEEP, VECTORS
from gdn_triton.chunk.triton.hopper.names import CHUNK, advance

RANGE = gl.constexpr(96.0)

# The vectors of a chunk in shared memory, 64 numbers each. The triangles warpgroup reads beta and d
# by the numbers that hopper/gates.py gives them. The vectors FIRST, SECOND, TO_END and OUT hold in
# the walk forward
#     beta 2^-e,   beta 2^d,   2^(g_last - d),   2^e
# and in the walk back
#     scale 2^e,   scale 2^g,   2^(g_last - d),   2^-e, times beta if the walk stores dv = beta dx
# and there the buffer `writes` holds -beta 2^d.
FIRST_VECTOR, SECOND_VECTOR = gl.constexpr(0), gl.constexpr(1)
TO_END_VECTOR, OUT_VECTOR = gl.constexpr(2), gl.constexpr(5)
# The number 2^g_last of a chunk, where hopper/gates.py has others.
LAST = gl.constexpr(1)


@gluon.jit
def gates_role(
    memory,
    inputs,
    walk,
    scale,
    STAGES: gl.constexpr,
    BACK: gl.constexpr,
    STORE_DV: gl.constexpr,
    LEAST_BETA: gl.constexpr,
):
    vectors, writes, flags, gates_full, empty = memory
    p_g, p_beta, stride_gt, stride_betat = inputs
    n_chunks, n_rows, _ = walk
    LANES: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    ONE: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    o_t = gl.arange(0, CHUNK, LANES)
    o_f = gl.arange(0, FLAGS, ONE)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    first = n_rows * 0
    step = first + CHUNK
    if BACK:
        first = (n_chunks - 1) * CHUNK
        step = -step
    rows = (first + o_t).to(gl.int64)
    exists = (rows < n_rows) & (rows >= 0)
    g_next = gl.load(p_g + rows * stride_gt, mask=exists, other=0)
    beta_next = gl.load(p_beta + rows * stride_betat, mask=exists, other=0).to(gl.float32)
    for _ in range(n_chunks):
        g = g_next
        beta = beta_next
        left = n_rows - first
        # Load the next chunk's gates while this chunk's gates are used.
        first += step
        rows = (first + o_t).to(gl.int64)
        exists = (rows < n_rows) & (rows >= 0)
        g_next = gl.load(p_g + rows * stride_gt, mask=exists, other=0)
        beta_next = gl.load(p_beta + rows * stride_betat, mask=exists, other=0).to(gl.float32)

        last = gl.sum(gl.where(o_t == gl.minimum(left, CHUNK) - 1, g, 0.0), 0)
        # A row past the end must not have a positive exponent.
        valid = o_t < left
        g = gl.where(valid, g, last)
        steep = gl.sum(gl.where(g < -RANGE, 1, 0), 0) > 0
        d = gl.where(steep, g, 0.0)
        e = g - d
        to_end = gl.where(valid, gl.exp2(last - d), 0.0)

        mbarrier.wait(empty.index(stage), phase ^ 1)
        base = stage * VECTORS
        vectors.index(base + BETA_VECTOR).store(beta)
        vectors.index(base + D_VECTOR).store(d)
        vectors.index(base + TO_END_VECTOR).store(to_end)
        if BACK:
            vectors.index(base + FIRST_VECTOR).store(scale * gl.exp2(e))
            vectors.index(base + SECOND_VECTOR).store(scale * gl.exp2(g))
            out = gl.exp2(-e)
            if STORE_DV:
                out *= gl.where(gl.abs(beta) < LEAST_BETA, 1.0, beta)
            vectors.index(base + OUT_VECTOR).store(out)
            writes.index(stage).store(-beta * gl.exp2(d))
        else:
            vectors.index(base + FIRST_VECTOR).store(beta * gl.exp2(-e))
            vectors.index(base + SECOND_VECTOR).store(beta * gl.exp2(d))
            vectors.index(base + OUT_VECTOR).store(gl.exp2(e))
        numbers = gl.where(o_f == STEEP, steep.to(gl.float32), gl.exp2(last))
        flags.index(stage).store(numbers)
        mbarrier.arrive(gates_full.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
