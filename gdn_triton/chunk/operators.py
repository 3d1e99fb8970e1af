"""The public operation as two operators of torch's library. A compiler sees these operators only.

`gdn_triton::chunk_gated_delta_rule_fwd` is opaque to torch.compile and torch.export: at every run
its implementation validates the arguments, reads `GDN_BACKEND` and chooses a backend. Its fake
knows only shapes, dtypes and strides, and raises the same errors as far as these show them. Its
gradient is `gdn_triton::chunk_gated_delta_rule_bwd`. It runs kernels where `cuda` or `triton`
serves the call. Otherwise it runs the forward again and differentiates it by autograd, which takes
as long as both together. A second derivative is an error.

`batch_invariant` is an argument whose value the trace reads, because a backward must have the value
of its forward, in any thread and whatever the variable is then. A program that was saved without it
reads the variable at every forward.

`import gdn_triton` imports this module, so a program that torch.export or AOTInductor has saved
finds its operators. An eager call does not pass through the dispatcher.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from gdn_triton._host.environment import batch_invariant, traced_batch_invariant
from gdn_triton._host.records import Options, arguments_of, flat, made, state_needs_grad
from gdn_triton._host.replay import replayed_gradients
from gdn_triton._host.schema import schema_takes, without_contents
from gdn_triton.chunk.backends import CHUNK
from gdn_triton.chunk.problem import DIFFERENTIABLE, ChunkCall, Inputs
from gdn_triton.chunk.validation import judge_chunk, validate_chunk

# The arguments of a call by their names in ChunkCall and its parts, and `batch_invariant`.
_SCHEMA: Final = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, Tensor? A_log, "
    "Tensor? dt_bias, Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, Tensor? chunk_indices, "
    "float? scale, bool output_final_state, bool use_qk_l2norm_in_kernel, "
    "bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, bool state_v_first, "
    "bool use_gate_in_kernel, int chunk_size, bool batch_invariant"
)

_ARGUMENTS: Final = arguments_of(_SCHEMA)
_REQUIRED: Final = ("q", "k", "v", "g", "beta")


def _invariant(given: Mapping[str, Any]) -> bool:
    """Whether a forward of these arguments is batch-invariant."""
    return given["batch_invariant"] or batch_invariant()


def _differentiable(given: Mapping[str, Any]) -> list[Any]:
    return [given[name] for name in DIFFERENTIABLE]


# ------------------------------------------------------------------------------------------ forward


@torch.library.custom_op(
    "gdn_triton::chunk_gated_delta_rule_fwd",
    mutates_args=(),
    # An operator cannot return None: a final state that was not asked for is empty, of shape [0].
    # Gradients are defined outside of the implementation, which cannot see whether one is needed.
    schema=f"({_SCHEMA}, bool needs_grad) -> (Tensor o, Tensor final_state)",
)
def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    *values, needs_grad = args
    given = _ARGUMENTS.named(values)
    x = made(ChunkCall, given)
    problem = dataclasses.replace(
        validate_chunk(x), needs_grad=needs_grad, batch_invariant=_invariant(given)
    )
    # Choose without gradients: the operator's autograd formula saves the tensors for them.
    o, final_state = CHUNK.choose(problem).run(problem, x.inputs)
    if final_state is None:
        final_state = o.new_empty(0, dtype=_state_dtype(o))
    return o, final_state


@_forward.register_fake
def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    *values, _ = args
    given = _ARGUMENTS.named(values)
    p, q = validate_chunk(made(ChunkCall, _without_contents(given))), given["q"]
    o = q.new_empty(p.B, p.T, p.HV, p.V)
    state = (p.N, p.HV, p.V, p.K) if p.state_v_first else (p.N, p.HV, p.K, p.V)
    return o, q.new_empty(state if p.output_final_state else 0, dtype=_state_dtype(q))


def _state_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _without_contents(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments in a form that validation can check by shapes alone, because fake tensors have
    nothing else. The chunk table is left out: with symbolic sizes the bounds of its length would
    become conditions on T, and split one graph into two."""
    if given["cu_seqlens"] is None:
        return given
    given = {**given, "cu_seqlens_cpu": None, "chunk_indices": None}
    return without_contents(given, _ARGUMENTS.tensors)


# ----------------------------------------------------------------------------------------- backward


