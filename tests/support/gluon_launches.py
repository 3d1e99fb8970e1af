"""Holds the emulator to what it says of launches that overlap, of barriers without a fence, and of
memory that Triton gives to a barrier and to something else.

    PYTHONPATH=.:tests/support python -m gluon_launches

Small kernels wait for the launches before them, or do not. Needs g++ on x86_64.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from emulator.gluon import emulated
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gdn_triton.chunk.triton.hopper.descriptors import descriptor, row_tile
from gdn_triton.chunk.triton.hopper.names import load_tile


@triton.jit
def write_kernel(x):
    gdc_launch_dependents()
    tl.store(x, 1.0)


@triton.jit
def copy_kernel(x, y, WAITS: tl.constexpr):
    gdc_launch_dependents()
    if WAITS:
        gdc_wait()
    tl.store(y, tl.load(x))


@gluon.jit
def load_kernel(x_desc, FENCED: gl.constexpr):
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    tile = gl.allocate_shared_memory(x_desc.dtype, [1, 64, 1, 64], ROWS)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    if FENCED:
        fence_async_shared()
    mbarrier.expect(full, 64 * 64 * 2)
    load_tile(x_desc, [0, 0, 0, 0], full, tile)
    mbarrier.wait(full, 0)


def load(*, fenced: bool) -> None:
    x = torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16)
    with emulated({"load_kernel": ()}, races=True):
        load_kernel[(1,)](x_desc=descriptor(x, row_tile(64)), FENCED=fenced)


@gluon.jit
def unused_barrier_kernel(x, INVALIDATED: gl.constexpr):
    """Triton takes the memory of a barrier that nothing waits for as free once it is
    initialised."""
    ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    if INVALIDATED:
        mbarrier.invalidate(barrier)
    rows = gl.arange(0, 128, ROWS)
    tile = gl.allocate_shared_memory(gl.int32, [128], SHARED, rows)
    gl.store(x + rows, tile.load(ROWS))


def reuse_barrier(*, invalidated: bool) -> None:
    x = torch.zeros(128, dtype=torch.int32)
    with emulated({"unused_barrier_kernel": ("x",)}, races=True):
        unused_barrier_kernel[(1,)](x=x, INVALIDATED=invalidated)
    assert torch.equal(x, torch.arange(128, dtype=torch.int32))


def copies(*waits: bool) -> torch.Tensor:
    """A launch writes a number. For each of ``waits`` another one follows, which waits for the
    launch before it or does not. All but the last copy another number; the last copies the first
    one."""
    written, other, result = torch.zeros(3, 1)
    with emulated({}, races=True):
        write_kernel[(1,)](x=written)
        for i, waits_for_it in enumerate(waits):
            last = i == len(waits) - 1
            x, y = (written, result) if last else (other, torch.zeros(1))
            copy_kernel[(1,)](x=x, y=y, WAITS=waits_for_it, launch_pdl=True)
    return result


def unrelated() -> None:
    """The last launch does not wait for the first one, from which it reads nothing."""
    with emulated({}, races=True):
        write_kernel[(1,)](x=torch.zeros(1))
        copy_kernel[(1,)](x=torch.zeros(1), y=torch.zeros(1), WAITS=False, launch_pdl=True)


def expect(error: str, run: Callable[[], object]) -> None:
    try:
        run()
    except RuntimeError as raised:
        assert error in str(raised), raised
    else:
        raise AssertionError(f"no error: {error}")


def main() -> None:
    assert copies(True) == 1
    assert copies(True, True) == 1
    expect("are not ordered", lambda: copies(False))
    # The second launch may end before the first one, so to wait for the second is not enough.
    expect("are not ordered", lambda: copies(False, True))
    expect("does not end after all others", unrelated)
    load(fenced=True)
    expect("has no fence after it", lambda: load(fenced=False))
    reuse_barrier(invalidated=True)
    expect("to the memory of a barrier", lambda: reuse_barrier(invalidated=False))
    print("right")


if __name__ == "__main__":
    main()
