"""Kernel launches that are repeated with the same addresses and numbers."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Repeats a launch on the current stream. The argument is the address of the kernel's output, the
# parameter o; None: the address of the recorded launch, as are all other addresses.
Again = Callable[[int | None], None]


class _Recorder(threading.local):
    """launches: the launches of this thread since `recording` began, None for a launch that needs
    its tensors and cannot be repeated. Outside of `recording` there is no list."""

    launches: list[Again | None] | None = None


recorder = _Recorder()


@contextmanager
def recording() -> Iterator[list[Again | None]]:
    """Inside of this context the list gets every launch of the package's kernels. A launch holds
    addresses and no tensors, so the caller must keep tensors at these addresses to repeat it. An
    entry is None for a launch that cannot be repeated."""
    before, recorder.launches = recorder.launches, []
    try:
        yield recorder.launches
    finally:
        recorder.launches = before
