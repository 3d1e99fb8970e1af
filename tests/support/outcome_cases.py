"""The allowed outcomes of a call with an unusual argument: the right numbers, or a refusal by the
package that names the argument and has written nothing."""

import linecache
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from function_cases import Function, copied, wide
from helpers import FP64, TRANSCENDENTALS, assert_within_budget, same_bits
from torch import Tensor

import gdn_triton

PACKAGE = str(Path(gdn_triton.__file__).parent)
# In results of so few numbers each step of the computation may round in the same direction: the
# norm or the activation, the decay, the product and the sum.
ROUNDINGS = 4
REFUSALS = (TypeError, ValueError, NotImplementedError, RuntimeError)
Results = Mapping[str, Tensor]


class Faults:
    """Collects all faults of a test, so that one run shows them all."""

    def __init__(self) -> None:
        self.found: list[str] = []

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.found.append(f"{what}: {type(error).__name__}: {str(error)[:400]}")

    def show(self) -> None:
        if self.found:
            pytest.fail("\n".join(self.found), pytrace=False)


# ----------------------------------------------------------------------------------------- refusals


def raised_by_the_package(error: BaseException) -> bool:
    """Whether the package itself raised the error, not an operation that it called."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(last.filename, last.lineno or 0)
    return last.filename.startswith(PACKAGE) and line.strip().startswith("raise ")


def assert_refusal(error: Exception, *names: str) -> None:
    """The sentence has one of the names as a word."""
    assert isinstance(error, REFUSALS), f"{type(error).__name__} is no refusal: {error}"
    assert raised_by_the_package(error), f"not a sentence of the package: {error}"
    assert any(has_word(str(error), name) for name in names), (
        f"no word of {' or '.join(names)} in: {error}"
    )


def has_word(sentence: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", sentence) is not None


class Untouched:
    """The contents of the tensors that a call writes, before the call."""

    def __init__(self, function: Function, x: Mapping[str, Any]) -> None:
        given = {name: x[name] for name in function.written if isinstance(x.get(name), Tensor)}
        # Tensors without memory, or of another layout, are only given where they are refused.
        self.given = {
            name: y
            for name, y in given.items()
            if y.layout == torch.strided and not y.is_nested and not y.is_meta
        }
        self.copies = {name: y.detach().clone() for name, y in self.given.items()}
        self.versions = {name: version(y) for name, y in self.given.items()}

    def check(self) -> None:
        for name, y in self.given.items():
            assert torch.equal(bytes_of(y), bytes_of(self.copies[name])), (
                f"{name} was written, then refused"
            )
            assert version(y) == self.versions[name], f"the version of {name} was raised"


def bytes_of(x: Tensor) -> Tensor:
    """NaN among them: memory that was shared may hold some."""
    return x.detach().resolve_neg().resolve_conj().contiguous().flatten().view(torch.uint8)


def version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def names_of(function: Function, x: Mapping[str, Any], *names: str) -> list[str]:
    """As errors may call them; without names all arguments of the call."""
    return [*(names or x), *(function.known_as(name) for name in names or x)]


def refused(function: Function, x: Mapping[str, Any], *names: str) -> None:
    """The call is refused with one of the names, without names with any, and writes nothing."""
    before = Untouched(function, x)
    try:
        function.run(x)
    except Exception as error:
        assert_refusal(error, *names_of(function, x, *names))
        before.check()
    else:
        raise AssertionError("it was served")


def served_or_refused(
    function: Function, x: Mapping[str, Any], check: Callable[[Results], None], *names: str
) -> bool:
    """Whether the call was served; then its results pass the check."""
    before = Untouched(function, x)
    try:
        found = function.run(x)
    except Exception as error:
        assert_refusal(error, *names_of(function, x, *names))
        before.check()
        return False
    check(found)
    return True


def served_together(
    function: Function,
    x: Mapping[str, Any],
    changed: Mapping[str, Callable[[], Any]],
    check: Callable[[Results], None],
) -> None:
    """All changes in one call, without those that are refused by name; where that is wrong, each by
    itself, so that the error names it."""
    left = dict(changed)
    while True:
        given = copied(x) | {name: change() for name, change in left.items()}
        before = Untouched(function, given)
        try:
            found = function.run(given)
        except Exception as error:
            before.check()
            if raised_by_the_package(error) and str(error).startswith("GDN_BACKEND="):
                return  # the backend that was asked for has no such call
            assert_refusal(error, *names_of(function, given, *left))
            for name in tuple(left):
                if any(has_word(str(error), word) for word in names_of(function, x, name)):
                    del left[name]
        else:
            break
    # A record of tensors that are written in place takes no others.
    assert left or changed.keys() <= function.named.keys(), "each change is refused"
    try:
        check(found)
    except AssertionError as error:
        faults = Faults()
        for name, change in left.items():
            with faults.of(name):
                check(function.run(copied(x) | {name: change()}))
        raise AssertionError("\n".join([str(error), *faults.found])) from None


# ----------------------------------------------------------------------------------- right numbers


def assert_same_bits(found: Results, expected: Results) -> None:
    assert found.keys() == expected.keys()
    for name, y in expected.items():
        y, z = y.detach(), found[name].detach().as_subclass(Tensor)
        assert same_bits(z, y), f"{name} has other bits"


def unit_of(x: Tensor, given: float = 0.0, passes: int = 1) -> float:
    """The unit roundoff of a result. given: that of the arguments, where it is larger. passes: how
    often the steps of a call run, one after another. On a GPU products of fp32 are three products
    in tf32, with twice its 11 bits."""
    products = 2.0**-22 if x.is_cuda else 0.0
    unit = max(given, products, torch.finfo(x.dtype).eps / 2)
    transcendentals = 0.0 if x.dtype == FP64 else TRANSCENDENTALS
    return passes * (ROUNDINGS * unit + transcendentals)


def assert_near(
    found: Results, exact: Results, narrow: Results, unit: float = 0.0, passes: int = 1
) -> None:
    """exact: in float64. narrow: by an independent computation. unit: of the arguments. passes: of
    `unit_of`."""
    assert found.keys() == exact.keys() == narrow.keys()
    for name, y in found.items():
        y = y.detach().as_subclass(Tensor)
        if not y.is_floating_point():
            assert torch.equal(y, exact[name]), f"{name} has other numbers"
            continue
        expected, independent = exact[name].detach().to(FP64), narrow[name].detach().to(FP64)
        limit = unit_of(y, unit, passes)
        assert_within_budget(name, y, expected, independent, dtype=y.dtype, unit=limit)


class Exact:
    """The results of a call by the reference in float64, and, for the error that is allowed, in the
    precision of the arguments."""

    def __init__(
        self, function: Function, x: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setenv("GDN_BACKEND", "reference")
            self.plain = function.run(copied(x))
            self.exact = function.run(wide(x))

    def check(self, found: Results, unit: float = 0.0) -> None:
        assert_near(found, self.exact, self.plain, unit)


def owned(function: Function, results: Results) -> dict[str, Tensor]:
    """The results, with 0 in the rows that belong to no sequence."""
    found = {}
    for name, y in results.items():
        found[name] = y.detach().clone()
        if name in function.meaningless:
            found[name][function.meaningless[name]] = 0
    return found
