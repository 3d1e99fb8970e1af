"""The specification as a backend: plain torch on any device, differentiable."""

import torch
from torch import Tensor

from gdn_triton import reference
from gdn_triton._host.contents import OF_PREFILL, warn_of_contents
from gdn_triton._host.tensors import writing
from gdn_triton.chunk.problem import Inputs, Pool, Problem


def forward(problem: Problem, x: Inputs, pool: Pool | None = None) -> tuple[Tensor, Tensor | None]:
    """Returns o [B, T, HV, V] in the dtype of q and the final state or None. With a `pool`, returns
    the pool's o and writes its states, without a gradient.

    Only this backend reads the contents of cu_seqlens and of slots on the host, and so waits for
    the device.
    """
    if pool is not None:
        with torch.no_grad():
            return _on_pool(problem, pool, x)
    if problem.device.type == "cpu" and problem.unreadable is None:
        warn_of_contents(
            q=x.q,
            k=x.k,
            v=x.v,
            g=x.g,
            beta=x.beta,
            initial_state=x.initial_state,
            cu_seqlens=x.cu_seqlens,
            A_log=x.A_log,
            dt_bias=x.dt_bias,
            normalizes_keys=problem.use_qk_l2norm,
            activates_gate=problem.use_gate,
            activates_beta=problem.use_beta_sigmoid,
        )
    result = _chunked(problem, x)
    o = result.o.to(problem.q_dtype).contiguous()
    if not problem.output_final_state:
        return o, None
    state_dtype = torch.float64 if problem.q_dtype == torch.float64 else torch.float32
    return o, result.final_state.to(state_dtype).contiguous()


def _chunked(
    problem: Problem, x: Inputs, *, keep_intermediates: bool = False
) -> reference.ChunkResult:
    # The specification turns autocast off by itself.
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
        state_v_first=problem.state_v_first,
        keep_intermediates=keep_intermediates,
    )


def _on_pool(problem: Problem, pool: Pool, x: Inputs) -> tuple[Tensor, Tensor]:
    p, state = problem, pool.state
    live = pool.read_slots > pool.last_skipped
    begun = live if pool.has_initial_state is None else live & pool.has_initial_state
    initial_state = state.new_zeros(p.N, *state.shape[1:])
    initial_state[begun] = state[pool.read_slots[begun].long()]
    keeps = pool.checkpoints is not None
    x = x._replace(initial_state=initial_state)
    result = _chunked(p, x, keep_intermediates=keeps)

    bounds = [b * p.T for b in range(p.B + 1)]
    if x.cu_seqlens is not None:
        bounds = x.cu_seqlens.tolist()
    served = torch.zeros(p.B * p.T, dtype=torch.bool, device=p.device)
    for n in live.nonzero().flatten().tolist():
        served[bounds[n] : bounds[n + 1]] = True
    served = served.view(p.B, p.T)
    if p.device.type == "cpu" and p.unreadable is None:
        warn_of_contents(
            q=x.q,
            k=x.k,
            v=x.v,
            g=x.g,
            beta=x.beta,
            initial_state=initial_state[begun],
            cu_seqlens=x.cu_seqlens,
            A_log=x.A_log,
            dt_bias=x.dt_bias,
            normalizes_keys=p.use_qk_l2norm,
            activates_gate=p.use_gate,
            activates_beta=p.use_beta_sigmoid,
            served=served,
            words=OF_PREFILL,
        )
    served = served[..., None, None]
    with writing(pool.out):
        pool.out.copy_(torch.where(served, result.o.to(p.q_dtype), 0))
    written = live & (pool.write_slots > pool.last_skipped)
    with writing(state):
        state[pool.write_slots[written].long()] = result.final_state[written].to(state.dtype)
    if keeps:
        _keep_checkpoints(p, pool, bounds, live.tolist(), result)
    return pool.out, state


def _keep_checkpoints(
    p: Problem, pool: Pool, bounds: list[int], live: list[bool], result: reference.ChunkResult
) -> None:
    assert pool.checkpoints is not None and result.h is not None
    slots = None if pool.checkpoint_slots is None else pool.checkpoint_slots.tolist()
    starts = result.h.flatten(0, 1)  # the state that each chunk starts from, K first
    starts = starts.mT if p.state_v_first else starts
    first = 0  # the sequence's first chunk
    for n in range(p.N):
        length = bounds[n + 1] - bounds[n]
        for j in range(length // pool.every if live[n] else 0):
            tokens = (j + 1) * pool.every
            after = result.final_state[n]
            if tokens < length:
                after = starts[first + tokens // p.chunk_size]
            row = bounds[n] // pool.every + j
            if slots is not None:
                row = slots[n][j] if j < len(slots[n]) else pool.last_skipped
                if row <= pool.last_skipped:
                    continue
            with writing(pool.checkpoints):
                pool.checkpoints[row] = after.to(pool.checkpoints.dtype)
        first += -(-length // p.chunk_size)
