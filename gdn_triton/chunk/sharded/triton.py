"""A rank's part of a split call in the Triton backend.

The local sequences are cut into walks, which the kernels treat as packed sequences: one walk for
each sequence, or several where a sequence is long and heads are few (as `choose_segments` decides
for a call on one device). The start state of each walk is found first, from the maps of the walks
(affine.py) and of other ranks. Then all walks run at the same time. The backward does the same in
reverse.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from gdn_triton._host.device import on_device
from gdn_triton._ranks.layout import ShardLayout
from gdn_triton.chunk.problem import Inputs, Problem
from gdn_triton.chunk.sharded.affine import Stretch, affine_bwd, affine_fwd
from gdn_triton.chunk.sharded.autograd import Incoming, Kept
from gdn_triton.chunk.triton import backward as chunk_bwd
from gdn_triton.chunk.triton import forward as chunk_fwd
from gdn_triton.chunk.triton.fused.walk import fused_fwd
from gdn_triton.chunk.triton.shared.chunks import make_chunks
from gdn_triton.chunk.triton.steps.output import output_fwd
from gdn_triton.chunk.triton.steps.state import state_fwd
from gdn_triton.chunk.triton.steps.wy import wy_fwd


class Walk(NamedTuple):
    """number: the index among all walks. first, last: whether the walk has the first and the last
    local token of its sequence. begun, unfinished: whether the sequence has tokens on earlier and
    later slots."""

    number: int
    row: int
    n_rows: int
    sequence: int
    first: bool
    last: bool
    begun: bool
    unfinished: bool

    @property
    def state_leaves(self) -> bool:
        """Whether another walk, on this rank or another, needs the walk's map."""
        return not self.last or self.unfinished

    @property
    def state_comes(self) -> bool:
        return not self.first or self.begun

    @property
    def has_shift(self) -> bool:
        """Whether its M is needed, in the forward as in the backward."""
        return self.state_leaves and self.state_comes


def cut_offsets(layout: ShardLayout, length: int) -> tuple[int, ...]:
    """The offsets of the walks: the local sequences in pieces of `length` tokens; 0 leaves them
    whole."""
    if length == 0:
        return layout.offsets
    offsets = [0]
    for bos, eos in pairwise(layout.offsets):
        offsets += range(bos + length, eos, length)
        offsets.append(eos)
    return tuple(offsets)


def make_walks(layout: ShardLayout, offsets: tuple[int, ...]) -> list[list[Walk]]:
    """The walks of each local sequence."""
    begun, unfinished = layout.begun, layout.unfinished
    spans = iter(enumerate(pairwise(offsets)))
    walks = []
    for n, (_, end) in enumerate(pairwise(layout.offsets)):
        mine: list[Walk] = []
        while not mine or not mine[-1].last:
            i, (bos, eos) = next(spans)
            walk = Walk(
                number=i,
                row=bos,
                n_rows=eos - bos,
                sequence=n,
                first=not mine,
                last=eos == end,
                begun=n in begun,
                unfinished=n in unfinished,
            )
            mine.append(walk)
        walks.append(mine)
    return walks


