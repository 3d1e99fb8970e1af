"""Launches the walks of the backward for compute capability 9.0."""

from typing import NamedTuple

import torch

from gdn_triton._triton.states import empty_state
from gdn_triton._triton.strides import head_arguments, head_strides, named, state_strides
from gdn_triton._triton.tiles import gpu_of
from gdn_triton.chunk.triton.gradients.gate import LEAST_BETA
from gdn_triton.chunk.triton.gradients.state import States
from gdn_triton.chunk.triton.hopper import launch as shapes
from gdn_triton.chunk.triton.hopper.launch import (
    COLUMNS,
    ONE,
    Shape,
    choose_shape,
    descriptor,
    state_descriptor,
    tma_readable,
)
from gdn_triton.chunk.triton.hopper.walks.kernel import hopper_walks_kernel
from gdn_triton.chunk.triton.shared.chunks import ChunkTable

# The walk back has more to hold in the registers of its states than the forward.
TWO = shapes.TWO._replace(state_registers=192, triangles_registers=96)


class Plan(NamedTuple):
    """The launches, each "back", "forward" or "both", and the form of their blocks."""

    launches: tuple[str, ...]
    shape: Shape


def choose_plan(multiprocessors: int, states: int, V: int) -> Plan:
    """Returns one launch if every block of both walks has its own multiprocessor, even with one
    state a block, and two launches otherwise. No form changes a bit."""
    if 2 * states * -(-V // COLUMNS) <= multiprocessors:
        return Plan(("both",), ONE)
    two = choose_shape(multiprocessors, states, V).states == 2
    return Plan(("forward", "back"), TWO if two else ONE)


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
    store_dv: bool = False,
) -> States:
    """Returns the results of ``state_bwd`` of gradients/state.py, for q, k, v and do in bfloat16.
    The walks compute A_inv, A_qk and own themselves and do not read these arguments. store_dv: the
    field dx of the result is beta dx, except in rows with |beta| < LEAST_BETA."""
    del A_inv, A_qk, own, A_is_strict
    B, T, HV, V = do.shape
    h = torch.empty(chunks.slots, HV, K, V, dtype=k.dtype, device=k.device)
    v_new = torch.empty(B, T, HV, V, dtype=k.dtype, device=k.device)
    dh, dx = torch.empty_like(h), torch.empty_like(v_new)
    dh0 = empty_state(N, HV, K, V, state_v_first, k.device) if store_dh0 else None
    q, k, v, do = (tma_readable(x) for x in (q, k, v, do))
    plan = choose_plan(gpu_of(k.device).multiprocessors, N * HV, V)
    shape = plan.shape
    columns, BK = shape.states * COLUMNS, 64 if K <= 64 else 128
    for launch in plan.launches:
        grid = (2 if launch == "both" else 1) * -(-V // columns) * HV * N
        hopper_walks_kernel[(grid,)](
            q_desc=descriptor(q, BK),
            k_desc=descriptor(k, BK),
            v_desc=descriptor(v, columns),
            do_desc=descriptor(do, columns),
            dx_desc=descriptor(dx, COLUMNS),
            dh_desc=state_descriptor(dh, BK),
            u_desc=descriptor(v_new, COLUMNS),
            h_desc=state_descriptor(h, BK),
            g_cumsum=g_cumsum,
            beta=beta,
            dx=dx,
            u=v_new,
            h0=initial_state,
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
            **named("h0n h0h h0k h0v", state_strides(initial_state, state_v_first)),
            **named("dhtn dhth dhtk dhtv", state_strides(dht, state_v_first)),
            **named("dh0n dh0h dh0k dh0v", state_strides(dh0, state_v_first)),
            K=K,
            V=V,
            BK=BK,
            BV=COLUMNS,
            STATES=shape.states,
            STAGES=3,
            Q_STAGES=2,
            T_STAGES=2,
            STATE_REGISTERS=shape.state_registers,
            TRIANGLES_REGISTERS=shape.triangles_registers,
            SINGLE_REGISTERS=shape.single_registers,
            STORE_DV=store_dv,
            LEAST_BETA=LEAST_BETA,
            IS_VARLEN=chunks.cu_seqlens is not None,
            WALKS=launch,
            num_warps=4,
        )
    return States(h=h, v_new=v_new, dh=dh, dx=dx, dh0=dh0)
