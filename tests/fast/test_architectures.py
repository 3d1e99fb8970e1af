"""The GPUs that the CUDA library has kernels for: in the build, in the library and in Python."""

import dataclasses
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from fast_cases import problem
from library_wheel import load_builder

from gdn_triton import fast
from gdn_triton.chunk.cuda import support
from gdn_triton.chunk.problem import Problem
from gdn_triton.fast.architectures import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"


def host_program(source: Path, program: Path) -> str:
    """The output of a program with csrc's host code, without CUDA's runtime."""
    build = load_builder()
    try:
        tools = build.find_toolchain()
        headers = build.cuda_includes(tools)
    except build.Unbuildable as why:
        pytest.skip(f"host code of csrc cannot be compiled here: {why}")
    command = [tools.cxx, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-I", CSRC, *headers]
    done = subprocess.run(
        [*command, source, "-o", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout


def test_rows_are_those_of_the_folders(tmp_path: Path) -> None:
    """An architecture is a folder, and a row in each of three lists."""
    names = [architecture.name for architecture in ARCHITECTURES.values()]
    assert len(set(names)) == len(names)
    assert sorted(names) == sorted(path.name for path in CSRC.glob("sm*"))
    assert sorted(names) == sorted(load_builder().ARCHITECTURES)
    said = host_program(Path(__file__).with_name("architectures.cpp"), tmp_path / "program")
    rows = re.findall(r"^row (\w+) (\d+) (\d+)$", said, re.M)
    assert {(int(major), int(minor)): name for name, major, minor in rows} == {
        capability: architecture.name for capability, architecture in ARCHITECTURES.items()
    }
    assert len(rows) == len(ARCHITECTURES)


def test_choice_by_compute_capability(tmp_path: Path) -> None:
    """Each GPU is asked for once, and one without kernels has a sentence that says what it is."""
    said = host_program(Path(__file__).with_name("architectures.cpp"), tmp_path / "program")
    needed = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
    none = f"the library has kernels for GPUs of compute capability {needed}; cuda:"
    first = [
        "-1 there is no such device, asked 1",
        "0 sm90, asked 2",
        f"1 {none}1 has 8.0, asked 2",
        "2 sm90, asked 2",
        f"3 {none}3 has 10.0, asked 2",
        "4 there is no such device, asked 1",
    ]
    again = [line.replace("sm90, asked 2", "sm90, asked 0") for line in first]
    lines = [line for line in said.splitlines() if not line.startswith("row ")]
    parts = "maps walk back both 4 5 6 7"
    assert lines == [*first, *again, "forward prefill backward walks 1 2 3", parts]


def test_a_row_without_kernels_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = load_builder()
    monkeypatch.setitem(build.ARCHITECTURES, "sm00", "-gencode=arch=compute_00,code=sm_00")
    tools = build.Toolchain("/nowhere/nvcc", (13, 0), "g++", tmp_path)
    with pytest.raises(build.BuildFailed, match=r"there is no \.cu file under .*csrc/sm00"):
        build.build(tools, tmp_path / "library.so", tmp_path / "objects")
    assert not list(tmp_path.iterdir())


def test_each_source_is_compiled_for_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second architecture's files get that one's flags, and no other's."""
    build = load_builder()
    for name in ("dispatch.cpp", "one/a.cu", "one/deep/b.cu", "two/c.cu", "no/d.cu"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path)
    monkeypatch.setattr(build, "ARCHITECTURES", {"one": "-for-one", "two": "-for-two"})
    monkeypatch.setattr(build, "cuda_includes", lambda tools: [])
    found = build.compilers(build.Toolchain("nvcc", (13, 0), "g++", tmp_path))
    assert {
        str(source.relative_to(tmp_path)): [x for x in command if x.startswith("-for-")]
        for source, command in found.items()
    } == {
        "dispatch.cpp": [],
        "one/a.cu": ["-for-one"],
        "one/deep/b.cu": ["-for-one"],
        "two/c.cu": ["-for-two"],
    }


def on(device: int, **changes: Any) -> Problem:
    return problem(device=torch.device("cuda", device), **changes)


@pytest.mark.parametrize(
    ("changes", "of_one", "of_other"),
    [
        ({}, None, None),
        ({"K": 256}, None, "K up to 128; K is 256"),
        ({"V": 136}, None, "K and V in multiples of 16, K up to 128; K is 128, V is 136"),
        ({"q_dtype": torch.float32}, "take", "q, k and v all in bfloat16; they are float32"),
        ({"chunk_size": 32}, "in chunks of 64", "in chunks of 128; 32 is asked for"),
        ({"pool_dtype": torch.float16}, None, "in float32 at most; the states are float16"),
        ({"T": 2**20}, None, "less than 1048576 tokens; T is 1048576"),
    ],
)
def test_limits_are_those_of_the_gpu(
    changes: dict[str, Any],
    of_one: str | None,
    of_other: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two GPUs in one process have the limits of two rows."""
    other = ARCHITECTURES[9, 0]._replace(
        chunk_size=128,
        max_K=128,
        head_multiple=16,
        max_tokens=2**20,
        dtypes=(torch.bfloat16,),
        pool_dtypes=(torch.float32,),
    )
    monkeypatch.setattr(fast, "why_unavailable", lambda: None)
    monkeypatch.setattr(fast, "why_not_on", lambda device: None)
    monkeypatch.setattr(fast, "architecture_on", {0: ARCHITECTURES[9, 0], 1: other}.__getitem__)
    told = [
        support.supports(on(0, **changes)),
        support.supports(on(1, **{"chunk_size": 128, **changes})),
    ]
    for reason, words in zip(told, (of_one, of_other), strict=True):
        assert (reason is None) == (words is None), reason
        assert words is None or words in str(reason)


def test_limits_of_the_backward_are_those_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ARCHITECTURES[9, 0]._replace(
        backward_max_K=64, backward_V=32, backward_max_chunks=7, chunk_size=32
    )
    monkeypatch.setattr(fast, "architecture_on", {0: ARCHITECTURES[9, 0], 1: other}.__getitem__)
    assert support.backward_supports(on(0)) is None
    assert support.backward_supports(on(1)) == "The CUDA backward takes K up to 64; K is 128."
    small = on(1, K=64, V=64, T=31, HV=4, B=1, N=1)
    assert support.backward_supports(small) == (
        "The CUDA backward takes less than 7 chunks of slices: "
        "(B * T / 32 + N) * HV * ceil(V / 32) is 8."
    )
    for changes in ({"HV": 3}, {"V": 32}):
        assert support.backward_supports(dataclasses.replace(small, **changes)) is None
    for sizes in ({}, {"K": 96}, {"K": 96, "V": 192}, {"K": 64}, {"V": 64}, {"V": 8 * 41}):
        assert support.backward_wasteful(on(0, **sizes)) is None
    for sizes in ({"K": 64, "V": 64}, {"K": 56}, {"K": 72, "V": 136}):
        assert support.backward_wasteful(on(0, **sizes)) is not None
    assert support.backward_wasteful(on(0, K=64, V=192)) == (
        "The CUDA backward computes with K = 128 and V = 256 for this call's K = 64 and V = 192, "
        "and Triton's takes less time; GDN_BACKEND=cuda takes the CUDA backward."
    )
    assert support.backward_wasteful(on(1, K=32, V=24)) is not None
    assert support.backward_wasteful(on(1, K=64, V=24)) is None


def test_row_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, architecture in ARCHITECTURES.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, x=capability: x)
        assert fast.architecture_on.__wrapped__(0) is architecture
        assert fast.why_not_on.__wrapped__(0) is None
