"""The independent computation for the error budget of helpers.py: plain torch, in the precision of
a kernel (`Arithmetic`), rounded where the kernel stores."""

from dataclasses import dataclass

import torch
from helpers import FP32, Case, Inputs
from torch import Tensor

from gdn_triton import reference
from gdn_triton.constants import LOG2_DECAY_FLOOR, RCP_LN2


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
        n = a.shape[-1]
        order = torch.tensor([*range(0, n, 2), *range(1, n, 2)], device=a.device)
        return a[..., order] @ b[..., order, :]

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
    """[HV, t] -> [HV, t, t], 0 above the diagonal."""
    keep = torch.ones(g_cumsum.shape[-1:] * 2, device=g_cumsum.device).tril(diagonal).bool()
    difference = g_cumsum[:, :, None] - g_cumsum[:, None, :]
    return torch.where(keep, difference, -torch.inf).exp2()


def narrow_cumsum(x: Tensor, case: Case, *, reverse: bool = False) -> Tensor:
    """Chunk-local sum of fp32 x [B, T, HV], one addition after the other in fp32: torch.cumsum adds
    up in float64 on a CPU, and is no independent computation in fp32."""
    out = torch.zeros_like(x)
    for _, b, start, end in case.spans():
        total = torch.zeros_like(x[b, start])
        for t in reversed(range(start, end)) if reverse else range(start, end):
            total = total + x[b, t]
            out[b, t] = total
    return out


def narrow_gate_cumsum(g: Tensor, case: Case) -> Tensor:
    """g_cumsum of g [B, T, HV], natural log, in fp32."""
    return narrow_cumsum((g.float() * RCP_LN2).clamp_min(LOG2_DECAY_FLOOR[FP32]), case)


def narrow_inverse(
    k: Tensor, g_cumsum: Tensor, beta: Tensor, case: Case, arithmetic: Arithmetic
) -> list[Tensor]:
    """(I + A)^-1 of each chunk, [HV, t, t], fp32, by forward substitution."""
    HV, product = g_cumsum.shape[2], arithmetic.product
    inverses = []
    for _, b, start, end in case.spans():
        k_c = arithmetic.operand(narrow_heads(k[b, start:end], HV))
        g_c, beta_c = narrow_heads(g_cumsum[b, start:end], HV), narrow_heads(beta[b, start:end], HV)
        A = (beta_c[:, :, None] * product(k_c, k_c.mT) * narrow_decay(g_c, -1)).tril(-1)
        identity = torch.eye(end - start, device=k.device).expand_as(A)
        A = arithmetic.inner(A)
        A_inv = torch.linalg.solve_triangular(A, identity, upper=False, unitriangular=True)
        inverses.append(arithmetic.inner(A_inv))
    return inverses


def narrow_wy(
    k: Tensor,
    v: Tensor,
    g_cumsum: Tensor,
    beta: Tensor,
    case: Case,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Tensor]:
    """w, u in the dtype; the factors of A_inv's columns are applied in fp32, then rounded."""
    B, T, HV, V = v.shape
    w = torch.zeros(B, T, HV, k.shape[-1], dtype=arithmetic.dtype, device=k.device)
    u = torch.zeros(B, T, HV, V, dtype=arithmetic.dtype, device=k.device)
    round_, product = arithmetic.operand, arithmetic.product
    inverses = narrow_inverse(k, g_cumsum, beta, case, arithmetic)
    for (_, b, start, end), A_inv in zip(case.spans(), inverses, strict=True):
        k_c, v_c = (round_(narrow_heads(x[b, start:end], HV)) for x in (k, v))
        g_c, beta_c = (narrow_heads(x[b, start:end], HV) for x in (g_cumsum, beta))
        X = A_inv * beta_c[:, None, :]
        u[b, start:end] = product(round_(X), v_c).movedim(0, 1).to(u.dtype)
        w[b, start:end] = product(round_(X * g_c.exp2()[:, None, :]), k_c).movedim(0, 1).to(w.dtype)
    return w, u


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
    states = torch.zeros(case.N, HV, K, V, device=k.device)
    if initial_state is not None:
        states = initial_state.to(FP32).clone()
    h: list[Tensor] = []
    v_new = torch.zeros(u.shape, dtype=arithmetic.dtype, device=u.device)
    for n, b, start, end in case.spans():
        k_c, w_c, u_c, g_c = (narrow_heads(x[b, start:end], HV) for x in (k, w, u, g_cumsum))
        h.append(states[n].to(arithmetic.dtype))
        v_c = u_c - product(round_(w_c), round_(states[n]))
        v_new[b, start:end] = v_c.movedim(0, 1).to(v_new.dtype)
        to_end = (g_c[:, -1:] - g_c).exp2()[:, :, None]
        g_last = g_c[:, -1, None, None].exp2()
        states[n] = g_last * states[n] + product(round_(k_c).mT, round_(to_end * v_c))
    none = torch.zeros(0, HV, K, V, dtype=arithmetic.dtype, device=k.device)
    return torch.stack(h) if h else none, v_new, states


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
    o = torch.zeros(v_new.shape, dtype=dtype, device=q.device)
    for c, (_, b, start, end) in enumerate(case.spans()):
        q_c, k_c, v_c = (round_(narrow_heads(x[b, start:end], HV)) for x in (q, k, v_new))
        g_c = narrow_heads(g_cumsum[b, start:end], HV)
        weights = round_(product(q_c, k_c.mT) * narrow_decay(g_c, 0))
        o_c = g_c.exp2()[:, :, None] * product(q_c, round_(h[c].float()))
        o_c = o_c + product(weights, v_c)
        o[b, start:end] = (scale * o_c).movedim(0, 1).to(dtype)
    return o


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
