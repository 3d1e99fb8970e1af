"""A rank's part of a split call in the specification: plain torch, and autograd within a rank."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gdn_triton import reference
from gdn_triton.chunk.problem import Inputs, Problem
from gdn_triton.chunk.sharded.autograd import Exchange, Kept
from gdn_triton.distributed.layout import ShardLayout


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
    """What the specification computes in."""
    wide = any(y is not None and y.dtype == torch.float64 for y in x)
    return torch.float64 if wide else torch.float32


def forward(
    problem: Problem, layout: ShardLayout, x: Inputs, exchange: Exchange
) -> tuple[Tensor, Tensor, Kept]:
    p, n = problem, len(layout.intervals)
    dtype = _state_dtype(x)
    starts = x.q.new_zeros(p.N, p.HV, p.K, p.V, dtype=dtype)
    if x.initial_state is not None:
        starts.copy_(x.initial_state)
    b = starts.new_zeros(n, p.HV, p.K, p.V)
    M = starts.new_zeros(n, p.HV, p.K, p.K)
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
        b[i] = _run(p, part).final_state[0]
        if comes:
            # The same recurrence from the identity, with values of zero.
            identity = torch.eye(p.K, dtype=dtype, device=b.device).expand(1, p.HV, -1, -1)
            zeros = x.v.new_zeros(1, part.v.shape[1], p.HV, p.K)
            M[i] = _run(p, part._replace(v=zeros, initial_state=identity)).final_state[0]
    for interval, state in zip(layout.intervals, exchange(b, M), strict=True):
        if state is not None:
            starts[interval.first] = state
    result = _run(p, x._replace(initial_state=starts))
    final_dtype = torch.float64 if p.q_dtype == torch.float64 else torch.float32
    final_state = result.final_state.to(final_dtype).contiguous()
    return result.o.to(p.q_dtype).contiguous(), final_state, Kept(starts, M, layout.offsets)


def gradients(
    problem: Problem,
    layout: ShardLayout,
    x: Inputs,
    kept: Kept,
    do: Tensor | None,
    dht: Tensor | None,
    needed: Mapping[str, bool],
    exchange: Exchange,
) -> tuple[Tensor | None, ...]:
    starts = kept.starts.detach().requires_grad_()
    with torch.enable_grad():
        leaves = Inputs._make(
            None if y is None else y.detach().requires_grad_(needed[name])
            for name, y in x._asdict().items()
        )
        result = _run(problem, leaves._replace(initial_state=starts))
    outputs = [result.o, result.final_state]
    do = torch.zeros_like(result.o) if do is None else do.to(result.o.dtype)
    ends = torch.zeros_like(starts)
    if dht is not None:
        ends.copy_(dht)

    def pull(sources: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
        hanging = [(y, dy) for y, dy in zip(outputs, (do, ends), strict=True) if y.requires_grad]
        return torch.autograd.grad(
            [y for y, _ in hanging],
            sources,
            [dy for _, dy in hanging],
            allow_unused=True,
            materialize_grads=True,
            **options,
        )

    b = starts.new_zeros(len(layout.intervals), *starts.shape[1:])
    if layout.begun:
        (dstarts,) = pull([starts], retain_graph=True)
        for i, interval in enumerate(layout.intervals):
            if interval.before:
                b[i] = dstarts[interval.first]
    for interval, state in zip(layout.intervals, exchange(b, kept.shifts), strict=True):
        if state is not None:
            ends[interval.last] += state

    names = [name for name, want in needed.items() if want and name != "initial_state"]
    *of_leaves, dstarts = pull([*(getattr(leaves, name) for name in names), starts])
    found: dict[str, Tensor | None] = dict.fromkeys(Inputs._fields)
    found.update(zip(names, of_leaves, strict=True))
    if x.initial_state is not None:
        dstarts = dstarts.clone()
        # These sequences' initial states came from another rank, which has their gradients.
        for n in layout.begun:
            dstarts[n] = 0
        found["initial_state"] = dstarts.to(x.initial_state.dtype)
    return tuple(found.values())
