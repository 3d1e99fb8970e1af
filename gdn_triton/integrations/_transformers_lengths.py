"""The host's offsets of packed sequences in transformers. The data collator computes them, and
`gdn_triton.chunk_gated_delta_rule` uses them for its plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdn_triton._host.arguments import must

OFFSETS, ON_HOST = "cu_seq_lens_q", "cu_seqlens_cpu"


@dataclass(frozen=True, slots=True)
class WithHostOffsets:
    """A data collator with `cu_seqlens_cpu` in its batches. An instance can be pickled, as the
    worker processes of a data loader require."""

    collator: Callable[..., Any]

    def __call__(self, features: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        batch = self.collator(features, *args, **kwargs)
        offsets = batch.get(OFFSETS)
        if offsets is None:
            expected = "be in the collator's batches (return_flash_attn_kwargs=True)"
            raise ValueError(must(OFFSETS, expected, "a batch without it"))
        if isinstance(offsets, Tensor) and not offsets.is_cpu:
            raise ValueError(must(OFFSETS, "be on the CPU", str(offsets.device)))
        return {**batch, ON_HOST: offsets.tolist()}


def as_tensor(offsets: Tensor | Sequence[int] | None) -> Tensor | None:
    """Returns the offsets of a batch as a tensor. The offsets are a list of integers if a trainer
    must not move them to the device."""
    if offsets is None or isinstance(offsets, Tensor):
        return offsets
    return torch.tensor(offsets, dtype=torch.int32, device="cpu")
