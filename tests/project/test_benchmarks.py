"""The benchmark on a CPU at toy sizes, and the page on records whose contents are known."""

import gc
import itertools
import json
import os
import re
import shlex
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import backward, conv, host, page, plot, prefill, rows, run, stranger
from benchmarks.measure import TOLERANCES, Device, Replay, equal_share
from benchmarks.peers import PEERS, OursTriton, Peer
from benchmarks.records import DEFAULT, EITHER, LIBRARY, Ratio, Run
from benchmarks.report import Report
from benchmarks.shapes import (
    ACCURACY,
    CHUNK,
    GATE_KINDS,
    NUMERICS,
    SPEED,
    Random,
    all_cases,
    floor_us,
    gate_kinds,
    gate_parameters,
    make_gates,
    make_inputs,
    tiny,
    with_gates,
)


def test_full_table() -> None:
    """Nine counts of heads with nineteen mixes of sequences, times only."""
    cases = all_cases("full")
    assert len({case.name for case in cases}) == len(cases) == 9 * 19
    assert all(case.measures == (SPEED,) and case.B == 1 for case in cases)
    assert {case.T for case in cases} == {2**n for n in range(11, 16)}
    assert all(case.T == sum(case.seqlens or ()) for case in cases)
    # One head count after the other, so that --select makes pieces that share their tuning.
    assert len({case.family for case in cases}) == 9
    assert [case.family for case in cases] == [c.family for c in cases[::19] for _ in range(19)]


def test_fewest_operations_and_bytes() -> None:
    """By hand, for 16/32 heads, K = V = 128, one sequence of 2048 tokens."""
    case = next(x for x in all_cases("full") if x.name == "full 16/32 1x2048")
    product = 2 * CHUNK * 128  # operations a token for one [CHUNK, 128] side of a product
    # k k^T, q k^T, A_inv x, A_qk v_new within a chunk; k h, q h and the update with the state.
    assert case.flops == 2048 * 32 * (4 * product + 3 * 2 * 128 * 128) == 2048 * 32 * 163_840
    tokens = 2048 * (2 * (2 * 16 * 128 + 2 * 32 * 128) + 4 * 2 * 32)
    assert case.bytes == tokens + 2 * 4 * 32 * 128 * 128
    rates = {"flops_per_s": 8e14, "bytes_per_s": 1e12}
    assert floor_us(case, rates) == pytest.approx(1e6 * case.bytes / 1e12)
    assert floor_us(case, {**rates, "bytes_per_s": 1e15}) == pytest.approx(1e6 * case.flops / 8e14)
    assert floor_us(case, {}) is None


def test_gates_of_every_kind() -> None:
    """By what they are: decays of a token, and which heads forget nothing."""
    rand = Random(0, torch.device("cpu"))
    made = {kind: make_gates(kind, (4, 500, 8), rand) for kind in GATE_KINDS}
    assert all(g.shape == (4, 500, 8) and g.dtype == torch.float32 for g in made.values())
    assert all(bool((g <= 0).all() and g.isfinite().all()) for g in made.values())
    assert not made["none"].any()
    mild = made["mild"]
    assert not mild[..., ::4].any() and bool((mild[..., 1:4] < 0).all())
    # The mean of softplus(x) for normal x is 0.806.
    assert mild[..., 1::4].mean().item() == pytest.approx(-0.806 / 16, rel=0.1)
    assert made["strong"].mean().item() == pytest.approx(-8.06, rel=0.05)
    A, dt_bias = gate_parameters("model", 4096, rand)
    assert 0 <= A.min() < 0.1 and 15.9 < A.max() < 16
    dt = torch.nn.functional.softplus(dt_bias.double())
    assert 1e-3 * 0.99 < dt.min() < 1.1e-3 and 0.09 < dt.max() < 0.1 * 1.01
    assert dt.log().mean().exp().item() == pytest.approx(1e-2, rel=0.1)
    with pytest.raises(ValueError, match="kind must be one of mild, model, strong, none, got 'm'"):
        make_gates("m", (1, 1, 1), rand)
    assert gate_kinds("model,mild,model") == ("model", "mild")


