"""`gdn_triton.layer_step` of sequences with different numbers of tokens: the bits of its parts in a
row, refusals, compilers, graphs."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import BF16, FP16, FP32, same_bits
from layer_step_cases import CONV, POOLS, Case, copied, in_a_row, without
from test_layer_drafts import NORM, REAL_WINDOWS, WINDOWS, tree_of
from test_layer_tokens import choose, norm_bound, windowed
from test_layer_window import copied_window, same_windows
from torch import Tensor
from window_cases import Case as WindowCase

from gdn_triton import layer_step

pytest.importorskip("triton", reason="Triton is not installed")
ON_GPU = pytest.mark.gpu("bf16, and real sizes")


@pytest.fixture(params=["reference", "at once", "three launches"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "reference" if request.param == "reference" else "triton"
    monkeypatch.setenv("GDN_BACKEND", name)
    choose(monkeypatch, request.param == "at once")


CASES = [
    Case(),
    Case(H=2, HV=6, K=20, V=33, W=2),
    Case(H=1, HV=4, K=32, V=40, W=3, dtype=FP16, pool=FP16, bias=True, sigmoid=True),
]
REAL = [
    Case(H=H, HV=HV, K=128, V=128, dtype=BF16, pool=pool)
    for H, HV in ((16, 32), (4, 8))
    for pool in (FP32, BF16)
]
EVERY = [*CASES, *(pytest.param(case, marks=ON_GPU) for case in REAL)]
# The second sequence has no slot, and the third no token. Some rows are after the last sequence.
LENGTHS, AFTER = [2, 3, 0, 4, 1], 3


def offsets(lengths: list[int], device: str) -> Tensor:
    """A view whose elements lie apart."""
    ends = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    return ends.repeat_interleave(2)[::2]


def packed(case: Case, device: str, *, slots: int = 1, after: int = AFTER) -> dict[str, Any]:
    """Sequences of `LENGTHS` tokens with a number of slots each."""
    N, rows = len(LENGTHS), sum(LENGTHS) + after
    x = replace(case, N=rows).arguments(device)
    places = torch.randperm(N * slots + 1)[: N * slots].view(N, slots).int()
    places[1] = -1
    count = N * slots + 1
    for name in POOLS:
        x[name] = torch.randn(count, *x[name].shape[1:]).to(device, x[name].dtype)
    return x | {
        "read_slots": (places if slots > 1 else places[:, 0]).to(device),
        "cu_seqlens": offsets(LENGTHS, device),
        "max_tokens": max(LENGTHS),
        "counters": torch.zeros(count, case.H, dtype=torch.int32, device=device),
    }


def token_sequences(x: dict[str, Any]) -> Tensor:
    """The sequence of each row, -1 after the last."""
    rows = x["mixed_qkv"].shape[-2]
    found = torch.full((rows,), -1)
    for n, (start, end) in enumerate(pairwise(x["cu_seqlens"].tolist())):
        found[start:end] = n
    return found


def assert_close(y: Tensor, expected: Tensor, x: dict[str, Any], live: Tensor) -> None:
    """y of live sequences up to the order of the norm's sum, and zeros in all other rows."""
    of_row = token_sequences(x)
    is_live = torch.cat([live.cpu(), torch.tensor([False])])[of_row]
    y, expected = y.view(-1, *y.shape[-2:]), expected.view(-1, *y.shape[-2:])
    near = (y - expected)[is_live].abs() <= norm_bound(x) * expected[is_live].abs()
    assert near.all() and (y[~is_live] == 0).all()


def arguments_of_parts(x: dict[str, Any]) -> dict[str, Any]:
    return {**dict.fromkeys(CONV), **copied(without(x, "max_tokens", "counters"))}


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("names", [(), NORM])
@pytest.mark.parametrize("case", EVERY)
def test_bits_of_the_parts(case: Case, names: tuple[str, ...], device: str) -> None:
    x = without(packed(case, device), *names)
    parts, live = arguments_of_parts(x), x["read_slots"] >= 0
    for _ in range(2):
        y, expected = layer_step(**x), in_a_row(parts, norm="gate" in x)
        assert_close(y, expected, x, live)
    assert all(same_bits(x[name], parts[name]) for name in POOLS)
    assert not x["counters"].any()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("names", [(), NORM, CONV])
