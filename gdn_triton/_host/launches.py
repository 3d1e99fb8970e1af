"""Launches of kernels that are made again, with the addresses and numbers that they had."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Makes a launch again, on the current stream. None: the launch cannot be made without its tensors.
Again = Callable[[], None] | None


class _Recorder(threading.local):
    """launches: those of this thread since `recording` began, or None outside of it."""

    launches: list[Again] | None = None


recorder = _Recorder()


@contextmanager
def recording() -> Iterator[list[Again]]:
    """Inside of which every launch of the package's kernels is entered in the list. A launch holds
    addresses and no tensors: whoever makes it again has to have tensors at these addresses."""
    before, recorder.launches = recorder.launches, []
    try:
        yield recorder.launches
    finally:
        recorder.launches = before
