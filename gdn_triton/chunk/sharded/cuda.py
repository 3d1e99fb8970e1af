"""A rank's part of a split call in the CUDA backend.

The rank's row of tokens is cut into pieces. A local sequence that has tokens on other ranks is one
piece. The library runs it in two calls for each direction (`gdn_triton.chunk.cuda.parts`): maps,
which the ranks exchange, then walks. The sequences between two such pieces form one piece too, an
ordinary call that runs while the maps are exchanged.

If the library's backward does not serve the parts, the Triton backend computes the gradients, and
the forward saves the tensors that this needs.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn_triton._host.device import on_device
from gdn_triton._ranks.layout import Interval, ShardLayout
from gdn_triton.chunk.cuda import calls, parts, support
from gdn_triton.chunk.problem import Inputs, Problem
from gdn_triton.chunk.sharded.autograd import Incoming, Kept


class Piece(NamedTuple):
    """rows: the piece's tokens in the rank's row. sequences: its local sequences. place: the index
    of its interval among those of the rank; -1: all of its sequences lie on this rank. comes,
    leaves: whether another rank sends a state to it, and whether its state is sent to another rank.
    """

    rows: slice
    sequences: slice
    place: int = -1
    comes: bool = False
    leaves: bool = False

    @property
    def crosses(self) -> bool:
        return self.comes or self.leaves


def pieces_of(layout: ShardLayout) -> tuple[Piece, ...]:
    """The pieces of a rank, in the order of their tokens; tokens of no sequence are in none."""
    return _pieces(layout.offsets, layout.intervals)


@functools.lru_cache(64)
def _pieces(offsets: tuple[int, ...], intervals: tuple[Interval, ...]) -> tuple[Piece, ...]:
    split = dict(_split_sequences(intervals))
    pieces, first = [], 0
    for n in range(len(offsets) - 1):
        if n not in split:
            continue
        if first < n:
            pieces.append(Piece(slice(offsets[first], offsets[n]), slice(first, n)))
        rows, (place, comes, leaves) = slice(offsets[n], offsets[n + 1]), split[n]
        pieces.append(Piece(rows, slice(n, n + 1), place, comes, leaves))
        first = n + 1
    if first < len(offsets) - 1:
        pieces.append(Piece(slice(offsets[first], offsets[-1]), slice(first, len(offsets) - 1)))
    return tuple(pieces)


def _split_sequences(intervals: tuple[Interval, ...]) -> Iterator[tuple[int, Any]]:
    """Each local sequence that has tokens on other ranks: the index of its interval, and whether a
    state comes to it and leaves it."""
    for place, x in enumerate(intervals):
        ends = dict.fromkeys([x.first] * bool(x.before) + [x.last] * bool(x.after))
        for n in ends:
            comes, leaves = bool(x.before) and n == x.first, bool(x.after) and n == x.last
            yield n, (place, comes, leaves)


@functools.lru_cache(256)
def _problem_of(problem: Problem, tokens: int, sequences: int, crosses: bool) -> Problem:
    return dataclasses.replace(
        problem,
        T=tokens,
        N=sequences,
        is_varlen=not crosses,
        has_initial_state=True,
        longest=(0, 0, 0),
    )


@functools.lru_cache(256)
def _offsets(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """int32. The same contents give the same tensor, so a captured CUDA graph finds it at its
    address."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.int32, device=device)


def _cut(problem: Problem, layout: ShardLayout, x: Inputs, piece: Piece) -> tuple[Problem, Inputs]:
    """The problem and the inputs of a piece to which no other rank sends a state."""
    rows, sequences = piece.rows, piece.sequences
    p = _problem_of(
        problem, rows.stop - rows.start, sequences.stop - sequences.start, piece.crosses
    )
    whole = rows.start == 0 and rows.stop == problem.T
    offsets, state = None, x.initial_state
    if not piece.crosses:
        numbers = layout.offsets[sequences.start : sequences.stop + 1]
        offsets = _offsets(tuple(n - numbers[0] for n in numbers), x.q.device)
    mine = None if state is None or piece.comes else state[sequences]
    if whole:
        return p, x._replace(initial_state=mine, cu_seqlens=offsets)
    return p, Inputs(
        q=x.q[:, rows],
        k=x.k[:, rows],
        v=x.v[:, rows],
        g=x.g[:, rows],
        beta=x.beta[:, rows],
        initial_state=mine,
        A_log=x.A_log,
        dt_bias=x.dt_bias,
        cu_seqlens=offsets,
    )


class _Ready(NamedTuple):
    """The pieces with their maps, which are None for a piece that does not cross ranks; and the
    summary."""

    pieces: tuple[Piece, ...]
    maps: tuple[parts.PartForward | None, ...]
    summary: Tensor


