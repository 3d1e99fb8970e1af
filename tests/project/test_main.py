"""The main job: its report, its verdict and its errors."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gdn_triton
from gdn_triton import demo, fast

ROOT = Path(__file__).resolve().parents[2]
LINES = ("machine", "input", "backend", "error", "time")


def run_job(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    unset = ("GDN_BACKEND", "TRITON_INTERPRET")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.run(
        [sys.executable, "-m", "gdn_triton", *arguments],
        cwd=ROOT,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def report_of(output: str) -> dict[str, str]:
    """The report's lines by their first word, all of them there and in order."""
    lines = dict(line.split(": ", 1) for line in output.splitlines())
    assert tuple(lines) == LINES
    return lines


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Documents of 1, 40, 64 and 301 bytes: a token, less than a chunk, a chunk, several."""
    for name, size in (("a.txt", 1), ("b.md", 40), ("c.py", 64), ("sub/d.rst", 301)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes((7 * i * i + 3 * i) % 95 + 32 for i in range(size)))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").write_bytes(b"no text")
    return tmp_path


def test_report(texts: Path) -> None:
    done = run_job(str(texts))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "comparing with the recurrence, token by token: up to a minute\n" in done.stderr
    lines = report_of(done.stdout)
    assert f"torch {torch.__version__}" in lines["machine"]
    assert lines["input"].startswith("4 documents, 406 tokens, 1 to 301 a document; ")
    chosen = "triton" if torch.cuda.is_available() else "reference"
    if fast.why_unavailable() is None:
        chosen = "cuda"
    assert lines["backend"].startswith(f"{chosen} (GDN_BACKEND=auto). ")
    assert ("Not cuda: " in lines["backend"]) == (chosen != "cuda")
    number = r"\d\.\de-\d\d"
    error = rf"o {number} \(budget {number}\), final state {number} \(budget {number}\): OK"
    assert re.fullmatch(error, lines["error"]), lines["error"]
    assert re.search(r"ms a call, \d+ ms the first; the recurrence in float64", lines["time"])


def test_the_project_is_the_default_input() -> None:
    done = run_job("--max-tokens", "600", "--heads", "1", "--dim", "16")
    assert done.returncode == 0, done.stdout + done.stderr
    number = int(report_of(done.stdout)["input"].split()[0])
    assert number == len(demo.read_documents(demo.default_paths()))
    assert ROOT / "README.md" in demo.default_paths()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing.txt", "does not exist: expected a file or a directory"),
        ("empty.txt", "is empty: expected at least one byte"),
        ("nothing", "has no text: expected a non-empty"),
    ],
)
def test_bad_paths(texts: Path, name: str, why: str) -> None:
    (texts / "nothing").mkdir()
    done = run_job(str(texts / "a.txt"), str(texts / name))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {texts / name} {why}")
    assert done.stderr.count("\n") == 1


def test_backends_that_cannot_run(texts: Path) -> None:
    done = run_job(str(texts), "--dtype", "float32", GDN_BACKEND="cuda")
    assert done.returncode == 2
    assert "backend: none (GDN_BACKEND=cuda). Not cuda: " in done.stdout
    assert done.stderr == "error: GDN_BACKEND=cuda cannot run this call\n"
    done = run_job(str(texts), GDN_BACKEND="fastest")
    assert done.returncode == 2
    assert "GDN_BACKEND must be one of" in done.stderr


@pytest.mark.parametrize("option", ["--max-tokens=0", "--heads=0", "--dtype=float64"])
def test_bad_options(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        demo.main([option])
    assert stopped.value.code == 2
    assert option.split("=")[0] in capsys.readouterr().err


# In this process, as for all kernel tests, a CPU runs the kernels in Triton's interpreter.
SMALL = ["--heads", "1", "--dim", "16", "--max-tokens", "200"]


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        "float16",
        pytest.param("bfloat16", marks=pytest.mark.gpu("the interpreter gets bf16 wrong")),
    ],
)
@pytest.mark.parametrize("seed", ["0", "1"])
def test_within_budget_in_every_dtype(
    texts: Path, dtype: str, seed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main([str(texts), *SMALL, "--dtype", dtype, "--seed", seed]) == 0
    lines = report_of(capsys.readouterr().out)
    assert f"; {dtype}, H=1 HV=2 K=16 V=32" in lines["input"]
    on_cuda = fast.why_unavailable() is None and dtype != "float32"
    assert lines["backend"].startswith("cuda " if on_cuda else "triton ")


def shifted_boundary(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The op with the last boundary between two documents one token too late."""
    cu_seqlens = arguments["cu_seqlens"].clone()
    cu_seqlens[-2] += 1
    return gdn_triton.chunk_gated_delta_rule(**{**arguments, "cu_seqlens": cu_seqlens})


def one_nan(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    o, final_state = gdn_triton.chunk_gated_delta_rule(**arguments)
    o[0, -1, 0, 0] = torch.nan
    return o, final_state


@pytest.mark.parametrize("fault", [shifted_boundary, one_nan])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_faults_are_over_budget(
    texts: Path,
    fault: Any,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = gdn_triton.chunk_gated_delta_rule

    def wrong(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        with monkeypatch.context() as inner:
            inner.setattr(gdn_triton, "chunk_gated_delta_rule", right)
            return fault(**arguments)

    monkeypatch.setattr(gdn_triton, "chunk_gated_delta_rule", wrong)
    assert demo.main([str(texts), *SMALL, "--dtype", dtype]) == 1
    assert report_of(capsys.readouterr().out)["error"].endswith(": FAILED")


def test_clip_keeps_proportions() -> None:
    documents = [b"x" * 1000, b"y" * 10, b"z"]
    assert demo.clip(documents, 2000) == documents
    assert [len(text) for text in demo.clip(documents, 101)] == [99, 1, 1]
