"""`tests/support/random_runs.py`: which cases run, in which process, and what is printed."""

import argparse
import itertools
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import random_runs
from parity_calls import random_call, random_variant
from random_runs import (
    Blocks,
    Check,
    Compiled,
    add_numbers,
    check_numbers,
    counted,
    listening,
    options_of,
)

SUPPORT = Path(__file__).resolve().parents[1] / "support"


def options(**changes: object) -> argparse.Namespace:
    given = {"seed": 5, "count": 3, "only": None, "workers": 1, "seconds": math.inf, "alike": 1}
    return argparse.Namespace(**{**given, "backend": "cuda", **changes})


def fails_at(wrong: int) -> Check:
    return lambda number: f"FAILED {number}" if number == wrong else None


@pytest.mark.parametrize(("seconds", "ran"), [(math.inf, 3), (0.0, 0)])
def test_cases_in_time(seconds: float, ran: int, capsys: pytest.CaptureFixture[str]) -> None:
    failed = check_numbers(fails_at(6), options(seconds=seconds))
    assert failed is (ran > 0)
    said = capsys.readouterr().out
    assert f"{ran} cases of 3, {int(failed)} failed" in said
    assert ("again: --only 6 --alike 1 --backend cuda" in said) is failed


def test_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_numbers(fails_at(700), options(only=700, alike=64))
    assert not check_numbers(fails_at(700), options(only=701, alike=64))
    assert "1 cases of 1, 1 failed [700]\n1 variants in" in capsys.readouterr().out


def test_another_error_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    """After an error of a kernel its process may have no usable GPU."""

    def check(number: int) -> str | None:
        raise RuntimeError("an illegal memory access was encountered")

    assert check_numbers(check, options())
    said = capsys.readouterr().out
    assert "FAILED 5: " in said and "RuntimeError: an illegal memory access" in said
    assert "1 cases of 3, 1 failed [5]" in said


class Counter:
    """As a number in memory that processes share."""

    value = 0

    def get_lock(self) -> "Counter":
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("alike", [1, 7, 64])
@pytest.mark.parametrize(("start", "stop"), [(0, 100), (5, 300), (63, 64)])
def test_blocks(start: int, stop: int, alike: int) -> None:
    """Each number is in one block, and the cases of one variant are in the same block."""
    blocks = list(Blocks(range(start, stop), alike, Counter()))
    assert list(itertools.chain(*blocks)) == list(range(start, stop))
    if alike > 1:
        variants = [{number // alike for number in block} for block in blocks]
        assert all(len(drawn) == 1 for drawn in variants)
        assert len(set.union(*variants)) == len(blocks)


def crash(number: int) -> str | None:
    """In a process of its own."""
    if number == 3:
        os._exit(7)
    if number == 14:
        raise ValueError("not a failed comparison")
    return None


def test_processes_are_replaced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that crashes is a fault of its case, and cases in other blocks run."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    assert check_numbers(crash, options(seed=0, count=40, workers=2))
    said = capsys.readouterr().out
    assert "FAILED 3: its process ended with exit code 7" in said
    assert "FAILED 14: " in said and "ValueError: not a failed comparison" in said
    # 0 to 2, 10 to 14, and 20 to 39.
    assert "28 cases of 40, 2 failed [3, 14]" in said


def hang(number: int) -> str | None:
    time.sleep(600 if number == 5 else 0)
    return None


def test_a_process_that_hangs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ended some time after the end of the run."""
    monkeypatch.setattr(random_runs, "GRACE", 1.0)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    start = time.time()
    assert check_numbers(hang, options(seed=0, count=10, workers=2, seconds=25.0))
    assert time.time() - start < 100
    said = capsys.readouterr().out
    assert "FAILED 5: it has not ended" in said and "5 cases of 10, 1 failed [5]" in said


@pytest.mark.of_no_device
def test_kernels_are_counted() -> None:
    knobs = pytest.importorskip("triton.knobs", reason="Triton is not installed")
    before = knobs.compilation.listener
    with listening() as found:
        for cache_hit in (False, False, True):
            times = knobs.CompileTimes(1_000_000, [("ttir", 250_000)], 250_000)
            given = {"src": None, "metadata": {}, "metadata_group": {}}
            knobs.compilation.listener(**given, times=times, cache_hit=cache_hit)
    assert counted(found) == Compiled(compiled=2, seconds=3.0, loaded=1)
    assert knobs.compilation.listener is before


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def alike(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["a script", *words])
        return int(options_of(add_numbers(argparse.ArgumentParser(), alike=64)).alike)

    assert alike() == 1
    assert alike("--backend", "triton") == 64
    assert alike("--backend", "triton", "--alike", "3") == 3


@pytest.mark.of_no_device
def test_calls_of_one_variant() -> None:
    """They have one set of strides and dtypes, and other lengths; over all variants every layout
    and size is drawn."""
    calls = [random_call(number, "cpu", small=True, alike=8)[0] for number in range(8)]
    x = [call.x for call in calls]
    for name in ("g", "beta"):
        drawn = {(y.stride()[1:], y.dtype) for y in (getattr(given, name) for given in x)}
        assert len(drawn) == 1
    assert len({(y.initial_state.stride(), y.initial_state.dtype) for y in x}) == 1
    assert len({(call.case.H, call.case.HV, call.options) for call in calls}) == 1
    assert len({call.case.tokens for call in calls}) > 3

    variants = [random_variant(number, small=False) for number in range(400)]
    assert len({(v.K, v.V) for v in variants}) == 14
    assert {layout for v in variants for _, layout in v.sides} == {"dense", "gaps", "heads first"}
    assert {v.H for v in variants} == {1, 2, 3, 4}
    assert {v.HV // v.H for v in variants} == {1, 2, 3, 4, 8}
    assert {v.N for v in variants if v.packed} == {1, 2, 3, 5, 9}


def test_scripts_say_what_they_take() -> None:
    for name in ("fast_parity", "random_gradients", "random_windows", "graph_replays"):
        done = subprocess.run(
            [sys.executable, SUPPORT / f"{name}.py", "--help"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert "--seconds" in done.stdout and "--only" in done.stdout
