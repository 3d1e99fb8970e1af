"""The Gluon kernels of steps for compute capability 9.0."""
