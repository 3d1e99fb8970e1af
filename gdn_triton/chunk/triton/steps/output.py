"""Output of a chunk from the state at its start and its corrected values:

    o_i = scale (2^g_i q_i h + sum_{j <= i} (q_i . k_j) 2^(g_i - g_j) v_new_j)

A program owns BV value columns of one chunk and value head. Rows of a packed call that belong to no
sequence are written as zeros.
"""

import torch
import triton
import triton.language as tl

from gdn_triton._triton.strides import in_elements, row_arguments, row_strides
from gdn_triton._triton.tiles import FUSED, dot_precision, gpu_of, output_config
from gdn_triton.chunk.problem import Pool
from gdn_triton.chunk.triton.shared.chunks import ChunkTable
from gdn_triton.chunk.triton.shared.places import chunk_span, decay_of_pairs, store_zeros
from gdn_triton.chunk.triton.shared.pool import out_strides


@triton.jit(do_not_specialize=["T", "NT"])
def output_fwd_kernel(
    q,
    k,
    v_new,
    h,
    g_cumsum,
    o,
    chunk_rows,
    read_slots,
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
    stride_ob,
    stride_ot,
    stride_oh,
    ALIGN_Q: tl.constexpr,
    ALIGN_K: tl.constexpr,
    ALIGN_O: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    LAST_SKIPPED: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """ALIGN_O: 0 if o is dense, without strides."""
    stride_kb, stride_kt, stride_kh = in_elements(stride_kb, stride_kt, stride_kh, ALIGN_K)
    stride_qb, stride_qt, stride_qh = in_elements(stride_qb, stride_qt, stride_qh, ALIGN_Q)
    pid = tl.program_id(0).to(tl.int64)
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    i_v, i_ch = pid % V_BLOCKS, pid // V_BLOCKS
    i_c, i_hv = i_ch // HV, i_ch % HV
    i_h = i_hv // (HV // H)
    i_b, row, n_rows = chunk_span(i_c, chunk_rows, T, NT, BT, IS_VARLEN)
    o_t = tl.arange(0, BT)
    o_v = i_v * BV + tl.arange(0, BV)
    in_v = o_v < V
    # Bases are 64-bit scalars; offsets inside of a chunk fit 32 bits (forward.py ensures it).
    base = (i_b * T + row) * HV + i_hv
    o_o = o_t[:, None] * HV * V + o_v[None, :]
    if ALIGN_O == 0:
        p_o = o + base * V + o_o
    else:
        stride_ob, stride_ot, stride_oh = in_elements(stride_ob, stride_ot, stride_oh, ALIGN_O)
        p_o = o + i_b * stride_ob + row * stride_ot + i_hv * stride_oh
        p_o += o_t[:, None] * stride_ot + o_v[None, :]
    if not IS_VARLEN:
        if read_slots is not None:
            # The rows of a packed sequence that is skipped already have a negative number.
            n_rows = tl.where(tl.load(read_slots + i_b) > LAST_SKIPPED, n_rows, -n_rows)
    if n_rows <= 0:
        store_zeros(p_o, (o_t < -n_rows)[:, None] & in_v[None, :])
        return
    dtype: tl.constexpr = v_new.dtype.element_ty
    valid = o_t < n_rows
    p_q = q + i_b * stride_qb + row * stride_qt + i_h * stride_qh
    p_k = k + i_b * stride_kb + row * stride_kt + i_h * stride_kh
    p_h = h + (i_c * HV + i_hv) * (K * V)

    b_o = tl.zeros([BT, BV], dtype=tl.float32)
    b_A = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        in_k = o_k < K
        mask = valid[:, None] & in_k[None, :]
        b_q = tl.load(p_q + (o_t[:, None] * stride_qt + o_k[None, :]), mask=mask, other=0)
        b_k = tl.load(p_k + (o_t[:, None] * stride_kt + o_k[None, :]), mask=mask, other=0)
        in_h = in_k[:, None] & in_v[None, :]
        b_h = tl.load(p_h + (o_k[:, None] * V + o_v[None, :]), mask=in_h, other=0)
        b_q = b_q.to(dtype)
        b_o = tl.dot(b_q, b_h, b_o, input_precision=PRECISION)
        b_A = tl.dot(b_q, tl.trans(b_k.to(dtype)), b_A, input_precision=PRECISION)

    b_g = tl.load(g_cumsum + base + o_t * HV, mask=valid, other=0)
    b_o *= tl.exp2(b_g)[:, None]
    causal = (o_t[:, None] >= o_t[None, :]) & valid[None, :]
    b_A = tl.where(causal, b_A * decay_of_pairs(b_g, causal), 0.0)
    mask = valid[:, None] & in_v[None, :]
    b_v = tl.load(v_new + base * V + o_o, mask=mask, other=0)
    b_o = tl.dot(b_A.to(dtype), b_v, b_o, input_precision=PRECISION) * scale
    tl.store(p_o, b_o.to(o.dtype.element_ty), mask=mask)


def output_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v_new: torch.Tensor,
    h: torch.Tensor,
    g_cumsum: torch.Tensor,
    chunks: ChunkTable,
    scale: float,
    dtype: torch.dtype,
    pool: Pool | None = None,
) -> torch.Tensor:
    """Returns o [B, T, HV, V] in ``dtype``. q, k: last stride 1; h [slots, HV, K, V] and v_new:
    from ``state_fwd``. pool: the memory of o, and the sequences that are skipped."""
    B, T, H, K = q.shape
    HV, V = v_new.shape[2:]
    o = torch.empty(B, T, HV, V, dtype=dtype, device=q.device) if pool is None else pool.out
    config = output_config(gpu_of(v_new.device), K, V, v_new.dtype)
    grid = chunks.slots * HV * triton.cdiv(V, config.BV)
    if grid == 0:
        return o
    output_fwd_kernel[(grid,)](
        q=q,
        k=k,
        v_new=v_new,
        h=h,
        g_cumsum=g_cumsum,
        o=o,
        chunk_rows=chunks.chunk_rows,
        read_slots=None if pool is None else pool.read_slots,
        scale=scale,
        T=T,
        NT=chunks.NT,
        H=H,
        HV=HV,
        **row_arguments("q", row_strides(q)),
        **row_arguments("k", row_strides(k)),
        **row_arguments("o", out_strides(pool)),
        K=K,
        V=V,
        BT=chunks.chunk_size,
        BK=config.BK,
        BV=config.BV,
        PRECISION=dot_precision(v_new.dtype),
        LAST_SKIPPED=-1 if pool is None else pool.last_skipped,
        IS_VARLEN=chunks.chunk_rows is not None,
        **config.options,
        **FUSED,
    )
    return o
