"""The frozen record of one validated call of the recurrence, and the record of its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from gdn_triton._host.records import Options, made


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentProblem:
    """The validated properties of a call, on which every backend may rely. Only
    `gdn_triton.recurrent.validation` builds it.

    There are two kinds of calls. A *sequence* call returns its final states as new tensors
    (`gdn_triton.fused_recurrent_gated_delta_rule`). A *step* call updates a pool of states in place
    (`gdn_triton.recurrent_step`).
    """

    B: int  # rows of the token tensors: 1 when packed
    T: int  # tokens of a row
    N: int  # sequences: B when padded, len(cu_seqlens) - 1 when packed
    H: int
    HV: int
    K: int
    V: int
    q_dtype: torch.dtype
    k_dtype: torch.dtype
    v_dtype: torch.dtype
    state_dtype: torch.dtype  # dtype of the pool, or of the final states
    tile_span: int  # most elements that one tile of a program spans in memory
    device: torch.device
    scale: float  # resolved: the caller's number, or K ** -0.5
    is_varlen: bool
    state_v_first: bool  # states are [.., HV, V, K] instead of [.., HV, K, V]
    use_qk_l2norm: bool
    use_gate: bool
    use_beta_sigmoid: bool
    allow_neg_eigval: bool
    needs_grad: bool = False  # grad mode is on and some input requires a gradient
    unreadable: str | None = None  # a sentence why no kernel can read the tensors
    # Sequence calls.
    output_final_state: bool = False
    # Step calls.
    is_step: bool = False
    is_mixed: bool = False  # q, k and v are one tensor [.., 2 * H * K + HV * V]
    every_token: bool = False  # write_slots has a slot for each token
    last_skipped: int = -1  # slots up to this one are padding
    columns: int = 0  # read_slots is [N, columns], with num_accepted_tokens; 0: it is [N]
    window_rows: int = 0  # rows R of the window; 0: there is none
    max_tokens: int = 0  # of the window

    @property
    def fold_period(self) -> int:
        return fold_period(self.window_rows, self.max_tokens)


class Operands(NamedTuple):
    """The tensors of a call as given by the caller. In a mixed call q, k and v are all mixed_qkv.

    Token tensors are [B, T, ...], or, in step calls, [N, ...] or (packed) [T, ...]. The last six
    fields are the tensors of a `StepWindow`, whose k and g are records, not the k and g of the
    call.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    gk: Tensor | None = None
    gv: Tensor | None = None
    beta: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    state: Tensor | None = None
    read_slots: Tensor | None = None
    write_slots: Tensor | None = None
    cu_seqlens: Tensor | None = None
    out: Tensor | None = None
    num_accepted_tokens: Tensor | None = None
    parents: Tensor | None = None
    positions: Tensor | None = None
    u_rows: Tensor | None = None
    k_rows: Tensor | None = None
    g_rows: Tensor | None = None
    call_rows: Tensor | None = None
    start: Tensor | None = None
    scales: Tensor | None = None


# The names of a window's tensors among the operands, with their names in a `StepWindow`. Every
# window has all of these tensors except the scales.
WINDOW: Final = {
    "u_rows": "u",
    "k_rows": "k",
    "g_rows": "g",
    "call_rows": "calls",
    "start": "start",
}
WINDOW_AND_SCALES: Final = {**WINDOW, "scales": "scales"}


class SequenceCall(NamedTuple):
    """The arguments of `gdn_triton.fused_recurrent_gated_delta_rule`. The initial state is `state`
    of the inputs. needs_grad: the call needs a gradient although grad mode may be off."""

    inputs: Operands
    options: Options
    scale: float | None
    output_final_state: bool
    needs_grad: bool = False


# The names of the tensors that may have gradients.
DIFFERENTIABLE: Final = (
    *("q", "k", "v", "g", "gk", "gv", "beta", "A_log", "dt_bias"),
    "initial_state",
)


def sequence_call(given: Mapping[str, Any], needs_grad: bool = False) -> SequenceCall:
    """Builds the call from all arguments of `gdn_triton.fused_recurrent_gated_delta_rule`, by
    name."""
    of_steps = (
        *("read_slots", "write_slots", "out", "num_accepted_tokens", "parents", "positions"),
        *WINDOW_AND_SCALES,
    )
    inputs = {**dict.fromkeys(of_steps), "state": given["initial_state"]}
    return made(SequenceCall, {**given, **inputs, "needs_grad": needs_grad})


