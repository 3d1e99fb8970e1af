"""The update of the state by a chunk, and its gradient, as functions that all walks over chunks
call (fused/walk.py, fused/segments.py, steps/state.py, gradients/state.py, and affine.py of calls
with ranks).

The forward, the backward's walk forward and the walks of ranks must give the same v_new and the
same states to the last bit. Equations are numbered as in docs/math.md.

b_h, b_dh: [BK, BV], fp32, the columns of a state that a program owns. b_q, b_k: [BT, BK]; b_A, b_P:
[BT, BT], A_inv and A_qk without its diagonal; all four in the dtype of products. b_g, b_beta,
b_own: [BT, 1], fp32; b_g is g_cumsum, in log2 units, and g_last its last row. valid: [BT, 1],
whether there is a token in a row. A_IS_STRICT: b_A lacks its unit diagonal, whose part is added in
fp32.
"""

import triton
import triton.language as tl

from gdn_triton.chunk.triton.shared.places import decay_between


@triton.jit
def solve_values(b_kh, b_v, b_A, b_g, b_beta, PRECISION: tl.constexpr, A_IS_STRICT: tl.constexpr):
    """v_new [BT, BV] of equation (5), fp32, from b_kh = k h and b_v, both [BT, BV] fp32:

    v_new = A_inv x,    x = beta (v - 2^g (k h))
    """
    b_x = b_beta * (b_v - b_kh * tl.exp2(b_g))
    if A_IS_STRICT:
        return tl.dot(b_A, b_x.to(b_A.dtype), b_x, input_precision=PRECISION)
    else:
        return tl.dot(b_A, b_x.to(b_A.dtype), input_precision=PRECISION)


@triton.jit
def decayed_values(b_v_new, b_g, g_last, valid):
    """Returns v_new [BT, BV] fp32 decayed to the chunk's end: 2^(g_last - g_i) v_new_i."""
    return b_v_new * decay_between(g_last, b_g, valid)


@triton.jit
def add_values(b_h, b_k, b_decayed, g_last, PRECISION: tl.constexpr):
    """The state after the chunk, equation (3), fp32, from ``decayed_values`` in the dtype of
    products:

    h = 2^g_last h + sum_i 2^(g_last - g_i) k_i (x) v_new_i
    """
    return tl.dot(tl.trans(b_k), b_decayed, b_h * tl.exp2(g_last), input_precision=PRECISION)


@triton.jit
def write_values(b_h, b_k, b_v_new, b_g, g_last, valid, PRECISION: tl.constexpr):
    """Does the same from b_v_new [BT, BV] fp32."""
    b_decayed = decayed_values(b_v_new, b_g, g_last, valid).to(b_k.dtype)
    return add_values(b_h, b_k, b_decayed, g_last, PRECISION)


@triton.jit
def solve_values_bwd(
    b_kdh,
    b_do,
    b_P,
    b_A,
    b_own,
    b_g,
    g_last,
    valid,
    PRECISION: tl.constexpr,
    A_IS_STRICT: tl.constexpr,
):
    """dx [BT, BV] of equations (6) and (7), fp32, from b_kdh = k dh', [BT, BV] fp32, b_do [BT, BV]
    in the dtype of products, and b_own, the diagonal of A_qk. dh' is of the state after the chunk.

        dv_new = A_qk^T do + 2^(g_last - g) (k dh'),    dx = A_inv^T dv_new
    """
    b_dv = tl.dot(tl.trans(b_P), b_do, input_precision=PRECISION)
    # Use tl.fma instead of a sum. Triton would turn a sum into a product that accumulates onto own
    # do. It loads no accumulator ahead of its chunk, so the chunk would wait for own.
    b_dv = tl.fma(b_own, b_do.to(tl.float32), b_dv)
    b_dv += b_kdh * decay_between(g_last, b_g, valid)
    if A_IS_STRICT:
        return tl.dot(tl.trans(b_A), b_dv.to(b_A.dtype), b_dv, input_precision=PRECISION)
    else:
        return tl.dot(tl.trans(b_A), b_dv.to(b_A.dtype), input_precision=PRECISION)


@triton.jit
def write_values_bwd(
    b_dh, b_q, b_k, b_do, b_dx, b_g, g_last, b_beta, scale, PRECISION: tl.constexpr
):
    """The gradient of the state before the chunk, equation (8), fp32, from b_dh, that of the state
    after it, b_do [BT, BV] in the dtype of products and b_dx [BT, BV] fp32:

        dh = 2^g_last dh' + q^T (scale 2^g do) - k^T (beta 2^g dx)
    """
    b_decay = tl.exp2(b_g)
    b_do = (b_do.to(tl.float32) * (b_decay * scale)).to(b_q.dtype)
    b_dh = tl.dot(tl.trans(b_q), b_do, b_dh * tl.exp2(g_last), input_precision=PRECISION)
    b_dx = (b_dx * (-b_beta * b_decay)).to(b_k.dtype)
    return tl.dot(tl.trans(b_k), b_dx, b_dh, input_precision=PRECISION)
