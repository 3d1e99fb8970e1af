"""The CUDA library: that it builds, what it serves and says, and, on a Hopper GPU, its numbers.

Without a GPU: the build from clean and its machine code (where nvcc is), the words of every
refusal, and the host code with an operator that only notes its arguments. With one, and a library
that `python csrc/build.py` has built: every regime against the float64 specification and Triton.
"""

import dataclasses
import functools
import importlib.util
import itertools
import math
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from fast_parity import (
    SIZES,
    Call,
    Options,
    check_parity,
    independent,
    make_call,
    random_call,
    requested,
    run,
    specification,
)
from helpers import (
    BF16,
    FP16,
    FP32,
    FP64,
    Case,
    assert_within_budget,
    make_inputs,
    pieces,
    same_bits,
    unit_rows,
)
from library_wheel import check_library_wheel, load_builder
from torch import Tensor

import gdn_triton
from gdn_triton import fast
from gdn_triton._host import backends as backend
from gdn_triton.chunk import backends as chunk_backends
from gdn_triton.chunk.problem import Inputs, Pool, Problem
from gdn_triton.fast import chunk, support

ROOT = Path(__file__).resolve().parents[2]
PARITY = ROOT / "tests" / "support" / "fast_parity.py"


@functools.cache
def builder() -> ModuleType:
    return load_builder()


# ------------------------------------------------------------------------------------ the build

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
# Of the C library, the compiler's runtime and torch; all torch symbols are of its stable ABI.
NEEDED = r"lib(torch|torch_cpu|stdc\+\+|gcc_s|c|m|dl|rt|pthread)\.so|ld-linux"
UNDEFINED = r"(aoti_torch_|torch_)\w+$|.*@(GLIBC|GLIBCXX|CXXABI|GCC)_"


