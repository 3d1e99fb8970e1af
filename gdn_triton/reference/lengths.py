"""Sequences by their lengths: a short one takes a chunk of few rows, and not one of chunk_size.

A chunk takes the memory and the time of all its rows, those past its sequence's end included. Where
many sequences are shorter than a chunk, most rows would be such.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# Rows beyond two for each token that a call may take before its sequences are told apart. Below
# them the additional operations cost more than the rows.
SPARE_ROWS = 1024


class Group(NamedTuple):
    """Sequences whose chunks have so many rows, packed. rows: a power of two, or chunk_size.
    sequences [n]: their numbers. tokens [t]: the places of theirs among all B * T. chunks [c]: of
    theirs among the chunks of all sequences. cu_seqlens [n + 1]: of their tokens. All on the
    CPU."""

    rows: int
    sequences: Tensor
    tokens: Tensor
    chunks: Tensor
    cu_seqlens: Tensor


def bounds_of(B: int, T: int, cu_seqlens: Tensor | None) -> list[int]:
    """The first token of each sequence among all B * T, and the end of the last one."""
    if cu_seqlens is None:
        return [b * T for b in range(B + 1)]
    return [int(x) for x in cu_seqlens.tolist()]


def count_chunks(bounds: Sequence[int], chunk_size: int) -> tuple[list[int], list[int]]:
    """The tokens and the chunks of each sequence."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size: expected a positive int, got {chunk_size}")
    lengths = [end - first for first, end in pairwise(bounds)]
    return lengths, [-(-length // chunk_size) for length in lengths]


def rows_for(length: int, chunk_size: int) -> int:
    """Rows of the chunks of a sequence: less than twice its tokens where one chunk holds them."""
    return min(chunk_size, 1 << max(length - 1, 0).bit_length())


def group_by_length(bounds: Sequence[int], chunk_size: int) -> list[Group]:
    """Every sequence in one of few groups; [] where chunks of chunk_size take few more rows than
    there are tokens."""
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
    """The numbers firsts[i] to firsts[i] + counts[i], one range after the other."""
    before = counts.cumsum(0) - counts
    every = torch.arange(int(counts.sum()), device="cpu")
    return every + (firsts - before).repeat_interleave(counts)
