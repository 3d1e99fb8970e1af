"""The form of a program of the recurrence: sizes of tiles, and the order of sums."""

import math
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
    """The form of a program. `parts`, `ordered`, `compact`, `groups` and the registers of `tile`
    change no bit of the result.

    parts: the number of blocks of `tile.BV` columns that a program owns. All blocks are loaded
    before the first is used, and are held in the states' dtype until they are used.
    rows: the number of tiles into which the rows of these columns are divided. The sums of one tile
    are added to the sums of the tile before it.
    fold: a thread adds 2^fold rows of a tile with fused multiply-adds.
    ordered: barriers order the loads of a token before the wait for the slot, and the loads of the
    state before the wait for the token. Without barriers ptxas moves the loads after the waits.
    compact: a program of one token takes fewer registers, because it holds its state in the states'
    dtype until the state is written.
    groups: the columns of a key-first tile are divided into `groups` groups, one for each warp. The
    threads of a warp then add the sums of its columns alone. With one group the compiler divides
    the rows too.
    """

    tile: Tile
    parts: int = 1
    rows: int = 1
    fold: int = 0
    ordered: bool = False
    compact: bool = False
    groups: int = 1


# The number of 2-byte elements that a thread loads at once.
VECTOR = 8
# The rows of a key-first tile of 16-bit states, and the most warps of a program that reads whole
# rows of such states.
TILE_ROWS, MOST_GROUPS = 32, 4

# States of more bytes than this do not fit in the cache, which evicts them before the next step
# reads them.
STATES_BEYOND_CACHE = 2**26
# With fewer bytes of states than this, programs with many columns leave multiprocessors idle.
FEW_STATES = 12 * 2**20
# The same for narrower programs of 16-bit states.
FEWEST_STATES = 3 * 2**20

# The most registers of a thread in calls of several tokens that write many float32 states once, at
# the end, and that `hopper/several.py` does not serve. Their instructions take as long as memory
# does, so more programs at once make them faster: on an H200 64 sequences of 32 heads and four
# tokens took 105 us instead of 114, and with key-first states 114 instead of 144. Calls that write
# each state do not gain.
LAST_REGISTERS, KEY_FIRST_LAST_REGISTERS = 128, 168


