"""The steps of the chunked form, in the order in which they run:

    gate_cumsum -> kkt -> solve -> wy -> state_pass -> output

Each step is a public function of tensors in the token layout. The function `..._in_chunks` computes
the step in the chunk view (`gdn_triton.reference.chunk_view`); the whole operator also calls it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from gdn_triton.constants import DEFAULT_CHUNK_SIZE, LOG2_DECAY_FLOOR, RCP_LN2
from gdn_triton.reference.arithmetic import (
    compute_dtype,
    ignores_autocast,
    product,
    triangular_solve,
    upcast,
)
from gdn_triton.reference.chunk_view import Chunks, States, from_heads, to_heads

# ------------------------------------------------------------------------------- step: chunk cumsum


def chunk_local_cumsum(
    x: Tensor,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    *,
    scale: float = 1.0,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Returns scale * (inclusive prefix sum of x inside each chunk), or the suffix sum with
    `reverse`.

    The suffix sum is the transpose of the prefix sum, so it computes the prefix sum's gradient.

    Args:
        x: [B, T, HV], any float dtype.

    Returns:
        [B, T, HV], float32 (float64 if x is), in x's unit times scale; 0 for tokens of no sequence.
    """
    chunks = Chunks.of(x, chunk_size, cu_seqlens)
    x_c = chunks.split(x.to(compute_dtype(x)))
    if reverse:
        return chunks.merge(x_c.flip(1).cumsum(1).flip(1) * scale)
    return chunks.merge(x_c.cumsum(1) * scale)


def floored_log2_decay(g: Tensor) -> Tensor:
    """Converts a natural-log decay to log2 units, with the floor that `gate_cumsum` explains."""
    return (g * RCP_LN2).clamp_min(LOG2_DECAY_FLOOR[g.dtype])


