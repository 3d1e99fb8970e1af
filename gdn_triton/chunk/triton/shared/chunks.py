"""Metadata of packed sequences, built on the device: the host reads no value of ``cu_seqlens``.

N packed sequences in T rows make at most ``max_chunks(T, N, chunk_size)`` chunks, a number that
depends on sizes alone. Chunk slots are numbered sequence by sequence. Kernels are launched over all
of them, and programs of empty slots end at once. Nothing is cached: ``cu_seqlens`` may change in
place between calls, or between two replays of a CUDA graph.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from gdn_triton._triton.launch import Launch

# Sequences or slots handled at a time by one program of the metadata kernel.
METADATA_BLOCK = 256


class ChunkTable(NamedTuple):
    """The chunks of one call. Padded calls have no tables, because all chunks follow from the
    sizes.

    NT: chunk slots of a batch entry (padded), or of the whole call (packed).

    slots: chunk slots of the whole call.

    chunk_rows: int32 [NT, 2], (first row, number of rows) of each slot. Rows after the last
    sequence, and those of sequences to skip, are listed too, with their number negated, for the
    output step to write zeros there. An empty slot is (0, 0).

    chunk_offsets: int32 [N + 1], the first slot of each sequence.
    """

    chunk_size: int
    NT: int
    slots: int
    cu_seqlens: torch.Tensor | None
    chunk_rows: torch.Tensor | None
    chunk_offsets: torch.Tensor | None


def max_chunks(T: int, N: int, chunk_size: int) -> int:
    """The most chunks that N sequences, and the rows that belong to none, can make of T rows."""
    return min(T, (T + (N + 1) * (chunk_size - 1)) // chunk_size)


@triton.jit(do_not_specialize=["T", "N", "NT", "BT"])
def chunk_metadata_kernel(
    cu_seqlens,
    chunk_rows,
    chunk_offsets,
    read_slots,
    T,
    N,
    NT,
    BT,
    BLOCK: tl.constexpr,
    LAST_SKIPPED: tl.constexpr,
):
    """Program ``i_n`` numbers the chunks of sequence ``i_n``. Program N numbers the chunks of the
    remaining rows and the empty slots."""
    i_n = tl.program_id(0)
    first = 0
    for start in range(0, i_n, BLOCK):
        m = start + tl.arange(0, BLOCK)
        bos = tl.load(cu_seqlens + m, mask=m < i_n, other=0)
        eos = tl.load(cu_seqlens + m + 1, mask=m < i_n, other=0)
        first += tl.sum(((eos - bos + BT - 1) // BT).to(tl.int32), 0)
    tl.store(chunk_offsets + i_n, first)

    bos = tl.load(cu_seqlens + i_n).to(tl.int32)
    sign = 1
    eos = T
    if i_n < N:
        eos = tl.load(cu_seqlens + i_n + 1).to(tl.int32)
        if read_slots is not None:
            sign = tl.where(tl.load(read_slots + i_n) > LAST_SKIPPED, 1, -1)
    else:
        sign = -1
    count = (eos - bos + BT - 1) // BT
    for start in range(0, count, BLOCK):
        i_t = start + tl.arange(0, BLOCK)
        row = bos + i_t * BT
        slot = first + i_t
        inside = (i_t < count) & (slot < NT)
        tl.store(chunk_rows + slot * 2, row, mask=inside)
        tl.store(chunk_rows + slot * 2 + 1, sign * tl.minimum(eos - row, BT), mask=inside)
    if i_n == N:
        for start in range(first + tl.maximum(count, 0), NT, BLOCK):
            slot = start + tl.arange(0, BLOCK)
            nothing = tl.zeros([BLOCK], dtype=tl.int32)
            tl.store(chunk_rows + slot * 2, nothing, mask=slot < NT)
            tl.store(chunk_rows + slot * 2 + 1, nothing, mask=slot < NT)


@functools.cache
def metadata_launch(last_skipped: int) -> Launch:
    return Launch(chunk_metadata_kernel, BLOCK=METADATA_BLOCK, LAST_SKIPPED=last_skipped)


def make_chunks(
    B: int,
    T: int,
    chunk_size: int,
    cu_seqlens: torch.Tensor | None = None,
    read_slots: torch.Tensor | None = None,
    last_skipped: int = -1,
) -> ChunkTable:
    """Cuts B padded sequences of T rows, or the packed sequences of ``cu_seqlens``, into chunks.
    Packed sequences whose entry of ``read_slots`` [N] is at most ``last_skipped`` are skipped."""
    if cu_seqlens is None:
        NT = -(-T // chunk_size)
        return ChunkTable(
            chunk_size=chunk_size,
            NT=NT,
            slots=B * NT,
            cu_seqlens=None,
            chunk_rows=None,
            chunk_offsets=None,
        )
    N = cu_seqlens.shape[0] - 1
    NT = max_chunks(T, N, chunk_size)
    cu_seqlens = cu_seqlens.contiguous()
    # One allocation holds both tables, because allocations and launches are most of a call's host
    # time. Both tables begin at a multiple of 16 bytes; otherwise kernels would have a variant for
    # even NT and one for odd.
    rows_size = -(-NT * 2 // 4) * 4
    tables = torch.empty(rows_size + N + 1, dtype=torch.int32, device=cu_seqlens.device)
    chunk_rows, chunk_offsets = tables[: NT * 2], tables[rows_size:]
    metadata_launch(last_skipped)(
        (N + 1, 1, 1),
        cu_seqlens=cu_seqlens,
        chunk_rows=chunk_rows,
        chunk_offsets=chunk_offsets,
        read_slots=read_slots,
        T=T,
        N=N,
        NT=NT,
        BT=chunk_size,
    )
    return ChunkTable(
        chunk_size=chunk_size,
        NT=NT,
        slots=NT,
        cu_seqlens=cu_seqlens,
        chunk_rows=chunk_rows,
        chunk_offsets=chunk_offsets,
    )
