"""Both serial walks of the backward in one launch. The walk forward computes the states and v_new
as the forward does:

    v_new = x + A_inv x,  x = beta (v - 2^g k h)
    h     = 2^g_last h + sum_i 2^(g_last - g_i) k_i (x) v_new_i

The walk back computes their gradients, where dh is the gradient of the state after a chunk, and dx
that of x:

    dv_new = A_qk^T do + own do + 2^(g_last - g) k dh
    dx     = dv_new + A_inv^T dv_new
    dh     = 2^g_last dh + sum_i 2^g_i (scale q_i (x) do_i - beta_i k_i (x) dx_i)

A_inv and A_qk are strictly lower here; their diagonals, 1 and own, are separate in fp32. Neither
walk reads results of the other, and latency bounds both. With few states they therefore share a
launch, in which even programs walk back and odd ones forward. A program owns BV columns of the
state [K, V] of one sequence and value head, in fp32 registers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from gdn_triton._triton.states import empty_state
from gdn_triton._triton.strides import (
    head_arguments,
    head_strides,
    in_elements,
    named,
    row_arguments,
    row_strides,
    state_strides,
)
from gdn_triton._triton.tiles import FUSED, dot_precision, gpu_of, state_bwd_config
from gdn_triton.chunk.triton.gradients.gate import LEAST_BETA
from gdn_triton.chunk.triton.shared.chunks import ChunkTable
from gdn_triton.chunk.triton.shared.places import sequence_span
from gdn_triton.chunk.triton.shared.pool import StateMemory, state_pointers
from gdn_triton.chunk.triton.shared.update import (
    solve_values,
    solve_values_bwd,
    write_values,
    write_values_bwd,
)


@triton.jit
def walk_forward(
    p_k,
    p_v,
    p_A,
    p_g,
    p_beta,
    p_h0,
    p_h,
    p_v_new,
    n_rows,
    HV,
    stride_kt,
    stride_vt,
    stride_gt,
    stride_betat,
    o_k,
    o_v,
    K_ROW: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    A_IS_STRICT: tl.constexpr,
    HAS_H0: tl.constexpr,
):
    """Walks from a sequence's first chunk to its last. Pointers are to the sequence's first row and
    chunk slot."""
    dtype: tl.constexpr = p_A.dtype.element_ty
    o_t = tl.arange(0, BT)[:, None]
    o_c = tl.arange(0, BT)[None, :]
    in_v = o_v < V
    in_state = (o_k[:, None] < K) & in_v
    o_h = o_k[:, None] * V + o_v
    if HAS_H0:
        b_h = tl.load(p_h0, mask=in_state, other=0).to(tl.float32)
    else:
        b_h = tl.zeros([BK, BV], dtype=tl.float32)
    step = tl.cast(HV, tl.int64) * BT
    for start in range(0, n_rows, BT):
        left = n_rows - start
        valid = o_t < left
        in_values = valid & in_v
        b_hd = b_h.to(dtype)
        tl.store(p_h + o_h, b_hd, mask=in_state)
        b_g = tl.load(p_g + o_t * stride_gt, mask=valid, other=0)
        g_last = tl.load(p_g + (tl.minimum(left, BT) - 1) * stride_gt)
        b_beta = tl.load(p_beta + o_t * stride_betat, mask=valid, other=0).to(tl.float32)
        in_keys = valid & (o_k[None, :] < K_ROW)
        b_k = tl.load(p_k + (o_t * stride_kt + o_k[None, :]), mask=in_keys, other=0).to(dtype)
        b_v = tl.load(p_v + (o_t * stride_vt + o_v), mask=in_values, other=0).to(tl.float32)
        b_A = tl.load(p_A + (o_t * HV * BT + o_c), mask=valid, other=0)

        b_kh = tl.dot(b_k, b_hd, input_precision=PRECISION)
        b_v = solve_values(b_kh, b_v, b_A, b_g, b_beta, PRECISION, A_IS_STRICT)
        tl.store(p_v_new + (o_t * HV * V + o_v), b_v.to(dtype), mask=in_values)
        b_h = write_values(b_h, b_k, b_v, b_g, g_last, valid, PRECISION)
        p_k += tl.cast(stride_kt, tl.int64) * BT
        p_v += tl.cast(stride_vt, tl.int64) * BT
        p_g += tl.cast(stride_gt, tl.int64) * BT
        p_beta += tl.cast(stride_betat, tl.int64) * BT
        p_A += step * BT
        p_v_new += step * V
        p_h += tl.cast(HV, tl.int64) * (K * V)


@triton.jit
def walk_back(
    p_q,
    p_k,
    p_do,
    p_A,
    p_P,
    p_g,
    p_own,
    p_beta,
    p_dht,
    p_dh,
    p_dx,
    p_dh0,
    scale,
    n_rows,
    HV,
    stride_qt,
    stride_kt,
    stride_gt,
    stride_betat,
    o_k,
    o_v,
    K_ROW: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    A_IS_STRICT: tl.constexpr,
    HAS_DHT: tl.constexpr,
    STORE_DH0: tl.constexpr,
    STORE_DV: tl.constexpr,
    LEAST_BETA: tl.constexpr,
):
    """Walks from a sequence's last chunk to its first. Pointers are to the sequence's first row and
    chunk slot."""
    dtype: tl.constexpr = p_A.dtype.element_ty
    o_t = tl.arange(0, BT)[:, None]
    o_c = tl.arange(0, BT)[None, :]
    in_v = o_v < V
    in_state = (o_k[:, None] < K) & in_v
    o_h = o_k[:, None] * V + o_v
    if HAS_DHT:
        b_dh = tl.load(p_dht, mask=in_state, other=0).to(tl.float32)
    else:
        b_dh = tl.zeros([BK, BV], dtype=tl.float32)
    step = tl.cast(HV, tl.int64) * BT
    count = tl.cdiv(n_rows, BT)
    last = (count - 1).to(tl.int64)
    p_q += last * BT * stride_qt
    p_k += last * BT * stride_kt
    p_g += last * BT * stride_gt
    p_beta += last * BT * stride_betat
    p_own += last * BT * stride_gt
    p_A += last * step * BT
    p_P += last * step * BT
    p_do += last * step * V
    p_dx += last * step * V
    p_dh += last * HV * (K * V)
    # g_last is loaded one chunk ahead by hand. Triton would keep it in shared memory, of which two
    # programs of 32 columns use all on a multiprocessor of Hopper.
    g_next = tl.load(p_g + (n_rows - 1 - (count - 1) * BT) * stride_gt, mask=count > 0, other=0)
    for i_t in range(0, count):
        left = n_rows - (count - 1 - i_t) * BT
        valid = o_t < left
        in_values = valid & in_v
        in_keys = valid & (o_k[None, :] < K_ROW)
        b_dhd = b_dh.to(dtype)
        tl.store(p_dh + o_h, b_dhd, mask=in_state)
        b_g = tl.load(p_g + o_t * stride_gt, mask=valid, other=0)
        g_last = g_next
        g_next = tl.load(p_g - stride_gt, mask=i_t < count - 1, other=0)
        b_beta = tl.load(p_beta + o_t * stride_betat, mask=valid, other=0).to(tl.float32)
        b_k = tl.load(p_k + (o_t * stride_kt + o_k[None, :]), mask=in_keys, other=0).to(dtype)
        b_q = tl.load(p_q + (o_t * stride_qt + o_k[None, :]), mask=in_keys, other=0).to(dtype)
        b_A = tl.load(p_A + (o_t * HV * BT + o_c), mask=valid, other=0)
        b_P = tl.load(p_P + (o_t * HV * BT + o_c), mask=valid, other=0)
        b_own = tl.load(p_own + o_t * stride_gt, mask=valid, other=0)
        b_do = tl.load(p_do + (o_t * HV * V + o_v), mask=in_values, other=0).to(dtype)

        b_kdh = tl.dot(b_k, b_dhd, input_precision=PRECISION)
        b_dx = solve_values_bwd(
            b_kdh, b_do, b_P, b_A, b_own, b_g, g_last, valid, PRECISION, A_IS_STRICT
        )
        b_dv = b_dx
        if STORE_DV:
            b_dv *= tl.where(tl.abs(b_beta) < LEAST_BETA, 1.0, b_beta)
        tl.store(p_dx + (o_t * HV * V + o_v), b_dv.to(dtype), mask=in_values)
        b_dh = write_values_bwd(b_dh, b_q, b_k, b_do, b_dx, b_g, g_last, b_beta, scale, PRECISION)
        p_q -= tl.cast(stride_qt, tl.int64) * BT
        p_k -= tl.cast(stride_kt, tl.int64) * BT
        p_g -= tl.cast(stride_gt, tl.int64) * BT
        p_beta -= tl.cast(stride_betat, tl.int64) * BT
        p_own -= tl.cast(stride_gt, tl.int64) * BT
        p_A -= step * BT
        p_P -= step * BT
        p_do -= step * V
        p_dx -= step * V
        p_dh -= tl.cast(HV, tl.int64) * (K * V)
    if STORE_DH0:
        tl.store(p_dh0, b_dh, mask=in_state)


@triton.jit(do_not_specialize=["scale", "T", "NT"])
def state_bwd_kernel(
    q,
    k,
    v,
    do,
    A_inv,
    A_qk,
    g_cumsum,
    own,
    beta,
    h0,
    dht,
    h,
    v_new,
    dh,
    dx,
    dh0,
    cu_seqlens,
    chunk_offsets,
    scale,
    T,
    NT,
    H,
    HV,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_betab,
    stride_betat,
    stride_betah,
    stride_h0n,
    stride_h0h,
    stride_h0k,
    stride_h0v,
    stride_dhtn,
    stride_dhth,
    stride_dhtk,
    stride_dhtv,
    stride_dh0k,
    stride_dh0v,
    ALIGN_Q: tl.constexpr,
    ALIGN_K: tl.constexpr,
    ALIGN_V: tl.constexpr,
    K_ROW: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    A_IS_STRICT: tl.constexpr,
    HAS_H0: tl.constexpr,
    HAS_DHT: tl.constexpr,
    STORE_DH0: tl.constexpr,
    STORE_DV: tl.constexpr,
    LEAST_BETA: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    WALKS: tl.constexpr,
):
    """WALKS: "back", "forward" or "both"."""
    stride_kb, stride_kt, stride_kh = in_elements(stride_kb, stride_kt, stride_kh, ALIGN_K)
    stride_qb, stride_qt, stride_qh = in_elements(stride_qb, stride_qt, stride_qh, ALIGN_Q)
    stride_vb, stride_vt, stride_vh = in_elements(stride_vb, stride_vt, stride_vh, ALIGN_V)
    pid = tl.program_id(0).to(tl.int64)
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    if WALKS == "both":
        is_back = pid % 2 == 0
        pid = pid // 2
    else:
        is_back = WALKS == "back"
    i_v, i_nh = pid % V_BLOCKS, pid // V_BLOCKS
    i_n, i_hv = i_nh // HV, i_nh % HV
    i_h = i_hv // (HV // H)
    i_b, row, n_rows, slot = sequence_span(i_n, cu_seqlens, chunk_offsets, T, NT, IS_VARLEN)
    o_k = tl.arange(0, BK)
    o_v = (i_v * BV + tl.arange(0, BV))[None, :]
    # Bases are 64-bit scalars; offsets inside of a chunk fit 32 bits (forward.py ensures it).
    base = (i_b * T + row) * HV + i_hv
    p_k = k + i_b * stride_kb + row * stride_kt + i_h * stride_kh
    p_g = g_cumsum + i_b * stride_gb + row * stride_gt + i_hv * stride_gh
    p_beta = beta + i_b * stride_betab + row * stride_betat + i_hv * stride_betah
    p_A = A_inv + base * BT
    first_state = (slot * HV + i_hv) * (K * V)
    if WALKS != "forward" and is_back:
        p_dht = dht
        if HAS_DHT:
            # Each branch has a separate name, because the types may differ: see fused_fwd_kernel.
            final = StateMemory(dht, stride_dhtn, stride_dhth, stride_dhtk, stride_dhtv)
            p_dht = state_pointers(final, i_n, i_hv, o_k, o_v)
        p_dh0 = dh0
        if STORE_DH0:
            p_dh0 = dh0 + i_nh * (K * V) + o_k[:, None] * stride_dh0k + o_v * stride_dh0v
        walk_back(
            q + i_b * stride_qb + row * stride_qt + i_h * stride_qh,
            p_k,
            do + base * V,
            p_A,
            A_qk + base * BT,
            p_g,
            own + i_b * stride_gb + row * stride_gt + i_hv * stride_gh,
            p_beta,
            p_dht,
            dh + first_state,
            dx + base * V,
            p_dh0,
            scale,
            n_rows,
            HV,
            stride_qt,
            stride_kt,
            stride_gt,
            stride_betat,
            o_k,
            o_v,
            K_ROW,
            K,
            V,
            BT,
            BK,
            BV,
            PRECISION,
            A_IS_STRICT,
            HAS_DHT,
            STORE_DH0,
            STORE_DV,
            LEAST_BETA,
        )
    elif WALKS != "back":
        p_h0 = h0
        if HAS_H0:
            initial = StateMemory(h0, stride_h0n, stride_h0h, stride_h0k, stride_h0v)
            p_h0 = state_pointers(initial, i_n, i_hv, o_k, o_v)
        walk_forward(
            p_k,
            v + i_b * stride_vb + row * stride_vt + i_hv * stride_vh,
            p_A,
            p_g,
            p_beta,
            p_h0,
            h + first_state,
            v_new + base * V,
            n_rows,
            HV,
            stride_kt,
            stride_vt,
            stride_gt,
            stride_betat,
            o_k,
            o_v,
            K_ROW,
            K,
            V,
            BT,
            BK,
            BV,
            PRECISION,
            A_IS_STRICT,
            HAS_H0,
        )


class States(NamedTuple):
    """h, dh: [slots, HV, K, V], each chunk's starting state and the gradient of its final state.
    v_new, dx: [B, T, HV, V]. All four have the dtype of A_inv. dh0: fp32, in the requested layout.
    """

    h: torch.Tensor
    v_new: torch.Tensor
    dh: torch.Tensor
    dx: torch.Tensor
    dh0: torch.Tensor | None


def state_bwd(
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
    initial_state: torch.Tensor | None = None,
    dht: torch.Tensor | None = None,
    *,
    N: int,
    K: int,
    A_is_strict: bool,
    store_dh0: bool = False,
    store_dv: bool = False,
    state_v_first: bool = False,
) -> States:
    """q, k: [B, T, H, K_row], zero beyond the width K of the keys; v: [B, T, HV, V]; last strides
    1. do: [B, T, HV, V], and A_inv, A_qk: [B, T, HV, chunk_size], contiguous; A_qk lacks its
    diagonal, and A_inv too if ``A_is_strict``. g_cumsum, own: [B, T, HV], with the same strides;
    beta: [B, T, HV]; initial_state and dht are laid out as ``state_v_first`` says. store_dv: the
    result's dx is beta dx, except in rows with |beta| < LEAST_BETA."""
    assert own.stride() == g_cumsum.stride()
    B, T, H, K_row = k.shape
    HV, V = do.shape[2:]
    dtype, device = A_inv.dtype, k.device
    h = torch.empty(chunks.slots, HV, K, V, dtype=dtype, device=device)
    v_new = torch.empty(B, T, HV, V, dtype=dtype, device=device)
    dh, dx = torch.empty_like(h), torch.empty_like(v_new)
    dh0 = empty_state(N, HV, K, V, state_v_first, device) if store_dh0 else None
    states = States(h=h, v_new=v_new, dh=dh, dx=dx, dh0=dh0)
    if N * HV * V == 0:
        return states
    back, forward = state_bwd_config(gpu_of(v.device), K, V, dtype, N * HV)
    launches = {"both": back} if forward is None else {"forward": forward, "back": back}
    for walks, tile in launches.items():
        grid = (2 if walks == "both" else 1) * triton.cdiv(V, tile.BV) * N * HV
        state_bwd_kernel[(grid,)](
            q=q,
            k=k,
            v=v,
            do=do,
            A_inv=A_inv,
            A_qk=A_qk,
            g_cumsum=g_cumsum,
            own=own,
            beta=beta,
            h0=initial_state,
            dht=dht,
            h=h,
            v_new=v_new,
            dh=dh,
            dx=dx,
            dh0=dh0,
            cu_seqlens=chunks.cu_seqlens,
            chunk_offsets=chunks.chunk_offsets,
            scale=scale,
            T=T,
            NT=chunks.NT,
            H=H,
            HV=HV,
            **row_arguments("q", row_strides(q)),
            **row_arguments("k", row_strides(k)),
            **row_arguments("v", row_strides(v)),
            **head_arguments("g", head_strides(g_cumsum)),
            **head_arguments("beta", head_strides(beta)),
            **named("h0n h0h h0k h0v", state_strides(initial_state, state_v_first)),
            **named("dhtn dhth dhtk dhtv", state_strides(dht, state_v_first)),
            **named("dh0k dh0v", state_strides(dh0, state_v_first)[2:]),
            K_ROW=K_row,
            K=K,
            V=V,
            BT=chunks.chunk_size,
            BK=tile.BK,
            BV=tile.BV,
            PRECISION=dot_precision(dtype),
            A_IS_STRICT=A_is_strict,
            HAS_H0=initial_state is not None,
            HAS_DHT=dht is not None,
            STORE_DH0=store_dh0,
            STORE_DV=store_dv,
            LEAST_BETA=LEAST_BETA,
            IS_VARLEN=chunks.cu_seqlens is not None,
            WALKS=walks,
            **tile.options,
            **FUSED,
        )
    return states
