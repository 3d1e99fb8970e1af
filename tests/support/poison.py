"""Fills memory that the package allocates without filling it, so a read of memory that nothing has
written cannot pass for a zero."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

# The functions that allocate: the owner of each, and its name.
ALLOCATING = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
)

# An index or a length of this value is far outside of any test's tensors, and its small multiples
# still fit 32 bits.
POISON_INT = -(2**28)


def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same function, which leaves NaN or a far-off index if the package calls it."""

    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = allocate(*args, **kwargs)
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("gdn_triton"):
            return x
        if x.is_floating_point():
            return x.fill_(torch.nan)
        return x.fill_(1 if x.dtype == torch.bool else POISON_INT)

    return wrapped


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Every allocation of the package is `poisoned`, in a script that runs no test."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ALLOCATING:
            patch.setattr(owner, name, poisoned(getattr(owner, name)))
        yield
