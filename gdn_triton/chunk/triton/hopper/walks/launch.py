"""Launches the walks of the backward for compute capability 9.0."""

from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gdn_triton._triton.states import empty_state
from gdn_triton._triton.strides import head_arguments, head_strides, named, state_strides
from gdn_triton._triton.tiles import gpu_of
from gdn_triton.chunk.triton.gradients.state import States
from gdn_triton.chunk.triton.hopper.launch import (
    COLUMNS,
    ROWS,
    choose_shape,
    descriptor,
    tma_readable,
)
from gdn_triton.chunk.triton.hopper.walks.back import hopper_walk_back_kernel
from gdn_triton.chunk.triton.hopper.walks.forward import hopper_walk_forward_kernel
from gdn_triton.chunk.triton.shared.chunks import ChunkTable


def state_descriptor(x: torch.Tensor, BK: int) -> TensorDescriptor:
    """Returns a TMA descriptor of states x [slots, HV, K, V], contiguous, whose tiles are 64
    columns of one state."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, BK, COLUMNS], ROWS)


def fixed_arguments(device: torch.device, N: int, HV: int, K: int, V: int) -> dict[str, Any]:
    shape = choose_shape(gpu_of(device).multiprocessors, N * HV, V)
    return {
        "K": K,
        "V": V,
        "BK": 64 if K <= 64 else 128,
        "BV": COLUMNS,
        "STATES": shape.states,
        "STAGES": 3,
        "T_STAGES": 2,
        "STATE_REGISTERS": shape.state_registers,
        "TRIANGLES_REGISTERS": shape.triangles_registers,
        "SINGLE_REGISTERS": shape.single_registers,
        "num_warps": 4,
    }


def walk_back(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    do: torch.Tensor,
    g_cumsum: torch.Tensor,
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
    those of ``state_bwd`` of gradients/state.py."""
    T, HV, V = do.shape[1:]
    fixed = {**fixed_arguments(k.device, N, HV, K, V), "Q_STAGES": 2, **tuning}
    BK, columns = fixed["BK"], fixed["STATES"] * COLUMNS
    hopper_walk_back_kernel[(-(-V // columns) * HV * N,)](
        q_desc=descriptor(tma_readable(q), BK),
        k_desc=descriptor(tma_readable(k), BK),
        do_desc=descriptor(tma_readable(do), columns),
        dx_desc=descriptor(dx, COLUMNS),
        dh_desc=state_descriptor(dh, BK),
        g_cumsum=g_cumsum,
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
        H=k.shape[2],
        HV=HV,
        **head_arguments("g", head_strides(g_cumsum)),
        **head_arguments("beta", head_strides(beta)),
        **named("dhtn dhth dhtk dhtv", state_strides(dht, state_v_first)),
        **named("dh0n dh0h dh0k dh0v", state_strides(dh0, state_v_first)),
        IS_VARLEN=chunks.cu_seqlens is not None,
        **fixed,
    )


def walk_forward(
    *,
    k: torch.Tensor,
    v: torch.Tensor,
    g_cumsum: torch.Tensor,
    beta: torch.Tensor,
    chunks: ChunkTable,
    initial_state: torch.Tensor | None,
    h: torch.Tensor,
    v_new: torch.Tensor,
    N: int,
    K: int,
    state_v_first: bool,
    **tuning: Any,
) -> None:
    """Writes h [slots, HV, K, V] and v_new [B, T, HV, V] in the same way."""
    T, HV, V = v_new.shape[1:]
    fixed = {**fixed_arguments(k.device, N, HV, K, V), **tuning}
    BK, columns = fixed["BK"], fixed["STATES"] * COLUMNS
    hopper_walk_forward_kernel[(-(-V // columns) * HV * N,)](
        k_desc=descriptor(tma_readable(k), BK),
        v_desc=descriptor(tma_readable(v), columns),
        u_desc=descriptor(v_new, COLUMNS),
        h_desc=state_descriptor(h, BK),
        g_cumsum=g_cumsum,
        beta=beta,
        u=v_new,
        h0=initial_state,
        cu_seqlens=chunks.cu_seqlens,
        chunk_offsets=chunks.chunk_offsets,
        T=T,
        N=N,
        NT=chunks.NT,
        H=k.shape[2],
        HV=HV,
        **head_arguments("g", head_strides(g_cumsum)),
        **head_arguments("beta", head_strides(beta)),
        **named("h0n h0h h0k h0v", state_strides(initial_state, state_v_first)),
        IS_VARLEN=chunks.cu_seqlens is not None,
        **fixed,
    )


def walks(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    A_inv: torch.Tensor,
    A_qk: torch.Tensor,
    g_cumsum: torch.Tensor,
    own: torch.Tensor,
    beta: torch.Tensor,
    chunks: ChunkTable,
    scale: float,
    initial_state: torch.Tensor | None,
    dht: torch.Tensor | None,
    N: int,
    K: int,
    A_is_strict: bool,
    store_dh0: bool,
    state_v_first: bool,
) -> States:
    """Does what ``state_bwd`` of gradients/state.py does, for q, k, v and do in bfloat16, but reads
    no A_inv, A_qk and own, which it computes."""
    del A_inv, A_qk, own, A_is_strict
    B, T, HV, V = do.shape
    h = torch.empty(chunks.slots, HV, K, V, dtype=k.dtype, device=k.device)
    v_new = torch.empty(B, T, HV, V, dtype=k.dtype, device=k.device)
    dh, dx = torch.empty_like(h), torch.empty_like(v_new)
    dh0 = empty_state(N, HV, K, V, state_v_first, k.device) if store_dh0 else None
    walk_forward(
        k=k,
        v=v,
        g_cumsum=g_cumsum,
        beta=beta,
        chunks=chunks,
        initial_state=initial_state,
        h=h,
        v_new=v_new,
        N=N,
        K=K,
        state_v_first=state_v_first,
    )
    walk_back(
        q=q,
        k=k,
        do=do,
        g_cumsum=g_cumsum,
        beta=beta,
        chunks=chunks,
        scale=scale,
        dht=dht,
        dh=dh,
        dx=dx,
        dh0=dh0,
        N=N,
        K=K,
        state_v_first=state_v_first,
    )
    return States(h=h, v_new=v_new, dh=dh, dx=dx, dh0=dh0)
