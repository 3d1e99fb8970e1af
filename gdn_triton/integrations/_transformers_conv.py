"""The convolution of transformers' layers on this package's op, under the names of the functions
that transformers' modeling files call."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdn_triton._host.arguments import check_tensors, must, shape_of
from gdn_triton._host.tensors import is_traced, writing
from gdn_triton.conv.api import causal_conv1d
from gdn_triton.conv.api import causal_conv1d_update as conv_update

ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}


def refuse_numbers_alone(seq_idx: Tensor | None, cu_seqlens: Tensor | None, T: int) -> None:
    """Raises ValueError if only `seq_idx` describes packed sequences. The gated delta rule reads
    only `cu_seq_lens_q` and would mix the tokens of different sequences."""
    if seq_idx is not None and cu_seqlens is None and T > 1:
        raise ValueError(must("cu_seq_lens_q", "be given with seq_idx", "seq_idx alone"))


def _judge_bounds(seq_idx: Tensor | None, cu_seqlens: Tensor, x: Tensor, W: int) -> None:
    """Raises ValueError if the offsets may describe other tokens than those of x [B, D, T], or
    `seq_idx` [B, T] other sequences. A layer puts cached tokens, or zeros if there are fewer than
    the W of a state, before the new tokens. Contents are compared only on a CPU: elsewhere the host
    would wait for the device."""
    B, _, T = x.shape
    N = cu_seqlens.shape[0] - 1
    if seq_idx is None:
        if N > 1 and T == W:
            expected = f"be given where packed sequences have up to {W} tokens in all"
            raise ValueError(must("seq_idx", expected, "None"))
        return
    if seq_idx.shape != (B, T):
        if N > 1:
            expected = f"have shape [B={B}, T={T}] with packed sequences, and no cache before them"
            raise ValueError(must("seq_idx", expected, shape_of(seq_idx)))
        return
    if seq_idx.device.type != "cpu" or cu_seqlens.device.type != "cpu" or is_traced(seq_idx):
        return
    offsets = cu_seqlens.long().clamp(0, T)
    end = int(offsets[-1])
    starts = torch.zeros(T + 1, dtype=torch.bool, device=offsets.device)
    starts = starts.index_fill(0, offsets, True)[1:end]
    wrong = (seq_idx[:, 1:end] != seq_idx[:, : max(end - 1, 0)]) != starts
    if wrong.any():
        expected = "change where a sequence of cu_seq_lens_q starts, and nowhere else"
        t = int(wrong.any(0).nonzero()[0]) + 1
        raise ValueError(must("seq_idx", expected, f"the opposite at token {t}"))


def whole(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a replacement of `causal_conv1d_fn` of a modeling file, which does not convolve
    across the bounds of packed sequences. theirs: the function that ours replaces."""

    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        refuse_numbers_alone(seq_idx, cu_seq_lens_q, hidden_states.shape[-1])
        if cu_seq_lens_q is not None:
            _judge_bounds(seq_idx, cu_seq_lens_q, hidden_states, weight.shape[-1])
        # A single sequence needs no offsets, and its offsets do not count the cached tokens.
        packed = cu_seq_lens_q if cu_seq_lens_q is not None and cu_seq_lens_q.shape[0] > 2 else None
        if not isinstance(activation, str | None) or activation not in ACTIVATIONS:
            if packed is not None:
                expected = "be silu, swish or None with packed sequences"
                raise ValueError(must("activation", expected, repr(activation)))
            return theirs(hidden_states, weight, bias, activation=activation, **kwargs)
        # hidden_states [B, D, T] is a transposed [B, T, D].
        x, activation = hidden_states.mT, ACTIVATIONS[activation]
        return causal_conv1d(x, weight, bias, activation, cu_seqlens=packed).mT

    return causal_conv1d_fn


def step(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A replacement of `causal_conv1d_update` of a modeling file. Its state [B, D, L] holds the
    last tokens and has at least W - 1 columns."""

    def causal_conv1d_update(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        required = {
            "hidden_states": hidden_states,
            "conv_state": conv_state,
            "weight": weight,
        }
        check_tensors(required, {"bias": bias})
        needed, T = weight.shape[-1] - 1, hidden_states.shape[-1]
        older = conv_state.shape[-1] - needed
        trained = any(x is not None and x.requires_grad for x in (hidden_states, weight, bias))
        if (
            older < 0
            or T != 1
            or needed < 1
            or not isinstance(activation, str | None)
            or activation not in ACTIVATIONS
            or torch.promote_types(hidden_states.dtype, conv_state.dtype) != conv_state.dtype
            or (trained and torch.is_grad_enabled())
        ):
            return theirs(hidden_states, conv_state, weight, bias, activation)
        # The update writes some of the columns that move to the front. Copy these columns before
        # the update, and write them after the update has validated the call.
        moved = conv_state[..., 1 : older + 1].clone() if older > 0 else None
        state = conv_state[..., older:]
        y = conv_update(hidden_states.mT, weight, bias, ACTIVATIONS[activation], state=state)
        if moved is not None:
            with writing(conv_state):
                conv_state[..., :older] = moved
        return y.mT

    return causal_conv1d_update
