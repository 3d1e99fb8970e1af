"""What all validations share: the dtypes they allow, the checks they have in common, and how an
error names an argument, what was expected and what came."""

import sys
from collections.abc import Sequence
from numbers import Real
from operator import gt
from typing import Any, NoReturn

import torch
from torch import Tensor

MOST_FLOAT = sys.float_info.max
FLOAT_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
INDEX_DTYPES = frozenset((torch.int32, torch.int64))
FLOATS = "float16, bfloat16, float32 or float64"
INDICES = "int32 or int64"


def check_offsets(name: str, offsets: Sequence[int], T: int) -> None:
    if offsets[0] != 0:
        raise ValueError(must(name, "start at 0", str(offsets[0])))
    if any(map(gt, offsets, offsets[1:])):
        i = next(i for i in range(1, len(offsets)) if offsets[i - 1] > offsets[i])
        raise ValueError(
            must(name, "not decrease", f"{offsets[i - 1]} then {offsets[i]} at index {i}")
        )
    if offsets[-1] > T:
        raise ValueError(must(name, f"end at or before T={T}", str(offsets[-1])))


def count_sequences(cu_seqlens: Tensor) -> int:
    """N of cu_seqlens [N + 1], judged by its shape alone."""
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(must("cu_seqlens", "have shape [N + 1], N >= 0", shape_of(cu_seqlens)))
    return cu_seqlens.shape[0] - 1


def check_dtype(name: str, x: Tensor, allowed: frozenset[torch.dtype], expected: str) -> None:
    if x.dtype not in allowed:
        raise ValueError(must(name, f"be {expected}", str(x.dtype)))


def real_or_none(name: str, x: object) -> float | None:
    """x as a float. TypeError if it is no real number, ValueError if float64 has no such one."""
    if x is None or type(x) is float:
        return x
    # A tensor is refused too: its value would have to be fetched from the device.
    if isinstance(x, bool) or not isinstance(x, Real):
        raise TypeError(must(name, "be a real number or None", value_of(x)))
    try:
        return float(x)
    except OverflowError:
        expected = f"be within the range of float64, {MOST_FLOAT:.1e}"
        # Its digits may be too many to print.
        raise ValueError(must(name, expected, f"one beyond it ({type_of(x)})")) from None


def refuse_head_first(head_first: object) -> NoReturn:
    """TypeError for a keyword that flash-linear-attention once had."""
    raise TypeError(
        f"head_first was removed, got {value_of(head_first)}: q, k, v, g and beta are [B, T, H, "
        "...], tokens before heads, which x.transpose(1, 2) makes of [B, H, T, ...]"
    )


def in_float64(x: Any) -> bool:
    """Whether a real number is finite, and within the range of float64."""
    return bool(-MOST_FLOAT <= x <= MOST_FLOAT)


def must(name: str, expected: str, given: str) -> str:
    return f"{name} must {expected}, got {given}"


def shaped(**sizes: int) -> str:
    return "[" + ", ".join(f"{name}={size}" for name, size in sizes.items()) + "]"


def shape_of(x: Tensor) -> str:
    return f"shape {list(x.shape)}"


def type_of(x: Any) -> str:
    return type(x).__name__


def value_of(x: Any) -> str:
    # A tensor is described, never printed: printing it would fetch its contents.
    return (
        f"a tensor of shape {list(x.shape)}" if isinstance(x, Tensor) else f"{x!r} ({type_of(x)})"
    )
