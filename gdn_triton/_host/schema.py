"""Checks before a call runs as an operator of torch's library."""

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from gdn_triton._host.arguments import in_float64


def schema_takes(given: Mapping[str, Any], tensors: Iterable[str], required: Iterable[str]) -> bool:
    """Whether an operator's schema takes the scale and the `tensors` without a conversion. Tensors
    that are not `required` may be None. If the result is False, the caller lets validation raise
    its error, since a schema would convert a value of a wrong type or raise an error of its own.
    The result is False too if only some tensors are on the meta device: torch increments the
    version of the tensors that an operator writes before the operator can refuse such a call."""
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
    """The arguments of a fake call, in a form that validation can check without contents.
    Validation reads offsets on the CPU, so all `tensors` move to the meta device, unless one is on
    an accelerator."""
    there = {name: given[name] for name in tensors if given[name] is not None}
    if any(y.device.type != "cpu" for y in there.values()):
        return dict(given)
    return {**given, **{name: torch.empty_like(y, device="meta") for name, y in there.items()}}
