"""The Gluon forward for compute capability 9.0: the calls that it serves, and on such a GPU its
results against the float64 recurrence. Triton's interpreter runs no Gluon: a CPU tests the choice
alone."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from choice_cases import problem
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
from gdn_triton.chunk.backends import chunk_kernels
from gdn_triton.chunk.problem import Inputs as Operands
from gdn_triton.chunk.triton.hopper import releases, support
from gdn_triton.chunk.triton.hopper.releases import RELEASES, most_states
from gdn_triton.chunk.triton.hopper.segments import (
    Cut,
    choose_cut,
    lengths_of,
    rounded_up,
    states_at_once,
    states_of_whole,
)
from gdn_triton.chunk.triton.hopper.support import hopper_refusal

# ------------------------------------------------------------------------- the calls that it takes

COMMON = problem(B=4, T=300, H=16, HV=32, K=128, V=128, N=4)

# One long sequence among 20 short ones, as cu_seqlens_cpu says.
UNEVEN = {
    "B": 1,
    "T": 20 * 64 + 6912,
    "N": 21,
    "H": 2,
    "HV": 8,
    "is_varlen": True,
    "longest": (6912, 64, 64),
}


@pytest.mark.usefixtures("on_a_hopper")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"needs_grad": True}, None),
        ({"K": 8, "V": 264}, None),
        ({"q_dtype": FP16, "k_dtype": FP16, "v_dtype": FP16}, None),
        ({"v_dtype": FP16}, "all in bfloat16 or all in float16"),
        (dict.fromkeys(("q_dtype", "k_dtype", "v_dtype"), torch.float32), "all in bfloat16 or"),
        ({"chunk_size": 32}, "chunk_size is 32"),
        ({"K": 256, "V": 512}, None),
        ({"K": 264}, "K is 264"),
        ({"K": 60}, "K is 60"),
        ({"V": 100}, "V is 100"),
        ({"pool_dtype": torch.float32}, None),
        ({"T": 0}, "empty"),
        ({"device": torch.device("cpu")}, "NVIDIA GPU"),
        ({"N": 1, "B": 1}, None),
        ({"N": 1, "B": 1, "H": 8, "HV": 16}, "has 16 states"),
        ({"N": 1, "B": 1, "H": 8, "HV": 16, "T": 4096}, None),
        ({"N": 1, "B": 1, "H": 8, "HV": 16, "T": 4096, "K": 136}, "has 32 times 64 columns"),
        ({"N": 1, "B": 1, "H": 8, "HV": 16, "K": 136, "V": 256}, None),
        ({"N": 1, "B": 1, "H": 8, "HV": 16, "batch_invariant": True}, None),
    ],
)
def test_refusals(change: dict[str, Any], words: str | None) -> None:
    refusal = hopper_refusal(replace(COMMON, **change))
    assert refusal is None if words is None else words in str(refusal)


ONE_SEQUENCE = {"N": 1, "B": 1}


@pytest.mark.parametrize(
    ("change", "is_cut"),
    [
        ({}, False),
        (ONE_SEQUENCE | {"T": 8192}, True),
        (ONE_SEQUENCE | {"T": 8192, "batch_invariant": True}, False),
        (ONE_SEQUENCE | {"T": 8192, "K": 136}, False),
        (ONE_SEQUENCE | {"T": 1024}, False),
        (ONE_SEQUENCE | {"T": 2048, "HV": 16}, True),
        (ONE_SEQUENCE | {"T": 4096, "HV": 1}, True),
        (ONE_SEQUENCE | {"T": 8192, "HV": 64}, False),
        (ONE_SEQUENCE | {"T": 8192, "HV": 16, "V": 256}, True),
        (ONE_SEQUENCE | {"T": 0}, False),
        ({"N": 2, "B": 1, "T": 8192, "HV": 8, "is_varlen": True}, True),
        (
            {"N": 2000, "B": 1, "T": 2**20, "HV": 1, "is_varlen": True, "longest": (2**19, 0, 0)},
            False,
        ),
        # The longest sequence counts, where the host knows it.
        (UNEVEN, True),
        (UNEVEN | {"longest": (0, 0, 0)}, False),
        (UNEVEN | {"batch_invariant": True}, False),
        (UNEVEN | {"HV": 16}, True),
        (UNEVEN | {"HV": 64}, False),
    ],
)
def test_calls_that_are_cut(change: dict[str, Any], is_cut: bool) -> None:
    assert (choose_cut(132, replace(COMMON, **change)) is not None) == is_cut


@pytest.mark.parametrize("HV", [2, 8, 32, 64])
@pytest.mark.parametrize("V", [64, 128, 256])
@pytest.mark.parametrize("T", [600, 4000, 33000, 2**20])
@pytest.mark.parametrize("longest", [(0, 0, 0), (0.5, 0.2, 0.1), (0.9, 0.02, 0)])
def test_cuts(HV: int, V: int, T: int, longest: tuple[float, ...]) -> None:
    """No segment is short, and some sequence is longer than the first one."""
    tokens = [int(T * share) for share in longest]
    p = replace(COMMON, B=1, T=T, N=4, HV=HV, V=V, is_varlen=True, longest=(*tokens,))
    cut = choose_cut(132, p)
    if cut is not None:
        assert 4 <= cut.rest and 4 <= cut.first < max(chunks for chunks, _ in lengths_of(p))
        assert V > 64 or (cut.first_states, cut.later_states) == (1, 1)


@pytest.mark.parametrize("cut", [Cut(1, 1), Cut(4, 2), Cut(2, 4), Cut(1, 7)])
@pytest.mark.parametrize("lengths", [(2000,), (129,) * 9, (0, 70, 700, 1), (65, 64, 66, 513)])
def test_slots(lengths: tuple[int, ...], cut: Cut) -> None:
    """Packed sequences never have more segments after their first ones than there are slots."""
    from gdn_triton.chunk.triton.hopper.launch import make_segments

    sizes = {"B": 1, "T": sum(lengths), "N": len(lengths), "is_varlen": True}
    p = replace(COMMON, **sizes, device=torch.device("cpu"))
    segments = make_segments(p, cut)
    counts = [-(-max(n - 64 * cut.first, 0) // (64 * cut.rest)) for n in lengths]
    assert sum(counts) <= segments.slots == segments.NS <= segments.BS
    assert sum(count > 1 for count in counts) <= segments.most_long


@pytest.mark.parametrize(
    ("change", "states"),
    [
        ({}, 1),
        ({"B": 5, "N": 5}, 2),
        ({"B": 5, "N": 5, "V": 64}, 1),
        # The time of one long sequence, or of all.
        ({"B": 1, "T": 8192, "N": 6, "is_varlen": True, "longest": (6000, 500, 500)}, 1),
        ({"B": 1, "T": 8192, "N": 6, "is_varlen": True, "longest": (1500, 1500, 1500)}, 2),
    ],
)
def test_states_of_whole(change: dict[str, Any], states: int) -> None:
    """With a release of Triton whose blocks have one state always one."""
    found = states_of_whole(132, replace(COMMON, **{"HV": 16, **change}))
    assert found == min(states, most_states())


@pytest.mark.parametrize(("release", "states"), [("3.6.0", 2), ("3.8.0", 2), ("3.9.0", 1)])
def test_most_states(release: str, states: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "installed_release", lambda: release)
    assert most_states() == states


@pytest.mark.parametrize(
    ("change", "tiles", "is_dealt"),
    [
        ({}, 133, True),
        ({}, 132, False),
        ({"T": 52 * 64}, 133, True),
        ({"T": 52 * 64 + 1}, 133, False),
        ({"K": 136}, 133, False),
    ],
)
def test_several_tiles_a_block(change: dict[str, Any], tiles: int, is_dealt: bool) -> None:
    from gdn_triton.chunk.triton.hopper import launch

    assert launch.is_dealt(replace(COMMON, **change), tiles, 132) == is_dealt


def test_lengths_of() -> None:
    assert lengths_of(replace(COMMON, T=300)) == ((5, 4),)
    packed = replace(COMMON, B=1, T=8192, N=21, is_varlen=True)
    assert lengths_of(packed) == ((7, 21),)
    assert lengths_of(replace(packed, longest=(6912, 65, 1))) == ((108, 1), (2, 1), (1, 1), (1, 18))
    assert lengths_of(replace(packed, N=2, longest=(8000, 192, 0))) == ((128, 1), (3, 1))
    assert [rounded_up(n) for n in (1, 64, 65, 2048, 2049, 6500)] == [1, 1, 2, 32, 34, 104]


@pytest.mark.parametrize(
    ("change", "states"),
    [
        ({}, 128),
        ({"V": 64}, 128),
        ({"V": 200}, 256),
        (UNEVEN | {"T": 8192}, 8 * 8192 / 6912),
        (UNEVEN | {"T": 8400, "longest": (0, 0, 0)}, 8 * 21),
    ],
)
def test_states_at_once(change: dict[str, Any], states: float) -> None:
    assert states_at_once(replace(COMMON, **change)) == states


@pytest.mark.parametrize(
    ("change", "spare", "shapes"),
    [
        ({}, 8, "two"),
        ({"batch_invariant": True}, 8, "two"),
        ({}, 3, ""),
        ({"is_varlen": True}, 8, ""),
        ({"use_qk_l2norm": False}, 8, ""),
        ({"q_dtype": FP16}, 8, ""),
    ],
)
def test_norm_inside(change: dict[str, Any], spare: int, shapes: str) -> None:
    """The blocks in which the kernel normalises rows of a stride of K + spare elements."""
    from gdn_triton.chunk.triton.hopper import launch

    x = torch.zeros(1, 4, 2, 128 + spare, dtype=BF16)[..., :128]
    given = Operands(x, x, *([None] * 7))
    asked = replace(COMMON, **{"use_qk_l2norm": True, **change})
    forms = {"one": launch.ONE, "two": launch.TWO}
    found = [name for name, shape in forms.items() if launch.norm_inside(asked, given, shape)]
    assert ", ".join(found) == shapes


@pytest.mark.usefixtures("on_a_hopper")
def test_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    said = chunk_kernels(COMMON, "triton")
    assert said == "The forward is by the Gluon kernel for compute capability 9.0."
    assert chunk_kernels(COMMON, "cuda") is None
    monkeypatch.setenv("GDN_GLUON", "0")
    said = chunk_kernels(COMMON, "triton")
    assert said == "The forward is by the portable kernels. GDN_GLUON=0 asks for them."
    monkeypatch.setenv("GDN_GLUON", "no")
    with pytest.raises(ValueError, match="GDN_GLUON must be 0 or 1, got 'no'"):
        hopper_refusal(COMMON)


@pytest.mark.parametrize("release", [*RELEASES, "3.6.0+git12", "3.5.9", "4.0.0"])
def test_releases(
    release: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is not listed has the portable kernels, and one line of the log says it."""
    import triton

    monkeypatch.setattr(triton, "__version__", release)
    releases.installed_release.cache_clear()
    support._release_refusal.cache_clear()
    with caplog.at_level(logging.INFO, "gdn_triton"):
        refusals = {support._release_refusal() for _ in range(2)}
    releases.installed_release.cache_clear()
    support._release_refusal.cache_clear()
    lines = [record.getMessage() for record in caplog.records]
    if release.partition("+")[0] in RELEASES:
        assert refusals == {None} and lines == []
    else:
        (why,) = refusals
        assert f"the installed one is {release}." in str(why)
        assert lines == [f"{why} The portable kernels run."]


# ------------------------------------------------------------------------------------ on such a GPU


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
