"""Whether the CUDA library can be used here, and the one sentence that says why it cannot."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fast_cases import ROOT, ask_again, output

from gdn_triton import fast


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file where the library would be, which loads, on a machine with one Hopper GPU."""
    (tmp_path / "library.so").write_bytes(b"no library")
    monkeypatch.setattr(fast, "LIBRARY", tmp_path / "library.so")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(torch.ops, "gdn_fast", SimpleNamespace(why_unavailable=lambda: ""))
    monkeypatch.setattr(fast, "why_not_on", lambda device: None)


def test_available(built: None) -> None:
    assert ask_again() is None


def test_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fast, "LIBRARY", tmp_path / "library.so")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    how = "`GDN_BUILD_CUDA=1 pip install .` in a checkout builds it"
    plain = f"The CUDA library is not built: {how}."
    assert ask_again() == plain
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    monkeypatch.setattr(fast, "why_not_on", lambda device: "It is old.")
    assert ask_again() == plain
    # Where it would serve, a line that is seen without a setting, once a process.
    assert not caplog.records
    monkeypatch.setattr(fast, "why_not_on", lambda device: None if device == 1 else "It is old.")
    reason = ask_again()
    assert reason == f"The CUDA library is not built: GPU 1 would run faster with it; {how}."
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("WARNING", reason)


def test_no_gpu(built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ask_again() == "The CUDA library needs a GPU; torch finds no CUDA device."


def test_library_that_does_not_load(built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "load_library", type(torch.ops).load_library.__get__(torch.ops))
    reason = ask_again()
    assert reason is not None and reason.endswith(".")
    assert reason.startswith(f"The CUDA library does not load with torch {torch.__version__}: ")
    assert "library.so" in reason


@pytest.mark.parametrize("error", [AttributeError("no such operator"), RuntimeError("no driver")])
def test_library_that_cannot_be_asked(
    built: None, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def ask() -> str:
        raise error

    monkeypatch.setattr(torch.ops, "gdn_fast", SimpleNamespace(why_unavailable=ask))
    reason = ask_again()
    assert reason is not None and reason.endswith(f": {error}.")


def test_driver_too_old(built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "gdn_fast", SimpleNamespace(why_unavailable=lambda: "Too old."))
    assert ask_again() == "Too old."


def test_other_gpu(built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    assert fast.why_not_on.__wrapped__(0) == (
        "The CUDA library is for GPUs of compute capability 9.0; A GPU has 8.0."
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fast.why_not_on.__wrapped__(0) is None


def test_one_gpu_of_several(built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library can be used if one GPU is right; a call elsewhere is refused by itself."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for right, expected in ((0, None), (1, None), (2, "Not on 0.")):
        reasons = {device: None if device == right else f"Not on {device}." for device in range(2)}
        monkeypatch.setattr(fast, "why_not_on", reasons.get)
        assert ask_again() == expected


def test_importing_and_asking_of_cpu_tensors_loads_nothing() -> None:
    code = """
import torch, gdn_triton
from gdn_triton import fast
x = torch.zeros(1, 4, 2, 128, dtype=torch.bfloat16)
print(gdn_triton.explain(x, x, x, x[..., 0], x[..., 0]).reasons["cuda"])
assert fast.why_unavailable.cache_info().misses == 0
assert not torch.cuda.is_initialized()
"""
    said = output(sys.executable, "-c", code, PYTHONPATH=str(ROOT), GDN_BACKEND="auto")
    assert said == "The CUDA library runs on NVIDIA GPUs; the tensors are on cpu.\n"
