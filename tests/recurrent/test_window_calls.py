"""Calls with a window: two backends on one window, compilers, CUDA graphs, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import BF16, FP16, FP32, same_bits
from torch import Tensor
from window_cases import Case, Decoding, cloned_window

import gdn_triton
from gdn_triton import StepWindow, fold_window, make_window, recurrent_step, restart_window

pytest.importorskip("triton", reason="Triton is not installed")

DRAFTS = Case(rows=7, max_tokens=3)


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel, wherever a test does not choose."""
    monkeypatch.setenv("GDN_BACKEND", "triton")


# ------------------------------------------------------------------------------ the same everywhere


@pytest.mark.parametrize("v_first", [False, True])
def test_backends_continue_each_other(
    v_first: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps, folds and restarts in turn on one window: the heads that memory holds, and up to which
    token, are the same for both."""
    run = Decoding(replace(DRAFTS, v_first=v_first), device)
    for i in range(14):
        monkeypatch.setenv("GDN_BACKEND", "reference" if i % 3 == 1 else "triton")
        x = run.tokens(1 + i % 3)
        beside = {"state": run.pool.clone(), "window": cloned_window(run.window)}
        given = run.arguments(x)
        run.step(x, torch.randint(1, 2 + i % 3, (DRAFTS.N,)).tolist())
        monkeypatch.setenv("GDN_BACKEND", "triton" if i % 3 == 1 else "reference")
        recurrent_step(**{**given, **beside})
        torch.testing.assert_close(beside["state"], run.pool)
        for mine, theirs in zip(run.window[:5], beside["window"][:5], strict=True):
            torch.testing.assert_close(mine, theirs, equal_nan=True)
        if i % 5 == 4:
            fold_window(run.pool, run.window, run.slots, run.positions, state_v_first=v_first)
            run.check_states()
    run.finish()


def test_without_a_window_nothing_has_changed(device: str) -> None:
    """A call that names no window is the call of a step that has none."""
    run = Decoding(DRAFTS, device)
    x = run.arguments(run.tokens(2)) | {"window": None, "positions": None}
    plain = {name: y for name, y in x.items() if name not in ("window", "positions")}
    other = run.pool.clone()
    assert same_bits(recurrent_step(**x), recurrent_step(**{**plain, "state": other}))
    assert same_bits(run.pool, other)


# ---------------------------------------------------------------------------------------- compilers


def windowed(**x: Any) -> Any:
    return recurrent_step(**x)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("backend_name", "mixed", "out"),
    [("triton", True, False), ("triton", False, True), ("reference", True, True)],
)
def test_compiled(
    backend_name: str, mixed: bool, out: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several compiled calls write the same values in place as eager calls."""
    monkeypatch.setenv("GDN_BACKEND", backend_name)
    run = Decoding(replace(DRAFTS, mixed=mixed, raw=mixed), device)
    eager = {"state": run.pool.clone(), "window": cloned_window(run.window)}
    call = torch.compile(windowed, fullgraph=True, backend="aot_eager")
    for _ in range(4):
        given = run.arguments(run.tokens(2))
        if out:
            given["out"] = torch.full((3, 2, 3, run.case.V), torch.nan, device=device)
        expected = recurrent_step(**{**given, **eager, "out": None})
        found = call(**given)
        assert same_bits(found, expected)
        assert not out or same_bits(given["out"], expected)
        run.positions = run.positions + 2
    assert same_bits(run.pool, eager["state"])
    for mine, theirs in zip(run.window[:5], eager["window"][:5], strict=True):
        assert same_bits(mine, theirs)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_folds(device: str) -> None:
    run = Decoding(DRAFTS, device)
    run.step(run.tokens(3))
    state, window = run.pool.clone(), cloned_window(run.window)
    fold_window(state, window, run.slots, run.positions)

    def fold(state: Tensor, window: StepWindow, slots: Tensor, positions: Tensor) -> Tensor:
        fold_window(state, window, slots, positions)
        return state.sum()

    def restart(window: StepWindow, slots: Tensor, positions: Tensor) -> Tensor:
        restart_window(window, slots, positions)
        return window.start + 0

    compiled = torch.compile(fold, fullgraph=True, backend="aot_eager")
    compiled(run.pool, run.window, run.slots, run.positions)
    assert same_bits(run.pool, state) and torch.equal(run.window.start, window.start)
    restart_window(window, run.slots, run.positions + 5)
    compiled = torch.compile(restart, fullgraph=True, backend="aot_eager")
    start = compiled(run.window, run.slots, run.positions + 5)
    assert torch.equal(start, window.start) and torch.equal(run.window.start, window.start)


@pytest.mark.usefixtures("fresh_compiler")
def test_errors_while_tracing(device: str) -> None:
    run = Decoding(DRAFTS, device)
    call = torch.compile(windowed, fullgraph=True, backend="aot_eager")
    given = run.arguments(run.tokens(1))
    with pytest.raises(Exception, match="positions must be None without window"):
        call(**{**given, "window": None})
    with pytest.raises(Exception, match="write_slots must be None with window"):
        call(**{**given, "write_slots": run.slots})


@pytest.mark.gpu("a CUDA graph")
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("T", [1, 3])
def test_cuda_graph(T: int, v_first: bool, device: str) -> None:
    """Slots and positions change between replays; the window goes on from the last replay."""
    case = Case(K=128, V=128, H=2, HV=4, N=4, rows=16, max_tokens=3, dtype=BF16, v_first=v_first)
    run = Decoding(replace(case, raw=True, mixed=True), device)
    eager = {"state": run.pool.clone(), "window": cloned_window(run.window)}
    given = run.arguments(run.tokens(T))
    out = torch.empty(4, T, 4, 128, dtype=BF16, device=device)
    nobody = torch.full_like(run.slots, -1)
    recurrent_step(**{**given, "read_slots": nobody}, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recurrent_step(**given, out=out)
    place = torch.zeros(6, dtype=torch.int32, device=device)
    restart_window(run.window, torch.arange(6, device=device), place)
    restart_window(eager["window"], torch.arange(6, device=device), place)
    for i in range(40):
        slots = torch.randperm(6, device=device)[:4].int()
        slots[i % 4] = -1
        given["read_slots"].copy_(slots)
        given["positions"].copy_(place[slots.clamp(min=0).long()])
        given["mixed_qkv"].normal_()
        graph.replay()
        expected = recurrent_step(**{**given, **eager})
        assert same_bits(out, expected)
        assert same_bits(run.pool, eager["state"])
        accepted = torch.randint(1, T + 1, (4,), device=device, dtype=torch.int32)
        place[slots[slots >= 0].long()] += accepted[slots >= 0]


# ------------------------------------------------------------------------------------------- errors


def arguments() -> dict[str, Any]:
    q, v = torch.zeros(3, 2, 8), torch.zeros(3, 4, 6)
    return {
        "state": torch.zeros(5, 4, 8, 6),
        "read_slots": torch.arange(3),
        "q": q,
        "k": q,
        "v": v,
        "g": v[..., 0],
        "beta": v[..., 0],
        "window": make_window(5, 2, 4, 8, 6, FP32, "cpu", rows=4, max_tokens=2),
        "positions": torch.zeros(3, dtype=torch.int32),
    }


TWO = torch.tensor([0, 2, 3, 3])
PACKED = {"cu_seqlens": TWO}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"window": None}, ValueError, "positions must be None without window, got Tensor"),
        ({"positions": None}, TypeError, "positions must be a torch.Tensor with window, got None"),
        ({"positions": [0, 0, 0]}, TypeError, "positions must be a torch.Tensor or None, got list"),
        ({"positions": torch.zeros(2).int()}, ValueError, r"positions must have shape \[N=3\]"),
        ({"positions": torch.zeros(3)}, ValueError, "positions must be int32 or int64"),
        (
            {"positions": torch.zeros(3, device="meta").int()},
            ValueError,
            "positions must be on the device of q",
        ),
        ({"window": tuple()}, TypeError, "window must be a gdn_triton.StepWindow, got tuple"),
        ({"write_slots": torch.arange(3)}, ValueError, "write_slots must be None with window"),
        (
            {
                "num_accepted_tokens": torch.ones(3).int(),
                "read_slots": torch.arange(3)[:, None],
            },
            ValueError,
            "num_accepted_tokens must be None with window",
        ),
        (
            {name: torch.zeros(3, 3, *shape) for name, shape in
             (("q", (2, 8)), ("k", (2, 8)), ("v", (4, 6)), ("g", (4,)), ("beta", (4,)))},
            ValueError,
            "q must have at most window.max_tokens=2 tokens a sequence, got T=3",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 3, 3, 3])},
            ValueError,
            "cu_seqlens must give a sequence at most window.max_tokens=2 tokens, got 3 for sequ",
        ),
        ({"positions": torch.tensor([0, -1, 0])}, ValueError, "positions must be at least 0 and b"),
        ({"positions": torch.tensor([2**30, 0, 0])}, ValueError, "positions must be .* below 107"),
        ({"positions": torch.tensor([0, 0, 3])}, ValueError, "positions must be 1 to window.max_"),
        ({"read_slots": torch.tensor([0, 1, 0])}, ValueError, "read_slots must name no slot twice"),
        ({"read_slots": torch.tensor([0, 1, 5])}, ValueError, "read_slots must be less than the 5"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["triton", "reference"])
