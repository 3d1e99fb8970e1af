"""What `graph_replays.py` prints of a replay that has other bits than an eager call."""

import bisect
import itertools
from collections.abc import Sequence

import torch
from helpers import same_bits
from torch import Tensor

INTEGERS = {2: torch.int16, 4: torch.int32}

Outputs = dict[str, Tensor]


def numbers_of(words: str) -> list[int]:
    """The numbers of a list of numbers and ranges: "24-26,3" is [3, 24, 25, 26]. Raises ValueError
    for other words and for an empty range."""
    numbers: set[int] = set()
    for part in words.split(","):
        first, dash, last = part.partition("-")
        found = range(int(first), int(last if dash else first) + 1)
        if not found:
            raise ValueError(f"{part}: expected a number or a range as 24-28")
        numbers.update(found)
    return sorted(numbers)


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers in the form that `numbers_of` takes."""
    parts = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in group]
        parts.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
    return ",".join(parts)


def differs(found: Tensor, expected: Tensor) -> Tensor:
    """Where bits differ or a NaN is left, elementwise, on the device."""
    integer = INTEGERS[found.element_size()]
    return (found.view(integer) != expected.view(integer)) | found.isnan()


def at_token(token: int, offsets: Sequence[int]) -> str:
    """The token with its place in its sequence."""
    n = bisect.bisect_right(offsets, token) - 1
    if n >= len(offsets) - 1:
        return f"{token} (of no sequence)"
    return (
        f"{token} ({token - offsets[n]} of sequence {n}, which has {offsets[n + 1] - offsets[n]})"
    )


def true_places(x: Tensor) -> list[int]:
    return [int(place) for place in x.nonzero().flatten().tolist()]


def places(name: str, bad: Tensor, offsets: Sequence[int]) -> str:
    """Where an output is wrong. bad: bool, [N, HV, K, V] of states, [1, T, heads] or [1, T, heads,
    channels] of tokens, [HV] of parameters."""
    if bad.dim() == 1:
        return f"heads {ranges(true_places(bad))}"
    if name.endswith("state"):
        by_head = bad.flatten(2).any(-1)
        rows = [f"{n}: {ranges(true_places(row))}" for n, row in enumerate(by_head) if row.any()]
        return f"heads of sequences {'; '.join(rows)}"
    by_head = bad[0].any(-1) if bad.dim() == 4 else bad[0]
    tokens, heads = true_places(by_head.any(1)), true_places(by_head.any(0))
    ends = [
        f"token {at_token(token, offsets)} in heads {ranges(true_places(by_head[token]))}"
        for token in (tokens[0], tokens[-1])
    ]
    return f"{len(tokens)} tokens in heads {ranges(heads)}, first {ends[0]}, last {ends[1]}"


def difference(name: str, found: Tensor, expected: Tensor, offsets: Sequence[int]) -> str | None:
    """One line of an output, or None if it is right."""
    bad = differs(found, expected)
    count = int(bad.sum())
    if count == 0:
        return None
    distance = (found.double() - expected.double()).abs()
    distance = distance[~distance.isnan()]
    largest = float(distance.max()) if distance.numel() else 0.0
    nans = [int(x.isnan().sum()) for x in (found, expected)]
    return (
        f"{name}: {count} of {bad.numel()} elements, largest difference {largest:.3e}, NaNs "
        f"{nans[0]} in the replay and {nans[1]} in the eager call; "
        f"{places(name, bad, offsets)}"
    )


def same_outputs(a: Outputs, b: Outputs) -> bool:
    return all(same_bits(x, b[name]) for name, x in a.items())


def verdict(replays: tuple[Outputs, Outputs], eager: tuple[Outputs, Outputs]) -> str:
    """Which of the two was wrong, by a second replay and a second eager call with the same
    lengths."""
    seen = {"replay": replays[0], "eager call": eager[0]}

    def like(outputs: Outputs) -> str:
        names = [name for name, x in seen.items() if same_outputs(outputs, x)]
        return f"the bits of the first {names[0]}" if names else "other bits than both"

    return f"a second replay has {like(replays[1])}, a second eager call {like(eager[1])}"


class Evidence:
    """Copies of the outputs of the first wrong replay since `clear`. They are made on the device,
    so that nothing waits before the next replay."""

    def __init__(self, outputs: Outputs) -> None:
        self.found = {name: torch.zeros_like(x) for name, x in outputs.items()}
        self.expected = {name: torch.zeros_like(x) for name, x in outputs.items()}
        device = next(iter(outputs.values())).device
        self.has_one = torch.zeros((), dtype=torch.bool, device=device)

    def clear(self) -> None:
        self.has_one.zero_()

    def note(self, found: Outputs, expected: Outputs, is_wrong: Tensor) -> None:
        is_first = is_wrong & ~self.has_one
        for kept, outputs in ((self.found, found), (self.expected, expected)):
            for name, x in kept.items():
                torch.where(is_first, outputs[name], x, out=x)
        self.has_one |= is_wrong

    def lines(self, offsets: Sequence[int]) -> list[str]:
        lines = (difference(n, x, self.expected[n], offsets) for n, x in self.found.items())
        return [line for line in lines if line is not None]