def recurrent_form(
    K: int,
    V: int,
    state_v_first: bool,
    itemsize: int,
    *,
    is_step: bool = True,
    one_token: bool = True,
    every_token: bool = True,
    state_bytes: int = 0,
) -> RecurrentForm:
    """Returns the form for a head's sizes, the states' layout and the bytes of a state's element.
    These fix the order of the sums over K. Whether the call is a step on a pool, whether each
    sequence has one token, whether the state after every token is written, and the bytes of all
    states of a call, decide only fields that change no bit.

    A value-first row [K] is held by one warp, which computes its sums alone. Measured
    (docs/tried.md): many float32 states reach the bandwidth of memory without `parts`, `ordered`
    and `compact`, and 16-bit states need them."""
    BK = padded(K, 256)
    # The forms of `several` and `writes_last` are for whole blocks of K. With a mask for K their
    # programs spill hundreds of bytes.
    several = is_step and not one_token and K == BK
    writes_last = several and not every_token
    if not state_v_first:
        return _key_first_form(
            BK, V, itemsize, is_step, one_token, writes_last=writes_last, state_bytes=state_bytes
        )
    short, registers = state_bytes < SHORT_STATES, None
    if itemsize != 2:
        of_thread = STATE_OF_A_THREAD
        if short:
            of_thread = SHORT_OF_A_THREAD
        elif writes_last and state_bytes >= STATES_BEYOND_CACHE:
            registers = LAST_REGISTERS
        elif not one_token:
            of_thread = STATE_OF_A_THREAD // 2
        tile = Tile(BK, padded(V, 32 * of_thread // BK, least=1), 1, 1, registers)
        # A thread has the four rows of a load.
        return RecurrentForm(tile=tile, fold=_log2(min(4, BK // 2)))
    BV, parts, compact = padded(V, 16 * STATE_OF_A_THREAD // BK, least=1), 1, False
    if not one_token:
        if state_bytes >= FEWEST_STATES:
            BV = padded(V, (4 if several and every_token and not short else 2) * BV, least=1)
    elif short:
        BV = padded(V, 32 * SHORT_OF_A_THREAD // BK, least=1)
    elif state_bytes < FEW_STATES:
        BV = padded(V, 2 * BV, least=1)
    elif state_bytes < STATES_BEYOND_CACHE:
        parts, registers = 4, 128
    elif BK == 128:
        # 0.91 to 0.96 of the time of a quarter of the columns, on an H200.
        BV, registers, compact = padded(V, 4 * BV, least=1), 168, True
    return RecurrentForm(
        tile=Tile(BK, BV, 1, 1, registers),
        parts=min(parts, triton.cdiv(V, BV)),
        fold=_log2(min(VECTOR, BK // 2)),
        ordered=True,
        compact=compact,
    )


def _key_first_form(
    BK: int,
    V: int,
    itemsize: int,
    is_step: bool,
    one_token: bool,
    *,
    writes_last: bool,
    state_bytes: int,
) -> RecurrentForm:
    """Returns the form of key-first states. A thread adds every n-th row of a column, where n is
    `shared`, the number of sums that threads then add. With few states one warp has all rows of a
    few columns, and with more float32 states two warps have twice these. Otherwise a program reads
    rows of 256 bytes. The warps of a float32 state share the sums. Each warp of many 16-bit states
    has the sums of 64 bytes of a row, as the one warp of a program with fewer states."""
    narrow = itemsize == 2
    if narrow:
        # One warp has registers for 128 rows. With two warps, 256 rows spilled in calls of several
        # tokens.
        BV, warps, rows = padded(V, 32), 1 if BK <= 128 else 4, max(1, BK // TILE_ROWS)
        few = state_bytes < FEWEST_STATES
    else:
        BV, rows = padded(V, 64), 1
        warps = max(1, BK * BV // (32 * STATE_OF_A_THREAD))
        few = not one_token or state_bytes < FEW_STATES
    shared = min(BK // rows, 32 * warps * 16 // itemsize // BV)
    tile, groups, compact = Tile(BK, BV, warps, 1), 1, False
    # A thread loads four numbers of a row. Sequences spilled with these tiles.
    few_columns = 128 // shared
    if is_step and few and few_columns < BV and shared <= 16:
        tile, rows, compact = Tile(BK, few_columns, 1, 1), BK // shared, not narrow and one_token
        if writes_last and not narrow and state_bytes >= FEW_STATES:
            tile = tile._replace(maxnreg=KEY_FIRST_LAST_REGISTERS)
    elif is_step and not narrow and state_bytes < 2 * FEW_STATES and 2 * few_columns < BV:
        tile, rows = Tile(BK, 2 * few_columns, 2, 1), BK // shared
    elif narrow and one_token and BK == 128 and state_bytes >= FEW_STATES:
        # One warp with a quarter of the columns took 1.12 to 1.16 times as long on an H200. Twice
        # as many such programs at once took longer still, because a row of theirs has 64 bytes.
        groups = min(MOST_GROUPS, triton.next_power_of_2(triton.cdiv(V, BV)))
        tile, rows, compact = Tile(BK, groups * BV, groups, 1), BK // shared, True
    fold = _log2(BK // shared // rows)
    return RecurrentForm(
        tile=tile, rows=rows, fold=fold, ordered=narrow, compact=compact, groups=groups
    )


class SeveralForm(NamedTuple):
    """The form of a program of `hopper/several.py`. A warp has four groups of eight threads, and
    the threads of a group share `columns` columns of a state. The form changes no bit."""

    warps: int
    columns: int

    @property
    def BV(self) -> int:
        return 4 * self.columns * self.warps

    @property
    def registers(self) -> int:
        """The most registers of a thread. One or two columns need 96. With four columns and 168
        registers instead of 128 nearly nothing is spilled, but fewer programs run at once, and 2048
        states took 1.02 to 1.08 times as long on an H200."""
        return 128 if self.columns == 4 else 96


SEVERAL_HALF = SeveralForm(warps=2, columns=2)  # has half the warps of the others
SEVERAL_1, SEVERAL_2, SEVERAL_4 = (SeveralForm(warps=4, columns=i) for i in (1, 2, 4))
# The key is the itemsize of the states, whether they are value-first, and whether the state after
# every token is kept. A form serves calls of at most the number of states before it, and with None
# `kernel.py` is faster. These forms were the fastest on an H200 for steps of four tokens. With few
# states a thread has fewer columns, so that more threads compute at once.
SEVERAL_FORMS: dict[tuple[int, bool, bool], tuple[tuple[float, SeveralForm | None], ...]] = {
    (4, True, False): ((8, SEVERAL_1), (128, SEVERAL_2), (math.inf, SEVERAL_4)),
    (4, False, False): ((64, SEVERAL_2), (math.inf, SEVERAL_4)),
    (2, True, False): ((128, SEVERAL_2), (math.inf, SEVERAL_4)),
    (2, False, False): ((64, SEVERAL_2), (math.inf, SEVERAL_4)),
    (4, True, True): ((64, SEVERAL_1), (math.inf, None)),
    (4, False, True): ((8, SEVERAL_HALF), (128, None), (512, SEVERAL_4), (math.inf, None)),
    (2, True, True): ((128, SEVERAL_2), (math.inf, SEVERAL_4)),
    (2, False, True): ((8, SEVERAL_HALF), (math.inf, None)),
}


def several_form(
    itemsize: int, state_v_first: bool, states: int, *, every_token: bool
) -> SeveralForm | None:
    """Returns the form of a call that runs the kernel of `hopper/several.py`, or None where
    `kernel.py` is faster. The kernel has the bits of `kernel.py` in the form of
    `recurrent_form`."""
    forms = SEVERAL_FORMS[itemsize, state_v_first, every_token]
    return next(form for most, form in forms if states <= most)


def _log2(n: int) -> int:
    return n.bit_length() - 1


def eviction_policy(state_bytes: int) -> str:
    """Returns the eviction policy for all states of a call, read and written. It changes no bit.
    Measured: states larger than the cache are faster with evict_last, because their writes then
    leave the cache together. Smaller states are faster with evict_first."""
    return "evict_last" if state_bytes >= STATES_BEYOND_CACHE else "evict_first"
