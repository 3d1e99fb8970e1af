"""Strides in the form in which kernels take them."""

import torch
import triton
import triton.language as tl


def row_strides(x: torch.Tensor) -> tuple[int, int, int, int]:
    """(align, batch, row, head) for x [B, T, heads, D]: its strides in units of ``align`` elements,
    the largest power of two up to 16 that divides them all.

    A kernel multiplies the strides by ``align``, a compile-time constant, from which the compiler
    knows the width of its loads. Triton itself detects multiples of 16 only: without ``align`` rows
    of 60 or 100 elements would be loaded one element at a time.
    """
    batch, row, head = x.stride()[:3]
    if x.shape[0] == 1:
        batch = 0
    either = batch | row | head | 16
    align = either & -either
    return align, batch // align, row // align, head // align


@triton.jit
def in_elements(stride_b, stride_t, stride_h, ALIGN: tl.constexpr):
    """(batch, row, head) strides in elements, from the result of ``row_strides`` in units of ALIGN.
    Batch entries and heads may lie any distance apart, so their strides are widened to 64 bits: a
    stride may fit 32 bits in units of ALIGN only. The host keeps the row stride below
    MAX_ROW_STRIDE."""
    return (
        tl.cast(stride_b, tl.int64) * ALIGN,
        stride_t * ALIGN,
        tl.cast(stride_h, tl.int64) * ALIGN,
    )


def head_strides(x: torch.Tensor) -> tuple[int, int, int]:
    """(batch, row, head) for x [B, T, HV]. A batch of one has stride 0, because its stride would
    change with T."""
    batch, row, head = x.stride()
    return 0 if x.shape[0] == 1 else batch, row, head


def state_strides(state: torch.Tensor | None, state_v_first: bool) -> tuple[int, int, int, int]:
    """(sequence, head, K, V) strides of a state [N, HV, K, V], or [N, HV, V, K] if value-first."""
    if state is None:
        return 0, 0, 0, 0
    n, h, a, b = state.stride()
    return (n, h, b, a) if state_v_first else (n, h, a, b)


def named(names: str, numbers: tuple[int, ...]) -> dict[str, int]:
    """Maps each name to its stride as a kernel's argument stride_NAME."""
    return {f"stride_{name}": n for name, n in zip(names.split(), numbers, strict=True)}


def row_arguments(name: str, strides: tuple[int, ...]) -> dict[str, int]:
    """The kernel arguments with the result of ``row_strides``, for "q" these are ALIGN_Q,
    stride_qb, stride_qt and stride_qh."""
    return {
        f"ALIGN_{name.upper()}": strides[0],
        **named(f"{name}b {name}t {name}h", strides[1:]),
    }


def head_arguments(name: str, strides: tuple[int, ...]) -> dict[str, int]:
    """The kernel arguments with the result of ``head_strides``, for "g" these are stride_gb,
    stride_gt and stride_gh."""
    return named(f"{name}b {name}t {name}h", strides)
