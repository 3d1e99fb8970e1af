"""The benchmark of a layer's part on a CPU: ours against float64, the calls of the engines against
their own files where their wheels are given, and the page of its records."""

import ast
import contextlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_kernels import be_lenient, exp
from engine_sources import WHEELS, wheel_of

from benchmarks import engines, layer, page
from benchmarks.measure import GATE
from gdn_triton.integrations import sglang
from gdn_triton.integrations.vllm import functions as vllm


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GDN_BACKEND", "reference")
    path = tmp_path / "layer.jsonl"
    options = ["--dry-run", "--pools", "float32", "float16", "--kinds", *layer.STEPS]
    layer.main([*options, "--jsonl", str(path)])
    head, *records = read(path)
    assert head["missing"] == [
        f"{name}: not measured: --engines names no folder" for name in ("vllm", "sglang")
    ]
    calls = [(x["what"], x["sequences"], x["tokens"], x["heads"], x["pool"]) for x in records]
    tokens = {"decode": 3, "drafts": 12, "last state": 12, "tree": 12, "packed": 8}
    assert calls == [
        ("prefill", 1, 70, "1/2", "float32"),
        ("prefill", 2, 70, "1/2", "float32"),
        *(
            (what, 3, count, "1/2", pool)
            for what, count in tokens.items()
            for pool in ("float32", "float16")
        ),
    ]
    for record in records:
        ours = record["results"]["gdn_triton"]
        assert ours["time"] > 0 and ours["error"] < 5e-3 and ours["launches"] is None
        assert ours["kernels"] == {}
        timed = {name for name, row in record["results"].items() if "time" in row}
        has_window = record["what"] in ("decode", "drafts", "packed")
        assert ("gdn_triton, with a window" in timed) == has_window
        in_three = record["what"] not in ("prefill", "decode")
        assert ("gdn_triton, three launches" in timed) == in_three
        assert all(row.get("error", 0) < 5e-3 for row in record["results"].values())
    assert "| decode | 3 | 3 | 1/2 | float16 | " in capsys.readouterr().out
    text = page.rows_page(path)
    assert text.startswith("# The Gated DeltaNet part of a layer\n")
    assert "python -m benchmarks.layer" in text and "| prefill | 2 | 70 | 1/2 | float32 | " in text
    assert page.all_ratios([path]) == []


def test_table() -> None:
    results: dict[str, Any] = {
        "gdn_triton": {"time": 12.34, "launches": 4, "error": 1e-3},
        "vLLM": {"time": 100.0, "launches": None},
        "SGLang": {"skipped": "no"},
    }
    record = {"what": "decode", "sequences": 64, "tokens": 64, "heads": "4/8", "pool": "bfloat16"}
    record["results"] = results
    last = layer.tables([record], results).splitlines()[-1]
    results["gdn_triton"]["kernels"] = {"conv": 3.04, "norm": 9.0}
    lines = layer.kernel_lines([record], "gdn_triton")
    assert lines == ["gdn_triton, decode of 64, 4/8: conv 3.0, norm 9.0"]
    assert layer.kernel_lines([record], "vLLM") == []
    assert last == "| decode | 64 | 64 | 4/8 | bfloat16 | 12.3 (4) | 100.0 | - |"


def test_a_wrong_one_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "reference")
    device = layer.device_for(dry_run=True)

    def wrong(step: layer.Step) -> Callable[[], torch.Tensor]:
        call = layer.ours(step)
        return lambda: 1.05 * call()

    makers: dict[str, Any] = {"gdn_triton": layer.ours, "wrong": wrong}
    record = layer.measure(layer.Sizes(1, 2, 16, 16), "decode", [1, 1], device, makers, 1)
    assert "time" in record["results"]["gdn_triton"]
    assert "differs by 5" in record["results"]["wrong"]["skipped"]


def test_times_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="a CUDA GPU"):
        layer.main([])


def test_no_wheels(tmp_path: Path) -> None:
    missing = engines.pack(tmp_path, tmp_path / "out")
    assert missing == [
        f"{tmp_path} has no wheel of {name}" for name in ("vllm 0.33.0", "sglang 0.5.23")
    ]


# -------------------------------------------------------------------------------- their own files


def test_no_files(no_engines: None, tmp_path: Path) -> None:
    made, _, missing = layer.makers_of(tmp_path)
    assert list(made) == [
        "gdn_triton",
        "gdn_triton, three launches",
        "gdn_triton, with a window",
    ]
    assert [line.split(" No module")[0] for line in missing] == [
        "vllm: not measured:",
        "sglang: not measured:",
    ]


def checked(theirs: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, in the place of a function that takes the arguments, or does not."""

    def call(*args: Any, **kwargs: Any) -> Any:
        inspect.signature(theirs).bind(*args, **kwargs)
        return run(*args, **kwargs)

    return call


# Not what Triton's interpreter runs: autotuned kernels, block pointers, and vLLM's convolution of
# whole sequences. Ours take their places, where the arguments are those that theirs have.
OURS: dict[str, dict[str, Callable[..., Any]]] = {
    "vllm": {
        "causal_conv1d_fn": vllm.causal_conv1d_fn,
        "chunk_gated_delta_rule": vllm.chunk_gated_delta_rule,
    },
    "sglang": {"chunk_gated_delta_rule": sglang.chunk_gated_delta_rule},
}


def test_platform_takes_what_vllm_asks(tmp_path: Path) -> None:
    """Also where a call is behind a look for a GPU, which the CPU does not reach."""
    wheel_of("vllm")
    assert engines.pack(Path(os.environ[WHEELS]), tmp_path) == []
    platform = engines.stubs("vllm")["vllm.platforms"].current_platform
    asked = set()
    for file in tmp_path.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match call:
                case ast.Call(ast.Attribute(ast.Name("current_platform"), name), args, keywords):
                    function = getattr(platform, name)
                    inspect.signature(function).bind(*args, **{k.arg or "": k for k in keywords})
                    asked.add(name)
    assert "is_device_capability_family" in asked


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_engines(
    name: str, no_engines: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their kernels of a step, and all of a prefill but what the interpreter cannot run."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("without a GPU, kernels run in Triton's interpreter only")
    wheel_of(name)
    pytest.importorskip("einops", reason="files of the engines import einops")
    assert engines.pack(Path(os.environ[WHEELS]), tmp_path) == []
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.py")) < 2**20
    theirs = engines.kernels(name, tmp_path)
    assert set(theirs) == {x for names in engines.FUNCTIONS[name].values() for x in names}
    be_lenient(monkeypatch)
    monkeypatch.setenv("GDN_BACKEND", "reference")
    properties = SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *args: properties)

    def nowhere(index: object) -> Any:
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.accelerator, "device_index", nowhere)
    for path, module in list(sys.modules.items()):
        if path.split(".")[0] != name:
            continue
        for attribute, value in (("exp", exp), ("custom_device_ctx", nowhere)):
            if hasattr(module, attribute):
                monkeypatch.setattr(module, attribute, value)
    run = {x: checked(f, OURS[name].get(x, f)) for x, f in theirs.items()}
    device = layer.device_for(dry_run=True)
    maker = {"vllm": layer.vllm, "sglang": layer.sglang}[name]
    makers: dict[str, Any] = {"engine": lambda step: maker(step, run)}
    for what, lengths in (("decode", [1, 1, 1]), ("prefill", [35, 35])):
        record = layer.measure(layer.Sizes(1, 2, 16, 16), what, lengths, device, makers, 1)
        row = record["results"]["engine"]
        assert "skipped" not in row and row["error"] < GATE, row
