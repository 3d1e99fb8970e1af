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
        # This is an attribute of the instance, because torch's compiler does not guard an attribute
        # of a class.
        self.invariant = False


_here = _Here()


def variable(name: str) -> str | None:
    """The value of an environment variable, or None.

    This reads the dictionary inside of `os.environ`, because for an unset variable `os.environ.get`
    catches an exception. The exception takes 0.5 us, and a call reads up to three variables. In a
    trace torch's compiler makes no guard for a function that catches an exception.
    """
    environment = os.environ
    found = environment._data.get(environment.encodekey(name))  # type: ignore[attr-defined]
    return None if found is None else environment.decodevalue(found)


def kernel_variables() -> tuple[str | None, str | None]:
    """The values of the variables that choose the kernels of a recurrence or of a layer's step. A
    plan of such a call holds its kernels."""
    return variable("GDN_BACKEND"), variable("GDN_GLUON")


def flag(name: str, *, default: bool) -> bool:
    """The value of a variable that is 0 or 1, or `default`. Raises ValueError for another value."""
    asked = variable(name)
    if asked not in (None, "0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {asked!r}")
    return default if asked is None else asked == "1"


def batch_invariant() -> bool:
    """Whether a sequence must give the same bits in any batch: with `GDN_BATCH_INVARIANT=1`, and
    inside of `invariant_calls`.

    Validation reads the variable at every call. Raises ValueError for a value other than 0 and 1.
    """
    return flag(_NAME, default=False) or _here.invariant


def traced_batch_invariant() -> bool:
    """The value of `batch_invariant` in a trace. It is a constant there: torch's compiler guards
    it, and traces the call again if it changes. This function does not check for values other than
    0 and 1."""
    return variable(_NAME) == "1" or _here.invariant


@contextmanager
def invariant_calls(asked: bool = True) -> Iterator[None]:
    """Inside of this context the calls of this thread run as with `GDN_BATCH_INVARIANT=1`, if
    `asked`."""
    before = _here.invariant
    _here.invariant = before or asked
    try:
        yield
    finally:
        _here.invariant = before
