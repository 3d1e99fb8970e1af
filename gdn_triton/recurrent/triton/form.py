"""How a program of the recurrence goes about a state: sizes of tiles, and the order of sums."""

from typing import NamedTuple

import triton

from gdn_triton._triton.tiles import Tile, padded

# Elements of a float32 state that a thread holds: enough loads in flight, few enough registers for
# several programs on a multiprocessor.
STATE_OF_A_THREAD = 64


class RecurrentForm(NamedTuple):
    """How a program goes about its columns. No bit depends on `parts` and `ordered`, nor on the
    registers of `tile`.

    parts: how many times `tile.BV` columns a program owns; all are loaded before the first is used,
        and wait in the states' dtype.
    rows: into how many tiles the rows of these columns are divided. The sums of one tile are added
        to those of the one before it.
    fold: 2^fold rows of a tile that lie in one thread are added up with fused multiplications and
        additions.
    ordered: barriers keep the loads of a token before the wait for the slot, and those of the state
        before the wait for the token; otherwise ptxas moves them after it.
    words: the sums of q q, k k and q k are of words of 32 bits.
    fast: quotients and roots are off by up to two units in the last place of float32.
    """

    tile: Tile
    parts: int = 1
    rows: int = 1
    fold: int = 0
    ordered: bool = False
    words: bool = False
    fast: bool = False


# Elements of 2 bytes that a thread loads at once.
VECTOR = 8
# Rows of a key-first tile of 16-bit states.
TILE_ROWS = 32

# The cache evicts states that do not fit it before the next step reads them; others may stay.
STATES_BEYOND_CACHE = 2**26
# Fewer bytes of states leave multiprocessors idle if a program has many columns.
FEW_STATES = 12 * 2**20


def recurrent_form(
    K: int,
    V: int,
    state_v_first: bool,
    itemsize: int,
    *,
    one_token: bool = True,
    state_bytes: int = 0,
) -> RecurrentForm:
    """The form for a head's sizes, the states' layout and the bytes of their elements, which fix
    the order of the sums over K. Whether each sequence has one token, and the bytes of all states
    of a call, decide only what no bit depends on.

    Value-first rows [K] lie in one warp, whose sums need no other one. Key-first, a program takes
    rows of 256 bytes of a float32 state, whose warps share the sums, or of 64 bytes of a 16-bit
    one in one warp. Measured (docs/tried.md): float32 states move as fast as memory does without
    the other options, 16-bit ones need them.
    """
    BK, narrow = padded(K, 256), itemsize == 2
    if not narrow:
        if state_v_first:
            return RecurrentForm(
                tile=Tile(BK, padded(V, 32 * STATE_OF_A_THREAD // BK, least=1), 1, 1)
            )
        BV = padded(V, 64)
        return RecurrentForm(tile=Tile(BK, BV, max(1, BK * BV // (32 * STATE_OF_A_THREAD)), 1))
    if state_v_first:
        BV, parts, registers = padded(V, 16 * STATE_OF_A_THREAD // BK, least=1), 1, None
        if not one_token:
            parts = 2
        elif state_bytes < FEW_STATES:
            BV = padded(V, 2 * BV, least=1)
        elif state_bytes < STATES_BEYOND_CACHE:
            parts, registers = 4, 128
        parts = min(parts, triton.cdiv(V, BV))
        tile, rows, folded = Tile(BK, BV, 1, 1, registers), 1, min(VECTOR, BK // 2)
    else:
        # One warp has registers for 128 rows; two of them spilled 256 with several tokens.
        BV, warps, rows = padded(V, 32), 1 if BK <= 128 else 4, max(1, BK // TILE_ROWS)
        tile, parts = Tile(BK, BV, warps, 1), 1
        folded = max(1, BK // rows * BV // (32 * warps * VECTOR))
    fold = folded.bit_length() - 1
    return RecurrentForm(
        tile=tile, parts=parts, rows=rows, fold=fold, ordered=True, words=True, fast=True
    )


def eviction_policy(state_bytes: int) -> str:
    """How the cache is to treat all states of a call, read and written. No bit depends on it.
    Measured: states beyond the cache come and go faster when their lines are the last to leave it,
    as writes then go out together; smaller ones when they make room for each other."""
    return "evict_last" if state_bytes >= STATES_BEYOND_CACHE else "evict_first"
