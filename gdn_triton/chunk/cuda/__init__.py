"""The CUDA backend of the chunked op: the problems that it serves, and the calls of the library."""
