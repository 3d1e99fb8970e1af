"""`gdn_triton.layer_step` of several tokens a sequence, in one launch and in three."""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import BF16, FP16, FP32, same_bits
from layer_step_cases import CONV, NORM, POOLS, Case, copied, in_a_row, without
from test_layer_window import copied_window, same_windows
from torch import Tensor
from window_cases import Case as WindowCase
from window_cases import Decoding

from gdn_triton import layer_step
from gdn_triton.step import plans

pytest.importorskip("triton", reason="Triton is not installed")
tokens_plan = importlib.import_module("gdn_triton.step.triton.tokens_plan")
ON_GPU = pytest.mark.gpu("bf16, and real sizes")
PARTS = [(), ("gate", "norm_weight"), CONV, CONV + NORM]


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels, wherever a test does not choose."""
    monkeypatch.setenv("GDN_BACKEND", "triton")


def choose(monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    """One launch, or three, for every number of sequences and of tokens."""
    most = 2**31 if at_once else 0
    for name in ("MOST_PROGRAMS", "MOST_DRAFTS", "MOST_ONE_TOKEN"):
        monkeypatch.setattr(tokens_plan, name, {4: most, 2: most})
    monkeypatch.setattr(tokens_plan, "MOST_WINDOW_PROGRAMS", dict.fromkeys((2, 4), (8, most)))
    monkeypatch.setattr(plans, "_plans", {})


@pytest.fixture(params=["at once", "three launches"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, request.param == "at once")


CASES = [
    Case(),
    Case(H=2, HV=6, K=20, V=33, W=2),
    Case(H=1, HV=4, K=32, V=40, W=3, dtype=FP16, pool=FP16, bias=True, sigmoid=True),
    Case(H=2, HV=2, K=16, V=24, dtype=FP16, conv_pool=FP32),
]
REAL = [
    Case(H=H, HV=HV, K=128, V=128, N=N, dtype=BF16, pool=pool)
    for H, HV, N in ((2, 4, 3), (4, 8, 20))
    for pool in (FP32, BF16)
]


def arguments(case: Case, device: str, T: int) -> dict[str, Any]:
    counters = torch.zeros(case.N + 2, case.H, dtype=torch.int32, device=device)
    return case.arguments(device, T) | {"counters": counters}


def norm_bound(x: dict[str, Any]) -> float:
    """The relative difference that the order of the norm's sum makes, and one rounding of y."""
    if x.get("gate") is None:
        return 0.0
    return x["gate"].shape[-1] * 2.0**-24 + torch.finfo(x["mixed_qkv"].dtype).eps


def is_close(y: Tensor, expected: Tensor, live: Tensor, bound: float) -> bool:
    near = ((y - expected)[live].abs() <= bound * expected[live].abs()).all()
    return bool(near) and bool((y[~live] == 0).all())


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("T", [1, 3, 4, 8])
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=ON_GPU) for case in REAL)])
def test_bits_of_the_parts(case: Case, T: int, device: str) -> None:
    """Both pools, and o where there is no norm; with one y is within the order of a sum."""
    x = arguments(case, device, T)
    live = x["read_slots"] >= 0
    for names in PARTS if T == 3 else PARTS[:2]:
        given = copied(without(x, *names))
        parts = {**dict.fromkeys(CONV), **copied(without(x, "counters", *names))}
        for _ in range(2):
            y, expected = layer_step(**given), in_a_row(parts, norm="gate" in given)
            assert is_close(y, expected, live, norm_bound(given))
        assert all(same_bits(given[name], parts[name]) for name in POOLS if name in given)
        assert not x["counters"].any()


WINDOWS = [
    WindowCase(H=1, HV=2, V=48, rows=8, max_tokens=3, v_first=True),
    WindowCase(H=2, HV=6, K=20, V=33, N=4, rows=10, max_tokens=4),
    WindowCase(H=1, HV=4, K=32, V=80, rows=16, max_tokens=8, dtype=FP16, pool=FP16, v_first=True),
]
REAL_WINDOWS = [
    WindowCase(
        H=H, HV=HV, K=128, V=128, N=N, rows=16, max_tokens=D, dtype=BF16, pool=pool, v_first=True
    )
    for H, HV, N in ((16, 32, 3), (4, 8, 5))
    for pool in (FP32, BF16)
    for D in (4, 8)
]


