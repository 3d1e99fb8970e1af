"""Environment variables that a validated call depends on; their rows are in
`docs/environment.md`."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_NAME: Final = "GDN_BATCH_INVARIANT"


class _Here(threading.local):
    def __init__(self) -> None:
        # An attribute of the instance: torch's compiler guards no attribute that a class has.
        self.invariant = False


_here = _Here()


def batch_invariant() -> bool:
    """`GDN_BATCH_INVARIANT`: whether a sequence must give the same bits in any batch; so it must
    inside of `invariant_calls`.

    Validation reads it at every call; ValueError for another value than 0 and 1.
    """
    asked = os.environ.get(_NAME, "0")
    if asked not in ("0", "1"):
        raise ValueError(f"{_NAME} must be 0 or 1, got {asked!r}")
    return asked == "1" or _here.invariant


def traced_batch_invariant() -> bool:
    """`batch_invariant` in a trace, where it is a constant: torch's compiler guards it, and traces
    the call anew where it has changed. Values other than 0 and 1 are left to `batch_invariant`."""
    environment = os.environ
    # The dict inside: `os.environ.get` of a name that is not there leaves no guard, since it is an
    # exception that os.environ catches.
    found = environment._data.get(environment.encodekey(_NAME))  # type: ignore[attr-defined]
    return bool(found == environment.encodevalue("1")) or _here.invariant


@contextmanager
def invariant_calls(asked: bool = True) -> Iterator[None]:
    """The calls of this thread are as with `GDN_BATCH_INVARIANT=1`, if that is asked."""
    before = _here.invariant
    _here.invariant = before or asked
    try:
        yield
    finally:
        _here.invariant = before
