"""A rank's part of a split call in the specification: plain torch, and autograd within a rank."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn_triton import reference
from gdn_triton._ranks.layout import ShardLayout
from gdn_triton.chunk.problem import Inputs, Problem
from gdn_triton.chunk.sharded.autograd import Incoming, Kept


def _run(problem: Problem, x: Inputs) -> reference.ChunkResult:
    return reference.chunk_gated_delta_rule(
        x.q,
        x.k,
        x.v,
        x.g,
        x.beta,
        scale=problem.scale,
        initial_state=x.initial_state,
        cu_seqlens=x.cu_seqlens,
        chunk_size=problem.chunk_size,
        use_qk_l2norm=problem.use_qk_l2norm,
        use_beta_sigmoid=problem.use_beta_sigmoid,
        allow_neg_eigval=problem.allow_neg_eigval,
        use_gate=problem.use_gate,
        A_log=x.A_log,
        dt_bias=x.dt_bias,
    )


def _state_dtype(x: Inputs) -> torch.dtype:
    """The dtype that the specification computes in."""
    wide = any(y is not None and y.dtype == torch.float64 for y in x)
    return torch.float64 if wide else torch.float32


class _Ready(NamedTuple):
    """starts: [N, HV, K, V], the states of the sequences that begin on this rank; other rows have
    any values. summary: the tensor that is sent."""

    starts: Tensor
    summary: Tensor


def forward_prepare(problem: Problem, layout: ShardLayout, x: Inputs) -> tuple[Tensor, _Ready]:
    p, n = problem, len(layout.intervals)
    dtype = _state_dtype(x)
    starts = x.q.new_zeros(p.N, p.HV, p.K, p.V, dtype=dtype)
    if x.initial_state is not None:
        starts.copy_(x.initial_state)
    summary = starts.new_zeros(n, p.HV, p.V + p.K, p.K)
    for i, interval in enumerate(layout.intervals):
        if not interval.after:
            continue
        last = interval.last
        rows = slice(layout.offsets[last], layout.offsets[last + 1])
        comes = bool(interval.before) and interval.first == last
        part = Inputs(
            q=x.q[:, rows],
            k=x.k[:, rows],
            v=x.v[:, rows],
            g=x.g[:, rows],
            beta=x.beta[:, rows],
            initial_state=None if comes else starts[last : last + 1],
            A_log=x.A_log,
            dt_bias=x.dt_bias,
        )
        summary[i, :, : p.V] = _run(p, part).final_state[0].mT
        if comes:
            # The same recurrence from the identity, with values of zero.
            identity = torch.eye(p.K, dtype=dtype, device=starts.device).expand(1, p.HV, -1, -1)
            zeros = x.v.new_zeros(1, part.v.shape[1], p.HV, p.K)
            whole = _run(p, part._replace(v=zeros, initial_state=identity))
            summary[i, :, p.V :] = whole.final_state[0].mT
    return summary, _Ready(starts=starts, summary=summary)


def forward_apply(
    problem: Problem, layout: ShardLayout, x: Inputs, local: _Ready, incoming: Incoming
) -> tuple[Tensor, Tensor, Kept]:
    p, starts = problem, local.starts
    for interval, state in zip(layout.intervals, incoming(), strict=True):
        if state is not None:
            starts[interval.first] = state.mT
    result = _run(p, x._replace(initial_state=starts))
    final_dtype = torch.float64 if p.q_dtype == torch.float64 else torch.float32
    final_state = result.final_state.to(final_dtype).contiguous()
    kept = Kept((starts, local.summary), None)
    return result.o.to(p.q_dtype).contiguous(), final_state, kept


class _Graph(NamedTuple):
    """The results of the rank with their graph, and the tensors from which their gradients are
    found."""

    leaves: Inputs
    starts: Tensor
    outputs: tuple[Tensor, Tensor]
    do: Tensor
    ends: Tensor

    def pull(self, sources: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
        pairs = zip(self.outputs, (self.do, self.ends), strict=True)
        hanging = [(y, dy) for y, dy in pairs if y.requires_grad]
        return torch.autograd.grad(
            [y for y, _ in hanging],
            sources,
            [dy for _, dy in hanging],
            allow_unused=True,
            materialize_grads=True,
            **options,
        )


def backward_prepare(
    problem: Problem,
    layout: ShardLayout,
    x: Inputs,
    kept: Kept,
    do: Tensor | None,
    dht: Tensor | None,
) -> tuple[Tensor, _Graph]:
    p = problem
    before, summary = kept.tensors
    assert before is not None and summary is not None
    starts = before.detach().requires_grad_()
    with torch.enable_grad():
        leaves = Inputs._make(
            None if y is None else y.detach().requires_grad_(y.is_floating_point()) for y in x
        )
        result = _run(p, leaves._replace(initial_state=starts))
    graph = _Graph(
        leaves=leaves,
        starts=starts,
        outputs=(result.o, result.final_state),
        do=torch.zeros_like(result.o) if do is None else do.to(result.o.dtype),
        ends=torch.zeros_like(starts),
    )
    if dht is not None:
        graph.ends.copy_(dht)
    back = summary.clone()
    if layout.begun:
        (dstarts,) = graph.pull([starts], retain_graph=True)
        for i, interval in enumerate(layout.intervals):
            if interval.before:
                back[i, :, : p.V] = dstarts[interval.first].mT
    return back, graph


def backward_apply(
    problem: Problem,
    layout: ShardLayout,
    x: Inputs,
    kept: Kept,
    local: _Graph,
    needed: Mapping[str, bool],
    incoming: Incoming,
) -> tuple[Tensor | None, ...]:
    for interval, state in zip(layout.intervals, incoming(), strict=True):
        if state is not None:
            local.ends[interval.last] += state.mT
    names = [name for name, want in needed.items() if want and name != "initial_state"]
    sources = [getattr(local.leaves, name) for name in names]
    *of_leaves, dstarts = local.pull([*sources, local.starts])
    found: dict[str, Tensor | None] = dict.fromkeys(Inputs._fields)
    found.update(zip(names, of_leaves, strict=True))
    if x.initial_state is not None:
        dstarts = dstarts.clone()
        # These sequences' initial states came from another rank, which has their gradients.
        for n in layout.begun:
            dstarts[n] = 0
        found["initial_state"] = dstarts.to(x.initial_state.dtype)
    return tuple(found.values())
