"""Builds of the CUDA library beside each other, without a GPU: `benchmarks.builds`."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from choice_cases import problem

from benchmarks import builds
from benchmarks.shapes import TABLES, all_cases, tiny
from gdn_triton._host.backends import GradientKernels
from gdn_triton.chunk import backends

ROW = "full 16/32 1x2048"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fingerprint_of_every_bit(dtype: torch.dtype) -> None:
    """One bit of any element, two elements in each other's place, and the sign of a zero."""
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0] = 0
    words = x.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
    seen = builds.fingerprint([x])
    for i in range(15):
        for bit in range(8 * x.element_size() - 1):
            words.view(-1)[i] ^= 1 << bit
            assert builds.fingerprint([x]) != seen
            words.view(-1)[i] ^= 1 << bit
    assert builds.fingerprint([x]) == seen
    assert builds.fingerprint([x.flip(0)]) != seen
    x[0, 0] = -0.0
    assert builds.fingerprint([x]) != seen


def test_summary_by_hand() -> None:
    """Ratios over the first build, by family, and the extremes in order."""
    records = [
        {
            "case": f"full {heads} 1x{T}",
            "gates": "mild",
            "us": {"a": 100.0, "b": us},
            "other_bits": ["b"] if us == 50 else [],
        }
        for heads, T, us in (("16/32", 2048, 50.0), ("16/32", 4096, 200.0), ("2/8", 2048, 110.0))
    ]
    text = builds.summary(records, ["a", "b"], extremes=1)
    assert "| full 16/32 | 2 | 1.000 | 2.000 |" in text
    assert "| all | 3 | 1.032 | 2.000 |" in text
    assert "1 of 3 rows have other bits." in text
    assert "| full 16/32 1x2048 | 100.0 | 50.0 | 0.500 | other |" in text
    assert "| full 16/32 1x4096 | 100.0 | 200.0 | 2.000 | same |" in text
    assert "| full 2/8 1x2048 |" not in text


def test_processes_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes, on the reference: a record of each row, and the same bits. The variables
    that are set for them are restored."""
    before = dict(os.environ)
    rows = tmp_path / "rows.jsonl"
    options = ["--select", f"^{ROW}$", "--gates", "mild,none", "--turns", "1", "--jsonl", str(rows)]
    assert builds.main(["before.so", "after.so", "--dry-run", *options]) == 0
    records = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [x["gates"] for x in records] == ["mild", "none"]
    for record in records:
        assert set(record["us"]) == {"1 before", "2 after"} and min(record["us"].values()) > 0
        assert record["other_bits"] == []
    assert "0 of 2 rows have other bits." in capsys.readouterr().out
    assert dict(os.environ) == before


@pytest.mark.long(9)
def test_error_of_a_process() -> None:
    """An error is the build's, with its sentence, and the processes serve what comes after it."""
    pair = [builds.Build(name, Path("none.so"), dry_run=True) for name in ("a", "b")]
    case = next(x for x in all_cases("full") if x.name == ROW)
    wrong = builds.Job(replace(tiny(case), gate="no such kind"), False)
    try:
        with pytest.raises(RuntimeError, match=r"a: .*no such kind"):
            builds.measure(wrong, pair, turns=1)
        record = builds.measure(builds.Job(tiny(case), False), pair, turns=1)
        assert record["other_bits"] == []
        pair[1].process.kill()
        with pytest.raises(RuntimeError, match="b: its process ended with status -9"):
            builds.measure(builds.Job(tiny(case), False), pair, turns=1)
    finally:
        for build in pair:
            build.stop()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["a.so"], "expected at least two libraries, got 1"),
        (["a.so", "b.so"], "no such library: a.so, b.so"),
        (["a.so", "b.so", "--dry-run", "--turns", "0"], "--turns must be at least 1, got 0"),
        (["a.so", "b.so", "--dry-run", "--table", "backward"], "--dry-run has no times of"),
    ],
)
def test_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        builds.main(options)
    assert message in capsys.readouterr().err


def test_every_table_has_jobs() -> None:
    args = builds.parse(["a.so", "b.so", "--dry-run", "--table", *TABLES])
    args.table.append(builds.BACKWARD)
    jobs = builds.jobs_of(args)
    assert {job.case.dtype for job in jobs} == {torch.float32}  # a dry run's
    args = builds.parse([__file__, __file__, "--dtype", "float16", "--select", f"^{ROW}$"])
    assert [(x.case.name, x.case.dtype) for x in builds.jobs_of(args)] == [(ROW, torch.float16)]
    assert {job.case.name.split()[0] for job in jobs if job.is_backward} == {"backward"}
    assert sum(not job.is_backward for job in jobs) == sum(len(all_cases(x)) for x in TABLES)


def test_words_of_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build's process recognises the library's own backward by the words of `explain`."""
    for name in ("supports", "backward_supports", "backward_wasteful"):
        monkeypatch.setattr(backends.cuda_support, name, lambda problem: None)
    made_by = backends.CHUNK.backends[0].supports(problem(needs_grad=True))
    assert isinstance(made_by, GradientKernels) and made_by.sentence == builds.BY_LIBRARY
