"""The rule by which the forward for compute capability 9.0 cuts sequences into segments. Importing
this module does not import Triton.

The constants are from times on an H100 of 2 to 64 value heads with 2048 to 65536 tokens.
"""

import math
from typing import Final

from gdn_triton.chunk.problem import Problem

CHUNK: Final = 64
# Chunks of a segment from which as many segments as fill the GPU are faster than half as many.
LONG_SEGMENT: Final = 32
# Chunks of the shortest segment.
LEAST_SEGMENT: Final = 8
# For calls with few segments a sequence, the least product of the number of segments and the
# chunks of the sequence. The fewer segments share the time of the maps, the longer the sequence
# has to be.
LEAST_PRODUCT: Final = 336


def states_at_once(problem: Problem) -> float:
    """Returns how many states of 128 columns run at once on average, if only the longest sequence
    bounds the call: for each value head, all tokens over those of the longest sequence."""
    p = problem
    rows = p.B * p.T
    return p.HV * -(-p.V // 128) * rows / (p.longest[0] or -(-rows // p.N))


def choose_segments(multiprocessors: int, problem: Problem) -> int:
    """Returns the number of chunks of a segment (fused/segments.py), or 0 if no sequence is cut.
    The sizes of the whole call decide, and the longest sequence if the host knows it. The
    batch-invariant mode cuts nothing."""
    p = problem
    rows = p.B * p.T
    if p.batch_invariant or p.N * p.HV * p.V * rows == 0:
        return 0
    states = states_at_once(p)
    if 3 * states > multiprocessors:
        return 0
    longest = -(-(p.longest[0] or -(-rows // p.N)) // CHUNK)
    filling = int(multiprocessors / states)
    if multiprocessors < 8 * states:
        # As many as fill the GPU with the maps of the inner segments, two blocks each.
        segments = (filling + 3) // 2
        least = LEAST_PRODUCT // segments
    else:
        # As many as fill it with blocks of one state each. The fold of the maps takes a time for
        # each segment, which grows beyond that of a segment's walk.
        segments = filling if longest >= LONG_SEGMENT * filling else filling // 2
        segments = min(segments, math.isqrt(longest))
        least = LEAST_SEGMENT * segments
    return -(-longest // segments) if longest >= max(least, 1) else 0
