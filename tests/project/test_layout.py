"""The tests mirror the package: a folder of tests for each of its folders. All files are short."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"

# A longer file has more than one subject.
MOST_LINES = 500


@pytest.mark.parametrize(
    ("folder", "least"), [("tests", 100), ("gdn_triton", 100), ("benchmarks", 10)]
)
def test_files_are_short(folder: str, least: int) -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cu")
    }
    assert len(lengths) > least, f"the files of {folder} are elsewhere"
    assert not {name: lines for name, lines in lengths.items() if lines > MOST_LINES}


def test_each_folder_of_the_package_has_its_tests() -> None:
    """An operator's folder is one with `operators.py`. The private folders share tests/host."""
    folders = [path for path in (ROOT / "gdn_triton").iterdir() if path.is_dir()]
    public = {path.name for path in folders if not path.name.startswith("_")}
    assert {path.name for path in folders if (path / "operators.py").exists()} <= public
    tested = {path.parent.name for path in TESTS.glob("*/test_*.py")}
    assert not public - tested


def test_each_operator_has_the_files_of_the_recipe() -> None:
    """CONTRIBUTING.md, "Add an operator"."""
    for path in (ROOT / "gdn_triton").glob("*/operators.py"):
        found = {x.stem for x in path.parent.iterdir()}
        recipe = {"api", "problem", "validation", "backends", "operators", "triton"}
        assert recipe <= found, f"{path.parent.name} lacks {recipe - found}"


def test_no_test_lies_at_the_top() -> None:
    assert not list(TESTS.glob("test_*.py"))
