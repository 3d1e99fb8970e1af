"""Allocation of states."""

import torch


def empty_state(
    N: int, HV: int, K: int, V: int, state_v_first: bool, device: torch.device
) -> torch.Tensor:
    """Allocates fp32 states [N, HV, K, V], or [N, HV, V, K] if value-first."""
    shape = (N, HV, V, K) if state_v_first else (N, HV, K, V)
    return torch.empty(shape, dtype=torch.float32, device=device)
