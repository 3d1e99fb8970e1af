"""Triton's interpreter as the tests run it: `triton.language` is changed once a launch, types are
made once a kind, and the numbers are those of the interpreter as it comes."""

import ast
import dataclasses
import inspect
from typing import Any

import interpreting
import pytest
import torch
import triton
import triton.language as tl
from interpreting import CHANGE, MISSING, PARTS, REPLACED, changing_once
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="where there is a GPU nothing is interpreted"
)


# Other names of a part in interpreting.py, and `self` where it replaces a semantic's function.
NAMES = {
    "core": "tl.core",
    "semantic": "tl.semantic.TritonSemantic",
    "block_type": "tl.core.block_type",
    "tensor": "tl.core.tensor",
    "self.builder": "interpreter.interpreter_builder",
    "self": "tl.semantic.TritonSemantic",
}
# Attributes of a tensor or of a type that interpreting.py sets itself, and a semantic's builder.
SET_THERE = {"__dict__", "_sizes", "builder", "numel", "shape"}


def dotted(node: ast.expr) -> str:
    """a.b.c of an expression that reads so; of another one its last names, after a dot."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_parts_of_triton_are_named() -> None:
    """Those that interpreting.py uses: a Triton from the oldest supported one on lacks none of
    `PARTS`, so that one which only a newer Triton has shows here, whatever Triton there is."""
    assert not MISSING
    used = set()
    for node in ast.walk(ast.parse(inspect.getsource(interpreting))):
        name = dotted(node) if isinstance(node, ast.Attribute) else ""
        owner = next((x for x in NAMES if name.startswith(f"{x}.")), None)
        if owner == "self" and name.split(".")[1] in SET_THERE:
            continue
        if owner is not None:
            name = NAMES[owner] + name.removeprefix(owner)
        if name.startswith(("tl.", "interpreter.")):
            used.add(name)
    assert "tl.semantic.TritonSemantic.broadcast_impl_value" in used
    unnamed = {name for name in used if not any(f"{x}.".startswith(f"{name}.") for x in PARTS)}
    assert not unnamed


@triton.jit
def inner(x, n: tl.constexpr):  # type: ignore[no-untyped-def]
    # tl.sum is a function of a module that sees `triton.language.core` alone.
    return tl.sum(x, axis=0) + tl.load(n)


@triton.jit
def outer(x, y, n, fails: tl.constexpr):  # type: ignore[no-untyped-def]
    for i in range(3):
        row = tl.load(x + 4 * i + tl.arange(0, 4))
        tl.store(y + i, inner(row, n) + inner(row, n))
    if fails:
        tl.static_assert(False)


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions for which the languages were changed, of the interpreter as it comes."""
    seen: list[str] = []
    assert CHANGE is not None, f"what conftest.py does is no use: Triton lacks {MISSING}"

    def noted(function: Any) -> Any:
        seen.append(function.__name__)
        return CHANGE(function)

    monkeypatch.setattr(interpreter, "_patch_lang", noted)
    return seen


def launch(fails: bool = False) -> torch.Tensor:
    x, y = torch.arange(12.0), torch.zeros(3)
    outer[(1,)](x, y, torch.tensor([0.5]), fails)
    return y


