"""Both walks that the CUDA library runs for the Triton backward of wide keys, compared with
float64."""

from typing import Any

import torch
from fast_cases import fast_case
from helpers import FP32, FP64, Case, assert_within_budget
from narrow import Arithmetic
from torch import Tensor

from gdn_triton.chunk.cuda import calls

# K and V whole, in part, and both in one call; empty sequences and rows of none.
CASES = [
    fast_case("packed", "", lengths=(70, 0, 130, 64), orphans=70, H=1, HV=2, K=256, V=128),
    fast_case("padded", "", T=200, B=2, H=2, HV=2, K=200, V=72),
    fast_case("narrow", "", T=65, B=1, H=1, HV=3, K=136, V=200),
]


def make_arguments(case: Case, dtype: torch.dtype, device: str, v_first: bool) -> dict[str, Any]:
    """The arguments of `chunk.walks`: inverses and scores are any strictly lower triangles."""
    generator = torch.Generator().manual_seed(7)
    B, T, H, HV, K, V = case.B, case.tokens, case.H, case.HV, case.K, case.V

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    g_cumsum = torch.zeros(B, HV, T).transpose(1, 2)
    A_inv, A_qk = torch.zeros(2, B, T, HV, case.chunk_size)
    for _, b, start, end in case.spans():
        t = end - start
        g_cumsum[b, start:end] = -draw(t, HV).abs().cumsum(0) / 8
        for A in (A_inv, A_qk):
            A[b, start:end, :, :t] = (draw(HV, t, t) / 16).tril(-1).movedim(0, 1)
    states = (case.N, HV, V, K) if v_first else (case.N, HV, K, V)
    q, k = (torch.nn.functional.normalize(draw(B, T, H, K), dim=-1) for _ in range(2))
    given = {"q": q, "k": k, "v": draw(B, T, HV, V), "do": draw(B, T, HV, V)}
    given |= {"A_inv": A_inv, "A_qk": A_qk}
    sides = {"own": draw(B, HV, T).transpose(1, 2), "beta": draw(B, T, HV).sigmoid()}
    sides |= {"g_cumsum": g_cumsum, "initial_state": draw(*states), "dht": draw(*states)}
    counts = [sum(n == i for n, *_ in case.spans()) for i in range(case.N)]
    offsets = None
    if case.packed:
        offsets = torch.tensor([sum(counts[:i]) for i in range(case.N + 1)], dtype=torch.int32)
        offsets = offsets.to(device)
    # Tokens of no sequence are not to be read.
    for x in (*given.values(), *(sides[name] for name in ("own", "beta", "g_cumsum"))):
        x[:, case.owned(x).shape[1] :] = torch.nan
    return {
        **{name: x.to(device, dtype) for name, x in given.items()},
        **{name: x.to(device) for name, x in sides.items()},
        "cu_seqlens": case.cu_seqlens(device),
        "chunk_offsets": offsets,
        "slots": sum(counts) + (2 if case.packed else 0),
        "scale": 0.1,
        "N": case.N,
        "K": K,
        "store_dh0": True,
        "state_v_first": v_first,
    }


def expected(given: dict[str, Any], case: Case, arithmetic: Arithmetic | None) -> dict[str, Tensor]:
    """h, v_new, dh, dx and dh0 in float64, or in fp32 with the roundings of a kernel."""
    dtype = FP64 if arithmetic is None else FP32

    def stored(x: Tensor) -> Tensor:
        return x if arithmetic is None else arithmetic.operand(x)

    def product(a: Tensor, b: Tensor) -> Tensor:
        return a @ b if arithmetic is None else arithmetic.product(a, b)

    HV = case.HV
    v_first, spans = given["state_v_first"], list(case.spans())

    def of_chunk(name: str, b: int, start: int, end: int) -> Tensor:
        """[HV, t, ...]"""
        x = given[name][b, start:end].to(dtype)
        return x.repeat_interleave(HV // x.shape[1], 1).movedim(1, 0)

    def states(name: str) -> Tensor:
        return given[name].to(dtype).mT.clone() if v_first else given[name].to(dtype).clone()

    found = {
        "h": torch.zeros(len(spans), HV, case.K, case.V, dtype=dtype, device=given["q"].device)
    }
    found["dh"] = found["h"].clone()
    found["v_new"] = torch.zeros_like(given["v"], dtype=dtype)
    found["dx"] = found["v_new"].clone()
    h, dh = states("initial_state"), states("dht")
    for c, (n, b, start, end) in enumerate(spans):
        k, v, A, g, beta = (
            of_chunk(name, b, start, end) for name in ("k", "v", "A_inv", "g_cumsum", "beta")
        )
        A = A[..., : end - start]
        found["h"][c] = stored(h[n])
        x = beta[..., None] * (v - g.exp2()[..., None] * product(k, stored(h[n])))
        v_new = x + product(A, stored(x))
        found["v_new"][b, start:end] = stored(v_new).movedim(0, 1)
        written = stored((g[:, -1:] - g).exp2()[..., None] * v_new)
        h[n] = g[:, -1, None, None].exp2() * h[n] + product(k.mT, written)
    for c, (n, b, start, end) in reversed(list(enumerate(spans))):
        q, k, do, A, P, g, beta, own = (
            of_chunk(name, b, start, end)
            for name in ("q", "k", "do", "A_inv", "A_qk", "g_cumsum", "beta", "own")
        )
        A, P = (x[..., : end - start] for x in (A, P))
        found["dh"][c] = stored(dh[n])
        du = (g[:, -1:] - g).exp2()[..., None] * product(k, stored(dh[n]))
        du = du + own[..., None] * do + product(P.mT, do)
        dx = du + product(A.mT, stored(du))
        found["dx"][b, start:end] = stored(dx).movedim(0, 1)
        read = stored(given["scale"] * g.exp2()[..., None] * do)
        kept = stored((beta * g.exp2())[..., None] * dx)
        dh[n] = g[:, -1, None, None].exp2() * dh[n] + product(q.mT, read) - product(k.mT, kept)
    found["dh0"] = dh.mT if v_first else dh
    return found


def check_walks(case: Case, dtype: torch.dtype, device: str, v_first: bool) -> calls.Walks:
    given, arithmetic = make_arguments(case, dtype, device, v_first), Arithmetic(dtype, device)
    found = calls.walks(**given)
    right, rounded = (expected(given, case, x) for x in (None, arithmetic))
    for name, y in found._asdict().items():
        assert y is not None
        if name in ("h", "dh"):
            y = y[: len(right[name])]
        elif name in ("v_new", "dx"):
            y = case.owned(y)
            right[name], rounded[name] = case.owned(right[name]), case.owned(rounded[name])
        assert_within_budget(
            name, y, right[name], rounded[name], dtype=y.dtype, unit=arithmetic.unit
        )
    return found
