"""Runs a call of `gdn_triton.chunk_prefill` in the backend that is chosen for it."""

import torch
from torch import Tensor

from gdn_triton._host.arguments import must
from gdn_triton._host.memory import is_same_memory
from gdn_triton._host.slots import LAST_SKIPPED
from gdn_triton._host.tensors import check_written, resolved
from gdn_triton.chunk.backends import PREFILL
from gdn_triton.chunk.prefill.validation import (
    check_memory,
    check_slots,
    checkpoint_rows,
    validate_prefill,
)
from gdn_triton.chunk.problem import Pool, PrefillCall


def run_prefill(x: PrefillCall) -> tuple[Tensor, Tensor | None]:
    """Returns o, and the checkpoints unless they are in the pool. Writes the states."""
    problem, given = validate_prefill(x), x.pool
    for name in ("state", "out", "state_checkpoints"):
        check_written(name, getattr(given, name))
    choice = PREFILL.choose(problem)
    p = problem
    if given.state_checkpoints is not None and is_same_memory(given.state_checkpoints, given.state):
        if given.checkpoint_slots is None:
            expected = "come with checkpoint_slots where it is state"
            raise ValueError(must("state_checkpoints", expected, "checkpoint_slots=None"))
        given = given._replace(state_checkpoints=None)
    if problem.unreadable is None:  # else a tensor need not have an address
        check_memory((*given, *x.inputs))
    out, checkpoints, every = given.out, given.state_checkpoints, x.checkpoint_every_n_tokens
    if out is None:
        out = torch.empty((p.B, p.T, p.HV, p.V), dtype=p.q_dtype, device=p.device)
    if every > 0 and checkpoints is None:
        if given.checkpoint_slots is not None:
            checkpoints = given.state
        else:
            shape = (checkpoint_rows(p, every), *given.state.shape[1:])
            checkpoints = torch.empty(shape, dtype=given.state.dtype, device=p.device)
    read_slots = given.read_slots.contiguous()
    pool = Pool(
        state=given.state,
        read_slots=read_slots,
        write_slots=read_slots if given.write_slots is None else given.write_slots.contiguous(),
        has_initial_state=_dense(given.has_initial_state),
        last_skipped=LAST_SKIPPED[x.skip],
        out=out,
        every=every,
        checkpoints=checkpoints,
        checkpoint_slots=_dense(given.checkpoint_slots),
    )
    check_slots(problem, pool, x.inputs.cu_seqlens)
    choice.run(problem, resolved(x.inputs), pool)
    return out, None if checkpoints is given.state else checkpoints


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
