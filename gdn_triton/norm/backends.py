"""Judges the arguments of `gdn_triton.rms_norm_gated`, chooses a backend and runs it.

The backends are those of `gdn_triton._host.backends`; no CUDA kernel is among them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from gdn_triton._host.arguments import (
    FLOAT_DTYPES,
    FLOATS,
    STRIDED,
    check_devices,
    check_dtype,
    check_flags,
    check_tensors,
    must,
    real_or_none,
    shape_of,
    value_of,
)
from gdn_triton._host.backends import Backend, Operator, missing, reference_supports, triton_refusal
from gdn_triton._host.device import on_device
from gdn_triton._host.tensors import resolved, why_unreadable
from gdn_triton.norm.problem import Norm

ACTIVATIONS: Final = ("silu", "sigmoid")
# Channels of a row that the Triton kernels hold in registers.
MAX_D: Final = 8192
NAMES: Final = ("x", "gate", "weight")

Run = Callable[[Norm, Tensor, Tensor, Tensor], Tensor]


def validate_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str, round_norm: bool
) -> Norm:
    """Checks the arguments of `gdn_triton.rms_norm_gated`, which documents them.

    In this order: types, devices, ranks, sizes, dtypes. Raises TypeError or ValueError with the
    argument, what was expected and what came. Reads shapes only, nothing on a device.
    """
    if not (
        isinstance(x, Tensor)
        and isinstance(gate, Tensor)
        and isinstance(weight, Tensor)
        and x.layout is gate.layout is weight.layout is STRIDED
        and not (x.is_nested or gate.is_nested or weight.is_nested)
    ):
        check_tensors({"x": x, "gate": gate, "weight": weight}, {})
    if type(eps) is not float:
        number = real_or_none("eps", eps)
        if number is None:
            raise TypeError(must("eps", "be a real number", value_of(eps)))
        eps = number
    if not 0.0 <= eps < math.inf:
        raise ValueError(must("eps", "be finite and at least 0", value_of(eps)))
    if type(activation) is not str or activation not in ACTIVATIONS:
        names = " or ".join(map(repr, ACTIVATIONS))
        raise ValueError(must("activation", f"be {names}", value_of(activation)))
    if round_norm is not True and round_norm is not False:
        check_flags(round_norm=round_norm)
    device = x.device
    if not gate.device == device == weight.device:
        check_devices("x", device, {"gate": gate, "weight": weight})
    if x.dim() < 1:
        raise ValueError(must("x", "have at least 1 dimension [..., D]", shape_of(x)))
    if gate.shape != x.shape:
        raise ValueError(must("gate", f"have the shape of x, {list(x.shape)}", shape_of(gate)))
    D = x.shape[-1]
    if D < 1:
        raise ValueError(must("x", "have at least 1 channel in its last dimension", shape_of(x)))
    if weight.shape != (D,):
        raise ValueError(must("weight", f"have shape [D={D}]", shape_of(weight)))
    dtypes = (x.dtype, gate.dtype, weight.dtype)
    if not FLOAT_DTYPES.issuperset(dtypes):
        for name, y in zip(NAMES, (x, gate, weight), strict=True):
            check_dtype(name, y, FLOAT_DTYPES, FLOATS)
    needs_grad = torch.is_grad_enabled() and (
        x.requires_grad or gate.requires_grad or weight.requires_grad
    )
    return Norm(
        D=D,
        eps=eps,
        activation=activation,
        round_norm=round_norm,
        device=device,
        dtypes=dtypes,
        needs_grad=needs_grad,
        unreadable=why_unreadable(NAMES, (x, gate, weight)),
    )


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


@functools.cache
def _load_triton() -> Run:
    from gdn_triton.norm.triton import forward

    return forward


@functools.cache
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
    run = NORM.choose(problem).load()
    x, gate, weight = resolved((x, gate, weight))
    with on_device(problem.device):
        return run(problem, x, gate, weight)
