"""Kernel launches that are repeated with the same addresses and numbers."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Repeats a launch on the current stream. None: the launch needs its tensors and cannot be repeated.
Again = Callable[[], None] | None


class _Recorder(threading.local):
    """launches: the launches of this thread since `recording` began; None outside of
    `recording`."""

    launches: list[Again] | None = None


recorder = _Recorder()


@contextmanager
def recording() -> Iterator[list[Again]]:
    """Inside of this context the list gets every launch of the package's kernels. A launch holds
    addresses and no tensors, so the caller must keep tensors at these addresses to repeat it."""
    before, recorder.launches = recorder.launches, []
    try:
        yield recorder.launches
    finally:
        recorder.launches = before
