"""README and docs against the code: every path, name, link, snippet and command that they show."""

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "CONTRIBUTING.md",
    *sorted(path for name in ("csrc", "examples") for path in (ROOT / name).rglob("*.md")),
]
TOP = (".ci", "benchmarks", "csrc", "docs", "examples", "gdn_triton", "hub", "tests")
CODE = [
    ROOT / "setup.py",
    *sorted(path for name in ("gdn_triton", "benchmarks") for path in (ROOT / name).rglob("*.py")),
]
MARKERS = ("<!-- main command -->", "<!-- test command -->")


class Block(NamedTuple):
    document: Path
    line: int  # of the opening fence, from 1
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(document: Path) -> list[Block]:
    """The fenced blocks of a document."""
    found: list[Block] = []
    lines: list[str] = []
    opened, language = 0, ""
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            if opened:
                found.append(Block(document, opened, language, "\n".join(lines) + "\n"))
                opened = 0
            else:
                opened, language, lines = number, line[3:].strip(), []
        elif opened:
            lines.append(line)
    assert not opened, f"{document.name}:{opened} is never closed"
    return found


def prose(document: Path) -> str:
    """A document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.S | re.M)


def code_spans(document: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(document))


ALL_BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]
each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


def looks_like_a_path(text: str) -> bool:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", text):
        return False
    in_tree = "/" in text and text.split("/")[0] in TOP
    return in_tree or text.endswith((".cpp", ".cu", ".cuh", ".h", ".md", ".py", ".toml"))


@each_document
def test_paths_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = {span for span in code_spans(document) if looks_like_a_path(span)}
    # Fenced blocks too: commands, and the arrows of design.md.
    named |= set(re.findall(rf"(?<![\w./])(?:{'|'.join(map(re.escape, TOP))})/[\w./-]*[\w/]", text))
    missing = [
        name
        for name in sorted(named)
        if not (ROOT / name).exists()
        and not (document.parent / name).exists()
        # A bare name is that of some file.
        and ("/" in name or not any(name == path.name for path in (*CODE, *DOCUMENTS)))
    ]
    assert not missing, missing


@each_document
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(document))
    local = [target.split("#")[0] for target in targets if not re.match(r"[a-z]+:", target)]
    missing = [target for target in local if target and not (document.parent / target).exists()]
    assert not missing, missing


@each_document
def test_no_text_reads_as_a_tag(document: Path) -> None:
    """The site leaves out words in angle brackets as an unknown tag; in a code span they stay."""
    text = re.sub(r"`[^`\n]+`", "", prose(document))
    assert not re.findall(r"<[A-Za-z][^>]*>", text)


def resolves(dotted: str) -> bool:
    """Whether a dotted name of the package is a module, or an attribute of one."""
    parts = dotted.split(".")
    for n in range(len(parts), 0, -1):
        module = ".".join(parts[:n])
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            continue
        if spec is None:
            continue
        value = importlib.import_module(module)
        for part in parts[n:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


@each_document
def test_names_of_the_package_exist(document: Path) -> None:
    dotted = {
        match
        for span in code_spans(document)
        for match in re.findall(r"\bgdn_triton(?:\.[A-Za-z_]\w*)+", span)
        if not match.endswith(".py")
    }
    unknown = sorted(name for name in dotted if not resolves(name))
    assert not unknown, unknown


@pytest.mark.parametrize(
    "block", [block for block in ALL_BLOCKS if block.language == "python"], ids=str
)
def test_python_runs(block: Block, tmp_path: Path) -> None:
    # A process of its own, without what the suite sets, as the reader would run it.
    unset = ("GDN_BACKEND", "TRITON_INTERPRET")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", block.text],
        cwd=tmp_path,
        env={**kept, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


SHELL = [block for block in ALL_BLOCKS if block.language in ("bash", "console", "sh", "shell")]


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_shell_parses(block: Block) -> None:
    assert block.language == "bash", "one name for shell blocks"
    done = subprocess.run(
        ["bash", "-n"], input=block.text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for module in re.findall(r"\bpython3? -m ([\w.]+)", block.text):
        assert importlib.util.find_spec(module) is not None, f"there is no module {module}"
    for script in re.findall(r"\bpython3? ([\w/]+\.py)", block.text):
        assert (ROOT / script).is_file(), f"there is no {script}"


def test_blocks_say_their_language() -> None:
    """One without is neither run nor parsed."""
    assert not [str(block) for block in ALL_BLOCKS if not block.language]


@pytest.mark.parametrize("marker", MARKERS)
def test_marked_command(marker: str) -> None:
    """One line each, under its marker: what `.ci/run` looks for."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(rf"^{re.escape(marker)}\n```bash\n(.*)\n```$", text, re.M)
    assert len(found) == 1
    assert found[0].startswith("python3 -m venv ")


def test_ci_runs_the_test_command() -> None:
    """`.ci/run` with a bash that only prints what it is asked to run."""
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    command = next(line for line in blocks(ROOT / "README.md") if "-m pytest" in line.text).text
    shown, replaced = re.subn(r"^bash .*$", "exit 0", text, flags=re.M)
    assert replaced == 1
    shown = shown.replace('"$(dirname "${BASH_SOURCE[0]}")/.."', f'"{ROOT}"')
    done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True)
    assert done.stdout == command


VARIABLE = r"\b(?:GDN|TRITON)_[A-Z]+(?:_[A-Z]+)*\b"


