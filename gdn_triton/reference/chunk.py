"""The gated delta rule in plain torch: the specification, and the CPU backend.

This module has two forms of one operator. For each sequence and value head hv, with key head h = hv
// (HV // H) and a state S of shape [K, V] (g is the natural-log decay, at most 0; -inf forgets
everything):

    S <- exp(g_t) S,    S <- S + k_t (x) beta_t (v_t - S^T k_t),    o_t = scale S^T q_t

`recurrent_gated_delta_rule` computes this line token by token. `chunk_gated_delta_rule` computes
the same in matrix products over chunks of tokens. Each of its steps is a public function of
`gdn_triton.reference.steps`, in the order in which they run:

    gate_cumsum -> kkt -> solve -> wy -> state_pass -> output

Sources: Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464 (sections 3.1 and 3.3); the WY form of the
delta rule is arXiv:2406.06484 (section 3). The papers write S as [V, K] and decays as products;
here S is [K, V] and decays are sums of base-2 logarithms, subtracted before they are exponentiated.

Arithmetic is float64 when any of q, k, v, g, beta, initial_state is float64, else float32; narrower
inputs are upcast, which is exact. Every function is differentiable by autograd, does not write its
inputs, and ignores autocast. On a GPU, float32 products follow
`torch.set_float32_matmul_precision`.

There are two layouts: padded, with B sequences of T tokens; and packed, with B = 1 and sequence n
at tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1 (cu_seqlens [N + 1], int32 or int64, read on the
host). Every sequence starts with a new chunk. Shapes are not checked here;
`gdn_triton.chunk.validation` checks them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from gdn_triton.constants import DEFAULT_CHUNK_SIZE
from gdn_triton.reference.activations import beta_sigmoid, gate, l2norm
from gdn_triton.reference.arithmetic import compute_dtype, ignores_autocast, product
from gdn_triton.reference.chunk_view import Chunks, Rows, States, from_heads, to_heads
from gdn_triton.reference.lengths import Group, bounds_of, group_by_length
from gdn_triton.reference.steps import (
    floored_log2_decay,
    kkt_in_chunks,
    output_in_chunks,
    solve_in_chunks,
    state_pass_in_chunks,
    states_to_layout,
    wy_in_chunks,
)


class _Inputs(NamedTuple):
    """The inputs after norm, sigmoid and gate, in the compute dtype. initial_state is [N, H, G, K,
    V]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor
    scale: float


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunks: Chunks,
    *,
    scale: float | None,
    initial_state: Tensor | None,
    use_qk_l2norm: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    use_gate: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state_v_first: bool,
) -> _Inputs:
    dtype = compute_dtype(q, k, v, g, beta, initial_state)
    H, K = q.shape[2:]
    HV, V = v.shape[2:]
    # First set the tokens of no sequence to 0, because a NaN in them would reach A_log's gradient
    # through the gate.
    q, k, v, g, beta = (chunks.without_orphans(x) for x in (q, k, v, g, beta))
    if use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    g, beta = g.to(dtype), beta.to(dtype)
    if use_gate:
        if A_log is None:
            raise ValueError("A_log: expected a tensor [HV] when use_gate is set, got None")
        g = gate(g, A_log.to(dtype), None if dt_bias is None else dt_bias.to(dtype))
    if use_beta_sigmoid:
        beta = beta_sigmoid(beta, allow_neg_eigval)
    elif allow_neg_eigval:
        raise ValueError("allow_neg_eigval: expected use_beta_sigmoid to be set with it, got False")
    if initial_state is None:
        initial_state = v.new_zeros(chunks.N, HV, K, V, dtype=dtype)
    elif state_v_first:
        initial_state = rearrange(initial_state, "N HV V K -> N HV K V").contiguous()
    return _Inputs(
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        g,
        beta,
        rearrange(initial_state.to(dtype), "N (H G) K V -> N H G K V", H=H),
        K**-0.5 if scale is None else scale,
    )


def _final_layout(final_state: Tensor, state_v_first: bool) -> Tensor:
    order = "V K" if state_v_first else "K V"
    return rearrange(final_state, f"N H G K V -> N (H G) {order}").contiguous()


