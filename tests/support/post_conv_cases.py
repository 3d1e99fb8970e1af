"""Helpers of the tests of post_conv."""

from collections.abc import Callable
from typing import Any

import torch
from helpers import FP32
from torch import Tensor

from gdn_triton import fused_post_conv_prep


def conv_output(L: int, D: int, layout: str, dtype: torch.dtype, device: str) -> Tensor:
    """[L, D], with NaN around it where it is a view."""
    x = torch.randn(L, D)
    if layout == "dense":
        return x.to(device, dtype)
    if layout == "channel-major":
        return x.t().to(device, dtype, memory_format=torch.contiguous_format).t()
    if layout == "strided":
        around = torch.full((L, 2 * D), torch.nan)
        around[:, ::2] = x
        return around.to(device, dtype)[:, ::2]
    before, after = {"view": (16, 8), "odd-view": (3, 4)}[layout]
    around = torch.full((L, before + D + after), torch.nan)
    around[:, before : before + D] = x
    return around.to(device, dtype)[:, before : before + D]


def make_args(
    shape: tuple[int, ...],
    *,
    layout: str = "dense",
    dtype: torch.dtype = FP32,
    gate_dtype: torch.dtype = FP32,
    device: str = "cpu",
) -> tuple[Any, ...]:
    """The public function's arguments. a and b are strided in both dimensions."""
    L, H, HV, K, V = shape
    gates = torch.randn(HV, 2, L, 2).to(device, gate_dtype)
    a, b = (3 * gates[:, i, :, 1].t() for i in range(2))
    A_log, dt_bias = torch.randn(2, HV).to(device, gate_dtype)
    x = conv_output(L, 2 * H * K + HV * V, layout, dtype, device)
    return x, a, b, A_log, dt_bias, H, K, V


def compiled(**options: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return fused_post_conv_prep(*args, **kwargs)

    return torch.compile(call, fullgraph=True, backend="aot_eager", **options)