def test_a_case_with_other_gates() -> None:
    """The same tensors but g; nothing is done to a case whose gates are what it is for."""
    cases = all_cases()
    assert with_gates(cases, "mild") == cases
    strong = with_gates(cases, "strong")
    assert [x.name for x in strong] == [x.name for x in cases if x.group != "gates"]
    assert {(x.gate, x.gates) for x in strong} == {("strong", "strong")}
    (before,) = [tiny(x) for x in cases if x.name == "padded B2 T1000 H3 D64 mask0.5"]
    x, y = (
        make_inputs(case, torch.device("cpu")) for case in (before, *with_gates([before], "none"))
    )
    assert torch.equal(x.q, y.q) and torch.equal(x.v, y.v) and torch.equal(x.beta, y.beta)
    assert x.g.any() and not y.g.any()


def test_dry_run_of_gates_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row for each kind, which says so; --resume makes those that are missing."""
    monkeypatch.setenv("GDN_BACKEND", "reference")
    options = ["--out", str(tmp_path), "--dry-run", "--table", "full", "--resume"]
    options += ["--select", "full 2/8 1x2048"]
    assert run.main([*options, "--gates", "model"]) == 0
    assert run.main([*options, "--gates", "mild,model,none"]) == 0
    records = [record for record in read(tmp_path) if record["kind"] == SPEED]
    assert [record["gates"] for record in records] == ["model", "mild", "none"]
    assert {record["case"] for record in records} == {"full 2/8 1x2048"}
    table = (tmp_path / "speed.md").read_text()
    for label in ("full 2/8 1x2048", "full 2/8 1x2048, model gates", "full 2/8 1x2048, none gates"):
        assert f"\n| {label} | reference | " in table
    capsys.readouterr()
    assert run.main([*options, "--gates", "strong", "--list"]) == 0
    assert capsys.readouterr().out == "full 2/8 1x2048, strong gates\n"
    with pytest.raises(SystemExit):
        run.parse([*options, "--gates", "mild,weak"])
    assert "expected some of mild,model,strong,none, got weak" in capsys.readouterr().err


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "results.jsonl").read_text().splitlines()]


def test_dry_run_of_the_full_table_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_BACKEND", "reference")
    options = ["--out", str(tmp_path), "--dry-run", "--table", "full"]
    assert run.main([*options, "--select", "full 2/8 1x2048"]) == 0
    assert run.main([*options, "--select", "full 2/8 (1x|8x1)", "--resume"]) == 0
    records = [record for record in read(tmp_path) if record["kind"] == SPEED]
    names = [record["case"] for record in records]
    assert len(names) == len(set(names)) == 6 and names[0] == "full 2/8 1x2048"
    for record in records:
        assert set(record["results"]) == {"gdn_triton", "reference"}
        assert all(result["graph"] > 0 for result in record["results"].values())
    assert {record["kind"] for record in read(tmp_path)} == {"header", SPEED}
    assert run.main([*options, "--select", "full 4/16 1x", "--budget-seconds", "0"]) == 0
    assert "out of budget (5)" in (tmp_path / "summary.md").read_text()


def test_dry_run_of_equal_elements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 our kernels run step by step: the same elements. The reference differs."""
    monkeypatch.setenv("GDN_BACKEND", "triton")
    options = ["--out", str(tmp_path), "--dry-run", "--numerics"]
    if torch.cuda.is_available():
        pytest.skip("the dry run is on the CPU, where kernels only run in the interpreter")
    assert run.main([*options, "--select", "gates mixed ragged"]) == 0
    (record,) = [record for record in read(tmp_path) if record["kind"] == NUMERICS]
    assert record["tolerances"] == list(TOLERANCES)
    assert record["results"]["gdn_triton"] == {"o": [1.0] * 3, "state": [1.0] * 3}
    assert record["results"]["reference"]["o"][0] < 1 == record["results"]["reference"]["o"][2]
    assert "100.000% 100.000% 100.000%" in (tmp_path / "numerics.md").read_text()


