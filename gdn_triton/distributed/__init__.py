"""Context parallelism: packed sequences split over the ranks of a process group, by their tokens.

`build_cp_context` says which tokens and sequences a rank holds; `chunk_gated_delta_rule` takes its
result, or one of flash-linear-attention, as `cp_context`. `conv_halo` is what a short convolution
before the operator needs of the rank before. The four stages of a rank, `forward_prepare`,
`forward_apply`, `backward_prepare` and `backward_apply`, are for a caller that exchanges the maps
itself. docs/context_parallel.md has the mathematics, the cost and the limits.

A process group has to exist before any of this is called (torch.distributed.init_process_group),
except by the stages.
"""

from gdn_triton._ranks.context import ContextParallel, build_cp_context, conv_halo
from gdn_triton.chunk.sharded.stages import (
    BackwardLocal,
    ForwardLocal,
    Gradients,
    Saved,
    backward_apply,
    backward_prepare,
    forward_apply,
    forward_prepare,
)

__all__ = [
    "BackwardLocal",
    "ContextParallel",
    "ForwardLocal",
    "Gradients",
    "Saved",
    "backward_apply",
    "backward_prepare",
    "build_cp_context",
    "conv_halo",
    "forward_apply",
    "forward_prepare",
]
