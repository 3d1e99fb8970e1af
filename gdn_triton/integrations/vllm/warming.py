"""Runs every kind of step of vLLM's Gated DeltaNet layers ahead of time, so that no request
compiles a kernel.

vLLM runs its model once to profile memory, before it allocates its caches. `_forward_core` of a
layer gets no metadata in that run and calls `warm_up`. `warm_up` runs `forward_core` with the
layer's own parameters, with pools of two slots, and with the tokens of that run, which have the
strides of later steps. Every sequence has slot 0, which is padding, so the warm-up writes no state.
"""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from gdn_triton.integrations.vllm.layer import LAYER, METADATA, Tokens, forward_core
from gdn_triton.integrations.vllm.window import POSITIONS, WITH_RECORDS, page_views, positions_of
from gdn_triton.warming import series

_logger = logging.getLogger("gdn_triton")
# One entry for each set of properties that select variants of kernels: the tokens of the largest
# step that has run.
_rows: dict[Any, int] = {}

CHECKPOINT_EVERY: Final = 64


def warm_up(layer: Any, x: Tokens, *, max_sequences: int, is_conv_state_dim_first: bool) -> int:
    """Runs steps of every kind, with up to as many tokens as x has, and up to max_sequences
    sequences.

    A call for a layer with the same properties as an earlier layer, with no more tokens, does
    nothing.

    layer: a layer of vLLM, whose caches need not be allocated. x: tokens of the layer; x.out is
    written.

    Returns:
        The number of steps that ran.

    Raises:
        TypeError, ValueError, RuntimeError: as for
            `gdn_triton.integrations.vllm.layer.forward_core`.
    """
    tensors = (x.mixed_qkv, x.a, x.b, x.out)
    parameters = (layer.A_log, layer.dt_bias, layer.conv1d.weight, layer.conv1d.bias)
    kinds = [
        None if y is None else (y.dtype, y.device, y.shape[1:], y.stride(), y.data_ptr() % 16)
        for y in (*tensors, *parameters)
    ]
    checkpoints = bool(getattr(layer, "_exports_checkpoints", False))
    # Only OLMo's layer has this attribute.
    doubles_beta = bool(getattr(layer, "allow_neg_eigval", False))
    options = (layer.num_spec, max_sequences, checkpoints, doubles_beta, is_conv_state_dim_first)
    key = (*kinds, *options, layer.num_k_heads // layer.tp_size, *layer.get_state_dtype())
    rows = x.mixed_qkv.shape[0]
    if rows <= _rows.get(key, 0):
        return 0
    device = x.mixed_qkv.device
    # With a window the dtypes have its records even where drafts leave it off.
    states = list(zip(layer.get_state_shape(), layer.get_state_dtype(), strict=False))
    if len(states) == WITH_RECORDS:
        # Kernels with a window have variants for the size of a page.
        pools = page_views(states, 2, layer.cache_config.mamba_page_size_padded, device)
    else:
        pools = tuple(torch.zeros(2, *shape, dtype=y, device=device) for shape, y in states)
    stand_in = SimpleNamespace(
        **{name: getattr(layer, name) for name in LAYER if name != "kv_cache"},
        allow_neg_eigval=doubles_beta,
        kv_cache=pools,
        _checkpoint_exporter=SimpleNamespace(export=lambda *args, **kwargs: None),
    )
    conv_state = pools[0] if is_conv_state_dim_first else pools[0].transpose(-1, -2)
    count = 0
    for step in _steps(x, max_sequences, layer.num_spec, checkpoints):
        if len(pools) == WITH_RECORDS:
            # The positions of sequences that are all padding are not read.
            zeros = step.non_spec_state_indices_tensor.new_zeros(rows)
            setattr(step, POSITIONS, positions_of(step, zeros))
        forward_core(stand_in, step, conv_state, x.mixed_qkv, x.b, x.a, x.out)
        count += 1
    if x.mixed_qkv.device.type != "cpu":
        torch.accelerator.synchronize(x.mixed_qkv.device)
    _rows[key] = rows
    _logger.info("gdn_triton has made %d steps of %s to warm up.", count, layer.prefix)
    return count


def _steps(x: Tokens, max_sequences: int, drafted: int, checkpoints: bool) -> Iterator[Any]:
    """Yields the metadata of every kind of step, with the sizes that `series` returns."""
    made = _Metadata(x.mixed_qkv.device, drafted)
    rows, S = x.mixed_qkv.shape[0], drafted + 1
    for n in series(min(max_sequences, rows)):
        yield from made.decodes(n)
    for first in _firsts(x):
        for N, T in _packed(max_sequences, rows - first):
            yield made.prefills(N, T, first)
            if checkpoints:
                yield made.with_checkpoints(made.prefills(N, T, first))
    if drafted == 0:
        return
    for n in series(min(max_sequences, rows // S)) if rows >= S else ():
        yield made.drafts(n, made.nothing())
        if n * S < rows:
            yield made.drafts(n, made.prefills(1, 1))
    for N, T in _packed(max_sequences, rows - S):
        yield made.drafts(1, made.prefills(N, T))
        if checkpoints:
            yield made.drafts(1, made.with_checkpoints(made.prefills(N, T)))


def _packed(max_sequences: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yields (sequences, tokens) of packed calls of at most `rows` tokens."""
    for T in series(rows) if rows > 0 else ():
        yield from ((N, T) for N in series(min(max_sequences, T)))


def _firsts(x: Tokens) -> list[int]:
    """Returns numbers of decodes before the prefills of a step: one number for each combination of
    tensors whose first element after the decodes is at a multiple of 16 bytes. Kernels have
    variants for these combinations."""
    found: dict[tuple[bool, ...], int] = {}
    for n in range(16):
        after = [y.data_ptr() + n * y.stride(0) * y.itemsize for y in (x.mixed_qkv, x.a, x.b)]
        # The last two are the slots of prefills and the flags of prefills.
        after += [x.out.data_ptr() + n * x.out.stride(0) * x.out.itemsize, 4 * n, n]
        found.setdefault(tuple(address % 16 == 0 for address in after), n)
    return sorted(found.values())


class _Metadata:
    """vLLM's metadata of steps whose sequences all have slot 0."""

    def __init__(self, device: torch.device, drafted: int) -> None:
        self.device = device
        self.S = drafted + 1

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def nothing(self) -> Any:
        made: dict[str, Any] = dict.fromkeys(METADATA)
        numbers = [name for name in METADATA if name.startswith("num_")]
        made |= {name: 0 for name in numbers if name != "num_accepted_tokens"}
        return SimpleNamespace(**made)

    def decodes(self, n: int) -> Iterator[Any]:
        # vLLM passes a column of its table or, in graphs, a buffer.
        for slots in {0: self.zeros(n, self.S)[:, 0], self.S - 1: self.zeros(n)}.values():
            made = self.nothing()
            made.num_decodes = made.num_decode_tokens = made.num_actual_tokens = n
            made.non_spec_state_indices_tensor = slots
            yield made

    def prefills(self, N: int, T: int, first: int = 0) -> Any:
        """Returns the metadata of T tokens of N sequences, after `first` decodes."""
        made = self.nothing()
        made.num_decodes = made.num_decode_tokens = first
        made.num_prefills, made.num_actual_tokens = N, first + T
        slots = self.zeros(first + N)
        made.non_spec_state_indices_tensor = slots
        made.prefill_state_indices = slots[first:]
        made.prefill_has_initial_state = self.zeros(first + N, dtype=torch.bool)[first:]
        made.prefill_query_start_loc = self.zeros(N + 1)
        made.prefill_query_start_loc[1:] = T
        return made

    def with_checkpoints(self, made: Any) -> Any:
        N = made.num_prefills
        made.flashinfer_checkpoint_plan = SimpleNamespace(every_n_tokens=CHECKPOINT_EVERY)
        made.checkpoint = SimpleNamespace(
            offsets=[CHECKPOINT_EVERY],
            checkpoint_offsets=self.zeros(N),
            state_indices=self.zeros(N),
        )
        return made

    def drafts(self, n: int, others: Any) -> Any:
        """Returns the metadata of n sequences of drafts, together with the prefills of `others`."""
        tokens, T = n * self.S, others.num_actual_tokens
        index = torch.arange(tokens + T, device=self.device)
        others.spec_token_indx, others.non_spec_token_indx = index[:tokens], index[tokens:]
        others.spec_sequence_masks = self.zeros(n, dtype=torch.bool)
        others.num_spec_decodes, others.num_actual_tokens = n, tokens + T
        others.spec_state_indices_tensor = self.zeros(n, self.S)
        others.spec_query_start_loc = self.zeros(n + 1)
        others.spec_query_start_loc[1:] = self.S
        others.num_accepted_tokens = self.zeros(n) + 1
        return others