def gate_cumsum(
    g: Tensor, chunk_size: int = DEFAULT_CHUNK_SIZE, *, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Returns the chunk-local inclusive cumsum of the decay, in log2 units.

        g_cumsum_i = sum over l <= i in the chunk of g_l / ln 2

    g_cumsum is log2 of the cumulative decay gamma of arXiv:2412.06464, section 3.3. Later steps use
    differences of g_cumsum, and -inf - -inf is NaN. Therefore each token's log2 decay is raised to
    at least LOG2_DECAY_FLOOR of the dtype. 2^floor is exactly 0, and any difference that spans such
    a token is at or below the floor, so no factor changes. A raised token gets no gradient, because
    the gradient of exp is 0 there.

    Args:
        g: [B, T, HV], natural log, at most 0, -inf allowed, any float dtype.

    Returns:
        g_cumsum [B, T, HV], log2, finite, float32 (float64 if g is); 0 for tokens of no sequence.
    """
    log2_decay = floored_log2_decay(g.to(compute_dtype(g)))
    return chunk_local_cumsum(log2_decay, chunk_size, cu_seqlens=cu_seqlens)


# ---------------------------------------------------------------------- the steps in the chunk view
# q, k: [C, H, 1, BT, K]. v, u, v_new: [C, H, G, BT, V]. w: [C, H, G, BT, K].
# g_cumsum, beta: [C, H, G, BT]. A, A_inv: [C, H, G, BT, BT]. h: [C, H, G, K, V].
# Rows past a sequence's end are 0, except that g_cumsum repeats its last value there: differences
# stay at most 0, and row BT - 1 is the whole chunk's decay.
#
# The diagonal exponents g_cumsum_i - g_cumsum_i are not computed, because they are 0. The two
# gradients x and -x of such a difference would both be added to the gradient of one gate, and x is
# as large as the output. With strong gates the true gradients of gates are many orders of magnitude
# smaller than the rounding error of a sum with x and -x.


def _strict_decay(g_cumsum: Tensor) -> Tensor:
    """Returns 2^(g_cumsum_i - g_cumsum_j) where j < i, else 0: [..., BT] -> [..., BT, BT]."""
    BT = g_cumsum.shape[-1]
    below = torch.ones(BT, BT, dtype=torch.bool, device=g_cumsum.device).tril(-1)
    difference = g_cumsum.unsqueeze(-1) - g_cumsum.unsqueeze(-2)
    # Mask before exp2: above the diagonal 2^x may be inf, and inf * 0 is NaN, in the gradient too.
    return difference.masked_fill(~below, -torch.inf).exp2()


def _decay_to_end(chunks: Chunks, g_cumsum: Tensor) -> Tensor:
    """Returns 2^(g_last - g_cumsum_i), [C, H, G, BT], which is 1 from a chunk's last token on."""
    has_next = torch.nn.functional.pad(chunks.valid[:, 1:], (0, 1))[:, None, None]
    return (g_cumsum[..., -1:] - g_cumsum).masked_fill(~has_next, 0).exp2()


def kkt_in_chunks(k: Tensor, g_cumsum: Tensor, beta: Tensor) -> Tensor:
    return beta.unsqueeze(-1) * product(k, k.mT) * _strict_decay(g_cumsum)


def solve_in_chunks(A: Tensor) -> Tensor:
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    return triangular_solve(A, identity.expand_as(A), upper=False)


def wy_in_chunks(
    k: Tensor, v: Tensor, g_cumsum: Tensor, beta: Tensor, A_inv: Tensor
) -> tuple[Tensor, Tensor]:
    # Apply the row factors of the right-hand side as column factors of A_inv.
    w = product(A_inv * (beta * g_cumsum.exp2()).unsqueeze(-2), k)
    u = product(A_inv * beta.unsqueeze(-2), v)
    return w, u


def state_pass_in_chunks(
    chunks: Chunks, k: Tensor, w: Tensor, u: Tensor, g_cumsum: Tensor, initial_state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the state pass in the chunk view. initial_state and the final state: [N, H, G, K, V]."""
    # [C, H, G, BT, K], decayed to the chunk's end
    k_to_end = _decay_to_end(chunks, g_cumsum).unsqueeze(-1) * k
    decay = g_cumsum[..., -1:].exp2().unsqueeze(-1)  # [C, H, G, 1, 1]
    states = States(chunks, initial_state)
    h, v_new = [], []
    for k_t, w_t, u_t, decay_t in zip(
        chunks.steps(k_to_end), chunks.steps(w), chunks.steps(u), chunks.steps(decay), strict=True
    ):
        state = states.running(u_t.shape[0])
        corrected = u_t - product(w_t, state)
        states.now = decay_t * state + product(k_t.mT, corrected)
        h.append(state)
        v_new.append(corrected)
    return chunks.unsteps(h), chunks.unsteps(v_new), states.final()


def output_in_chunks(
    q: Tensor, k: Tensor, v_new: Tensor, h: Tensor, g_cumsum: Tensor, scale: float
) -> Tensor:
    identity = torch.eye(g_cumsum.shape[-1], dtype=g_cumsum.dtype, device=g_cumsum.device)
    A_qk = product(q, k.mT) * (_strict_decay(g_cumsum) + identity)
    return scale * (g_cumsum.exp2().unsqueeze(-1) * product(q, h) + product(A_qk, v_new))


# ------------------------------------------------------------------- the steps, in the token layout


@ignores_autocast
def kkt(
    k: Tensor,
    g_cumsum: Tensor,
    beta: Tensor,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Computes A_ij = beta_i (k_i . k_j) 2^(g_cumsum_i - g_cumsum_j) for j < i in one chunk, else
    0.

    A is the strictly lower matrix of the UT transform (arXiv:2406.06484, section 3) with the decay
    (arXiv:2412.06464, section 3.3). k_i . k_j is computed once for each key head.

    Args:
        k: [B, T, H, K]. g_cumsum: [B, T, HV], log2 (`gate_cumsum`). beta: [B, T, HV].
            Any float dtypes.

    Returns:
        A [B, T, HV, BT], float32 or float64: a row for each token, whose columns are its chunk.
    """
    k, g_cumsum, beta = upcast(k, g_cumsum, beta)
    chunks, H = Chunks.of(k, chunk_size, cu_seqlens), k.shape[2]
    A = kkt_in_chunks(
        to_heads(chunks.split(k), H),
        to_heads(chunks.split(g_cumsum, hold=True), H),
        to_heads(chunks.split(beta), H),
    )
    return chunks.merge(from_heads(A))


def solve(A: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """Computes A_inv = (I + A)^-1 for each chunk by forward substitution (arXiv:2406.06484, section
    3).

    Args:
        A: [B, T, HV, BT] as `kkt` returns it, any float dtype; its BT is the chunk size. Entries at
            and above the diagonal are not read.

    Returns:
        A_inv [B, T, HV, BT], float32 (float64 if A is): unit lower triangular in each chunk, and 0
        in columns past the sequence's end.
    """
    chunks = Chunks.of(A, A.shape[-1], cu_seqlens)
    A_c = chunks.split(A.to(compute_dtype(A)))
    return chunks.merge(from_heads(solve_in_chunks(to_heads(A_c, A.shape[2]))))


@ignores_autocast
def wy(
    k: Tensor,
    v: Tensor,
    g_cumsum: Tensor,
    beta: Tensor,
    A_inv: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes w = A_inv (beta 2^g_cumsum k) and u = A_inv (beta v), chunk by chunk.

    The formulas are from arXiv:2412.06464, section 3.3, and without the decay from
    arXiv:2406.06484, section 3.

    Args:
        k: [B, T, H, K]. v: [B, T, HV, V]. g_cumsum: [B, T, HV], log2. beta: [B, T, HV].
        A_inv: [B, T, HV, BT]; its last dimension is the chunk size. Any float dtypes.

    Returns:
        w [B, T, HV, K] and u [B, T, HV, V], float32 or float64.
    """
    k, v, g_cumsum, beta, A_inv = upcast(k, v, g_cumsum, beta, A_inv)
    chunks, H = Chunks.of(k, A_inv.shape[-1], cu_seqlens), k.shape[2]
    w, u = wy_in_chunks(
        to_heads(chunks.split(k), H),
        to_heads(chunks.split(v), H),
        to_heads(chunks.split(g_cumsum, hold=True), H),
        to_heads(chunks.split(beta), H),
        to_heads(chunks.split(A_inv), H),
    )
    return chunks.merge(from_heads(w)), chunks.merge(from_heads(u))


class StatePass(NamedTuple):
    """The results of `state_pass`. Shapes are as in `ChunkResult`, with the state K-first."""

    h: Tensor
    v_new: Tensor
    final_state: Tensor


@ignores_autocast
def state_pass(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g_cumsum: Tensor,
    initial_state: Tensor | None = None,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    cu_seqlens: Tensor | None = None,
) -> StatePass:
    """Computes the states chunk after chunk, which is the only serial step; h is the state before a
    chunk:

        v_new  = u - w h
        h_next = 2^g_last h + sum over i of 2^(g_last - g_cumsum_i) k_i (x) v_new_i

    where g_last is the chunk's last g_cumsum (arXiv:2412.06464, section 3.3).

    Args:
        k: [B, T, H, K]. w: [B, T, HV, K]. u: [B, T, HV, V]. g_cumsum: [B, T, HV], log2.
            Any float dtypes.
        initial_state: [N, HV, K, V], or None for 0.

    Returns:
        h [B, NT, HV, K, V] (packed: [1, NT, HV, K, V], the chunks of sequence 0 first),
        v_new [B, T, HV, V], final_state [N, HV, K, V]; float32 or float64.
    """
    dtype = compute_dtype(k, w, u, g_cumsum, initial_state)
    H, K = k.shape[2:]
    HV, V = u.shape[2:]
    chunks = Chunks.of(k, chunk_size, cu_seqlens)
    if initial_state is None:
        initial_state = k.new_zeros(chunks.N, HV, K, V, dtype=dtype)
    h, v_new, final_state = state_pass_in_chunks(
        chunks,
        to_heads(chunks.split(k.to(dtype)), H),
        to_heads(chunks.split(w.to(dtype)), H),
        to_heads(chunks.split(u.to(dtype)), H),
        to_heads(chunks.split(g_cumsum.to(dtype), hold=True), H),
        rearrange(initial_state.to(dtype), "N (H G) K V -> N H G K V", H=H),
    )
    final_state = rearrange(final_state, "N H G K V -> N (H G) K V")
    return StatePass(states_to_layout(h, chunks), chunks.merge(from_heads(v_new)), final_state)


def states_to_layout(h: Tensor, chunks: Chunks) -> Tensor:
    """Converts [C, H, G, K, V] to [B, NT, HV, K, V]."""
    return rearrange(h, "(B NT) H G K V -> B NT (H G) K V", B=chunks.B, NT=chunks.NT)


@ignores_autocast
def output(
    q: Tensor,
    k: Tensor,
    v_new: Tensor,
    h: Tensor,
    g_cumsum: Tensor,
    scale: float | None = None,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Computes o. Each token reads the state before its chunk, and the tokens of its chunk up to
    itself.

        o_i = scale (2^g_i h^T q_i + sum over j <= i of (q_i . k_j) 2^(g_i - g_j) v_new_j)

    where g stands for g_cumsum (arXiv:2412.06464, section 3.3). q_i . k_j is computed once for each
    key head.

    Args:
        q, k: [B, T, H, K]. v_new: [B, T, HV, V]. h: [B, NT, HV, K, V]. g_cumsum: [B, T, HV], log2.
            Any float dtypes.
        scale: factor of the output, any float. None: K ** -0.5.

    Returns:
        o [B, T, HV, V], float32 or float64; 0 for tokens of no sequence.
    """
    q, k, v_new, h, g_cumsum = upcast(q, k, v_new, h, g_cumsum)
    chunks, H = Chunks.of(q, chunk_size, cu_seqlens), q.shape[2]
    o = output_in_chunks(
        to_heads(chunks.split(q), H),
        to_heads(chunks.split(k), H),
        to_heads(chunks.split(v_new), H),
        rearrange(h, "B NT (H G) K V -> (B NT) H G K V", H=H),
        to_heads(chunks.split(g_cumsum, hold=True), H),
        q.shape[-1] ** -0.5 if scale is None else scale,
    )
    return chunks.merge(from_heads(o))
