"""The records of a call of the chunked op and of the prefill: its arguments as the caller gave
them; the validated sizes, dtypes and flags; its tensors; and the tensors of a call on a pool of
states."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from gdn_triton._host.records import Options, constructor, made


class Inputs(NamedTuple):
    """The tensors that every backend takes. initial_state is laid out as `Problem.state_v_first`
    says, in every module. All but cu_seqlens may have gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    cu_seqlens: Tensor | None = None


new_inputs = constructor(Inputs)

DIFFERENTIABLE: Final = tuple(name for name in Inputs._fields if name != "cu_seqlens")


def needed_inputs(needs_input_grad: Sequence[bool]) -> dict[str, bool]:
    """Whether each of `Inputs` needs a gradient, in an autograd function whose last arguments they
    are."""
    return dict(zip(Inputs._fields, needs_input_grad[-len(Inputs._fields) :], strict=True))


class Gradients(NamedTuple):
    """The gradient of each of `Inputs`, in its shape and dtype; None without the input."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    cu_seqlens: None = None


class ChunkCall(NamedTuple):
    """The arguments of `gdn_triton.chunk_gated_delta_rule`, which documents them."""

    inputs: Inputs
    options: Options
    cu_seqlens_cpu: Tensor | None
    chunk_indices: Tensor | None
    scale: float | None
    output_final_state: bool
    chunk_size: int


new_chunk_call = constructor(ChunkCall)


class PoolArguments(NamedTuple):
    """The tensors of a `gdn_triton.chunk_prefill` that `Inputs` lacks, as the caller gave them."""

    state: Tensor
    read_slots: Tensor
    write_slots: Tensor | None
    has_initial_state: Tensor | None
    out: Tensor | None
    state_checkpoints: Tensor | None
    checkpoint_slots: Tensor | None


new_pool_arguments = constructor(PoolArguments)


class PrefillCall(NamedTuple):
    """The arguments of `gdn_triton.chunk_prefill`, which documents them. The initial state of the
    inputs is None, because it is in the pool."""

    pool: PoolArguments
    inputs: Inputs
    options: Options
    scale: float | None
    skip: str
    checkpoint_every_n_tokens: int
    chunk_size: int
    cu_seqlens_cpu: Tensor | None


new_prefill_call = constructor(PrefillCall)


def prefill_call(given: Mapping[str, Any]) -> PrefillCall:
    """A record of all arguments of `gdn_triton.chunk_prefill`, which are given by their names."""
    return made(PrefillCall, {**given, "initial_state": None})


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The validated properties of a call, on which every backend may rely. Only
    `gdn_triton.chunk.validation` builds it.

    q, k are [B, T, H, K], v is [B, T, HV, V]; value head `hv` reads key head `hv // (HV // H)`.
    """

    B: int
    T: int  # tokens of a sequence when padded, of the whole packed row otherwise
    H: int
    HV: int
    K: int
    V: int
    N: int  # sequences: B when padded, len(cu_seqlens) - 1 when packed
    q_dtype: torch.dtype
    k_dtype: torch.dtype
    v_dtype: torch.dtype
    device: torch.device
    scale: float  # resolved: the caller's number, or K ** -0.5
    chunk_size: int
    is_varlen: bool
    has_initial_state: bool
    output_final_state: bool
    state_v_first: bool  # states are [N, HV, V, K] instead of [N, HV, K, V]
    use_qk_l2norm: bool
    use_beta_sigmoid: bool
    allow_neg_eigval: bool
    use_gate: bool
    needs_grad: bool  # grad mode is on and some input requires a gradient
    pool_dtype: torch.dtype | None = None  # of a pool of states; None: no pool, `Pool` is None too
    batch_invariant: bool = False  # a sequence must give the same bits in any batch
    # Tokens of the longest packed sequences, as the caller says them, then 0: a hint.
    longest: tuple[int, int, int] = (0, 0, 0)
    unreadable: str | None = None  # a sentence why no kernel can take the tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The arguments of a call on a pool of states (`gdn_triton.chunk_prefill`) that other calls
    lack.

    Sequence n starts from slot read_slots[n], or from zeros where has_initial_state[n] is False.
    Its final state is written to slot write_slots[n] in the pool's dtype. Slots up to
    `last_skipped` are padding. A read slot that is padding skips its sequence: the rows of o are 0,
    and nothing else is written. A write slot that is padding is not written.

    After (j + 1) * `every` tokens of a sequence that starts at token s of all B * T, its state is
    written to row s // every + j of `checkpoints`, or to row checkpoint_slots[n, j]; a j past the
    columns of checkpoint_slots is not kept. No row or slot is written twice, except that the state
    after a sequence's last token may be a checkpoint and the final state in one slot. No slot that
    is written is read by another sequence.
    """

    state: Tensor  # [slots, HV, K, V] or, as state_v_first says, [slots, HV, V, K]; any strides
    read_slots: Tensor  # [N], int32 or int64, dense
    write_slots: Tensor  # [N], int32 or int64, dense
    has_initial_state: Tensor | None  # [N], bool, dense; None: all have one
    last_skipped: int  # -1 or 0
    out: Tensor  # [B, T, HV, V] in q's dtype, where o goes; last stride 1
    every: int  # tokens, a multiple of the chunk size; 0: no checkpoints
    checkpoints: Tensor | None  # [rows, HV, K, V], or V first; may be `state`
    checkpoint_slots: Tensor | None  # [N, M], int32 or int64, dense
