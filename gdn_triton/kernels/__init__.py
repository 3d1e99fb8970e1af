"""The Triton kernels: one file per mathematical step, each kernel with its launcher below it."""
