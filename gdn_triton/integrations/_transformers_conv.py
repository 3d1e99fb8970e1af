"""The convolution of transformers' layers on this package's op, for the functions that their
modeling files call."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdn_triton._host.arguments import check_tensors
from gdn_triton._host.tensors import writing
from gdn_triton.conv.api import causal_conv1d
from gdn_triton.conv.api import causal_conv1d_update as conv_update

ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}
# What a layer hands on of packed sequences. Their bounds may be meant for the tokens without the
# cached ones before them, so transformers' own function judges them.
PACKED = ("cu_seq_lens_q", "seq_idx")


def whole(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`causal_conv1d_fn` of a modeling file. theirs: what was there."""

    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        packed = any(kwargs.get(name) is not None for name in PACKED)
        if packed or not isinstance(activation, str | None) or activation not in ACTIVATIONS:
            return theirs(hidden_states, weight, bias, activation=activation, **kwargs)
        # [B, D, T], which is a transposed [B, T, D].
        return causal_conv1d(hidden_states.mT, weight, bias, ACTIVATIONS[activation]).mT

    return causal_conv1d_fn


def step(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`causal_conv1d_update` of a modeling file, whose state [B, D, L] has W - 1 columns or more:
    the last tokens."""

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
        # Columns that no convolution reads any more move along, once the call has been judged.
        moved = conv_state[..., 1 : older + 1].clone()
        state = conv_state[..., older:]
        y = conv_update(hidden_states.mT, weight, bias, ACTIVATIONS[activation], state=state)
        if older > 0:
            with writing(conv_state):
                conv_state[..., :older] = moved
        return y.mT

    return causal_conv1d_update
