"""The specification of decoding with a window of records, in plain torch.

A step reads the state S_0 of its slot and does not write it. Instead it writes a record of each
token: the key k_t, the log decay g_t, and the u_t of S_t = exp(g_t) S_(t-1) + k_t (x) u_t. If S_0
includes the tokens before `held`, the state before token t is

    S = exp(G) S_0 + sum_j exp(G_j) k_j (x) u_j        held <= j < t

where G is the sum of g over the tokens j of this sum, and G_j is the sum of g over the tokens after
j. Record t is in row t mod R of the window, for R rows. Each head is folded once in a period: S
replaces its S_0. The tokens that a head's S_0 includes are derived from positions alone
(`held_tokens`).

Rows of tokens before `start` may hold any number or NaN, so they are masked by selects. A gate of
-inf gives exp(G_j) = 0, because no sum contains a difference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn_triton.constants import INT8_MAX, L2NORM_EPS, LEAST_INT8_RANGE
from gdn_triton.reference.activations import gate
from gdn_triton.reference.arithmetic import compute_dtype
from gdn_triton.reference.recurrent import decay_of, recurrent
from gdn_triton.reference.trees import recurrent_tree

__all__ = [
    "Records",
    "accept",
    "fold",
    "folded_before",
    "held_tokens",
    "scaled_to_int8",
    "window_step",
    "with_records",
]


class Records(NamedTuple):
    """The tensors of a window, indexed by slot and row."""

    u: Tensor  # [slots, R, HV, V]
    k: Tensor  # [slots, R, H, K]
    g: Tensor  # [slots, R, HV], natural logarithm
    calls: Tensor  # [slots, R]: the position at the start of the call that wrote the row
    start: Tensor  # [slots]: the state in memory holds the tokens before it
    scales: Tensor | None = None  # [slots, HV, V]: of an int8 state, by value channel


def folded_before(positions: Tensor, turns: Tensor, period: int) -> Tensor:
    """Returns [N, HV]: the largest b <= positions [N] that equals a head's turn [HV] modulo the
    period."""
    return positions[:, None] - (positions[:, None] - turns) % period


def held_tokens(
    records: Records, slots: Tensor, positions: Tensor, turns: Tensor, period: int
) -> Tensor:
    """Returns [N, HV]: the state in memory includes the tokens before this number. The number is
    derived from the position of the call that wrote the record of token positions - 1. If a
    position equals `start`, another sequence may have written that row. The result is then at least
    `start`, so no record is folded.

    Args:
        slots, positions: [N], int64.
    """
    start = records.start[slots].long()
    last = records.calls[slots, (positions - 1) % records.calls.shape[1]].long()
    return torch.maximum(folded_before(last, turns, period), start[:, None])


def with_records(
    state: Tensor, records: Records, slots: Tensor, first: Tensor, end: Tensor
) -> Tensor:
    """Returns the states after adding the records of the tokens from `first` to end - 1.

    Args:
        state: [N, HV, K, V], the states of slots [N], which include the tokens before `first`.
        first, end: [N, HV], int64.
    """
    HV, R = state.shape[1], records.u.shape[1]
    heads = torch.arange(HV, device=state.device)
    key_heads = heads // (HV // records.k.shape[2])
    log_w = state.new_zeros(state.shape[:2])
    added = torch.zeros_like(state)
    for back in range(1, R + 1):
        token = end - back
        live = token >= first
        if not live.any():
            break
        row = token % R
        k = records.k[slots[:, None], row, key_heads].to(state.dtype)
        u = records.u[slots[:, None], row, heads].to(state.dtype)
        g = records.g[slots[:, None], row, heads].to(state.dtype)
        weight = decay_of(log_w)[..., None, None]
        record = weight * k[..., :, None] * u[..., None, :]
        added = added + torch.where(live[..., None, None], record, 0)
        log_w = torch.where(live, log_w + g, log_w)
    return decay_of(log_w)[..., None, None] * state + added


def fold(
    state: Tensor,
    records: Records,
    slots: Tensor,
    positions: Tensor,
    turns: Tensor,
    period: int,
    state_v_first: bool,
) -> None:
    """Folds the records into the states of the slots [N] of the pool [slots, HV, K, V]. The states
    then include the tokens before `positions` [N], and `start` is set to `positions`."""
    held = held_tokens(records, slots, positions, turns, period)
    _fold(state, records, slots, held, positions[:, None].expand_as(held), state_v_first)
    records.start[slots] = positions.to(records.start.dtype)


def _fold(
    state: Tensor, records: Records, slots: Tensor, held: Tensor, due: Tensor, state_v_first: bool
) -> Tensor:
    """Stores the states of the slots with the tokens before `due` [N, HV]. Returns the stored,
    rounded states as [N, HV, K, V] in the arithmetic's dtype."""
    pool = state.mT if state_v_first else state
    before, scales = pool[slots], records.scales
    if scales is None:
        dtype = compute_dtype(before, records.k)
        folded = with_records(before.to(dtype), records, slots, held, due).to(state.dtype)
        now = torch.where((held < due)[..., None, None], folded, before)
        pool[slots] = now
        return now.to(dtype)
    dtype = compute_dtype(scales, records.k)
    old = before.to(dtype) * scales[slots].to(dtype)[..., None, :]
    numbers, factors = scaled_to_int8(with_records(old, records, slots, held, due))
    is_due = (held < due)[..., None]
    scales[slots] = torch.where(is_due, factors.to(scales.dtype), scales[slots])
    pool[slots] = torch.where(is_due[..., None], numbers, before)
    return pool[slots].to(dtype) * scales[slots].to(dtype)[..., None, :]


