"""The prefill as an operator of torch's library. A compiler sees this operator only.

As in `gdn_triton.chunk.operators`, which gives the reasons, the operator is opaque. Its
implementation validates the call and chooses the backend at every run, and its fake validates
shapes only. `import gdn_triton` imports this module. `gdn_triton::chunk_prefill` writes its states
and, where they are given, its output and its checkpoints.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from gdn_triton._host.environment import invariant_calls, traced_batch_invariant
from gdn_triton._host.memory import operator_counts_writes
from gdn_triton._host.records import Options, arguments_of, flat
from gdn_triton._host.schema import schema_takes, without_contents
from gdn_triton.chunk.prefill.run import run_prefill
from gdn_triton.chunk.prefill.validation import checkpoint_rows, validate_prefill
from gdn_triton.chunk.problem import PrefillCall, prefill_call

_REQUIRED: Final = ("state", "read_slots", "q", "k", "v", "g", "beta")
# The arguments of a call by their names in PrefillCall and its parts, and `batch_invariant`.
_SCHEMA: Final = (
    "Tensor(a!) state, Tensor read_slots, Tensor? write_slots, Tensor? has_initial_state, "
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, "
    "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, Tensor(b!)? out, Tensor(c!)? state_checkpoints, "
    "Tensor? checkpoint_slots, "
    "float? scale, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel, "
    "bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, bool state_v_first, str skip, "
    "int checkpoint_every_n_tokens, int chunk_size, bool batch_invariant"
)


_ARGUMENTS: Final = arguments_of(_SCHEMA)


def _new_checkpoints(x: PrefillCall) -> bool:
    """Whether the checkpoints are a new tensor."""
    given = x.pool.state_checkpoints is not None or x.pool.checkpoint_slots is not None
    return x.checkpoint_every_n_tokens > 0 and not given


@torch.library.custom_op(
    "gdn_triton::chunk_prefill",
    mutates_args=("state", "out", "state_checkpoints"),
    # An operator can return neither None nor an argument: such an output is empty, of shape [0].
    schema=f"({_SCHEMA}) -> (Tensor o, Tensor state_checkpoints)",
)
def _prefill(*args: Any) -> tuple[Tensor, Tensor]:
    given = _ARGUMENTS.named(args)
    x = prefill_call(given)
    state, nothing = x.pool.state, x.inputs.q.new_empty(0)
    with operator_counts_writes(), invariant_calls(given["batch_invariant"]):
        o, checkpoints = run_prefill(x)
    kept = checkpoints if _new_checkpoints(x) and checkpoints is not None else state.new_empty(0)
    return o if x.pool.out is None else nothing, kept


@_prefill.register_fake
def _prefill_fake(*args: Any) -> tuple[Tensor, Tensor]:
    given = _ARGUMENTS.named(args)
    x, state = prefill_call(given), given["state"]
    shapes = without_contents({**given, "cu_seqlens_cpu": None}, _ARGUMENTS.tensors)
    p = validate_prefill(prefill_call(shapes))
    kept = state.new_empty(0)
    if _new_checkpoints(x):
        rows = checkpoint_rows(p, x.checkpoint_every_n_tokens)
        kept = state.new_empty(rows, *state.shape[1:])
    return x.inputs.q.new_empty((p.B, p.T, p.HV, p.V) if x.pool.out is None else 0), kept


def traced_prefill(x: PrefillCall) -> tuple[Tensor, Tensor | None]:
    """Runs `gdn_triton.chunk_prefill` through its operator."""
    given = flat(x)
    needs_grad = torch.is_grad_enabled() and any(
        isinstance(y, Tensor) and y.requires_grad for y in given.values()
    )
    # torch increments versions of written tensors before it finds that a tensor is on another
    # device.
    tensors = [y for y in given.values() if isinstance(y, Tensor)]
    together = len({y.device for y in tensors if y is not x.cu_seqlens_cpu}) == 1
    if needs_grad or not together or not _fits(given):
        validate_prefill(x)
    given["scale"] = None if x.scale is None else float(x.scale)
    given["batch_invariant"] = traced_batch_invariant()
    o, checkpoints = torch.ops.gdn_triton.chunk_prefill(*_ARGUMENTS.ordered(given))
    if x.pool.out is not None:
        o = x.pool.out
    if _new_checkpoints(x):
        return o, checkpoints
    kept = x.pool.state_checkpoints
    return o, None if kept is x.pool.state else kept


def _fits(given: dict[str, Any]) -> bool:
    """Whether the operator takes the arguments as they are."""
    return (
        schema_takes(given, _ARGUMENTS.tensors, _REQUIRED)
        and all(given[name] is True or given[name] is False for name in Options._fields)
        and type(given["skip"]) is str
        and type(given["checkpoint_every_n_tokens"]) is int
        and given["checkpoint_every_n_tokens"] < 2**31
        and type(given["chunk_size"]) is int
    )
