"""Gated delta rule in plain torch: the specification, and the CPU backend.

Two forms of one operator. Per sequence and value head hv, with key head h = hv // (HV // H) and a
state S of shape [K, V] (g is the natural-log decay, at most 0; -inf forgets everything):

    S <- exp(g_t) S,    S <- S + k_t (x) beta_t (v_t - S^T k_t),    o_t = scale S^T q_t

`recurrent_gated_delta_rule` is that line, token by token. `chunk_gated_delta_rule` is the same
operator in matrix products over chunks of tokens; each of its steps is a public function here, in
the order in which they run:

    gate_cumsum -> kkt -> solve -> wy -> state_pass -> output

Sources: Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464 (sections 3.1 and 3.3); the WY form of the
delta rule is arXiv:2406.06484 (section 3). The papers write S as [V, K] and decays as products;
here S is [K, V] and decays are sums of base-2 logarithms, subtracted before they are exponentiated.

Arithmetic is float64 when any of q, k, v, g, beta, initial_state is float64, else float32; narrower
inputs are upcast, which is exact. Every function is differentiable by autograd, leaves its inputs
alone and ignores autocast. On a GPU, float32 products follow `torch.set_float32_matmul_precision`.

Layouts: padded, B sequences of T tokens; or packed, B = 1 and sequence n at tokens cu_seqlens[n] to
cu_seqlens[n + 1] (cu_seqlens [N + 1], int32 or int64, read on the host). Chunks restart at every
sequence's start. Shapes are taken as given; `gdn_triton.chunk.validation` is where a caller's
mistakes are named.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gdn_triton.constants import (
    DEFAULT_CHUNK_SIZE,
    L2NORM_EPS,
    LOG2_DECAY_FLOOR,
    RCP_LN2,
    SOFTPLUS_THRESHOLD,
)

__all__ = [
    "ChunkResult",
    "Chunks",
    "Rows",
    "StatePass",
    "States",
    "beta_sigmoid",
    "chunk_gated_delta_rule",
    "chunk_local_cumsum",
    "gate",
    "gate_cumsum",
    "kkt",
    "l2norm",
    "output",
    "product",
    "recurrent_gated_delta_rule",
    "solve",
    "state_pass",
    "wy",
]

P = ParamSpec("P")
R = TypeVar("R")


# ---------------------------------------------------------------------------------------- precision


def _compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any tensor is float64, else float32."""
    wide = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if wide else torch.float32


