"""Functions that name the backend of a call of any operator, and the reason. They run no kernel and
write no state."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch

from gdn_triton._host.arguments import must, refuse_head_first, value_of
from gdn_triton._host.backends import Explanation, Operator
from gdn_triton._host.contents import read_contents
from gdn_triton._host.deprecated import deprecated_state_layout
from gdn_triton._host.records import made
from gdn_triton._host.tensors import is_traced
from gdn_triton.chunk.api import chunk_gated_delta_rule
from gdn_triton.chunk.backends import CHUNK, PREFILL, SHARDED
from gdn_triton.chunk.prefill.api import chunk_prefill
from gdn_triton.chunk.prefill.validation import validate_prefill
from gdn_triton.chunk.problem import ChunkCall, Inputs, prefill_call
from gdn_triton.chunk.validation import validate_chunk
from gdn_triton.conv.api import causal_conv1d, causal_conv1d_update, fused_conv_prep
from gdn_triton.conv.backends import CONV, CONV_UPDATE
from gdn_triton.conv.prep import CONV_PREP, PrepProblem, prep_problem
from gdn_triton.conv.validation import PLAIN, ConvArguments, PrepArguments, validate_conv
from gdn_triton.conv.validation import STEP as CONV_STEP
from gdn_triton.norm.api import rms_norm_gated
from gdn_triton.norm.backends import NORM
from gdn_triton.norm.validation import validate_norm
from gdn_triton.prep.api import fused_post_conv_prep
from gdn_triton.prep.backends import POST_CONV
from gdn_triton.prep.problem import Sizes, with_gradients
from gdn_triton.prep.validation import validate_post_conv
from gdn_triton.recurrent.api import fused_recurrent_gated_delta_rule, recurrent_step, step_call
from gdn_triton.recurrent.backends import ACCEPT, FOLD, RECURRENT, RESTART, STEP
from gdn_triton.recurrent.problem import FoldProblem, sequence_call
from gdn_triton.recurrent.validation import validate_sequences, validate_step
from gdn_triton.recurrent.validation_window import validate_fold
from gdn_triton.recurrent.window import accept_window, fold_call, fold_window, restart_window
from gdn_triton.step.api import layer_step
from gdn_triton.step.backends import LAYER_STEP, runs_parts
from gdn_triton.step.problem import LayerCall
from gdn_triton.step.validation import validate_layer

_Given = dict[str, Any]


def explain(*args: Any, contents: bool = False, **kwargs: Any) -> Explanation:
    """Names the backend that `chunk_gated_delta_rule` would run for these arguments, and why no
    other.

    Takes the same arguments and raises the same errors for bad ones, but runs nothing. If
    `GDN_BACKEND` names a backend that refuses the call, this is no error here: the result has the
    reason. `print` the result.

    With `contents`, which waits for the device, the result's `contents` describes the tensors (the
    largest g, the longest key, the range of beta) and has a sentence for each mistake that shows in
    them (docs/wrong_numbers.md). Raises ValueError if the tensors have no memory to read.
    """
    given = _bound(chunk_gated_delta_rule, *args, **kwargs)
    explanation, inputs = _chunk(given)
    if contents is not True and contents is not False:
        raise TypeError(must("contents", "be True or False", value_of(contents)))
    if not contents:
        return explanation
    if is_traced(inputs.q):
        raise ValueError(must("contents", "be False where tensors have no memory", "True"))
    found = read_contents(
        **inputs._asdict(),
        normalizes_keys=given["use_qk_l2norm_in_kernel"],
        activates_gate=given["use_gate_in_kernel"],
        activates_beta=given["use_beta_sigmoid_in_kernel"],
    )
    return dataclasses.replace(explanation, contents=found)


def _explain_signature() -> inspect.Signature:
    """The signature of the function, with `contents` added."""
    own = inspect.signature(explain)
    taken = inspect.signature(chunk_gated_delta_rule).parameters.values()
    return own.replace(parameters=[*taken, own.parameters["contents"]])


explain.__signature__ = _explain_signature()  # type: ignore[attr-defined]


def explain_call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Names the backend that `function(*args, **kwargs)` would run, and why no other one.

    It runs nothing, and does not check the contents of slots.

    Args:
        function: one of this package's operators: `chunk_gated_delta_rule`, `chunk_prefill`,
            `fused_recurrent_gated_delta_rule`, `recurrent_step`, `fold_window`, `restart_window`,
            `accept_window`, `causal_conv1d`, `causal_conv1d_update`, `fused_conv_prep`,
            `fused_post_conv_prep`, `rms_norm_gated`, `layer_step`.
        args, kwargs: its arguments.

    Returns:
        An `Explanation`. If `GDN_BACKEND` names a backend that refuses the call, this is no error
        here: the result has the reason. Where `fused_conv_prep` cannot run its one kernel
        ("reference" is chosen), it runs `causal_conv1d` and `fused_post_conv_prep`, each in the
        backend that is chosen for it. The parts of a `layer_step` also run each in its own backend
        where its kernel does not take a call, even if "triton" is asked for.

    Raises:
        TypeError, ValueError, RuntimeError: the errors of the function for arguments of a wrong
            type, shape, dtype or device; TypeError also for a function that is not in this list.
    """
    if function is chunk_gated_delta_rule:
        return _chunk(_bound(function, *args, **kwargs))[0]
    if function is layer_step:
        return _layer_step(_bound(function, *args, **kwargs))
    row = _OPERATORS.get(function)
    if row is None:
        known = (chunk_gated_delta_rule, *_OPERATORS, layer_step)
        names = ", ".join(function.__name__ for function in known)
        name = getattr(function, "__name__", repr(function))
        raise TypeError(f"function must be one of {names}, got {name}")
    operator, judge = row
    return operator.explain(judge(_bound(function, *args, **kwargs)))


