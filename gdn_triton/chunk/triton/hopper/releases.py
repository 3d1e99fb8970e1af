"""The releases of Triton whose Gluon compiles the kernels for compute capability 9.0. Importing
this module does not import Triton."""

import functools
from typing import Final

from packaging.version import Version

# Gluon's language and the machine code of its kernels differ between releases of Triton.
# tests/host/test_gluon_code.py checks the code of the installed release if it is one of these.
RELEASES: Final = ("3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0")

# Of these the releases with which a block has one state: two states a block would spill, and the
# assembler would serialise their products.
ONE_STATE_RELEASES: Final = ("3.9.0",)


@functools.cache
def installed_release() -> str:
    import triton

    return Version(triton.__version__).base_version


def most_states() -> int:
    """The most states that a block may have."""
    return 1 if installed_release() in ONE_STATE_RELEASES else 2
