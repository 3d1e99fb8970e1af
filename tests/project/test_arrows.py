"""Which module imports which: the parts of the package, and the arrows between them.

Every import is read from the text, those inside of functions and under TYPE_CHECKING too. A module
is named without the package: `chunk.api`. A part is a folder or a module directly in the package.
"""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from trees import files_shown

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "gdn_triton"
TOP = "gdn_triton"  # the package's own `__init__.py`

# A part may import from itself and from the parts that are listed with it, each of which has its
# line above: so there is no circle of parts.
PARTS = {
    "constants": "",
    "reference": "constants",
    "_host": "constants",
    "_triton": "_host constants",
    "fast": "",
    "_ranks": "_host",
    "prep": "reference _host _triton constants",
    "norm": "reference _host _triton constants",
    "chunk": "_ranks reference fast _host _triton constants",
    "recurrent": "reference _host _triton constants",
    "conv": "prep reference _host _triton constants",
    "step": "recurrent conv norm _host _triton constants",
    "explanations": "step chunk recurrent conv prep norm _host",
    "warming": "chunk recurrent _host constants",
    "distributed": "chunk _ranks",
    "layers": "step chunk recurrent conv norm distributed _host",
    "integrations": "explanations warming step chunk recurrent conv prep norm _host constants",
    TOP: "explanations warming step chunk recurrent conv prep norm _host",
    "demo": f"{TOP} reference constants",
    "__main__": "demo",
}
OPS = ("chunk", "recurrent", "conv", "prep", "norm")

# The layer and the adapters call public functions.
OUTSIDE = ("layers", "integrations")


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or TOP


