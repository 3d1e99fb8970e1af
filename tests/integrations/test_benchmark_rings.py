"""The benchmark of SGLang's rings on a CPU: ours against float64, and SGLang's own files where its
wheel is given."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_kernels import be_lenient
from engine_sources import WHEELS, wheel_of

from benchmarks import engines, rings
from benchmarks.layer_calls import Sizes
from benchmarks.measure import GATE, device_for

SIZES = Sizes(1, 2, 32, 32)


def test_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GDN_BACKEND", "reference")
    path = tmp_path / "rings.jsonl"
    rings.main(["--dry-run", "--jsonl", str(path)])
    head, *records = [json.loads(line) for line in path.read_text().splitlines()]
    why = "SGLang: not measured: --engines names no folder"
    assert head["missing"] == [why] and head["commit"] and head["gpu"] == "none (CPU)"
    calls = [(x["what"], x["states"], x["sequences"]) for x in records]
    assert calls == [
        (what, states, 17)
        for what in ("one token", "4 drafts", "fold")
        for states in ("float32", "float16")
    ]
    for record in records:
        row = record["results"]["gdn_triton"]
        assert row["time"] > 0 and row["same bits"] and "SGLang" not in record["results"]
        measured = {
            "one token": {"o", "u", "k", "state"},
            "4 drafts": {"o", "u", "k"},
            "fold": {"state"},
        }
        assert set(row["errors"]) == measured[record["what"]]
        assert max(row["errors"].values()) < 5e-4
        if record["states"] == "float32":
            assert max(x for name, x in row["errors"].items() if name != "o") < 1e-6
    text = capsys.readouterr().out
    assert f"\n{why}\n" in text and head["commit"] in text
    last = [line for line in text.splitlines() if line.startswith("| fold | float16 | 17 | ")]
    assert len(last) == 1 and last[0].endswith(" | yes | - | - |")


WRITTEN = [
    *((what, field) for what in (rings.ONE, rings.SEVERAL) for field in ("out", "d", "k_rows")),
    *((what, "state") for what in rings.OWN),
    (rings.FOLD, "counts"),
]


@pytest.mark.parametrize("what, field", WRITTEN)
def test_a_wrong_one_is_not_timed(what: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong one also adds 1 to one of its tensors. The verification of drafts only reads the
    states."""
    monkeypatch.setenv("GDN_BACKEND", "reference")
    names = {"d": "d_cache", "k_rows": "k_cache", "counts": "write_pos", "out": "out"}
    names["state"] = "initial_state" if what == rings.ONE else "checkpoint_state"

    def wrong(*args: Any, **given: Any) -> None:
        rings.OWN[what](*args, **given)
        given[names[field]].add_(1)

    functions = {"ours": rings.OWN, "wrong": {what: wrong}}
    device = device_for(dry_run=True)
    found = rings.measure(what, SIZES, 17, torch.float32, device, functions, 1)["results"]
    assert found["ours"]["time"] > 0
    assert set(found["wrong"]) == {"skipped"} and "RuntimeError" in found["wrong"]["skipped"]


def test_no_files(no_engines: None, tmp_path: Path) -> None:
    functions, versions, missing = rings.functions_of(tmp_path)
    assert list(functions) == list(versions) == ["gdn_triton"]
    assert len(missing) == 1 and missing[0].startswith("SGLang: not measured: ModuleNotFoundError")


@pytest.mark.parametrize("what", list(rings.OWN))
def test_sglang(
    what: str, no_engines: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("without a GPU, kernels run in Triton's interpreter only")
    wheel_of("sglang")
    pytest.importorskip("einops", reason="files of SGLang import einops")
    engines.pack(Path(os.environ[WHEELS]), tmp_path)
    be_lenient(monkeypatch)
    monkeypatch.setenv("GDN_BACKEND", "reference")
    properties = SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *args: properties)
    functions, versions, missing = rings.functions_of(tmp_path)
    assert versions["SGLang"] == engines.VERSIONS["sglang"] and missing == []
    device = device_for(dry_run=True)
    record = rings.measure(what, SIZES, 3, torch.float32, device, functions, 1)
    row = record["results"]["SGLang"]
    assert "skipped" not in row and row["same bits"] and max(row["errors"].values()) < GATE, row
