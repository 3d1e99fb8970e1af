"""The backends of the convolution, and the functions that run a call in one of them.

The backends are triton and reference of `gdn_triton._host.backends`. There is no CUDA kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from gdn_triton._host.backends import Backend, Operator, missing, reference_supports, triton_limits
from gdn_triton._host.device import on_device
from gdn_triton.conv.problem import ConvOperands, ConvProblem
from gdn_triton.conv.validation import (
    PLAIN,
    ConvArguments,
    Form,
    PrepArguments,
    operands,
    validate_conv,
)

# The numbers of taps that the Triton kernels have. The reference has no limit.
TRITON_WIDTHS: Final = (2, 3, 4)


@functools.cache
def _limits(dtype: torch.dtype, device_type: str, D: int) -> str | None:
    return triton_limits((dtype,), device_type, 1, 1, D)


def conv_refusal(problem: ConvProblem) -> str | None:
    """A sentence why the Triton kernels cannot run the convolution, or None."""
    p = problem
    if p.unreadable is not None:
        return p.unreadable
    if p.wide:
        return "The Triton kernels compute in float32 at most; one of the inputs is float64."
    if p.W not in TRITON_WIDTHS:
        return f"The Triton kernels take 2, 3 or 4 taps; the weight has {p.W}."
    if p.needs_grad and p.has_state:
        return (
            "The Triton backward starts from no state; an input requires a gradient and a state is "
            "given. Call under torch.no_grad() if none is wanted."
        )
    return _limits(p.dtype, p.device.type, p.D)


ConvRun = Callable[[ConvProblem, ConvOperands], Tensor]


def _load_triton() -> ConvRun:
    from gdn_triton.conv.triton import autograd

    return autograd.forward


def _load_triton_update() -> ConvRun:
    from gdn_triton.conv.triton import autograd

    return autograd.update


def _load_reference() -> ConvRun:
    from gdn_triton.conv import reference

    return reference.forward


NO_CUDA = missing("cuda", "The CUDA library has no convolution.")
_REFERENCE: Backend[ConvProblem, ConvRun] = Backend(
    "reference", reference_supports, _load_reference
)
CONV: Operator[ConvProblem, ConvRun] = Operator(
    "causal_conv1d", (NO_CUDA, Backend("triton", conv_refusal, _load_triton), _REFERENCE)
)
CONV_UPDATE: Operator[ConvProblem, ConvRun] = Operator(
    "causal_conv1d_update",
    (NO_CUDA, Backend("triton", conv_refusal, _load_triton_update), _REFERENCE),
)


def run_conv(args: ConvArguments, form: Form = PLAIN) -> Tensor:
    """Runs the convolution, which writes the states. Returns y in the shape of x."""
    problem = validate_conv(args, form)
    return run_valid_conv(problem, args, form)


def run_valid_conv(
    problem: ConvProblem, args: ConvArguments, form: Form, prep: PrepArguments | None = None
) -> Tensor:
    """prep: the tensors of a preparation that follows, None without one."""
    given = operands(problem, args, form, prep)
    run = (CONV_UPDATE if form.is_step else CONV).choose(problem).run
    with on_device(problem.device):
        y = run(problem, given)
    return y.view(args.x.shape)
