"""The record of a call of `gdn_triton.scale_channels`."""

from typing import NamedTuple

import torch


class Scale(NamedTuple):
    """A validated call. dtypes: of x and weight. needs_grad: grad mode is on and some input
    requires a gradient. unreadable: a sentence why no kernel can take the tensors, or None."""

    D: int
    device: torch.device
    dtypes: tuple[torch.dtype, torch.dtype]
    needs_grad: bool
    unreadable: str | None
