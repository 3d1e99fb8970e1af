"""Functions that the kernels share: the place of a chunk, and base-2 decays without overflow."""

import triton
import triton.language as tl


@triton.jit
def chunk_span(i_c, chunk_rows, T, NT, BT, IS_VARLEN: tl.constexpr):
    """Returns the place of chunk slot ``i_c``: (batch entry, its first row there, its number of
    rows). Padded: slot ``i_c`` is chunk ``i_c % NT`` of batch entry ``i_c // NT``. Packed: the
    slot's row of ``chunk_rows`` (see chunks.py); 0 or fewer rows mean that no sequence fills it."""
    if IS_VARLEN:
        i_b = i_c * 0
        row = tl.load(chunk_rows + i_c * 2).to(tl.int64)
        n_rows = tl.load(chunk_rows + i_c * 2 + 1)
    else:
        i_b = i_c // NT
        row = (i_c % NT) * BT
        n_rows = tl.minimum(T - row, BT).to(tl.int32)
    return i_b, row, n_rows


@triton.jit
def segment_place(i_s, chunk_offsets, N, NS, BN: tl.constexpr, IS_VARLEN: tl.constexpr):
    """Returns, for segment slot ``i_s``, (its sequence, whether it is the first there, the last).
    Padded: a batch entry has ``NS`` segments. Packed: the sequence is the last non-empty one whose
    first slot is at or before ``i_s``; N is less than BN, and few."""
    if IS_VARLEN:
        o_n = tl.arange(0, BN)
        ends = tl.load(chunk_offsets + 1 + o_n, mask=o_n < N, other=2147483647)
        i_n = tl.sum((ends <= i_s).to(tl.int32), 0).to(tl.int64)
        first = tl.load(chunk_offsets + i_n)
        end = tl.load(chunk_offsets + tl.minimum(i_n + 1, N))
    else:
        i_n = i_s // NS
        first = i_n * NS
        end = first + NS
    return i_n, i_s == first, i_s + 1 == end


@triton.jit
def sequence_rows(i_n, cu_seqlens, N, T, IS_VARLEN: tl.constexpr):
    """Returns the place of sequence ``i_n``: (batch entry, first row, number of rows). Packed
    sequence N stands for the rows that belong to none, and their number is negated."""
    if IS_VARLEN:
        i_b = i_n * 0
        row = tl.load(cu_seqlens + i_n).to(tl.int64)
        end = tl.load(cu_seqlens + tl.minimum(i_n + 1, N)).to(tl.int64)
        n_rows = (tl.where(i_n == N, row - T, end - row)).to(tl.int32)
    else:
        i_b = i_n
        row = i_n * 0
        n_rows = (row + T).to(tl.int32)
    return i_b, row, n_rows


@triton.jit
def sequence_span(i_n, cu_seqlens, chunk_offsets, T, NT, IS_VARLEN: tl.constexpr):
    """Returns the place of sequence ``i_n``: (batch entry, first row, number of rows, first chunk
    slot)."""
    if IS_VARLEN:
        i_b = i_n * 0
        row = tl.load(cu_seqlens + i_n).to(tl.int64)
        n_rows = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - row).to(tl.int32)
        first_slot = tl.load(chunk_offsets + i_n).to(tl.int64)
    else:
        i_b = i_n
        row = i_n * 0
        n_rows = (row + T).to(tl.int32)
        first_slot = i_n * NT
    return i_b, row, n_rows, first_slot


@triton.jit
def store_zeros(p, mask):
    """Stores 0 at the pointers p where ``mask``, of their shape, is set."""
    tl.store(p, tl.zeros(mask.shape, dtype=p.dtype.element_ty), mask=mask)


@triton.jit
def decay_between(g_to, g_from, mask):
    """Returns 2^(g_to - g_from) where ``mask`` is set, else exactly 0. The select precedes the
    exponential, because a masked difference may be large and positive, and inf * 0 is NaN."""
    return tl.exp2(tl.where(mask, g_to - g_from, float("-inf")))


@triton.jit
def decay_of_pairs(b_g, mask):
    """Returns 2^(g_i - g_j) of the tokens i, j of a chunk where ``mask`` [BT, BT] is set, else
    exactly 0. b_g: [BT], log2 units."""
    return decay_between(b_g[:, None], b_g[None, :], mask)


@triton.jit
def diagonal(b_x, o_t):
    """Returns the diagonal [BT] of b_x [BT, BT], exactly. o_t: the numbers of its rows."""
    return tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_x, 0.0), 1)


@triton.jit
def decay_cumsum(b_x):
    """Returns the inclusive sum along axis 0 of log2 decays, fp32. The sum is in fixed point, in
    units of 2^-40: integer addition is associative, so the same tokens give the same bits however
    the compiler arranges the scan, and only the result is rounded. From a NaN on (or a growth by
    more than 2^256, which fp32 does not hold) the sum is NaN: it is less than every sum that decays
    above their floor can have."""
    known = tl.abs(b_x) < 256.0
    fixed = (tl.where(known, b_x, 0.0) * 1099511627776.0).to(tl.int64)
    total = tl.cumsum(tl.where(known, fixed, -72057594037927936), 0)
    b_sum = total.to(tl.float32) * 9.094947017729282e-13
    return tl.where(total < -36028797018963968, float("nan"), b_sum)
