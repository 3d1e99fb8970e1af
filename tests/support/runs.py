"""Divides the work of a test run between its processes."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder in which `make` has run, in the first process of the run that needed it. If it
    fails, the next process that needs it tries again."""
    own = factory.getbasetemp()
    # The processes of pytest-xdist have their folders in one.
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with open(shared / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = shared / f"{name}.made"
        if done.exists():
            return Path(done.read_text())
        folder = factory.mktemp(name)
        make(folder)
        done.write_text(str(folder))
        return folder


def seconds(item: pytest.Item) -> float:
    """The time of the test, by its marker."""
    marker = item.get_closest_marker("long")
    return float(marker.args[0]) if marker else 0.0


def longest_first(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Moves the longest tests to the beginning of each process's part, so that no process runs one
    of them when the others have no work left. pytest-xdist gives each process an equal part of the
    list, one after the other, and moves tests from the end of a part to a process without work."""
    first: list[list[pytest.Item]] = [[] for _ in range(processes)]
    for item in sorted(filter(seconds, items), key=seconds, reverse=True):
        min(first, key=lambda part: sum(map(seconds, part))).append(item)
    rest = [item for item in items if not seconds(item)]
    ordered: list[pytest.Item] = []
    for i, part in enumerate(first):
        size = (len(items) - len(ordered)) // (processes - i)
        taken = max(0, size - len(part))
        ordered += [*part, *rest[:taken]]
        del rest[:taken]
    return ordered
