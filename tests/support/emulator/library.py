"""Replaces the CUDA library by that of `emulator.build`, for tensors on the CPU.

`use` changes `gdn_triton.fast` for the rest of the process, whose calls with GDN_BACKEND=cuda then
run the kernels here. It therefore needs a separate process.
"""

import ctypes
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emulator.build import LIBRARY
from gdn_triton import fast
from gdn_triton.chunk.cuda import calls, parts, support
from gdn_triton.chunk.problem import Problem
from gdn_triton.chunk.sharded import cuda
from gdn_triton.fast.architectures import ARCHITECTURES

_ALIGNMENT = 256  # bytes, of a GPU's allocations; the CPU's allocator keeps to 64


def use(folder: Path) -> None:
    """The library in `folder`."""
    able = support.supports

    def supports(problem: Problem) -> str | None:
        return able(replace(problem, device=torch.device("cuda")))

    fast.why_unavailable = lambda: None  # type: ignore[assignment]
    fast.why_not_on = lambda device: None  # type: ignore[assignment]
    fast.architecture_on = lambda device: ARCHITECTURES[9, 0]  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    support.supports = supports
    for module in (calls, parts, cuda):
        module.torch = _Torch()  # type: ignore[attr-defined]
    # A torch for CUDA has put the real runtime into the process's global scope, which symbols of
    # the library would otherwise bind to before those of libemulator.so.
    ctypes.CDLL(str(folder / LIBRARY), mode=os.RTLD_NOW | os.RTLD_DEEPBIND)
    machine = ctypes.CDLL(str(folder / "libemulator.so"))
    operator = calls.library_operator

    def bounded(name: str) -> Callable[..., None]:
        return _bounded(machine, operator(name))

    calls.library_operator = bounded  # type: ignore[assignment]


def _bounded(machine: ctypes.CDLL, operator: torch._ops.OpOverload) -> Callable[..., None]:
    """The operator. Its kernels may access only the memory of its arguments, and write only the
    arguments that its schema marks as written."""
    schema = operator._schema.arguments

    def run(*arguments: Any) -> None:
        for x, told in zip(arguments, schema, strict=True):
            if isinstance(x, Tensor) and x.numel() > 0:
                most = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
                written = told.alias_info is not None and told.alias_info.is_write
                address, size = ctypes.c_uint64(x.data_ptr()), (most + 1) * x.element_size()
                machine.emulator_allow(address, ctypes.c_uint64(size), int(written))
        try:
            operator(*arguments)
        finally:
            ended = machine.emulator_end_call()
        if not ended:
            raise RuntimeError("a launch of the call may outlive its last one")

    return run


class _Torch:
    """torch with an `empty` whose memory begins at the multiples of a GPU's allocator, and is
    NaN."""

    def __getattr__(self, name: str) -> Any:
        return _empty if name == "empty" else getattr(torch, name)


def _empty(*shape: Any, dtype: torch.dtype, device: Any) -> Tensor:
    spare = _ALIGNMENT // dtype.itemsize
    count = torch.Size(shape if isinstance(shape[0], int) else shape[0]).numel()
    memory = torch.full((count + spare,), torch.nan, dtype=dtype, device=device)
    first = -memory.data_ptr() % _ALIGNMENT // dtype.itemsize
    return memory[first : first + count].view(*shape)
