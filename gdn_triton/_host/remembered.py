"""Validations that run once for all calls that are alike."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

import torch

from gdn_triton._host.arguments import INDEX_DTYPES
from gdn_triton._host.environment import batch_invariant
from gdn_triton._host.tensors import PLAIN_TENSORS, is_transformed

_Arguments = ParamSpec("_Arguments")
_Judgement = TypeVar("_Judgement")
_Kept = TypeVar("_Kept")

# The number of calls that `remembered` keeps. It is bounded because lengths may never repeat.
MOST_REMEMBERED = 1024
MOST_COMPARED = 512  # the most integers of a CPU tensor that are part of a key
_COUNTED = frozenset((bool, int, str, type(None)))


def keep(kept: dict[Hashable, _Kept], key: Hashable, value: _Kept, *, most: int) -> None:
    """Stores a value under a key. A dictionary that has `most` values is emptied first."""
    if len(kept) >= most:
        kept.clear()
    kept[key] = value


def remembered(judge: Callable[_Arguments, _Judgement]) -> Callable[_Arguments, _Judgement]:
    """Runs `judge` once for all calls that are alike, and returns the kept result afterwards. The
    result may depend only on what `likeness` compares.

    An exception is not kept, so a bad call is judged every time. A full cache is emptied.
    """
    accepted: dict[Hashable, _Judgement] = {}

    @functools.wraps(judge)
    def judged(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Judgement:
        try:
            key = likeness(tuple(kwargs), (*args, *kwargs.values()))
        except RuntimeError:  # a tensor that is not strided, which need not have a shape
            key = None
        if key is None:
            return judge(*args, **kwargs)
        judgement = accepted.get(key)
        if judgement is None:
            judgement = judge(*args, **kwargs)
            keep(accepted, key, judgement, most=MOST_REMEMBERED)
        return judgement

    return judged


def likeness(names: tuple[str, ...], values: tuple[Any, ...]) -> Hashable | None:
    """A key of a call's arguments: calls with equal keys have the same validation. None if no key
    can hold the arguments. Raises ValueError for a bad `GDN_BATCH_INVARIANT`.

    The key holds each tensor's shape, dtype, layout, device and `requires_grad`, and the values of
    a short integer tensor on the CPU. It holds the type of each value, since 1 equals True, and the
    bits of each float, since 0.0 equals -0.0. It also holds whether gradients are on, and
    `GDN_BATCH_INVARIANT`. The result is None for a longer integer tensor on the CPU, for a subclass
    of Tensor (which may have symbolic sizes), inside of a transform of torch.func or of
    forward-mode AD, and for an object of another type. A value may be a record, a NamedTuple of
    such values.
    """
    if is_transformed():
        return None
    flat, key = list(values), [names, torch.is_grad_enabled(), batch_invariant()]
    for x in flat:  # the fields of a record are appended on the way
        kind = type(x)
        if kind in _COUNTED:
            key.append(x)
        elif kind in PLAIN_TENSORS:
            dtype = x.dtype
            if dtype in INDEX_DTYPES and x.is_cpu:
                if x.numel() > MOST_COMPARED:
                    return None
                key.append(tuple(x.flatten().tolist()))
            key += x.shape, dtype, x.layout, x.device, x.requires_grad
        elif kind is float:
            key.append(x.hex())
        elif hasattr(kind, "_fields"):
            flat.extend(x)
        else:
            return None
    return (*key, *map(type, flat))
