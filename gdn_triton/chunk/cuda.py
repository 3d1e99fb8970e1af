"""The CUDA backend under autograd: the library's forward, and where a gradient is needed the Triton
backward, which takes nothing from a forward but its inputs."""

from torch import Tensor

from gdn_triton._host.memory import count_writes
from gdn_triton.chunk.problem import Inputs, Pool, Problem
from gdn_triton.fast import chunk as fast_chunk


def forward(problem: Problem, x: Inputs, pool: Pool | None = None) -> tuple[Tensor, Tensor | None]:
    """o [B, T, HV, V] in q's dtype and the final state, or None; differentiable once. The same bits
    with and without a gradient. With a `pool`, its o and its states, and no gradient."""
    if not problem.needs_grad:
        if pool is not None:
            count_writes(pool.state, pool.out, pool.checkpoints)
        return fast_chunk.forward(problem, x, pool)
    # Only this needs Triton.
    from gdn_triton.chunk.triton.autograd import differentiable

    return differentiable(fast_chunk.forward, problem, x)
