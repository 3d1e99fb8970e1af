"""Arguments that a call may refuse: it names the argument, and nothing has been written; or else
the numbers are right."""

import inspect
import typing
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from call_cases import SIZES
from function_cases import LAYER, WRITING, Function, copied, each_function, tensors
from helpers import BF16, FP16, FP64
from outcome_cases import (
    Exact,
    Faults,
    Untouched,
    assert_same_bits,
    refused,
    served_together,
)
from pool_cases import arena, up
from torch import Tensor

from gdn_triton.layers import GatedDeltaNet


def signature(function: Function) -> inspect.Signature:
    is_layer = function.exports == LAYER
    return inspect.signature(GatedDeltaNet.forward if is_layer else function.call)


# ------------------------------------------------------------------------------------------- dtypes

WRONG_FLOATS = (torch.int64, torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn)
WRONG_INDICES = (torch.float32, torch.bool, torch.int16, torch.uint8, torch.complex64)
WRONG_FLAGS = (torch.float32, torch.int64, torch.uint8, torch.complex64)


@each_function
def test_wrong_dtypes(function: Function, backend: str, device: str) -> None:
    x, faults = function.arguments(device), Faults()
    for name in tensors(x):
        wrong = WRONG_FLOATS if x[name].is_floating_point() else WRONG_INDICES
        if x[name].dtype == torch.bool:
            wrong = WRONG_FLAGS
        if name == "attention_mask":
            wrong = (torch.complex64,)
        for dtype in wrong:
            with faults.of(f"{name} as {dtype}"):
                refused(function, copied(x) | {name: x[name].to(dtype)}, name)
    faults.show()


