"""The CUDA library: whether it can be used, and why not. Importing this module loads nothing.

The library is the file `_gdn_fast.so` in this folder. It is optional, and is built in a checkout by
`GDN_BUILD_CUDA=1 pip install .`. Its operators are `torch.ops.gdn_fast.*` (`csrc/ops.cpp`);
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

    The first call loads the library and queries the GPUs, and the result is kept. If the library is
    not built and a GPU could run it, the first call logs a warning with the command that builds it,
    because pip shows no output of a build that succeeds.
    """
    if not LIBRARY.exists():
        return _why_not_built()
    if not torch.cuda.is_available():
        return "The CUDA library needs a GPU; torch finds no CUDA device."
    try:
        torch.ops.load_library(str(LIBRARY))
        refusal: str = torch.ops.gdn_fast.why_unavailable()
    except Exception as error:
        # torch's own message names only the file. A library of another package lacks this operator.
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
    """The folder and the limits of the library's kernels for this CUDA device, for which
    `why_not_on` is None."""
    return ARCHITECTURES[torch.cuda.get_device_capability(device)]


def _why_not_built() -> str:
    if __name__ != "gdn_triton.fast":
        # A copy of the package under another name (hub/build.py) never contains a library.
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
