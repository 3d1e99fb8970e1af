"""Where the elements of an argument lie, and what else a tensor is than elements: the numbers are
those of a dense tensor, or the call is refused."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from function_cases import LAYER, TABLE, Function, copied, each, each_function, tensors
from outcome_cases import (
    Exact,
    Faults,
    assert_same_bits,
    refused,
    served_or_refused,
    served_together,
)
from tensor_cases import Named, Wrapped, negative, unwrapped
from torch import Tensor, nn

# ------------------------------------------------------------------------------------------ strides


def poisoned(shape: list[int], like: Tensor) -> Tensor:
    poison: float = True if like.dtype == torch.bool else -(2**28)
    if like.is_floating_point():
        poison = torch.nan
    return torch.full(shape, poison, dtype=like.dtype, device=like.device)


def with_gaps(x: Tensor, rng: random.Random) -> Tensor:
    """The values of x in memory whose dimensions are in another order and have gaps, all of it
    poison but for the values."""
    order = list(range(x.dim()))
    rng.shuffle(order)
    steps = [rng.choice((2, 3) if x.dim() == 1 else (1, 2, 3)) for _ in order]
    firsts = [rng.randrange(3) for _ in order]
    around = poisoned([f + x.shape[d] * s for f, d, s in zip(firsts, order, steps, strict=True)], x)
    cuts = [slice(f, f + x.shape[d] * s, s) for f, d, s in zip(firsts, order, steps, strict=True)]
    view = around[tuple(cuts)].permute([order.index(d) for d in range(x.dim())])
    assert view.shape == x.shape
    return view.copy_(x)


def reversed_order(x: Tensor, rng: random.Random) -> Tensor:
    """The first dimension is the dense one."""
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def within_storage(x: Tensor, rng: random.Random) -> Tensor:
    """Dense, but one element into its storage: aligned to nothing."""
    around = poisoned([x.numel() + 2], x)
    return around[1:-1].view(x.shape).copy_(x)


def columns(x: Tensor, rng: random.Random) -> Tensor:
    """Part of wider rows, as a projection is split."""
    around = poisoned([*x.shape[:-1], x.shape[-1] + 3], x)
    return around[..., 1:-2].copy_(x)


@pytest.mark.parametrize("view", [with_gaps, reversed_order, within_storage, columns])
@each_function
def test_strides(
    function: Function, view: Any, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, x = random.Random(function.name), function.arguments(device)
    exact = Exact(function, x, monkeypatch)
    changed = {name: partial(view, x[name], rng) for name in tensors(x)}
    served_together(function, x, changed, exact.check)


@each_function
def test_expanded(
    function: Function, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every element of each float is the same one, at strides of 0."""
    x = function.arguments(device)
    constant = {n: x[n].flatten()[0].expand(x[n].shape) for n in function.floats(x)}
    x |= {name: y.contiguous() for name, y in constant.items()}
    exact = Exact(function, x, monkeypatch)
    served_together(function, x, {n: lambda y=y: y for n, y in constant.items()}, exact.check)


@each_function
def test_what_is_read_is_not_written(function: Function, backend: str, device: str) -> None:
    """Nor is what lies around it."""
    rng, x = random.Random(0), function.arguments(device)
    views = {name: with_gaps(y, rng) for name, y in x.items() if isinstance(y, Tensor)}
    views = {name: y for name, y in views.items() if name not in function.named}
    views |= {name: x[name] for name in function.written}
    around = {name: y._base for name, y in views.items() if name not in function.written}
    before = {name: y.clone() for name, y in around.items()}
    function.run(x | views)
    for name, y in around.items():
        torch.testing.assert_close(y, before[name], rtol=0, atol=0, equal_nan=True, msg=name)


# ------------------------------------------------------------------------------------- the sign bit


@each_function
def test_negative_bit(
    function: Function, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A written tensor has no negative bit, because kernels write to memory."""
    x = function.arguments(device)
    exact = Exact(function, x, monkeypatch)
    function.run(copied(x))  # what is kept of a call without the bit is no other's
    # A tensor of integers has no such view.
    kept = {*function.written, *function.named}
    floats = function.all_floats(x)
    changed = {name: partial(negative, x[name]) for name in floats if name not in kept}
    exact.check(function.run(copied(x) | {name: make() for name, make in changed.items()}))
    faults = Faults()
    for name in [name for name in floats if name in kept]:
        with faults.of(name):
            given = copied(x) | {name: negative(x[name])}
            if function.exports == LAYER:  # writes by torch's operations
                exact.check(function.run(given))
            else:
                refused(function, given, name)
    faults.show()


@each_function
def test_real_parts(
    function: Function, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views of complex tensors, at twice the strides, and without the bit."""
    x = function.arguments(device)
    exact = Exact(function, x, monkeypatch)

    def real(y: Tensor) -> Tensor:
        return torch.complex(y, torch.full_like(y, torch.nan)).conj().real

    names = function.all_floats(x)
    changed = {name: partial(real, x[name]) for name in names}
    served_together(function, x, changed, exact.check)


# ------------------------------------------------------------------------------- types of tensors


@each_function
def test_subclass_with_memory(function: Function, backend: str, device: str) -> None:
    x = function.arguments(device)
    expected = function.run(copied(x))
    given = {name: x[name].as_subclass(Named) for name in tensors(x)}
    assert_same_bits(function.run(x | given), expected)


@each_function
def test_parameters(function: Function, backend: str, device: str) -> None:
    """Those that want no gradient, as of a frozen model; a pool may be one too."""
    x = function.arguments(device)
    expected = function.run(copied(x))
    names = [*function.floats(x), *function.written]
    given = {name: nn.Parameter(x[name].clone(), requires_grad=False) for name in names}
    assert_same_bits(function.run(x | given), expected)


@each(function for function in TABLE if function.exports != LAYER)
def test_subclass_without_memory(
    function: Function, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels refuse it by name; torch's operations take it where it reads like a tensor."""
    x = function.arguments(device)
    exact, faults = Exact(function, x, monkeypatch), Faults()
    function.run(copied(x))  # what is kept of a call without the type is no other's

    def check(found: Any) -> None:
        exact.check({name: unwrapped(y) for name, y in found.items()})

    for name in tensors(x):
        with faults.of(name):
            changed = copied(x)
            changed[name] = Wrapped(changed[name])
            if backend == "triton":
                refused(function, changed, name)
            else:
                served_or_refused(function, changed, check, name)
    faults.show()
