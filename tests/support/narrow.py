"""The independent computation for the error budget of helpers.py: plain torch, in the precision of
a kernel (`Arithmetic`), rounded where the kernel stores. All chunks are computed at the same time,
because a loop over chunks launches thousands of small kernels on a GPU."""

import functools
import itertools
from dataclasses import dataclass

import torch
from helpers import FP32, Case, Inputs
from torch import Tensor

from gdn_triton import reference
from gdn_triton.constants import LOG2_DECAY_FLOOR, RCP_LN2
from gdn_triton.reference import Chunks, States


def keep_bits(x: Tensor, bits: int) -> Tensor:
    """fp32 x rounded to a significand of `bits` bits (of 24), to nearest."""
    drop = 24 - bits
    as_int = x.float().contiguous().view(torch.int32)
    return ((as_int + (1 << (drop - 1))) & -(1 << drop)).view(FP32)


@dataclass(frozen=True)
class Arithmetic:
    """The bits that the products of a kernel keep of their operands, for inputs of `dtype`.

    16-bit inputs: operands are rounded to the dtype. fp32 inputs: all bits in the interpreter; on a
    GPU a product is three tf32 products, which keep two times 11 bits of an operand. Products of
    fp32 values between 16-bit inputs and outputs (inside the inverse): all bits in the interpreter,
    tf32's 11 on a GPU.
    """

    dtype: torch.dtype
    device: str

    def operand(self, x: Tensor) -> Tensor:
        if self.dtype != FP32:
            return x.to(self.dtype).to(FP32)
        return x if self.device == "cpu" else keep_bits(x, 22)

    def inner(self, x: Tensor) -> Tensor:
        if self.device == "cpu":
            return x
        return keep_bits(x, 22 if self.dtype == FP32 else 11)

    @staticmethod
    def product(a: Tensor, b: Tensor) -> Tensor:
        """a @ b in fp32, summed like an unrolled loop: the even terms, then the odd ones. The order
        of the tokens would give an unusually small error where terms cancel from token to token, as
        under reflections; kernels and libraries do not use it."""
        a = torch.cat([a[..., 0::2], a[..., 1::2]], -1)
        return a @ torch.cat([b[..., 0::2, :], b[..., 1::2, :]], -2)

    @property
    def unit(self) -> float:
        """The unit roundoff of the operands that a product keeps."""
        if self.dtype == FP32 and self.device != "cpu":
            return 2.0**-22
        return torch.finfo(self.dtype).eps / 2


