"""The CUDA backend under autograd: the library's forward, and where a gradient is needed the
library's backward, or the Triton one for a call that the library's does not serve: with the
library's walks over the states, where it has them."""

import functools
from typing import Any

from torch import Tensor

from gdn_triton._host.memory import count_writes
from gdn_triton.chunk.autograd import Find, differentiable
from gdn_triton.chunk.limits import why_triton_gradients
from gdn_triton.chunk.problem import Inputs, Pool, Problem
from gdn_triton.fast import chunk as fast_chunk
from gdn_triton.fast.support import walks_support


def gradients_of(problem: Problem) -> Find:
    """The backward of a problem whose forward the library serves."""
    if why_triton_gradients(problem) is None:
        return fast_chunk.gradients
    return _triton_gradients(walks_support(problem) is None)


@functools.cache
def _triton_gradients(with_walks: bool) -> Find:
    # Only this needs Triton.
    from gdn_triton.chunk.triton.backward import gradients
    from gdn_triton.chunk.triton.backward_state import States
    from gdn_triton.chunk.triton.chunks import ChunkTable

    if not with_walks:
        return gradients

    def walk(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        do: Tensor,
        A_inv: Tensor,
        A_qk: Tensor,
        g_cumsum: Tensor,
        own: Tensor,
        beta: Tensor,
        chunks: ChunkTable,
        scale: float,
        initial_state: Tensor | None,
        dht: Tensor | None,
        *,
        A_is_strict: bool,
        **options: Any,
    ) -> States:
        assert A_is_strict  # of 16-bit inputs, the only ones of the library
        found = fast_chunk.walks(
            q=q,
            k=k,
            v=v[..., : do.shape[3]],
            do=do,
            A_inv=A_inv,
            A_qk=A_qk,
            g_cumsum=g_cumsum,
            own=own,
            beta=beta,
            initial_state=initial_state,
            dht=dht,
            cu_seqlens=chunks.cu_seqlens,
            chunk_offsets=chunks.chunk_offsets,
            slots=chunks.slots,
            scale=scale,
            **options,
        )
        return States(**found._asdict())

    return functools.partial(gradients, walk=walk)


def forward(problem: Problem, x: Inputs, pool: Pool | None = None) -> tuple[Tensor, Tensor | None]:
    """o [B, T, HV, V] in q's dtype and the final state, or None; differentiable once. The same bits
    with and without a gradient. With a `pool`, its o and its states, and no gradient."""
    if problem.needs_grad:
        return differentiable(fast_chunk.forward, gradients_of(problem), problem, x)
    if pool is not None:
        count_writes(pool.state, pool.out, pool.checkpoints)
    return fast_chunk.forward(problem, x, pool)
