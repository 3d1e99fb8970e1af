"""Repeated launches of a compiled kernel in a third of the host time that Triton takes.

At every launch Triton inspects each argument to find the compiled variant. This takes 25 us for a
kernel of 45 arguments, which is longer than the kernel runs on small inputs. A `Launch` holds a
kernel and the arguments on which its code is specialised, and inspects only the other arguments.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from gdn_triton._host.launches import Again, recorder
from gdn_triton._host.remembered import keep
from gdn_triton._triton.tiles import FUSED, compiler

# The most variants that one Launch remembers. A few are normal, for dtypes, alignments and devices.
MOST_VARIANTS = 64

# The options of a launch that are no arguments of its kernel.
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl", *FUSED)


def taken_by(kernel: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that a kernel has, and the options of a launch among them."""
    names = {*kernel.arg_names, *OPTIONS}
    return {name: x for name, x in arguments.items() if name in names}


def with_fusion(fixed: dict[str, Any]) -> dict[str, Any]:
    """Returns the fixed arguments of a launch with `FUSED`, unless they have its option."""
    return fixed if FUSED.keys() <= fixed.keys() else fixed | FUSED


class Launch:
    """``Launch(kernel, **fixed)(grid, **given)`` does what ``kernel[grid](**given, **fixed)`` does.

    given: the kernel's first parameters, in its order: its pointers, each a tensor or None, then
        the numbers that it lists in ``do_not_specialize``.
    fixed: all its other parameters and the options (``num_warps``, ...), no tensor among them. Two
        sets of them are two objects, which the caller keeps. `FUSED` is the default of its option.

    The first launch of a variant is Triton's own, which compiles it; later ones run what it
    returned. The variant depends on the current device, on each pointer (whether it is None, its
    dtype, and whether its address is a multiple of 16 bytes), and on the type of each number.
    Launches with numbers beyond 32 bits are always Triton's own. No value is remembered.

    Hooks on launches are called as usual. Options that Triton reads from its environment
    (TRITON_DEBUG) take effect at the first launch of a variant. In the interpreter, and on GPUs
    that are not NVIDIA's, where Triton's variants depend on more than this, every launch is
    Triton's own.

    Raises TypeError if the arguments are not split as said here, or come in another order.
    """

    __slots__ = ("_compiled", "_fixed", "_given", "_kernel", "_pointers", "_values", "_variants")

    def __init__(self, kernel: Any, **fixed: Any) -> None:
        fixed = with_fusion(fixed)
        self._compiled = isinstance(kernel, JITFunction)
        self._kernel = kernel
        self._fixed = fixed
        self._given = given = tuple(name for name in kernel.arg_names if name not in fixed)
        if given + tuple(kernel.arg_names[len(given) :]) != tuple(kernel.arg_names):
            raise TypeError(f"{kernel.__name__}: {given}, not fixed, must be its first parameters")
        self._pointers = count_pointers(kernel, given, fixed)
        self._values = tuple(fixed[name] for name in kernel.arg_names[len(given) :])
        self._variants: dict[Hashable, CompiledKernel] = {}

    def __call__(self, grid: tuple[int, int, int], /, **given: Any) -> None:
        if tuple(given) != self._given:
            raise TypeError(
                f"{self._kernel.__name__}: expected {self._given}, in this order, got "
                f"{tuple(given)}"
            )
        kernel, pointers = self._kernel, self._pointers
        if not self._compiled or kernel.pre_run_hooks:
            kernel[grid](**given, **self._fixed)
            if recorder.launches is not None:
                recorder.launches.append(None)
            return
        values = tuple(given.values())
        tensors, numbers = values[:pointers], values[pointers:]
        device = driver.active.get_current_device()
        addresses: list[int | None] = []
        decisive: list[Hashable] = [device]
        inspect_pointers(tensors, addresses, decisive)
        key = (*decisive, *map(type, numbers))
        small = are_small(numbers)
        variant = self._variants.get(key) if small else None
        if variant is None:
            variant = kernel[grid](**given, **self._fixed)
            if small and is_kept(variant):
                keep(self._variants, key, variant, most=MOST_VARIANTS)
            if recorder.launches is not None:
                found = self._variants.get(key) if small else None
                again = None if found is None else _again(found, grid, addresses, numbers, self)
                recorder.launches.append(again)
            return
        if recorder.launches is not None:
            recorder.launches.append(_again(variant, grid, addresses, numbers, self))
        stream = driver.active.get_current_stream(device)
        run_variant(variant, grid, stream, (*addresses, *numbers, *self._values))


def count_pointers(kernel: Any, given: tuple[str, ...], fixed: Mapping[str, Any]) -> int:
    """Returns how many of the given parameters are pointers. Raises TypeError unless the others are
    the numbers in ``do_not_specialize``, and for a fixed tensor."""
    # The interpreter has no variants.
    params = kernel.params if isinstance(kernel, JITFunction) else ()
    numbers = tuple(p.name for p in params if p.do_not_specialize)
    pointers = len(given) - len(numbers)
    if given[pointers:] != numbers:
        raise TypeError(f"{kernel.__name__}: {given}, not fixed, must end with {numbers}")
    for name, value in fixed.items():
        if isinstance(value, torch.Tensor):
            raise TypeError(f"{kernel.__name__}: {name} is a tensor, which cannot be fixed")
    return pointers


def inspect_pointers(
    tensors: Sequence[torch.Tensor | None], addresses: list[Any], decisive: list[Hashable]
) -> None:
    """Appends the addresses, and the properties on which the variant depends."""
    for x in tensors:
        if x is None:
            addresses.append(None)
            decisive.append(None)
        else:
            address = x.data_ptr()
            addresses.append(address)
            decisive.append(x.dtype)
            if address % 16 != 0:
                decisive.append("unaligned")


def are_small(numbers: Sequence[Any]) -> bool:
    """Whether all numbers fit 32 bits."""
    return not numbers or (min(numbers) >= -(2**31) and max(numbers) < 2**31)


def is_kept(variant: Any) -> bool:
    """Whether the result of Triton's launch is a variant that can be launched again. The result is
    None where a test has replaced that launch."""
    return isinstance(variant, CompiledKernel) and compiler() == "cuda"


def has_hooks() -> bool:
    """Whether launches call hooks."""
    runtime = knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


def run_variant(
    variant: CompiledKernel, grid: tuple[int, int, int], stream: int, values: tuple[Any, ...]
) -> None:
    """Launches a variant. values: of all parameters, with addresses in place of tensors."""
    if has_hooks():
        variant[grid](*values, stream=stream)
        return
    # This does the same as the line above without the 3 us that Triton takes to call no hook.
    variant.run(*grid, stream, variant.function, variant.packed_metadata, None, None, None, *values)


def _again(
    variant: CompiledKernel,
    grid: tuple[int, int, int],
    addresses: Sequence[int | None],
    numbers: Sequence[Any],
    launch: Launch,
) -> Again:
    values = (*addresses, *numbers, *launch._values)
    device = driver.active.get_current_device()
    place = launch._given.index("o") if "o" in launch._given else None
    before, after = values[:place], values[(place or 0) + 1 :]

    def again(o: int | None) -> None:
        stream = driver.active.get_current_stream(device)
        run_variant(variant, grid, stream, values if o is None else (*before, o, *after))

    return again
