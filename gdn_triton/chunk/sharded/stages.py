"""The four stages of a rank, for a caller that exchanges the maps itself.

A rank makes the maps of its tokens (`forward_prepare`). The caller gathers the summaries of all
ranks, as `torch.distributed.all_gather_into_tensor` does. Each rank then finds the state that other
ranks send to it, and its output (`forward_apply`). The gradients take the same steps in reverse. No
function here communicates with another rank or records a graph.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn_triton._host.arguments import must, shape_of
from gdn_triton._host.records import new_options
from gdn_triton._host.tensors import resolved
from gdn_triton._ranks.exchange import fold
from gdn_triton._ranks.layout import ShardLayout
from gdn_triton.chunk.backends import SHARDED
from gdn_triton.chunk.problem import Inputs, Problem, new_chunk_call, new_inputs
from gdn_triton.chunk.sharded.autograd import (
    Incoming,
    Kept,
    ShardOps,
    final_states,
    key_first,
    key_first_inputs,
    key_first_problem,
)
from gdn_triton.chunk.sharded.run import validate_sharded
from gdn_triton.constants import DEFAULT_CHUNK_SIZE


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A validated call. x: its inputs, with states [N, HV, K, V]."""

    ops: ShardOps
    problem: Problem
    layout: ShardLayout
    x: Inputs

    @property
    def key_first(self) -> Problem:
        return key_first_problem(self.problem)

    def incoming(self, summaries: Tensor, *, back: bool) -> Incoming:
        """The states from gathered summaries, whose shape is checked."""
        p, slots = self.problem, len(self.layout.places)
        shape = (slots, p.HV, p.V + p.K, p.K)
        if tuple(summaries.shape) != shape:
            expected = f"have shape {list(shape)}, a summary of each slot, rank by rank"
            raise ValueError(must("summaries", expected, shape_of(summaries)))
        return lambda: fold(self.layout, summaries, p.V, back=back)


@functools.lru_cache(256)
def _with_gradients(problem: Problem) -> Problem:
    """Choose with gradients, because a backward may follow."""
    return dataclasses.replace(problem, needs_grad=True)


class ForwardLocal(NamedTuple):
    """The results of `forward_prepare` that `forward_apply` of the same rank needs."""

    call: _Call
    local: Any


class Saved(NamedTuple):
    """The results of `forward_apply` that `backward_prepare` needs: `tensors`, among them the
    inputs, which an autograd function can save, and `metadata`, which holds no tensor of the call.
    """

    tensors: tuple[Tensor | None, ...]
    metadata: Any


class BackwardLocal(NamedTuple):
    """The results of `backward_prepare` that `backward_apply` of the same rank needs."""

    call: _Call
    kept: Kept
    local: Any


class Gradients(NamedTuple):
    """The gradients of this rank's inputs; None without such an input. The gradients of A_log and
    dt_bias are those of this rank's tokens. The row of `initial_state` of a sequence that began on
    an earlier rank has a gradient of 0."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None


@torch.no_grad()
def forward_prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    *,
    cp_context: object,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> tuple[Tensor, ForwardLocal]:
    """The maps of this rank's tokens, for `chunk_gated_delta_rule` with the same arguments.

    Args:
        cp_context: of `build_cp_context`, which makes one without a process group from `place`.

    Returns:
        summary: [slots of a rank, HV, V + K, K], float32 (float64 in the reference where an input
            is), contiguous. A slot has the map S_out = M S_in + b of the sequence that continues
            after it: b transposed, [V, K], then M transposed, [K, K]. If the sequence begins in the
            slot, b is the state after the slot, and no rank reads M. A slot whose last sequence
            ends in it may have any values.
        local: for `forward_apply`.

    Raises:
        TypeError, ValueError, RuntimeError: as `chunk_gated_delta_rule`.
    """
    x = new_chunk_call(
        inputs=new_inputs(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            initial_state=initial_state,
            A_log=A_log,
            dt_bias=dt_bias,
            cu_seqlens=None,
        ),
        options=new_options(
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first,
            use_gate_in_kernel=use_gate_in_kernel,
        ),
        cu_seqlens_cpu=None,
        chunk_indices=None,
        scale=scale,
        output_final_state=output_final_state,
        chunk_size=chunk_size,
    )
    layout, inputs, problem = validate_sharded(x, cp_context)
    if problem.unreadable is not None:
        raise NotImplementedError(f"cp_context serves no such call. {problem.unreadable}")
    problem = _with_gradients(problem)
    ops = SHARDED.choose(problem).run
    call = _Call(ops, problem, layout, key_first_inputs(problem, resolved(inputs)))
    summary, local = ops.forward_prepare(call.key_first, layout, call.x)
    return summary, ForwardLocal(call, local)


@torch.no_grad()
def forward_apply(local: ForwardLocal, summaries: Tensor) -> tuple[Tensor, Tensor | None, Saved]:
    """The output of this rank's tokens.

    Args:
        local: of this rank's `forward_prepare`; used once.
        summaries: [slots, HV, V + K, K], the summaries of all ranks, in the order of the ranks.
            Those of ranks that share no sequence with this one are not read.

    Returns:
        o: [1, T, HV, V], the dtype of q.
        final_state: the state after the last local token of each local sequence, or None.
        saved: for `backward_prepare`.

    Raises:
        ValueError: summaries of another shape.
    """
    call, made = local
    incoming = call.incoming(summaries, back=False)
    o, final_state, kept = call.ops.forward_apply(
        call.key_first, call.layout, call.x, made, incoming
    )
    saved = Saved((*call.x, *kept.tensors), (call.ops, call.problem, call.layout, kept.rest))
    return o, final_states(call.problem, final_state), saved


@torch.no_grad()
def backward_prepare(
    saved: Saved, do: Tensor | None, dht: Tensor | None = None
) -> tuple[Tensor, BackwardLocal]:
    """The reverse maps of this rank's tokens.

    Args:
        saved: of this rank's `forward_apply`.
        do: the gradient of o, or None for zeros.
        dht: that of the final state, in its shape, or None for zeros.

    Returns:
        summary: as that of `forward_prepare`, of a slot with the map dS_in = M^T dS_out + c of the
            sequence that began before it: c transposed, then M transposed.
        local: for `backward_apply`.
    """
    ops, problem, layout, rest = saved.metadata
    n = len(Inputs._fields)
    call = _Call(ops, problem, layout, Inputs._make(saved.tensors[:n]))
    kept = Kept(saved.tensors[n:], rest)
    summary, local = ops.backward_prepare(
        call.key_first, layout, call.x, kept, do, key_first(dht, problem)
    )
    return summary, BackwardLocal(call, kept, local)


@torch.no_grad()
def backward_apply(local: BackwardLocal, summaries: Tensor) -> Gradients:
    """The gradients of this rank's inputs.

    Args:
        local: of this rank's `backward_prepare`; used once.
        summaries: [slots, HV, V + K, K], the summaries of all ranks, in the order of the ranks.

    Raises:
        ValueError: summaries of another shape.
    """
    call, kept, made = local
    incoming = call.incoming(summaries, back=True)
    needed = {name: y is not None for name, y in call.x._asdict().items()}
    needed["cu_seqlens"] = False
    found = Inputs._make(
        call.ops.backward_apply(call.key_first, call.layout, call.x, kept, made, needed, incoming)
    )
    return Gradients._make(key_first_inputs(call.problem, found)[:-1])