def scaled_to_int8(states: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds states [.., K, V] to integers from -127 to 127, and returns them with the factor of
    each value channel [.., V]. The largest magnitude of a channel is 127 times its factor. Ties
    round up. The factor of a channel that is not finite is NaN."""
    largest = states.abs().amax(-2) + (states * 0).sum(-2)
    is_small = largest <= LEAST_INT8_RANGE
    per_unit = torch.where(is_small, 0, INT8_MAX / largest)
    numbers = torch.floor(states * per_unit[..., None, :] + 0.5).nan_to_num()
    return numbers.to(torch.int8), torch.where(is_small, 0, largest / INT8_MAX)


def accept(records: Records, slots: Tensor, positions: Tensor, path: Tensor) -> None:
    """Moves the records of a path to consecutive rows. The j-th token of the path becomes the token
    at position + j, as if the call at `positions` [N] had only had the tokens of the path.

    Args:
        path: [N, L]: for each slot [N] tokens of that call in increasing order, padded with -1.
    """
    R = records.u.shape[1]
    for j in range(path.shape[1]):
        # The rows of later tokens of the path come after the row that is written.
        live = path[:, j] >= 0
        slot, place = slots[live], positions[live]
        for x in (records.u, records.k, records.g):
            x[slot, (place + j) % R] = x[slot, (place + path[live, j]) % R]


def window_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    state: Tensor,
    records: Records,
    slots: Tensor,
    positions: Tensor,
    owner: Tensor,
    turns: Tensor,
    period: int,
    last_skipped: int,
    scale: float,
    cu_seqlens: Tensor | None,
    parents: Tensor | None,
    use_qk_l2norm: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    use_gate: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state_v_first: bool,
) -> Tensor:
    """Runs the recurrence from the states of a pool and their records. Writes records, and the
    states of the heads that are folded in this step.

    Args:
        q, k, v, g, beta, the flags, A_log, dt_bias, cu_seqlens: as for `recurrent`.
        parents: [B, T], as for `recurrent_tree`; None: each token follows the token before it.
        state: [slots, HV, K, V], or [slots, HV, V, K] if `state_v_first`.
        slots, positions: [N]: the slot of each sequence, where slots up to `last_skipped` are
            padding, and the number of its tokens before this call.
        owner: [B, T], int64: the sequence of each token, -1 for none.
        turns: [HV], int64: the tokens at which each head is folded, modulo the period.

    Returns:
        o [B, T, HV, V] in the arithmetic's dtype; 0 for skipped sequences and for tokens of no
        sequence.
    """
    N, HV, R = slots.shape[0], v.shape[2], records.u.shape[1]
    lengths = torch.bincount(owner[owner >= 0], minlength=N)
    live = (slots > last_skipped) & (lengths > 0)
    chosen, now = slots[live].long(), positions[live].long()
    held = held_tokens(records, chosen, now, turns, period)
    due = torch.maximum(folded_before(now, turns, period), records.start[chosen].long()[:, None])
    known = _fold(state, records, chosen, held, due, state_v_first)
    whole = with_records(known, records, chosen, due, now[:, None].expand_as(due))
    initial_state = whole.new_zeros(N, *whole.shape[1:])
    initial_state[live] = whole
    served = (owner >= 0) & torch.cat([live, live.new_zeros(1)])[owner]
    given: dict[str, Any] = {
        "beta": beta,
        "scale": scale,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
        "use_qk_l2norm": use_qk_l2norm,
        "use_beta_sigmoid": use_beta_sigmoid,
        "allow_neg_eigval": allow_neg_eigval,
        "use_gate": use_gate,
        "A_log": A_log,
        "dt_bias": dt_bias,
    }
    if parents is None:
        chain = recurrent(q, k, v, g, **given, keep_written=True)
        o, written = chain.o, chain.written
    else:
        # The slots of skipped sequences may be any numbers.
        above = torch.where(served, parents, -1)
        o, _, written = recurrent_tree(q, k, v, g, **given, parents=above)
    assert written is not None

    b, t = served.nonzero(as_tuple=True)
    of = owner[served]
    starts = torch.zeros_like(lengths) if cu_seqlens is None else cu_seqlens[:-1].long()
    begin = positions[of].long()
    row = (begin + t - starts[of]) % R
    slot = slots[of].long()
    u, log_decay = written[b, t], g[b, t].to(written.dtype)
    if use_qk_l2norm:
        # The record has the given key, so u contains the factor that normalises the key.
        squares = k[b, t].to(u.dtype).square().sum(-1) + L2NORM_EPS
        u = u * squares.rsqrt().repeat_interleave(HV // k.shape[2], 1)[..., None]
    if use_gate:
        assert A_log is not None
        log_decay = gate(g[b, t], A_log, dt_bias)
    records.u[slot, row] = u.to(records.u.dtype)
    records.k[slot, row] = k[b, t].to(records.k.dtype)
    records.g[slot, row] = log_decay.to(records.g.dtype)
    records.calls[slot, row] = begin.to(records.calls.dtype)
    return torch.where(served[..., None, None], o, 0)