@functools.lru_cache(maxsize=256)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """int32. The same contents give the same tensor, so a captured CUDA graph finds it at its
    address."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.int32, device=device)


def _table(stretches: list[Stretch], device: torch.device) -> Tensor:
    return _on_device(tuple(n for s in stretches for n in s), device).view(len(stretches), 4)


def _local_problem(problem: Problem, walks: int) -> Problem:
    return dataclasses.replace(
        problem,
        N=walks,
        is_varlen=True,
        has_initial_state=True,
        output_final_state=True,
        state_v_first=False,
    )


class _Maps(NamedTuple):
    """b (or c) and M of the walks whose maps are needed, and the index of each walk in them."""

    offsets: Tensor
    shifts: Tensor
    offset_of: dict[int, int]
    shift_of: dict[int, int]

    def b(self, walk: Walk) -> Tensor:
        # In float64: torch may compute a product of float32 in tf32.
        return self.offsets[self.offset_of[walk.number]].double()

    def M(self, walk: Walk) -> Tensor:
        return self.shifts[self.shift_of[walk.number]].double()


def _flat(walks: list[list[Walk]]) -> Iterator[Walk]:
    return (walk for mine in walks for walk in mine)


def _shift_places(walks: list[list[Walk]]) -> dict[int, int]:
    needed = [walk.number for walk in _flat(walks) if walk.has_shift]
    return {index: place for place, index in enumerate(needed)}


class _Operands(NamedTuple):
    """The tensors that the maps are made from, in the form that `affine_fwd` reads."""

    k: Tensor
    A_inv: Tensor
    g_cumsum: Tensor
    beta: Tensor
    A_is_strict: bool


def _forward_maps(
    problem: Problem, x: _Operands, v: Tensor, starts: Tensor, walks: list[list[Walk]]
) -> _Maps:
    shift_of = _shift_places(walks)
    leaving = [walk for walk in _flat(walks) if walk.state_leaves]
    table = _table(
        [
            Stretch(
                walk.row,
                walk.n_rows,
                shift_of.get(walk.number, -1),
                -1 if walk.state_comes else walk.number,
            )
            for walk in leaving
        ],
        v.device,
    )
    offsets, shifts = affine_fwd(
        x.k,
        v,
        x.A_inv,
        x.g_cumsum,
        x.beta,
        starts,
        table,
        len(shift_of),
        K=problem.K,
        A_is_strict=x.A_is_strict,
    )
    places = {walk.number: place for place, walk in enumerate(leaving)}
    return _Maps(offsets, shifts, places, shift_of)


def _compose(maps: _Maps, mine: list[Walk]) -> tuple[Tensor, Tensor]:
    """b and M of all walks of a sequence together, whose state comes from another rank and leaves
    this rank."""
    b, M = maps.b(mine[0]), maps.M(mine[0])
    for walk in mine[1:]:
        b, M = torch.baddbmm(maps.b(walk), maps.M(walk), b), maps.M(walk) @ M
    return b, M


def _follow_forward(maps: _Maps, starts: Tensor, mine: list[Walk]) -> Tensor:
    """Fills `starts` of all walks of a sequence except the first. Returns the state after the last
    walk, if a state leaves it."""
    state = starts[mine[0].number].double()
    for walk in mine:
        if not walk.first:
            starts[walk.number] = state
        if walk.has_shift:
            state = torch.baddbmm(maps.b(walk), maps.M(walk), state)
        elif walk.state_leaves:
            state = maps.b(walk)
    return state


def _summary(
    problem: Problem, layout: ShardLayout, maps: _Maps, starts: Tensor, walks: list[list[Walk]]
) -> Tensor:
    """The summary of the intervals. Fills `starts` of the sequences that begin on this rank."""
    p, n = problem, len(layout.intervals)
    summary = starts.new_zeros(n, p.HV, p.V + p.K, p.K)
    begun = layout.begun
    ends = {
        mine[0].sequence: _follow_forward(maps, starts, mine)
        for mine in walks
        if mine[0].sequence not in begun
    }
    for i, interval in enumerate(layout.intervals):
        if interval.after and interval.last in ends:
            summary[i, :, : p.V] = ends[interval.last].mT
        elif interval.after:
            b, M = _compose(maps, walks[interval.last])
            summary[i, :, : p.V], summary[i, :, p.V :] = b.mT, M.mT
    return summary


class _Ready(NamedTuple):
    """The results that need no state of another rank. walk: returns o and the states after the
    walks, from `starts`."""

    problem: Problem  # of the walks
    offsets: tuple[int, ...]
    walks: list[list[Walk]]
    maps: _Maps
    starts: Tensor
    walk: Callable[[Tensor], tuple[Tensor, Tensor | None]]


def forward_prepare(problem: Problem, layout: ShardLayout, x: Inputs) -> tuple[Tensor, _Ready]:
    with on_device(x.q.device):
        return _forward_prepare(problem, layout, x)


def _forward_prepare(problem: Problem, layout: ShardLayout, x: Inputs) -> tuple[Tensor, _Ready]:
    offsets = cut_offsets(layout, chunk_fwd.choose_segments(problem) * problem.chunk_size)
    walks = make_walks(layout, offsets)
    p = _local_problem(problem, len(offsets) - 1)
    x = chunk_fwd.readable_inputs(x)
    v, device = x.v, x.v.device
    chunks = make_chunks(1, p.T, p.chunk_size, _on_device(offsets, device))
    starts = torch.zeros(p.N, p.HV, p.K, p.V, dtype=torch.float32, device=device)
    if x.initial_state is not None:
        firsts = tuple(mine[0].number for mine in walks)
        starts.index_copy_(0, _on_device(firsts, device).long(), x.initial_state.float())

    if chunk_fwd.choose_dataflow(p) is chunk_fwd.forward_fused:
        prepared = chunk_fwd.prepare(p, x, chunks)
        g_cumsum, beta, _ = prepared.scalars.transpose(2, 3)
        operands = _Operands(prepared.k, prepared.A_inv, g_cumsum, beta, True)

        def walk(starts: Tensor) -> tuple[Tensor, Tensor | None]:
            return fused_fwd(
                prepared,
                v,
                chunks,
                p.scale,
                p.q_dtype,
                starts,
                N=p.N,
                K=p.K,
                output_final_state=True,
            )
    else:
        q, k, g_cumsum, beta = chunk_fwd.activate(p, x, chunks)
        dtype = chunk_fwd.compute_dtype(p)
        w, u, A_inv = wy_fwd(k, v, g_cumsum, beta, chunks, dtype, store_A_inv=True)
        assert A_inv is not None
        operands = _Operands(k, A_inv, g_cumsum, beta, False)

        def walk(starts: Tensor) -> tuple[Tensor, Tensor | None]:
            h, v_new, final = state_fwd(
                k, w, u, g_cumsum, chunks, starts, N=p.N, output_final_state=True
            )
            assert h is not None
            o = output_fwd(q, k, v_new, h, g_cumsum, chunks, p.scale, p.q_dtype)
            return o, final

    maps = _forward_maps(p, operands, v, starts, walks)
    summary = _summary(p, layout, maps, starts, walks)
    ready = _Ready(problem=p, offsets=offsets, walks=walks, maps=maps, starts=starts, walk=walk)
    return summary, ready


def forward_apply(
    problem: Problem, layout: ShardLayout, x: Inputs, local: _Ready, incoming: Incoming
) -> tuple[Tensor, Tensor, Kept]:
    with on_device(x.q.device):
        p, starts, walks = local.problem, local.starts, local.walks
        for interval, state in zip(layout.intervals, incoming(), strict=True):
            if state is not None:
                mine = walks[interval.first]
                starts[mine[0].number] = state.mT
                _follow_forward(local.maps, starts, mine)
        o, final = local.walk(starts)
        assert final is not None
        if p.N != problem.N:
            lasts = tuple(mine[-1].number for mine in walks)
            final = final.index_select(0, _on_device(lasts, final.device))
        return o, final, Kept((starts, local.maps.shifts), local.offsets)


class _Back(NamedTuple):
    """The results that need no gradient of another rank. ends: the gradient of the state after each
    walk; at first only the caller's gradients for the last walk of each sequence."""

    problem: Problem
    walks: list[list[Walk]]
    begun: chunk_bwd.Begun
    maps: _Maps
    ends: Tensor


