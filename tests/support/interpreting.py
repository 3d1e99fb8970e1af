"""Triton's interpreter with less to do: it changes `triton.language` once a launch.

The interpreter changes the builtins of `triton.language` before a launch and puts them back after
it. It also does so at each call of one kernel function by another, where all of them are changed
already, and which takes a quarter to a third of the processor's time of a test of the backward.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from triton.runtime import interpreter

# The interpreter's own, None where this Triton's has other parts.
CHANGE: Callable[[Any], Any] | None = None
if hasattr(interpreter, "_LangPatchScope"):
    CHANGE = getattr(interpreter, "_patch_lang", None)


def change_once() -> None:
    """From here on in this process, where this Triton's interpreter has the parts for it."""
    if CHANGE is not None:
        interpreter._patch_lang = changing_once(CHANGE)


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
