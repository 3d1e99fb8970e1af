"""The record of a call of `gdn_triton.rms_norm_gated`."""

from typing import NamedTuple

import torch


class Norm(NamedTuple):
    """The properties of a validated call that choose its backend. D: the channels of a row. dtypes:
    the dtypes of x, gate and weight. needs_grad: grad mode is on and an input requires a gradient.
    unreadable: a sentence why no kernel can take the tensors, or None."""

    D: int
    eps: float
    activation: str
    round_norm: bool
    device: torch.device
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    needs_grad: bool = False
    unreadable: str | None = None
