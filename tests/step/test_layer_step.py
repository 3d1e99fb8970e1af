"""`gdn_triton.layer_step`: the bits of its parts in a row, float64, compilers, graphs, refusals."""

import importlib
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers import BF16, FP16, FP32, FP64, assert_within_budget, same_bits
from torch import Tensor
from window_cases import Case as WindowCase
from window_cases import Decoding, cloned_window

import gdn_triton
from gdn_triton import causal_conv1d_update, layer_step, recurrent_step, rms_norm_gated
from gdn_triton.step import plans

pytest.importorskip("triton", reason="Triton is not installed")
window = importlib.import_module("gdn_triton.step.triton.window")

POOLS = ("state", "conv_state")


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel, wherever a test does not choose."""
    monkeypatch.setenv("GDN_BACKEND", "triton")


@dataclass(frozen=True)
class Case:
    """The second sequence is padding, if there are three."""

    H: int = 1
    HV: int = 2
    K: int = 16
    V: int = 24
    N: int = 3
    W: int = 4
    dtype: torch.dtype = FP32
    pool: torch.dtype = FP32
    conv_pool: torch.dtype | None = None
    v_first: bool = True
    bias: bool = False
    sigmoid: bool = False

    @property
    def of_conv(self) -> torch.dtype:
        return self.conv_pool or self.dtype

    @property
    def D(self) -> int:
        return 2 * self.H * self.K + self.HV * self.V

    def arguments(self, device: str, T: int = 0) -> dict[str, Any]:
        """T: tokens of a sequence; 0: one, without a dimension for it."""
        torch.manual_seed(0)
        lead = (self.N, T) if T else (self.N,)

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(*shape).to(device, dtype)

        heads = (self.V, self.K) if self.v_first else (self.K, self.V)
        slots = torch.randperm(self.N + 2)[: self.N].int()
        if self.N > 2:
            slots[1] = -1
        # Views whose rows and heads lie apart, as those of a projection do.
        a, b = normal(*lead, 2, self.HV).unbind(-2)
        gate = normal(*lead, self.HV, 2 * self.V)[..., : self.V]
        return {
            "mixed_qkv": normal(*lead, self.D + 8)[..., 8:],
            "a": a,
            "b": b,
            "A_log": normal(self.HV, dtype=FP32) / 2,
            "dt_bias": normal(self.HV, dtype=FP32),
            "state": normal(self.N + 2, self.HV, *heads, dtype=self.pool),
            "read_slots": slots.to(device),
            "conv_state": normal(
                self.N + 2, self.D, self.W - 1, dtype=self.conv_pool or self.dtype
            ),
            "conv_weight": normal(self.D, self.W),
            "conv_bias": normal(self.D) if self.bias else None,
            "gate": gate,
            "norm_weight": normal(self.V),
            "norm_activation": "sigmoid" if self.sigmoid else "silu",
            "norm_eps": 1e-5,
            "state_v_first": self.v_first,
        }


def copied(x: dict[str, Any]) -> dict[str, Any]:
    return {**x, **{name: x[name].clone() for name in POOLS if x.get(name) is not None}}


def in_a_row(x: dict[str, Any], norm: bool = True) -> Tensor:
    """The public functions one after the other, without what makes skipped rows 0 after a norm."""
    mixed, slots = x["mixed_qkv"], x["read_slots"]
    if x.get("conv_weight") is not None:
        mixed = causal_conv1d_update(
            mixed,
            x["conv_weight"],
            x["conv_bias"],
            x.get("activation", "silu"),
            state=x["conv_state"],
            read_slots=slots,
        )
    gates = {name: x[name] for name in ("a", "b", "A_log", "dt_bias")}
    rest = {name: x[name] for name in ("window", "positions") if name in x}
    o = recurrent_step(
        x["state"],
        slots,
        mixed_qkv=mixed,
        **gates,
        **rest,
        use_qk_l2norm_in_kernel=True,
        state_v_first=x["state_v_first"],
    )
    if not norm:
        return o
    return rms_norm_gated(o, x["gate"], x["norm_weight"], x["norm_eps"], x["norm_activation"])


def without(x: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: y for name, y in x.items() if name not in names}


NORM = ("gate", "norm_weight", "norm_eps", "norm_activation")
CONV = ("conv_weight", "conv_bias", "conv_state")

CASES = [
    Case(),
    Case(v_first=False, bias=True, sigmoid=True),
    Case(H=2, HV=6, K=20, V=33, W=2),
    Case(H=1, HV=4, K=32, V=40, W=3, dtype=FP16, pool=FP16, bias=True),
    Case(H=1, HV=1, K=64, V=64, dtype=FP16, v_first=False, conv_pool=FP32),
    Case(H=1, HV=3, K=64, V=144, dtype=FP16, pool=FP16, v_first=False),
]
REAL = [
    Case(H=H, HV=HV, K=128, V=128, N=N, dtype=BF16, pool=pool, v_first=v_first)
    for H, HV, N in ((2, 4, 3), (4, 8, 50), (4, 8, 90), (2, 8, 70))
    for pool in (FP32, BF16)
    for v_first in (True, False)
]
ON_GPU = pytest.mark.gpu("bf16, and batches of all forms")


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=ON_GPU) for case in REAL)])
def test_bits_of_the_parts(case: Case, device: str) -> None:
    """Both pools, and o where there is no norm; with one y is within the order of a sum."""
    x = case.arguments(device)
    # The parts run for narrow key-first states; explain says so by the name of the reference.
    chosen = "triton" if case.v_first or case.pool.itemsize == 4 else "reference"
    assert gdn_triton.explain_call(layer_step, **x).chosen == chosen
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


@pytest.mark.parametrize("T", [1, 3])
def test_several_tokens_are_the_parts(T: int, device: str) -> None:
    x = CASES[0].arguments(device, T)
    explained = gdn_triton.explain_call(layer_step, **x)
    assert explained.chosen == ("triton" if T == 1 else "reference")
    given, parts = copied(x), copied(x)
    y, expected = layer_step(**given), in_a_row(parts)
    live = x["read_slots"] >= 0
    torch.testing.assert_close(y[live], expected[live])
    assert y.shape == (3, T, 2, 24) and (y[~live] == 0).all()
    assert all(same_bits(given[name], parts[name]) for name in POOLS)


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