def _upcast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All tensors in their common compute dtype."""
    dtype = _compute_dtype(*tensors)
    return tuple(x.to(dtype) for x in tensors)


def _ignores_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Autocast would silently run the products in half precision, and mix dtypes with the state."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        tensor = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        with torch.autocast(tensor.device.type, enabled=False):
            return function(*args, **kwargs)

    return wrapped


# ----------------------------------------------------------------------------------------- products
# Autocast is a state of the moment: torch's own backward of a product runs in half precision where
# `backward` is called inside autocast, though the forward ran outside. The gradients here turn
# autocast off for themselves. They are made of the same two functions, so that this holds for
# second derivatives too. Where nothing is recorded, the functions are torch's.


class _Product(torch.autograd.Function):
    """a @ b, with leading dimensions that broadcast."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    @_ignores_autocast
    def backward(ctx: Any, dc: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        wants_a, wants_b = ctx.needs_input_grad
        return (
            product(dc, b.mT).sum_to_size(a.shape) if wants_a else None,
            product(a.mT, dc).sum_to_size(b.shape) if wants_b else None,
        )

    @staticmethod
    def jvp(ctx: Any, da: Tensor, db: Tensor) -> Tensor:
        a, b = ctx.saved_tensors
        return product(da, b) + product(a, db)


class _TriangularSolve(torch.autograd.Function):
    """X of (I + A) X = B, of a strictly lower, or strictly upper, A of B's leading dimensions."""

    generate_vmap_rule = True

    @staticmethod
    def forward(A: Tensor, B: Tensor, upper: bool) -> Tensor:
        # unitriangular: the diagonal of I + A is taken as 1 without being read, so A serves as it
        # is.
        return torch.linalg.solve_triangular(A, B, upper=upper, unitriangular=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        A, _, ctx.upper = inputs
        ctx.save_for_backward(A, output)
        ctx.save_for_forward(A, output)

    @staticmethod
    @_ignores_autocast
    def backward(ctx: Any, dX: Tensor) -> tuple[Tensor | None, ...]:
        A, X = ctx.saved_tensors
        dB = _triangular_solve(A.mT, dX, not ctx.upper)
        dA = -product(dB, X.mT) if ctx.needs_input_grad[0] else None
        return None if dA is None else _strict_part(dA, ctx.upper), dB, None

    @staticmethod
    def jvp(ctx: Any, dA: Tensor, dB: Tensor, _: None) -> Tensor:
        A, X = ctx.saved_tensors
        return _triangular_solve(A, dB - product(_strict_part(dA, ctx.upper), X), ctx.upper)


def _strict_part(A: Tensor, upper: bool) -> Tensor:
    """A without its diagonal and what lies on the other side of it."""
    return A.triu(1) if upper else A.tril(-1)


def _records(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, of matrices with leading dimensions that broadcast. Its derivatives ignore autocast;
    the product itself does where its caller does."""
    if not _records(a, b):
        return a @ b
    c: Tensor = _Product.apply(a, b)  # type: ignore[no-untyped-call]
    return c


def _triangular_solve(A: Tensor, B: Tensor, upper: bool) -> Tensor:
    """Solves as `_TriangularSolve` does; its derivatives ignore autocast."""
    if not _records(A, B):
        return _TriangularSolve.forward(A, B, upper)
    X: Tensor = _TriangularSolve.apply(A, B, upper)  # type: ignore[no-untyped-call]
    return X


# ----------------------------------------------------------------------------------- the chunk view


class Chunks:
    """Where each chunk's tokens lie, and in which order chunks depend on each other.

    The chunk view of a token tensor [B, T, ...] is [C, BT, ...]: C chunks over all sequences, those
    of sequence 0 first. Sequences have ceil(length / BT) chunks, so an empty one has none. Tokens
    of no sequence are in no chunk.

    Attributes:
        N: number of sequences (B when padded). C: number of chunks; NT: of each batch row.
        BT: chunk size, any positive int.
        lengths [N], num_chunks [N]: tokens and chunks of each sequence.
        offsets [N + 1]: first chunk of each sequence, and C.
        counts: counts[t] is the number of sequences with more than t chunks; [0] if there is none.
        valid: bool [C, BT], false in the tail of a sequence's last chunk.
    """

    def __init__(
        self,
        T: int,
        B: int,
        chunk_size: int,
        cu_seqlens: Tensor | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        if chunk_size < 1:
            raise ValueError(f"chunk_size: expected a positive int, got {chunk_size}")
        if cu_seqlens is None:
            bounds = [b * T for b in range(B + 1)]
        else:
            bounds = [int(x) for x in cu_seqlens.tolist()]
            device = cu_seqlens.device if device is None else device
        self.B, self.T, self.BT = B, T, chunk_size
        self.N = len(bounds) - 1
        self.lengths = [end - start for start, end in itertools.pairwise(bounds)]
        self.num_chunks = [-(-length // chunk_size) for length in self.lengths]
        self.offsets = [0]
        for n in self.num_chunks:
            self.offsets.append(self.offsets[-1] + n)
        self.C = self.offsets[-1]
        self.NT = -(-T // chunk_size) if cu_seqlens is None else self.C

        per_sequence = torch.tensor(self.num_chunks, dtype=torch.int64)
        sequence = torch.arange(self.N).repeat_interleave(per_sequence)  # [C]
        # [C], the chunk's position within its sequence
        step = torch.arange(self.C) - torch.tensor(self.offsets)[sequence]
        starts, ends = torch.tensor(bounds[:-1]).long(), torch.tensor(bounds[1:]).long()
        first = starts[sequence] + step * chunk_size
        token = first[:, None] + torch.arange(chunk_size)  # [C, BT], into B * T
        end = ends[sequence][:, None]
        valid = token < end
        # One chunk after the other covers every token once, in order: the chunk view is a reshape.
        self._aligned = bool(valid.all()) and self.C * chunk_size == B * T
        self.valid = valid.to(device)
        self._held_token = torch.minimum(token, end - 1).flatten().to(device)
        self._valid_row = valid.flatten().nonzero().flatten().to(device)
        self._valid_token = token[valid].to(device)

        # Longest first: the sequences still running at a step are then a prefix of those of the
        # step before.
        order = per_sequence.argsort(descending=True, stable=True)
        rank = order.argsort()
        # Without chunks one step over nothing remains, so that outputs keep shape and gradient.
        self.counts = torch.bincount(step, minlength=1).tolist()
        by_step = (step * max(self.N, 1) + rank[sequence]).argsort()
        self._single = self.N <= 1
        self._order, self._rank = order.to(device), rank.to(device)
        self._by_step, self._by_chunk = by_step.to(device), by_step.argsort().to(device)

    @classmethod
    def of(cls, x: Tensor, chunk_size: int, cu_seqlens: Tensor | None) -> Chunks:
        """The chunks of a token tensor [B, T, ...]."""
        return cls(x.shape[1], x.shape[0], chunk_size, cu_seqlens, device=x.device)

    def without_orphans(self, x: Tensor) -> Tensor:
        """[B, T, ...] with the tokens of no sequence set to 0."""
        if self._valid_token.numel() == self.B * self.T:
            return x
        orphan = torch.ones(self.B * self.T, dtype=torch.bool, device=x.device)
        orphan[self._valid_token] = False
        return x.masked_fill(orphan.reshape(self.B, self.T, *[1] * (x.dim() - 2)), 0)

    def split(self, x: Tensor, *, hold: bool = False) -> Tensor:
        """[B, T, ...] -> [C, BT, ...]; rows past a sequence's end are 0, or its last if `hold`."""
        tail = x.shape[2:]
        if self._aligned:
            return x.reshape(self.C, self.BT, *tail)
        rows = x.reshape(self.B * self.T, *tail).index_select(0, self._held_token)
        rows = rows.reshape(self.C, self.BT, *tail)
        if hold:
            return rows
        # Selected, not multiplied: the held row may be NaN, and 0 * NaN is NaN.
        return rows.masked_fill(~self.valid.reshape(self.C, self.BT, *[1] * len(tail)), 0)

    def merge(self, x: Tensor) -> Tensor:
        """[C, BT, ...] -> [B, T, ...]; 0 for the tokens of no sequence."""
        tail = x.shape[2:]
        if self._aligned:
            return x.reshape(self.B, self.T, *tail)
        rows = x.reshape(self.C * self.BT, *tail).index_select(0, self._valid_row)
        tokens = x.new_zeros(self.B * self.T, *tail).index_copy(0, self._valid_token, rows)
        return tokens.reshape(self.B, self.T, *tail)

    def steps(self, x: Tensor) -> Sequence[Tensor]:
        """[C, ...] -> at each step t [counts[t], ...]: chunk t of all sequences that have one."""
        # One permutation and one split: a gather at each step would cost a whole gradient per step
        # in backward.
        return (x if self._single else x.index_select(0, self._by_step)).split(self.counts)

    def unsteps(self, steps: Sequence[Tensor]) -> Tensor:
        """The inverse of `steps`, as a new tensor."""
        x = torch.cat(tuple(steps))
        return x if self._single else x.index_select(0, self._by_chunk)

    def sort_sequences(self, x: Tensor) -> Tensor:
        """[N, ...] in sequence order -> longest first, the order of every step."""
        return x if self._single else x.index_select(0, self._order)

    def unsort_sequences(self, x: Tensor) -> Tensor:
        """The inverse of `sort_sequences`."""
        return x if self._single else x.index_select(0, self._rank)


class States:
    """The running states, longest sequence first; those that have ended are set aside."""

    def __init__(self, chunks: Chunks, initial: Tensor) -> None:
        self.chunks = chunks
        self.now = chunks.sort_sequences(initial)
        self.ended: list[Tensor] = []

    def running(self, count: int) -> Tensor:
        """States of the first `count` sequences, the only ones that go on."""
        if count < self.now.shape[0]:
            self.now, ended = self.now.split((count, self.now.shape[0] - count))
            self.ended.append(ended)
        return self.now

    def final(self) -> Tensor:
        """All states in sequence order, as a new tensor."""
        return self.chunks.unsort_sequences(torch.cat([self.now, *reversed(self.ended)]))


class Rows:
    """The results of a walk's steps, one row for each chunk, in one tensor.

    Where nothing is recorded each row is copied at once to its place in one tensor. A list of small
    tensors that stay, made between states that come and go, would leave holes in the heap that are
    as large as a state and that no state fits into.
    """

    def __init__(self, chunks: Chunks) -> None:
        self.chunks = chunks
        self._made: list[Tensor] = []
        self._places: Iterator[Tensor] | None = None

    def add(self, x: Tensor) -> None:
        """Takes the result of the next step, [counts[t], ...]. Autograd records every step or
        none."""
        if x.requires_grad:
            self._made.append(x)
            return
        if self._places is None:
            self._made.append(x.new_empty(self.chunks.C, *x.shape[1:]))
            self._places = iter(self._made[0].split(self.chunks.counts))
        next(self._places).copy_(x)

    def all(self) -> Tensor:
        """[C, ...] in the order of the chunks, as a new tensor."""
        return self.chunks.unsteps(self._made)


def _to_heads(x: Tensor, H: int) -> Tensor:
    """[C, BT, heads, ...] -> [C, H, heads // H, BT, ...]: value heads under their key head."""
    return x.unflatten(2, (H, x.shape[2] // H)).movedim(1, 3).contiguous()


def _from_heads(x: Tensor) -> Tensor:
    """[C, H, G, BT, ...] -> [C, BT, H * G, ...]."""
    return x.movedim(3, 1).flatten(2, 3).contiguous()


# ---------------------------------------------------------------------------- inputs, before chunks


def gate(g_raw: Tensor, A_log: Tensor, dt_bias: Tensor | None = None) -> Tensor:
    """Natural-log decay g = -exp(A_log) * softplus(g_raw + dt_bias).

    The parametrisation of Mamba-2 (arXiv:2405.21060), as arXiv:2412.06464, section 3.4, takes it.

    Args:
        g_raw: [B, T, HV], any float dtype. A_log: [HV]. dt_bias: [HV], or None for 0.

    Returns:
        g [B, T, HV], natural log, at most 0, float32 (float64 if any input is). softplus(x) is x
        above SOFTPLUS_THRESHOLD.
    """
    dtype = _compute_dtype(g_raw, A_log, dt_bias)
    x = g_raw.to(dtype)
    if dt_bias is not None:
        x = x + dt_bias.to(dtype)
    return -A_log.to(dtype).exp() * F.softplus(x, threshold=SOFTPLUS_THRESHOLD)


def beta_sigmoid(beta_raw: Tensor, allow_neg_eigval: bool = False) -> Tensor:
    """Write strength sigmoid(beta_raw), in (0, 1); twice that, in (0, 2), if `allow_neg_eigval`.

    With |k| = 1 the state's transition has the eigenvalue 1 - beta along k, hence the name
    (arXiv:2411.12537).

    Args:
        beta_raw: [B, T, HV], any float dtype.

    Returns:
        beta [B, T, HV], float32 (float64 if beta_raw is).
    """
    beta = beta_raw.to(_compute_dtype(beta_raw)).sigmoid()
    return 2 * beta if allow_neg_eigval else beta


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + L2NORM_EPS) over the last dimension, computed wide, rounded to x's dtype.

    Args:
        x: [..., K], any float dtype.

    Returns:
        [..., K] in x's dtype. Rounding is part of the meaning: the rule that follows reads the
        rounded keys.
    """
    wide = x.to(_compute_dtype(x))
    return (wide * (wide.square().sum(-1, keepdim=True) + L2NORM_EPS).rsqrt()).to(x.dtype)


# ------------------------------------------------------------------------------- step: chunk cumsum


def chunk_local_cumsum(
    x: Tensor,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    *,
    scale: float = 1.0,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """scale * (inclusive prefix sum of x inside each chunk); with `reverse` the suffix sum.

    The reverse form is the transpose of the forward one, which is what a gradient through it needs.

    Args:
        x: [B, T, HV], any float dtype.

    Returns:
        [B, T, HV], float32 (float64 if x is), in x's unit times scale; 0 for tokens of no sequence.
    """
    chunks = Chunks.of(x, chunk_size, cu_seqlens)
    x_c = chunks.split(x.to(_compute_dtype(x)))
    if reverse:
        return chunks.merge(x_c.flip(1).cumsum(1).flip(1) * scale)
    return chunks.merge(x_c.cumsum(1) * scale)


def _log2_decay(g: Tensor) -> Tensor:
    """Natural-log decay in log2 units, with the floor that `gate_cumsum` explains."""
    return (g * RCP_LN2).clamp_min(LOG2_DECAY_FLOOR[g.dtype])


def gate_cumsum(
    g: Tensor, chunk_size: int = DEFAULT_CHUNK_SIZE, *, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Chunk-local inclusive cumsum of the decay, in log2 units.

        g_cumsum_i = sum over l <= i in the chunk of g_l / ln 2

    It is log2 of the cumulative decay gamma of arXiv:2412.06464, section 3.3. Later steps use
    differences of it, and -inf - -inf is NaN; so each token's log2 decay is raised to
    LOG2_DECAY_FLOOR of the arithmetic. At the floor 2^x is already exactly 0, and any difference
    that spans such a token is at or below the floor, so no factor changes: only the NaN goes. A
    raised token gets no gradient, as exp has none there.

    Args:
        g: [B, T, HV], natural log, at most 0, -inf allowed, any float dtype.

    Returns:
        g_cumsum [B, T, HV], log2, finite, float32 (float64 if g is); 0 for tokens of no sequence.
    """
    log2_decay = _log2_decay(g.to(_compute_dtype(g)))
    return chunk_local_cumsum(log2_decay, chunk_size, cu_seqlens=cu_seqlens)


# ---------------------------------------------------------------------- the steps in the chunk view
# q, k: [C, H, 1, BT, K]. v, u, v_new: [C, H, G, BT, V]. w: [C, H, G, BT, K].
# g_cumsum, beta: [C, H, G, BT]. A, A_inv: [C, H, G, BT, BT]. h: [C, H, G, K, V].
# Rows past a sequence's end are 0, but g_cumsum's hold its last value there: differences stay at
# most 0, and row BT - 1 is the whole chunk's decay.


def _decay(g_cumsum: Tensor, diagonal: int) -> Tensor:
    """2^(g_cumsum_i - g_cumsum_j) where j <= i + diagonal, else 0: [..., BT] -> [..., BT, BT]."""
    BT = g_cumsum.shape[-1]
    kept = torch.ones(BT, BT, dtype=torch.bool, device=g_cumsum.device).tril(diagonal)
    difference = g_cumsum.unsqueeze(-1) - g_cumsum.unsqueeze(-2)
    # Masked before exp2: above the diagonal it may be inf, and inf * 0 is NaN, in the gradient too.
    return difference.masked_fill(~kept, -torch.inf).exp2()


def _kkt(k: Tensor, g_cumsum: Tensor, beta: Tensor) -> Tensor:
    return beta.unsqueeze(-1) * product(k, k.mT) * _decay(g_cumsum, -1)


def _solve(A: Tensor) -> Tensor:
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    return _triangular_solve(A, identity.expand_as(A), upper=False)


def _wy(
    k: Tensor, v: Tensor, g_cumsum: Tensor, beta: Tensor, A_inv: Tensor
) -> tuple[Tensor, Tensor]:
    # Row factors of the right-hand side are column factors of A_inv.
    w = product(A_inv * (beta * g_cumsum.exp2()).unsqueeze(-2), k)
    u = product(A_inv * beta.unsqueeze(-2), v)
    return w, u


def _state_pass(
    chunks: Chunks, k: Tensor, w: Tensor, u: Tensor, g_cumsum: Tensor, initial_state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """initial_state and the final state: [N, H, G, K, V]."""
    g_last = g_cumsum[..., -1:]
    # [C, H, G, BT, K], decayed to the chunk's end
    k_to_end = (g_last - g_cumsum).exp2().unsqueeze(-1) * k
    decay = g_last.exp2().unsqueeze(-1)  # [C, H, G, 1, 1]
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


def _output(
    q: Tensor, k: Tensor, v_new: Tensor, h: Tensor, g_cumsum: Tensor, scale: float
) -> Tensor:
    A_qk = product(q, k.mT) * _decay(g_cumsum, 0)
    return scale * (g_cumsum.exp2().unsqueeze(-1) * product(q, h) + product(A_qk, v_new))


# ------------------------------------------------------------------- the steps, in the token layout


@_ignores_autocast
def kkt(
    k: Tensor,
    g_cumsum: Tensor,
    beta: Tensor,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """A_ij = beta_i (k_i . k_j) 2^(g_cumsum_i - g_cumsum_j) for j < i in one chunk, else 0.

    The strictly lower matrix of the UT transform with its decay: arXiv:2406.06484, section 3;
    arXiv:2412.06464, section 3.3. k_i . k_j is computed once for each key head.

    Args:
        k: [B, T, H, K]. g_cumsum: [B, T, HV], log2 (`gate_cumsum`). beta: [B, T, HV].
            Any float dtypes.

    Returns:
        A [B, T, HV, BT], float32 or float64: a row for each token, whose columns are its chunk.
    """
    k, g_cumsum, beta = _upcast(k, g_cumsum, beta)
    chunks, H = Chunks.of(k, chunk_size, cu_seqlens), k.shape[2]
    A = _kkt(
        _to_heads(chunks.split(k), H),
        _to_heads(chunks.split(g_cumsum, hold=True), H),
        _to_heads(chunks.split(beta), H),
    )
    return chunks.merge(_from_heads(A))


def solve(A: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """A_inv = (I + A)^-1 for each chunk, by forward substitution (arXiv:2406.06484, section 3).

    Args:
        A: [B, T, HV, BT] as `kkt` returns it, any float dtype; its BT is the chunk size. Entries at
            and above the diagonal are not read.

    Returns:
        A_inv [B, T, HV, BT], float32 (float64 if A is): unit lower triangular in each chunk, and 0
        in columns past the sequence's end.
    """
    chunks = Chunks.of(A, A.shape[-1], cu_seqlens)
    A_c = chunks.split(A.to(_compute_dtype(A)))
    return chunks.merge(_from_heads(_solve(_to_heads(A_c, A.shape[2]))))


@_ignores_autocast
def wy(
    k: Tensor,
    v: Tensor,
    g_cumsum: Tensor,
    beta: Tensor,
    A_inv: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """w = A_inv (beta 2^g_cumsum k) and u = A_inv (beta v), chunk by chunk.

    arXiv:2412.06464, section 3.3; without the decay arXiv:2406.06484, section 3.

    Args:
        k: [B, T, H, K]. v: [B, T, HV, V]. g_cumsum: [B, T, HV], log2. beta: [B, T, HV].
        A_inv: [B, T, HV, BT]; its last dimension is the chunk size. Any float dtypes.

    Returns:
        w [B, T, HV, K] and u [B, T, HV, V], float32 or float64.
    """
    k, v, g_cumsum, beta, A_inv = _upcast(k, v, g_cumsum, beta, A_inv)
    chunks, H = Chunks.of(k, A_inv.shape[-1], cu_seqlens), k.shape[2]
    w, u = _wy(
        _to_heads(chunks.split(k), H),
        _to_heads(chunks.split(v), H),
        _to_heads(chunks.split(g_cumsum, hold=True), H),
        _to_heads(chunks.split(beta), H),
        _to_heads(chunks.split(A_inv), H),
    )
    return chunks.merge(_from_heads(w)), chunks.merge(_from_heads(u))


class StatePass(NamedTuple):
    """What `state_pass` returns; shapes as `ChunkResult`'s, the state K-first."""

    h: Tensor
    v_new: Tensor
    final_state: Tensor


@_ignores_autocast
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
    """The only serial step, chunk after chunk; h is the state that a chunk starts from:

        v_new  = u - w h
        h_next = 2^g_last h + sum over i of 2^(g_last - g_cumsum_i) k_i (x) v_new_i

    with g_last the chunk's last g_cumsum (arXiv:2412.06464, section 3.3).

    Args:
        k: [B, T, H, K]. w: [B, T, HV, K]. u: [B, T, HV, V]. g_cumsum: [B, T, HV], log2.
            Any float dtypes.
        initial_state: [N, HV, K, V], or None for 0.

    Returns:
        h [B, NT, HV, K, V] (packed: [1, NT, HV, K, V], the chunks of sequence 0 first),
        v_new [B, T, HV, V], final_state [N, HV, K, V]; float32 or float64.
    """
    dtype = _compute_dtype(k, w, u, g_cumsum, initial_state)
    H, K = k.shape[2:]
    HV, V = u.shape[2:]
    chunks = Chunks.of(k, chunk_size, cu_seqlens)
    if initial_state is None:
        initial_state = k.new_zeros(chunks.N, HV, K, V, dtype=dtype)
    h, v_new, final_state = _state_pass(
        chunks,
        _to_heads(chunks.split(k.to(dtype)), H),
        _to_heads(chunks.split(w.to(dtype)), H),
        _to_heads(chunks.split(u.to(dtype)), H),
        _to_heads(chunks.split(g_cumsum.to(dtype), hold=True), H),
        initial_state.to(dtype).unflatten(1, (H, HV // H)),
    )
    return StatePass(
        _states_to_layout(h, chunks), chunks.merge(_from_heads(v_new)), final_state.flatten(1, 2)
    )


def _states_to_layout(h: Tensor, chunks: Chunks) -> Tensor:
    """[C, H, G, K, V] -> [B, NT, HV, K, V]."""
    return h.flatten(1, 2).unflatten(0, (chunks.B, chunks.NT))


@_ignores_autocast
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
    """What each token reads: the state its chunk started from, and the chunk up to itself.

        o_i = scale (2^g_i h^T q_i + sum over j <= i of (q_i . k_j) 2^(g_i - g_j) v_new_j)

    with g for g_cumsum (arXiv:2412.06464, section 3.3). q_i . k_j is computed once for each key
    head.

    Args:
        q, k: [B, T, H, K]. v_new: [B, T, HV, V]. h: [B, NT, HV, K, V]. g_cumsum: [B, T, HV], log2.
            Any float dtypes.
        scale: None is K**-0.5; any float is taken literally.

    Returns:
        o [B, T, HV, V], float32 or float64; 0 for tokens of no sequence.
    """
    q, k, v_new, h, g_cumsum = _upcast(q, k, v_new, h, g_cumsum)
    chunks, H = Chunks.of(q, chunk_size, cu_seqlens), q.shape[2]
    o = _output(
        _to_heads(chunks.split(q), H),
        _to_heads(chunks.split(k), H),
        _to_heads(chunks.split(v_new), H),
        h.flatten(0, 1).unflatten(1, (H, h.shape[2] // H)),
        _to_heads(chunks.split(g_cumsum, hold=True), H),
        q.shape[-1] ** -0.5 if scale is None else scale,
    )
    return chunks.merge(_from_heads(o))


# ------------------------------------------------------------------------------- the whole operator


class _Inputs(NamedTuple):
    """Inputs after norm, sigmoid and gate, in the compute dtype; initial_state [N, H, G, K, V]."""

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
    dtype = _compute_dtype(q, k, v, g, beta, initial_state)
    H, K = q.shape[2:]
    HV, V = v.shape[2:]
    # First of all: a NaN in a token of no sequence would reach A_log's gradient through the gate.
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
        initial_state = initial_state.mT.contiguous()
    return _Inputs(
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        g,
        beta,
        initial_state.to(dtype).unflatten(1, (H, HV // H)),
        K**-0.5 if scale is None else scale,
    )


def _final_layout(final_state: Tensor, state_v_first: bool) -> Tensor:
    """[N, H, G, K, V] -> [N, HV, K, V], or [N, HV, V, K]."""
    final_state = final_state.flatten(1, 2)
    return final_state.mT.contiguous() if state_v_first else final_state


@_ignores_autocast
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
    """The gated delta rule token by token: what everything else must equal.

    arXiv:2412.06464, section 3.1, equation 10; the module's docstring has it in our symbols.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V], HV a multiple of H. Any float dtypes.
        g: [B, T, HV], natural-log decay, at most 0, -inf allowed; what `gate` takes if `use_gate`.
        beta: [B, T, HV], write strength; what `beta_sigmoid` takes if `use_beta_sigmoid`.
        scale: None is K**-0.5; any float is taken literally.
        initial_state: [N, HV, K, V], [N, HV, V, K] if `state_v_first`; None is 0.
        cu_seqlens: [N + 1]; None is padded, with N = B.
        use_qk_l2norm: q and k pass through `l2norm`.
        A_log, dt_bias: [HV], for `use_gate`.

    Returns:
        o [B, T, HV, V] in q's dtype, 0 for tokens of no sequence; and the final state, in
        initial_state's layout, a new tensor in the compute dtype. An empty sequence passes its
        state through.
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
    per_token = (_to_heads(tokens.split(y), H) for y in (x.q, x.k, x.v, x.g.exp(), x.beta))
    out = Rows(tokens)
    # q_t, k_t: [n, H, 1, 1, K]; v_t: [n, H, G, 1, V]; decay_t, beta_t: [n, H, G, 1];
    # the state: [n, H, G, K, V].
    for q_t, k_t, v_t, decay_t, beta_t in zip(*map(tokens.steps, per_token), strict=True):
        state = decay_t.unsqueeze(-1) * states.running(v_t.shape[0])
        state = state + k_t.mT * (beta_t.unsqueeze(-1) * (v_t - product(k_t, state)))
        out.add(x.scale * product(q_t, state))
        states.now = state
    o = tokens.merge(_from_heads(out.all()))
    return o.to(q.dtype), _final_layout(states.final(), state_v_first)


class ChunkResult(NamedTuple):
    """What `chunk_gated_delta_rule` returns. BT is the chunk size, NT the number of chunks.

    o is in q's dtype, the rest in the compute dtype. All but o and final_state are None unless
    `keep_intermediates`.
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


@_ignores_autocast
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
    """The gated delta rule in chunks: matrix products, and one loop over chunk positions.

    arXiv:2412.06464, section 3.3. Arguments, o and the final state are those of
    `recurrent_gated_delta_rule`, and so is the result up to rounding.

    Args:
        chunk_size: any positive int; the kernels take gdn_triton.constants.CHUNK_SIZES.
        keep_intermediates: also return every step's result in the token layout. Without it each is
            dropped after its last use (autograd keeps what it needs).
    """
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
            kept.update({name: chunks.merge(_from_heads(step)) for name, step in steps.items()})

    # The zeros past a sequence's end, summed, hold the last value: what `hold` does elsewhere.
    g_cumsum = _to_heads(chunks.split(_log2_decay(x.g)).cumsum(1), H)
    k_c, v_c, beta_c = (_to_heads(chunks.split(y), H) for y in (x.k, x.v, x.beta))
    A = _kkt(k_c, g_cumsum, beta_c)
    A_inv = _solve(A)
    keep(g_cumsum=g_cumsum, A=A, A_inv=A_inv)
    del A
    w, u = _wy(k_c, v_c, g_cumsum, beta_c, A_inv)
    keep(w=w, u=u)
    del A_inv, v_c, beta_c
    h, v_new, final_state = _state_pass(chunks, k_c, w, u, g_cumsum, x.initial_state)
    keep(v_new=v_new)
    if keep_intermediates:
        kept["h"] = _states_to_layout(h, chunks)
    del w, u
    o = _output(_to_heads(chunks.split(x.q), H), k_c, v_new, h, g_cumsum, x.scale)
    return ChunkResult(
        chunks.merge(_from_heads(o)).to(q.dtype), _final_layout(final_state, state_v_first), **kept
    )
