"""`tests/support/graph_replays.py`: what it draws, what it finds wrong, and some of its replays."""

import random

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
)

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
