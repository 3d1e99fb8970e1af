"""The backends of the chunked op, of the prefill and of a rank's part of a split call: what each
refuses, and what runs a call."""

import functools
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from gdn_triton._host.backends import (
    Backend,
    Operator,
    load_nothing,
    reference_supports,
)
from gdn_triton.chunk.cuda import support as cuda_support
from gdn_triton.chunk.problem import Inputs, Pool, Problem
from gdn_triton.chunk.triton.hopper.support import hopper_refusal
from gdn_triton.chunk.triton.support import triton_supports

if TYPE_CHECKING:
    from gdn_triton.chunk.sharded.autograd import ShardOps


class Forward(Protocol):
    """What runs a call of the chunked op: o and the final states, or None. With a `pool`, which is
    there if and only if the problem has a `pool_dtype`, o and the states are written into it."""

    def __call__(
        self, problem: Problem, x: Inputs, pool: Pool | None = None
    ) -> tuple[Tensor, Tensor | None]: ...


def cuda_supports(problem: Problem) -> str | None:
    """A sentence why the CUDA library, or Triton for its gradients, cannot run this, or None."""
    refusal = problem.unreadable or cuda_support.supports(problem)
    if refusal is not None or not problem.needs_grad:
        return refusal
    own = cuda_support.backward_supports(problem)
    if own is None:
        return None
    refusal = triton_supports(problem)
    if refusal is None:
        return None
    return (
        f"An input requires a gradient, and the Triton backward cannot run: {refusal} Nor does the "
        f"library's own serve the call. {own}"
    )


def chunk_gradients(problem: Problem, name: str) -> str | None:
    """A sentence on what makes the gradients of a call in the backend of that name; None where none
    are wanted, or where they are the backend's by its name."""
    if not problem.needs_grad or name != "cuda":
        return None
    why = cuda_support.why_triton_gradients(problem)
    if why is None:
        return "The gradients are by the CUDA library's backward."
    if cuda_support.walks_support(problem) is None:
        return f"The gradients are by the Triton backward, with the CUDA library's walks. {why}"
    return f"The gradients are by the Triton backward. {why}"


def chunk_kernels(problem: Problem, name: str) -> str | None:
    """A sentence on which forward of the backend of that name would run on a GPU; None where it has
    one."""
    if name != "triton" or problem.device.type != "cuda":
        return None
    why = hopper_refusal(problem)
    if why is None:
        return "The forward is by the Gluon kernel for compute capability 9.0."
    return f"The forward is by the portable kernels. {why}"


def sharded_cuda_supports(problem: Problem) -> str | None:
    """A sentence why the CUDA library cannot run a rank's part of a split call."""
    return "The CUDA library does not serve cp_context."


# Loaded modules are cached: even an import statement of a loaded module takes longer.


@functools.cache
def _load_cuda() -> Forward:
    from gdn_triton.chunk.cuda import autograd

    return autograd.forward


@functools.cache
def _load_triton() -> Forward:
    from gdn_triton.chunk.triton import autograd

    def forward(
        problem: Problem, x: Inputs, pool: Pool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        on_hopper = hopper_refusal(problem) is None
        return autograd.forward(problem, x, pool, on_hopper=on_hopper)

    return forward


@functools.cache
def _load_reference() -> Forward:
    from gdn_triton.chunk import reference

    return reference.forward


@functools.cache
def _load_triton_shard() -> "ShardOps":
    from gdn_triton.chunk.sharded import triton

    return triton


@functools.cache
def _load_reference_shard() -> "ShardOps":
    from gdn_triton.chunk.sharded import reference

    return reference


_CHUNK_BACKENDS: tuple[Backend[Problem, Forward], ...] = (
    Backend("cuda", cuda_supports, _load_cuda),
    Backend("triton", triton_supports, _load_triton),
    Backend("reference", reference_supports, _load_reference),
)
CHUNK = Operator("chunk_gated_delta_rule", _CHUNK_BACKENDS, chunk_gradients, chunk_kernels)
PREFILL = Operator("chunk_prefill", _CHUNK_BACKENDS, kernels=chunk_kernels)

# A call of the chunked op that is split over ranks.
SHARDED: Operator[Problem, "ShardOps"] = Operator(
    "chunk_gated_delta_rule",
    (
        Backend("cuda", sharded_cuda_supports, load_nothing),
        Backend("triton", triton_supports, _load_triton_shard),
        Backend("reference", reference_supports, _load_reference_shard),
    ),
)
