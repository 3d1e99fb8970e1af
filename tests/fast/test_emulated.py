"""The CUDA library's kernels without a GPU: tests/support/emulator runs their PTX on a CPU. Needs
nvcc and g++."""

import itertools
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from emulator.build import HERE, build, build_program
from emulator.ptx import entries
from emulator.translate import Untranslatable, launch_registers, translate
from fast_cases import ROOT
from library_wheel import load_builder

RIGHT = ("none", "barrier-freed")
IN_BARRIER = "an access to the memory of a barrier"
# The machine's message for each wrong kernel of faults.cu.
FAULTS = {
    "no-wait": "are not ordered",
    "no-fence": "a write without a fence.proxy.async after it",
    "no-sync": "are not ordered",
    "too-many-bytes": "16 bytes to come",
    "outside": "an access outside of the block's shared memory",
    "unaligned": "an access to shared memory that is not aligned",
    "overwritten": "are not ordered",
    "lanes": "a write by another lane of the warp",
    "no-store-wait": "a wrong number",
    "left": "may end before a copy into its shared memory has",
    "no-tensor": "that is not inside of a tensor of the call",
    "read-only": "that is not inside of a tensor which the call writes",
    "blocks": "a write by another block",
    "early": "are not ordered",
    "nobody-waits": "a launch outlives the call",
    "raise-below": "a setmaxnreg.inc to fewer than the 128 registers that a thread has",
    "lower-above": "a setmaxnreg.dec to more than the 128 registers that a thread has",
    "registers-never-free": "lanes wait for registers of their block",
    "one-warp-raises": "a setmaxnreg that not all warps of the warpgroup execute",
    "unread": "are not ordered",
    "untold": "are not ordered",
    "published-early": "are not ordered",
    "store-goes-on": "a number is published before a store has ended",
    "barrier-written": IN_BARRIER,
    "barrier-early": IN_BARRIER,
    "barrier-loaded": IN_BARRIER,
    "barrier-stored": IN_BARRIER,
    "barrier-twice": IN_BARRIER,
}
# Faults for which the message depends on the order of the warps, with the message of one order.
IN_ORDER = {
    "phases": "a phase of a barrier may end before warp 0 has seen the end of the one before",
    "late-phase": "a wait that comes too late: the next phase has ended too",
    "ends-before-raise": "a setmaxnreg that not all warps of the warpgroup execute",
    "barrier-late": "are not ordered",
    "barrier-untold": "are not ordered",
    "barrier-freed-early": "are not ordered",
    "two-lowers": "a setmaxnreg before all warps of the warpgroup have executed the one before",
}
# The messages without the search for races. `no-wait` then shows as a wrong number.
WITHOUT_RACES = {
    "none": "right",
    "no-wait": "a wrong number",
    "overwritten": "an operand changed before the product was waited for",
    "barrier-written": IN_BARRIER,
    "barrier-loaded": IN_BARRIER,
    "barrier-stored": IN_BARRIER,
}
CASES = (
    "forward-.*-bfloat16|prefill-skipped-bfloat16|backward-(heads|alone|empties|uneven|"
    "options-(128-128-bfloat16|96-192-float16)|gates-(model|closed|alternating|growing))"
)


@pytest.fixture(autouse=True)
def able() -> None:
    if platform.machine() != "x86_64":
        pytest.skip(f"the emulator changes stacks on x86_64 only, this is {platform.machine()}")
    builder = load_builder()
    try:
        builder.find_toolchain()
    except builder.Unbuildable as why:
        pytest.skip(f"the CUDA library cannot be built here: {why}")