def forward_prepare(problem: Problem, layout: ShardLayout, x: Inputs) -> tuple[Tensor, _Ready]:
    p, pieces = problem, pieces_of(layout)
    with on_device(x.q.device):
        # No rank reads the summary of an interval that no state leaves.
        shape = (len(layout.intervals), p.HV, p.V + p.K, p.K)
        summary = torch.empty(shape, dtype=torch.float32, device=x.q.device)
        maps: list[parts.PartForward | None] = []
        for piece in pieces:
            if not piece.crosses:
                maps.append(None)
                continue
            carry = summary[piece.place] if piece.leaves else None
            own, inputs = _cut(p, layout, x, piece)
            maps.append(parts.forward_maps(own, inputs, carry, comes=piece.comes))
        return summary, _Ready(pieces=pieces, maps=tuple(maps), summary=summary)


def forward_apply(
    problem: Problem, layout: ShardLayout, x: Inputs, local: _Ready, incoming: Incoming
) -> tuple[Tensor, Tensor | None, Kept]:
    p, device = problem, x.q.device
    with on_device(device):
        o = torch.empty((1, p.T, p.HV, p.V), dtype=p.q_dtype, device=device)
        final = None
        if p.output_final_state:
            shape = (p.N, p.HV, p.K, p.V)
            final = torch.empty(shape, dtype=torch.float32, device=device)
        if layout.offsets[-1] < p.T:
            o[:, layout.offsets[-1] :] = 0
        left: list[Tensor | None] = []
        for piece in local.pieces:
            if not piece.crosses:
                left.append(_run_whole(p, layout, x, piece, o, final))
        states = incoming()
        starts = []
        for piece, part in zip(local.pieces, local.maps, strict=True):
            if part is None:
                continue
            state = states[piece.place] if piece.comes else None
            mine = None if final is None else final[piece.sequences]
            start = None if state is None else state.mT.unsqueeze(0)
            parts.forward_walk(part, start, o[:, piece.rows], mine)
            starts.append(part.starts)
        if not p.needs_grad:
            return o, final, Kept((), None)
        if support.why_no_part_gradients(p) is not None:
            return o, final, _kept_for_triton(p, layout, x, local, states)
        return o, final, Kept((local.summary, *left, *starts), len(left))


def _run_whole(
    problem: Problem,
    layout: ShardLayout,
    x: Inputs,
    piece: Piece,
    o: Tensor,
    final: Tensor | None,
) -> Tensor | None:
    """Runs a piece whose sequences lie on this rank. Returns the states that it leaves for its
    backward."""
    own, inputs = _cut(problem, layout, x, piece)
    states = None
    if own.needs_grad and support.why_no_part_gradients(own) is None:
        own_o, own_final, states = calls.forward_for_gradients(own, inputs)
    else:
        own_o, own_final = calls.forward(own, inputs)
    o[:, piece.rows] = own_o
    if final is not None:
        assert own_final is not None
        final[piece.sequences] = own_final
    return states


def _kept_for_triton(
    p: Problem, layout: ShardLayout, x: Inputs, local: _Ready, states: list[Tensor | None]
) -> Kept:
    """The tensors that the Triton backend saves if every local sequence is one walk: the states
    that they start from, and the M of each sequence to which a state comes and that a state leaves.
    """
    starts = torch.zeros((p.N, p.HV, p.K, p.V), dtype=torch.float32, device=x.q.device)
    if x.initial_state is not None:
        starts.copy_(x.initial_state)
    through = []
    for piece in local.pieces:
        state = states[piece.place] if piece.comes else None
        if state is not None:
            starts[piece.sequences.start] = state.mT
        if piece.comes and piece.leaves:
            through.append(local.summary[piece.place, :, p.V :].mT)
    shifts = torch.stack(through) if through else starts.new_empty(0, p.HV, p.K, p.K)
    return Kept((starts, shifts), layout.offsets)


class _Back(NamedTuple):
    """The pieces with their reverse maps, which are None for a piece that does not cross ranks; the
    memory of all gradients; and dht of all local sequences."""

    pieces: tuple[Piece, ...]
    maps: tuple[parts.PartBackward | None, ...]
    found: parts.Outputs
    sums: list[Tensor]
    dht: Tensor | None
    do: Tensor
    left: tuple[Tensor | None, ...]


def backward_prepare(
    problem: Problem,
    layout: ShardLayout,
    x: Inputs,
    kept: Kept,
    do: Tensor | None,
    dht: Tensor | None,
) -> tuple[Tensor, Any]:
    p, device = problem, x.q.device
    if support.why_no_part_gradients(p) is not None:
        # Import here, because only this case needs Triton.
        from gdn_triton.chunk.sharded import triton

        return triton.backward_prepare(p, layout, x, kept, do, dht)
    with on_device(device):
        pieces, n_left = pieces_of(layout), kept.rest
        sent, left, starts = (
            kept.tensors[0],
            kept.tensors[1 : 1 + n_left],
            kept.tensors[1 + n_left :],
        )
        assert sent is not None
        found = _outputs(p, layout, x)
        do = torch.zeros_like(found.v) if do is None else do
        dht = None if dht is None else dht.float()
        summary = torch.empty_like(sent)
        maps: list[parts.PartBackward | None] = []
        sums: list[Tensor] = []
        states = iter(starts)
        for piece in pieces:
            if not piece.crosses:
                maps.append(None)
                continue
            own, inputs = _cut(p, layout, x, piece)
            outputs = _rows_of(found, piece)
            if outputs.gate_sums is not None:
                sums.append(outputs.gate_sums)
            carry = summary[piece.place] if piece.comes else None
            start = next(states)
            assert start is not None
            mine = None if dht is None else dht[piece.sequences]
            part = parts.backward_maps(own, inputs, start, do[:, piece.rows], mine, outputs, carry)
            maps.append(part)
            if piece.comes and piece.leaves:
                summary[piece.place, :, p.V :] = sent[piece.place, :, p.V :]
        back = _Back(
            pieces=pieces, maps=tuple(maps), found=found, sums=sums, dht=dht, do=do, left=left
        )
        return summary, back


