"""Checks of the memory that a call writes. No two elements of a written tensor may share an
address, and a written tensor may share no byte with any other tensor of the call.

One program of a kernel writes while others still read, and with shared memory the result would
depend on their order. No contents are read here, and nothing waits for a device. `Apart` does the
work that depends on shapes, strides and dtypes once for all calls that are alike. A call then only
compares the addresses of its tensors.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from gdn_triton._host.arguments import must

# Shape, strides and dtype, which give the offset of each element from the first.
Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]

# Two layouts count as sharing memory if numpy does not decide it in this many steps. Slices,
# transposes and splits of dense tensors need a few steps.
MOST_STEPS = 20_000


def layout_of(x: Tensor | None) -> Layout | None:
    return None if x is None else (x.shape, x.stride(), x.dtype)


class Apart:
    """The tensors that must not overlap in memory, for all calls that are alike.

    layouts: the layout of each tensor, by its name in errors; None for a tensor that is not given.
    written: the names of the tensors that the call writes. If two written tensors
    overlap, the error names the earlier one of this list first.

    Raises ValueError if a tensor that is written has two elements in one place.
    """

    __slots__ = ("_chosen", "_first", "_layouts", "_names", "_writes")

    def __init__(self, layouts: Mapping[str, Layout | None], written: Sequence[str]) -> None:
        # A tensor without elements has no memory that could be shared.
        present = {
            name: (i, layout)
            for i, (name, layout) in enumerate(layouts.items())
            if layout is not None and 0 not in layout[0]
        }
        self._names = tuple(present)
        self._layouts = tuple(layout for _, layout in present.values())
        writes = [self._names.index(name) for name in written if name in present]
        for w in writes:
            check_own_memory(self._names[w], self._layouts[w])
        sizes = [span(shape, strides) * dtype.itemsize for shape, strides, dtype in self._layouts]
        # For each written tensor: its index, its bytes, and the bytes of every tensor that it is
        # compared with. Tensors without a comparison have a negative size, which overlaps nothing.
        self._writes: list[tuple[int, int, tuple[int, ...]]] = []
        if len(present) > 1 and writes:
            for n, w in enumerate(writes):
                others = [-(2**64) if i in writes[: n + 1] else m for i, m in enumerate(sizes)]
                self._writes.append((w, sizes[w], tuple(others)))
            self._first = present[self._names[writes[0]]][0]
            self._chosen = itemgetter(*(i for i, _ in present.values()))

    def check(self, tensors: Sequence[Tensor | None]) -> None:
        """Raises ValueError if a written tensor shares memory with another one. `tensors` have the
        layouts and the order of `layouts`. Tensors without memory (on the meta device, or fake) are
        skipped."""
        if not self._writes or isinstance(tensors[self._first], FakeTensor):
            return
        addresses = tuple(map(Tensor.data_ptr, self._chosen(tensors)))
        for w, size, other_sizes in self._writes:
            first = addresses[w]
            end = first + size
            for i, address in enumerate(addresses):
                if address < end and first < address + other_sizes[i]:
                    self._check_pair(w, i, address - first if first else None)

    def _check_pair(self, w: int, i: int, distance: int | None) -> None:
        """Two tensors whose ranges of addresses overlap may still share no element, as two columns
        of one tensor do not. distance: from the one to the other in bytes; None without memory."""
        if distance is not None and _share(self._layouts[w], self._layouts[i], distance):
            name = self._names[i]
            expected = f"lie apart from {name} in memory"
            raise ValueError(must(self._names[w], expected, f"memory that {name} has too"))


def is_same_memory(x: Tensor, y: Tensor) -> bool:
    """Whether x is y, or a view of the same elements in the same order and of the same dtype."""
    if x is y:
        return True
    if layout_of(x) != layout_of(y) or x.is_meta or isinstance(x, FakeTensor):
        return False
    return x.data_ptr() == y.data_ptr()


@functools.lru_cache(1024)
def check_own_memory(name: str, layout: Layout) -> None:
    """Raises ValueError if two elements of a written tensor have the same address."""
    if _meets_itself(layout):
        expected = "have memory of its own for every element"
        raise ValueError(must(name, expected, f"strides {list(layout[1])}"))


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements from the first to the last, inclusive."""
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def _meets_itself(layout: Layout) -> bool:
    """Whether two elements with different indices have the same address."""
    shape, strides, dtype = layout
    kept = sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1)
    reach = 0
    for stride, n in kept:
        if stride <= reach:
            break
        reach += (n - 1) * stride
    else:
        return False
    # If two elements have one address, let k be the largest stride in which their indices differ.
    # Larger strides do not matter then, and after a shift one of the two has index 0 at k.
    for k, (stride, n) in enumerate(kept):
        rest = tuple(m for _, m in kept[:k]), tuple(s for s, _ in kept[:k])
        later = (n - 1, *rest[0]), (stride, *rest[1]), dtype
        if stride == 0 or _share((*rest, dtype), later, stride * dtype.itemsize):
            return True
    return False


@functools.lru_cache(1024)
def _share(x: Layout, y: Layout, distance: int) -> bool:
    """Whether an element of x and an element of y share a byte. distance: the bytes from the first
    byte of x to the first byte of y."""
    first, second = _array_at(2**62, x), _array_at(2**62 + distance, y)
    try:
        return numpy.shares_memory(first, second, max_work=MOST_STEPS)
    except RuntimeError:  # numpy has not decided it
        return True


def _array_at(address: int, layout: Layout) -> Any:
    """An array of that layout, whose memory is never read."""
    shape, strides, dtype = layout
    interface = {
        "version": 3,
        "data": (address, True),
        "shape": tuple(shape),
        "strides": tuple(stride * dtype.itemsize for stride in strides),
        "typestr": f"|V{dtype.itemsize}",
    }
    return numpy.asarray(SimpleNamespace(__array_interface__=interface))


# ------------------------------------------------------------------------------ versions of tensors


class _Operator(threading.local):
    counts_writes = False


_operator = _Operator()


def count_writes(*tensors: Tensor | None) -> None:
    """Tells autograd that a kernel is about to write these tensors in place, as torch's in-place
    operations do. Autograd then refuses a backward that needs their old contents."""
    if _operator.counts_writes:
        return
    torch.autograd.graph.increment_version([x for x in tensors if x is not None])


@contextmanager
def operator_counts_writes() -> Iterator[None]:
    """Inside of this context `count_writes` does nothing: torch counts the writes that an
    operator's schema declares."""
    before = _operator.counts_writes
    _operator.counts_writes = True
    try:
        yield
    finally:
        _operator.counts_writes = before
