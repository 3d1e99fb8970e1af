"""`gdn_triton.prepare_step`: the calls of `recurrent_step`, and when a launch is made again."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import BF16, same_bits
from torch import Tensor
from window_cases import Case, Decoding, cloned_window

import gdn_triton
from gdn_triton import prepare_step, recurrent_step
from gdn_triton._host import launches
from gdn_triton.recurrent import prepared

pytest.importorskip("triton", reason="Triton is not installed")

HELD = (
    *("state", "A_log", "dt_bias", "allow_neg_eigval", "use_qk_l2norm_in_kernel", "scale"),
    *("state_v_first", "skip", "window"),
)
DRAFTS = Case(rows=7, max_tokens=3, mixed=True, raw=True)


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "triton")


def parted(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments that the step holds, and those of each call."""
    held = {name: y for name, y in given.items() if name in HELD}
    return held, {name: y for name, y in given.items() if name not in HELD}


def cloned(given: dict[str, Any]) -> dict[str, Any]:
    window = given.get("window")
    if window is not None:
        given = {**given, "window": cloned_window(window)}
    return {**given, "state": given["state"].clone()}


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("case", [DRAFTS, replace(DRAFTS, mixed=False, raw=False, v_first=True)])
def test_bits_of_the_step(case: Case, window: bool, device: str) -> None:
    """Batches of several lengths in turns; the second time each buffer has other contents."""
    run = Decoding(case, device)
    first = run.arguments(run.tokens(1))
    if not window:
        first = {name: y for name, y in first.items() if name not in ("window", "positions")}
    beside = {name: y for name, y in cloned(first).items() if name in ("state", "window")}
    step = prepare_step(**parted(first)[0])
    for i in range(9):
        x = run.arguments(run.tokens(1 + i % 3))
        per_call = {n: y for n, y in parted(x)[1].items() if window or n != "positions"}
        expected = recurrent_step(**{**first, **per_call, **beside})
        if i % 2:
            out = torch.full_like(expected, torch.nan)
            assert step(**per_call, out=out) is out
            assert same_bits(out, expected)
        else:
            assert same_bits(step(**per_call), expected)
        run.positions = run.positions + 1 + i % 3
    assert same_bits(run.pool, beside["state"])
    if window:
        for mine, theirs in zip(run.window[:5], beside["window"][:5], strict=True):
            assert same_bits(mine, theirs)


@pytest.mark.parametrize("window", [False, True])
def test_bits_of_a_tree(window: bool, device: str) -> None:
    """Three times in the same buffers, each time with another tree; each node has a slot if there
    is no window."""
    run = Decoding(DRAFTS, device)
    N, T = run.case.N, 3
    x = run.arguments(run.tokens(T))
    tree = torch.tensor([[-1, 0, 0]] * N, dtype=torch.int32, device=device)
    x["parents"] = tree
    if not window:
        x = {name: y for name, y in x.items() if name not in ("window", "positions")}
        x["state"] = torch.cat([run.pool, torch.zeros_like(run.pool[:1]).expand(N * T, -1, -1, -1)])
        nodes = len(run.pool) + torch.arange(N * T, device=device).view(N, T)
        x["write_slots"] = nodes.to(x["read_slots"].dtype)
    held, per_call = parted(x)
    step = prepare_step(**held)
    for parents in ([-1, 0, 0], [-1, -1, 1], [-1, 0, 1]):
        tree.copy_(torch.tensor(parents))
        beside = {name: y for name, y in cloned(x).items() if name in ("state", "window")}
        expected = recurrent_step(**{**x, **beside})
        assert same_bits(step(**per_call), expected)
        assert same_bits(x["state"], beside["state"])


@pytest.mark.gpu("launches are made again on a GPU only")
@pytest.mark.parametrize("window", [False, True])
def test_launches_are_made_again(
    window: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third call of a kind judges nothing, and its bits are those of the step; in a graph
    too. A stream or a place that differs is heard of."""
    run = Decoding(Case(K=128, V=128, H=2, HV=4, N=4, rows=16, dtype=BF16, mixed=True), device)
    x = run.arguments(run.tokens(1))
    if not window:
        x = {name: y for name, y in x.items() if name not in ("window", "positions")}
    beside = {name: y for name, y in cloned(x).items() if name in ("state", "window")}
    held, per_call = parted(x)
    step = prepare_step(**held)
    whole = 0

    def counted(*args: Any, **given: Any) -> Tensor:
        nonlocal whole
        whole += 1
        return recurrent_step(*args, **given)

    monkeypatch.setattr(prepared, "recurrent_step", counted)
    out = torch.empty(4, 1, 4, 128, dtype=BF16, device=device)
    for _ in range(6):
        per_call["mixed_qkv"].normal_()
        expected = recurrent_step(**{**x, **per_call, **beside})
        version = run.pool._version
        assert same_bits(step(**per_call, out=out), expected)
        assert run.pool._version == version + 1
        run.positions += 1
    assert whole == 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(**per_call, out=out)
    assert whole == 2
    for _ in range(3):
        per_call["mixed_qkv"].normal_()
        graph.replay()
        assert same_bits(out, recurrent_step(**{**x, **per_call, **beside}))
        run.positions += 1
    moved = {**per_call, "mixed_qkv": per_call["mixed_qkv"].clone()}
    assert same_bits(step(**moved, out=out), recurrent_step(**{**x, **moved, **beside}))
    assert whole == 3
    assert same_bits(run.pool, beside["state"])


class Counted:
    """A prepared step for CPU tensors whose launches are recorded as on a GPU, and counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: Decoding) -> None:
        self.whole = self.again = 0
        self.places: list[int | None] = []
        given = run.arguments(run.tokens(1))
        held, self.given = parted(given)
        self.step = prepare_step(**held)
        monkeypatch.setattr(prepared, "recurrent_step", self._whole)
        # Tensors on a CPU, also where there is a GPU.
        monkeypatch.setenv("GDN_BACKEND", "reference")
        self.step._has_memory = True

    def _whole(self, *args: Any, **given: Any) -> Tensor:
        self.whole += 1
        o = recurrent_step(*args, **given)
        if launches.recorder.launches is not None:
            launches.recorder.launches[:] = [self._again]
        return o

    def _again(self, o: int | None) -> None:
        self.again += 1
        self.places.append(o)

    def counts(self, **changes: Any) -> tuple[int, int]:
        self.step(**{**self.given, **changes})
        return self.whole, self.again


