"""`gdn_triton.layer_step`: the bits of its parts in a row, float64, compilers, graphs, refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import BF16, FP16, FP32, FP64, assert_within_budget, same_bits
from layer_step_cases import CONV, NORM, POOLS, Case, copied, in_a_row, without
from torch import Tensor

import gdn_triton
from gdn_triton import layer_step

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel, wherever a test does not choose."""
    monkeypatch.setenv("GDN_BACKEND", "triton")


CASES = [
    Case(),
    Case(v_first=False, bias=True, sigmoid=True),
    Case(H=2, HV=6, K=20, V=33, W=2),
    Case(H=1, HV=4, K=32, V=40, W=3, dtype=FP16, pool=FP16, bias=True),
    Case(H=1, HV=1, K=64, V=64, dtype=FP16, v_first=False, conv_pool=FP32),
    Case(H=1, HV=3, K=64, V=144, dtype=FP16, pool=FP16, v_first=False),
    Case(H=1, HV=2, K=128, V=40, v_first=False),
    Case(H=1, HV=2, K=200, V=8, dtype=FP16, pool=FP16, v_first=False),
]
REAL = [
    Case(H=H, HV=HV, K=128, V=128, N=N, dtype=BF16, pool=pool, v_first=v_first)
    for H, HV, N in ((2, 4, 3), (4, 8, 50), (4, 8, 140), (2, 8, 70))
    for pool in (FP32, BF16)
    for v_first in (True, False)
]
ON_GPU = pytest.mark.gpu("bf16, and batches of all forms")


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=ON_GPU) for case in REAL)])
def test_bits_of_the_parts(case: Case, device: str) -> None:
    """Both pools, and o where there is no norm; with one y is within the order of a sum."""
    x = case.arguments(device)
    assert gdn_triton.explain_call(layer_step, **x).chosen == "triton"
    plain, parts = copied(without(x, *NORM)), copied(x)
    expected = in_a_row(parts, norm=False)
    o = layer_step(**plain)
    assert same_bits(o, expected) and o.is_contiguous()
    for name in POOLS:
        assert same_bits(plain[name], parts[name]), name
    assert not same_bits(plain["state"], x["state"])

    whole = copied(x)
    y = layer_step(**whole)
    for name in POOLS:
        assert same_bits(whole[name], parts[name]), name
    rounded = in_a_row(copied(x))
    # The sum's order moves y by at most V units of float32; then y is rounded.
    bound = case.V * 2.0**-24 + torch.finfo(case.dtype).eps
    live = x["read_slots"] >= 0
    assert ((y - rounded)[live].abs() <= bound * rounded[live].abs()).all()
    assert (y[~live] == 0).all() and (o[~live] == 0).all()


