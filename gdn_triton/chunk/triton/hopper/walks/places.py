"""Where a segment of a sequence lies that a program of the walks walks over (segments.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gdn_triton.chunk.triton.hopper.names import CHUNK
from gdn_triton.chunk.triton.hopper.places import FORGOTTEN, MOST_WINDOW
from gdn_triton.chunk.triton.hopper.walks import segments

# Packed sequences whose lengths a program reads at once.
MOST_SEQUENCES = gl.constexpr(segments.MOST_SEQUENCES)


@gluon.jit
def segment_at(
    i_w,
    cu_seqlens,
    segment_rows,
    segment_offsets,
    T,
    N,
    NS,
    segment,
    IS_VARLEN: gl.constexpr,
):
    """(its sequence, batch entry, tokens of the sequence before it, first row, rows, 1 if it is the
    last there) of segment slot i_w. segment_rows, segment_offsets: those of a ``ChunkTable`` of
    segments. An empty slot has no rows, or fewer."""
    if IS_VARLEN:
        LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        o_n = gl.arange(0, MOST_SEQUENCES, LANES)
        ends = gl.load(segment_offsets + 1 + o_n, mask=o_n < N, other=2147483647)
        i_n = gl.minimum(gl.sum((ends <= i_w).to(gl.int32), 0), N - 1)
        first_row = gl.load(segment_rows + 2 * i_w)
        n_rows = gl.load(segment_rows + 2 * i_w + 1)
        tokens = first_row - gl.load(cu_seqlens + i_n).to(gl.int32)
        is_last = (i_w + 1 == gl.load(segment_offsets + i_n + 1)).to(gl.int32)
        return i_n, i_w * 0, tokens, first_row, n_rows, is_last
    else:
        i_n = i_w // NS
        tokens = i_w % NS * segment
        is_last = (i_w % NS == NS - 1).to(gl.int32)
        return i_n, i_n, tokens, tokens, gl.minimum(T - tokens, segment), is_last


@gluon.jit
def least_window(g, o_w, o_c, n_chunks):
    """The least number of chunks, from the first of the decays g [MOST_WINDOW] on, that together
    decay by more than 2^FORGOTTEN, or 0 if there are none. Past a NaN there are none."""
    sums = gl.sum(gl.where(o_c[None, :] <= o_w[:, None], g[None, :], 0.0), 1)
    enough = (sums <= -FORGOTTEN) & (o_w < n_chunks)
    spare = gl.max(gl.where(enough, MOST_WINDOW - o_w, 0), 0)
    return gl.where(spare > 0, MOST_WINDOW + 1 - spare, 0)


@gluon.jit
def windows_of(p_g, stride_gt, n_rows):
    """The chunks of the least windows at the start and at the end of ``n_rows`` rows, or twice 0
    unless both exist. p_g: sums of the decays of chunks."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    o_w = gl.arange(0, MOST_WINDOW, gl.SliceLayout(1, PAIRS))
    o_c = gl.arange(0, MOST_WINDOW, gl.SliceLayout(0, PAIRS))
    n_chunks = (n_rows + CHUNK - 1) // CHUNK
    inside = o_c < n_chunks
    last = gl.minimum((o_c + 1) * CHUNK, n_rows) - 1
    g = gl.load(p_g + last.to(gl.int64) * stride_gt, mask=inside, other=0)
    at_start = least_window(g, o_w, o_c, n_chunks)
    last = gl.minimum((n_chunks - o_c) * CHUNK, n_rows) - 1
    g = gl.load(p_g + last.to(gl.int64) * stride_gt, mask=inside, other=0)
    at_end = least_window(g, o_w, o_c, n_chunks)
    both = gl.minimum(at_start, at_end) > 0
    return gl.where(both, at_start, 0), gl.where(both, at_end, 0)


@gluon.jit
def any_differs(i_n, p_marks, stride, segment_offsets, NS, MARKS: gl.constexpr):
    """Whether a segment of sequence i_n ends in another state than the next one begins with.
    p_marks: of a value head, MARKS for each segment."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    if segment_offsets is not None:
        first = gl.load(segment_offsets + i_n)
        count = gl.load(segment_offsets + i_n + 1) - first
    else:
        first = i_n * NS
        count = NS
    o_s = gl.arange(0, 128, LANES)
    found = gl.zeros([128], gl.int32, LANES)
    for start in range(0, count, 128):
        p = p_marks + (first + start + o_s).to(gl.int64) * stride
        for i in gl.static_range(MARKS):
            found = found | gl.load(p + i, mask=start + o_s < count, other=0)
    return gl.max(found, 0) > 0
