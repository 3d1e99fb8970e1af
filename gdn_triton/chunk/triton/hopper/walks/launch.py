"""Launches the walks of the backward for compute capability 9.0."""

import functools
from typing import Literal, NamedTuple

import torch

from gdn_triton._triton.states import empty_state
from gdn_triton._triton.strides import head_strides, named, state_strides
from gdn_triton._triton.tiles import gpu_of
from gdn_triton.chunk.triton.gradients.gate import LEAST_BETA
from gdn_triton.chunk.triton.gradients.state import States
from gdn_triton.chunk.triton.hopper import launch as shapes
from gdn_triton.chunk.triton.hopper.descriptors import (
    COLUMNS,
    TileLaunch,
    row_tile,
    state_tile,
    tma_readable,
)
from gdn_triton.chunk.triton.hopper.launch import ONE, Shape
from gdn_triton.chunk.triton.hopper.walks.kernel import hopper_walks_kernel
from gdn_triton.chunk.triton.shared.chunks import ChunkTable

# The walk back has more to hold in the registers of its states than the forward.
TWO = shapes.TWO._replace(state_registers=192, triangles_registers=96)

Walk = Literal["back", "forward"]


class Plan(NamedTuple):
    """The forms of the blocks of both walks, and whether the walks run at the same time."""

    forward: Shape
    back: Shape
    together: bool = True


def choose_plan(multiprocessors: int, states: int, V: int) -> Plan:
    """Returns walks at the same time if all blocks of one state have a multiprocessor. If they take
    more than half of them, blocks of two states are faster. No form changes a bit."""
    blocks = 2 * states * -(-V // COLUMNS)
    together = blocks <= multiprocessors
    # With few states each block of one state has a multiprocessor of its own.
    two = 2 * blocks > multiprocessors if together else 2 * states > multiprocessors
    shape = TWO if two and V > COLUMNS else ONE
    return Plan(forward=shape, back=shape, together=together)


@functools.lru_cache(maxsize=256, typed=True)
def walks_launch(
    walk: Walk,
    shape: Shape,
    H: int,
    HV: int,
    K: int,
    V: int,
    g_strides: tuple[int, ...],
    beta_strides: tuple[int, ...],
    h0_strides: tuple[int, ...],
    dht_strides: tuple[int, ...],
    dh0_strides: tuple[int, ...],
    *,
    store_dv: bool,
    is_varlen: bool,
    leads: bool,
    follows: bool,
) -> TileLaunch:
    """The strides of g_cumsum and beta are those of a token and a head."""
    columns, BK = shape.states * COLUMNS, 64 if K <= 64 else 128
    options = {"launch_pdl": True} if follows else {}
    return TileLaunch(
        hopper_walks_kernel,
        {
            "q_desc": row_tile(BK),
            "k_desc": row_tile(BK),
            "v_desc": row_tile(columns),
            "do_desc": row_tile(columns),
            "dx_desc": row_tile(COLUMNS),
            "dh_desc": state_tile(BK),
            "u_desc": row_tile(COLUMNS),
            "h_desc": state_tile(BK),
        },
        H=H,
        HV=HV,
        **named("gt gh", g_strides),
        **named("betat betah", beta_strides),
        **named("h0n h0h h0k h0v", h0_strides),
        **named("dhtn dhth dhtk dhtv", dht_strides),
        **named("dh0n dh0h dh0k dh0v", dh0_strides),
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
        IS_BACK=walk == "back",
        IS_VARLEN=is_varlen,
        LEADS=leads,
        FOLLOWS=follows,
        num_warps=4,
        **options,
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
    g_strides, beta_strides = head_strides(g_cumsum), head_strides(beta)

    def launch(walk: Walk, shape: Shape, *, leads: bool = False, follows: bool = False) -> None:
        programs = -(-V // (shape.states * COLUMNS)) * HV * N
        run = walks_launch(
            walk,
            shape,
            k.shape[2],
            HV,
            K,
            V,
            g_strides[1:],
            beta_strides[1:],
            state_strides(initial_state, state_v_first),
            state_strides(dht, state_v_first),
            state_strides(dh0, state_v_first),
            store_dv=store_dv,
            is_varlen=chunks.cu_seqlens is not None,
            leads=leads,
            follows=follows,
        )
        run(
            (programs, 1, 1),
            q_desc=q,
            k_desc=k,
            v_desc=v,
            do_desc=do,
            dx_desc=dx,
            dh_desc=dh,
            u_desc=v_new,
            h_desc=h,
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
            stride_gb=g_strides[0],
            stride_betab=beta_strides[0],
        )

    plan = choose_plan(gpu_of(k.device).multiprocessors, N * HV, V)
    launch("forward", plan.forward, leads=plan.together)
    launch("back", plan.back, follows=plan.together)
    return States(h=h, v_new=v_new, dh=dh, dx=dx, dh0=dh0)
