"""The Triton backend under autograd: its forward, and its backward where a gradient is needed. The
backward takes nothing from a forward but its inputs, so it also serves the CUDA library's."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from gdn_triton._host.memory import count_writes
from gdn_triton._host.records import state_needs_grad
from gdn_triton._host.tensors import readable_gradient
from gdn_triton.chunk.problem import Inputs, Pool, Problem, needed_inputs
from gdn_triton.chunk.triton import backward as chunk_bwd
from gdn_triton.chunk.triton import forward as chunk_fwd

# What runs a forward without gradients.
Forward = Callable[[Problem, Inputs], tuple[Tensor, Tensor | None]]


class _Gradients(torch.autograd.Function):
    """The backward as a function of its own, so that differentiating it is an error. Without this
    the kernels' results would be taken for constants, and second derivatives would be wrong."""

    @staticmethod
    def forward(
        ctx: Any,
        problem: Problem,
        store_dh0: bool,
        do: Tensor | None,
        dht: Tensor | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        x = Inputs._make(tensors)
        return tuple(chunk_bwd.gradients(problem, x, do, dht, store_dh0=store_dh0))

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
        ctx: Any, run: Forward, problem: Problem, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        o, final_state = run(problem, Inputs._make(tensors))
        ctx.save_for_backward(*tensors)
        ctx.problem = problem
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
        found = _Gradients.apply(  # type: ignore[no-untyped-call]
            ctx.problem, needed["initial_state"], do, dht, *ctx.saved_tensors
        )
        wanted = (x if want else None for x, want in zip(found, needed.values(), strict=True))
        return (None, None, *wanted)


def differentiable(run: Forward, problem: Problem, x: Inputs) -> tuple[Tensor, Tensor | None]:
    """What the forward `run` returns for these arguments, with the Triton backward as its gradient:
    for a problem that Triton serves."""
    return _Chunk.apply(run, problem, *x)  # type: ignore[no-any-return, no-untyped-call]


def forward(problem: Problem, x: Inputs, pool: Pool | None = None) -> tuple[Tensor, Tensor | None]:
    """o [B, T, HV, V] in q's dtype and the final state, or None; differentiable once. The same bits
    with and without a gradient. With a `pool`, its o and its states, and no gradient."""
    if problem.needs_grad:
        return differentiable(chunk_fwd.forward, problem, x)
    if pool is not None:
        count_writes(pool.state, pool.out, pool.checkpoints)
    return chunk_fwd.forward(problem, x, pool)
