"""Checks the accesses of kernels to memory in Triton's interpreter.

The interpreter reads and writes any address that a kernel computes, and it runs the programs of a
launch one after the other. A read past a tensor's end therefore returns whatever lies there, and
programs that depend on each other's writes give the right numbers. Here each access must be to an
element of one of the launch's tensors, not to a gap between the rows of a view, and no program may
access an element that another program of the same launch writes, unless both accesses are atomic,
or atomic operations of both programs on one element order the two accesses.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from far import untouched
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime import interpreter

_Addresses = NDArray[np.int64]
_NOBODY, _SEVERAL = 0, -1  # of programs, which count from 1
_ATOMIC = 1 << 30  # added to a program's number where the access is atomic


@dataclass(frozen=True, slots=True)
class _View:
    """The bytes of a tensor's elements."""

    first: int
    itemsize: int
    steps: tuple[tuple[int, int], ...]  # bytes and count of each dimension, the widest step first
    end: int
    dense: bool

    @classmethod
    def of(cls, x: Tensor) -> "_View":
        sizes = zip(x.stride(), x.shape, strict=True)
        steps = sorted(((s * x.element_size(), n) for s, n in sizes if n > 1 and s > 0))[::-1]
        extent = sum(step * (n - 1) for step, n in steps) + x.element_size()
        dense = extent == math.prod(n for _, n in steps) * x.element_size()
        first = x.data_ptr()
        return cls(first, x.element_size(), tuple(steps), first + extent, dense)

    def has(self, addresses: _Addresses, size: int) -> NDArray[np.bool_]:
        """Whether each access of that many bytes is inside of an element."""
        inside: NDArray[np.bool_] = (addresses >= self.first) & (addresses + size <= self.end)
        if self.dense or not inside.any():
            return inside
        rest = addresses - self.first
        for step, count in self.steps:
            at = np.minimum(rest // step, count - 1)
            rest = rest - at * step
        found: NDArray[np.bool_] = inside & (rest >= 0) & (rest + size <= self.itemsize)
        return found


class _Storage:
    """The programs that have read and written each byte of a storage in the current launch. Most
    storages are only read: reads are checked when something is written."""

    def __init__(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        self.first, self.bytes = storage.data_ptr(), storage.nbytes()
        self.writers: NDArray[np.int32] | None = None
        self.readers: NDArray[np.int32] | None = None
        self.early: list[tuple[int, _Addresses]] = []  # programs, and what they read
        # Each access: its program, whether it writes, and its bytes.
        self.log: list[tuple[int, bool, _Addresses]] = []

    def note_read(self, program: int, at: _Addresses) -> None:
        if self.readers is None:
            self.early.append((program, at))
            return
        before = self.readers[at]
        alone = (before == _NOBODY) | (before == program)
        self.readers[at] = np.where(alone, program, _SEVERAL)

    def begin_writing(self) -> None:
        if self.readers is None:
            # A storage may be larger than the machine's memory, most of it never touched.
            self.writers = np.frombuffer(untouched(4 * self.bytes), np.int32)
            self.readers = np.frombuffer(untouched(4 * self.bytes), np.int32)
            for program, at in self.early:
                self.note_read(program, at)


class Launch:
    """One launch of a kernel."""

    def __init__(self, name: str, tensors: list[Tensor]) -> None:
        self.name = name
        self.views = list({_View.of(x): None for x in tensors if x.numel()})
        storages = {x.untyped_storage().data_ptr(): x for x in tensors if x.numel()}
        self.storages = [_Storage(x) for x in storages.values()]
        # By the address of an atomic operation: the programs that have made one there, each with
        # the lengths of all logs at that time. By program: those that come before it in this way.
        self.released: dict[int, dict[int, tuple[int, ...]]] = {}
        self.before: dict[int, dict[int, tuple[int, ...]]] = {}

    def look(self, what: str, pointers: Any, size: int, mask: Any = None) -> None:
        """what: "read", "written" or "changed", which is both at once."""
        flat = np.asarray(pointers).view(np.int64).ravel()
        if mask is not None and not np.all(mask):
            flat = flat[np.broadcast_to(np.asarray(mask, bool), np.shape(pointers)).ravel()]
        if not flat.size:
            return
        least, most = int(flat.min()), int(flat.max())
        if not any(x.dense and x.first <= least and most + size <= x.end for x in self.views):
            self._look_closely(what, flat, size)
        for storage in self.storages:
            if storage.first <= least and most < storage.first + storage.bytes:
                self._order(what, storage, flat - storage.first)
            elif most >= storage.first and least < storage.first + storage.bytes:
                here = flat[(flat >= storage.first) & (flat < storage.first + storage.bytes)]
                self._order(what, storage, here - storage.first)
        if what == "changed":
            program, times = _number(), tuple(len(storage.log) for storage in self.storages)
            for address in flat.tolist():
                there = self.released.setdefault(address, {})
                self.before.setdefault(program, {}).update(
                    {other: time for other, time in there.items() if other != program}
                )
                there[program] = times

    def _is_after(self, storage: _Storage, at: _Addresses, only_writes: bool) -> bool:
        """Whether atomic operations order all accesses of other programs to these bytes before the
        program that runs."""
        place, program = self.storages.index(storage), _number()
        before = self.before.get(program, {})
        return all(
            other == program
            or (only_writes and not writes)
            or (other in before and time < before[other][place])
            or not np.isin(bytes_, at).any()
            for time, (other, writes, bytes_) in enumerate(storage.log)
        )

    def _look_closely(self, what: str, flat: _Addresses, size: int) -> None:
        known = np.zeros(flat.shape, bool)
        for view in self.views:
            known |= view.has(flat, size)
            if known.all():
                return
        raise AssertionError(
            f"{self.name}: program {_program()} has {what} {size} bytes at "
            f"{int(flat[~known][0]):#x}, which are of none of its tensors"
        )

    def _order(self, what: str, storage: _Storage, at: _Addresses) -> None:
        program = _number()
        own = program + (_ATOMIC if what == "changed" else 0)

        def check(others: NDArray[np.int32], which: str) -> None:
            wrong = (others != _NOBODY) & ((others & ~_ATOMIC) != program)
            if own >= _ATOMIC:
                wrong &= (others < _ATOMIC) | (others == _SEVERAL)
            only_writes = which == "written" and what == "read"
            if wrong.any() and not self._is_after(storage, at[wrong], only_writes):
                raise AssertionError(
                    f"{self.name}: program {_program()} has {what} byte "
                    f"{int(at[np.argmax(wrong)])} of a tensor's storage, which another program "
                    f"of the launch has {which}"
                )

        storage.log.append((program, what != "read", at))
        if what != "read":
            storage.begin_writing()
        if storage.writers is not None:
            check(storage.writers[at], "written")
        if what == "read":
            storage.note_read(program, at)
            return
        assert storage.writers is not None and storage.readers is not None
        check(storage.readers[at], "read")
        storage.writers[at] = own


def _program() -> tuple[int, ...]:
    return tuple(int(x) for x in interpreter.interpreter_builder.grid_idx)


def _number() -> int:
    """The number of the running program, from 1."""
    x, y, z = _program()
    _, second, third = (int(n) for n in interpreter.interpreter_builder.grid_dim)
    return 1 + (x * second + y) * third + z


class _Accesses:
    """The interpreter's functions for memory, each of which looks first."""

    def __init__(self, own: Any, launches: list[Launch]) -> None:
        self.own, self.launches = own, launches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self.launches[-1].look("read", pointers, np.dtype(dtype).itemsize, mask)
        return self.own.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self.launches[-1].look("written", pointers, value.dtype.itemsize, mask)
        return self.own.store(pointers, value, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        self.launches[-1].look("changed", pointers, value.dtype.itemsize, mask)
        return self.own.atomic_rmw(operation, pointers, value, mask, *rest)

    def atomic_cas(self, pointers: Any, compared: Any, value: Any, *rest: Any) -> Any:
        self.launches[-1].look("changed", pointers, value.dtype.itemsize)
        return self.own.atomic_cas(pointers, compared, value, *rest)


def _tensors(values: Any) -> Iterator[Tensor]:
    for x in values:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from _tensors(x)


@contextmanager
def watched() -> Iterator[None]:
    """Checks every launch in the interpreter until the end of the context. A wrong access is an
    AssertionError, which the interpreter wraps in its own error."""
    launches: list[Launch] = []
    executor: Any = interpreter.GridExecutor
    begin: Callable[..., Any] = executor._init_args_hst
    own, run = interpreter._interpreter, executor.__call__

    def begin_watched(self: Any, given: Any, kwargs: Any) -> Any:
        args, named = begin(self, given, kwargs)
        launches.append(Launch(self.fn.__name__, [*_tensors(args), *_tensors(named.values())]))
        return args, named

    def run_watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = len(launches)
        try:
            return run(self, *args, **kwargs)
        finally:
            del launches[before:]

    executor._init_args_hst, executor.__call__ = begin_watched, run_watched
    interpreter._interpreter = _Accesses(own, launches)
    try:
        yield
    finally:
        executor._init_args_hst, executor.__call__ = begin, run
        interpreter._interpreter = own
