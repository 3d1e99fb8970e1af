"""The rule by which the forward for compute capability 9.0 cuts sequences into segments. Importing
this module does not import Triton.

The effect of a segment on the state is an affine map, S_out = M S_in + b (docs/hopper.md). The
first segments of all sequences are walked while the maps of the inner ones are made: b by a walk
from zeros, and M by a walk from the identity with values of zero. A fold of the maps gives the
start of each later segment, and all of these are walked at the same time.

Where the last chunks of an inner segment, a window, forget the state from before them, b is walked
over the window alone, and M is left out. A later segment whose end then differs from the next start
has the rest of its sequence walked again.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from gdn_triton.chunk.problem import Problem

CHUNK: Final = 64

# Microseconds on an H100, between those of mild gates and of a model's: a chunk in a block of two
# states, of one, and of a map; the start and end of a program; a segment of the fold, for each turn
# of its programs; and the other launches, without and with windows.
TWO_STATES, ONE_STATE, MAP = 3.0, 2.08, 2.1
PROGRAM, FOLD, LAUNCHES, LAUNCHES_WITH_WINDOWS = 6.0, 3.2, 11.0, 20.0
# Columns of a state in a program of the fold.
FOLD_COLUMNS: Final = 16
# The share of the heads that forget, and the chunks of their windows, as a plan assumes them.
FORGETTING, WINDOW = 0.7, 10
# The chunks of the shortest segments that are walked in windows, which take two launches' time.
LEAST_WINDOWED: Final = 12
# A cut has to take at most this share of the time of whole sequences.
WORTH_IT: Final = 0.9
LEAST_SEGMENT: Final = 4
# Later segments at most, and how many more than in the best cut so far are tried.
MOST_LATER: Final = 16
MORE_LATER: Final = 3
# Of the first segment's length to the others'.
RATIOS: Final = (1.0, 1.25, 1.6, 2.2, 3.0, 4.0)
# The kernels that find the segments of packed sequences read the lengths of all at once.
MOST_SEQUENCES: Final = 1024


class Cut(NamedTuple):
    """Where sequences are cut, in chunks: after the first segment, which is the longest, and each
    other one. The states of a block that walks first segments and others. windows: inner
    segments may be walked in windows."""

    first: int
    rest: int
    first_states: int = 1
    later_states: int = 1
    windows: bool = True


# Kinds of sequences: their chunks, and how many there are.
Lengths = tuple[tuple[int, int], ...]
# Kinds of programs: their microseconds, and how many there are.
Programs = Sequence[tuple[float, int]]


def states_at_once(problem: Problem) -> float:
    """Returns how many states of 128 columns run at once on average, if only the longest sequence
    bounds the call: for each value head, all tokens over those of the longest sequence."""
    p = problem
    rows = p.B * p.T
    return p.HV * -(-p.V // 128) * rows / (p.longest[0] or -(-rows // p.N))


def rounded_up(tokens: int) -> int:
    """The chunks of so many tokens, as one of 16 numbers between two powers of two. Calls of uneven
    lengths, which may never repeat, then have few plans."""
    chunks = -(-tokens // CHUNK)
    step = 1 << max(chunks.bit_length() - 5, 0)
    return -(-chunks // step) * step


def lengths_of(problem: Problem) -> Lengths:
    """The sequences as the host knows or assumes them: those that the caller names, while the
    others, or all, are equally long."""
    p = problem
    if not p.is_varlen or p.N == 1:
        return ((-(-p.T // CHUNK), p.N),)
    known = [min(rounded_up(tokens), rounded_up(p.T)) for tokens in p.longest if tokens > 0]
    known = known[: p.N]
    left, others = max(rounded_up(p.T) - sum(known), 0), p.N - len(known)
    kinds = [(chunks, 1) for chunks in known]
    return (*kinds, (-(-left // others), others)) if others else tuple(kinds)


def time_of(programs: Programs, multiprocessors: int) -> float:
    """The likely time of programs of which the longest begin first: a lower bound, and half of the
    shortest where there are more programs than multiprocessors."""
    bound = work = 0.0
    begun = 0
    for time, count in sorted(programs, reverse=True):
        if count > 0:
            begun += count
            bound = max(bound, -(-begun // multiprocessors) * time)
            work += time * count
            shortest = time
    if begun > multiprocessors:
        work += shortest / 2 * multiprocessors
    return max(bound, work / multiprocessors)


def walk_programs(
    lengths: Lengths, heads: int, columns: int, states: int
) -> list[tuple[float, int]]:
    """heads: of all states. columns: of a state."""
    chunk = TWO_STATES if states == 2 else ONE_STATE
    blocks = heads * -(-columns // (64 * states))
    return [(chunks * chunk + PROGRAM, count * blocks) for chunks, count in lengths]


def candidates(longest: int, later: int) -> Iterator[tuple[int, int]]:
    """Lengths of the first segment and of so many others."""
    for ratio in RATIOS:
        rest = -int(-longest // (later + ratio))
        if rest >= LEAST_SEGMENT:
            yield max(longest - later * rest, rest), rest


def cut_time(
    multiprocessors: int, lengths: Lengths, HV: int, V: int, first: int, rest: int, share: float
) -> tuple[float, Cut]:
    """Microseconds of a cut with the better shapes of blocks, where a share of the heads forget."""
    map_blocks = HV * (-(-V // 128) + 1)
    firsts = tuple((min(chunks, first), count) for chunks, count in lengths)
    later: list[tuple[int, int]] = []
    inner = most = folded = 0
    for chunks, count in lengths:
        if chunks > first:
            number = -(-(chunks - first) // rest)
            later.append((chunks - first - (number - 1) * rest, count))
            inner += count * (number - 1)
            most = max(most, number)
            folded += count * (number > 1)
    later.append((rest, inner))
    windows = int(inner * map_blocks * share) if rest >= LEAST_WINDOWED else 0
    a_map, a_window = (chunks * MAP + PROGRAM for chunks in (rest, min(rest, WINDOW)))
    maps = [(a_map, inner * map_blocks - windows), (a_window, windows)]
    # First segments begin when all programs of maps have begun.
    more = inner * map_blocks - multiprocessors
    begin = 0.0 if more <= 0 else a_window if more <= windows else a_map
    forms = (1, 2) if V > 64 else (1,)
    early = {
        states: max(
            time_of([*walk_programs(firsts, HV, V, states), *maps], multiprocessors),
            begin + time_of(walk_programs(firsts, HV, V, states), multiprocessors),
        )
        for states in forms
    }
    late = {
        states: time_of(walk_programs(tuple(later), HV, V, states), multiprocessors)
        for states in forms
    }
    one, other = min(early, key=lambda s: early[s]), min(late, key=lambda s: late[s])
    is_windowed = rest >= LEAST_WINDOWED
    turns = -(-folded * HV * -(-V // FOLD_COLUMNS) // multiprocessors)
    time = early[one] + late[other] + FOLD * turns * (most - 1)
    time += LAUNCHES_WITH_WINDOWS if is_windowed and inner else LAUNCHES
    cut = Cut(
        first=first,
        rest=rest,
        first_states=one,
        later_states=other,
        windows=is_windowed,
    )
    return time, cut


@functools.lru_cache(maxsize=1024)
def whole_times(multiprocessors: int, lengths: Lengths, HV: int, V: int) -> dict[int, float]:
    """Microseconds of whole sequences, by the states of a block."""
    return {
        states: time_of(walk_programs(lengths, HV, V, states), multiprocessors)
        for states in ((1, 2) if V > 64 else (1,))
    }


def states_of_whole(multiprocessors: int, problem: Problem) -> int:
    """The states of a block that walks whole sequences. Both give the same bits."""
    p = problem
    times = whole_times(multiprocessors, lengths_of(p), p.HV, p.V)
    return min(times, key=lambda states: times[states])


@functools.lru_cache(maxsize=1024)
def best_cut(multiprocessors: int, lengths: Lengths, HV: int, V: int) -> Cut | None:
    whole = min(whole_times(multiprocessors, lengths, HV, V).values())
    # Each chunk is walked once, whatever the cut.
    both = TWO_STATES * -(-V // 128) if V > 64 else ONE_STATE
    each = HV * min(both, ONE_STATE * -(-V // 64)) / multiprocessors
    best, enough = None, WORTH_IT * whole
    if each * sum(chunks * count for chunks, count in lengths) + LAUNCHES >= enough:
        return None
    longest, last = max(chunks for chunks, _ in lengths), 1
    for later in range(1, MOST_LATER + 1):
        for first, rest in candidates(longest, later):
            time, cut = cut_time(multiprocessors, lengths, HV, V, first, rest, FORGETTING)
            if time < enough:
                best, enough, last = cut, time, later
        if later >= last + MORE_LATER:
            break
    return best


def choose_cut(multiprocessors: int, problem: Problem) -> Cut | None:
    """Returns None if sequences stay whole. The sizes of the whole call decide, and the longest
    sequences if the host knows them. The batch-invariant mode cuts nothing, and maps have no room
    for more than 128 channels of K."""
    p = problem
    if p.batch_invariant or p.N > MOST_SEQUENCES or 0 in (p.N, p.HV, p.V, p.B * p.T) or p.K > 128:
        return None
    return best_cut(multiprocessors, lengths_of(p), p.HV, p.V)