class StepCall(NamedTuple):
    """The arguments of `gdn_triton.recurrent_step`. is_mixed: mixed_qkv is given instead of q, k
    and v. If a and b are given instead of g and beta, the options ask for the gate and the sigmoid.
    max_tokens: the window's max_tokens, None without a window."""

    inputs: Operands
    options: Options
    scale: float | None
    skip: str
    is_mixed: bool
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldProblem:
    """One validated call of `gdn_triton.fold_window`, `gdn_triton.restart_window` or
    `gdn_triton.accept_window`. The latter two have no state: HV, K and V are then the sizes of the
    window."""

    N: int
    H: int
    HV: int
    K: int
    V: int
    k_dtype: torch.dtype
    state_dtype: torch.dtype | None
    tile_span: int  # as in `RecurrentProblem`
    device: torch.device
    state_v_first: bool
    last_skipped: int
    window_rows: int
    max_tokens: int
    unreadable: str | None

    @property
    def fold_period(self) -> int:
        return fold_period(self.window_rows, self.max_tokens)


class FoldOperands(NamedTuple):
    """The tensors of a fold. state: only of `gdn_triton.fold_window`. path: only of
    `gdn_triton.accept_window`."""

    state: Tensor | None
    u_rows: Tensor
    k_rows: Tensor
    g_rows: Tensor
    call_rows: Tensor
    start: Tensor
    slots: Tensor
    positions: Tensor
    scales: Tensor | None = None
    path: Tensor | None = None


class FoldCall(NamedTuple):
    """The arguments of `gdn_triton.fold_window`, `gdn_triton.restart_window` or
    `gdn_triton.accept_window`."""

    inputs: FoldOperands
    max_tokens: int
    state_v_first: bool
    skip: str


def fold_period(rows: int, max_tokens: int) -> int:
    """Returns the number of tokens between two folds of a head. A call reads the records of at most
    period - 1 + max_tokens tokens, and writes the records of at most max_tokens other tokens. All
    of these records have rows of their own in the window, because no program may read a row that
    another program of the launch writes."""
    return rows + 1 - 2 * max_tokens


# The number of different turns. With few turns most steps of a period have no fold, whose latency a
# small batch does not hide. Sequences at equal positions fold 1 / TURNS of their heads in one step.
MOST_TURNS: Final = 3


def turn_count(period: int) -> int:
    return min(MOST_TURNS, period)


def turns(HV: int, period: int) -> list[int]:
    """Returns the turn of each value head. The state of a head in memory holds the tokens before a
    position that equals the head's turn modulo the period. All backends use this rule, so one
    backend can continue the window of another."""
    count = turn_count(period)
    return [hv % count * period // count for hv in range(HV)]


# A function that runs calls like a given call. It returns o, and the final states if a sequence
# call asks for them.
PlannedCall = Callable[[Operands], tuple[Tensor, Tensor | None]]


def tokens_apart(x: Tensor, dims: int, is_varlen: bool) -> Tensor:
    """Returns a view of x as [B, T, ...], with `dims` dimensions after these two."""
    if x.dim() == dims + 2:
        return x
    return x.unsqueeze(0) if is_varlen else x.unsqueeze(1)


def split_mixed(problem: RecurrentProblem, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k [.., H, K] and v [.., HV, V] as views of one tensor [.., 2 * H * K + HV * V]."""
    p = problem
    q, k, v = mixed.split((p.H * p.K, p.H * p.K, p.HV * p.V), -1)
    heads = q.unflatten(-1, (p.H, p.K)), k.unflatten(-1, (p.H, p.K)), v.unflatten(-1, (p.HV, p.V))
    return heads


def views(problem: RecurrentProblem, x: Operands) -> Operands:
    """Returns the operands with every token tensor as [B, T, ...], and with q, k and v separate.
    Nothing is copied."""
    q, k, v = split_mixed(problem, x.q) if problem.is_mixed else (x.q, x.k, x.v)
    packed = problem.is_varlen
    beta = x.beta
    if beta is not None and problem.is_step:
        beta = tokens_apart(beta, 1, packed)
    return x._replace(
        q=tokens_apart(q, 2, packed),
        k=tokens_apart(k, 2, packed),
        v=tokens_apart(v, 2, packed),
        g=None if x.g is None else tokens_apart(x.g, 1, packed),
        beta=beta,
        out=None if x.out is None else tokens_apart(x.out, 2, packed),
    )
