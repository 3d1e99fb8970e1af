"""The Triton backend under autograd: its forward, and its backward where a gradient is needed. The
backward takes nothing from a forward but its inputs, so it also serves the CUDA library's."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from gdn_triton._host.memory import count_writes
from gdn_triton._host.tensors import readable_gradient
from gdn_triton.chunk.problem import Inputs, Pool, Problem
from gdn_triton.chunk.triton import backward as chunk_bwd
from gdn_triton.chunk.triton import forward as chunk_fwd

# Runs a forward without gradients.
Run = Callable[[Problem, Inputs, Tensor | None], tuple[Tensor, Tensor | None]]


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
        cu_seqlens: Tensor | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        x = Inputs(*tensors)  # type: ignore[arg-type]
        return tuple(chunk_bwd.gradients(problem, x, cu_seqlens, do, dht, store_dh0=store_dh0))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> NoReturn:
        raise RuntimeError(
            "gdn_triton.chunk_gated_delta_rule has no second derivative in the Triton backend, nor "
            "in the CUDA one: use GDN_BACKEND=reference for one"
        )


class _Chunk(torch.autograd.Function):
    """Keeps the inputs and nothing else."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, problem: Problem, cu_seqlens: Tensor | None, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        o, final_state = run(problem, Inputs(*tensors), cu_seqlens)  # type: ignore[arg-type]
        ctx.save_for_backward(cu_seqlens, *tensors)
        ctx.problem = problem
        ctx.set_materialize_grads(False)
        # The final state depends on every input but q: it needs no gradient when q alone does.
        if final_state is not None and not any(ctx.needs_input_grad[4:]):
            ctx.mark_non_differentiable(final_state)
        return o, final_state

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        if do is None and dht is None:
            return (None,) * (3 + len(needed))
        do, dht = readable_gradient("o", do), readable_gradient("final_state", dht)
        store_dh0 = needed[Inputs._fields.index("initial_state")]
        found = _Gradients.apply(  # type: ignore[no-untyped-call]
            ctx.problem, store_dh0, do, dht, *ctx.saved_tensors
        )
        wanted = (x if want else None for x, want in zip(found, needed, strict=True))
        return (None, None, None, *wanted)


def differentiable(
    run: Run, problem: Problem, x: Inputs, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """What the forward `run` returns for these arguments, with the Triton backward as its gradient:
    for a problem that Triton serves."""
    return _Chunk.apply(run, problem, cu_seqlens, *x)  # type: ignore[no-any-return, no-untyped-call]


def forward(
    problem: Problem, x: Inputs, cu_seqlens: Tensor | None, pool: Pool | None = None
) -> tuple[Tensor, Tensor | None]:
    """o [B, T, HV, V] in q's dtype and the final state, or None; differentiable once. The same bits
    with and without a gradient. With a `pool`, its o and its states, and no gradient."""
    if problem.needs_grad:
        return differentiable(chunk_fwd.forward, problem, x, cu_seqlens)
    if pool is not None:
        count_writes(pool.state, pool.out, pool.checkpoints)
    return chunk_fwd.forward(problem, x, cu_seqlens, pool)
