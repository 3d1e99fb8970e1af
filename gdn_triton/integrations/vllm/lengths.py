"""The offsets of vLLM's prefills on the host, for the plan of `gdn_triton.chunk_prefill`.

vLLM's `GDNAttentionMetadataBuilder.build` computes the offsets of a step's prefills on the host and
on the device, but its metadata has only the offsets on the device. `telling` wraps that method.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdn_triton.integrations._lengths import tell_offsets


def telling(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps vLLM's `build`. The wrapper also stores the host's offsets of the prefills for the
    tensor `prefill_query_start_loc` of the metadata. Metadata that vLLM derives for another group
    of layers has the same tensor."""

    @functools.wraps(build)
    def build_and_tell(
        self: Any, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        metadata = build(self, common_prefix_len, common_attn_metadata, *args, **kwargs)
        if metadata.prefill_query_start_loc is not None:
            offsets = prefill_offsets(metadata, common_attn_metadata.query_start_loc_cpu)
            tell_offsets(metadata.prefill_query_start_loc, offsets)
        return metadata

    return build_and_tell


def prefill_offsets(metadata: Any, query_start_loc_cpu: Tensor) -> Tensor:
    """Returns the offsets of a step's prefills from the offsets of all its sequences [N + 1].
    Decodes come first if no sequence has drafts; otherwise every sequence without drafts is a
    prefill."""
    is_draft = metadata.spec_sequence_masks_cpu
    if is_draft is None:
        # Copy the offsets, because vLLM writes the next step's offsets to the same memory.
        return query_start_loc_cpu[metadata.num_decodes :] - metadata.num_decode_tokens
    lengths = query_start_loc_cpu.diff()[~is_draft]
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(query_start_loc_cpu.dtype)
