"""Sequences that are split over ranks, in any backend: the four stages of a rank, and one autograd
function over them.

The effect of a shard on the state is an affine map, S_out = M S_in + b, with M [K, K] and b [K, V]
for each value head. Every rank finds its maps from its own tokens (prepare), and all ranks exchange
them in one all-gather. Each rank then folds the maps of the ranks before it, in order, into the
state that it starts from (apply). In reverse the gradient of the state takes the transposed maps,
dS_in = M^T dS_out + c. No rank waits for the walk of another rank.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gdn_triton._host.derivatives import IN_NONE, found_once
from gdn_triton._host.records import state_needs_grad
from gdn_triton._host.tensors import readable_gradient
from gdn_triton._ranks.exchange import fold, start_gather
from gdn_triton._ranks.layout import ShardLayout
from gdn_triton.chunk.problem import Inputs, Problem, needed_inputs

# Waits for the other ranks if necessary, and returns the state (or gradient) that other ranks send
# to each interval of this rank, [HV, V, K], or None where they send none. A backend calls it once,
# as late as it can.
Incoming = Callable[[], list[Tensor | None]]


class Kept(NamedTuple):
    """The backward needs these tensors, and the rest, in addition to the inputs."""

    tensors: tuple[Tensor | None, ...]
    rest: Any


class ShardOps(Protocol):
    """The stages of one rank in one backend, on the rank's tensors. The problem has states [.., K,
    V] in any layout of the caller. A summary is [intervals, HV, V + K, K], in fp32, or in float64
    where the backend computes in it. It has, for each interval from which a state leaves the rank,
    b transposed, then M transposed. If no state comes to such an interval, the state that leaves it
    replaces b. Unused entries may have any values. `local` is passed to the stage that follows."""

    def forward_prepare(
        self, problem: Problem, layout: ShardLayout, x: Inputs
    ) -> tuple[Tensor, Any]:
        """The summary."""

    def forward_apply(
        self, problem: Problem, layout: ShardLayout, x: Inputs, local: Any, incoming: Incoming
    ) -> tuple[Tensor, Tensor | None, Kept]:
        """Returns o, the state after the last token of each local sequence, and the values to save.
        The states may be None unless they are asked for."""

    def backward_prepare(
        self,
        problem: Problem,
        layout: ShardLayout,
        x: Inputs,
        kept: Kept,
        do: Tensor | None,
        dht: Tensor | None,
    ) -> tuple[Tensor, Any]:
        """Returns the summary in reverse, for each interval to which a state comes: c in place of
        b, and the M of the forward."""

    def backward_apply(
        self,
        problem: Problem,
        layout: ShardLayout,
        x: Inputs,
        kept: Kept,
        local: Any,
        needed: Mapping[str, bool],
        incoming: Incoming,
    ) -> tuple[Tensor | None, ...]:
        """Returns the gradient of each of `Inputs` where it is needed, and None without such an
        input. needed: by the names of the inputs."""


def key_first(state: Tensor | None, problem: Problem) -> Tensor | None:
    """Changes a state from the caller's layout to [N, HV, K, V], or back."""
    return state if state is None or not problem.state_v_first else state.mT


def key_first_inputs(problem: Problem, x: Inputs) -> Inputs:
    return (
        x
        if not problem.state_v_first
        else x._replace(initial_state=key_first(x.initial_state, problem))
    )


@functools.lru_cache(256)
def key_first_problem(problem: Problem) -> Problem:
    return dataclasses.replace(problem, state_v_first=False)


def final_states(problem: Problem, final_state: Tensor | None) -> Tensor | None:
    """The states of `ShardOps.forward_apply` in the form that the caller asks for."""
    if not problem.output_final_state or final_state is None:
        return None
    return final_state.mT.contiguous() if problem.state_v_first else final_state


def exchanged(problem: Problem, layout: ShardLayout, summary: Tensor, *, back: bool) -> Incoming:
    """Starts the all-gather of this rank's summary. The result waits for it and folds."""
    if not layout.crosses:
        return lambda: [None] * len(layout.intervals)
    gathered = start_gather(layout, summary)
    return lambda: fold(layout, gathered(), problem.V, back=back)


class _ContextParallel(torch.autograd.Function):
    """The last arguments are `Inputs`, whose offsets are those of the layout."""

    @staticmethod
    def forward(
        ctx: Any, ops: ShardOps, problem: Problem, layout: ShardLayout, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        x = Inputs._make(tensors)
        o, final_state, kept = _forward(ops, problem, layout, x)
        ctx.save_for_backward(*x, *kept.tensors)
        ctx.ops, ctx.problem, ctx.layout, ctx.rest = ops, problem, layout, kept.rest
        ctx.set_materialize_grads(False)
        if final_state is not None and not state_needs_grad(needed_inputs(ctx.needs_input_grad)):
            ctx.mark_non_differentiable(final_state)
        return o, final_state

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Tensor | None, ...]:
        p: Problem = ctx.problem
        do, dht = readable_gradient("o", do), readable_gradient("final_state", dht)
        ops, layout, rest = ctx.ops, ctx.layout, ctx.rest
        needed = needed_inputs(ctx.needs_input_grad)

        def find(do: Tensor | None, dht: Tensor | None, *saved: Tensor | None) -> Inputs:
            n = len(Inputs._fields)
            x = key_first_inputs(p, Inputs._make(saved[:n]))
            problem, kept = key_first_problem(p), Kept(tuple(saved[n:]), rest)
            summary, local = ops.backward_prepare(problem, layout, x, kept, do, key_first(dht, p))
            incoming = exchanged(problem, layout, summary, back=True)
            found = ops.backward_apply(problem, layout, x, kept, local, needed, incoming)
            return key_first_inputs(p, Inputs._make(found))

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
    p, x = key_first_problem(problem), key_first_inputs(problem, x)
    summary, local = ops.forward_prepare(p, layout, x)
    incoming = exchanged(p, layout, summary, back=False)
    o, final_state, kept = ops.forward_apply(p, layout, x, local, incoming)
    return o, final_states(problem, final_state), kept


def forward(
    ops: ShardOps, problem: Problem, layout: ShardLayout, x: Inputs
) -> tuple[Tensor, Tensor | None]:
    """Returns o [1, T, HV, V] in q's dtype, and the state after the last local token of each local
    sequence, in the caller's layout, or None. Differentiable once. Every rank of the group has to
    make the call, and the backward if another rank runs it."""
    if problem.needs_grad:
        return _ContextParallel.apply(ops, problem, layout, *x)  # type: ignore[no-any-return, no-untyped-call]
    o, final_state, _ = _forward(ops, problem, layout, x)
    return o, final_state
