"""Loads and stores of dense taps of a weight [D, W], or dense tokens of a state [D, W - 1].

A thread has a run of channels. The thread loads and stores all columns of the run as words of 16
bytes, and then permutes its registers. A column that is loaded by itself would need one load of two
bytes for each channel, and each such load of a warp touches all cache lines of the warp's channels.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def levels_of(run):
    """The base-2 logarithm of a power of two."""
    return run.bit_length() - 1


@triton.jit
def elements_of(tiles, COUNT: tl.constexpr):
    """Splits COUNT tiles [BT, RUN] into COUNT times RUN tiles [BT, 1], in the order of a thread's
    run."""
    RUN: tl.constexpr = tiles[0].shape[1]
    LEVELS: tl.constexpr = levels_of(RUN)
    found = ()
    for i in tl.static_range(COUNT):
        pieces = (tiles[i],)
        for level in tl.static_range(LEVELS):
            finer = ()
            for j in tl.static_range(2**level):
                piece = pieces[j]
                halves = tl.reshape(piece, [piece.shape[0], 2, piece.shape[1] // 2])
                first, second = tl.split(tl.permute(halves, (0, 2, 1)))
                finer += (first, second)
            pieces = finer
        found += pieces
    return found


@triton.jit
def tile_of(elements, FIRST: tl.constexpr, STEP: tl.constexpr, RUN: tl.constexpr):
    """Joins RUN of the elements [BT, 1] into a tile [BT, RUN]: element FIRST, and every STEP-th
    after it."""
    pieces = ()
    for i in tl.static_range(RUN):
        pieces += (elements[FIRST + STEP * i],)
    LEVELS: tl.constexpr = levels_of(RUN)
    for level in tl.static_range(LEVELS):
        wider = ()
        for j in tl.static_range(2 ** (LEVELS - 1 - level)):
            both = tl.permute(tl.join(pieces[2 * j], pieces[2 * j + 1]), (0, 2, 1))
            wider += (tl.reshape(both, [both.shape[0], 2 * both.shape[2]]),)
        pieces = wider
    return pieces[0]  # type: ignore[misc]


@triton.jit
def load_columns(p, o_run, end, COUNT: tl.constexpr, RUN: tl.constexpr):
    """Loads the COUNT columns of the runs o_run, of RUN channels each, as a tuple of COUNT tiles
    [BT, RUN]; 0 from channel `end` on. p points to channel 0. Its COUNT columns are followed by the
    columns of channel 1."""
    tiles = ()
    o_e = tl.arange(0, RUN)[None, :]
    for i in tl.static_range(COUNT):
        place = (o_run * (RUN * COUNT) + i * RUN)[:, None] + o_e
        tiles += (tl.load(p + place, mask=place < end * COUNT, other=0),)
    elements = elements_of(tiles, COUNT)
    columns = ()
    for i in tl.static_range(COUNT):
        columns += (tile_of(elements, i, COUNT, RUN),)
    return columns


@triton.jit
def store_columns(p, columns, o_run, end, COUNT: tl.constexpr, RUN: tl.constexpr):
    """Stores the columns that `load_columns` loads."""
    elements = elements_of(columns, COUNT)
    o_e = tl.arange(0, RUN)[None, :]
    for i in tl.static_range(COUNT):
        pieces = ()
        for j in tl.static_range(RUN):
            # Element i RUN + j of a run is one column of one channel.
            pieces += (elements[(i * RUN + j) % COUNT * RUN + (i * RUN + j) // COUNT],)
        place = (o_run * (RUN * COUNT) + i * RUN)[:, None] + o_e
        tl.store(p + place, tile_of(pieces, 0, 1, RUN), mask=place < end * COUNT)
