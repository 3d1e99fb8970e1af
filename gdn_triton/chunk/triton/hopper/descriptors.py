"""Tensors as TMA reads and writes them, and launches of kernels whose first arguments are TMA
descriptors."""

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
import triton
from packaging.version import Version
from triton.compiler import CompiledKernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from gdn_triton._host.launches import recorder
from gdn_triton._host.remembered import keep
from gdn_triton._triton.launch import (
    MOST_VARIANTS,
    are_small,
    count_pointers,
    has_hooks,
    inspect_pointers,
    is_kept,
    run_variant,
    with_fusion,
)

ROWS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
ROWS32 = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=4)
# TMA needs strides that are multiples of 16 bytes: this many elements of 2 bytes.
TMA_ALIGNMENT = 8
CHUNK = 64
# The columns of V of a tile of states.
COLUMNS = 64
# The number of shapes and strides of tensors whose strides are remembered.
MOST_LAYOUTS = 1024
# The releases of Triton whose function in C this module calls, and whether it takes the kernel's
# arguments as one list.
TAKES_LIST = {"3.6.0": False, "3.7.0": True, "3.7.1": True, "3.8.0": True, "3.9.0": True}
# The number of encoded descriptors that a variant keeps for each of its parameters.
MOST_ENCODED = 512