def output(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def cuobjdump() -> str:
    """The toolkit's, or the one that comes in every wheel of Triton."""
    found = shutil.which("cuobjdump")
    if found is None:
        spec = importlib.util.find_spec("triton")
        if spec is not None and spec.origin is not None:
            wheel = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
            found = str(wheel) if wheel.exists() else None
    if found is None:
        pytest.skip("there is no cuobjdump to read machine code with: neither nvcc's nor Triton's")
    return found


def toolchain() -> Any:
    build = builder()
    try:
        return build.find_toolchain()
    except build.Unbuildable as why:
        pytest.skip(f"the CUDA library cannot be built here: {why}")


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
    """What a program of tests/fast/ prints that runs functions of csrc on the CPU."""
    tools = toolchain()
    program, source = folder / name, Path(__file__).with_name(f"{name}.cu")
    command = (tools.nvcc, "-ccbin", tools.cxx, "-std=c++17", "-O1", "-arch=sm_90a", "-o", program)
    output(*command, source)
    return output(program)


def test_plans(tmp_path: Path) -> None:
    """How calls are cut into segments: whatever the lengths are, there is memory for them; and no
    cut beside the chosen one promises more."""
    assert host_program("plans", tmp_path) == "right: 3042 plans\n"


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
    assert not re.findall(r"\b(?:LDL|STL)\b", code), "local memory"
    for instruction, purpose in INSTRUCTIONS.items():
        assert re.search(rf"\b{instruction}\b", code), f"no {instruction}: {purpose}"


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
        x, x, x, side, side, None, None, None, None, 1.0, *[False] * 5, x, None, side
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
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert missing().startswith("torch is not installed where the build runs")
    old = SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: old)
    assert missing().endswith("2.10 or newer is needed to build with")
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
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


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("0", "it was installed with GDN_BUILD_CUDA=0"),
        ("auto", NO_COMPILER),
        ("", NO_COMPILER),
    ],
)
def test_install_without_the_library_keeps_the_reason(
    asked: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line of the install, and what the installed package says."""
    done = setup_py("-q", "build", "--build-base", tmp_path, GDN_BUILD_CUDA=asked)
    assert done.returncode == 0, done.stderr
    assert f"gdn_triton: CUDA library: {reason}\n" in done.stderr
    (status,) = tmp_path.glob("*/gdn_triton/fast/_build_status.txt")
    assert not list(tmp_path.glob("**/*.so"))
    monkeypatch.setattr(fast, "LIBRARY", tmp_path / "none.so")
    monkeypatch.setattr(fast, "BUILD_STATUS", status)
    assert ask_again() == f"The CUDA library is not built: {reason}."


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("1", "GDN_BUILD_CUDA=1, but the CUDA library cannot be built: there is no CUDA compiler"),
        ("yes", "GDN_BUILD_CUDA must be 0, 1, auto or the path of a library that is built, got"),
        ("/nowhere/library.so", "the path of a library that is built, got '/nowhere/library.so'"),
    ],
)
def test_install_that_must_not_go_on(asked: str, words: str, tmp_path: Path) -> None:
    done = setup_py("-q", "build", "--build-base", tmp_path, GDN_BUILD_CUDA=asked)
    assert done.returncode == 1
    assert words in done.stderr
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------- what it says


def ask_again() -> str | None:
    """`why_unavailable` as at a process's first call."""
    return fast.why_unavailable.__wrapped__()


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file where the library would be, which loads, on a machine with one Hopper GPU."""
    (tmp_path / "library.so").write_bytes(b"no library")
    monkeypatch.setattr(fast, "LIBRARY", tmp_path / "library.so")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(torch.ops, "gdn_fast", SimpleNamespace(why_unavailable=lambda: ""))
    monkeypatch.setattr(fast, "why_not_on", lambda device: None)


def test_available(built: None) -> None:
    assert ask_again() is None


def test_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "LIBRARY", tmp_path / "library.so")
    monkeypatch.setattr(fast, "BUILD_STATUS", tmp_path / "status.txt")
    built_by = "python csrc/build.py builds it in a checkout"
    assert ask_again() == f"The CUDA library is not built: {built_by}."
    fast.BUILD_STATUS.write_text("a reason\n")
    assert ask_again() == "The CUDA library is not built: a reason."
    # Where it would serve, how to get it, in the one sentence that `explain`, the log and
    # `python -m gdn_triton` show.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    monkeypatch.setattr(fast, "why_not_on", lambda device: None if device == 1 else "It is old.")
    assert ask_again() == (
        "The CUDA library is not built: a reason. GPU 1 would run faster with it: in a checkout, "
        '`pip install ".[cuda]"`, then `python csrc/build.py --install`.'
    )
    monkeypatch.setattr(fast, "why_not_on", lambda device: "It is old.")
    assert ask_again() == "The CUDA library is not built: a reason."


def test_no_gpu(built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ask_again() == "The CUDA library needs a GPU; torch finds no CUDA device."


def test_library_that_does_not_load(built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "load_library", type(torch.ops).load_library.__get__(torch.ops))
    reason = ask_again()
    assert reason is not None and reason.endswith(".")
    assert reason.startswith(f"The CUDA library does not load with torch {torch.__version__}: ")
    assert "library.so" in reason


def test_driver_too_old(built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "gdn_fast", SimpleNamespace(why_unavailable=lambda: "Too old."))
    assert ask_again() == "Too old."


def test_other_gpu(built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    assert fast.why_not_on.__wrapped__(0) == (
        "The CUDA library is for GPUs of compute capability 9.0; A GPU has 8.0."
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fast.why_not_on.__wrapped__(0) is None


def test_one_gpu_of_several(built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library can be used if one GPU is right; a call elsewhere is refused by itself."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for right, expected in ((0, None), (1, None), (2, "Not on 0.")):
        reasons = {device: None if device == right else f"Not on {device}." for device in range(2)}
        monkeypatch.setattr(fast, "why_not_on", reasons.get)
        assert ask_again() == expected


def test_importing_and_asking_of_cpu_tensors_loads_nothing() -> None:
    code = """
import torch, gdn_triton
from gdn_triton import fast
x = torch.zeros(1, 4, 2, 128, dtype=torch.bfloat16)
print(gdn_triton.explain(x, x, x, x[..., 0], x[..., 0]).reasons["cuda"])
assert fast.why_unavailable.cache_info().misses == 0
assert not torch.cuda.is_initialized()
"""
    said = output(sys.executable, "-c", code, PYTHONPATH=str(ROOT), GDN_BACKEND="auto")
    assert said == "The CUDA library runs on NVIDIA GPUs; the tensors are on cpu.\n"


# --------------------------------------------------------------------------------- what it serves


def problem(**changes: Any) -> Problem:
    """One that the library takes, on a device that need not be there."""
    dtype = changes.pop("dtype", BF16)
    base = Problem(
        B=2,
        T=100,
        H=2,
        HV=4,
        K=128,
        V=128,
        N=2,
        q_dtype=dtype,
        k_dtype=dtype,
        v_dtype=dtype,
        device=torch.device("cuda:0"),
        scale=0.1,
        chunk_size=64,
        is_varlen=False,
        has_initial_state=True,
        output_final_state=True,
        state_v_first=False,
        use_qk_l2norm=False,
        use_beta_sigmoid=False,
        allow_neg_eigval=False,
        use_gate=False,
        needs_grad=False,
    )
    return dataclasses.replace(base, **changes)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "why_unavailable", lambda: None)
    monkeypatch.setattr(fast, "why_not_on", lambda device: None)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": FP16},
        {"B": 1, "N": 7, "is_varlen": True},
        {"H": 3, "HV": 24},
        {"T": 0},
        {"B": 1, "N": 0, "is_varlen": True},
        {"state_v_first": True, "has_initial_state": False, "output_final_state": False},
        {
            "use_qk_l2norm": True,
            "use_beta_sigmoid": True,
            "allow_neg_eigval": True,
            "use_gate": True,
        },
        {"scale": -3.0},
        {"K": 8, "V": 8},
        {"K": 96, "V": 192},
        {"K": 256, "V": 4096},
        {"needs_grad": True},
        {"device": torch.device("cuda:1")},
        {"pool_dtype": FP32},
        {"pool_dtype": BF16, "dtype": FP16},
        {"pool_dtype": FP16},
    ],
)
def test_takes(changes: dict[str, Any], hopper: None) -> None:
    assert support.supports(problem(**changes)) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": torch.device("cpu")}, "on NVIDIA GPUs; the tensors are on cpu"),
        ({"device": torch.device("xpu")}, "on NVIDIA GPUs; the tensors are on xpu"),
        ({"dtype": FP32}, "bfloat16 or all in float16; they are float32, float32 and float32"),
        ({"dtype": FP64}, "they are float64, float64 and float64"),
        ({"k_dtype": FP16}, "they are bfloat16, float16 and bfloat16"),
        ({"v_dtype": FP32}, "they are bfloat16, bfloat16 and float32"),
        ({"K": 264}, "K and V in multiples of 8, K up to 256; K is 264, V is 128"),
        ({"K": 100}, "K is 100, V is 128"),
        ({"V": 84}, "K is 128, V is 84"),
        ({"chunk_size": 32}, "in chunks of 64; 32 is asked for"),
        ({"pool_dtype": FP64}, "in float32 at most; the states are float64"),
        ({"T": 2**31}, "less than 2147483648 tokens; T is 2147483648"),
    ],
)
def test_refuses(changes: dict[str, Any], words: str, hopper: None) -> None:
    reason = support.supports(problem(**changes))
    assert reason is not None and words in reason and reason.endswith(".")


def test_refuses_where_it_cannot_run(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "why_not_on", {1: "Not on that one."}.get)
    assert support.supports(problem(device=torch.device("cuda:1"))) == "Not on that one."
    monkeypatch.setattr(fast, "why_unavailable", lambda: "Not built.")
    assert support.supports(problem()) == "Not built."


def test_gradients_are_served_where_triton_serves_them(
    hopper: None, no_interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = problem(needs_grad=True, K=64)
    monkeypatch.setattr(backend, "_triton_missing", lambda: None)
    assert chunk_backends.cuda_supports(trained) is None
    monkeypatch.setattr(backend, "_triton_missing", lambda: "No Triton here.")
    reason = chunk_backends.cuda_supports(trained)
    assert reason is not None
    assert "the Triton backward cannot run: No Triton here. Nor does the library's own" in reason
    assert reason.endswith(support.backward_supports(trained) or "?")
    assert chunk_backends.cuda_supports(problem(needs_grad=True)) is None
    assert chunk_backends.cuda_supports(problem()) is None
    refused = chunk_backends.cuda_supports(problem(needs_grad=True, chunk_size=32))
    assert refused == support.supports(problem(chunk_size=32))


# ---------------------------------------------------------------------------------- the host code


class Operator:
    """Notes its arguments, and writes what a kernel would."""

    INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    FLAGS = (
        *("cu_seqlens", "scale", "state_v_first", "use_qk_l2norm", "use_beta_sigmoid"),
        *("allow_neg_eigval", "batch_invariant", "o"),
    )
    NAMES: ClassVar = {
        "chunk_forward": (*INPUTS, "initial_state", *FLAGS, "final_state", "workspace"),
        "chunk_prefill": (
            *(*INPUTS, "state", "read_slots", "write_slots", "has_initial_state", "last_skipped"),
            *(*FLAGS, "every", "checkpoints", "checkpoint_slots", "workspace"),
        ),
    }

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.name = ""

    def named(self, name: str) -> "Operator":
        """In place of `chunk._operator`."""
        self.name = name
        return self

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(dict(zip(self.NAMES[self.name], arguments, strict=True)))


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Operator:
    noted = Operator()
    monkeypatch.setattr(chunk, "_operator", noted.named)
    monkeypatch.setattr(chunk, "workspace_floats", lambda *sizes: sum(map(int, sizes[1:])))
    return noted


def host_call(**changes: Any) -> tuple[Problem, Inputs]:
    """A problem on the CPU and its tensors."""
    p = problem(device=torch.device("cpu"), **changes)
    case = Case("host", "", T=p.T, B=p.B, H=p.H, HV=p.HV, K=p.K, V=p.V, spare=8)
    x = make_inputs(case, BF16, "cpu")
    return p, Inputs(x.q, x.k, x.v, x.g, x.beta, x.initial_state, None, None)


def test_host_passes_views_as_they_are(operator: Operator) -> None:
    p, given = host_call(use_qk_l2norm=True, scale=0.25)
    o, state = chunk.forward(p, given)
    (passed,) = operator.calls
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        assert passed[name] is getattr(given, name), name
    assert passed["o"] is o and passed["final_state"] is state
    assert o.shape == given.v.shape and o.dtype == BF16 and o.is_contiguous()
    assert state is not None
    assert state.shape == (2, 4, 128, 128) and state.dtype == FP32 and state.is_contiguous()
    assert passed["scale"] == 0.25 and passed["use_qk_l2norm"] is True
    assert passed["use_beta_sigmoid"] is passed["state_v_first"] is False
    assert passed["batch_invariant"] is False
    assert passed["workspace"].numel() == 2 + 100 + 2 + 4 + 128 + 128 + 2 + True + False + True


def test_host_batch_invariance(operator: Operator) -> None:
    """Asked for by the problem, and so by scratch memory of another size."""
    for asked in (False, True):
        p, given = host_call(batch_invariant=asked)
        chunk.forward(p, given)
        assert operator.calls[-1]["batch_invariant"] is asked
    sizes = [passed["workspace"].numel() for passed in operator.calls]
    assert sizes[1] == sizes[0] + 1


def test_host_copies_what_tma_cannot_read(operator: Operator) -> None:
    """Copies are dense and equal: of an odd base, of odd rows, of a strided last dimension, and of
    a dense tensor that begins at an odd address."""
    p, given = host_call()
    q, k, v = given.q, given.k, given.v
    wide = torch.zeros(*q.shape[:3], 136, dtype=BF16)
    odd_base = wide[..., 4:132].copy_(q)
    odd_rows = torch.zeros(2, 100, 2 * 128 + 3, dtype=BF16)[..., :256].unflatten(-1, (2, 128))
    odd_rows.copy_(k)
    columns = v.mT.contiguous().mT
    flat = torch.zeros(q.numel() + 1, dtype=BF16)[1:].view(q.shape).copy_(q)
    assert flat.is_contiguous()
    for name, x in (("q", odd_base), ("k", odd_rows), ("v", columns), ("q", flat)):
        chunk.forward(p, given._replace(**{name: x}))
        passed = operator.calls.pop()[name]
        assert passed is not x and same_bits(passed, x), name
        assert passed.is_contiguous() and passed.data_ptr() % 16 == 0


def test_host_narrows_side_inputs(operator: Operator) -> None:
    p, given = host_call(use_gate=True, dtype=BF16)
    for dtype in (FP16, BF16, FP32, FP64):
        sides = {name: getattr(given, name).to(dtype) for name in ("g", "beta", "initial_state")}
        heads = {"A_log": torch.rand(8, dtype=dtype)[::2], "dt_bias": torch.rand(4, dtype=dtype)}
        chunk.forward(p, given._replace(**sides, **heads))
        passed = operator.calls.pop()
        for name, x in sides.items():
            assert passed[name].dtype == (FP32 if dtype == FP64 else dtype)
            assert (passed[name] is x) == (dtype != FP64)
        for name, x in heads.items():
            assert passed[name].is_contiguous() and torch.equal(passed[name], x.float())


def test_host_state_layout(operator: Operator) -> None:
    p, given = host_call(V=256, state_v_first=True)
    _, state = chunk.forward(p, given._replace(initial_state=given.initial_state.mT))
    assert state is not None and state.shape == (2, 4, 256, 128)
    p, given = host_call(output_final_state=False)
    _, state = chunk.forward(p, given._replace(initial_state=None))
    assert state is None and operator.calls[-1]["final_state"] is None
    assert operator.calls[-1]["initial_state"] is None


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(
    "changes", [{"T": 0}, {"B": 0, "N": 0}, {"B": 1, "N": 0, "is_varlen": True}], ids=str
)
def test_host_launches_nothing_for_nothing(
    changes: dict[str, Any], with_state: bool, operator: Operator
) -> None:
    p, given = host_call(**changes)
    initial_state = torch.rand(p.N, 4, 128, 128, dtype=FP16) if with_state else None
    given = given._replace(initial_state=initial_state)
    o, state = chunk.forward(p, given)
    assert not operator.calls
    assert o.shape == given.v.shape and (o == 0).all()
    assert state is not None and state.dtype == FP32
    expected = torch.zeros(p.N, 4, 128, 128) if initial_state is None else initial_state.float()
    assert same_bits(state, expected)


def prefill_call(device: str = "cpu", **changes: Any) -> tuple[Problem, Inputs, Pool]:
    """As `host_call`, from slot 3 and zeros to slots 4 and 0, one checkpoint kept in slot 1."""
    p, given = host_call(pool_dtype=FP32, output_final_state=False, **changes)
    p = replace(p, device=torch.device(device))
    given = Inputs(*(None if x is None else x.to(device) for x in given))
    given = given._replace(initial_state=None)
    state = torch.rand(5, 4, p.K, p.V, device=device)
    pool = Pool(
        state=state,
        read_slots=torch.tensor([3, 2], device=device)[: p.N],
        write_slots=torch.tensor([4, 0], device=device, dtype=torch.int32)[: p.N],
        has_initial_state=torch.tensor([True, False], device=device)[: p.N],
        last_skipped=-1,
        out=torch.full((p.B, p.T, p.HV, p.V), torch.nan, dtype=BF16, device=device),
        every=64,
        checkpoints=state,
        checkpoint_slots=torch.tensor([[1], [-1]], device=device)[: p.N],
    )
    return p, given, pool


def test_host_passes_a_pool_as_it_is(operator: Operator) -> None:
    p, given, pool = prefill_call(use_qk_l2norm=True, scale=0.25)
    o, state = chunk.forward(p, given, pool)
    (passed,) = operator.calls
    assert operator.name == "chunk_prefill" and o is pool.out and state is None
    for name in ("q", "k", "v", "g", "beta"):
        assert passed[name] is getattr(given, name), name
    for name in (
        "state",
        "read_slots",
        "write_slots",
        "has_initial_state",
        "last_skipped",
        "every",
    ):
        assert passed[name] is getattr(pool, name), name
    assert passed["checkpoints"] is pool.state
    assert passed["checkpoint_slots"] is pool.checkpoint_slots
    assert passed["o"] is pool.out and passed["scale"] == 0.25 and passed["use_qk_l2norm"] is True
    assert passed["workspace"].numel() == 2 + 100 + 2 + 4 + 128 + 128 + 2 + True + False + True
    chunk.forward(p, given, replace(pool, has_initial_state=None, checkpoint_slots=None))
    assert operator.calls[1]["has_initial_state"] is operator.calls[1]["checkpoint_slots"] is None


def test_host_copies_an_o_that_tma_cannot_write(operator: Operator) -> None:
    """Rows apart are written where they lie; an odd base is not, and gets what was written."""
    p, given, pool = prefill_call()
    around = torch.zeros(p.B, p.T, p.HV, p.V + 8, dtype=BF16)
    for first, lies_right in ((8, True), (3, False)):
        out = around[..., first : first + p.V]
        o, _ = chunk.forward(p, given, replace(pool, out=out))
        written = operator.calls.pop()["o"]
        assert o is out and (written is out) == lies_right
        assert written.is_contiguous() or lies_right
        assert same_bits(written, out)


@pytest.mark.parametrize("changes", [{"T": 0}, {"B": 0, "N": 0}, {"B": 1, "N": 0}], ids=str)
def test_host_moves_states_without_tokens(changes: dict[str, Any], operator: Operator) -> None:
    """The kernel is called where there is a sequence, and only there."""
    p, given, pool = prefill_call(**changes)
    o, _ = chunk.forward(p, given, pool)
    assert o is pool.out and len(operator.calls) == (p.N > 0)
    assert p.N > 0 or not o.any()


def test_operator_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "why_unavailable", lambda: "Not built.")
    with pytest.raises(RuntimeError, match=r"Not built\."):
        chunk._operator.__wrapped__("chunk_forward")


# ------------------------------------------------------------------------------------- gradients


def gradients(
    name: str, call: Call, by: Callable[..., Any] = gdn_triton.chunk_gated_delta_rule
) -> list[Tensor]:
    """o, the final state, and the gradient of each float input of one backend, for random ones of
    both outputs."""
    tensors = {n: getattr(call.x, n) for n in ("q", "k", "v", "g", "beta", "initial_state")}
    tensors |= {n: x for n in ("A_log", "dt_bias") if (x := getattr(call, n)) is not None}
    leaves = {n: x.detach().clone().requires_grad_() for n, x in tensors.items()}
    with requested(name):
        o, state = by(
            **leaves,
            output_final_state=True,
            use_qk_l2norm_in_kernel=call.options.l2norm,
            use_beta_sigmoid_in_kernel=call.options.sigmoid,
            use_gate_in_kernel=call.options.gate,
            cu_seqlens=call.x.cu_seqlens,
        )
        generator = torch.Generator().manual_seed(7)
        above = [torch.randn(y.shape, generator=generator).to(y) for y in (o, state)]
        found = torch.autograd.grad([o, state], list(leaves.values()), above)
    return [o.detach(), state.detach(), *found]


class Sevens(Operator):
    """Sevens for o and eights for the final state: no other forward has those."""

    def __call__(self, *arguments: Any) -> None:
        super().__call__(*arguments)
        self.calls[-1]["o"].fill_(7)
        self.calls[-1]["final_state"].fill_(8)


@pytest.fixture
def sevens(operator: Operator, monkeypatch: pytest.MonkeyPatch, device: str) -> Sevens:
    """The library's operator, by decree there and able."""
    pytest.importorskip("triton", reason="Triton is not installed")
    noted = Sevens()
    monkeypatch.setattr(chunk, "_operator", noted.named)
    monkeypatch.setattr(support, "supports", lambda problem: None)
    return noted


TRAINED = Case("trained", "", lengths=(70, 0, 5), orphans=3, K=16, V=24, chunk_size=64)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_librarys_forward_with_tritons_gradients(
    compiled: bool, sevens: Sevens, device: str
) -> None:
    call = make_call(TRAINED, FP16, device, Options(l2norm=True, gate=True, bias=True))
    op: Callable[..., Any] = gdn_triton.chunk_gated_delta_rule
    by = torch.compile(op, fullgraph=True, backend="aot_eager") if compiled else op
    (o, state, *found), (_, _, *expected) = (gradients(n, call, by) for n in ("cuda", "triton"))
    assert (o == 7).all() and (state == 8).all() and len(sevens.calls) == 1
    assert len(found) == 8
    for got, want in zip(found, expected, strict=True):
        assert want.count_nonzero() > 0 and same_bits(got, want)


def test_no_gradient_no_triton(sevens: Sevens, device: str, monkeypatch: Any) -> None:
    """A forward alone imports no kernel of Triton's."""
    for name in ("autograd", "backward"):
        monkeypatch.setitem(sys.modules, f"gdn_triton.chunk.triton.{name}", None)
    call = make_call(TRAINED, FP16, device, Options())
    o, _ = run("cuda", call)
    assert (o == 7).all()
    with pytest.raises(ImportError):
        gradients("cuda", call)


def test_a_second_derivative_is_an_error(sevens: Sevens, device: str) -> None:
    x = make_call(TRAINED, FP16, device, Options()).x
    v = x.v.detach().clone().requires_grad_()
    with requested("cuda"):
        o, _ = gdn_triton.chunk_gated_delta_rule(
            *(x.q, x.k, v, x.g, x.beta.requires_grad_()),
            cu_seqlens=x.cu_seqlens,
            output_final_state=True,
        )
        (dv,) = torch.autograd.grad(o.float().square().sum(), v, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative in the Triton backend, nor in"):
        torch.autograd.grad(dv.sum(), x.beta)


# ----------------------------------------------------------------------------- numbers, on a Hopper

gpu = pytest.mark.gpu("the CUDA library runs on GPUs only")


@pytest.fixture
def cuda() -> str:
    """The device; skips where the library is not there for it."""
    reason = fast.why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    return "cuda"


def fast_case(name: str, why: str, **sizes: Any) -> Case:
    """A case that the library serves, with rows that TMA can read."""
    usual = {"H": 2, "HV": 4, "K": 128, "V": 128, "spare": 8}
    return Case(name, why, **{**usual, **sizes}, chunk_size=64)


def sized(case: Case, K: int, V: int) -> Case:
    return replace(case, name=f"{case.name}-K{K}-V{V}", K=K, V=V)


EDGES = (0, 1, 63, 64, 65, 127)
CASES = [
    *(fast_case(f"padded-{T}", "a side of a chunk", T=T, B=2) for T in (*EDGES[1:], 128, 200)),
    *(fast_case(f"packed-{n}", "one sequence, and rows of none", lengths=(n,), orphans=9)
      for n in EDGES),
    *(fast_case(f"group-{G}", "value heads on a key head", H=2, HV=2 * G, lengths=(70, 0, 130))
      for G in (1, 2, 3, 4, 8)),
    fast_case("edges", "every length beside every other", lengths=(*EDGES, *EDGES[::-1])),
    fast_case("one-head", "", T=300, H=1, HV=1),
    fast_case("odd-rows", "rows that TMA cannot read, so copies", T=150, B=2, spare=3),
    fast_case("orphans", "more rows of no sequence than a chunk", lengths=(5, 80), orphans=200),
    fast_case("documents", "very different lengths", lengths=(1, 1500, 63, 0, 64, 700) + (17,) * 40,
              orphans=100, H=4, HV=8),
    fast_case("wide", "more heads than multiprocessors", T=130, B=2, H=16, HV=96),
    fast_case("long", "few heads and many chunks: segments side by side", T=8192, H=1, HV=2),
    fast_case("segments", "cut sequences beside a short one",
              lengths=(9000, 1, 6000), orphans=70, H=1, HV=1),
    fast_case("chunks", "many chunks, no segment", T=900, B=4, H=8, HV=32),
    fast_case("halves", "more chunks than buffers, few heads", T=500, B=2, H=1, HV=3),
]  # fmt: skip
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
OPTIONS = {
    "l2norm": Options(l2norm=True),
    "sigmoid": Options(sigmoid=True),
    "sigmoid-twice": Options(sigmoid=True, negative=True),
    "gate": Options(gate=True),
    "gate-bias": Options(gate=True, bias=True),
    "no-state": Options(with_state=False),
    "v-first": Options(v_first=True),
    "v-first-no-state": Options(v_first=True, with_state=False),
    "layer": Options(l2norm=True, sigmoid=True, gate=True, bias=True),
    "all": Options(
        l2norm=True, sigmoid=True, negative=True, gate=True, bias=True, v_first=True, scale=0.3
    ),
}
RAGGED = fast_case("ragged", "", lengths=(65, 0, 1, 127, 64, 63, 200), orphans=70, HV=8)
PADDED = fast_case("padded", "", T=150, B=2)
# Few heads and many chunks: long sequences are cut into segments.
SEGMENTS = fast_case("segments", "", lengths=(9000, 0, 6000), orphans=70, H=1, HV=1)
# (K, V) for each kind of kernels, in whole tiles of 64 channels and not.
WHOLE, LESS = ((64, 64), (128, 256), (256, 512)), ((40, 200), (96, 192), (136, 72))


@gpu
@pytest.mark.parametrize("size", [(128, 128), *SIZES], ids=lambda size: "K{}-V{}".format(*size))
def test_segments_are_cut(size: tuple[int, int], cuda: str) -> None:
    """Without the norm, a call has scratch memory for its segments only."""
    s = SEGMENTS
    layout = (None, s.B, s.tokens, s.H, s.HV, *size, s.N)
    assert chunk.workspace_floats(*layout, True, True, False, invariant=False) > 0
    assert chunk.workspace_floats(*layout, True, True, False, invariant=True) == 0


@gpu
@DTYPES
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity(case: Case, dtype: torch.dtype, cuda: str) -> None:
    check_parity(make_call(case, dtype, cuda, Options()), ("reference", "triton", "cuda"))


@gpu
@DTYPES
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "K{}-V{}".format(*size))
@pytest.mark.parametrize("case", [PADDED, RAGGED, SEGMENTS], ids=lambda case: case.name)
def test_sizes(case: Case, size: tuple[int, int], dtype: torch.dtype, cuda: str) -> None:
    check_parity(
        make_call(sized(case, *size), dtype, cuda, Options()), ("reference", "triton", "cuda")
    )


@gpu
@DTYPES
@pytest.mark.parametrize("size", LESS, ids=lambda size: "K{}-V{}".format(*size))
def test_many_tiles(size: tuple[int, int], dtype: torch.dtype, cuda: str) -> None:
    """More parts of V than multiprocessors: a block has several tiles."""
    case = sized(fast_case("many", "", lengths=(70, 0, 130, 1), orphans=9, HV=96), *size)
    check_parity(make_call(case, dtype, cuda, OPTIONS["all"]))


@gpu
@DTYPES
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    "case", [PADDED, RAGGED, *(sized(RAGGED, *s) for s in LESS)], ids=lambda case: case.name
)
def test_options(case: Case, name: str, dtype: torch.dtype, cuda: str) -> None:
    check_parity(make_call(case, dtype, cuda, OPTIONS[name]))


