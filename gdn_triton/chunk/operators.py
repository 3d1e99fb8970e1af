"""The public operation as two operators of torch's library, which is what a compiler sees of it.

`gdn_triton::chunk_gated_delta_rule_fwd` is opaque to torch.compile and torch.export: the arguments
are judged, `GDN_BACKEND` is read and a backend is chosen in its implementation, at every run. Its
fake knows shapes, dtypes and strides only, and refuses what does not fit in them with the same
errors. Its gradient is `gdn_triton::chunk_gated_delta_rule_bwd`: by kernels where `cuda` or
`triton` serves the call; else the forward again, differentiated with autograd, right and as slow as
both together. A second derivative is an error.

`import gdn_triton` imports this module, so that a program that torch.export or AOTInductor has
saved finds its operators. An eager call does not pass through the dispatcher.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from gdn_triton._host.backends import CHUNK
from gdn_triton._host.replay import replayed_gradients
from gdn_triton._host.schema import schema_takes, without_contents
from gdn_triton.chunk.autograd import Find
from gdn_triton.chunk.problem import ChunkCall, Problem
from gdn_triton.chunk.validation import validate_chunk

# The fields of ChunkCall, in their order.
_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, Tensor? A_log, "
    "Tensor? dt_bias, Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, Tensor? chunk_indices, "
    "float? scale, bool output_final_state, bool use_qk_l2norm_in_kernel, "
    "bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, bool state_v_first, "
    "bool use_gate_in_kernel, int chunk_size"
)

# The number of leading fields that may have a gradient, and that are tensors.
_DIFFERENTIABLE: Final = 8
_TENSORS: Final = 11


def _run(x: ChunkCall, problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Runs the call in the backend that serves it, without a gradient: the operator's autograd
    formula, not its implementation, keeps tensors for the backward."""
    without = dataclasses.replace(problem, needs_grad=False)
    return CHUNK.choose(problem).load()(without, x.inputs, x.cu_seqlens)


# ------------------------------------------------------------------------------------------ forward


@torch.library.custom_op(
    "gdn_triton::chunk_gated_delta_rule_fwd",
    mutates_args=(),
    # An operator cannot return None: a final state that was not asked for is empty, of shape [0].
    # Gradients are defined outside of the implementation, which cannot see whether one is needed.
    schema=f"({_SCHEMA}, bool needs_grad) -> (Tensor o, Tensor final_state)",
)
def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    x = ChunkCall(*args[:-1])
    problem = dataclasses.replace(validate_chunk(*x), needs_grad=args[-1])
    o, final_state = _run(x, problem)
    return o, x.q.new_empty(0, dtype=_state_dtype(x)) if final_state is None else final_state


@_forward.register_fake
def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    x = ChunkCall(*args[:-1])
    p = validate_chunk(*_without_contents(x))
    o = x.q.new_empty(p.B, p.T, p.HV, p.V)
    state = (p.N, p.HV, p.V, p.K) if p.state_v_first else (p.N, p.HV, p.K, p.V)
    return o, x.q.new_empty(state if p.output_final_state else 0, dtype=_state_dtype(x))


def _state_dtype(x: ChunkCall) -> torch.dtype:
    return torch.float64 if x.q.dtype == torch.float64 else torch.float32


def _without_contents(x: ChunkCall) -> ChunkCall:
    """A call that validation judges by its shapes alone, for fake tensors have nothing else.

    Symbolic sizes are also why the chunk table is left out: the bounds of its length would become
    conditions on T, and split one graph into two.
    """
    if x.cu_seqlens is None:
        return x
    x = x._replace(cu_seqlens_cpu=None, chunk_indices=None)
    return ChunkCall._make((*without_contents(x[:_TENSORS]), *x[_TENSORS:]))


# ----------------------------------------------------------------------------------------- backward


@torch.library.custom_op(
    "gdn_triton::chunk_gated_delta_rule_bwd",
    mutates_args=(),
    # One gradient for each argument that wants one, in the order of the differentiable arguments.
    schema=f"(Tensor? do, Tensor? dht, {_SCHEMA}, bool[] wanted) -> Tensor[]",
)
def _backward(do: Tensor | None, dht: Tensor | None, *args: Any) -> list[Tensor]:
    x, wanted = ChunkCall(*args[:-1]), args[-1]
    problem = dataclasses.replace(validate_chunk(*x), needs_grad=True)
    name = CHUNK.choose(problem).name
    if name == "reference":
        return _by_autograd(x, problem, do, dht, wanted)
    return _by_kernels(name, x, problem, do, dht, wanted)


