"""Accesses to memory that `watching` finds in kernels in Triton's interpreter."""

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="where there is a GPU nothing is interpreted"
)


@triton.jit
def rows(x, y, width, row_step, n: tl.constexpr, shift: tl.constexpr):  # type: ignore[no-untyped-def]
    """y[i] = x[i] by rows of up to n columns; `shift` rows further on it reads x once more."""
    row = tl.program_id(0)
    columns = tl.arange(0, n)
    inside = columns < width
    value = tl.load(x + row * row_step + columns, inside, 0)
    if shift:
        value += tl.load(x + (row + shift) * row_step + columns, inside, 0)
    tl.store(y + row * row_step + columns, value, inside)


@triton.jit
def total(x, y, n: tl.constexpr, apart: tl.constexpr):  # type: ignore[no-untyped-def]
    value = tl.sum(tl.load(x + tl.program_id(0) * n + tl.arange(0, n)), axis=0)
    if apart:
        tl.atomic_add(y, value)
    else:
        tl.store(y, tl.load(y) + value)


def refused(words: str, launch: Callable[[], object]) -> None:
    with pytest.raises(Exception, match=words):
        launch()


def test_inside() -> None:
    """Rows with a gap, of which masked lanes would read and write."""
    x, y = torch.arange(24.0).view(4, 6)[:, :5], torch.zeros(4, 6)[:, :5]
    rows[(4,)](x, y, 5, 6, 8, 0)
    assert torch.equal(x, y)


def test_outside() -> None:
    x, y = torch.arange(24.0).view(4, 6), torch.zeros(4, 6)
    refused(r"rows: program \(3, 0, 0\) has read 4 bytes", lambda: rows[(4,)](x, y, 6, 6, 8, 1))
    refused("has written 4 bytes", lambda: rows[(4,)](x, y[:2], 6, 6, 8, 0))


def test_in_a_gap() -> None:
    """The bytes are of the storage, between the rows of the view."""
    x, y = torch.arange(24.0).view(4, 6), torch.zeros(4, 6)
    refused("has read 4 bytes", lambda: rows[(4,)](x[:, :5], y, 6, 6, 8, 0))
    refused("has written 4 bytes", lambda: rows[(4,)](x, y[:, :5], 6, 6, 8, 0))


def test_programs_apart() -> None:
    x = torch.arange(32.0)
    y = torch.zeros(1)
    total[(4,)](x, y, 8, True)
    assert y == x.sum()
    refused("which another program of the launch has", lambda: total[(4,)](x, y, 8, False))


def test_in_place() -> None:
    """A program may read what it writes; its neighbour may not."""

    def doubled(x: Tensor, shift: int) -> Tensor:
        rows[(3,)](x, x, 6, 6, 8, shift)
        return x

    assert torch.equal(doubled(torch.ones(4, 6), 0), torch.ones(4, 6))
    refused("which another program of the launch has read", lambda: doubled(torch.ones(4, 6), 1))
