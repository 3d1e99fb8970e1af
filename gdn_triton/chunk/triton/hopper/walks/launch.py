"""Launches the walks of the backward for compute capability 9.0."""

from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gdn_triton._triton.strides import head_arguments, head_strides, named, state_strides
from gdn_triton._triton.tiles import gpu_of
from gdn_triton.chunk.triton.hopper.launch import COLUMNS, ROWS, descriptor, tma_readable
from gdn_triton.chunk.triton.hopper.walks.back import hopper_walk_back_kernel
from gdn_triton.chunk.triton.shared.chunks import ChunkTable

CHUNK = 64
STATE_REGISTERS, SINGLE_REGISTERS = 232, 32
STAGES = 2


def state_descriptor(x: torch.Tensor, BK: int) -> TensorDescriptor:
    """Returns a TMA descriptor of states x [slots, HV, K, V], contiguous, whose tiles are 64
    columns of one state."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, BK, COLUMNS], ROWS)


def walk_back(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    do: torch.Tensor,
    A_inv: torch.Tensor,
    A_qk: torch.Tensor,
    g_cumsum: torch.Tensor,
    own: torch.Tensor,
    beta: torch.Tensor,
    chunks: ChunkTable,
    scale: float,
    dht: torch.Tensor | None,
    dh: torch.Tensor,
    dx: torch.Tensor,
    dh0: torch.Tensor | None,
    N: int,
    K: int,
    state_v_first: bool,
    **tuning: Any,
) -> None:
    """Writes dh [slots, HV, K, V], dx [B, T, HV, V] and dh0, whose meaning and other arguments are
    those of ``state_bwd`` of gradients/state.py. A_inv lacks its diagonal."""
    H = k.shape[2]
    T, HV, V = do.shape[1:]
    BK = 64 if K <= 64 else 128
    multiprocessors = gpu_of(k.device).multiprocessors
    states = 1 if V <= COLUMNS or 2 * N * HV <= multiprocessors else 2
    fixed = {
        "BV": COLUMNS,
        "STATES": states,
        "STAGES": STAGES,
        "STATE_REGISTERS": STATE_REGISTERS,
        "SINGLE_REGISTERS": SINGLE_REGISTERS,
        **tuning,
    }
    columns = fixed["STATES"] * COLUMNS
    hopper_walk_back_kernel[(-(-V // columns) * HV * N,)](
        q_desc=descriptor(tma_readable(q), BK),
        k_desc=descriptor(tma_readable(k), BK),
        do_desc=descriptor(tma_readable(do), columns),
        p_desc=descriptor(A_qk, CHUNK),
        a_desc=descriptor(A_inv, CHUNK),
        dx_desc=descriptor(dx, COLUMNS),
        dh_desc=state_descriptor(dh, BK),
        g_cumsum=g_cumsum,
        own=own,
        beta=beta,
        dx=dx,
        dht=dht,
        dh0=dh0,
        cu_seqlens=chunks.cu_seqlens,
        chunk_offsets=chunks.chunk_offsets,
        scale=scale,
        T=T,
        N=N,
        NT=chunks.NT,
        H=H,
        HV=HV,
        **head_arguments("g", head_strides(g_cumsum)),
        **head_arguments("beta", head_strides(beta)),
        **named("dhtn dhth dhtk dhtv", state_strides(dht, state_v_first)),
        **named("dh0n dh0h dh0k dh0v", state_strides(dh0, state_v_first)),
        K=K,
        V=V,
        BK=BK,
        IS_VARLEN=chunks.cu_seqlens is not None,
        num_warps=4,
        **fixed,
    )
