"""The convolution on Triton: forward, the step of decoding, and gradients."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from gdn_triton._host.derivatives import IN_TRITON, found_once
from gdn_triton._host.device import on_device
from gdn_triton._host.tensors import readable_gradient
from gdn_triton.conv.problem import ConvOperands, ConvProblem
from gdn_triton.conv.triton.backward import conv_bwd
from gdn_triton.conv.triton.forward import conv_fwd
from gdn_triton.conv.triton.update import conv_update_fwd


class _CausalConv1d(torch.autograd.Function):
    """Saves only its inputs for the backward."""

    @staticmethod
    def forward(ctx: Any, problem: ConvProblem, *tensors: Tensor | None) -> Tensor:
        x, weight, bias, cu_seqlens = tensors
        assert x is not None and weight is not None
        ctx.problem = problem
        ctx.save_for_backward(*tensors)
        return conv_fwd(problem, ConvOperands(x=x, weight=weight, bias=bias, cu_seqlens=cu_seqlens))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dy = readable_gradient("y", dy)
        find = functools.partial(conv_bwd, ctx.problem)
        name = "gdn_triton.causal_conv1d"
        with on_device(dy.device):
            found = found_once(find, dy, *ctx.saved_tensors, operator=name, backends=IN_TRITON)
        return None, *found, None


def forward(problem: ConvProblem, given: ConvOperands) -> Tensor:
    """Returns y [B, T, D] and writes the states."""
    if problem.needs_grad:
        tensors = given.x, given.weight, given.bias, given.cu_seqlens
        y: Tensor = _CausalConv1d.apply(problem, *tensors)  # type: ignore[no-untyped-call]
        return y
    return conv_fwd(problem, given)


def update(problem: ConvProblem, given: ConvOperands) -> Tensor:
    """Runs `forward` for few tokens in each sequence, in one kernel that also writes the states."""
    return conv_update_fwd(problem, given)
