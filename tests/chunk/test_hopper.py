"""The Gluon forward for compute capability 9.0, on such a GPU: its results against the float64
recurrence. Triton's interpreter runs no Gluon: a CPU tests the choice alone
(test_hopper_choice.py)."""

from typing import Any

import pytest
import torch
from chunk_cases import call_with_state, check
from helpers import BF16, FP16, Case, Inputs, cases, make_inputs, pieces, same_bits
from hopper_cases import (
    MANY_KEYS,
    MANY_KEYS_PACKED,
    ODD_STRIDES,
    ONE_TO_ONE,
    ONE_TOKEN,
    PACKED,
    SEVERAL,
    SMALL,
    SMALL_PACKED,
    TAIL,
    WIDE,
    hopper,
    hopper_case,
    run_by_gluon,
)
from torch import Tensor

from gdn_triton import chunk_gated_delta_rule
from gdn_triton.chunk.triton.hopper.segments import (
    Cut,
)


@pytest.fixture
def gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    run_by_gluon(monkeypatch)


CASES = [
    TAIL,
    ONE_TOKEN,
    PACKED,
    WIDE,
    ODD_STRIDES,
    SMALL,
    SMALL_PACKED,
    SEVERAL,
    ONE_TO_ONE,
    MANY_KEYS,
    MANY_KEYS_PACKED,
]


@hopper
@pytest.mark.usefixtures("gluon")
@pytest.mark.parametrize("case", cases(CASES))
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_regimes(case: Case, v_first: bool, dtype: torch.dtype) -> None:
    check(case, make_inputs(case, dtype, "cuda"), "cuda", state_v_first=v_first)


@hopper
@pytest.mark.usefixtures("gluon")
@pytest.mark.parametrize("case", cases([PACKED, CASES[0], MANY_KEYS_PACKED]))
def test_options(case: Case) -> None:
    x = make_inputs(case, BF16, "cuda", raw=True)
    heads = torch.linspace(-1, 1, case.HV, device="cuda")
    options: dict[str, Any] = {"l2norm": True, "sigmoid": True, "negative": True, "scale": 0.3}
    check(case, x, "cuda", A_log=heads, dt_bias=heads / 2, **options)
    check(case, x, "cuda", A_log=heads, **{**options, "with_state": False})


@hopper
@pytest.mark.usefixtures("gluon")
@pytest.mark.parametrize("case", cases([*CASES[:4], *CASES[5:8]]))
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_norm(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel whose blocks have two states the norm has the bits of the norm apart."""
    from gdn_triton.chunk.triton.hopper import launch

    monkeypatch.setattr(launch, "norm_inside", lambda *_: True)
    monkeypatch.setattr(launch, "shape_of_whole", lambda *_: launch.TWO)
    x = make_inputs(case, dtype, "cuda")
    x = x.but(q=7 * x.q, k=0.01 * x.k)
    o, state = check(case, x, "cuda", l2norm=True)
    monkeypatch.setattr(launch, "norm_inside", lambda *_: False)
    apart, its_state = check(case, x, "cuda", l2norm=True)
    assert same_bits(o, apart) and same_bits(state, its_state)


def gates_of(kind: str, g: Tensor) -> Tensor:
    """g [B, T, HV] of a kind, natural logarithms. Some decay by more than the frame of a chunk, and
    one head forgets everything at some tokens."""
    if kind == "none":
        return torch.zeros_like(g)
    if kind == "strong":
        return 60 * g
    if kind == "growing":
        return -0.02 * g
    sometimes = torch.arange(g.shape[1], device=g.device) % 37 == 5
    far = torch.full_like(g, float("-inf") if kind == "infinite" else -80.0)
    return torch.where(sometimes[None, :, None], far, 0.05 * g)


@hopper
@pytest.mark.usefixtures("gluon")
@pytest.mark.parametrize("kind", ["none", "strong", "growing", "far", "infinite"])
@pytest.mark.parametrize("case", cases([PACKED, CASES[3], MANY_KEYS_PACKED]))
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gates(case: Case, kind: str, dtype: torch.dtype) -> None:
    x = make_inputs(case, dtype, "cuda")
    check(case, x.but(g=gates_of(kind, x.g)), "cuda")


CUTS = [
    Cut(1, 1),
    Cut(1, 2, first_states=2),
    Cut(3, 1, first_states=2, later_states=2),
    Cut(2, 2, later_states=2),
]


@hopper
@pytest.mark.usefixtures("gluon")
@pytest.mark.parametrize("case", cases([CASES[0], PACKED, CASES[6]]))
@pytest.mark.parametrize("kind", ["none", "strong", "far"])
@pytest.mark.parametrize(("with_state", "dtype"), [(False, BF16), (True, BF16), (True, FP16)])
def test_segments(
    case: Case,
    kind: str,
    with_state: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Segments of a chunk, and of several. With other gates than "none" some are walked in
    windows."""
    from gdn_triton.chunk.triton.hopper import launch

    x = make_inputs(case, dtype, "cuda")
    for cut in CUTS:
        monkeypatch.setattr(launch, "choose_cut", lambda *_, cut=cut: cut)
        check(case, x.but(g=gates_of(kind, x.g)), "cuda", with_state=with_state)


LONG = hopper_case("long", "segments of two chunks", lengths=(700, 70, 0, 1030), orphans=3)


@hopper
@pytest.mark.usefixtures("gluon")
def test_windows_that_do_not_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunk of each segment decays by more than 2^64, and the one before it grows by as
    much: a walk of the last one alone has another end."""
    from gdn_triton.chunk.triton.hopper import launch

    monkeypatch.setattr(launch, "choose_cut", lambda *_: Cut(3, 2, later_states=2))
    x = make_inputs(LONG, BF16, "cuda")
    starts = torch.tensor(LONG.offsets(), device="cuda")
    rows = torch.arange(x.g.shape[1], device="cuda")
    inside = rows - starts[torch.searchsorted(starts, rows, right=True) - 1]
    odd = (inside // 64 % 2 == 1)[None, :, None]
    g = torch.where(odd, 0.72, -0.72) + torch.zeros_like(x.g)
    o, state = check(LONG, x.but(g=g), "cuda")
    for _ in range(3):
        again, its_state = call_with_state(x.but(g=g), LONG)
        assert same_bits(o, again) and same_bits(state, its_state)


@hopper
@pytest.mark.usefixtures("gluon")
@pytest.mark.parametrize("name", ["v", "g", "beta"])
def test_not_a_number_before_a_window(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches all later tokens of its sequence, and no other sequence."""
    from gdn_triton.chunk.triton.hopper import launch

    x = make_inputs(LONG, BF16, "cuda")
    broken = x.but(g=gates_of("strong", x.g))
    getattr(broken, name)[:, 5] = torch.nan
    found = []
    for cut in (None, Cut(3, 2), Cut(3, 2, later_states=2)):
        monkeypatch.setattr(launch, "choose_cut", lambda *_, cut=cut: cut)
        o, state = call_with_state(broken, LONG)
        found.append((o.isnan(), state.isnan()))
    assert found[0][0][:, 65:700].any() and not found[0][0][:, 700:].any()
    for nans in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(nans, found[0], strict=True))