def test_dry_run_of_the_convolution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record for each row of each table, and all of them in the output."""
    monkeypatch.setenv("GDN_BACKEND", "reference")
    conv.main(["--dry-run", "--jsonl", str(tmp_path / "results.jsonl")])
    records = read(tmp_path)
    titles = [record.pop("table") for record in records]
    assert [titles.count(title) for title in dict.fromkeys(titles)] == [2, 2, 1, 4, 1]
    assert [record["sequences"] for record in records[2:4]] == ["10 x 2", "4 x 5"]
    assert records[0]["same bits"] and records[1]["same bits"]
    measured = [x for record in records for x in record.values() if isinstance(x, float)]
    assert len(measured) == 2 * 5 + 2 * 3 + 3 + 4 * 2 + 4 and min(measured) > 0
    text = capsys.readouterr().out
    assert all(f"\n{title}\n\n| " in text for title in titles)
    # By hand: 8192 channels of 16 bits in and out, 32 gates of two kinds, in 16 and out in 32 bits.
    assert conv.MODEL.bytes(1) == 2 * 16384 + 2 * 32 * (2 + 4) == 33_152


def test_dry_run_of_the_prefill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GDN_BACKEND", "reference")
    options = ["--dry-run", "--jsonl", str(tmp_path / "results.jsonl"), "--gates", "mild,strong"]
    prefill.main(options)
    first, strong, second, _ = read(tmp_path)
    assert (first["gates"], strong["gates"]) == ("mild", "strong") and strong["same bits"]
    assert (first["sequences"], first["states"]) == ("1 x 128", "float32")
    assert (second["sequences"], second["states"]) == ("3 x 20", "bfloat16")
    for record in (first, second):
        assert record["same bits"]
        assert sum(isinstance(x, float) and x > 0 for x in record.values()) == 4
    assert "| 3 x 20 | 1/2 | bfloat16 | " in capsys.readouterr().out


def test_dry_run_of_host_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GDN_BACKEND", "auto")
    host.main(["--dry-run", "--calls", "6", "--jsonl", str(tmp_path / "results.jsonl")])
    records = read(tmp_path)
    assert [record["calls"] for record in records] == [f"6, {kind}" for kind in host.KINDS]
    for record in records:
        assert 0 < record["median us"] <= record["99 % us"]
    assert "| 6, two shapes in turns | " in capsys.readouterr().out
    taken = {kind: list(itertools.islice(host.lengths(kind, 5, 24), 20)) for kind in host.KINDS}
    assert taken["two shapes in turns"] == [24, 12] * 10
    assert sorted(taken["fresh lengths"]) == list(range(5, 25)) != taken["fresh lengths"]
    with pytest.raises(SystemExit):
        host.main(["--dry-run", "--calls", "0"])


@pytest.mark.parametrize("module", [conv, host, prefill])
def test_times_need_a_gpu(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="a CUDA GPU"):
        module.main([])


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu("a call is captured in a graph"))]
)
def test_a_replay_keeps_the_tensors_it_reads(device: str) -> None:
    """A capture gives unused memory back, so another one after this would leave it nothing."""
    x = torch.ones(4, device=device)
    tensor = weakref.ref(x)
    replay = Replay(partial(torch.neg, x), Device(torch.device(device)))
    del x
    gc.collect()
    assert tensor() is not None
    replay.run()


def test_equal_share() -> None:
    x = torch.tensor([0.0, 1.0, 100.0, float("nan")])
    y = torch.tensor([0.0, 1.001, 100.5, float("nan")])
    assert [equal_share(x, y, tolerance) for tolerance in (0, 1e-3, 1e-2)] == [0.25, 0.5, 0.75]


def test_backend_of_a_column_is_set_for_its_calls_only(monkeypatch: pytest.MonkeyPatch) -> None:
    column = object.__new__(OursTriton)
    for before in (None, "reference"):
        monkeypatch.delenv("GDN_BACKEND", raising=False)
        if before is not None:
            monkeypatch.setenv("GDN_BACKEND", before)
        with column.chosen():
            assert os.environ["GDN_BACKEND"] == "triton"
        assert os.environ.get("GDN_BACKEND") == before
        with object.__new__(PEERS["fla"]).chosen():
            assert os.environ.get("GDN_BACKEND") == before


# ---------------------------------------------------------------------------------------- the page

HEADER = {
    "kind": "header",
    "date": "2026-01-01 00:00 UTC",
    "command": "python -m benchmarks.run --out DIR --table full --commit x --budget-seconds 9 "
    "--resume --peers fla,flashinfer",
    "commit": "abc",
    "gpu": "a GPU",
    "driver": "1",
    "power limit": "2 W",
    "bytes_per_s": 4e12,
    "flops_per_s": 8e14,
    "python": "3",
    "torch": "2",
    "triton": "3",
    "GDN_BACKEND": "auto",
    "implementations": {"gdn_triton": "0", "FLA": "1", "FlashInfer": "2"},
    "missing": ["FlashQLA: not measured: ImportError: no"],
}


def speed(case: str, ours: float, fla: float, flashinfer: float | None) -> dict[str, Any]:
    def cells(graph: float) -> dict[str, Any]:
        return {"graph": graph, "graph_min": graph, "call": graph + 9, "host": 50.0, "extra": 10**6}

    results: dict[str, Any] = {"gdn_triton": cells(ours), "FLA": cells(fla)}
    results["FlashInfer"] = {"skipped": "no"} if flashinfer is None else cells(flashinfer)
    return {"kind": "speed", "case": case, "backend": "triton", "results": results}


@pytest.fixture
def records(tmp_path: Path) -> Path:
    path = tmp_path / "some.jsonl"
    numerics = {"gdn_triton": {"o": [0.5, 0.75, 1.0], "state": [0.25, 0.75, 1.0]}}
    lines = [
        HEADER,
        speed("full 2/8 1x32768", 100.0, 200.0, 150.0),
        speed("full 2/8 1x16384", 100.0, 200.0, 80.0),
        speed("full 2/8 1x8192", 100.0, 200.0, 50.0),
        speed("full 2/8 1x4096", 100.0, 120.0, None),
        {"kind": "speed", "case": "full 4/16 1x2048", "refused": "o differs", "results": {}},
        {"kind": "numerics", "case": "full 2/8 1x4096", "tolerances": [0.0, 0.001, 0.01],
         "results": numerics},
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_page_lists_losses_first(records: Path) -> None:
    text = rows.section(Run(records))
    graphs = text[text.index("## Time on the GPU") : text.index("## Calls")]
    found = [line.split(" | ") for line in graphs.splitlines() if line.startswith("| full")]
    assert [row[0] for row in found] == [
        "| full 2/8 1x8192",
        "| full 2/8 1x16384",
        "| full 2/8 1x32768",
        "| full 2/8 1x4096",
    ]
    assert [row[5] for row in found] == ["0.50", "0.80", "1.50", "1.20"]
    # 8192 tokens, 8 heads: 10.7 GFLOP in 100 us, of which 8e14 a second would take 13.4 us.
    assert found[0][6] == "107" and found[0][8] == "13% |"
    assert found[3][4] == "", "a number where nothing was measured"


def test_losses_are_named_for_each_kind_of_gates(tmp_path: Path) -> None:
    """In the page, in the plot and in the summary of a run. A row without a kind is mild."""
    path = tmp_path / "results.jsonl"
    lines = [
        HEADER,
        speed("full 2/8 1x8192", 100.0, 200.0, 150.0),
        {**speed("full 2/8 1x8192", 100.0, 90.0, 150.0), "gates": "model"},
        {**speed("full 2/8 1x4096", 100.0, 110.0, 80.0), "gates": "model"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = rows.section(Run(path))
    graphs = text[text.index("## Time on the GPU") : text.index("## Calls")]
    found = [line.split(" | ") for line in graphs.splitlines() if line.startswith("| full")]
    assert [(row[0], row[5]) for row in found] == [
        ("| full 2/8 1x4096, model gates", "0.80"),
        ("| full 2/8 1x8192, model gates", "0.90"),
        ("| full 2/8 1x8192", "1.50"),
    ]
    assert "- With mild gates: On the GPU FLA takes 2.00 times as long" in text
    assert (
        "- With model gates: On the GPU FLA takes 0.99 times as long as gdn_triton in the "
        "geometric mean of 2 rows, 0.90 at the least (full 2/8 1x8192, model gates); it is faster "
        "in 1: full 2/8 1x8192, model gates (0.90)."
    ) in text
    report = Report(tmp_path, "gdn_triton", "FLA", True)
    summary, _ = report.summary()
    assert "mild gates, graph replay slower than the fastest other on 0: none" in summary
    assert (
        "model gates, graph replay slower than the fastest other on 2: full 2/8 1x4096, model "
        "gates (FlashInfer 0.80), full 2/8 1x8192, model gates (FLA 0.90)"
    ) in summary


def test_page_says_what_was_run_and_what_was_not(records: Path) -> None:
    text = rows.section(Run(records))
    command = "python -m benchmarks.run --out DIR --table full --peers fla,flashinfer\n"
    assert command in text
    assert "Refused: speed full 4/16 1x2048: o differs." in text
    assert "Not in this run: FlashQLA. " in text
    assert "On the GPU FlashInfer takes 0.84 times as long as gdn_triton in the geometric" in text
    assert (
        "of 3 rows, 0.50 at the least (full 2/8 1x8192); it is faster in 2: "
        "full 2/8 1x8192 (0.50), full 2/8 1x16384 (0.80)."
    ) in text
    # 1 MB beside 42.9 MB of inputs and outputs.
    assert "| full 2/8 1x8192 | 2% | 2% | 2% |" in text


def alone(name: str, *times: tuple[str, float, float]) -> list[dict[str, Any]]:
    """A run of ours beside one implementation: case, our time, its time."""
    command = f"python -m benchmarks.run --out there --table full --peers {name.lower()}"
    header = HEADER | {"command": command, "implementations": {"gdn_triton": "0", name: "1"}}
    lines = [header]
    for case, ours, other in times:
        lines.append(speed(case, ours, other, None))
        results = lines[-1]["results"]
        lines[-1]["results"] = {"gdn_triton": results["gdn_triton"], name: results["FLA"]}
    return lines


def test_page_of_peers_in_processes_of_their_own(tmp_path: Path) -> None:
    """Ratios are within a process, though the table shows the median of ours."""
    path = tmp_path / "apart.jsonl"
    note = {"kind": "note", "heading": "Each alone", "text": "Because of this."}
    lines = [
        note,
        *alone("FLA", ("full 2/8 1x8192", 100.0, 150.0), ("full 2/8 1x4096", 40.0, 80.0)),
        *alone("FlashInfer split", ("full 2/8 1x8192", 120.0, 108.0)),
        {"kind": "speed", "case": "full 2/8 1x4096", "refused": "o differs", "results": {}},
    ]
    lines[5]["results"]["gdn_triton"]["host"] = 70.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_ = Run(path)
    text = rows.section(run_)
    assert text.startswith("# Each alone\n") and "\nBecause of this.\n" in text
    for peer in ("fla", "flashinfer split"):
        assert f"python -m benchmarks.run --out DIR --table full --peers {peer}\n" in text
    assert "FLA 1, FlashInfer split 1, at abc" in text
    assert "2 runs, each in a process" in text and "most 20.0% in a row" in text
    assert "GPU FLA takes 1.73 times as long" in text, "of 150 / 100 and 80 / 40"
    assert "0.90 at the least (full 2/8 1x8192); it is faster in 1: full 2/8 1x8192 (0.90)" in text
    assert "The most host time of a call is 70 us (full 2/8 1x8192)." in text
    assert "Refused: speed full 2/8 1x4096: o differs." in text
    assert "Not in this run: FlashQLA. " in text
    found = [line.split(" | ")[:6] for line in text.splitlines() if line.startswith("| full")]
    assert found[0] == ["| full 2/8 1x8192", "triton", "110", "150", "108", "0.90"]
    assert found[1] == ["| full 2/8 1x4096", "triton", "40", "80", "", "2.00"]
    ratios = {(x.other, x.case): x.value for x in page.forward_ratios(run_)}
    assert ratios == {
        ("FLA", "2/8 1x8192"): 1.5,
        ("FLA", "2/8 1x4096"): 2.0,
        ("FlashInfer", "2/8 1x8192"): 0.9,
    }


def test_table_of_equal_elements(records: Path) -> None:
    assert rows.numerics_table(Run(records)).splitlines()[2] == (
        "| full 2/8 1x4096 | gdn_triton | 50.000% | 75.000% | 100.000% "
        "| 25.000% | 75.000% | 100.000% |"
    )


def write_records(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """A prefill on the CUDA library beside our Triton kernels, decode steps and gradients."""
    both = speed("full 16/32 1x8192", 100.0, 300.0, 125.0) | {"backend": "cuda", "gates": "model"}
    both["results"]["gdn_triton Triton"] = both["results"]["FLA"] | {"graph": 200.0}
    both["results"]["FlashInfer split"] = both["results"]["FLA"] | {"graph": 80.0}
    older = json.loads(json.dumps(both))
    older["results"]["FLA"]["graph"] = 900.0
    kinds = {"float32": 5.0, "bfloat16": 4.0}
    steps = [
        {
            "kind": "decode", "sequences": 8, "heads": "16/32", "pool": pool, "roof": 8.0,
            "results": {
                "gdn_triton, key-first": {"time": 10.0},
                "gdn_triton, value-first": {"time": 16.0},
                "FlashInfer, pool, value-first": {"time": 2 * time},
                "FlashInfer, states, key-first": {"time": 40.0},
                "FLA, states": {"skipped": "no"},
            },
        }
        for pool, time in kinds.items()
    ]  # fmt: skip
    names = ("gdn_triton", "triton", "fla", "flashqla")
    times = {name: {"backward": 10.0 * n, "call": 20.0 * n, "kept": 0, "peak": 2**20}
             for n, name in enumerate(names, 1)}  # fmt: skip
    times["flashqla"] = {"error": "no"}
    gradients = {"kind": "times", "case": "backward 16/32 K 128 V 128 512+512", "results": times}
    of_times = {**HEADER, "implementations": dict.fromkeys(names, "1")}
    return [
        write_records(tmp_path / "a.jsonl", [HEADER, both]),
        write_records(tmp_path / "b.jsonl", [{**HEADER, "date": "2025-12-31"}, older]),
        write_records(tmp_path / "c.jsonl", [HEADER, *steps]),
        write_records(tmp_path / "d.jsonl", [of_times, gradients]),
    ]


def test_the_default_install_is_a_peer_of_the_backward_where_the_library_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the CUDA library it is gdn_triton itself, and no second column."""
    monkeypatch.setattr("gdn_triton.fast.why_unavailable", lambda: "It was not built.")
    with pytest.raises(RuntimeError, match=r"without the CUDA library\. It was not built\."):
        backward.load(backward.TRITON)
    monkeypatch.setattr("gdn_triton.fast.why_unavailable", lambda: None)
    assert backward.load(backward.TRITON) is backward.load(backward.OURS)
    assert backward.BACKENDS == {backward.TRITON: "triton"}


