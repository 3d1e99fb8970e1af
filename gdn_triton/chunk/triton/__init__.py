"""The Triton backend of the chunked op: host code, and one file per mathematical step, each kernel
with its launcher below it."""
