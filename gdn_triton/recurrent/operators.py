"""The recurrence as operators of torch's library, which is what a compiler sees of it.

As `gdn_triton.chunk.operators`, which says why: an operator is opaque, its implementation judges
the call and chooses the backend at every run, and its fake judges shapes only. Imported by
`import gdn_triton`.

- `gdn_triton::fused_recurrent_fwd`, with the gradient `gdn_triton::fused_recurrent_bwd`, which runs
  the forward again in the backend that serves calls that need gradients.
- `gdn_triton::recurrent_step` writes its states, `gdn_triton::recurrent_step_out` also its output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from gdn_triton._host.memory import operator_counts_writes
from gdn_triton._host.replay import replayed_gradients
from gdn_triton._host.schema import schema_takes
from gdn_triton.recurrent.plans import SequenceOptions, StepOptions, run_sequences, run_step
from gdn_triton.recurrent.problem import Operands
from gdn_triton.recurrent.validation import validate_sequences, validate_step

# The operands of a sequence call: those that may have gradients come first.
_DIFFERENTIABLE: Final = 10
_TENSORS: Final = 11
_SEQUENCES = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gk, Tensor? gv, Tensor? beta, "
    "Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, Tensor? cu_seqlens, float? scale, "
    "bool output_final_state, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel, "
    "bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, bool state_v_first"
)


def _sequences(args: Sequence[Any]) -> tuple[Operands, SequenceOptions]:
    """The records of a sequence call, from the arguments of `_SEQUENCES`."""
    x = Operands(*args[:_DIFFERENTIABLE])._replace(cu_seqlens=args[_DIFFERENTIABLE])
    return x, SequenceOptions(*args[_TENSORS:])


@torch.library.custom_op(
    "gdn_triton::fused_recurrent_fwd",
    mutates_args=(),
    # An operator cannot return None: a final state that was not asked for is empty, of shape [0].
    # Gradients are defined outside of the implementation, which cannot see whether one is needed.
    schema=f"({_SEQUENCES}, bool needs_grad) -> (Tensor o, Tensor final_state)",
)
def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    x, options = _sequences(args[:-1])
    o, final_state = run_sequences(x, options, needs_grad=args[-1])
    return o, x.q.new_empty(0, dtype=torch.float32) if final_state is None else final_state


@_forward.register_fake
def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    x, options = _sequences(args[:-1])
    p = validate_sequences(x, **options._asdict())
    o = x.v.new_empty(p.B, p.T, p.HV, p.V)
    if not p.output_final_state:
        return o, x.q.new_empty(0, dtype=torch.float32)
    state = (p.N, p.HV, p.V, p.K) if p.state_v_first else (p.N, p.HV, p.K, p.V)
    return o, x.q.new_empty(state, dtype=p.state_dtype)


@torch.library.custom_op(
    "gdn_triton::fused_recurrent_bwd",
    mutates_args=(),
    # One gradient for each operand that wants one, in the order of the differentiable operands.
    schema=f"(Tensor? do, Tensor? dht, {_SEQUENCES}, bool[] wanted) -> Tensor[]",
)
def _backward(do: Tensor | None, dht: Tensor | None, *args: Any) -> list[Tensor]:
    return replayed_gradients(
        lambda *leaves: run_sequences(*_sequences((*leaves, *args[_DIFFERENTIABLE:-1]))),
        args[:_DIFFERENTIABLE],
        args[-1],
        (do, dht),
    )


@_backward.register_fake
def _backward_fake(do: Tensor | None, dht: Tensor | None, *args: Any) -> list[Tensor]:
    operands = zip(args[:_DIFFERENTIABLE], args[-1], strict=True)
    return [x.new_empty(x.shape) for x, want in operands if want and x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS])
    ctx.rest = inputs[_TENSORS:-1]
    ctx.set_materialize_grads(False)
    # The final state depends on every input but q: it needs no gradient when q alone does.
    asked = SequenceOptions(*ctx.rest).output_final_state
    if not asked or not any(ctx.needs_input_grad[1:_DIFFERENTIABLE]):
        ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:_DIFFERENTIABLE])
    gradients = iter(_backward(do, dht, *ctx.saved_tensors, *ctx.rest, wanted))
    others = [None] * (_TENSORS + len(ctx.rest) + 1 - _DIFFERENTIABLE)
    return (*(next(gradients) if want else None for want in wanted), *others)


def _differentiate_twice(ctx: Any, *gradients: Any) -> NoReturn:
    raise RuntimeError(
        "gdn_triton.fused_recurrent_gated_delta_rule has no second derivative under a compiler: "
        "call it outside of one, with GDN_BACKEND=reference"
    )


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_differentiate_twice)


def traced_sequences(x: Operands, options: SequenceOptions) -> tuple[Tensor, Tensor | None]:
    """`gdn_triton.fused_recurrent_gated_delta_rule` through its operator."""
    differentiable = x[:_DIFFERENTIABLE]
    if not _fits(x, options, ("q", "k", "v")):
        validate_sequences(x, **options._asdict())
    needs_grad = torch.is_grad_enabled() and any(
        y is not None and y.requires_grad for y in differentiable
    )
    o, final_state = torch.ops.gdn_triton.fused_recurrent_fwd(
        *differentiable, x.cu_seqlens, *_converted(options), needs_grad
    )
    return o, final_state if options.output_final_state else None


# ------------------------------------------------------------------------------------------- steps

_STEP = (
    "Tensor q, Tensor? k, Tensor? v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, "
    "Tensor(a!) state, Tensor read_slots, Tensor? write_slots, Tensor? num_accepted_tokens, "
    "Tensor? cu_seqlens{out}, "
    "bool is_mixed, bool is_raw, float? scale, bool use_qk_l2norm_in_kernel, "
    "bool allow_neg_eigval, bool state_v_first, str skip"
)
# The tensors of it, without out.
_STEP_TENSORS: Final = 12


def _step_call(args: Sequence[Any], out: Tensor | None = None) -> tuple[Operands, StepOptions]:
    """The records of a step, from the arguments of `_STEP` but out. A mixed tensor came as q
    alone."""
    q, k, v, g, beta, A_log, dt_bias = args[:7]
    state, read_slots, write_slots, accepted, cu_seqlens = args[7:_STEP_TENSORS]
    options = StepOptions(*args[_STEP_TENSORS:])
    if options.is_mixed:
        k = v = q
    slots = state, read_slots, write_slots
    rest = cu_seqlens, out, accepted
    return Operands(q, k, v, g, None, None, beta, A_log, dt_bias, *slots, *rest), options


def _step_out_call(args: Sequence[Any]) -> tuple[Operands, StepOptions]:
    """From the arguments of `_STEP`, with out."""
    others = (*args[:_STEP_TENSORS], *args[_STEP_TENSORS + 1 :])
    return _step_call(others, out=args[_STEP_TENSORS])


@torch.library.custom_op(
    "gdn_triton::recurrent_step",
    mutates_args=("state",),
    schema=f"({_STEP.format(out='')}) -> Tensor",
)
def _step(*args: Any) -> Tensor:
    with operator_counts_writes():
        return run_step(*_step_call(args))


@_step.register_fake
def _step_fake(*args: Any) -> Tensor:
    x, options = _step_call(args)
    p = validate_step(x, **options._asdict())
    lead = x.v.shape[:-1] if p.is_mixed else x.v.shape[:-2]
    return x.v.new_empty(*lead, p.HV, p.V)


@torch.library.custom_op(
    "gdn_triton::recurrent_step_out",
    mutates_args=("state", "out"),
    schema=f"({_STEP.format(out=', Tensor(b!) out')}) -> ()",
)
def _step_out(*args: Any) -> None:
    with operator_counts_writes():
        run_step(*_step_out_call(args))


@_step_out.register_fake
def _step_out_fake(*args: Any) -> None:
    x, options = _step_out_call(args)
    validate_step(x, **options._asdict())


def traced_step(x: Operands, options: StepOptions) -> Tensor:
    """`gdn_triton.recurrent_step` through its operator."""
    needs_grad = torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in x)
    if needs_grad or not _fits(x, options, ("q", "k", "v", "g", "beta", "state", "read_slots")):
        validate_step(x, **options._asdict())
    tensors = (
        x.q,
        None if options.is_mixed else x.k,
        None if options.is_mixed else x.v,
        x.g,
        x.beta,
        x.A_log,
        x.dt_bias,
        x.state,
        x.read_slots,
        x.write_slots,
        x.num_accepted_tokens,
        x.cu_seqlens,
    )
    if x.out is None:
        o: Tensor = torch.ops.gdn_triton.recurrent_step(*tensors, *_converted(options))
        return o
    torch.ops.gdn_triton.recurrent_step_out(*tensors, x.out, *_converted(options))
    return x.out


# ------------------------------------------------------------------------------------ under a trace


def _fits(x: Operands, options: SequenceOptions | StepOptions, required: Sequence[str]) -> bool:
    """Whether an operator takes the arguments as they are."""
    others = options._replace(scale=None)
    return schema_takes(x, [getattr(x, name) for name in required], options.scale) and all(
        y is None or y is True or y is False or type(y) is str for y in others
    )


def _converted(options: SequenceOptions | StepOptions) -> tuple[Any, ...]:
    scale = options.scale
    return tuple(options._replace(scale=None if scale is None else float(scale)))
