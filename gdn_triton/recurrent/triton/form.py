"""The form of a program of the recurrence: sizes of tiles, and the order of sums."""

from typing import NamedTuple

import triton

from gdn_triton._triton.tiles import Tile, padded

# The number of float32 state elements per thread: enough loads in flight, and few enough registers
# for several programs on a multiprocessor.
STATE_OF_A_THREAD = 64
# The same for value-first states of fewer bytes in a call. Then the time is that of one program,
# which computes fewer sums.
SHORT_OF_A_THREAD, SHORT_STATES = 16, 6 * 2**20


class RecurrentForm(NamedTuple):
    """The form of a program. `parts`, `ordered` and the registers of `tile` change no bit of the
    result.

    parts: the number of blocks of `tile.BV` columns that a program owns. All blocks are loaded
    before the first is used, and are held in the states' dtype until they are used.
    rows: the number of tiles into which the rows of these columns are divided. The sums of one tile
    are added to the sums of the tile before it.
    fold: a thread adds 2^fold rows of a tile with fused multiply-adds.
    ordered: barriers order the loads of a token before the wait for the slot, and the loads of the
    state before the wait for the token. Without barriers ptxas moves the loads after the waits.
    """

    tile: Tile
    parts: int = 1
    rows: int = 1
    fold: int = 0
    ordered: bool = False


# The number of 2-byte elements that a thread loads at once.
VECTOR = 8
# The rows of a key-first tile of 16-bit states.
TILE_ROWS = 32

# States of more bytes than this do not fit in the cache, which evicts them before the next step
# reads them.
STATES_BEYOND_CACHE = 2**26
# With fewer bytes of states than this, programs with many columns leave multiprocessors idle.
FEW_STATES = 12 * 2**20
# The same for narrower programs of 16-bit states.
FEWEST_STATES = 3 * 2**20


def recurrent_form(
    K: int,
    V: int,
    state_v_first: bool,
    itemsize: int,
    *,
    is_step: bool = True,
    one_token: bool = True,
    state_bytes: int = 0,
) -> RecurrentForm:
    """Returns the form for a head's sizes, the states' layout and the bytes of a state's element.
    These fix the order of the sums over K. Whether the call is a step on a pool, whether each
    sequence has one token, and the bytes of all states of a call, decide only fields that change no
    bit.

    A value-first row [K] is held by one warp, which computes its sums alone. Measured
    (docs/tried.md): many float32 states reach the bandwidth of memory without the other options,
    and 16-bit states need them."""
    BK = padded(K, 256)
    if not state_v_first:
        return _key_first_form(BK, V, itemsize, is_step, one_token, state_bytes)
    short = state_bytes < SHORT_STATES
    if itemsize != 2:
        of_thread = STATE_OF_A_THREAD
        if short:
            of_thread = SHORT_OF_A_THREAD
        elif not one_token:
            of_thread = STATE_OF_A_THREAD // 2
        tile = Tile(BK, padded(V, 32 * of_thread // BK, least=1), 1, 1)
        return RecurrentForm(tile=tile)
    BV, parts, registers = padded(V, 16 * STATE_OF_A_THREAD // BK, least=1), 1, None
    if not one_token:
        parts = 1 if state_bytes < FEWEST_STATES else 2
    elif short:
        BV = padded(V, 32 * SHORT_OF_A_THREAD // BK, least=1)
    elif state_bytes < FEW_STATES:
        BV = padded(V, 2 * BV, least=1)
    elif state_bytes < STATES_BEYOND_CACHE:
        parts, registers = 4, 128
    return RecurrentForm(
        tile=Tile(BK, BV, 1, 1, registers),
        parts=min(parts, triton.cdiv(V, BV)),
        fold=_log2(min(VECTOR, BK // 2)),
        ordered=True,
    )


def _key_first_form(
    BK: int, V: int, itemsize: int, is_step: bool, one_token: bool, state_bytes: int
) -> RecurrentForm:
    """Returns the form of key-first states. A thread adds every n-th row of a column, where n is
    `shared`, the number of sums that threads then add. With few states one warp has all rows of a
    few columns, and with more float32 states two warps have twice these. Otherwise a program reads
    rows of 256 bytes of a float32 state, and its warps share the sums, or rows of 64 bytes of a
    16-bit state in one warp."""
    narrow, registers = itemsize == 2, None
    if narrow:
        # One warp has registers for 128 rows. With two warps, 256 rows spilled in calls of several
        # tokens.
        BV, warps, rows = padded(V, 32), 1 if BK <= 128 else 4, max(1, BK // TILE_ROWS)
        few = state_bytes < FEWEST_STATES
        # With many states a half more programs on a multiprocessor gain more than the spills of 32
        # bytes cost: 230 to 209 microseconds on an H100. A quarter of these states lost 5 percent.
        if one_token and BK == 128 and state_bytes > STATES_BEYOND_CACHE:
            registers = 168
    else:
        BV, rows = padded(V, 64), 1
        warps = max(1, BK * BV // (32 * STATE_OF_A_THREAD))
        few = not one_token or state_bytes < FEW_STATES
    shared = min(BK, 32 * warps * 16 // itemsize // BV)
    tile = Tile(BK, BV, warps, 1, registers)
    # A thread loads four numbers of a row. Sequences spilled with these tiles.
    few_columns = 128 // shared
    if is_step and few and few_columns < BV and shared <= 16:
        tile, rows = Tile(BK, few_columns, 1, 1), BK // shared
    elif is_step and not narrow and state_bytes < 2 * FEW_STATES and 2 * few_columns < BV:
        tile, rows = Tile(BK, 2 * few_columns, 2, 1), BK // shared
    fold = _log2(BK // shared // rows)
    return RecurrentForm(tile=tile, rows=rows, fold=fold, ordered=narrow)


def _log2(n: int) -> int:
    return n.bit_length() - 1


def eviction_policy(state_bytes: int) -> str:
    """Returns the eviction policy for all states of a call, read and written. It changes no bit.
    Measured: states larger than the cache are faster with evict_last, because their writes then
    leave the cache together. Smaller states are faster with evict_first."""
    return "evict_last" if state_bytes >= STATES_BEYOND_CACHE else "evict_first"
