"""Checks of the tensors that an adapter itself writes. An op checks only the tensors that the op
writes, so an adapter calls these functions before it writes any tensor."""

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from gdn_triton._host.arguments import (
    check_devices,
    check_dtypes,
    check_rank,
    check_tensors,
    must,
    shape_of,
)
from gdn_triton._host.memory import Apart, Layout, layout_of
from gdn_triton._host.tensors import PLAIN_TENSORS, host_reads, is_traced, is_transformed, writing


def check_result(name: str, x: Tensor, first: str, device: torch.device) -> None:
    """Checks a tensor to which a result is copied, except its shape. first: the name of the tensor
    that is on `device`."""
    check_tensors({name: x}, {})
    check_devices(first, device, {name: x})
    check_dtypes({name: x}, ())
    if torch.is_grad_enabled() and x.requires_grad:
        raise NotImplementedError(
            f"{name} is written in place and has no gradient, and requires one: detach it"
        )


def check_same_shape(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise ValueError(must(name, f"have shape {list(shape)}", shape_of(x)))


def check_apart(
    written: Mapping[str, Tensor | None], read: Mapping[str, Tensor | None] | None = None
) -> None:
    """Raises ValueError if a tensor of `written` has two elements at one address, or shares memory
    with another tensor of `written` or `read`. Tensors that may have no address are skipped."""
    if torch.compiler.is_compiling():
        return
    given = {**(read or {}), **written}
    check_tensors({}, given)
    tensors = tuple(given.values())
    present = [x for x in tensors if x is not None]
    plain = PLAIN_TENSORS.issuperset(map(type, present))
    if not plain or is_transformed() or any(map(is_traced, present)):
        return
    _apart(tuple(given), tuple(map(layout_of, tensors)), tuple(written)).check(tensors)


@functools.lru_cache(1024)
def _apart(
    names: tuple[str, ...], layouts: tuple[Layout | None, ...], written: tuple[str, ...]
) -> Apart:
    return Apart(dict(zip(names, layouts, strict=True)), written)


def check_indices(name: str, x: Tensor, first: str, device: torch.device) -> None:
    """Checks slots or rows, one per sequence, except their number and contents."""
    check_tensors({name: x}, {})
    check_devices(first, device, {name: x})
    check_rank(name, x, "N")
    check_dtypes({name: x}, (name,))


def check_below(name: str, x: Tensor, count: int, places: str) -> None:
    """Checks the contents of slots if the host can read them. places: the name of the `count`
    places that the slots index."""
    if host_reads(x) and x.numel() > 0 and int(x.max()) >= count:
        expected = f"be less than the {count} {places}"
        raise ValueError(must(name, expected, str(int(x.max()))))


def fill(x: Tensor, result: Tensor) -> Tensor:
    """Copies a result to a tensor that has been checked, and returns that tensor."""
    with writing(x):
        return x.copy_(result)
