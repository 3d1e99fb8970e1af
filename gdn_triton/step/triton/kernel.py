"""A layer's decode step in one launch, with one token for each sequence:

    x = silu(bias + sum over j of weight[:, W - 1 - j] x_(t - j)),    q, k, v = x
    S = exp(g) S + k (x) beta (v - exp(g) S^T k),    o = scale S^T q
    y = weight o / sqrt(mean(o^2) + eps) act(gate)

A program handles one key head of one sequence and loops over the value heads of that key head.
Therefore no other program reads or writes the program's states or its channels of the convolution's
state. With one program per value head, one program would write channels of q and k that another
program still has to read. The norm needs all columns of a head, and one program has all of them.

q, k, v, the states and o have the same bits as those of `causal_conv1d_update` and
`recurrent_step`. The norm's sum of squares may differ from that of `rms_norm_gated` in its last
bits, because the order of that sum depends on the register layout of a head.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_triton._host.device import on_device
from gdn_triton._host.memory import count_writes
from gdn_triton._triton.activations import log_decay
from gdn_triton._triton.launch import Launch
from gdn_triton._triton.strides import named, state_strides
from gdn_triton._triton.taps import Filter, convolved, earlier, keep, on_nvidia, taps
from gdn_triton._triton.tiles import UNFUSED, gpu_of
from gdn_triton.constants import L2NORM_EPS, RCP_LN2, SOFTPLUS_THRESHOLD
from gdn_triton.recurrent.problem import tokens_apart
from gdn_triton.recurrent.triton.form import (
    STATES_BEYOND_CACHE,
    RecurrentForm,
    eviction_policy,
    recurrent_form,
)
from gdn_triton.recurrent.triton.kernel import decay_of, normalizer, strength
from gdn_triton.recurrent.triton.layer import head_norms
from gdn_triton.recurrent.triton.sums import column_sums, products
from gdn_triton.step.problem import LayerCall, LayerOperands, LayerProblem


@triton.jit
def layer_step_kernel(
    x, a, b, A_log, dt_bias, state, slots, conv_state, conv_weight, conv_bias, gate, norm_weight, y,
    scale, stride_xn, stride_xc, stride_an, stride_ah, stride_bn, stride_bh, stride_A, stride_dt,
    stride_hn, stride_hh, stride_s, stride_cn, stride_cc, stride_cw, stride_bias, stride_zn,
    stride_zh, stride_zv, stride_norm, stride_on, stride_oh, stride_ov,
    stride_wc: tl.constexpr, stride_ww: tl.constexpr, stride_hk: tl.constexpr,
    stride_hv: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    W: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr, TILES: tl.constexpr,
    PREFETCH: tl.constexpr, FOLD: tl.constexpr, SHARED: tl.constexpr, STATE_V_FIRST: tl.constexpr,
    RCP_LN2: tl.constexpr, EPS: tl.constexpr, THRESHOLD: tl.constexpr, USE_QK_L2NORM: tl.constexpr,
    BETA_FACTOR: tl.constexpr, LAST_SKIPPED: tl.constexpr, SILU: tl.constexpr,
    NORM_EPS: tl.constexpr, SIGMOID: tl.constexpr, NVIDIA: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """conv_weight None: x has been convolved. norm_weight None: y is o. A value head has PARTS
    tiles of BV columns. TILES is the power of two that holds the tiles of a key head. PREFETCH:
    load a tile while the tile before is used. FOLD: see `RecurrentForm`. SHARED: see
    `column_sums`."""
    pid = tl.program_id(0).to(tl.int64)
    i_n, i_h = pid // H, pid % H
    GROUP: tl.constexpr = HV // H
    KEPT: tl.constexpr = state.dtype.element_ty
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    # The channels of q and k have the shape [2, BK], and the channels of the tiles' columns
    # [BV, TILES]. The tensors are transposed, because the compiler would otherwise give a state
    # their register layout.
    is_k = tl.arange(0, 2)[:, None]
    c_qk = is_k * (H * K) + i_h * K + o_k[None, :]
    in_qk = (is_k < 2) & (o_k < K)[None, :]
    o_tile = tl.arange(0, TILES)[None, :]
    i_hv = i_h * GROUP + o_tile // PARTS
    o_d = o_tile % PARTS * BV + o_v[:, None]
    in_d = (o_tile < GROUP * PARTS) & (o_d < V)
    c_v = 2 * H * K + i_hv * V + o_d
    p_y = y + i_n * stride_on + i_hv * stride_oh + o_d.to(tl.int64) * stride_ov

    slot = tl.load(slots + i_n * stride_s).to(tl.int64)
    # These loads do not depend on the slot.
    p_x = x + i_n * stride_xn
    x_qk = tl.load(p_x + c_qk * stride_xc, mask=in_qk, other=0)
    x_v = tl.load(p_x + c_v * stride_xc, mask=in_d, other=0)
    if conv_weight is not None:
        f = Filter(conv_weight, conv_bias, stride_wc, stride_ww, stride_bias)
        w_qk, bias_qk = taps(f, c_qk, in_qk, W, False)
        w_v, bias_v = taps(f, c_v, in_d, W, False)
    # These are the gates of each tile's head.
    o_t = tl.arange(0, TILES)
    j_hv, in_t = i_h * GROUP + o_t // PARTS, o_t < GROUP * PARTS
    b_g = tl.load(a + i_n * stride_an + j_hv * stride_ah, mask=in_t, other=0).to(tl.float32)
    b_beta = tl.load(b + i_n * stride_bn + j_hv * stride_bh, mask=in_t, other=0)
    b_A = tl.load(A_log + j_hv * stride_A, mask=in_t, other=0).to(tl.float32)
    if dt_bias is not None:
        b_g += tl.load(dt_bias + j_hv * stride_dt, mask=in_t, other=0).to(tl.float32)
    if norm_weight is not None:
        p_z = gate + i_n * stride_zn + i_hv * stride_zh + o_d.to(tl.int64) * stride_zv
        b_z = tl.load(p_z, mask=in_d, other=0)
        b_w = tl.load(norm_weight + o_d.to(tl.int64) * stride_norm, mask=in_d, other=0)
    if slot <= LAST_SKIPPED:
        tl.store(p_y, tl.zeros([BV, TILES], dtype=y.dtype.element_ty), mask=in_d)
        return

    p_state = state + slot * stride_hn + i_h * GROUP * stride_hh
    o_state = o_k[:, None] * stride_hk + o_v[None, :] * stride_hv
    in_k = (o_k < K)[:, None]
    # Use a loop over tiles, because in an unrolled one the compiler would load all tiles at once.
    tile = tl.load(
        p_state + o_state, mask=in_k & (o_v < V)[None, :], other=0, eviction_policy=POLICY
    )
    if conv_weight is not None:
        p_conv = conv_state + slot * stride_cn
        old_qk = earlier(p_conv, c_qk, in_qk, stride_cc, stride_cw, W)
        old_v = earlier(p_conv, c_v, in_d, stride_cc, stride_cw, W)
        # Wait here, because several threads may read a channel that one of them writes.
        tl.debug_barrier()
        keep(p_conv, x_qk, old_qk, c_qk, in_qk, stride_cc, stride_cw, W)
        keep(p_conv, x_v, old_v, c_v, in_d, stride_cc, stride_cw, W)
        x_qk = convolved(x_qk, old_qk, w_qk, bias_qk, W, SILU, NVIDIA)
        x_v = convolved(x_v, old_v, w_v, bias_v, W, SILU, NVIDIA)
    # Select a column by a sum: the sum of a number's bits and of zeros is the number.
    qk_bits = x_qk.to(tl.float32).to(tl.int32, bitcast=True)
    v_bits = x_v.to(tl.float32).to(tl.int32, bitcast=True)
    b_q = tl.sum(tl.where(is_k == 0, qk_bits, 0), 0).to(tl.float32, bitcast=True)
    b_k = tl.sum(tl.where(is_k == 1, qk_bits, 0), 0).to(tl.float32, bitcast=True)

    # Multiply the sums of q or k, not their elements, by a scalar factor of q or k.
    of_q, of_k = scale, 1.0
    qq, kk, qk = products(b_q, b_k)
    if USE_QK_L2NORM:
        of_q = normalizer(qq, scale, EPS)
        of_k = normalizer(kk, 1.0, EPS)
    qk *= of_q
    b_y = tl.zeros([BV, TILES], dtype=y.dtype.element_ty)
    decays = decay_of(log_decay(b_g, b_A, tl.exp(b_A), THRESHOLD), RCP_LN2)
    betas = strength(b_beta, BETA_FACTOR)
    for t in range(0, GROUP * PARTS):
        end_v = V - t % PARTS * BV
        p = p_state + tl.cast(stride_hh, tl.int64) * (t // PARTS) + t % PARTS * BV * stride_hv
        p += o_state
        if PREFETCH:
            b_h = tile.to(tl.float32)
            more = tl.where(t + 1 < GROUP * PARTS, V - (t + 1) % PARTS * BV, 0)
            p_next = p_state + tl.cast(stride_hh, tl.int64) * ((t + 1) // PARTS)
            p_next += (t + 1) % PARTS * BV * stride_hv + o_state
            mask = in_k & (o_v < more)[None, :]
            tile = tl.load(p_next, mask=mask, other=0, eviction_policy=POLICY)
        else:
            if t > 0:
                mask = in_k & (o_v < end_v)[None, :]
                tile = tl.load(p, mask=mask, other=0, eviction_policy=POLICY)
            b_h = tile.to(tl.float32)
        decay = tl.sum(tl.where(o_t == t, decays, 0.0), 0)
        of_v = tl.sum(tl.where(o_t == t, betas, 0.0), 0)
        b_v = tl.sum(tl.where(o_tile == t, v_bits, 0), 1).to(tl.float32, bitcast=True)
        b_o, stored = column_sums((b_h,), 0, (b_q,), (b_k,), 1, FOLD, STATE_V_FIRST, K == BK,
                                  SHARED)  # fmt: skip
        b_o, stored = b_o * (of_q * decay), stored * (of_k * decay)
        b_v = (b_v - stored) * of_k
        b_v *= of_v
        b_o = tl.fma(b_v, qk, b_o).to(y.dtype.element_ty)
        b_y = tl.where(o_tile == t, b_o[:, None], b_y)
        kept = tl.fma(b_h, decay, b_k[:, None] * b_v[None, :]).to(KEPT)
        tl.store(p, kept, mask=in_k & (o_v < end_v)[None, :], eviction_policy=POLICY)

    if norm_weight is not None:
        b_y = head_norms(b_y, in_d, b_w, b_z, V, PARTS, NORM_EPS, SIGMOID)
    tl.store(p_y, b_y, mask=in_d)


class LayerForm(NamedTuple):
    """The form of a program. parts: the number of tiles of BV columns of a value head. prefetch: a
    program loads a tile while it uses the tile before. `prefetch` changes no bit of the result; nor
    does the number of warps for value-first states."""

    BK: int
    BV: int
    warps: int
    parts: int
    tiles: int
    prefetch: bool
    fold: int


def wide_form(p: LayerProblem, one_token: bool = True) -> RecurrentForm:
    """Returns the form of the step alone for many states. The bytes of all states change no bit,
    and the kernels of a layer do not choose their form by them. With more bytes the programs of a
    step would have tiles of four times the columns."""
    return recurrent_form(
        p.K,
        p.V,
        p.state_v_first,
        p.state_dtype.itemsize,
        one_token=one_token,
        state_bytes=STATES_BEYOND_CACHE - 1,
    )


def shares_rows(p: LayerProblem, warps: int) -> bool:
    """Returns whether the warps of a program share the rows of a column."""
    return not p.state_v_first and warps > 1


class ValueFirstForm(NamedTuple):
    """The most programs a multiprocessor for which a form of value-first states is the fastest, the
    warps that share a tile, and whether a program loads a tile while it uses the tile before."""

    programs: float
    warps: int
    prefetch: bool


# The key is the itemsize of the states, and whether a key head has more than FEW_CHANNELS channels
# of v. One tile a head is faster while a multiprocessor has one program, or two with 16-bit states.
# With up to four float32 programs tiles of two warps are faster. With more, tiles that are not
# prefetched are the fastest, because a thread then has 128 registers instead of 235, and four
# programs run at once instead of two. On an H200 1024 programs of two value heads took 72 us with 4
# warps, 73 with 2, 83 with 4 and prefetching; 512 took 38, 37 and 44. With more channels of v two
# warps spill, and tiles that are not prefetched take 168 registers, which was not timed.
FEW_CHANNELS = 256
ONE_TILE = ValueFirstForm(programs=1, warps=8, prefetch=True)
HALF_TILES = ValueFirstForm(programs=math.inf, warps=4, prefetch=True)
VALUE_FIRST_FORMS = {
    (4, False): (
        ONE_TILE,
        ValueFirstForm(programs=4, warps=2, prefetch=True),
        HALF_TILES._replace(prefetch=False),
    ),
    (4, True): (ONE_TILE, HALF_TILES),
    (2, False): (ONE_TILE._replace(programs=2), HALF_TILES),
    (2, True): (ONE_TILE._replace(programs=2), HALF_TILES),
}
# Below this number of programs the registers of a prefetched float32 tile cost more time than
# waiting for its loads.
LEAST_TO_PREFETCH = 32


def layer_form(p: LayerProblem) -> LayerForm:
    """Returns the form of the kernel, derived from `recurrent_form`. With value-first states a warp
    computes the sums over K alone. Therefore a program can have more warps, which share the columns
    of a head."""
    form = wide_form(p)
    BK, BV, warps = form.tile.BK, form.tile.BV, form.tile.num_warps
    programs, itemsize = p.N * p.H, p.state_dtype.itemsize
    prefetch = True
    if p.state_v_first:
        each = programs / gpu_of(p.device).multiprocessors
        key = itemsize, p.HV // p.H * p.V > FEW_CHANNELS
        found = next(x for x in VALUE_FIRST_FORMS[key] if each <= x.programs)
        more = min(found.warps, max(1, triton.next_power_of_2(p.V) // BV))
        BV, warps = BV * more, warps * more
        prefetch = found.prefetch and (itemsize == 2 or programs >= LEAST_TO_PREFETCH)
    parts = -(-p.V // BV)
    return LayerForm(
        BK=BK,
        BV=BV,
        warps=warps,
        parts=parts,
        tiles=triton.next_power_of_2(p.HV // p.H * parts),
        prefetch=prefetch,
        fold=form.fold,
    )


def strides(x: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if x is None else tuple(x.stride())


def slot_strides(x: LayerOperands) -> tuple[int, int]:
    """Returns the strides of read_slots, which is [N] or [N, S]; the second is 0 for [N]."""
    first, *second = x.read_slots.stride()
    return first, second[0] if second else 0


def parts_arguments(p: LayerProblem, x: LayerOperands) -> dict[str, Any]:
    """Returns the fixed arguments of the convolution and of the norm, in kernels that compute the
    norm in one program of a key head. x: the result of `one_token` or of `all_tokens`."""
    gate = "zn zh zv" if x.mixed_qkv.dim() == 2 else "zn zt zh zv"
    return {
        **named("cn cc cw", strides(x.conv_state, 3)),
        **named("wc ww", strides(x.conv_weight, 2)),
        **named("bias", strides(x.conv_bias, 1)),
        **named(gate, strides(x.gate, len(gate.split()))),
        **named("norm", strides(x.norm_weight, 1)),
        "W": max(p.W, 1),
        "SILU": p.silu,
        "GROUP_BLOCK": triton.next_power_of_2(p.HV // p.H),
        "V_BLOCK": triton.next_power_of_2(p.V),
        "NORM_EPS": p.norm_eps,
        "SIGMOID": p.norm_sigmoid,
        "NVIDIA": on_nvidia(),
    }


def make_launch(p: LayerProblem, x: LayerOperands) -> Launch:
    """Returns the launch. x: operands with one token for each sequence, without a dimension for
    tokens."""
    form = layer_form(p)
    return Launch(
        layer_step_kernel,
        scale=p.scale,
        **named("xn xc", strides(x.mixed_qkv, 2)),
        **named("an ah", strides(x.a, 2)),
        **named("bn bh", strides(x.b, 2)),
        **named("A", strides(x.A_log, 1)),
        **named("dt", strides(x.dt_bias, 1)),
        **named("hn hh hk hv", state_strides(x.state, p.state_v_first)),
        **named("s", strides(x.read_slots, 1)),
        **named("cn cc cw", strides(x.conv_state, 3)),
        **named("wc ww", strides(x.conv_weight, 2)),
        **named("bias", strides(x.conv_bias, 1)),
        **named("zn zh zv", strides(x.gate, 3)),
        **named("norm", strides(x.norm_weight, 1)),
        **named("on oh ov", strides(x.out, 3)),
        H=p.H,
        HV=p.HV,
        K=p.K,
        V=p.V,
        W=max(p.W, 1),
        BK=form.BK,
        BV=form.BV,
        PARTS=form.parts,
        TILES=form.tiles,
        PREFETCH=form.prefetch,
        FOLD=form.fold,
        SHARED=shares_rows(p, form.warps),
        STATE_V_FIRST=p.state_v_first,
        RCP_LN2=RCP_LN2,
        EPS=L2NORM_EPS,
        THRESHOLD=SOFTPLUS_THRESHOLD,
        USE_QK_L2NORM=p.use_qk_l2norm,
        BETA_FACTOR=2.0 if p.allow_neg_eigval else 1.0,
        LAST_SKIPPED=p.last_skipped,
        SILU=p.silu,
        NORM_EPS=p.norm_eps,
        SIGMOID=p.norm_sigmoid,
        NVIDIA=on_nvidia(),
        POLICY=eviction_policy(p.N * p.HV * p.K * p.V * p.state_dtype.itemsize),
        **UNFUSED,
        num_warps=form.warps,
        num_stages=1,
    )


def one_token(x: LayerOperands) -> LayerOperands:
    """Returns the operands of a call with one token for each sequence, without a dimension for
    tokens."""
    if x.mixed_qkv.dim() == 2:
        return x
    return x._replace(
        mixed_qkv=x.mixed_qkv[:, 0],
        a=x.a[:, 0],
        b=x.b[:, 0],
        gate=None if x.gate is None else x.gate[:, 0],
        out=None if x.out is None else x.out[:, 0],
    )


def all_tokens(p: LayerProblem, x: LayerOperands) -> LayerOperands:
    """Returns the operands with dimensions for rows and for tokens."""

    def apart(y: Tensor, dims: int) -> Tensor:
        return tokens_apart(y, dims, p.is_packed)

    return x._replace(
        mixed_qkv=apart(x.mixed_qkv, 1),
        a=apart(x.a, 1),
        b=apart(x.b, 1),
        gate=None if x.gate is None else apart(x.gate, 2),
        out=None if x.out is None else apart(x.out, 2),
    )


def output(p: LayerProblem, x: LayerOperands) -> Tensor:
    """Returns the tensor to which y is written."""
    if x.out is not None:
        return x.out
    shape = (*x.mixed_qkv.shape[:-1], p.HV, p.V)
    return torch.empty(shape, dtype=p.dtype, device=p.device)


def plan(problem: LayerProblem, call: LayerCall) -> Callable[[LayerCall], Tensor]:
    """Returns a function that runs all calls that differ from this one only in contents and
    addresses."""
    p = problem
    x = call.inputs._replace(out=output(p, call.inputs))
    launch = make_launch(p, one_token(x))

    def run(given: LayerCall) -> Tensor:
        x = given.inputs
        y = output(p, x)
        if p.N == 0:
            return y
        count_writes(x.state, x.conv_state, x.out)
        with on_device(p.device):
            launch(
                (p.N * p.H, 1, 1),
                x=x.mixed_qkv,
                a=x.a,
                b=x.b,
                A_log=x.A_log,
                dt_bias=x.dt_bias,
                state=x.state,
                slots=x.read_slots,
                conv_state=x.conv_state,
                conv_weight=x.conv_weight,
                conv_bias=x.conv_bias,
                gate=x.gate,
                norm_weight=x.norm_weight,
                y=y,
            )
        return y

    return run
