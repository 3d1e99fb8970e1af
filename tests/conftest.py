"""Where the tests run, from which seed, and on what memory.

Without a CUDA GPU the kernels run in Triton's interpreter, on CPU tensors. It keeps bf16 values as
integers and multiplies those, so only fp32 and fp16 go through kernels there (`helpers.DTYPES`);
with a GPU everything also runs in bf16, and at real sizes.
"""

import os
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import torch
from poison import ALLOCATING, poisoned
from runs import longest_first

if not torch.cuda.is_available():
    # Read by triton.jit when a kernel is defined: this has to precede every import of Triton.
    os.environ["TRITON_INTERPRET"] = "1"

    from interpreting import change_once

    change_once()

# A comparison that fails in these modules shows as much as one in a test.
SUPPORT = Path(__file__).resolve().parent / "support"
pytest.register_assert_rewrite(*(path.stem for path in sorted(SUPPORT.glob("*_cases.py"))))


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None):
        # The workers inherit these variables, and so do the processes that tests begin. Each of
        # them has about one core: threads that waited for each other took a quarter of the time.
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.setdefault(name, "1")
    config.addinivalue_line("markers", "gpu(why): needs a CUDA GPU, and why")
    config.addinivalue_line("markers", "two_gpus(why): needs two CUDA GPUs, and why")
    config.addinivalue_line("markers", "long(seconds): of one core, about; it starts first")
    config.addinivalue_line("markers", "of_no_device: the same whatever device there is")
    # NumPy under the interpreter warns of the infinities and NaNs that some tests are about.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")


def pytest_report_header() -> str:
    """The versions that are tested, of which CONTRIBUTING.md has a table."""
    names = ("torch", "triton", "numpy", "transformers")
    found = {x.name: x.version for x in reversed(list(distributions()))}
    return ", ".join(f"{name} {found.get(name, 'is not there')}" for name in names)


@pytest.hookimpl(trylast=True)  # of the tests that are selected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        for name, needed in (("gpu", 1), ("two_gpus", 2)):
            for marker in item.iter_markers(name):
                if gpus < needed:
                    reason = f"needs {needed} CUDA GPU(s), has {gpus}: {marker.args[0]}"
                    item.add_marker(pytest.mark.skip(reason=reason))
    if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
        items[:] = longest_first(items, int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))


@pytest.fixture
def device() -> str:
    """Where kernels run here."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Backends are chosen as in a process that does not interpret Triton's kernels."""
    from choice_cases import not_interpreted

    with not_interpreted(monkeypatch):
        yield


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile knows no function from before, nor this test's afterwards."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(params=["steps", "fused", "segments"])
def dataflow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One of the portable dataflows of the Triton backend, whichever the sizes would choose:
    "steps" for every call, "fused" for every call that it can take (all but those with fp32
    products), "segments" for the fused one in segments of one chunk (where sequences are few, as
    segments demand)."""
    from gdn_triton.chunk.problem import Problem
    from gdn_triton.chunk.triton import forward as chunk_fwd

    def choose(problem: Problem) -> Callable[..., Any]:
        wide = chunk_fwd.compute_dtype(problem).itemsize == 4
        by_steps = wide or request.param == "steps"
        return chunk_fwd.forward_by_steps if by_steps else chunk_fwd.forward_fused

    def choose_segments(problem: Problem) -> int:
        return int(request.param == "segments" and problem.N < 128 and problem.K <= 128)

    monkeypatch.setenv("GDN_BACKEND", "triton")
    monkeypatch.setenv("GDN_GLUON", "0")
    monkeypatch.setattr(chunk_fwd, "choose_dataflow", choose)
    monkeypatch.setattr(chunk_fwd, "choose_segments", choose_segments)
    return str(request.param)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that the package allocates without filling it holds NaN, or an index out of range.
    Without this a read of memory that nothing has written could give zeros."""
    for owner, name in ALLOCATING:
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(autouse=True)
def watched_memory() -> Iterator[None]:
    """Kernels in the interpreter stay inside of their tensors, and their programs apart."""
    if torch.cuda.is_available():
        yield
        return
    from watching import watched

    with watched():
        yield
