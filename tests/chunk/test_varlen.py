"""The chunk tables built on the device, against plain loops."""

import itertools
import random

import pytest
import torch
from helpers import same_bits

from gdn_triton.chunk.triton.shared.chunks import make_chunks, max_chunks
from gdn_triton.constants import CHUNK_SIZES


def offsets_of(lengths: list[int]) -> list[int]:
    return [sum(lengths[:n]) for n in range(len(lengths) + 1)]


def tables(offsets: list[int], T: int, chunk_size: int) -> tuple[list[tuple[int, int]], list[int]]:
    """chunk_rows without its empty slots, and chunk_offsets."""
    rows: list[tuple[int, int]] = []
    chunk_offsets = []
    for first, end in itertools.pairwise(offsets):
        chunk_offsets.append(len(rows))
        rows += [(row, min(chunk_size, end - row)) for row in range(first, end, chunk_size)]
    chunk_offsets.append(len(rows))
    orphans = range(offsets[-1], T, chunk_size)
    return rows + [(row, -min(chunk_size, T - row)) for row in orphans], chunk_offsets


def check(cu_seqlens: torch.Tensor, T: int, chunk_size: int) -> None:
    chunks = make_chunks(1, T, chunk_size, cu_seqlens)
    rows, chunk_offsets = tables(cu_seqlens.tolist(), T, chunk_size)
    assert chunks.NT == chunks.slots == max_chunks(T, len(cu_seqlens) - 1, chunk_size)
    assert len(rows) <= chunks.NT, "the host reserved too few slots"
    rows += [(0, 0)] * (chunks.NT - len(rows))
    assert chunks.chunk_rows is not None and chunks.chunk_offsets is not None
    assert chunks.chunk_rows.dtype == chunks.chunk_offsets.dtype == torch.int32
    assert chunks.chunk_rows.device == chunks.chunk_offsets.device == cu_seqlens.device
    assert chunks.chunk_rows.reshape(-1, 2).tolist() == [list(row) for row in rows]
    assert chunks.chunk_offsets.tolist() == chunk_offsets


# Lengths on each side of a chunk, empty ones at every place, and rows of no sequence.
LENGTHS = {
    "no-sequence-no-row": ([], 0),
    "no-sequence": ([], 37),
    "one-empty": ([0], 0),
    "only-empty": ([0, 0, 0], 20),
    "one-token": ([1], 0),
    "sides-of-a-chunk": ([15, 16, 17, 31, 32, 33, 63, 64, 65], 0),
    "empty-everywhere": ([0, 5, 0, 0, 70, 0], 3),
    "orphans-longer-than-a-chunk": ([3, 40], 130),
    "all-slots-used": ([1, 1, 1, 1], 1),
}


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tables(name: str, chunk_size: int, dtype: torch.dtype, device: str) -> None:
    lengths, orphans = LENGTHS[name]
    cu_seqlens = torch.tensor(offsets_of(lengths), dtype=dtype, device=device)
    check(cu_seqlens, sum(lengths) + orphans, chunk_size)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_more_sequences_than_a_block(dtype: torch.dtype, device: str) -> None:
    """The kernel counts sequences 256 at a time: 300 take a second, partly filled block."""
    generator = random.Random(0)
    lengths = [generator.choice([0, 0, 1, 15, 16, 17, 50]) for _ in range(300)]
    cu_seqlens = torch.tensor(offsets_of(lengths), dtype=dtype, device=device)
    check(cu_seqlens, sum(lengths) + 9, 16)


@pytest.mark.parametrize(
    ("lengths", "orphans"),
    [([16 * 256 + 1, 5], 0), ([5], 16 * 300), ([1] * 10, 0)],
    ids=["sequence", "orphans", "empty-slots"],
)
def test_more_chunks_than_a_block(lengths: list[int], orphans: int, device: str) -> None:
    """A sequence's chunks, and those of the rows of none, are written 256 at a time too."""
    check(torch.tensor(offsets_of(lengths), device=device), sum(lengths) + orphans, 16)


def test_more_empty_slots_than_a_block(device: str) -> None:
    """600 sequences reserve slots for 600 ragged chunks, and one long sequence needs none of them.
    All sequences but one are empty, so few programs do anything."""
    lengths = [0] * 150 + [16 * 600] + [0] * 149
    cu_seqlens = torch.tensor(offsets_of(lengths), device=device)
    T = sum(lengths)
    assert max_chunks(T, 300, 16) - 600 > 256
    check(cu_seqlens, T, 16)


def test_strided_offsets(device: str) -> None:
    """cu_seqlens may be a view, for instance a column of a table."""
    table = torch.tensor([[0, -7], [20, -7], [20, -7], [61, -7]], device=device)
    check(table[:, 0], 70, 16)


def test_change_in_place(device: str) -> None:
    """Nothing is remembered of the contents: the next call sees what is there now."""
    cu_seqlens = torch.tensor([0, 10, 50], dtype=torch.int32, device=device)
    check(cu_seqlens, 50, 16)
    before = cu_seqlens.clone()
    cu_seqlens.copy_(torch.tensor([0, 33, 50]))
    check(cu_seqlens, 50, 16)
    assert not same_bits(before, cu_seqlens)


@pytest.mark.parametrize("T", [0, 1, 16, 17])
def test_padded(T: int) -> None:
    """Padded calls need no table: the host knows all."""
    chunks = make_chunks(3, T, 16)
    assert (chunks.NT, chunks.slots) == (-(-T // 16), 3 * -(-T // 16))
    assert chunks.cu_seqlens is chunks.chunk_rows is chunks.chunk_offsets is None


def test_max_chunks() -> None:
    """Never fewer than needed, and reached by the worst split for every T, N and chunk size."""
    for chunk_size in CHUNK_SIZES:
        for N in range(4):
            for T in range(4 * chunk_size):
                most = max_chunks(T, N, chunk_size)
                # N one-token sequences and then the rest make the most ragged chunks.
                ones = min(N, T)
                lengths = [1] * ones + [0] * (N - ones)
                rows, _ = tables(offsets_of(lengths), T, chunk_size)
                assert len(rows) == most or T <= N, (T, N, chunk_size)
                assert len(rows) <= most
    generator = random.Random(0)
    for _ in range(500):
        lengths = [generator.randrange(70) for _ in range(generator.randrange(8))]
        T, chunk_size = sum(lengths) + generator.randrange(70), generator.choice(CHUNK_SIZES)
        rows, _ = tables(offsets_of(lengths), T, chunk_size)
        assert len(rows) <= max_chunks(T, len(lengths), chunk_size)