def said(program: Path, *faults: str, **settings: str) -> str:
    environment = {**os.environ, **settings}
    done = subprocess.run(
        [program, *faults], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.long(12)
def test_faults_are_found(tmp_path: Path) -> None:
    """A check that finds nothing in wrong kernels would find nothing in those of the library."""
    program = build_program(tmp_path, HERE / "faults.cu")
    for fault, words in FAULTS.items():
        assert words in said(program, fault, EMULATOR_RACES="1"), fault
    for fault, words in IN_ORDER.items():
        assert words in said(program, fault, EMULATOR_RACES="1", EMULATOR_IN_ORDER="1"), fault
    for fault, words in WITHOUT_RACES.items():
        assert words in said(program, fault), fault
    for seed, form in itertools.product(range(20), RIGHT):
        assert said(program, form, EMULATOR_RACES="1", EMULATOR_SEED=str(seed)) == "right\n"
    # The first of the two forms fails in a launch that returns its error. No call of
    # cudaGetLastError clears this error, and the second form must not find it.
    failed, _, after = said(program, "early", "none", EMULATOR_RACES="1").partition("\n")
    assert FAULTS["early"] in failed and after == "right\n"


@pytest.mark.long(10)
def test_tiles_are_dealt(tmp_path: Path) -> None:
    """To the blocks of the backward's walks: as a greedy deal does, and each tile once."""
    program = build_program(tmp_path, ROOT / "tests/fast/deal.cu")
    settings = {**os.environ, "EMULATOR_RACES": "1"}
    done = subprocess.run([program], env=settings, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("right: ") and done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long(10)
def test_gates_of_any_size(tmp_path: Path) -> None:
    """Where exp(A_log) overflows and softplus underflows too, with their derivatives."""
    program = build_program(tmp_path, ROOT / "tests/fast/gates.cu")
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("right: ") and done.returncode == 0, done.stdout + done.stderr


def aborting_runtime(folder: Path) -> Path:
    """A library with the functions of CUDA's runtime that `libemulator.so` has. Each ends the
    process."""
    command = ["nm", "-D", "--defined-only", "--format=just-symbols", folder / "libemulator.so"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = [x for x in said.split() if x.startswith(("cuda", "__cuda"))]
    assert "cudaLaunchKernelExC" in names
    source, library = folder / "aborting.cpp", folder / "aborting.so"
    functions = (f'extern "C" void {x}() {{ std::abort(); }}\n' for x in names)
    source.write_text("#include <cstdlib>\n" + "".join(functions))
    cxx = load_builder().find_toolchain().cxx
    subprocess.run([cxx, "-shared", "-fPIC", source, "-o", library], check=True)
    return library


@pytest.mark.long(160)
@pytest.mark.timeout(1800)  # three minutes of two cores, which may be busy with other tests
def test_kernels(tmp_path: Path) -> None:
    """The forward in bf16 at K = V = 128, and on a pool with a skipped sequence; the backward in
    both dtypes and with a slice and a half, whole and in segments, from states of the forward too;
    and the walks of wide keys: within their budgets, with an end, and with no access that races."""
    build(tmp_path, heads="^heads_128(_exact(_pool)?)?$")
    command = [sys.executable, "-m", "emulator.run", "--folder", str(tmp_path), "--races"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}"}
    # A torch for CUDA brings the real runtime, which must not be called either.
    if torch.version.cuda is None:
        environment["LD_PRELOAD"] = str(aborting_runtime(tmp_path))
    # The backward cuts both walks only where a long sequence leaves most multiprocessors idle, and
    # deals segments of the walk forward only where uneven sequences leave some idle.
    runs = (
        *((CASES, 4, 20), ("backward-dealt", 16, 3)),
        ("backward-cut(-packed-forgets|-several)?$", 132, 3),
        ("backward-kept-(chunks|multiples|cut-several)", 132, 3),
        # Triangles beside the walk back, of steep chunks too.
        ("backward-(uneven|small-betas-128-128-strong-bfloat16)$", 132, 2),
        *(("^walks", 4, 6), ("^walks", 132, 6)),
    )
    for select, multiprocessors, count in runs:
        done = subprocess.run(
            [*command, "--select", select, "--multiprocessors", str(multiprocessors)],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        assert done.stdout.count(", ok\n") == count, done.stdout


# Launch bounds, and the numbers of setmaxnreg.dec and .inc behind them.
REGISTERS = (
    (".maxntid 512, 1, 1 .minnctapersm 1", (40,), (176, 120)),
    (".maxntid 512, 1, 1 .minnctapersm 1", (40,), (112,)),
    (".maxntid 512, 1, 1 .minnctapersm 1", (40, 104), ()),
    (".maxntid 384, 1, 1 .minnctapersm 1", (40,), (232,)),
    (".maxntid 288, 1, 1 .minnctapersm 1", (40,), (232,)),
    (".maxntid 256, 1, 1 .minnctapersm 1", (40,), (232,)),
    (".maxntid 256, 1, 1 .minnctapersm 1", (40,), ()),
    (".maxntid 256, 1, 1 .minnctapersm 2", (40,), (232,)),
    (".maxntid 640, 1, 1 .minnctapersm 1", (40,), (200,)),
    (".maxnreg 120", (40,), (176,)),
)


def test_registers_at_launch_are_those_of_ptxas(tmp_path: Path) -> None:
    source = ".version 8.0\n.target sm_90a\n.address_size 64\n"
    for i, (bounds, lowered, raised) in enumerate(REGISTERS):
        kinds = (*(("dec", x) for x in lowered), *(("inc", x) for x in raised))
        code = "\n".join(f"setmaxnreg.{kind}.sync.aligned.u32 {x};" for kind, x in kinds)
        source += f".visible .entry k{i}()\n{bounds}\n{{\n{code}\nret;\n}}\n"
    path = tmp_path / "registers.ptx"
    path.write_text(source)
    builder = load_builder()
    nvcc = builder.find_toolchain().nvcc
    made = ["-cubin", "-o", str(tmp_path / "registers.cubin"), str(path)]
    said = builder.kernels_of(builder.run([nvcc, "-arch=sm_90a", "-Xptxas", "-v", *made]))
    counts = {x.name: x.registers for x in said}
    assert len(counts) == len(REGISTERS)
    for entry in entries(source):  # ptxas says 255 of the 256 that the hardware gives
        assert min(launch_registers(entry), 255) == counts[entry.name], entry.name


def test_registers_at_launch_are_not_known_without_bounds() -> None:
    """ptxas ignores setmaxnreg there."""
    for bounds in ("", ".maxntid 512, 1, 1"):
        (entry,) = entries(f".visible .entry k()\n{bounds}\n{{\nret;\n}}\n")
        assert launch_registers(entry) == 0


def test_unknown_instructions_are_refused() -> None:
    text = ".visible .entry k(\n)\n{\n\t.reg .b32 %r<3>;\n\tbarrier.red.popc %r1, %r2;\n\tret;\n}\n"
    with pytest.raises(Untranslatable, match=r"barrier\.red\.popc"):
        translate(text, "k.ptx")
