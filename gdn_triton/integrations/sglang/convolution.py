"""The convolution of SGLang's Gated DeltaNet layers, and the split of its result into q, k and v,
on this package's ops. The functions have the parameters, order and defaults of SGLang 0.5.23. A
slot of -1 is padding: its state is not changed, and its result is 0."""

from itertools import accumulate
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from gdn_triton._host.arguments import check_rank, check_tensors, must, shape_of, value_of
from gdn_triton.conv.api import causal_conv1d
from gdn_triton.conv.api import causal_conv1d_update as conv_update
from gdn_triton.integrations._decode import check_convolved, refuse
from gdn_triton.integrations._lengths import tell_offsets

PAD_SLOT_ID = -1


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: list[int],
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = PAD_SLOT_ID,
    validate_data: bool = False,
    block_table: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Convolves whole sequences. x: [D, T], a transposed [T, D]. conv_states:
    [slots, D, W - 1 or more], of which the first W - 1 columns are the state. query_start_loc:
    [N + 1]. cache_indices, has_initial_state: [N]. seq_lens_cpu: the lengths of the sequences on
    the host, for the plan of `chunk_gated_delta_rule`, which SGLang calls next with the same
    query_start_loc. `block_table` and `validate_data` are not read: the blocks of tokens are found
    on the device.

    Returns [D, T], a transposed tensor. The errors are those of `gdn_triton.causal_conv1d`.
    """
    if kwargs:
        raise TypeError(f"causal_conv1d_fn does not know {', '.join(sorted(kwargs))}")
    _check_padding(pad_slot_id)
    check_convolved(x, weight, "conv_states", conv_states)
    check_rank("x", x, "D", "T")
    check_tensors({"query_start_loc": query_start_loc}, {})
    offsets = _host_offsets(seq_lens_cpu, query_start_loc)
    y = causal_conv1d(
        x.mT,
        weight,
        bias,
        _activation(activation),
        state=conv_states[..., : weight.shape[1] - 1],
        read_slots=cache_indices,
        has_initial_state=has_initial_state,
        cu_seqlens=query_start_loc,
    )
    tell_offsets(query_start_loc, offsets)
    return y.mT


def _host_offsets(lengths: list[int] | Tensor | None, query_start_loc: Tensor) -> Tensor | None:
    """Returns the offsets [N + 1] from the host's lengths. Returns None if SGLang has no lengths,
    or has padded the batch and has lengths for other sequences than the device."""
    if isinstance(lengths, Tensor) and lengths.is_cpu:
        lengths = lengths.tolist()
    if not isinstance(lengths, list | None) or not all(
        isinstance(n, Integral) for n in lengths or ()
    ):
        raise TypeError(must("seq_lens_cpu", "be a list of ints, or None", value_of(lengths)))
    if lengths is None or query_start_loc.shape != (len(lengths) + 1,):
        return None
    offsets = [0, *accumulate(lengths)]
    return torch.tensor(offsets, dtype=query_start_loc.dtype, device="cpu")


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    num_accept_tokens: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    pad_slot_id: int = PAD_SLOT_ID,
    metadata: object | None = None,
    validate_data: bool = False,
) -> Tensor:
    """Runs a decode step. x: [N, D], or [N, D, T]. conv_state: [slots, D, C], whose first W - 1
    columns are the state; with num_accept_tokens [N] the W - 1 + T - 1 columns that
    `gdn_triton.causal_conv1d_update` describes. `metadata` and `validate_data` are not read.

    Not supported: the windows of drafts (`intermediate_conv_window`), drafts that are trees
    (`retrieve_next_token`, `retrieve_next_sibling`, `retrieve_parent_token`), rings
    (`cache_seqlens`).

    Returns a new tensor in the shape of x with dense channels.
    """
    trees = (retrieve_next_token, retrieve_next_sibling, retrieve_parent_token)
    refuse("cache_seqlens", cache_seqlens is not None, "states are no rings")
    window = intermediate_conv_window is not None
    refuse("intermediate_conv_window", window, "there is a state a slot")
    refuse("retrieve_next_token", any(y is not None for y in trees), "drafts are chains")
    _check_padding(pad_slot_id)
    check_convolved(x, weight, "conv_state", conv_state)
    W = weight.shape[1]
    columns = W - 1 if num_accept_tokens is None else W - 2 + (x.shape[2] if x.dim() == 3 else 1)
    y = conv_update(
        x.mT if x.dim() == 3 else x,
        weight,
        bias,
        _activation(activation),
        state=conv_state[..., :columns],
        read_slots=conv_state_indices,
        num_accepted_tokens=num_accept_tokens,
    )
    return y.mT if x.dim() == 3 else y


def fused_qkv_split_gdn_prefill(
    mixed_qkv: Tensor,
    num_q_heads: int,
    num_k_heads: int,
    num_v_heads: int,
    head_q: int,
    head_k: int,
    head_v: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k [1, T, H, K] and v [1, T, HV, V] of mixed_qkv [T, channels] as views. SGLang
    makes copies, but our prefill reads views."""
    check_tensors({"mixed_qkv": mixed_qkv}, {})
    check_rank("mixed_qkv", mixed_qkv, "T", "channels")
    sizes = (num_q_heads, head_q), (num_k_heads, head_k), (num_v_heads, head_v)
    widths = [heads * size for heads, size in sizes]
    if mixed_qkv.shape[1] != sum(widths):
        expected = f"have {sum(widths)} channels, {widths} of q, k and v"
        raise ValueError(must("mixed_qkv", expected, shape_of(mixed_qkv)))
    parts = mixed_qkv.split(widths, -1)
    q, k, v = (x.unflatten(-1, s)[None] for x, s in zip(parts, sizes, strict=True))
    return q, k, v


def _activation(activation: bool | str | None) -> str | None:
    if isinstance(activation, bool):
        return "silu" if activation else None
    return "silu" if activation == "swish" else activation


def _check_padding(pad_slot_id: int) -> None:
    if pad_slot_id != PAD_SLOT_ID:
        raise NotImplementedError(f"pad_slot_id must be {PAD_SLOT_ID}, got {pad_slot_id!r}")