def _find(name: str, problem: Problem) -> Find:
    if name == "cuda":
        from gdn_triton.chunk.cuda import gradients_of

        return gradients_of(problem)
    from gdn_triton.chunk.triton.backward import gradients

    return gradients


def _by_kernels(
    name: str,
    x: ChunkCall,
    problem: Problem,
    do: Tensor | None,
    dht: Tensor | None,
    wanted: list[bool],
) -> list[Tensor]:
    found = _find(name, problem)(
        problem,
        x.inputs,
        x.cu_seqlens,
        do,
        dht,
        store_dh0=wanted[x._fields.index("initial_state")],
    )
    return [dy for dy, want in zip(found, wanted, strict=True) if want and dy is not None]


def _by_autograd(
    x: ChunkCall, problem: Problem, do: Tensor | None, dht: Tensor | None, wanted: list[bool]
) -> list[Tensor]:
    rest = x[_DIFFERENTIABLE:]
    return replayed_gradients(
        lambda *leaves: _run(ChunkCall._make((*leaves, *rest)), problem),
        x[:_DIFFERENTIABLE],
        wanted,
        (do, dht),
    )


@_backward.register_fake
def _backward_fake(do: Tensor | None, dht: Tensor | None, *args: Any) -> list[Tensor]:
    x, wanted = ChunkCall(*args[:-1]), args[-1]
    return [
        y.new_empty(y.shape)
        for y, want in zip(x[:_DIFFERENTIABLE], wanted, strict=True)
        if want and y is not None
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x = ChunkCall(*inputs[:-1])
    ctx.save_for_backward(*x[:_TENSORS])
    ctx.rest = x[_TENSORS:]
    ctx.set_materialize_grads(False)
    # The final state depends on every input but q: it needs no gradient when q alone does.
    if not x.output_final_state or not any(ctx.needs_input_grad[1:_DIFFERENTIABLE]):
        ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:_DIFFERENTIABLE])
    gradients = iter(_backward(do, dht, *ctx.saved_tensors, *ctx.rest, wanted))
    others = [None] * (len(ChunkCall._fields) + 1 - _DIFFERENTIABLE)
    return (*(next(gradients) if want else None for want in wanted), *others)


def _differentiate_twice(ctx: Any, *gradients: Any) -> NoReturn:
    raise RuntimeError(
        "gdn_triton.chunk_gated_delta_rule has no second derivative under a compiler: call it "
        "outside of one, with GDN_BACKEND=reference"
    )


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_differentiate_twice)


# ------------------------------------------------------------------------------------ under a trace


def traced(x: ChunkCall) -> tuple[Tensor, Tensor | None]:
    """`gdn_triton.chunk_gated_delta_rule` through the operator: the one function that is traced."""
    # A fake looks at no contents: those of cu_seqlens_cpu are there even where q has no memory.
    if not _fits(x) or not torch.compiler.is_compiling():
        validate_chunk(*x)
    needs_grad = torch.is_grad_enabled() and any(
        y is not None and y.requires_grad for y in x[:_DIFFERENTIABLE]
    )
    x = x._replace(scale=None if x.scale is None else float(x.scale))
    o, final_state = torch.ops.gdn_triton.chunk_gated_delta_rule_fwd(*x, needs_grad)
    return o, final_state if x.output_final_state else None


def _fits(x: ChunkCall) -> bool:
    """Whether the operator takes the arguments as they are."""
    flags = (
        x.output_final_state,
        x.use_qk_l2norm_in_kernel,
        x.use_beta_sigmoid_in_kernel,
        x.allow_neg_eigval,
        x.state_v_first,
        x.use_gate_in_kernel,
    )
    return (
        schema_takes(x[:_TENSORS], x[:5], x.scale)
        and all(flag is True or flag is False for flag in flags)
        and type(x.chunk_size) is int
    )
