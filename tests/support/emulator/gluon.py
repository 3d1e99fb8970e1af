"""Runs the Gluon kernels of the package, and the kernels of Triton in the same calls, on a CPU: the
PTX that Triton makes of them for compute capability 9.0, by the machine that also runs the CUDA
library (build.py). Needs g++ on x86_64, and neither nvcc nor a GPU.

    with emulated({"hopper_fwd_kernel": ("o", "ht", "o_desc")}, seed=1, races=True):
        hopper_fwd(problem, x)
"""

import contextlib
import ctypes
import hashlib
import os
import re
import struct
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from target_code import AbsentDevice
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from emulator.translate import translate

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[2] / "build" / "emulator_gluon"
# As in build.py: PTX says itself which products and sums are one instruction. A kernel runs for a
# tenth of the time that g++ would take to optimise it.
_FLAGS = (
    *("-std=c++17", "-O0", "-fPIC", "-w", "-march=native", "-ffp-contract=off", "-shared"),
    "-Wl,--exclude-libs,ALL",  # PRIVATE of build.py says why
)
_MOST_PARAMETERS = 8192  # kMostParameters of launch.h
_MAP_MAGIC = 0x70616D726F736E65
_ALIGNMENT = 128
# Which races `emulator_launch` looks for.
_NO_RACES, _INSIDE, _BETWEEN = range(3)


def _compiled(target: Path, command: Sequence[str | Path]) -> Path:
    if not target.exists():
        # Another process may compile the same file.
        made = target.with_name(f"{target.stem}_{os.getpid()}.so")
        subprocess.run(["g++", *_FLAGS, *command, "-o", made], check=True)
        made.replace(target)
    return target


def _named_by(*texts: bytes) -> str:
    return hashlib.sha256(b"".join(texts)).hexdigest()[:20]


def _machine() -> Path:
    """The library of the machine itself."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    sources = [x for x in sorted(HERE.glob("*.cpp")) if x.name != "cuda_runtime.cpp"]
    digest = _named_by(*(x.read_bytes() for x in (*sources, *sorted(HERE.glob("*.h")))))
    settings = [f'-DEMULATOR_FOLDER="{FOLDER}"', '-DEMULATOR_FLAGS=""', "-O2"]
    return _compiled(FOLDER / f"machine_{digest}.so", (*settings, *sources, "-ldl"))


def _as_nvcc_writes(ptx: str) -> str:
    """The text in the form of nvcc, where LLVM writes it differently."""
    ptx = re.sub(r"\.ptr \.global \.align \d+ ", "", ptx)
    ptx = re.sub(r"\{ (%\w+) \}", r"\1", ptx)
    # Triton's single warps share a warpgroup, each with a setmaxnreg of its own.
    ptx = re.sub(r"\bsetmaxnreg[^;]*;", "", ptx)
    # A policy of the cache changes no number.
    ptx = re.sub(r"\bcreatepolicy[^;]*;", "", ptx)
    ptx = re.sub(r"(\.L2::cache_hint[^;]*), %\w+;", r"\1;", ptx)
    count = 0

    def told_apart(found: re.Match[str]) -> str:
        """The labels of a scope of inline assembly are its own."""
        nonlocal count
        count += 1
        return re.sub(r"\b(waitLoop|skipWait)\b", rf"\1_{count}", found[0])

    ptx = re.sub(r"\{[^{}]*?\.reg \.pred complete;.*?\n\}", told_apart, ptx, flags=re.DOTALL)
    # All threads of the first four warps store the same word, which tells the other warps their
    # role; and all lanes of a single warp the same numbers.
    return re.sub(r"(?m)^(\s*)(st\.shared\S*\s+\[global_smem\b)", r"\1@%one_thread \2", ptx)


def _library_of(ptx: str, machine: Path) -> Path:
    """The kernel of a module, as a library."""
    ptx = _as_nvcc_writes(ptx)
    # Messages quote lines of this file.
    kept = FOLDER / f"kernel_{_named_by(ptx.encode())}.ptx"
    if not kept.exists():
        kept.write_text(ptx)
    ((_, text),) = translate(ptx, str(kept)).items()
    text = text.replace("v_one_thread", "(t.index == 0 || t.index >= 128 && t.index % 32 == 0)")
    # The name contains the machine's, since two machines in a process would share their globals.
    source = FOLDER / f"kernel_{_named_by(machine.name.encode(), text.encode())}.cpp"
    if not source.exists():
        source.write_text(text)
    return _compiled(source.with_suffix(".so"), ("-I", HERE, source, machine))


def _tensor_map(descriptor: Any) -> bytes:
    """A TensorMap of launch.h. Dimensions are listed from the last."""
    x, size = descriptor.base, descriptor.base.element_size()
    rank = len(descriptor.shape)
    dims = [*reversed(descriptor.shape), *(1,) * (4 - rank)]
    strides = [*(n * size for n in reversed(descriptor.strides[:-1])), *(16,) * (4 - rank)]
    box = [128 // size, *reversed(descriptor.block_shape[:-1]), *(1,) * (4 - rank)]
    half = x.dtype is torch.float16
    packed = struct.pack(
        "<QQ4q3q4i??6x", _MAP_MAGIC, x.data_ptr(), *dims, *strides, *box, half, size == 4
    )
    return packed.ljust(128, b"\0")


_SCALARS: dict[str, str] = {"fp32": "<f", "i32": "<i", "i64": "<q", "u64": "<Q"}


def _parameters(signature: dict[str, str], given: dict[str, Any]) -> list[bytes]:
    """The bytes of each parameter, in the order of the kernel's PTX."""
    parts: list[bytes] = []
    for name, kind in signature.items():
        x = given.get(name)
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            assert x is not None
            parts.append(_tensor_map(x))
            parts += (struct.pack("<I", n) for n in x.shape)
            parts += (struct.pack("<Q", n) for n in x.strides)
        elif kind.startswith("*"):
            assert isinstance(x, Tensor)
            parts.append(struct.pack("<Q", x.data_ptr()))
        else:
            parts.append(struct.pack(_SCALARS[kind], x))
    return parts


