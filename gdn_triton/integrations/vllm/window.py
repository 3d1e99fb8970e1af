"""Decode steps of vLLM's layers with a window of records, for `register(window=True)`.

A page of vLLM's memory holds the states of one sequence in one layer. vLLM asks
`MambaStateShapeCalculator` for the shapes of these states, makes pages of their size, and gives the
layer a view of each state in all pages. With a window the shapes include the records, so a page
holds a state together with its records. Pages of attention layers have the same size and are filled
with tokens. Records in memory of our own would need as much memory for each of those pages too.

Prefix caching and connectors copy or move the states of a page without its records, and drafts need
a state for each token; a step then has no window. The position of a token is the length of its
sequence, which vLLM has on the device. A prefill folds the records of the sequences that it
continues, and restarts the windows of all its sequences. A preempted sequence loses its page and
starts with a prefill again.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from gdn_triton.recurrent.window import StepWindow, fold_window, restart_window

ROWS: Final = 16
# Pages hold `start` in this many numbers, so that the next page begins at a multiple of 16 bytes.
STARTS: Final = 4
# The states of a layer's page: without records those of the convolution and of the rule.
OWN, WITH_RECORDS = 2, 7
POSITIONS: Final = "gdn_triton_positions"
# The methods of vLLM's layers that unpack the dtypes of a page into two names.
UNPACKING: Final = ("_fused_gdn_decode_unsupported_reason", "_warmup_prefill_kernels")

_logger = logging.getLogger("gdn_triton")


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions of a step's sequences, decodes first. lengths: [sequences or more], int32: the
    tokens of each sequence, with those of the step. before, after: [prefills]: the position of the
    first token of each prefill, and of the first token after it; None without prefills."""

    lengths: Tensor
    before: Tensor | None = None
    after: Tensor | None = None


def shapes(theirs: Any) -> Any:
    """Wraps vLLM's `gated_delta_net_state_shape`, a class method: adds the shapes of a window where
    there are no drafts."""

    def gated_delta_net_state_shape(
        cls: Any,
        tp_world_size: int,
        num_k_heads: int,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        conv_kernel_size: int,
        num_spec: int = 0,
    ) -> tuple[tuple[int, ...], ...]:
        own: tuple[tuple[int, ...], ...] = theirs.__func__(
            cls,
            tp_world_size,
            num_k_heads,
            num_v_heads,
            head_k_dim,
            head_v_dim,
            conv_kernel_size,
            num_spec,
        )
        if num_spec > 0:
            return own
        H, HV = num_k_heads // tp_world_size, num_v_heads // tp_world_size
        rows = (ROWS, HV, head_v_dim), (ROWS, H, head_k_dim), (ROWS, HV)
        return (*own, *rows, (ROWS,), (STARTS,))

    return classmethod(gated_delta_net_state_shape)


def dtypes(theirs: Any) -> Any:
    """Wraps vLLM's `gated_delta_net_state_dtype`, a class method, which has no argument for drafts.
    vLLM pairs the dtypes with the shapes and ignores additional dtypes."""

    def gated_delta_net_state_dtype(
        cls: Any,
        model_dtype: Any,
        mamba_cache_dtype: Any,
        mamba_ssm_cache_dtype: Any = "auto",
    ) -> tuple[torch.dtype, ...]:
        own: tuple[torch.dtype, ...] = theirs.__func__(
            cls, model_dtype, mamba_cache_dtype, mamba_ssm_cache_dtype
        )
        if not isinstance(model_dtype, torch.dtype):
            raise TypeError(f"model_dtype must be a torch.dtype, got {model_dtype!r}")
        rows = torch.float32, model_dtype, torch.float32
        return (*own, *rows, torch.int32, torch.int32)

    return classmethod(gated_delta_net_state_dtype)


