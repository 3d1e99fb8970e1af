"""The arguments of the CUDA library's operators, in the operators' order (`csrc/arguments.h`,
`csrc/ops.cpp`).

`torch.ops` takes twice as long for 20 arguments by keyword as by position. Callers therefore name
the arguments here, and unpack the tuple in the call. `tests/fast/test_operator_arguments.py` holds
the order.
"""

from typing import NamedTuple

from torch import Tensor

# The first arguments of every call: the inputs in a form that the kernels can read, and the
# options. longest: the tokens of the longest packed sequences, or zeros.
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens")
OPTIONS = (
    *("scale", "state_v_first", "use_qk_l2norm", "use_beta_sigmoid", "allow_neg_eigval"),
    *("batch_invariant", "longest"),
)


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


class PartMapsArguments(NamedTuple):
    """The arguments of `part_forward_maps` after inputs and options."""

    initial_state: Tensor | None
    carry: Tensor | None
    comes: bool
    starts: Tensor
    workspace: Tensor


class PartWalkArguments(NamedTuple):
    """The arguments of `part_forward_walk` after inputs and options."""

    initial_state: Tensor | None
    o: Tensor
    final_state: Tensor | None
    starts: Tensor
    workspace: Tensor


class PartBackwardArguments(NamedTuple):
    """The arguments of `part_backward` after inputs and options."""

    walks: bool
    initial_state: Tensor | None
    do: Tensor
    dht: Tensor | None
    carry: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dh0: Tensor | None
    gate_sums: Tensor | None
    starts: Tensor
    workspace: Tensor


# All that the library plans a call by. device: None for the current one.
PLAN_SIZES = (
    *("device", "B", "T", "H", "HV", "K", "V", "N", "is_bfloat16", "is_packed"),
    *("use_qk_l2norm", "batch_invariant", "longest", "second", "third"),
)

# The names of each operator's arguments, in the operator's order.
ARGUMENTS = {
    "chunk_forward": INPUTS + OPTIONS + ForwardArguments._fields,
    "chunk_prefill": INPUTS + OPTIONS + PoolArguments._fields,
    "chunk_backward": INPUTS + OPTIONS + BackwardArguments._fields,
    "backward_walks": WalkArguments._fields,
    "part_forward_maps": INPUTS + OPTIONS + PartMapsArguments._fields,
    "part_forward_walk": INPUTS + OPTIONS + PartWalkArguments._fields,
    "part_backward": INPUTS + OPTIONS + PartBackwardArguments._fields,
}