def test_ratios_of_each_install(files: list[Path]) -> None:
    """The default install has the Triton kernels; the fastest variant of a peer counts; of a call
    in two files that of the later one."""
    ratios = page.all_ratios(files)
    assert {x.device for x in ratios} == {"a GPU"}
    found = {x[1:5]: x.value for x in ratios if x.other in page.OTHERS}
    prefill_, training = "Prefill, gates of a model", "Training step (forward and backward)"
    case, step, trained = "16/32 1x8192", "8 sequences, 16/32", "16/32 2x512"
    expected = {
        (prefill_, DEFAULT, "FLA", case): 1.5,
        (prefill_, DEFAULT, "FlashInfer", case): 0.4,
        (prefill_, LIBRARY, "FLA", case): 3.0,
        (prefill_, LIBRARY, "FlashInfer", case): 0.8,
        ("Decode step, float32 pool, key-first", EITHER, "FlashInfer", step): 1.0,
        ("Decode step, float32 pool, value-first", EITHER, "FlashInfer", step): 0.625,
        ("Decode step, bfloat16 pool, key-first", EITHER, "FlashInfer", step): 0.8,
        ("Decode step, bfloat16 pool, value-first", EITHER, "FlashInfer", step): 0.5,
        (training, DEFAULT, "FLA", trained): 1.5,
        (training, LIBRARY, "FLA", trained): 3.0,
        ("Backward alone", DEFAULT, "FLA", trained): 1.5,
        ("Backward alone", LIBRARY, "FLA", trained): 3.0,
    }
    assert found == pytest.approx(expected)
    # Prefill first, the default install before the other; then decode, training, the backward.
    assert [x.what.split(" ")[0] for x in ratios if x.other == "FLA"] == (
        ["Prefill,"] * 2 + ["Training"] * 2 + ["Backward"] * 2
    )


