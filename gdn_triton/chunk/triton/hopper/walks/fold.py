"""The fold of the maps of segments (segments.py) from both ends of each sequence."""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gdn_triton._triton.launch import Launch
from gdn_triton._triton.tiles import Gpu, Tile, dependent_launch, dot_precision, starts_config


@triton.jit
def fold(
    p_state,
    p_map,
    p_window,
    count,
    HV,
    o_v,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    MAP: tl.constexpr,
    MARKS: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOWS: tl.constexpr,
    BACK: tl.constexpr,
):
    """Folds ``count`` maps, from the state at p_state on. The states and the maps of each step lie
    HV states and maps after those of the step before, or before them if BACK."""
    o_k = tl.arange(0, BK)
    in_state = (o_k[:, None] < K) & (o_v < V)
    in_map = (o_k[:, None] < K) & (o_k[None, :] < K)
    step = tl.cast(HV, tl.int64)
    if BACK:
        step = -step
        p_M = p_map + (o_k[None, :] * K + o_k[:, None])
    else:
        p_M = p_map + (o_k[:, None] * K + o_k[None, :])
    p_b = p_state + (o_k[:, None] * V + o_v)
    b_h = tl.load(p_b, mask=in_state, other=0)
    for _ in range(count):
        p_b += step * (K * V)
        made = in_map
        if WINDOWS:
            has_map = tl.load(p_window) == 0
            p_window += step * MARKS
            made = in_map & (o_k[:, None] < tl.where(has_map, K, 0))
            # Not multiplied by 0, since it may be NaN.
            b_h = tl.where(has_map, b_h, 0.0)
        b_M = tl.load(p_M, mask=made, other=0)
        b_b = tl.load(p_b, mask=in_state, other=0)
        b_h = tl.dot(b_M, b_h, b_b, input_precision=PRECISION)
        tl.store(p_b, b_h, mask=in_state)
        p_M += step * MAP


@triton.jit(do_not_specialize=["N", "NS", "segment"])
def fold_walks_kernel(
    starts,
    d_starts,
    shifts,
    windows,
    cu_seqlens,
    N,
    NS,
    segment,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Makes of the state between two segments the next one, M S + b, and of the gradient of the
    next state that of the one before, M^T dS + c. Slot i of ``starts`` and ``d_starts`` is the
    state before segment i of `segment_of` (hopper/places.py), where b and c lie; slot i of
    ``shifts`` is M of this segment, left out where it has a window. Even programs go forward."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    pid = tl.program_id(0).to(tl.int64)
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    is_back = pid % 2 == 1
    i_v, i_nh = pid // 2 % V_BLOCKS, pid // 2 // V_BLOCKS
    i_long, i_hv = i_nh // HV, i_nh % HV
    if IS_VARLEN:
        o_n = tl.arange(0, BN)
        inside = o_n < N
        bos = tl.load(cu_seqlens + o_n, mask=inside, other=0)
        rows = (tl.load(cu_seqlens + o_n + 1, mask=inside, other=0) - bos).to(tl.int32)
        counts = (tl.maximum(rows - segment, 0) + segment - 1) // segment
        i_n = tl.sum((tl.cumsum((counts > 1).to(tl.int32), 0) <= i_long).to(tl.int32), 0)
        slot = tl.sum(tl.where(o_n < i_n, counts, 0), 0).to(tl.int64)
        count = tl.sum(tl.where(o_n == i_n, counts, 0), 0)
    else:
        slot = i_long * NS
        count = NS
    if count < 2:
        return
    o_v = (i_v * BV + tl.arange(0, BV))[None, :]
    MAP: tl.constexpr = K * (K if K > V else V)
    MARKS: tl.constexpr = 1 + (V + 63) // 64
    WINDOWS: tl.constexpr = windows is not None
    first = slot * HV + i_hv
    last = first + tl.cast(count - 1, tl.int64) * HV
    p_map = shifts
    # The function takes no None.
    p_window = windows if WINDOWS else shifts
    if is_back:
        p_state = d_starts + last * (K * V)
        p_map += (last - HV) * MAP
        if WINDOWS:
            p_window += (last - HV) * MARKS
        fold(
            *(p_state, p_map, p_window, count - 1, HV, o_v),
            *(K, V, BK, MAP, MARKS, PRECISION, WINDOWS, True),
        )
    else:
        p_state = starts + first * (K * V)
        p_map += first * MAP
        if WINDOWS:
            p_window += first * MARKS
        fold(
            *(p_state, p_map, p_window, count - 1, HV, o_v),
            *(K, V, BK, MAP, MARKS, PRECISION, WINDOWS, False),
        )


@functools.lru_cache(maxsize=256, typed=True)
def fold_launch(
    gpu: Gpu, config: Tile, HV: int, K: int, V: int, BN: int, is_varlen: bool
) -> Launch:
    return Launch(
        fold_walks_kernel,
        HV=HV,
        K=K,
        V=V,
        BK=config.BK,
        BV=config.BV,
        BN=BN,
        PRECISION=dot_precision(torch.float32),
        IS_VARLEN=is_varlen,
        **config.options,
        **dependent_launch(gpu),
    )


def fold_walks(
    starts: torch.Tensor,
    d_starts: torch.Tensor,
    shifts: torch.Tensor,
    windows: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    *,
    gpu: Gpu,
    N: int,
    most_long: int,
    BN: int,
    NS: int,
    segment: int,
) -> None:
    """starts, d_starts: fp32 [slots, HV, K, V]. shifts, windows, most_long: of ``Segments`` in
    hopper/launch.py."""
    HV, K, V = starts.shape[1:]
    tile = starts_config(gpu, K, V)
    fold_launch(gpu, tile, HV, K, V, BN, cu_seqlens is not None)(
        (2 * most_long * HV * -(-V // tile.BV), 1, 1),
        starts=starts,
        d_starts=d_starts,
        shifts=shifts,
        windows=windows,
        cu_seqlens=cu_seqlens,
        N=N,
        NS=NS,
        segment=segment,
    )
