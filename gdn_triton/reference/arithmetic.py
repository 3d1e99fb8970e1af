"""Arithmetic of the specification: its dtype, and matrix products and triangular solves whose
derivatives ignore autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Returns float64 if any tensor is float64, else float32."""
    wide = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if wide else torch.float32


def upcast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Converts all tensors to their common compute dtype."""
    dtype = compute_dtype(*tensors)
    return tuple(x.to(dtype) for x in tensors)


def ignores_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Disables autocast, which would silently run the products in half precision, and mix their
    dtype with the state's dtype."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        tensor = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        with torch.autocast(tensor.device.type, enabled=False):
            return function(*args, **kwargs)

    return wrapped


# Autocast may differ between forward and backward: torch's backward of a product runs in half
# precision if `backward` is called inside autocast, even if the forward ran outside. The gradients
# below disable autocast. They call the same two functions, so second derivatives ignore autocast
# too. If autograd records nothing, torch's functions run directly.


class _Product(torch.autograd.Function):
    """a @ b with leading dimensions that broadcast."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    @ignores_autocast
    def backward(ctx: Any, dc: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        wants_a, wants_b = ctx.needs_input_grad
        return (
            product(dc, b.mT).sum_to_size(a.shape) if wants_a else None,
            product(a.mT, dc).sum_to_size(b.shape) if wants_b else None,
        )

    @staticmethod
    def jvp(ctx: Any, da: Tensor, db: Tensor) -> Tensor:
        a, b = ctx.saved_tensors
        return product(da, b) + product(a, db)


class _TriangularSolve(torch.autograd.Function):
    """Solves (I + A) X = B for X. A is strictly lower or strictly upper triangular, and has B's
    leading dimensions."""

    generate_vmap_rule = True

    @staticmethod
    def forward(A: Tensor, B: Tensor, upper: bool) -> Tensor:
        # With unitriangular=True torch does not read the diagonal and assumes ones, so A can be
        # passed instead of I + A.
        return torch.linalg.solve_triangular(A, B, upper=upper, unitriangular=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        A, _, ctx.upper = inputs
        ctx.save_for_backward(A, output)
        ctx.save_for_forward(A, output)

    @staticmethod
    @ignores_autocast
    def backward(ctx: Any, dX: Tensor) -> tuple[Tensor | None, ...]:
        A, X = ctx.saved_tensors
        dB = triangular_solve(A.mT, dX, not ctx.upper)
        dA = -product(dB, X.mT) if ctx.needs_input_grad[0] else None
        return None if dA is None else _strict_part(dA, ctx.upper), dB, None

    @staticmethod
    def jvp(ctx: Any, dA: Tensor, dB: Tensor, _: None) -> Tensor:
        A, X = ctx.saved_tensors
        return triangular_solve(A, dB - product(_strict_part(dA, ctx.upper), X), ctx.upper)


def _strict_part(A: Tensor, upper: bool) -> Tensor:
    """Returns A with its diagonal and the other triangle set to 0."""
    return A.triu(1) if upper else A.tril(-1)


def _records(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b with leading dimensions that broadcast. The derivatives ignore autocast. The
    product itself ignores autocast only inside of `ignores_autocast`."""
    if not _records(a, b):
        return a @ b
    c: Tensor = _Product.apply(a, b)  # type: ignore[no-untyped-call]
    return c


def triangular_solve(A: Tensor, B: Tensor, upper: bool) -> Tensor:
    """Solves as `_TriangularSolve` does. The derivatives ignore autocast."""
    if not _records(A, B):
        return _TriangularSolve.forward(A, B, upper)
    X: Tensor = _TriangularSolve.apply(A, B, upper)  # type: ignore[no-untyped-call]
    return X