def test_tables_name_every_loss(files: list[Path]) -> None:
    made = page.parts(files)
    prefill_ = "| a GPU | Prefill, gates of a model |"
    assert (
        f"{prefill_} default (Triton) | 1.50 (0 of 1) | **0.40** (1 of 1) | - |\n"
        in (made["summary"])
    )
    assert (
        f"{prefill_} with the CUDA library | 3.00 (0 of 1) | **0.80** (1 of 1) | - |\n"
        in (made["short"])
    )
    lost = [line.split(" | ")[:4] for line in made["losses"].splitlines()[2:]]
    assert [line[0].removeprefix("| ") for line in lost] == [
        "Prefill, gates of a model",
        "Prefill, gates of a model",
        "Decode step, bfloat16 pool, key-first",
        "Decode step, bfloat16 pool, value-first",
        "Decode step, float32 pool, value-first",
    ]
    assert "| FlashInfer | 1 of 1 | 16/32 1x8192: 0.40 |\n" in made["losses"]


def test_records_need_a_header(tmp_path: Path) -> None:
    """Those of benchmarks.conv, host and prefill have none: no page shows them."""
    path = write_records(tmp_path / "a.jsonl", [{"sequences": "1 x 2"}])
    with pytest.raises(ValueError, match="no record of kind header"):
        page.all_ratios([path])


