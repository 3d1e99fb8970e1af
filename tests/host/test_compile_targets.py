"""Kernels, compiled for GPUs that need not be there: compile_targets.py, a target each.

In processes of their own: Triton decides on import between its interpreter and its compiler.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from compilations import check_compiled

SUPPORT = Path(__file__).resolve().parents[1] / "support"


# One process compiles some 280 kernels for Hopper: minutes of a fast core, up to forty of a slow
# one that other processes share. Every shape for every target is for a release.
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("backend", "arch"),
    [
        pytest.param("cuda", "80", marks=pytest.mark.long(16)),
        pytest.param("cuda", "90", marks=pytest.mark.long(220)),
        pytest.param("cuda", "100", marks=pytest.mark.long(20)),
        # The kernels with the widest tiles alone, for less shared memory.
        pytest.param("cuda", "120", marks=pytest.mark.long(16)),
        pytest.param("cuda", "121", marks=pytest.mark.long(11)),
        pytest.param("hip", "gfx942", marks=pytest.mark.long(42)),
        pytest.param("hip", "gfx950", marks=pytest.mark.long(42)),
    ],
)
def test_kernels_compile(backend: str, arch: str) -> None:
    check_compiled("compile_targets.py", backend, arch)


@pytest.mark.timeout(2400)
@pytest.mark.long(60)
def test_sums_have_one_order() -> None:
    """The calls are packed and padded, and have a multiple of 16 tokens or another number."""
    check_compiled("sum_layouts.py")


def test_unwritten_registers_are_found() -> None:
    """Lines of real kernels: one whose second descriptor starts from UR8, which nothing wrote, the
    same with UR16, which the lines before did write, and the upper half of a register, taken into
    one whose own upper half nobody reads, and into a third."""
    command = [sys.executable, "-c", FIND]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1])])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "9960 UIADD3 UR14, UP0, UR8, 0x20, URZ",
        "-",
        "5030 UPRMT UR36, UR35, 0x7632, UR37",
    ]


def test_accesses_before_the_wait_are_found() -> None:
    """Lines of a real kernel, whose wait is missing or comes too late."""
    command = [sys.executable, "-c", FIND_ACCESSES]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1])])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "[]",
        "['0130 LDG.E R0, desc[UR6][R2.64]']",
        "['0130 LDG.E R0, desc[UR6][R2.64]', 'no wait']",
    ]


FIND_ACCESSES = r"""
from target_code import accesses_before_the_wait
start = "        /*0040*/                   S2R R5, SR_CTAID.X ;\n"
wait = "        /*0050*/                   ACQBULK ;\n"
load = "        /*0130*/             @!P0  LDG.E R0, desc[UR6][R2.64] ;\n"
for kernel in (start + wait + load, start + load + wait, start + load):
    print(accesses_before_the_wait(kernel))
"""


FIND = r"""
from target_code import unwritten_uniform_registers
kernel = '''
        /*1760*/                   USHF.R.U32.HI UR16, URZ, 0x4, URZ ;
        /*1770*/                   UMOV UR17, 0xc0000010 ;
        /*9940*/                   UMOV UR6, UR16 ;
        /*9950*/                   UMOV UR7, UR17 ;
        /*9960*/                   UIADD3 UR14, UP0, UR8, 0x20, URZ ;
        /*9970*/                   UMOV UR15, UR7 ;
        /*9b00*/                   HGMMA.64x16x16.F32 R24, R36, gdesc[UR4].tnspB, R24 ;
        /*9b40*/                   HGMMA.64x16x16.F32 R24, R40, gdesc[UR12].tnspB, R24 ;
'''
print(*unwritten_uniform_registers(kernel), sep="\n")
print(*unwritten_uniform_registers(kernel.replace("UR8", "UR16")) or "-", sep="\n")
halves = '''
        /*5000*/                   ULDC UR8, c[0x0][0x210] ;
        /*5010*/                   UPRMT UR35, UR8, 0x7632, UR35 ;
        /*5030*/                   UPRMT UR36, UR35, 0x7632, UR37 ;
'''
print(*unwritten_uniform_registers(halves), sep="\n")
"""


NARROW = """
  tt.func public @kernel(%x: !tt.ptr<f32>, %stride_xh: i32, %stride_qt: i32) {
    %head = arith.extsi %stride_xh : i32 to i64 loc(#loc1)
    %far = arith.muli %pid, %head : i64 loc(#loc1)
    %rows = tt.splat %stride_qt : i32 -> tensor<64xi32> loc(#loc2)
    %row = arith.muli %o_t, %rows : tensor<64xi32> loc(#loc2)
    %next = tt.addptr %x, %stride_xh : !tt.ptr<f32>, i32 loc(#loc3)
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("", []),
        ("    %y = arith.muli %stride_xh, %c16_i32 : i32 loc(#loc4)", ["stride_xh"]),
        ("    %y = arith.muli %stride_xh_far, %c16_i32 : i32", []),
        (
            "    %a = tt.splat %stride_xh : i32 -> tensor<64xi32> loc(#loc4)\n"
            "    %b = tt.expand_dims %a {axis = 1 : i32} : tensor<64xi32> -> tensor<64x1xi32>\n"
            "    %c = arith.muli %o_t, %b : tensor<64x1xi32> loc(#loc5)",
            ["stride_xh"],
        ),
    ],
)
def test_narrow_strides_are_found(line: str, found: list[str]) -> None:
    from target_code import narrow_strides

    assert [text.split()[0] for text in narrow_strides(NARROW + line)] == found
