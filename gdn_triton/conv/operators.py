"""The convolution as operators of torch's library. A compiler sees these operators only.

As in `gdn_triton.chunk.operators`, which gives the reasons, an operator is opaque. Its
implementation validates the call and chooses the backend at every run, and its fake validates
shapes only. `import gdn_triton` imports this module. The operators that write states have no
gradient. The others are

- `gdn_triton::causal_conv1d`, with the gradient `gdn_triton::causal_conv1d_bwd`;
- `gdn_triton::fused_conv_prep`, for calls without gradients. With gradients a trace has one
operator for the convolution and one for the preparation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from gdn_triton._host.memory import operator_counts_writes
from gdn_triton._host.records import arguments_of, made
from gdn_triton._host.replay import replayed_gradients
from gdn_triton.conv.backends import run_conv
from gdn_triton.conv.prep import of_sequences, run_conv_prep
from gdn_triton.conv.validation import (
    PLAIN,
    STEP,
    ConvArguments,
    Form,
    PrepArguments,
    prep_needs_grad,
    validate_conv,
    validate_conv_prep,
)
from gdn_triton.prep.operators import traced
from gdn_triton.prep.problem import PreparedInputs

_CONV: Final = "Tensor x, Tensor weight, Tensor? bias, str? activation"
_STATE: Final = (
    "Tensor(a!) state, Tensor? read_slots, Tensor? write_slots, Tensor? has_initial_state, str skip"
)
_PREP: Final = (
    "Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, int num_k_heads, int head_k_dim, "
    "int head_v_dim, bool apply_l2norm, bool output_g_exp"
)
_PREPARED: Final = "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta)"


_OF_STATES: Final = (
    *("state", "read_slots", "write_slots", "has_initial_state"),
    *("num_accepted_tokens", "parents"),
)
# The arguments of each operator, with the names that they have in the records of a call.
_CONV_ARGUMENTS: Final = arguments_of(f"{_CONV}, Tensor? cu_seqlens")
_STATES: Final = (
    f"{_CONV}, {_STATE}, Tensor? cu_seqlens, Tensor? num_accepted_tokens, Tensor? parents, "
    "bool is_step"
)
_STATE_ARGUMENTS: Final = arguments_of(_STATES)
_PREP_ARGUMENTS: Final = arguments_of(f"{_CONV}, Tensor? cu_seqlens, {_PREP}")
_PREP_STATE_ARGUMENTS: Final = arguments_of(f"{_CONV}, {_STATE}, Tensor? cu_seqlens, {_PREP}")
_TRAINED: Final = ("x", "weight", "bias")


def _given(given: Mapping[str, Any]) -> ConvArguments:
    """The record of a call from the arguments of its operator, which may lack the arguments of a
    state."""
    return made(ConvArguments, {**dict.fromkeys(_OF_STATES), "skip": "negative", **given})


# ------------------------------------------------------------------------------- without a state


@torch.library.custom_op(
    "gdn_triton::causal_conv1d",
    mutates_args=(),
    schema=f"({_CONV}, Tensor? cu_seqlens) -> Tensor",
)
def _conv(*args: Any) -> Tensor:
    return run_conv(_given(_CONV_ARGUMENTS.named(args)))


@_conv.register_fake
def _conv_fake(*args: Any) -> Tensor:
    validate_conv(_given(_CONV_ARGUMENTS.named(args)), PLAIN)
    return args[0].new_empty(args[0].shape)


@torch.library.custom_op(
    "gdn_triton::causal_conv1d_bwd",
    mutates_args=(),
    # There is one gradient for each argument that requires one, in the order x, weight, bias.
    schema=f"(Tensor dy, {_CONV}, Tensor? cu_seqlens, bool[] wanted) -> Tensor[]",
)
def _conv_backward(dy: Tensor, *args: Any) -> list[Tensor]:
    *values, wanted = args
    given = _CONV_ARGUMENTS.named(values)

    def run(*leaves: Tensor | None) -> tuple[Tensor]:
        return (run_conv(_given({**given, **dict(zip(_TRAINED, leaves, strict=True))})),)

    return replayed_gradients(run, [given[name] for name in _TRAINED], wanted, (dy,))


@_conv_backward.register_fake
def _conv_backward_fake(dy: Tensor, *args: Any) -> list[Tensor]:
    *values, wanted = args
    given = _CONV_ARGUMENTS.named(values)
    trained = zip((given[name] for name in _TRAINED), wanted, strict=True)
    return [x.new_empty(x.shape) for x, want in trained if want and x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    given = _CONV_ARGUMENTS.named(inputs)
    ctx.save_for_backward(*(given.pop(name) for name in _CONV_ARGUMENTS.tensors))
    ctx.rest = given


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needed = dict(zip(_CONV_ARGUMENTS.names, ctx.needs_input_grad, strict=False))
    tensors = dict(zip(_CONV_ARGUMENTS.tensors, ctx.saved_tensors, strict=True))
    values = _CONV_ARGUMENTS.ordered({**tensors, **ctx.rest})
    gradients = iter(_conv_backward(dy, *values, [needed[name] for name in _TRAINED]))
    found = {name: next(gradients) for name in _TRAINED if needed[name]}
    return tuple(found.get(name) for name in _CONV_ARGUMENTS.names)


def _differentiate_twice(ctx: Any, *gradients: Any) -> NoReturn:
    raise RuntimeError(
        "gdn_triton.causal_conv1d has no second derivative under a compiler: call it outside of "
        "one, with GDN_BACKEND=reference"
    )


_conv.register_autograd(_differentiate, setup_context=_save)
_conv_backward.register_autograd(_differentiate_twice)


# ----------------------------------------------------------------------------------- with a state


def _with_state(args: Sequence[Any]) -> tuple[ConvArguments, Form]:
    given = _STATE_ARGUMENTS.named(args)
    return _given(given), STEP if given["is_step"] else PLAIN


@torch.library.custom_op(
    "gdn_triton::causal_conv1d_state",
    mutates_args=("state",),
    schema=f"({_STATES}) -> Tensor",
)
def _conv_state(*args: Any) -> Tensor:
    with operator_counts_writes():
        return run_conv(*_with_state(args))


@_conv_state.register_fake
def _conv_state_fake(*args: Any) -> Tensor:
    validate_conv(*_with_state(args))
    return args[0].new_empty(args[0].shape)


# ----------------------------------------------------------------------------- and the preparation


def _prepared_fake(args: ConvArguments, prep: PrepArguments) -> PreparedInputs:
    sizes = validate_conv_prep(args, prep)[1]
    x, lead = args.x, args.x.shape[:-1]
    keys = (*lead, sizes.H, sizes.K)
    v = x.new_empty((*lead, sizes.HV, sizes.V))
    wide = torch.float64 if sizes.wide else torch.float32
    gates = (*lead, sizes.HV)
    new = x.new_empty
    return new(keys), new(keys), v, new(gates, dtype=wide), new(gates, dtype=wide)


@torch.library.custom_op(
    "gdn_triton::fused_conv_prep",
    mutates_args=(),
    schema=f"({_CONV}, Tensor? cu_seqlens, {_PREP}) -> {_PREPARED}",
)
def _prep(*args: Any) -> PreparedInputs:
    given = _PREP_ARGUMENTS.named(args)
    return run_conv_prep(_given(given), made(PrepArguments, given))


@_prep.register_fake
def _prep_fake(*args: Any) -> PreparedInputs:
    given = _PREP_ARGUMENTS.named(args)
    return _prepared_fake(_given(given), made(PrepArguments, given))


@torch.library.custom_op(
    "gdn_triton::fused_conv_prep_state",
    mutates_args=("state",),
    schema=f"({_CONV}, {_STATE}, Tensor? cu_seqlens, {_PREP}) -> {_PREPARED}",
)
def _prep_state(*args: Any) -> PreparedInputs:
    given = _PREP_STATE_ARGUMENTS.named(args)
    with operator_counts_writes():
        return run_conv_prep(_given(given), made(PrepArguments, given))


@_prep_state.register_fake
def _prep_state_fake(*args: Any) -> PreparedInputs:
    given = _PREP_STATE_ARGUMENTS.named(args)
    return _prepared_fake(_given(given), made(PrepArguments, given))


# ------------------------------------------------------------------------------------ under a trace


def _judged(args: ConvArguments, form: Form) -> bool:
    """Validates a call, whose values of a wrong type a schema would convert, and returns whether it
    has a state. Raises NotImplementedError for a gradient of a call with a state."""
    problem = validate_conv(args, form)
    if problem.has_state and problem.needs_grad:
        raise NotImplementedError(
            "gdn_triton.causal_conv1d with a state has no gradient under a compiler; an input "
            "requires one. Call under torch.no_grad(), or without a state"
        )
    return problem.has_state


def traced_conv(args: ConvArguments, form: Form = PLAIN) -> Tensor:
    """Runs `gdn_triton.causal_conv1d` or `causal_conv1d_update` through its operator."""
    if _judged(args, form) or form.is_step:
        given = {**args._asdict(), "is_step": form.is_step}
        y: Tensor = torch.ops.gdn_triton.causal_conv1d_state(*_STATE_ARGUMENTS.ordered(given))
        return y
    y = torch.ops.gdn_triton.causal_conv1d(*_CONV_ARGUMENTS.ordered(args._asdict()))
    return y


def traced_conv_prep(args: ConvArguments, prep: PrepArguments) -> PreparedInputs:
    """Runs `gdn_triton.fused_conv_prep` through its operator or, with gradients, through the
    operators of its two parts."""
    problem, _ = validate_conv_prep(args, prep)
    given = {**args._asdict(), **prep._asdict()}
    if prep_needs_grad(problem, prep):
        y = traced_conv(args)
        prep = prep._replace(a=prep.a.flatten(0, -2), b=prep.b.flatten(0, -2))
        flat = y.flatten(0, -2)
        parts = of_sequences(args.cu_seqlens, prep, lambda given: traced(flat, *given))
        q, k, v, g, beta = (x.unflatten(0, args.x.shape[:-1]) for x in parts)
    elif args.state is None:
        q, k, v, g, beta = torch.ops.gdn_triton.fused_conv_prep(*_PREP_ARGUMENTS.ordered(given))
    else:
        q, k, v, g, beta = torch.ops.gdn_triton.fused_conv_prep_state(
            *_PREP_STATE_ARGUMENTS.ordered(given)
        )
    return q, k, v, g, beta
