"""Environment variables that a validated call depends on; their rows are in
`docs/environment.md`."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Here(threading.local):
    invariant = False


_here = _Here()


def batch_invariant() -> bool:
    """`GDN_BATCH_INVARIANT`: whether a sequence must give the same bits in any batch; so it must
    inside of `invariant_calls`.

    Validation reads it at every call; ValueError for another value than 0 and 1.
    """
    asked = os.environ.get("GDN_BATCH_INVARIANT", "0")
    if asked not in ("0", "1"):
        raise ValueError(f"GDN_BATCH_INVARIANT must be 0 or 1, got {asked!r}")
    return asked == "1" or _here.invariant


@contextmanager
def invariant_calls() -> Iterator[None]:
    """The calls of this thread are as with `GDN_BATCH_INVARIANT=1`."""
    before = _here.invariant
    _here.invariant = True
    try:
        yield
    finally:
        _here.invariant = before
