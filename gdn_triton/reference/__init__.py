"""The specification of every op in plain torch, which is also the CPU backend. It imports only
torch and the constants, so it shares no code, and no fault, with the rest of the package."""

from gdn_triton.reference.activations import beta_sigmoid, gate, l2norm
from gdn_triton.reference.arithmetic import product
from gdn_triton.reference.chunk import (
    ChunkResult,
    chunk_gated_delta_rule,
    recurrent_gated_delta_rule,
)
from gdn_triton.reference.chunk_view import Chunks, Rows, States
from gdn_triton.reference.steps import (
    StatePass,
    chunk_local_cumsum,
    gate_cumsum,
    kkt,
    output,
    solve,
    state_pass,
    wy,
)

__all__ = [
    "ChunkResult",
    "Chunks",
    "Rows",
    "StatePass",
    "States",
    "beta_sigmoid",
    "chunk_gated_delta_rule",
    "chunk_local_cumsum",
    "gate",
    "gate_cumsum",
    "kkt",
    "l2norm",
    "output",
    "product",
    "recurrent_gated_delta_rule",
    "solve",
    "state_pass",
    "wy",
]