def with_own_dtypes(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of a layer that is in `UNPACKING`: while it runs, `get_state_dtype` leaves out
    the dtypes of the records."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        dtypes = self.get_state_dtype()[:OWN]
        self.get_state_dtype = lambda: dtypes
        try:
            return method(self, *args, **kwargs)
        finally:
            del self.get_state_dtype

    return run


def why_not(config: Any) -> str | None:
    """Returns the reason why an engine with this configuration decodes without a window, or
    None."""
    if config.cache_config.mamba_cache_mode != "none":
        return "prefix caching copies states from page to page without their records"
    if config.speculative_config is not None:
        return "drafts have a state for each token"
    if config.kv_transfer_config is not None:
        return "a connector moves states without their records"
    return None


def placing(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps vLLM's `GDNAttentionMetadataBuilder.build`: adds the positions of a step with a window
    to its metadata."""
    told: set[str] = set()

    @functools.wraps(build)
    def build_and_place(
        self: Any, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        metadata = build(self, common_prefix_len, common_attn_metadata, *args, **kwargs)
        if len(self.kv_cache_spec.shapes) != WITH_RECORDS:
            return metadata
        reason = why_not(self.vllm_config)
        if reason is None:
            lengths = common_attn_metadata.seq_lens
            setattr(metadata, POSITIONS, positions_of(metadata, lengths))
        elif reason not in told:
            told.add(reason)
            _logger.warning("vLLM decodes without a window: %s.", reason)
        return metadata

    return build_and_place


def page_views(
    states: list[tuple[tuple[int, ...], torch.dtype]],
    count: int,
    page_size: int | None,
    device: torch.device,
) -> tuple[Tensor, ...]:
    """Returns the states of a layer in `count` pages of zeros, as views like vLLM's. page_size: in
    bytes; None: that of the states."""
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in states]
    pages = torch.zeros(count, page_size or sum(sizes), dtype=torch.int8, device=device)
    views, end = [], 0
    for (shape, dtype), size in zip(states, sizes, strict=True):
        views.append(pages[:, end : end + size].view(dtype).view(-1, *shape))
        end += size
    return tuple(views)


def positions_of(metadata: Any, lengths: Tensor) -> Positions:
    """Returns the positions of a step without drafts. lengths: the tokens of each sequence."""
    N, first = metadata.num_prefills, metadata.num_decodes
    if N == 0:
        return Positions(lengths)
    offsets = metadata.prefill_query_start_loc[: N + 1]
    after = lengths[first : first + N] + 1
    return Positions(lengths, after - offsets.diff(), after)


def carrying(update: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps vLLM's `update_block_table`, which makes the metadata of another group of layers: the
    positions are the same."""

    @functools.wraps(update)
    def update_and_carry(self: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        updated = update(self, metadata, *args, **kwargs)
        positions = getattr(metadata, POSITIONS, None)
        if positions is not None:
            setattr(updated, POSITIONS, positions)
        return updated

    return update_and_carry


@dataclass(frozen=True, slots=True)
class LayerWindow:
    """The window of a layer's pages, and the positions of a step."""

    window: StepWindow
    positions: Positions

    def of_decodes(self, count: int) -> dict[str, Any]:
        """Returns the arguments of `recurrent_step` for the first `count` sequences."""
        return {"window": self.window, "positions": self.positions.lengths[:count]}

    def fold(self, state: Tensor, slots: Tensor, continues: Tensor, skip: str) -> None:
        """Folds the records of prefills that continue a state. The pages of the other prefills may
        hold anything."""
        assert self.positions.before is not None
        slots = torch.where(continues, slots, 0)
        fold_window(state, self.window, slots, self.positions.before, state_v_first=True, skip=skip)

    def restart(self, slots: Tensor, skip: str) -> None:
        assert self.positions.after is not None
        restart_window(self.window, slots, self.positions.after, skip=skip)


def window_of(layer: Any, metadata: Any) -> LayerWindow | None:
    """Returns the window of a step, or None where the step has none."""
    positions = getattr(metadata, POSITIONS, None)
    if positions is None or len(layer.kv_cache) != WITH_RECORDS:
        return None
    u, k, g, calls, start = layer.kv_cache[OWN:]
    window = StepWindow(u=u, k=k, g=g, calls=calls, start=start[:, 0], max_tokens=1)
    return LayerWindow(window, positions)
