"""`gdn_triton.layer_step` as an operator of torch's library. A compiler sees this operator only.

As in `gdn_triton.recurrent.operators`, `gdn_triton::layer_step` is opaque, and validates its
arguments and chooses its backend at every run. A call with a window runs its parts, each as its own
operator. `import gdn_triton` imports this module.
"""

from typing import Any, Final

import torch
from torch import Tensor

from gdn_triton._host.memory import operator_counts_writes
from gdn_triton._host.records import arguments_of, flat, made
from gdn_triton._host.schema import schema_takes
from gdn_triton.step import parts
from gdn_triton.step.plans import run_layer
from gdn_triton.step.problem import LayerCall
from gdn_triton.step.validation import validate_layer

_SCHEMA: Final = (
    "Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor? dt_bias, Tensor(a!) state, "
    "Tensor read_slots, Tensor(b!)? conv_state, Tensor? conv_weight, Tensor? conv_bias, "
    "Tensor? gate, Tensor? norm_weight, str? activation, float norm_eps, str norm_activation, "
    "bool allow_neg_eigval, bool use_qk_l2norm_in_kernel, float? scale, bool state_v_first, "
    "str skip"
)
_ARGUMENTS: Final = arguments_of(_SCHEMA)
_REQUIRED: Final = ("mixed_qkv", "a", "b", "A_log", "state", "read_slots")
_NO_WINDOW: Final = {"window": None, "positions": None}


def _call(args: Any) -> LayerCall:
    return made(LayerCall, {**_ARGUMENTS.named(args), **_NO_WINDOW})


@torch.library.custom_op(
    "gdn_triton::layer_step",
    mutates_args=("state", "conv_state"),
    schema=f"({_SCHEMA}) -> Tensor",
)
def _step(*args: Any) -> Tensor:
    with operator_counts_writes():
        return run_layer(_call(args))


@_step.register_fake
def _step_fake(*args: Any) -> Tensor:
    call = _call(args)
    p, x = validate_layer(call), call.inputs.mixed_qkv
    return x.new_empty(*x.shape[:-1], p.HV, p.V)


def traced_layer(call: LayerCall) -> Tensor:
    """Runs `gdn_triton.layer_step` through its operator, or through the operators of its parts."""
    # Validate first, because a schema would convert a value of a wrong type.
    if call.window is not None or call.positions is not None:
        validate_layer(call)
        return parts.run(call)
    given = flat(call)
    if not torch.compiler.is_compiling() or not schema_takes(given, _ARGUMENTS.tensors, _REQUIRED):
        validate_layer(call)
    options = call.options
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
    y: Tensor = torch.ops.gdn_triton.layer_step(*_ARGUMENTS.ordered(given))
    return y
