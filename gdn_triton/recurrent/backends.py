"""The backends of the recurrence: what each refuses, and what plans a call."""

import functools
from collections.abc import Callable

from gdn_triton._host.backends import (
    Backend,
    Operator,
    missing,
    reference_supports,
    states_refusal,
    triton_refusal,
)
from gdn_triton.constants import MAX_STATE_SPAN, MAX_TOKENS
from gdn_triton.recurrent.problem import Operands, PlannedCall, RecurrentProblem

# plan(problem, operands) returns a function that runs this call of the recurrence and its like.
Plan = Callable[[RecurrentProblem, Operands], PlannedCall]


def recurrent_triton_supports(problem: RecurrentProblem) -> str | None:
    """A sentence why the Triton kernel cannot run this call of the recurrence, or None."""
    if problem.unreadable is not None:
        return problem.unreadable
    dtypes = (problem.q_dtype, problem.k_dtype, problem.v_dtype)
    refusal = triton_refusal(dtypes, problem.device.type, problem.K)
    if refusal is not None:
        return refusal
    refusal = states_refusal(problem.state_dtype)
    if refusal is not None:
        return refusal
    if problem.tile_span >= MAX_STATE_SPAN:
        return (
            "The Triton kernel takes rows and states of which the last element is less than 2^31 "
            f"elements from the first; one is {problem.tile_span} from it."
        )
    if problem.T >= MAX_TOKENS:
        return f"The Triton kernel takes less than {MAX_TOKENS} tokens; T is {problem.T}."
    if problem.needs_grad:
        return (
            "The Triton kernel of the recurrence has no backward; an input requires a gradient. "
            "Call under torch.no_grad() if none is wanted."
        )
    return None


# Loaded modules are cached: even an import statement of a loaded module takes longer.


@functools.cache
def _load_triton_plan() -> Plan:
    from gdn_triton.recurrent.triton import plan

    return plan.plan


@functools.cache
def _load_reference_plan() -> Plan:
    from gdn_triton.recurrent import reference

    return reference.plan


_RECURRENT_BACKENDS: tuple[Backend[RecurrentProblem, Plan], ...] = (
    missing("cuda", "The CUDA library has no kernel for the recurrence token by token."),
    Backend("triton", recurrent_triton_supports, _load_triton_plan),
    Backend("reference", reference_supports, _load_reference_plan),
)
RECURRENT = Operator("fused_recurrent_gated_delta_rule", _RECURRENT_BACKENDS)
STEP = Operator("recurrent_step", _RECURRENT_BACKENDS)
