"""The specification of the recurrence as a backend: plain torch on any device."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from gdn_triton._host.contents import OF_RAW_STEP, OF_STEP, warn_of_contents
from gdn_triton._host.slots import accepted_slots
from gdn_triton._host.tensors import writing
from gdn_triton.recurrent.problem import (
    FoldOperands,
    FoldProblem,
    Operands,
    PlannedCall,
    RecurrentProblem,
    turns,
    views,
)
from gdn_triton.reference.recurrent import RecurrentResult, recurrent
from gdn_triton.reference.trees import recurrent_tree
from gdn_triton.reference.window import Records, accept, fold, window_step


def plan(problem: RecurrentProblem, operands: Operands) -> PlannedCall:
    """Returns the function that runs this call and all calls like it. The function reads offsets
    and slots on the host, and therefore waits for the device."""
    run = _step if problem.is_step else _sequences
    if problem.window_rows:
        run = _window_step
    return lambda x: run(problem, x)


def _recurrent(p: RecurrentProblem, x: Operands, initial_state: Tensor | None) -> RecurrentResult:
    """Runs a call. x: the operands as returned by `views`."""
    if x.parents is not None:
        assert initial_state is not None
        tree = recurrent_tree(
            x.q,
            x.k,
            x.v,
            x.g,
            parents=x.parents,
            initial_state=initial_state,
            beta=x.beta,
            cu_seqlens=x.cu_seqlens,
            scale=p.scale,
            use_qk_l2norm=p.use_qk_l2norm,
            use_beta_sigmoid=p.use_beta_sigmoid,
            allow_neg_eigval=p.allow_neg_eigval,
            use_gate=p.use_gate,
            A_log=x.A_log,
            dt_bias=x.dt_bias,
            state_v_first=p.state_v_first,
            kept=p.state_dtype,
        )
        # Every state has its own slot, so there is no separate final state.
        return RecurrentResult(tree.o, initial_state, tree.states)
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
    """Runs a sequence call. The results are differentiable."""
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
    # Use a with statement. A decorator of torch adds a frame outside of this package, and a warning
    # would name that frame.
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
    owner = _owners(p, x)  # the sequence of each token
    served = (owner >= 0) & torch.cat([live, live.new_zeros(1)])[owner]
    if x.parents is not None:
        # The slots of skipped sequences may be any numbers.
        x = x._replace(parents=torch.where(served, x.parents, -1))
    result = _recurrent(p, x, initial_state)

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

    return _given_back(p, x, operands, o), None


def _given_back(p: RecurrentProblem, x: Operands, operands: Operands, o: Tensor) -> Tensor:
    """Returns o [B, T, HV, V] in the dtype, shape and memory that the call asks for. x: the
    operands as returned by `views`."""
    if x.out is not None:
        with writing(x.out):
            x.out.copy_(o)
        assert operands.out is not None
        return operands.out
    shape = operands.v.shape[:-1] if p.is_mixed else operands.v.shape[:-2]
    return o.reshape(*shape, p.HV, p.V)


def _records(x: Operands | FoldOperands) -> Records:
    assert x.u_rows is not None and x.k_rows is not None and x.g_rows is not None
    assert x.call_rows is not None and x.start is not None
    return Records(
        u=x.u_rows, k=x.k_rows, g=x.g_rows, calls=x.call_rows, start=x.start, scales=x.scales
    )


def _turns(p: RecurrentProblem | FoldProblem) -> Tensor:
    return torch.tensor(turns(p.HV, p.fold_period), device=p.device)


@contextmanager
def _writing_all(*written: Tensor | None) -> Iterator[None]:
    with torch.no_grad(), ExitStack() as stack:
        for y in written:
            if y is not None:
                stack.enter_context(writing(y))
        yield


def _window_step(p: RecurrentProblem, operands: Operands) -> tuple[Tensor, Tensor | None]:
    x = views(p, operands)
    assert x.g is not None and x.beta is not None and x.state is not None
    assert x.read_slots is not None and x.positions is not None
    records = _records(x)
    with _writing_all(x.state, *records[:4], x.scales):
        o = window_step(
            x.q,
            x.k,
            x.v,
            x.g,
            x.beta,
            state=x.state,
            records=records,
            slots=x.read_slots,
            positions=x.positions,
            owner=_owners(p, x),
            turns=_turns(p),
            period=p.fold_period,
            last_skipped=p.last_skipped,
            scale=p.scale,
            cu_seqlens=x.cu_seqlens,
            parents=x.parents,
            use_qk_l2norm=p.use_qk_l2norm,
            use_beta_sigmoid=p.use_beta_sigmoid,
            allow_neg_eigval=p.allow_neg_eigval,
            use_gate=p.use_gate,
            A_log=x.A_log,
            dt_bias=x.dt_bias,
            state_v_first=p.state_v_first,
        )
    # o may be an inference tensor although the caller is not in inference mode.
    with torch.no_grad():
        return _given_back(p, x, operands, o.to(p.v_dtype, copy=True)), None


def fold_slots(p: FoldProblem, x: FoldOperands) -> None:
    """Runs `gdn_triton.fold_window` or, without a state, `gdn_triton.restart_window` or, with a
    path, `gdn_triton.accept_window`."""
    live = x.slots > p.last_skipped
    slots, positions = x.slots[live].long(), x.positions[live].long()
    if x.path is not None:
        with _writing_all(x.u_rows, x.k_rows, x.g_rows):
            accept(_records(x), slots, positions, x.path[live].long())
        return
    if x.state is None:
        with _writing_all(x.start):
            x.start[slots] = positions.to(x.start.dtype)
        return
    with _writing_all(x.state, x.start, x.scales):
        fold(x.state, _records(x), slots, positions, _turns(p), p.fold_period, p.state_v_first)


def _owners(p: RecurrentProblem, x: Operands) -> Tensor:
    """Returns [B, T]: the number of the sequence of each token, -1 for tokens of no sequence."""
    if x.cu_seqlens is None:
        return torch.arange(p.N, device=p.device)[:, None].expand(p.B, p.T)
    owner = torch.full((1, p.T), -1, device=p.device)
    bounds = x.cu_seqlens.tolist()
    for n in range(p.N):
        owner[0, bounds[n] : bounds[n + 1]] = n
    return owner
