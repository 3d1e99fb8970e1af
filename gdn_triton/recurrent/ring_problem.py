"""The tensors of a step on an engine's rings, and the record of one validated call."""

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

# The most records of a ring, and the most tokens of a sequence in one call. A program holds the
# records and the columns of the tokens in registers.
MOST_ROWS: Final = 32
MOST_DRAFTS: Final = 8


class RingOperands(NamedTuple):
    """The tensors of a call. Those of tokens are None in a fold, and others where a call has none.

    q, k: [T, H, K]. v, out: [T, HV, V]. a, b: [T, HV]. A_log, dt_bias: [HV].
    state: the pool [slots, HV, V, K], in a fold [layers, slots, HV, V, K]; value-first.
    d: [rings, HV, L, V], the u of each record. k_rows: [rings, H, L, K]. g_rows: [rings, HV, L].
    d_low, k_low: the parts that the dtypes of d and k_rows round off, with their strides. In a fold
    these five have the layers first.
    slots: [N], the slot of each sequence. Those up to last_skipped are padding.
    ring_slots: [N], the ring of each sequence. None: its slot.
    counts: the records of each ring, by ring, or by sequence where there are no ring_slots.
    bases: by ring, the row of the oldest record. None: row 0.
    flags: by ring or by sequence, as counts: not 0 where a step or a fold folds, and where drafts
    leave a sequence out.
    cu_seqlens: [N + 1], the tokens of each sequence, in drafts.
    accepted, track_slots, track_steps: [N], in a fold. The state after token track_steps[n] of the
    accepted[n] last records is written to slot track_slots[n].
    """

    state: Tensor
    d: Tensor
    k_rows: Tensor
    g_rows: Tensor
    slots: Tensor
    counts: Tensor
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    out: Tensor | None = None
    d_low: Tensor | None = None
    k_low: Tensor | None = None
    ring_slots: Tensor | None = None
    bases: Tensor | None = None
    flags: Tensor | None = None
    cu_seqlens: Tensor | None = None
    accepted: Tensor | None = None
    track_slots: Tensor | None = None
    track_steps: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RingProblem:
    """The validated properties of a call. T: all tokens; 0 in a fold. most: the most tokens of a
    sequence in drafts, otherwise 1. layers: of a fold."""

    N: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    L: int
    layers: int
    most: int
    last_skipped: int
    scale: float
    use_qk_l2norm: bool
    q_dtype: torch.dtype
    dtypes: tuple[torch.dtype, ...]
    state_dtype: torch.dtype
    tile_span: int
    device: torch.device
    unreadable: str | None
