"""Where the walk of a program lies: a sequence, or a segment of one (segments.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gdn_triton._triton.views import viewed
from gdn_triton.chunk.triton.hopper.gates import add, log2_decay
from gdn_triton.chunk.triton.hopper.names import CHUNK

# The decay, in log2 units, after which hardly anything is left of a state, and the chunks of the
# longest window.
FORGOTTEN, MOST_WINDOW = gl.constexpr(64.0), gl.constexpr(32)


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
def longest_first(i_w, cu_seqlens, T, N, BN: gl.constexpr):
    """(number, batch entry, first row, rows, rows of no sequence that follow) of packed sequence
    i_w in descending order of their lengths."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_n = gl.arange(0, BN, gl.SliceLayout(1, PAIRS))
    o_m = gl.arange(0, BN, gl.SliceLayout(0, PAIRS))
    n = gl.minimum(o_n, N - 1)
    m = gl.minimum(o_m, N - 1)
    start_n = gl.load(cu_seqlens + n).to(gl.int32)
    start_m = gl.load(cu_seqlens + m).to(gl.int32)
    rows_n = gl.load(cu_seqlens + n + 1).to(gl.int32) - start_n
    rows_m = gl.load(cu_seqlens + m + 1).to(gl.int32) - start_m
    longer = rows_m[None, :] > rows_n[:, None]
    equal = (rows_m[None, :] == rows_n[:, None]) & (o_m[None, :] < o_n[:, None])
    place = gl.sum(((longer | equal) & (o_m < N)[None, :]).to(gl.int32), 1)
    here = (place == i_w) & (o_n < N)
    i_n = gl.sum(gl.where(here, o_n, 0), 0)
    first_row = gl.sum(gl.where(here, start_n, 0), 0)
    n_rows = gl.sum(gl.where(here, rows_n, 0), 0)
    return i_n, i_w * 0, first_row, n_rows, gl.where(i_n == N - 1, T - first_row - n_rows, 0)


@gluon.jit
def find_order(order_s, cu_seqlens, N, BN: gl.constexpr, THREADS: gl.constexpr):
    """Stores the numbers of the packed sequences, of which there are at most as many as threads, in
    descending order of their lengths."""
    # Each thread compares one sequence with all others.
    ROWS: gl.constexpr = gl.BlockedLayout([1, BN], [32, 1], [gl.num_warps(), 1], [1, 0])
    OWN: gl.constexpr = gl.SliceLayout(1, ROWS)
    ALL: gl.constexpr = gl.SliceLayout(0, ROWS)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    own_s = viewed(order_s, gl.int32, [THREADS], FLAT)
    all_s = own_s.slice(0, BN)
    o_n = gl.arange(0, THREADS, OWN)
    o_m = gl.arange(0, BN, ALL)
    n = gl.minimum(o_n, N - 1)
    rows = (gl.load(cu_seqlens + n + 1) - gl.load(cu_seqlens + n)).to(gl.int32)
    # A number that does not exist comes last.
    rows = gl.where(o_n < N, rows, -1)
    own_s.store(rows)
    others = all_s.load(ALL)[None, :]
    own, number = rows[:, None], o_n[:, None]
    first = (others > own) | ((others == own) & (o_m[None, :] < number))
    own_s.store(gl.sum(first.to(gl.int32), 1))
    place = all_s.load(ALL)[None, :]
    own_s.store(gl.sum(gl.where(place == number, o_m[None, :], 0), 1))


@gluon.jit
def later_segments(o_n, cu_seqlens, read_slots, N, first, segment, LAST_SKIPPED: gl.constexpr):
    """The number of segments after the first one of packed sequences o_n; of a sequence that is
    skipped, and of a number from N on, none."""
    inside = o_n < N
    start = gl.load(cu_seqlens + o_n, mask=inside, other=0).to(gl.int32)
    rows = gl.load(cu_seqlens + o_n + 1, mask=inside, other=0).to(gl.int32) - start
    if read_slots is not None:
        kept = gl.load(read_slots + o_n, mask=inside, other=LAST_SKIPPED) > LAST_SKIPPED
        rows = gl.where(kept, rows, 0)
    return (gl.maximum(rows - first, 0) + segment - 1) // segment


