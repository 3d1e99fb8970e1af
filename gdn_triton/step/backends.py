"""The backends of `gdn_triton.layer_step`: the kernel of a whole step, and the parts of a step one
after the other."""

import functools
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from gdn_triton._host.backends import (
    Backend,
    Operator,
    missing,
    reference_supports,
    span_refusal,
    states_refusal,
    triton_refusal,
)
from gdn_triton.recurrent.api import call_of
from gdn_triton.recurrent.validation import validate_step
from gdn_triton.step.problem import MOST_TOKENS, LayerCall, LayerProblem, step_arguments

# Makes a function that runs a given call and all calls like it.
Plan = Callable[[LayerProblem, LayerCall], Callable[[LayerCall], Tensor]]

# The limits of the kernels: taps, bytes of a value-first row of a state, and tiles of a program.
WIDTHS: Final = (0, 2, 3, 4)
MOST_ROW: Final = 512
MOST_GROUP: Final = 8
MOST_V: Final = 256


@functools.lru_cache(maxsize=256)
def kernel_refusal(p: LayerProblem) -> str | None:
    """Returns a sentence why the call cannot be one launch, or None. The parts may still run on
    kernels."""
    if not 1 <= p.T <= MOST_TOKENS:
        return (
            f"The kernels of a layer's step take 1 to {MOST_TOKENS} tokens a sequence; T is {p.T}."
        )
    if p.W not in WIDTHS:
        return f"The Triton kernels take 2, 3 or 4 taps; conv_weight has {p.W}."
    if torch.float64 in p.dtypes:
        return "The Triton kernels compute in float32 at most; one of the inputs is float64."
    if p.HV // p.H > MOST_GROUP or p.V > MOST_V:
        return (
            f"The kernel of a layer's step takes up to {MOST_GROUP} value heads a key head and "
            f"V up to {MOST_V}; HV / H is {p.HV // p.H}, V is {p.V}."
        )
    if p.has_window:
        return None
    if p.state_v_first and p.K * p.state_dtype.itemsize > MOST_ROW:
        return (
            f"The kernel of a layer's step takes value-first states of up to {MOST_ROW} bytes a "
            f"row; one has {p.K * p.state_dtype.itemsize}."
        )
    return None


def triton_supports(p: LayerProblem) -> str | None:
    """Returns a sentence why the kernel cannot run the call, or None."""
    if p.unreadable is not None:
        return p.unreadable
    refusal = kernel_refusal(p) or triton_refusal((p.dtype,), p.device.type, p.K)
    return refusal or states_refusal(p.state_dtype) or span_refusal(p.tile_span)


@functools.cache
def load_triton() -> Plan:
    """Returns the function that plans a call. It takes the first kernel that serves the call:

        layer_tokens_kernel     1 to 8 tokens, if the programs are few
        layer_step_kernel       one token
        window_one_fwd_kernel   one token with a window, if the programs are few
        layer_window_kernel     several tokens with a window, if the programs are few

    Otherwise the parts run one after the other, and `layer_norm_kernel` is the norm.
    """
    from gdn_triton.step import parts
    from gdn_triton.step.triton import kernel, tokens_plan, window

    def planned(problem: LayerProblem, call: LayerCall) -> Callable[[LayerCall], Tensor]:
        p = problem
        # The kernels of one token take only its read slot.
        is_plain = not (p.most_accepted or p.has_write_slots or p.is_tree or p.is_packed)
        # `layer_step_kernel` would spill with key-first states of 16 bits.
        has_kernel = is_plain and (p.state_v_first or p.state_dtype.itemsize == 4)
        if not p.has_window:
            if tokens_plan.serves_tokens(p):
                return tokens_plan.plan(p, call)
            if p.T == 1 and has_kernel:
                return kernel.plan(p, call)
        elif not p.is_tree:
            step = call_of(mixed_qkv=call.inputs.mixed_qkv, **step_arguments(call))
            rule = validate_step(step)
            if p.T == 1 and is_plain and window.is_one_launch(p, rule):
                return window.plan(p, call, rule, step.inputs)
            if (p.T > 1 or p.is_packed) and tokens_plan.serves_window_tokens(p, rule):
                return tokens_plan.plan_window(p, call, rule, step.inputs)
        norm = window.plan_norm(problem, call.inputs) if problem.has_norm else None
        return functools.partial(parts.run, norm=norm)

    return planned


@functools.cache
def _load_parts() -> Plan:
    from gdn_triton.step import parts

    return parts.plan


LAYER_STEP: Operator[LayerProblem, Plan] = Operator(
    "layer_step",
    (
        missing("cuda", "The CUDA library has no kernel for a layer's step."),
        Backend("triton", triton_supports, load_triton),
        # Run the parts, each in the backend that is chosen for it.
        Backend("reference", reference_supports, _load_parts),
    ),
)


def runs_parts(p: LayerProblem) -> bool:
    """Returns whether the parts run for every value of `GDN_BACKEND`. Each part then reads the
    value."""
    return p.unreadable is None and kernel_refusal(p) is not None


def plan_of(p: LayerProblem, call: LayerCall) -> Callable[[LayerCall], Tensor]:
    """Returns a function that makes one launch if the kernel accepts the call, and runs the parts
    otherwise."""
    if runs_parts(p):
        return _load_parts()(p, call)
    return LAYER_STEP.choose(p).run(p, call)
