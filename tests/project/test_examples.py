"""The training example at toy size: it learns, resumes exactly and says what is wrong."""

import csv
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

# Read once a process, at its first product on a GPU, which may be another test's.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "steps": 6,
    "batch": 2,
    "length": 24,
    "width": 16,
    "layers": 2,
    "heads": 1,
    "head-dim": 8,
    "warmup": 2,
    "eval-every": 2,
    "eval-batches": 1,
    "sample": 20,
}


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


train_bytes = load_example("train_bytes")


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has this backend outside of the suite; the interpreter would be slow here."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("GDN_BACKEND", "reference")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Three documents that repeat themselves, so that a few steps learn something."""
    path = tmp_path / "texts"
    path.mkdir()
    for n in range(3):
        (path / f"{n}.txt").write_text(f"{n} times one is {n}.\n" * 60)
    return path


def run(*arguments: object, **options: object) -> int:
    """The example's exit status; `TINY` unless the options say otherwise, without a plot."""
    given = {**TINY, **{name.replace("_", "-"): value for name, value in options.items()}}
    flags = [f"--{name}={value}" for name, value in given.items()]
    return int(train_bytes.main([*map(str, arguments), *flags, "--no-plot"]))


def losses(out: Path) -> list[dict[str, str]]:
    with (out / "losses.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_learns_and_writes(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(texts, "--out", out, steps=40, lr=0.02, eval_every=20) == 0
    rows = losses(out)
    assert [int(row["step"]) for row in rows] == list(range(1, 41))
    assert [row["step"] for row in rows if row["validation_loss"]] == ["20", "40"]
    first, last = float(rows[0]["loss"]), float(rows[-1]["loss"])
    assert 5 < first < 6 and last < 0.7 * first  # log(256) is 5.5
    assert float(rows[-1]["validation_loss"]) < 0.75 * first
    sample = (out / "sample.txt").read_bytes()
    assert sample.startswith(b"def ") and len(sample) == 4 + TINY["sample"]
    printed = capsys.readouterr()
    assert f"loss: {first:.3f} at step 1, {last:.3f} at step 40" in printed.out
    assert printed.err.count("\n") == 2  # no terminal: a line for each validation


def test_same_seed_same_losses(texts: Path, tmp_path: Path) -> None:
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert run(texts, "--out", tmp_path / out, seed=seed) == 0
    a, b, c = (losses(tmp_path / out) for out in "abc")
    assert a == b
    assert a[0] != c[0]
    samples = [(tmp_path / out / "sample.txt").read_bytes() for out in "ab"]
    assert samples[0] == samples[1]


def test_resume_is_exact(
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Interrupted in step 4, after the checkpoint of step 2; then by the clock; then to the end."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(texts, "--out", whole) == 0
    learning_rate = train_bytes.learning_rate

    def interrupting(settings: Any, step: int) -> float:
        if step == 3:
            raise KeyboardInterrupt
        return float(learning_rate(settings, step))

    with monkeypatch.context() as inner:
        inner.setattr(train_bytes, "learning_rate", interrupting)
        assert run(texts, "--out", parts) == 2
    assert "interrupted: --resume goes on" in capsys.readouterr().err
    assert len(losses(parts)) == 2
    assert run(texts, "--out", parts, "--resume", "--seconds", 0) == 0
    # A validation that the uninterrupted run does not have, and the same loss.
    cut = losses(parts)[2]
    assert cut["validation_loss"] and cut["loss"] == losses(whole)[2]["loss"]
    assert run(texts, "--out", parts, "--resume") == 0
    rows = [row | {"validation_loss": ""} if row["step"] == "3" else row for row in losses(parts)]
    assert rows == losses(whole)
    ends = [torch.load(out / "checkpoint.pt")["model"] for out in (whole, parts)]
    assert all(torch.equal(ends[1][name], x) for name, x in ends[0].items())
    samples = [(out / "sample.txt").read_bytes() for out in (whole, parts)]
    assert samples[0] == samples[1]


def test_decoding_is_the_forward() -> None:
    """The sample's bytes come from a prefill and steps; the same logits as of the whole text."""
    torch.manual_seed(0)
    settings = train_bytes.Settings(width=16, layers=2, heads=1, head_dim=8)
    model = train_bytes.LanguageModel(settings).double()
    tokens = torch.randint(256, (1, 80))
    with torch.no_grad():
        caches = model.make_caches(1)
        steps = [model(part, caches) for part in tokens.split([76, 1, 1, 1, 1], 1)]
        torch.testing.assert_close(torch.cat(steps, 1), model(tokens), rtol=1e-9, atol=1e-9)


def test_no_validation_text_is_trained_on(texts: Path) -> None:
    for count in (3, 40):
        for n in range(count):
            (texts / f"{n}.txt").write_text(f"<{n}>" * 30)
        train, validation = (bytes(x.tolist()) for x in train_bytes.load_text([texts], 20))
        held = [n for n in range(count) if f"<{n}>".encode() in validation]
        assert 0 < len(held) <= max(1, count // 8)
        assert not [n for n in held if f"<{n}>".encode() in train]
        assert all(f"<{n}>".encode() in train for n in range(count) if n not in held)


def test_the_default_text_is_the_library() -> None:
    found = train_bytes.library_sources()
    assert found == train_bytes.library_sources()
    assert len(found) > 300
    names = {path.name for path in found}
    assert "argparse.py" in names and not any("site-packages" in str(path) for path in found)


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip(
        "matplotlib", reason="matplotlib, of the extra `examples`, is not installed"
    )
    path = tmp_path / "loss.png"
    train_bytes.plot_losses([(1, 5.5, None), (2, 5.0, 5.1), (3, 4.0, 4.2)], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_no_matplotlib(
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Said before anything is trained."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert train_bytes.main([str(texts), "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'gdn_triton[examples]', or pass --no-plot" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_cannot_run(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*arguments: object, **options: object) -> str:
        assert run(*arguments, **options) == 2
        return capsys.readouterr().err.splitlines()[-1]

    out = tmp_path / "out"
    message = f"error: {out / 'checkpoint.pt'} does not exist: there is nothing to resume"
    assert error(texts, "--out", out, "--resume") == message
    assert run(texts, "--out", out, steps=2) == 0
    assert "exists: pass --resume" in error(texts, "--out", out, steps=2)
    message = "error: --steps must be that of the run to resume, 2, got 6"
    assert error(texts, "--out", out, "--resume") == message
    (texts / "3.txt").write_text("more\n" * 20)
    message = "error: the text is not that of the run to resume"
    assert error(texts, "--out", out, "--resume", steps=2) == message
    message = "expected more than --length=100000"
    assert message in error(texts, "--out", tmp_path / "other", length=100_000)
    assert "does not exist" in error(tmp_path / "nothing", "--out", tmp_path / "other")
    with pytest.raises(SystemExit):
        run(texts, steps="many")
    assert "argument --steps: invalid int value: 'many'" in capsys.readouterr().err
