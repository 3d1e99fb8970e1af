"""The CUDA backend under autograd: the library's forward, and where a gradient is needed the Triton
backward, which takes nothing from a forward but its inputs."""

from torch import Tensor

from gdn_triton.fast import chunk as fast_chunk
from gdn_triton.problem import Pool, Problem


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
    if not problem.needs_grad:
        return fast_chunk.forward(problem, *tensors, pool)
    # Only this needs Triton.
    from gdn_triton.ops.chunk import differentiable

    return differentiable(fast_chunk.forward, problem, *tensors)
