"""Calls of the adapter's functions for SGLang's rings, and what they should compute in float64."""

from typing import Any

import torch
from helpers import FP32, assert_within_budget
from torch import Tensor

from gdn_triton import reference as specification
from gdn_triton.integrations.sglang import rings

H, HV = 2, 4
SLOTS = 6
# K and V.
SMALL, REAL = (20, 40), (128, 128)


def tokens_of(
    T: int, dtype: torch.dtype, device: str, sizes: tuple[int, int] = SMALL
) -> dict[str, Tensor]:
    K, V = sizes
    x = {
        "mixed_qkv": torch.randn(T, 2 * H * K + HV * V),
        "a": torch.randn(T, HV),
        "b": torch.randn(T, HV),
    }
    return {name: y.to(device, dtype) for name, y in x.items()}


def parameters(device: str) -> dict[str, Tensor]:
    return {"A_log": torch.randn(HV, device=device), "dt_bias": torch.randn(HV, device=device)}


def of_heads(mixed_qkv: Tensor, K: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = mixed_qkv.split((H * K, H * K, HV * V), -1)
    return q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))


def specified(
    x: dict[str, Tensor], gates: dict[str, Tensor], state: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """o [T, HV, V] and the final state of one sequence's tokens, after `state` [HV, V, K]."""
    wide = {name: y.to(dtype) for name, y in (x | gates).items()}
    q, k, v = of_heads(wide["mixed_qkv"], state.shape[2], state.shape[1])
    o, states = specification.recurrent_gated_delta_rule(
        *(q[None], k[None], v[None], wide["a"][None]),
        beta=wide["b"][None],
        A_log=wide["A_log"],
        dt_bias=wide["dt_bias"],
        initial_state=state.to(dtype)[None],
        use_qk_l2norm=True,
        use_gate=True,
        use_beta_sigmoid=True,
        state_v_first=True,
    )[:2]
    return o[0], states[0]


def assert_specified(
    name: str, got: Tensor, pairs: list[tuple[Tensor, Tensor]], unit: float = 0.0
) -> None:
    """pairs: of each sequence the result in float64, and in float32."""
    exact, narrow = (torch.stack(y) for y in zip(*pairs, strict=True))
    unit = max(unit, 2**-20)
    assert_within_budget(name, got, exact, narrow, dtype=got.dtype, unit=unit)


class Rings:
    """A pool, its rings and SGLang's cursors; the rings hold NaN where no record is."""

    def __init__(
        self,
        L: int,
        pool: torch.dtype,
        ring: torch.dtype,
        device: str,
        low: bool = False,
        sizes: tuple[int, int] = SMALL,
    ) -> None:
        K, V = sizes

        def rows(*shape: int, dtype: torch.dtype = ring) -> Tensor:
            return torch.full(shape, torch.nan, dtype=dtype, device=device)

        self.L = L
        self.state = torch.randn(SLOTS, HV, V, K, device=device).to(pool)
        self.d, self.k = rows(SLOTS, HV, L, V), rows(SLOTS, H, L, K)
        self.g = rows(SLOTS, HV, L, dtype=FP32)
        self.d_low = rows(SLOTS, HV, L, V) if low else None
        self.k_low = rows(SLOTS, H, L, K) if low else None

    def tensors(self) -> list[Tensor]:
        found = (self.state, self.d, self.k, self.g, self.d_low, self.k_low)
        return [y for y in found if y is not None]

    def caches(self) -> dict[str, Tensor]:
        return {"d_cache": self.d, "k_cache": self.k, "g_cache": self.g}


def decode(
    own: Rings,
    x: dict[str, Tensor],
    gates: dict[str, Tensor],
    slots: Tensor,
    write_pos: Tensor,
    force: Tensor | None,
    function: Any = rings.fused_recurrent_gdn_replayssm_decode,
) -> Tensor:
    N, (V, K) = slots.shape[0], own.state.shape[2:]
    out = torch.full((N, 1, HV, V), torch.nan, dtype=x["mixed_qkv"].dtype, device=slots.device)
    o, pool = function(
        **x,
        **gates,
        scale=K**-0.5,
        initial_state=own.state,
        **own.caches(),
        out=out,
        ssm_state_indices=slots,
        write_pos=write_pos,
        force_flush=force,
        use_qk_l2norm_in_kernel=True,
    )
    assert o is out and pool is own.state
    return out.squeeze(1)
