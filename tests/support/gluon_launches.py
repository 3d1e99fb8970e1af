"""Holds the emulator to what it says of launches that overlap.

    PYTHONPATH=.:tests/support python -m gluon_launches

Small kernels wait for the launches before them, or do not. Needs g++ on x86_64.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from emulator.gluon import emulated
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


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
    print("right")


if __name__ == "__main__":
    main()
