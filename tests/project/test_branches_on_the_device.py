"""Kernels assign records in branches on the device so that Triton compiles them for every dtype.

Triton joins what the two sides of a branch on a device value made of a name, and refuses the kernel
where the types differ, used later or not. A record has the types of its pointers, which are those
of a call's tensors, or None. So calls of some dtypes would compile and calls of others would not.
Here a record that is made in such a branch, or in a loop, has a name that no other part of its
function assigns.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "gdn_triton"
Function = ast.FunctionDef


def trees() -> dict[str, ast.Module]:
    """By path, every file that has functions of Triton, or records for them."""
    found = {str(p.relative_to(PACKAGE)): p.read_text("utf-8") for p in PACKAGE.rglob("*.py")}
    return {name: ast.parse(text) for name, text in sorted(found.items()) if "triton" in text}


def records(tree: ast.AST) -> set[str]:
    """The names of the NamedTuples of a file."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {cls.name for cls in classes if "NamedTuple" in map(ast.unparse, cls.bases)}


def kernels(tree: ast.AST) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function) and any(
            "triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list
        ):
            yield node


def names_of_constants(function: Function) -> set[str]:
    """Names of compile-time values: annotated as such, in the signature or where assigned."""
    named = [node for node in ast.walk(function) if isinstance(node, (ast.arg, ast.AnnAssign))]
    return {
        node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
        for node in named
        if node.annotation is not None and ast.unparse(node.annotation) == "tl.constexpr"
    }


def is_constant(test: ast.expr, constants: set[str]) -> bool:
    """Whether Triton knows the value of a test: literals, names of compile-time values and whether
    a name is None, and what is made of such alone. Anything else counts as the device's."""
    if isinstance(test, ast.Constant):
        return True
    if isinstance(test, ast.Name):
        return test.id in constants
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Is, ast.IsNot)):
        return True
    if isinstance(test, (ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Tuple)):
        inside = [node for node in ast.iter_child_nodes(test) if isinstance(node, ast.expr)]
        return all(is_constant(node, constants) for node in inside)
    return False


def blocks(function: Function) -> Iterator[list[ast.stmt]]:
    """The sides of branches on values of the device, and the bodies of loops."""
    constants = names_of_constants(function)
    for node in ast.walk(function):
        if isinstance(node, (ast.For, ast.While)):
            yield node.body
        elif isinstance(node, ast.If) and not is_constant(node.test, constants):
            yield from (node.body, node.orelse)


def assigned(part: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Names, each with the node that assigns it."""
    for node in ast.walk(part):
        if isinstance(node, ast.arg):
            yield node.arg, node
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node


def records_made(part: ast.AST, classes: set[str]) -> Iterator[str]:
    """The names to which a record, or a tuple, is assigned."""
    for node in ast.walk(part):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        made = [node.value, *ast.walk(node.value)]
        calls = {ast.unparse(one.func) for one in made if isinstance(one, ast.Call)}
        if isinstance(node.value, ast.Tuple) or calls & classes:
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def shared_names(function: Function, classes: set[str]) -> set[str]:
    """Names of records made in a block of `blocks` that are assigned outside of it too."""
    everywhere = list(assigned(function))
    shared = set()
    for block in blocks(function):
        made = {name for part in block for name in records_made(part, classes)}
        inside = {id(node) for part in block for _, node in assigned(part)}
        shared |= {name for name, node in everywhere if name in made and id(node) not in inside}
    return shared


def test_records_made_in_a_branch_have_names_of_their_own() -> None:
    files = trees()
    classes = {name for tree in files.values() for name in records(tree)}
    functions = [(path, f) for path, tree in files.items() for f in kernels(tree)]
    made = [name for _, f in functions for name in records_made(f, classes)]
    assert len(functions) > 50 and len(made) > 10, "the kernels, or their records, are elsewhere"
    found = {f"{path}: {f.name}": shared_names(f, classes) for path, f in functions}
    assert not {place: names for place, names in found.items() if names}


REUSED = """
@triton.jit
def kernel(h0, dht, ends, WALKS: tl.constexpr, HAS_DHT: tl.constexpr):
    {before}
    if {test}:
        if HAS_DHT:
            x = Memory(dht, 1)
    elif WALKS != "back":
        {other} = Memory(h0, 1)
"""


@pytest.mark.parametrize(
    ("before", "test", "other", "found"),
    [
        ("pass", 'WALKS != "forward" and ends', "x", {"x"}),
        ("pass", 'WALKS != "forward" and ends', "y", set()),
        ("x = Memory(h0, 1)", "ends", "y", {"x"}),
        ("x = h0", "ends > 0", "y", {"x"}),
        ("for x in range(ends): pass", "tl.load(ends)", "y", {"x"}),
        # Triton leaves out the side that is not taken.
        ("x = Memory(h0, 1)", 'WALKS != "forward" and HAS_DHT', "x", set()),
        ("x = Memory(h0, 1)", "h0 is not None", "x", set()),
    ],
)
def test_what_is_found(before: str, test: str, other: str, found: set[str]) -> None:
    tree = ast.parse(REUSED.format(before=before, test=test, other=other))
    (kernel,) = kernels(tree)
    assert shared_names(kernel, {"Memory"}) == found
