"""Token tensors in the shape of chunks and heads, for padded and packed calls. The specification
computes in this view."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from einops import rearrange
from torch import Tensor

from gdn_triton.reference.lengths import bounds_of, count_chunks


class Chunks:
    """The indices of each chunk's tokens, and the order in which chunks depend on each other.

    The chunk view of a token tensor [B, T, ...] is [C, BT, ...]: C chunks over all sequences, those
    of sequence 0 first. Sequences have ceil(length / BT) chunks, so an empty one has none. Tokens
    of no sequence are in no chunk.

    Attributes:
        N: number of sequences (B when padded). C: number of chunks; NT: of each batch row.
        BT: chunk size, any positive int.
        lengths [N], num_chunks [N]: tokens and chunks of each sequence.
        offsets [N + 1]: first chunk of each sequence, and C.
        counts: counts[t] is the number of sequences with more than t chunks; [0] if there is none.
        valid: bool [C, BT], false in the tail of a sequence's last chunk.
    """

    def __init__(
        self,
        T: int,
        B: int,
        chunk_size: int,
        cu_seqlens: Tensor | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        bounds = bounds_of(B, T, cu_seqlens)
        if cu_seqlens is not None and device is None:
            device = cu_seqlens.device
        self.B, self.T, self.BT = B, T, chunk_size
        self.N = len(bounds) - 1
        self.lengths, self.num_chunks = count_chunks(bounds, chunk_size)
        self.offsets = [0]
        for n in self.num_chunks:
            self.offsets.append(self.offsets[-1] + n)
        self.C = self.offsets[-1]
        self.NT = -(-T // chunk_size) if cu_seqlens is None else self.C

        def on_host(numbers: Sequence[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device="cpu")

        per_sequence = on_host(self.num_chunks)
        sequence = torch.arange(self.N, device="cpu").repeat_interleave(per_sequence)  # [C]
        # [C], the chunk's index within its sequence
        step = torch.arange(self.C, device="cpu") - on_host(self.offsets)[sequence]
        starts, ends = on_host(bounds[:-1]), on_host(bounds[1:])
        first = starts[sequence] + step * chunk_size
        token = first[:, None] + torch.arange(chunk_size, device="cpu")  # [C, BT], into B * T
        end = ends[sequence][:, None]
        valid = token < end
        # If the chunks, in order, contain every token once, the chunk view is a reshape.
        self._aligned = bool(valid.all()) and self.C * chunk_size == B * T
        self.valid = valid.to(device)
        self._held_token = torch.minimum(token, end - 1).flatten().to(device)
        self._valid_row = valid.flatten().nonzero().flatten().to(device)
        self._valid_token = token[valid].to(device)

        # Sort the longest sequence first. The sequences of a step are then a prefix of the
        # sequences of the step before.
        order = per_sequence.argsort(descending=True, stable=True)
        rank = order.argsort()
        # Without chunks there is still one empty step, so that outputs have the right shape and a
        # gradient.
        self.counts = torch.bincount(step, minlength=1).tolist()
        by_step = (step * max(self.N, 1) + rank[sequence]).argsort()
        # With one sequence, or one chunk in each sequence, the order needs no permutation.
        in_order = [torch.equal(x, torch.arange(len(x), device="cpu")) for x in (order, by_step)]
        self._in_order = all(in_order)
        self._order, self._rank = order.to(device), rank.to(device)
        self._by_step, self._by_chunk = by_step.to(device), by_step.argsort().to(device)

    @classmethod
    def of(cls, x: Tensor, chunk_size: int, cu_seqlens: Tensor | None) -> Chunks:
        """Returns the chunks of a token tensor [B, T, ...]."""
        return cls(x.shape[1], x.shape[0], chunk_size, cu_seqlens, device=x.device)

    def without_orphans(self, x: Tensor) -> Tensor:
        """Returns x [B, T, ...] with the tokens of no sequence set to 0."""
        if self._valid_token.numel() == self.B * self.T:
            return x
        orphan = torch.ones(self.B * self.T, dtype=torch.bool, device=x.device)
        orphan[self._valid_token] = False
        return x.masked_fill(orphan.reshape(self.B, self.T, *[1] * (x.dim() - 2)), 0)

    def split(self, x: Tensor, *, hold: bool = False) -> Tensor:
        """Converts [B, T, ...] to [C, BT, ...]. Rows past a sequence's end are 0, or the sequence's
        last row if `hold`."""
        rows = rearrange(x, "B T ... -> (B T) ...")
        if not self._aligned:
            rows = rows.index_select(0, self._held_token)
        rows = rearrange(rows, "(C BT) ... -> C BT ...", C=self.C, BT=self.BT)
        if self._aligned or hold:
            return rows
        # Select instead of multiplying: the held row may be NaN, and 0 * NaN is NaN.
        ones = [1] * (x.dim() - 2)
        return rows.masked_fill(~self.valid.reshape(self.C, self.BT, *ones), 0)

    def merge(self, x: Tensor) -> Tensor:
        """Converts [C, BT, ...] to [B, T, ...], with 0 for the tokens of no sequence."""
        tokens = rearrange(x, "C BT ... -> (C BT) ...")
        if not self._aligned:
            rows = tokens.index_select(0, self._valid_row)
            tokens = rows.new_zeros(self.B * self.T, *rows.shape[1:])
            tokens = tokens.index_copy(0, self._valid_token, rows)
        return rearrange(tokens, "(B T) ... -> B T ...", B=self.B, T=self.T)

    def steps(self, x: Tensor) -> Sequence[Tensor]:
        """Converts [C, ...] to one tensor [counts[t], ...] per step t: chunk t of all sequences
        that have one."""
        # Use one permutation and one split. A gather at each step would cost a gradient of x's size
        # in the backward of each step.
        return (x if self._in_order else x.index_select(0, self._by_step)).split(self.counts)

    def unsteps(self, steps: Sequence[Tensor]) -> Tensor:
        """Inverts `steps` and returns a new tensor."""
        x = torch.cat(tuple(steps))
        return x if self._in_order else x.index_select(0, self._by_chunk)

    def sort_sequences(self, x: Tensor) -> Tensor:
        """Reorders [N, ...] from sequence order to longest first, the order of every step."""
        return x if self._in_order else x.index_select(0, self._order)

    def unsort_sequences(self, x: Tensor) -> Tensor:
        """Inverts `sort_sequences`."""
        return x if self._in_order else x.index_select(0, self._rank)


class States:
    """The states of sequences during a walk over their chunks, longest sequence first. The states
    of sequences that have ended are stored separately."""

    def __init__(self, chunks: Chunks, initial: Tensor) -> None:
        self.chunks = chunks
        self.now = chunks.sort_sequences(initial)
        self.ended: list[Tensor] = []

    def running(self, count: int) -> Tensor:
        """Returns the states of the first `count` sequences, the only sequences that continue."""
        if count < self.now.shape[0]:
            self.now, ended = self.now.split((count, self.now.shape[0] - count))
            self.ended.append(ended)
        return self.now

    def final(self) -> Tensor:
        """Returns all states in sequence order, as a new tensor."""
        return self.chunks.unsort_sequences(torch.cat([self.now, *reversed(self.ended)]))


class Rows:
    """The results of the steps of a walk over chunks, one row for each chunk, in one tensor.

    If autograd records nothing, each row is copied immediately to its place in one tensor. A list
    of small tensors that stay allocated, between states that are freed, would fragment the memory:
    the gaps would be slightly too small for the next state.
    """

    def __init__(self, chunks: Chunks) -> None:
        self.chunks = chunks
        self._made: list[Tensor] = []
        self._places: Iterator[Tensor] | None = None

    def add(self, x: Tensor) -> None:
        """Adds the result of the next step, [counts[t], ...]. Autograd records every step or
        none."""
        if x.requires_grad:
            self._made.append(x)
            return
        if self._places is None:
            self._made.append(x.new_empty(self.chunks.C, *x.shape[1:]))
            self._places = iter(self._made[0].split(self.chunks.counts))
        next(self._places).copy_(x)

    def all(self) -> Tensor:
        """Returns [C, ...] in the order of the chunks, as a new tensor."""
        return self.chunks.unsteps(self._made)


def to_heads(x: Tensor, H: int) -> Tensor:
    """Splits the value heads into H groups of G, one for each key head."""
    return rearrange(x, "C BT (H G) ... -> C H G BT ...", H=H).contiguous()


def from_heads(x: Tensor) -> Tensor:
    return rearrange(x, "C H G BT ... -> C BT (H G) ...").contiguous()
