"""`Launch` against Triton's own launches: the same compiled variant, the same arguments, always.

Triton chooses among compiled variants of a kernel by its arguments; a launch of the wrong one is
silent. The child process is this file itself, on Triton's compiler with a driver that writes down
what it is asked to run, for a GPU that need not be there; on a machine with a GPU it runs as well.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from recorded_launches import Counted, Recorder, said_by_child, say_outcomes

from gdn_triton._triton.launch import MOST_VARIANTS, Launch
from gdn_triton._triton.tiles import FUSED, compiler


@triton.jit(do_not_specialize=["scale", "n"])
def scaled_sum_kernel(
    x,
    y,
    out,
    scale,
    n,
    stride,
    ONE: tl.constexpr,
    HAS_Y: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[i] = scale * (x[i * stride] + y[i]) + ONE."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + i * stride, mask=i < n, other=0).to(tl.float32)
    if HAS_Y:
        total += tl.load(y + i, mask=i < n, other=0).to(tl.float32)
    tl.store(out + i, scale * total + ONE, mask=i < n)


@triton.jit(do_not_specialize=["n"])
def apart_kernel(x, n, stride, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i * stride, mask=i < n), mask=i < n)


FIXED = {"stride": 3, "ONE": 1, "HAS_Y": True, "BLOCK": 64}
OPTIONS = {"num_warps": 4, "num_stages": 2, **FUSED}
GRID = (1, 1, 1)


def given(device: str = "cpu", n: Any = 40, **changes: Any) -> dict[str, Any]:
    arguments = {
        "x": torch.arange(512.0, device=device),
        "y": torch.ones(512, device=device),
        "out": torch.full((512,), float("nan"), device=device),
        "scale": 0.5,
        "n": n,
    }
    return {**arguments, **changes}


# --------------------------------------------------------------------------- in the child: recorded


def recorder() -> Recorder:
    """A new driver, and nothing compiled."""
    from triton.runtime import driver

    recorder = Recorder()
    driver.set_active(recorder)
    scaled_sum_kernel.device_caches.clear()
    compiler.cache_clear()
    return recorder


def triton_launches(recorder: Recorder, arguments: dict[str, Any], fixed: dict[str, Any]) -> Any:
    """The kernel that Triton itself runs for these arguments."""
    scaled_sum_kernel[GRID](**arguments, **fixed)
    return recorder.last()


def check_same(recorder: Recorder, launch: Launch, arguments: Any, fixed: Any, own: int) -> None:
    """A launch runs what Triton would run; `own`: how many of the launches are Triton's own."""
    expected = triton_launches(recorder, arguments, fixed)
    with Counted() as counted:
        launch(GRID, **arguments)
    assert recorder.last() == expected, (recorder.last(), expected)
    assert counted.count == own, (counted.count, own)


def child_same_variant_for_every_change_of_what_is_given() -> None:
    """From a warm launch, one thing at a time: 1 where Triton has to look, 0 where it need not."""
    here = recorder()
    fixed = {**FIXED, **OPTIONS}
    launch = Launch(scaled_sum_kernel, **fixed)
    with Counted() as counted:
        launch(GRID, **given())
    assert counted.count == 1
    check_same(here, launch, given(), fixed, own=0)
    # Values are handed over, not remembered; 1, 16 and 17 are no variants of what is not fixed.
    for n in (0, 1, 16, 17, 2**31 - 1, -(2**31), -1):
        check_same(here, launch, given(n=n), fixed, own=0)
    for scale in (0.0, -0.0, 1.0, 1e300, 7.25):
        check_same(here, launch, given(scale=scale), fixed, own=int(scale == 1e300))
    for changes in (
        {"x": torch.arange(512).half()},
        {"x": torch.arange(512).bfloat16()},
        {"x": torch.arange(512)},
        {"y": torch.ones(513)[1:]},
        {"out": torch.empty(514)[2:]},
        {"x": torch.ones(513)[1:], "y": torch.ones(513)[1:]},
        {"scale": 1},
        {"scale": True},
        {"n": True},
        {"n": 16.0},
    ):
        check_same(here, launch, given(**changes), fixed, own=1)
        check_same(here, launch, given(**changes), fixed, own=0)
        check_same(here, launch, given(), fixed, own=0)
    # Sizes of 64 bits are Triton's own every time.
    for n in (2**31, 2**40, -(2**31) - 1):
        for _ in range(2):
            check_same(here, launch, given(n=n), fixed, own=1)
    # Another stride of the storage, another tensor: only addresses.
    check_same(here, launch, given(y=torch.ones(520)[4:]), fixed, own=0)


