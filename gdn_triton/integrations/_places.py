"""The places where another program reaches an operator, the replacements, and their report."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ABSENT", "Patch", "Patches", "Place", "Status", "Target"]


@dataclass(frozen=True, slots=True)
class Place:
    """A place where a program reaches an op: its dotted `name`, and the `op` of ours that runs
    there, or None and the `reason` why none does."""

    name: str
    op: str | None
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.name}: {f'gdn_triton.{self.op}' if self.op else f'not ours: {self.reason}'}"


@dataclass(frozen=True, slots=True)
class Status:
    """Whether ours are enabled in `program`, its version (None: not installed), and every place
    where it reaches an op that has a counterpart here. `print` it."""

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
    """`name` of `owner`, a module or a class, where our `op` belongs."""

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
    """A replacement at a target: the former object, and ours."""

    target: Target
    before: Any
    ours: Any

    @property
    def in_place(self) -> bool:
        return self.target.now is self.ours


@dataclass(frozen=True, slots=True)
class Patches:
    """All replacements, in their order."""

    made: list[Patch] = field(default_factory=list)

    def at(self, target: Target) -> Iterable[Patch]:
        return (
            p for p in self.made if p.target.owner is target.owner and p.target.name == target.name
        )

    def is_ours(self, target: Target) -> bool:
        return any(patch.in_place for patch in self.at(target))

    def put_at(self, owner: Any, name: str) -> list[Any]:
        """Every replacement that was made at one place, whether it is still there or not."""
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
        """A report for each target. missed: the reason for a target that should be ours and never
        was."""
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
