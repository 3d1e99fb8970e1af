"""The Triton backend of a layer's step: the kernel, and the form of a step with a window."""
