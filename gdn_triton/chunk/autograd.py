"""Backends by kernels under autograd: a forward that runs without gradients, and what finds them. A
backward takes nothing from a forward but its inputs, so that each serves any of them."""

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from gdn_triton._host.records import state_needs_grad
from gdn_triton._host.tensors import readable_gradient
from gdn_triton.chunk.problem import Gradients, Inputs, Problem, needed_inputs

# What runs a forward without gradients.
Run = Callable[[Problem, Inputs], tuple[Tensor, Tensor | None]]


class Find(Protocol):
    """What finds the gradients of all inputs; that of the initial state only with ``store_dh0``."""

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
        find: Find,
        problem: Problem,
        store_dh0: bool,
        do: Tensor | None,
        dht: Tensor | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        return tuple(find(problem, Inputs._make(tensors), do, dht, store_dh0=store_dh0))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> NoReturn:
        raise RuntimeError(
            "gdn_triton.chunk_gated_delta_rule has no second derivative in the Triton backend, nor "
            "in the CUDA one: use GDN_BACKEND=reference for one"
        )


class _Chunk(torch.autograd.Function):
    """Keeps the inputs, its last arguments, and nothing else."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, find: Find, problem: Problem, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        o, final_state = run(problem, Inputs._make(tensors))
        ctx.save_for_backward(*tensors)
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
        x, store_dh0 = Inputs._make(ctx.saved_tensors), needed["initial_state"]
        if torch.is_grad_enabled():  # somebody may differentiate what is found
            found = _Gradients.apply(  # type: ignore[no-untyped-call]
                ctx.find, ctx.problem, store_dh0, do, dht, *x
            )
        else:
            found = ctx.find(ctx.problem, x, do, dht, store_dh0=store_dh0)
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
