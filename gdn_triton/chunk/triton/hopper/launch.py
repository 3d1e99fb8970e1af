"""Launches the forward for compute capability 9.0."""

import functools
from typing import NamedTuple

import torch

from gdn_triton._triton.states import empty_state
from gdn_triton._triton.strides import head_strides, named, state_strides
from gdn_triton._triton.tiles import gpu_of
from gdn_triton.chunk.problem import Inputs, Pool, Problem
from gdn_triton.chunk.triton.fused.segments import fold_maps
from gdn_triton.chunk.triton.hopper.descriptors import (
    COLUMNS,
    TileLaunch,
    row_tile,
    tma_reachable,
    tma_readable,
)
from gdn_triton.chunk.triton.hopper.kernel import hopper_fwd_kernel
from gdn_triton.chunk.triton.hopper.segments import choose_segments, states_at_once
from gdn_triton.chunk.triton.shared.chunks import ChunkTable, make_chunks
from gdn_triton.chunk.triton.shared.pool import (
    PoolLayout,
    pool_arguments,
    pool_layout,
    pool_numbers,
    pool_pointers,
)
from gdn_triton.chunk.triton.steps.l2norm import l2norm_fwd
from gdn_triton.constants import L2NORM_EPS, LOG2_DECAY_FLOOR, RCP_LN2, SOFTPLUS_THRESHOLD

CHUNK = 64


class Shape(NamedTuple):
    """States of a block, of 64 columns of V each, and how its warps share its 64K registers: of a
    thread of the states' warps, of the triangles' and of the single warps."""

    states: int
    state_registers: int
    triangles_registers: int
    single_registers: int


TWO = Shape(states=2, state_registers=184, triangles_registers=112, single_registers=32)
# The only state has the registers that are left, at most 256.
ONE = Shape(states=1, state_registers=256, triangles_registers=168, single_registers=40)


def choose_shape(multiprocessors: int, states: float, V: int) -> Shape:
    """One state of 64 columns a block, where even so each block has a multiprocessor of its own.
    states: of 128 columns, at once. Both give the same bits."""
    return ONE if V <= COLUMNS or 2 * states <= multiprocessors else TWO


@functools.lru_cache(maxsize=256, typed=True)
def forward_launch(
    shape: Shape,
    H: int,
    HV: int,
    K: int,
    V: int,
    g_strides: tuple[int, ...],
    beta_strides: tuple[int, ...],
    h0_strides: tuple[int, ...],
    ht_strides: tuple[int, ...],
    o_strides: tuple[int, ...],
    layout: PoolLayout,
    BN: int,
    *,
    sigmoid: bool,
    neg_eigval: bool,
    varlen: bool,
    output: bool,
    in_segments: bool,
    has_start: bool,
    norm: bool,
) -> TileLaunch:
    """The strides of g, beta and o are those of a token and a head."""
    BK = 64 if K <= 64 else 128
    return TileLaunch(
        hopper_fwd_kernel,
        {
            "q_desc": row_tile(BK),
            "k_desc": row_tile(BK),
            "v_desc": row_tile(shape.states * COLUMNS),
            "o_desc": row_tile(COLUMNS),
        },
        H=H,
        HV=HV,
        **named("gt gh", g_strides),
        **named("betat betah", beta_strides),
        **named("h0n h0h h0k h0v", h0_strides),
        **{**pool_arguments(layout), **named("htn hth htk htv", ht_strides)},
        **named("ot oh", o_strides),
        RCP_LN2=RCP_LN2,
        FLOOR=LOG2_DECAY_FLOOR[torch.float32],
        THRESHOLD=SOFTPLUS_THRESHOLD,
        BETA_FACTOR=2.0 if neg_eigval else 1.0,
        K=K,
        V=V,
        BK=BK,
        BV=COLUMNS,
        STATES=shape.states,
        STAGES=3,
        T_STAGES=2,
        STATE_REGISTERS=shape.state_registers,
        TRIANGLES_REGISTERS=shape.triangles_registers,
        SINGLE_REGISTERS=shape.single_registers,
        USE_SIGMOID=sigmoid,
        BN=BN,
        OUTPUT=output,
        IN_SEGMENTS=in_segments,
        HAS_START=has_start,
        IS_VARLEN=varlen,
        NORM=norm,
        EPS=L2NORM_EPS,
        num_warps=4,
    )


def norm_inside(p: Problem, x: Inputs, shape: Shape) -> bool:
    """Whether the kernel normalises q and k itself, with the bits of the kernel apart. It is slower
    in blocks of one state, where the triangles' warps have no time for the keys, and no faster in
    packed calls. Rows that TMA cannot read are copied anyway, by the kernel that normalises
    them."""
    served = p.q_dtype is torch.bfloat16 and not p.is_varlen and shape.states == 2
    return p.use_qk_l2norm and served and tma_reachable(x.q) and tma_reachable(x.k)


def prepared(p: Problem, x: Inputs, *, norm: bool) -> Inputs:
    """The inputs as TMA reads them, with the norm of q and k, if the call asks for it, and unless
    the kernel does it."""
    q, k = l2norm_fwd(x.q, x.k) if p.use_qk_l2norm and not norm else (x.q, x.k)
    return x._replace(q=tma_readable(q), k=tma_readable(k), v=tma_readable(x.v))


