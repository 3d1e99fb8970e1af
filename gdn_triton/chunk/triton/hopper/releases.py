"""What depends on the release of Triton that compiles the kernels for compute capability 9.0.
Importing this module does not import Triton."""

from typing import Final

from gdn_triton._host import gluon

# The releases with which a block has one state: two states a block would spill, and the assembler
# would serialise their products.
ONE_STATE_RELEASES: Final = ("3.9.0",)


def most_states() -> int:
    """The most states that a block may have."""
    return 1 if gluon.installed_release() in ONE_STATE_RELEASES else 2