@gluon.jit
def slot_of(
    i_n,
    cu_seqlens,
    read_slots,
    N,
    NS,
    first,
    segment,
    BN: gl.constexpr,
    LAST_SKIPPED: gl.constexpr,
    IS_VARLEN: gl.constexpr,
):
    """The slot of the second segment of sequence i_n."""
    if IS_VARLEN:
        LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        o_n = gl.arange(0, BN, LANES)
        counts = later_segments(o_n, cu_seqlens, read_slots, N, first, segment, LAST_SKIPPED)
        return gl.sum(gl.where(o_n < i_n, counts, 0), 0)
    else:
        return i_n * NS


@gluon.jit
def segment_of(
    i_w,
    cu_seqlens,
    read_slots,
    T,
    N,
    NS,
    first,
    segment,
    BN: gl.constexpr,
    LAST_SKIPPED: gl.constexpr,
    IS_VARLEN: gl.constexpr,
):
    """(batch entry, its sequence, tokens of this before it, first row, rows, 1 if it is the last
    there) of segment slot i_w. The slots number the segments after the first one of each sequence,
    sequence by sequence. An empty slot has no rows."""
    if IS_VARLEN:
        LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        o_n = gl.arange(0, BN, LANES)
        counts = later_segments(o_n, cu_seqlens, read_slots, N, first, segment, LAST_SKIPPED)
        ends = gl.associative_scan(counts, 0, add)
        i_n = gl.sum((ends <= i_w).to(gl.int32), 0)
        before = gl.sum(gl.where(o_n < i_n, counts, 0), 0)
        count = gl.sum(gl.where(o_n == i_n, counts, 0), 0)
        i_b = i_w * 0
        i_n = gl.minimum(i_n, N - 1)
        start = gl.load(cu_seqlens + i_n).to(gl.int32)
        tokens = gl.where(count > 0, first + (i_w - before) * segment, 0)
        rows = gl.load(cu_seqlens + i_n + 1).to(gl.int32) - start - tokens
        n_rows = gl.where(count > 0, gl.minimum(rows, segment), 0)
        is_last = (i_w + 1 == before + count).to(gl.int32)
        return i_b, i_n, tokens, start + tokens, n_rows, is_last
    else:
        i_n = i_w // NS
        tokens = first + i_w % NS * segment
        n_rows = gl.minimum(T - tokens, segment)
        is_last = (i_w % NS == NS - 1).to(gl.int32)
        if read_slots is not None:
            n_rows *= (gl.load(read_slots + i_n) > LAST_SKIPPED).to(gl.int32)
        return i_n, i_n, tokens, tokens, n_rows, is_last


@gluon.jit
def window_of(
    p_g,
    stride_gt,
    n_rows,
    A_log,
    dt_bias,
    i_hv,
    RCP_LN2: gl.constexpr,
    FLOOR: gl.constexpr,
    THRESHOLD: gl.constexpr,
):
    """The least number of whole chunks at the end of ``n_rows`` rows that together decay by more
    than 2^FORGOTTEN, or 0 if there are none among the last MOST_WINDOW. Past a NaN there are
    none."""
    TILE: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    o_w = gl.arange(0, MOST_WINDOW, gl.SliceLayout(1, TILE))
    o_t = gl.arange(0, CHUNK, gl.SliceLayout(0, TILE))
    row = n_rows - (o_w[:, None] + 1) * CHUNK + o_t[None, :]
    inside = row >= 0
    g = gl.load(p_g + row.to(gl.int64) * stride_gt, mask=inside, other=0).to(gl.float32)
    p_A_log = p_g
    p_dt_bias = p_g
    if A_log is not None:
        p_A_log = A_log + i_hv
    if dt_bias is not None:
        p_dt_bias = dt_bias + i_hv
    g = log2_decay(
        *(g, p_A_log, p_dt_bias, RCP_LN2, FLOOR, THRESHOLD),
        *(A_log is not None, dt_bias is not None),
    )
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    o_w = gl.arange(0, MOST_WINDOW, gl.SliceLayout(1, PAIRS))
    o_c = gl.arange(0, MOST_WINDOW, gl.SliceLayout(0, PAIRS))
    sums = gl.convert_layout(gl.sum(gl.where(inside, g, 0.0), 1), o_c.type.layout)
    sums = gl.sum(gl.where(o_c[None, :] <= o_w[:, None], sums[None, :], 0.0), 1)
    enough = (sums <= -FORGOTTEN) & ((o_w + 1) * CHUNK <= n_rows)
    # Chunks from the window's first one to that of the longest window.
    spare = gl.max(gl.where(enough, MOST_WINDOW - o_w, 0), 0)
    return gl.where(spare > 0, MOST_WINDOW + 1 - spare, 0)


