"""Which backend would run a call of any of the operators, and why: nothing runs, no state is
written."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from gdn_triton._host.arguments import refuse_head_first
from gdn_triton._host.backends import Explanation
from gdn_triton._host.deprecated import deprecated_state_layout
from gdn_triton.chunk.api import chunk_gated_delta_rule, explain
from gdn_triton.chunk.backends import PREFILL
from gdn_triton.chunk.prefill.api import chunk_prefill
from gdn_triton.chunk.prefill.validation import validate_prefill
from gdn_triton.chunk.problem import prefill_call
from gdn_triton.conv.api import causal_conv1d, causal_conv1d_update, fused_conv_prep
from gdn_triton.conv.backends import CONV, CONV_UPDATE
from gdn_triton.conv.prep import CONV_PREP, prep_problem
from gdn_triton.conv.validation import PLAIN, ConvArguments, PrepArguments, validate_conv
from gdn_triton.conv.validation import STEP as CONV_STEP
from gdn_triton.norm.api import rms_norm_gated
from gdn_triton.norm.backends import NORM
from gdn_triton.norm.validation import validate_norm
from gdn_triton.prep.api import fused_post_conv_prep
from gdn_triton.prep.backends import POST_CONV
from gdn_triton.prep.problem import with_gradients
from gdn_triton.prep.validation import validate_post_conv
from gdn_triton.recurrent.api import fused_recurrent_gated_delta_rule, recurrent_step, step_call
from gdn_triton.recurrent.backends import ACCEPT, FOLD, RECURRENT, RESTART, STEP
from gdn_triton.recurrent.problem import sequence_call
from gdn_triton.recurrent.validation import validate_sequences, validate_step
from gdn_triton.recurrent.validation_window import validate_fold
from gdn_triton.recurrent.window import accept_window, fold_call, fold_window, restart_window

_Given = dict[str, Any]


def explain_call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Which backend `function(*args, **kwargs)` would run, and why no other one.

    It runs nothing, and what slots hold is not judged.

    Args:
        function: one of this package's operators: `chunk_gated_delta_rule`, `chunk_prefill`,
            `fused_recurrent_gated_delta_rule`, `recurrent_step`, `fold_window`, `restart_window`,
            `accept_window`, `causal_conv1d`, `causal_conv1d_update`, `fused_conv_prep`,
            `fused_post_conv_prep`, `rms_norm_gated`.
        args, kwargs: its arguments.

    Returns:
        An `Explanation`. A backend that was asked for by name and refuses is no error here: the
        result says so. Where `fused_conv_prep` cannot run its one kernel ("reference" is chosen),
        its two parts are a `causal_conv1d` and a `fused_post_conv_prep`, each in the backend that
        is chosen for it.

    Raises:
        TypeError, ValueError, RuntimeError: the errors of the function for arguments of a wrong
            type, shape, dtype or device; TypeError too for a function that is not one of these.
    """
    judge = _JUDGES.get(function)
    if judge is None:
        names = ", ".join(known.__name__ for known in _JUDGES)
        name = getattr(function, "__name__", repr(function))
        raise TypeError(f"function must be one of {names}, got {name}")
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return judge(dict(call.arguments))


def _chunk(given: _Given) -> Explanation:
    return explain(**given)


def _prefill(given: _Given) -> Explanation:
    return PREFILL.explain(validate_prefill(prefill_call(given)))


def _sequences(given: _Given) -> Explanation:
    head_first = given.pop("head_first")
    if head_first is not None:
        refuse_head_first(head_first)
    old_name = given.pop("transpose_state_layout")
    if old_name is not None:
        given["state_v_first"] = deprecated_state_layout(given["state_v_first"], old_name)
    return RECURRENT.explain(validate_sequences(sequence_call(given)))


def _step(given: _Given) -> Explanation:
    return STEP.explain(validate_step(step_call(given)))


def _fold(given: _Given) -> Explanation:
    return FOLD.explain(validate_fold(fold_call(**given), folds=True))


def _restart(given: _Given) -> Explanation:
    call = fold_call(state=None, state_v_first=False, **given)
    return RESTART.explain(validate_fold(call, folds=False))


def _accept(given: _Given) -> Explanation:
    call = fold_call(state=None, state_v_first=False, has_path=True, **given)
    return ACCEPT.explain(validate_fold(call, folds=False))


def _conv(given: _Given) -> Explanation:
    return CONV.explain(validate_conv(ConvArguments(**given), PLAIN))


def _conv_update(given: _Given) -> Explanation:
    return CONV_UPDATE.explain(validate_conv(ConvArguments(**given), CONV_STEP))


def _conv_prep(given: _Given) -> Explanation:
    prep = PrepArguments(**{name: given.pop(name) for name in PrepArguments._fields})
    args = ConvArguments(x=given.pop("mixed_qkv"), **given)
    return CONV_PREP.explain(prep_problem(args, prep))


def _post_conv(given: _Given) -> Explanation:
    sizes = validate_post_conv(*given.values())
    tensors = [x for x in given.values() if isinstance(x, torch.Tensor)]
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return POST_CONV.explain(with_gradients(sizes, needs_grad))


def _norm(given: _Given) -> Explanation:
    return NORM.explain(validate_norm(**given))


_JUDGES: dict[Callable[..., Any], Callable[[_Given], Explanation]] = {
    chunk_gated_delta_rule: _chunk,
    chunk_prefill: _prefill,
    fused_recurrent_gated_delta_rule: _sequences,
    recurrent_step: _step,
    fold_window: _fold,
    restart_window: _restart,
    accept_window: _accept,
    causal_conv1d: _conv,
    causal_conv1d_update: _conv_update,
    fused_conv_prep: _conv_prep,
    fused_post_conv_prep: _post_conv,
    rms_norm_gated: _norm,
}
