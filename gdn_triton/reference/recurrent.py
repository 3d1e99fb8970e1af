"""The specification of the recurrence in plain torch, with all options of decoding.

For each sequence and value head hv, with key head h = hv // (HV // H) and a state S of shape
[K, V]:

    S <- exp(g_t) diag(exp(gk_t)) S diag(exp(gv_t))
    S <- S + k_t (x) beta_t (v_t - S^T k_t)
    o_t = scale S^T q_t

g [HV] is a decay of the whole state, gk [HV, K] are decays of its rows, and gv [HV, V] decays of
its columns, all as natural logarithms. beta is one number per head, or one per value channel. With
g alone this is `gdn_triton.reference.recurrent_gated_delta_rule` (arXiv:2412.06464, equation 10),
except that normalised q and k are not rounded here.

Arithmetic is float64 when any floating-point input is float64, else float32; narrower inputs are
upcast, which is exact. The function is differentiable by autograd, does not write its inputs, and
ignores autocast.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor

from gdn_triton.constants import L2NORM_EPS, RCP_LN2
from gdn_triton.reference.activations import beta_sigmoid, gate
from gdn_triton.reference.arithmetic import product
from gdn_triton.reference.chunk_view import Chunks, Rows, States

__all__ = ["RecurrentResult", "recurrent"]


class RecurrentResult(NamedTuple):
    """The results of `recurrent`, in the arithmetic's dtype."""

    o: Tensor  # [B, T, HV, V]; 0 for tokens of no sequence
    final_state: Tensor  # [N, HV, K, V], or [N, HV, V, K] if state_v_first
    states: Tensor | None  # [B, T, HV, K, V] or V first: after each token; 0 for no sequence
    written: Tensor | None = None  # [B, T, HV, V]: the value that each token writes


def _unit(x: Tensor) -> Tensor:
    """Returns x divided by its length, not rounded."""
    return x * (x.square().sum(-1, keepdim=True) + L2NORM_EPS).rsqrt()


def decay_of(g: Tensor) -> Tensor:
    """Returns exp(g), computed in base 2 like all decays."""
    return (g * RCP_LN2).exp2()


def _row_decay(g: Tensor | None, gk: Tensor | None, like: Tensor) -> Tensor:
    """Returns the decay exp(g) exp(gk) of a state's rows: [B, T, HV, K or 1, 1]."""
    decay = like.new_ones(*like.shape[:3], 1, 1)
    if g is not None:
        decay = decay * decay_of(g)[..., None, None]
    if gk is not None:
        decay = decay * decay_of(gk)[..., :, None]
    return decay


