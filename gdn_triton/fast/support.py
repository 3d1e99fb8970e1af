"""What the CUDA library serves, forward and backward, judged from a `Problem` alone; no GPU is
needed to ask.

A `Problem` has no addresses and no strides. Those are never a reason to refuse:
`gdn_triton.fast.chunk` copies what TMA cannot read where it lies.
"""

import torch

from gdn_triton import fast
from gdn_triton.chunk.problem import Problem

CHUNK_SIZE = 64
MAX_K = 256
HEAD_MULTIPLE = 8  # TMA takes rows of whole multiples of 16 bytes
DTYPES = (torch.bfloat16, torch.float16)
POOL_DTYPES = (torch.float32, *DTYPES)
# TMA's coordinates, and the kernels' token numbers, are 32-bit.
MAX_TOKENS = 2**31
BACKWARD_CHANNELS = 128
# Blocks of scratch memory have 32-bit numbers.
BACKWARD_MAX_CHUNKS = 2**28


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
    if p.q_dtype not in DTYPES or not p.q_dtype == p.k_dtype == p.v_dtype:
        return (
            "The CUDA library takes q, k and v all in bfloat16 or all in float16; they are "
            f"{_name(p.q_dtype)}, {_name(p.k_dtype)} and {_name(p.v_dtype)}."
        )
    if p.K > MAX_K or p.K % HEAD_MULTIPLE or p.V % HEAD_MULTIPLE:
        return (
            f"The CUDA library takes K and V in multiples of {HEAD_MULTIPLE}, K up to {MAX_K}; "
            f"K is {p.K}, V is {p.V}."
        )
    if p.chunk_size != CHUNK_SIZE:
        return f"The CUDA library computes in chunks of {CHUNK_SIZE}; {p.chunk_size} is asked for."
    if p.pool_dtype is not None and p.pool_dtype not in POOL_DTYPES:
        states = _name(p.pool_dtype)
        return f"The CUDA library computes in float32 at most; the states are {states}."
    if p.T >= MAX_TOKENS:
        return f"The CUDA library takes less than {MAX_TOKENS} tokens; T is {p.T}."
    return None


def backward_supports(problem: Problem) -> str | None:
    """A sentence why the CUDA library does not make the gradients of this problem, or None. For a
    problem whose forward it serves: where it does not, the Triton backward does."""
    p = problem
    if (p.K, p.V) != (BACKWARD_CHANNELS,) * 2 or p.q_dtype is not torch.bfloat16:
        return (
            f"The CUDA backward takes K = V = {BACKWARD_CHANNELS} in bfloat16; K is {p.K}, V is "
            f"{p.V}, in {_name(p.q_dtype)}."
        )
    chunks = (p.B * p.T // CHUNK_SIZE + p.N) * p.HV
    if chunks >= BACKWARD_MAX_CHUNKS:
        return (
            f"The CUDA backward takes less than {BACKWARD_MAX_CHUNKS} chunks of value heads: "
            f"(B * T / {CHUNK_SIZE} + N) * HV is {chunks}."
        )
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