def test_when_a_call_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another place, shape, stride, dtype, or argument that is there is judged, and known at the
    second time."""
    monkeypatch.setenv("GDN_BACKEND", "auto")
    run = Decoding(replace(DRAFTS, mixed=False), "cpu")
    calls = Counted(monkeypatch, run)
    calls.given["read_slots"].fill_(-1)
    out = torch.empty(3, 1, 3, 24)
    assert [calls.counts(out=out) for _ in range(4)] == [(1, 0), (2, 0), (2, 1), (2, 2)]
    q, slots = calls.given["q"], calls.given["read_slots"]
    apart = torch.zeros(3, 1, 1, 32)[..., ::2]
    for judged, changes in (
        (1, {"q": q.clone()}),
        (2, {"q": apart}),
        (2, {"q": q.half()}),
        (2, {"read_slots": slots.long()}),
        (2, {"a": calls.given["a"].half()}),
    ):
        before = calls.whole
        found = [calls.counts(**changes, out=out)[0] - before for _ in range(4)]
        assert found == [1, *[judged] * 3]
    whole, again = calls.whole, calls.again
    assert calls.counts(out=out) == (whole, again + 1)
    run.pool.data = run.pool.data.clone()
    assert calls.counts(out=out) == (whole + 1, again + 1)


def test_new_outputs_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without out each call has another output. Its launch is the recorded one with the address of
    that output, also where all earlier outputs are still there."""
    monkeypatch.setenv("GDN_BACKEND", "auto")
    run = Decoding(replace(DRAFTS, mixed=False), "cpu")
    calls = Counted(monkeypatch, run)
    calls.given["read_slots"].fill_(-1)
    outputs = [calls.step(**calls.given) for _ in range(6)]
    assert (calls.whole, calls.again) == (2, 4)
    assert calls.places == [o.data_ptr() for o in outputs[2:]]
    assert len({o.data_ptr() for o in outputs}) == 6
    assert calls.counts(out=outputs[0]) == (3, 4)


def test_errors_name_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after calls that fitted."""
    monkeypatch.setenv("GDN_BACKEND", "auto")
    run = Decoding(replace(DRAFTS, mixed=False), "cpu")
    calls = Counted(monkeypatch, run)
    calls.given["read_slots"].fill_(-1)
    for _ in range(3):
        calls.counts()
    for changes, error, message in (
        ({"q": torch.zeros(3, 1, 1, 8)}, ValueError, "q must have the K=16 channels of state"),
        ({"q": torch.zeros(3, 1, 1, 16).int()}, ValueError, "q must be float16, bfloat16"),
        ({"q": [0]}, TypeError, "q must be a torch.Tensor, got list"),
        ({"q": None}, TypeError, "q must be a torch.Tensor, got None"),
        ({"q": torch.zeros(3, 1, 1, 16).to_sparse()}, ValueError, "q must be a strided tensor"),
        ({"positions": None}, TypeError, "positions must be a torch.Tensor with window"),
        ({"mixed_qkv": torch.zeros(1)}, ValueError, "q must be None with mixed_qkv"),
    ):
        with pytest.raises(error, match=message):
            calls.counts(**changes)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        calls.counts(v=calls.given["v"].clone().requires_grad_())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"state": None}, TypeError, "state must be a torch.Tensor, got NoneType"),
        ({"A_log": 1.0}, TypeError, "A_log must be a torch.Tensor or None, got float"),
        ({"state_v_first": 1}, TypeError, "state_v_first must be True or False"),
        ({"skip": "zero"}, ValueError, "skip must be one of negative, non_positive"),
        ({"scale": "1"}, TypeError, "scale must be a real number or None, got '1'"),
        ({"window": 3}, TypeError, "window must be a gdn_triton.StepWindow, got int"),
    ],
)
def test_refusals(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        prepare_step(**{"state": torch.zeros(2, 2, 8, 8), **changes})


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("window", [False, True])
def test_compiled(window: bool, device: str) -> None:
    run = Decoding(DRAFTS, device)
    x = run.arguments(run.tokens(2))
    if not window:
        x = {name: y for name, y in x.items() if name not in ("window", "positions")}
    beside = {name: y for name, y in cloned(x).items() if name in ("state", "window")}
    held, per_call = parted(x)
    step = prepare_step(**held)

    def doubled(**given: Any) -> Tensor:
        return 2 * step(**given)

    found = torch.compile(doubled, fullgraph=True, backend="aot_eager")(**per_call)
    assert same_bits(found, 2 * recurrent_step(**{**x, **beside}))
    assert same_bits(run.pool, beside["state"])


def test_is_public() -> None:
    assert type(prepare_step(torch.zeros(1, 1, 8, 8))) is gdn_triton.PreparedStep
