"""Which problems the forward for compute capability 9.0 serves. Importing this imports no Triton."""

import functools
import importlib.metadata
import logging
import os
from typing import Final

import torch

from gdn_triton.chunk.problem import Problem

SWITCH: Final = "GDN_GLUON"

# Gluon's language changes between releases, and so does the code that they make of it:
# tests/host/test_gluon_code.py judges the code of each of these.
RELEASES: Final = ("3.6.0", "3.7.1", "3.9.0")

_logger = logging.getLogger("gdn_triton")


def hopper_refusal(problem: Problem) -> str | None:
    """A sentence why the kernel for compute capability 9.0 does not run this problem, and the
    portable kernels do; or None. ValueError for an unknown `GDN_GLUON`."""
    p = problem
    if not _asked():
        return f"{SWITCH}=0 asks for the portable kernels."
    if p.device.type != "cuda":
        return "The kernel for compute capability 9.0 takes tensors of an NVIDIA GPU."
    refusal = _place_refusal(p.device)
    if refusal is not None:
        return refusal
    if not p.q_dtype is p.k_dtype is p.v_dtype is torch.bfloat16:
        return "The kernel for compute capability 9.0 takes q, k and v in bfloat16."
    if p.chunk_size != 64:
        return f"The kernel for compute capability 9.0 has chunks of 64; chunk_size is {p.chunk_size}."
    if p.K > 128 or p.K % 8 != 0 or p.V % 8 != 0:
        return (
            "The kernel for compute capability 9.0 takes K and V in multiples of 8, and K up to "
            f"128; K is {p.K} and V is {p.V}."
        )
    if p.pool_dtype is not None:
        return "The kernel for compute capability 9.0 takes no pool of states."
    if 0 in (p.N, p.T, p.HV, p.K, p.V):
        return "The kernel for compute capability 9.0 takes at least one token."
    return None


def _asked() -> bool:
    value = os.environ.get(SWITCH, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH} must be 0 or 1, got {value!r}")
    return value == "1"


@functools.cache
def _place_refusal(device: torch.device) -> str | None:
    """Why not on this device, with this release of Triton. Neither changes within a process."""
    found = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or found != (9, 0):
        return f"The device has compute capability {found[0]}.{found[1]}, not 9.0."
    release = importlib.metadata.version("triton")
    if release not in RELEASES:
        why = f"The kernel for compute capability 9.0 is for Triton {', '.join(RELEASES)}, not {release}."
        _logger.info("%s The portable kernels run.", why)
        return why
    return None
