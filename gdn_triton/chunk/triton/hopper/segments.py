"""The plan of the forward for compute capability 9.0: where sequences are cut, and the states of a
block. Importing this module does not import Triton.

The effect of a segment on the state is an affine map, S_out = M S_in + b (docs/hopper.md). The
first segments of all sequences are walked while the maps of the inner ones are made: b by a walk
from zeros, and M by a walk from the identity with values of zero. A fold of the maps gives the
start of each later segment, and all of these are walked at the same time.

Where the last chunks of an inner segment, a window, forget the state from before them, b is walked
over the window alone, and M is left out. A later segment whose end then differs from the next start
has the rest of its sequence walked again.

`choose_cut` compares the modelled time of whole sequences with that of several cuts:

    lengths_of      the sequences, as the host knows or assumes them
    candidates      the lengths of segments that are tried
    cut_lengths     the segments into which a cut divides the sequences
    cut_time        the programs of a cut's launches, from the costs below
    time_of         the time of a launch, whose programs start in order on free multiprocessors
"""

import functools
import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from gdn_triton.chunk.problem import Problem
from gdn_triton.chunk.triton.hopper.releases import most_states

CHUNK: Final = 64

# Costs in microseconds, fitted on an H100 to times between those of mild gates and a model's. A
# program is one block of a launch.
#
# A chunk in a program of two states, in one of one state, and in one that makes a map.
TWO_STATES, ONE_STATE, MAP = 2.92, 2.06, 2.15
# The start and end of such a program, and all of a program without rows.
PROGRAM_OF_TWO, PROGRAM_OF_ONE, PROGRAM_OF_MAP, EMPTY = 13.5, 6.5, 4.0, 3.0
# A step of the fold, over one inner segment of every sequence: for each sequence, value head and
# 128 channels of V; and in addition to all of these.
FOLD, LEAST_FOLD = 0.15, 2.2
# All else of a call: without maps, with maps, and with maps in windows.
LAUNCHES, LAUNCHES_WITH_MAPS, LAUNCHES_WITH_WINDOWS = 22.0, 12.0, 27.0

# Assumptions about the gates, which the host does not read: the share of the heads that forget, and
# the chunks of their windows.
FORGETTING, WINDOW = 0.75, 11
# The fewest chunks of a segment whose map may be walked in a window: windows need one more launch.
LEAST_WINDOWED: Final = 12
# The most time of a cut over that of whole sequences: where FORGETTING of the heads forget, and
# where none forgets.
WORTH_IT: Final = 0.97
MOST_LOSS: Final = 1.2

# The search: the fewest chunks of a segment; the most later segments of the longest sequence; how
# many more than in the best cut so far are tried; and the first segment's length over the others'.
LEAST_SEGMENT: Final = 4
MOST_LATER: Final = 16
MORE_LATER: Final = 3
RATIOS: Final = (0.8, 1.0, 1.2, 1.45, 1.75, 2.2, 3.0, 4.0)
# The kernels that find the segments of packed sequences read the lengths of all at once.
MOST_SEQUENCES: Final = 1024


class Cut(NamedTuple):
    """A plan in segments. first, rest: the chunks of a first segment, and of every later one except
    the last. first_states, later_states: the states of a block that walks these segments. windows:
    inner segments may be walked in windows."""

    first: int
    rest: int
    first_states: int = 1
    later_states: int = 1
    windows: bool = True


# Pairs (chunks of a sequence or segment, how many there are).
Lengths = tuple[tuple[int, int], ...]
# Pairs (microseconds of a program, how many there are), in the order in which programs start.
Programs = Sequence[tuple[float, int]]