@gpu
@DTYPES
@pytest.mark.parametrize("g", [0.0, -1e-4, -20.0, -1e30, -math.inf])
@pytest.mark.parametrize(
    "case",
    [
        *(RAGGED, SEGMENTS),
        *(sized(case, *s) for case in (RAGGED, SEGMENTS) for s in WHOLE),
    ],
    ids=lambda case: case.name,
)
def test_one_gate_everywhere(case: Case, g: float, dtype: torch.dtype, cuda: str) -> None:
    """From a state that never forgets to one that keeps nothing, in full and ragged chunks."""
    call = make_call(case, dtype, cuda, Options())
    check_parity(call._replace(x=call.x.but(g=torch.full_like(call.x.g, g))))


@gpu
@DTYPES
def test_some_gates_forget_all(dtype: torch.dtype, cuda: str) -> None:
    """-inf among mild gates: at a chunk's start, end, twice in a row, and in the ragged end."""
    call = make_call(PADDED, dtype, cuda, Options())
    gates = call.x.g.clone()
    gates[:, [0, 5, 6, 63, 64, 140]] = -torch.inf
    check_parity(call._replace(x=call.x.but(g=gates)))


@gpu
@DTYPES
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("key", ["axis", "one", "many"])
def test_one_beta(key: str, beta: float, dtype: torch.dtype, cuda: str) -> None:
    """No decay: beta 0 writes nothing, 1 replaces, 2 reflects; under one key for all tokens, along
    an axis (exactly of length 1) or not, and under keys of their own."""
    call = make_call(PADDED, dtype, cuda, Options())
    x = call.x.but(
        beta=torch.full_like(call.x.beta, beta), g=torch.zeros_like(call.x.g), k=call.x.k.clone()
    )
    if key == "axis":
        x.k.zero_()[..., 3] = 1
    elif key == "one":
        # A little shorter than 1: under rounding a reflection must not grow.
        x.k.copy_(0.9 * unit_rows(128))
    results = check_parity(call._replace(x=x))
    if beta == 0:
        assert same_bits(results["cuda"][1], x.initial_state.float())


