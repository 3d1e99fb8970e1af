"""The backends of `gdn_triton.rms_norm_gated`: their refusals, and the function that runs a call.

The backends are triton and reference of `gdn_triton._host.backends`. There is no CUDA kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from gdn_triton._host.backends import Backend, Operator, missing, reference_supports, triton_refusal
from gdn_triton._host.device import on_device
from gdn_triton._host.tensors import resolved
from gdn_triton.norm.problem import Norm
from gdn_triton.norm.validation import validate_norm

# The most channels of a row that the Triton kernels hold in registers.
MAX_D: Final = 8192

Run = Callable[[Norm, Tensor, Tensor, Tensor], Tensor]


@functools.lru_cache(maxsize=256)
def triton_refuses(problem: Norm) -> str | None:
    """A sentence why the Triton kernels cannot run the call, or None."""
    if problem.unreadable is not None:
        return problem.unreadable
    if torch.float64 in problem.dtypes:
        return "The Triton kernels compute in float32 at most; one of the inputs is float64."
    if problem.D > MAX_D:
        return f"The Triton kernels norm rows of up to {MAX_D} channels; D is {problem.D}."
    return triton_refusal(problem.dtypes, problem.device.type, 1)


def _load_triton() -> Run:
    from gdn_triton.norm.triton import forward

    return forward


def _load_reference() -> Run:
    from gdn_triton.reference.norm import rms_norm_gated

    def forward(p: Norm, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return rms_norm_gated(x, gate, weight, p.eps, p.activation, p.round_norm)

    return forward


NORM: Operator[Norm, Run] = Operator(
    "rms_norm_gated",
    (
        missing("cuda", "The CUDA library has no norm."),
        Backend("triton", triton_refuses, _load_triton),
        Backend("reference", reference_supports, _load_reference),
    ),
)


def run_norm(x: Tensor, gate: Tensor, weight: Tensor, *options: Any) -> Tensor:
    """Validates the call, and runs it in the backend that is chosen for it."""
    problem = validate_norm(x, gate, weight, *options)
    run = NORM.choose(problem).run
    x, gate, weight = resolved((x, gate, weight))
    with on_device(problem.device):
        return run(problem, x, gate, weight)
