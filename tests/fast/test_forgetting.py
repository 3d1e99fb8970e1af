"""Long sequences in segments whose maps go as far back as gates remember, on a Hopper GPU: against
the same call whole, where a map in a window is a good guess and where it is a wrong one."""

import pytest
import torch
from fast_cases import gpu
from torch import Tensor
from torch.nn import functional

import gdn_triton
from gdn_triton.chunk.cuda import calls

K, V = 128, 128
UNMARKED = 2**31 - 1


def call(
    H: int, HV: int, lengths: tuple[int, ...], kind: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """`kind`: what is done to a call whose gates are mild, with a quarter of the heads at 0."""
    T, N = sum(lengths), len(lengths)
    given = {
        "q": functional.normalize(torch.randn(1, T, H, K, device="cuda"), dim=-1),
        "k": functional.normalize(torch.randn(1, T, H, K, device="cuda"), dim=-1),
        "v": torch.randn(1, T, HV, V, device="cuda"),
        "g": functional.logsigmoid(torch.randn(1, T, HV, device="cuda")) / 16,
        "beta": torch.rand(1, T, HV, device="cuda"),
        "initial_state": torch.randn(N, HV, K, V, device="cuda"),
    }
    given["g"][:, :, : HV // 4] = 0
    if kind == "none":
        given["g"].zero_()
    elif kind == "strong":
        given["g"] = 10 * functional.logsigmoid(torch.randn(1, T, HV, device="cuda"))
    elif kind == "-inf":  # as masks of packed texts have it
        given["g"][:, 1000::1500] = -torch.inf
    elif kind == "quiet":  # what came before is all of the state, however small
        for first in range(512, T, 2048):
            given["v"][:, first : first + 1536] = 0
            given["beta"][:, first : first + 1536] = 0
    elif kind == "silent end":
        given["v"][:, 1000:] = 0
        given["g"] /= 256
        given["beta"] /= 256
    elif kind == "alike keys":
        given["k"] = functional.normalize(given["k"] + 0.1, dim=-1)
    elif kind == "long keys":  # |I - beta k k^T| is above 1 now and then
        given["k"] *= 1.5
    elif kind == "a NaN":
        given["v"][0, 5000, -1, 3] = torch.nan
    elif kind == "an infinity":
        given["v"][0, 5000, -1, 3] = torch.inf
    elif kind == "a NaN gate":
        given["g"][0, 5000, -1] = torch.nan
    else:
        assert kind == "mild"
    given = {
        name: x.to(dtype) if name in ("q", "k", "v", "beta") else x for name, x in given.items()
    }
    ends = torch.tensor(lengths, device="cuda").cumsum(0, dtype=torch.int32)
    return {**given, "cu_seqlens": functional.pad(ends, (1, 0))}


# Whether the guesses hold for all heads with gates of each kind, and nothing is walked again. None:
# they hold for some heads.
KINDS = {
    "mild": True,
    "none": True,
    "strong": True,
    "-inf": True,
    "quiet": None,
    "silent end": True,
    "alike keys": True,
    "long keys": True,
    "a NaN": False,
    "an infinity": False,
    "a NaN gate": False,
}
# Calls whose plan forgets.
SIZES = [(2, 8, (65536,)), (4, 16, (28672, 4096)), (16, 32, (32768,))]


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("H", "HV", "lengths"), SIZES)
def test_as_whole(
    H: int,
    HV: int,
    lengths: tuple[int, ...],
    kind: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As far apart as two roundings of the state are: of the largest entry of each 64 tokens and
    head, and of each head's final state. And no more is walked again than has to be."""
    monkeypatch.setenv("GDN_BACKEND", "cuda")
    given = call(H, HV, lengths, kind, dtype)
    scratch: list[Tensor] = []
    workspace = calls._workspace

    def poisoned(*arguments: object) -> Tensor:
        scratch.append(workspace(*arguments).fill_(torch.nan))
        return scratch[-1]

    monkeypatch.setattr(calls, "_workspace", poisoned)

    def run() -> tuple[Tensor, Tensor]:
        o, state = gdn_triton.chunk_gated_delta_rule(**given, output_final_state=True)
        return o.float().unflatten(1, (-1, 64)).transpose(2, 3), state

    monkeypatch.setenv("GDN_BATCH_INVARIANT", "1")
    whole = run()
    monkeypatch.setenv("GDN_BATCH_INVARIANT", "0")
    cut, again = run(), run()
    assert scratch[1].numel() > scratch[0].numel(), "the call is not cut"
    # Segments::marks are the last of the scratch memory: a number for each 64 channels of V.
    marks = scratch[1].view(torch.int32)[-len(lengths) * HV * V // 64 :]
    for x, y, z in zip(cut, again, whole, strict=True):
        assert torch.equal(x.view(torch.int32), y.view(torch.int32)), "not the same bits twice"
        assert torch.equal(x.isfinite(), z.isfinite()), "a NaN that ends, or one too many"
        x, z = (torch.where(a.isfinite(), a, 0) for a in (x, z))
        # Below 2^-100 products of two small numbers are below float32's.
        least = max(torch.finfo(dtype).tiny, 2**-100)
        largest = z.abs().amax((-1, -2), keepdim=True).clamp(min=least)
        assert ((x - z).abs() <= 0.03 * largest).all(), ((x - z).abs() / largest).nan_to_num().max()
    unmarked = marks == UNMARKED
    assert ((marks > 0) & (unmarked | (marks < 1024))).all(), "no mark"
    if KINDS[kind] is not None:
        assert unmarked.all() == KINDS[kind], f"{int((~unmarked).sum())} tiles walked again"
