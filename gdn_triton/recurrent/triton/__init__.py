"""The Triton backend of the recurrence: the plan of a call, and its kernels."""
