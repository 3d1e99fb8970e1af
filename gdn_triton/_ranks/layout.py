"""How the shard of one rank connects to the shards of the others: leaf records, no torch calls.

All tokens of a call, over all ranks, are one packed row. It is cut into slots, numbered in the
order of their tokens; a rank holds one of them, or two (`layout="zigzag"`), one after the other in
its own row. What a rank holds of a sequence is a sequence of its own row, a local one.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Interval(NamedTuple):
    """A slot that this rank holds.

    slot: its number. first, last: the local sequences of its first and last token; where it has no
    token they mean nothing, and before and after are empty. before: the slots that hold earlier
    tokens of the sequence `first`, in order; after: those that hold later tokens of `last`. Slots
    without tokens are in neither. history: how many tokens of `first` lie before the slot.
    """

    slot: int
    first: int
    last: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    history: int


@dataclass(frozen=True, slots=True, eq=False)
class ShardLayout:
    """What the operator needs to know of a call that is split over ranks.

    group: None where the caller exchanges the maps. cu_seqlens [N + 1], on the device, and offsets,
    the same on the host: the local sequences.
    lengths: tokens of each slot. places: where each slot lies in a buffer gathered from all ranks.
    crosses: whether any sequence lies in more than one slot, as every rank must answer alike.
    """

    group: "ProcessGroup | None"
    cu_seqlens: Tensor
    offsets: tuple[int, ...]
    intervals: tuple[Interval, ...]
    lengths: tuple[int, ...]
    places: tuple[int, ...]
    crosses: bool

    @property
    def begun(self) -> frozenset[int]:
        """Local sequences that began on an earlier slot."""
        return frozenset(i.first for i in self.intervals if i.before)

    @property
    def unfinished(self) -> frozenset[int]:
        """Local sequences that end on a later slot."""
        return frozenset(i.last for i in self.intervals if i.after)


def slots_of_rank(rank: int, world_size: int, zigzag: bool) -> tuple[int, ...]:
    """The slots of a rank, in the order in which the rank's row holds them."""
    return (rank, 2 * world_size - 1 - rank) if zigzag else (rank,)


def places_of_slots(world_size: int, zigzag: bool) -> tuple[int, ...]:
    """Where each slot lies in a buffer to which every rank gave its slots, rank by rank."""
    held = [slots_of_rank(rank, world_size, zigzag) for rank in range(world_size)]
    order = [slot for slots in held for slot in slots]
    return tuple(order.index(slot) for slot in range(len(order)))


class Part(NamedTuple):
    """The result of `cut_out`. sequences: which of all sequences the local ones are parts of.
    lengths: the tokens of each. interval: with `first` and `last` counted from 0."""

    sequences: tuple[int, ...]
    lengths: tuple[int, ...]
    interval: Interval


def cut_out(offsets: Sequence[int], lengths: Sequence[int], slot: int) -> Part:
    """The part of the sequences `offsets` that lies in a slot, for slots of `lengths`.

    A sequence without tokens belongs to the last slot that begins at or before it.
    """
    bounds = [0, *accumulate(lengths)]
    start, end = bounds[slot], bounds[slot + 1]
    sequences, tokens = [], []
    begin = finish = start
    for n, (bos, eos) in enumerate(pairwise(offsets)):
        if bos == eos:
            mine = bisect_right(bounds, bos, hi=len(lengths)) - 1 == slot
        else:
            mine = max(bos, start) < min(eos, end)
            if mine:
                begin, finish = min(begin, bos), max(finish, eos)
        if mine:
            sequences.append(n)
            tokens.append(min(eos, end) - max(bos, start))
    filled = [c for c, length in enumerate(lengths) if length > 0]
    interval = Interval(
        slot=slot,
        first=0,
        last=len(sequences) - 1,
        before=tuple(c for c in filled if begin < bounds[c + 1] <= start),
        after=tuple(c for c in filled if end <= bounds[c] < finish),
        history=start - begin,
    )
    return Part(tuple(sequences), tuple(tokens), interval)


def any_crosses(offsets: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether a sequence has tokens in two slots."""
    bounds = [0, *accumulate(lengths)]
    inner = [b for b, length in zip(bounds, lengths, strict=False) if length > 0]
    return any(
        bisect_right(inner, eos - 1) != bisect_right(inner, bos)
        for bos, eos in pairwise(offsets)
        if bos < eos
    )