def _outputs(p: Problem, layout: ShardLayout, x: Inputs) -> parts.Outputs:
    """Memory for all gradients of the rank, 0 for tokens of no sequence."""
    names = ("q", "k", "v", "g", "beta")
    of_tokens = {}
    for name in names:
        y = getattr(x, name)
        of_tokens[name] = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        if layout.offsets[-1] < p.T:
            of_tokens[name][:, layout.offsets[-1] :] = 0
    dh0 = None
    if x.initial_state is not None:
        dh0 = torch.empty((p.N, p.HV, p.K, p.V), dtype=torch.float32, device=x.q.device)
    sums = None
    if x.A_log is not None:
        sums = torch.empty(2, p.HV, dtype=torch.float32, device=x.q.device)
    return parts.Outputs(**of_tokens, initial_state=dh0, gate_sums=sums)


def _rows_of(found: parts.Outputs, piece: Piece) -> parts.Outputs:
    """A piece's part of the memory, with separate sums."""
    dh0, sums = found.initial_state, found.gate_sums
    return parts.Outputs(
        q=found.q[:, piece.rows],
        k=found.k[:, piece.rows],
        v=found.v[:, piece.rows],
        g=found.g[:, piece.rows],
        beta=found.beta[:, piece.rows],
        initial_state=None if dh0 is None else dh0[piece.sequences],
        gate_sums=None if sums is None else torch.empty_like(sums),
    )


def backward_apply(
    problem: Problem,
    layout: ShardLayout,
    x: Inputs,
    kept: Kept,
    local: Any,
    needed: Mapping[str, bool],
    incoming: Incoming,
) -> tuple[Tensor | None, ...]:
    if support.why_no_part_gradients(problem) is not None:
        from gdn_triton.chunk.sharded import triton

        return triton.backward_apply(problem, layout, x, kept, local, needed, incoming)
    p, found, dht = problem, local.found, local.dht
    with on_device(x.q.device):
        left = iter(local.left)
        for piece in local.pieces:
            if not piece.crosses:
                _find_whole(p, layout, x, piece, local, next(left))
        states = incoming()
        for piece, part in zip(local.pieces, local.maps, strict=True):
            if part is None:
                continue
            end = None if dht is None else dht[piece.sequences]
            state = states[piece.place] if piece.leaves else None
            if state is not None:
                end = state.mT.unsqueeze(0) if end is None else end + state.mT
            parts.backward_walks(part, end)
            if piece.comes and found.initial_state is not None:
                # The initial state of that sequence came from another rank, which has its gradient.
                found.initial_state[piece.sequences] = 0
        sums = None if not local.sums else torch.stack(local.sums).sum(0)
        if sums is None and found.gate_sums is not None:
            sums = torch.zeros_like(found.gate_sums)

        def of_head(i: int, y: Tensor | None) -> Tensor | None:
            return None if y is None or sums is None else sums[i].to(y.dtype, copy=True)

        dh0 = found.initial_state
        return tuple(
            Inputs(
                q=found.q,
                k=found.k,
                v=found.v,
                g=found.g,
                beta=found.beta,
                initial_state=None
                if dh0 is None or x.initial_state is None
                else dh0.to(x.initial_state.dtype),
                A_log=of_head(0, x.A_log),
                dt_bias=of_head(1, x.dt_bias),
            )
        )


def _find_whole(
    problem: Problem,
    layout: ShardLayout,
    x: Inputs,
    piece: Piece,
    local: _Back,
    states: Tensor | None,
) -> None:
    """The gradients of a piece whose sequences lie on this rank."""
    own, inputs = _cut(problem, layout, x, piece)
    found = calls.gradients(
        own,
        inputs,
        local.do[:, piece.rows],
        None if local.dht is None else local.dht[piece.sequences],
        store_dh0=local.found.initial_state is not None,
        states=states,
    )
    for name in ("q", "k", "v", "g", "beta"):
        getattr(local.found, name)[:, piece.rows] = getattr(found, name)
    if local.found.initial_state is not None and found.initial_state is not None:
        local.found.initial_state[piece.sequences] = found.initial_state
    if found.A_log is not None:
        zeros = torch.zeros_like(found.A_log)
        second = zeros if found.dt_bias is None else found.dt_bias
        local.sums.append(torch.stack([found.A_log, second]).float())