def narrow_heads(x: Tensor, HV: int) -> Tensor:
    """[t, heads, ...] -> [HV, t, ...] in fp32; a key head serves HV / heads value heads."""
    return x.float().repeat_interleave(HV // x.shape[1], 1).movedim(1, 0)


def narrow_decay(g_cumsum: Tensor, diagonal: int) -> Tensor:
    """[..., t] -> [..., t, t], 0 above the diagonal."""
    keep = torch.ones(g_cumsum.shape[-1:] * 2, device=g_cumsum.device).tril(diagonal).bool()
    difference = g_cumsum[..., :, None] - g_cumsum[..., None, :]
    return torch.where(keep, difference, -torch.inf).exp2()


@functools.lru_cache(maxsize=64)
def chunks_of(case: Case, device: torch.device) -> Chunks:
    """The view of a case's tokens as chunks, which all functions of this module share."""
    offsets = case.cu_seqlens("cpu", torch.int64)
    return Chunks(case.tokens, case.B, case.chunk_size, offsets, device=device)


def by_chunk(x: Tensor, case: Case, HV: int, *, hold: bool = False) -> Tensor:
    """[B, T, heads, ...] -> [C, HV, t, ...] in fp32. Rows past the end of a sequence are 0, or its
    last row with `hold`."""
    x = chunks_of(case, x.device).split(x.float(), hold=hold)
    return x.repeat_interleave(HV // x.shape[2], 2).transpose(1, 2)


def by_token(x: Tensor, case: Case) -> Tensor:
    """[C, HV, t, ...] -> [B, T, HV, ...]; 0 for tokens of no sequence."""
    return chunks_of(case, x.device).merge(x.transpose(1, 2))


def narrow_cumsum(x: Tensor, case: Case, *, reverse: bool = False) -> Tensor:
    """Chunk-local sum of fp32 x [B, T, HV], one addition after the other in fp32: torch.cumsum adds
    up in float64 on a CPU, and is no independent computation in fp32."""
    chunks = chunks_of(case, x.device)
    rows = chunks.split(x).unbind(1)
    sums = list(itertools.accumulate(reversed(rows) if reverse else rows))
    return chunks.merge(torch.stack(sums[::-1] if reverse else sums, 1))


def narrow_gate_cumsum(g: Tensor, case: Case) -> Tensor:
    """g_cumsum of g [B, T, HV], natural log, in fp32."""
    return narrow_cumsum((g.float() * RCP_LN2).clamp_min(LOG2_DECAY_FLOOR[FP32]), case)


def inverses(
    k: Tensor, g_cumsum: Tensor, beta: Tensor, case: Case, arithmetic: Arithmetic
) -> Tensor:
    """(I + A)^-1 [C, HV, t, t] in fp32, by forward substitution. Rows and columns past the end of a
    sequence are those of the identity."""
    HV, product = g_cumsum.shape[2], arithmetic.product
    k_c = arithmetic.operand(by_chunk(k, case, HV))
    g_c, beta_c = by_chunk(g_cumsum, case, HV, hold=True), by_chunk(beta, case, HV)
    A = beta_c[..., None] * product(k_c, k_c.mT) * narrow_decay(g_c, -1)
    A = arithmetic.inner(A.tril(-1))
    identity = torch.eye(case.chunk_size, device=k.device).expand_as(A)
    return arithmetic.inner(
        torch.linalg.solve_triangular(A, identity, upper=False, unitriangular=True)
    )


def narrow_inverse(
    k: Tensor, g_cumsum: Tensor, beta: Tensor, case: Case, arithmetic: Arithmetic
) -> list[Tensor]:
    """(I + A)^-1 of each chunk, [HV, t, t], fp32."""
    found = inverses(k, g_cumsum, beta, case, arithmetic)
    lengths = [end - start for *_, start, end in case.spans()]
    return [x[:, :t, :t] for x, t in zip(found, lengths, strict=True)]


def narrow_wy(
    k: Tensor,
    v: Tensor,
    g_cumsum: Tensor,
    beta: Tensor,
    case: Case,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Tensor]:
    """w, u in the dtype; the factors of A_inv's columns are applied in fp32, then rounded."""
    HV, dtype = v.shape[2], arithmetic.dtype
    round_, product = arithmetic.operand, arithmetic.product
    A_inv = inverses(k, g_cumsum, beta, case, arithmetic)
    k_c, v_c = (round_(by_chunk(x, case, HV)) for x in (k, v))
    g_c, beta_c = by_chunk(g_cumsum, case, HV, hold=True), by_chunk(beta, case, HV)
    X = A_inv * beta_c[:, :, None, :]
    u = product(round_(X), v_c)
    w = product(round_(X * g_c.exp2()[:, :, None, :]), k_c)
    return by_token(w.to(dtype), case), by_token(u.to(dtype), case)


def narrow_state(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g_cumsum: Tensor,
    initial_state: Tensor | None,
    case: Case,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Tensor, Tensor]:
    """h [C, HV, K, V] and v_new in the dtype, the final state [N, HV, K, V] in fp32."""
    HV, V = u.shape[2:]
    round_, product, K = arithmetic.operand, arithmetic.product, k.shape[-1]
    chunks = chunks_of(case, k.device)
    if initial_state is None:
        initial_state = torch.zeros(case.N, HV, K, V, device=k.device)
    states = States(chunks, initial_state.to(FP32))
    k_c, w_c = (round_(by_chunk(x, case, HV)) for x in (k, w))
    u_c, g_c = by_chunk(u, case, HV), by_chunk(g_cumsum, case, HV, hold=True)
    to_end = (g_c[..., -1:] - g_c).exp2()[..., None]
    g_last = g_c[..., -1, None, None].exp2()
    h: list[Tensor] = []
    v_new: list[Tensor] = []
    per_chunk = (k_c, w_c, u_c, to_end, g_last)
    for k_t, w_t, u_t, to_end_t, g_last_t in zip(*map(chunks.steps, per_chunk), strict=True):
        state = states.running(u_t.shape[0])
        v_t = u_t - product(w_t, round_(state))
        h.append(state.to(arithmetic.dtype))
        v_new.append(v_t.to(arithmetic.dtype))
        states.now = g_last_t * state + product(round_(k_t).mT, round_(to_end_t * v_t))
    return chunks.unsteps(h), by_token(chunks.unsteps(v_new), case), states.final()


def narrow_output(
    q: Tensor,
    k: Tensor,
    v_new: Tensor,
    h: Tensor,
    g_cumsum: Tensor,
    scale: float,
    case: Case,
    arithmetic: Arithmetic,
    dtype: torch.dtype,
) -> Tensor:
    """o in `dtype`; h [C, HV, K, V]. The weights of v_new are rounded, as a product's operand."""
    HV = v_new.shape[2]
    round_, product = arithmetic.operand, arithmetic.product
    q_c, k_c, v_c = (round_(by_chunk(x, case, HV)) for x in (q, k, v_new))
    g_c = by_chunk(g_cumsum, case, HV, hold=True)
    weights = round_(product(q_c, k_c.mT) * narrow_decay(g_c, 0))
    o = g_c.exp2()[..., None] * product(q_c, round_(h.float())) + product(weights, v_c)
    return by_token((scale * o).to(dtype), case)


def narrow_forward(
    x: Inputs,
    case: Case,
    arithmetic: Arithmetic,
    *,
    scale: float | None = None,
    with_state: bool = True,
    use_qk_l2norm: bool = False,
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o in q's dtype and the final state [N, HV, K, V], all steps one after the other."""
    q, k, v = x.q, x.k, x.v
    g, beta = x.g.float(), x.beta.float()
    if use_qk_l2norm:
        q, k = reference.l2norm(q), reference.l2norm(k)
    if A_log is not None:
        g = reference.gate(g, A_log.float(), None if dt_bias is None else dt_bias.float())
    if use_beta_sigmoid:
        beta = reference.beta_sigmoid(beta, allow_neg_eigval)
    g_cumsum = narrow_gate_cumsum(g, case)
    w, u = narrow_wy(k, v, g_cumsum, beta, case, arithmetic)
    initial_state = x.initial_state if with_state else None
    h, v_new, final = narrow_state(k, w, u, g_cumsum, initial_state, case, arithmetic)
    scale = case.K**-0.5 if scale is None else scale
    o = narrow_output(q, k, v_new, h, g_cumsum, scale, case, arithmetic, x.q.dtype)
    return o, final
