"""The problems that the kernels for compute capability 9.0 serve. Importing this module does not
import Triton."""

import functools
import logging
from typing import Final

import torch
from packaging.version import Version

from gdn_triton._host.environment import variable
from gdn_triton.chunk.problem import Problem
from gdn_triton.chunk.triton.hopper.segments import choose_segments

SWITCH: Final = "GDN_GLUON"

# Gluon's language and the machine code of its kernels differ between releases of Triton.
# tests/host/test_gluon_code.py checks the code of the installed release if it is one of these.
RELEASES: Final = ("3.6.0", "3.7.1")

# States for each multiprocessor, below which the portable kernels, whose programs own fewer columns
# of a state, may be faster for sequences that are not cut. Measured on an H100 (docs/gluon.md).
FEWEST_STATES: Final = 0.24

# The same for the walks of the backward.
FEWEST_WALKS: Final = 0.24

# Whether the kernels take the calls of `_unproven_forward` and `_unproven_walks`, which have run in
# the emulator alone.
TAKE_UNPROVEN = False

_logger = logging.getLogger("gdn_triton")


def hopper_refusal(problem: Problem) -> str | None:
    """Returns a sentence why the portable kernels run this problem instead of the kernel for
    compute capability 9.0, or None.

    Raises ValueError if GDN_GLUON is neither 0 nor 1.
    """
    p = problem
    refusal = _any_refusal(p) or _unproven_forward(p)
    if refusal is not None or p.batch_invariant:
        return refusal
    states, multiprocessors = p.N * p.HV, _multiprocessors(p.device)
    is_cut = choose_segments(multiprocessors, p) > 0
    if states < FEWEST_STATES * multiprocessors and not is_cut:
        return (
            f"The call has {states} states (sequences times value heads), too few for the kernel "
            f"for compute capability 9.0 on {multiprocessors} multiprocessors."
        )
    return None


def walks_refusal(problem: Problem) -> str | None:
    """Returns the same for the walks of the backward."""
    p = problem
    refusal = _any_refusal(p)
    if refusal is None and p.q_dtype is not torch.bfloat16:
        return "The walks for compute capability 9.0 take bfloat16."
    refusal = refusal or _unproven_walks(p)
    if refusal is not None or p.batch_invariant:
        return refusal
    states, multiprocessors = p.N * p.HV, _multiprocessors(p.device)
    if states < FEWEST_WALKS * multiprocessors:
        return (
            f"The call has {states} states (sequences times value heads), too few for the walks "
            f"for compute capability 9.0 on {multiprocessors} multiprocessors."
        )
    return None


def _unproven_forward(problem: Problem) -> str | None:
    """Returns the refusal of a call that has run in the emulator alone, or None."""
    if TAKE_UNPROVEN or problem.q_dtype is torch.bfloat16:
        return None
    return "The kernel for compute capability 9.0 has not run with float16 on a GPU."


def _unproven_walks(problem: Problem) -> str | None:
    """Returns the same for the walks of the backward."""
    p = problem
    if TAKE_UNPROVEN:
        return None
    if p.is_varlen or p.T % 64 != 0 or (p.K, p.V) != (128, 128):
        return (
            "The walks for compute capability 9.0 have run on a GPU with padded sequences of whole "
            f"chunks and K = V = 128 only; T is {p.T}, K is {p.K}, V is {p.V}, and is_varlen is "
            f"{p.is_varlen}."
        )
    if p.has_initial_state or p.output_final_state:
        return (
            "The walks for compute capability 9.0 have run on a GPU without initial and final "
            "states only."
        )
    return None


def _any_refusal(problem: Problem) -> str | None:
    """Returns the refusal of both, which does not depend on the number of states, or None."""
    p = problem
    if not _asked():
        return f"{SWITCH}=0 asks for them."
    if p.device.type != "cuda":
        return "The kernel for compute capability 9.0 takes tensors of an NVIDIA GPU."
    return _device_refusal(p.device) or _release_refusal() or sizes_refusal(p)


def sizes_refusal(problem: Problem) -> str | None:
    """Returns the refusal that follows from dtypes, sizes and options alone, or None."""
    p = problem
    kernel = "The kernel for compute capability 9.0"
    if not p.q_dtype is p.k_dtype is p.v_dtype or p.q_dtype not in (torch.bfloat16, torch.float16):
        return f"{kernel} takes q, k and v all in bfloat16 or all in float16."
    if p.chunk_size != 64:
        return f"{kernel} has chunks of 64 tokens; chunk_size is {p.chunk_size}."
    if p.K > 128 or p.K % 8 != 0 or p.V % 8 != 0:
        return f"{kernel} takes K and V in multiples of 8, K up to 128; K is {p.K}, V is {p.V}."
    if 0 in (p.N, p.T, p.HV, p.K, p.V):
        return f"{kernel} takes no empty tensors."
    return None


def _asked() -> bool:
    value = variable(SWITCH)
    if value not in (None, "0", "1"):
        raise ValueError(f"{SWITCH} must be 0 or 1, got {value!r}")
    return value != "0"


# The device and the release of Triton do not change within a process.


@functools.cache
def _device_refusal(device: torch.device) -> str | None:
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU."
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or (major, minor) != (9, 0):
        return f"The GPU has compute capability {major}.{minor}, not 9.0."
    return None


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _release_refusal() -> str | None:
    import triton

    release = Version(triton.__version__).base_version
    if release in RELEASES:
        return None
    why = (
        f"The kernel for compute capability 9.0 is for Triton {', '.join(RELEASES)}; the installed "
        f"one is {release}."
    )
    _logger.info("%s The portable kernels run.", why)
    return why
