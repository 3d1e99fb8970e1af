"""`csrc/same_code.py`: which kernels of two libraries it takes for equal."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from library_wheel import load_builder, load_script

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "csrc" / "same_code.py"


tool = load_script("same_code")

SASS = """\
Fatbin elf code:
================
arch = sm_90a
identifier = {file}

	code for sm_90a
	.target	sm_90a

		Function : _Z3addPf
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/       LDC R1, c[0x0][0x28] ;      /* 0x00000a00ff017b82 */
                                                   /* 0x000fe20000000800 */
		.......

		Function : _Z3subPf
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/       EXIT ;                      /* 0x000000000000794d */
                                                   /* 0x000fea0003800000 */
"""
USAGE = """\
Resource usage:
 Function _Z3subPf:
  REG:{registers} STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:536
 Function _Z3addPf:
  REG:8 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:536
"""


def test_what_a_kernel_is() -> None:
    """Its GPU, registers and memory, and each instruction with its bits; not its file."""
    usage = USAGE.format(registers=4)
    add, sub = tool.kernels_of(SASS.format(file="/a/x.cu"), usage)
    assert add[0] == "_Z3addPf" and sub[0] == "_Z3subPf"
    assert add[1].splitlines() == [
        "sm_90a",
        "REG:8 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:536",
        '.headerflags @"EF_CUDA_SM90"',
        "/*0000*/ LDC R1, c[0x0][0x28] ; /* 0x00000a00ff017b82 */",
        "/* 0x000fe20000000800 */",
    ]
    assert tool.kernels_of(SASS.format(file="/b/y.cu"), usage) == [add, sub]
    for other in (
        tool.kernels_of(SASS.replace("0x000fea", "0x001fea"), usage),  # what it waits for
        tool.kernels_of(SASS, USAGE.format(registers=5)),
        tool.kernels_of(SASS.replace("code for sm_90a", "code for sm_100a"), usage),
    ):
        assert other[1][0] == "_Z3subPf" and other[1] != sub
    with pytest.raises(SystemExit, match="other kernels with their code than with their reg"):
        tool.kernels_of(SASS, usage.replace("_Z3subPf", "_Z3mulPf"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "gdn::sm90::fold<gdn::sm90::Heads<64, false> >(gdn::Rows)",
            "fold<Heads<64, false> >(Rows)",
        ),
        ("gdn::(anonymous namespace)::zero(int*)", "zero(int*)"),
        ("void run<(a::Pass)1, x::y::Z>()", "void run<(Pass)1, Z>()"),
        ("plain(float*)", "plain(float*)"),
    ],
)
def test_namespaces_are_dropped(name: str, expected: str) -> None:
    assert tool.without_namespaces(name) == expected


def kernels(**codes: str) -> list[object]:
    """Kernels with these codes. The part of a name after an underscore is left out."""
    return [tool.Kernel(name.split("_")[0], code) for name, code in codes.items()]


def test_comparison() -> None:
    before = kernels(a="1", b="2", c="3")
    assert tool.compare(before, reversed(before)) == (["a", "b", "c"], [], [])
    # A new name with the code of one that is gone is that kernel.
    assert tool.compare(before, kernels(a="1", b="2", d="3")) == (["a", "b"], [("c", "d")], [])
    # Code that two kernels have exchanged is not.
    equal, renamed, different = tool.compare(before, kernels(a="1", b="3", c="2"))
    assert (equal, renamed) == (["a"], [])
    assert different == [
        "b: 1 lines and 1; line 1 was `2`, is `3`.",
        "c: 1 lines and 1; line 1 was `3`, is `2`.",
    ]
    _, renamed, different = tool.compare(before, kernels(a="1", b="2\n2", d="4"))
    assert renamed == []
    assert different == [
        "b: 1 lines and 2; line 2 was `nothing`, is `2`.",
        "c: it is gone, and no new kernel has its code.",
        "d: it is new, and no kernel had its code.",
    ]


def test_kernels_of_one_name_are_counted() -> None:
    """A kernel of a header is in each file that launches it."""
    twice = kernels(a_0="1", a_1="1")
    assert tool.compare(twice, twice).equal == ["a", "a"]
    assert tool.compare(twice, kernels(a="1")).different == [
        "a: it is gone, and no new kernel has its code."
    ]
    assert tool.compare(kernels(a="1"), twice).different == [
        "a: it is new, and no kernel had its code."
    ]
    assert tool.compare(kernels(a_0="1", a_1="2"), kernels(a_0="1", a_1="1")).different == [
        "a: 1 lines and 1; line 1 was `2`, is `1`."
    ]


KERNEL = """
namespace {space} {{
{kind} float by(float x) {{ return x * {factor}; }}
__global__ void scale(float* x) {{ x[threadIdx.x] = by(x[threadIdx.x]); }}
}}
"""


def test_two_builds(tmp_path: Path) -> None:
    """Builds of a small kernel are equal in another namespace and file, and differ in a number."""
    build = load_builder()
    try:
        tools = build.find_toolchain()
    except build.Unbuildable as why:
        pytest.skip(f"nothing can be compiled for a GPU here: {why}")
    if tool.find_cuobjdump() is None or shutil.which("c++filt") is None:
        pytest.skip("there is no cuobjdump, or no c++filt, to read machine code with")
    forms = {
        "first": {"space": "one", "kind": "static __device__", "factor": "3.f"},
        "moved": {"space": "two::three", "kind": "inline __device__", "factor": "3.f"},
        "changed": {"space": "one", "kind": "static __device__", "factor": "5.f"},
    }
    for name, form in forms.items():
        source = tmp_path / f"{name}.cu"
        source.write_text(KERNEL.format(**form))
        command = (
            tools.nvcc,
            "-ccbin",
            tools.cxx,
            "-std=c++17",
            *build.ARCHITECTURES["sm90"].split(),
        )
        subprocess.run([*command, "-cubin", source, "-o", tmp_path / name], check=True)

    def said(after: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, TOOL, tmp_path / "first", tmp_path / after],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stderr == ""
        return done.returncode, done.stdout

    assert said("moved") == (0, "1 kernels are equal but for names, 0 are not\n")
    code, text = said("changed")
    assert code == 1 and text.startswith("different: scale(float*): ")
    assert text.endswith("\n0 kernels are equal but for names, 1 are not\n")
