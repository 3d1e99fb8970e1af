"""Where the walk of a program lies: a sequence, or a segment of one (fused/segments.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def sequence_of(i_w, cu_seqlens, T, N, IS_VARLEN: gl.constexpr):
    """(batch entry, first row, rows, rows of no sequence that follow) of sequence i_w."""
    if IS_VARLEN:
        first_row = gl.load(cu_seqlens + i_w).to(gl.int32)
        end = gl.load(cu_seqlens + i_w + 1).to(gl.int32)
        return i_w * 0, first_row, end - first_row, gl.where(i_w == N - 1, T - end, 0)
    else:
        return i_w, i_w * 0, i_w * 0 + T, i_w * 0


@gluon.jit
def segment_of(
    i_w,
    chunk_rows,
    chunk_offsets,
    T,
    N,
    NS,
    segment,
    BN: gl.constexpr,
    IS_VARLEN: gl.constexpr,
):
    """(batch entry, first row, rows, rows of no sequence, its sequence, 1 if it is the first there,
    1 if the last) of segment slot i_w."""
    if IS_VARLEN:
        LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        i_b = i_w * 0
        first_row = gl.load(chunk_rows + i_w * 2)
        listed = gl.load(chunk_rows + i_w * 2 + 1)
        n_rows = gl.maximum(listed, 0)
        n_rest = gl.maximum(-listed, 0)
        o_n = gl.arange(0, BN, LANES)
        ends = gl.load(chunk_offsets + 1 + o_n, mask=o_n < N, other=2147483647)
        i_n = gl.sum((ends <= i_w).to(gl.int32), 0)
        first = gl.load(chunk_offsets + i_n)
        end = gl.load(chunk_offsets + gl.minimum(i_n + 1, N))
    else:
        i_b = i_w // NS
        first_row = i_w % NS * segment
        n_rows = gl.minimum(T - first_row, segment)
        n_rest = i_w * 0
        i_n = i_b
        first = i_n * NS
        end = first + NS
    is_first = (i_w == first).to(gl.int32)
    is_last = (i_w + 1 == end).to(gl.int32)
    return i_b, first_row, n_rows, n_rest, i_n, is_first, is_last
