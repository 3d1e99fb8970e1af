"""The Triton backend: its forward and its backward."""

from collections.abc import Callable

from torch import Tensor

from gdn_triton._host.memory import count_writes
from gdn_triton.chunk.autograd import ByKernels, leaves_nothing
from gdn_triton.chunk.problem import Gradients, Inputs, Pool, Problem
from gdn_triton.chunk.triton import backward as chunk_bwd
from gdn_triton.chunk.triton import forward as chunk_fwd


def forward(
    problem: Problem, x: Inputs, pool: Pool | None = None, *, on_hopper: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns o [B, T, HV, V] in q's dtype and the final state or None, without a gradient. With a
    `pool`, o and the states are those of the pool. on_hopper: run the kernel for compute capability
    9.0."""
    if pool is not None:
        count_writes(pool.state, pool.out, pool.checkpoints)
    run = chunk_fwd.forward_hopper if on_hopper else chunk_fwd.forward
    return run(problem, x, pool)


def by_triton(
    forward: Callable[[Problem, Inputs], tuple[Tensor, Tensor | None]],
    walks_on_hopper: Callable[[Problem], bool],
    gradients_on_hopper: Callable[[Problem], bool],
) -> ByKernels:
    """forward: the function that runs the forward. walks_on_hopper: whether the kernels for compute
    capability 9.0 walk over the states of the backward; gradients_on_hopper: whether the kernel for
    it makes the gradients of chunks."""

    def find(
        problem: Problem, x: Inputs, do: Tensor | None, dht: Tensor | None, *, store_dh0: bool
    ) -> Gradients:
        return chunk_bwd.gradients(
            problem,
            x,
            do,
            dht,
            store_dh0=store_dh0,
            walks_on_hopper=walks_on_hopper(problem),
            gradients_on_hopper=gradients_on_hopper(problem),
        )

    return ByKernels(run=leaves_nothing(forward), find=find)
