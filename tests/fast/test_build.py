"""The build of the CUDA library, from a checkout and in an install: its machine code and symbols,
the faults that stop it, and what is missing where it cannot be made. Needs nvcc in some tests, and
no GPU."""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fast_cases import ROOT, output
from library_wheel import check_library_wheel, load_builder, load_script


@functools.cache
def builder() -> ModuleType:
    return load_builder()


NO_COMPILER = (
    'there is no CUDA compiler (tried /nowhere/nvcc); pip install ".[cuda]" brings one, or set '
    "CUDA_HOME or NVCC"
)

# A machine-code instruction, and what goes without it.
INSTRUCTIONS = {
    "HGMMA": "matrix products on the tensor cores, by warpgroup",
    "UTMALDG": "loads by TMA",
    "UTMASTG": "stores by TMA",
}
# The library may need the C library, the compiler's runtime and torch, of which it uses the stable
# ABI only.
NEEDED = r"lib(torch|torch_cpu|stdc\+\+|gcc_s|c|m|dl|rt|pthread)\.so|ld-linux"
UNDEFINED = r"(aoti_torch_|torch_)\w+$|.*@(GLIBC|GLIBCXX|CXXABI|GCC)_"


def cuobjdump() -> str:
    found = load_script("same_code").find_cuobjdump()
    if found is None:
        pytest.skip("there is no cuobjdump to read machine code with: neither nvcc's nor Triton's")
    return str(found)


def toolchain() -> Any:
    build = builder()
    try:
        return build.find_toolchain()
    except build.Unbuildable as why:
        pytest.skip(f"the CUDA library cannot be built here: {why}")


@pytest.mark.long(150)
@pytest.mark.timeout(2400)  # five minutes of two cores, which may be busy with other tests
def test_build_from_clean(tmp_path: Path) -> None:
    """In one test, for the build is the expensive part."""
    build, tools = builder(), toolchain()
    library, objects = tmp_path / "library.so", tmp_path / "objects"
    kernels = build.build(tools, library, objects)
    assert kernels, "ptxas reported no kernel"
    warnings = [
        line
        for log in objects.rglob("*.log")
        for line in log.read_text().splitlines()
        if re.search(r"\bwarning\b", line, re.I)
    ]
    assert not warnings, warnings
    check_machine_code(library, {kernel.name for kernel in kernels})
    check_symbols(library)
    check_loads_without_driver(library)
    check_library_wheel(library, tmp_path / "wheel")
    # Nothing changed: nothing is compiled again.
    made = {path: path.stat().st_mtime_ns for path in objects.rglob("*.o")}
    build.build(tools, library, objects)
    assert made == {path: path.stat().st_mtime_ns for path in objects.rglob("*.o")}


def host_program(name: str, folder: Path) -> str:
    """The output of a program of tests/fast/ that runs functions of csrc on the CPU."""
    tools = toolchain()
    program, source = folder / name, Path(__file__).with_name(f"{name}.cu")
    command = (tools.nvcc, "-ccbin", tools.cxx, "-std=c++17", "-O1", "-arch=sm_90a", "-o", program)
    output(*command, "-I", ROOT / "csrc", source)
    return output(program)


def test_plans(tmp_path: Path) -> None:
    """How calls are cut into segments: whatever the lengths are, there is memory for them; and no
    cut next to the chosen one promises more."""
    assert host_program("plans", tmp_path) == "right: 3542 plans\n"


def test_frame(tmp_path: Path) -> None:
    """The powers of two in which a state is held, and what stays in the triangles of a chunk that
    decays by more: they add up to the gates, and all are in the dtype's range."""
    assert host_program("frame", tmp_path).startswith("right: ")


def check_machine_code(library: Path, kernels: set[str]) -> None:
    tool = cuobjdump()
    usage = output(tool, "--dump-resource-usage", library)
    assert set(re.findall(r"^arch = (\S+)", usage, re.M)) == {"sm_90a"}
    used = dict(re.findall(r"Function (\S+):\s*\n\s*(REG:.*)", usage))
    assert set(used) == kernels
    for name, line in used.items():
        assert "STACK:0 " in line and "LOCAL:0 " in line, f"{name}: {line}"
    code = output(tool, "--dump-sass", library)
    for instruction in ("LDL", "STL"):
        assert not has_word(code, instruction), f"{instruction}: local memory"
    for instruction, purpose in INSTRUCTIONS.items():
        assert has_word(code, instruction), f"no {instruction}: {purpose}"


