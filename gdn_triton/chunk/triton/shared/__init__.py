"""Device functions and records that several kernels of the chunked op use."""
