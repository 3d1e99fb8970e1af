"""Backends by kernels under autograd: a forward that runs without gradients, and what finds them. A
backward needs nothing of a forward but its inputs, so that each serves any of them. What a forward
leaves beside makes its own backend's backward take less time."""

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from gdn_triton._host.records import state_needs_grad
from gdn_triton._host.tensors import readable_gradient
from gdn_triton.chunk.problem import Gradients, Inputs, Problem, needed_inputs

# What runs a forward without gradients: o, the final state, and what it leaves for the backward.
Run = Callable[[Problem, Inputs], tuple[Tensor, Tensor | None, Tensor | None]]


def leaves_nothing(forward: Callable[[Problem, Inputs], tuple[Tensor, Tensor | None]]) -> Run:
    """What runs a forward that gives o and the final state alone."""

    def run(problem: Problem, x: Inputs) -> tuple[Tensor, Tensor | None, None]:
        return *forward(problem, x), None

    return run


class Find(Protocol):
    """What finds the gradients of all inputs; that of the initial state only with ``store_dh0``. Of
    a `Run` that leaves something, it takes that as ``states`` too."""

    def __call__(
        self,
        problem: Problem,
        x: Inputs,
        do: Tensor | None,
        dht: Tensor | None,
        *,
        store_dh0: bool,
    ) -> Gradients: ...


class _Gradients(torch.autograd.Function):
    """The backward as a function of its own, so that differentiating it is an error. Without this
    the kernels' results would be taken for constants, and second derivatives would be wrong."""

    @staticmethod
    def forward(
        ctx: Any,
        find: Callable[..., Gradients],
        problem: Problem,
        store_dh0: bool,
        states: Tensor | None,
        do: Tensor | None,
        dht: Tensor | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        x = Inputs._make(tensors)
        return tuple(find(problem, x, do, dht, store_dh0=store_dh0, **_left(states)))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> NoReturn:
        raise RuntimeError(
            "gdn_triton.chunk_gated_delta_rule has no second derivative in the Triton backend, nor "
            "in the CUDA one: use GDN_BACKEND=reference for one"
        )


def _left(states: Tensor | None) -> dict[str, Tensor]:
    return {} if states is None else {"states": states}


class _Chunk(torch.autograd.Function):
    """Keeps the inputs, its last arguments, and what the forward leaves."""

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
        states, *tensors = ctx.saved_tensors
        x, store_dh0 = Inputs._make(tensors), needed["initial_state"]
        if torch.is_grad_enabled():  # somebody may differentiate what is found
            found = _Gradients.apply(  # type: ignore[no-untyped-call]
                ctx.find, ctx.problem, store_dh0, states, do, dht, *x
            )
        else:
            found = ctx.find(ctx.problem, x, do, dht, store_dh0=store_dh0, **_left(states))
        wanted = (x if want else None for x, want in zip(found, needed.values(), strict=True))
        return (None, None, None, *wanted)


def differentiable(
    run: Run, find: Find, problem: Problem, x: Inputs
) -> tuple[Tensor, Tensor | None]:
    """What the forward `run` returns for these arguments, with the gradients that `find` finds: for
    a problem that both serve."""
    return _Chunk.apply(  # type: ignore[no-any-return, no-untyped-call]
        run, find, problem, *x
    )