@gpu
@DTYPES
def test_zero_keys(dtype: torch.dtype, cuda: str) -> None:
    """Rows of zeros under the norm: no NaN, nothing written."""
    call = make_call(PADDED, dtype, cuda, Options(l2norm=True))
    k = call.x.k.clone()
    k[:, ::2] = 0
    check_parity(call._replace(x=call.x.but(k=k)))


@gpu
@pytest.mark.parametrize("scale", [0.0, -0.5, 2.5])
def test_scale(scale: float, cuda: str) -> None:
    o, _ = check_parity(make_call(PADDED, BF16, cuda, Options(scale=scale)))["cuda"]
    assert bool((o == 0).all()) == (scale == 0)


@gpu
@pytest.mark.parametrize("state", [BF16, FP16, FP32, FP64], ids=str)
@pytest.mark.parametrize("side", [BF16, FP16, FP32, FP64], ids=str)
def test_side_inputs_of_any_dtype(side: torch.dtype, state: torch.dtype, cuda: str) -> None:
    call = make_call(RAGGED, BF16, cuda, Options(gate=True, bias=True))
    x = call.x.but(
        g=call.x.g.to(side),
        beta=call.x.beta.to(FP16 if side == BF16 else side),
        initial_state=call.x.initial_state.to(state),
    )
    A_log, dt_bias = (y.to(side) for y in (call.A_log, call.dt_bias) if y is not None)
    check_parity(call._replace(x=x, A_log=A_log, dt_bias=dt_bias), ("cuda",))


