"""Launches the walks of the backward for compute capability 9.0."""

import functools
from typing import Any, Literal, NamedTuple

import torch

from gdn_triton._triton.states import empty_state
from gdn_triton._triton.strides import head_strides, named, state_strides
from gdn_triton._triton.tiles import gpu_of
from gdn_triton.chunk.problem import Problem
from gdn_triton.chunk.triton.fused.segments import fold_maps
from gdn_triton.chunk.triton.gradients.gate import LEAST_BETA
from gdn_triton.chunk.triton.gradients.state import States
from gdn_triton.chunk.triton.hopper import launch as shapes
from gdn_triton.chunk.triton.hopper.descriptors import (
    CHUNK,
    COLUMNS,
    TileLaunch,
    row_tile,
    state_tile,
    tma_readable,
)
from gdn_triton.chunk.triton.hopper.launch import ONE, Shape
from gdn_triton.chunk.triton.hopper.releases import most_states
from gdn_triton.chunk.triton.hopper.segments import states_at_once
from gdn_triton.chunk.triton.hopper.walks.kernel import hopper_walks_kernel
from gdn_triton.chunk.triton.hopper.walks.segments import choose_segment
from gdn_triton.chunk.triton.shared.chunks import ChunkTable, make_chunks

# The walk back has more to hold in the registers of its states than the forward.
TWO = shapes.TWO._replace(state_registers=192, triangles_registers=96)

Walk = Literal["back", "forward"]
# A launch walks whole sequences; or, of a call in segments, it makes their maps, walks them, or
# walks whole sequences again.
Part = Literal["whole", "maps", "segments", "again"]


class Plan(NamedTuple):
    """The forms of the blocks of both walks, and whether the walks run at the same time. segment:
    the chunks of a segment, or 0 for whole sequences."""

    forward: Shape
    back: Shape
    together: bool = True
    segment: int = 0


def choose_plan(problem: Problem) -> Plan:
    """Returns the plan of a call. Both walks of whole sequences run at the same time if all blocks
    of one state that run at once have a multiprocessor. If these take more than half of them,
    blocks of two states are faster in padded calls and slower in packed ones. No form of the blocks
    changes a bit."""
    multiprocessors, V = gpu_of(problem.device).multiprocessors, problem.V
    segment = choose_segment(multiprocessors, problem)
    states = states_at_once(problem)
    blocks = 2 * states * -(-V // COLUMNS)
    together = segment > 0 or blocks <= multiprocessors
    if segment > 0:
        two = True
    elif together:
        two = 2 * blocks > multiprocessors and not problem.is_varlen
    else:
        two = 2 * states > multiprocessors
    shape = TWO if two and V > COLUMNS and most_states() == 2 else ONE
    return Plan(forward=shape, back=shape, together=together, segment=segment)


@functools.lru_cache(maxsize=256, typed=True)
def walks_launch(
    walk: Walk,
    part: Part,
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
        PART=part,
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
    plan: Plan,
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

    segments = chunks
    starts, ends, shifts, windows = None, None, None, None
    marks: dict[Walk, torch.Tensor] = {}
    if plan.segment > 0:
        segments = make_chunks(B, T, plan.segment * CHUNK, chunks.cu_seqlens)
        starts = torch.empty(segments.slots, HV, K, V, dtype=torch.float32, device=k.device)
        ends = torch.empty_like(starts)
        shifts = torch.empty(segments.slots, HV, K, K, dtype=torch.float32, device=k.device)
        windows = torch.empty(segments.slots, HV, dtype=torch.int32, device=k.device)
        sizes = (2, segments.slots, HV, -(-V // COLUMNS))
        both = torch.empty(sizes, dtype=torch.int32, device=k.device)
        marks = {"forward": both[0], "back": both[1]}

    def launch(
        walk: Walk,
        part: Part,
        shape: Shape,
        h0: tuple[torch.Tensor | None, tuple[int, ...]],
        dht: tuple[torch.Tensor | None, tuple[int, ...]],
        dh0: tuple[torch.Tensor | None, tuple[int, ...]],
        *,
        leads: bool = False,
        follows: bool = False,
    ) -> None:
        columns = shape.states * COLUMNS
        blocks = -(-V // columns)
        if part == "maps" and walk == "forward":
            blocks += -(-K // columns)
        run = walks_launch(
            walk,
            part,
            shape,
            k.shape[2],
            HV,
            K,
            V,
            g_strides[1:],
            beta_strides[1:],
            h0[1],
            dht[1],
            dh0[1],
            store_dv=store_dv,
            is_varlen=chunks.cu_seqlens is not None,
            leads=leads,
            follows=follows,
        )
        run(
            (blocks * HV * (N if part in ("whole", "again") else segments.slots), 1, 1),
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
            h0=h0[0],
            dht=dht[0],
            dh0=dh0[0],
            starts=starts,
            shifts=shifts,
            windows=windows,
            marks=marks.get(walk),
            cu_seqlens=chunks.cu_seqlens,
            chunk_offsets=chunks.chunk_offsets,
            segment_rows=segments.chunk_rows,
            segment_offsets=segments.chunk_offsets,
            scale=scale,
            T=T,
            N=N,
            NT=chunks.NT,
            NS=segments.NT,
            segment=segments.chunk_size,
            stride_gb=g_strides[0],
            stride_betab=beta_strides[0],
        )

    given = initial_state, state_strides(initial_state, state_v_first)
    of_dht = dht, state_strides(dht, state_v_first)
    of_dh0 = dh0, state_strides(dh0, state_v_first)
    part: Part = "whole"
    if plan.segment > 0:
        assert starts is not None and ends is not None and shifts is not None
        strides = state_strides(starts, False)
        launch("forward", "maps", plan.forward, given, of_dht, of_dh0, leads=True)
        launch("back", "maps", plan.back, given, of_dht, (ends, strides), follows=True)
        options: Any = {"N": N, "state_v_first": state_v_first}
        fold_maps(starts, shifts, segments, initial_state, None, **options)
        fold_maps(ends, shifts, segments, dht, dh0, **options, back=True)
        states = (starts, strides), (ends, strides), of_dh0
        launch("forward", "segments", plan.forward, *states, leads=plan.together)
        launch("back", "segments", plan.back, *states, follows=plan.together)
        part = "again"
    launch("forward", part, plan.forward, given, of_dht, of_dh0, leads=plan.together)
    launch("back", part, plan.back, given, of_dht, of_dh0, follows=plan.together)
    return States(h=h, v_new=v_new, dh=dh, dx=dx, dh0=dh0)
