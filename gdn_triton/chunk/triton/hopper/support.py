"""The problems that the kernels for compute capability 9.0 serve. Importing this module does not
import Triton."""

import functools
from typing import Final

import torch

from gdn_triton._host.gluon import gluon_refusal
from gdn_triton.chunk.problem import Problem
from gdn_triton.chunk.triton.hopper.segments import choose_cut, states_at_once
from gdn_triton.chunk.triton.hopper.walks.segments import FEWEST_WALKS, choose_segment

# States for each multiprocessor, below which the portable kernels, whose programs own fewer columns
# of a state, may be faster for sequences that are not cut. Measured on an H100 (docs/gluon.md).
FEWEST_STATES: Final = 0.24

# The same with K above 128, where a program owns this many columns of a state: programs for each
# multiprocessor.
COLUMNS: Final = 64
FEWEST_PROGRAMS: Final = 0.3

# The longest packed sequence over the average, where the host does not know the lengths.
ASSUMED_UNEVENNESS: Final = 4

# The channels of K that the kernels have room for: the forward's, and those of the backward.
MOST_KEYS: Final = 256
MOST_BACKWARD_KEYS: Final = 128

# The channels of V that the kernel of the gradients of chunks has room for.
MOST_GRADIENT_CHANNELS: Final = 128


def hopper_refusal(problem: Problem) -> str | None:
    """Returns a sentence why the portable kernels run this problem instead of the kernel for
    compute capability 9.0, or None.

    Raises ValueError if GDN_GLUON is neither 0 nor 1.
    """
    p = problem
    refusal = _any_refusal(p, MOST_KEYS)
    if refusal is not None or p.batch_invariant:
        return refusal
    states, multiprocessors = p.N * p.HV, _multiprocessors(p.device)
    few = f"too few for the kernel for compute capability 9.0 on {multiprocessors} multiprocessors."
    if p.K > MOST_BACKWARD_KEYS:
        programs = states * -(-p.V // COLUMNS)
        if programs < FEWEST_PROGRAMS * multiprocessors:
            return f"The call has {programs} times {COLUMNS} columns of a state, {few}"
        return None
    is_cut = choose_cut(multiprocessors, p) is not None
    if states < FEWEST_STATES * multiprocessors and not is_cut:
        return f"The call has {states} states (sequences times value heads), {few}"
    return None


def gradients_refusal(problem: Problem) -> str | None:
    """Returns the same for the kernel of the gradients of chunks."""
    p = problem
    refusal = _any_refusal(p, MOST_BACKWARD_KEYS)
    kernel = "The kernel of the gradients of chunks for compute capability 9.0"
    if refusal is None and p.q_dtype is not torch.bfloat16:
        return f"{kernel} takes bfloat16."
    if refusal is None and p.V > MOST_GRADIENT_CHANNELS:
        return f"{kernel} takes V up to {MOST_GRADIENT_CHANNELS}; V is {p.V}."
    return refusal


def walks_refusal(problem: Problem) -> str | None:
    """Returns the same for the walks of the backward."""
    p = problem
    refusal = _any_refusal(p, MOST_BACKWARD_KEYS)
    if refusal is None and p.q_dtype is not torch.bfloat16:
        return "The walks for compute capability 9.0 take bfloat16."
    if refusal is not None or p.batch_invariant:
        return refusal
    states = states_at_once(p)
    if p.is_varlen and p.N > 1 and p.longest[0] == 0:
        states /= ASSUMED_UNEVENNESS
    multiprocessors = _multiprocessors(p.device)
    if states < FEWEST_WALKS * multiprocessors and choose_segment(multiprocessors, p) == 0:
        return (
            f"The walks for compute capability 9.0 would run {states:.0f} states at once, too few "
            f"on {multiprocessors} multiprocessors: the longest sequence bounds the call."
        )
    return None


def _any_refusal(problem: Problem, most_keys: int) -> str | None:
    """Returns the refusal that does not depend on the number of states, of a kernel with room for
    so many channels of K, or None."""
    p = problem
    return gluon_refusal(p.device) or sizes_refusal(p, most_keys)


def sizes_refusal(problem: Problem, most_keys: int) -> str | None:
    """Returns the refusal that follows from dtypes, sizes and options alone, or None."""
    p = problem
    kernel = "The kernel for compute capability 9.0"
    if not p.q_dtype is p.k_dtype is p.v_dtype or p.q_dtype not in (torch.bfloat16, torch.float16):
        return f"{kernel} takes q, k and v all in bfloat16 or all in float16."
    if p.chunk_size != 64:
        return f"{kernel} has chunks of 64 tokens; chunk_size is {p.chunk_size}."
    if p.K > most_keys or p.K % 8 != 0 or p.V % 8 != 0:
        sizes = f"K and V in multiples of 8, K up to {most_keys}"
        return f"{kernel} takes {sizes}; K is {p.K}, V is {p.V}."
    if 0 in (p.N, p.T, p.HV, p.K, p.V):
        return f"{kernel} takes no empty tensors."
    return None


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
