"""The taps of a weight [D, W], or the tokens of a state [D, W - 1], that are dense in memory.

A thread has a run of channels. The thread loads and stores all columns of the run as words of 16
bytes, and its registers change places. A column that is loaded by itself is one load of two bytes
for each channel, and each such load of a warp touches all lines in which the warp's channels lie.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def levels_of(run):
    """The logarithm of a power of two."""
    return run.bit_length() - 1


@triton.jit
def elements_of(tiles, COUNT: tl.constexpr):
    """Tiles [BT, RUN] as COUNT times RUN tiles [BT, 1]: a thread's run, in its order."""
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
    """[BT, RUN] of RUN of the elements [BT, 1], from FIRST on, each STEP further."""
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
    """The columns of the runs o_run of RUN channels each, a tuple of COUNT tiles [BT, RUN]; 0 from
    channel `end` on. p: of channel 0, whose COUNT columns are followed by those of channel 1."""
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
    """The reverse of `load_columns`."""
    elements = elements_of(columns, COUNT)
    o_e = tl.arange(0, RUN)[None, :]
    for i in tl.static_range(COUNT):
        pieces = ()
        for j in tl.static_range(RUN):
            # Place i RUN + j of a run has one column of one channel.
            pieces += (elements[(i * RUN + j) % COUNT * RUN + (i * RUN + j) // COUNT],)
        place = (o_run * (RUN * COUNT) + i * RUN)[:, None] + o_e
        tl.store(p + place, tile_of(pieces, 0, 1, RUN), mask=place < end * COUNT)
