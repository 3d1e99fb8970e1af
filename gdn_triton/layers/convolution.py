"""The convolution of a layer, and masks of the rows that are tokens. The layer's convolution starts
from states and has Triton gradients; `gdn_triton.causal_conv1d` has Triton gradients only without
states.

The host reads no contents in this module, and no shape depends on contents. Therefore a call can be
compiled as one graph and, except in the reference backend, captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from gdn_triton.conv.api import causal_conv1d, causal_conv1d_update
from gdn_triton.layers.cache import GatedDeltaNetCache

__all__ = ["conv_from_states", "convolved", "joined_weights", "served_rows"]

# The longest sequence whose convolution from a cache runs token by token, in one kernel that also
# writes the states.
CONV_STEP_TOKENS: Final = 8


def sequence_of_tokens(cu_seqlens: Tensor, T: int) -> Tensor:
    """Returns [T], int64: the number of each token's sequence, and N for tokens that belong to no
    sequence."""
    tokens = torch.arange(T, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens.contiguous(), tokens, right=True) - 1


def served_rows(T: int, live: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
    """Returns [1, T, 1] or [B, 1, 1], bool: which rows are tokens of a sequence that is not
    skipped; None: all rows. live: [N], bool, which sequences are not skipped; None: all
    sequences."""
    if cu_seqlens is None:
        return None if live is None else live[:, None, None]
    owner = sequence_of_tokens(cu_seqlens, T)
    served = owner < cu_seqlens.shape[0] - 1
    if live is not None:
        served = torch.cat([live, live.new_zeros(1)])[owner]
    return served[None, :, None]


def conv_from_states(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Convolves sequences that continue from states, with gradients, on every backend and under a
    compiler. The function copies the W - 1 tokens of each state before the tokens of its sequence,
    and calls the convolution without states.

    Args:
        x: [B, T, D]; with cu_seqlens [1, T, D].
        weight: [D, W]. bias: [D], or None.
        state: [N, D, W - 1]. It is read in x's dtype, is not written, and has a gradient.
        cu_seqlens: [N + 1].

    Returns:
        y: [B, T, D]; undefined for tokens of no sequence.
        state: [N, D, W - 1], after the last tokens.
    """
    N, D, past = state.shape
    T = x.shape[1]
    before = state.mT.to(x.dtype)
    if cu_seqlens is None:
        x = torch.cat([before, x], 1)
        return causal_conv1d(x, weight, bias)[:, past:], x[:, T:].mT

    offsets = cu_seqlens.long() + past * torch.arange(N + 1, device=x.device)
    steps = torch.arange(past, device=x.device)
    first, last = offsets[:-1, None] + steps, offsets[1:, None] - past + steps
    rows = torch.arange(T, device=x.device)
    rows = rows + past * (sequence_of_tokens(cu_seqlens, T) + 1).clamp(max=N)
    spread = x.new_zeros(T + N * past, D)
    spread = spread.index_copy(0, first.flatten(), before.reshape(-1, D))
    spread = spread.index_copy(0, rows, x[0])
    y = causal_conv1d(spread, weight, bias, cu_seqlens=offsets)
    return y.index_select(0, rows)[None], spread[last].mT


def joined_weights(convs: Sequence[nn.Conv1d]) -> tuple[Tensor, Tensor | None]:
    """Returns the weights [D, W] and the biases [D] of q, k and v, concatenated."""
    weight = torch.cat([conv.weight for conv in convs]).squeeze(1)
    biases = [conv.bias for conv in convs if conv.bias is not None]
    return weight, torch.cat(biases) if biases else None


def convolved(
    qkv: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache: GatedDeltaNetCache | None,
    slots: Tensor | None,
    cu_seqlens: Tensor | None,
    longest: int,
    *,
    cp_context: object | None,
) -> tuple[Tensor, Tensor | None]:
    """Returns qkv after the convolution and, with a cache, the new states. The new states are not
    written to their slots yet, because the rule may still refuse the call. longest: an upper bound
    of the tokens of a sequence. cp_context: the context of sequences that are split over ranks,
    which have no cache."""
    if cp_context is not None:
        # Import here, because only calls with cp_context need torch.distributed.
        from gdn_triton.distributed import conv_halo

        halo = conv_halo(qkv, cp_context, weight.shape[1]).mT
        return conv_from_states(qkv, weight, bias, halo, cu_seqlens)[0], None
    if cache is None:
        return causal_conv1d(qkv, weight, bias, cu_seqlens=cu_seqlens), None
    assert slots is not None and cache.conv_state is not None
    state = cache.read("conv_state", slots)
    if torch.is_grad_enabled():
        return conv_from_states(qkv, weight, bias, state, cu_seqlens)
    # A cache may have a narrower dtype than the tokens. Round only the tokens that stay in the
    # cache.
    state = state.to(torch.promote_types(state.dtype, qkv.dtype))
    convolve = causal_conv1d_update if longest <= CONV_STEP_TOKENS else causal_conv1d
    return convolve(qkv, weight, bias, state=state, cu_seqlens=cu_seqlens), state