@gluon.jit
def in_window(
    p_window,
    block,
    of_keys,
    first_row,
    n_rows,
    p_g,
    stride_gt,
    A_log,
    dt_bias,
    i_hv,
    RCP_LN2: gl.constexpr,
    FLOOR: gl.constexpr,
    THRESHOLD: gl.constexpr,
):
    """(first row, rows) of a block of the map of a segment, whose window its first block stores. In
    a window b is walked, and there is no M."""
    p_g += first_row.to(gl.int64) * stride_gt
    window = window_of(p_g, stride_gt, n_rows, A_log, dt_bias, i_hv, RCP_LN2, FLOOR, THRESHOLD)
    gl.store(p_window, window, mask=block == 0)
    skipped = gl.where(window > 0, n_rows - window * CHUNK * (1 - of_keys), 0)
    return first_row + skipped, n_rows - skipped


@gluon.jit
def none_differs(i_w, p_marks, mark, stride, NS, BS: gl.constexpr, IS_VARLEN: gl.constexpr):
    """Whether no segment of padded sequence i_w, or of all packed ones, ends in another state than
    the next one begins with."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    o_s = gl.arange(0, BS, LANES)
    slot = o_s if IS_VARLEN else i_w * NS + o_s
    p = p_marks + slot.to(gl.int64) * stride
    window = gl.load(p, mask=o_s < NS, other=0)
    differs = gl.load(p + mark, mask=o_s < NS, other=0)
    return gl.max(gl.minimum(window, differs), 0) <= 0


@gluon.jit
def rest_of(
    i_w,
    p_marks,
    mark,
    stride,
    cu_seqlens,
    read_slots,
    T,
    N,
    NS,
    first,
    segment,
    BN: gl.constexpr,
    BS: gl.constexpr,
    LAST_SKIPPED: gl.constexpr,
    IS_VARLEN: gl.constexpr,
):
    """(batch entry, its sequence, the slot of a segment, tokens before the next one, its first row,
    all rows from there) of number i_w of the sequences with inner segments, where the end of that
    segment is the first to differ from the next one's start. There are no rows where no end
    differs."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    i_n = i_w
    if IS_VARLEN:
        o_n = gl.arange(0, BN, LANES)
        counts = later_segments(o_n, cu_seqlens, read_slots, N, first, segment, LAST_SKIPPED)
        numbers = gl.associative_scan((counts > 1).to(gl.int32), 0, add)
        i_n = gl.minimum(gl.sum((numbers <= i_w).to(gl.int32), 0), N - 1)
        exists = i_w < gl.max(numbers, 0)
    else:
        exists = i_n < N
    slot = slot_of(i_n, cu_seqlens, read_slots, N, NS, first, segment, BN, LAST_SKIPPED, IS_VARLEN)
    if IS_VARLEN:
        i_b = i_n * 0
        start = gl.load(cu_seqlens + i_n).to(gl.int32)
        length = gl.load(cu_seqlens + i_n + 1).to(gl.int32) - start
    else:
        i_b = i_n
        start = i_n * 0
        length = start + T
    if read_slots is not None:
        length *= (gl.load(read_slots + i_n) > LAST_SKIPPED).to(gl.int32)
    count = (gl.maximum(length - first, 0) + segment - 1) // segment
    o_s = gl.arange(0, BS, LANES)
    p = p_marks + (slot + o_s).to(gl.int64) * stride
    in_window = gl.load(p, mask=(o_s < count - 1) & exists, other=0) > 0
    differs = gl.load(p + mark, mask=in_window, other=0) > 0
    index = BS - gl.max(gl.where(differs, BS - o_s, 0), 0)
    tokens = first + (index + 1) * segment
    n_rows = gl.where(index < BS, length - tokens, 0)
    return i_b, i_n, slot + gl.where(index < BS, index, 0), tokens, start + tokens, n_rows