@each_document
def test_environment_variables_exist(document: Path) -> None:
    """So do the macros of a build of csrc."""
    sources = (x for ending in ("cu", "cuh", "h") for x in ROOT.glob(f"csrc/**/*.{ending}"))
    code = "\n".join(path.read_text(encoding="utf-8") for path in (*CODE, *sources))
    named = set(re.findall(VARIABLE, document.read_text(encoding="utf-8")))
    unknown = sorted(name for name in named if not re.search(rf"\b{name}\b", code))
    assert not unknown, unknown


def test_every_environment_variable_has_a_row() -> None:
    rows = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    read: set[str] = set()
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                read |= set(re.findall(r"^GDN_[A-Z_]+$", node.value))
    assert "GDN_BACKEND" in read
    missing = sorted(name for name in read if f"| `{name}` |" not in rows)
    assert not missing, missing


def jit_kernels(path: Path) -> set[str]:
    """The Triton functions of a file that are launched, which by our names end in _kernel."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }


def test_kernels_have_one_row_each() -> None:
    text = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+_kernel)` \| `([\w/]+\.py)` \|", text, re.M)
    files = sorted((ROOT / "gdn_triton").rglob("*.py"))
    kernels = {(name, str(path.relative_to(ROOT))) for path in files for name in jit_kernels(path)}
    assert len(kernels) >= 7
    assert sorted(rows) == sorted(kernels)


def test_the_index_links_every_document() -> None:
    index = ROOT / "docs" / "index.md"
    text = index.read_text(encoding="utf-8")
    pages = (ROOT / "docs").rglob("*.md")
    names = [path.relative_to(index.parent).as_posix() for path in pages if path != index]
    missing = [name for name in names if f"({name})" not in text]
    assert not missing, missing
    assert "(docs/index.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


# Words of a page without code blocks and generated tables. A longer page has several subjects.
MOST_WORDS = {
    "README.md": 600,
    "csrc/sm90/README.md": 1000,
    "csrc/sm90/backward/README.md": 1000,
    "docs/backward.md": 1600,
    "docs/hopper.md": 1400,
    "docs/planning.md": 700,
    "docs/tried.md": 2000,
}


@pytest.mark.parametrize("name", MOST_WORDS)
def test_pages_are_short(name: str) -> None:
    text = re.sub(
        r"<!-- benchmarks: \w+ -->.*?<!-- benchmarks end -->", "", prose(ROOT / name), flags=re.S
    )
    words = [word for word in text.split() if re.search(r"\w", word)]
    assert len(words) <= MOST_WORDS[name]


# Words of prose in all pages together, so that one subject is not told twice.
MOST_WORDS_OF_ALL = 18_000


def words_of_prose(document: Path) -> int:
    """Words of a page without code blocks and rows of tables."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.S)
    return sum(len(line.split()) for line in text.splitlines() if not line.startswith("|"))


def test_all_pages_are_short_together() -> None:
    words = {str(path.relative_to(ROOT)): words_of_prose(path) for path in DOCUMENTS}
    assert sum(words.values()) <= MOST_WORDS_OF_ALL, words


RECORDS = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))


def test_documents_are_made_from_the_records() -> None:
    """`python -m benchmarks.page` on the records of the repository changes no page."""
    from benchmarks.page import DOCUMENTS as MARKED
    from benchmarks.page import documents, rows_page

    made = documents(RECORDS)
    changed = [path for path, text in made.items() if path.read_text("utf-8") != text]
    assert not changed, f"run python -m benchmarks.page: {changed}"
    marked = {str(path.relative_to(ROOT)) for path in DOCUMENTS if "<!-- benchmarks: " in
              path.read_text(encoding="utf-8")}  # fmt: skip
    assert marked == set(MARKED)
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for path in RECORDS:
        assert f"`benchmarks/results/{path.name}`" in page
        assert f"The records are in `{path.name}`" in rows_page(path)


def test_every_record_is_shown() -> None:
    """A file whose rows a later run has replaced, and that no page names, says nothing."""
    from benchmarks.page import all_ratios

    ratios = all_ratios(RECORDS)
    cited = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    for path in RECORDS:
        rest = all_ratios(other for other in RECORDS if other != path)
        name = f"benchmarks/results/{path.name}"
        assert rest != ratios or cited.count(name) > 1, f"{path.name} is shown nowhere"


def test_commands_of_records_are_of_no_machine() -> None:
    """A command names no folder of the machine that ran it: who runs it again has others."""
    for path in RECORDS:
        for line in path.read_text(encoding="utf-8").splitlines():
            command = json.loads(line).get("command", "")
            absolute = [word for word in shlex.split(command) if word.startswith(("/", "~"))]
            assert not absolute, f"{path.name}: {command}"


def test_pictures_are_drawn_by_their_script() -> None:
    """`python docs/pictures.py` and `python -m docs.decode_pictures` change no file, and a page
    shows each picture."""
    from docs import decode_pictures
    from docs.pictures import ASSETS, PICTURES

    pages = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    for name, draw in (PICTURES | decode_pictures.PICTURES).items():
        assert (ASSETS / name).read_text(encoding="utf-8") == draw(), name
        assert f"(assets/{name})" in pages


def test_benchmark_plots_are_made_from_the_records() -> None:
    """Each plot says which numbers it was drawn from, and the page shows it."""
    from benchmarks.page import all_ratios
    from benchmarks.plot import ASSETS, digest, plots

    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    made = plots(all_ratios(RECORDS))
    assert len(made) == 3
    for name, data in made.items():
        assert f"(assets/{name})" in page
        text = (ASSETS / name).read_text(encoding="utf-8")
        assert digest(data) in text, f"{name} is of other records: run benchmarks.page"
