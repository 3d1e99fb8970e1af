"""Whether the Gluon kernels for compute capability 9.0 run. Importing this module does not import
Triton."""

import functools
import logging
from typing import Final

import torch
from packaging.version import Version

from gdn_triton._host.environment import flag

SWITCH: Final = "GDN_GLUON"

# The releases of Triton whose Gluon compiles the kernels. Gluon's language and the machine code of
# its kernels differ between releases. tests/host/test_gluon_code.py checks the code of the
# installed release if it is one of these.
RELEASES: Final = ("3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0")

_logger = logging.getLogger("gdn_triton")


def gluon_refusal(device: torch.device) -> str | None:
    """Returns a sentence why the portable kernels run on this device instead of the Gluon kernels
    for compute capability 9.0, or None.

    Raises ValueError if GDN_GLUON is neither 0 nor 1.
    """
    if not flag(SWITCH, default=True):
        return f"{SWITCH}=0 asks for them."
    if device.type != "cuda":
        return "The kernel for compute capability 9.0 takes tensors of an NVIDIA GPU."
    return device_refusal(device) or release_refusal()


# The device and the release of Triton do not change within a process.


@functools.cache
def device_refusal(device: torch.device) -> str | None:
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU."
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or (major, minor) != (9, 0):
        return f"The GPU has compute capability {major}.{minor}, not 9.0."
    return None


@functools.cache
def installed_release() -> str:
    import triton

    return Version(triton.__version__).base_version


@functools.cache
def release_refusal() -> str | None:
    release = installed_release()
    if release in RELEASES:
        return None
    why = (
        f"The kernel for compute capability 9.0 is for Triton {', '.join(RELEASES)}; the installed "
        f"one is {release}."
    )
    _logger.info("%s The portable kernels run.", why)
    return why
