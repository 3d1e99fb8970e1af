"""A layer's decode step with a window, with one token for each sequence, in one launch or in three.

One launch runs the kernel of `gdn_triton.recurrent_step` with a window. Each of its programs has a
part of one value head, so a few sequences are enough to occupy a GPU. Every program computes the
convolution of its own q and k. The last program of a key head to finish writes the convolution's
state of these channels, which the other programs read before, and computes the norms, which need
all parts of a head. The tickets of the window count the finished programs. No program waits for
another program.

Measured on an H100: with many programs the repeated convolution, its registers and the tickets cost
more than two further launches. Therefore a larger call is three launches: the update of the
convolution, the step of the recurrence, and `layer_norm_kernel`. Both forms give the same bits.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from gdn_triton._host.device import on_device
from gdn_triton._host.memory import count_writes
from gdn_triton._triton.launch import Launch
from gdn_triton._triton.strides import named
from gdn_triton._triton.tiles import UNFUSED
from gdn_triton.recurrent.problem import Operands, RecurrentProblem, tokens_apart, views
from gdn_triton.recurrent.triton.layer import finish_layer
from gdn_triton.recurrent.triton.window_plan import make_launch, step_grid
from gdn_triton.step.problem import LayerCall, LayerOperands, LayerProblem
from gdn_triton.step.triton.kernel import (
    all_tokens,
    one_token,
    output,
    parts_arguments,
    slot_strides,
    strides,
)
from gdn_triton.step.triton.tokens import start_slot

# The largest number of programs in one launch, by the bytes of an element of the states. With more
# 16-bit states a step alone runs the kernel of `recurrent/triton/hopper/window.py`: on an H200 64
# sequences of 8 heads took 15 us in three launches and 20 in one.
MOST_PROGRAMS = {4: 256, 2: 512}


# The offsets of packed sequences that a program compares at once.
OFFSETS = tl.constexpr(256)


@triton.jit
def sequence_of(cu_seqlens, stride_seq, N, i_t):
    """Returns the sequence of token i_t of a packed call: the number of sequences that end at or
    before the token, which is N after the last sequence."""
    o_n = tl.arange(0, OFFSETS)
    ended = tl.zeros([OFFSETS], dtype=tl.int32)
    for first in range(0, N, OFFSETS):
        p_end = cu_seqlens + (first + o_n + 1).to(tl.int64) * stride_seq
        in_n = first + o_n < N
        ended += ((tl.load(p_end, mask=in_n, other=0) <= i_t) & in_n).to(tl.int32)
    return tl.sum(ended, 0).to(tl.int64)


@triton.jit(do_not_specialize=["N"])
def layer_norm_kernel(
    o, gate, norm_weight, slots, num_accepted_tokens, cu_seqlens, N, stride_s, stride_sc, stride_n,
    stride_seq, stride_ob, stride_ot, stride_oh, stride_ov, stride_zn, stride_zt, stride_zh,
    stride_zv, stride_norm, T: tl.constexpr, S: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr,
    V: tl.constexpr, GROUP_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, LAST_SKIPPED: tl.constexpr,
    NORM_EPS: tl.constexpr, SIGMOID: tl.constexpr
):  # fmt: skip
    """Replaces o [N, T, HV, V] by its gated norm. A program handles the value heads of one key head
    of a token. It does not change the o of a skipped sequence. slots: [N], or [N, S] with
    num_accepted_tokens. cu_seqlens: the tokens of the N sequences are packed, and T is not used."""
    pid = tl.program_id(0).to(tl.int64)
    i_n, i_t, i_h = pid // (T * H), pid // H % T, pid % H
    i_b, known = i_n, True
    if cu_seqlens is not None:
        i_b, i_t = i_n * 0, pid // H
        i_n = sequence_of(cu_seqlens, stride_seq, N, i_t)
        known = i_n < N
    p_slot = slots + i_n * stride_s
    slot = start_slot(p_slot, num_accepted_tokens, i_n, known, stride_sc, stride_n, S, LAST_SKIPPED)
    if slot > LAST_SKIPPED:
        p_gate = gate + i_b * stride_zn + i_t * stride_zt + i_h * GROUP * stride_zh
        p_o = o + i_b * stride_ob + i_t * stride_ot + i_h * GROUP * stride_oh
        finish_layer(
            p_o, None, None, None, p_gate, norm_weight, 0, stride_oh, stride_ov, 0, 0, 0, 0,
            stride_zh, stride_zv, stride_norm, GROUP, 0, 1, V, 1, GROUP_BLOCK, V_BLOCK, 1,
            NORM_EPS, SIGMOID
        )  # fmt: skip


def is_one_launch(p: LayerProblem, rule: RecurrentProblem) -> bool:
    """Returns whether the call is one launch. rule: the step of the recurrence."""
    most = MOST_PROGRAMS.get(p.state_dtype.itemsize, 0)
    has_parts = p.W > 0 or p.has_norm
    return not has_parts or (p.has_tickets and step_grid(rule)[0] <= most)


def plan_norm(p: LayerProblem, x: LayerOperands) -> Callable[[LayerOperands, Tensor], Tensor]:
    """Returns a function that replaces o by its gated norm and returns o."""
    x = all_tokens(p, x._replace(out=output(p, x)))
    group = p.HV // p.H
    launch = Launch(
        layer_norm_kernel,
        **named("s sc", slot_strides(x)),
        **named("n", strides(x.num_accepted_tokens, 1)),
        **named("seq", strides(x.cu_seqlens, 1)),
        **named("ob ot oh ov", strides(x.out, 4)),
        **named("zn zt zh zv", strides(x.gate, 4)),
        **named("norm", strides(x.norm_weight, 1)),
        T=1 if p.is_packed else p.T,
        S=p.most_accepted,
        H=p.H,
        GROUP=group,
        V=p.V,
        GROUP_BLOCK=triton.next_power_of_2(group),
        V_BLOCK=triton.next_power_of_2(p.V),
        LAST_SKIPPED=p.last_skipped,
        NORM_EPS=p.norm_eps,
        SIGMOID=p.norm_sigmoid,
        **UNFUSED,
        num_warps=1,
    )

    def run(given: LayerOperands, o: Tensor) -> Tensor:
        if p.tokens > 0:
            with on_device(p.device):
                launch(
                    (p.tokens * p.H, 1, 1),
                    o=o,
                    gate=given.gate,
                    norm_weight=given.norm_weight,
                    slots=given.read_slots,
                    num_accepted_tokens=None if p.has_window else given.num_accepted_tokens,
                    cu_seqlens=given.cu_seqlens,
                    N=p.N,
                )
        return o

    return run


def plan(
    problem: LayerProblem, call: LayerCall, rule: RecurrentProblem, operands: Operands
) -> Callable[[LayerCall], Tensor]:
    """Returns a function that makes one launch, for all calls that differ from this one only in
    contents and addresses. rule, operands: the call's step of the recurrence and its operands."""
    p, x = problem, one_token(call.inputs._replace(out=output(problem, call.inputs)))
    layer = parts_arguments(p, x)
    assert x.out is not None
    y = tokens_apart(x.out, 2, is_varlen=False)
    launch, grid = make_launch(rule, views(rule, operands), y, layer), step_grid(rule)
    counts = p.W > 0 or p.has_norm

    def run(given: LayerCall) -> Tensor:
        x, window = given.inputs, given.window
        y = output(p, x)
        if p.N == 0:
            return y
        tickets = window.tickets if counts else None
        # Every launch leaves the tickets at zero.
        written = (window.u, window.k, window.g, window.calls, window.scales)
        count_writes(x.state, x.conv_state, x.out, *written)
        with on_device(p.device):
            launch(
                grid,
                q=x.mixed_qkv,
                k=x.mixed_qkv,
                v=x.mixed_qkv,
                g=x.a,
                beta=x.b,
                A_log=x.A_log,
                dt_bias=x.dt_bias,
                o=y,
                state=x.state,
                u_rows=window.u,
                k_rows=window.k,
                g_rows=window.g,
                call_rows=window.calls,
                start=window.start,
                slots=x.read_slots,
                positions=given.positions,
                scales=window.scales,
                conv_state=x.conv_state,
                conv_weight=x.conv_weight,
                conv_bias=x.conv_bias,
                gate=x.gate,
                norm_weight=x.norm_weight,
                tickets=tickets,
                N=p.N,
            )
        return y

    return run