@cache
def modules() -> dict[str, Path]:
    return {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(path: Path) -> set[str]:
    """The modules of the package that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            # A module of a package, or a name of a module.
            names = [
                f"{node.module}.{alias.name}"
                if f"{node.module}.{alias.name}".removeprefix(f"{TOP}.") in modules()
                else f"{node.module}"
                for alias in node.names
            ]
        else:
            continue
        found |= {n.removeprefix(f"{TOP}.") for n in names if n.split(".")[0] == TOP}
    return found


@cache
def arrows() -> frozenset[tuple[str, str]]:
    return frozenset((a, b) for a, path in modules().items() for b in imports(path))


def part(module: str) -> str:
    return module.split(".")[0]


def is_kernel_side(module: str) -> bool:
    """In the folder or the file of a Triton backend, or in what they share. A `support` is host
    code: it judges problems, and is asked where there is no Triton."""
    names = module.split(".")
    return ("triton" in names and names[-1] != "support") or names[0] == "_triton"


def test_every_import_is_of_a_module() -> None:
    assert len(arrows()) > 200
    assert {b for _, b in arrows()} <= set(modules())
    # Nothing is imported by a string, which would not be seen here.
    for name, path in modules().items():
        text = path.read_text(encoding="utf-8")
        assert not re.search(rf"(import_module|__import__)\(f?[\"']{TOP}", text), name


def test_einops_is_off_the_host_path() -> None:
    """The specification, the layer and the demonstration name axes by einops. A call's host code,
    from the public function to the kernel, does not: each einops call takes microseconds."""
    users = {
        name
        for name, path in modules().items()
        if re.search(r"^\s*(from|import) einops\b", path.read_text(encoding="utf-8"), re.M)
    }
    assert {part(name) for name in users} == {"reference", "layers", "demo"}


def test_parts_are_those_of_the_tree() -> None:
    assert {part(module) for module in modules()} == set(PARTS)
    for i, (name, others) in enumerate(PARTS.items()):
        assert set(others.split()) <= set(list(PARTS)[:i]), f"{name} names a part below it"


def test_arrows_between_parts() -> None:
    against = {
        (a, b) for a, b in arrows() if part(a) != part(b) and part(b) not in PARTS[part(a)].split()
    }
    assert against == set(), "arrows that the layout does not allow"


def test_the_picture_shows_the_arrows() -> None:
    """docs/assets/layers.svg has allowed arrows only, and the others of PARTS follow from them."""
    from docs.pictures import LAYERS, OPERATORS

    groups = {**{name: (name,) for name in PARTS}, "operators": OPERATORS}
    assert sorted(OPERATORS) == sorted(OPS)
    below: dict[str, set[str]] = {name: set() for name in PARTS}
    for a, b in LAYERS:
        pairs = [(x, y) for x in groups[a] for y in groups[b]]
        assert any(y in PARTS[x].split() for x, y in pairs), f"{a} does not import {b}"
        for x, y in pairs:
            below[x].add(y)
    for name, others in PARTS.items():  # a part comes after the parts that it imports
        below[name] |= {part for other in below[name] for part in below[other]}
        assert set(others.split()) <= below[name], f"the picture lacks imports of {name}"


def test_no_circle_of_files() -> None:
    graph: dict[str, set[str]] = {module: set() for module in modules()}
    for a, b in arrows():
        graph[a].add(b)
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError with the circle
    assert len(order) == len(graph)


def test_an_op_knows_no_other_but_by_name() -> None:
    """The convolution runs the preparation, and there is no other arrow between ops."""
    between = {(part(a), part(b)) for a, b in arrows() if {part(a), part(b)} <= set(OPS)}
    assert {(a, b) for a, b in between if a != b} == {("conv", "prep")}


def test_the_specification_imports_constants_only() -> None:
    seen = {b for a, b in arrows() if part(a) == "reference" and part(b) != "reference"}
    assert seen == {"constants"}


def test_kernels_know_neither_calls_nor_the_library() -> None:
    host = re.compile(r"\.(api|run|\w*operators|plans|backends|support|validation\w*)$")
    seen = {b for a, b in arrows() if is_kernel_side(a)}
    assert "chunk.problem" in seen
    assert not {b for b in seen if host.search(b) or {"fast", "cuda"} & set(b.split("."))}
    assert not {(a, b) for a, b in arrows() if part(a) == "fast" and is_kernel_side(b)}


def test_layers_and_integrations_call_public_functions() -> None:
    """They import the modules of the operators from which the package takes its public names."""
    public = {b for a, b in arrows() if a == TOP and part(b) in OPS}
    assert {"chunk.api", "recurrent.api", "recurrent.window"} <= public
    inside = {
        (a, b) for a, b in arrows() if part(a) in OUTSIDE and part(b) in OPS and b not in public
    }
    assert inside == set()


def test_folders_import_nothing_themselves() -> None:
    """Importing one module of a folder must not import the others."""
    closed = {TOP, "reference", "distributed", "fast", "layers"}  # their names are public
    closed |= {f"integrations.{name}" for name in ("vllm", "sglang", "flashinfer")}
    packages = {name for name, path in modules().items() if path.name == "__init__.py"}
    assert closed < packages
    assert not {a for a, _ in arrows() if a in packages - closed}


RECORD_OF_MANY = 6  # fields


def records() -> set[str]:
    """The classes of many fields: NamedTuples and dataclasses, by name."""
    found = set()
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            above = [ast.unparse(x) for x in (*node.bases, *node.decorator_list)]
            fields = sum(isinstance(x, ast.AnnAssign) for x in node.body)
            if fields >= RECORD_OF_MANY and re.search("NamedTuple|dataclass", " ".join(above)):
                found.add(node.name)
    return found


def constructors() -> set[str]:
    """The names that the modules give what `constructor` returns."""
    return {
        ast.unparse(target)
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("constructor(")
        for target in node.targets
    }


def test_records_are_made_by_the_names_of_their_fields() -> None:
    """Two tensors, or two flags, that changed places would have the right types. Inside of a
    kernel records are made by position, and the specification has its own ways."""
    many = records()
    assert {"Inputs", "ChunkCall", "PrefillCall", "Problem", "Operands"} <= many
    makers = constructors()
    assert {"new_options", "new_inputs", "new_chunk_call", "new_operands"} <= makers
    kernels = {"conv.triton.kernel", "conv.triton.update"}
    for name, path in modules().items():
        if name in kernels or part(name) == "reference":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in many | makers:
                assert not node.args, f"{name}, line {node.lineno}: by position"


def test_design_shows_the_tree() -> None:
    """The first block of docs/design.md."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    block = re.findall(r"^```text\n(gdn_triton/.*?)^```$", text, re.S | re.M)[0]
    shown = files_shown(block)
    files = [f"gdn_triton/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*.py")]
    # A folder's own file is meant by its line.
    assert sorted(shown) == sorted(name for name in files if not name.endswith("/__init__.py"))
