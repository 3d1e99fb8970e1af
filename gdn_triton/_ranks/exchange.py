"""The exchange between ranks: gathers a tensor of every slot, and applies the maps that precede a
slot to a state."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gdn_triton._ranks.layout import ShardLayout


def start_gather(layout: ShardLayout, x: Tensor) -> Callable[[], Tensor]:
    """Starts a gather of x [intervals, ...] of every rank and returns a function. That function
    waits for the gather, on a GPU without blocking the host, and returns [slots, ...], at
    `layout.places`."""
    everyone = x.new_empty(len(layout.places), *x.shape[1:])
    # torch 2.13 renames this function and warns about the old name.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = gather(everyone, x.contiguous(), group=layout.group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return everyone

    return wait


def gather_slots(layout: ShardLayout, x: Tensor) -> Tensor:
    """Gathers x [intervals, ...] of every rank as [slots, ...], at `layout.places`."""
    return start_gather(layout, x)()


def fold(layout: ShardLayout, maps: Tensor, V: int, *, back: bool) -> list[Tensor | None]:
    """Returns the state [HV, V, K] before each interval of this rank, or None for an interval
    without an earlier slot. maps: the maps of all slots, [slots, HV, V + K, K] (b, then M,
    transposed), which are applied in the order of the slots before the interval. With ``back`` it
    returns the gradient of the state after each interval: from the slots after it, the last one
    first, by the transpose of M."""
    incoming: list[Tensor | None] = []
    for interval in layout.intervals:
        state: Tensor | None = None
        for slot in reversed(interval.after) if back else interval.before:
            b, M = maps[layout.places[slot]].split([V, maps.shape[-1]], -2)
            if state is None:
                state = b
            else:
                # Use float64, because torch may compute a float32 product in tf32.
                M = M.double()
                state = torch.baddbmm(b.double(), state.double(), M.mT if back else M)
        incoming.append(None if state is None else state.to(maps.dtype))
    return incoming
