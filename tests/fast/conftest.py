"""The CUDA library where it is, and what stands in its place where it is not."""

import pytest
from fast_backward_cases import Noted
from fast_cases import Operator

from gdn_triton import fast
from gdn_triton.chunk.cuda import calls, support
from gdn_triton.fast.architectures import ARCHITECTURES


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "why_unavailable", lambda: None)
    monkeypatch.setattr(fast, "why_not_on", lambda device: None)
    monkeypatch.setattr(fast, "architecture_on", lambda device: ARCHITECTURES[9, 0])


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Operator:
    noted = Operator()
    monkeypatch.setattr(calls, "library_operator", noted.named)
    monkeypatch.setattr(calls, "workspace_floats", lambda *sizes: sum(map(int, sizes[1:])))
    return noted


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """The library, by decree there and able."""
    found = Noted()
    monkeypatch.setattr(calls, "library_operator", found.named)
    monkeypatch.setattr(calls, "workspace_floats", lambda *sizes: 1)
    monkeypatch.setattr(
        calls,
        "backward_floats",
        lambda *sizes, checkpoint_interval: sum(map(int, sizes[1:])) + 1000 * checkpoint_interval,
    )
    monkeypatch.setattr(calls, "best_checkpoint_interval", lambda *sizes: found.checkpoint_interval)
    monkeypatch.setattr(support, "supports", lambda problem: None)
    monkeypatch.setattr(fast, "architecture_on", lambda device: ARCHITECTURES[9, 0])
    monkeypatch.setenv("GDN_BACKEND", "cuda")
    return found


@pytest.fixture
def cuda() -> str:
    """The device; skips where the library is not there for it."""
    reason = fast.why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    return "cuda"


@pytest.fixture
def batch_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the sizes of a call decide whether its sequences are cut into segments."""
    monkeypatch.setenv("GDN_BATCH_INVARIANT", "1")