def _bound(function: Callable[..., Any], *args: Any, **kwargs: Any) -> _Given:
    """Returns all arguments of a call by name, without removed and deprecated ones. Only the public
    functions may call this function, because a warning names their caller."""
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    given = dict(call.arguments)
    head_first = given.pop("head_first", None)
    if head_first is not None:
        refuse_head_first(head_first)
    old_name = given.pop("transpose_state_layout", None)
    if old_name is not None:
        v_first = deprecated_state_layout(given["state_v_first"], old_name, frames=2)
        given["state_v_first"] = v_first
    return given


def _chunk(given: _Given) -> tuple[Explanation, Inputs]:
    """Returns the problem and the tensors of a call. With a context the offsets are the
    context's."""
    x = made(ChunkCall, given)
    if given["cp_context"] is None:
        return CHUNK.explain(validate_chunk(x)), x.inputs
    # Imported here because only calls with cp_context need torch.distributed.
    from gdn_triton.chunk.sharded.run import validate_sharded

    _, inputs, problem = validate_sharded(x, given["cp_context"])
    return SHARDED.explain(problem), inputs


def _restart(given: _Given) -> FoldProblem:
    call = fold_call(state=None, state_v_first=False, **given)
    return validate_fold(call, folds=False)


def _accept(given: _Given) -> FoldProblem:
    call = fold_call(state=None, state_v_first=False, has_path=True, **given)
    return validate_fold(call, folds=False)


def _conv_prep(given: _Given) -> PrepProblem:
    prep = PrepArguments(**{name: given.pop(name) for name in PrepArguments._fields})
    return prep_problem(ConvArguments(x=given.pop("mixed_qkv"), **given), prep)


def _post_conv(given: _Given) -> Sizes:
    tensors = [x for x in given.values() if isinstance(x, torch.Tensor)]
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return with_gradients(validate_post_conv(*given.values()), needs_grad)


def _layer_step(given: _Given) -> Explanation:
    problem = validate_layer(made(LayerCall, given))
    found = LAYER_STEP.explain(problem)
    if found.chosen is None and runs_parts(problem):
        reasons = {**found.reasons, "reference": None}
        return dataclasses.replace(found, chosen="reference", reasons=reasons)
    return found


# The other functions, each with its operator and a function that makes a problem of the arguments.
_OPERATORS: dict[Callable[..., Any], tuple[Operator[Any, Any], Callable[[_Given], Any]]] = {
    chunk_prefill: (PREFILL, lambda given: validate_prefill(prefill_call(given))),
    fused_recurrent_gated_delta_rule: (
        RECURRENT,
        lambda given: validate_sequences(sequence_call(given)),
    ),
    recurrent_step: (STEP, lambda given: validate_step(step_call(given))),
    fold_window: (FOLD, lambda given: validate_fold(fold_call(**given), folds=True)),
    restart_window: (RESTART, _restart),
    accept_window: (ACCEPT, _accept),
    causal_conv1d: (CONV, lambda given: validate_conv(ConvArguments(**given), PLAIN)),
    causal_conv1d_update: (
        CONV_UPDATE,
        lambda given: validate_conv(ConvArguments(**given), CONV_STEP),
    ),
    fused_conv_prep: (CONV_PREP, _conv_prep),
    fused_post_conv_prep: (POST_CONV, _post_conv),
    rms_norm_gated: (NORM, lambda given: validate_norm(**given)),
}