@pytest.mark.parametrize("case", CASES[:3])
def test_parts_can_be_left_out(case: Case, device: str) -> None:
    x = case.arguments(device)
    for names in (CONV, NORM, CONV + NORM):
        given, parts = (
            copied(without(x, *names)),
            copied(without(x, *CONV) if CONV[0] in names else x),
        )
        expected = in_a_row({**{name: None for name in CONV}, **parts}, norm="gate" not in names)
        live = x["read_slots"] >= 0
        torch.testing.assert_close(layer_step(**given)[live], expected[live])
        assert same_bits(given["state"], parts["state"])
    linear = copied(without(x, *NORM)) | {"activation": None}
    expected = in_a_row(copied(x) | {"activation": None}, norm=False)
    assert same_bits(layer_step(**linear), expected)


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[3]])
def test_against_float64(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = case.arguments(device)
    wide = {
        name: y.to(FP64) if isinstance(y, Tensor) and y.is_floating_point() else y
        for name, y in copied(x).items()
    }
    narrow = copied(x)
    y = layer_step(**x)
    monkeypatch.setenv("GDN_BACKEND", "reference")
    exact, computed = layer_step(**wide), layer_step(**narrow)
    live = x["read_slots"] >= 0
    results = {"y": (y[live], exact[live], computed[live])}
    results |= {name: (x[name], wide[name], narrow[name]) for name in POOLS}
    for name, (found, expected, other) in results.items():
        unit = torch.finfo(case.dtype).eps / 2
        assert_within_budget(name, found, expected, other, dtype=found.dtype, unit=unit)


@pytest.mark.parametrize("T", [1, 3, 9])
def test_several_tokens_are_the_parts(T: int, device: str) -> None:
    x = CASES[0].arguments(device, T)
    explained = gdn_triton.explain_call(layer_step, **x)
    assert explained.chosen == ("reference" if T == 9 else "triton")
    given, parts = copied(x), copied(x)
    y, expected = layer_step(**given), in_a_row(parts)
    live = x["read_slots"] >= 0
    torch.testing.assert_close(y[live], expected[live])
    assert y.shape == (3, T, 2, 24) and (y[~live] == 0).all()
    assert all(same_bits(given[name], parts[name]) for name in POOLS)


def test_a_sequence_alone(device: str) -> None:
    """In any batch, and in any slot, a sequence has the bits that it has alone."""
    case = replace(CASES[0], N=5)
    x = case.arguments(device)
    batch = copied(x)
    y = layer_step(**batch)
    for n in (0, 3, 4):
        alone = copied(x)
        slot = int(x["read_slots"][n])
        for name in ("mixed_qkv", "a", "b", "gate", "read_slots"):
            alone[name] = x[name][n : n + 1]
        assert same_bits(layer_step(**alone), y[n : n + 1])
        assert all(same_bits(alone[name][slot], batch[name][slot]) for name in POOLS)


@pytest.mark.gpu("batches whose programs have other sizes")
@pytest.mark.parametrize("pool", [FP32, BF16])
def test_a_sequence_alone_in_any_form(pool: torch.dtype, device: str) -> None:
    case = Case(H=4, HV=8, K=128, V=128, N=200, dtype=BF16, pool=pool)
    x = case.arguments(device)
    batch = copied(x)
    y = layer_step(**batch)
    for count in (1, 20, 50):
        some = copied(x)
        for name in ("mixed_qkv", "a", "b", "gate", "read_slots"):
            some[name] = x[name][:count]
        assert same_bits(layer_step(**some), y[:count])
        slots = x["read_slots"][:count]
        slots = slots[slots >= 0].long()
        assert all(same_bits(some[name][slots], batch[name][slots]) for name in POOLS)


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 3e38, 1e-30, 0.0])
def test_norms_of_extreme_heads(value: float, device: str) -> None:
    """As in the parts: of what is not finite, too large to square, or too small. Other heads and
    sequences are as they were."""
    x = CASES[0].arguments(device)
    x |= {"norm_eps": 0.5, "read_slots": torch.tensor([0, 1, 2], device=device)}
    plain = layer_step(**copied(x))
    x["state"][0, 0] = value
    given, parts = copied(x), copied(x)
    y, expected = layer_step(**given), in_a_row(parts)
    torch.testing.assert_close(y, expected, equal_nan=True)
    assert same_bits(y[1:], plain[1:]) and same_bits(y[0, 1], plain[0, 1])


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("T", [0, 2])
@pytest.mark.parametrize("names", [(), CONV, NORM])
def test_compiled(names: tuple[str, ...], T: int, device: str) -> None:
    x = without(CASES[0].arguments(device, T), *names)
    eager, traced = copied(x), copied(x)
    call = torch.compile(
        lambda **given: 2 * layer_step(**given), fullgraph=True, backend="aot_eager"
    )
    assert same_bits(call(**traced), 2 * layer_step(**eager))
    assert all(same_bits(traced[name], eager[name]) for name in POOLS if name in x)