def child_absent_pointers() -> None:
    here = recorder()
    fixed = {**FIXED, **OPTIONS, "HAS_Y": False}
    launch = Launch(scaled_sum_kernel, **fixed)
    for own, y in ((1, None), (0, None), (1, torch.ones(512)), (0, None), (0, torch.ones(512))):
        check_same(here, launch, given(y=y), fixed, own)


def child_same_variant_for_every_change_of_what_is_fixed() -> None:
    """Objects side by side, made and run in every order: none takes another's variant."""
    here = recorder()
    changes = (
        *({}, {"stride": 1}, {"stride": 16}, {"stride": 17}, {"stride": 2**31}),
        *({"ONE": 1.0}, {"ONE": True}, {"ONE": 2}, {"HAS_Y": False}, {"BLOCK": 128}),
        *({"num_warps": 8}, {"num_stages": 3}),
    )
    launches = [({**FIXED, **OPTIONS, **x}, Launch(scaled_sum_kernel, **{**FIXED, **OPTIONS, **x}))
                for x in changes]  # fmt: skip
    for own in (1, 0, 0):
        for fixed, launch in launches:
            check_same(here, launch, given(), fixed, own)
    handles = {launch_args[4] for launch_args in here.launches}
    # A stride of 17 is no other variant than one of 3, and Triton takes 1.0 and True for 1.
    assert len(handles) == len(changes) - 3, (len(handles), len(changes))


def child_devices_and_streams() -> None:
    here = recorder()
    fixed = {**FIXED, **OPTIONS}
    launch = Launch(scaled_sum_kernel, **fixed)
    check_same(here, launch, given(), fixed, own=1)
    here.stream = 12
    check_same(here, launch, given(), fixed, own=0)
    assert here.last()[3] == 12
    here.device = 1
    check_same(here, launch, given(), fixed, own=1)
    check_same(here, launch, given(), fixed, own=0)
    second = here.last()[4]
    here.device = 0
    check_same(here, launch, given(), fixed, own=0)
    assert here.last()[4] != second


def child_hooks_are_called() -> None:
    from triton import knobs

    here = recorder()
    fixed = {**FIXED, **OPTIONS}
    launch = Launch(scaled_sum_kernel, **fixed)
    launch(GRID, **given())
    seen: list[str] = []
    enter = lambda metadata: seen.append("enter " + metadata.get()["name"])  # noqa: E731
    leave = lambda metadata: seen.append("leave " + metadata.get()["name"])  # noqa: E731
    knobs.runtime.launch_enter_hook.add(enter)
    check_same(here, launch, given(), fixed, own=0)
    assert seen == ["enter scaled_sum_kernel"] * 2, seen
    knobs.runtime.launch_exit_hook.add(leave)
    knobs.runtime.launch_enter_hook.remove(enter)
    seen.clear()
    check_same(here, launch, given(), fixed, own=0)
    assert seen == ["leave scaled_sum_kernel"] * 2, seen
    knobs.runtime.launch_exit_hook.remove(leave)
    scaled_sum_kernel.add_pre_run_hook(lambda *args, **kwargs: seen.append("before"))
    seen.clear()
    check_same(here, launch, given(), fixed, own=1)
    assert seen == ["before"] * 2, seen
    scaled_sum_kernel.pre_run_hooks.clear()


