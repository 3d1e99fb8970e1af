"""Problems and cases that the tests of the Gluon kernels for compute capability 9.0 share."""

from typing import Any

import pytest
import torch
from helpers import Case

from gdn_triton._host import gluon
from gdn_triton.chunk.triton.hopper import support

hopper = pytest.mark.gpu("the interpreter runs no Gluon")


def hopper_case(name: str, why: str, **sizes: Any) -> Case:
    sizes = {"H": 2, "HV": 4, "K": 128, "V": 128, "spare": 8, **sizes}
    return Case(name, why, chunk_size=64, gpu=True, **sizes)


TAIL = hopper_case("tail", "a ragged chunk, and B > 1", T=200, B=2)
ONE_TOKEN = hopper_case("one-token", "the least sequence", T=1)
PACKED = hopper_case(
    "packed",
    "empty sequences first, between and last; each side of a chunk; rows of none",
    lengths=(0, 1, 150, 63, 0, 64, 65, 700, 0),
    orphans=70,
)
# More states than half of the multiprocessors: blocks with two of them.
WIDE = hopper_case("wide", "blocks with two states", lengths=(70, *(1,) * 38, 200), orphans=3)
ODD_STRIDES = hopper_case("odd-strides", "rows that TMA cannot read: copies", T=130, spare=3)
SMALL = hopper_case("small", "fewer channels than a tile has", T=200, B=2, K=40, V=72)
SMALL_PACKED = hopper_case("small-packed", "the same, packed", lengths=(130, 0, 70), K=64, V=24)
SEVERAL = hopper_case("several", "several blocks of V", T=130, V=264)
MANY_KEYS = hopper_case("many-keys", "K = 256, several blocks of V", T=200, B=2, K=256, V=264)
MANY_KEYS_PACKED = hopper_case(
    "many-keys-packed",
    "K above 128: each side of a chunk; rows of none",
    lengths=(0, 1, 150, 63, 64, 65, 700),
    orphans=70,
    K=200,
    V=72,
)
ONE_TO_ONE = hopper_case("one-to-one", "a value head a key head", lengths=(130, 70), H=4, HV=4)


def as_on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusals are those of a GPU of 132 multiprocessors with a listed release of Triton."""
    monkeypatch.delenv("GDN_GLUON", raising=False)
    monkeypatch.setattr(gluon, "device_refusal", lambda device: None)
    monkeypatch.setattr(gluon, "release_refusal", lambda: None)
    monkeypatch.setattr(support, "_multiprocessors", lambda device: 132)


def run_by_gluon(monkeypatch: pytest.MonkeyPatch, portable: Any = None) -> None:
    """All calls that the Gluon kernels serve run them, however few states they have. Skips on a GPU
    or a release of Triton that has none of them. portable: a kernel that must not run."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the GPU has another compute capability")
    refusal = gluon.release_refusal()
    if refusal is not None:
        pytest.skip(refusal)

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError(f"{portable.__name__} runs")

    if portable is not None:
        monkeypatch.setattr(portable, "run", forbidden)
    monkeypatch.setenv("GDN_BACKEND", "triton")
    monkeypatch.setenv("GDN_BATCH_INVARIANT", "1")
    monkeypatch.delenv("GDN_GLUON", raising=False)
