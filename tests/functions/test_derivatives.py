"""Gradients, and gradients of gradients: right, or refused; never those of constants. Backends
without any refuse the call (test_refusals.py)."""

from typing import Any

import pytest
import torch
from function_cases import TABLE, Function, copied, each_with_gradients, wide
from outcome_cases import assert_near, has_word, raised_by_the_package
from torch import Tensor


def leaves_of(function: Function, x: dict[str, Any]) -> dict[str, Tensor]:
    return {name: x[name].detach().clone().requires_grad_() for name in function.floats(x)}


def differentiable(results: dict[str, Tensor]) -> list[Tensor]:
    return [y for name, y in results.items() if name.startswith("result") and y.requires_grad]


def first(function: Function, x: dict[str, Any]) -> dict[str, Tensor]:
    leaves = leaves_of(function, x)
    loss = sum(y.square().sum() for y in differentiable(function.run(copied(x) | leaves)))
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def second(function: Function, x: dict[str, Any], *, linear: bool) -> dict[str, Tensor]:
    """The gradient of a penalty on gradients. linear: those of the sum of all results, whose own
    gradient is the constant 1, and does not require one."""
    leaves = leaves_of(function, x)
    results = differentiable(function.run(copied(x) | leaves))
    loss = sum(y.sum() if linear else y.square().sum() for y in results)
    inputs = list(leaves.values())
    found = torch.autograd.grad(loss, inputs, create_graph=True)
    penalty = sum(dx.square().sum() for dx in found)
    again = torch.autograd.grad(penalty, inputs, allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, again, strict=True))


@each_with_gradients(TABLE)
def test_first(
    function: Function, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = function.arguments(device)
    found = first(function, x)
    monkeypatch.setenv("GDN_BACKEND", "reference")
    # The forward rounds in each of its steps, and so does the backward.
    assert_near(found, first(function, wide(x)), first(function, x), passes=2)


@pytest.mark.parametrize("linear", [True, False], ids=["constant", "varying"])
@each_with_gradients(TABLE)
def test_second(
    function: Function, linear: bool, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient that comes from above requires one itself, or none."""
    x = function.arguments(device)
    try:
        found = second(function, x, linear=linear)
    except RuntimeError as error:
        # Autograd runs a backward from C++, so that the last frame is still the package's.
        assert raised_by_the_package(error), f"not a sentence of the package: {error}"
        assert has_word(str(error), "second derivative"), error
        assert backend != "reference" or "cp_context" in x, "the reference has them all"
        return
    monkeypatch.setenv("GDN_BACKEND", "reference")
    exact = second(function, wide(x), linear=linear)
    # The same, and the derivative of both.
    assert_near(found, exact, second(function, x, linear=linear), passes=4)
