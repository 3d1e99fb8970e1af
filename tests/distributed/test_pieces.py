"""How a rank's row of tokens is cut into pieces for the CUDA library, and what its operators get
for them, by operators that note their arguments."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from choice_cases import problem
from helpers import BF16
from shard_cases import Case, make_call
from stage_cases import contexts, local_inputs, run_stages

from gdn_triton import fast
from gdn_triton.chunk.cuda import calls, parts, support
from gdn_triton.chunk.sharded.cuda import pieces_of
from gdn_triton.fast.architectures import ARCHITECTURES
from gdn_triton.fast.arguments import ARGUMENTS

CASES = [
    Case("one", "one sequence, a rank in the middle", (300,), 3),
    Case(
        "packed", "whole sequences around one that is split", (50, 0, 200, 1, 90, 40), 2, (160, 221)
    ),
    Case("zigzag", "two slots a rank", (150, 100), 2, layout="zigzag"),
    Case("inside", "no sequence is split", (70, 80), 2, (70, 80)),
    Case("orphans", "tokens of no sequence", (100,), 2, (60, 57), orphans=17),
    Case("empty", "a rank without tokens", (40, 9), 3, (0, 23, 26)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pieces_cover_the_sequences_of_a_rank(case: Case) -> None:
    for context in contexts(case, "cpu"):
        layout = context._shard_layout
        pieces = pieces_of(layout)
        rows = [(piece.rows.start, piece.rows.stop) for piece in pieces]
        ends = [0, *itertools.accumulate(stop - start for start, stop in rows)]
        assert rows == list(itertools.pairwise(ends)) and ends[-1] == layout.offsets[-1]
        sequences = [range(p.sequences.start, p.sequences.stop) for p in pieces]
        assert [n for some in sequences for n in some] == list(range(context.num_seqs))
        for piece in pieces:
            if not piece.crosses:
                assert piece.place == -1
                continue
            n, interval = piece.sequences.start, layout.intervals[piece.place]
            assert piece.sequences.stop == n + 1
            assert piece.comes == (bool(interval.before) and n == interval.first)
            assert piece.leaves == (bool(interval.after) and n == interval.last)
        assert sum(p.comes for p in pieces) == sum(bool(i.before) for i in layout.intervals)
        assert sum(p.leaves for p in pieces) == sum(bool(i.after) for i in layout.intervals)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The calls of the operators, which write zeros."""
    found: list[tuple[str, dict[str, Any]]] = []
    outputs = ("carry", "o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dh0", "gate_sums")

    def named(name: str) -> Callable[..., None]:
        def run(*given: Any) -> None:
            passed = dict(zip(ARGUMENTS[name], given, strict=True))
            for output in outputs:
                if passed.get(output) is not None:
                    assert passed[output].is_contiguous(), f"{name}: {output}"
                    passed[output].zero_()
            found.append((name, passed))

        return run

    monkeypatch.setattr(calls, "library_operator", named)
    monkeypatch.setattr(calls, "ask", lambda name, sizes, *more: 0)
    monkeypatch.setattr(calls, "workspace_floats", lambda *sizes: 1)
    monkeypatch.setattr(calls, "backward_floats", lambda *sizes, checkpoint_interval: 1)
    monkeypatch.setattr(parts, "_floats", lambda name, *sizes: 4 * 128 * 128)
    monkeypatch.setattr(support, "supports", lambda problem: None)
    monkeypatch.setattr(fast, "architecture_on", lambda device: ARCHITECTURES[9, 0])
    monkeypatch.setenv("GDN_BACKEND", "cuda")
    return found


def sized(case: Case) -> Case:
    return replace(case, dtype=BF16, K=128, V=128, HV=2, chunk_size=64, backend="cuda")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_operators_get_the_pieces(case: Case, noted: list[tuple[str, dict[str, Any]]]) -> None:
    case = sized(case)
    x, do, dht = make_call(case, "cpu")
    found = run_stages(case, x, do, dht)
    for context, results in zip(contexts(case, "cpu"), found, strict=True):
        local = local_inputs(case, context, x)
        for name in ("q", "k", "v", "g", "beta"):
            assert results[f"d{name}"].shape == local[name].shape
            assert not results[f"d{name}"].any()  # tokens of no sequence included
        assert results["o"].shape == local["v"].shape and not results["o"].any()
    pieces = [p for context in contexts(case, "cpu") for p in pieces_of(context._shard_layout)]
    crossing = [p for p in pieces if p.crosses]
    by_name = {name: [passed for other, passed in noted if other == name] for name in ARGUMENTS}
    whole = sum(p.rows.stop > p.rows.start for p in pieces if not p.crosses)
    assert len(by_name["chunk_forward"]) == len(by_name["chunk_backward"]) == whole
    for piece, maps, walk in zip(
        crossing, by_name["part_forward_maps"], by_name["part_forward_walk"], strict=True
    ):
        tokens = piece.rows.stop - piece.rows.start
        assert maps["q"].shape[1] == walk["o"].shape[1] == tokens
        assert (maps["carry"] is not None) == piece.leaves
        assert maps["comes"] == piece.comes
        # A state that comes is that of the exchange, and the caller's is not read.
        assert (maps["initial_state"] is None) == piece.comes
        assert (walk["initial_state"] is not None) == piece.comes
        assert maps["starts"] is walk["starts"] and maps["workspace"] is walk["workspace"]
    backward = by_name["part_backward"]
    first = [passed for passed in backward if not passed["walks"]]
    second = [passed for passed in backward if passed["walks"]]
    for piece, maps, walk in zip(crossing, first, second, strict=True):
        assert (maps["carry"] is not None) == piece.comes and walk["carry"] is None
        assert maps["dq"] is walk["dq"] and maps["workspace"] is walk["workspace"]
        assert maps["starts"] is walk["starts"]


def test_gradients_of_other_heads_are_by_triton(noted: list[tuple[str, dict[str, Any]]]) -> None:
    """The reason names what the library's backward of a part takes."""
    given = problem(device="cuda:0", K=64, V=128, q_dtype=BF16, needs_grad=True)
    assert "K = V = 128 in bfloat16; K is 64" in (support.why_no_part_gradients(given) or "")
