"""What the slots of a pool may hold, judged where the host can read them: on the CPU. Elsewhere
reading them would wait for the device, and what is refused here is undefined behaviour there.

Only what is read or written counts: the slots of sequences that are skipped, and those of tokens
that belong to no sequence, may hold anything.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gdn_triton._host.arguments import must


class Write(NamedTuple):
    """Slot `slot` is written by sequence `sequence`, as element `place` of the slots says."""

    slot: int
    sequence: int
    place: int


def final_writes(read: Sequence[int], write: Sequence[int], last_skipped: int) -> list[Write]:
    """The writes of a call that names one slot for each sequence, its final state's."""
    return [
        Write(slot, n, n)
        for n, slot in enumerate(write)
        if slot > last_skipped and read[n] > last_skipped
    ]


def token_writes(
    read: Sequence[int], write: Sequence[int], bounds: Sequence[int], last_skipped: int
) -> list[Write]:
    """The writes of a call that names one slot for each token. bounds: sequence n has the tokens
    from bounds[n] to bounds[n + 1] - 1 of the call."""
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
    """Sequences run in any order, so a slot that is written twice would hold either state."""
    found = set()
    for write in writes:
        if write.slot in found:
            given = f"{write.slot} twice"
            raise ValueError(must(name, "name no slot twice: each is written", given))
        found.add(write.slot)


def check_readers(readers: Iterable[tuple[int, int]], writes: Iterable[Write]) -> None:
    """No sequence may read what another one writes: they run in any order. readers: (slot,
    sequence) of those that read a slot."""
    owners = {write.slot: write.sequence for write in writes}
    for slot, n in readers:
        if owners.get(slot, n) != n:
            found = f"slot {slot}, read by sequence {n} and written by {owners[slot]}"
            raise ValueError(must("read_slots", "read no slot that another sequence writes", found))


def readers(
    read: Sequence[int], has_initial_state: Sequence[bool] | None, last_skipped: int
) -> list[tuple[int, int]]:
    """(slot, sequence) of the sequences that start from a slot."""
    return [
        (slot, n)
        for n, slot in enumerate(read)
        if slot > last_skipped and (has_initial_state is None or has_initial_state[n])
    ]
