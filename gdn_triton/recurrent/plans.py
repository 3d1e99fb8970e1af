"""Plans of the recurrence. A plan is the function that runs all calls that differ only in contents.

A decode step takes microseconds, and the validation of its arguments would take as long. Therefore
the package validates a call, chooses its backend and prepares its launch once for each combination
of shapes, strides, dtypes and flags. The result is a plan, which is stored under these properties.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gdn_triton._host.backends import Operator
from gdn_triton._host.environment import kernel_variables
from gdn_triton._host.memory import Apart
from gdn_triton._host.remembered import keep
from gdn_triton._host.slots import check_contents, check_parents
from gdn_triton._host.tensors import PLAIN_TENSORS, is_transformed, resolved
from gdn_triton.recurrent.backends import ACCEPT, FOLD, RECURRENT, RESTART, STEP, Plan
from gdn_triton.recurrent.problem import (
    FoldCall,
    Operands,
    PlannedCall,
    RecurrentProblem,
    SequenceCall,
    StepCall,
)
from gdn_triton.recurrent.validation import step_memory, validate_sequences, validate_step
from gdn_triton.recurrent.validation_window import (
    check_folds,
    check_positions,
    fold_memory,
    validate_fold,
)

# All plans are dropped when their number reaches this limit.
MOST_PLANS = 4096


class _Plan(NamedTuple):
    """A stored plan. memory: the check of a step's memory, which runs at every call."""

    problem: RecurrentProblem
    memory: Apart | None
    run: PlannedCall


_plans: dict[Hashable, _Plan] = {}
_Call = TypeVar("_Call", SequenceCall, StepCall)


def run_sequences(call: SequenceCall) -> tuple[Tensor, Tensor | None]:
    """Returns o and the final states, or None instead of the states."""
    run, x = _planned(RECURRENT, call, validate_sequences, None)
    try:
        return run(x)
    except RuntimeError:
        _raise_refusal(validate_sequences, call)
        raise


def run_step(call: StepCall) -> Tensor:
    """Returns o and writes the states."""
    run, x = _planned(STEP, call, validate_step, step_memory)
    return run(x)[0]


def judge_step(call: StepCall) -> None:
    """Raises the errors that `run_step` would raise for this call before its launch. Writes
    nothing."""
    _planned(STEP, call, validate_step, step_memory)


def run_fold(call: FoldCall, *, folds: bool) -> None:
    """Folds the windows of slots, restarts them if there is no state, or accepts a path if there is
    one. No plan is stored, because such calls are rare or are captured in a graph."""
    x = call.inputs
    problem = validate_fold(call, folds=folds)
    if problem.unreadable is None:
        fold_memory(call).check(x)
    check_folds(problem, x)
    operator = FOLD if folds else RESTART if call.inputs.path is None else ACCEPT
    operator.choose(problem).run(problem, resolved(x))


def _planned(
    operator: Operator[RecurrentProblem, Plan],
    call: _Call,
    judge: Callable[[_Call], RecurrentProblem],
    judge_memory: Callable[[_Call], Apart] | None,
) -> tuple[PlannedCall, Operands]:
    """Returns the function that runs a validated call, and its operands."""
    x: Operands = call.inputs
    _, *rest = call
    transformed = is_transformed()
    try:
        key = (
            *rest,
            # The key includes the types: True == 1 as a key, but validation refuses one of the two.
            *map(type, rest),
            *map(type, call.options),
            *_known(x),
            operator.name,
            torch.is_grad_enabled(),
            *kernel_variables(),
        )
        plan = None if transformed else _plans.get(key)
    except (TypeError, RuntimeError):
        # An option has no hash, or a tensor has no shape or strides.
        _raise_refusal(judge, call)
        raise
    if plan is None:
        problem = judge(call)
        memory = None
        # A tensor that no kernel can read may have no address.
        if judge_memory is not None and problem.unreadable is None:
            memory = judge_memory(call)
            memory.check(x)
        check_contents(problem, x)
        check_parents(problem, x, reads_states=True)
        check_positions(problem, x)
        inputs = resolved(x)
        if inputs is not x:
            # The copy has other strides, so another plan serves it.
            return _planned(operator, call._replace(inputs=inputs), judge, judge_memory)
        if transformed:
            # Check the properties of a tensor that the key does not include.
            return operator.choose(problem).run(problem, x), x
        plan = _Plan(problem, memory, operator.choose(problem).run(problem, x))
        keep(_plans, key, plan, most=MOST_PLANS)
    else:
        if plan.memory is not None:
            try:
                plan.memory.check(x)
            except RuntimeError:
                _raise_refusal(judge, call)
                raise
        if plan.problem.device.type == "cpu":
            check_contents(plan.problem, x)
            check_parents(plan.problem, x, reads_states=True)
            check_positions(plan.problem, x)
    return plan.run, x


def _raise_refusal(judge: Callable[[_Call], object], call: _Call) -> None:
    """Raises the error of validation for a call that failed, if validation refuses the call. A
    sparse tensor may have the strides of a dense tensor. Its call then finds the plan of the dense
    call and fails, because a sparse tensor has no address.
    """
    try:
        judge(call)
    except (TypeError, ValueError, NotImplementedError) as refusal:
        raise refusal from None


def _known(operands: Operands) -> list[Any]:
    """Returns the properties of the operands on which a plan may depend. The properties exclude a
    tensor's contents and address."""
    known: list[Any] = []
    for x in operands:
        kind = type(x)
        if x is None:
            known.append(None)
        elif kind in PLAIN_TENSORS:
            device, needs_grad = x.device, x.requires_grad
            # The entries are in the key itself, because a tuple for each tensor takes longer.
            known += kind, x.dtype, x.shape, x.stride(), device, needs_grad, x.is_neg()
        elif isinstance(x, Tensor):
            layout = x.dtype, x.shape, x.stride(), x.device, x.requires_grad, x.is_neg()
            known.append((kind, layout))
        else:
            known.append(kind)
    return known
