"""The CUDA library of `emulator.build` in the place of the real one, for tensors of the CPU.

`use` changes `gdn_triton.fast` for the rest of the process, whose calls with GDN_BACKEND=cuda then
run the kernels here: for a process of its own.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emulator.build import LIBRARY
from gdn_triton import fast
from gdn_triton.chunk.problem import Problem
from gdn_triton.fast import chunk, support
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
    chunk.torch = _Torch()  # type: ignore[assignment]
    torch.ops.load_library(str(folder / LIBRARY))


class _Torch:
    """torch, whose `empty` begins at the multiples that a GPU's allocator gives, and is NaN."""

    def __getattr__(self, name: str) -> Any:
        return _empty if name == "empty" else getattr(torch, name)


def _empty(*shape: Any, dtype: torch.dtype, device: Any) -> Tensor:
    spare = _ALIGNMENT // dtype.itemsize
    count = torch.Size(shape if isinstance(shape[0], int) else shape[0]).numel()
    memory = torch.full((count + spare,), torch.nan, dtype=dtype, device=device)
    first = -memory.data_ptr() % _ALIGNMENT // dtype.itemsize
    return memory[first : first + count].view(*shape)