@torch.library.custom_op(
    "gdn_triton::chunk_gated_delta_rule_bwd",
    mutates_args=(),
    # There is one gradient for each argument that requires one, in the order of the differentiable
    # arguments.
    schema=f"(Tensor? do, Tensor? dht, {_SCHEMA}, bool[] wanted) -> Tensor[]",
)
def _backward(do: Tensor | None, dht: Tensor | None, *args: Any) -> list[Tensor]:
    *values, wanted = args
    given = _ARGUMENTS.named(values)
    x = made(ChunkCall, given)
    problem = dataclasses.replace(
        validate_chunk(x), needs_grad=True, batch_invariant=given["batch_invariant"]
    )
    choice = CHUNK.choose(problem)
    by_name = dict(zip(DIFFERENTIABLE, wanted, strict=True))
    if choice.gradients is not None:
        store_dh0 = by_name["initial_state"]
        of = choice.gradients.find(problem, x.inputs, do, dht, store_dh0=store_dh0)._asdict()
        return [of[name] for name, want in by_name.items() if want and of[name] is not None]

    def run(*leaves: Tensor | None) -> tuple[Tensor, Tensor | None]:
        named = dict(zip(DIFFERENTIABLE, leaves, strict=True))
        return choice.run(problem, Inputs(**{**x.inputs._asdict(), **named}))

    return replayed_gradients(run, _differentiable(given), wanted, (do, dht))


@_backward.register_fake
def _backward_fake(do: Tensor | None, dht: Tensor | None, *args: Any) -> list[Tensor]:
    *values, wanted = args
    tensors = zip(_differentiable(_ARGUMENTS.named(values)), wanted, strict=True)
    return [y.new_empty(y.shape) for y, want in tensors if want and y is not None]


def _needed(ctx: Any) -> dict[str, bool]:
    """Whether each argument needs a gradient. torch adds entries after those of the call's
    arguments."""
    needed = dict(zip(_ARGUMENTS.names, ctx.needs_input_grad, strict=False))
    return {name: needed[name] for name in DIFFERENTIABLE}


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *values, _ = inputs
    given = _ARGUMENTS.named(values)
    ctx.save_for_backward(*(given.pop(name) for name in _ARGUMENTS.tensors))
    # The value that the forward has read, in the same call and thread, because a backward may run
    # in any thread.
    ctx.rest = {**given, "batch_invariant": _invariant(given)}
    ctx.set_materialize_grads(False)
    if not given["output_final_state"] or not state_needs_grad(_needed(ctx)):
        ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Tensor | None, ...]:
    needed = _needed(ctx)
    tensors = dict(zip(_ARGUMENTS.tensors, ctx.saved_tensors, strict=True))
    values = _ARGUMENTS.ordered({**tensors, **ctx.rest})
    gradients = iter(_backward(do, dht, *values, _differentiable(needed)))
    found = {name: next(gradients) if want else None for name, want in needed.items()}
    return (*(found.get(name) for name in _ARGUMENTS.names), None)


def _differentiate_twice(ctx: Any, *gradients: Any) -> NoReturn:
    raise RuntimeError(
        "gdn_triton.chunk_gated_delta_rule has no second derivative under a compiler: call it "
        "outside of one, with GDN_BACKEND=reference"
    )


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_differentiate_twice)


# ------------------------------------------------------------------------------------ under a trace


def traced(x: ChunkCall) -> tuple[Tensor, Tensor | None]:
    """Runs `gdn_triton.chunk_gated_delta_rule` through its operator. This is the only function that
    is traced."""
    given = flat(x)
    # A fake reads no contents, but cu_seqlens_cpu has contents even if q has no memory.
    if not _fits(given) or not torch.compiler.is_compiling():
        # Do not use remembered validations: a compiler would trace the comparison with earlier
        # calls.
        judge_chunk(x)
    needs_grad = torch.is_grad_enabled() and any(
        y is not None and y.requires_grad for y in _differentiable(given)
    )
    given["scale"] = None if x.scale is None else float(x.scale)
    given["batch_invariant"] = traced_batch_invariant()
    values = _ARGUMENTS.ordered(given)
    o, final_state = torch.ops.gdn_triton.chunk_gated_delta_rule_fwd(*values, needs_grad)
    return o, final_state if x.output_final_state else None


def _fits(given: dict[str, Any]) -> bool:
    """Whether the operator takes the arguments as they are."""
    flags = (given["output_final_state"], *(given[name] for name in Options._fields))
    return (
        schema_takes(given, _ARGUMENTS.tensors, _REQUIRED)
        and all(flag is True or flag is False for flag in flags)
        and type(given["chunk_size"]) is int
    )
