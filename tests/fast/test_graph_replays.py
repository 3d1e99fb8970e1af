"""`tests/support/graph_replays.py`: what it draws, what it finds wrong and says of that, and some
of its replays."""

import random
import sys
from typing import Any

import pytest
import torch
from fast_cases import gpu
from graph_replays import (
    BACKWARD,
    FORWARD,
    Call,
    Captured,
    Shape,
    check_shape,
    divided,
    draw_offsets,
    forbid_overlap,
    parsed,
)
from replay_reports import Evidence, difference, numbers_of, ranges, verdict

SMALL = Shape(1, 2, 100, 3, forgets=False)


@pytest.mark.parametrize("N", [1, 2, 48])
def test_offsets(N: int) -> None:
    """Ones that the op takes, with empty sequences, of all tokens and of fewer."""
    rng, T = random.Random(0), 2048
    drawn = [draw_offsets(rng, N, T, number) for number in range(100)]
    for offsets in drawn:
        assert len(offsets) == N + 1 and offsets[0] == 0
        assert offsets == sorted(offsets) and offsets[-1] <= T
    assert {offsets[-1] == T for offsets in drawn} == {False, True}
    assert N == 1 or any(len(set(offsets)) <= N for offsets in drawn)
    assert drawn[0] == [round(T * n / N) for n in range(N + 1)]


def test_division() -> None:
    for shapes, count in ((FORWARD, 10000), (BACKWARD, 500), (FORWARD, 3)):
        assert sum(divided(shapes, count)) == count


class Again(Captured):
    """In the place of a graph: the call again, into the same outputs."""

    def __init__(self, call: Call) -> None:
        self.call, self.outputs = call, call(call.cu_seqlens)
        self.captured = call.cu_seqlens.clone()

    def offsets(self) -> torch.Tensor:
        return self.call.cu_seqlens

    def replay(self) -> None:
        for name, x in self.call(self.offsets()).items():
            self.outputs[name].copy_(x)


class Stale(Again):
    """One with the offsets of its capture."""

    def offsets(self) -> torch.Tensor:
        return self.captured


class Unwritten(Again):
    """One that leaves a last row."""

    def replay(self) -> None:
        super().replay()
        self.outputs["o"][:, -1] = torch.nan


@pytest.mark.of_no_device
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("graph", "right"), [(Again, True), (Stale, False), (Unwritten, False)])
def test_what_is_found(graph: type[Captured], right: bool, backward: bool) -> None:
    shape = SMALL._replace(backward=backward)
    found = check_shape(shape, 4, 0, device="cpu", backend="reference", graph=graph)
    assert found.replays == 4 and (not found.lines) is right


class WrongOnce(Again):
    """One whose second replay has a wrong token in the state and the output of a head."""

    count = 0

    def replay(self) -> None:
        super().replay()
        self.count += 1
        if self.count == 2:
            self.outputs["o"][0, 30:33, 1, 5] += 1
            self.outputs["final_state"][2, 0, 3, 4] = torch.nan


@pytest.mark.of_no_device
def test_report() -> None:
    shape = SMALL._replace(T=200)
    found = check_shape(shape, 40, 0, device="cpu", backend="reference", graph=WrongOnce)
    assert found.replays == 40 and len(found.lines) == 1
    head, o, state, which = found.lines[0].split("\n")
    assert "replay 1: o, final_state; lengths [" in head
    assert "o: 3 of 51200 elements" in o and "3 tokens in heads 1, first token 30 (" in o
    assert "final_state: 1 of 98304 elements" in state
    assert "NaNs 1 in the replay and 0 in the eager call; heads of sequences 2: 0" in state
    right = "the bits of the first eager call"
    assert which.strip() == f"a second replay has {right}, a second eager call {right}"


def test_difference() -> None:
    """Where outputs of every shape are wrong, and that a right one has no line."""
    offsets = [0, 10, 10, 25]
    o, state = torch.zeros(1, 30, 4, 8), torch.zeros(3, 4, 8, 8)
    rates = torch.zeros(4)
    assert difference("o", o, o.clone(), offsets) is None
    found = o.clone()
    found[0, 12, 1:3, 7], found[0, 28, 3] = 0.5, -2.0
    assert difference("o", found, o, offsets) == (
        "o: 10 of 960 elements, largest difference 2.000e+00, NaNs 0 in the replay and 0 in the "
        "eager call; 2 tokens in heads 1-3, first token 12 (2 of sequence 2, which has 15) in "
        "heads 1-2, last token 28 (of no sequence) in heads 3"
    )
    found = state.clone()
    found[0, 0, 1], found[2, 1:4, 0, 0] = -0.0, 1.0  # the bits of -0 are others
    line = difference("gradient of initial_state", found, state, offsets)
    assert line is not None and line.endswith("heads of sequences 0: 0; 2: 1-3")
    nan = torch.tensor([0.0, torch.nan, 0.0, 0.0])
    line = difference("gradient of A_log", nan, nan.clone(), offsets)
    assert line is not None and line.startswith("gradient of A_log: 1 of 4 elements, largest")
    assert line.endswith("NaNs 1 in the replay and 1 in the eager call; heads 1")
    assert difference("gradient of A_log", rates, rates + 1, offsets) is not None


