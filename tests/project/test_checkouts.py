"""Host times of several checkouts on a CPU: `benchmarks.trees`."""

import re
from pathlib import Path

import pytest

from benchmarks import trees

ROOT = Path(__file__).resolve().parents[2]


def test_checkouts_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each process imports the package of its own checkout."""
    other = tmp_path / "gdn_triton"
    other.mkdir()
    (other / "__init__.py").write_text("raise RuntimeError('the other one')", encoding="utf-8")
    few = ["--dry-run", "--processes", "1", "--turns", "2", "--batches", "1"]
    trees.main([f"a={ROOT}", *few])
    shown = capsys.readouterr().out
    assert re.findall(r"^\| (reference: .*?) \| \d+ \(\d+ to \d+\) \|$", shown, re.M) == [
        call for call, _, _ in trees.cases(dry_run=True, library=False)
    ]
    with pytest.raises(RuntimeError, match="a process has ended"):
        trees.main([f"a={ROOT}", f"b={tmp_path}", *few])


@pytest.mark.parametrize("given", [[], ["folder"]])
def test_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        trees.main(given)
    assert "at least one NAME=FOLDER is needed" in capsys.readouterr().err
