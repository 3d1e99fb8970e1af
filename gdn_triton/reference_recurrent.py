"""The recurrence with everything that decoding adds, in plain torch: its specification.

Per sequence and value head hv, with key head h = hv // (HV // H) and a state S of shape [K, V]:

    S <- exp(g_t) diag(exp(gk_t)) S diag(exp(gv_t))
    S <- S + k_t (x) beta_t (v_t - S^T k_t)
    o_t = scale S^T q_t

g [HV] is a decay of the whole state, gk [HV, K] of its rows, gv [HV, V] of its columns, all natural
logarithms; beta is a number a head, or one a value channel. With g alone this is what
`gdn_triton.reference.recurrent_gated_delta_rule` computes (arXiv:2412.06464, equation 10), but for
the normalised q and k, which are not rounded here.

Arithmetic is float64 when any floating-point input is float64, else float32; narrower inputs are
upcast, which is exact. Differentiable by autograd, leaves its inputs alone, ignores autocast.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gdn_triton.constants import L2NORM_EPS, RCP_LN2
from gdn_triton.reference import beta_sigmoid, gate

__all__ = ["RecurrentResult", "recurrent"]


class RecurrentResult(NamedTuple):
    """What `recurrent` returns, in the arithmetic's dtype."""

    o: Tensor  # [B, T, HV, V]; 0 for tokens of no sequence
    final_state: Tensor  # [N, HV, K, V], or [N, HV, V, K] if state_v_first
    states: Tensor | None  # [B, T, HV, K, V] or V first: after each token; 0 for those of none


class _Tokens(NamedTuple):
    """Some sequences of one length: q, k [n, T, HV, K], v [n, T, HV, V], decay and beta
    [n, T, HV, K or 1, V or 1]."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


def _unit(x: Tensor) -> Tensor:
    """x over its length, not rounded."""
    return x * (x.square().sum(-1, keepdim=True) + L2NORM_EPS).rsqrt()


def _exp(g: Tensor) -> Tensor:
    """exp(g), in base 2 as decays are throughout."""
    return (g * RCP_LN2).exp2()


def _decay(g: Tensor | None, gk: Tensor | None, gv: Tensor | None, like: Tensor) -> Tensor:
    """exp of the decays' sum, [B, T, HV, K or 1, V or 1]."""
    decay = like.new_ones(*like.shape[:3], 1, 1)
    if g is not None:
        decay = decay * _exp(g)[..., None, None]
    if gk is not None:
        decay = decay * _exp(gk)[..., :, None]
    if gv is not None:
        decay = decay * _exp(gv)[..., None, :]
    return decay


def _walk(x: _Tokens, state: Tensor, kept: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor]:
    """o [n, T, HV, V], the states after each token [n, T, HV, K, V], the final state."""
    out, states = [], []
    for t in range(x.q.shape[1]):
        q, k, v = x.q[:, t, :, :, None], x.k[:, t, :, :, None], x.v[:, t, :, None, :]
        state = state * x.decay[:, t]
        v_new = x.beta[:, t] * (v - k.mT @ state)
        state = state + k * v_new
        out.append((q.mT @ state).squeeze(-2))
        if kept is not None:
            state = state.to(kept).to(state.dtype)
        states.append(state)
    if not out:
        return x.v, state.new_zeros(*x.v.shape[:3], *state.shape[-2:]), state
    return torch.stack(out, 1), torch.stack(states, 1), state


def _spans(T: int, B: int, cu_seqlens: Tensor | None) -> Sequence[tuple[slice, slice, slice]]:
    """(rows, tokens, sequences) of each walk: all sequences together when padded, else each."""
    if cu_seqlens is None:
        return [(slice(0, B), slice(0, T), slice(0, B))]
    bounds = itertools.pairwise(cu_seqlens.tolist())
    return [(slice(0, 1), slice(a, b), slice(n, n + 1)) for n, (a, b) in enumerate(bounds)]


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm: bool = False,
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    use_gate: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_v_first: bool = False,
    kept: torch.dtype | None = None,
    keep_states: bool = False,
) -> RecurrentResult:
    """The recurrence, token by token.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V], HV a multiple of H. Any float dtypes.
        g: [B, T, HV], natural-log decay, -inf allowed; None is 0. What `gdn_triton.reference.gate`
            takes if `use_gate`.
        gk, gv: [B, T, HV, K] and [B, T, HV, V], natural-log decays of the state's rows and columns.
        beta: [B, T, HV] or [B, T, HV, V]; None is 1. What `gdn_triton.reference.beta_sigmoid` takes
            if `use_beta_sigmoid`.
        scale: None is K**-0.5; any float is taken literally.
        initial_state: [N, HV, K, V], [N, HV, V, K] if `state_v_first`; None is 0.
        cu_seqlens: [N + 1], read on the host; None is padded, with N = B.
        use_qk_l2norm: q and k over their length, x * rsqrt(sum(x^2) + 1e-6), not rounded.
        A_log, dt_bias: [HV], for `use_gate`.
        kept: the dtype that the state is rounded to after each token, as when memory keeps it.
        keep_states: also return the states after each token.
    """
    with torch.autocast(q.device.type, enabled=False):
        given = (q, k, v, g, gk, gv, beta, initial_state, A_log, dt_bias)
        wide = any(x is not None and x.dtype == torch.float64 for x in given)
        dtype = torch.float64 if wide else torch.float32
        B, T, H, K = q.shape
        HV, V = v.shape[2:]
        N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1

        q, k = (x.to(dtype) for x in (q, k))
        if use_qk_l2norm:
            q, k = _unit(q), _unit(k)
        q = q * (K**-0.5 if scale is None else scale)
        q, k = (x.repeat_interleave(HV // H, 2) for x in (q, k))
        g, gk, gv = (None if x is None else x.to(dtype) for x in (g, gk, gv))
        if use_gate:
            assert g is not None and A_log is not None
            g = gate(g, A_log, dt_bias)
        beta = v.new_ones(B, T, HV, dtype=dtype) if beta is None else beta.to(dtype)
        if use_beta_sigmoid:
            beta = beta_sigmoid(beta, allow_neg_eigval)
        beta = beta[..., None, :] if beta.dim() == 4 else beta[..., None, None]
        x = _Tokens(q, k, v.to(dtype), _decay(g, gk, gv, q), beta)

        if initial_state is None:
            state = v.new_zeros(N, HV, K, V, dtype=dtype)
        else:
            state = initial_state.to(dtype)
            state = state.mT if state_v_first else state
        o = v.new_zeros(B, T, HV, V, dtype=dtype)
        states = v.new_zeros(B, T, HV, K, V, dtype=dtype) if keep_states else None
        final = []
        for rows, tokens, sequences in _spans(T, B, cu_seqlens):
            part = _Tokens(*(y[rows, tokens] for y in x))
            o_part, states_part, last = _walk(part, state[sequences], kept)
            o[rows, tokens] = o_part
            if states is not None:
                states[rows, tokens] = states_part
            final.append(last)
        final_state = torch.cat(final) if final else state
        if state_v_first:
            final_state = final_state.mT.contiguous()
            states = None if states is None else states.mT.contiguous()
        return RecurrentResult(o, final_state.clone(), states)
