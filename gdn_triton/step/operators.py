"""`gdn_triton.layer_step` as an operator of torch's library. A compiler sees only this operator.

`gdn_triton::layer_step` is opaque, like the operators of `gdn_triton.recurrent.operators`: it
validates its arguments and chooses its backend at every run. `gdn_triton::layer_step_window` also
takes the tensors of a window. `layer_step_out` and `layer_step_window_out` write y to a given
tensor. `import gdn_triton` imports this module.
"""

from typing import Any, Final

import torch
from torch import Tensor

from gdn_triton._host.memory import operator_counts_writes
from gdn_triton._host.records import Arguments, arguments_of, flat, made
from gdn_triton._host.schema import schema_takes
from gdn_triton.recurrent.window import StepWindow
from gdn_triton.step.plans import run_layer
from gdn_triton.step.problem import LayerCall
from gdn_triton.step.validation import validate_layer

_PARTS: Final = (
    "Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor? dt_bias, Tensor(a!) state, "
    "Tensor read_slots, Tensor(b!)? conv_state, Tensor? conv_weight, Tensor? conv_bias, "
    "Tensor? gate, Tensor? norm_weight, Tensor(i!)? counters, str? activation, float norm_eps, "
    "str norm_activation, "
    "bool allow_neg_eigval, bool use_qk_l2norm_in_kernel, float? scale, bool state_v_first, "
    "str skip, Tensor? write_slots, Tensor? num_accepted_tokens, Tensor? parents, "
    "Tensor? cu_seqlens{out}"
)
_OF_WINDOW: Final = (
    "Tensor(c!) u, Tensor(d!) k, Tensor(e!) g, Tensor(f!) calls, Tensor start, "
    "int max_tokens, Tensor(g!)? scales, Tensor(h!)? tickets, Tensor positions"
)
_OUT: Final = ", Tensor(o!) out"
_SCHEMA: Final = f"{_PARTS.format(out='')}, int? max_tokens"
_OUT_SCHEMA: Final = f"{_PARTS.format(out=_OUT)}, int? max_tokens"
_WINDOW_SCHEMA: Final = f"{_PARTS.format(out='')}, {_OF_WINDOW}"
_WINDOW_OUT_SCHEMA: Final = f"{_PARTS.format(out=_OUT)}, {_OF_WINDOW}"
_ARGUMENTS: Final = arguments_of(_SCHEMA)
_OUT_ARGUMENTS: Final = arguments_of(_OUT_SCHEMA)
_WINDOW_ARGUMENTS: Final = arguments_of(_WINDOW_SCHEMA)
_WINDOW_OUT_ARGUMENTS: Final = arguments_of(_WINDOW_OUT_SCHEMA)
_WRITTEN: Final = ("state", "conv_state", "counters")
_WINDOW_WRITTEN: Final = (*_WRITTEN, "u", "k", "g", "calls", "scales", "tickets")
_REQUIRED: Final[tuple[str, ...]] = ("mixed_qkv", "a", "b", "A_log", "state", "read_slots")
_WINDOW_REQUIRED: Final = (*_REQUIRED, "u", "k", "g", "calls", "start", "positions")
_NO_WINDOW: Final = {"window": None, "positions": None}


def _call(arguments: Arguments, args: Any) -> LayerCall:
    return made(LayerCall, {"out": None, **arguments.named(args), **_NO_WINDOW})


def _window_call(arguments: Arguments, args: Any) -> LayerCall:
    given = arguments.named(args)
    window = {"window": made(StepWindow, given), "max_tokens": None}
    return made(LayerCall, {"out": None, **given, **window})


def _output(call: LayerCall) -> Tensor:
    p, x = validate_layer(call), call.inputs.mixed_qkv
    return x.new_empty(*x.shape[:-1], p.HV, p.V)


@torch.library.custom_op(
    "gdn_triton::layer_step",
    mutates_args=_WRITTEN,
    schema=f"({_SCHEMA}) -> Tensor",
)
def _step(*args: Any) -> Tensor:
    with operator_counts_writes():
        return run_layer(_call(_ARGUMENTS, args))


@_step.register_fake
def _step_fake(*args: Any) -> Tensor:
    return _output(_call(_ARGUMENTS, args))


@torch.library.custom_op(
    "gdn_triton::layer_step_out",
    mutates_args=(*_WRITTEN, "out"),
    schema=f"({_OUT_SCHEMA}) -> ()",
)
def _step_out(*args: Any) -> None:
    with operator_counts_writes():
        run_layer(_call(_OUT_ARGUMENTS, args))


@_step_out.register_fake
def _step_out_fake(*args: Any) -> None:
    validate_layer(_call(_OUT_ARGUMENTS, args))


@torch.library.custom_op(
    "gdn_triton::layer_step_window",
    mutates_args=_WINDOW_WRITTEN,
    schema=f"({_WINDOW_SCHEMA}) -> Tensor",
)
def _window_step(*args: Any) -> Tensor:
    with operator_counts_writes():
        return run_layer(_window_call(_WINDOW_ARGUMENTS, args))


@_window_step.register_fake
def _window_step_fake(*args: Any) -> Tensor:
    return _output(_window_call(_WINDOW_ARGUMENTS, args))


@torch.library.custom_op(
    "gdn_triton::layer_step_window_out",
    mutates_args=(*_WINDOW_WRITTEN, "out"),
    schema=f"({_WINDOW_OUT_SCHEMA}) -> ()",
)
def _window_step_out(*args: Any) -> None:
    with operator_counts_writes():
        run_layer(_window_call(_WINDOW_OUT_ARGUMENTS, args))


@_window_step_out.register_fake
def _window_step_out_fake(*args: Any) -> None:
    validate_layer(_window_call(_WINDOW_OUT_ARGUMENTS, args))


def traced_layer(call: LayerCall) -> Tensor:
    """Runs `gdn_triton.layer_step` through its operator."""
    # Validate first, because a schema would convert a value of a wrong type.
    given = flat(call)
    has_window = isinstance(call.window, StepWindow)
    options, out = call.options, call.inputs.out
    arguments, required = _ARGUMENTS if out is None else _OUT_ARGUMENTS, _REQUIRED
    if has_window:
        arguments = _WINDOW_ARGUMENTS if out is None else _WINDOW_OUT_ARGUMENTS
        required = _WINDOW_REQUIRED
    if (
        not torch.compiler.is_compiling()
        or (not has_window and (call.window is not None or call.positions is not None))
        or (has_window and type(call.window.max_tokens) is not int)
        or (options.max_tokens is not None and (has_window or type(options.max_tokens) is not int))
        or not schema_takes(given, arguments.tensors, required)
    ):
        validate_layer(call)
    flags = (
        options.allow_neg_eigval,
        options.use_qk_l2norm_in_kernel,
        options.state_v_first,
    )
    plain = all(flag is True or flag is False for flag in flags) and type(options.skip) is str
    if (
        not plain
        or type(options.norm_eps) is not float
        or type(options.norm_activation) is not str
        or (options.activation is not None and type(options.activation) is not str)
        or (torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in call.inputs))
    ):
        validate_layer(call)
    given["norm_eps"] = float(options.norm_eps)
    given["scale"] = None if options.scale is None else float(options.scale)
    operators = torch.ops.gdn_triton
    if out is not None:
        write = operators.layer_step_window_out if has_window else operators.layer_step_out
        write(*arguments.ordered(given))
        return out
    operator = operators.layer_step_window if has_window else operators.layer_step
    y: Tensor = operator(*arguments.ordered(given))
    return y
