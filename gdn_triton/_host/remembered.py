"""Judgements that are made once for all calls that are alike."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

import torch

from gdn_triton._host.arguments import INDEX_DTYPES
from gdn_triton._host.environment import batch_invariant
from gdn_triton._host.tensors import PLAIN_TENSORS, is_transformed

_Arguments = ParamSpec("_Arguments")
_Judgement = TypeVar("_Judgement")

# How many calls `remembered` keeps: a bound, as lengths may never repeat.
MOST_REMEMBERED = 1024
MOST_COMPARED = 512  # integers of a tensor that the host can read
_COUNTED = frozenset((bool, int, str, type(None)))


def remembered(judge: Callable[_Arguments, _Judgement]) -> Callable[_Arguments, _Judgement]:
    """judge, which must not look further than `likeness`, run once for calls that are alike.

    What it raises is not remembered: a bad call is always judged. Once full it starts anew.
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
            if len(accepted) >= MOST_REMEMBERED:
                accepted.clear()
            accepted[key] = judgement
        return judgement

    return judged


def likeness(names: tuple[str, ...], values: tuple[Any, ...]) -> Hashable | None:
    """All that may be judged of the arguments of a call, in a form that is equal for calls that are
    alike; None if no such form holds it. ValueError for a bad `GDN_BATCH_INVARIANT`.

    Of a tensor: shape, dtype, layout, device, and whether it requires a gradient (and whether
    gradients are on at all); of integers that the host can read, their values, if they are few. Of
    a number its type too, as 1 is equal to True, and a float to the last bit, as 0.0 is equal to
    -0.0. Of the environment `GDN_BATCH_INVARIANT`. No form has the contents of longer integer
    tensors that the host can read, what a subclass of Tensor knows (symbolic sizes), what a tensor
    is to a transform of torch.func or to forward-mode AD, or an object of another type. A value may
    be a record, a NamedTuple of such values.
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
            if x.is_cpu and dtype in INDEX_DTYPES:
                if x.numel() > MOST_COMPARED:
                    return None
                key.append(tuple(x.flatten().tolist()))
            key.append((x.shape, dtype, x.layout, x.device, x.requires_grad))
        elif kind is float:
            key.append(x.hex())
        elif hasattr(kind, "_fields"):
            flat.extend(x)
        else:
            return None
    return (*key, *map(type, flat))
