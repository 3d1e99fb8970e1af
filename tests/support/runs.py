"""How the processes of a run of the tests share its work."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder in which `make` has run, in whichever process of the run needed it first. Where it
    fails, the next one that needs it tries again."""
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
    """What the test takes, by its marker."""
    marker = item.get_closest_marker("long")
    return float(marker.args[0]) if marker else 0.0


def longest_first(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """The tests with the longest at the beginning of each process's part, so that no process runs
    one of them when the others have nothing left. pytest-xdist gives each process an equal part of
    the list, one after the other, and moves tests from the end of a part to a process that has
    none left."""
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