@pytest.mark.gpu("a CUDA graph")
def test_cuda_graph(device: str) -> None:
    """Slots and contents change between replays."""
    x = Case(H=2, HV=4, K=128, V=128, N=4, dtype=BF16).arguments(device)
    eager = copied(x)
    layer_step(**copied(x))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer_step(**x)
    for i in range(20):
        slots = torch.randperm(6, device=device)[:4].int()
        slots[i % 4] = -1
        x["read_slots"].copy_(slots)
        x["mixed_qkv"].normal_()
        graph.replay()
        assert same_bits(y, layer_step(**eager))
    assert all(same_bits(x[name], eager[name]) for name in POOLS)


def test_strides_of_the_pools(device: str) -> None:
    """Channel-dense states of the convolution, and slots that lie apart, change no bit."""
    x = CASES[0].arguments(device)
    plain, other = copied(x), copied(x)
    other["conv_state"] = x["conv_state"].mT.clone().mT
    around = torch.full((5, 3, *x["state"].shape[1:]), torch.nan, device=device)
    other["state"] = around[:, 1].copy_(x["state"])
    assert same_bits(layer_step(**plain), layer_step(**other))
    assert all(same_bits(plain[name], other[name]) for name in POOLS)
    assert around[:, ::2].isnan().all()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"conv_state": None}, ValueError, "conv_state must come with conv_weight"),
        ({"conv_weight": None}, ValueError, "conv_weight must come with conv_state"),
        ({"gate": None}, ValueError, "gate must come with norm_weight"),
        ({"norm_weight": None}, ValueError, "norm_weight must come with gate"),
        (
            {"conv_weight": None, "conv_state": None, "conv_bias": torch.zeros(80)},
            ValueError,
            "conv_bias must be None without conv_weight",
        ),
        ({"mixed_qkv": torch.zeros(3, 81)}, ValueError, "mixed_qkv must have 2 \\* H \\* K"),
        ({"mixed_qkv": torch.zeros(80)}, ValueError, "mixed_qkv must have shape"),
        ({"a": torch.zeros(3, 3)}, ValueError, r"a must have shape \[N=3, HV=2\]"),
        ({"gate": torch.zeros(3, 2, 23)}, ValueError, r"gate must have shape"),
        ({"norm_weight": torch.zeros(23)}, ValueError, r"norm_weight must have shape \[V=24\]"),
        ({"conv_state": torch.zeros(5, 80, 2)}, ValueError, r"conv_state must have shape"),
        ({"conv_weight": torch.zeros(79, 4)}, ValueError, r"conv_weight must have shape \[D=80"),
        ({"conv_state": torch.zeros(5, 80, 3).half()}, ValueError, "conv_state must have a dtype"),
        ({"read_slots": torch.tensor([0, 5, 1])}, ValueError, "read_slots must be less than the 5"),
        ({"read_slots": torch.tensor([0, 1, 1])}, ValueError, "read_slots must name no slot twice"),
        ({"activation": "tanh"}, ValueError, 'activation must be "silu" or None'),
        ({"norm_activation": "tanh"}, ValueError, 'norm_activation must be "silu" or "sigmoid"'),
        ({"norm_eps": -1.0}, ValueError, "norm_eps must be finite and at least 0"),
        ({"norm_eps": None}, TypeError, "norm_eps must be a real number"),
        ({"state_v_first": 1}, TypeError, "state_v_first must be True or False"),
        ({"positions": torch.zeros(3).int()}, ValueError, "positions must be None without window"),
        ({"counters": torch.zeros(5, 2).int()}, ValueError, r"counters must have shape \[slots=5"),
        ({"counters": torch.zeros(5, 1)}, ValueError, "counters must be torch.int32"),
    ],
)
def test_refusals(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    x = CASES[0].arguments("cpu")
    before = copied(x)
    with pytest.raises(error, match=message):
        layer_step(**{**x, **changes})
    assert all(same_bits(x[name], before[name]) for name in POOLS)


def test_a_gradient_is_refused(device: str) -> None:
    x = CASES[0].arguments(device)
    x["norm_weight"].requires_grad_()
    with pytest.raises(NotImplementedError, match="layer_step updates states in place"):
        layer_step(**x)
    with torch.no_grad():
        layer_step(**x)
