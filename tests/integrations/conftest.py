"""Fixtures of the tests of transformers' models."""

from collections.abc import Iterator

import pytest
import torch

from gdn_triton.integrations import transformers as integration


@pytest.fixture
def undone() -> Iterator[None]:
    """Ends disabled; and on one thread, since a second costs such small products more than it
    gives, above all while other processes run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    integration.disable()


@pytest.fixture
def quick(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is called with what, where the interpreter would take minutes."""
    monkeypatch.setenv("GDN_BACKEND", "reference" if device == "cpu" else "triton")