def has_word(text: str, word: str) -> bool:
    """The text is of 100 MB: a pattern that begins with letters is found fastest in it."""
    return re.search(rf"{word}(?<=\b{word})\b", text) is not None


def check_symbols(library: Path) -> None:
    if shutil.which("nm") is None or shutil.which("readelf") is None:
        pytest.skip("there are no nm and readelf (binutils) to list symbols with")
    undefined = [line.split()[-2:] for line in output("nm", "-D", "-u", library).splitlines()]
    foreign = [name for kind, name in undefined if kind != "w" and not re.match(UNDEFINED, name)]
    assert not foreign, "outside of the stable ABI"
    needed = re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-d", library))
    assert not [name for name in needed if not re.match(NEEDED, name)]
    # It brings libtorch_cuda.so, where the weak symbol of the current stream is.
    assert "libtorch.so" in needed


LOAD = """
import sys, torch
torch.ops.load_library(sys.argv[1])
print(torch.ops.gdn_fast.why_unavailable())
x = torch.zeros(1, 4, 2, 128, dtype=torch.bfloat16)
side = torch.zeros(1, 4, 2)
try:
    torch.ops.gdn_fast.chunk_forward(
        *(x, x, x, side, side, None, None, None, 1.0, *[False] * 5, [0, 0, 0]),
        *(None, x, None, None, 0, side),
    )
except RuntimeError as why:
    print(why)
"""


def check_loads_without_driver(library: Path) -> None:
    """Also where torch has no CUDA, or the machine no GPU; then it says so."""
    sentence, refusal = output(
        sys.executable, "-c", LOAD, library, CUDA_VISIBLE_DEVICES=""
    ).splitlines()
    if torch.version.cuda is None:
        assert sentence == "This torch was built without CUDA."
        assert "this torch was built without CUDA" in refusal
    else:
        assert sentence == "" or sentence.endswith(".")
        assert "q must be on a CUDA device" in refusal


CLEAN_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1kPf' for 'sm_90a'
ptxas info    : Function properties for _Z1kPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 6 barriers
"""


def test_faults_of_a_log() -> None:
    build = builder()
    assert build.faults(CLEAN_LOG) == []
    assert build.kernels_of(CLEAN_LOG * 2) == [build.Kernel("_Z1kPf", 168, 0, 0, 0)] * 2
    (spilt,) = build.faults(CLEAN_LOG.replace("0 bytes spill loads", "24 bytes spill loads"))
    assert "_Z1kPf" in spilt and "24 of spill loads" in spilt
    (local,) = build.faults(CLEAN_LOG.replace("0 bytes stack", "64 bytes stack"))
    assert "64 bytes of local memory" in local
    for code in ("C7508", "C7510", "C7514"):
        line = f"ptxas info    : ({code}) Potential Performance Loss: wgmma.mma_async is serialized"
        assert build.faults(CLEAN_LOG + line + "\n") == [line]


def fake_nvcc(folder: Path, version: str) -> str:
    path = folder / f"nvcc-{version}"
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.1'\n")
    path.chmod(0o755)
    return str(path)


def test_newest_compiler_that_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old nvcc on the PATH does not hide the one that pip has installed."""
    build = builder()
    old, new = fake_nvcc(tmp_path, "12.4"), fake_nvcc(tmp_path, "13.0")
    monkeypatch.setattr(build, "nvcc_candidates", lambda: ["/nowhere/nvcc", old, new])
    monkeypatch.setenv("CXX", "g++")
    tools = build.find_toolchain()
    assert (tools.nvcc, tools.cuda) == (new, (13, 0))


