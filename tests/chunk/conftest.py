"""Fixtures of the chunked operator."""

import pytest
from hopper_cases import as_on_a_hopper


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell does not decide which backend runs the good calls."""
    monkeypatch.setenv("GDN_BACKEND", "reference")


@pytest.fixture
def on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_hopper(monkeypatch)
