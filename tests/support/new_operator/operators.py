"""`gdn_triton.scale_channels` as operators of torch's library, which is what a compiler sees."""

from __future__ import annotations

from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from gdn_triton._host.replay import replayed_gradients
from gdn_triton.scale.backends import run_scale
from gdn_triton.scale.validation import validate_scale

_SCHEMA: Final = "Tensor x, Tensor weight"


@torch.library.custom_op(
    "gdn_triton::scale_channels",
    mutates_args=(),
    schema=f"({_SCHEMA}, bool needs_grad) -> Tensor",
)
def _forward(x: Tensor, weight: Tensor, needs_grad: bool) -> Tensor:
    return run_scale(x, weight)


@_forward.register_fake
def _forward_fake(x: Tensor, weight: Tensor, needs_grad: bool) -> Tensor:
    validate_scale(x, weight)
    return x.new_empty(x.shape)


@torch.library.custom_op(
    "gdn_triton::scale_channels_bwd",
    mutates_args=(),
    schema=f"(Tensor dy, {_SCHEMA}, bool[] wanted) -> Tensor[]",
)
def _backward(dy: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]) -> list[Tensor]:
    from gdn_triton.reference.scale import scale_channels

    def run(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (scale_channels(x, weight),)

    return replayed_gradients(run, (x, weight), wanted, (dy,))


@_backward.register_fake
def _backward_fake(dy: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]) -> list[Tensor]:
    return [y.new_empty(y.shape) for y, want in zip((x, weight), wanted, strict=True) if want]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:2])
    gradients = iter(_backward(dy, *ctx.saved_tensors, wanted))
    return (*(next(gradients) if want else None for want in wanted), None)


def _differentiate_twice(ctx: Any, *gradients: Any) -> NoReturn:
    raise RuntimeError(
        "gdn_triton.scale_channels has no second derivative under a compiler: call it outside of "
        "one, with GDN_BACKEND=reference"
    )


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_differentiate_twice)


def traced(x: Tensor, weight: Tensor) -> Tensor:
    """`gdn_triton.scale_channels` through the operator."""
    y: Tensor = torch.ops.gdn_triton.scale_channels(x, weight, validate_scale(x, weight).needs_grad)
    return y
