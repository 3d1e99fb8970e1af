"""The gradients of chunks from the states and from their gradients, in plain torch, for the
tests of the Gluon kernel that computes them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from helpers import BF16, FP32, FP64, Case, assert_within_budget
from torch import Tensor

from gdn_triton.chunk.triton.gradients.gate import LEAST_BETA, ChunkGradients
from gdn_triton.chunk.triton.shared.chunks import ChunkTable


class Given(NamedTuple):
    """Operands as ``chunk_gradients`` of gdn_triton/chunk/triton/hopper takes them."""

    q: Tensor
    k: Tensor
    do: Tensor
    u: Tensor
    dv: Tensor
    h: Tensor
    dh: Tensor
    g_cumsum: Tensor
    beta: Tensor

    def to(self, dtype: torch.dtype) -> "Given":
        return Given(*(x.to(dtype) for x in self))


def chunk_table(case: Case, device: str) -> ChunkTable:
    """The table of a case of chunks of 64, as ``make_chunks`` makes it; packed cases have one empty
    slot more."""
    if not case.packed:
        NT = -(-case.T // 64)
        return ChunkTable(64, NT, case.B * NT, None, None, None)
    rows = [(first, end - first) for *_, first, end in case.spans()]
    end = case.offsets()[-1]
    rows += ((end + n, -min(64, case.orphans - n)) for n in range(0, case.orphans, 64))
    rows.append((0, 0))
    table = torch.tensor(rows, dtype=torch.int32, device=device)
    return ChunkTable(64, len(rows), len(rows), torch.zeros(1), table, None)


def make_given(case: Case, device: str, *, slots: int, strength: float, seed: int) -> Given:
    """Random operands. Tokens of no sequence are NaN. strength: the most that a token decays by, in
    log2 units."""
    generator = torch.Generator().manual_seed(seed)
    B, T, H, HV, K, V = case.B, case.tokens, case.H, case.HV, case.K, case.V

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def tokens(heads: int, width: int) -> Tensor:
        x = normal(B, T, heads, width)
        if case.packed:
            x[:, case.offsets()[-1] :] = torch.nan
        return x.to(device, BF16)

    decays = -strength * torch.rand(B, HV, T, generator=generator)
    g_cumsum = torch.zeros_like(decays)
    for _, b, first, end in case.spans():
        g_cumsum[b, :, first:end] = decays[b, :, first:end].cumsum(-1)
    beta = torch.rand(B, HV, T, generator=generator)
    # Rows of dv that are dx.
    beta[..., 5::17], beta[..., 9::17] = 0.0, LEAST_BETA / 2
    return Given(
        q=tokens(H, K) * K**-0.5,
        k=tokens(H, K) * K**-0.5,
        do=tokens(HV, V),
        u=tokens(HV, V),
        dv=tokens(HV, V),
        h=normal(slots, HV, K, V).to(device, BF16),
        dh=normal(slots, HV, K, V).to(device, BF16),
        g_cumsum=g_cumsum.to(device).transpose(1, 2),
        beta=beta.to(device).transpose(1, 2),
    )


@dataclass
class Expected:
    """dq, dk [B, T, H, K]; by token, of shape [B, HV, T], dv . u, and
    what the decay of a token and of those before it in its chunk counts with (ahead), and of those
    after it (behind), as ``gate_bwd`` adds them up; across [slots, HV]."""

    dq: Tensor
    dk: Tensor
    dx_u: Tensor
    ahead: Tensor
    behind: Tensor
    across: Tensor


def expected(
    case: Case, x: Given, scale: float, *, dtype: torch.dtype, rounds: bool, norm: bool
) -> Expected:
    """In ``dtype``. rounds: S and N to bfloat16 where products take them. norm: dq and dk are
    multiplied as by the gradient of a norm with the factors of `factors_of`."""
    given, x = x, x.to(dtype)
    B, T, HV, G = case.B, case.tokens, case.HV, case.HV // case.H

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=x.q.device)

    def operand(y: Tensor) -> Tensor:
        return y.to(BF16).to(dtype) if rounds else y

    out = Expected(
        dq=torch.zeros_like(x.q),
        dk=torch.zeros_like(x.k),
        dx_u=zeros(B, HV, T),
        ahead=zeros(B, HV, T),
        behind=zeros(B, HV, T),
        across=zeros(given.h.shape[0], HV),
    )
    for slot, (_, b, first, end) in enumerate(case.spans()):
        at = slice(first, end)
        for hv in range(HV):
            q, k = x.q[b, at, hv // G], x.k[b, at, hv // G]
            do, u, dx = (y[b, at, hv] for y in (x.do, x.u, x.dv))
            g, beta = x.g_cumsum[b, at, hv], rest_of(x.beta[b, at, hv, None])
            h, dh = x.h[slot, hv], x.dh[slot, hv]
            decay = (g[:, None] - g[None, :]).tril(-1).exp2().tril(-1)
            start, to_end = g.exp2()[:, None], (g[-1] - g).exp2()[:, None]
            S, N = scale * (do @ u.mT) * decay, -(dx @ u.mT) * decay
            own = scale * (do * u).sum(1, keepdim=True)
            doh, dxh, udh = scale * start * (do @ h.mT), start * (dx @ h.mT), to_end * (u @ dh.mT)
            Sr, Nr = operand(S), operand(beta * N)
            out.dq[b, at, hv // G] += own * k + Sr @ k + doh
            out.dk[b, at, hv // G] += own * q + Sr.mT @ q + (Nr + Nr.mT) @ k - beta * dxh + udh
            M = S * (q @ k.mT) + beta * N * (k @ k.mT)
            read = (dxh * k).sum(1)
            out.dx_u[b, hv, at] = (dx * u).sum(1)
            ahead = M.sum(1) - M.sum(0) + (doh * q).sum(1) - beta[:, 0] * read
            out.ahead[b, hv, at] = ahead
            out.behind[b, hv, at] = (udh * k).sum(1)
            out.across[slot, hv] = (h * dh).sum() * g[-1].exp2()
    if norm:
        for dy, y, factor in zip((out.dq, out.dk), (x.q, x.k), factors_of(given), strict=True):
            dy -= y * (y * dy).sum(-1, keepdim=True)
            dy *= factor[..., None]
    return out


def factors_of(x: Given) -> Tensor:
    """Factors of a norm that could have made q and k, [2, B, T, H], fp32."""
    return torch.stack([y[..., 0].float().exp() for y in (x.q, x.k)])


def rest_of(beta: Tensor) -> Tensor:
    """The factor that rows of dv lack of beta dx."""
    return torch.where(beta.abs() < LEAST_BETA, beta, 1.0)


def added_up(found: ChunkGradients, beta: Tensor) -> dict[str, Tensor]:
    """The scalars as ``gate_bwd`` adds them up. beta: [B, HV, T]."""
    dx_u, queries, later, earlier = found.pair_shares
    to_queries, read, behind = found.shares[0]
    beta = rest_of(beta)
    return {
        "dx_u": dx_u,
        "ahead": queries + beta * later - earlier + to_queries - beta * read,
        "behind": behind,
    }


def check_gradients(
    case: Case, device: str, run: Any, *, strength: float, seed: int, norm: bool
) -> None:
    """run: ``chunk_gradients``, or a function in its place. norm: with factors of a norm."""
    chunks = chunk_table(case, device)
    x = make_given(case, device, slots=chunks.slots, strength=strength, seed=seed)
    scale = -0.3
    factors = factors_of(x) if norm else None
    found = run(**x._asdict(), chunks=chunks, scale=scale, factors=factors, K=case.K)
    exact = expected(case, x, scale, dtype=FP64, rounds=False, norm=norm)
    narrow = expected(case, x, scale, dtype=FP32, rounds=True, norm=norm)
    unit = torch.finfo(BF16).eps / 2
    for name in ("dq", "dk"):
        got, right = getattr(found, name), getattr(exact, name)
        near = getattr(narrow, name).to(BF16)
        if case.packed:
            assert (got[:, case.offsets()[-1] :] == 0).all(), f"{name}: tokens of no sequence"
            got, right, near = (case.owned(y) for y in (got, right, near))
        assert_within_budget(name, got, right, near, dtype=BF16, unit=torch.finfo(BF16).eps)
    for name, got in added_up(found, x.beta.transpose(1, 2)).items():
        right, near = getattr(exact, name), getattr(narrow, name)
        if case.packed:
            end = case.offsets()[-1]
            got, right, near = got[..., :end], right[..., :end], near[..., :end]
        assert_within_budget(name, got, right, near, dtype=FP32, unit=unit * 2.0**-8)
    used = len(list(case.spans()))
    # A decay below the normal numbers of fp32 is 0.
    least = (x.h.float() * x.dh.float()).abs().sum((-1, -2))[:used] * torch.finfo(FP32).tiny
    got = found.across[0, :used]
    assert ((got - exact.across[:used])[exact.across[:used].abs() < least] <= least.max()).all()
    live = exact.across[:used].abs() >= 2**24 * least
    across = (torch.where(live, y[:used], 0.0) for y in (exact.across, narrow.across))
    got = torch.where(live, got, 0.0)
    assert_within_budget("across", got, *across, dtype=FP32, unit=unit * 2.0**-8)
