"""The arguments of the CUDA library's operators, in the operators' order (`csrc/arguments.h`,
`csrc/ops.cpp`).

`torch.ops` takes twice as long for 20 arguments by keyword as by position. Callers therefore name
the arguments here, and unpack the tuple in the call. `tests/fast/test_operator_arguments.py` holds
the order.
"""

from typing import NamedTuple

from torch import Tensor


class CallInputs(NamedTuple):
    """What every call reads, as the kernels can read it."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    cu_seqlens: Tensor | None


class CallOptions(NamedTuple):
    """The options of every call. longest: tokens of the longest packed sequences, or zeros."""

    scale: float
    state_v_first: bool
    use_qk_l2norm: bool
    use_beta_sigmoid: bool
    allow_neg_eigval: bool
    batch_invariant: bool
    longest: tuple[int, int, int]


class ForwardArguments(NamedTuple):
    """The arguments of `chunk_forward` after inputs and options."""

    initial_state: Tensor | None
    o: Tensor
    final_state: Tensor | None
    states: Tensor | None
    checkpoint_interval: int
    workspace: Tensor


class PoolArguments(NamedTuple):
    """The arguments of `chunk_prefill` after inputs and options."""

    state: Tensor
    read_slots: Tensor
    write_slots: Tensor
    has_initial_state: Tensor | None
    last_skipped: int
    o: Tensor
    checkpoint_interval: int
    checkpoints: Tensor | None
    checkpoint_slots: Tensor | None
    workspace: Tensor


class BackwardArguments(NamedTuple):
    """The arguments of `chunk_backward` after inputs and options."""

    initial_state: Tensor | None
    do: Tensor
    dht: Tensor | None
    states: Tensor | None
    checkpoint_interval: int
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dh0: Tensor | None
    gate_sums: Tensor | None
    workspace: Tensor


class WalkArguments(NamedTuple):
    """The arguments of `backward_walks`."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    A_inv: Tensor
    A_qk: Tensor
    g_cumsum: Tensor
    beta: Tensor
    own: Tensor
    initial_state: Tensor | None
    dht: Tensor | None
    cu_seqlens: Tensor | None
    chunk_offsets: Tensor | None
    scale: float
    state_v_first: bool
    h: Tensor
    v_new: Tensor
    dh: Tensor
    dx: Tensor
    dh0: Tensor | None


# All that the library plans a call by. device: None for the current one.
PLAN_SIZES = (
    *("device", "B", "T", "H", "HV", "K", "V", "N", "is_bfloat16", "is_packed"),
    *("use_qk_l2norm", "batch_invariant", "longest", "second", "third"),
)

# The names of each operator's arguments, in their order.
ARGUMENTS = {
    "chunk_forward": CallInputs._fields + CallOptions._fields + ForwardArguments._fields,
    "chunk_prefill": CallInputs._fields + CallOptions._fields + PoolArguments._fields,
    "chunk_backward": CallInputs._fields + CallOptions._fields + BackwardArguments._fields,
    "backward_walks": WalkArguments._fields,
}
