"""The CUDA library: whether it is there, and why not. Importing this loads nothing.

The library, `_gdn_fast.so` beside this file, is optional: an install without a CUDA compiler goes
without, and leaves the reason in `_build_status.txt`. Its operators are `torch.ops.gdn_fast.*`
(`csrc/ops.cpp`); `gdn_triton.chunk.cuda.calls` calls them.
"""

import functools
from pathlib import Path

import torch

from gdn_triton.fast.architectures import ARCHITECTURES, Architecture

LIBRARY = Path(__file__).with_name("_gdn_fast.so")
BUILD_STATUS = Path(__file__).with_name("_build_status.txt")


@functools.cache
def why_unavailable() -> str | None:
    """A sentence why the CUDA library cannot be used in this process, or None if it can.

    The first call loads it and asks for the GPUs; the answer is kept.
    """
    if not LIBRARY.exists():
        return f"The CUDA library is not built: {_build_status()}.{_how_to_get_it()}"
    if not torch.cuda.is_available():
        return "The CUDA library needs a GPU; torch finds no CUDA device."
    try:
        torch.ops.load_library(str(LIBRARY))
        refusal: str = torch.ops.gdn_fast.why_unavailable()
    except Exception as error:
        # torch's own message only names the file. Another package's library has no such operator.
        why = error.__cause__ or error
        return f"The CUDA library does not load with torch {torch.__version__}: {why}."
    if refusal:
        return refusal
    reasons = [why_not_on(device) for device in range(torch.cuda.device_count())]
    return None if None in reasons else reasons[0]


def is_available() -> bool:
    """Whether the CUDA library can be used in this process."""
    return why_unavailable() is None


@functools.cache
def why_not_on(device: int | None) -> str | None:
    """A sentence why the library's kernels cannot run on this CUDA device, or None if they can."""
    capability = torch.cuda.get_device_capability(device)
    if capability in ARCHITECTURES:
        return None
    needed = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
    return (
        f"The CUDA library is for GPUs of compute capability {needed}; "
        f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}."
    )


@functools.cache
def architecture_on(device: int | None) -> Architecture:
    """What the library's kernels for this CUDA device are and take; `why_not_on` is None for it."""
    return ARCHITECTURES[torch.cuda.get_device_capability(device)]


def _how_to_get_it() -> str:
    """A sentence after a space where there is a GPU for the library, else nothing; nothing either
    in a copy of the package under another name (hub/build.py), as no build puts a library there."""
    if __name__ != "gdn_triton.fast" or not torch.cuda.is_available():
        return ""
    devices = [i for i in range(torch.cuda.device_count()) if why_not_on(i) is None]
    if not devices:
        return ""
    return (
        f" {torch.cuda.get_device_name(devices[0])} would run faster with it: in a checkout, "
        '`pip install ".[cuda]"`, then `python csrc/build.py --install`.'
    )


def _build_status() -> str:
    """Why the last install built no library, without a full stop."""
    if BUILD_STATUS.exists():
        return BUILD_STATUS.read_text(encoding="utf-8").strip()
    return "python csrc/build.py builds it in a checkout"