@hopper
@pytest.mark.usefixtures("gluon")
@pytest.mark.parametrize("case", cases([CASES[3], MANY_KEYS_PACKED]))
def test_same_bits(case: Case) -> None:
    """Again; and each sequence alone, packed and padded, in blocks with one state."""
    x = make_inputs(case, BF16, "cuda")
    o, state = call_with_state(x, case)
    for _ in range(5):
        again, its_state = call_with_state(x, case)
        assert same_bits(o, again) and same_bits(state, its_state)
    offsets = case.offsets()
    for n, inside in enumerate(pieces(o, offsets)):
        if n not in (0, 1, case.N - 1):
            continue
        for packed in (True, False):
            alone, its_state = call_with_state(alone_of(x, n, offsets, packed), case)
            assert same_bits(inside, alone) and same_bits(state[n], its_state[0])


def alone_of(x: Inputs, n: int, offsets: list[int], packed: bool) -> Inputs:
    rows = slice(offsets[n], offsets[n + 1])
    tokens = {name: getattr(x, name)[:, rows].clone() for name in ("q", "k", "v", "g", "beta")}
    length = torch.tensor([0, rows.stop - rows.start], device=x.q.device)
    state = x.initial_state[n : n + 1]
    return x.but(**tokens, initial_state=state, cu_seqlens=length if packed else None)


@hopper
@pytest.mark.usefixtures("gluon")
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize(("case", "number"), [(PACKED, 7), (MANY_KEYS_PACKED, 2)])
def test_not_a_number(name: str, case: Case, number: int) -> None:
    """A NaN changes no sequence but its own, whose tokens before it are in another chunk."""
    x = make_inputs(case, BF16, "cuda")
    o, state = call_with_state(x, case)
    first = case.offsets()[number]
    broken = getattr(x, name).clone()
    broken[:, first + 70] = torch.nan
    found, its_state = call_with_state(x.but(**{name: broken}), case)
    kept = torch.ones(o.shape[1], dtype=torch.bool, device="cuda")
    kept[first + 64 : case.offsets()[number + 1]] = False
    assert same_bits(found[:, kept], o[:, kept])
    others = torch.arange(case.N, device="cuda") != number
    assert same_bits(its_state[others], state[others])
    assert found[:, first + 70].isnan().any()


@hopper
@pytest.mark.usefixtures("gluon")
def test_graph_and_compiler() -> None:
    """A CUDA graph, replayed with other lengths and gates, and torch.compile without a break."""
    x = make_inputs(PACKED, BF16, "cuda")
    assert x.cu_seqlens is not None
    call_with_state(x, PACKED)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = call_with_state(x, PACKED)
    x.cu_seqlens.copy_(torch.tensor([0, 0, 100, 165, 165, 300, 400, 401, 1000, 1043]))
    x.g.mul_(3)
    graph.replay()
    expected, its_state = call_with_state(x, PACKED)
    assert same_bits(o, expected) and same_bits(state, its_state)

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Any]:
        return chunk_gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            initial_state=x.initial_state,
            cu_seqlens=x.cu_seqlens,
            output_final_state=True,
        )

    traced, its_state = torch.compile(run, fullgraph=True, backend="aot_eager")(*x.tensors)
    assert same_bits(traced, expected) and same_bits(its_state, state)


@hopper
@pytest.mark.usefixtures("gluon")
def test_gradients_are_those_of_the_portable_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward needs only the inputs."""
    found = []
    for gluon_runs in ("1", "0"):
        monkeypatch.setenv("GDN_GLUON", gluon_runs)
        x = make_inputs(PACKED, BF16, "cuda")
        leaves = [y.detach().clone().requires_grad_() for y in x.tensors]
        o, _ = chunk_gated_delta_rule(*leaves, cu_seqlens=x.cu_seqlens)
        monkeypatch.setenv("GDN_GLUON", "0")  # the portable backward after both
        o.backward(torch.ones_like(o))
        found.append([y.grad for y in leaves])
    for a, b in zip(*found, strict=True):
        assert a is not None and b is not None and same_bits(a, b)
