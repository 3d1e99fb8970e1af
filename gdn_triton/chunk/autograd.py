"""Wraps a forward and a backward by kernels as one function that autograd can differentiate.

The backward needs only the inputs of its forward, and therefore works with every forward. A forward
may also leave states, with which the backward of the same backend takes less time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gdn_triton._host.derivatives import IN_KERNELS, found_once
from gdn_triton._host.records import state_needs_grad
from gdn_triton._host.tensors import readable_gradient
from gdn_triton.chunk.problem import Gradients, Inputs, Problem, needed_inputs

# Runs a forward without gradients. Returns o, the final state, and states for the backward or None.
Run = Callable[[Problem, Inputs], tuple[Tensor, Tensor | None, Tensor | None]]


def leaves_nothing(forward: Callable[[Problem, Inputs], tuple[Tensor, Tensor | None]]) -> Run:
    """A `Run` from a forward that returns o and the final state alone."""

    def run(problem: Problem, x: Inputs) -> tuple[Tensor, Tensor | None, None]:
        return *forward(problem, x), None

    return run


class Find(Protocol):
    """Returns the gradients of all inputs, the gradient of the initial state only with
    ``store_dh0``. If the `Run` of the call leaves states, they are passed as ``states`` too."""

    def __call__(
        self,
        problem: Problem,
        x: Inputs,
        do: Tensor | None,
        dht: Tensor | None,
        *,
        store_dh0: bool,
    ) -> Gradients: ...


class ByKernels(NamedTuple):
    """The two functions of a call with gradients: `run` is its forward, and `find` computes the
    gradients from the inputs and from the states that `run` leaves."""

    run: Run
    find: Find


class _Chunk(torch.autograd.Function):
    """Saves the inputs, which are its last arguments, and the states that the forward leaves."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, find: Find, problem: Problem, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        o, final_state, states = run(problem, Inputs._make(tensors))
        ctx.save_for_backward(states, *tensors)
        ctx.find, ctx.problem = find, problem
        ctx.set_materialize_grads(False)
        if final_state is not None and not state_needs_grad(needed_inputs(ctx.needs_input_grad)):
            ctx.mark_non_differentiable(final_state)
        return o, final_state

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = needed_inputs(ctx.needs_input_grad)
        if do is None and dht is None:
            return (None,) * len(ctx.needs_input_grad)
        do, dht = readable_gradient("o", do), readable_gradient("final_state", dht)
        find, problem, store_dh0 = ctx.find, ctx.problem, needed["initial_state"]

        def find_all(
            do: Tensor | None, dht: Tensor | None, states: Tensor | None, *tensors: Tensor | None
        ) -> Gradients:
            x, left = Inputs._make(tensors), {} if states is None else {"states": states}
            found: Gradients = find(problem, x, do, dht, store_dh0=store_dh0, **left)
            return found

        found = found_once(
            find_all,
            do,
            dht,
            *ctx.saved_tensors,
            operator="gdn_triton.chunk_gated_delta_rule",
            backends=IN_KERNELS,
        )
        wanted = (x if want else None for x, want in zip(found, needed.values(), strict=True))
        return (None, None, None, *wanted)


def differentiable(by: ByKernels, problem: Problem, x: Inputs) -> tuple[Tensor, Tensor | None]:
    """Returns o and the final state or None, differentiable once, with the bits of a forward
    without gradients."""
    return _Chunk.apply(  # type: ignore[no-any-return, no-untyped-call]
        by.run, by.find, problem, *x
    )
