"""The specification of the recurrence as a backend: plain torch on any device."""

import torch
from torch import Tensor

from gdn_triton._host.contents import OF_RAW_STEP, OF_STEP, warn_of_contents
from gdn_triton._host.slots import accepted_slots
from gdn_triton._host.tensors import writing
from gdn_triton.recurrent.problem import Operands, PlannedCall, RecurrentProblem, views
from gdn_triton.reference.recurrent import RecurrentResult, recurrent


def plan(problem: RecurrentProblem, operands: Operands) -> PlannedCall:
    """What runs this call and those like it. Reads offsets and slots on the host, and so waits for
    the device."""
    run = _step if problem.is_step else _sequences
    return lambda x: run(problem, x)


def _recurrent(p: RecurrentProblem, x: Operands, initial_state: Tensor | None) -> RecurrentResult:
    """x: the operands as `views` returns them."""
    return recurrent(
        x.q,
        x.k,
        x.v,
        x.g,
        gk=x.gk,
        gv=x.gv,
        beta=x.beta,
        scale=p.scale,
        initial_state=initial_state,
        cu_seqlens=x.cu_seqlens,
        use_qk_l2norm=p.use_qk_l2norm,
        use_beta_sigmoid=p.use_beta_sigmoid,
        allow_neg_eigval=p.allow_neg_eigval,
        use_gate=p.use_gate,
        A_log=x.A_log,
        dt_bias=x.dt_bias,
        state_v_first=p.state_v_first,
        kept=p.state_dtype if p.is_step else None,
        keep_states=p.every_token,
    )


def _sequences(p: RecurrentProblem, x: Operands) -> tuple[Tensor, Tensor | None]:
    """Differentiable."""
    if p.device.type == "cpu" and p.unreadable is None:
        warn_of_contents(
            q=x.q,
            k=x.k,
            v=x.v,
            g=x.g,
            beta=x.beta,
            initial_state=x.state,
            cu_seqlens=x.cu_seqlens,
            A_log=x.A_log,
            dt_bias=x.dt_bias,
            normalizes_keys=p.use_qk_l2norm,
            activates_gate=p.use_gate,
            activates_beta=p.use_beta_sigmoid,
        )
    result = _recurrent(p, x, x.state)
    o = result.o.to(p.v_dtype)
    return o, result.final_state.to(p.state_dtype) if p.output_final_state else None


def _step(p: RecurrentProblem, operands: Operands) -> tuple[Tensor, Tensor | None]:
    # No decorator: a warning names the first frame outside of this package.
    with torch.no_grad():
        return _on_pool(p, operands)


def _on_pool(p: RecurrentProblem, operands: Operands) -> tuple[Tensor, Tensor | None]:
    x = views(p, operands)
    if x.num_accepted_tokens is not None:
        first, kept = accepted_slots(p, x)
        x = x._replace(
            read_slots=torch.tensor(first, device=p.device),
            write_slots=torch.tensor(kept, device=p.device).view(p.B, p.T),
        )
    state, read = x.state, x.read_slots
    assert state is not None and read is not None
    live = read > p.last_skipped
    initial_state = state.new_zeros(p.N, *state.shape[1:])
    initial_state[live] = state[read[live].long()]
    result = _recurrent(p, x, initial_state)

    owner = _owners(p, x)  # the sequence of each token
    served = (owner >= 0) & torch.cat([live, live.new_zeros(1)])[owner]
    if p.device.type == "cpu" and p.unreadable is None:
        warn_of_contents(
            q=x.q,
            k=x.k,
            v=x.v,
            g=x.g,
            beta=x.beta,
            initial_state=initial_state[live],
            cu_seqlens=x.cu_seqlens,
            A_log=x.A_log,
            dt_bias=x.dt_bias,
            normalizes_keys=p.use_qk_l2norm,
            activates_gate=p.use_gate,
            activates_beta=p.use_beta_sigmoid,
            served=served,
            words=OF_RAW_STEP if p.use_gate else OF_STEP,
        )
    o = torch.where(served[..., None, None], result.o, 0).to(p.v_dtype)
    write = read if x.write_slots is None else x.write_slots
    if p.every_token:
        assert result.states is not None
        written = served & (write > p.last_skipped)
        states = result.states[written]
    else:
        written = live & (write > p.last_skipped)
        states = result.final_state[written]
    with writing(state):
        state[write[written].long()] = states.to(state.dtype)

    if x.out is not None:
        with writing(x.out):
            x.out.copy_(o)
        assert operands.out is not None
        return operands.out, None
    shape = operands.v.shape[:-1] if p.is_mixed else operands.v.shape[:-2]
    return o.reshape(*shape, p.HV, p.V), None


def _owners(p: RecurrentProblem, x: Operands) -> Tensor:
    """[B, T]: the sequence that each token belongs to, -1 for none."""
    if x.cu_seqlens is None:
        return torch.arange(p.N, device=p.device)[:, None].expand(p.B, p.T)
    owner = torch.full((1, p.T), -1, device=p.device)
    bounds = x.cu_seqlens.tolist()
    for n in range(p.N):
        owner[0, bounds[n] : bounds[n + 1]] = n
    return owner
