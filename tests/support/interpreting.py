"""Triton's interpreter with less work: it changes `triton.language` once for each launch, and makes
the type and the shape of a tensor once for each kind.

The interpreter changes the builtins of `triton.language` before a launch and restores them
afterwards. It also does so at each call of one kernel function by another, although all of them are
changed already, which takes a quarter to a third of the processor's time of a test of the backward.

Each operation on a tensor makes a new type, with the product of its shape and its name as text, a
new shape, a wrapped number for each dimension, and a table of all dtypes of NumPy. Most of a
launch's time is spent on these, and a launch has few kinds of tensors.

Each sum, difference and product of integers below 64 bits is computed a second time, in 64 bits,
for an assertion that it did not overflow. The interpreter drops that assertion unless its option
`debug` is set. The second computation takes a fifth of a launch's time.
"""

from collections.abc import Callable
from operator import attrgetter
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

# The parts of Triton that this module uses. The oldest supported Triton has all of them.
PARTS = (
    "interpreter.TensorHandle",
    "interpreter._LangPatchScope",
    "interpreter._get_np_dtype",
    "interpreter._patch_lang",
    "interpreter.interpreter_builder.create_broadcast",
    "interpreter.interpreter_builder.options.debug",
    "interpreter.tl.core",
    "tl.constexpr",
    "tl.core._unwrap_if_constexpr",
    "tl.core.block_type.__init__",
    "tl.core.tensor.__init__",
    "tl.dtype",
    "tl.float32",
    "tl.int1",
    "tl.int32",
    "tl.int64",
    "tl.pointer_type",
    "tl.semantic.TritonSemantic.binary_op_sanitize_overflow_impl",
    "tl.semantic.TritonSemantic.binary_op_type_checking_impl",
    "tl.semantic.TritonSemantic.broadcast_impl_value",
    "tl.semantic.TritonSemantic.cast",
    "tl.semantic.TritonSemantic.computation_type_impl",
    "tl.tuple",
    "tl.uint32",
    "tl.uint64",
)


def is_there(part: str) -> bool:
    try:
        attrgetter(part)(SimpleNamespace(interpreter=interpreter, tl=tl))
    except AttributeError:
        return False
    return True


MISSING = [part for part in PARTS if not is_there(part)]
# The interpreter's own function; None if this Triton has other parts, which then stay unchanged.
CHANGE: Callable[[Any], Any] | None = None if MISSING else interpreter._patch_lang

# The replaced functions: the owner of each, its name, and the original.
REPLACED: list[tuple[Any, str, Any]] = []


def replace(owner: Any, name: str, new: Any) -> None:
    REPLACED.append((owner, name, getattr(owner, name)))
    setattr(owner, name, new)


def change_once() -> None:
    """Changes the interpreter for the rest of the process, if this Triton has the parts for it."""
    if CHANGE is not None:
        replace(interpreter, "_patch_lang", changing_once(CHANGE))
        keep_types()
        keep_type_of_computations()
        check_overflow_where_it_is_asserted()


