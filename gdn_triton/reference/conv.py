"""The causal depthwise convolution in plain torch: the specification of `gdn_triton.causal_conv1d`,
and its CPU backend.

The function is differentiable by autograd. `gdn_triton.causal_conv1d` checks the arguments.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["causal_conv1d", "with_earlier"]


def with_earlier(x: Tensor, W: int, state: Tensor | None = None) -> Tensor:
    """Concatenates the W - 1 tokens before x, from a state [..., D, W - 1] or zeros, and x
    [..., T, D] to [..., W - 1 + T, D]. The state after t tokens is rows t to t + W - 2 of the
    result."""
    if state is None:
        return F.pad(x, (0, 0, W - 1, 0))
    return torch.cat([state.mT.to(x.dtype), x], -2)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    silu: bool = True,
    state: Tensor | None = None,
) -> Tensor:
    """Computes y_t = silu(bias + sum over j of weight[:, W - 1 - j] * x_(t - j)) for each sequence.

    Args:
        x: [..., T, D]: sequences of T tokens. weight: [D, W]. bias: [D], or None for 0. state:
            [..., D, W - 1], the tokens before the first token, in order; None: zeros. Any float
            dtypes.
        silu: False: no activation.

    Returns:
        [..., T, D] in x's dtype, computed in float32, or float64 if x, weight or bias is.
    """
    inputs = (x, weight) if bias is None else (x, weight, bias)
    wide = torch.float64 if any(y.dtype == torch.float64 for y in inputs) else torch.float32
    T, W = x.shape[-2], weight.shape[1]
    tokens, taps = with_earlier(x.to(wide), W, state), weight.to(wide)
    y = torch.zeros_like(tokens[..., W - 1 :, :])
    if bias is not None:
        y = y + bias.to(wide)
    for i in range(W):
        y = y + tokens[..., i : i + T, :] * taps[:, i]
    return (F.silu(y) if silu else y).to(x.dtype)