@pytest.mark.parametrize("S", [2, 5])
@pytest.mark.parametrize("case", EVERY)
def test_drafts(case: Case, S: int, names: tuple[str, ...], device: str) -> None:
    """Over steps that accept other numbers of tokens, and that have tokens [1, T] and an output."""
    x, N = packed(case, device, slots=S), len(LENGTHS)
    count, columns = x["state"].shape[0], case.W - 2 + S + 1  # one more than is used
    wide = torch.randn(count, case.D, columns).to(device, x["conv_state"].dtype)
    accepted = torch.arange(N, device=device) % S + 1
    accepted[-1] = S + 1
    x = without(x | {"conv_state": wide, "num_accepted_tokens": accepted}, *names)
    parts = arguments_of_parts(x)
    for i in range(3):
        given = {"mixed_qkv": torch.randn_like(x["mixed_qkv"])}
        expected = in_a_row({**parts, **given}, norm="gate" in x)
        if i == 1:
            rows = {name: x[name][None] for name in ("a", "b", "gate") if name in x}
            given = {"mixed_qkv": given["mixed_qkv"][None], **rows}
            given["out"] = torch.full((1, *expected.shape[:2], 2 * case.V), torch.nan).to(expected)
            given["out"] = given["out"][..., ::2]
        y = layer_step(**{**x, **given})
        assert i != 1 or y is given["out"]
        live = (x["read_slots"][:, 0] >= 0) & (accepted >= 1) & (accepted <= S)
        assert_close(y, expected, x, live)
        accepted.copy_(accepted.flip(0))
    assert all(same_bits(x[name], parts[name]) for name in POOLS if name in x)
    assert not x["counters"].any()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("case", EVERY)
def test_a_slot_a_token(case: Case, device: str) -> None:
    """With parents and without."""
    x, N = packed(case, device), len(LENGTHS)
    rows, ends = sum(LENGTHS) + AFTER, offsets(LENGTHS, "cpu").tolist()
    count = N + 1 + rows
    slots = (N + 1 + torch.randperm(rows)).int()[None].to(device)
    parents = torch.full((1, rows), 7, dtype=torch.int32)
    for start, end in pairwise(ends):
        if end > start:
            parents[0, start:end] = tree_of(1, end - start)
    x |= {name: torch.randn(count, *x[name].shape[1:]).to(x[name]) for name in POOLS}
    x |= {"write_slots": slots, "parents": parents.to(device)}
    x["counters"] = torch.zeros(count, case.H, dtype=torch.int32, device=device)
    for others in ((), ("parents",)):
        given = copied(without(x, *others))
        parts = arguments_of_parts(given)
        y, expected = layer_step(**given), in_a_row(parts)
        assert_close(y, expected, x, x["read_slots"] >= 0)
        assert all(same_bits(given[name], parts[name]) for name in POOLS)
        assert not x["counters"].any()


WINDOW_LENGTHS = [2, 3, 0]


