"""What the calls that are operators of torch's library have in common before they become one."""

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from gdn_triton._host.arguments import in_float64


def schema_takes(given: Mapping[str, Any], tensors: Iterable[str], required: Iterable[str]) -> bool:
    """Whether a schema takes these arguments as they are: it converts what has the wrong type, or
    has no place for it. Where it does not, the error is validation's. Judged are the scale and the
    `tensors`; those of them that are not `required` may be None. Nor does it take tensors with
    memory beside those of the meta device: before an operator refuses them, torch has raised the
    version of what it writes."""
    scale, optional = given["scale"], [given[name] for name in tensors]
    return (
        all(isinstance(given[name], Tensor) for name in required)
        and all(y is None or isinstance(y, Tensor) for y in optional)
        and len({y.device.type == "meta" for y in optional if y is not None}) <= 1
        and not isinstance(scale, bool)
        and (
            scale is None or type(scale) is float or (isinstance(scale, Real) and in_float64(scale))
        )
    )


def without_contents(given: Mapping[str, Any], tensors: Iterable[str]) -> dict[str, Any]:
    """The arguments of a fake call for validation, which reads offsets that are on the CPU: all
    `tensors` on the meta device, unless one is on an accelerator."""
    there = {name: given[name] for name in tensors if given[name] is not None}
    if any(y.device.type != "cpu" for y in there.values()):
        return dict(given)
    return {**given, **{name: torch.empty_like(y, device="meta") for name, y in there.items()}}
