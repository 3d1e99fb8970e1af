"""The cache of a layer: the states of its sequences between calls."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gdn_triton._host.arguments import (
    check_devices,
    check_dtypes,
    check_rank,
    check_tensors,
    must,
    shape_of,
)
from gdn_triton._host.memory import check_own_memory
from gdn_triton._host.slots import LAST_SKIPPED, check_skip
from gdn_triton._host.tensors import host_reads, writing

__all__ = ["GatedDeltaNetCache"]


@dataclass(frozen=True, eq=False)
class GatedDeltaNetCache:
    """The states of one layer's sequences, in numbered slots; calls update them in place.

    `gdn_triton.layers.GatedDeltaNet.make_cache` makes one. A slot of zeros is a new sequence. The
    last row of each pool is no slot: a call writes the states of skipped sequences there, so that
    no shape depends on the number of skipped sequences.

    Args:
        conv_state: [slots + 1, 2 * H * K + HV * V, conv_size - 1]: the last rows of q, k and v
            before the convolution, the latest last; None without a convolution.
        recurrent_state: [slots + 1, HV, V, K].
        skip: which slots are padding, as for `gdn_triton.recurrent_step`: "negative", or
            "non_positive" where slot 0 is unused.
    """

    conv_state: Tensor | None
    recurrent_state: Tensor
    skip: str = "negative"

    def __post_init__(self) -> None:
        check_skip(self.skip)
        pools = {"recurrent_state": self.recurrent_state, "conv_state": self.conv_state}
        check_tensors({"recurrent_state": self.recurrent_state}, pools)
        check_dtypes(pools, ())
        check_devices("recurrent_state", self.recurrent_state.device, pools)
        conv_state, rows = self.conv_state, self.recurrent_state.shape[:1]
        if conv_state is not None and conv_state.shape[:1] != rows:
            expected = "have as many rows as recurrent_state, [slots + 1, ...]"
            given = f"{shape_of(conv_state)} and {shape_of(self.recurrent_state)}"
            raise ValueError(must("conv_state", expected, given))
        for name, pool in pools.items():
            if pool is not None and 0 not in pool.shape:
                check_own_memory(name, (pool.shape, pool.stride(), pool.dtype))

    @property
    def slots(self) -> int:
        """The number of slots, slot 0 included."""
        return self.recurrent_state.shape[0] - 1

    @torch.no_grad()
    def reset(self, slots: Tensor | None = None) -> None:
        """Sets the states in these slots, int32 or int64 [n], to zeros; None: all slots. Slots that
        are padding are skipped, and other slots do not change.

        Raises:
            TypeError, ValueError: slots that do not fit; their contents are checked on the CPU
                only. No state has changed.
        """
        if slots is not None:
            self._check_slots(slots)
        for pool in (self.conv_state, self.recurrent_state):
            if pool is None:
                continue
            with writing(pool):
                if slots is None:
                    pool.zero_()
                else:
                    pool.index_fill_(0, self.rows(slots), 0)

    def is_live(self, slots: Tensor) -> Tensor:
        """Returns [n], bool: whether a slot is not padding."""
        return slots > LAST_SKIPPED[self.skip]

    def rows(self, slots: Tensor) -> Tensor:
        """Returns [n], int64: the row of each slot in the pools, and the last row for padding."""
        return torch.where(self.is_live(slots), slots, self.slots).long()

    def read(self, pool: Tensor, slots: Tensor) -> Tensor:
        """Returns copies of these slots' states [n, ...]; zeros for padding."""
        live = self.is_live(slots).view(-1, *(1,) * (pool.dim() - 1))
        return torch.where(live, pool[self.rows(slots)], 0)

    def write(self, pool: Tensor, slots: Tensor, states: Tensor) -> None:
        """Writes states [n, ...] into these slots. No gradient passes through the write."""
        with writing(pool):
            pool.index_copy_(0, self.rows(slots), states.detach().to(pool.dtype))

    def _check_slots(self, slots: Tensor) -> None:
        check_tensors({"slots": slots}, {})
        check_devices("the cache", self.recurrent_state.device, {"slots": slots})
        check_rank("slots", slots, "n")
        check_dtypes({"slots": slots}, ("slots",))
        # Skipped sequences write to the row after the last slot.
        if host_reads(slots) and slots.numel() > 0 and int(slots.max()) >= self.slots:
            expected = f"be less than the {self.slots} slots of the cache"
            raise ValueError(must("slots", expected, str(int(slots.max()))))
