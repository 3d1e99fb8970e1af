"""The problems that the Triton kernels of the chunked op serve. Importing this module imports no
Triton."""

from gdn_triton._host.backends import states_refusal, triton_limits
from gdn_triton.chunk.problem import Problem
from gdn_triton.constants import LINE, MAX_ROW_STRIDE, MAX_STATE_SPAN, MAX_TOKENS


def triton_supports(problem: Problem) -> str | None:
    """A sentence why the Triton kernels cannot run this problem, or None."""
    p = problem
    if p.unreadable is not None:
        return p.unreadable
    refusal = triton_limits((p.q_dtype, p.k_dtype, p.v_dtype), p.device.type, p.HV, p.K, p.V)
    refusal = refusal or (None if p.pool_dtype is None else states_refusal(p.pool_dtype))
    return refusal or _offsets_refusal(p)


def _offsets_refusal(p: Problem) -> str | None:
    """The sizes that the kernels number in 32 bits."""
    if p.T >= MAX_TOKENS:
        return f"The Triton kernels take less than {MAX_TOKENS} tokens; T is {p.T}."
    # The rows of q, k and v, and those of the triangles, which have chunk_size numbers for each
    # token and head.
    row = p.HV * max(-(-max(p.K, p.V) // LINE) * LINE, p.chunk_size)
    if row >= MAX_ROW_STRIDE:
        return (
            f"The Triton kernels take rows of less than {MAX_ROW_STRIDE} elements; a token's "
            f"HV * max(K, V, chunk_size), with K and V in multiples of {LINE}, is {row}."
        )
    if p.K * p.V >= MAX_STATE_SPAN:
        return (
            f"The Triton kernels take states of less than {MAX_STATE_SPAN} elements; K * V is "
            f"{p.K * p.V}."
        )
    return None
