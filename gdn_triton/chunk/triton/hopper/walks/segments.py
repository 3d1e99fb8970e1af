"""The rule by which the walks of the backward cut sequences into segments of one length. Importing
this module does not import Triton.

A segment is affine in both directions: S_out = M S_in + b, and dS_in = M^T dS_out + c for the
gradients (docs/backward.md). The first segments are walked forward and the last ones back while the
maps of the inner ones are made: M and b by the forward's kernel, and c by a walk back from zeros
that stores no gradient. A fold of the maps from both ends gives the state and the gradient between
any two segments, and all other walks run at the same time.

Where the last chunks of an inner segment forget the state from before them, M is left out, as in
the forward (hopper/segments.py), and b and c are walked over as many chunks as forget. If a walk
then ends with a state other than the next start, both walks of its sequence and head run again,
whole.
"""

import functools
from typing import Final, NamedTuple

from gdn_triton.chunk.problem import Problem
from gdn_triton.chunk.triton.hopper.segments import (
    FOLD,
    FOLD_COLUMNS,
    FORGETTING,
    LEAST_SEGMENT,
    LEAST_WINDOWED,
    MAP,
    MOST_SEQUENCES,
    PROGRAM,
    WINDOW,
    WORTH_IT,
    Lengths,
    lengths_of,
    time_of,
)

# Microseconds of a chunk on an H100, in blocks of one state and of two: of the walk forward, of the
# walk back, and of a map of the gradients.
FORWARD: Final = {1: 1.9, 2: 2.6}
BACK: Final = {1: 2.25, 2: 2.9}
BACK_MAP: Final = {1: 2.25, 2: 3.1}
# The same of a chunk of 128 columns where the memory bounds both walks; of a chunk of the portable
# walks where each program has its own multiprocessor; of a chunk of 128 columns in the kernel that
# they need; and of the launches of a cut, without and with windows.
MEMORY, PORTABLE, PREPARE = 0.066, 1.4, 0.02
LAUNCHES, LAUNCHES_WITH_WINDOWS = 15.0, 25.0
PORTABLE_COLUMNS: Final = 16
MOST_SEGMENTS: Final = 32
# Whether calls are cut, and inner segments walked in windows. Neither has been measured on a GPU in
# this form.
CUTS: bool = False
WINDOWED: bool = False


class WalkCut(NamedTuple):
    """segment: chunks of a segment, of which the last of a sequence may have fewer. maps, later:
    the states of a block that makes a map of the gradients, or walks a later segment. windows:
    inner segments may be walked in windows."""

    segment: int
    maps: int = 2
    later: int = 2
    windows: bool = True


def whole_time(multiprocessors: int, lengths: Lengths, HV: int, V: int) -> float:
    """Microseconds of the walks over whole sequences."""
    states = HV * -(-V // 128) * sum(count for _, count in lengths)
    form = 2 if V > 64 and 8 * states > multiprocessors else 1
    blocks = HV * -(-V // (64 * form))
    chain = [(chunks * BACK[form] + PROGRAM, count * blocks) for chunks, count in lengths]
    work = sum(chunks * count for chunks, count in lengths) * HV * -(-V // 128)
    return max(time_of(chain, multiprocessors), work * MEMORY)


def portable_time(multiprocessors: int, lengths: Lengths, HV: int, V: int) -> float:
    """The same of the portable kernels, with the one that makes their triangles."""
    programs = 2 * HV * -(-V // PORTABLE_COLUMNS) * sum(count for _, count in lengths)
    chunks = max(chunks for chunks, _ in lengths)
    work = sum(chunks * count for chunks, count in lengths) * HV * -(-V // 128)
    return chunks * PORTABLE * max(1.0, programs / multiprocessors) + work * PREPARE


def cut_time(
    multiprocessors: int, lengths: Lengths, HV: int, V: int, segment: int, *, windows: bool
) -> tuple[float, WalkCut]:
    """Microseconds of a cut with the better forms of blocks."""
    parts = [(-(-chunks // segment), count) for chunks, count in lengths]
    sequences = sum(count for _, count in parts)
    inner = sum(max(n - 2, 0) * count for n, count in parts)
    later = sum((n - 1) * count for n, count in parts)
    folded = sum(count for n, count in parts if n > 2)
    columns = {states: HV * -(-V // (64 * states)) for states in (1, 2)}
    share = FORGETTING if windows else 0.0
    short = min(WINDOW, segment)
    maps = inner * HV * (-(-V // 128) + 1)
    forms = (1, 2) if V > 64 else (1,)
    early, late = {}, {}
    for states in forms:
        back = inner * columns[states]
        early[states] = time_of(
            [
                (segment * MAP + PROGRAM, round(maps * (1 - share))),
                (short * MAP + PROGRAM, round(maps * share)),
                (segment * FORWARD[1] + PROGRAM, sequences * columns[1]),
                (segment * BACK[states] + PROGRAM, sequences * columns[states]),
                (segment * BACK_MAP[states] + PROGRAM, round(back * (1 - share))),
                (short * BACK_MAP[states] + PROGRAM, round(back * share)),
            ],
            multiprocessors,
        )
        chain = sum(
            time_of([(segment * chunk[states] + PROGRAM, later * columns[states])], multiprocessors)
            for chunk in (FORWARD, BACK)
        )
        late[states] = max(chain, later * segment * HV * -(-V // 128) * MEMORY)
    of_maps, of_later = (min(times, key=lambda s: times[s]) for times in (early, late))
    turns = -(-2 * folded * HV * -(-V // FOLD_COLUMNS) // multiprocessors)
    steps = max(n for n, _ in parts) - 1
    time = early[of_maps] + late[of_later] + FOLD * turns * steps
    time += LAUNCHES_WITH_WINDOWS if windows else LAUNCHES
    return time, WalkCut(segment=segment, maps=of_maps, later=of_later, windows=windows)


@functools.lru_cache(maxsize=1024)
def best_walk_cut(multiprocessors: int, lengths: Lengths, HV: int, V: int) -> WalkCut | None:
    enough = WORTH_IT * min(
        time(multiprocessors, lengths, HV, V) for time in (whole_time, portable_time)
    )
    longest, best = max(chunks for chunks, _ in lengths), None
    for number in range(3, MOST_SEGMENTS + 1):
        segment = -(-longest // number)
        if segment < LEAST_SEGMENT:
            break
        windows = WINDOWED and segment >= LEAST_WINDOWED
        time, cut = cut_time(multiprocessors, lengths, HV, V, segment, windows=windows)
        if time < enough:
            best, enough = cut, time
    return best


def choose_walk_cut(multiprocessors: int, problem: Problem) -> WalkCut | None:
    """Returns None if sequences stay whole. The sizes of the whole call decide, and the longest
    sequences if the host knows them. The batch-invariant mode cuts nothing."""
    p = problem
    if not CUTS or p.batch_invariant or p.N > MOST_SEQUENCES or 0 in (p.N, p.HV, p.V, p.B * p.T):
        return None
    return best_walk_cut(multiprocessors, lengths_of(p), p.HV, p.V)
