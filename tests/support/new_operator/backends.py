"""The backends of `gdn_triton.scale_channels`: what each refuses, and what runs a call."""

from collections.abc import Callable

import torch
from torch import Tensor

from gdn_triton._host.backends import Backend, Operator, missing, reference_supports, triton_refusal
from gdn_triton._host.device import on_device
from gdn_triton._host.tensors import resolved
from gdn_triton.scale.problem import Scale
from gdn_triton.scale.validation import validate_scale

Run = Callable[[Tensor, Tensor], Tensor]


def triton_refuses(problem: Scale) -> str | None:
    """A sentence why the Triton kernel cannot run the call, or None."""
    if problem.unreadable is not None:
        return problem.unreadable
    if torch.float64 in problem.dtypes:
        return "The Triton kernels compute in float32 at most; one of the inputs is float64."
    if problem.needs_grad:
        return "The Triton kernel of the product has no backward; an input requires a gradient."
    return triton_refusal(problem.dtypes, problem.device.type, 1)


def _load_triton() -> Run:
    from gdn_triton.scale.triton import scale_fwd

    return scale_fwd


def _load_reference() -> Run:
    from gdn_triton.reference.scale import scale_channels

    return scale_channels


SCALE: Operator[Scale, Run] = Operator(
    "scale_channels",
    (
        missing("cuda", "The CUDA library has no product with a weight of each channel."),
        Backend("triton", triton_refuses, _load_triton),
        Backend("reference", reference_supports, _load_reference),
    ),
)


def run_scale(x: Tensor, weight: Tensor) -> Tensor:
    """Validates the call, and runs it in the backend that is chosen for it."""
    problem = validate_scale(x, weight)
    run = SCALE.choose(problem).run
    x, weight = resolved((x, weight))
    with on_device(problem.device):
        return run(x, weight)
