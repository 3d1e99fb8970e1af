"""The frozen record of one validated convolution, and the tensors that come with it."""

from typing import NamedTuple

import torch
from torch import Tensor


class ConvProblem(NamedTuple):
    """The validated properties of a call, on which every backend may rely. Only
    `gdn_triton.conv.validation` builds it."""

    B: int  # rows of x: 1 when packed
    T: int  # tokens of a row
    N: int  # sequences: B when padded, len(cu_seqlens) - 1 when packed
    D: int  # channels
    W: int  # taps
    dtype: torch.dtype  # of x and of the result
    device: torch.device
    silu: bool
    last_skipped: int  # slots up to this one are padding
    every_token: bool  # write_slots has a slot for each token
    has_state: bool
    wide: bool  # x, the weight or the bias is float64
    needs_grad: bool  # grad mode is on and x, the weight or the bias requires a gradient
    unreadable: str | None = None  # a sentence why no kernel can take the tensors
    columns: int = 0  # of a slot, with num_accepted_tokens; 0: it has W - 1


class ConvOperands(NamedTuple):
    """x [B, T, D], weight [D, W], bias [D]; state [slots, D, W - 1], which the call writes; slots
    and flags as in `gdn_triton.causal_conv1d`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    state: Tensor | None = None
    read_slots: Tensor | None = None
    write_slots: Tensor | None = None
    has_initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    num_accepted_tokens: Tensor | None = None
    parents: Tensor | None = None


class PrepOperands(NamedTuple):
    """The other inputs of the preparation: a and b [B, T, HV], and its sizes and flags."""

    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    H: int
    HV: int
    K: int
    V: int
    use_l2norm: bool
    g_exp: bool
