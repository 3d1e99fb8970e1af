"""The CUDA library: whether it is there, and why not. Importing this loads nothing.

The library, `_gdn_fast.so` beside this file, is optional: `GDN_BUILD_CUDA=1 pip install .` in a
checkout builds it. Its operators are `torch.ops.gdn_fast.*` (`csrc/ops.cpp`);
`gdn_triton.chunk.cuda.calls` calls them.
"""

import functools
import logging
from pathlib import Path

import torch

from gdn_triton.fast.architectures import ARCHITECTURES, Architecture

LIBRARY = Path(__file__).with_name("_gdn_fast.so")

_logger = logging.getLogger("gdn_triton")


@functools.cache
def why_unavailable() -> str | None:
    """A sentence why the CUDA library cannot be used in this process, or None if it can.

    The first call loads it and asks for the GPUs; the answer is kept. Where the library is not
    built and a GPU would run it, that call logs a warning with the command to type: pip shows
    nothing of a build that succeeds.
    """
    if not LIBRARY.exists():
        return _why_not_built()
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


def _why_not_built() -> str:
    if __name__ != "gdn_triton.fast":
        # No build puts a library into a copy of the package under another name (hub/build.py).
        return (
            "The CUDA library is not built: a universal kernel has no machine code, the installed "
            "package may have."
        )
    how = "`GDN_BUILD_CUDA=1 pip install .` in a checkout builds it"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    served = next((device for device in range(count) if why_not_on(device) is None), None)
    if served is None:
        return f"The CUDA library is not built: {how}."
    name = torch.cuda.get_device_name(served)
    answer = f"The CUDA library is not built: {name} would run faster with it; {how}."
    _logger.warning("%s", answer)
    return answer
