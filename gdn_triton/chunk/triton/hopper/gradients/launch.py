"""Launches the gradients of chunks for compute capability 9.0."""

import functools

import torch

from gdn_triton._triton.strides import head_arguments, head_strides
from gdn_triton._triton.tiles import gpu_of
from gdn_triton.chunk.triton.gradients.gate import ChunkGradients
from gdn_triton.chunk.triton.hopper.descriptors import (
    COLUMNS,
    TileLaunch,
    row_tile,
    state_tile,
    tma_readable,
)
from gdn_triton.chunk.triton.hopper.gradients.kernel import hopper_gradients_kernel
from gdn_triton.chunk.triton.shared.chunks import ChunkTable

# The registers of a thread of the warps of keys, of values and of the single warps. The warps of
# queries have the others.
KEY_REGISTERS, VALUE_REGISTERS, SINGLE_REGISTERS = 208, 80, 32
# The number of units of 32 KB.
RING = 5


@functools.lru_cache(maxsize=256, typed=True)
def gradients_launch(
    H: int,
    HV: int,
    K: int,
    V: int,
    g_strides: tuple[int, ...],
    beta_strides: tuple[int, ...],
    *,
    is_varlen: bool,
) -> TileLaunch:
    BK, BV = (64 if n <= 64 else 128 for n in (K, V))
    rows = ("q_desc", "k_desc", "do_desc", "u_desc", "dv_desc")
    tiles = dict.fromkeys(rows, row_tile(COLUMNS))
    return TileLaunch(
        hopper_gradients_kernel,
        tiles | dict.fromkeys(("h_desc", "dh_desc"), state_tile(BK)),
        H=H,
        HV=HV,
        **head_arguments("g", g_strides),
        **head_arguments("beta", beta_strides),
        K=K,
        V=V,
        BK=BK,
        BV=BV,
        RING=RING,
        KEY_REGISTERS=KEY_REGISTERS,
        VALUE_REGISTERS=VALUE_REGISTERS,
        SINGLE_REGISTERS=SINGLE_REGISTERS,
        IS_VARLEN=is_varlen,
        num_warps=4,
    )


def chunk_gradients(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    do: torch.Tensor,
    h: torch.Tensor,
    u: torch.Tensor,
    dh: torch.Tensor,
    dv: torch.Tensor,
    g_cumsum: torch.Tensor,
    beta: torch.Tensor,
    chunks: ChunkTable,
    scale: float,
    factors: torch.Tensor | None,
    K: int,
) -> ChunkGradients:
    """q, k: [B, T, H, K_row], zero beyond the keys' own width K, last stride 1; do, u (v_new) and
    dv: [B, T, HV, V], h and dh: [slots, HV, K, V], contiguous; all these are bf16. dv: as
    ``state_bwd`` makes it with ``store_dv``; ``gate_bwd`` completes it. g_cumsum, beta: [B, T, HV].
    factors: those of ``l2norm_with_factors``, for dq and dk of the q and k before their norm, or
    None."""
    B, T, H, _ = k.shape
    HV, V = do.shape[2:]
    device = k.device
    dq = torch.empty(B, T, H, K, dtype=q.dtype, device=device)
    dk = torch.empty_like(dq)
    shares = torch.empty(7, B, HV, T, dtype=torch.float32, device=device)
    across = torch.empty(1, chunks.slots, HV, dtype=torch.float32, device=device)
    n_items = chunks.slots * H
    run = gradients_launch(
        H,
        HV,
        K,
        V,
        head_strides(g_cumsum),
        head_strides(beta),
        is_varlen=chunks.chunk_rows is not None,
    )
    run(
        (min(n_items, gpu_of(device).multiprocessors), 1, 1),
        q_desc=tma_readable(q),
        k_desc=tma_readable(k),
        do_desc=tma_readable(do),
        u_desc=u,
        dv_desc=dv,
        h_desc=h,
        dh_desc=dh,
        g_cumsum=g_cumsum,
        beta=beta,
        factors=factors,
        dq=dq,
        dk=dk,
        shares=shares,
        across=across,
        chunk_rows=chunks.chunk_rows,
        scale=scale,
        n_items=n_items,
        B=B,
        T=T,
        NT=chunks.NT,
    )
    return ChunkGradients(
        dq=dq, dk=dk, dv=dv, pair_shares=shares[:4], shares=shares[None, 4:], across=across
    )
