"""The kernels of the forward by steps. Each step writes its result to memory."""
