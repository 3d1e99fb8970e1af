"""`gdn_triton.rms_norm_gated` as operators of torch's library. A compiler sees these operators
only.

As in `gdn_triton.chunk.operators`, `gdn_triton::rms_norm_gated` is opaque, and validates its
arguments and chooses its backend at every run. Its gradient `gdn_triton::rms_norm_gated_bwd` runs
the call again under autograd and differentiates it. `import gdn_triton` imports this module.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from gdn_triton._host.replay import replayed_gradients
from gdn_triton.norm.backends import run_norm
from gdn_triton.norm.validation import validate_norm

_SCHEMA: Final = "Tensor x, Tensor gate, Tensor weight, float eps, str activation, bool round_norm"
# The number of arguments that are tensors. Each of them may have a gradient.
_TENSORS: Final = 3


@torch.library.custom_op(
    "gdn_triton::rms_norm_gated", mutates_args=(), schema=f"({_SCHEMA}) -> Tensor"
)
def _forward(*args: Any) -> Tensor:
    return run_norm(*args)


@_forward.register_fake
def _forward_fake(*args: Any) -> Tensor:
    validate_norm(*args)
    return args[0].new_empty(args[0].shape)


@torch.library.custom_op(
    "gdn_triton::rms_norm_gated_bwd",
    mutates_args=(),
    # There is one gradient for each tensor that requires one, in the order of the tensors.
    schema=f"(Tensor dy, {_SCHEMA}, bool[] wanted) -> Tensor[]",
)
def _backward(dy: Tensor, *args: Any) -> list[Tensor]:
    *call, wanted = args
    rest = call[_TENSORS:]

    def run(*leaves: Tensor | None) -> tuple[Tensor]:
        return (run_norm(*leaves, *rest),)  # type: ignore[arg-type]

    return replayed_gradients(run, call[:_TENSORS], wanted, (dy,))


@_backward.register_fake
def _backward_fake(dy: Tensor, *args: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, w in zip(args[:_TENSORS], args[-1], strict=True) if w]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS])
    ctx.rest = inputs[_TENSORS:]


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:_TENSORS])
    gradients = iter(_backward(dy, *ctx.saved_tensors, *ctx.rest, wanted))
    return (*(next(gradients) if w else None for w in wanted), *[None] * len(ctx.rest))


def _differentiate_twice(ctx: Any, *gradients: Any) -> NoReturn:
    raise RuntimeError(
        "gdn_triton.rms_norm_gated has no second derivative under a compiler: call it outside of "
        "one, with GDN_BACKEND=reference"
    )


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_differentiate_twice)


def traced(*args: Any) -> Tensor:
    """Runs `gdn_triton.rms_norm_gated` through its operator, in a trace. It validates first,
    because a schema would convert a value of a wrong type."""
    problem = validate_norm(*args)
    y: Tensor = torch.ops.gdn_triton.rms_norm_gated(
        *args[:_TENSORS], problem.eps, problem.activation, problem.round_norm
    )
    return y
