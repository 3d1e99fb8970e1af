"""Triton's interpreter with less to do: it changes `triton.language` once a launch, and makes the
type and the shape of a tensor once a kind.

The interpreter changes the builtins of `triton.language` before a launch and puts them back after
it. It also does so at each call of one kernel function by another, where all of them are changed
already, and which takes a quarter to a third of the processor's time of a test of the backward.

Each operation on a tensor makes a new type, with the product of its shape and its name as text, a
new shape, a wrapped number for each dimension, and a table of all dtypes of NumPy. Most of a
launch's time is spent in these, and a launch has few kinds of tensors.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

# The interpreter's own, None where this Triton's has other parts.
CHANGE: Callable[[Any], Any] | None = None
if hasattr(interpreter, "_LangPatchScope"):
    CHANGE = getattr(interpreter, "_patch_lang", None)


def change_once() -> None:
    """From here on in this process, where this Triton's interpreter has the parts for it."""
    if CHANGE is not None:
        interpreter._patch_lang = changing_once(CHANGE)
        keep_types()


def keep_types() -> None:
    """Types and shapes are made once a kind, from here on in this process, and operands of one
    shape are not broadcast."""
    block_type, tensor, semantic = tl.core.block_type, tl.core.tensor, tl.semantic.TritonSemantic
    make_type, make_tensor = block_type.__init__, tensor.__init__
    broadcast = semantic.broadcast_impl_value
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, dict[str, Any]] = {}

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
            types[key] = dict(self.__dict__)
        else:
            self.__dict__.update(found)

    def tensor_of_kind(self: Any, handle: Any, type: Any) -> None:
        is_block = isinstance(type, block_type)
        key = tuple(type.shape.values) if is_block else ()
        found = shapes.get(key)
        if found is None:
            make_tensor(self, handle, type)
            shapes[key] = {"shape": self.shape, "numel": self.numel}
        else:
            own = self.__dict__
            own.update(found)
            own["handle"], own["type"] = handle, type
            own["dtype"] = type.element_ty if is_block else type.scalar

    def broadcast_others(self: Any, left: Any, right: Any) -> Any:
        a, b = left.type, right.type
        if isinstance(a, block_type) and isinstance(b, block_type):
            if a.shape.values == b.shape.values:
                return left, right
        elif not (isinstance(a, block_type) or isinstance(b, block_type)):
            return left, right
        return broadcast(self, left, right)

    semantic.broadcast_impl_value = broadcast_others
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

    interpreter._get_np_dtype = dtype_of_kind
    block_type.__init__ = type_of_kind
    tensor.__init__ = tensor_of_kind


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

            # The launch that began ends all: calls within it never undo what they changed.
            scope.restore = end
        changed.extend(wanted)
        return scope

    return change_others
