"""The launch of the convolution's kernel (`gdn_triton.conv.triton.kernel`), alone or with the
preparation: its configurations and its arguments."""

import functools
from typing import NamedTuple

import torch
import triton

from gdn_triton._triton.launch import Launch
from gdn_triton._triton.strides import named
from gdn_triton._triton.taps import on_nvidia
from gdn_triton._triton.tiles import UNFUSED
from gdn_triton.constants import L2NORM_EPS, SOFTPLUS_THRESHOLD
from gdn_triton.conv.problem import ConvOperands, ConvProblem, PrepOperands
from gdn_triton.conv.triton.kernel import conv_kernel
from gdn_triton.conv.triton.rows import layout_of, strides
from gdn_triton.conv.triton.update import conv_walk
from gdn_triton.prep.triton import GATE_TILE


class Config(NamedTuple):
    """tokens: R, the tokens of a thread. lanes: the groups of R tokens of a program, for 128
    channels of 16 bits. columns: the bytes of a row that a program reads."""

    tokens: int
    lanes: int
    columns: int
    num_warps: int


TOKEN_MAJOR = Config(tokens=8, lanes=8, columns=256, num_warps=4)
# Neighbouring elements in memory are tokens here, and neighbouring threads load them.
CHANNEL_MAJOR = Config(tokens=1, lanes=64, columns=128, num_warps=4)


@functools.lru_cache(maxsize=256, typed=True)
def conv_launch(
    D: int,
    W: int,
    itemsize: int,
    align: int,
    channel_major: bool,
    heads: tuple[int, int, int] | None,
    V_COLUMNS: int,
    weight_strides: tuple[int, ...],
    bias_strides: tuple[int, ...],
    state_strides: tuple[int, ...],
    slot_strides: tuple[int, ...],
    flag_strides: tuple[int, ...],
    a_strides: tuple[int, ...],
    b_strides: tuple[int, ...],
    last_skipped: int,
    silu: bool,
    use_l2norm: bool,
    g_exp: bool,
) -> tuple[int, int, Launch]:
    """Returns the tokens of a block, the number of its programs, and the kernel with all arguments
    that do not depend on lengths. heads: H, HV, K, or None for the convolution alone."""
    config = CHANNEL_MAJOR if channel_major else TOKEN_MAJOR
    H, HV, K = heads or (0, 0, 1)
    BK = triton.next_power_of_2(K)
    columns = config.columns // itemsize
    BC = max(columns, BK) if use_l2norm else columns
    LANES = max(1, config.lanes * columns // BC)
    BT = LANES * config.tokens
    qk_parts = triton.cdiv(H, BC // BK) if use_l2norm else triton.cdiv(H * K, BC)
    v_parts = triton.cdiv(V_COLUMNS, BC)
    gate_parts = triton.cdiv(BT * HV, GATE_TILE)
    launch = Launch(
        conv_kernel,
        **named("bc", bias_strides),
        **named("sn sc sw", state_strides),
        **named("r", slot_strides),
        **named("i", flag_strides),
        **named("ab at ah", a_strides),
        **named("bb bt bh", b_strides),
        **named("wc ww", weight_strides),
        ALIGN=align,
        H=H,
        HV=HV,
        K=K,
        V_COLUMNS=V_COLUMNS,
        EPS=L2NORM_EPS,
        THRESHOLD=SOFTPLUS_THRESHOLD,
        NVIDIA=on_nvidia(),
        W=W,
        LANES=LANES,
        R=config.tokens,
        BC=BC,
        BK=BK,
        BG=GATE_TILE,
        QK_PARTS=qk_parts,
        V_PARTS=v_parts,
        GATE_PARTS=gate_parts,
        LAST_SKIPPED=last_skipped,
        SILU=silu,
        USE_L2NORM=use_l2norm,
        G_EXP=g_exp,
        CHANNEL_MAJOR=channel_major,
        **UNFUSED,
        num_warps=config.num_warps,
    )
    return BT, 2 * qk_parts + v_parts + gate_parts, launch


def launch_conv(
    problem: ConvProblem,
    given: ConvOperands,
    outputs: tuple[torch.Tensor | None, ...],
    prep: PrepOperands | None,
) -> None:
    """outputs: q, k, v, g, beta; only v for the convolution alone."""
    p = problem
    if p.B * p.T > 0:
        x, layout = layout_of(given.x)
        a, b = (prep.a, prep.b) if prep is not None else (None, None)
        BT, parts, launch = conv_launch(
            p.D,
            p.W,
            x.element_size(),
            layout.align,
            layout.channel_major,
            None if prep is None else (prep.H, prep.HV, prep.K),
            p.D if prep is None else prep.HV * prep.V,
            given.weight.stride(),
            strides(given.bias, 1),
            strides(given.state, 3),
            strides(given.read_slots, 1),
            strides(given.has_initial_state, 1),
            strides(a, 3),
            strides(b, 3),
            p.last_skipped,
            p.silu,
            prep is not None and prep.use_l2norm,
            prep is not None and prep.g_exp,
        )
        q, k, v, g, beta = outputs
        launch(
            (p.B * -(-p.T // BT) * parts, 1, 1),
            x=x,
            weight=given.weight,
            bias=given.bias,
            state=given.state,
            read_slots=given.read_slots,
            has_initial_state=given.has_initial_state,
            cu_seqlens=None if given.cu_seqlens is None else given.cu_seqlens.contiguous(),
            a=a,
            b=b,
            A_log=None if prep is None else prep.A_log.contiguous(),
            dt_bias=None if prep is None else prep.dt_bias.contiguous(),
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            T=p.T,
            N=p.N,
            STEPS=p.N.bit_length(),
            stride_xb=layout.batch,
            stride_xt=layout.token,
            stride_xc=layout.channel,
        )
    if given.state is not None:
        conv_walk(p, given, None)


def conv_fwd(problem: ConvProblem, given: ConvOperands) -> torch.Tensor:
    """Returns the convolution of x [B, T, D], contiguous, and writes the states."""
    y = given.x.new_empty((problem.B, problem.T, problem.D))
    launch_conv(problem, given, (None, None, y, None, None), None)
    return y


def conv_prep_fwd(
    problem: ConvProblem, given: ConvOperands, prep: PrepOperands
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns q, k [B, T, H, K] and v [B, T, HV, V] in x's dtype, and g and beta [B, T, HV] in
    fp32. Writes the states."""
    lead, x = (problem.B, problem.T), given.x
    q = x.new_empty((*lead, prep.H, prep.K))
    k = torch.empty_like(q)
    v = x.new_empty((*lead, prep.HV, prep.V))
    g = x.new_empty((*lead, prep.HV), dtype=torch.float32)
    beta = torch.empty_like(g)
    launch_conv(problem, given, (q, k, v, g, beta), prep)
    return q, k, v, g, beta