@functools.lru_cache(maxsize=MOST_LAYOUTS)
def tma_strides(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the strides with which TMA accesses a tensor of four dimensions and elements of 2
    bytes whose address is a multiple of 16 bytes, or None if TMA cannot access it."""
    # The stride of a dimension of length 1 may be any number, so replace it by one that TMA
    # accepts.
    far = [n if m > 1 else TMA_ALIGNMENT for m, n in zip(shape[:3], strides[:3], strict=True)]
    rows = all(0 < stride < 2**38 and stride % TMA_ALIGNMENT == 0 for stride in far)
    return (*far, 1) if rows and strides[3] == 1 else None


def tma_reachable(x: torch.Tensor) -> bool:
    """Whether TMA can read and write x [B, T, heads, D], D a multiple of 8."""
    return tma_strides(x.shape, x.stride()) is not None and x.data_ptr() % 16 == 0


def tma_readable(x: torch.Tensor) -> torch.Tensor:
    """x [B, T, heads, D] itself where TMA can read it, else a contiguous copy."""
    return x if tma_reachable(x) else x.clone(memory_format=torch.contiguous_format)


def row_tile(width: int) -> tuple[int, int, int, int]:
    """The shape of the tiles of x [B, T, heads, D]: one chunk of one head."""
    return 1, CHUNK, 1, width


def state_tile(BK: int) -> tuple[int, int, int, int]:
    """The shape of the tiles of states [slots, HV, K, V]: 64 columns of one state."""
    return 1, 1, BK, COLUMNS


def descriptor(x: torch.Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """Returns a TMA descriptor of x, which TMA can access, for tiles of a shape. TMA fills tiles
    past an edge with zeros and does not store past an edge."""
    strides = tma_strides(x.shape, x.stride())
    assert strides is not None, "TMA cannot access the tensor"
    return TensorDescriptor(
        x, list(x.shape), list(strides), list(block), ROWS if x.element_size() == 2 else ROWS32
    )


class _Unchecked(TensorDescriptor):  # type: ignore[misc]
    """The descriptor of a launch whose variant is known: the fields that Triton's launch reads and,
    as attributes of the class, those with a default."""

    def __init__(self, base: torch.Tensor, shape: torch.Size, strides: tuple[int, ...]) -> None:
        self.base, self.shape, self.strides = base, shape, strides

    __repr__ = object.__repr__


def _unchecked(x: torch.Tensor) -> _Unchecked:
    shape = x.shape
    strides = tma_strides(shape, x.stride())
    assert strides is not None and x.data_ptr() % 16 == 0, "TMA cannot access the tensor"
    return _Unchecked(x, shape, strides)


class _Variant:
    """A compiled variant, which is launched without Triton's loop over all arguments. That loop
    encodes every descriptor again, and takes longer than the rest of the launch. The encoding
    depends on the address, the shape and the strides of the tensor alone, and is kept under them.

    Triton's own loop runs where launches have hooks, for kernels that need memory of their own, and
    with releases other than those of TAKES_LIST.
    """

    __slots__ = (
        "_before",
        "_encode",
        "_ignored",
        "_launch",
        "_takes_list",
        "_tiles",
        "_variant",
    )

    def __init__(self, variant: CompiledKernel) -> None:
        self._variant = variant
        self._launch: Callable[..., None] | None = None
        takes_list = TAKES_LIST.get(Version(triton.__version__).base_version)
        if takes_list is None:
            return
        from triton.backends.nvidia.driver import CudaLauncher, make_tensordesc_arg

        run = variant.run
        is_plain = isinstance(run, CudaLauncher)
        if not is_plain or run.global_scratch_size > 0 or run.profile_scratch_size > 0:
            return
        found = inspect.getclosurevars(run.launch).nonlocals
        self._launch, self._encode = found["launcher"], make_tensordesc_arg
        # From 3.8 on there is one parameter more, which it ignores.
        self._ignored = (None,) * (len(inspect.signature(make_tensordesc_arg).parameters) - 2)
        self._tiles: list[tuple[Any, dict[Hashable, list[Any]]]] = [
            (tile, {}) for tile in found["tensordesc_meta"]
        ]
        self._takes_list = takes_list
        options = variant.function, run.launch_cooperative_grid, run.launch_pdl
        # The kernel needs no memory of its own, and the launch calls no hooks.
        memory, metadata = (None, None), (variant.packed_metadata, None, None, None)
        if takes_list:
            self._before = (*options, *metadata, *memory, run.arg_annotations, run.kernel_signature)
        else:
            self._before = (*options, *memory, *metadata)

    def launch(
        self,
        grid: tuple[int, int, int],
        stream: int,
        tensors: Sequence[torch.Tensor],
        places: Sequence[Hashable],
        values: tuple[Any, ...],
    ) -> None:
        """places: the address, shape and strides of each of the tensors that TMA accesses. values:
        of the other parameters."""
        if self._launch is None or has_hooks():
            run_variant(self._variant, grid, stream, (*map(_unchecked, tensors), *values))
            return
        arguments: list[Any] = []
        for x, place, (tile, encoded) in zip(tensors, places, self._tiles, strict=True):
            part = encoded.get(place)
            if part is None:
                part = self._encode(_unchecked(x), tile, *self._ignored)
                keep(encoded, place, part, most=MOST_ENCODED)
            arguments += part
        arguments += values
        if self._takes_list:
            self._launch(*grid, stream, *self._before, arguments)
        else:
            self._launch(*grid, stream, *self._before, *arguments)


class TileLaunch:
    """``TileLaunch(kernel, tiles, **fixed)(grid, **given)`` does what ``kernel[grid](**given,
    **fixed)`` does with descriptors in place of the first tensors. As `Launch` (_triton/launch.py),
    but the kernel's numbers may stand anywhere among its parameters.

    tiles: the names of the kernel's first parameters, which are descriptors, and the shape of the
        tiles of each.
    fixed: as for `Launch`.
    given: the other parameters in the kernel's order: the tensors that TMA accesses, the other
        pointers, and the numbers in ``do_not_specialize``.

    The variant also depends on the dtypes of the tensors that TMA accesses, and on nothing else of
    them. Raises AssertionError if TMA cannot access one, and TypeError as `Launch`.
    """

    __slots__ = (
        "_compiled",
        "_fixed",
        "_given",
        "_in_order",
        "_kernel",
        "_pointers",
        "_tiles",
        "_values",
        "_variants",
    )

    def __init__(self, kernel: Any, tiles: Mapping[str, tuple[int, ...]], **fixed: Any) -> None:
        fixed = with_fusion(fixed)
        self._given = given = tuple(name for name in kernel.arg_names if name not in fixed)
        if given[: len(tiles)] != tuple(tiles):
            raise TypeError(f"{kernel.__name__}: {tuple(tiles)} must be its first parameters")
        self._pointers = count_pointers(kernel, given, fixed)
        self._compiled = isinstance(kernel, JITFunction)
        self._kernel = kernel
        self._tiles = tiles
        self._fixed = fixed
        names = (*given[len(tiles) :], *fixed)
        self._values = tuple(fixed.values())
        others = kernel.arg_names[len(tiles) :]
        self._in_order = itemgetter(*(names.index(name) for name in others))
        self._variants: dict[Hashable, _Variant] = {}

    def __call__(self, grid: tuple[int, int, int], /, **given: Any) -> None:
        if tuple(given) != self._given:
            raise TypeError(
                f"{self._kernel.__name__}: expected {self._given}, in this order, got "
                f"{tuple(given)}"
            )
        if recorder.launches is not None:
            recorder.launches.append(None)
        count, pointers = len(self._tiles), self._pointers
        values = tuple(given.values())
        numbers = values[pointers:]
        if not self._compiled or self._kernel.pre_run_hooks or not are_small(numbers):
            self._launch_by_triton(grid, given)
            return
        device = driver.active.get_current_device()
        decisive: list[Hashable] = [device]
        tensors, places = values[:count], []
        for x in tensors:
            decisive.append(x.dtype)
            places.append((x.data_ptr(), x.shape, x.stride()))
        addresses: list[int | None] = []
        inspect_pointers(values[count:pointers], addresses, decisive)
        key = (*decisive, *map(type, numbers))
        variant = self._variants.get(key)
        if variant is None:
            compiled = self._launch_by_triton(grid, given)
            if is_kept(compiled):
                keep(self._variants, key, _Variant(compiled), most=MOST_VARIANTS)
            return
        stream = driver.active.get_current_stream(device)
        others = self._in_order((*addresses, *numbers, *self._values))
        variant.launch(grid, stream, tensors, places, others)

    def _launch_by_triton(self, grid: tuple[int, int, int], given: dict[str, Any]) -> Any:
        described = {name: descriptor(given[name], tile) for name, tile in self._tiles.items()}
        return self._kernel[grid](**{**given, **described}, **self._fixed)
