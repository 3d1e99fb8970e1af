"""Modes that are set around a call, for other parts of a program, do not change its numbers."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch
from function_cases import (
    LAYER,
    TABLE,
    WRITING,
    Function,
    copied,
    each,
    each_function,
    each_with_gradients,
    tensors,
)
from outcome_cases import Faults, assert_same_bits, raised_by_the_package
from torch import Tensor


@contextmanager
def default_device() -> Iterator[None]:
    """As a program that makes a model without memory has it."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def autocast() -> AbstractContextManager[object]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.autocast(device, dtype=torch.bfloat16)


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "default device": default_device,
    "default dtype": default_dtype,
    "deterministic": deterministic,
    "autocast": autocast,
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
}


def changes(function: Function, mode: str) -> bool:
    """The projections of a layer are torch's, which autocast rounds, and it takes the recurrence
    where no gradient is wanted."""
    return function.exports == LAYER and mode in (
        "autocast",
        "no_grad",
        "inference mode",
    )


@each_function
def test_numbers(function: Function, backend: str, device: str) -> None:
    x, faults = function.arguments(device), Faults()
    expected = function.run(copied(x))
    for mode, enter in MODES.items():
        if not changes(function, mode):
            with faults.of(mode), enter():
                assert_same_bits(function.run(copied(x)), expected)
    faults.show()


def gradients(function: Function, x: dict[str, Any]) -> dict[str, Tensor]:
    leaves = {name: x[name].detach().clone().requires_grad_() for name in function.floats(x)}
    results = function.run(copied(x) | leaves)
    loss = sum(y.square().sum() for y in results.values() if y.requires_grad)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@each_with_gradients(TABLE)
def test_gradients(function: Function, backend: str, device: str) -> None:
    """Forward and backward inside of those modes in which there are gradients."""
    x = function.arguments(device)
    expected = gradients(function, x)
    with ExitStack() as modes:
        for mode in ("default device", "default dtype", "deterministic", "autocast"):
            if not changes(function, mode):
                modes.enter_context(MODES[mode]())
        found = gradients(function, x)
    assert_same_bits(found, expected)


@each(WRITING)
def test_what_inference_mode_made(
    function: Function, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of that mode, which have no version, are written outside of it by each backend or by
    none."""
    x = function.arguments(device)
    served, faults = {}, Faults()
    for backend in ("triton", "reference"):
        monkeypatch.setenv("GDN_BACKEND", backend)
        with torch.no_grad():  # a layer then takes the same rule
            expected = function.run(copied(x))
        with torch.inference_mode():
            given = copied(x) | {name: x[name].clone() for name in tensors(x)}
        with faults.of(backend), torch.no_grad():
            try:
                found = function.run(given)
            except Exception as error:
                assert raised_by_the_package(error), f"not a sentence of the package: {error}"
                served[backend] = False
            else:
                served[backend] = True
                assert_same_bits(found, expected)
    faults.show()
    assert len(set(served.values())) == 1, served
