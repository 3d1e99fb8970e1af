"""The CUDA backend under autograd: the library's forward, and where a gradient is needed the
library's backward, or the Triton one for a call that the library's does not serve: with the
library's walks over the states, where it has them."""

import functools
from typing import Any

from torch import Tensor

from gdn_triton._host.memory import count_writes
from gdn_triton.chunk.autograd import Find, differentiable, leaves_nothing
from gdn_triton.chunk.cuda import calls, support
from gdn_triton.chunk.problem import Inputs, Pool, Problem


def gradients_of(problem: Problem) -> Find:
    """The backward of a problem whose forward the library serves."""
    if support.why_triton_gradients(problem) is None:
        return calls.gradients
    return _triton_gradients(support.walks_support(problem) is None)


def _triton_gradients(with_walks: bool) -> Find:
    # Only this needs Triton.
    from gdn_triton.chunk.triton.backward import gradients

    return functools.partial(gradients, walk=_walk) if with_walks else gradients


def _walk(*, v: Tensor, chunks: Any, A_is_strict: bool, **given: Any) -> calls.Walks:
    """What `state_bwd` of the Triton backward is, by the library."""
    assert A_is_strict  # of 16-bit inputs, the only ones that the library takes
    return calls.walks(
        v=v[..., : given["do"].shape[3]],
        cu_seqlens=chunks.cu_seqlens,
        chunk_offsets=chunks.chunk_offsets,
        slots=chunks.slots,
        **given,
    )


def forward(problem: Problem, x: Inputs, pool: Pool | None = None) -> tuple[Tensor, Tensor | None]:
    """o [B, T, HV, V] in q's dtype and the final state, or None; differentiable once. The same bits
    with and without a gradient. With a `pool`, its o and its states, and no gradient."""
    if problem.needs_grad:
        own = support.why_triton_gradients(problem) is None
        run = calls.forward_for_gradients if own else leaves_nothing(calls.forward)
        return differentiable(run, gradients_of(problem), problem, x)
    if pool is not None:
        count_writes(pool.state, pool.out, pool.checkpoints)
    return calls.forward(problem, x, pool)
