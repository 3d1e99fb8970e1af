"""The convolution on Triton: forward, the step of decoding, and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gdn_triton._host.device import on_device
from gdn_triton._host.tensors import readable_gradient
from gdn_triton.conv.problem import ConvOperands, ConvProblem
from gdn_triton.conv.triton.backward import conv_bwd
from gdn_triton.conv.triton.forward import conv_fwd
from gdn_triton.conv.triton.update import conv_update_fwd


class _CausalConv1d(torch.autograd.Function):
    """Keeps its inputs, and nothing else."""

    @staticmethod
    def forward(ctx: Any, problem: ConvProblem, *tensors: Tensor | None) -> Tensor:
        x, weight, bias, cu_seqlens = tensors
        assert x is not None and weight is not None
        ctx.problem = problem
        ctx.save_for_backward(*tensors)
        return conv_fwd(problem, ConvOperands(x=x, weight=weight, bias=bias, cu_seqlens=cu_seqlens))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, cu_seqlens = ctx.saved_tensors
        dy = readable_gradient("y", dy)
        with on_device(x.device):
            dx, dweight, dbias = conv_bwd(ctx.problem, dy, x, weight, bias, cu_seqlens)
        return None, dx, dweight, dbias, None


def forward(problem: ConvProblem, given: ConvOperands) -> Tensor:
    """[B, T, D]; the states are written."""
    if problem.needs_grad:
        tensors = given.x, given.weight, given.bias, given.cu_seqlens
        y: Tensor = _CausalConv1d.apply(problem, *tensors)  # type: ignore[no-untyped-call]
        return y
    return conv_fwd(problem, given)


def update(problem: ConvProblem, given: ConvOperands) -> Tensor:
    """`forward` for few tokens a sequence, in one kernel with the states."""
    return conv_update_fwd(problem, given)
