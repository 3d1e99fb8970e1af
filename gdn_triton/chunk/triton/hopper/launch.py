"""Launches the forward for compute capability 9.0."""

import functools
from typing import Any, Literal, NamedTuple

import torch
import triton

from gdn_triton._triton.states import empty_state
from gdn_triton._triton.strides import head_strides, named, state_strides
from gdn_triton._triton.tiles import gpu_of
from gdn_triton.chunk.problem import Inputs, Pool, Problem
from gdn_triton.chunk.triton.hopper.descriptors import (
    COLUMNS,
    TileLaunch,
    row_tile,
    tma_reachable,
    tma_readable,
)
from gdn_triton.chunk.triton.hopper.fold import fold_maps
from gdn_triton.chunk.triton.hopper.kernel import hopper_fwd_kernel
from gdn_triton.chunk.triton.hopper.segments import Cut, choose_cut, states_of_whole
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
# Half of 64 columns of a state.
STATE_TILE = 1, 1, 64, 64


# A launch walks whole sequences; or, of a call in segments, it walks the first ones, makes the maps
# of the inner ones, walks the later ones, or walks again the rest of a sequence.
Part = Literal["whole", "first", "maps", "later", "again"]


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
# For K > 128: two warpgroups make triangles. The state has the registers that are left.
WIDE = Shape(states=1, state_registers=248, triangles_registers=112, single_registers=40)


