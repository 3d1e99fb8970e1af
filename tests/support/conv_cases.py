"""Helpers that the tests of conv share."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import FP32
from torch import Tensor

UNIT32 = 2.0**-24
BACKENDS = ["triton", "reference"]
PREPARED = ("q", "k", "v", "g", "beta")

# Packed: empty sequences first, between and last; fewer tokens than taps; boundaries inside of a
# block of tokens, on its last token and on its end; rows of no sequence.
LENGTHS = (0, 1, 2, 61, 5, 0, 3, 57, 64, 0)
ORPHANS = 6
REAL = pytest.mark.gpu("a real size, for the compiled kernel")


def make(
    T: int, D: int, W: int = 4, *, dtype: torch.dtype = FP32, device: str = "cpu", batch: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, D] or [batch, T, D], weight, bias."""
    x = torch.randn(*((batch,) if batch else ()), T, D)
    weight, bias = torch.randn(D, W), torch.randn(D)
    return x.to(device, dtype), weight.to(device, dtype), bias.to(device, dtype)


def packed(device: str = "cpu", dtype: torch.dtype = torch.int32) -> tuple[int, Tensor]:
    """T and cu_seqlens of `LENGTHS`."""
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).to(device, dtype)
    return sum(LENGTHS) + ORPHANS, cu_seqlens


def in_layout(x: Tensor, layout: str) -> Tensor:
    """x [.., T, D], with NaN around it where it is a view."""
    if layout == "dense":
        return x
    if layout == "channel-major":
        return x.mT.contiguous().mT
    if layout == "strided":
        around = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan).to(x)
        around[..., ::2] = x
        return around[..., ::2]
    before, after = {"view": (16, 8), "odd-view": (3, 4)}[layout]
    around = F.pad(x, (before, after), value=torch.nan)
    return around[..., before : before + x.shape[-1]]


def on(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", backend)


def make_prep(
    shape: tuple[int, ...], *, device: str = "cpu", dtype: torch.dtype = FP32, batch: int = 0
) -> tuple[Any, ...]:
    """mixed_qkv, weight, a, b, A_log, dt_bias, H, K, V; a and b are strided in both dimensions."""
    T, H, HV, K, V = shape
    x, weight, _ = make(T, 2 * H * K + HV * V, dtype=dtype, device=device, batch=batch)
    gates = torch.randn(*x.shape[:-1], 2, HV, 2, device=device)
    a, b = gates[..., 0, :, 1], gates[..., 1, :, 1]
    A_log, dt_bias = torch.randn(2, HV, device=device)
    return x, weight, a, b, A_log, dt_bias, H, K, V


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return torch.compile(call, fullgraph=True, backend="aot_eager")
