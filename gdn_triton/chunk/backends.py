"""The backends of the chunked op, of the prefill and of a rank's part of a split call: their
refusals, and the functions that run a call."""

import functools
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from gdn_triton._host.backends import (
    Backend,
    GradientKernels,
    Operator,
    load_nothing,
    reference_supports,
)
from gdn_triton.chunk.autograd import ByKernels
from gdn_triton.chunk.cuda import support as cuda_support
from gdn_triton.chunk.problem import Inputs, Pool, Problem
from gdn_triton.chunk.triton.hopper.support import (
    gradients_refusal,
    hopper_refusal,
    walks_refusal,
)
from gdn_triton.chunk.triton.support import triton_supports

if TYPE_CHECKING:
    from gdn_triton.chunk.sharded.autograd import ShardOps


class Forward(Protocol):
    """Runs a call of the chunked op. Returns o and the final states or None. With a `pool`, which
    is given if and only if the problem has a `pool_dtype`, it writes o and the states into the
    pool's memory."""

    def __call__(
        self, problem: Problem, x: Inputs, pool: Pool | None = None
    ) -> tuple[Tensor, Tensor | None]: ...


def _cuda_supports(problem: Problem) -> str | GradientKernels | None:
    """As `Backend.supports`: the library runs the forward, and it or Triton makes the gradients."""
    refusal = problem.unreadable or cuda_support.supports(problem)
    if refusal is not None or not problem.needs_grad:
        return refusal
    why = cuda_support.why_triton_gradients(problem)
    if why is None:
        return _BY_LIBRARY
    refusal = triton_supports(problem)
    if refusal is None:
        return _by_triton(why, with_walks=cuda_support.walks_support(problem) is None)
    return (
        f"An input requires a gradient, and the Triton backward cannot run: {refusal} Nor does the "
        f"library's own serve the call. {why}"
    )


def _triton_supports(problem: Problem) -> str | GradientKernels | None:
    return triton_supports(problem) or (_BY_TRITON if problem.needs_grad else None)


def sharded_cuda_supports(problem: Problem) -> str | GradientKernels | None:
    """As `Backend.supports`, for a rank's part of a split call."""
    refusal = problem.unreadable or cuda_support.supports(problem)
    if refusal is not None or not problem.needs_grad:
        return refusal
    why = cuda_support.why_no_part_gradients(problem)
    if why is None:
        return _PART_BY_LIBRARY
    refusal = triton_supports(problem)
    if refusal is None:
        return _part_by_triton(why)
    return f"{why} The Triton backward cannot run either: {refusal}"


def chunk_kernels(problem: Problem, name: str) -> str | None:
    """Sentences that say which of a backend's kernels would run on a GPU; None if it has one form
    of each."""
    if name != "triton" or problem.device.type != "cuda":
        return None
    said = _by_gluon("The forward is", hopper_refusal(problem))
    if not problem.needs_grad:
        return said
    walks = _by_gluon("The walks of the backward are", walks_refusal(problem))
    gradients = _by_gluon("The gradients of chunks are", gradients_refusal(problem))
    return f"{said} {walks} {gradients}"


def _by_gluon(subject: str, refusal: str | None) -> str:
    if refusal is None:
        return f"{subject} by the Gluon kernel for compute capability 9.0."
    return f"{subject} by the portable kernels. {refusal}"


def _load_cuda() -> Forward:
    from gdn_triton.chunk.cuda import autograd

    return autograd.forward


def _load_cuda_gradients() -> ByKernels:
    from gdn_triton.chunk.cuda import autograd

    return autograd.by_library()


@functools.cache
def _load_triton() -> Forward:
    from gdn_triton.chunk.triton import autograd

    def forward(
        problem: Problem, x: Inputs, pool: Pool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return autograd.forward(problem, x, pool, on_hopper=hopper_refusal(problem) is None)

    return forward


def _load_triton_gradients() -> ByKernels:
    from gdn_triton.chunk.triton import autograd

    return autograd.by_triton(
        _load_triton(),
        lambda problem: walks_refusal(problem) is None,
        lambda problem: gradients_refusal(problem) is None,
    )


def _load_reference() -> Forward:
    from gdn_triton.chunk import reference

    return reference.forward


def _load_cuda_shard() -> "ShardOps":
    from gdn_triton.chunk.sharded import cuda

    return cuda


def _load_triton_shard() -> "ShardOps":
    from gdn_triton.chunk.sharded import triton

    return triton


def _load_reference_shard() -> "ShardOps":
    from gdn_triton.chunk.sharded import reference

    return reference


_BY_LIBRARY = GradientKernels(
    _load_cuda_gradients, "The gradients are by the CUDA library's backward."
)
_BY_TRITON = GradientKernels(_load_triton_gradients)


@functools.cache
def _by_triton(why: str, *, with_walks: bool) -> GradientKernels:
    """The Triton backward after a forward of the CUDA library. why: a sentence that says why the
    library's own backward does not run."""

    def load() -> ByKernels:
        from gdn_triton.chunk.cuda import autograd

        return autograd.by_triton(with_walks=with_walks)

    walks = ", with the CUDA library's walks" if with_walks else ""
    return GradientKernels(load, f"The gradients are by the Triton backward{walks}. {why}")


# The `ShardOps` of a rank's part have its backward as well, and therefore nothing is loaded for it.
_PART_BY_LIBRARY = GradientKernels(load_nothing, _BY_LIBRARY.sentence)


@functools.cache
def _part_by_triton(why: str) -> GradientKernels:
    return GradientKernels(load_nothing, f"The gradients are by the Triton backward. {why}")


_CHUNK_BACKENDS: tuple[Backend[Problem, Forward], ...] = (
    Backend("cuda", _cuda_supports, _load_cuda),
    Backend("triton", _triton_supports, _load_triton),
    Backend("reference", reference_supports, _load_reference),
)
CHUNK = Operator("chunk_gated_delta_rule", _CHUNK_BACKENDS, chunk_kernels)
PREFILL = Operator("chunk_prefill", _CHUNK_BACKENDS, chunk_kernels)

# A call of the chunked op that is split over ranks.
SHARDED: Operator[Problem, "ShardOps"] = Operator(
    "chunk_gated_delta_rule",
    (
        Backend("cuda", sharded_cuda_supports, _load_cuda_shard),
        Backend("triton", triton_supports, _load_triton_shard),
        Backend("reference", reference_supports, _load_reference_shard),
    ),
)
