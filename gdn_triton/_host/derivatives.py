"""Gradients that kernels compute. They have no second derivative, and asking for one is an error.

A kernel records no operation. Its gradients would pass for constants under ``create_graph=True``,
and the gradient of a penalty on them would silently be 0. torch's `once_differentiable` raises only
if an incoming gradient requires a gradient, and the gradient that ``y.sum()`` sends does not. Every
backward of this package that runs kernels, or an exchange between ranks, therefore finds its
gradients by `found_once`.
"""

from collections.abc import Callable
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

# Sentences that name the backends without a second derivative, and a remedy.
IN_TRITON: Final = "in the Triton backend: use GDN_BACKEND=reference for one"
IN_KERNELS: Final = "in the Triton backend, nor in the CUDA one: use GDN_BACKEND=reference for one"
IN_NONE: Final = "in any backend"


class _FoundOnce(torch.autograd.Function):
    """The gradients as a function of all tensors that they depend on. Its derivative is an
    error."""

    @staticmethod
    def forward(
        ctx: Any,
        find: Callable[..., tuple[Tensor | None, ...]],
        refusal: str,
        *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.refusal = refusal
        return tuple(find(*tensors))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> NoReturn:
        raise RuntimeError(ctx.refusal)


def found_once(
    find: Callable[..., tuple[Tensor | None, ...]],
    *tensors: Tensor | None,
    operator: str,
    backends: str,
) -> tuple[Tensor | None, ...]:
    """Returns `find(*tensors)` in the form that the backward of an autograd function returns.

    Differentiating a result raises RuntimeError, whose sentence names `operator` and `backends`.

    Args:
        find: runs without recording. It may read no other tensor that requires a gradient.
        tensors: the incoming gradients and the saved inputs.
        operator: the public name of the function. backends: one of the sentences above.
    """
    if not torch.is_grad_enabled():
        return tuple(find(*tensors))
    refusal = f"{operator} has no second derivative {backends}"
    return _FoundOnce.apply(find, refusal, *tensors)  # type: ignore[no-any-return, no-untyped-call]
