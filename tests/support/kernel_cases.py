"""Helpers that the tests of kernels share."""

from typing import Any

import torch
from helpers import (
    FP64,
    SMALL,
    Case,
    Inputs,
)
from torch import Tensor

from gdn_triton import reference
from gdn_triton.chunk.triton.shared.chunks import ChunkTable, make_chunks

UNIT32 = 2.0**-24


def case_named(name: str) -> Case:
    return next(case for case in SMALL if case.name == name)


def chunks_of(case: Case, x: Inputs) -> ChunkTable:
    return make_chunks(case.B, case.tokens, case.chunk_size, x.cu_seqlens)


def state_inputs(case: Case, x: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """g_cumsum in fp32, and the specification's w and u, rounded to the kernel's dtype."""
    g_cumsum = reference.gate_cumsum(x.g, case.chunk_size, cu_seqlens=x.cu_seqlens)
    k, v, g64, beta = (y.to(FP64) for y in (x.k, x.v, g_cumsum, x.beta))
    packing: dict[str, Any] = {"cu_seqlens": x.cu_seqlens}
    A = reference.kkt(k, g64, beta, chunk_size=case.chunk_size, **packing)
    w, u = reference.wy(k, v, g64, beta, reference.solve(A, **packing), **packing)
    return g_cumsum, w.to(dtype), u.to(dtype)
