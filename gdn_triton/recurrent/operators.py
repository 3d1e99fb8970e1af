"""The recurrence as operators of torch's library. A compiler sees only these operators.

The operators are opaque, for the reasons that `gdn_triton.chunk.operators` gives. The
implementation of an operator validates the call and chooses the backend at every run, and its fake
validates only shapes. `import gdn_triton` imports this module.

- `gdn_triton::fused_recurrent_fwd`, with the gradient `gdn_triton::fused_recurrent_bwd`, which runs
  the forward again in a backend that has gradients.
- `gdn_triton::recurrent_step` writes its states, and `gdn_triton::recurrent_step_out` also writes
  its output.
- `gdn_triton::recurrent_step_window` and `gdn_triton::recurrent_step_window_out` also write
  records.
- `gdn_triton::fold_window`, `gdn_triton::restart_window` and `gdn_triton::accept_window` are the
  functions of these names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from gdn_triton._host.memory import operator_counts_writes
from gdn_triton._host.records import Arguments, Options, arguments_of, flat, made, state_needs_grad
from gdn_triton._host.replay import replayed_gradients
from gdn_triton._host.schema import schema_takes
from gdn_triton.recurrent.plans import run_fold, run_sequences, run_step
from gdn_triton.recurrent.problem import (
    DIFFERENTIABLE,
    WINDOW,
    WINDOW_AND_SCALES,
    FoldCall,
    SequenceCall,
    StepCall,
    sequence_call,
)
from gdn_triton.recurrent.validation import validate_sequences, validate_step
from gdn_triton.recurrent.validation_window import validate_fold

_SEQUENCES: Final = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gk, Tensor? gv, Tensor? beta, "
    "Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, Tensor? cu_seqlens, float? scale, "
    "bool output_final_state, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel, "
    "bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, bool state_v_first"
)


_ARGUMENTS: Final = arguments_of(_SEQUENCES)


def _differentiable(given: Mapping[str, Any]) -> list[Any]:
    return [given[name] for name in DIFFERENTIABLE]


@torch.library.custom_op(
    "gdn_triton::fused_recurrent_fwd",
    mutates_args=(),
    # An operator cannot return None, so a final state that was not asked for is an empty tensor of
    # shape [0]. The gradient is defined outside of the implementation, which cannot see whether a
    # gradient is needed.
    schema=f"({_SEQUENCES}, bool needs_grad) -> (Tensor o, Tensor final_state)",
)
def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    *values, needs_grad = args
    o, final_state = run_sequences(sequence_call(_ARGUMENTS.named(values), needs_grad))
    return o, o.new_empty(0, dtype=torch.float32) if final_state is None else final_state


@_forward.register_fake
def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    *values, _ = args
    call = sequence_call(_ARGUMENTS.named(values))
    p = validate_sequences(call)
    o = call.inputs.v.new_empty(p.B, p.T, p.HV, p.V)
    if not p.output_final_state:
        return o, o.new_empty(0, dtype=torch.float32)
    state = (p.N, p.HV, p.V, p.K) if p.state_v_first else (p.N, p.HV, p.K, p.V)
    return o, o.new_empty(state, dtype=p.state_dtype)


@torch.library.custom_op(
    "gdn_triton::fused_recurrent_bwd",
    mutates_args=(),
    # There is one gradient for each operand that requires one, in the order of the differentiable
    # operands.
    schema=f"(Tensor? do, Tensor? dht, {_SEQUENCES}, bool[] wanted) -> Tensor[]",
)
def _backward(do: Tensor | None, dht: Tensor | None, *args: Any) -> list[Tensor]:
    *values, wanted = args
    given = _ARGUMENTS.named(values)

    def run(*leaves: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return run_sequences(
            sequence_call({**given, **dict(zip(DIFFERENTIABLE, leaves, strict=True))})
        )

    return replayed_gradients(run, _differentiable(given), wanted, (do, dht))


@_backward.register_fake
def _backward_fake(do: Tensor | None, dht: Tensor | None, *args: Any) -> list[Tensor]:
    *values, wanted = args
    tensors = zip(_differentiable(_ARGUMENTS.named(values)), wanted, strict=True)
    return [x.new_empty(x.shape) for x, want in tensors if want and x is not None]


def _needed(ctx: Any) -> dict[str, bool]:
    """Returns which arguments need a gradient. torch's list has more entries than the call has
    arguments."""
    needed = dict(zip(_ARGUMENTS.names, ctx.needs_input_grad, strict=False))
    return {name: needed[name] for name in DIFFERENTIABLE}


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *values, _ = inputs
    given = _ARGUMENTS.named(values)
    ctx.save_for_backward(*(given.pop(name) for name in _ARGUMENTS.tensors))
    ctx.rest = given
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
        "gdn_triton.fused_recurrent_gated_delta_rule has no second derivative under a compiler: "
        "call it outside of one, with GDN_BACKEND=reference"
    )


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_differentiate_twice)


def traced_sequences(call: SequenceCall) -> tuple[Tensor, Tensor | None]:
    """Runs `gdn_triton.fused_recurrent_gated_delta_rule` through its operator."""
    given = flat(call)
    given["initial_state"] = given.pop("state")
    if not _fits(given, ("output_final_state", *Options._fields), _ARGUMENTS, ("q", "k", "v")):
        validate_sequences(call)
    needs_grad = torch.is_grad_enabled() and any(
        y is not None and y.requires_grad for y in _differentiable(given)
    )
    values = _ARGUMENTS.ordered(_converted(given))
    o, final_state = torch.ops.gdn_triton.fused_recurrent_fwd(*values, needs_grad)
    return o, final_state if call.output_final_state else None


# ------------------------------------------------------------------------------------------- steps

_STEP: Final = (
    "Tensor q, Tensor? k, Tensor? v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, "
    "Tensor(a!) state, Tensor read_slots, Tensor? write_slots, Tensor? num_accepted_tokens, "
    "Tensor? parents, Tensor? cu_seqlens{out}, bool is_mixed, bool is_raw, float? scale, "
    "bool use_qk_l2norm_in_kernel, bool allow_neg_eigval, bool state_v_first, str skip"
)
_STEP_FLAGS: Final = ("use_qk_l2norm_in_kernel", "allow_neg_eigval", "state_v_first")
_NEW: Final = _STEP.format(out="")
_OUT: Final = _STEP.format(out=", Tensor(b!) out")
_STEP_ARGUMENTS: Final = arguments_of(_NEW)
_OUT_ARGUMENTS: Final = arguments_of(_OUT)

_ROWS: Final = (
    "Tensor(c!) u_rows, Tensor(d!) k_rows, Tensor(e!) g_rows, Tensor(f!) call_rows, Tensor start, "
    "Tensor(g!)? scales"
)
_WINDOW_STEP: Final = _STEP.replace("Tensor? write_slots, Tensor? num_accepted_tokens, ", "")
_WINDOW_NEW: Final = f"{_WINDOW_STEP.format(out='')}, Tensor positions, {_ROWS}, int max_tokens"
_WINDOW_OUT: Final = _WINDOW_NEW.replace("? cu_seqlens", "? cu_seqlens, Tensor(b!) out")
_WINDOW_ARGUMENTS: Final = arguments_of(_WINDOW_NEW)
_WINDOW_OUT_ARGUMENTS: Final = arguments_of(_WINDOW_OUT)


def _step_call(given: Mapping[str, Any]) -> StepCall:
    """Builds the call from the arguments of `_STEP` or `_WINDOW_STEP`. A mixed tensor is passed as
    q."""
    absent = dict.fromkeys(
        ("gk", "gv", "out", "write_slots", "num_accepted_tokens", "positions", "max_tokens")
    )
    absent |= dict.fromkeys(WINDOW_AND_SCALES)
    mixed = dict.fromkeys(("k", "v"), given["q"]) if given["is_mixed"] else {}
    raw = {"use_beta_sigmoid_in_kernel": given["is_raw"], "use_gate_in_kernel": given["is_raw"]}
    return made(StepCall, {**absent, **given, **mixed, **raw})


@torch.library.custom_op(
    "gdn_triton::recurrent_step",
    mutates_args=("state",),
    schema=f"({_NEW}) -> Tensor",
)
def _step(*args: Any) -> Tensor:
    with operator_counts_writes():
        return run_step(_step_call(_STEP_ARGUMENTS.named(args)))


@_step.register_fake
def _step_fake(*args: Any) -> Tensor:
    return _step_output(_step_call(_STEP_ARGUMENTS.named(args)))


def _step_output(call: StepCall) -> Tensor:
    p, v = validate_step(call), call.inputs.v
    lead = v.shape[:-1] if p.is_mixed else v.shape[:-2]
    return v.new_empty(*lead, p.HV, p.V)


@torch.library.custom_op(
    "gdn_triton::recurrent_step_out",
    mutates_args=("state", "out"),
    schema=f"({_OUT}) -> ()",
)
def _step_out(*args: Any) -> None:
    with operator_counts_writes():
        run_step(_step_call(_OUT_ARGUMENTS.named(args)))


@_step_out.register_fake
def _step_out_fake(*args: Any) -> None:
    validate_step(_step_call(_OUT_ARGUMENTS.named(args)))


@torch.library.custom_op(
    "gdn_triton::recurrent_step_window",
    mutates_args=("state", "u_rows", "k_rows", "g_rows", "call_rows", "scales"),
    schema=f"({_WINDOW_NEW}) -> Tensor",
)
def _window_step(*args: Any) -> Tensor:
    with operator_counts_writes():
        return run_step(_step_call(_WINDOW_ARGUMENTS.named(args)))


@_window_step.register_fake
def _window_step_fake(*args: Any) -> Tensor:
    return _step_output(_step_call(_WINDOW_ARGUMENTS.named(args)))


@torch.library.custom_op(
    "gdn_triton::recurrent_step_window_out",
    mutates_args=("state", "out", "u_rows", "k_rows", "g_rows", "call_rows", "scales"),
    schema=f"({_WINDOW_OUT}) -> ()",
)
def _window_step_out(*args: Any) -> None:
    with operator_counts_writes():
        run_step(_step_call(_WINDOW_OUT_ARGUMENTS.named(args)))


@_window_step_out.register_fake
def _window_step_out_fake(*args: Any) -> None:
    validate_step(_step_call(_WINDOW_OUT_ARGUMENTS.named(args)))


def traced_step(call: StepCall) -> Tensor:
    """Runs `gdn_triton.recurrent_step` through its operator."""
    x, given = call.inputs, flat(call)
    if not torch.compiler.is_compiling():
        # torch counts the writes of an operator before it finds that a tensor is on another device.
        validate_step(call)
    given["is_raw"] = call.options.use_gate_in_kernel
    needs_grad = torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in x)
    required = ["q", "k", "v", "g", "beta", "state", "read_slots"]
    has_window = call.max_tokens is not None
    if has_window:
        required += ["positions", *WINDOW]
    # The operator without a window has no argument for positions, and the operator with a window
    # has none for write_slots.
    elsewhere = (x.write_slots, x.num_accepted_tokens) if has_window else (x.positions,)
    arguments = _WINDOW_OUT_ARGUMENTS if has_window else _OUT_ARGUMENTS
    if (
        needs_grad
        or not _fits(given, _STEP_FLAGS, arguments, required)
        or type(call.skip) is not str
        or any(y is not None for y in elsewhere)
        or (has_window and type(call.max_tokens) is not int)
    ):
        validate_step(call)
    given = _converted(given)
    if call.is_mixed:
        given["k"] = given["v"] = None
    operators = torch.ops.gdn_triton
    if x.out is None:
        if has_window:
            o: Tensor = operators.recurrent_step_window(*_WINDOW_ARGUMENTS.ordered(given))
        else:
            o = operators.recurrent_step(*_STEP_ARGUMENTS.ordered(given))
        return o
    if has_window:
        operators.recurrent_step_window_out(*arguments.ordered(given))
    else:
        operators.recurrent_step_out(*arguments.ordered(given))
    return x.out


# ------------------------------------------------------------------------------------------- folds

_FOLDED: Final = (
    "Tensor u_rows, Tensor k_rows, Tensor g_rows, Tensor call_rows, Tensor(b!) start, "
    "Tensor slots, Tensor positions, int max_tokens, bool state_v_first, str skip"
)
_FOLD: Final = f"Tensor(a!) state, Tensor(c!)? scales, {_FOLDED}"
_FOLD_ARGUMENTS: Final = arguments_of(_FOLD)
_RESTART_ARGUMENTS: Final = arguments_of(_FOLDED)
_ACCEPT: Final = (
    "Tensor(a!) u_rows, Tensor(b!) k_rows, Tensor(c!) g_rows, Tensor call_rows, Tensor start, "
    "Tensor slots, Tensor positions, Tensor path, int max_tokens, bool state_v_first, str skip"
)
_ACCEPT_ARGUMENTS: Final = arguments_of(_ACCEPT)


@torch.library.custom_op(
    "gdn_triton::fold_window", mutates_args=("state", "start", "scales"), schema=f"({_FOLD}) -> ()"
)
def _fold(*args: Any) -> None:
    with operator_counts_writes():
        run_fold(_fold_call(_FOLD_ARGUMENTS, args), folds=True)


@_fold.register_fake
def _fold_fake(*args: Any) -> None:
    validate_fold(_fold_call(_FOLD_ARGUMENTS, args), folds=True)


def _fold_call(arguments: Arguments, args: Sequence[Any]) -> FoldCall:
    return made(FoldCall, {"state": None, "scales": None, "path": None, **arguments.named(args)})


@torch.library.custom_op(
    "gdn_triton::restart_window", mutates_args=("start",), schema=f"({_FOLDED}) -> ()"
)
def _restart(*args: Any) -> None:
    with operator_counts_writes():
        run_fold(_fold_call(_RESTART_ARGUMENTS, args), folds=False)


@_restart.register_fake
def _restart_fake(*args: Any) -> None:
    validate_fold(_fold_call(_RESTART_ARGUMENTS, args), folds=False)


@torch.library.custom_op(
    "gdn_triton::accept_window",
    mutates_args=("u_rows", "k_rows", "g_rows"),
    schema=f"({_ACCEPT}) -> ()",
)
def _accept(*args: Any) -> None:
    with operator_counts_writes():
        run_fold(_fold_call(_ACCEPT_ARGUMENTS, args), folds=False)


@_accept.register_fake
def _accept_fake(*args: Any) -> None:
    validate_fold(_fold_call(_ACCEPT_ARGUMENTS, args), folds=False)


def traced_fold(call: FoldCall, *, folds: bool) -> None:
    """Runs `gdn_triton.fold_window`, `gdn_triton.restart_window` or, with a path,
    `gdn_triton.accept_window` through its operator."""
    given = flat(call)
    if not torch.compiler.is_compiling():
        # torch counts the writes of an operator before it finds that a tensor is on another device.
        validate_fold(call, folds=folds)
    operators = torch.ops.gdn_triton
    if call.inputs.path is not None:
        arguments, operator = _ACCEPT_ARGUMENTS, operators.accept_window
    elif folds:
        arguments, operator = _FOLD_ARGUMENTS, operators.fold_window
    else:
        arguments, operator = _RESTART_ARGUMENTS, operators.restart_window
    needs_grad = torch.is_grad_enabled() and any(
        isinstance(y, Tensor) and y.requires_grad for y in call.inputs
    )
    if (
        needs_grad
        or any(not isinstance(given[name], Tensor) for name in arguments.tensors)
        or type(call.max_tokens) is not int
        or type(call.state_v_first) is not bool
        or type(call.skip) is not str
    ):
        validate_fold(call, folds=folds)
    operator(*arguments.ordered(given))


# ------------------------------------------------------------------------------------ under a trace


def _fits(
    given: Mapping[str, Any], flags: Sequence[str], arguments: Arguments, required: Sequence[str]
) -> bool:
    """Returns whether an operator accepts the arguments without a conversion."""
    return schema_takes(given, arguments.tensors, required) and all(
        given[name] is True or given[name] is False for name in flags
    )


def _converted(given: Mapping[str, Any]) -> dict[str, Any]:
    scale = given["scale"]
    return {**given, "scale": None if scale is None else float(scale)}
