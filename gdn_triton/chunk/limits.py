"""What the Triton kernels of the chunked op refuse, and which calls whose forward is the CUDA
library's have their gradients from them."""

from gdn_triton._host.backends import requested_backend, states_refusal, triton_limits
from gdn_triton.chunk.problem import Problem
from gdn_triton.fast import support as fast_support


def triton_supports(problem: Problem) -> str | None:
    """A sentence why the Triton kernels cannot run this problem, or None."""
    p = problem
    if p.unreadable is not None:
        return p.unreadable
    refusal = triton_limits((p.q_dtype, p.k_dtype, p.v_dtype), p.device.type, p.HV, p.K, p.V)
    return refusal or (None if p.pool_dtype is None else states_refusal(p.pool_dtype))


def why_triton_gradients(problem: Problem) -> str | None:
    """A sentence why the Triton backward makes the gradients of a problem whose forward the CUDA
    library serves, or None where the library's own does."""
    refusal = fast_support.backward_supports(problem)
    if refusal is not None:
        return refusal
    wasteful = fast_support.backward_wasteful(problem)
    if wasteful is None or requested_backend() == "cuda" or triton_supports(problem) is not None:
        return None
    return wasteful