def test_verdict() -> None:
    a, b, c = ({"o": torch.full((2,), float(x))} for x in range(3))
    said = verdict((a, b), (b, b))
    assert said == (
        "a second replay has the bits of the first eager call, a second eager call the bits of "
        "the first eager call"
    )
    assert "a second eager call the bits of the first replay" in verdict((a, a), (b, a))
    assert "a second replay has other bits than both" in verdict((a, c), (b, b))


@pytest.mark.of_no_device
def test_evidence() -> None:
    """The first wrong replay stays, until `clear`."""
    right = {"o": torch.zeros(1, 4, 2, 2)}
    evidence = Evidence(right)
    for wrong in (0.0, 1.0, 2.0):
        evidence.note({"o": right["o"] + wrong}, right, torch.tensor(wrong > 0))
    assert evidence.lines([0, 4])[0].startswith("o: 16 of 16 elements, largest difference 1.000e")
    evidence.clear()
    evidence.note({"o": right["o"] + 3}, right, torch.tensor(True))
    assert "difference 3.000e" in evidence.lines([0, 4])[0]


@pytest.mark.parametrize(
    ("words", "numbers"),
    [("24", [24]), ("24-28", [24, 25, 26, 27, 28]), ("25,24", [24, 25]), ("3,1-2,2", [1, 2, 3])],
)
def test_numbers(words: str, numbers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert numbers_of(words) == numbers
    assert numbers_of(ranges(numbers)) == numbers
    monkeypatch.setattr(sys, "argv", ["graph_replays.py", "--only", words])
    assert parsed().only == numbers


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--only", "5-4"], "invalid numbers_of value: '5-4'"),
        (["--only", "4,"], "invalid numbers_of value: '4,'"),
        (["--only", "900"], "--only: the graphs have the numbers 0 to"),
        (["--no-overlap"], "--no-overlap: the CUDA library has no such option"),
        (["--poison", "some"], "invalid word_of value"),
    ],
)
def test_wrong_words(
    words: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["graph_replays.py", *words])
    with pytest.raises(SystemExit):
        parsed()
    assert why in capsys.readouterr().err


def test_poison_is_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, word in (([], None), (["--poison"], 0x5A5A5A5A), (["--poison", "0x2"], 2)):
        monkeypatch.setattr(sys, "argv", ["graph_replays.py", *words])
        assert parsed().poison == word


@pytest.mark.of_no_device
def test_no_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches that may overlap lose the option, and the others have the options that they had."""
    jit = pytest.importorskip("triton.runtime.jit", reason="Triton is not installed")
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(jit.JITFunction, "run", lambda kernel, *args, **given: seen.append(given))

    def kernel(x: Any) -> None: ...

    forbid_overlap()
    for options in ({"launch_pdl": True, "num_warps": 4}, {"num_warps": 8}):
        jit.JITFunction(kernel)[(1,)](0, **options)
    given = [{name: x for name, x in y.items() if name not in ("grid", "warmup")} for y in seen]
    assert given == [{"launch_pdl": False, "num_warps": 4}, {"num_warps": 8}]


@pytest.mark.of_no_device
def test_time() -> None:
    """A graph that has no time left stops, and its count is that of the replays that ran."""
    found = check_shape(SMALL, 40, 0, device="cpu", backend="reference", graph=Again, seconds=0.0)
    assert found.replays == 16 and not found.lines


@gpu
@pytest.mark.parametrize(
    "shape", [*FORWARD[::5], FORWARD[-1], *BACKWARD[::6]], ids=lambda x: x.words
)
def test_replays(shape: Shape, cuda: str) -> None:
    """`tests/support/graph_replays.py` makes as many as one likes."""
    assert not check_shape(shape, 12, 0).lines


@gpu
def test_poison(cuda: str) -> None:
    """The memory of a graph holds the word before each replay, wherever there is no output."""
    graphs: list[Captured] = []

    def captured(call: Call) -> Captured:
        graphs.append(Captured(call, word=0x5A5A5A5A))
        return graphs[0]

    assert not check_shape(FORWARD[24], 3, 0, graph=captured).lines
    poison = graphs[0].poison
    assert poison is not None and poison.free

    def is_poisoned() -> bool:
        with torch.cuda.stream(poison.stream), torch.cuda.use_mem_pool(poison.pool):
            blocks = [torch.empty(n // 4, dtype=torch.int32, device=cuda) for n in poison.free]
            return all(bool((x == poison.word).all()) for x in blocks)

    poison.fill(poison.free)
    torch.cuda.synchronize()
    assert is_poisoned()
    graphs[0].graph.replay()
    torch.cuda.synchronize()
    assert not is_poisoned()