def windowed(case: WindowCase, device: str, T: int) -> tuple[Decoding, dict[str, Any]]:
    """Sequences of a window, and the arguments of a layer's step of T tokens for them."""
    run = Decoding(replace(case, mixed=True, raw=True), device)
    of_layer = Case(
        H=case.H, HV=case.HV, K=case.K, V=case.V, N=case.N, dtype=case.dtype, pool=case.pool,
        v_first=case.v_first, W=3 if case.H == 2 else 4,
    )  # fmt: skip
    x = of_layer.arguments(device, T)
    return run, x | {"state": run.pool, "read_slots": run.slots, "window": run.window}


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("names", PARTS)
@pytest.mark.parametrize(
    "case", [*WINDOWS, *(pytest.param(case, marks=ON_GPU) for case in REAL_WINDOWS)]
)
def test_with_a_window(case: WindowCase, names: tuple[str, ...], device: str) -> None:
    """It has the bits of its parts in the pools and the window, over folds."""
    T = case.max_tokens
    run, x = windowed(case, device, T)
    x = without(x, *names)
    beside, live = copied_window(x), run.slots >= 0
    for _ in range(4):
        step = {"positions": run.positions, "mixed_qkv": torch.randn_like(x["mixed_qkv"])}
        y = layer_step(**{**x, **step})
        expected = in_a_row({**dict.fromkeys(CONV), **beside, **step}, norm="gate" in x)
        assert is_close(y, expected, live, norm_bound(x))
        # Not all tokens need to be accepted.
        run.positions = run.positions + T - 1
    assert all(same_bits(x[name], beside[name]) for name in POOLS if name in x)
    assert same_windows(x, beside)


@pytest.mark.parametrize("pool", [FP32, pytest.param(BF16, marks=ON_GPU)])
def test_a_sequence_alone(pool: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of three launches gives each sequence the bits of one launch."""
    case = replace(CASES[0], N=4)
    if pool == BF16:
        case = Case(H=4, HV=8, K=128, V=128, N=4, dtype=BF16, pool=pool)
    x = arguments(case, device, 3)
    batch = copied(x)
    choose(monkeypatch, at_once=False)
    y = layer_step(**batch)
    choose(monkeypatch, at_once=True)
    for n in (0, 2, 3):
        alone, slot = copied(x), int(x["read_slots"][n])
        for name in ("mixed_qkv", "a", "b", "gate", "read_slots"):
            alone[name] = x[name][n : n + 1]
        assert same_bits(layer_step(**alone), y[n : n + 1])
        assert all(same_bits(alone[name][slot], batch[name][slot]) for name in POOLS)


@pytest.mark.usefixtures("form")
def test_nan_of_a_sequence(device: str) -> None:
    """NaN of one sequence reaches no other one, and NaN of one head no other head."""
    x = arguments(replace(CASES[1], N=5), device, 3)
    plain, other = copied(x), copied(x)
    y = layer_step(**plain)
    other["mixed_qkv"] = x["mixed_qkv"].clone()
    other["mixed_qkv"][0, 0] = torch.nan
    other["mixed_qkv"][3, 0, -1] = torch.nan  # the last value head
    other["gate"] = x["gate"].clone()
    other["gate"][1] = torch.nan
    found = layer_step(**other)
    # The gate of a skipped sequence may hold anything.
    assert found[0].isnan().all() and found[3, :, -1].isnan().any() and (found[1] == 0).all()
    assert same_bits(found[[2, 4]], y[[2, 4]]) and same_bits(found[3, :, :-1], y[3, :, :-1])
    assert not other["counters"].any()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("has_window", [False, True])
def test_compiled(has_window: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, at_once=True)
    copy = copied_window if has_window else copied
    if has_window:
        run, x = windowed(WINDOWS[0], device, 2)
        x |= {"positions": run.positions}
    else:
        x = arguments(CASES[0], device, 2)
    eager, traced = copy(x), copy(x)
    call = torch.compile(
        lambda **given: 2 * layer_step(**given), fullgraph=True, backend="aot_eager"
    )
    assert same_bits(call(**traced), 2 * layer_step(**eager))
    assert all(same_bits(traced[name], eager[name]) for name in POOLS)


@pytest.mark.gpu("a CUDA graph")
@pytest.mark.parametrize("T", [2, 4])
def test_cuda_graph(T: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand replays with other slots and contents, in one launch, and the parts in a row."""
    choose(monkeypatch, at_once=True)
    x = arguments(Case(H=16, HV=32, K=128, V=128, N=4, dtype=BF16), device, T)
    eager = copied(x)
    layer_step(**copied(x))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer_step(**x)
    choose(monkeypatch, at_once=False)
    for i in range(1000):
        slots = torch.randperm(6, device=device)[:4].int()
        slots[i % 4] = -1
        x["read_slots"].copy_(slots)
        x["mixed_qkv"].normal_()
        graph.replay()
        expected = layer_step(**eager)
        if i < 50 or i % 50 == 0:
            assert same_bits(y, expected)
    assert all(same_bits(x[name], eager[name]) for name in POOLS)
    assert not x["counters"].any()


def test_counters_and_a_window(device: str) -> None:
    run, x = windowed(WINDOWS[0], device, 2)
    counters = torch.zeros(run.pool.shape[0], 1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="counters must be None with a window"):
        layer_step(**x, positions=run.positions, counters=counters)
