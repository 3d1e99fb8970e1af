"""Replacements of another program's functions by our ops: the places, the replacements, and a
report."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ABSENT", "Patch", "Patches", "Place", "Status", "Target"]


@dataclass(frozen=True, slots=True)
class Place:
    """A place where a program reaches an op: its dotted `name`, and the `op` of ours that runs
    there, or None and the `reason` why our op does not run there."""

    name: str
    op: str | None
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.name}: {f'gdn_triton.{self.op}' if self.op else f'not ours: {self.reason}'}"


@dataclass(frozen=True, slots=True)
class Status:
    """Whether our ops are enabled in `program`, the program's version (None: not installed), and
    every place where the program reaches an op that this package also has. `print` it."""

    program: str
    enabled: bool
    version: str | None
    places: tuple[Place, ...]

    def __str__(self) -> str:
        state = "enabled" if self.enabled else "disabled"
        lines = [f"gdn_triton is {state} in {self.program} {self.version or '(not installed)'}"]
        return "\n".join([*lines, *(f"  {place}" for place in self.places)])


ABSENT = object()


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Attribute `name` of `owner`, a module or a class, which our `op` is to replace."""

    owner: Any
    name: str
    op: str

    @property
    def path(self) -> str:
        if isinstance(self.owner, type):
            return f"{self.owner.__module__}.{self.owner.__qualname__}.{self.name}"
        return f"{self.owner.__name__}.{self.name}"

    @property
    def now(self) -> Any:
        return vars(self.owner).get(self.name, ABSENT)


@dataclass(frozen=True, slots=True, eq=False)
class Patch:
    """A replacement at a target: the former object, and our object."""

    target: Target
    before: Any
    ours: Any

    @property
    def in_place(self) -> bool:
        return self.target.now is self.ours


@dataclass(frozen=True, slots=True)
class Patches:
    """All replacements, in the order in which they were made."""

    made: list[Patch] = field(default_factory=list)

    def at(self, target: Target) -> Iterable[Patch]:
        return (
            p for p in self.made if p.target.owner is target.owner and p.target.name == target.name
        )

    def is_ours(self, target: Target) -> bool:
        return any(patch.in_place for patch in self.at(target))

    def put_at(self, owner: Any, name: str) -> list[Any]:
        """Returns every replacement that was made at one place, including those that have been
        replaced since."""
        return [p.ours for p in self.made if p.target.owner is owner and p.target.name == name]

    def put(self, target: Target, ours: Any) -> None:
        self.made.append(Patch(target, target.now, ours))
        setattr(target.owner, target.name, ours)

    def take_back(self) -> None:
        """Restores the former objects, except where another replacement has been made since."""
        for patch in reversed(self.made):
            if not patch.in_place:
                continue
            if patch.before is ABSENT:
                delattr(patch.target.owner, patch.target.name)
            else:
                setattr(patch.target.owner, patch.target.name, patch.before)

    def places(self, targets: Iterable[Target], enabled: bool, missed: str) -> Iterator[Place]:
        """Returns a report for each target. missed: the reason for a target at which our op should
        run but was never put."""
        for target in targets:
            patches = list(self.at(target))
            if any(patch.in_place for patch in patches):
                yield Place(target.path, target.op)
            elif not enabled and (not patches or patches[0].before is target.now):
                yield Place(target.path, None, "not enabled.")
            elif patches:
                reason = "replaced by another since `enable`, and left alone."
                yield Place(target.path, None, reason)
            else:
                yield Place(target.path, None, missed)
