"""From a call of `gdn_triton.chunk_prefill` to the backend that runs it."""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from gdn_triton._host.arguments import must
from gdn_triton._host.backends import PREFILL
from gdn_triton._host.memory import is_same_memory
from gdn_triton._host.tensors import check_written, resolved
from gdn_triton.chunk.problem import Inputs, Pool
from gdn_triton.chunk.validation_prefill import (
    check_memory,
    check_slots,
    checkpoint_rows,
    validate_prefill,
)
from gdn_triton.recurrent.validation import LAST_SKIPPED

# How many arguments of a call are tensors, or None.
TENSORS: Final = 15


class PrefillCall(NamedTuple):
    """The arguments of `gdn_triton.chunk_prefill`: first its tensors, then the rest."""

    state: Tensor
    read_slots: Tensor
    write_slots: Tensor | None
    has_initial_state: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    cu_seqlens: Tensor | None
    out: Tensor | None
    state_checkpoints: Tensor | None
    checkpoint_slots: Tensor | None
    scale: float | None
    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    state_v_first: bool
    skip: str
    checkpoint_every_n_tokens: int
    chunk_size: int


def run_prefill(x: PrefillCall) -> tuple[Tensor, Tensor | None]:
    """o, and the checkpoints where they are in no pool; the states are written."""
    problem = validate_prefill(*x)
    for name in ("state", "out", "state_checkpoints"):
        check_written(name, getattr(x, name))
    backend = PREFILL.choose(problem)
    p = problem
    if x.state_checkpoints is not None and is_same_memory(x.state_checkpoints, x.state):
        if x.checkpoint_slots is None:
            expected = "come with checkpoint_slots where it is state"
            raise ValueError(must("state_checkpoints", expected, "checkpoint_slots=None"))
        x = x._replace(state_checkpoints=None)
    if problem.unreadable is None:  # else a tensor need not have an address
        check_memory(x[:TENSORS])
    out, checkpoints, every = x.out, x.state_checkpoints, x.checkpoint_every_n_tokens
    if out is None:
        out = torch.empty((p.B, p.T, p.HV, p.V), dtype=p.q_dtype, device=p.device)
    if every > 0 and checkpoints is None:
        if x.checkpoint_slots is not None:
            checkpoints = x.state
        else:
            shape = (checkpoint_rows(p, every), *x.state.shape[1:])
            checkpoints = torch.empty(shape, dtype=x.state.dtype, device=p.device)
    read_slots = x.read_slots.contiguous()
    pool = Pool(
        state=x.state,
        read_slots=read_slots,
        write_slots=read_slots if x.write_slots is None else x.write_slots.contiguous(),
        has_initial_state=_dense(x.has_initial_state),
        last_skipped=LAST_SKIPPED[x.skip],
        out=out,
        every=every,
        checkpoints=checkpoints,
        checkpoint_slots=_dense(x.checkpoint_slots),
    )
    check_slots(problem, pool, x.cu_seqlens)
    tensors = resolved(Inputs(x.q, x.k, x.v, x.g, x.beta, None, x.A_log, x.dt_bias))
    backend.load()(problem, tensors, x.cu_seqlens, pool)
    return out, None if checkpoints is x.state else checkpoints


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
