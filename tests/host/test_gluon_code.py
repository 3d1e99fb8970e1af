"""The Gluon kernels, compiled for a GPU that need not be there: tests/support/gluon_code.py, in a
process of its own, since Triton decides on import between its interpreter and its compiler."""

import pytest
import triton
from compilations import check_compiled
from packaging.version import Version
from target_code import (
    accesses_to_barriers,
    loads_in_flight,
    local_memory_around,
    overwritten_operands,
    stale_uniform_registers,
    unwritten_uniform_registers,
)

from gdn_triton._host.gluon import RELEASES


@pytest.mark.timeout(1800)  # a minute of a fast core, more than ten of a slow one
@pytest.mark.long(70)
def test_code_for_hopper() -> None:
    release = Version(triton.__version__).base_version
    if release not in RELEASES:
        pytest.skip(f"with Triton {release} the portable kernels run: not in RELEASES")
    check_compiled("gluon_code.py")


# The loop of a role in the loop of a block's warps, which wait for work. A wait that repeats does
# so after the end of the code, and jumps back.
LOOP = """
.L_x_1:
        /*0000*/                   STL [R1], R2 ;
.L_x_2:
        /*0010*/                   LDL R2, [R1] ;
        /*0018*/                   LDL R3, [R1+0x4] ;
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8], R3 ;
        /*0030*/              @!P0 BRA `(.L_x_4) ;
.L_x_3:
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, R36, gdesc[UR4], R24 ;
        /*0050*/                   STL [R1+0x4], R2 ;
        /*0060*/                   LDL.LU R2, [R1+0x4] ;
        /*0070*/              @!P0 BRA `(.L_x_2) ;
        /*0080*/                   LDL R2, [R1] ;
        /*0090*/              @!P1 BRA `(.L_x_1) ;
        /*00a0*/                   EXIT ;
.L_x_4:
        /*00b0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8], R3 ;
        /*00c0*/              @!P0 BRA `(.L_x_4) ;
        /*00d0*/                   BRA `(.L_x_3) ;
"""


def test_local_memory_is_found() -> None:
    """In the inner loop, before the wait as after it, and in no loop that a wait seems to make."""
    assert local_memory_around(LOOP, "HGMMA.64x128") == 4


def test_the_most_local_memory_is_found() -> None:
    """Of two roles with the same product."""
    other = LOOP.replace("L_x_", "L_x_1").replace("LDL R2, [R1] ;", "NOP ;", 1)
    for sass in (LOOP + other, other + LOOP):
        assert local_memory_around(sass, "HGMMA.64x128") == 4
    assert local_memory_around(other, "HGMMA.64x128") == 3


def test_a_product_in_no_loop_is_an_error() -> None:
    for sass in ("", LOOP.replace("@!P0 BRA `(.L_x_2)", "NOP").replace("@!P1 BRA", "NOP")):
        with pytest.raises(AssertionError, match="HGMMA"):
            local_memory_around(sass, "HGMMA.64x128")


STALE = """
.L_x_1:
        /*0000*/              @P0 BRA `(.L_x_2) ;
        /*0010*/                   UIADD3 UR4, UR9, 0x2, URZ ;
.L_x_2:
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8], R3 ;
        /*0030*/              @!P0 BRA `(.L_x_3) ;
.L_x_4:
        /*0040*/                   UMOV UR6, UR4 ;
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R24, R36, gdesc[UR4], R24 ;
        /*0060*/              @!P1 BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
.L_x_3:
        /*0080*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8], R3 ;
        /*0090*/              @!P0 BRA `(.L_x_3) ;
        /*00a0*/                   BRA `(.L_x_4) ;
"""


@pytest.mark.parametrize("written", ["in a branch", "under a predicate", "always"])
def test_stale_registers_are_found(written: str) -> None:
    """Some iterations do not write the address that the product reads."""
    sass = STALE if written == "in a branch" else STALE.replace("@P0 BRA", "NOP ")
    if written == "under a predicate":
        sass = sass.replace("     UIADD3", "@UP0 UIADD3")
    found = stale_uniform_registers(sass)
    assert found == ([] if written == "always" else ["0040 UMOV UR6, UR4"])


MOVED = """
.L_x_1:
        /*0000*/               @P0 R2UR UR7, R88 ;
        /*0010*/                   IMAD.U32 R89, RZ, RZ, UR7 ;
        /*0020*/                   NOP ;
        /*0030*/               @P0 R2UR UR15, R89 ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, R36, gdesc[UR20], R24 ;
        /*0050*/              @!P1 BRA `(.L_x_1) ;
"""


def test_a_stale_register_that_a_predicate_discards() -> None:
    """A move of a register is harmless where only an instruction under a predicate reads it."""
    assert stale_uniform_registers(MOVED) == []
    without = MOVED.replace("@P0 R2UR UR15", "    R2UR UR15")
    assert stale_uniform_registers(without) == ["0010 IMAD.U32 R89, RZ, RZ, UR7"]


