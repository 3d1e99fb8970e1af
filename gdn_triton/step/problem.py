"""The records of a call of `gdn_triton.layer_step`."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor


class LayerOperands(NamedTuple):
    """The tensors of a call, by the names that errors give them."""

    mixed_qkv: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor | None
    state: Tensor
    read_slots: Tensor
    conv_state: Tensor | None
    conv_weight: Tensor | None
    conv_bias: Tensor | None
    gate: Tensor | None
    norm_weight: Tensor | None
    counters: Tensor | None
    write_slots: Tensor | None = None
    num_accepted_tokens: Tensor | None = None
    parents: Tensor | None = None
    cu_seqlens: Tensor | None = None
    out: Tensor | None = None


# The most tokens of a sequence in a call of the kernels.
MOST_TOKENS: Final = 8

# The tensors that a call writes in place.
WRITTEN: Final = ("state", "conv_state", "counters", "out")


class LayerOptions(NamedTuple):
    """The arguments that are not tensors."""

    activation: str | None
    norm_eps: float
    norm_activation: str
    allow_neg_eigval: bool
    use_qk_l2norm_in_kernel: bool
    scale: float | None
    state_v_first: bool
    skip: str
    max_tokens: int | None = None


class LayerCall(NamedTuple):
    """The arguments of `gdn_triton.layer_step`. window, positions: as for
    `gdn_triton.recurrent_step`."""

    inputs: LayerOperands
    options: LayerOptions
    window: Any = None
    positions: Tensor | None = None


def step_arguments(call: LayerCall) -> dict[str, Any]:
    """Returns the arguments of the call's `gdn_triton.recurrent_step`, except mixed_qkv."""
    x, options, has_window = call.inputs, call.options, call.window is not None
    return {
        "state": x.state,
        "read_slots": x.read_slots,
        # With a window these two are arguments of the convolution alone.
        "write_slots": None if has_window else x.write_slots,
        "num_accepted_tokens": None if has_window else x.num_accepted_tokens,
        "parents": x.parents,
        "cu_seqlens": x.cu_seqlens,
        "a": x.a,
        "b": x.b,
        "A_log": x.A_log,
        "dt_bias": x.dt_bias,
        "allow_neg_eigval": options.allow_neg_eigval,
        "use_qk_l2norm_in_kernel": options.use_qk_l2norm_in_kernel,
        "scale": options.scale,
        "state_v_first": options.state_v_first,
        "skip": options.skip,
        "window": call.window,
        "positions": call.positions,
    }


def most_accepted(call: LayerCall) -> int:
    """Returns S, the largest number of accepted tokens of a sequence, or 0 without
    num_accepted_tokens."""
    x = call.inputs
    if x.num_accepted_tokens is None:
        return 0
    S: int = x.read_slots.shape[1] if call.window is None else call.window.max_tokens
    return S


def conv_arguments(call: LayerCall) -> dict[str, Any]:
    """Returns the arguments of the call's `gdn_triton.causal_conv1d_update`, except x. The call has
    a convolution."""
    x, options = call.inputs, call.options
    assert x.conv_weight is not None and x.conv_state is not None
    state, slots = x.conv_state, x.read_slots
    if x.num_accepted_tokens is not None:
        state = state[..., : x.conv_weight.shape[1] - 2 + most_accepted(call)]
        slots = slots if slots.dim() == 1 else slots[:, 0]
    return {
        "weight": x.conv_weight,
        "bias": x.conv_bias,
        "activation": options.activation,
        "state": state,
        "read_slots": slots,
        "write_slots": x.write_slots,
        "skip": options.skip,
        "num_accepted_tokens": x.num_accepted_tokens,
        "parents": x.parents,
        "cu_seqlens": x.cu_seqlens,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProblem:
    """The validated properties of a call, on which every backend may rely. Only
    `gdn_triton.step.validation` builds it."""

    N: int
    T: int  # tokens of a sequence; of a packed one at most
    tokens: int  # rows of mixed_qkv
    H: int
    HV: int
    K: int
    V: int
    W: int  # taps; 0: there is no convolution
    dtype: torch.dtype  # of mixed_qkv and of the result
    dtypes: tuple[torch.dtype, ...]  # of all tensors
    state_dtype: torch.dtype
    device: torch.device
    scale: float
    silu: bool
    norm_eps: float
    norm_sigmoid: bool
    allow_neg_eigval: bool
    use_qk_l2norm: bool
    state_v_first: bool
    last_skipped: int  # slots up to this one are padding
    tile_span: int  # most elements a tile spans; with a window as in `RecurrentProblem`
    has_window: bool
    has_tickets: bool  # counters, or the tickets of a window
    has_norm: bool
    most_accepted: int  # S, with num_accepted_tokens; 0: without
    has_write_slots: bool
    every_token: bool  # write_slots has a slot for each token
    slots: int  # of state
    is_tree: bool  # parents are given
    is_packed: bool  # cu_seqlens is given
    unreadable: str | None  # a sentence why no kernel can read the tensors
