"""The kernels of the fused forward, and those of a sequence that is cut into segments."""
