"""Helpers that the tests of reference share."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

FP64, FP32 = torch.float64, torch.float32


@dataclass(frozen=True)
class Case:
    """One regime. `lengths` is packed; None is padded with B rows of T tokens."""

    T: int = 40
    B: int = 1
    lengths: tuple[int, ...] | None = None
    H: int = 2
    HV: int = 2
    K: int = 8
    V: int = 8
    chunk_size: int = 16
    g: float | None = None  # None: uniform in (-1, 0); a number: that gate at every token
    holes: bool = False  # a third of the gates are -inf
    beta: float | None = None  # None: uniform in (0, 1)
    same_key: bool = False
    orphans: int = 0  # tokens past the last sequence
    spread: bool = False  # gates between -1e-3 and -20, log-uniform


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor
    cu_seqlens: Tensor | None

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.g, self.beta

    def options(self) -> dict[str, Any]:
        return {"initial_state": self.initial_state, "cu_seqlens": self.cu_seqlens}

    def to(self, dtype: torch.dtype) -> "Inputs":
        cast = {
            name: getattr(self, name).to(dtype)
            for name in ("q", "k", "v", "g", "beta", "initial_state")
        }
        return replace(self, **cast)


def make(case: Case, seed: int = 0) -> Inputs:
    """float64 inputs whose values float32 holds exactly, so a narrower run has the same problem."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator).double()

    B, T, N = case.B, case.T, case.B
    cu_seqlens = None
    if case.lengths is not None:
        B, T, N = 1, sum(case.lengths) + case.orphans, len(case.lengths)
        cu_seqlens = torch.tensor([0, *np.cumsum(case.lengths, dtype=np.int64).tolist()])
    q, k = normal(B, T, case.H, case.K), normal(B, T, case.H, case.K)
    v = normal(B, T, case.HV, case.V)
    if case.same_key:
        k = k[:, :1].expand_as(k).clone() if T else k
    # Unit keys, as the layer has them: with beta in [0, 2] no step then amplifies the state.
    k = torch.nn.functional.normalize(k, dim=-1).float().double()
    g = -uniform(B, T, case.HV) if case.g is None else torch.full((B, T, case.HV), case.g).double()
    if case.spread:
        g = -(1e-3 * (20 / 1e-3) ** uniform(B, T, case.HV)).float().double()
    if case.holes:
        g = g.masked_fill(uniform(B, T, case.HV) < 1 / 3, -math.inf)
    beta = uniform(B, T, case.HV) if case.beta is None else torch.full_like(g, case.beta)
    initial_state = normal(N, case.HV, case.K, case.V)
    return Inputs(q, k, v, g, beta, initial_state, cu_seqlens)


# Each entry is a place where the two forms, the two layouts or the arithmetic could part ways.
REGIMES = {
    "one_token": Case(T=1),
    "below_chunk": Case(T=15),
    "at_chunk": Case(T=16),
    "above_chunk": Case(T=17),
    "two_rows_with_tail": Case(B=2, T=39),
    "chunk_32": Case(T=75, chunk_size=32),
    "chunk_64": Case(T=150, chunk_size=64),
    "grouped_heads": Case(B=2, H=2, HV=6),
    "one_key_head": Case(H=1, HV=3),
    "wide_value": Case(K=5, V=12),
    "wide_key": Case(K=12, V=5, HV=4),
    "tiny_heads": Case(K=1, V=1),
    "no_tokens": Case(B=2, T=0),
    "no_rows": Case(B=0, T=5),
    "packed": Case(lengths=(3, 40, 16, 17), HV=4, K=6),
    "packed_aligned": Case(lengths=(32, 16, 48)),
    "packed_with_empty": Case(lengths=(0, 5, 0, 0, 33, 1, 0), HV=4),
    "packed_all_empty": Case(lengths=(0, 0)),
    "packed_none": Case(lengths=()),
    "packed_orphans": Case(lengths=(20, 7), orphans=9),
    "packed_only_orphans": Case(lengths=(), orphans=9),
    "strong_decay": Case(g=-20.0),
    "forget_all": Case(g=-math.inf),
    "forget_some": Case(B=2, T=50, holes=True, HV=4),
    "packed_forget_some": Case(lengths=(40, 1, 19), holes=True),
    "no_decay": Case(g=0.0),
    "spread_decay": Case(T=100, spread=True),
    "no_write": Case(beta=0.0),
    "full_write": Case(beta=1.0),
    "reflect": Case(beta=2.0),
    "same_key_full_write": Case(beta=1.0, same_key=True, g=0.0),
    "same_key_reflect": Case(beta=2.0, same_key=True, g=0.0, T=70, chunk_size=64),
}
regimes = pytest.mark.parametrize("case", REGIMES.values(), ids=REGIMES.keys())


def relative_error(actual: Tensor, expected: Tensor, at_least: float = 0.0) -> float:
    """Largest error over the largest expected magnitude, or over 1 where all that is expected is 0.

    `at_least` bounds that magnitude from below.
    """
    if expected.numel() == 0:
        return 0.0
    error = (actual.double() - expected.double()).abs().max().item()
    size = max(expected.double().abs().max().item(), at_least)
    return error / size if size > 0 else error


def assert_close(
    actual: Tensor | None, expected: Tensor, tolerance: float = 1e-12, at_least: float = 0.0
) -> None:
    assert actual is not None
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert torch.isfinite(expected).all()
    assert torch.isfinite(actual).all()
    error = relative_error(actual, expected, at_least)
    assert error <= tolerance, f"relative error {error:.3e} above {tolerance:.3e}"


def sequences(inputs: Inputs) -> list[tuple[int, slice]]:
    """(batch row, tokens) of each sequence."""
    if inputs.cu_seqlens is None:
        B, T = inputs.g.shape[:2]
        return [(b, slice(0, T)) for b in range(B)]
    bounds = inputs.cu_seqlens.tolist()
    return [(0, slice(bounds[n], bounds[n + 1])) for n in range(len(bounds) - 1)]
