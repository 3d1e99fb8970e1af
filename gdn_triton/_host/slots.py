"""Checks of the slot numbers of a call on a pool. Only slots on the CPU are checked, because
reading an accelerator would wait for it. On an accelerator the calls that are refused here are
undefined behaviour.

The slots of sequences that are skipped, and of tokens that belong to no sequence, are not used and
may hold anything.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from gdn_triton._host.arguments import check_offsets, must, value_of

# The largest slot number that is padding, by the value of `skip`.
LAST_SKIPPED: Final = {"negative": -1, "non_positive": 0}


class OnSlots(Protocol):
    """The fields of a validated call on a pool that the checks of its slots read."""

    @property
    def device(self) -> torch.device: ...
    @property
    def B(self) -> int: ...
    @property
    def T(self) -> int: ...
    @property
    def N(self) -> int: ...
    @property
    def last_skipped(self) -> int: ...
    @property
    def every_token(self) -> bool: ...


class SlotTensors(Protocol):
    """The tensors of a call on a pool. read_slots is [N], or [N, S] in a call of the recurrence
    with num_accepted_tokens."""

    @property
    def state(self) -> Tensor | None: ...
    @property
    def read_slots(self) -> Tensor | None: ...
    @property
    def write_slots(self) -> Tensor | None: ...
    @property
    def cu_seqlens(self) -> Tensor | None: ...
    @property
    def num_accepted_tokens(self) -> Tensor | None: ...


def check_skip(skip: object) -> None:
    if type(skip) is not str or skip not in LAST_SKIPPED:
        raise ValueError(must("skip", f"be one of {', '.join(LAST_SKIPPED)}", value_of(skip)))


class Write(NamedTuple):
    """Sequence `sequence` writes slot `slot`, which is element `place` of the tensor of slots."""

    slot: int
    sequence: int
    place: int


def final_writes(read: Sequence[int], write: Sequence[int], last_skipped: int) -> list[Write]:
    """The writes of a call with one slot for each sequence, which gets the final state."""
    return [
        Write(slot, n, n)
        for n, slot in enumerate(write)
        if slot > last_skipped and read[n] > last_skipped
    ]


def token_writes(
    read: Sequence[int], write: Sequence[int], bounds: Sequence[int], last_skipped: int
) -> list[Write]:
    """The writes of a call with one slot for each token. bounds: sequence n has the tokens from
    bounds[n] to bounds[n + 1] - 1 of the call."""
    return [
        Write(write[t], n, t)
        for n, slot in enumerate(read)
        if slot > last_skipped
        for t in range(bounds[n], bounds[n + 1])
        if write[t] > last_skipped
    ]


def check_read_in_pool(read: Sequence[int], slots: int) -> None:
    if read and max(read) >= slots:
        given = f"{max(read)} at index {read.index(max(read))}"
        raise ValueError(must("read_slots", f"be less than the {slots} slots of state", given))


def check_written_in_pool(name: str, writes: Iterable[Write], slots: int) -> None:
    for write in writes:
        if write.slot >= slots:
            given = f"{write.slot} at index {write.place}"
            raise ValueError(must(name, f"be less than the {slots} slots of state", given))


def check_once(name: str, writes: Iterable[Write]) -> None:
    """Raises ValueError if a slot is written twice. Sequences run in any order, so the slot could
    hold either state."""
    found = set()
    for write in writes:
        if write.slot in found:
            given = f"{write.slot} twice"
            raise ValueError(must(name, "name no slot twice: each is written", given))
        found.add(write.slot)


def check_readers(readers: Iterable[tuple[int, int]], writes: Iterable[Write]) -> None:
    """Raises ValueError if a sequence reads a slot that another one writes, because sequences run
    in any order. readers: (slot, sequence) for each sequence that reads a slot."""
    owners = {write.slot: write.sequence for write in writes}
    for slot, n in readers:
        if owners.get(slot, n) != n:
            found = f"slot {slot}, read by sequence {n} and written by {owners[slot]}"
            raise ValueError(must("read_slots", "read no slot that another sequence writes", found))


def readers(
    read: Sequence[int], has_initial_state: Sequence[bool] | None, last_skipped: int
) -> list[tuple[int, int]]:
    """(slot, sequence) for each sequence that starts from a slot."""
    return [
        (slot, n)
        for n, slot in enumerate(read)
        if slot > last_skipped and (has_initial_state is None or has_initial_state[n])
    ]


def check_contents(p: OnSlots, x: SlotTensors, has_initial_state: Tensor | None = None) -> None:
    """Checks the contents of offsets and slots that are CPU tensors."""
    if p.device.type != "cpu":
        return
    if x.cu_seqlens is not None:
        check_offsets("cu_seqlens", x.cu_seqlens.tolist(), p.T)
    if x.read_slots is None or x.state is None:
        return
    last = p.last_skipped
    if x.read_slots.dim() == 2:
        read, write = accepted_slots(p, x)
    else:
        read = x.read_slots.tolist()
        write = read if x.write_slots is None else x.write_slots.flatten().tolist()
    check_read_in_pool(read, x.state.shape[0])
    name = "read_slots" if x.write_slots is None else "write_slots"
    if not p.every_token:
        writes = final_writes(read, write, last)
    else:
        writes = token_writes(read, write, _bounds(p, x), last)
    check_written_in_pool(name, writes, x.state.shape[0])
    check_once(name, writes)
    flags = None if has_initial_state is None else has_initial_state.tolist()
    check_readers(readers(read, flags, last), writes)


class TreeTensors(SlotTensors, Protocol):
    """The tensors of a call whose tokens may be the nodes of trees."""

    @property
    def parents(self) -> Tensor | None: ...


def check_parents(p: OnSlots, x: TreeTensors, *, reads_states: bool) -> None:
    """Checks the contents of parents if it is a CPU tensor. reads_states: a token starts from the
    state in its parent's slot; otherwise from the inputs of its ancestors."""
    if p.device.type != "cpu" or x.parents is None:
        return
    assert x.read_slots is not None
    read, parents = x.read_slots.tolist(), x.parents.flatten().tolist()
    write = None if x.write_slots is None else x.write_slots.flatten().tolist()
    for n, (start, end) in enumerate(pairwise(_bounds(p, x))):
        if read[n] <= p.last_skipped:
            continue
        for i in range(end - start):
            parent = parents[start + i]
            if not -1 <= parent < i:
                expected = "be -1 or an earlier token of the same sequence"
                found = f"{parent} for token {i} of sequence {n}"
                raise ValueError(must("parents", expected, found))
            if write is None:
                continue
            # A program has read the first token's state before it writes this token's slot.
            is_root = reads_states and i == 0 and -1 not in parents[start + 1 : end]
            if write[start + i] == read[n] and not is_root:
                found = f"slot {read[n]}, read by sequence {n} and written by its token {i}"
                raise ValueError(must("write_slots", "keep the read slot, with parents", found))
            is_lost = parent >= 0 and write[start + parent] <= p.last_skipped
            if reads_states and is_lost and parent != i - 1:
                expected = "keep the state of a token that is the parent of any but the next one"
                found = f"no slot for token {parent} of sequence {n}, the parent of token {i}"
                raise ValueError(must("write_slots", expected, found))


def accepted_slots(p: OnSlots, x: SlotTensors) -> tuple[list[int], list[int]]:
    """Returns the slot that each sequence starts from, and the slots of all tokens. Reads
    read_slots [N, S] and num_accepted_tokens on the host."""
    assert x.read_slots is not None and x.num_accepted_tokens is not None
    rows = x.read_slots.tolist()
    read = [
        row[accepted - 1] if 1 <= accepted <= len(row) else p.last_skipped
        for row, accepted in zip(rows, x.num_accepted_tokens.tolist(), strict=True)
    ]
    write = [p.last_skipped] * (p.B * p.T)
    for row, (start, end) in zip(rows, pairwise(_bounds(p, x)), strict=True):
        kept = row[: end - start]
        write[start : start + len(kept)] = kept
    return read, write


def _bounds(p: OnSlots, x: SlotTensors) -> list[int]:
    """Returns the bounds: sequence n has the tokens from bounds[n] to bounds[n + 1] - 1 of all
    tokens."""
    if x.cu_seqlens is None:
        return [n * p.T for n in range(p.N + 1)]
    bounds: list[int] = x.cu_seqlens.tolist()
    return bounds
