"""The specification of decoding on an engine's rings of records, in plain torch.

A ring has L rows for each key head and value head of a sequence: the normalised key k_t, the log
decay g_t and the u_t of S_t = exp(g_t) S_(t-1) + k_t (x) u_t. Its record i, 0 for the oldest, lies
in row (base + i) mod L. The state before a call is S_0 in memory with the first `count` records:

    S = exp(G) S_0 + sum_i exp(G_i) k_i (x) u_i

where G is the sum of all g, and G_i the sum of those after record i. Rows without a record may hold
anything.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gdn_triton.constants import L2NORM_EPS
from gdn_triton.reference.activations import beta_sigmoid, gate
from gdn_triton.reference.arithmetic import compute_dtype

__all__ = ["Ring", "RingTokens", "append", "replayed", "ring_tokens"]


class Ring(NamedTuple):
    """The rows of one sequence. The low parts, which are added, may be None."""

    u: Tensor  # [HV, L, V]
    k: Tensor  # [H, L, K]
    g: Tensor  # [HV, L], natural logarithm
    u_low: Tensor | None = None
    k_low: Tensor | None = None


class RingTokens(NamedTuple):
    """The results of a sequence's tokens, in the arithmetic's dtype."""

    o: Tensor  # [T, HV, V]
    u: Tensor  # [T, HV, V]
    k: Tensor  # [T, H, K], normalised
    g: Tensor  # [T, HV]
    state: Tensor  # [HV, V, K], after the last token


def _sum(x: Tensor, low: Tensor | None, rows: Tensor, dtype: torch.dtype) -> Tensor:
    found = x[:, rows].to(dtype)
    return found if low is None else found + low[:, rows].to(dtype)


def replayed(state: Tensor, ring: Ring, base: int, count: int) -> Tensor:
    """The state [HV, V, K] after the first `count` records of the ring."""
    dtype = compute_dtype(state)
    rows = (base + torch.arange(count, device=state.device)) % ring.g.shape[1]
    u, k = _sum(ring.u, ring.u_low, rows, dtype), _sum(ring.k, ring.k_low, rows, dtype)
    k = k.repeat_interleave(state.shape[0] // k.shape[0], 0)
    state = state.to(dtype)
    for i in range(count):
        decay = ring.g[:, rows[i]].to(dtype).exp()[:, None, None]
        state = decay * state + u[:, i, :, None] * k[:, i, None, :]
    return state


def ring_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    *,
    scale: float,
    use_qk_l2norm: bool,
) -> RingTokens:
    """The tokens of one sequence after `state` [HV, V, K], the result of `replayed`.

    Args:
        q, k: [T, H, K]. v: [T, HV, V]. a, b: [T, HV], before their activations.
        A_log, dt_bias: [HV].
    """
    dtype = compute_dtype(state, q)
    q, k, v, state = (x.to(dtype) for x in (q, k, v, state))
    if use_qk_l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + L2NORM_EPS).sqrt() for x in (q, k))
    g, beta = gate(a, A_log, dt_bias).to(dtype), beta_sigmoid(b).to(dtype)
    group = v.shape[1] // k.shape[1]
    outputs, updates = [], []
    for t in range(v.shape[0]):
        q_t, k_t = (x[t].repeat_interleave(group, 0)[:, :, None] for x in (q, k))
        state = g[t].exp()[:, None, None] * state
        u = beta[t][:, None] * (v[t] - (state @ k_t).squeeze(-1))
        state = state + u[:, :, None] * k_t.mT
        outputs.append(scale * (state @ q_t).squeeze(-1))
        updates.append(u)
    empty = v.new_empty(v.shape)
    o, u = (torch.stack(x) if x else empty for x in (outputs, updates))
    return RingTokens(o=o, u=u, k=k, g=g, state=state)


def append(ring: Ring, tokens: RingTokens, base: int, count: int) -> None:
    """Writes the records of tokens to the rows after the first `count` records."""
    T = tokens.u.shape[0]
    rows = (base + count + torch.arange(T, device=tokens.u.device)) % ring.g.shape[1]
    for high, low, x in ((ring.u, ring.u_low, tokens.u), (ring.k, ring.k_low, tokens.k)):
        x = x.transpose(0, 1)
        high[:, rows] = x.to(high.dtype)
        if low is not None:
            low[:, rows] = (x - x.to(high.dtype).to(x.dtype)).to(low.dtype)
    ring.g[:, rows] = tokens.g.T.to(ring.g.dtype)
