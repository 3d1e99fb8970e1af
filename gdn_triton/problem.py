"""The frozen record of one validated call: sizes, dtypes and flags, unpacked once."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Problem:
    """What every backend may rely on. Built by `gdn_triton.validation` only.

    q, k are [B, T, H, K], v is [B, T, HV, V]; value head `hv` reads key head `hv // (HV // H)`.
    """

    B: int
    T: int  # tokens of a sequence when padded, of the whole packed row otherwise
    H: int
    HV: int
    K: int
    V: int
    N: int  # sequences: B when padded, len(cu_seqlens) - 1 when packed
    q_dtype: torch.dtype
    k_dtype: torch.dtype
    v_dtype: torch.dtype
    device: torch.device
    scale: float  # resolved: the caller's number, or K ** -0.5
    chunk_size: int
    is_varlen: bool
    has_initial_state: bool
    output_final_state: bool
    state_v_first: bool  # states are [N, HV, V, K] instead of [N, HV, K, V]
    use_qk_l2norm: bool
    use_beta_sigmoid: bool
    allow_neg_eigval: bool
    use_gate: bool
    needs_grad: bool  # grad mode is on and some input requires a gradient
