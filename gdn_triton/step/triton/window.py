"""A layer's decode step with a window in one launch, with one token for each sequence.

The kernel is that of `gdn_triton.recurrent_step` with a window, whose programs have a part of a
value head each, so that a few sequences occupy a GPU. Each program computes the convolution of its
q and k anew. The last program of a key head to come writes the convolution's state of these
channels, which the others read, and computes the norms, which need all parts of a head. The tickets
of the window count the programs, and no program waits for another one.
"""

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from gdn_triton._host.device import on_device
from gdn_triton._host.memory import count_writes
from gdn_triton._triton.strides import named
from gdn_triton._triton.taps import on_nvidia
from gdn_triton.recurrent.problem import Operands, RecurrentProblem, views
from gdn_triton.recurrent.triton.window_plan import make_launch, step_grid
from gdn_triton.step.problem import LayerCall, LayerProblem
from gdn_triton.step.triton.kernel import one_token, strides


def plan(
    problem: LayerProblem, call: LayerCall, rule: RecurrentProblem, operands: Operands
) -> Callable[[LayerCall], Tensor]:
    """Returns a function that runs calls that differ from this one in contents and addresses only.
    rule, operands: those of the step of the recurrence in this call."""
    p, x = problem, one_token(call.inputs)
    shape = (*call.inputs.mixed_qkv.shape[:-1], p.HV, p.V)
    y = torch.empty(p.N, 1, p.HV, p.V, dtype=p.dtype, device=p.device)
    layer = {
        **named("cn cc cw", strides(x.conv_state, 3)),
        **named("wc ww", strides(x.conv_weight, 2)),
        **named("bias", strides(x.conv_bias, 1)),
        **named("zn zh zv", strides(x.gate, 3)),
        **named("norm", strides(x.norm_weight, 1)),
        "W": max(p.W, 1),
        "SILU": p.silu,
        "GROUP_BLOCK": triton.next_power_of_2(p.HV // p.H),
        "V_BLOCK": triton.next_power_of_2(p.V),
        "NORM_EPS": p.norm_eps,
        "SIGMOID": p.norm_sigmoid,
        "NVIDIA": on_nvidia(),
    }
    launch, grid = make_launch(rule, views(rule, operands), y, layer), step_grid(rule)
    counts = p.W > 0 or x.norm_weight is not None

    def run(given: LayerCall) -> Tensor:
        x, window = given.inputs, given.window
        y = torch.empty(shape, dtype=p.dtype, device=p.device)
        if p.N == 0:
            return y
        tickets = window.tickets if counts else None
        written = (window.u, window.k, window.g, window.calls, window.scales, tickets)
        count_writes(x.state, x.conv_state, *written)
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
