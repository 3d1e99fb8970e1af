"""The walks of the backward for compute capability 9.0 in Gluon: the calls that they serve, and on
such a GPU the gradients against float64 autograd of the specification."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from backward_cases import (
    STRENGTHS,
    TaskOptions,
    by_op,
    check,
    check_alone,
    check_rows_of_no_sequence,
    check_task,
    make_task,
)
from choice_cases import problem
from helpers import BF16, FP16, Case, cases, make_inputs, same_bits
from hopper_cases import (
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

from gdn_triton.chunk.backends import chunk_kernels
from gdn_triton.chunk.triton.hopper.releases import most_states
from gdn_triton.chunk.triton.hopper.support import walks_refusal
from gdn_triton.chunk.triton.hopper.walks.segments import choose_segment

SIZES = {"B": 4, "T": 320, "H": 16, "HV": 32, "K": 128, "V": 128, "N": 4}
COMMON = problem(**SIZES, output_final_state=False, needs_grad=True)


@pytest.mark.usefixtures("on_a_hopper")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"K": 8, "V": 264}, None),
        ({"T": 130}, None),
        ({"has_initial_state": True}, None),
        ({"output_final_state": True}, None),
        ({"k_dtype": FP16}, "in bfloat16"),
        ({"q_dtype": FP16, "k_dtype": FP16, "v_dtype": FP16}, "walks .* take bfloat16"),
        ({"chunk_size": 32}, "chunk_size is 32"),
        ({"K": 256}, "K is 256"),
        ({"V": 100}, "V is 100"),
        ({"T": 0}, "empty"),
        ({"is_varlen": True}, None),
        ({"is_varlen": True, "H": 4, "HV": 8}, "would run 8 states at once"),
        ({"is_varlen": True, "H": 4, "HV": 8, "longest": (512, 0, 0)}, None),
        ({"is_varlen": True, "H": 4, "HV": 8, "longest": (1200, 0, 0)}, "run 9 states at once"),
        ({"is_varlen": True, "H": 4, "HV": 8, "N": 8}, None),
        ({"is_varlen": True, "H": 8, "HV": 16, "N": 1, "B": 1}, None),
        ({"device": torch.device("cpu")}, "NVIDIA GPU"),
        ({"N": 1, "B": 1, "H": 8, "HV": 16}, None),
        ({"N": 1, "B": 1, "H": 4, "HV": 8}, "would run 8 states at once"),
        ({"N": 1, "B": 1, "H": 4, "HV": 8, "batch_invariant": True}, None),
    ],
)
def test_refusals(change: dict[str, Any], words: str | None) -> None:
    refusal = walks_refusal(replace(COMMON, **change))
    assert refusal is None if words is None else re.search(words, str(refusal))


LONG = problem(**{**SIZES, "B": 1, "N": 1, "T": 32768, "H": 4, "HV": 8}, needs_grad=True)


@pytest.mark.usefixtures("on_a_hopper")
@pytest.mark.parametrize(
    ("change", "is_cut"),
    [
        ({}, True),
        ({"is_varlen": True, "longest": (32768, 0, 0)}, True),
        ({"is_varlen": True, "N": 5, "longest": (30000, 1000, 1000)}, True),
        ({"T": 1024}, False),
        ({"B": 4, "N": 4, "T": 8192, "H": 16, "HV": 32}, False),
        ({"batch_invariant": True}, False),
    ],
)
def test_cuts(change: dict[str, Any], is_cut: bool) -> None:
    """A call in segments runs these walks, however few states it has."""
    p = replace(LONG, **change)
    segment = choose_segment(132, p)
    assert (segment > 0) == is_cut
    if is_cut:
        assert walks_refusal(p) is None
        assert 16 <= segment < p.T // 64


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"HV": 8, "T": 32768}, (2, True, 32)),
        ({"HV": 16}, (1, True, 0)),
        ({"HV": 32}, (2, True, 0)),
        ({"HV": 32, "is_varlen": True}, (1, True, 0)),
        ({"HV": 16, "is_varlen": True, "N": 4, "longest": (4000, 3100, 1000)}, (1, True, 0)),
        ({"HV": 64}, (1, False, 0)),
        ({"HV": 32, "B": 4, "N": 4}, (2, False, 0)),
        ({"HV": 32, "V": 64, "B": 4, "N": 4}, (1, False, 0)),
        ({"HV": 8, "T": 32768, "batch_invariant": True}, (1, True, 0)),
    ],
)
def test_plans(
    change: dict[str, Any], expected: tuple[int, bool, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of a block, with a release of Triton whose blocks may have two, whether the walks
    run at the same time, the chunks of a segment."""
    gluon = "triton.experimental.gluon.nvidia.hopper"
    pytest.importorskip(gluon, reason="this Triton lacks Gluon for compute capability 9.0")
    from gdn_triton._triton.tiles import Gpu
    from gdn_triton.chunk.triton.hopper.walks import launch

    monkeypatch.setattr(launch, "gpu_of", lambda _: Gpu("cuda", 90, 132))
    plan = launch.choose_plan(replace(COMMON, **{"B": 1, "N": 1, "T": 8192, **change}))
    assert plan.forward == plan.back
    states, together, segment = expected
    expected = min(states, most_states()), together, segment
    assert (plan.forward.states, plan.together, plan.segment) == expected


