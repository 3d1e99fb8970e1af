"""The record of a call of `gdn_triton.rms_norm_gated`."""

from typing import NamedTuple

import torch


class Norm(NamedTuple):
    """A validated call, from which its backend is chosen. D: channels of a row. dtypes: of x, gate
    and weight. needs_grad: grad mode is on and some input requires a gradient. unreadable: a
    sentence why no kernel can take the tensors, or None."""

    D: int
    eps: float
    activation: str
    round_norm: bool
    device: torch.device
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    needs_grad: bool = False
    unreadable: str | None = None
