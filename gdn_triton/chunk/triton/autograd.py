"""The Triton backend: its forward and its backward."""

from torch import Tensor

from gdn_triton._host.memory import count_writes
from gdn_triton.chunk.autograd import ByKernels, leaves_nothing
from gdn_triton.chunk.problem import Inputs, Pool, Problem
from gdn_triton.chunk.triton import backward as chunk_bwd
from gdn_triton.chunk.triton import forward as chunk_fwd
from gdn_triton.chunk.triton.hopper.support import hopper_refusal


def forward(problem: Problem, x: Inputs, pool: Pool | None = None) -> tuple[Tensor, Tensor | None]:
    """o [B, T, HV, V] in q's dtype and the final state, or None, without a gradient. With a `pool`,
    its o and its states."""
    if pool is not None:
        count_writes(pool.state, pool.out, pool.checkpoints)
    return _run(problem, x, pool)


def _run(problem: Problem, x: Inputs, pool: Pool | None = None) -> tuple[Tensor, Tensor | None]:
    """The forward in one kernel for compute capability 9.0 where that serves the call."""
    chosen = chunk_fwd.forward if hopper_refusal(problem) else chunk_fwd.forward_hopper
    return chosen(problem, x, pool)


def by_triton() -> ByKernels:
    return ByKernels(run=leaves_nothing(_run), find=chunk_bwd.gradients)
