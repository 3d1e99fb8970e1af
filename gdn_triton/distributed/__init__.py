"""Context parallelism: packed sequences split over the ranks of a process group, by their tokens.

`build_cp_context` says which tokens and sequences a rank holds; `chunk_gated_delta_rule` takes its
result, or one of flash-linear-attention, as `cp_context`. `conv_halo` is what a short convolution
before the operator needs of the rank before. docs/context_parallel.md has the mathematics, the cost
and the limits.

A process group has to exist before any of this is called (torch.distributed.init_process_group).
"""

from gdn_triton.distributed.context import ContextParallel, build_cp_context, conv_halo

__all__ = ["ContextParallel", "build_cp_context", "conv_halo"]
