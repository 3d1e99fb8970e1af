"""`gdn_triton.causal_conv1d` from states, with the gradients that it has without; which rows of
packed sequences are tokens.

No contents are read by the host here and no shape depends on them, so that a call can be compiled
whole and, but for the reference backend, captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from gdn_triton.conv.api import causal_conv1d, causal_conv1d_update
from gdn_triton.layers.cache import GatedDeltaNetCache

__all__ = ["conv_from_states", "convolved", "joined_weights", "served_rows"]

# The longest that the convolution from a cache takes token by token, in one kernel with the states.
CONV_STEP_TOKENS: Final = 8


def sequence_of_tokens(cu_seqlens: Tensor, T: int) -> Tensor:
    """[T], int64: the sequence of each token, N for those of none."""
    tokens = torch.arange(T, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens.contiguous(), tokens, right=True) - 1


def served_rows(T: int, live: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
    """[1, T, 1] or [B, 1, 1]: which rows are tokens of a sequence that is not skipped; None: all of
    them. live: [N], bool, the sequences that are not; None: all."""
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
    """The convolution of sequences that go on from states, on every backend that serves it without
    them, and under a compiler: the W - 1 tokens of a state are laid out before its sequence's.

    Args:
        x: [B, T, D]; with cu_seqlens [1, T, D].
        weight: [D, W]. bias: [D], or None.
        state: [N, D, W - 1], rounded to x's dtype. It is not written, and has its gradient.
        cu_seqlens: [N + 1].

    Returns:
        y: [B, T, D]; that of tokens of no sequence is meaningless.
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
    """The weights [D, W] and the biases [D] of all channels, side by side."""
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
    """qkv after the convolution, and with a cache the states after it, which are not yet in their
    slots: the rule may still refuse the call. longest: no sequence has more tokens. cp_context: of
    sequences that are split over ranks, which have no cache."""
    if cp_context is not None:
        # Imported here because only calls with cp_context need torch.distributed.
        from gdn_triton.distributed import conv_halo

        halo = conv_halo(qkv, cp_context, weight.shape[1]).mT
        return conv_from_states(qkv, weight, bias, halo, cu_seqlens)[0], None
    if cache is None:
        return causal_conv1d(qkv, weight, bias, cu_seqlens=cu_seqlens), None
    assert slots is not None and cache.conv_state is not None
    state = cache.read("conv_state", slots)
    if torch.is_grad_enabled():
        return conv_from_states(qkv, weight, bias, state, cu_seqlens)
    # A cache may be narrower than the tokens, of which only those that stay are rounded to it.
    state = state.to(torch.promote_types(state.dtype, qkv.dtype))
    convolve = causal_conv1d_update if longest <= CONV_STEP_TOKENS else causal_conv1d
    return convolve(qkv, weight, bias, state=state, cu_seqlens=cu_seqlens), state