def test_marked_places_are_filled() -> None:
    text = "a\n<!-- benchmarks: x -->\nold\n<!-- benchmarks end -->\nb\n"
    once = page.filled(text, {"x": "| 1 |\n"})
    assert once == "a\n<!-- benchmarks: x -->\n\n| 1 |\n\n<!-- benchmarks end -->\nb\n"
    assert page.filled(once, {"x": "| 1 |\n"}) == once
    with pytest.raises(KeyError):
        page.filled(text, {"y": ""})


def test_rows_of_steps_and_gradients(files: list[Path]) -> None:
    text = page.rows_page(files[2])
    assert text.startswith("# Decode steps\n") and "The records are in `c.jsonl`." in text
    assert "| 8, 16/32, float32 | 8.00 | 10.00, 80 % | 16.00, 50 % | 10.00, 80 % |" in text
    text = page.rows_page(files[3])
    assert "| 16/32 K 128 V 128 512+512 | 10 / 20, 0 / 1 MiB | 20 / 40, 0 / 1 MiB |" in text


def test_plots_show_the_ratios(files: list[Path]) -> None:
    data = plot.plots(page.all_ratios(files))
    assert list(data) == ["prefill.svg", "decode.svg", "training.svg"]
    assert data["prefill.svg"]["rows"] == {
        "16/32 1x8192, 100 us": {"FLA": 3.0, "gdn_triton Triton": 2.0, "FlashInfer": 0.8}
    }
    assert data["decode.svg"]["panels"]["float32 pool"] == {
        "gdn_triton, key-first": {"8": 80.0},
        "gdn_triton, value-first": {"8": 50.0},
        "FlashInfer": {"8": 80.0},
    }
    assert data["training.svg"]["rows"] == {
        "16/32 2x512, 20 us": {"FLA": 3.0, "gdn_triton Triton": 2.0}
    }
    mild = Ratio("GPU", "Prefill, mild gates", LIBRARY, "FLA", "2/8 1x2048", 2.0, 1.0)
    assert plot.plots([mild]) == {}, "a call that is not among those that are plotted"


