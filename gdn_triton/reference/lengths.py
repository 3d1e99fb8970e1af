"""Groups of sequences by length: a short sequence gets a chunk with fewer rows than chunk_size.

A chunk costs the memory and the time of all its rows, including rows past its sequence's end. If
many sequences are shorter than a chunk, most rows would be past the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# A call groups its sequences if the rows of its chunks would exceed twice the number of tokens by
# more than this number. With fewer rows, grouping costs more time than the rows.
SPARE_ROWS = 1024


class Group(NamedTuple):
    """The packed sequences whose chunks have `rows` rows, a power of two or chunk_size. sequences
    [n]: the numbers of the sequences. tokens [t]: the indices of their tokens among all B * T.
    chunks [c]: the indices of their chunks among the chunks of all sequences. cu_seqlens [n + 1]:
    the offsets of their tokens. All tensors are on the CPU."""

    rows: int
    sequences: Tensor
    tokens: Tensor
    chunks: Tensor
    cu_seqlens: Tensor


def bounds_of(B: int, T: int, cu_seqlens: Tensor | None) -> list[int]:
    """Returns the index of the first token of each sequence among all B * T, and the end of the
    last sequence."""
    if cu_seqlens is None:
        return [b * T for b in range(B + 1)]
    return [int(x) for x in cu_seqlens.tolist()]


def count_chunks(bounds: Sequence[int], chunk_size: int) -> tuple[list[int], list[int]]:
    """Returns the numbers of tokens and of chunks of each sequence."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size: expected a positive int, got {chunk_size}")
    lengths = [end - first for first, end in pairwise(bounds)]
    return lengths, [-(-length // chunk_size) for length in lengths]


def rows_for(length: int, chunk_size: int) -> int:
    """Returns the number of rows of a sequence's chunks. If one chunk holds the sequence, it is
    less than twice the number of tokens."""
    return min(chunk_size, 1 << max(length - 1, 0).bit_length())


def group_by_length(bounds: Sequence[int], chunk_size: int) -> list[Group]:
    """Assigns every sequence to one of few groups. Returns [] if chunks of chunk_size have few more
    rows than there are tokens."""
    lengths, counts = count_chunks(bounds, chunk_size)
    if sum(counts) * chunk_size <= 2 * sum(lengths) + SPARE_ROWS:
        return []
    members: dict[int, list[int]] = {}
    for n, length in enumerate(lengths):
        members.setdefault(rows_for(length, chunk_size), []).append(n)
    length_of, count_of, first_token = map(_on_host, (lengths, counts, bounds[:-1]))
    first_chunk = count_of.cumsum(0) - count_of
    groups = []
    for rows, numbers in sorted(members.items()):
        sequences = _on_host(numbers)
        cu_seqlens = torch.zeros(len(numbers) + 1, dtype=torch.int64, device="cpu")
        cu_seqlens[1:] = length_of[sequences].cumsum(0)
        groups.append(
            Group(
                rows=rows,
                sequences=sequences,
                tokens=_ranges(first_token[sequences], length_of[sequences]),
                chunks=_ranges(first_chunk[sequences], count_of[sequences]),
                cu_seqlens=cu_seqlens,
            )
        )
    return groups


def _on_host(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _ranges(firsts: Tensor, counts: Tensor) -> Tensor:
    """Returns the numbers firsts[i] to firsts[i] + counts[i] - 1, one range after the other."""
    before = counts.cumsum(0) - counts
    every = torch.arange(int(counts.sum()), device="cpu")
    return every + (firsts - before).repeat_interleave(counts)