def packed_window(case: WindowCase, device: str) -> tuple[Any, dict[str, Any]]:
    """Sequences of a window, with the rows of a packed call; the second one is padding."""
    run, x = windowed(case, device, 1)
    lengths = (WINDOW_LENGTHS * case.N)[: case.N]
    rows = sum(lengths) + AFTER
    of_rows = {
        name: torch.randn(rows, *x[name].shape[2:]).to(x[name])
        for name in ("mixed_qkv", "a", "b", "gate")
    }
    return run, x | of_rows | {"cu_seqlens": offsets(lengths, device)}


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(("accepts", "names"), [(False, ()), (True, ()), (False, CONV)])
@pytest.mark.parametrize("case", [*WINDOWS, *(pytest.param(c, marks=ON_GPU) for c in REAL_WINDOWS)])
def test_with_a_window(
    case: WindowCase, accepts: bool, names: tuple[str, ...], device: str
) -> None:
    """Over folds; a position says which tokens of the call before were accepted."""
    run, x = packed_window(case, device)
    x = without(x, *names)
    accepted = torch.ones(case.N, dtype=torch.int32, device=device)
    if accepts:
        columns = x["conv_state"].shape[-1] + case.max_tokens  # one more than is used
        x["conv_state"] = torch.randn(*x["conv_state"].shape[:2], columns).to(device, case.dtype)
    beside, live = {**dict.fromkeys(CONV), **copied_window(x)}, run.slots >= 0
    lengths = x["cu_seqlens"].diff()
    for i in range(4):
        step = {"positions": run.positions, "mixed_qkv": torch.randn_like(x["mixed_qkv"])}
        if accepts:
            step["num_accepted_tokens"] = accepted
        y, expected = layer_step(**{**x, **step}), in_a_row({**beside, **step})
        assert_close(y, expected, x, live)
        if accepts:
            accepted = torch.minimum(lengths, lengths * 0 + i % 2 + 1).clamp(min=1).int()
        run.positions = run.positions + torch.where(lengths > 0, accepted, 0)
    assert all(same_bits(x[name], beside[name]) for name in POOLS if name in x)
    assert same_windows(x, beside)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("rows", [0, 3, 12])
def test_without_a_bound(rows: int, device: str) -> None:
    """T bounds the tokens of a sequence; a call may have no sequence, and no token."""
    for lengths in ([], [rows]):
        x = without(packed(CASES[0], device), "max_tokens")
        for name in ("mixed_qkv", "a", "b", "gate"):
            x[name] = torch.cat([x[name]] * 2)[:rows]
        x |= {"cu_seqlens": offsets(lengths, device), "read_slots": x["read_slots"][: len(lengths)]}
        parts = arguments_of_parts(x)
        y, expected = layer_step(**x), in_a_row(parts)
        assert_close(y, expected, x, x["read_slots"] >= 0)
        assert all(same_bits(x[name], parts[name]) for name in POOLS)


@pytest.mark.usefixtures("form")
def test_nan_in_rows_of_nobody(device: str) -> None:
    """Rows of a skipped sequence and after the last one may hold anything."""
    x, S = packed(CASES[1], device), len(LENGTHS)
    y = layer_step(**copied(x))
    of_row = token_sequences(x)
    nobody = ((of_row < 0) | (of_row == 1)).to(device)
    assert S > 1 and nobody.any()
    for name in ("mixed_qkv", "a", "b", "gate"):
        x[name] = torch.where(nobody.view(-1, *(1,) * (x[name].dim() - 1)), torch.nan, x[name])
    assert same_bits(layer_step(**x), y) and not y.isnan().any()


def example(kind: str, device: str) -> dict[str, Any]:
    if kind == "window":
        run, x = packed_window(WINDOWS[0], device)
        return x | {"positions": run.positions}
    x = packed(CASES[0], device, slots=3)
    accepted = torch.tensor([1, 2, 3, 3, 1], device=device)
    wide = x["conv_state"].repeat(1, 1, 2)
    return x | {"conv_state": wide, "num_accepted_tokens": accepted}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", ["drafts", "window"])
