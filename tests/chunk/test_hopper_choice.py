"""Which calls the Gluon forward for compute capability 9.0 serves, and in which form."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from choice_cases import problem
from helpers import BF16, FP16

from gdn_triton._host import gluon
from gdn_triton._host.gluon import RELEASES
from gdn_triton.chunk.backends import chunk_kernels
from gdn_triton.chunk.problem import Inputs as Operands
from gdn_triton.chunk.triton.hopper.releases import most_states
from gdn_triton.chunk.triton.hopper.segments import (
    Cut,
    choose_cut,
    lengths_of,
    rounded_up,
    states_at_once,
    states_of_whole,
)
from gdn_triton.chunk.triton.hopper.support import hopper_refusal

COMMON = problem(B=4, T=300, H=16, HV=32, K=128, V=128, N=4)

# One long sequence among 20 short ones, as cu_seqlens_cpu says.
UNEVEN = {
    "B": 1,
    "T": 20 * 64 + 6912,
    "N": 21,
    "H": 2,
    "HV": 8,
    "is_varlen": True,
    "longest": (6912, 64, 64),
}


@pytest.mark.usefixtures("on_a_hopper")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"needs_grad": True}, None),
        ({"K": 8, "V": 264}, None),
        ({"q_dtype": FP16, "k_dtype": FP16, "v_dtype": FP16}, None),
        ({"v_dtype": FP16}, "all in bfloat16 or all in float16"),
        (dict.fromkeys(("q_dtype", "k_dtype", "v_dtype"), torch.float32), "all in bfloat16 or"),
        ({"chunk_size": 32}, "chunk_size is 32"),
        ({"K": 256, "V": 512}, None),
        ({"K": 264}, "K is 264"),
        ({"K": 60}, "K is 60"),
        ({"V": 100}, "V is 100"),
        ({"pool_dtype": torch.float32}, None),
        ({"T": 0}, "empty"),
        ({"device": torch.device("cpu")}, "NVIDIA GPU"),
        ({"N": 1, "B": 1}, None),
        ({"N": 1, "B": 1, "H": 8, "HV": 16}, "has 16 states"),
        ({"N": 1, "B": 1, "H": 8, "HV": 16, "T": 4096}, None),
        ({"N": 1, "B": 1, "H": 8, "HV": 16, "T": 4096, "K": 136}, "has 32 times 64 columns"),
        ({"N": 1, "B": 1, "H": 8, "HV": 16, "K": 136, "V": 256}, None),
        ({"N": 1, "B": 1, "H": 8, "HV": 16, "batch_invariant": True}, None),
    ],
)
def test_refusals(change: dict[str, Any], words: str | None) -> None:
    refusal = hopper_refusal(replace(COMMON, **change))
    assert refusal is None if words is None else words in str(refusal)


ONE_SEQUENCE = {"N": 1, "B": 1}


@pytest.mark.parametrize(
    ("change", "is_cut"),
    [
        ({}, False),
        (ONE_SEQUENCE | {"T": 8192}, True),
        (ONE_SEQUENCE | {"T": 8192, "batch_invariant": True}, False),
        (ONE_SEQUENCE | {"T": 8192, "K": 136}, False),
        (ONE_SEQUENCE | {"T": 1024}, False),
        (ONE_SEQUENCE | {"T": 2048, "HV": 16}, True),
        (ONE_SEQUENCE | {"T": 4096, "HV": 1}, True),
        (ONE_SEQUENCE | {"T": 8192, "HV": 64}, False),
        (ONE_SEQUENCE | {"T": 8192, "HV": 16, "V": 256}, True),
        (ONE_SEQUENCE | {"T": 0}, False),
        ({"N": 2, "B": 1, "T": 8192, "HV": 8, "is_varlen": True}, True),
        (
            {"N": 2000, "B": 1, "T": 2**20, "HV": 1, "is_varlen": True, "longest": (2**19, 0, 0)},
            False,
        ),
        # The longest sequence counts, where the host knows it.
        (UNEVEN, True),
        (UNEVEN | {"longest": (0, 0, 0)}, False),
        (UNEVEN | {"batch_invariant": True}, False),
        (UNEVEN | {"HV": 16}, True),
        (UNEVEN | {"HV": 64}, False),
    ],
)
def test_calls_that_are_cut(change: dict[str, Any], is_cut: bool) -> None:
    assert (choose_cut(132, replace(COMMON, **change)) is not None) == is_cut


@pytest.mark.parametrize("HV", [2, 8, 32, 64])
@pytest.mark.parametrize("V", [64, 128, 256])
@pytest.mark.parametrize("T", [600, 4000, 33000, 2**20])
@pytest.mark.parametrize("longest", [(0, 0, 0), (0.5, 0.2, 0.1), (0.9, 0.02, 0)])
def test_cuts(HV: int, V: int, T: int, longest: tuple[float, ...]) -> None:
    """No segment is short, and some sequence is longer than the first one."""
    tokens = [int(T * share) for share in longest]
    p = replace(COMMON, B=1, T=T, N=4, HV=HV, V=V, is_varlen=True, longest=(*tokens,))
    cut = choose_cut(132, p)
    if cut is not None:
        assert 4 <= cut.rest and 4 <= cut.first < max(chunks for chunks, _ in lengths_of(p))
        assert V > 64 or (cut.first_states, cut.later_states) == (1, 1)


@pytest.mark.parametrize("cut", [Cut(1, 1), Cut(4, 2), Cut(2, 4), Cut(1, 7)])
@pytest.mark.parametrize("lengths", [(2000,), (129,) * 9, (0, 70, 700, 1), (65, 64, 66, 513)])
def test_slots(lengths: tuple[int, ...], cut: Cut) -> None:
    """Packed sequences never have more segments after their first ones than there are slots."""
    from gdn_triton.chunk.triton.hopper.launch import make_segments

    sizes = {"B": 1, "T": sum(lengths), "N": len(lengths), "is_varlen": True}
    p = replace(COMMON, **sizes, device=torch.device("cpu"))
    segments = make_segments(p, cut)
    counts = [-(-max(n - 64 * cut.first, 0) // (64 * cut.rest)) for n in lengths]
    assert sum(counts) <= segments.slots == segments.NS <= segments.BS
    assert sum(count > 1 for count in counts) <= segments.most_long


@pytest.mark.parametrize(
    ("change", "states"),
    [
        ({}, 1),
        ({"B": 5, "N": 5}, 2),
        ({"B": 5, "N": 5, "V": 64}, 1),
        # The time of one long sequence, or of all.
        ({"B": 1, "T": 8192, "N": 6, "is_varlen": True, "longest": (6000, 500, 500)}, 1),
        ({"B": 1, "T": 8192, "N": 6, "is_varlen": True, "longest": (1500, 1500, 1500)}, 2),
    ],
)
def test_states_of_whole(change: dict[str, Any], states: int) -> None:
    """With a release of Triton whose blocks have one state always one."""
    found = states_of_whole(132, replace(COMMON, **{"HV": 16, **change}))
    assert found == min(states, most_states())


@pytest.mark.parametrize(("release", "states"), [("3.6.0", 2), ("3.8.0", 2), ("3.9.0", 1)])
def test_most_states(release: str, states: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon, "installed_release", lambda: release)
    assert most_states() == states


@pytest.mark.parametrize(
    ("change", "tiles", "is_dealt"),
    [
        ({}, 133, True),
        ({}, 132, False),
        ({"T": 52 * 64}, 133, True),
        ({"T": 52 * 64 + 1}, 133, False),
        ({"K": 136}, 133, False),
    ],
)
def test_several_tiles_a_block(change: dict[str, Any], tiles: int, is_dealt: bool) -> None:
    from gdn_triton.chunk.triton.hopper import launch

    assert launch.is_dealt(replace(COMMON, **change), tiles, 132) == is_dealt


def test_lengths_of() -> None:
    assert lengths_of(replace(COMMON, T=300)) == ((5, 4),)
    packed = replace(COMMON, B=1, T=8192, N=21, is_varlen=True)
    assert lengths_of(packed) == ((7, 21),)
    assert lengths_of(replace(packed, longest=(6912, 65, 1))) == ((108, 1), (2, 1), (1, 1), (1, 18))
    assert lengths_of(replace(packed, N=2, longest=(8000, 192, 0))) == ((128, 1), (3, 1))
    assert [rounded_up(n) for n in (1, 64, 65, 2048, 2049, 6500)] == [1, 1, 2, 32, 34, 104]


@pytest.mark.parametrize(
    ("change", "states"),
    [
        ({}, 128),
        ({"V": 64}, 128),
        ({"V": 200}, 256),
        (UNEVEN | {"T": 8192}, 8 * 8192 / 6912),
        (UNEVEN | {"T": 8400, "longest": (0, 0, 0)}, 8 * 21),
    ],
)
def test_states_at_once(change: dict[str, Any], states: float) -> None:
    assert states_at_once(replace(COMMON, **change)) == states


@pytest.mark.parametrize(
    ("change", "spare", "shapes"),
    [
        ({}, 8, "two"),
        ({"batch_invariant": True}, 8, "two"),
        ({}, 3, ""),
        ({"is_varlen": True}, 8, ""),
        ({"use_qk_l2norm": False}, 8, ""),
        ({"q_dtype": FP16}, 8, ""),
    ],
)
def test_norm_inside(change: dict[str, Any], spare: int, shapes: str) -> None:
    """The blocks in which the kernel normalises rows of a stride of K + spare elements."""
    from gdn_triton.chunk.triton.hopper import launch

    x = torch.zeros(1, 4, 2, 128 + spare, dtype=BF16)[..., :128]
    given = Operands(x, x, *([None] * 7))
    asked = replace(COMMON, **{"use_qk_l2norm": True, **change})
    forms = {"one": launch.ONE, "two": launch.TWO}
    found = [name for name, shape in forms.items() if launch.norm_inside(asked, given, shape)]
    assert ", ".join(found) == shapes


@pytest.mark.usefixtures("on_a_hopper")
def test_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    said = chunk_kernels(COMMON, "triton")
    assert said == "The forward is by the Gluon kernel for compute capability 9.0."
    assert chunk_kernels(COMMON, "cuda") is None
    monkeypatch.setenv("GDN_GLUON", "0")
    said = chunk_kernels(COMMON, "triton")
    assert said == "The forward is by the portable kernels. GDN_GLUON=0 asks for them."
    monkeypatch.setenv("GDN_GLUON", "no")
    with pytest.raises(ValueError, match="GDN_GLUON must be 0 or 1, got 'no'"):
        hopper_refusal(COMMON)


@pytest.mark.parametrize("release", [*RELEASES, "3.6.0+git12", "3.5.9", "4.0.0"])
def test_releases(
    release: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is not listed has the portable kernels, and one line of the log says it."""
    import triton

    monkeypatch.setattr(triton, "__version__", release)
    gluon.installed_release.cache_clear()
    gluon.release_refusal.cache_clear()
    with caplog.at_level(logging.INFO, "gdn_triton"):
        refusals = {gluon.release_refusal() for _ in range(2)}
    gluon.installed_release.cache_clear()
    gluon.release_refusal.cache_clear()
    lines = [record.getMessage() for record in caplog.records]
    if release.partition("+")[0] in RELEASES:
        assert refusals == {None} and lines == []
    else:
        (why,) = refusals
        assert f"the installed one is {release}." in str(why)
        assert lines == [f"{why} The portable kernels run."]