def test_the_lane_of_an_election_is_written() -> None:
    """By the instruction itself, after its predicate."""
    read = "        /*0010*/                   MOV R8, UR62 ;"
    elect = "        /*0000*/                   ELECT P0, UR62, PT ;"
    assert unwritten_uniform_registers(f"{elect}\n{read}") == []
    assert unwritten_uniform_registers(read) == ["0010 MOV R8, UR62"]


def encoded(*instructions: tuple[str, int, int]) -> str:
    """Instructions with their encodings. Of each: its text, the counter that it holds until it has
    ended (7: none), and the counters for which it waits, a bit each."""
    lines = []
    for i, (text, counter, waits) in enumerate(instructions):
        bits = (waits << 11 | counter << 5) << 41
        lines.append(f"        /*{16 * i:04x}*/  {text} ;  /* 0x{0:016x} */")
        lines.append(f"                          /* 0x{bits:016x} */")
    return "\n".join(lines)


ARRIVE = "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ"


@pytest.mark.parametrize("arrive", [ARRIVE, "ARRIVES.LDGSTSBAR.64.ARVCNT [UR4]"])
def test_a_load_in_flight_is_found(arrive: str) -> None:
    """Unless the arrival, or an instruction before it, waits for the load, or a fence does."""
    load, use = ("LDS R2, [R3]", 1, 0), "FADD R4, R2, R2"
    assert loads_in_flight(encoded(load, (arrive, 7, 1))) == [f"0010 {arrive}"]
    assert loads_in_flight(encoded(load, (arrive, 7, 2))) == []
    assert loads_in_flight(encoded(load, (use, 7, 2), (arrive, 7, 0))) == []
    assert loads_in_flight(encoded(load, ("FENCE.VIEW.ASYNC.S", 7, 0), (arrive, 7, 0))) == []


def test_a_wait_for_products_outlasts_earlier_loads() -> None:
    """But not later ones, and not if the wait leaves products."""
    load, product = ("LDS R2, [R3]", 1, 0), ("HGMMA.64x64x16.F32 R8, R4, gdesc[UR4], R8", 7, 0)
    wait, arrive = ("WARPGROUP.DEPBAR.LE gsb0, 0x0", 7, 0), (ARRIVE, 7, 0)
    assert loads_in_flight(encoded(load, product, wait, arrive)) == []
    assert loads_in_flight(encoded(product, load, wait, arrive)) == [f"0030 {ARRIVE}"]
    left = ("WARPGROUP.DEPBAR.LE gsb0, 0x1", 7, 0)
    assert loads_in_flight(encoded(load, product, left, arrive)) == [f"0030 {ARRIVE}"]


def test_a_load_of_the_last_iteration_is_found() -> None:
    """It is in flight at an arrival that stands before it."""
    loop = encoded((ARRIVE, 7, 0), ("LDSM.16.M88.4 R4, [R3]", 0, 0), ("@P0 BRA `(.L_x_1)", 7, 0))
    assert loads_in_flight(f".L_x_1:\n{loop}") == [f"0000 {ARRIVE}"]


PRODUCTS = """
        /*0000*/                   HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], R24 ;
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR8], R24, gsb0 ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R56, R12, gdesc[UR4], R56, gsb0 ;
        /*0030*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0040*/                   {} ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0060*/                   {} ;
"""


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("MOV R15, R3", True),
        ("LDS.128 R12, [R2]", True),
        ("IMAD.WIDE R14, R2, R3, R4", True),
        ("SHFL.BFLY PT, R12, R2, 0x1, 0x1f", True),
        ("LDSM.16.M88.4 R9, [R2]", True),  # to R12
        ("MOV R11, R3", False),  # of the group that has ended
        ("STS [R12], R12", False),
        ("ISETP.NE.AND P0, PT, R12, RZ, PT", False),
        ("MOV R16, R12", False),
    ],
)
def test_overwritten_operands_are_found(text: str, is_found: bool) -> None:
    """After the first wait the product at 0020 is in flight, and after the second one none."""
    found = overwritten_operands(PRODUCTS.format(text, text))
    assert found == ([f"0040 {text}"] if is_found else [])


BARRIERS = """
        /*0000*/                   SYNCS.EXCH.64 URZ, [UR9+0x2bc08], UR12 ;
        /*0010*/                   LDS.U8 R0, [R0+UR4+0x2bc0c] ;
        /*0020*/                   STS.128 [UR9+0x2bc00], R4 ;
        /*0030*/                   STS.64 [UR9+0x2bc00], R14 ;
        /*0040*/                   LDS R2, [R6+0x2bc0c] ;
        /*0050*/                   LDS R3, [R6+0x2bc10] ;
        /*0060*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8+0x2bc08], R3 ;
"""


def test_accesses_to_barriers_are_found() -> None:
    """Those that overlap the eight bytes of a barrier, and no operation of the barrier itself."""
    assert accesses_to_barriers(BARRIERS) == [
        "0020 STS.128 [UR9+0x2bc00], R4",
        "0040 LDS R2, [R6+0x2bc0c]",
    ]
