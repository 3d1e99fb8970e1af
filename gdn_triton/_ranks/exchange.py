"""What ranks exchange: a tensor of every slot, and the maps that lead to a slot, folded."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gdn_triton._ranks.layout import ShardLayout


def start_gather(layout: ShardLayout, x: Tensor) -> Callable[[], Tensor]:
    """Begins to gather x [intervals, ...] of every rank; the result waits for them, without the
    host on a GPU, and returns [slots, ...], at `layout.places`."""
    everyone = x.new_empty(len(layout.places), *x.shape[1:])
    # Its name from torch 2.13 on, where the old one warns.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = gather(everyone, x.contiguous(), group=layout.group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return everyone

    return wait


def gather_slots(layout: ShardLayout, x: Tensor) -> Tensor:
    """x [intervals, ...] of every rank, as [slots, ...], at `layout.places`."""
    return start_gather(layout, x)()


def fold(layout: ShardLayout, maps: Tensor, V: int, *, back: bool) -> list[Tensor | None]:
    """The state [HV, V, K] that comes to each interval of this rank, or None, from the maps of all
    slots, [slots, HV, V + K, K] (b, then M, transposed): from the slots before it, in order. With
    ``back`` the gradient, from those after it, the last one first, by M's own transpose."""
    incoming: list[Tensor | None] = []
    for interval in layout.intervals:
        state: Tensor | None = None
        for slot in reversed(interval.after) if back else interval.before:
            b, M = maps[layout.places[slot]].split([V, maps.shape[-1]], -2)
            if state is None:
                state = b
            else:
                # In float64: torch may compute a product of float32 in tf32.
                M = M.double()
                state = torch.baddbmm(b.double(), state.double(), M.mT if back else M)
        incoming.append(None if state is None else state.to(maps.dtype))
    return incoming
