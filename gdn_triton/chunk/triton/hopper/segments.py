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
import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from gdn_triton.chunk.problem import Problem
from gdn_triton.chunk.triton.hopper.releases import most_states

CHUNK: Final = 64

# Microseconds on an H100, between those of mild gates and of a model's: a chunk in a block of two
# states, of one, and of a map; the start and end of such a program, and all of one without rows; a
# segment of the fold, for each sequence and head, and at least; and the other launches, without
# maps, with them, and with windows.
TWO_STATES, ONE_STATE, MAP = 2.92, 2.06, 2.15
PROGRAM_OF_TWO, PROGRAM_OF_ONE, PROGRAM_OF_MAP, EMPTY = 13.5, 6.5, 4.0, 3.0
FOLD, LEAST_FOLD = 0.15, 2.2
LAUNCHES, LAUNCHES_WITH_MAPS, LAUNCHES_WITH_WINDOWS = 22.0, 12.0, 27.0
# The share of the heads that forget, and the chunks of their windows, as a plan assumes them.
FORGETTING, WINDOW = 0.75, 11
# The chunks of the shortest segments that are walked in windows, which take a launch's time.
LEAST_WINDOWED: Final = 12
# A cut has to take at most this share of the time of whole sequences.
WORTH_IT: Final = 0.97
# The same where no head forgets.
MOST_LOSS: Final = 1.2
LEAST_SEGMENT: Final = 4
# Later segments at most, and how many more than in the best cut so far are tried.
MOST_LATER: Final = 16
MORE_LATER: Final = 3
# Of the first segment's length to the others'.
RATIOS: Final = (0.8, 1.0, 1.2, 1.45, 1.75, 2.2, 3.0, 4.0)
# The kernels that find the segments of packed sequences read the lengths of all at once.
MOST_SEQUENCES: Final = 1024


class Cut(NamedTuple):
    """Where sequences are cut, in chunks: after the first segment, and each other one. The states
    of a block that walks first segments and others. windows: inner segments may be walked in
    windows."""

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
    """The time of programs that begin in this order, each as soon as a multiprocessor is free."""
    free, end = [(0.0, multiprocessors)], 0.0
    for time, count in programs:
        while count > 0:
            begin, places = heapq.heappop(free)
            taken = min(places, count)
            if places > taken:
                heapq.heappush(free, (begin, places - taken))
            heapq.heappush(free, (begin + time, taken))
            count -= taken
            end = max(end, begin + time)
    return end


def work_of(programs: Programs) -> float:
    return sum(time * count for time, count in programs)


def forms_of_blocks(V: int) -> Sequence[int]:
    """The numbers of states that a block may have."""
    return range(1, most_states() + 1) if V > 64 else (1,)


def walk_programs(
    lengths: Lengths, heads: int, columns: int, states: int
) -> list[tuple[float, int]]:
    """The longest first. heads: of all states. columns: of a state."""
    blocks = heads * -(-columns // (64 * states))
    chunk, program = (TWO_STATES, PROGRAM_OF_TWO) if states == 2 else (ONE_STATE, PROGRAM_OF_ONE)
    return sorted(((n * chunk + program, count * blocks) for n, count in lengths), reverse=True)


def candidates(longest: int, later: int) -> Iterator[tuple[int, int]]:
    """Lengths of the first segment and of so many others."""
    for ratio in RATIOS:
        rest = -int(-longest // (later + ratio))
        first = longest - later * rest
        if min(first, rest) >= LEAST_SEGMENT:
            yield first, rest


def cut_time(
    multiprocessors: int,
    lengths: Lengths,
    HV: int,
    V: int,
    first: int,
    rest: int,
    share: float,
    enough: float = math.inf,
) -> tuple[float, Cut] | None:
    """Microseconds of a cut with the better shapes of blocks, where a share of the heads forget, or
    None if they are not below ``enough``."""
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
    windows = rest >= LEAST_WINDOWED
    # A map has blocks of b, and one of M.
    blocks, forgetting = -(-V // 128), int(HV * share) if windows else 0
    maps = [
        (rest * MAP + PROGRAM_OF_MAP, inner * (HV - forgetting) * (blocks + 1)),
        (min(rest, WINDOW) * MAP + PROGRAM_OF_MAP, inner * forgetting * blocks),
        (EMPTY, inner * forgetting),
    ]
    forms = forms_of_blocks(V)
    early = {states: walk_programs(firsts, HV, V, states) for states in forms}
    late = {states: walk_programs(tuple(later), HV, V, states) for states in forms}
    others = LAUNCHES
    if inner > 0:
        others = LAUNCHES_WITH_WINDOWS if windows else LAUNCHES_WITH_MAPS
        others += (LEAST_FOLD + FOLD * folded * HV * blocks) * (most - 1)
    least = min(map(work_of, early.values())) + work_of(maps) + min(map(work_of, late.values()))
    if least / multiprocessors + others >= enough:
        return None
    time, first_states = min((time_of([*maps, *early[s]], multiprocessors), s) for s in forms)
    time_of_later, later_states = min((time_of(late[s], multiprocessors), s) for s in forms)
    cut = Cut(
        first=first,
        rest=rest,
        first_states=first_states,
        later_states=later_states,
        windows=windows,
    )
    time += time_of_later + others
    return (time, cut) if time < enough else None


@functools.lru_cache(maxsize=1024)
def whole_times(multiprocessors: int, lengths: Lengths, HV: int, V: int) -> dict[int, float]:
    """Microseconds of whole sequences, by the states of a block."""
    return {
        states: time_of(walk_programs(lengths, HV, V, states), multiprocessors)
        for states in forms_of_blocks(V)
    }


def states_of_whole(multiprocessors: int, problem: Problem) -> int:
    """The states of a block that walks whole sequences. Both give the same bits."""
    p = problem
    times = whole_times(multiprocessors, lengths_of(p), p.HV, p.V)
    return min(times, key=lambda states: times[states])


@functools.lru_cache(maxsize=1024)
def best_cut(multiprocessors: int, lengths: Lengths, HV: int, V: int) -> Cut | None:
    whole = min(whole_times(multiprocessors, lengths, HV, V).values())
    best, enough, longest, last = None, WORTH_IT * whole, max(n for n, _ in lengths), 1
    for later in range(1, MOST_LATER + 1):
        for first, rest in candidates(longest, later):
            sizes = (multiprocessors, lengths, HV, V, first, rest)
            found = cut_time(*sizes, FORGETTING, enough)
            if found is not None and cut_time(*sizes, 0.0, MOST_LOSS * whole):
                enough, best = found
                last = later
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
