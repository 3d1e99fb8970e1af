"""The product of each channel with its weight: a program has one row."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["stride_x"])
def scale_fwd_kernel(x, weight, y, stride_x, stride_c, stride_w, D: tl.constexpr, BD: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD).to(tl.int64)
    mask = o_d < D
    b_x = tl.load(x + i * stride_x + o_d * stride_c, mask=mask, other=0).to(tl.float32)
    b_w = tl.load(weight + o_d * stride_w, mask=mask, other=0).to(tl.float32)
    tl.store(y + i * D + o_d, (b_x * b_w).to(y.dtype.element_ty), mask=mask)


def scale_fwd(x: Tensor, weight: Tensor) -> Tensor:
    """x: [B, T, D]; weight: [D], at any strides. Returns x's shape and dtype, contiguous."""
    y = x.new_empty(x.shape)
    if y.numel() == 0:
        return y
    D = x.shape[-1]
    rows = x.reshape(-1, D)
    scale_fwd_kernel[(rows.shape[0],)](
        rows,
        weight,
        y,
        rows.stride(0),
        rows.stride(1),
        weight.stride(0),
        D=D,
        BD=triton.next_power_of_2(D),
    )
    return y
