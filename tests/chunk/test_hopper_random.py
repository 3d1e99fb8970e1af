"""Random calls of the Gluon kernels for compute capability 9.0, on such a GPU: results against
float64, replays of CUDA graphs against eager calls, and compute-sanitizer."""

import shutil
import sys

import pytest
from backward_cases import check_task
from fast_backward_cases import random_task
from fast_cases import ROOT, output
from fast_parity import check_parity
from graph_replays import BACKWARD, FORWARD, Shape, check_shape
from hopper_cases import hopper, run_by_gluon
from parity_calls import random_call

SUPPORT = ROOT / "tests" / "support"


@hopper
@pytest.mark.parametrize("number", range(2000, 2024))
def test_random(number: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/support/fast_parity.py --backend triton` makes as many as one likes."""
    run_by_gluon(monkeypatch)
    check_parity(random_call(number, device, small=False)[0], ("triton",))


@hopper
@pytest.mark.parametrize("number", range(2000, 2012))
def test_random_gradients(number: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/support/random_gradients.py --backend triton` makes as many as one likes."""
    run_by_gluon(monkeypatch)
    task, dtype = random_task(number, device, longest=700)
    check_task(task, dtype, device)


@hopper
@pytest.mark.parametrize("shape", [*FORWARD[::5], *BACKWARD[::6]], ids=lambda x: x.words)
def test_replays(shape: Shape, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/support/graph_replays.py --backend triton` makes as many as one likes."""
    run_by_gluon(monkeypatch)
    monkeypatch.delenv("GDN_BATCH_INVARIANT")
    assert not check_shape(shape, 12, 0, backend="triton").lines


@hopper
@pytest.mark.parametrize("script", ["fast_parity.py", "random_gradients.py"])
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_sanitizer(tool: str, script: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small random cases under compute-sanitizer."""
    run_by_gluon(monkeypatch)
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("there is no compute-sanitizer on the PATH")
    small = ("--small", "--quiet") if script == "fast_parity.py" else ()
    report = output(
        *(sanitizer, "--tool", tool, "--kernel-name", "kernel_substring=hopper"),
        *("--error-exitcode", "1", sys.executable, str(SUPPORT / script)),
        *("--backend", "triton", "--count", "4", "--seed", "1", "--alike", "1", *small),
        # Each tensor in an allocation of its own, so that a read past its end is one.
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
        PYTHONPATH=str(ROOT),
    )
    assert "4 cases of 4, 0 failed" in report
