"""Where the tests of the host code run, and which backend runs their calls."""

from collections.abc import Iterator

import pytest
import torch
from choice_cases import NO_CUDA

from gdn_triton import fast
from gdn_triton._host import backends


@pytest.fixture
def on_device(
    request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The reference, wherever a test does not take `backend`: there nothing depends on which."""
    if device == "cuda" and request.node.get_closest_marker("of_no_device"):
        pytest.skip("nothing of this depends on the device")
    monkeypatch.setenv("GDN_BACKEND", "reference")
    with torch.device(device):
        yield


@pytest.fixture(params=["triton", "reference"])
def backend(
    request: pytest.FixtureRequest, on_device: None, monkeypatch: pytest.MonkeyPatch
) -> str:
    monkeypatch.setenv("GDN_BACKEND", request.param)
    return str(request.param)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, no_interpreter: None) -> None:
    """Neither the machine nor the shell decides: no request, Triton there, no interpreter."""
    monkeypatch.delenv("GDN_BACKEND", raising=False)
    monkeypatch.setattr(backends, "_triton_missing", lambda: None)
    monkeypatch.setattr(backends, "_choices", {})
    monkeypatch.setattr(fast, "why_unavailable", lambda: NO_CUDA)
