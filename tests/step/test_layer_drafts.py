"""`gdn_triton.layer_step` with num_accepted_tokens, and with the nodes of trees: the bits of its
parts in a row, refusals, compilers, graphs."""

import importlib
from typing import Any

import pytest
import torch
from helpers import BF16, FP16, FP32, same_bits
from layer_step_cases import CONV, POOLS, Case, copied, in_a_row, without
from test_layer_tokens import choose, is_close, norm_bound, windowed
from test_layer_window import copied_window, same_windows
from torch import Tensor
from window_cases import Case as WindowCase

from gdn_triton import layer_step

pytest.importorskip("triton", reason="Triton is not installed")
tokens_plan = importlib.import_module("gdn_triton.step.triton.tokens_plan")
ON_GPU = pytest.mark.gpu("bf16, and real sizes")
NORM = ("gate", "norm_weight")


@pytest.fixture(params=["reference", "at once", "three launches"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "reference" if request.param == "reference" else "triton"
    monkeypatch.setenv("GDN_BACKEND", name)
    choose(monkeypatch, request.param == "at once")


CASES = [
    Case(),
    Case(H=2, HV=6, K=20, V=33, W=2, N=4),
    Case(H=1, HV=4, K=32, V=40, W=3, dtype=FP16, pool=FP16, bias=True, sigmoid=True),
    Case(v_first=False, conv_pool=FP32),
]
REAL = [
    Case(H=H, HV=HV, K=128, V=128, N=N, dtype=BF16, pool=pool)
    for H, HV, N in ((16, 32, 3), (4, 8, 20))
    for pool in (FP32, BF16)
]


def calls(*sizes: tuple[Any, ...]) -> list[Any]:
    """Each small case with two of the sizes of a call, and each real one with all."""
    some = [(case, *sizes[(i + j) % len(sizes)]) for i, case in enumerate(CASES) for j in (0, 1)]
    return some + [pytest.param(case, *size, marks=ON_GPU) for case in REAL for size in sizes]


def accepting(case: Case, device: str, T: int, S: int) -> dict[str, Any]:
    """Drafts of sequences with S slots each, of which the second sequence's are padding. The number
    of the last sequence is not in 1 to S."""
    x, N = case.arguments(device, T), case.N
    slots = torch.randperm(N * S + 1)[: N * S].view(N, S).int()
    slots[1] = -1
    shape = x["state"].shape[1:]
    accepted = torch.arange(N) % S + 1
    accepted[-1] = S + 1
    columns = case.W - 2 + S + 1  # one more than is used
    wide = torch.randn(N * S + 1, case.D, columns).to(device, x["conv_state"].dtype)
    return x | {
        "state": torch.randn(N * S + 1, *shape).to(device, case.pool),
        "conv_state": wide,
        "read_slots": slots.to(device),
        "num_accepted_tokens": accepted.to(device),
        "counters": torch.zeros(N * S + 1, case.H, dtype=torch.int32, device=device),
    }


def live_drafts(x: dict[str, Any]) -> Tensor:
    slots, accepted = x["read_slots"], x["num_accepted_tokens"]
    return (slots[:, 0] >= 0) & (accepted >= 1) & (accepted <= slots.shape[1])


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(
    ("case", "T", "S", "names"), calls((1, 2, ()), (4, 4, ()), (3, 5, NORM), (5, 3, CONV))
)
def test_drafts(case: Case, T: int, S: int, names: tuple[str, ...], device: str) -> None:
    """Both pools, over steps that accept other numbers of tokens."""
    x = without(accepting(case, device, T, S), *names)
    parts, norm = {**dict.fromkeys(CONV), **copied(x)}, "gate" in x
    before = copied(x)
    for _ in range(3):
        given = {"mixed_qkv": torch.randn_like(x["mixed_qkv"])}
        y, expected = layer_step(**{**x, **given}), in_a_row({**parts, **given}, norm=norm)
        assert is_close(y, expected, live_drafts(x), norm_bound(x))
        x["num_accepted_tokens"].copy_(x["num_accepted_tokens"].flip(0))
        parts["num_accepted_tokens"] = x["num_accepted_tokens"]
    assert all(same_bits(x[name], parts[name]) for name in POOLS if name in x)
    assert not same_bits(x["state"], before["state"])
    assert not x["counters"].any()


WINDOWS = [
    WindowCase(H=1, HV=2, V=48, rows=8, max_tokens=3, v_first=True),
    WindowCase(H=2, HV=6, K=20, V=33, N=4, rows=10, max_tokens=4),
    WindowCase(H=1, HV=4, K=32, V=80, rows=16, max_tokens=8, dtype=FP16, pool=FP16, v_first=True),
]
REAL_WINDOWS = [
    WindowCase(
        H=H, HV=HV, K=128, V=128, N=3, rows=16, max_tokens=4, dtype=BF16, pool=pool, v_first=True
    )
    for H, HV in ((16, 32), (4, 8))
    for pool in (FP32, BF16)
]
EVERY_WINDOW = [*WINDOWS, *(pytest.param(case, marks=ON_GPU) for case in REAL_WINDOWS)]


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("case", EVERY_WINDOW)
def test_drafts_with_a_window(case: WindowCase, device: str) -> None:
    """A position says which tokens of the rule were accepted, and num_accepted_tokens which of the
    convolution."""
    T = case.max_tokens
    run, x = windowed(case, device, T)
    columns = x["conv_state"].shape[-1] + T  # one more than is used
    x["conv_state"] = torch.randn(*x["conv_state"].shape[:2], columns).to(device, case.dtype)
    beside, live = copied_window(x), run.slots >= 0
    accepted = torch.ones(case.N, dtype=torch.int32, device=device)
    for i in range(4):
        step = {"positions": run.positions, "mixed_qkv": torch.randn_like(x["mixed_qkv"])}
        step["num_accepted_tokens"] = accepted
        y, expected = layer_step(**{**x, **step}), in_a_row({**beside, **step})
        assert is_close(y, expected, live, norm_bound(x))
        accepted = (torch.arange(case.N, dtype=torch.int32, device=device) + i) % T + 1
        run.positions = run.positions + accepted
    assert all(same_bits(x[name], beside[name]) for name in POOLS)
    assert same_windows(x, beside)


def tree_of(N: int, T: int) -> Tensor:
    """Parents [N, T] of random trees with two roots or more."""
    parents = (torch.rand(N, T) * (torch.arange(T) + 1)).long() - 1
    parents[:, -1] = -1
    return parents.int()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(("case", "T", "names"), calls((1, ()), (4, NORM), (5, CONV), (9, ())))
def test_trees(case: Case, T: int, names: tuple[str, ...], device: str) -> None:
    """Nodes have slots of their own in both pools."""
    x, N = case.arguments(device, T), case.N
    count = N * (T + 1)
    slots = torch.randperm(count).view(N, T + 1).int().to(device)
    slots[1] = -1
    x |= {
        "state": torch.randn(count, *x["state"].shape[1:]).to(device, case.pool),
        "conv_state": torch.randn(count, case.D, case.W - 1).to(device, x["conv_state"].dtype),
        "read_slots": slots[:, 0],
        "write_slots": slots[:, 1:],
        "parents": tree_of(N, T).to(device),
        "counters": torch.zeros(count, case.H, dtype=torch.int32, device=device),
    }
    # Without parents each token follows the one before it.
    for others in ((), ("parents",)):
        given = copied(without(x, *names, *others))
        parts = {**dict.fromkeys(CONV), **copied(given)}
        y, expected = layer_step(**given), in_a_row(parts, norm="gate" in given)
        assert is_close(y, expected, slots[:, 0] >= 0, norm_bound(given))
        assert all(same_bits(given[name], parts[name]) for name in POOLS if name in given)
        assert not x["counters"].any()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("T", [0, 1, 3])
def test_a_write_slot_a_sequence(T: int, device: str) -> None:
    x = CASES[0].arguments(device, T)
    pools = {name: x[name].repeat(2, *(1,) * (x[name].dim() - 1)) for name in POOLS}
    x |= pools | {"write_slots": torch.tensor([6, 8, -1], device=device)}
    x["counters"] = torch.zeros(10, 1, dtype=torch.int32, device=device)
    parts = copied(x)
    y, expected = layer_step(**x), in_a_row(parts)
    assert is_close(y, expected, x["read_slots"] >= 0, norm_bound(x))
    assert all(same_bits(x[name], parts[name]) for name in POOLS)


@pytest.mark.usefixtures("form")
def test_sequences_that_share_a_read_slot(device: str) -> None:
    """Branches of a sequence start from one slot, which none of them writes."""
    x = CASES[1].arguments(device, 3)
    x |= {"read_slots": torch.full_like(x["read_slots"], 2)}
    x["write_slots"] = torch.arange(6, 18, device=device).view(4, 3)
    x |= {name: x[name].repeat(3, *(1,) * (x[name].dim() - 1)) for name in POOLS}
    x["counters"] = torch.zeros(18, 2, dtype=torch.int32, device=device)
    parts = copied(x)
    y, expected = layer_step(**x), in_a_row(parts)
    assert is_close(y, expected, x["read_slots"] >= 0, norm_bound(x))
    assert all(same_bits(x[name], parts[name]) for name in POOLS)
    assert not x["counters"].any()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("names", [(), CONV])
@pytest.mark.parametrize("case", EVERY_WINDOW)
def test_trees_with_a_window(case: WindowCase, names: tuple[str, ...], device: str) -> None:
    """Only the convolution has a slot for each node. It may have more slots than the states."""
    T, N = case.max_tokens, case.N
    run, x = windowed(case, device, T)
    slots, shape = x["state"].shape[0], x["conv_state"].shape[1:]
    nodes = slots + torch.arange(N * T, device=device).view(N, T)
    x["conv_state"] = torch.randn(slots + N * T, *shape).to(device, case.dtype)
    x |= {"write_slots": nodes, "parents": tree_of(N, T).to(device)}
    x = without(x, *names, *(("write_slots",) if names else ()))
    beside, live = {**dict.fromkeys(CONV), **copied_window(x)}, run.slots >= 0
    for _ in range(2):
        step = {"positions": run.positions, "mixed_qkv": torch.randn_like(x["mixed_qkv"])}
        y, expected = layer_step(**{**x, **step}), in_a_row({**beside, **step})
        assert is_close(y, expected, live, norm_bound(x))
        run.positions = run.positions + 1
    assert all(same_bits(x[name], beside[name]) for name in POOLS if name in x)
    assert same_windows(x, beside)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", ["drafts", "drafts with a window", "tree"])
def test_compiled(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "triton")
    choose(monkeypatch, at_once=True)
    x = example(kind, device)
    copy = copied_window if "window" in x else copied
    eager, traced = copy(x), copy(x)
    call = torch.compile(
        lambda **given: 2 * layer_step(**given), fullgraph=True, backend="aot_eager"
    )
    assert same_bits(call(**traced), 2 * layer_step(**eager))
    assert all(same_bits(traced[name], eager[name]) for name in POOLS)


def example(kind: str, device: str) -> dict[str, Any]:
    if kind == "drafts":
        return accepting(CASES[0], device, 3, 3)
    if kind == "tree":
        x = CASES[0].arguments(device, 3)
        nodes = torch.arange(5, 14, device=device).view(3, 3)
        pools = {name: x[name].repeat(3, *(1,) * (x[name].dim() - 1)) for name in POOLS}
        return x | pools | {"write_slots": nodes, "parents": tree_of(3, 3).to(device)}
    run, x = windowed(WINDOWS[0], device, 3)
    accepted = torch.full_like(run.slots, 2)
    wide = x["conv_state"].repeat(1, 1, 2)
    return x | {"conv_state": wide, "num_accepted_tokens": accepted, "positions": run.positions}


@pytest.mark.gpu("a CUDA graph")
@pytest.mark.parametrize("at_once", [True, False])
def test_cuda_graph(at_once: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays with other slots, numbers and contents, and the parts in a row."""
    choose(monkeypatch, at_once=at_once)
    monkeypatch.setenv("GDN_BACKEND", "triton")
    x = without(accepting(REAL[0], device, 4, 4), *NORM)
    parts = copied(x)
    layer_step(**copied(x))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer_step(**x)
    count, N = x["state"].shape[0], x["read_slots"].shape[0]
    for i in range(200):
        slots = torch.randperm(count, device=device)[: 4 * N].view(N, 4)
        slots[i % N] = -1
        x["read_slots"].copy_(slots)
        x["num_accepted_tokens"].random_(0, 6)
        x["mixed_qkv"].normal_()
        graph.replay()
        assert same_bits(y, in_a_row(parts, norm=False))
    assert all(same_bits(x[name], parts[name]) for name in POOLS)


@pytest.mark.parametrize(
    ("kind", "changes", "error", "message"),
    [
        ("drafts", {"num_accepted_tokens": torch.ones(2).int()}, ValueError, "num_accepted_tokens"),
        ("drafts", {"num_accepted_tokens": torch.ones(3)}, ValueError, "num_accepted_tokens must"),
        ("drafts", {"read_slots": torch.zeros(3).int()}, ValueError, r"read_slots must have shape"),
        ("drafts", {"write_slots": torch.zeros(3).int()}, ValueError, "write_slots must be None"),
        ("drafts", {"parents": torch.zeros(3, 3).int()}, ValueError, "parents must be None with"),
        (
            "drafts",
            {"conv_state": torch.zeros(10, 80, 4)},
            ValueError,
            r"conv_state must have shape \[slots, D=80, at least W - 2 \+ S=5\]",
        ),
        (
            "drafts",
            {"conv_weight": torch.zeros(80, 1)},
            ValueError,
            "conv_weight must have W >= 2 with num_accepted_tokens",
        ),
        (
            "drafts",
            {"read_slots": torch.tensor([[0, 1, 2], [-1, 4, 5], [6, 7, 8]])},
            ValueError,
            "read_slots must have padding in none or in both",
        ),
        (
            "drafts",
            {"read_slots": torch.tensor([[0, 1, 2], [3, 1, 5], [6, 7, 8]])},
            ValueError,
            "read_slots must name no slot twice",
        ),
        (
            "drafts with a window",
            {"num_accepted_tokens": torch.tensor([4, 4, 4])},
            ValueError,
            "num_accepted_tokens must be 1 to 3 with window",
        ),
        (
            "drafts with a window",
            {"write_slots": torch.zeros(3).int(), "num_accepted_tokens": None},
            ValueError,
            "parents must be given with write_slots and window",
        ),
        (
            "drafts with a window",
            dict.fromkeys(CONV),
            ValueError,
            "num_accepted_tokens must be None with window and without conv_weight",
        ),
        ("tree", {"write_slots": None}, ValueError, "write_slots must have shape"),
        ("tree", {"write_slots": torch.arange(3)}, ValueError, "write_slots must have shape"),
        ("tree", {"write_slots": torch.zeros(3, 2).int()}, ValueError, "write_slots must have"),
        ("tree", {"parents": torch.zeros(3, 2).int()}, ValueError, "parents must have shape"),
        ("tree", {"parents": torch.tensor([[-1, 1, 0]] * 3)}, ValueError, "parents must be -1 or"),
        (
            "tree",
            {"read_slots": torch.tensor([5, -1, 1])},
            ValueError,
            "write_slots must keep the read slot",
        ),
        (
            "tree",
            {"write_slots": torch.arange(9).view(3, 3) + 7},
            ValueError,
            "write_slots must be less than the 15 slots",
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
