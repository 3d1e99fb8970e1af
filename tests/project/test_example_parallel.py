"""The training example on several processes: the losses of one process, within rounding, whether
the processes share sequences or not, and after a checkpoint is resumed by another number of them.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_examples import load_example

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
SIZES = ["--length=64", "--width=16", "--head-dim=8", "--batch=2", "--lr=0.01"]
ON_GPUS = ["--length=2048", "--width=256", "--head-dim=128", "--batch=2"]


def options(out: Path, sizes: list[str], *more: str) -> argparse.Namespace:
    example = load_example("train_parallel")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        parsed: argparse.Namespace = example.parse(
            ["--out", str(out), f"--steps={STEPS}", *sizes, *more]
        )
    return parsed


def train(given: argparse.Namespace, kind: str, rank: int = 0, exact: bool = False) -> list[float]:
    """In this process, with the process group that there is. exact: all in float64."""
    example = load_example("train_parallel")
    if exact:
        narrow = example.LanguageModel
        example.LanguageModel = lambda *sizes: narrow(*sizes).double()
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", rank)
    losses: list[float] = example.train(given, device)
    return losses


def init(kind: str, store: str, rank: int, world: int) -> None:
    backend = "gloo" if kind == "cpu" else "nccl"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)


def work(rank: int, given: argparse.Namespace, kind: str, folder: str) -> None:
    init(kind, f"{folder}/store", rank, 2)
    losses = train(given, kind, rank)
    torch.save(losses, f"{folder}/losses-{rank}.pt")


def check(kind: str, sizes: list[str], tmp_path: Path) -> None:
    init("cpu", str(tmp_path / "exact-store"), 0, 1)
    exact = train(options(tmp_path / "exact", sizes), "cpu", exact=True)
    dist.destroy_process_group()

    # The command of the docstring: two processes share every sequence, and stop halfway.
    shared = tmp_path / "shared"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    given = ["--cp=2", f"--steps={STEPS // 2}", f"--out={shared}", *sizes]
    done = subprocess.run(
        [*command, ROOT / "examples" / "train_parallel.py", *given],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss") == STEPS // 2, done.stdout

    init(kind, str(tmp_path / "one-store"), 0, 1)
    one = train(options(tmp_path / "one", sizes), kind)
    # One process goes on.
    resumed = train(options(shared, sizes, "--resume"), kind)
    dist.destroy_process_group()
    # Two processes with a sequence each.
    run_ranks(2, work, options(tmp_path / "apart", sizes), kind, str(tmp_path))
    apart: list[Any] = [torch.load(tmp_path / f"losses-{rank}.pt") for rank in range(2)]
    assert apart[0] == apart[1]

    # The rounding of the whole computation, or of the number that holds a loss if that is more.
    rounding = max(abs(x - y) for x, y in zip(one, exact, strict=True))
    rounding = max(rounding, torch.finfo(torch.float32).eps * max(exact))
    assert rounding < 0.1
    for losses in (resumed, apart[0]):
        assert len(losses) == STEPS
        errors = [abs(x - y) for x, y in zip(losses, exact, strict=True)]
        assert max(errors) <= 4 * rounding, (losses, exact)
    # A step changes the loss by far more than that.
    assert abs(exact[0] - exact[1]) > 100 * rounding


@pytest.mark.long(30)
def test_gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "reference")
    check("cpu", SIZES, tmp_path)


@pytest.mark.two_gpus("NCCL between two GPUs")
def test_nccl(tmp_path: Path) -> None:
    check("cuda", ON_GPUS, tmp_path)


def test_what_cannot_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(world: str | None, *arguments: str) -> str:
        if world is None:
            monkeypatch.delenv("WORLD_SIZE", raising=False)
        else:
            monkeypatch.setenv("WORLD_SIZE", world)
        with pytest.raises(SystemExit):
            load_example("train_parallel").main(arguments)
        return capsys.readouterr().err.splitlines()[-1].partition("error: ")[2]

    assert error(None) == "start it by torchrun, also for one process"
    assert error("3", "--cp=2") == "processes must be a multiple of 2, got 3"
    assert error("4", "--cp=2", "--batch=3") == "--batch must be a multiple of 2, got 3"
    assert error("2", "--cp=2", "--length=66") == "--length must be a multiple of 4, got 66"
