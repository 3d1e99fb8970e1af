"""The backends of the recurrence: reasons to refuse a call, and functions that plan a call."""

from collections.abc import Callable

from gdn_triton._host.backends import (
    Backend,
    Operator,
    missing,
    reference_supports,
    span_refusal,
    states_refusal,
    triton_refusal,
)
from gdn_triton.constants import MAX_TOKENS
from gdn_triton.recurrent.problem import (
    FoldOperands,
    FoldProblem,
    Operands,
    PlannedCall,
    RecurrentProblem,
)

# plan(problem, operands) returns a function that runs this call and all calls like it.
Plan = Callable[[RecurrentProblem, Operands], PlannedCall]
Fold = Callable[[FoldProblem, FoldOperands], None]


def recurrent_triton_supports(problem: RecurrentProblem) -> str | None:
    """Returns a sentence why the Triton kernel cannot run this call of the recurrence, or None."""
    if problem.unreadable is not None:
        return problem.unreadable
    dtypes = (problem.q_dtype, problem.k_dtype, problem.v_dtype)
    refusal = triton_refusal(dtypes, problem.device.type, problem.K)
    if refusal is not None:
        return refusal
    refusal = states_refusal(problem.state_dtype)
    if refusal is not None:
        return refusal
    refusal = span_refusal(problem.tile_span)
    if refusal is not None:
        return refusal
    if problem.T >= MAX_TOKENS:
        return f"The Triton kernel takes less than {MAX_TOKENS} tokens; T is {problem.T}."
    if problem.needs_grad:
        return (
            "The Triton kernel of the recurrence has no backward; an input requires a gradient. "
            "Call under torch.no_grad() if none is wanted."
        )
    return None


def fold_triton_supports(problem: FoldProblem) -> str | None:
    """Returns a sentence why the Triton kernels cannot fold or restart these windows, or None."""
    if problem.unreadable is not None:
        return problem.unreadable
    refusal = triton_refusal((problem.k_dtype,), problem.device.type, problem.K)
    if refusal is None and problem.state_dtype is not None:
        refusal = states_refusal(problem.state_dtype)
    return refusal or span_refusal(problem.tile_span)


def _load_triton_plan() -> Plan:
    from gdn_triton.recurrent.triton import plan, window_plan

    def planned(problem: RecurrentProblem, operands: Operands) -> PlannedCall:
        chosen = window_plan if problem.window_rows else plan
        return chosen.plan(problem, operands)

    return planned


def _load_reference_plan() -> Plan:
    from gdn_triton.recurrent import reference

    return reference.plan


def _load_triton_fold() -> Fold:
    from gdn_triton.recurrent.triton import window_plan

    return window_plan.fold_slots


def _load_reference_fold() -> Fold:
    from gdn_triton.recurrent import reference

    return reference.fold_slots


_RECURRENT_BACKENDS: tuple[Backend[RecurrentProblem, Plan], ...] = (
    missing("cuda", "The CUDA library has no kernel for the recurrence token by token."),
    Backend("triton", recurrent_triton_supports, _load_triton_plan),
    Backend("reference", reference_supports, _load_reference_plan),
)
RECURRENT = Operator("fused_recurrent_gated_delta_rule", _RECURRENT_BACKENDS)
STEP = Operator("recurrent_step", _RECURRENT_BACKENDS)
_FOLD_BACKENDS: tuple[Backend[FoldProblem, Fold], ...] = (
    missing("cuda", "The CUDA library has no kernel for the windows of decoding."),
    Backend("triton", fold_triton_supports, _load_triton_fold),
    Backend("reference", reference_supports, _load_reference_fold),
)
FOLD = Operator("fold_window", _FOLD_BACKENDS)
RESTART = Operator("restart_window", _FOLD_BACKENDS)
ACCEPT = Operator("accept_window", _FOLD_BACKENDS)