def test_wrong_calls(
    name: str,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GDN_BACKEND", name)
    x = {**arguments(), **changes}
    before = [y.clone() for y in tensors(x)]
    for _ in range(2):
        with pytest.raises(error, match=message):
            recurrent_step(**x)
    assert all(same_bits(y, kept) for y, kept in zip(tensors(x), before, strict=True))


def tensors(x: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call might write."""
    window = x["window"] or ()
    return [x["state"], *(y for y in window if isinstance(y, Tensor))]


@pytest.mark.parametrize(
    ("part", "error", "message"),
    [
        ({"u": [0]}, TypeError, "window.u must be a torch.Tensor"),
        ({"u": torch.zeros(5, 4, 4)}, ValueError, "window.u must have 4 dimensions"),
        ({"u": torch.zeros(4, 4, 4, 6)}, ValueError, "window.u must have shape .*slots=5"),
        ({"u": torch.zeros(5, 4, 4, 6).half()}, ValueError, "window.u must be torch.float32"),
        ({"u": torch.zeros(5, 4, 6, 4).mT}, ValueError, "window.u must have contiguous slots"),
        (
            {"u": torch.zeros(1, 4, 4, 6).expand(5, 4, 4, 6)},
            ValueError,
            "window.u must have memory of",
        ),
        ({"k": torch.zeros(5, 4, 4, 8)}, ValueError, r"window.k must have shape .*H=2"),
        ({"k": torch.zeros(5, 4, 2, 8).half()}, ValueError, "window.k must be .*32, as k is"),
        ({"g": torch.zeros(5, 3, 4)}, ValueError, "window.g must have shape .*R=4"),
        ({"g": torch.zeros(5, 4, 4).double()}, ValueError, "window.g must be torch.float32"),
        ({"calls": torch.zeros(5, 4)}, ValueError, "window.calls must be torch.int32"),
        ({"calls": torch.zeros(5, 4).long()}, ValueError, "window.calls must be torch.int32"),
        (
            {"calls": torch.zeros(5, 8).int()[:, ::2]},
            ValueError,
            "window.calls must have contiguous slots",
        ),
        ({"start": torch.zeros(3).int()}, ValueError, "window.start must have shape"),
        ({"start": torch.full((5,), 3).int()}, ValueError, "positions must not be less than wind"),
        ({"start": torch.zeros(5, device="meta").int()}, ValueError, "window.start must be on the"),
        ({"max_tokens": 3}, ValueError, "window.max_tokens must be .*half of the R=4 rows"),
        ({"max_tokens": 0}, ValueError, "window.max_tokens must be at least 1"),
        ({"max_tokens": True}, TypeError, "window.max_tokens must be an int, got True"),
        ({"max_tokens": 1.0}, TypeError, "window.max_tokens must be an int, got 1.0"),
    ],
)
def test_wrong_windows(part: dict[str, Any], error: type[Exception], message: str) -> None:
    x = arguments()
    x["window"] = x["window"]._replace(**part)
    with pytest.raises(error, match=message):
        recurrent_step(**x)


@pytest.mark.parametrize(
    ("part", "error", "message"),
    [
        ({"u": [0]}, TypeError, "window.u must be a torch.Tensor"),
        ({"u": torch.zeros(5, 4, 4)}, ValueError, "window.u must have 4 dimensions"),
        ({"u": torch.zeros(5, 4, 4, 6).half()}, ValueError, "window.u must be torch.float32"),
        ({"u": torch.zeros(5, 4, 6, 4).mT}, ValueError, "window.u must have contiguous slots"),
        ({"k": torch.zeros(5, 4, 3, 8)}, ValueError, "window.k must have heads of which the HV=4"),
        ({"k": torch.zeros(5, 3, 2, 8)}, ValueError, "window.k must have shape .*R=4"),
        ({"k": torch.zeros(5, 4, 2, 8).int()}, ValueError, "window.k must be float16, bfloat16"),
        ({"k": torch.zeros(5, 4, 2, 7)}, ValueError, "state must have shape .*K=7"),
        ({"calls": torch.zeros(5, 4)}, ValueError, "window.calls must be torch.int32"),
        ({"start": torch.zeros(3).int()}, ValueError, "window.start must have shape"),
        ({"start": torch.full((5,), 3).int()}, ValueError, "positions must not be less than wind"),
        ({"max_tokens": 3}, ValueError, "window.max_tokens must be .*half of the R=4 rows"),
    ],
)
def test_wrong_windows_of_folds(part: dict[str, Any], error: type[Exception], message: str) -> None:
    x = arguments()
    with pytest.raises(error, match=message):
        fold_window(x["state"], x["window"]._replace(**part), x["read_slots"], x["positions"])
    assert not x["state"].any()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"state": None}, TypeError, "state must be a torch.Tensor, got NoneType"),
        ({"state": torch.zeros(5, 4, 8, 7)}, ValueError, "state must have shape"),
        ({"state": torch.zeros(5, 4, 8, 6).int()}, ValueError, "state must be float16"),
        ({"window": None}, TypeError, "window must be a gdn_triton.StepWindow, got NoneType"),
        ({"slots": torch.zeros(3, 1).int()}, ValueError, "slots must have 1 dimensions"),
        ({"slots": torch.zeros(3)}, ValueError, "slots must be int32 or int64"),
        ({"slots": torch.tensor([0, 5, 1])}, ValueError, "slots must be less than the 5 slots"),
        ({"slots": torch.tensor([0, 0, 1])}, ValueError, "slots must name no slot twice"),
        ({"positions": torch.zeros(2).int()}, ValueError, "positions must have shape"),
        ({"positions": torch.tensor([-1, 0, 0])}, ValueError, "positions must be at least 0"),
        ({"skip": "none"}, ValueError, "skip must be one of"),
        ({"state_v_first": 1}, TypeError, "state_v_first must be True or False"),
    ],
)
@pytest.mark.parametrize("function", [fold_window, restart_window])
def test_wrong_folds(
    function: Any, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    x = {**arguments(), "slots": torch.arange(3), **changes}
    names = ["window", "slots", "positions"]
    if function is fold_window:
        names += ["state", "state_v_first"]
    elif set(changes) & {"state", "state_v_first"}:
        return
    x = {name: x[name] for name in (*names, "skip") if name in x}
    with pytest.raises(error, match=message):
        function(**x)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rows": 3, "max_tokens": 2}, ValueError, "max_tokens must be at most half of rows=3"),
        ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, got 0"),
        ({"slots": -1}, ValueError, "slots must be at least 0, got -1"),
        ({"K": 1.5}, TypeError, "K must be an int, got 1.5"),
        ({"H": 2, "HV": 3}, ValueError, "HV must be a multiple of H=2, got 3"),
        ({"dtype": torch.int32}, ValueError, "dtype must be float16, .*, got torch.int32"),
        ({"dtype": None}, TypeError, "dtype must be a torch.dtype, got None"),
    ],
)
def test_wrong_sizes(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    sizes = {"slots": 2, "H": 1, "HV": 1, "K": 4, "V": 4, "device": "cpu"}
    with pytest.raises(error, match=message):
        make_window(**{**sizes, **changes})


def test_no_gradient() -> None:
    x = arguments()
    x["window"] = x["window"]._replace(u=x["window"].u.requires_grad_())
    with pytest.raises(NotImplementedError, match="has no gradient"):
        recurrent_step(**x)
    with pytest.raises(NotImplementedError, match="fold_window updates states in place"):
        fold_window(x["state"], x["window"], x["read_slots"], x["positions"])


def test_explained(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """By the backends of a step, and for the dtypes of this call."""
    x = {name: y.to(device) for name, y in arguments().items() if name != "window"}
    x["window"] = make_window(5, 2, 4, 8, 6, FP32, device, rows=4, max_tokens=2)
    explain = gdn_triton.explain_call
    assert explain(recurrent_step, **x).chosen == "triton"
    x["state"] = x["state"].double()
    assert explain(recurrent_step, **x).chosen is None
    monkeypatch.setenv("GDN_BACKEND", "auto")
    folded = explain(fold_window, x["state"], x["window"], x["read_slots"], x["positions"])
    assert folded.chosen == "reference" and "float64" in str(folded.reasons["triton"])
    assert explain(restart_window, x["window"], x["read_slots"], x["positions"]).chosen == "triton"
    half = {**x, "k": x["k"].to(FP16)}
    with pytest.raises(ValueError, match=r"window.k must be torch.float16, as k is"):
        explain(recurrent_step, **half)