def _column_decay(gv: Tensor | None, like: Tensor) -> Tensor:
    """Returns the decay exp(gv) of a state's columns: [B, T, HV, 1, V or 1]."""
    return like.new_ones(*like.shape[:3], 1, 1) if gv is None else decay_of(gv)[..., None, :]


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
    keep_written: bool = False,
) -> RecurrentResult:
    """Computes the recurrence token by token.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V], HV a multiple of H. Any float dtypes.
        g: [B, T, HV], natural-log decay, -inf allowed; None is 0. With `use_gate` the input of
            `gdn_triton.reference.gate`.
        gk, gv: [B, T, HV, K] and [B, T, HV, V], natural-log decays of the state's rows and columns.
        beta: [B, T, HV] or [B, T, HV, V]; None is 1. With `use_beta_sigmoid` the input of
            `gdn_triton.reference.beta_sigmoid`.
        scale: factor of the output, any float. None: K ** -0.5.
        initial_state: [N, HV, K, V], [N, HV, V, K] if `state_v_first`; None is 0.
        cu_seqlens: [N + 1], read on the host; None means the padded layout, with N = B.
        use_qk_l2norm: divide q and k by their length, x * rsqrt(sum(x^2) + 1e-6), not rounded.
        A_log, dt_bias: [HV], for `use_gate`.
        kept: the dtype to which the state is rounded after each token, as in a pool of that dtype.
        keep_states: also return the states after each token.
        keep_written: also return beta_t (v_t - S^T k_t) of each token, S being the decayed state.
    """
    with torch.autocast(q.device.type, enabled=False):
        given = (q, k, v, g, gk, gv, beta, initial_state, A_log, dt_bias)
        wide = any(x is not None and x.dtype == torch.float64 for x in given)
        dtype = torch.float64 if wide else torch.float32
        B, T, H, K = q.shape
        HV, V = v.shape[2:]
        # Use chunks of one token. First set the tokens of no sequence to 0, because a NaN in them
        # would reach A_log's gradient through the gate.
        chunks = Chunks.of(q, 1, cu_seqlens)
        q, k, v = (chunks.without_orphans(x).to(dtype) for x in (q, k, v))
        g, gk, gv, beta = (
            None if x is None else chunks.without_orphans(x).to(dtype) for x in (g, gk, gv, beta)
        )
        if use_qk_l2norm:
            q, k = _unit(q), _unit(k)
        q = q * (K**-0.5 if scale is None else scale)
        q, k = (repeat(x, "B T H K -> B T (H G) K", G=HV // H) for x in (q, k))
        if use_gate:
            assert g is not None and A_log is not None
            g = gate(g, A_log, dt_bias)
        beta = v.new_ones(B, T, HV) if beta is None else beta
        if use_beta_sigmoid:
            beta = beta_sigmoid(beta, allow_neg_eigval)
        beta = beta[..., None, :] if beta.dim() == 4 else beta[..., None, None]
        if initial_state is None:
            initial_state = v.new_zeros(chunks.N, HV, K, V)
        elif state_v_first:
            initial_state = rearrange(initial_state, "N HV V K -> N HV K V")

        o, states, written, final_state = _walk(
            chunks,
            _Tokens(
                q[..., None, :],
                k[..., None, :],
                v[..., None, :],
                _row_decay(g, gk, like=q),
                _column_decay(gv, like=q),
                beta,
            ),
            initial_state.to(dtype),
            kept,
            keep_states,
            keep_written,
        )
        if state_v_first:
            turned = "... K V -> ... V K"
            final_state = rearrange(final_state, turned).contiguous()
            states = None if states is None else rearrange(states, turned).contiguous()
        return RecurrentResult(o, final_state, states, written)


class _Tokens(NamedTuple):
    """The inputs of every token, in shapes that broadcast with a state [K, V]."""

    q: Tensor  # [.., 1, K]
    k: Tensor  # [.., 1, K]
    v: Tensor  # [.., 1, V]
    row_decay: Tensor  # [.., K or 1, 1]
    column_decay: Tensor  # [.., 1, V or 1]
    beta: Tensor  # [.., 1, V or 1]


def _walk(
    chunks: Chunks,
    x: _Tokens,
    initial_state: Tensor,
    kept: torch.dtype | None,
    keep_states: bool,
    keep_written: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Returns o [B, T, HV, V], the state after each token [B, T, HV, K, V] and the value that each
    token writes [B, T, HV, V], both only if asked for, and the final state [N, HV, K, V]. chunks:
    chunks of one token."""
    running = States(chunks, initial_state)
    out, states, values = Rows(chunks), Rows(chunks), Rows(chunks)
    # Each step runs the next token of all sequences that have one.
    steps = (chunks.steps(chunks.split(y).squeeze(1)) for y in x)
    for q, k, v, row_decay, column_decay, beta in zip(*steps, strict=True):
        # Multiply the decays of rows and columns here: the product for all tokens at once would be
        # as large as all states.
        state = running.running(v.shape[0]) * (row_decay * column_decay)
        written = beta * (v - product(k, state))
        state = state + k.mT * written
        out.add(product(q, state).squeeze(-2))
        if kept is not None:
            state = state.to(kept).to(state.dtype)
        if keep_states:
            states.add(state)
        if keep_written:
            values.add(written.squeeze(-2))
        running.now = state

    def merged(rows: Rows) -> Tensor:
        return chunks.merge(rows.all().unsqueeze(1))

    return (
        merged(out),
        merged(states) if keep_states else None,
        merged(values) if keep_written else None,
        running.final(),
    )
