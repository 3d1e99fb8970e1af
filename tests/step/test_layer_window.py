"""`gdn_triton.layer_step` with a window, in one launch and in three."""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import BF16, FP16, FP32, same_bits
from layer_step_cases import CONV, NORM, POOLS, Case, copied, in_a_row, without
from torch import Tensor
from window_cases import Case as WindowCase
from window_cases import Decoding, cloned_window

import gdn_triton
from gdn_triton import layer_step
from gdn_triton.step import plans

pytest.importorskip("triton", reason="Triton is not installed")
window = importlib.import_module("gdn_triton.step.triton.window")
ON_GPU = pytest.mark.gpu("bf16, and real sizes")


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel, wherever a test does not choose."""
    monkeypatch.setenv("GDN_BACKEND", "triton")


WINDOWS = [
    WindowCase(H=1, HV=2, rows=6, v_first=True),
    WindowCase(H=2, HV=6, K=20, V=33, N=4, rows=7, max_tokens=2),
    WindowCase(H=1, HV=4, K=32, V=72, rows=6, dtype=FP16, pool=FP16, v_first=True),
    WindowCase(H=1, HV=1, K=16, V=40, rows=6, dtype=FP16, pool=FP16, index=torch.int64),
]
REAL_WINDOWS = [
    WindowCase(H=H, HV=HV, K=128, V=128, N=N, rows=16, dtype=BF16, pool=pool, v_first=v_first)
    for H, HV, N in ((16, 32, 3), (2, 8, 5))
    for pool in (FP32, BF16)
    for v_first in (True, False)
]


def windowed(case: WindowCase, device: str, **options: Any) -> tuple[Decoding, dict[str, Any]]:
    """Sequences of a window, and the arguments of a layer's step for them."""
    run = Decoding(replace(case, mixed=True, raw=True), device)
    of_layer = Case(
        H=case.H, HV=case.HV, K=case.K, V=case.V, N=case.N, dtype=case.dtype,
        v_first=case.v_first, pool=case.pool, **options,
    )  # fmt: skip
    x = of_layer.arguments(device)
    return run, x | {"state": run.pool, "read_slots": run.slots, "window": run.window}


def copied_window(x: dict[str, Any]) -> dict[str, Any]:
    return {**copied(x), "window": cloned_window(x["window"])}


def same_windows(x: dict[str, Any], y: dict[str, Any]) -> bool:
    """The records that were written, and the tickets, which are zeros."""
    pairs = [
        (mine, theirs)
        for name, mine in x["window"]._asdict().items()
        if isinstance(theirs := getattr(y["window"], name), Tensor)
    ]
    return not x["window"].tickets.any() and all(same_bits(a, b) for a, b in pairs)