def test_compiled(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an output, which the operator writes."""
    monkeypatch.setenv("GDN_BACKEND", "triton")
    choose(monkeypatch, at_once=True)
    x = example(kind, device)
    copy = copied_window if "window" in x else copied
    eager, traced = copy(x), copy(x)
    call = torch.compile(
        lambda **given: 2 * layer_step(**given), fullgraph=True, backend="aot_eager"
    )
    expected = layer_step(**eager)
    assert same_bits(call(**traced), 2 * expected)
    assert all(same_bits(traced[name], eager[name]) for name in POOLS)
    out = torch.full_like(expected, torch.nan)
    assert same_bits(call(**copy(x), out=out), 2 * expected) and same_bits(out, expected)


@pytest.mark.gpu("a CUDA graph")
@pytest.mark.parametrize("at_once", [True, False])
def test_cuda_graph(at_once: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays with other slots, offsets, numbers and contents, and the parts in a row."""
    choose(monkeypatch, at_once=at_once)
    monkeypatch.setenv("GDN_BACKEND", "triton")
    case, N, S = REAL[0], len(LENGTHS), 4
    x = without(packed(case, device, slots=S, after=9), *NORM)
    columns = case.W - 2 + S
    wide = torch.randn(N * S + 1, case.D, columns).to(device, BF16)
    x |= {"conv_state": wide, "num_accepted_tokens": torch.ones(N, dtype=torch.int64).to(device)}
    parts = arguments_of_parts(x)
    layer_step(**copied(x))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer_step(**x)
    for i in range(200):
        slots = torch.randperm(N * S + 1, device=device)[: N * S].view(N, S)
        slots[i % N] = -1
        x["read_slots"].copy_(slots)
        x["num_accepted_tokens"].random_(0, 6)
        x["cu_seqlens"][1:].copy_(torch.randint(0, 5, (N,), device=device).cumsum(0))
        x["mixed_qkv"].normal_()
        y.fill_(torch.nan)
        graph.replay()
        assert same_bits(y, in_a_row(parts, norm=False))
    assert all(same_bits(x[name], parts[name]) for name in POOLS)
    assert not x["counters"].any()


@pytest.mark.parametrize(
    ("kind", "changes", "error", "message"),
    [
        ("drafts", {"max_tokens": 0}, ValueError, r"max_tokens must be 1 to 2\^31 - 1, got 0"),
        ("drafts", {"max_tokens": True}, TypeError, "max_tokens must be an int or None, got True"),
        ("drafts", {"max_tokens": 2.0}, TypeError, "max_tokens must be an int or None, got 2.0"),
        (
            "drafts",
            {"max_tokens": 3},
            ValueError,
            "cu_seqlens must give a sequence at most max_tokens=3 tokens, got 4 for sequence 3",
        ),
        ("drafts", {"cu_seqlens": None}, ValueError, "max_tokens must be None without cu_seqlens"),
        ("drafts", {"cu_seqlens": torch.zeros(2, 3).int()}, ValueError, "cu_seqlens must have sha"),
        ("drafts", {"cu_seqlens": torch.zeros(6)}, ValueError, "cu_seqlens must be int32 or int64"),
        ("drafts", {"cu_seqlens": torch.zeros(3).int()}, ValueError, "read_slots must have shape"),
        (
            "drafts",
            {"cu_seqlens": torch.tensor([0, 2, 1, 5, 6, 7])},
            ValueError,
            "cu_seqlens must not decrease, got 2 then 1 at index 2",
        ),
        (
            "drafts",
            {"mixed_qkv": torch.zeros(2, 13, 80)},
            ValueError,
            r"mixed_qkv must have shape \[T, 2 \* H \* K \+ HV \* V\] or \[1, T, .* with",
        ),
        ("drafts", {"a": torch.zeros(5, 2)}, ValueError, r"a must have shape \[T=13, HV=2\]"),
        ("drafts", {"out": torch.zeros(13, 2, 23)}, ValueError, r"out must have shape \[T=13, HV"),
        (
            "drafts",
            {"out": torch.zeros(13, 2, 24).double()},
            ValueError,
            "out must be torch.float32, as mixed_qkv is, got torch.float64",
        ),
        (
            "drafts",
            {"out": torch.zeros(1, 2, 24).expand(13, 2, 24)},
            ValueError,
            "out",
        ),
        ("window", {"max_tokens": 3}, ValueError, "max_tokens must be None with a window"),
        (
            "window",
            {"cu_seqlens": torch.tensor([0, 4, 5, 6])},
            ValueError,
            "cu_seqlens must give a sequence at most window.max_tokens=3 tokens, got 4",
        ),
    ],
)
def test_refusals(
    kind: str, changes: dict[str, Any], error: type[Exception], message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("GDN_BACKEND", raising=False)
    choose(monkeypatch, at_once=True)
    x = example(kind, "cpu")
    before = copied(x)
    with pytest.raises(error, match=message):
        layer_step(**{**x, **changes})
    assert all(same_bits(x[name], before[name]) for name in POOLS)


def test_an_output_that_is_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GDN_BACKEND", raising=False)
    x = example("drafts", "cpu")
    with pytest.raises(ValueError, match="out must lie apart from gate"):
        layer_step(**x, out=x["gate"])
