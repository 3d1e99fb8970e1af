"""Context parallelism: the tokens of packed sequences are split over the ranks of a process group.

`build_cp_context` computes which tokens and sequences a rank holds, and `chunk_gated_delta_rule`
accepts its result, or a context of flash-linear-attention, as `cp_context`. `conv_halo` returns the
tokens of earlier ranks that a short convolution before the operator needs. The four stages of a
rank, `forward_prepare`, `forward_apply`, `backward_prepare` and `backward_apply`, are for a caller
that exchanges the maps itself. docs/context_parallel.md has the mathematics, the cost and the
limits.

All functions except the stages need a process group (torch.distributed.init_process_group).
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