class _Machine:
    def __init__(self, writes: Mapping[str, Collection[str]], seed: int, races: bool) -> None:
        self.writes, self.seed, self.races = writes, seed, races
        self.path = _machine()
        self.library = ctypes.CDLL(str(self.path), mode=ctypes.RTLD_GLOBAL)
        self.library.emulator_launch.restype = ctypes.c_char_p

    def launch(
        self, name: str, kernel: Any, given: dict[str, Any], grid: Sequence[int], *, checks: bool
    ) -> None:
        """checks: look for races inside of the launch and for accesses that are not allowed, if
        asked for; else for races with earlier launches alone."""
        assert all(n == 1 for n in grid[1:]), f"{name}: a grid of several dimensions"
        path = str(_library_of(kernel.asm["ptx"], self.path)).encode()
        places = (ctypes.c_uint32 * 400)()
        count = self.library.emulator_parameters(path, places, 200)
        parts = _parameters(kernel.src.signature, given)
        # Triton adds pointers to scratch memory, which no kernel here has.
        parts += [struct.pack("<Q", 0)] * (count - len(parts))
        memory = ctypes.create_string_buffer(_MOST_PARAMETERS + _ALIGNMENT)
        first = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
        for i, part in enumerate(parts):
            assert len(part) == places[2 * i + 1], f"{name}: parameter {i}"
            ctypes.memmove(first + places[2 * i], part, len(part))
        if checks:
            self._allow(given, self.writes[name])
        watched = (_INSIDE if checks else _BETWEEN) if self.races else _NO_RACES
        blocks, threads = grid[0], kernel.metadata.num_warps * 32
        said = self.library.emulator_launch(
            path,
            name.encode(),
            blocks,
            threads,
            kernel.metadata.shared,
            ctypes.c_void_p(first),
            int(kernel.metadata.launch_pdl),
            ctypes.c_uint64(self.seed),
            watched,
        )
        self.library.emulator_end_launch()
        if said:
            raise RuntimeError(f"{name}: {said.decode()}")

    def end(self) -> None:
        """Fails if an earlier launch may still run when the last one has ended, because what comes
        next waits for the last one alone."""
        if not self.library.emulator_end_call():
            raise RuntimeError("the last launch does not end after all others")

    def _allow(self, given: dict[str, Any], written: Collection[str]) -> None:
        """A kernel may access its arguments alone."""
        for name, x in given.items():
            tensor = getattr(x, "base", x)
            if isinstance(tensor, Tensor) and tensor.numel() > 0:
                shape, strides = tensor.shape, tensor.stride()
                most = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
                address, size = tensor.data_ptr(), (most + 1) * tensor.element_size()
                self.library.emulator_allow(
                    ctypes.c_uint64(address), ctypes.c_uint64(size), int(name in written)
                )


@contextlib.contextmanager
def emulated(
    writes: Mapping[str, Collection[str]],
    *,
    seed: int = 0,
    races: bool = False,
) -> Iterator[None]:
    """Launches run here, for tensors of the CPU, in an order of warps and copies that `seed` draws.
    writes: of the Gluon kernels that may run, the arguments that they may write. Of other kernels
    only accesses to global memory are checked, against those of earlier launches that may still
    run."""
    machine = _Machine(writes, seed, races)
    run = JITFunction.run

    def one(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        # Code that Triton arranges itself lets several warps store one number to the same place.
        checks = isinstance(self, GluonJITFunction)
        machine.launch(self.fn.__name__, kernel, kwargs, grid, checks=checks)

    driver.set_active(AbsentDevice(GPUTarget("cuda", 90, 32)))
    with (
        mock.patch.object(JITFunction, "run", one),
        # The machine code would not be read. Kernels without it have a cache of their own.
        mock.patch.object(CUDABackend, "make_cubin", lambda *_: b""),
        mock.patch.object(knobs.cache, "dir", str(FOLDER / "triton")),
    ):
        yield
        machine.end()