@gpu
@DTYPES
@pytest.mark.parametrize("number", range(1000, 1020))
def test_random(number: int, dtype: torch.dtype, cuda: str) -> None:
    """`tests/support/fast_parity.py` makes as many as one likes."""
    call, own = random_call(number, cuda, small=False)
    if own != dtype:
        call = call._replace(x=call.x.but(**{n: getattr(call.x, n).to(dtype) for n in "qkv"}))
    check_parity(call, ("cuda",))


# --------------------------------------------------------------------------------- bits and memory


def same(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(first, second, strict=True))


LARGE = fast_case(
    "large", "", lengths=(700, 1, 64, 129, 0, 1000, 3000), orphans=70, H=4, HV=16
)  # fmt: skip


@pytest.fixture
def batch_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the sizes of a call decide whether its sequences are cut into segments."""
    monkeypatch.setenv("GDN_BATCH_INVARIANT", "1")


@gpu
@DTYPES
@pytest.mark.parametrize(
    "case",
    [LARGE, SEGMENTS, *(sized(case, *s) for case in (LARGE, SEGMENTS) for s in (*WHOLE, *LESS))],
    ids=lambda case: case.name,
)
def test_fifty_runs_one_result(case: Case, dtype: torch.dtype, cuda: str) -> None:
    call = make_call(case, dtype, cuda, OPTIONS["layer"])
    first = run("cuda", call)
    assert all(same(first, run("cuda", call)) for _ in range(50))


@gpu
@DTYPES
def test_alone(dtype: torch.dtype, cuda: str, batch_invariant: None) -> None:
    """A sequence's bits do not depend on what else is in the batch, packed or padded."""
    call = make_call(LARGE, dtype, cuda, Options())
    o, state = run("cuda", call)
    offsets = LARGE.offsets()
    for n, (first, end) in enumerate(itertools.pairwise(offsets)):
        tokens = {m: getattr(call.x, m)[:, first:end] for m in ("q", "k", "v", "g", "beta")}
        one = call.x.but(**tokens, initial_state=call.x.initial_state[n : n + 1])
        for cu_seqlens in (None, torch.tensor([0, end - first], device=cuda)):
            alone, alone_state = run("cuda", call._replace(x=one.but(cu_seqlens=cu_seqlens)))
            assert same_bits(alone, o[:, first:end]), f"o of sequence {n}"
            assert same_bits(alone_state[0], state[n]), f"final state of sequence {n}"


@gpu
@DTYPES
@pytest.mark.parametrize("HV", [1, 3, 40, 200])
def test_heads_know_nothing_of_each_other(
    HV: int, dtype: torch.dtype, cuda: str, batch_invariant: None
) -> None:
    """However many there are, the last is what it is alone."""
    case = fast_case("heads", "", T=200, B=1, H=1, HV=HV)
    call = make_call(case, dtype, cuda, Options())
    o, state = run("cuda", call)
    last = {n: getattr(call.x, n)[:, :, -1:] for n in ("v", "g", "beta")}
    x = call.x.but(**last, initial_state=call.x.initial_state[:, -1:])
    alone, alone_state = run("cuda", call._replace(x=x))
    assert same_bits(alone[:, :, 0], o[:, :, -1]) and same_bits(alone_state[:, 0], state[:, -1])


@gpu
@DTYPES
@pytest.mark.parametrize("cut", [64, 128])
def test_later_chunks(cut: int, dtype: torch.dtype, cuda: str) -> None:
    """o up to a chunk's end depends on nothing after it."""
    call, other = (make_call(PADDED, dtype, cuda, Options(), seed=seed) for seed in (0, 1))
    mixed = {
        n: torch.cat([getattr(call.x, n)[:, :cut], getattr(other.x, n)[:, cut:]], 1)
        for n in ("q", "k", "v", "g", "beta")
    }
    o, _ = run("cuda", call)
    changed, _ = run("cuda", call._replace(x=call.x.but(**mixed)))
    assert same_bits(changed[:, :cut], o[:, :cut])


