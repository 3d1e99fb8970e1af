"""The fold of the maps of segments (segments.py), for the forward of compute capability 9.0."""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gdn_triton._triton.launch import Launch
from gdn_triton._triton.tiles import (
    Gpu,
    Tile,
    dependent_launch,
    dot_precision,
    gpu_of,
    starts_config,
)
from gdn_triton.chunk.problem import Pool

# The most columns of a state in a program. Each program reads whole maps, so a head has as few
# programs as fill the multiprocessors.
WIDEST = 64


@triton.jit(do_not_specialize=["N", "NS", "first", "segment"])
def fold_maps_kernel(
    starts,
    shifts,
    windows,
    cu_seqlens,
    read_slots,
    N,
    NS,
    first,
    segment,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
    LAST_SKIPPED: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Makes the start of each segment but a sequence's first two of the start of the one before:
    M S + b, with M in ``shifts`` at the slot of the one before and b in ``starts`` at its own; or b
    alone, where the one before was walked in a window."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    pid = tl.program_id(0).to(tl.int64)
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    i_v, i_nh = pid % V_BLOCKS, pid // V_BLOCKS
    i_long, i_hv = i_nh // HV, i_nh % HV
    if IS_VARLEN:
        o_n = tl.arange(0, BN)
        inside = o_n < N
        bos = tl.load(cu_seqlens + o_n, mask=inside, other=0)
        rows = (tl.load(cu_seqlens + o_n + 1, mask=inside, other=0) - bos).to(tl.int32)
        if read_slots is not None:
            kept = tl.load(read_slots + o_n, mask=inside, other=LAST_SKIPPED) > LAST_SKIPPED
            rows = tl.where(kept, rows, 0)
        counts = (tl.maximum(rows - first, 0) + segment - 1) // segment
        i_n = tl.sum((tl.cumsum((counts > 1).to(tl.int32), 0) <= i_long).to(tl.int32), 0)
        slot = tl.sum(tl.where(o_n < i_n, counts, 0), 0).to(tl.int64)
        count = tl.sum(tl.where(o_n == i_n, counts, 0), 0)
    else:
        slot = i_long * NS
        count = NS
    if count < 2:
        return
    o_k = tl.arange(0, BK)
    o_v = (i_v * BV + tl.arange(0, BV))[None, :]
    in_state = (o_k[:, None] < K) & (o_v < V)
    in_shift = (o_k[:, None] < K) & (o_k[None, :] < K)
    base = slot * HV + i_hv
    p_b = starts + base * (K * V) + (o_k[:, None] * V + o_v)
    MAP: tl.constexpr = K * (K if K > V else V)
    MARKS: tl.constexpr = 1 + (V + 63) // 64
    p_M = shifts + base * MAP + (o_k[:, None] * K + o_k[None, :])
    p_window = windows
    if windows is not None:
        p_window += base * MARKS
    b_h = tl.load(p_b, mask=in_state, other=0)
    for _ in range(1, count):
        p_b += tl.cast(HV, tl.int64) * (K * V)
        made = in_shift
        if windows is not None:
            has_map = tl.load(p_window) == 0
            p_window += HV * MARKS
            made = in_shift & (o_k[:, None] < tl.where(has_map, K, 0))
            # Not multiplied by 0, since it may be NaN.
            b_h = tl.where(has_map, b_h, 0.0)
        b_M = tl.load(p_M, mask=made, other=0)
        b_b = tl.load(p_b, mask=in_state, other=0)
        b_h = tl.dot(b_M, b_h, b_b, input_precision=PRECISION)
        tl.store(p_b, b_h, mask=in_state)
        p_M += tl.cast(HV, tl.int64) * MAP


@functools.lru_cache(maxsize=256, typed=True)
def fold_launch(
    gpu: Gpu, config: Tile, HV: int, K: int, V: int, BN: int, last_skipped: int, is_varlen: bool
) -> Launch:
    return Launch(
        fold_maps_kernel,
        HV=HV,
        K=K,
        V=V,
        BK=config.BK,
        BV=config.BV,
        BN=BN,
        PRECISION=dot_precision(torch.float32),
        LAST_SKIPPED=last_skipped,
        IS_VARLEN=is_varlen,
        **config.options,
        **dependent_launch(gpu),
    )


def fold_maps(
    starts: torch.Tensor,
    shifts: torch.Tensor,
    windows: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    *,
    N: int,
    most_long: int,
    BN: int,
    NS: int,
    first: int,
    segment: int,
    pool: Pool | None = None,
) -> None:
    """starts, shifts and windows: of ``Segments`` in launch.py."""
    HV, K, V = starts.shape[1:]
    gpu = gpu_of(starts.device)
    tile = starts_config(gpu, K, V)
    while tile.BV < min(WIDEST, V) and HV * -(-V // tile.BV) > gpu.multiprocessors:
        tile = tile._replace(BV=2 * tile.BV)
    last_skipped = -1 if pool is None else pool.last_skipped
    fold_launch(gpu, tile, HV, K, V, BN, last_skipped, cu_seqlens is not None)(
        (most_long * HV * -(-V // tile.BV), 1, 1),
        starts=starts,
        shifts=shifts,
        windows=windows,
        cu_seqlens=cu_seqlens,
        read_slots=None if pool is None else pool.read_slots,
        N=N,
        NS=NS,
        first=first,
        segment=segment,
    )
