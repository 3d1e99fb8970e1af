"""Every function, in every backend."""

import pytest


@pytest.fixture(params=["triton", "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv("GDN_BACKEND", request.param)
    return str(request.param)