@gpu
@DTYPES
@pytest.mark.parametrize("decay", [1, 30])
@pytest.mark.parametrize("cut", [3, 63, 70, 149])
def test_later_tokens_of_a_chunk(cut: int, decay: int, dtype: torch.dtype, cuda: str) -> None:
    """They change no more than the rounding of the tokens before them, however strong their gates
    are: the kernel scales a chunk by the decay of the whole of it."""
    call = make_call(PADDED, dtype, cuda, Options())
    tokens = {n: getattr(call.x, n).clone() for n in ("q", "k", "v", "g", "beta")}
    before = {n: x[:, :cut].clone() for n, x in tokens.items()}
    tokens["g"][:, cut:] *= decay
    for n in ("k", "v"):
        tokens[n][:, cut:] = tokens[n][:, cut:].flip(1)
    o, _ = run("cuda", call._replace(x=call.x.but(**tokens)))
    alone = call._replace(case=replace(PADDED, T=cut), x=call.x.but(**before))
    exact, narrow = specification(alone)[0], independent(alone)[0]
    unit = torch.finfo(dtype).eps / 2
    assert_within_budget("o", o[:, :cut], exact, narrow, dtype=dtype, unit=unit)


@gpu
@DTYPES
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "case",
    [RAGGED, SEGMENTS, *(sized(RAGGED, *s) for s in LESS)],
    ids=lambda case: case.name,
)
def test_nan_stays_in_its_sequence(
    case: Case, bad: float, name: str, dtype: torch.dtype, cuda: str
) -> None:
    """Neighbours that share its tiles keep every bit, whichever sequence is sick."""
    call = make_call(case, dtype, cuda, Options())
    clean_o, clean_state = run("cuda", call)
    offsets = case.offsets()
    for sick, (first, end) in enumerate(itertools.pairwise(offsets)):
        if first == end:
            continue
        poisoned = getattr(call.x, name).clone()
        if name == "initial_state":
            poisoned[sick] = bad
        else:
            poisoned[:, first:end] = bad
        o, state = run("cuda", call._replace(x=call.x.but(**{name: poisoned})))
        parts = zip(pieces(o, offsets), pieces(clean_o, offsets), strict=True)
        for n, (got, expected) in enumerate(parts):
            if n != sick:
                assert same_bits(got, expected), f"{sick} is sick, o of {n}"
                assert same_bits(state[n], clean_state[n]), f"{sick} is sick, state of {n}"
        assert not o[:, first:end].isfinite().all()
        assert (o[:, offsets[-1] :] == 0).all()


@gpu
@DTYPES
def test_nan_in_tokens_of_no_sequence(dtype: torch.dtype, cuda: str) -> None:
    call = make_call(RAGGED, dtype, cuda, Options())
    changes = {n: getattr(call.x, n).clone() for n in ("q", "k", "v", "g", "beta")}
    for x in changes.values():
        x[:, RAGGED.offsets()[-1] :] = torch.nan
    assert same(run("cuda", call), run("cuda", call._replace(x=call.x.but(**changes))))


@gpu
@pytest.mark.parametrize("with_state", [False, True], ids=["from-0", "from-state"])
@pytest.mark.parametrize("v_first", [False, True], ids=["k-first", "v-first"])
@pytest.mark.parametrize(
    "case",
    [
        fast_case("no-tokens", "", T=0, B=2),
        fast_case("no-batch", "", T=5, B=0),
        fast_case("no-sequence", "", lengths=()),
        fast_case("only-orphans", "", lengths=(), orphans=200),
        fast_case("only-empty", "", lengths=(0, 0)),
        fast_case("empty-and-orphans", "", lengths=(0, 0), orphans=90),
    ],
    ids=lambda case: case.name,
)
def test_no_tokens(case: Case, v_first: bool, with_state: bool, cuda: str) -> None:
    call = make_call(case, BF16, cuda, Options(v_first=v_first, with_state=with_state))
    o, state = run("cuda", call)
    assert o.shape == call.x.v.shape and (o == 0).all()
    initial = call.x.initial_state
    assert same_bits(state, initial if with_state else torch.zeros_like(initial))


@gpu
@DTYPES
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("size", [(128, 128), *LESS], ids=lambda size: "K{}-V{}".format(*size))
def test_empty_sequences_keep_their_state(
    size: tuple[int, int], with_state: bool, dtype: torch.dtype, cuda: str
) -> None:
    """First, in the middle and last; bit for bit in both layouts."""
    case = sized(fast_case("empty", "", lengths=(0, 70, 0, 0, 5, 0), orphans=3), *size)
    for v_first in (False, True):
        call = make_call(case, dtype, cuda, Options(with_state=with_state, v_first=v_first))
        _, state = run("cuda", call)
        for n in (0, 2, 3, 5):
            expected = call.x.initial_state[n] if with_state else torch.zeros_like(state[n])
            assert same_bits(state[n], expected)


@gpu
@DTYPES
def test_strides_change_no_bit(dtype: torch.dtype, cuda: str) -> None:
    """Splits of a projection, dense tensors, heads outside, odd addresses, an expanded batch."""
    call = make_call(PADDED, dtype, cuda, Options())
    expected = run("cuda", call)
    names = ("q", "k", "v", "g", "beta")
    views: dict[str, dict[str, Tensor]] = {"dense": {}, "heads": {}, "columns": {}, "odd": {}}
    for n in names:
        x = getattr(call.x, n)
        views["dense"][n] = x.contiguous()
        views["heads"][n] = x.transpose(1, 2).contiguous().transpose(1, 2)
        views["columns"][n] = x.mT.contiguous().mT
        wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 8)
        views["odd"][n] = wide[..., 1 : 1 + x.shape[-1]].copy_(x)
    for how, changes in views.items():
        assert same(expected, run("cuda", call._replace(x=call.x.but(**changes)))), how
    one = {n: getattr(call.x, n)[:1] for n in (*names, "initial_state")}
    twice = {n: x.expand(2, *x.shape[1:]) for n, x in one.items()}
    o, state = run("cuda", call._replace(x=call.x.but(**twice)))
    for row in range(2):
        assert same_bits(o[row], expected[0][0]) and same_bits(state[row], expected[1][0])


@gpu
def test_offsets_of_either_dtype_and_stride(cuda: str) -> None:
    call = make_call(RAGGED, BF16, cuda, Options())
    cu_seqlens = call.x.cu_seqlens
    assert cu_seqlens is not None
    expected = run("cuda", call)
    column = torch.stack([cu_seqlens, cu_seqlens - 1000], 1)[:, 0]
    for offsets in (cu_seqlens.long(), column):
        assert same(expected, run("cuda", call._replace(x=call.x.but(cu_seqlens=offsets))))


