"""Where a program of the walks lies: a sequence, or a segment of one (segments.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gdn_triton.chunk.triton.hopper.names import CHUNK
from gdn_triton.chunk.triton.hopper.places import (
    FORGOTTEN,
    MOST_WINDOW,
    segment_of,
    sequence_of,
    slot_of,
)


@gluon.jit
def walk_of(
    i_w,
    of_map,
    cu_seqlens,
    T,
    N,
    NS,
    segment,
    BN: gl.constexpr,
    PART: gl.constexpr,
    IS_BACK: gl.constexpr,
    IS_VARLEN: gl.constexpr,
):
    """(batch entry, its sequence, tokens of this before the walk, first row, rows, slot, whether
    the walk ends within the sequence) of walk i_w of a part. The state between two segments has the
    slot that `segment_of` gives to the second one. The slot of a later walk is that of its first
    state, that of another walk of a segment the one of its last state, and that of a sequence its
    first."""
    slot = i_w * 0
    is_inner = i_w < 0
    tokens = i_w * 0
    i_n = i_w
    if PART != "later":
        i_n = gl.where(of_map, 0, i_w)
        i_b, first_row, n_rows, _ = sequence_of(i_n, cu_seqlens, T, N, IS_VARLEN)
    if PART == "ends" or PART == "again":
        slot = slot_of(i_n, cu_seqlens, None, N, NS, segment, segment, BN, -1, IS_VARLEN)
    if PART == "ends":
        later = (gl.maximum(n_rows, 1) - 1) // segment
        is_inner = later > 0
        if IS_BACK:
            slot += later - 1
            tokens = later * segment
            first_row += tokens
        n_rows = gl.minimum(n_rows - tokens, segment)
    if PART == "later" or (PART == "ends" and IS_BACK):
        inner_b, inner_n, inner_tokens, inner_row, inner_rows, is_last = segment_of(
            *(i_w, cu_seqlens, None, T, N, NS, segment, segment, BN, -1, IS_VARLEN)
        )
    if PART == "ends" and IS_BACK:
        inner_rows *= 1 - is_last
        i_b, i_n = gl.where(of_map, inner_b, i_b), gl.where(of_map, inner_n, i_n)
        tokens = gl.where(of_map, inner_tokens, tokens)
        first_row = gl.where(of_map, inner_row, first_row)
        n_rows = gl.where(of_map, inner_rows, n_rows)
        slot = gl.where(of_map, i_w, slot)
        is_inner = gl.where(of_map, inner_rows > 0, is_inner)
    if PART == "later":
        i_b, i_n, slot = inner_b, inner_n, i_w
        tokens, first_row, n_rows = inner_tokens, inner_row, inner_rows
        is_inner = (is_last == 0) & (inner_rows > 0)
        if IS_BACK:
            # The walk back ends where the walk forward of the same slot begins.
            n_rows = gl.where(inner_rows > 0, segment, 0)
            tokens -= n_rows
            first_row -= n_rows
            is_inner = tokens > 0
    return i_b, i_n, tokens, first_row, n_rows, slot, is_inner


@gluon.jit
def first_window(p_g, stride_gt, n_rows):
    """The least number of whole chunks at the start of ``n_rows`` rows that together decay by more
    than 2^FORGOTTEN, or 0 if there are none among the first MOST_WINDOW. p_g: the sums of the log2
    decays of each chunk. After a NaN there are none."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    o_w = gl.arange(0, MOST_WINDOW, gl.SliceLayout(1, PAIRS))
    o_c = gl.arange(0, MOST_WINDOW, gl.SliceLayout(0, PAIRS))
    row = (o_c + 1) * CHUNK - 1
    g = gl.load(p_g + row.to(gl.int64) * stride_gt, mask=row < n_rows, other=0)
    sums = gl.sum(gl.where(o_c[None, :] <= o_w[:, None], g[None, :], 0.0), 1)
    enough = (sums <= -FORGOTTEN) & ((o_w + 1) * CHUNK <= n_rows)
    # Chunks from the window's last one to that of the longest window.
    spare = gl.max(gl.where(enough, MOST_WINDOW - o_w, 0), 0)
    return gl.where(spare > 0, MOST_WINDOW + 1 - spare, 0)


@gluon.jit
def any_differs(p_differs, HV, MARKS: gl.constexpr, count, BS: gl.constexpr):
    """1 if one of the marks of ``count`` segments of a sequence is 1, else 0."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    o_s = gl.arange(0, BS, LANES)
    p = p_differs + o_s.to(gl.int64) * (HV * MARKS)
    marks = gl.load(p, mask=o_s < count, other=0)
    for c in gl.static_range(1, MARKS):
        marks |= gl.load(p + c, mask=o_s < count, other=0)
    return gl.max(marks, 0)
