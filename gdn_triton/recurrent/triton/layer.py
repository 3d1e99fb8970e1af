"""The parts of a layer's step around the recurrence, for kernels that run a whole step in one
launch: the gated norm, and the end of a step whose programs share a key head."""

import triton
import triton.language as tl

from gdn_triton._triton.activations import sigmoid
from gdn_triton._triton.taps import earlier, keep


@triton.jit
def power_of_two(x):
    """Returns the largest power of two that is at most x and at least 2^-126, and its inverse. x is
    not negative."""
    bits = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 0x00800000)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def fixed_point(x):
    """Returns x, at most 4, as an integer in units of 2^-44."""
    return (x * 17592186044416.0).to(tl.int64)


@triton.jit
def sums_of_squares(x, PARTS: tl.constexpr):
    """Returns [TILES]: the sum of the squares of x [BV, TILES] over the PARTS tiles of each head.
    The sum is computed in fixed point relative to the largest square. Therefore it does not depend
    on the tiles of a head, whose size differs with the number of sequences."""
    o_t = tl.arange(0, x.shape[1])
    same = o_t[:, None] // PARTS == o_t[None, :] // PARTS
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    if PARTS > 1:
        top = tl.max(tl.where(same, top[:, None], 0), 0)
    finite = top < 0x7F800000
    largest = top.to(tl.float32, bitcast=True)
    unit, inverse = power_of_two(tl.where(finite, largest, 0.0))
    x = tl.where(finite[None, :], x, 0.0) * inverse[None, :]
    units = tl.sum(fixed_point(x * x), 0)
    if PARTS > 1:
        units = tl.sum(tl.where(same, units[:, None], 0), 0)
    squares = units.to(tl.float32) * 5.684341886080802e-14 * unit * unit
    return tl.where(finite, squares, largest * largest)


@triton.jit
def head_norms(
    b_y, in_d, b_w, b_z, V: tl.constexpr, PARTS: tl.constexpr, NORM_EPS: tl.constexpr,
    SIGMOID: tl.constexpr
):  # fmt: skip
    """Returns the gated norm of b_y [BV, TILES], the PARTS tiles of each head, in the dtype of b_y.
    in_d: which elements exist. b_w, b_z: the weight and the gate of each element."""
    b_n = b_y.to(tl.float32)
    squares = sums_of_squares(tl.where(in_d, b_n, 0.0), PARTS)
    b_n *= tl.rsqrt(squares / V + NORM_EPS)[None, :]
    b_n *= b_w.to(tl.float32)
    b_z = b_z.to(tl.float32)
    b_s = sigmoid(b_z, 1.0)
    b_n *= b_s if SIGMOID else b_z * b_s
    return b_n.to(b_y.dtype)


@triton.jit
def is_last(p_ticket, COUNT: tl.constexpr):
    """Returns whether this program is the last of COUNT programs to call this function with
    p_ticket, an element that is 0 before and after a launch. All reads and writes of the other
    programs before their calls precede the reads and writes of the last program after its call: a
    barrier orders the threads of each program, and the atomic addition releases and acquires."""
    tl.debug_barrier()
    last = tl.atomic_add(p_ticket, 1, sem="acq_rel", scope="gpu") == COUNT - 1
    if last:
        tl.atomic_xchg(p_ticket, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def finish_layer(
    p_o, p_q, p_k, p_conv, p_gate, norm_weight, channel,
    stride_oh, stride_ov, stride_qk, stride_kk, stride_cc, stride_cw, stride_zh, stride_zv,
    stride_norm, GROUP: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, GROUP_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, W: tl.constexpr,
    NORM_EPS: tl.constexpr, SIGMOID: tl.constexpr
):  # fmt: skip
    """The work of the last program of a key head for one token. It stores the convolution's state
    of the channels of q and k, and replaces o by its gated norm. HK: H * K. channel: the first
    channel of q. p_o, p_gate: pointers to the first of the GROUP value heads. p_conv None: there is
    no convolution. p_gate None: there is no norm."""
    if p_gate is not None:
        o_d, o_g = tl.arange(0, V_BLOCK)[:, None], tl.arange(0, GROUP_BLOCK)[None, :]
        in_d = (o_d < V) & (o_g < GROUP)
        p_y = p_o + o_g.to(tl.int64) * stride_oh + o_d * stride_ov
        # Other programs have written o, so bypass the first cache, which may hold an old line.
        b_y = tl.load(p_y, mask=in_d, other=0, cache_modifier=".cg")
        p_z = p_gate + o_g.to(tl.int64) * stride_zh + o_d.to(tl.int64) * stride_zv
        b_z = tl.load(p_z, mask=in_d, other=0)
        p_w = norm_weight + o_d.to(tl.int64) * stride_norm + o_g * 0
        b_w = tl.load(p_w, mask=in_d, other=0)
    if p_conv is not None:
        o_k = tl.arange(0, BK)
        in_k = o_k < K
        o_q = channel + o_k
        x_q = tl.load(p_q + o_k * stride_qk, mask=in_k, other=0)
        x_k = tl.load(p_k + o_k * stride_kk, mask=in_k, other=0)
        old_q = earlier(p_conv, o_q, in_k, stride_cc, stride_cw, W)
        old_k = earlier(p_conv, o_q + HK, in_k, stride_cc, stride_cw, W)
        # Wait here, because several threads may read a channel that one of them writes.
        tl.debug_barrier()
        keep(p_conv, x_q, old_q, o_q, in_k, stride_cc, stride_cw, W)
        keep(p_conv, x_k, old_k, o_q + HK, in_k, stride_cc, stride_cw, W)
    if p_gate is not None:
        b_y = head_norms(b_y, in_d, b_w, b_z, V, 1, NORM_EPS, SIGMOID)
        tl.store(p_y, b_y, mask=in_d)
