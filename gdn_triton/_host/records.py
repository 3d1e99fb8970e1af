"""Records of calls: the flags that the operators of the rule share, and functions that build and
flatten records by field names.

A record may hold other records; no two of them have a field of the same name. So all arguments of a
call have one name each, in Python as in the schema of an operator.
"""

import functools
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

_Record = TypeVar("_Record", bound=tuple[Any, ...])
_Fields = ParamSpec("_Fields")


def constructor(cls: Callable[_Fields, _Record]) -> Callable[_Fields, _Record]:
    """A faster constructor of a NamedTuple, for records that every call makes.

    `cls(...)` packs the keywords into a dictionary on the way to `__new__`, which costs 0.35 to
    0.55 us a record. A call of the chunked op makes three, and takes 10 us before its backend runs.
    """
    return types.MethodType(cls.__new__, cls)


class Options(NamedTuple):
    """The flags of the rule in the order of `gdn_triton.chunk_gated_delta_rule`, which documents
    them."""

    use_qk_l2norm_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    state_v_first: bool
    use_gate_in_kernel: bool


new_options = constructor(Options)


def state_needs_grad(needed: Mapping[str, bool]) -> bool:
    """Whether a final state needs a gradient. It depends on every input except q."""
    return any(want for name, want in needed.items() if name != "q")


@functools.cache
def _parts(cls: type[Any]) -> dict[str, type[Any] | None]:
    """The fields of a record, each with the type of the record that it holds, or None."""
    kinds = typing.get_type_hints(cls)
    return {name: kinds[name] if hasattr(kinds[name], "_fields") else None for name in cls._fields}


def made(cls: type[_Record], given: Mapping[str, Any]) -> _Record:
    """Builds the record, and the records inside of it, from the values of all fields by name.
    `given` may have further names."""
    return cls(
        **{
            name: given[name] if part is None else made(part, given)
            for name, part in _parts(cls).items()
        }
    )


def flat(record: Any) -> dict[str, Any]:
    """The fields by name; a record inside is replaced by its own fields."""
    found: dict[str, Any] = {}
    for name, value in record._asdict().items():
        # Test the type first: a compiler knows the type of a symbolic number, but cannot read an
        # attribute of it.
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            found.update(flat(value))
        else:
            found[name] = value
    return found


class Arguments(NamedTuple):
    """The names in an operator's schema, in order, and which of them are tensors."""

    names: tuple[str, ...]
    tensors: tuple[str, ...]

    def named(self, values: Iterable[Any]) -> dict[str, Any]:
        return dict(zip(self.names, values, strict=True))

    def ordered(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(given[name] for name in self.names)


def arguments_of(schema: str) -> Arguments:
    """schema: as in `Tensor(a!) state, Tensor? out, float? scale`."""
    kinds = {name: kind for kind, name in (part.split(" ") for part in schema.split(", "))}
    tensors = tuple(name for name, kind in kinds.items() if kind.startswith("Tensor"))
    return Arguments(tuple(kinds), tensors)
