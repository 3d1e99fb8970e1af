"""The form of a program of a step with a window: sizes of tiles, and the order of sums."""

from typing import NamedTuple


class WindowForm(NamedTuple):
    """The form of a program: BV columns of a state and `warps` warps. K is cut into pieces of KI,
    or of FI in a fold. early: a program issues all loads before it uses a loaded state or record;
    with one token the kernel is that of `window_early.py` or, with few, that of `window_few.py`.
    records_first: the kernel of `window_early.py` loads the records before the state. registers:
    the largest number per thread, which limits the programs per multiprocessor; None: the
    compiler's choice. None of these four changes a bit."""

    BV: int
    warps: int
    KI: int
    FI: int
    dot: bool = False
    early: bool = False
    registers: int | None = None
    records_first: bool = False
    few: bool = False


# Up to this many float32 states, or value-first 16-bit states, the kernel of `window_few.py` is
# faster. On an H200 8 float32 states took 2.35 us instead of 2.73, and key-first 3.01 instead of
# 3.55; 8 bfloat16 states took 2.27 instead of 2.44, but key-first 2.61 instead of 2.39.
FEWEST_STATES, FEWEST_NARROW_STATES = 64, 16
# Up to this many float32 states of drafts have programs of fewer columns: on an H200 8 states took
# 4.35 us instead of 5.00, and 64 states 7.61 instead of 7.41.
FEWEST_DRAFTS = 32
# Up to this many states of a call, programs have fewer columns: there are then more programs, and
# each waits for fewer loads. Measured with 256 states and with 2048.
FEW_STATES = 512
# Up to this many 16-bit states a program loads the records, whose products are the longest chain of
# instructions, before its state. A step was then 6 percent faster with 32 states, and slower with
# 256.
LEAST_STATES = 128
# With more value-first, or key-first, 16-bit states than this a program has all columns of a state:
# it computes the products of a token and of the records' keys once. On an H200 such programs were 3
# percent faster with 3072 value-first states, 8 percent with 16384, and 3 percent slower with 2048;
# they were 2 percent faster with 1536 key-first states, and slower with 1024.
MOST_STATES, MOST_KEY_FIRST_STATES = 2048, 1024

# The key is the itemsize of the states and whether they are value-first. With more states than the
# value, the kernel of `hopper/window.py` is faster than those of `window_few.py` and
# `window_early.py`. With fewer value-first float32 states the latter took up to 12 percent less
# time on an H200.
FEWEST_COPIED_STATES = {(4, True): 128, (4, False): 0, (2, True): 256, (2, False): 128}
# The kernel of `hopper/window.py` has programs of fewer columns for up to this many float32 states,
# or value-first 16-bit states. On an H200 512 float32 states took 7 percent less time, and 512
# 16-bit states, with programs of one warp, 12 percent less.
FEW_COPIED_STATES, FEW_NARROW_COPIED_STATES = 1024, 2048
# The kernel of `hopper/drafts.py` has programs of fewer columns for up to this many states. On an
# H200 512 value-first float32 states took 9 percent less time, and 128 16-bit states 11 percent.
FEW_COPIED_DRAFTS = 512


def window_form(state_itemsize: int, one_token: bool) -> WindowForm:
    """Returns the form of K = V = 128. It fixes the order of all sums, so it does not depend on the
    batch. Both state layouts have the same form."""
    narrow = state_itemsize <= 2
    if one_token:
        if narrow:
            return WindowForm(BV=64, warps=2, KI=64, FI=64, dot=True)
        return WindowForm(BV=32, warps=2, KI=32, FI=32)
    if state_itemsize == 2:
        return WindowForm(BV=64, warps=2, KI=32, FI=32)
    return WindowForm(BV=64, warps=4, KI=64 if narrow else 32, FI=32)


def most_registers(state_itemsize: int, max_tokens: int) -> int | None:
    """Returns the registers of a thread of the kernel of several tokens, for K = V = 128 and tokens
    of 2 bytes. As many programs as fit wait for memory at once, and no register is spilled with 4
    tokens."""
    if max_tokens > 8:
        return None
    return 128 if max_tokens <= 4 and state_itemsize != 2 else 168