def test_plots_without_matplotlib(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert list(plot.write(plot.plots(page.all_ratios(files)), tmp_path / "x")) == [plot.MISSING]
    assert not (tmp_path / "x").exists()


def test_plots_with_matplotlib(files: list[Path], tmp_path: Path) -> None:
    """The same numbers give the same file, which says so."""
    pytest.importorskip("matplotlib", reason="matplotlib draws the plots and is not installed")
    data = plot.plots(page.all_ratios(files))
    drawn = []
    for _ in range(2):
        assert len(list(plot.write(data, tmp_path))) == 3
        drawn.append({name: (tmp_path / name).read_text() for name in data})
    assert drawn[0] == drawn[1]
    for name, text in drawn[0].items():
        assert plot.digest(data[name]) in text and "gdn_triton" in text


def test_every_main_case_that_is_timed_is_also_checked() -> None:
    assert all(ACCURACY in case.measures for case in all_cases() if SPEED in case.measures)
    assert all(issubclass(peer, Peer) for peer in PEERS.values())


def test_stranger_runs_the_command_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The steps are the README's own; then those of another one, which prints what a run prints."""
    *setup, last = stranger.main_command(stranger.README.read_text(encoding="utf-8"))
    assert [step[0] for step in setup] == ["python3", ".venv/bin/pip"]
    assert last == [".venv/bin/python", "-m", "gdn_triton"]

    def timed(*printed: str) -> str:
        code = "".join(f"print({line!r});" for line in printed)
        steps = [[sys.executable, "-c", "open('made', 'w')"], [sys.executable, "-c", code]]
        text = " && ".join(shlex.join(step) for step in steps)
        (tmp_path / "README.md").write_text(f"{stranger.MARKER}\n```bash\n{text}\n```\n")
        monkeypatch.setattr(stranger, "README", tmp_path / "README.md")
        assert stranger.main([]) == 0
        return capfd.readouterr().out

    shown = timed("machine: CPU (toy)", "error: o 1e-7: OK", "time: 1 ms")
    assert re.search(r"^CPU \(toy\); \d+ cores$", shown, re.M)
    shown_rows = re.findall(r"^\| (.*) \| (\d+) \| (\d+) \|$", shown, re.M)
    assert len(shown_rows) == 2 and "until its number is right" in shown_rows[1][0]
    assert not (stranger.ROOT / "made").exists(), "a step ran in the checkout itself"
    with pytest.raises(SystemExit, match="printed no line"):
        timed("machine: CPU (toy)", "error: o 1.0: FAILED")
