"""What the calls that are operators of torch's library have in common before they become one."""

from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from gdn_triton._host.arguments import in_float64


def schema_takes(tensors: Iterable[object], required: Iterable[object], scale: Any) -> bool:
    """Whether a schema takes these arguments as they are: it converts what has the wrong type, or
    has no place for it. Where it does not, the error is validation's. Those of `tensors` that are
    not `required` may be None."""
    return (
        all(isinstance(y, Tensor) for y in required)
        and all(y is None or isinstance(y, Tensor) for y in tensors)
        and not isinstance(scale, bool)
        and (
            scale is None or type(scale) is float or (isinstance(scale, Real) and in_float64(scale))
        )
    )


def without_contents(tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """The tensors of a fake call for validation, which reads offsets that are on the CPU: all on
    the meta device, unless one is on an accelerator."""
    if any(y is not None and y.device.type != "cpu" for y in tensors):
        return tensors
    return [None if y is None else torch.empty_like(y, device="meta") for y in tensors]