def drafts_form(state_itemsize: int, v_first: bool, states: int) -> WindowForm | None:
    """Returns the form with `early` of a call of at most four bf16 tokens in each sequence, for
    K = V = 128 and states that are floats of 2 or 4 bytes, or None where it has not been timed. The
    form of all other calls has the same bits."""
    if not v_first:
        return None
    if state_itemsize == 4:
        BV = 32 if states <= FEWEST_DRAFTS else 64
        return WindowForm(BV=BV, warps=4, KI=32, FI=32, early=True, registers=128)
    if states <= FEW_STATES:
        return WindowForm(BV=32, warps=2, KI=128, FI=32, early=True, registers=128)
    return WindowForm(BV=128, warps=4, KI=128, FI=64, early=True, registers=168)


def early_form(state_itemsize: int, v_first: bool, states: int) -> WindowForm | None:
    """Returns the form of a call of one token whose states have 1, 2 or 4 bytes, or None where the
    other kernel is faster. KI and `dot` are those of `window_form`, and one warp computes the sums
    over K of a column. Therefore the number of states changes no bit."""
    few = states <= FEW_STATES
    if state_itemsize == 2:
        if few:
            first = states <= LEAST_STATES
            return WindowForm(
                BV=32, warps=2, KI=64, FI=64, dot=True, early=True, records_first=first
            )
        if states > (MOST_STATES if v_first else MOST_KEY_FIRST_STATES):
            return WindowForm(BV=128, warps=2, KI=64, FI=32, dot=True, early=True, registers=255)
        return WindowForm(BV=64, warps=2, KI=64, FI=64, dot=True, early=True, registers=168)
    if not v_first:
        return None
    if state_itemsize == 1:
        if few:
            return WindowForm(BV=64, warps=4, KI=64, FI=64, dot=True, early=True, registers=96)
        return WindowForm(BV=128, warps=4, KI=64, FI=32, dot=True, early=True, registers=128)
    if few:
        return WindowForm(BV=32, warps=2, KI=32, FI=32, early=True, records_first=True)
    # On an H200 64 sequences of 32 heads took 43 us, without the branch after the loads 47: ptxas
    # then put instructions that wait for the token before the last loads of the state. Programs of
    # four warps, with half the registers, took 46, and 52 with the branch, which makes them spill.
    return WindowForm(BV=64, warps=2, KI=32, FI=32, early=True, registers=255)


def few_form(state_itemsize: int, v_first: bool, states: int) -> WindowForm | None:
    """Returns the form of a call of one token that runs the kernel of `window_few.py`, or None. It
    has the bits of the other forms: a float32 tile has their KI, and KI changes no bit of the
    products of matrix units. The columns of a key-first tile decide which threads share a sum, so
    a program has as many as in `window_form`."""
    if state_itemsize == 4 and states <= FEWEST_STATES:
        return WindowForm(BV=16 if v_first else 32, warps=2, KI=32, FI=128, early=True, few=True)
    if state_itemsize == 2 and v_first and states <= FEWEST_NARROW_STATES:
        return WindowForm(BV=16, warps=2, KI=128, FI=128, dot=True, early=True, few=True)
    return None


def copied_form(state_itemsize: int, v_first: bool, states: int) -> WindowForm | None:
    """Returns the form of a call of one token that runs the kernel of `hopper/window.py`, or None
    where another kernel is faster. It has the bits of the other forms."""
    fewest = FEWEST_COPIED_STATES.get((state_itemsize, v_first))
    if fewest is None or states <= fewest:
        return None
    if state_itemsize == 4:
        BV, registers = (32, 128) if states <= FEW_COPIED_STATES else (64, 168)
        return WindowForm(BV=BV, warps=2, KI=32, FI=32, registers=registers)
    BV, warps, registers = 64, 2, 128
    if v_first and states <= FEW_NARROW_COPIED_STATES:
        BV, warps, registers = 32, 1, 168
    elif states <= FEW_STATES:
        BV = 32
    return WindowForm(BV=BV, warps=warps, KI=64, FI=32, dot=True, registers=registers)


def copied_drafts_form(state_itemsize: int, states: int) -> WindowForm | None:
    """Returns the form of a call of at most four tokens that runs the kernel of
    `hopper/drafts.py`, or None. It has the bits of the other forms."""
    few = states <= FEW_COPIED_DRAFTS
    if state_itemsize == 4:
        return WindowForm(BV=32 if few else 64, warps=2, KI=32, FI=32, registers=168)
    if state_itemsize == 2:
        return WindowForm(BV=32 if few else 64, warps=2, KI=32, FI=32, registers=128)
    return None