def keep_types() -> None:
    """Types and shapes are made once a kind, from here on in this process, and operands of one
    shape are not broadcast."""
    block_type, tensor, semantic = tl.core.block_type, tl.core.tensor, tl.semantic.TritonSemantic
    make_type, make_tensor = block_type.__init__, tensor.__init__
    broadcast, unwrap = semantic.broadcast_impl_value, tl.core._unwrap_if_constexpr
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, dict[str, Any]] = {}
    common: dict[Any, tuple[int, ...]] = {}

    def type_of_kind(self: Any, element_ty: Any, shape: Any) -> None:
        # A pointer's type is made anew at every launch: it is known by what it holds.
        pointed = getattr(element_ty, "element_ty", None)
        kind = element_ty.name
        if pointed is not None:
            kind = pointed.name, element_ty.address_space, element_ty.const
        sizes = shape.values if isinstance(shape, tl.tuple) else shape
        key = kind, *[x.value if isinstance(x, tl.constexpr) else x for x in sizes]
        found = types.get(key)
        if found is None:
            make_type(self, element_ty, shape)
            # As integers, which a dictionary finds faster than wrapped numbers.
            self._sizes = key[1:]
            types[key] = dict(self.__dict__)
        else:
            self.__dict__.update(found)

    def tensor_of_kind(self: Any, handle: Any, type: Any) -> None:
        is_block = isinstance(type, block_type)
        key = type._sizes if is_block else ()
        found = shapes.get(key)
        if found is None:
            make_tensor(self, handle, type)
            shapes[key] = {"shape": self.shape, "numel": self.numel}
        else:
            own = self.__dict__
            own.update(found)
            own["handle"], own["type"] = handle, type
            own["dtype"] = type.element_ty if is_block else type.scalar

    def common_sizes(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
        """None if the interpreter has more to do: to add dimensions, or to refuse."""
        found = common.get((a, b))
        if found is None:
            if len(a) != len(b):
                return None
            pairs = list(zip(a, b, strict=True))
            if any(m != n and 1 not in (m, n) for m, n in pairs):
                return None
            found = common[a, b] = tuple(n if m == 1 else m for m, n in pairs)
        return found

    def spread(self: Any, x: Any, sizes: tuple[int, ...]) -> Any:
        """A block of these sizes from one of which some are 1."""
        if x.type._sizes == sizes:
            return x
        handle = self.builder.create_broadcast(x.handle, sizes)
        return tensor(handle, block_type(x.type.element_ty, list(sizes)))

    def fill(self: Any, x: Any, like: Any) -> Any:
        """A block of one number."""
        data = np.full(like._sizes, x.handle.data, dtype=interpreter._get_np_dtype(x.handle.dtype))
        handle = interpreter.TensorHandle(data, x.handle.dtype.scalar)
        return tensor(handle, like.with_element_ty(x.type.scalar))

    def broadcast_others(self: Any, left: Any, right: Any) -> Any:
        a, b = left.type, right.type
        if isinstance(a, block_type) and isinstance(b, block_type):
            if a._sizes == b._sizes:
                return left, right
            sizes = common_sizes(a._sizes, b._sizes)
            if sizes is None:
                return broadcast(self, left, right)
            return spread(self, left, sizes), spread(self, right, sizes)
        if isinstance(a, block_type):
            return left, fill(self, right, a)
        if isinstance(b, block_type):
            return fill(self, left, b), right
        return left, right

    plain = (tensor, tl.dtype, tl.pointer_type, block_type, int, float, bool, str, type(None))

    def unwrap_others(x: Any) -> Any:
        return x if type(x) in plain else unwrap(x)

    replace(tl.core, "_unwrap_if_constexpr", unwrap_others)
    replace(semantic, "broadcast_impl_value", broadcast_others)
    np_dtype = interpreter._get_np_dtype
    dtypes: dict[str, Any] = {}

    def dtype_of_kind(type: Any) -> Any:
        scalar = type.scalar
        if scalar.is_ptr():
            return np_dtype(scalar)
        found = dtypes.get(scalar.name)
        if found is None:
            found = dtypes[scalar.name] = np_dtype(scalar)
        return found

    replace(interpreter, "_get_np_dtype", dtype_of_kind)
    replace(block_type, "__init__", type_of_kind)
    replace(tensor, "__init__", tensor_of_kind)


def keep_type_of_computations() -> None:
    """The type in which two operands are computed is found once for each pair of types, and an
    operand that has it is not cast, from here on in this process."""
    core, semantic = tl.core, tl.semantic.TritonSemantic
    check, find = semantic.binary_op_type_checking_impl, semantic.computation_type_impl
    cast = semantic.cast
    found: dict[Any, Any] = {}
    # Two tensors of one of these types are computed in it, whatever the operation is.
    own = {x.name for x in (tl.int1, tl.int32, tl.uint32, tl.int64, tl.uint64, tl.float32)}

    def check_others(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        if type(lhs) is core.tensor and type(rhs) is core.tensor:
            name = lhs.dtype.name
            if name in own and name == rhs.dtype.name:
                return self.broadcast_impl_value(lhs, rhs)
        return check(self, lhs, rhs, *args, **kwargs)

    def find_once(self: Any, a: Any, a_is_number: bool, b: Any, *rest: bool) -> Any:
        key = a.name, a_is_number, b.name, *rest
        kind = found.get(key)
        if kind is None:
            kind = found[key] = find(self, a, a_is_number, b, *rest)
        return kind

    def cast_others(self: Any, input: Any, dst_ty: Any, *args: Any, **kwargs: Any) -> Any:
        return input if input.type.scalar is dst_ty else cast(self, input, dst_ty, *args, **kwargs)

    replace(semantic, "binary_op_type_checking_impl", check_others)
    replace(semantic, "computation_type_impl", find_once)
    replace(semantic, "cast", cast_others)


def check_overflow_where_it_is_asserted() -> None:
    """From here on in this process."""
    semantic = tl.semantic.TritonSemantic
    check = semantic.binary_op_sanitize_overflow_impl

    def check_if_asserted(self: Any, *args: Any) -> None:
        if self.builder.options.debug:
            check(self, *args)

    replace(semantic, "binary_op_sanitize_overflow_impl", check_if_asserted)


def changing_once(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`change`, which changes the languages that a function's module sees and returns how to undo
    that, for the languages that no function of the same launch has seen."""
    changed: list[ModuleType] = []  # by the launch that runs

    def change_others(function: Any) -> Any:
        seen = [x for x in function.__globals__.values() if isinstance(x, ModuleType)]
        wanted = [x for x in (interpreter.tl, interpreter.tl.core) if x in seen]
        if wanted and all(x in changed for x in wanted):
            return interpreter._LangPatchScope()
        scope = change(function)
        if not changed:
            undo = scope.restore

            def end() -> None:
                changed.clear()
                undo()

            # The launch restores everything at its end: calls within it never undo the changes.
            scope.restore = end
        changed.extend(wanted)
        return scope

    return change_others
