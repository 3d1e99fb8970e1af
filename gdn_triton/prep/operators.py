"""`gdn_triton.fused_post_conv_prep` as operators of torch's library. A compiler sees these only.

As in `gdn_triton.chunk.operators`, `gdn_triton::fused_post_conv_prep` is opaque, and validates its
arguments and chooses its backend at every run. Its gradient `gdn_triton::fused_post_conv_prep_bwd`
runs the reference again and differentiates it. `import gdn_triton` imports this module.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from gdn_triton._host.replay import replayed_gradients
from gdn_triton.prep.backends import choose_post_conv, run_post_conv
from gdn_triton.prep.problem import PreparedInputs
from gdn_triton.prep.validation import validate_post_conv

_SCHEMA: Final = (
    "Tensor conv_output, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, int num_k_heads, "
    "int head_k_dim, int head_v_dim, bool apply_l2norm, bool output_g_exp"
)
# The number of arguments that are tensors. Each of them may have a gradient.
_TENSORS: Final = 5


@torch.library.custom_op(
    "gdn_triton::fused_post_conv_prep",
    mutates_args=(),
    schema=f"({_SCHEMA}, bool needs_grad) -> (Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta)",
)
def _forward(*args: Any) -> PreparedInputs:
    *call, needs_grad = args
    return run_post_conv(choose_post_conv(validate_post_conv(*call), needs_grad), *call)


@_forward.register_fake
def _forward_fake(*args: Any) -> PreparedInputs:
    x, a = args[:2]
    sizes = validate_post_conv(*args[:-1])
    L, H, HV, K, V = x.shape[0], sizes.H, sizes.HV, sizes.K, sizes.V
    q, k, v = x.new_empty(L, H, K), x.new_empty(L, H, K), x.new_empty(L, HV, V)
    dtype = torch.float64 if sizes.wide else torch.float32
    return q, k, v, a.new_empty(L, HV, dtype=dtype), a.new_empty(L, HV, dtype=dtype)


@torch.library.custom_op(
    "gdn_triton::fused_post_conv_prep_bwd",
    mutates_args=(),
    # There is one gradient for each tensor that requires one, in the order of the tensors.
    schema=f"(Tensor? dq, Tensor? dk, Tensor? dv, Tensor? dg, Tensor? dbeta, {_SCHEMA}, "
    "bool[] wanted) -> Tensor[]",
)
def _backward(
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dg: Tensor | None,
    dbeta: Tensor | None,
    *args: Any,
) -> list[Tensor]:
    from gdn_triton.reference import prep as reference_post_conv

    rest = args[_TENSORS:-1]
    return replayed_gradients(
        lambda *leaves: reference_post_conv.fused_post_conv_prep(*leaves, *rest),
        args[:_TENSORS],
        args[-1],
        (dq, dk, dv, dg, dbeta),
    )


@_backward.register_fake
def _backward_fake(
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dg: Tensor | None,
    dbeta: Tensor | None,
    *args: Any,
) -> list[Tensor]:
    wanted = args[-1]
    return [x.new_empty(x.shape) for x, w in zip(args[:_TENSORS], wanted, strict=True) if w]


def _save(ctx: Any, inputs: tuple[Any, ...], output: PreparedInputs) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS])
    ctx.rest = inputs[_TENSORS:-1]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:_TENSORS])
    gradients = iter(_backward(*grads, *ctx.saved_tensors, *ctx.rest, wanted))
    others = [None] * (len(ctx.rest) + 1)
    return (*(next(gradients) if w else None for w in wanted), *others)


def _differentiate_twice(ctx: Any, *gradients: Any) -> NoReturn:
    raise RuntimeError(
        "gdn_triton.fused_post_conv_prep has no second derivative under a compiler: call it "
        "outside of one, with GDN_BACKEND=reference"
    )


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_differentiate_twice)


def traced(*args: Any) -> PreparedInputs:
    """Runs `gdn_triton.fused_post_conv_prep` through its operator, in a trace."""
    tensors, sizes, flags = args[:_TENSORS], args[_TENSORS:-2], args[-2:]
    # Validate first, because a schema would convert a value of a wrong type.
    if (
        not all(isinstance(x, Tensor) for x in tensors)
        or not all(type(size) is int for size in sizes)
        or not all(flag is True or flag is False for flag in flags)
    ):
        validate_post_conv(*args)
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    q, k, v, g, beta = torch.ops.gdn_triton.fused_post_conv_prep(*args, needs_grad)
    return q, k, v, g, beta