@ignores_autocast
def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
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
) -> tuple[Tensor, Tensor]:
    """Computes the gated delta rule token by token. Every other form must give the same result.

    The rule is equation 10 of arXiv:2412.06464, section 3.1. The module's docstring has the
    equation in our symbols.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V], HV a multiple of H. Any float dtypes.
        g: [B, T, HV], natural-log decay, at most 0, -inf allowed; with `use_gate` the input of
            `gate`.
        beta: [B, T, HV], write strength; with `use_beta_sigmoid` the input of `beta_sigmoid`.
        scale: factor of the output, any float. None: K ** -0.5.
        initial_state: [N, HV, K, V], [N, HV, V, K] if `state_v_first`; None is 0.
        cu_seqlens: [N + 1]; None means the padded layout, with N = B.
        use_qk_l2norm: q and k pass through `l2norm`.
        A_log, dt_bias: [HV], for `use_gate`.

    Returns:
        o [B, T, HV, V] in q's dtype, 0 for tokens of no sequence; and the final state, in
        initial_state's layout, a new tensor in the compute dtype. The final state of an empty
        sequence is its initial state.
    """
    tokens = Chunks.of(q, 1, cu_seqlens)
    x = _prepare(
        q,
        k,
        v,
        g,
        beta,
        tokens,
        scale=scale,
        initial_state=initial_state,
        use_qk_l2norm=use_qk_l2norm,
        use_beta_sigmoid=use_beta_sigmoid,
        allow_neg_eigval=allow_neg_eigval,
        use_gate=use_gate,
        A_log=A_log,
        dt_bias=dt_bias,
        state_v_first=state_v_first,
    )
    H = q.shape[2]
    states = States(tokens, x.initial_state)
    per_token = (to_heads(tokens.split(y), H) for y in (x.q, x.k, x.v, x.g.exp(), x.beta))
    out = Rows(tokens)
    # q_t, k_t: [n, H, 1, 1, K]; v_t: [n, H, G, 1, V]; decay_t, beta_t: [n, H, G, 1];
    # the state: [n, H, G, K, V].
    for q_t, k_t, v_t, decay_t, beta_t in zip(*map(tokens.steps, per_token), strict=True):
        state = decay_t.unsqueeze(-1) * states.running(v_t.shape[0])
        state = state + k_t.mT * (beta_t.unsqueeze(-1) * (v_t - product(k_t, state)))
        out.add(x.scale * product(q_t, state))
        states.now = state
    o = tokens.merge(from_heads(out.all()))
    return o.to(q.dtype), _final_layout(states.final(), state_v_first)


class ChunkResult(NamedTuple):
    """The results of `chunk_gated_delta_rule`. BT is the chunk size, NT the number of chunks.

    o is in q's dtype, and all other tensors are in the compute dtype. All tensors except o and
    final_state are None unless `keep_intermediates` is set.
    """

    o: Tensor  # [B, T, HV, V]
    final_state: Tensor  # [N, HV, K, V], or [N, HV, V, K] if state_v_first
    g_cumsum: Tensor | None = None  # [B, T, HV], log2, chunk-local
    A: Tensor | None = None  # [B, T, HV, BT]
    A_inv: Tensor | None = None  # [B, T, HV, BT]
    w: Tensor | None = None  # [B, T, HV, K]
    u: Tensor | None = None  # [B, T, HV, V]
    h: Tensor | None = None  # [B, NT, HV, K, V]; packed [1, NT, ...], sequence 0's chunks first
    v_new: Tensor | None = None  # [B, T, HV, V]


@ignores_autocast
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
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
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    keep_intermediates: bool = False,
) -> ChunkResult:
    """Computes the gated delta rule in chunks, with matrix products and one loop over chunk
    positions.

    The form is that of arXiv:2412.06464, section 3.3. Arguments and results are those of
    `recurrent_gated_delta_rule`, up to rounding.

    Args:
        chunk_size: any positive int; the kernels accept gdn_triton.constants.CHUNK_SIZES.
        keep_intermediates: also return every step's result in the token layout. Otherwise each
            result is freed after its last use, except tensors that autograd needs.

    If many sequences are shorter than a chunk, their chunks have fewer rows
    (`gdn_triton.reference.lengths`). This changes only the order of sums.
    """
    inputs = _Given(q, k, v, g, beta, initial_state)
    run = functools.partial(
        _chunked,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
        use_beta_sigmoid=use_beta_sigmoid,
        allow_neg_eigval=allow_neg_eigval,
        use_gate=use_gate,
        A_log=A_log,
        dt_bias=dt_bias,
        state_v_first=state_v_first,
        keep_intermediates=keep_intermediates,
    )
    groups = group_by_length(bounds_of(q.shape[0], q.shape[1], cu_seqlens), chunk_size)
    if not groups:
        return run(inputs, cu_seqlens=cu_seqlens, chunk_size=chunk_size)
    if len(groups) == 1:
        result = run(inputs, cu_seqlens=cu_seqlens, chunk_size=groups[0].rows)
        return _with_columns(result, chunk_size)
    results = []
    for group in groups:
        result = run(inputs.of(group), cu_seqlens=group.cu_seqlens, chunk_size=group.rows)
        results.append(_with_columns(result, chunk_size))
    return _joined(results, groups, q.shape[1])


