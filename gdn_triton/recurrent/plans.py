"""From a call of the recurrence to what runs it, once for all calls that differ in contents only.

A decode step is over in microseconds, and judging its arguments would take as long. So a call is
judged, its backend chosen and its launch prepared once for its shapes, strides, dtypes and flags;
what came out, a plan, is kept and found again by these.
"""

import dataclasses
import os
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from gdn_triton._host.backends import RECURRENT, STEP, Operator, Plan
from gdn_triton._host.memory import Apart
from gdn_triton._host.tensors import is_transformed, resolved
from gdn_triton.recurrent.problem import Operands, RecurrentProblem, Run
from gdn_triton.recurrent.validation import (
    check_contents,
    step_memory,
    validate_sequences,
    validate_step,
)

# When there are so many plans, all are dropped and made anew.
MOST_PLANS = 4096


class _Plan(NamedTuple):
    """memory: of a step, whose tensors are judged by it at every call."""

    problem: RecurrentProblem
    memory: Apart | None
    run: Run


_plans: dict[Hashable, _Plan] = {}


class SequenceOptions(NamedTuple):
    """The arguments of `gdn_triton.fused_recurrent_gated_delta_rule` that are no tensors."""

    scale: float | None
    output_final_state: bool
    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    state_v_first: bool


class StepOptions(NamedTuple):
    """The arguments of `gdn_triton.recurrent_step` that are no tensors, and which tensors came:
    is_mixed: mixed_qkv, not q, k, v. is_raw: a and b, not g and beta."""

    is_mixed: bool
    is_raw: bool
    scale: float | None
    use_qk_l2norm_in_kernel: bool
    allow_neg_eigval: bool
    state_v_first: bool
    skip: str


def run_sequences(
    x: Operands, options: SequenceOptions, needs_grad: bool = False
) -> tuple[Tensor, Tensor | None]:
    """o and the final states, or None. `needs_grad`: a gradient is needed that autograd's state
    does not show."""

    def judge(x: Operands) -> RecurrentProblem:
        problem = validate_sequences(x, **options._asdict())
        return dataclasses.replace(problem, needs_grad=True) if needs_grad else problem

    return _run(RECURRENT, x, (*options, needs_grad), judge, None)


def run_step(x: Operands, options: StepOptions) -> Tensor:
    """o; the states are written."""

    def judge(x: Operands) -> RecurrentProblem:
        return validate_step(x, **options._asdict())

    def judge_memory(x: Operands) -> Apart:
        return step_memory(x, options.is_mixed, options.is_raw)

    return _run(STEP, x, options, judge, judge_memory)[0]


def _run(
    operator: Operator[RecurrentProblem, Plan],
    x: Operands,
    options: tuple[object, ...],
    judge: Callable[[Operands], RecurrentProblem],
    judge_memory: Callable[[Operands], Apart] | None,
) -> tuple[Tensor, Tensor | None]:
    key = (
        options,
        # The types too: True == 1 as a key, but validation refuses one of the two.
        *map(type, options),
        *map(_known, x),
        torch.is_grad_enabled(),
        os.environ.get("GDN_BACKEND"),
    )
    transformed = is_transformed()
    plan = None if transformed else _plans.get(key)
    if plan is None:
        problem = judge(x)
        memory = None
        # A tensor that no kernel can read need not have an address.
        if judge_memory is not None and problem.unreadable is None:
            memory = judge_memory(x)
            memory.check(x)
        check_contents(problem, x)
        inputs = resolved(x)
        if inputs is not x:
            # The copy has other strides, so another plan serves it.
            return _run(operator, inputs, options, judge, judge_memory)
        if transformed:
            # Properties of a tensor that the key does not hold.
            return operator.choose(problem).load()(problem, x)(x)
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        run = operator.choose(problem).load()(problem, x)
        plan = _plans[key] = _Plan(problem, memory, run)
    else:
        if plan.memory is not None:
            plan.memory.check(x)
        if plan.problem.device.type == "cpu":
            check_contents(plan.problem, x)
    return plan.run(x)


def _known(x: object) -> object:
    """All that a plan may depend on of an argument: of a tensor, not its contents and address."""
    if x is None:
        return None
    if isinstance(x, Tensor):
        layout = x.dtype, x.shape, x.stride(), x.device, x.requires_grad, x.is_neg()
        return layout if type(x) is Tensor else (type(x), layout)
    return type(x)