def _follow_back(maps: _Maps, ends: Tensor, mine: list[Walk], *, store: bool) -> Tensor:
    """Returns the gradient of the state before the first walk of a sequence, if a state comes to
    it. With ``store`` fills `ends` of all walks except the last."""
    state = ends[mine[-1].number].double()
    for walk in reversed(mine):
        if store and not walk.last:
            ends[walk.number] = state
        if walk.has_shift:
            state = torch.baddbmm(maps.b(walk), maps.M(walk).mT, state)
        elif walk.state_comes:
            state = maps.b(walk)
    return state


def backward_prepare(
    problem: Problem,
    layout: ShardLayout,
    x: Inputs,
    kept: Kept,
    do: Tensor | None,
    dht: Tensor | None,
) -> tuple[Tensor, _Back]:
    with on_device(x.q.device):
        return _backward_prepare(problem, layout, x, kept, do, dht)


def _backward_prepare(
    problem: Problem,
    layout: ShardLayout,
    x: Inputs,
    kept: Kept,
    do: Tensor | None,
    dht: Tensor | None,
) -> tuple[Tensor, _Back]:
    (starts, shifts), offsets = kept.tensors, kept.rest
    assert starts is not None and shifts is not None
    p = _local_problem(problem, len(offsets) - 1)
    walks = make_walks(layout, offsets)
    cu_seqlens = _on_device(offsets, x.q.device)
    begun = chunk_bwd.begin(p, x._replace(initial_state=starts, cu_seqlens=cu_seqlens), do)
    ends = torch.zeros_like(starts)
    if dht is not None:
        lasts = tuple(mine[-1].number for mine in walks)
        ends.index_copy_(0, _on_device(lasts, dht.device).long(), dht.float())

    c = begun.recomputed
    shift_of = _shift_places(walks)
    coming = [walk for walk in _flat(walks) if walk.state_comes]
    table = _table(
        [
            Stretch(walk.row, walk.n_rows, -1, -1 if walk.state_leaves else walk.number)
            for walk in coming
        ],
        x.q.device,
    )
    found = affine_bwd(
        c.q,
        c.k,
        begun.do,
        c.A_inv,
        c.A_qk,
        c.g_cumsum,
        c.own,
        c.beta,
        ends,
        table,
        p.scale,
        K=p.K,
        A_is_strict=c.A_is_strict,
    )
    maps = _Maps(found, shifts, {w.number: i for i, w in enumerate(coming)}, shift_of)
    summary = ends.new_zeros(len(layout.intervals), p.HV, p.V + p.K, p.K)
    for i, interval in enumerate(layout.intervals):
        if interval.before:
            mine = walks[interval.first]
            summary[i, :, : p.V] = _follow_back(maps, ends, mine, store=False).mT
            if mine[-1].unfinished:
                M = functools.reduce(lambda M, walk: maps.M(walk) @ M, mine[1:], maps.M(mine[0]))
                summary[i, :, p.V :] = M.mT
    return summary, _Back(problem=p, walks=walks, begun=begun, maps=maps, ends=ends)


def backward_apply(
    problem: Problem,
    layout: ShardLayout,
    x: Inputs,
    kept: Kept,
    local: _Back,
    needed: Mapping[str, bool],
    incoming: Incoming,
) -> tuple[Tensor | None, ...]:
    with on_device(x.q.device):
        p, walks, ends = local.problem, local.walks, local.ends
        for interval, state in zip(layout.intervals, incoming(), strict=True):
            if state is not None:
                ends[walks[interval.last][-1].number] += state.mT
        for mine in walks:
            if len(mine) > 1:
                _follow_back(local.maps, ends, mine, store=True)
        found = chunk_bwd.finish(p, local.begun, ends, store_dh0=needed["initial_state"])
        dh0 = found.initial_state
        if dh0 is None or x.initial_state is None:
            return tuple(found._replace(initial_state=None))
        if p.N != problem.N:
            firsts = tuple(mine[0].number for mine in walks)
            dh0 = dh0.index_select(0, _on_device(firsts, dh0.device))
        # These sequences' initial states came from another rank, which has their gradients.
        for n in layout.begun:
            dh0[n] = 0
        return tuple(found._replace(initial_state=dh0.to(x.initial_state.dtype)))
