"""The short causal convolution of a Gated DeltaNet layer, in plain torch.

No contents are read by the host and no shape depends on them, so that a call can be compiled whole
and captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

__all__ = ["causal_conv", "packed_causal_conv", "sequence_of_tokens"]


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """silu of a depthwise convolution of every token with the ones before it.

    Args:
        x: [B, T, D].
        weight: [D, 1, W], that of the token itself last. bias: [D].
        state: [B, D, W - 1], the rows before the first token, the latest last; zeros for none.

    Returns:
        y: [B, T, D].
        state: [B, D, W - 1], after the last token; a view.
    """
    x = torch.cat([state.to(x.dtype), x.mT], -1)
    y = silu(conv1d(x, weight, bias, groups=weight.shape[0]))
    return y.mT, x[..., x.shape[-1] - state.shape[-1] :]


def sequence_of_tokens(cu_seqlens: Tensor, T: int) -> Tensor:
    """[T], int64: the sequence of each token, N for those of none."""
    tokens = torch.arange(T, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, tokens, right=True) - 1


def packed_causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """`causal_conv` of N sequences packed in one row, x [1, T, D] and state [N, D, W - 1].

    The sequences are laid out with W - 1 rows before each, which hold its state, and convolved as
    one: T + N (W - 1) rows, whatever the lengths. The y of tokens of no sequence is meaningless.
    """
    N, D, past = state.shape
    T = x.shape[1]
    cu_seqlens = cu_seqlens.long()
    before = past * torch.arange(N + 1, device=x.device)  # rows of past ahead of each sequence's
    steps = torch.arange(past, device=x.device)
    rows = torch.arange(T, device=x.device)
    rows = rows + past * (sequence_of_tokens(cu_seqlens, T) + 1).clamp(max=N)
    first = (cu_seqlens[:-1] + before[:-1])[:, None] + steps
    last = (cu_seqlens[1:] + before[:-1])[:, None] + steps

    spread = x.new_zeros(T + N * past, D)
    spread = spread.index_copy(0, first.flatten(), state.mT.reshape(-1, D).to(x.dtype))
    spread = spread.index_copy(0, rows, x[0])
    y = conv1d(spread.mT[None], weight, bias, padding=past, groups=D)
    y = silu(y[0].mT.index_select(0, rows))
    return y[None], spread[last].mT