@pytest.mark.usefixtures("on_a_hopper")
def test_what_explain_says(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "The walks of the backward are by the Gluon kernel for compute capability 9.0."
    assert said in str(chunk_kernels(COMMON, "triton"))
    assert "walks" not in str(chunk_kernels(replace(COMMON, needs_grad=False), "triton"))
    monkeypatch.setenv("GDN_GLUON", "0")
    said = "The walks of the backward are by the portable kernels. GDN_GLUON=0 asks for them."
    assert said in str(chunk_kernels(COMMON, "triton"))


# ------------------------------------------------------------------------------------ on such a GPU


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> None:
    from gdn_triton.chunk.triton.gradients.state import state_bwd_kernel

    run_by_gluon(monkeypatch, portable=state_bwd_kernel)


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
]
OPTIONS = {
    "none": TaskOptions(state=False, dht=False),
    "state": TaskOptions(dht=False, v_first=True),
    "dht": TaskOptions(state=False, v_first=True),
    "all": TaskOptions(l2norm=True, sigmoid=True, negative=True, gate=True, v_first=True),
}


@hopper
@pytest.mark.usefixtures("walks")
@pytest.mark.parametrize("case", cases(CASES))
def test_gradients(case: Case) -> None:
    check(case, BF16, "cuda")


@hopper
@pytest.mark.usefixtures("walks")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("case", cases([PACKED, CASES[0]]))
def test_options(case: Case, options: TaskOptions) -> None:
    check(case, BF16, "cuda", options)


@hopper
@pytest.mark.usefixtures("walks")
@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("case", cases([PACKED, WIDE]))
def test_gates(case: Case, strength: str) -> None:
    x = make_inputs(case, BF16, "cuda")
    x = x.but(g=STRENGTHS[strength](x.g))
    check_task(make_task(case, BF16, "cuda", TaskOptions(), x), BF16, "cuda")


@pytest.fixture(params=[(1, 1), (2, 2), (3, 2)])
def in_segments(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts each call: the chunks of a segment, and the states of a block."""
    from gdn_triton.chunk.triton.hopper.walks import launch

    segment, states = request.param
    shape = launch.TWO if states == 2 else launch.ONE
    plan = launch.Plan(shape, shape, segment=segment)
    monkeypatch.setattr(launch, "choose_plan", lambda _: plan)


@hopper
@pytest.mark.usefixtures("walks", "in_segments")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("case", cases([TAIL, PACKED, SMALL_PACKED, SEVERAL]))
def test_segments(case: Case, options: TaskOptions) -> None:
    check(case, BF16, "cuda", options)


@hopper
@pytest.mark.usefixtures("walks", "in_segments")
@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("case", cases([PACKED, WIDE]))
def test_gates_in_segments(case: Case, strength: str) -> None:
    x = make_inputs(case, BF16, "cuda")
    x = x.but(g=STRENGTHS[strength](x.g))
    check_task(make_task(case, BF16, "cuda", TaskOptions(), x), BF16, "cuda")


@hopper
@pytest.mark.usefixtures("walks", "in_segments")
def test_same_bits_in_segments() -> None:
    test_same_bits()


@hopper
@pytest.mark.usefixtures("walks")
def test_same_bits() -> None:
    task = make_task(WIDE, BF16, "cuda", TaskOptions())
    found = by_op(task)
    for _ in range(5):
        assert all(same_bits(x, found[name]) for name, x in by_op(task).items())


@hopper
@pytest.mark.usefixtures("walks")
def test_sequences_alone() -> None:
    """In blocks with one state, packed and padded."""
    case = hopper_case("alone", "", lengths=(70, 1, 64, 200), HV=36, H=18)
    check_alone(case, BF16, "cuda")


@hopper
@pytest.mark.usefixtures("walks")
def test_rows_of_no_sequence() -> None:
    check_rows_of_no_sequence(make_task(PACKED, BF16, "cuda", TaskOptions()))
