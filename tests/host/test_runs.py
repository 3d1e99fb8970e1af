"""How the processes of a run of the tests share its work."""

import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs import longest_first, made_once


def item(name: str, seconds: float | None = None) -> Any:
    marker = None if seconds is None else SimpleNamespace(args=(seconds,))
    return SimpleNamespace(name=name, get_closest_marker=lambda _: marker)


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        (1, "b f d a c e g h i"),
        # Parts of four and five tests: 90 seconds, and 50 and 30.
        (2, "b a c e f d g h i"),
        (3, "b a c f e g d h i"),
    ],
)
def test_longest_tests_begin_the_parts(processes: int, expected: str) -> None:
    long = {"b": 90, "d": 30, "f": 50}
    items = [item(name, long.get(name)) for name in "abcdefghi"]
    assert " ".join(x.name for x in longest_first(items, processes)) == expected


def test_every_test_is_in_a_part() -> None:
    """Also where some parts have long tests alone, or none."""
    for count in range(5):
        for processes in range(1, 8):
            items = [item(str(n), 10 - n if n % 2 else None) for n in range(count)]
            ordered = longest_first(items, processes)
            assert sorted(x.name for x in ordered) == sorted(x.name for x in items)


def make_in_a_process(shared: Path, number: int) -> None:
    """As a process of pytest-xdist, whose folder is in that of the run."""
    own = shared / f"popen-gw{number}"
    own.mkdir()
    factory: Any = SimpleNamespace(getbasetemp=lambda: own, mktemp=lambda name: mkdir(own / name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_XDIST_WORKER", f"gw{number}")
        folder = made_once(factory, "thing", lambda x: (x / f"made-{number}").touch())
    assert len(list(folder.iterdir())) == 1


def mkdir(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_made_once_by_several_processes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=make_in_a_process, args=(tmp_path, n)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(list(tmp_path.glob("*/thing/made-*"))) == 1


def test_made_again_after_a_failure(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(tmp_path_factory, "getbasetemp", lambda: tmp_path)

    def fail(folder: Path) -> None:
        raise ValueError(folder)

    with pytest.raises(ValueError):
        made_once(tmp_path_factory, "thing", fail)
    folder = made_once(tmp_path_factory, "thing", lambda x: (x / "made").touch())
    assert (folder / "made").exists()
    assert made_once(tmp_path_factory, "thing", fail) == folder
