"""Fixtures of the tests of transformers' models and of the engines' own files."""

import sys
from collections.abc import Iterator
from typing import Any

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


@pytest.fixture
def no_engines() -> Iterator[None]:
    """No module of vLLM or SGLang is imported before a test, and none stays after it."""

    def take_out() -> dict[str, Any]:
        names = [x for x in sys.modules if x.split(".")[0] in ("vllm", "sglang")]
        return {name: sys.modules.pop(name) for name in names}

    before = take_out()
    yield
    take_out()
    sys.modules.update(before)