def hopper_fwd(
    problem: Problem, x: Inputs, pool: Pool | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o [B, T, HV, V] in q's dtype and the final state, or None; with a ``pool`` its o and its
    states. x as ``readable_inputs`` of forward.py leaves it; of problems that ``hopper_refusal`` of
    support.py does not refuse."""
    p = problem
    if pool is None:
        o = torch.empty(p.B, p.T, p.HV, p.V, dtype=p.q_dtype, device=p.device)
        initial_state, final_state = x.initial_state, None
        if p.output_final_state:
            final_state = empty_state(p.N, p.HV, p.K, p.V, p.state_v_first, p.device)
    else:
        o = pool.out if tma_reachable(pool.out) else torch.empty_like(pool.out).contiguous()
        initial_state = final_state = pool.state
    walk(p, x, o, initial_state, final_state, pool)
    if pool is not None and o is not pool.out:
        pool.out.copy_(o)
        o = pool.out
    return o, final_state


def walk(
    p: Problem,
    x: Inputs,
    o: torch.Tensor,
    initial_state: torch.Tensor | None,
    final_state: torch.Tensor | None,
    pool: Pool | None,
) -> None:
    """Walks all sequences, whole or in segments."""
    multiprocessors = gpu_of(p.device).multiprocessors
    ht_strides = state_strides(final_state, p.state_v_first)
    length = choose_segments(multiprocessors, p)
    if length == 0:
        shape = choose_shape(multiprocessors, states_at_once(p), p.V)
        norm = norm_inside(p, x, shape)
        x = prepared(p, x, norm=norm)
        h0_strides = state_strides(initial_state, p.state_v_first)
        launch(
            p, x, shape, o, initial_state, h0_strides, final_state, ht_strides, pool=pool, norm=norm
        )
        return
    x = prepared(p, x, norm=False)
    skipped = (None, -1) if pool is None else (pool.read_slots, pool.last_skipped)
    segments = make_chunks(p.B, p.T, length * CHUNK, x.cu_seqlens, *skipped)
    starts = torch.empty(segments.slots, p.HV, p.K, p.V, dtype=torch.float32, device=p.device)
    shifts = torch.empty(segments.slots, p.HV, p.K, p.K, dtype=torch.float32, device=p.device)
    strides = state_strides(starts, False)
    none = state_strides(None, False)
    launch(
        *(p, x, TWO, o, None, none, starts, strides, segments),
        shifts=shifts,
        has_start=initial_state is not None,
    )
    fold_maps(
        starts,
        shifts,
        segments,
        initial_state,
        final_state,
        N=p.N,
        state_v_first=p.state_v_first,
        pool=pool,
    )
    at_once = p.HV * -(-p.V // 128) * p.B * p.T / (length * CHUNK)
    shape = choose_shape(multiprocessors, at_once, p.V)
    launch(p, x, shape, o, starts, strides, final_state, ht_strides, segments, pool=pool)


def launch(
    p: Problem,
    x: Inputs,
    shape: Shape,
    o: torch.Tensor,
    h0: torch.Tensor | None,
    h0_strides: tuple[int, ...],
    ht: torch.Tensor | None,
    ht_strides: tuple[int, ...],
    segments: ChunkTable | None = None,
    shifts: torch.Tensor | None = None,
    has_start: bool = False,
    pool: Pool | None = None,
    norm: bool = False,
) -> None:
    """Walks sequences, or their segments, from ``h0`` to ``ht`` and o; with ``shifts`` it makes the
    maps of the segments, without o: b goes to ``ht`` and M to ``shifts``. has_start: the sequences
    do not start from zeros."""
    output = shifts is None
    columns = shape.states * COLUMNS
    blocks = -(-p.V // columns) + (0 if output else -(-p.K // columns))
    walks = p.N if segments is None else segments.slots
    g_strides, beta_strides, o_strides = head_strides(x.g), head_strides(x.beta), o.stride()
    run = forward_launch(
        shape,
        p.H,
        p.HV,
        p.K,
        p.V,
        g_strides[1:],
        beta_strides[1:],
        h0_strides,
        ht_strides,
        o_strides[1:3],
        pool_layout(pool, p.state_v_first),
        1 << p.N.bit_length() if segments is not None and p.is_varlen else 2,
        sigmoid=p.use_beta_sigmoid,
        neg_eigval=p.allow_neg_eigval,
        varlen=p.is_varlen,
        output=output,
        in_segments=segments is not None,
        has_start=has_start,
        norm=norm,
    )
    run(
        (blocks * p.HV * walks, 1, 1),
        q_desc=x.q,
        k_desc=x.k,
        v_desc=x.v,
        o_desc=o,
        g=x.g,
        beta=x.beta,
        A_log=x.A_log,
        dt_bias=x.dt_bias,
        h0=h0,
        o=o,
        ht=ht,
        shifts=shifts,
        cu_seqlens=None if x.cu_seqlens is None else x.cu_seqlens.contiguous(),
        chunk_rows=None if segments is None else segments.chunk_rows,
        chunk_offsets=None if segments is None else segments.chunk_offsets,
        **pool_pointers(pool),
        scale=p.scale,
        T=p.T,
        N=p.N,
        NS=0 if segments is None else segments.NT,
        segment=0 if segments is None else segments.chunk_size,
        **pool_numbers(pool),
        stride_gb=g_strides[0],
        stride_betab=beta_strides[0],
        stride_ob=o_strides[0],
    )