def test_once_a_launch(changes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    load = tl.load
    expected = launch()
    assert expected.tolist() == [13.0, 45.0, 77.0]
    # Each of six calls, and those of tl.sum inside of them.
    assert changes.count("outer") == 1 and changes.count("inner") == 6
    changes.clear()
    monkeypatch.setattr(interpreter, "_patch_lang", changing_once(interpreter._patch_lang))
    for _ in range(2):
        assert launch().equal(expected)
        assert tl.load is load
    assert changes.count("outer") == 2 and "inner" not in changes
    # The second language, which only functions like tl.sum see, once a launch too.
    assert len(changes) <= 4


def test_after_a_failure(changes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that ends by an error is over: the next one changes the languages again."""
    load = tl.load
    monkeypatch.setattr(interpreter, "_patch_lang", changing_once(interpreter._patch_lang))
    with pytest.raises(interpreter.InterpreterError):
        launch(fails=True)
    assert tl.load is load
    changes.clear()
    assert launch().tolist() == [13.0, 45.0, 77.0]
    assert changes.count("outer") == 1 and tl.load is load


@triton.jit
def kinds(x, y, n: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tensors of three dtypes and four shapes, pointers too."""
    row = tl.load(x + tl.arange(0, n))
    square = row[:, None] * row[None, :].to(tl.float16)
    sums = tl.sum(square.to(tl.float32), axis=1)
    tl.store(y + tl.arange(0, n), tl.where(row > 1, sums, row).to(tl.float32))


def test_types_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As conftest.py has it for all tests: a second launch like the first one makes no type."""
    made: list[str] = []
    make = tl.core.validate_block_shape

    def noted(shape: Any) -> int:
        made.append(str(shape))
        return int(make(shape))

    monkeypatch.setattr(tl.core, "validate_block_shape", noted)
    x, y = torch.tensor([0.5, 1.5, 2.0, 0.25]), torch.zeros(4)
    kinds[(1,)](x, y, 4)
    made.clear()
    kinds[(1,)](x, y, 4)
    assert made == []
    wide = torch.arange(8.0)
    kinds[(1,)](wide, torch.zeros(8), 8)
    assert made
    assert torch.allclose(y, torch.where(x > 1, x * x.sum(), x))


@triton.jit
def mixed(x, y, z, n: tl.constexpr, fails: tl.constexpr):  # type: ignore[no-untyped-def]
    """Operands of different dtypes and shapes, and numbers; integers that overflow."""
    at = tl.arange(0, n)
    row = tl.load(x + at)
    half, wide = row.to(tl.float16), at.to(tl.int64)
    square = (half[:, None] * half[None, :] + row[None, :]) / (1 + at[:, None])
    kept = tl.where((at[:, None] >= at[None, :]) & (row > 0.5)[None, :], square, 3)
    tl.store(y + at[:, None] * n + at[None, :], kept - at % 3)
    large = (at + 2_000_000_000) * 3 + (row > 1)
    tl.store(z + at, (large + wide * 2**40) // (wide + 1) - (half / 3).to(tl.int32))
    if fails:
        tl.store(y + at, row + tl.arange(0, 2 * n))


def results(fails: bool) -> list[torch.Tensor]:
    y, z = torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64)
    try:
        mixed[(1,)](torch.tensor([0.5, 1.5, -2.0, 0.3]), y, z, 4, fails)
    except interpreter.InterpreterError as error:
        assert fails and "incompatible dimensions at index 0: 4 and 8" in str(error)
    return [y, z]


@pytest.mark.parametrize("fails", [False, True], ids=["launched", "refused"])
def test_numbers_of_the_interpreter_as_it_comes(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = results(fails)
    assert REPLACED, f"what conftest.py does is no use: Triton lacks {MISSING}"
    for owner, name, own in REPLACED:
        monkeypatch.setattr(owner, name, own)
    for x, expected in zip(ours, results(fails), strict=True):
        assert x.any() and torch.equal(x, expected)


def test_overflow_is_looked_for_where_it_is_asserted(monkeypatch: pytest.MonkeyPatch) -> None:
    options = interpreter.interpreter_builder.options
    x = torch.tensor([0.5, 1.5, -2.0, 0.3])
    arguments = x, torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64), 4, False
    mixed[(1,)](*arguments)
    monkeypatch.setattr(
        interpreter.interpreter_builder, "options", dataclasses.replace(options, debug=True)
    )
    with pytest.raises(interpreter.InterpreterError, match="int32 overflow detected for operation"):
        mixed[(1,)](*arguments)
