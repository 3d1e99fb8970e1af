"""`.ci/run`: its two parts, the Tritons that they run with, and the page that names them."""

import os
import re
import subprocess
from importlib.metadata import requires
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from gdn_triton._host.backends import MIN_TRITON

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "tests" / "each_triton.txt"
RUN = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
VERSIONS = re.findall(r"^for version in (.*); do$", RUN, re.M)[0].split()

KERNELS = [
    path
    for path in (ROOT / "gdn_triton").rglob("*.py")
    if re.search(r"^def \w+_kernel\(", path.read_text(encoding="utf-8"), re.M)
]


def need(start: str) -> SpecifierSet:
    """The versions of setup.py's first requirement that begins so."""
    found = re.findall(rf'"({start}[^"]*)"', (ROOT / "setup.py").read_text(encoding="utf-8"))
    return Requirement(found[0]).specifier


def readme_torch() -> str:
    found = re.findall(r"torch==([\d.]+) -e", (ROOT / "README.md").read_text(encoding="utf-8"))
    return str(found[0])


def test_tritons_of_the_short_part() -> None:
    """The oldest one of setup.py, and the one that this torch pins, where its build pins one."""
    oldest, own = (Version(x) for x in VERSIONS)
    assert str(need("triton>=")) == f">={MIN_TRITON}" and oldest == Version(MIN_TRITON)
    pins = [x for x in map(Requirement, requires("torch") or ()) if x.name == "triton"]
    if Version(torch.__version__).release == Version(readme_torch()).release:
        assert all(x.specifier.contains(own) for x in pins)


def test_versions_of_the_page() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, rows = text.split(
        "| tests | torch | Triton | numpy | transformers |\n|---|---|---|---|---|\n"
    )
    table = [re.split(r" \| ", row.strip("| ")) for row in rows.split("\n\n")[0].splitlines()]
    tritons = [Version(re.findall(r"^[\d.]+", row[2])[0]) for row in table]
    assert [row[0] for row in table] == [
        "all",
        "`tests/each_triton.txt`",
        "`tests/each_triton.txt`",
    ]
    assert tritons[1:] == [Version(x) for x in reversed(VERSIONS)]
    assert tritons == sorted(tritons, reverse=True)
    for _, of_torch, _, of_numpy, of_transformers in table:
        assert of_torch == readme_torch()
        assert need("torch>=").contains(of_torch)
        assert need("numpy<").contains(of_numpy)
        assert need("transformers>=").contains(of_transformers)


def test_short_part_is_of_every_folder_with_kernels() -> None:
    lines = LIST.read_text(encoding="utf-8").splitlines()
    folders = {x.relative_to(ROOT / "gdn_triton").parts[0] for x in KERNELS}
    assert folders >= {"chunk", "conv", "norm", "prep", "recurrent"}
    missing = [x for x in folders if not any(line.startswith(f"tests/{x}/") for line in lines)]
    assert not missing
    assert len(set(lines)) == len(lines)
    for line in lines:
        path, _, test = line.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not test or f"\ndef {test.partition('[')[0]}(" in text, line


@pytest.mark.parametrize("failing", ["", "whole", *VERSIONS])
def test_every_part_decides(tmp_path: Path, failing: str) -> None:
    """The order of the parts, with programs that only note their call. A part that fails is the
    last one."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text(RUN, encoding="utf-8")
    bin = tmp_path / ".venv" / "bin"
    bin.mkdir(parents=True)
    readme = "<!-- test command -->\n```bash\n.venv/bin/python whole\n```\n"
    (tmp_path / "README.md").write_text(readme, encoding="utf-8")
    programs = {
        "pip": 'echo "pip $*"',
        "python": 'echo "tests with ${PYTHONPATH##*/}: $*"\n'
        f'[[ "$PYTHONPATH $*" != *"{failing or "never"}"* ]]',
    }
    for name, text in programs.items():
        (bin / name).write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
        (bin / name).chmod(0o755)
    done = subprocess.run(
        ["bash", tmp_path / ".ci" / "run"],
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == (not failing), done.stderr
    ran = re.findall(r"^tests with ([^:]*): (.*)$", done.stdout, re.M)
    expected = [("", "whole")]
    for version in VERSIONS:
        expected.append(
            (f"triton-{version}", "-m pytest -n 2 --dist worksteal @tests/each_triton.txt")
        )
    names = ["whole", *VERSIONS]
    assert ran == expected[: names.index(failing) + 1 if failing else None]
    if not failing:
        assert done.stdout.count("pip install -q --no-deps") == len(VERSIONS)
