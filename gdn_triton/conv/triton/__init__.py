"""The Triton backend of the convolution: its autograd function, and its kernels."""
