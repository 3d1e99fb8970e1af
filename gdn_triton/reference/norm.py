"""The gated norm of a Gated DeltaNet layer, in plain torch: the specification of
`gdn_triton.rms_norm_gated`, and its CPU backend.

The function is differentiable by autograd. `gdn_triton.rms_norm_gated` checks the arguments.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gdn_triton.reference.activations import sigmoid

__all__ = ["rms_norm_gated"]


def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    activation: str = "silu",
    round_norm: bool = False,
) -> Tensor:
    """Returns weight * x / sqrt(mean(x^2) + eps) * activation(gate), in the dtype and the shape of
    x.

    The arithmetic is float32, or float64 if any argument is. round_norm: round x / sqrt(..) to the
    dtype of x, and its product with weight to the dtype to which torch promotes x and weight.
    """
    wide = torch.float64 if torch.float64 in (x.dtype, gate.dtype, weight.dtype) else torch.float32
    y = x.to(wide)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    y = weight * y.to(x.dtype) if round_norm else weight.to(wide) * y
    z = gate.to(wide)
    y = y * (F.silu(z) if activation == "silu" else sigmoid(z))
    # Return a new contiguous tensor for any strides of the arguments.
    return y.to(x.dtype).contiguous()
