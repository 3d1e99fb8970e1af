"""The chunked op with a context of context parallelism: validate, choose a backend, run it."""

from torch import Tensor

from gdn_triton._host.arguments import is_strided, must, type_of
from gdn_triton._host.tensors import is_traced, resolved
from gdn_triton._ranks.context import shard_layout
from gdn_triton._ranks.layout import ShardLayout
from gdn_triton.chunk.backends import SHARDED
from gdn_triton.chunk.problem import ChunkCall, Inputs, Problem
from gdn_triton.chunk.sharded.autograd import forward
from gdn_triton.chunk.validation import validate_chunk


def sharded(x: ChunkCall, cp_context: object) -> tuple[Tensor, Tensor | None]:
    """`gdn_triton.chunk_gated_delta_rule` with a context: validate, choose a backend, run it."""
    layout, inputs, problem = validate_sharded(x, cp_context)
    if layout.group is None and layout.crosses:
        raise ValueError(
            "cp_context.group must be a torch.distributed.ProcessGroup, got None: a context "
            "without one is for gdn_triton.distributed.forward_prepare"
        )
    if problem.unreadable is not None:
        raise NotImplementedError(f"cp_context serves no such call. {problem.unreadable}")
    ops = SHARDED.choose(problem).run
    return forward(ops, problem, layout, resolved(inputs))


def validate_sharded(x: ChunkCall, cp_context: object) -> tuple[ShardLayout, Inputs, Problem]:
    """Checks a call. Its offsets are those of the context, also in the inputs that are returned.
    Raises the errors of `validate_chunk` and `shard_layout`."""
    layout = shard_layout(cp_context)
    tokens = sum(layout.lengths[interval.slot] for interval in layout.intervals)
    q = x.inputs.q
    # The other checks of q are those of the call.
    if isinstance(q, Tensor) and is_strided(q) and q.dim() == 4 and q.shape[1] != tokens:
        raise ValueError(
            f"q must have the T={tokens} tokens of this rank's part of cp_context, got "
            f"T={q.shape[1]}"
        )
    inputs = x.inputs._replace(cu_seqlens=layout.cu_seqlens)
    problem = validate_chunk(x._replace(inputs=inputs, cu_seqlens_cpu=None))
    if is_traced(q):
        expected = "have memory with cp_context, whose ranks exchange what is in it"
        raise ValueError(must("q", expected, f"a {type_of(q)} on {problem.device}"))
    return layout, inputs, problem
