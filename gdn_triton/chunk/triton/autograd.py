"""The Triton backend under autograd: its forward, and its backward where a gradient is needed."""

from torch import Tensor

from gdn_triton._host.memory import count_writes
from gdn_triton.chunk.autograd import differentiable, leaves_nothing
from gdn_triton.chunk.problem import Inputs, Pool, Problem
from gdn_triton.chunk.triton import backward as chunk_bwd
from gdn_triton.chunk.triton import forward as chunk_fwd


def forward(
    problem: Problem, x: Inputs, pool: Pool | None = None, *, on_hopper: bool = False
) -> tuple[Tensor, Tensor | None]:
    """o [B, T, HV, V] in q's dtype and the final state, or None; differentiable once. The same bits
    with and without a gradient. With a `pool`, its o and its states, and no gradient. on_hopper:
    by the kernel for compute capability 9.0."""
    run = chunk_fwd.forward_hopper if on_hopper else chunk_fwd.forward
    if problem.needs_grad:
        return differentiable(leaves_nothing(run), chunk_bwd.gradients, problem, x)
    if pool is not None:
        count_writes(pool.state, pool.out, pool.checkpoints)
    return run(problem, x, pool)
