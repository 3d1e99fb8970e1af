"""Strides as kernels take them."""

import torch


def row_strides(x: torch.Tensor) -> tuple[int, int, int, int]:
    """(align, batch, row, head) for x [B, T, heads, D]: its strides in units of ``align`` elements,
    the largest power of two up to 16 that divides them all.

    A kernel multiplies them by ``align``, a compile-time constant, and so the compiler knows how
    wide its loads may be. By itself Triton only notices multiples of 16: rows of 60 or 100 elements
    would be loaded one by one.
    """
    batch, row, head = x.stride()[:3]
    if x.shape[0] == 1:
        batch = 0
    either = batch | row | head | 16
    align = either & -either
    return align, batch // align, row // align, head // align
