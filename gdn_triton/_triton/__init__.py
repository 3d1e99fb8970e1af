"""Functions that the Triton kernels of all operators share. Private."""
