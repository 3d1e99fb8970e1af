"""Plans of `gdn_triton.layer_step`. A plan is the function that runs a call and all calls like
it."""

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from gdn_triton._host.environment import kernel_variables
from gdn_triton._host.memory import Apart
from gdn_triton._host.remembered import keep
from gdn_triton._host.tensors import is_transformed, resolved
from gdn_triton.step.backends import plan_of
from gdn_triton.step.problem import LayerCall, LayerProblem
from gdn_triton.step.validation import (
    all_tensors,
    check_contents,
    layer_memory,
    validate_layer,
)

# All plans are dropped when their number reaches this limit.
MOST_PLANS = 1024


class _Plan(NamedTuple):
    problem: LayerProblem
    memory: Apart
    run: Callable[[LayerCall], Tensor]


_plans: dict[Hashable, _Plan] = {}


def run_layer(call: LayerCall) -> Tensor:
    """Returns y and writes the states."""
    inputs, tensors = call.inputs, all_tensors(call)
    key = None if is_transformed() else _key(call, tensors)
    plan = None if key is None else _plans.get(key)
    if plan is None:
        problem = validate_layer(call)
        memory = None
        if problem.unreadable is None:
            # Check only readable tensors, because others may have no address.
            memory = layer_memory(call)
            memory.check(tensors)
        check_contents(problem, call)
        if memory is None or key is None:
            return plan_of(problem, call)(call)
        readable = resolved(inputs)
        if readable is not inputs:
            # The copy has other strides, so another plan serves it.
            return run_layer(call._replace(inputs=readable))
        plan = _Plan(problem, memory, plan_of(problem, call))
        keep(_plans, key, plan, most=MOST_PLANS)
    else:
        plan.memory.check(tensors)
        check_contents(plan.problem, call)
    return plan.run(call)


def _key(call: LayerCall, tensors: tuple[Tensor | None, ...]) -> Hashable | None:
    """Returns a key of all properties on which the plan of a call depends, or None if the key
    cannot hold all of them."""
    known: list[Hashable] = [torch.is_grad_enabled(), *kernel_variables()]
    for option in call.options:
        # The key includes the types: True == 1 as a key, but validation refuses one of the two.
        if type(option) not in _PLAIN_OPTIONS:
            return None
        known += (option, type(option).__name__)
    for x in tensors:
        if x is None:
            known.append(None)
        elif type(x) is Tensor and x.layout is torch.strided and not x.is_nested:
            known.append((x.dtype, x.shape, x.stride(), x.device, x.requires_grad, x.is_neg()))
        elif type(x) is torch.nn.Parameter:
            known.append((x.dtype, x.shape, x.stride(), x.device, x.requires_grad, False))
        else:
            return None
    most = getattr(call.window, "max_tokens", None)
    if type(most) not in _PLAIN_OPTIONS:
        return None
    return (*known, type(call.window), type(call.positions), most, type(most))


_PLAIN_OPTIONS = frozenset((bool, float, int, str, type(None)))
