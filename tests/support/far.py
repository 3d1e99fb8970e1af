"""Tensors whose elements lie so far apart that an offset between them does not fit 32 bits.

Nothing touches the memory between the elements, so a CPU can reserve it without having it.
"""

import mmap
from collections.abc import Iterator

import torch
from torch import Tensor

# Linux: memory that is lent whether or not there is so much. Python names it from 3.13 on.
NO_RESERVE = 0x4000


def untouched(size: int) -> mmap.mmap:
    """A tensor of zeros with that many bytes."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)


def far(x: Tensor, dim: int, stride: int) -> Tensor:
    """The values of x in a tensor whose dimension `dim` has that stride; the other dimensions are
    dense."""
    strides = list(x.new_empty(x.shape).stride())
    strides[dim] = stride
    last = sum((n - 1) * step for n, step in zip(x.shape, strides, strict=True))
    memory = torch.frombuffer(untouched((last + 1) * x.element_size()), dtype=x.dtype)
    return memory.as_strided(x.shape, strides).copy_(x)


def far_strides(x: Tensor) -> Iterator[tuple[int, int]]:
    """(dimension, stride), by which some element of x lies 2^31 elements from the first: the least
    stride that is a multiple of 16, and one that does not fit 32 bits itself."""
    for dim, n in enumerate(x.shape):
        if n > 1:
            least = -(-(2**31) // (n - 1))
            yield from sorted({(dim, -(-least // 16) * 16), (dim, 2**31)})
