"""A layer's step as its parts one after the other: the convolution, the rule, the norm. The parts
define the result of a step. Each part runs in the backend that is chosen for it."""

from collections.abc import Callable

import torch
from torch import Tensor

from gdn_triton._host.slots import LAST_SKIPPED
from gdn_triton._host.tensors import writing
from gdn_triton.conv.api import causal_conv1d_update
from gdn_triton.norm.api import rms_norm_gated
from gdn_triton.norm.backends import NORM
from gdn_triton.norm.validation import validate_norm
from gdn_triton.recurrent.api import check_step, recurrent_step
from gdn_triton.step.problem import (
    LayerCall,
    LayerOperands,
    LayerProblem,
    conv_arguments,
    step_arguments,
)


def plan(problem: LayerProblem, call: LayerCall) -> Callable[[LayerCall], Tensor]:
    return run


def run(call: LayerCall, norm: Callable[[LayerOperands, Tensor], Tensor] | None = None) -> Tensor:
    """Runs the parts. norm: a function that replaces o by its gated norm, except for the zeros of
    skipped sequences; None: `gdn_triton.rms_norm_gated`."""
    x, options = call.inputs, call.options
    step = step_arguments(call)
    of_norm = (options.norm_eps, options.norm_activation)
    # Make all checks before a state changes.
    check_step(mixed_qkv=x.mixed_qkv, **step)
    if x.gate is not None and x.norm_weight is not None and norm is None:
        NORM.choose(validate_norm(x.gate, x.gate, x.norm_weight, *of_norm, False))
    mixed_qkv = x.mixed_qkv
    if x.conv_weight is not None:
        mixed_qkv = causal_conv1d_update(mixed_qkv, **conv_arguments(call))
    o = recurrent_step(mixed_qkv=mixed_qkv, out=x.out, **step)
    if x.gate is None or x.norm_weight is None:
        return o
    if norm is not None:
        return norm(x, o)
    y = rms_norm_gated(o, x.gate, x.norm_weight, *of_norm)
    # Select y here, because the gate of a skipped sequence may hold NaN.
    live = _start_slots(call) > LAST_SKIPPED[options.skip]
    if x.cu_seqlens is not None:
        tokens = torch.arange(y.shape[-3], device=y.device)
        # Tokens after the last sequence have number N.
        of_token = torch.bucketize(tokens, x.cu_seqlens[1:].contiguous(), right=True)
        live = torch.cat([live, live.new_zeros(1)])[of_token]
        y = torch.where(live[:, None, None], y, 0)
    else:
        y = torch.where(live.view(-1, *(1,) * (y.dim() - 1)), y, 0)
    if x.out is None:
        return y
    with writing(x.out):
        return x.out.copy_(y)


def _start_slots(call: LayerCall) -> Tensor:
    """Returns [N]: the slot of the state from which each sequence starts, or padding."""
    slots, accepted = call.inputs.read_slots, call.inputs.num_accepted_tokens
    if accepted is None or slots.dim() == 1:
        return slots
    columns = torch.arange(1, slots.shape[1] + 1, device=slots.device)
    # A sequence whose number is not in 1 to S has no column.
    return torch.where(columns == accepted[:, None], slots, -1).amax(1)
