"""`TileLaunch` against Triton's own launches of a kernel with TMA descriptors: the same compiled
variant, the same descriptors, always. As in test_launch.py the child process is this file itself,
on a driver that writes down what it is asked to run."""

from typing import Any

import pytest
import torch
import triton
from packaging.version import Version
from recorded_launches import Counted, EncodingRecorder, Recorder, said_by_child, say_outcomes
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gdn_triton._host.gluon import RELEASES
from gdn_triton._triton.tiles import compiler
from gdn_triton.chunk.triton.hopper.descriptors import (
    MOST_ENCODED,
    TAKES_LIST,
    TileLaunch,
    descriptor,
    row_tile,
    tma_reachable,
    tma_readable,
)


@gluon.jit(do_not_specialize=["n", "stride_b"])
def tiles_kernel(
    x_desc,
    y_desc,
    out,
    flags,
    n,
    stride_t,
    stride_b,
    WIDTH: gl.constexpr,
    num_warps: gl.constexpr,
):
    """out[i stride_b] = n + stride_t, plus a flag."""
    total = n + stride_t + WIDTH
    if flags is not None:
        total += gl.load(flags)
    gl.store(out + gl.program_id(0) * stride_b, total)


TILES = {"x_desc": row_tile(64), "y_desc": row_tile(128)}
FIXED = {"stride_t": 3, "WIDTH": 64, "num_warps": 4}
GRID = (2, 1, 1)
IS_LISTED = Version(triton.__version__).base_version in RELEASES


def rows(*shape: int, spare: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*shape[:-1], shape[-1] + spare, dtype=dtype)[..., : shape[-1]]


def given(**changes: Any) -> dict[str, Any]:
    tensors = {"x_desc": rows(2, 70, 3, 64), "y_desc": rows(2, 70, 1, 128)}
    pointers = {"out": torch.zeros(8, dtype=torch.int32), "flags": None}
    return {**tensors, **pointers, "n": 5, "stride_b": 4, **changes}


def recorder() -> Recorder:
    """A new driver, and nothing compiled."""
    from triton.runtime import driver

    recorder = EncodingRecorder() if IS_LISTED else Recorder()
    driver.set_active(recorder)
    tiles_kernel.device_caches.clear()
    compiler.cache_clear()
    return recorder


def check_same(here: Recorder, launch: TileLaunch, arguments: dict[str, Any], own: int) -> None:
    """A launch runs what Triton would run; own: how many of the launches are Triton's own."""
    described = {name: descriptor(arguments[name], tile) for name, tile in TILES.items()}
    tiles_kernel[GRID](**{**arguments, **described}, **launch._fixed)
    expected = here.last()
    with Counted() as counted:
        launch(GRID, **arguments)
    assert here.last() == expected, (here.last(), expected)
    assert counted.count == own, (counted.count, own)


def child_same_variant_and_descriptors_for_every_change() -> None:
    """From a warm launch, one thing at a time: 1 where Triton has to look, 0 where it need not."""
    here = recorder()
    launch = TileLaunch(tiles_kernel, TILES, **FIXED)
    check_same(here, launch, given(), own=1)
    # Addresses, shapes, strides and values are handed over, not remembered.
    for changes in (
        {},
        {"x_desc": rows(2, 70, 3, 64, spare=8)},
        {"x_desc": rows(1, 1, 1, 64)},
        {"x_desc": rows(5, 17, 16, 128)},
        # The stride of a dimension of length 1 may be one that TMA cannot take.
        {"x_desc": rows(1, 64, 1, 64, spare=8).transpose(0, 2)},
        {"x_desc": torch.zeros(640, dtype=torch.bfloat16).as_strided((1, 4, 1, 64), (3, 64, 5, 1))},
        {"y_desc": rows(2, 64, 9, 128).transpose(1, 2)},
        *({"n": n} for n in (0, 1, 16, 2**31 - 1, -(2**31))),
        {"stride_b": 1},
    ):
        check_same(here, launch, given(**changes), own=0)
    for changes in (
        {"x_desc": rows(2, 70, 3, 64, dtype=torch.float16)},
        {"y_desc": rows(2, 70, 3, 64, dtype=torch.float16)},
        {"out": torch.zeros(8, dtype=torch.int64)},
        {"out": torch.zeros(9, dtype=torch.int32)[1:]},
        {"flags": torch.zeros(1, dtype=torch.int32)},
        {"n": True},
    ):
        check_same(here, launch, given(**changes), own=1)
        check_same(here, launch, given(**changes), own=0)
        check_same(here, launch, given(), own=0)
    for _ in range(2):
        check_same(here, launch, given(n=2**31), own=1)