def child_remembers_no_more_than_it_says() -> None:
    here = recorder()
    fixed = {**FIXED, **OPTIONS}
    launch = Launch(scaled_sum_kernel, **fixed)
    for here.device in range(MOST_VARIANTS + 3):
        check_same(here, launch, given(), fixed, own=1)
        check_same(here, launch, given(), fixed, own=0)
        assert len(launch._variants) <= MOST_VARIANTS
    assert len(launch._variants) == 3


def child_nothing_is_kept_of_a_replaced_launch() -> None:
    """A run that returns nothing, as in compile_targets.py, is called every time."""
    from triton.runtime.jit import JITFunction

    here = recorder()
    launch = Launch(scaled_sum_kernel, **FIXED, **OPTIONS)
    kept, asked = JITFunction.run, []
    JITFunction.run = lambda self, *args, **kwargs: asked.append(kwargs)  # type: ignore
    try:
        launch(GRID, **given())
        launch(GRID, **given())
    finally:
        JITFunction.run = kept  # type: ignore[method-assign]
    assert len(asked) == 2 and not here.launches


def child_other_gpus_are_left_to_triton() -> None:
    from triton.backends.compiler import GPUTarget

    here = recorder()
    here.target = GPUTarget("hip", "gfx942", 64)
    fixed = {**FIXED, **OPTIONS}
    launch = Launch(scaled_sum_kernel, **fixed)
    for _ in range(2):
        check_same(here, launch, given(), fixed, own=1)


def child_numbers_stand_after_the_pointers() -> None:
    recorder()
    message = raised(lambda: Launch(scaled_sum_kernel, **FIXED, scale=1.0))
    assert "must be its first parameters" in message, message
    without = {name: value for name, value in FIXED.items() if name != "stride"}
    message = raised(lambda: Launch(scaled_sum_kernel, **without))
    assert "must end with ('scale', 'n')" in message, message


def raised(function: Callable[[], Any]) -> str:
    try:
        function()
    except TypeError as error:
        return str(error)
    raise AssertionError("no TypeError")


CHECKS = [name for name in globals() if name.startswith("child_")]

# -------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def child() -> dict[str, str]:
    """The output of each check. The checks run in a separate process, because Triton chooses
    between its interpreter and its compiler when it is imported."""
    return said_by_child(__file__)


@pytest.mark.parametrize("check", CHECKS)
def test_beside_triton(check: str, child: dict[str, str]) -> None:
    assert child[check] == "held"


@pytest.fixture
def launch() -> Iterator[Launch]:
    yield Launch(scaled_sum_kernel, **FIXED, **OPTIONS)


def test_results(launch: Launch, device: str) -> None:
    """On a GPU through both ways of launching, else in the interpreter."""
    for n in (40, 64, 1, 40):
        for offset in (0, 1, 0):
            arguments = given(device, n=n, x=torch.arange(512.0, device=device)[offset:])
            launch(GRID, **arguments)
            expected = 0.5 * (3.0 * torch.arange(n, device=device) + offset + 1) + 1
            assert torch.equal(arguments["out"][:n], expected)
            assert arguments["out"][n:].isnan().all()


def test_order_and_names(launch: Launch) -> None:
    arguments = given()
    with pytest.raises(TypeError, match=r"expected \('x', 'y', 'out', 'scale', 'n'\), in this"):
        launch(GRID, **{name: arguments[name] for name in ("y", "x", "out", "scale", "n")})
    with pytest.raises(TypeError, match="in this order"):
        launch(GRID, **{name: arguments[name] for name in ("x", "y", "out", "scale")})
    with pytest.raises(TypeError, match="in this order"):
        launch(GRID, **arguments, stride=3)


def test_what_cannot_be_fixed() -> None:
    with pytest.raises(TypeError, match="must be its first parameters"):
        Launch(scaled_sum_kernel, **FIXED, x=None)
    with pytest.raises(TypeError, match="ONE is a tensor, which cannot be fixed"):
        Launch(scaled_sum_kernel, **{**FIXED, "ONE": torch.ones(1)})
    with pytest.raises(TypeError, match="must be its first parameters"):
        Launch(apart_kernel, stride=1, BLOCK=16)


if __name__ == "__main__":
    say_outcomes(globals()[check] for check in CHECKS)
