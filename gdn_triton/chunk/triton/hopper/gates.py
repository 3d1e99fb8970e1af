"""The gates warp: the factors of each chunk's tokens, and the frame of the state.

The frame is the power of two by which the stored state S' differs from the state S. With g_i the
chunk's inclusive sum of log2 decays and S = 2^G S' before the chunk, the equations of docs/math.md
become, for u_i = 2^e_i u'_i with d_i = G + g_i - e_i, D = G + g_last - G1 and any e, y and G1,

    u'  = (I + A')^-1 beta (2^-e v - 2^d k S'),   A'_ij = beta_i (k_i . k_j) 2^(d_i - d_j),  i > j
    o   = scale 2^(e - y) (2^(d + y) q S' + P' u'),  P'_ij = (q_i . k_j) 2^(y_i + d_i - d_j), i >= j
    S'1 = 2^D S' + sum_j 2^(D - d_j) k_j^T u'_j,   S1 = 2^G1 S'1

In most chunks e = G + g and d = y = D = 0, so no matrix is multiplied by a decay. G decreases from
chunk to chunk, from TOP to TOP - RANGE, a range that the exponents of bfloat16 hold. Before a chunk
that would leave this range, S' is multiplied by a power of two that sets G to TOP.

A chunk that decays by more than the whole range is steep. In a steep chunk every d is a whole
number, so the factors of 16-bit operands are exact powers of two. Tokens that decay by less than
STEEP_UNITS up to the chunk's end have d = D. The u' of the other tokens are 2^-STEEP_UNITS times
smaller than u and are added to the state without the rest of their decay. y is -d, but at most e +
MOST_LIFT.

A' and P' of a steep chunk are multiplied by powers of differences of exponents. A chunk is narrow
if its D is at least LEAST and no token grows. There 16-bit integers hold all exponents, and two
powers are made at once (`times_power` of names.py). A power of A' is at most 2: it is 2, and not 1,
where the sums of two tokens are equal, but are rounded to both sides of a whole number. The
exponentials of the other, wide chunks are in fp32.

The exponents of float16 hold a range of 8. There y is 0, and in steep chunks the state warps apply
two factors apart from all operands: 2^d to q S', and 2^(D - d) to the u' that they add to S'.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gdn_triton.chunk.triton.hopper.names import CHUNK, advance

# In the exponents of bfloat16, and in those of float16.
TOP, TOP_16 = gl.constexpr(24.0), gl.constexpr(4.0)
RANGE, RANGE_16 = gl.constexpr(96.0), gl.constexpr(8.0)
STEEP_UNITS, STEEP_UNITS_16 = gl.constexpr(49.0), gl.constexpr(0.0)
MOST_LIFT = gl.constexpr(72.0)
MOST_POWER = gl.constexpr(100.0)
# The least D of a narrow chunk: sums of two exponents and a bias fit 16 bits.
LEAST = gl.constexpr(-8000.0)
# The limit of one token's growth, in log2 units. fp32 sums and factors cannot represent more.
GROWTH_LIMIT = gl.constexpr(256.0)

# The vectors of a chunk in shared memory, 64 numbers each:
#     x' = C v - F (k S'),   o = R (q S' + P' u'),   beta,   d,   y + d
C_VECTOR, F_VECTOR, R_VECTOR = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
# In float16 the last one is D - d, as y is 0.
BETA_VECTOR, D_VECTOR, SCORE_VECTOR = gl.constexpr(3), gl.constexpr(4), gl.constexpr(5)
VECTORS = gl.constexpr(6)
# The exponents of a narrow chunk, 64 int16 each: y + d, plus the bias of the dtype's exponent; -d.
SCORE_EXPONENTS, COLUMN_EXPONENTS = gl.constexpr(0), gl.constexpr(1)
EXPONENTS = gl.constexpr(2)
# The numbers of a chunk: the factor of the state before it is read, the factor before the tokens
# are added, the factor at the end (2^G1, which converts S' to S), and the kind of chunk: 0, or -1
# where the chunk is steep and narrow, or 1 where it is steep and wide. In bfloat16 the first factor
# multiplies only the rounded state, and the second one contains it.
ENTER, DECAY, END, STEEP = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
FLAGS = gl.constexpr(4)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def log2_decay(
    g,
    p_A_log,
    p_dt_bias,
    RCP_LN2: gl.constexpr,
    FLOOR: gl.constexpr,
    THRESHOLD: gl.constexpr,
    HAS_GATE: gl.constexpr,
    HAS_DT_BIAS: gl.constexpr,
):
    """Returns the log2 decay of tokens from their natural-log decay or raw gate, not below the
    floor. A NaN stays a NaN. gdn_triton/_triton/activations.py (log_decay) explains the formula."""
    if HAS_GATE:
        if HAS_DT_BIAS:
            g += gl.load(p_dt_bias).to(gl.float32)
        b_A = gl.load(p_A_log).to(gl.float32)
        is_exp = g < -2 * THRESHOLD
        e = gl.exp(gl.where(is_exp, b_A + g, gl.where(g > THRESHOLD, THRESHOLD, g)))
        series = e * (1 - e * (1 / 2 - e * (1 / 3 - e * (1 / 4 - e * (1 / 5 - e / 6)))))
        u = 1 + e
        log1p = gl.where(e < 0.0625, series, gl.log(u) + (e - (u - 1)) / u)
        g = -gl.where(is_exp, e, gl.exp(b_A) * gl.where(g > THRESHOLD, g, log1p))
    g *= RCP_LN2
    return gl.where(g < FLOOR, FLOOR, g)


@gluon.jit
def gates_walk(
    memory,
    inputs,
    p_A_log,
    p_dt_bias,
    walk,
    ring,
    scale,
    dtype: gl.constexpr,
    RCP_LN2: gl.constexpr,
    FLOOR: gl.constexpr,
    THRESHOLD: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_GATE: gl.constexpr,
    HAS_DT_BIAS: gl.constexpr,
    USE_SIGMOID: gl.constexpr,
    BETA_FACTOR: gl.constexpr,
):
    vectors, exponents, flags, gates_full, empty = memory
    p_g, p_beta, stride_gt, stride_betat = inputs
    n_chunks, n_rows, _ = walk
    IS_HALF: gl.constexpr = dtype == gl.float16
    BIAS: gl.constexpr = 15 if IS_HALF else 127
    HIGHEST: gl.constexpr = TOP_16 if IS_HALF else TOP
    WIDTH: gl.constexpr = RANGE_16 if IS_HALF else RANGE
    UNITS: gl.constexpr = STEEP_UNITS_16 if IS_HALF else STEEP_UNITS
    LANES: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    ONE: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    o_t = gl.arange(0, CHUNK, LANES)
    o_f = gl.arange(0, FLAGS, ONE)
    stage, phase = ring
    G = gl.full([], HIGHEST, gl.float32)
    valid = o_t < n_rows
    offset = o_t.to(gl.int64)
    g_next = gl.load(p_g + offset * stride_gt, mask=valid, other=0).to(gl.float32)
    beta_next = gl.load(p_beta + offset * stride_betat, mask=valid, other=0).to(gl.float32)
    for _ in range(n_chunks):
        g = log2_decay(g_next, p_A_log, p_dt_bias, RCP_LN2, FLOOR, THRESHOLD, HAS_GATE, HAS_DT_BIAS)
        beta = beta_next
        if USE_SIGMOID:
            beta = BETA_FACTOR / (1 + gl.exp(-beta))
        g = gl.where(valid, g, 0.0)
        beta = gl.where(valid, beta, 0.0)
        # Load the next chunk's gates while this chunk's gates are used.
        offset += CHUNK
        valid = offset < n_rows
        g_next = gl.load(p_g + offset * stride_gt, mask=valid, other=0).to(gl.float32)
        beta_next = gl.load(p_beta + offset * stride_betat, mask=valid, other=0).to(gl.float32)

        # All results from a NaN on are NaN, and no earlier ones. The same holds for a growth that
        # exceeds fp32.
        bad = gl.where(g < GROWTH_LIMIT, 0, 1)
        poisoned = gl.associative_scan(bad, 0, add) > 0
        any_bad = gl.sum(bad, 0) > 0
        sums = gl.associative_scan(gl.where(bad > 0, 0.0, g), 0, add)
        last = gl.sum(gl.where(o_t == CHUNK - 1, sums, 0.0), 0)

        steep = last < -WIDTH
        leaves = (G + last < HIGHEST - WIDTH) | (G + last > HIGHEST + 16)
        leaves = gl.where(steep, (G < 0) | (G > HIGHEST), leaves)
        enter = gl.where(leaves, G - HIGHEST, 0.0)
        G = gl.where(leaves, HIGHEST, G)
        D = gl.where(steep, gl.floor(G + last), 0.0)
        d = gl.where(steep, gl.maximum(D, gl.floor(G + sums - UNITS)), 0.0)
        e = G + sums - d
        y = d * 0
        if not IS_HALF:
            most = gl.minimum(MOST_LIFT + gl.floor(e), MOST_POWER)
            y = gl.where(steep, gl.minimum(-d, most), 0.0)
        G = gl.where(any_bad, float("nan"), G + last - D)
        narrow = steep & (D >= LEAST) & (gl.max(g, 0) <= 0)
        kind = gl.where(narrow, -1.0, steep.to(gl.float32))

        mbarrier.wait(empty.index(stage), phase ^ 1)
        base = stage * VECTORS
        vectors.index(base + C_VECTOR).store(beta * gl.exp2(-e))
        vectors.index(base + F_VECTOR).store(beta * gl.exp2(d))
        r = gl.where(poisoned, float("nan"), scale * gl.exp2(e - y))
        vectors.index(base + R_VECTOR).store(r)
        vectors.index(base + BETA_VECTOR).store(beta)
        vectors.index(base + D_VECTOR).store(d)
        vectors.index(base + SCORE_VECTOR).store(D - d if IS_HALF else y + d)
        at = stage * EXPONENTS
        row = (y + d + BIAS).to(gl.int32).to(gl.int16)
        exponents.index(at + SCORE_EXPONENTS).store(row)
        exponents.index(at + COLUMN_EXPONENTS).store((-d).to(gl.int32).to(gl.int16))
        numbers = gl.where(o_f == ENTER, gl.exp2(enter), kind)
        numbers = gl.where(o_f == DECAY, gl.exp2(D if IS_HALF else D + enter), numbers)
        numbers = gl.where(o_f == END, gl.exp2(G), numbers)
        flags.index(stage).store(numbers)
        mbarrier.arrive(gates_full.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase
