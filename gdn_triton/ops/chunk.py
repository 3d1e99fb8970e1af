"""The Triton backend under autograd: its forward, and its backward where a gradient is needed. The
backward takes nothing from a forward but its inputs, so it also serves the CUDA library's."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from gdn_triton.ops import chunk_bwd, chunk_fwd
from gdn_triton.problem import Pool, Problem


class _Gradients(torch.autograd.Function):
    """The backward as a function of its own, so that differentiating it is an error. Without this
    the kernels' results would be taken for constants, and second derivatives would be wrong."""

    @staticmethod
    def forward(
        ctx: Any, problem: Problem, store_dh0: bool, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        return tuple(chunk_bwd.gradients(problem, *tensors, store_dh0=store_dh0))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> NoReturn:
        raise RuntimeError(
            "gdn_triton.chunk_gated_delta_rule has no second derivative in the Triton backend, nor "
            "in the CUDA one: use GDN_BACKEND=reference for one"
        )


class _Chunk(torch.autograd.Function):
    """Keeps the inputs and nothing else. The first eight tensors may have gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., tuple[Tensor, Tensor | None]],
        problem: Problem,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        o, final_state = run(
            problem, q, k, v, g, beta, initial_state, cu_seqlens, None, A_log, dt_bias
        )
        ctx.save_for_backward(q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias)
        ctx.problem = problem
        ctx.set_materialize_grads(False)
        # q is what the states do not depend on.
        if final_state is not None and not any(ctx.needs_input_grad[3:]):
            ctx.mark_non_differentiable(final_state)
        return o, final_state

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Tensor | None, ...]:
        if do is None and dht is None:
            return (None,) * 11
        needed = ctx.needs_input_grad[2:10]
        store_dh0 = needed[5]
        found = _Gradients.apply(  # type: ignore[no-untyped-call]
            ctx.problem, store_dh0, do, dht, *ctx.saved_tensors
        )
        wanted = (x if want else None for x, want in zip(found, needed, strict=True))
        return (None, None, *wanted, None)


def differentiable(
    run: Callable[..., tuple[Tensor, Tensor | None]],
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_indices: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """What the forward `run` returns for these arguments, with the Triton backward as its gradient:
    for a problem that Triton serves. `chunk_indices` is left out."""
    return _Chunk.apply(  # type: ignore[no-any-return, no-untyped-call]
        run, problem, q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens
    )


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_indices: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    pool: Pool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """o [B, T, HV, V] in q's dtype and the final state, or None; differentiable once. The same bits
    with and without a gradient. With a `pool`, its o and its states, and no gradient."""
    tensors = (q, k, v, g, beta, initial_state, cu_seqlens, chunk_indices, A_log, dt_bias)
    if problem.needs_grad:
        return differentiable(chunk_fwd.forward, problem, *tensors)
    return chunk_fwd.forward(problem, *tensors, pool)
