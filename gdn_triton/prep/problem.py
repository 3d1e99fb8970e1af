"""The record of a call of `gdn_triton.fused_post_conv_prep`."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

PreparedInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

# The names of all tensors except the first, whose name differs between callers.
GATE_TENSORS: Final = ("a", "b", "A_log", "dt_bias")


class Sizes(NamedTuple):
    """The properties of a validated call that choose its backend. wide: an input is float64.
    needs_grad: grad mode is on and an input requires a gradient; validation does not set it.
    unreadable: a sentence why no kernel can take the tensors, or None."""

    H: int
    HV: int
    K: int
    V: int
    device: torch.device
    dtype: torch.dtype
    wide: bool
    needs_grad: bool = False
    unreadable: str | None = None


def with_gradients(sizes: Sizes, needs_grad: bool) -> Sizes:
    # Only a call that needs gradients makes a second record.
    return sizes._replace(needs_grad=True) if needs_grad else sizes