@gpu
@pytest.mark.parametrize(
    "case", [PADDED, RAGGED, *(sized(RAGGED, *s) for s in LESS)], ids=lambda case: case.name
)
def test_writes_nothing_but_its_outputs(
    case: Case, cuda: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an input, nor a byte before or after what it is given to write to."""
    margin, guarded, empty = 4096, [], torch.empty

    def inside(*shape: Any, **kwargs: Any) -> Tensor:
        x = empty(*shape, **kwargs)
        around = torch.full((x.numel() + 2 * margin,), 7.0, dtype=x.dtype, device=x.device)
        guarded.append(around)
        return around[margin:-margin].view(x.shape)

    monkeypatch.setattr(chunk.torch, "empty", inside)
    call = make_call(case, BF16, cuda, OPTIONS["all"])
    held = [
        *call.x.around,
        *(y for y in (call.A_log, call.dt_bias, call.x.cu_seqlens) if y is not None),
    ]
    before = [y.clone() for y in held]
    run("cuda", call)
    assert len(guarded) == 3
    for around in guarded:
        assert (around[:margin] == 7).all() and (around[-margin:] == 7).all()
    assert all(same_bits(a, b) for a, b in zip(before, held, strict=True))


@gpu
def test_many_sequences(cuda: str) -> None:
    """70,000 of one token: more than a second grid dimension takes."""
    N, generator = 70_000, torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, N, 1, 128, generator=generator).to(cuda, BF16) for _ in range(3))
    beta = torch.rand(1, N, 1, generator=generator).to(cuda)
    cu_seqlens = torch.arange(N + 1, device=cuda)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GDN_BACKEND", "cuda")
        o, _ = gdn_triton.chunk_gated_delta_rule(
            q, k, v, -beta, beta, scale=1.0, cu_seqlens=cu_seqlens
        )
    exact = beta.double()[..., None] * (q.double() * k.double()).sum(-1, keepdim=True) * v.double()
    # Three roundings to bf16 of factors of the result, and one of the result.
    assert ((o.double() - exact).abs() <= 2.0**-6 * exact.abs() + 1e-6).all()


@gpu
def test_offsets_past_32_bits(cuda: str, batch_invariant: None) -> None:
    """A sequence at elements past 2^32 has the bits that it has at 0."""
    HV, before, length = 32, 2**20 + 64, 200
    T = before + length + 70
    generator = torch.Generator(cuda).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=BF16, device=cuda).normal_(generator=generator)

    q, k, v = normal(1, T, 1, 128), normal(1, T, 1, 128), normal(1, T, HV, 128)
    g = -torch.rand(1, T, HV, device=cuda, generator=generator)
    beta = torch.rand(1, T, HV, device=cuda, generator=generator)
    cu_seqlens = torch.tensor([0, before, before + length], device=cuda)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GDN_BACKEND", "cuda")
        o, state = gdn_triton.chunk_gated_delta_rule(
            q, k, v, g, beta, cu_seqlens=cu_seqlens, **options
        )
        part = slice(before, before + length)
        alone = gdn_triton.chunk_gated_delta_rule(
            *(x[:, part].clone() for x in (q, k, v, g, beta)), **options
        )
    assert same_bits(o[:, part], alone[0]) and same_bits(state[1:], alone[1])
    assert (o[:, before + length :] == 0).all()


# ------------------------------------------------------------------------------- streams and graphs


@pytest.fixture
def loud_syncs() -> Iterator[None]:
    """Any wait of the host for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@gpu
@pytest.mark.parametrize("case", [PADDED, RAGGED], ids=lambda case: case.name)
def test_no_host_sync(case: Case, cuda: str, request: Any) -> None:
    call = make_call(case, BF16, cuda, OPTIONS["all"])
    run("cuda", call)
    request.getfixturevalue("loud_syncs")
    run("cuda", call)


@gpu
def test_current_stream(cuda: str) -> None:
    """A kernel on another stream would read q before it is there."""
    call = make_call(RAGGED, BF16, cuda, Options())
    expected = run("cuda", call)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        late = torch.full_like(call.x.q, torch.nan)
        torch.cuda._sleep(100_000_000)
        late.copy_(call.x.q)
        got = run("cuda", call._replace(x=call.x.but(q=late)))
    side.synchronize()
    assert same(expected, got)


@gpu
def test_thread_without_a_context(cuda: str) -> None:
    """A thread's first call, with memory from torch's cache, so that nothing before has made the
    device's context current there; autograd's threads are such."""
    call = make_call(RAGGED, BF16, cuda, Options())
    expected = run("cuda", call)
    run("cuda", call)  # leaves memory of every size in the cache
    torch.cuda.synchronize()
    found: list[tuple[Tensor, Tensor]] = []
    thread = threading.Thread(target=lambda: found.append(run("cuda", call)))
    thread.start()
    thread.join()
    assert found and same(expected, found[0])


@gpu
@DTYPES
def test_graph_replay(dtype: torch.dtype, cuda: str) -> None:
    """Captured once; replayed after cu_seqlens and the inputs have changed in place."""
    first = fast_case("graph", "", lengths=(100, 0, 64, 300, 1), orphans=20)
    second = replace(first, lengths=(0, 250, 3, 200, 12))
    third = replace(first, lengths=(0, 0, 0, 0, 485), orphans=0)
    check_replay(first, (first, second, second, third, first), dtype, cuda)


@gpu
@DTYPES
@pytest.mark.parametrize("size", [(128, 128), *WHOLE], ids=lambda size: "K{}-V{}".format(*size))
def test_graph_replay_of_segments(size: tuple[int, int], dtype: torch.dtype, cuda: str) -> None:
    first = sized(SEGMENTS, *size)
    second = replace(first, lengths=(0, 15000, 0))
    third = replace(first, lengths=(65, 600, 14163), orphans=242)
    check_replay(first, (first, second, third, first), dtype, cuda)


def draw_lengths(rng: random.Random, parts: int, tokens: int) -> tuple[int, ...]:
    """`parts` lengths of at most `tokens` together, some of them 0 and often one most of them."""

    def weight() -> float:
        return rng.choice((0.0, rng.random(), rng.random(), 30 * rng.random()))

    weights = [weight() for _ in range(parts)]
    whole = sum(weights) or 1.0
    return tuple(int(tokens * x / whole) for x in weights)


@gpu
@DTYPES
@pytest.mark.parametrize("size", [(128, 128), (64, 64), (96, 192), (256, 512)], ids=str)
def test_graph_replay_of_many_tiles(
    size: tuple[int, int], dtype: torch.dtype, cuda: str, batch_invariant: None
) -> None:
    """More tiles than multiprocessors, which go to blocks by the lengths: those of each replay, not
    those of the capture."""
    rng, tokens, parts = random.Random(7), 3000, 9
    first = sized(fast_case("tiles", "", lengths=(tokens // parts,) * parts, H=8, HV=16), *size)
    orphans = tokens - sum(first.lengths or ())
    cases = [replace(first, orphans=orphans)]
    for _ in range(12):
        lengths = draw_lengths(rng, parts, tokens)
        cases.append(replace(first, lengths=lengths, orphans=tokens - sum(lengths)))
    check_replay(cases[0], tuple(cases), dtype, cuda)


@gpu
@pytest.mark.parametrize("parts", [57, 1024, 1025, 3000])
def test_order_of_sequences(parts: int, cuda: str) -> None:
    """Given in another order, each sequence has the same bits, up to the number of sequences that
    blocks take by their lengths and beyond."""
    rng = random.Random(parts)
    lengths = [rng.choice((0, 1, 5, 64, 65, rng.randrange(200))) for _ in range(parts)]
    case = fast_case("order", "", lengths=tuple(lengths), orphans=5, H=2, HV=4)
    call = make_call(case, BF16, cuda, Options())
    order = sorted(range(parts), key=lambda n: lengths[n])
    starts = [0, *itertools.accumulate(lengths)]
    tokens = [t for n in order for t in range(starts[n], starts[n + 1])]
    rows = torch.tensor([*tokens, *range(starts[-1], case.tokens)], device=cuda)
    x = call.x
    moved = {n: getattr(x, n)[:, rows] for n in ("q", "k", "v", "g", "beta")}
    bounds = torch.tensor([0, *itertools.accumulate(lengths[n] for n in order)], device=cuda)
    sorted_x = x.but(**moved, initial_state=x.initial_state[order], cu_seqlens=bounds.int())
    o, state = run("cuda", call)
    sorted_o, sorted_state = run("cuda", call._replace(x=sorted_x))
    assert same_bits(o[:, rows], sorted_o) and same_bits(state[order], sorted_state)


@gpu
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("size", [(128, 128), *WHOLE], ids=lambda size: "K{}-V{}".format(*size))
def test_kernels_before_and_after(size: tuple[int, int], captured: bool, cuda: str) -> None:
    """Kernels of a call in segments run beside each other: none before its inputs are written, or
    after the call is over."""
    call = make_call(sized(SEGMENTS, *size), BF16, cuda, Options())
    expected = run("cuda", call)
    given = [x.clone() for x in call.x.tensors]
    o, state = (torch.empty_like(x) for x in expected)

    def calls() -> None:
        for _ in range(10):
            for x, values in zip(call.x.tensors, given, strict=True):
                x.copy_(values)
            found = run("cuda", call)
            for x in call.x.tensors:
                x.fill_(torch.nan)
            o.copy_(found[0])
            state.copy_(found[1])

    calls()
    if captured:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        o.fill_(torch.nan)
        graph.replay()
    assert same(expected, (o, state))


def check_replay(first: Case, cases: tuple[Case, ...], dtype: torch.dtype, cuda: str) -> None:
    call = make_call(first, dtype, cuda, OPTIONS["layer"])
    assert call.x.cu_seqlens is not None
    run("cuda", call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run("cuda", call)
    for seed, case in enumerate(cases):
        assert case.tokens == first.tokens
        call.x.cu_seqlens.copy_(torch.tensor(case.offsets()))
        call.x.around[0].copy_(make_inputs(first, dtype, cuda, seed=seed, raw=True).around[0])
        expected = run("cuda", call._replace(case=case))
        for y in captured:
            y.fill_(torch.nan)
        graph.replay()
        assert same(expected, captured), case.lengths
        check_parity(call._replace(case=case), ("cuda",))


@gpu
@pytest.mark.two_gpus("a tensor on a device that is not the current one")
def test_another_device(cuda: str) -> None:
    call = make_call(RAGGED, BF16, "cuda:0", Options())
    expected = run("cuda", call)
    if fast.why_not_on(1) is not None:
        pytest.skip(str(fast.why_not_on(1)))
    o, state = run("cuda", call.to("cuda:1"))
    assert o.device.index == state.device.index == 1 and torch.cuda.current_device() == 0
    assert same(expected, (o.to("cuda:0"), state.to("cuda:0")))


@gpu
def test_compiled(cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op is opaque to torch.compile: the same kernel, the same bits."""
    monkeypatch.setenv("GDN_BACKEND", "cuda")
    x = make_call(RAGGED, BF16, cuda, Options()).x

    def layer(*tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        return gdn_triton.chunk_gated_delta_rule(
            *tensors, cu_seqlens=x.cu_seqlens, output_final_state=True
        )

    compiled = torch.compile(layer, fullgraph=True)(*x.tensors)
    assert same(layer(*x.tensors), compiled)


@gpu
@DTYPES
@pytest.mark.parametrize("options", [Options(), OPTIONS["layer"]], ids=["plain", "layer"])
@pytest.mark.parametrize(
    "case", [PADDED, RAGGED, SEGMENTS, sized(RAGGED, 96, 192)], ids=lambda case: case.name
)
def test_trained(case: Case, options: Options, dtype: torch.dtype, cuda: str) -> None:
    """The forward has its own bits, and the gradients have those of the backward that serves the
    call, whose own tests judge them; compiled too."""
    call = make_call(case, dtype, cuda, options)
    own = dtype == BF16 and (case.K, case.V) == (128, 128)
    expected = [*run("cuda", call), *gradients("cuda" if own else "triton", call)[2:]]
    torch.compiler.reset()  # a function has a limit of variants, for all cases of a process
    op = torch.compile(gdn_triton.chunk_gated_delta_rule, fullgraph=True)
    for by in (gdn_triton.chunk_gated_delta_rule, op):
        for got, want in zip(gradients("cuda", call, by), expected, strict=True):
            assert same_bits(got, want)


@gpu
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_sanitizer(tool: str, cuda: str) -> None:
    """Random small cases under compute-sanitizer; `fast_parity` says how to run more."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("there is no compute-sanitizer on the PATH")
    report = output(
        *(
            sanitizer,
            "--tool",
            tool,
            "--kernel-name",
            "kernel_substring=gdn",
            "--error-exitcode",
            "1",
        ),
        *(sys.executable, PARITY, "--count", "3", "--small", "--quiet"),
        # Each tensor in an allocation of its own, so that a read past its end is one.
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
        PYTHONPATH=str(ROOT),
    )
    assert "3 cases, 0 failed" in report


# Each changes one argument of a right call of the operator; words of what it then says.
BAD_ARGUMENTS: list[tuple[str, Any, str]] = [
    ("k", lambda x: x.cpu(), "k must be on a CUDA device"),
    ("k", lambda x: x.half(), "k must be BFloat16, got Half"),
    ("k", lambda x: x[:, :, :1], "k must have shape [2, 150, 2, 128], got [2, 150, 1, 128]"),
    ("v", lambda x: x.mT.contiguous().mT, "the last dimension of v must be dense"),
    ("g", lambda x: x.double(), "g must be bfloat16, float16 or float32, got Double"),
    ("beta", lambda x: x[:, 1:], "beta must have shape [2, 150, 4]"),
    ("initial_state", lambda x: x[:1], "initial_state must have shape [2, 4, 128, 128]"),
    ("o", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "o must be contiguous"),
    ("final_state", lambda x: x.half(), "final_state must be Float, got Half"),
    ("workspace", lambda x: x[:8], "workspace must have "),
]


@gpu
@pytest.mark.parametrize(("name", "change", "words"), BAD_ARGUMENTS)
def test_operator_checks_its_arguments(name: str, change: Any, words: str, cuda: str) -> None:
    """For whoever calls it directly: the op's own checks come before it otherwise."""
    noted = Operator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk, "_operator", noted.named)
        run("cuda", make_call(PADDED, BF16, cuda, OPTIONS["l2norm"]))
    judge(noted, name, change, words)


def judge(noted: Operator, name: str, change: Any, words: str) -> None:
    """The noted call runs, and one argument changed it says `words`."""
    (arguments,) = noted.calls
    run_operator = getattr(torch.ops.gdn_fast, noted.name)
    run_operator(*arguments.values())
    arguments[name] = change(arguments[name])
    with pytest.raises(RuntimeError, match=re.escape(words)):
        run_operator(*arguments.values())


BAD_POOLS: list[tuple[str, Any, str]] = [
    ("state", lambda x: x.double(), "state must be bfloat16, float16 or float32, got Double"),
    ("state", lambda x: x[:, :1], "state must have shape [5, 4, 128, 128], got [5, 1, 128, 128]"),
    ("read_slots", lambda x: x[:1], "read_slots must have shape [2], got [1]"),
    ("write_slots", lambda x: x.float(), "write_slots must be Int, got Float"),
    ("has_initial_state", lambda x: x.int(), "has_initial_state must be Bool, got Int"),
    ("every", lambda x: 96, "every must be 0 or a multiple of 64, got 96"),
    ("checkpoints", lambda x: None, "checkpoints must be a tensor where every is not 0"),
    ("checkpoint_slots", lambda x: x[:1], "checkpoint_slots must have shape [2, 1], got [1, 1]"),
    ("o", lambda x: x.cpu(), "o must be on a CUDA device"),
    ("o", lambda x: x.mT.contiguous().mT, "the last dimension of o must be dense"),
]


@gpu
@pytest.mark.parametrize(("name", "change", "words"), BAD_POOLS)
def test_prefill_operator_checks_its_arguments(
    name: str, change: Any, words: str, cuda: str
) -> None:
    noted = Operator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk, "_operator", noted.named)
        p, given, pool = prefill_call(device=cuda)
        chunk.forward(p, given, pool)
    judge(noted, name, change, words)
