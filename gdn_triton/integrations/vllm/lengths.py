"""The offsets of vLLM's prefills on the host, for the plan of `gdn_triton.chunk_prefill`.

`GDNAttentionMetadataBuilder.build` of vLLM computes the offsets of a step's prefills on the host
and on the device, and its metadata has those of the device only. `telling` wraps that method.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdn_triton.integrations._lengths import tell_offsets


def telling(build: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's `build`, which also keeps the host's offsets of the prefills for the tensor
    `prefill_query_start_loc` of its metadata. Metadata that vLLM derives from it for another group
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
    """The offsets of a step's prefills, from those of all its sequences [N + 1]: decodes come first
    where no sequence has drafts, and otherwise every sequence without drafts is a prefill."""
    is_draft = metadata.spec_sequence_masks_cpu
    if is_draft is None:
        # A copy: vLLM writes the next step's offsets to the same memory.
        return query_start_loc_cpu[metadata.num_decodes :] - metadata.num_decode_tokens
    lengths = query_start_loc_cpu.diff()[~is_draft]
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(query_start_loc_cpu.dtype)