def shape_of_whole(multiprocessors: int, p: Problem) -> Shape:
    if p.K > 128:
        return WIDE
    return TWO if states_of_whole(multiprocessors, p) == 2 else ONE


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
    BS: int,
    part: Part,
    *,
    ordered: bool,
    sigmoid: bool,
    neg_eigval: bool,
    varlen: bool,
    dependent: bool,
    norm: bool,
    dealt: bool,
    loaded: bool,
    lines: bool,
) -> TileLaunch:
    """The strides of g, beta and o are those of a token and a head."""
    BK = 64 if K <= 64 else 128 if K <= 128 else 256
    options = {"launch_pdl": True} if dependent else {}
    return TileLaunch(
        hopper_fwd_kernel,
        {
            "q_desc": row_tile(BK),
            "k_desc": row_tile(BK),
            "v_desc": row_tile(shape.states * COLUMNS),
            "o_desc": row_tile(COLUMNS),
            "h0_desc": STATE_TILE if loaded else row_tile(BK),
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
        # A map needs no memory for q, P' and o.
        STAGES=4 if part == "maps" else 3,
        T_STAGES=2,
        STATE_REGISTERS=shape.state_registers,
        TRIANGLES_REGISTERS=shape.triangles_registers,
        SINGLE=shape.single_registers,
        USE_SIGMOID=sigmoid,
        BN=BN,
        BS=BS,
        PART=part,
        ORDERED=ordered,
        IS_VARLEN=varlen,
        NORM=norm,
        DEALT=dealt,
        LOADED=loaded,
        LINES=lines,
        EPS=L2NORM_EPS,
        num_warps=4,
        **options,
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
    cut = choose_cut(multiprocessors, p)
    if cut is not None:
        walk_in_segments(p, x, cut, o, initial_state, final_state, pool)
        return
    shape = shape_of_whole(multiprocessors, p)
    norm = norm_inside(p, x, shape)
    x = prepared(p, x, norm=norm)
    h0_strides = state_strides(initial_state, p.state_v_first)
    launch(p, x, shape, o, initial_state, h0_strides, final_state, ht_strides, pool=pool, norm=norm)


# Packed sequences of which kernels find the order by comparing all pairs.
MOST_ORDERED = 128


def is_ordered(p: Problem) -> bool:
    """Whether the programs of the longest packed sequences begin first."""
    return p.is_varlen and 2 <= p.N <= MOST_ORDERED


def sequences_at_once(p: Problem) -> int:
    """Packed sequences whose lengths a kernel reads at once: at least one for each thread."""
    return max(triton.next_power_of_2(p.N), 128) if p.is_varlen else 2


# The rows of a sequence, on average, up to which a block walks several tiles. In longer ones the
# ends of a tile take little of the time.
MOST_ROWS_DEALT = 52 * CHUNK


def is_dealt(p: Problem, tiles: int, multiprocessors: int) -> bool:
    """Whether a block walks several of the tiles of whole sequences, with the same bits."""
    return p.K <= 128 and tiles > multiprocessors and p.B * p.T <= MOST_ROWS_DEALT * p.N


def order_size(p: Problem) -> int:
    return max(triton.next_power_of_2(p.N), 16)


class Segments(NamedTuple):
    """The segments after the first one of each sequence. They have numbers, sequence by sequence,
    of which the kernels find the rows (places.py).

    slots: an upper bound of their number. most_long: the same of the sequences with two or more,
    which have inner segments. NS: the number of a padded sequence, or ``slots``. first, segment:
    tokens of the first segment, and of each other. BS: a kernel reads this many segments at once.

    starts: fp32 [slots, HV, K, V]. shifts: fp32 [slots, HV, K max(K, V)]: M [K, K]; or the end
    [K, V] of a segment that has no M and an end other than the next start. windows: int32 [slots,
    HV, 1 + blocks of 64 columns]: the chunks of the window, or 0; and, of these columns, whether
    the end differs from the next start.
    """

    slots: int
    most_long: int
    NS: int
    first: int
    segment: int
    BS: int
    starts: torch.Tensor
    shifts: torch.Tensor
    windows: torch.Tensor | None


def make_segments(p: Problem, cut: Cut) -> Segments:
    first, segment = cut.first * CHUNK, cut.rest * CHUNK
    if p.is_varlen:
        # The sequences that are longer than a first segment have rows of their own for all but the
        # end of their last segment.
        longer = min(p.N, p.T // (first + 1))
        NS = slots = max((p.T + longer * max(segment - first - 1, 0)) // segment, 1)
        most_long = min(p.N, slots // 2)
    else:
        NS = -(-(p.T - first) // segment)
        slots = p.B * NS
        most_long = p.B if NS > 1 else 0
    BS = max(triton.next_power_of_2(NS), 128)
    sizes, marks = (slots, p.HV), 1 + -(-p.V // COLUMNS)
    starts = torch.empty(*sizes, p.K, p.V, dtype=torch.float32, device=p.device)
    shifts = torch.empty(*sizes, p.K * max(p.K, p.V), dtype=torch.float32, device=p.device)
    windows = None
    if cut.windows:
        windows = torch.empty(*sizes, marks, dtype=torch.int32, device=p.device)
    return Segments(
        slots=slots,
        most_long=most_long,
        NS=NS,
        first=first,
        segment=segment,
        BS=BS,
        starts=starts,
        shifts=shifts,
        windows=windows,
    )


def walk_in_segments(
    p: Problem,
    x: Inputs,
    cut: Cut,
    o: torch.Tensor,
    initial_state: torch.Tensor | None,
    final_state: torch.Tensor | None,
    pool: Pool | None,
) -> None:
    x = prepared(p, x, norm=False)
    segments = make_segments(p, cut)
    none = state_strides(None, False)
    h0 = initial_state, state_strides(initial_state, p.state_v_first)
    ht = final_state, state_strides(final_state, p.state_v_first)
    starts = segments.starts, state_strides(segments.starts, False)
    given: Any = {"segments": segments, "pool": pool}
    shape = TWO if cut.first_states == 2 else ONE

    # The first two launches do not depend on each other.
    if segments.most_long > 0:
        launch(p, x, TWO, o, None, none, None, starts[1], **given, part="maps")
    launch(p, x, shape, o, *h0, *ht, **given, part="first", dependent=segments.most_long > 0)
    if segments.most_long > 0:
        fold_maps(
            segments.starts,
            segments.shifts,
            segments.windows,
            x.cu_seqlens,
            N=p.N,
            most_long=segments.most_long,
            BN=sequences_at_once(p),
            NS=segments.NS,
            first=segments.first,
            segment=segments.segment,
            pool=pool,
        )
    shape = TWO if cut.later_states == 2 else ONE
    launch(p, x, shape, o, *starts, *ht, **given, part="later", dependent=True)
    if segments.most_long > 0 and segments.windows is not None:
        slot, head = segments.shifts.stride()[:2]
        ends = segments.shifts, (slot, head, p.V, 1)
        launch(p, x, ONE, o, *ends, *ht, **given, part="again", dependent=True)


def launch(
    p: Problem,
    x: Inputs,
    shape: Shape,
    o: torch.Tensor,
    h0: torch.Tensor | None,
    h0_strides: tuple[int, ...],
    ht: torch.Tensor | None,
    ht_strides: tuple[int, ...],
    segments: Segments | None = None,
    part: Part = "whole",
    dependent: bool = False,
    pool: Pool | None = None,
    norm: bool = False,
) -> None:
    """Does a part of a call, from ``h0`` to ``ht`` and o. dependent: its programs may begin before
    those of the launch just before it have ended."""
    columns = shape.states * COLUMNS
    blocks = -(-p.V // columns) + (0 if part != "maps" else -(-p.K // columns))
    walks = p.N
    # The maps of a call in segments begin before its first segments.
    ordered = part == "first" or blocks * p.HV * walks > gpu_of(p.device).multiprocessors
    ordered = ordered and part in ("whole", "first") and is_ordered(p)
    if segments is not None and part != "first":
        walks = segments.most_long if part == "again" else segments.slots
    programs, taken = blocks * p.HV * walks, None
    multiprocessors = gpu_of(p.device).multiprocessors
    dealt = part == "whole" and is_dealt(p, programs, multiprocessors)
    if dealt:
        programs = multiprocessors
        if p.is_varlen:
            taken = torch.zeros(1, dtype=torch.int32, device=p.device)
    g_strides, beta_strides, o_strides = head_strides(x.g), head_strides(x.beta), o.stride()
    # Of whole sequences, TMA loads the states, which are stored by lines, where their channels of
    # V are contiguous.
    whole = dealt and p.K > 64 and pool is None
    lines = whole and ht is not None and ht_strides[3] == 1
    loaded = False
    if whole and shape.states == 2 and not norm and h0 is not None:
        loaded = not p.state_v_first and h0.dtype is torch.float32 and tma_reachable(h0)
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
        (order_size(p) if ordered else 2) if segments is None else sequences_at_once(p),
        2 if segments is None else segments.BS,
        part,
        ordered=ordered,
        sigmoid=p.use_beta_sigmoid,
        neg_eigval=p.allow_neg_eigval,
        varlen=p.is_varlen,
        dependent=dependent,
        norm=norm,
        dealt=dealt,
        loaded=loaded,
        lines=lines,
    )
    run(
        (programs, 1, 1),
        q_desc=x.q,
        k_desc=x.k,
        v_desc=x.v,
        o_desc=o,
        h0_desc=h0 if loaded else x.q,
        g=x.g,
        beta=x.beta,
        A_log=x.A_log,
        dt_bias=x.dt_bias,
        h0=h0,
        o=o,
        ht=ht,
        starts=None if segments is None else segments.starts,
        shifts=None if segments is None else segments.shifts,
        windows=None if segments is None else segments.windows,
        cu_seqlens=None if x.cu_seqlens is None else x.cu_seqlens.contiguous(),
        **pool_pointers(pool),
        taken=taken,
        scale=p.scale,
        T=p.T,
        N=p.N,
        NS=0 if segments is None else segments.NS,
        first=0 if segments is None else segments.first,
        segment=1 if segments is None else segments.segment,
        **pool_numbers(pool),
        stride_gb=g_strides[0],
        stride_betab=beta_strides[0],
        stride_ob=o_strides[0],
    )
