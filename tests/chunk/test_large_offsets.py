"""Addresses past 2^31 elements: q, k and v as views of one buffer whose rows lie far apart.

The pages between the rows are never touched. On a CPU they cost nothing; on a GPU they are real.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import FP16, Case, Inputs, make_inputs, same_bits
from torch import Tensor

import gdn_triton
from gdn_triton.chunk.triton.shared.chunks import make_chunks
from gdn_triton.constants import MAX_TOKENS

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


def sized(T: int = 64, HV: int = 1, K: int = 1, V: int = 1, packed: bool = False) -> dict[str, Any]:
    """A call of such sizes whose elements are all one, where Triton's kernels run here."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def tensor(*shape: int) -> Tensor:
        return torch.zeros((), dtype=FP16, device=device).expand(1, T, HV, *shape)

    cu_seqlens = torch.tensor([0, T], device=device) if packed else None
    x = {"q": tensor(K), "k": tensor(K), "v": tensor(V), "g": tensor(), "beta": tensor()}
    return {**x, "cu_seqlens": cu_seqlens}


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_more_tokens_than_are_numbered(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by Triton before anything is launched or written; by `auto` left to the reference."""
    T = 2**31 + 64
    x = sized(T, packed=packed)
    message = f"less than {MAX_TOKENS} tokens; T is {T}"
    on: dict[str, Any] = {"device": x["q"].device}
    state, slots = torch.zeros(1, 1, 1, 1, **on), torch.zeros(1, dtype=torch.int64, **on)
    calls: list[Callable[[], Any]] = [
        lambda: gdn_triton.chunk_gated_delta_rule(**x),
        lambda: gdn_triton.chunk_prefill(state, slots, **x),
        lambda: gdn_triton.fused_recurrent_gated_delta_rule(**x),
        lambda: gdn_triton.recurrent_step(state, slots, **x),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=message):
            call()
    assert state._version == 0
    monkeypatch.setenv("GDN_BACKEND", "auto")
    told = gdn_triton.explain(**x)
    assert told.chosen == "reference" and message in str(told.reasons["triton"])
    told = gdn_triton.explain_call(gdn_triton.fused_recurrent_gated_delta_rule, **x)
    assert told.chosen == "reference" and message in str(told.reasons["triton"])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"T": MAX_TOKENS - 1}, None),
        ({"T": MAX_TOKENS}, f"T is {MAX_TOKENS}"),
        ({"HV": 2**19 - 1}, None),
        # The triangles of a chunk have 64 columns for each token and head.
        ({"HV": 2**19}, f"HV \\* max.* is {2**25}"),
        # Copies of q and k have rows of whole multiples of 16.
        ({"HV": 2**25 // 65, "K": 65}, f"HV \\* max.* is {80 * (2**25 // 65)}"),
        ({"K": 256, "V": 2**23 - 1}, None),
        ({"K": 256, "V": 2**23}, f"K \\* V is {2**31}"),
    ],
    ids=str,
)
def test_sizes_that_are_numbered(sizes: dict[str, int], message: str | None) -> None:
    told = gdn_triton.explain(**sized(**sizes)).reasons["triton"]
    if message is None:
        assert told is None
    else:
        assert told is not None and re.search(message, told)


def test_numbers_of_tokens_fit(device: str) -> None:
    """The table of chunks at the largest T, whose last chunk is not full."""
    T = MAX_TOKENS - 1
    table = make_chunks(1, T, 2**28, torch.tensor([0, 5, T - 3], device=device))
    assert table.chunk_rows is not None and table.chunk_offsets is not None
    size, rows = 2**28, table.chunk_rows.view(-1, 2).tolist()
    parts = [[5 + i * size, min(size, T - 8 - i * size)] for i in range(4)]
    expected = [[0, 5], *parts, [T - 3, -3]]
    assert rows[:6] == expected and not any(map(any, rows[6:]))
    assert table.chunk_offsets.tolist() == [0, 1, 5]
