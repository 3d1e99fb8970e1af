"""The rule by which the walks of the backward for compute capability 9.0 cut sequences into
segments of one length. Importing this module does not import Triton.

The state after a segment is M h + b for the state h before it, and the gradient of the state before
it is M^T dh + b' for the gradient dh after it (docs/backward.md). The maps M, b and b' of all
segments are made at the same time, a fold from each end gives the states that segments start from,
and then all segments are walked at the same time. Where a segment forgets the state before it, b
and b' are walked over the fewest chunks that forget, and M is 0.
"""

from typing import Final

from gdn_triton.chunk.problem import Problem
from gdn_triton.chunk.triton.hopper.segments import lengths_of, states_at_once

# States for each multiprocessor, below which the portable walks, whose programs own fewer columns
# of a state, are faster for whole sequences.
FEWEST_WALKS: Final = 0.12

# Microseconds on an H200. A chunk of the longest whole sequence: in the portable kernels; and in
# blocks of one state, where both walks take at most half of the multiprocessors, and where they
# take more.
PORTABLE, FEW_BLOCKS, MANY_BLOCKS = 1.6, 2.3, 3.2
# Every call in segments; and in addition each chunk of 128 channels of V of a value head, divided
# by the number of multiprocessors.
SEGMENTS, CHUNK_IN_SEGMENTS = 180.0, 9.6
# A cut has to take at most this share of the time of whole sequences.
WORTH_IT: Final = 0.93
LEAST_SEGMENT: Final = 16
# A program reads the lengths of all packed sequences at once.
MOST_SEQUENCES: Final = 128


def choose_segment(multiprocessors: int, problem: Problem) -> int:
    """Returns the chunks of a segment, or 0 if sequences stay whole. The segments of all sequences
    together fill the GPU once with blocks of two states for each walk. The sizes of the whole call
    decide, and the longest sequences if the host knows them. The batch-invariant mode cuts
    nothing."""
    p = problem
    if p.batch_invariant or p.N > MOST_SEQUENCES or 0 in (p.N, p.HV, p.V, p.B * p.T) or p.K > 128:
        return 0
    lengths, states = lengths_of(p), states_at_once(p)
    longest, chunks = max(n for n, _ in lengths), sum(n * count for n, count in lengths)
    blocks = p.HV * -(-p.V // 128)
    segment = max(-(-chunks // max(multiprocessors // blocks, 1)), LEAST_SEGMENT)
    # Two walks of two blocks of 64 channels of V for each state fill the GPU with whole sequences.
    if segment >= longest or 4 * states > multiprocessors:
        return 0
    if states < FEWEST_WALKS * multiprocessors:
        whole = longest * PORTABLE
    else:
        whole = longest * (FEW_BLOCKS if 8 * states <= multiprocessors else MANY_BLOCKS)
    time = SEGMENTS + CHUNK_IN_SEGMENTS * blocks * chunks / multiprocessors
    return segment if time < WORTH_IT * whole else 0
