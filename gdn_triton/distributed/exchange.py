"""What ranks exchange: a tensor of every slot, and the maps that lead to a slot, folded."""

import torch
import torch.distributed as dist
from torch import Tensor

from gdn_triton.distributed.layout import ShardLayout


def gather_slots(layout: ShardLayout, x: Tensor) -> Tensor:
    """x [intervals, ...] of every rank, as [slots, ...], at `layout.places`."""
    everyone = x.new_empty(len(layout.places), *x.shape[1:])
    # Its name from torch 2.13 on, where the old one warns.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(everyone, x.contiguous(), group=layout.group)
    return everyone


def fold(layout: ShardLayout, b: Tensor, M: Tensor, *, back: bool) -> list[Tensor | None]:
    """The exchange: states come from the slots before an interval, in order; with ``back``,
    gradients from those after it, the last one first, by the transposed M."""
    if not layout.crosses:
        return [None] * len(layout.intervals)
    maps, V = gather_slots(layout, torch.cat([b, M], -1)), b.shape[-1]
    incoming: list[Tensor | None] = []
    for interval in layout.intervals:
        state = None
        for slot in reversed(interval.after) if back else interval.before:
            # In float64: torch may compute a product of float32 in tf32.
            b, M = maps[layout.places[slot]].double().split([V, maps.shape[-1] - V], -1)
            state = b if state is None else torch.baddbmm(b, M.mT if back else M, state)
        incoming.append(None if state is None else state.to(maps.dtype))
    return incoming