class _Given(NamedTuple):
    """The tensors of a call that have one part per token or per sequence."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None

    def of(self, group: Group) -> _Given:
        """Returns the tensors of a group of the packed sequences, packed again."""
        tokens, state = group.tokens.to(self.q.device), self.initial_state
        q, k, v, g, beta = (x.index_select(1, tokens) for x in self[:5])
        if state is not None:
            state = state.index_select(0, group.sequences.to(state.device))
        return _Given(q, k, v, g, beta, state)


def _with_columns(result: ChunkResult, chunk_size: int) -> ChunkResult:
    """Pads A and A_inv with zeros to chunk_size columns."""
    wide = {
        name: F.pad(x, (0, chunk_size - x.shape[-1]))
        for name, x in (("A", result.A), ("A_inv", result.A_inv))
        if x is not None
    }
    return result._replace(**wide)


def _joined(results: list[ChunkResult], groups: list[Group], T: int) -> ChunkResult:
    """Concatenates the results of groups of packed sequences to the result of the whole call, of T
    tokens."""

    def places(name: str) -> Tensor:
        parts = {"final_state": "sequences", "h": "chunks"}
        every = torch.cat([getattr(group, parts.get(name, "tokens")) for group in groups])
        return every.to(results[0].o.device)

    joined: dict[str, Tensor | None] = {}
    for name in ChunkResult._fields:
        found = [getattr(result, name) for result in results]
        if found[0] is None:
            joined[name] = None
        elif name == "final_state":
            joined[name] = torch.cat(found).index_select(0, places(name).argsort())
        elif name == "h":
            joined[name] = torch.cat(found, 1).index_select(1, places(name).argsort())
        else:
            rows = torch.cat(found, 1)
            zeros = rows.new_zeros(1, T, *rows.shape[2:])
            joined[name] = zeros.index_copy(1, places(name), rows)
    return ChunkResult(**joined)  # type: ignore[arg-type]


def _chunked(
    inputs: _Given,
    *,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    scale: float | None,
    use_qk_l2norm: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    use_gate: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state_v_first: bool,
    keep_intermediates: bool,
) -> ChunkResult:
    """Runs all sequences in chunks of chunk_size rows."""
    q, k, v, g, beta, initial_state = inputs
    chunks = Chunks.of(q, chunk_size, cu_seqlens)
    x = _prepare(
        q,
        k,
        v,
        g,
        beta,
        chunks,
        scale=scale,
        initial_state=initial_state,
        use_qk_l2norm=use_qk_l2norm,
        use_beta_sigmoid=use_beta_sigmoid,
        allow_neg_eigval=allow_neg_eigval,
        use_gate=use_gate,
        A_log=A_log,
        dt_bias=dt_bias,
        state_v_first=state_v_first,
    )
    H = q.shape[2]
    kept: dict[str, Tensor] = {}

    def keep(**steps: Tensor) -> None:
        if keep_intermediates:
            kept.update({name: chunks.merge(from_heads(step)) for name, step in steps.items()})

    # g is 0 past a sequence's end, so the sums there repeat the last value, like `hold` elsewhere.
    g_cumsum = to_heads(chunks.split(floored_log2_decay(x.g)).cumsum(1), H)
    k_c, v_c, beta_c = (to_heads(chunks.split(y), H) for y in (x.k, x.v, x.beta))
    A = kkt_in_chunks(k_c, g_cumsum, beta_c)
    A_inv = solve_in_chunks(A)
    keep(g_cumsum=g_cumsum, A=A, A_inv=A_inv)
    del A
    w, u = wy_in_chunks(k_c, v_c, g_cumsum, beta_c, A_inv)
    keep(w=w, u=u)
    del A_inv, v_c, beta_c
    h, v_new, final_state = state_pass_in_chunks(chunks, k_c, w, u, g_cumsum, x.initial_state)
    keep(v_new=v_new)
    if keep_intermediates:
        kept["h"] = states_to_layout(h, chunks)
    del w, u
    o = output_in_chunks(to_heads(chunks.split(x.q), H), k_c, v_new, h, g_cumsum, x.scale)
    return ChunkResult(
        chunks.merge(from_heads(o)).to(q.dtype), _final_layout(final_state, state_v_first), **kept
    )
