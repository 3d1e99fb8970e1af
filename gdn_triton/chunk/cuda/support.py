"""The problems that the CUDA library serves, forward and backward, by the `Problem` and the limits
of its device's architecture.

A `Problem` has no addresses and no strides. These are never a reason to refuse, because
`gdn_triton.chunk.cuda.calls` copies tensors that TMA cannot read in place.
"""

import torch

from gdn_triton import fast
from gdn_triton._host.backends import requested_backend
from gdn_triton.chunk.problem import Problem
from gdn_triton.chunk.triton.support import triton_supports


def supports(problem: Problem) -> str | None:
    """A sentence why the CUDA library cannot run this problem's forward, or None."""
    p = problem
    if p.device.type != "cuda":
        return f"The CUDA library runs on NVIDIA GPUs; the tensors are on {p.device.type}."
    unavailable = fast.why_unavailable()
    if unavailable is not None:
        return unavailable
    wrong_device = fast.why_not_on(p.device.index)
    if wrong_device is not None:
        return wrong_device
    limits = fast.architecture_on(p.device.index)
    if p.q_dtype not in limits.dtypes or not p.q_dtype == p.k_dtype == p.v_dtype:
        taken = " or ".join(f"all in {_name(dtype)}" for dtype in limits.dtypes)
        return (
            f"The CUDA library takes q, k and v {taken}; they are {_name(p.q_dtype)}, "
            f"{_name(p.k_dtype)} and {_name(p.v_dtype)}."
        )
    if p.K > limits.max_K or p.K % limits.head_multiple or p.V % limits.head_multiple:
        return (
            f"The CUDA library takes K and V in multiples of {limits.head_multiple}, K up to "
            f"{limits.max_K}; K is {p.K}, V is {p.V}."
        )
    if p.chunk_size != limits.chunk_size:
        return (
            f"The CUDA library computes in chunks of {limits.chunk_size}; {p.chunk_size} is asked "
            "for."
        )
    if p.pool_dtype is not None and p.pool_dtype not in limits.pool_dtypes:
        states = _name(p.pool_dtype)
        return f"The CUDA library computes in float32 at most; the states are {states}."
    if p.T >= limits.max_tokens:
        return f"The CUDA library takes less than {limits.max_tokens} tokens; T is {p.T}."
    return None


def backward_supports(problem: Problem) -> str | None:
    """A sentence why the CUDA library does not make the gradients of a problem whose forward it
    serves, or None. If the library does not make them, the Triton backward does."""
    p, limits = problem, fast.architecture_on(problem.device.index)
    if p.K > limits.backward_max_K:
        return f"The CUDA backward takes K up to {limits.backward_max_K}; K is {p.K}."
    slices = p.HV * -(-p.V // limits.backward_V)
    chunks = (p.B * p.T // limits.chunk_size + p.N) * slices
    if chunks >= limits.backward_max_chunks:
        return (
            f"The CUDA backward takes less than {limits.backward_max_chunks} chunks of slices: "
            f"(B * T / {limits.chunk_size} + N) * HV * ceil(V / {limits.backward_V}) is {chunks}."
        )
    if p.B * p.T >= limits.backward_max_tokens:
        return (
            f"The CUDA backward takes less than {limits.backward_max_tokens} tokens; B * T is "
            f"{p.B * p.T}."
        )
    return None


def backward_wasteful(problem: Problem) -> str | None:
    """A sentence why `GDN_BACKEND=auto` lets Triton make the gradients of a problem that
    `backward_supports` accepts, or None."""
    p, limits = problem, fast.architecture_on(problem.device.index)
    K, V = limits.backward_max_K, -(-p.V // limits.backward_V) * limits.backward_V
    if p.K * p.V >= limits.backward_least_use * K * V:
        return None
    return (
        f"The CUDA backward computes with K = {K} and V = {V} for this call's K = {p.K} and "
        f"V = {p.V}, and Triton's takes less time; GDN_BACKEND=cuda takes the CUDA backward."
    )


def why_triton_gradients(problem: Problem) -> str | None:
    """A sentence why the Triton backward makes the gradients of a problem whose forward the CUDA
    library serves, or None if the library makes them."""
    refusal = backward_supports(problem)
    if refusal is not None:
        return refusal
    wasteful = backward_wasteful(problem)
    if wasteful is None or requested_backend() == "cuda" or triton_supports(problem) is not None:
        return None
    return wasteful


def why_no_part_gradients(problem: Problem) -> str | None:
    """A sentence why the CUDA library does not make the gradients of a rank's part of a split call
    whose forward it serves, or None."""
    p, limits = problem, fast.architecture_on(problem.device.index)
    channels, dtype = limits.part_backward_channels, limits.part_backward_dtype
    if p.K != channels or p.V != channels or p.q_dtype is not dtype:
        return (
            f"The CUDA backward of a part of a sequence takes K = V = {channels} in "
            f"{_name(dtype)}; K is {p.K}, V is {p.V}, in {_name(p.q_dtype)}."
        )
    return backward_supports(problem)


def walks_support(problem: Problem) -> str | None:
    """A sentence why the Triton backward of a problem whose forward the library serves makes the
    walks over the states itself, or None if the library makes them."""
    p, limits = problem, fast.architecture_on(problem.device.index)
    if limits.backward_max_K < p.K <= limits.walks_max_K:
        return None
    return (
        f"The CUDA library makes a backward's walks for K from {limits.backward_max_K + 1} to "
        f"{limits.walks_max_K}; K is {p.K}."
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