@pytest.mark.parametrize("dtype", [FP16, BF16, FP64], ids=str)
@each_function
def test_other_floats(
    function: Function,
    dtype: torch.dtype,
    backend: str,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every other one of the floats: as precise as that dtype is, or refused."""
    if (dtype, backend, device) == (BF16, "triton", "cpu"):
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16")
    x = function.arguments(device)
    names = function.all_floats(x)
    if "layer" in x:
        names.remove("hidden_states")  # its modules say which dtypes they take
    for chosen in (names[::2], names[1::2]):
        rounded = copied(x) | {name: x[name].to(dtype).to(x[name].dtype) for name in chosen}
        exact = Exact(function, rounded, monkeypatch)
        changed = {name: partial(rounded[name].to, dtype, copy=True) for name in chosen}
        unit = torch.finfo(dtype).eps / 2
        served_together(function, rounded, changed, partial(exact.check, unit=unit))


@each_function
def test_other_integers(
    function: Function, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = function.arguments(device)
    expected = function.run(copied(x))
    given = {n: x[n].to(torch.int32) for n in tensors(x) if x[n].dtype == torch.int64}
    assert_same_bits(function.run(copied(x) | given), expected)
    if "attention_mask" in x:
        for dtype in (torch.bool, torch.float32, torch.uint8):
            mask = {"attention_mask": x["attention_mask"].to(dtype)}
            assert_same_bits(function.run(copied(x) | mask), expected)


# --------------------------------------------------------------------------------- layouts, devices


def nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([*x], layout=torch.strided)


def jagged(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([*x], layout=torch.jagged)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": lambda x: x.to_sparse(),
    "sparse rows": lambda x: x.flatten(1).to_sparse_csr(),
    "nested": nested,
    "jagged": jagged,
    "MKL-DNN": lambda x: x.to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse CSR|Sparse invariant)")
@pytest.mark.parametrize("layout", LAYOUTS)
@each_function
def test_layouts(function: Function, layout: str, backend: str, device: str) -> None:
    """Only strided tensors have elements at addresses."""
    x, faults = function.arguments(device), Faults()
    for name in tensors(x):
        try:
            other = LAYOUTS[layout](x[name].detach())
        except (RuntimeError, ValueError, IndexError):
            continue  # torch has no such tensor of this shape, dtype or device
        with faults.of(name):
            refused(function, copied(x) | {name: other}, name)
    faults.show()


@each_function
def test_devices(function: Function, backend: str, device: str) -> None:
    """One tensor without memory, or on the host. Where it is the first, the others are named."""
    x, faults = function.arguments(device), Faults()
    for name in tensors(x):
        for other in ("meta",) if device == "cpu" else ("meta", "cpu"):
            if name != "cu_seqlens_cpu" or other == "meta":
                with faults.of(f"{name} on {other}"):
                    refused(function, copied(x) | {name: x[name].to(other)})
    faults.show()


# --------------------------------------------------------------------------- what is no such tensor


@each_function
def test_no_tensors(function: Function, backend: str, device: str) -> None:
    x, faults = function.arguments(device), Faults()
    for name in tensors(x):
        if name in function.named:
            continue  # a field of a record that the caller makes
        for wrong in ([1.0], 1.0, "text", np.zeros(3), {}, object()):
            with faults.of(f"{name} as {type(wrong).__name__}"):
                refused(function, copied(x) | {name: wrong}, name)
        if signature(function).parameters[name].default is inspect.Parameter.empty:
            with faults.of(f"{name} as None"):
                refused(function, copied(x) | {name: None}, name)
    faults.show()


@each_function
def test_wrong_ranks(function: Function, backend: str, device: str) -> None:
    """A dimension more, or none: some argument does not fit the others."""
    x, faults = function.arguments(device), Faults()
    for name in tensors(x):
        for label, wrong in (("more", x[name][None]), ("none", x[name].new_ones(()))):
            with faults.of(f"{name} with {label}"):
                refused(function, copied(x) | {name: wrong})
    faults.show()


@each_function
def test_unknown_keywords(function: Function, backend: str, device: str) -> None:
    x = function.arguments(device)
    for name in ("unknown", "head_dim_first"):
        before = Untouched(function, x)
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            function.run(x | {name: None})
        before.check()


NONE_OF_THEM = (
    [1],
    {"a": 1},
    {1},
    object(),
    "no such",
    b"silu",
    1j,
    2**70,
    -(2**70),
    torch.ones(2),
)


@each_function
def test_values_of_no_use(function: Function, backend: str, device: str) -> None:
    """Those that no hash has among them, and numbers of too many bits."""
    x, faults = function.arguments(device), Faults()
    parameters = signature(function).parameters
    kinds = typing.get_type_hints(GatedDeltaNet.forward if "layer" in x else function.call)
    for name in parameters.keys() & kinds.keys():
        options = {kinds[name], *typing.get_args(kinds[name])}
        if Tensor in options:
            continue
        takes_numbers = options & {float}
        for wrong in NONE_OF_THEM:
            if takes_numbers and isinstance(wrong, int):
                continue  # a float can be as large
            with faults.of(f"{name} as {str(wrong)[:30]}"):
                # A size that is too large for a tensor is named by its letter.
                is_size = isinstance(wrong, int) and name in SIZES
                refused(function, copied(x) | {name: wrong}, *(() if is_size else (name,)))
    faults.show()


# --------------------------------------------------------------------------- memory that is shared


PAIRS = [
    pytest.param(function, written, id=f"{function.name}-{written}")
    for function in WRITING
    if function.exports != LAYER  # writes after it has read
    for written in function.written
]


@pytest.mark.parametrize("function,written", PAIRS)
def test_what_is_written_lies_apart(
    function: Function, written: str, backend: str, device: str
) -> None:
    """Another argument starts in the last bytes of what is written, or ends in its first ones."""
    x, faults = function.arguments(device), Faults()
    for other in tensors(x):
        if other == written or x[other].device != x[written].device or other == "cu_seqlens_cpu":
            continue
        first, second = (up(x[name].nbytes) - 16 for name in (written, other))
        for starts in ({written: 0, other: first}, {other: 0, written: second}):
            with faults.of(other):
                moved, _ = arena(copied(x), starts)
                # Offsets and slots are read before memory is judged: they have to be whole.
                moved[other].copy_(x[other])
                with pytest.raises(ValueError, match=r"must lie apart from .* in memory"):
                    function.run(moved)
                refused(function, moved, written)
                refused(function, moved, other)
    faults.show()


@pytest.mark.parametrize("function,written", PAIRS)
def test_elements_in_one_place(function: Function, written: str, backend: str, device: str) -> None:
    """A stride of 0, and one that is half of what it has to be."""
    x = function.arguments(device)
    y = x[written]
    dim = next(dim for dim, size in enumerate(y.shape) if size > 1)
    strides = list(y.stride())
    for stride in (0, strides[dim] // 2):
        strides[dim] = stride
        wrong = torch.zeros(y.numel(), device=y.device).as_strided(y.shape, strides)
        refused(function, copied(x) | {written: wrong}, written)


@each_function
def test_gradients_that_there_are_not(function: Function, backend: str, device: str) -> None:
    """An input that requires one is refused where there is none: it never becomes a constant."""
    x, faults = function.arguments(device), Faults()
    served = function.floats(x) if backend in function.gradients else []
    for name in [name for name in function.all_floats(x) if name not in served]:
        given = copied(x)
        given[name].requires_grad_()
        with faults.of(name):
            refused(function, given, name, "gradient", "differentiable")
    faults.show()
