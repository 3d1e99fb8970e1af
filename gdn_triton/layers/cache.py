"""What a layer keeps of the sequences that it has seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gdn_triton._host.slots import LAST_SKIPPED

__all__ = ["GatedDeltaNetCache"]


@dataclass(frozen=True, eq=False)
class GatedDeltaNetCache:
    """The states of one layer's sequences, in numbered slots; calls update them in place.

    `gdn_triton.layers.GatedDeltaNet.make_cache` makes one. A slot of zeros is a sequence of which
    nothing has been seen. The last row of each pool is no slot: what is written for sequences that
    a call skips lands there, so that no shape depends on how many those are.

    Args:
        conv_state: [slots + 1, 2 * H * K + HV * V, conv_size - 1]: the last rows of q, k and v
            before the convolution, the latest last; None without a convolution.
        recurrent_state: [slots + 1, HV, V, K].
        skip: which slots are padding, as for `gdn_triton.recurrent_step`: "negative", or
            "non_positive" where slot 0 is nobody's.
    """

    conv_state: Tensor | None
    recurrent_state: Tensor
    skip: str = "negative"

    def __post_init__(self) -> None:
        if self.skip not in LAST_SKIPPED:
            raise ValueError(f"skip must be one of {', '.join(LAST_SKIPPED)}, got {self.skip!r}")

    @property
    def slots(self) -> int:
        """How many sequences there is room for, that of slot 0 included."""
        return self.recurrent_state.shape[0] - 1

    @torch.no_grad()
    def reset(self, slots: Tensor | None = None) -> None:
        """Forgets the sequences in these slots, int32 or int64 [n]; None: all. Slots that are
        padding are passed over; other slots are as they were."""
        for pool in (self.conv_state, self.recurrent_state):
            if pool is None:
                continue
            if slots is None:
                pool.zero_()
            else:
                pool.index_fill_(0, self.rows(slots), 0)

    def is_live(self, slots: Tensor) -> Tensor:
        """[n], bool: which slots are not padding."""
        return slots > LAST_SKIPPED[self.skip]

    def rows(self, slots: Tensor) -> Tensor:
        """[n], int64: the row of each slot in the pools, the last one for padding."""
        return torch.where(self.is_live(slots), slots, self.slots).long()

    def read(self, pool: Tensor, slots: Tensor) -> Tensor:
        """Copies of these slots' states [n, ...]; zeros for padding."""
        live = self.is_live(slots).view(-1, *(1,) * (pool.dim() - 1))
        return torch.where(live, pool[self.rows(slots)], 0)

    def write(self, pool: Tensor, slots: Tensor, states: Tensor) -> None:
        """Puts states [n, ...] into these slots; no gradient goes that way."""
        pool.index_copy_(0, self.rows(slots), states.detach().to(pool.dtype))
