"""The prefill as an operator of torch's library, which is what a compiler sees of it.

As `gdn_triton.chunk.operators`, which says why: an operator is opaque, its implementation judges
the call and chooses the backend at every run, and its fake judges shapes only. Imported by
`import gdn_triton`. `gdn_triton::chunk_prefill` writes its states and, where they are given, its
output and its checkpoints.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from gdn_triton._host.memory import operator_counts_writes
from gdn_triton._host.schema import schema_takes, without_contents
from gdn_triton.chunk.prefill_call import TENSORS, PrefillCall, run_prefill
from gdn_triton.chunk.validation_prefill import checkpoint_rows, validate_prefill

_REQUIRED: Final = ("state", "read_slots", "q", "k", "v", "g", "beta")
# The fields of PrefillCall, in their order.
_SCHEMA = (
    "Tensor(a!) state, Tensor read_slots, Tensor? write_slots, Tensor? has_initial_state, "
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, "
    "Tensor? cu_seqlens, Tensor(b!)? out, Tensor(c!)? state_checkpoints, Tensor? checkpoint_slots, "
    "float? scale, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel, "
    "bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, bool state_v_first, str skip, "
    "int checkpoint_every_n_tokens, int chunk_size"
)


def _new_checkpoints(x: PrefillCall) -> bool:
    """Whether they are a new tensor."""
    given = x.state_checkpoints is not None or x.checkpoint_slots is not None
    return x.checkpoint_every_n_tokens > 0 and not given


@torch.library.custom_op(
    "gdn_triton::chunk_prefill",
    mutates_args=("state", "out", "state_checkpoints"),
    # An operator can return neither None nor an argument: such an output is empty, of shape [0].
    schema=f"({_SCHEMA}) -> (Tensor o, Tensor state_checkpoints)",
)
def _prefill(*args: Any) -> tuple[Tensor, Tensor]:
    x = PrefillCall(*args)
    with operator_counts_writes():
        o, checkpoints = run_prefill(x)
    nothing = x.q.new_empty(0)
    kept = checkpoints if _new_checkpoints(x) and checkpoints is not None else x.state.new_empty(0)
    return o if x.out is None else nothing, kept


@_prefill.register_fake
def _prefill_fake(*args: Any) -> tuple[Tensor, Tensor]:
    x = PrefillCall(*args)
    p = validate_prefill(*_without_contents(x))
    kept = x.state.new_empty(0)
    if _new_checkpoints(x):
        rows = checkpoint_rows(p, x.checkpoint_every_n_tokens)
        kept = x.state.new_empty(rows, *x.state.shape[1:])
    return x.q.new_empty((p.B, p.T, p.HV, p.V) if x.out is None else 0), kept


def _without_contents(x: PrefillCall) -> PrefillCall:
    """A call that validation judges by its shapes alone."""
    return PrefillCall._make((*without_contents(x[:TENSORS]), *x[TENSORS:]))


def traced_prefill(x: PrefillCall) -> tuple[Tensor, Tensor | None]:
    """`gdn_triton.chunk_prefill` through its operator."""
    needs_grad = torch.is_grad_enabled() and any(
        isinstance(y, Tensor) and y.requires_grad for y in x[:TENSORS]
    )
    if needs_grad or not _fits(x):
        validate_prefill(*x)
    scale = None if x.scale is None else float(x.scale)
    o, checkpoints = torch.ops.gdn_triton.chunk_prefill(*x._replace(scale=scale))
    if x.out is not None:
        o = x.out
    if _new_checkpoints(x):
        return o, checkpoints
    return o, None if x.state_checkpoints is x.state else x.state_checkpoints


def _fits(x: PrefillCall) -> bool:
    """Whether the operator takes the arguments as they are."""
    flags = (
        x.use_qk_l2norm_in_kernel,
        x.use_gate_in_kernel,
        x.use_beta_sigmoid_in_kernel,
        x.allow_neg_eigval,
        x.state_v_first,
    )
    return (
        schema_takes(x[:TENSORS], [getattr(x, name) for name in _REQUIRED], x.scale)
        and all(flag is True or flag is False for flag in flags)
        and type(x.skip) is str
        and type(x.checkpoint_every_n_tokens) is int
        and type(x.chunk_size) is int
    )