@pytest.fixture(params=["at once", "three launches"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the forms of a step with a window, for every number of sequences."""
    most = 2**31 if request.param == "at once" else 0
    monkeypatch.setattr(window, "MOST_PROGRAMS", {4: most, 2: most})
    monkeypatch.setattr(plans, "_plans", {})


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("names", [(), ("gate", "norm_weight"), CONV, CONV + NORM])
@pytest.mark.parametrize(
    "case", [*WINDOWS, *(pytest.param(case, marks=ON_GPU) for case in REAL_WINDOWS)]
)
def test_with_a_window(case: WindowCase, names: tuple[str, ...], device: str) -> None:
    """It has the bits of its parts in the pools and the window, over folds."""
    run, x = windowed(case, device, W=3 if case.H == 2 else 4, bias=case.v_first)
    x = without(x, *names)
    beside, live = copied_window(x), run.slots >= 0
    norm = "gate" in x
    for _ in range(case.rows + 3):
        step = {"positions": run.positions, "mixed_qkv": torch.randn_like(x["mixed_qkv"])}
        assert gdn_triton.explain_call(layer_step, **{**x, **step}).chosen == "triton"
        y = layer_step(**{**x, **step})
        expected = in_a_row({**dict.fromkeys(CONV), **beside, **step}, norm=norm)
        bound = case.V * 2.0**-24 + torch.finfo(case.dtype).eps if norm else 0
        assert ((y - expected)[live].abs() <= bound * expected[live].abs()).all()
        assert (y[~live] == 0).all()
        run.positions = run.positions + 1
    assert all(same_bits(x[name], beside[name]) for name in POOLS if name in x)
    assert same_windows(x, beside)


@pytest.mark.parametrize(
    "case", [WINDOWS[0], *(pytest.param(x, marks=ON_GPU) for x in REAL_WINDOWS)]
)
def test_a_sequence_alone_with_a_window(
    case: WindowCase, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence is one launch, and the batch is three; y has the same bits too."""
    case = replace(case, N=5)
    run, x = windowed(case, device)
    # One sequence has at most 4 programs a value head.
    monkeypatch.setattr(window, "MOST_PROGRAMS", dict.fromkeys((2, 4), 4 * case.HV))
    monkeypatch.setattr(plans, "_plans", {})
    for _ in range(4):
        x |= {"positions": run.positions, "mixed_qkv": torch.randn_like(x["mixed_qkv"])}
        alone = copied_window(x)
        for name in ("mixed_qkv", "a", "b", "gate", "read_slots", "positions"):
            alone[name] = x[name][3:4]
        y, slot = layer_step(**x), int(run.slots[3])
        assert same_bits(layer_step(**alone), y[3:4])
        assert all(same_bits(alone[name][slot], x[name][slot]) for name in POOLS)
        run.positions = run.positions + 1


@pytest.mark.usefixtures("form")
def test_nan_of_a_sequence_with_a_window(device: str) -> None:
    """NaN of one sequence reaches no other one, and NaN of one head no other head."""
    run, x = windowed(replace(WINDOWS[1], N=5), device)
    x |= {"positions": run.positions}
    plain, other = copied_window(x), copied_window(x)
    y = layer_step(**plain)
    other["mixed_qkv"] = x["mixed_qkv"].clone()
    other["mixed_qkv"][0] = torch.nan
    other["mixed_qkv"][3, -1] = torch.nan  # the last value head
    other["gate"] = x["gate"].clone()
    other["gate"][1] = torch.nan
    found = layer_step(**other)
    # The gate of a skipped sequence may hold anything.
    assert found[0].isnan().all() and found[3, -1].isnan().all() and (found[1] == 0).all()
    assert same_bits(found[[2, 4]], y[[2, 4]]) and same_bits(found[3, :-1], y[3, :-1])
    assert not other["window"].tickets.any()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_with_a_window(device: str) -> None:
    run, x = windowed(WINDOWS[0], device)
    x |= {"positions": run.positions}
    eager, traced = copied_window(x), copied_window(x)
    call = torch.compile(
        lambda **given: 2 * layer_step(**given), fullgraph=True, backend="aot_eager"
    )
    assert same_bits(call(**traced), 2 * layer_step(**eager))
    assert all(same_bits(traced[name], eager[name]) for name in POOLS)
    assert same_windows(traced, eager)


@pytest.mark.gpu("a CUDA graph")
def test_cuda_graph_with_a_window(device: str) -> None:
    """A thousand replays with other slots, positions and contents."""
    run, x = windowed(replace(REAL_WINDOWS[0], N=4), device)
    count = run.pool.shape[0]
    now = torch.zeros(count, dtype=torch.int32, device=device)
    everyone = torch.arange(count, device=device, dtype=torch.int32)
    gdn_triton.restart_window(run.window, everyone, now)
    x |= {"positions": torch.zeros(4, dtype=torch.int32, device=device)}
    eager = copied_window(x)
    layer_step(**{**copied_window(x), "read_slots": torch.full_like(run.slots, -1)})
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer_step(**x)
    for i in range(1000):
        slots = torch.randperm(count, device=device)[:4].int()
        slots[i % 4] = -1
        x["read_slots"].copy_(slots)
        x["positions"].copy_(now[slots])
        x["mixed_qkv"].normal_()
        graph.replay()
        if i < 50 or i % 50 == 0:
            given = {name: x[name] for name in ("read_slots", "positions", "mixed_qkv")}
            assert same_bits(y, layer_step(**{**eager, **given}))
        else:
            layer_step(**{**eager, "read_slots": slots, "positions": x["positions"]})
        now[slots[slots >= 0].long()] += 1
    assert all(same_bits(x[name], eager[name]) for name in POOLS)
    assert same_windows(x, eager)


def test_tickets_are_judged(device: str) -> None:
    run, x = windowed(WINDOWS[0], device)
    x |= {"positions": run.positions}
    tickets = run.window.tickets
    wrong = {
        "window.tickets must have shape": tickets[:, :0],
        "window.tickets must be torch.int32": tickets.long(),
        "window.tickets must be contiguous": tickets.repeat(1, 2)[:, ::2],
    }
    for message, given in wrong.items():
        with pytest.raises(ValueError, match=message):
            layer_step(**{**x, "window": run.window._replace(tickets=given)})
    none = {**copied_window(x), "window": cloned_window(run.window)._replace(tickets=None)}
    assert same_bits(layer_step(**none), layer_step(**x))