def test_dry_run(tmp_path: Path) -> None:
    """Every source by its compiler, for Hopper alone, then the link; nothing is made."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.1'\n"
        "echo '#$ INCLUDES=\"-I/cuda/include\"' >&2\n"
    )
    nvcc.chmod(0o755)
    made = tmp_path / "objects"
    command = (sys.executable, ROOT / "csrc" / "build.py", "--dry-run", "--objects", made)
    library = tmp_path / "library.so"
    said = output(*command, "--library", library, NVCC=str(nvcc), CXX="g++").splitlines()
    build = builder()
    assert len(said) == len(build.sources()) + 1
    for source, line in zip(build.sources(), said, strict=False):
        assert f"-c {source} " in line
        assert ("arch=compute_90a,code=sm_90a" in line) == (source.suffix == ".cu")
        assert line.startswith(str(nvcc) if source.suffix == ".cu" else "g++ ")
    assert f"-shared -nodlink -cudart static -cudadevrt none -o {library} " in said[-1]
    assert not made.exists() and not library.exists()


def test_what_the_build_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = builder()

    def missing() -> str:
        with pytest.raises(build.Unbuildable) as why:
            build.find_toolchain()
        return str(why.value)

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("NVCC", "/nowhere/nvcc")
    assert missing() == NO_COMPILER
    monkeypatch.setenv("NVCC", fake_nvcc(tmp_path, "12.4"))
    assert missing().endswith("is CUDA 12.4; 12.8 or newer is needed")
    monkeypatch.setenv("NVCC", fake_nvcc(tmp_path, "13.1"))
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setattr(build, "package_folders", lambda name: [])
    assert missing() == "there is no torch; 2.10 or newer is needed to link with"
    monkeypatch.setattr(build, "package_folders", lambda name: [tmp_path / "torch"])
    assert missing() == f"torch at {tmp_path / 'torch'} is too old; 2.10 or newer is needed"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert missing() == "it is built on Linux only, this is darwin"


def test_object_is_current_until_a_file_or_the_command_changes(tmp_path: Path) -> None:
    build = builder()
    source, target = tmp_path / "a.cu", tmp_path / "a.o"
    for path in (source, target):
        path.write_text("")
    target.with_suffix(".d").write_text(f"{target}: \\\n {source}\n")
    target.with_suffix(".command").write_text("cc -c a.cu")
    os.utime(source, (1, 1))
    assert build.is_current(target, ["cc", "-c", "a.cu"])
    assert not build.is_current(target, ["cc", "-O3", "-c", "a.cu"])
    os.utime(source, (2**32, 2**32))
    assert not build.is_current(target, ["cc", "-c", "a.cu"])
    source.unlink()
    assert not build.is_current(target, ["cc", "-c", "a.cu"])


def setup_py(*arguments: str | Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    pytest.importorskip("setuptools", reason="setup.py needs setuptools, which is not installed")
    return subprocess.run(
        [sys.executable, "setup.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "NVCC": "/nowhere/nvcc", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("asked", ["", "0"])
def test_install_without_the_library(asked: str, tmp_path: Path) -> None:
    """Whatever compilers there are, nothing is built unasked; an earlier build's library goes."""
    nvcc = fake_nvcc(tmp_path, "13.0")
    old = tmp_path / "lib" / "gdn_triton" / "fast" / "_gdn_fast.so"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"of an earlier build")
    done = setup_py("-q", "build", "--build-base", tmp_path, GDN_BUILD_CUDA=asked, NVCC=nvcc)
    assert done.returncode == 0, done.stderr
    assert "`GDN_BUILD_CUDA=1 pip install .` builds it\n" in done.stderr
    assert (old.parent / "__init__.py").exists() and not old.exists()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("1", "GDN_BUILD_CUDA=1, but the CUDA library cannot be built: there is no CUDA compiler"),
        ("auto", "GDN_BUILD_CUDA must be 0, 1 or the path of a library that is built, ending in"),
        ("/nowhere/library.so", "that is built, ending in .so, got '/nowhere/library.so'"),
    ],
)
def test_install_that_must_not_go_on(asked: str, words: str, tmp_path: Path) -> None:
    done = setup_py("-q", "build", "--build-base", tmp_path, GDN_BUILD_CUDA=asked)
    assert done.returncode == 1
    assert words in done.stderr
    assert not list(tmp_path.iterdir())
