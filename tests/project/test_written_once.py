"""Computations that must have the same bits in several kernels are one function that all call."""

import ast
from collections import Counter
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "gdn_triton" / "chunk"


def calls(tree: ast.AST, name: str) -> list[ast.Call]:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in found if ast.unparse(call.func) == name]


def test_update_of_the_state() -> None:
    """A product that is added to the decayed state, or to its gradient: equations (3) and (8)."""
    decayed: Counter[str] = Counter()
    callers = set()
    for path in sorted(KERNELS.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        name = str(path.relative_to(KERNELS))
        for dot in calls(tree, "tl.dot"):
            decayed[name] += any(calls(added, "tl.exp2") for added in dot.args[2:])
        if calls(tree, "write_values") or calls(tree, "add_values"):
            callers.add(name)
    assert +decayed == {"triton/shared/update.py": 2}
    assert callers == {
        "sharded/affine.py",
        "triton/fused/segments.py",
        "triton/fused/walk.py",
        "triton/gradients/state.py",
        "triton/shared/update.py",
        "triton/steps/state.py",
    }
