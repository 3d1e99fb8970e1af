"""Helpers that the tests of compile share."""

from collections.abc import Callable
from typing import Any

import torch
from helpers import FP32, Case, make_inputs
from torch import Tensor

from gdn_triton import chunk_gated_delta_rule


def compiled(backend: Any = "aot_eager", **options: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return chunk_gated_delta_rule(*args, **kwargs)

    return torch.compile(call, fullgraph=True, backend=backend, **options)


def dense(device: str, dtype: torch.dtype = FP32, **sizes: int) -> list[Tensor]:
    """q, k, v, g, beta."""
    case = Case("sizes", "", **{"T": 40, "B": 2, **sizes})
    return list(make_inputs(case, dtype, device).tensors)


def assert_same(actual: Any, expected: Any) -> None:
    assert len(actual) == len(expected)
    for x, y in zip(actual, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert (x.dtype, x.stride()) == (y.dtype, y.stride())
            assert x.isfinite().all()
            assert torch.equal(x, y)
