"""Judges the calls of `gdn_triton.scale_channels` before anything is launched."""

from typing import Final

import torch
from torch import Tensor

from gdn_triton._host.arguments import (
    check_devices,
    check_dtypes,
    check_rank,
    check_shape,
    check_tensors,
    must,
    shape_of,
)
from gdn_triton._host.tensors import why_unreadable
from gdn_triton.scale.problem import Scale

NAMES: Final = ("x", "weight")


def validate_scale(x: Tensor, weight: Tensor) -> Scale:
    """Raises TypeError or ValueError with the argument, what was expected and what came."""
    given = {"x": x, "weight": weight}
    check_tensors(given, {})
    check_devices("x", x.device, given)
    check_rank("x", x, "B", "T", "D")
    D = x.shape[-1]
    if D < 1:
        raise ValueError(must("x", "have at least 1 channel in its last dimension", shape_of(x)))
    check_shape("weight", weight, D=D)
    check_dtypes(given, ())
    return Scale(
        D=D,
        device=x.device,
        dtypes=(x.dtype, weight.dtype),
        needs_grad=torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad),
        unreadable=why_unreadable(NAMES, (x, weight)),
    )
