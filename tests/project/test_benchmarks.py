"""The benchmark on a CPU at toy sizes."""

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

from benchmarks import backward, conv, first_calls, host, prefill, run, stranger
from benchmarks.measure import TOLERANCES, Device, Replay, equal_share
from benchmarks.peers import PEERS, OursTriton, Peer
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
    assert os.environ["GDN_BACKEND"] == "auto"  # the run restores the variable
    records = read(tmp_path)
    assert [record["calls"] for record in records] == [f"6, {kind}" for kind in host.KINDS]
    for record in records:
        assert 0 < record["median us"] <= record["99 % us"]
    assert "| 6, two shapes in turns | " in capsys.readouterr().out
    host.main(["--dry-run", "--calls", "2", "--steps"])
    assert "| 2, prepare_step, window | " in capsys.readouterr().out
    taken = {kind: list(itertools.islice(host.lengths(kind, 5, 24), 20)) for kind in host.KINDS}
    assert taken["two shapes in turns"] == [24, 12] * 10
    assert sorted(taken["fresh lengths"]) == list(range(5, 25)) != taken["fresh lengths"]
    with pytest.raises(SystemExit):
        host.main(["--dry-run", "--calls", "0"])


def test_dry_run_of_first_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here the reference runs, for which Triton compiles nothing."""
    jsonl = ["--jsonl", str(tmp_path / "results.jsonl")]
    first_calls.main(["--dry-run", "--select", "packed|recurrent", *jsonl])
    records = read(tmp_path)
    assert [r["call"] for r in records] == [
        "forward, packed 8 x 1024",
        "recurrent_step, 64 sequences",
    ]
    for record in records:
        assert record["empty cache, s"] > 0 and record["filled cache, s"] > 0
        assert (record["kernels"], record["compiled later"]) == (0, 0)
    assert "| recurrent_step, 64 sequences | " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        first_calls.main(["--dry-run", "--select", "nothing"])


@pytest.mark.parametrize("name", first_calls.CALLS)
def test_later_calls_have_other_sizes(name: str) -> None:
    """They run, too."""
    device = Device(torch.device("cpu"))
    first, *others = first_calls.CALLS[name]
    assert first not in others and len(others) > 1
    first_calls.make_call(name, others[-1], device, strength=5.0)()


@pytest.mark.parametrize("module", [conv, first_calls, host, prefill])
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


def test_gradients_are_of_calls_with_the_same_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLA keeps its chunk indices for the tensors of lengths: all calls get the same tensors."""
    for name in ("synchronize", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    given = []

    def rule(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
        *, initial_state: torch.Tensor, cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor,
        output_final_state: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        assert cu_seqlens_cpu.tolist() == cu_seqlens.tolist() == [0, 3, 8]
        given.append((cu_seqlens, cu_seqlens_cpu))
        return v * 1, initial_state * 1

    inputs = make_inputs(backward.packed(1, 2, 4, 4, 3, 5), torch.device("cpu"))
    timed = backward.Backward(rule, inputs)
    timed.forward()
    assert len(given) == 2
    assert all(a is b for a, b in zip(*given, strict=True))
