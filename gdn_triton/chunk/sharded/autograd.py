"""Sequences that are split over ranks, in any backend, under autograd.

What a shard does to the state that comes in is an affine map, S_out = M S_in + b, with M [K, K] and
b [K, V] for each value head. Every rank finds its own from its tokens alone, all ranks exchange
them in one all-gather, and each folds those of the ranks before it, in order, into the state that
it starts from. In reverse the gradient of the state takes the transposed maps,
dS_in = M^T dS_out + c. Nothing is truncated, and no rank waits for the walk of another.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gdn_triton._host.derivatives import IN_NONE, found_once
from gdn_triton._host.records import state_needs_grad
from gdn_triton._host.tensors import readable_gradient
from gdn_triton.chunk.problem import Inputs, Problem, needed_inputs
from gdn_triton.distributed.exchange import fold
from gdn_triton.distributed.layout import ShardLayout

# exchange(b, M): from the maps of this rank's intervals, [intervals, HV, K, V] and
# [intervals, HV, K, K], the state that comes to each interval, [HV, K, V]; None where none does. b
# of an interval that nothing comes to is what leaves it. Entries that nobody needs are zeros.
# Every rank has to call it.
Exchange = Callable[[Tensor, Tensor], list[Tensor | None]]


class Kept(NamedTuple):
    """What the backward needs beside the inputs. starts: the state that each walk starts from,
    [walks, HV, K, V]. shifts: the M that were needed, [_, HV, K, K]. offsets: of the walks."""

    starts: Tensor
    shifts: Tensor
    offsets: tuple[int, ...]


class ShardOps(Protocol):
    """A backend's part: both functions of one rank, on its tensors. The problem is one of states
    [.., K, V], whatever the caller's layout."""

    def forward(
        self, problem: Problem, layout: ShardLayout, x: Inputs, exchange: Exchange
    ) -> tuple[Tensor, Tensor, Kept]:
        """o, the state after the last token of each local sequence, and what to keep."""

    def gradients(
        self,
        problem: Problem,
        layout: ShardLayout,
        x: Inputs,
        kept: Kept,
        do: Tensor | None,
        dht: Tensor | None,
        needed: Mapping[str, bool],
        exchange: Exchange,
    ) -> tuple[Tensor | None, ...]:
        """The gradient of each of `Inputs` where needed; None where there is no such input.
        needed: by the names of the inputs."""


def _key_first(state: Tensor | None, problem: Problem) -> Tensor | None:
    """A state in the caller's layout as [N, HV, K, V], or back."""
    return state if state is None or not problem.state_v_first else state.mT


def _key_first_inputs(problem: Problem, x: Inputs) -> Inputs:
    return x._replace(initial_state=_key_first(x.initial_state, problem))


def _key_first_problem(problem: Problem) -> Problem:
    return dataclasses.replace(problem, state_v_first=False)


class _ContextParallel(torch.autograd.Function):
    """The last arguments are `Inputs`, whose offsets are those of the layout."""

    @staticmethod
    def forward(
        ctx: Any, ops: ShardOps, problem: Problem, layout: ShardLayout, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        x = Inputs._make(tensors)
        o, final_state, kept = _forward(ops, problem, layout, x)
        ctx.save_for_backward(*x, kept.starts, kept.shifts)
        ctx.ops, ctx.problem, ctx.layout, ctx.offsets = ops, problem, layout, kept.offsets
        ctx.set_materialize_grads(False)
        if final_state is not None and not state_needs_grad(needed_inputs(ctx.needs_input_grad)):
            ctx.mark_non_differentiable(final_state)
        return o, final_state

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Tensor | None, ...]:
        p: Problem = ctx.problem
        do, dht = readable_gradient("o", do), readable_gradient("final_state", dht)
        ops, layout, offsets = ctx.ops, ctx.layout, ctx.offsets
        needed = needed_inputs(ctx.needs_input_grad)

        def find(do: Tensor | None, dht: Tensor | None, *saved: Tensor | None) -> Inputs:
            *tensors, starts, shifts = saved
            assert starts is not None and shifts is not None
            found = ops.gradients(
                _key_first_problem(p),
                layout,
                _key_first_inputs(p, Inputs._make(tensors)),
                Kept(starts, shifts, offsets),
                do,
                _key_first(dht, p),
                needed,
                partial(fold, layout, back=True),
            )
            return _key_first_inputs(p, Inputs._make(found))

        # Every rank runs this, with a gradient or without: the other ranks wait in the exchange.
        found = found_once(
            find,
            do,
            dht,
            *ctx.saved_tensors,
            operator="gdn_triton.chunk_gated_delta_rule with cp_context",
            backends=IN_NONE,
        )
        wanted = (x if want else None for x, want in zip(found, needed.values(), strict=True))
        return (None, None, None, *wanted)


def _forward(
    ops: ShardOps, problem: Problem, layout: ShardLayout, x: Inputs
) -> tuple[Tensor, Tensor | None, Kept]:
    p, x = _key_first_problem(problem), _key_first_inputs(problem, x)
    o, final_state, kept = ops.forward(p, layout, x, partial(fold, layout, back=False))
    if not problem.output_final_state:
        return o, None, kept
    if problem.state_v_first:
        final_state = final_state.mT.contiguous()
    return o, final_state, kept


def forward(
    ops: ShardOps, problem: Problem, layout: ShardLayout, x: Inputs
) -> tuple[Tensor, Tensor | None]:
    """o [1, T, HV, V] in q's dtype, and the state after the last local token of each local
    sequence, in the caller's layout, or None. Differentiable once. Every rank of the group has to
    call it, and its backward where another rank does."""
    if problem.needs_grad:
        return _ContextParallel.apply(ops, problem, layout, *x)  # type: ignore[no-any-return, no-untyped-call]
    o, final_state, _ = _forward(ops, problem, layout, x)
    return o, final_state
