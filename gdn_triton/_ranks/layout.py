"""The connections of one rank's shard to the shards of other ranks: plain records, without calls of
torch.

All tokens of a call, over all ranks, form one packed row. The row is cut into slots, which are
numbered in the order of their tokens. A rank's own row is one slot, or two slots one after the
other (`layout="zigzag"`). A local sequence is the part of a sequence that lies in a rank's row.
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

    slot: its number. first, last: the local sequences of its first and last token. before: the
    slots that hold earlier tokens of the sequence `first`, in order. after: the slots that hold
    later tokens of `last`. Slots without tokens are in neither. history: the number of tokens of
    `first` before the slot. If the slot itself has no token, first and last are meaningless, and
    before and after are empty.
    """

    slot: int
    first: int
    last: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    history: int


@dataclass(frozen=True, slots=True, eq=False)
class ShardLayout:
    """The properties of a call split over ranks that the operator needs.

    group: None where the caller exchanges the maps. cu_seqlens [N + 1], on the device, and offsets,
    the same numbers on the host: the local sequences. lengths: the number of tokens of each slot.
    places: the index of each slot in a buffer gathered from all ranks. crosses: whether any
    sequence lies in more than one slot, which is the same on every rank.
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
        """The local sequences that began on an earlier slot."""
        return frozenset(i.first for i in self.intervals if i.before)

    @property
    def unfinished(self) -> frozenset[int]:
        """The local sequences that end on a later slot."""
        return frozenset(i.last for i in self.intervals if i.after)


def slots_of_rank(rank: int, world_size: int, zigzag: bool) -> tuple[int, ...]:
    """Returns the slots of a rank, in the order of the rank's row."""
    return (rank, 2 * world_size - 1 - rank) if zigzag else (rank,)


def places_of_slots(world_size: int, zigzag: bool) -> tuple[int, ...]:
    """Returns the index of each slot in a buffer to which every rank gave its slots, rank by
    rank."""
    held = [slots_of_rank(rank, world_size, zigzag) for rank in range(world_size)]
    order = [slot for slots in held for slot in slots]
    return tuple(order.index(slot) for slot in range(len(order)))


class Part(NamedTuple):
    """The result of `cut_out`. sequences: the number of the whole sequence of each local one.
    lengths: the number of tokens of each local sequence. interval: its `first` and `last` are
    counted from 0."""

    sequences: tuple[int, ...]
    lengths: tuple[int, ...]
    interval: Interval


def cut_out(offsets: Sequence[int], lengths: Sequence[int], slot: int) -> Part:
    """Returns the part of the sequences `offsets` that lies in a slot, for slots of `lengths`.

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
    """Returns whether any sequence has tokens in two slots."""
    bounds = [0, *accumulate(lengths)]
    inner = [b for b, length in zip(bounds, lengths, strict=False) if length > 0]
    return any(
        bisect_right(inner, eos - 1) != bisect_right(inner, bos)
        for bos, eos in pairwise(offsets)
        if bos < eos
    )
