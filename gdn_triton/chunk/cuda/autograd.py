"""The CUDA backend: the library's forward, with the library's backward or the Triton one, in which
the library walks over the states for some K."""

import functools
from typing import Any

from torch import Tensor

from gdn_triton._host.memory import count_writes
from gdn_triton.chunk.autograd import ByKernels, leaves_nothing
from gdn_triton.chunk.cuda import calls
from gdn_triton.chunk.problem import Inputs, Pool, Problem


def forward(problem: Problem, x: Inputs, pool: Pool | None = None) -> tuple[Tensor, Tensor | None]:
    """Returns o [B, T, HV, V] in q's dtype and the final state or None, without a gradient. With a
    `pool`, o and the states are those of the pool."""
    if pool is not None:
        count_writes(pool.state, pool.out, pool.checkpoints)
    return calls.forward(problem, x, pool)


def by_library() -> ByKernels:
    return ByKernels(run=calls.forward_for_gradients, find=calls.gradients)


def by_triton(*, with_walks: bool) -> ByKernels:
    """The Triton backward after a forward of the library. Only this function needs Triton.
    with_walks: the library walks over the states."""
    from gdn_triton.chunk.triton.backward import gradients

    find = functools.partial(gradients, walk=_walk) if with_walks else gradients
    return ByKernels(run=leaves_nothing(calls.forward), find=find)


def _walk(*, v: Tensor, chunks: Any, A_is_strict: bool, **given: Any) -> calls.Walks:
    """Does by the library what `state_bwd` of the Triton backward does."""
    assert A_is_strict  # of 16-bit inputs, the only ones that the library takes
    return calls.walks(
        v=v[..., : given["do"].shape[3]],
        cu_seqlens=chunks.cu_seqlens,
        chunk_offsets=chunks.chunk_offsets,
        slots=chunks.slots,
        **given,
    )
