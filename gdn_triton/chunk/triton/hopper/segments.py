"""Into which segments the forward for compute capability 9.0 cuts sequences. Importing this imports
no Triton."""

from typing import Final

from gdn_triton.chunk.problem import Problem

# Chunks of a sequence below which it is not cut. The first is for calls whose maps would fill the
# GPU more than once, if segments filled it.
LEAST_CUT: Final = (128, 64)


def choose_segments(multiprocessors: int, problem: Problem) -> int:
    """Chunks of the segments that sequences are cut into (fused/segments.py), or 0. By the sizes of
    the whole call, so never in the batch-invariant mode."""
    p = problem
    blocks = p.N * p.HV * -(-p.V // 128)
    if p.batch_invariant or blocks == 0 or 3 * blocks > multiprocessors:
        return 0
    # As many segments as fill the GPU. Where a sequence has few, the maps of its inner ones, two
    # blocks each, would need it twice, so there are as many as fill it with maps.
    few = multiprocessors < 8 * blocks
    segments = (multiprocessors // blocks + 3) // 2 if few else multiprocessors // blocks
    chunks = p.B * -(-p.T // 64) // p.N
    return -(-chunks // segments) if chunks >= LEAST_CUT[0 if few else 1] else 0
