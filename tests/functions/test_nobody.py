"""Rows that belong to nobody: padding, skipped sequences and slots that no one reads hold anything;
and calls in which there are no others."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from call_cases import EMPTY, Batch
from function_cases import TABLE, Function, copied, each, each_with_gradients
from outcome_cases import Exact, Faults, assert_same_bits, owned
from torch import Tensor

POISONED = tuple(function for function in TABLE if function.nobody)


def poisoned(function: Function, x: dict[str, Any], value: float) -> dict[str, Any]:
    """The call with that value in all rows of nobody, and numbers far outside in its slots."""
    x = copied(x)
    for name, rows in function.nobody.items():
        if name in x:
            x[name][rows] = value if x[name].is_floating_point() else 2**28
    return x


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=["nan", "inf"])
@each(POISONED)
def test_what_nobody_s_rows_hold(
    function: Function, value: float, backend: str, device: str
) -> None:
    x = function.arguments(device)
    expected = owned(function, function.run(copied(x)))
    found = owned(function, function.run(poisoned(function, x, value)))
    assert all(y.isfinite().all() for y in found.values())
    assert_same_bits(found, expected)


@each_with_gradients(POISONED)
def test_gradients(function: Function, backend: str, device: str) -> None:
    """Nobody's rows reach no gradient, and their own is 0."""
    x = function.arguments(device)

    def gradients(x: dict[str, Any], value: float) -> dict[str, Tensor]:
        x = poisoned(function, x, value)
        names = function.floats(x)
        leaves = {name: x[name].requires_grad_() for name in names}
        results = {n: y for n, y in function.run(x).items() if y.requires_grad}
        torch.manual_seed(1)
        above = [torch.randn_like(y) for y in results.values()]
        found = torch.autograd.grad(list(results.values()), list(leaves.values()), above)
        return dict(zip(names, found, strict=True))

    expected, faults = gradients(x, 0.0), Faults()
    for name, dx in gradients(x, torch.nan).items():
        with faults.of(name):
            assert dx.isfinite().all()
            assert_same_bits({name: dx}, {name: expected[name]})
            assert name not in function.nobody or not dx[function.nobody[name]].any()
    faults.show()


def empty_calls() -> Iterator[Any]:
    """Packed, where the function takes offsets, and in rows, but for a context's tokens."""
    for function, (kind, batch) in itertools.product(TABLE, EMPTY.items()):
        is_packed = function.batch.offsets is not None
        in_rows = function.name != "chunk with cp_context"
        if in_rows if batch.offsets is None else is_packed:
            yield pytest.param(function, batch, id=f"{function.name}-{kind}")


@pytest.mark.parametrize(("function", "batch"), [*empty_calls()])
def test_empty_calls(
    function: Function, batch: Batch, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without tokens, without sequences, or both: shapes and dtypes as ever, states as they were,
    0 for tokens of nobody."""
    x = function.arguments(device, batch)
    exact = Exact(function, x, monkeypatch)
    found = function.run(copied(x))
    exact.check(found)
    full = function.run(function.arguments(device))
    for name, y in full.items():
        assert found[name].dtype == y.dtype and found[name].dim() == y.dim(), name
    if batch.offsets is not None and function.meaningless.keys() <= {"state"}:
        assert not found["result 0"].any()
    if backend in function.gradients:
        leaves = {name: x[name].clone().requires_grad_() for name in function.floats(x)}
        results = [y for y in function.run(copied(x) | leaves).values() if y.requires_grad]
        for y in torch.autograd.grad(
            sum(y.sum() for y in results),
            list(leaves.values()),
            allow_unused=True,
            materialize_grads=True,
        ):
            assert y.isfinite().all()