def child_same_variant_for_every_change_of_what_is_fixed() -> None:
    here = recorder()
    changes: tuple[dict[str, Any], ...] = ({}, {"stride_t": 1}, {"stride_t": 16}, {"WIDTH": 32})
    launches = [TileLaunch(tiles_kernel, TILES, **{**FIXED, **x}) for x in changes]
    for own in (1, 0):
        for launch in launches:
            check_same(here, launch, given(), own)
    assert here.loaded == len(changes)


def child_devices_and_streams() -> None:
    here = recorder()
    launch = TileLaunch(tiles_kernel, TILES, **FIXED)
    check_same(here, launch, given(), own=1)
    here.stream = 12
    check_same(here, launch, given(), own=0)
    assert here.last()[3] == 12
    here.device = 1
    check_same(here, launch, given(), own=1)
    second = here.last()[4]
    here.device = 0
    check_same(here, launch, given(), own=0)
    assert here.last()[4] != second


def child_descriptors_are_encoded_once() -> None:
    here = recorder()
    launch = TileLaunch(tiles_kernel, TILES, **FIXED)
    arguments = given()
    for _ in range(2):
        check_same(here, launch, arguments, own=int(not launch._variants))
    if not isinstance(here, EncodingRecorder):
        return
    before = here.encodings
    launch(GRID, **arguments)
    assert here.encodings == before
    # The tensor that lies at the same address has another width, or other rows.
    x = rows(2, 70, 3, 64)
    for y in (x, x.view(4, 35, 3, 64), x.view(2, 35, 6, 64), x[:, :64]):
        check_same(here, launch, {**arguments, "x_desc": y}, own=0)
    places = [rows(1, 1, 8 * i, 64) for i in range(1, MOST_ENCODED + 2)]
    for x in places:
        launch(GRID, **{**arguments, "x_desc": x})
    (variant,) = launch._variants.values()
    assert [len(encoded) <= MOST_ENCODED for _, encoded in variant._tiles] == [True, True]


def child_hooks_are_called() -> None:
    from triton import knobs

    here = recorder()
    launch = TileLaunch(tiles_kernel, TILES, **FIXED)
    check_same(here, launch, given(), own=1)
    seen: list[str] = []
    enter = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    knobs.runtime.launch_enter_hook.add(enter)
    check_same(here, launch, given(), own=0)
    knobs.runtime.launch_enter_hook.remove(enter)
    assert seen == ["tiles_kernel"] * 2, seen


def child_tensors_that_tma_cannot_access() -> None:
    here = recorder()
    launch = TileLaunch(tiles_kernel, TILES, **FIXED)
    for _ in range(2):
        count = len(here.launches)
        for x in UNREACHABLE:
            try:
                launch(GRID, **given(x_desc=x))
            except AssertionError:
                continue
            raise RuntimeError(f"a launch with {x.shape}, {x.stride()}")
        assert len(here.launches) == count
        launch(GRID, **given())


CHECKS = [name for name in globals() if name.startswith("child_")]

# A row, a token and a head that begin at no multiple of 16 bytes; columns that are not dense.
UNREACHABLE = [
    rows(2, 70, 3, 64).flatten()[1:8193].view(2, 64, 1, 64),
    rows(2, 70, 1, 64, spare=4),
    rows(2, 70, 64, 3).transpose(2, 3),
    rows(2, 70, 3, 128)[..., ::2],
]

# -------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def child() -> dict[str, str]:
    return said_by_child(__file__)


@pytest.mark.parametrize("check", CHECKS)
def test_as_triton(check: str, child: dict[str, str]) -> None:
    assert child[check] == "held"


def test_copies() -> None:
    for x in (rows(2, 70, 3, 64, spare=8), rows(1, 4, 3, 64).transpose(1, 2)):
        assert tma_readable(x) is x
    for x in UNREACHABLE:
        assert not tma_reachable(x)
        assert tma_reachable(tma_readable(x)) and torch.equal(tma_readable(x), x)


def test_releases() -> None:
    assert tuple(TAKES_LIST) == RELEASES


def test_names() -> None:
    with pytest.raises(TypeError, match=r"\('y_desc', 'x_desc'\) must be its first parameters"):
        TileLaunch(tiles_kernel, dict(reversed(TILES.items())), **FIXED)
    with pytest.raises(TypeError, match="WIDTH is a tensor, which cannot be fixed"):
        TileLaunch(tiles_kernel, TILES, **{**FIXED, "WIDTH": torch.ones(1)})
    launch = TileLaunch(tiles_kernel, TILES, **FIXED)
    with pytest.raises(TypeError, match="in this order"):
        launch(GRID, **dict(reversed(given().items())))


if __name__ == "__main__":
    say_outcomes(globals()[check] for check in CHECKS)
