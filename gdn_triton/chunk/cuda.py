"""The CUDA backend under autograd: the library's forward, and where a gradient is needed the
library's backward, or the Triton one for a call that the library's does not serve."""

from torch import Tensor

from gdn_triton._host.memory import count_writes
from gdn_triton.chunk.autograd import Find, differentiable
from gdn_triton.chunk.limits import why_triton_gradients
from gdn_triton.chunk.problem import Inputs, Pool, Problem
from gdn_triton.fast import chunk as fast_chunk


def gradients_of(problem: Problem) -> Find:
    """The backward of a problem whose forward the library serves."""
    if why_triton_gradients(problem) is None:
        return fast_chunk.gradients
    # Only this needs Triton.
    from gdn_triton.chunk.triton.backward import gradients

    return gradients


def forward(problem: Problem, x: Inputs, pool: Pool | None = None) -> tuple[Tensor, Tensor | None]:
    """o [B, T, HV, V] in q's dtype and the final state, or None; differentiable once. The same bits
    with and without a gradient. With a `pool`, its o and its states, and no gradient."""
    if problem.needs_grad:
        return differentiable(fast_chunk.forward, gradients_of(problem), problem, x)
    if pool is not None:
        count_writes(pool.state, pool.out, pool.checkpoints)
    return fast_chunk.forward(problem, x, pool)
