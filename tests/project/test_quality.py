"""Lint, format and annotations; the format of the CUDA sources."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_tool(module: str, *arguments: str) -> None:
    pytest.importorskip(module, reason=f"{module}, of the extra `test`, is not installed")
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, f"\n{done.stdout}{done.stderr}"


def test_lint() -> None:
    run_tool("ruff", "check", ".")


def test_format() -> None:
    run_tool("ruff", "format", "--check", ".")


def test_cuda_format() -> None:
    """`.clang-format`, by the version of clang-format that the extra `test` pins."""
    clang_format = pytest.importorskip(
        "clang_format", reason="clang-format, of the extra `test`, is not installed"
    )
    sources = [x for ending in ("cpp", "cu", "cuh", "h") for x in ROOT.glob(f"csrc/**/*.{ending}")]
    assert len(sources) > 50, "the sources are elsewhere"
    done = subprocess.run(
        [clang_format.get_executable("clang-format"), "--dry-run", "--Werror", *sources],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, f"\n{done.stderr[:5000]}"


@pytest.mark.long(10)
def test_types() -> None:
    run_tool("mypy", "gdn_triton", "benchmarks")