def states_at_once(problem: Problem) -> float:
    """Returns how many states of 128 channels of V run at once on average, if the longest sequence
    alone bounds the call: value heads, times blocks of V, times all tokens over those of the
    longest sequence. Without known lengths the sequences count as equally long."""
    p = problem
    rows = p.B * p.T
    return p.HV * -(-p.V // 128) * rows / (p.longest[0] or -(-rows // p.N))


def rounded_up(tokens: int) -> int:
    """Returns the chunks of so many tokens, rounded up to one of 16 numbers between two powers of
    two. Calls of uneven lengths, which may never repeat, then have few plans."""
    chunks = -(-tokens // CHUNK)
    step = 1 << max(chunks.bit_length() - 5, 0)
    return -(-chunks // step) * step


def lengths_of(problem: Problem) -> Lengths:
    """Returns the sequences as the host knows or assumes them: the longest ones, where the caller
    gave the lengths, and the others, or all, as equally long."""
    p = problem
    if not p.is_varlen or p.N == 1:
        return ((-(-p.T // CHUNK), p.N),)
    known = [min(rounded_up(tokens), rounded_up(p.T)) for tokens in p.longest if tokens > 0]
    known = known[: p.N]
    left, others = max(rounded_up(p.T) - sum(known), 0), p.N - len(known)
    kinds = [(chunks, 1) for chunks in known]
    return (*kinds, (-(-left // others), others)) if others else tuple(kinds)


def time_of(programs: Programs, multiprocessors: int) -> float:
    """Returns the time of programs that start in this order, each as soon as a multiprocessor is
    free."""
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
    """Returns the sum of the times of all programs."""
    return sum(time * count for time, count in programs)


def states_of_blocks(V: int) -> Sequence[int]:
    """Returns the numbers of states, 64 channels of V each, that a block may have."""
    return range(1, most_states() + 1) if V > 64 else (1,)


def walk_programs(lengths: Lengths, HV: int, V: int, states: int) -> list[tuple[float, int]]:
    """Returns the programs that walk sequences or segments with o, the longest first, in blocks of
    so many states."""
    blocks = HV * -(-V // (64 * states))
    chunk, program = (TWO_STATES, PROGRAM_OF_TWO) if states == 2 else (ONE_STATE, PROGRAM_OF_ONE)
    return sorted(((n * chunk + program, count * blocks) for n, count in lengths), reverse=True)


def candidates(longest: int, later: int) -> Iterator[tuple[int, int]]:
    """Yields `first` and `rest` of cuts that divide a sequence of `longest` chunks into a first and
    `later` other segments, one cut for each ratio of the two lengths."""
    for ratio in RATIOS:
        rest = -int(-longest // (later + ratio))
        first = longest - later * rest
        if min(first, rest) >= LEAST_SEGMENT:
            yield first, rest


class CutLengths(NamedTuple):
    """The segments of all sequences. firsts, later: the chunks of the first segments, and of all
    others. inner: the number of inner segments, which have maps: those that are neither the first
    nor the last of a sequence. mapped: the number of sequences with inner segments. most_inner: the
    most inner segments of a sequence, each of which is a step of the fold."""

    firsts: Lengths
    later: Lengths
    inner: int
    mapped: int
    most_inner: int


def cut_lengths(lengths: Lengths, first: int, rest: int) -> CutLengths:
    """Returns the segments of all sequences for a cut with these lengths."""
    firsts = tuple((min(chunks, first), count) for chunks, count in lengths)
    lasts: list[tuple[int, int]] = []
    inner = mapped = most_inner = 0
    for chunks, count in lengths:
        if chunks > first:
            own_inner = -(-(chunks - first) // rest) - 1
            lasts.append((chunks - first - own_inner * rest, count))
            inner += count * own_inner
            mapped += count * (own_inner > 0)
            most_inner = max(most_inner, own_inner)
    later = (*lasts, (rest, inner))
    return CutLengths(firsts=firsts, later=later, inner=inner, mapped=mapped, most_inner=most_inner)


def cut_time(
    multiprocessors: int,
    lengths: Lengths,
    HV: int,
    V: int,
    first: int,
    rest: int,
    forgetting: float,
    enough: float = math.inf,
) -> tuple[float, Cut] | None:
    """Returns the microseconds of a cut, with the faster shapes of blocks, and the cut; or None if
    they are not below ``enough``. forgetting: the share of the heads that forget."""
    segments = cut_lengths(lengths, first, rest)
    inner, windows = segments.inner, rest >= LEAST_WINDOWED
    blocks, heads_in_windows = -(-V // 128), int(HV * forgetting) if windows else 0
    maps = [
        # A whole map has the blocks of b, and one of M.
        (rest * MAP + PROGRAM_OF_MAP, inner * (HV - heads_in_windows) * (blocks + 1)),
        # A map in a window has those of b alone; the program of M finds nothing to do.
        (min(rest, WINDOW) * MAP + PROGRAM_OF_MAP, inner * heads_in_windows * blocks),
        (EMPTY, inner * heads_in_windows),
    ]
    choices = states_of_blocks(V)
    early = {states: walk_programs(segments.firsts, HV, V, states) for states in choices}
    late = {states: walk_programs(segments.later, HV, V, states) for states in choices}
    others = LAUNCHES
    if inner > 0:
        others = LAUNCHES_WITH_WINDOWS if windows else LAUNCHES_WITH_MAPS
        others += (LEAST_FOLD + FOLD * segments.mapped * HV * blocks) * segments.most_inner
    # No schedule is shorter than its work on all multiprocessors, which is faster to compute.
    least = min(map(work_of, early.values())) + work_of(maps) + min(map(work_of, late.values()))
    if least / multiprocessors + others >= enough:
        return None
    time, first_states = min((time_of([*maps, *early[s]], multiprocessors), s) for s in choices)
    time_of_later, later_states = min((time_of(late[s], multiprocessors), s) for s in choices)
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
    """Returns the microseconds of whole sequences, by the states of a block."""
    return {
        states: time_of(walk_programs(lengths, HV, V, states), multiprocessors)
        for states in states_of_blocks(V)
    }


def states_of_whole(multiprocessors: int, problem: Problem) -> int:
    """Returns the states of a block that walks whole sequences. Both numbers give the same
    bits."""
    p = problem
    times = whole_times(multiprocessors, lengths_of(p), p.HV, p.V)
    return min(times, key=lambda states: times[states])


@functools.lru_cache(maxsize=1024)
def best_cut(multiprocessors: int, lengths: Lengths, HV: int, V: int) -> Cut | None:
    """Returns the fastest cut, or None if none is worth it. The search goes from few later segments
    to many, and ends some steps after the best cut so far."""
    whole = min(whole_times(multiprocessors, lengths, HV, V).values())
    longest = max(chunks for chunks, _ in lengths)
    best, enough, best_later = None, WORTH_IT * whole, 1
    for later in range(1, MOST_LATER + 1):
        for first, rest in candidates(longest, later):
            sizes = (multiprocessors, lengths, HV, V, first, rest)
            found = cut_time(*sizes, FORGETTING, enough)
            if found is not None and cut_time(*sizes, 0.0, MOST_LOSS * whole):
                enough, best = found
                best_later = later
        if later >= best_later + MORE_LATER:
            break
    return best


def choose_cut(multiprocessors: int, problem: Problem) -> Cut | None:
    """Returns where the sequences of a call are cut, or None if they stay whole. The sizes of the
    whole call decide, and the longest sequences if the host knows them. The batch-invariant mode
    cuts nothing, and maps have no room for more than 128 channels of K."""
    p = problem
    if p.batch_invariant or p.N > MOST_SEQUENCES or 0 in (p.N, p.HV, p.V, p.B * p.T) or p.K > 128:
        return None
    return best_cut(multiprocessors, lengths_of(p), p.HV, p.V)
