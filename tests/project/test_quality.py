"""Lint, format and annotations."""

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


@pytest.mark.long(10)
def test_types() -> None:
    run_tool("mypy", "gdn_triton", "benchmarks")
