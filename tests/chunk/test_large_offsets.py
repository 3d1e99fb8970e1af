"""Addresses past 2^31 elements: q, k and v as views of one buffer whose rows lie far apart.

The pages between the rows are never touched. On a CPU they cost nothing; on a GPU they are real.
"""

import pytest
import torch
from helpers import FP16, Case, Inputs, make_inputs, same_bits
from torch import Tensor

import gdn_triton

GIB = 2**30


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "triton")


def allocate(elements: int, device: str) -> Tensor:
    """16-bit elements that nobody has written; skips where there is no room."""
    size = 2 * elements
    if device == "cuda" and torch.cuda.mem_get_info()[0] < size + 2 * GIB:
        pytest.skip(f"needs {size / GIB:.0f} GiB of GPU memory")
    try:
        return torch.empty(elements, dtype=FP16, device=device)
    except RuntimeError:
        pytest.skip(f"the system does not lend {size / GIB:.0f} GiB of address space")


def spread(x: Inputs, buffer: Tensor, batch: int, row: int, head: int) -> Inputs:
    """The same q, k, v as views of `buffer` with these strides."""
    views = {}
    for i, name in enumerate(("q", "k", "v")):
        y = getattr(x, name)
        views[name] = buffer.as_strided(y.shape, (batch, row, head, 1), i * 64).copy_(y)
    return x.but(**views)


def call(x: Inputs, case: Case, l2norm: bool) -> tuple[Tensor, Tensor]:
    o, state = gdn_triton.chunk_gated_delta_rule(
        *x.tensors,
        initial_state=x.initial_state,
        output_final_state=True,
        cu_seqlens=x.cu_seqlens,
        chunk_size=case.chunk_size,
        use_qk_l2norm_in_kernel=l2norm,
    )
    assert state is not None
    return o, state


# (case, strides of batch, row and head): each stride in turn carries an address past 2^31.
ROWS = Case("rows", "", T=140, H=2, HV=2, chunk_size=64)
PACKED = Case("packed", "", lengths=(3, 130), orphans=7, H=2, HV=2, chunk_size=64)
FAR_ROWS = Case("far-rows", "", T=50, H=2, HV=2, chunk_size=64)
BATCH = Case("batch", "", T=20, B=3, H=2, HV=2)
HEADS = Case("heads", "", T=20, H=3, HV=3)
SPREADS = {
    "rows": (ROWS, (0, 2**24, 192)),
    "packed": (PACKED, (0, 2**24, 192)),
    # Rows so far apart that even offsets inside a chunk pass 2^31.
    "far-rows": (FAR_ROWS, (0, 2**26, 192)),
    "batch": (BATCH, (2**30 + 2**29, 384, 192)),
    "heads": (HEADS, (0, 192, 2**30 + 2**29)),
}


@pytest.mark.parametrize("l2norm", [False, True], ids=["plain", "l2norm"])
@pytest.mark.parametrize("name", SPREADS)
def test_far_apart(name: str, l2norm: bool, dataflow: str, device: str) -> None:
    case, strides = SPREADS[name]
    x = make_inputs(case, FP16, device)
    sizes = (case.B, case.tokens, case.H)
    last = sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True)) + 192
    assert last > 2**31
    far = spread(x, allocate(last, device), *strides)
    got = call(far, case, l2norm)
    # Dense copies: where rows lie must change no bit.
    dense = x.but(**{n: getattr(x, n).contiguous() for n in ("q", "k", "v")})
    expected = call(dense, case, l2norm)
    assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.gpu("the results themselves pass 2^31 elements, and all of them are written")
def test_large_results(dataflow: str, device: str) -> None:
    """o of 2^31 elements and more: its last rows equal those of a call of their own."""
    case = Case("large", "", T=2**17 + 100, H=1, HV=128, K=16, V=128, chunk_size=64, spare=0)
    needed = 12 * case.T * case.HV * case.V
    if torch.cuda.mem_get_info()[0] < 3 * needed:
        pytest.skip(f"needs {3 * needed / GIB:.0f} GiB of GPU memory")
    q, k = torch.nn.functional.normalize(
        torch.randn(2, 1, case.T, 1, case.K, device=device), dim=-1
    ).to(FP16)
    v = torch.randn(1, case.T, case.HV, case.V, device=device, dtype=FP16)
    g = torch.full((1, case.T, case.HV), -0.1, device=device)
    # At a chunk's start everything is forgotten: what follows is a sequence of its own.
    cut = 2**17 - 64
    g[:, cut] = -torch.inf
    beta = torch.rand(1, case.T, case.HV, device=device)
    o, state = gdn_triton.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    q, k, v, g, beta = (y[:, cut:].clone() for y in (q, k, v, g, beta))
    tail, tail_state = gdn_triton.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    assert state is not None and tail_state is not None
    assert o.numel() > 2**31
    assert same_bits(o[:, cut:], tail) and same_bits(state, tail_state)
