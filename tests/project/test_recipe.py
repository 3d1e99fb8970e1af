"""CONTRIBUTING.md, "Add an operator", followed for a small operator in a copy of the repository.

`tests/support/new_operator` has the files of `gdn_triton.scale_channels`, a product with a weight
for each channel. `STEPS` places them, and changes the other files that the recipe names, step by
step. A file that the recipe forgets leaves a test of the copy failing; a file that it names and
that needs no change is missing from `STEPS`.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "tests" / "support" / "new_operator"

Edit = tuple[str, str]  # a text that stands in the file once, and what takes its place


def after(text: str, more: str) -> Edit:
    return text, text + more


def before(text: str, more: str) -> Edit:
    return text, more + text


PARTS = '"explanations": "step chunk recurrent conv prep norm'
FUNCTION = """    Function(
        "scale",
        "scale_channels",
        gdn_triton.scale_channels,
        lambda batch: {"x": torch.randn(*batch.lead, 4), "weight": torch.randn(4)},
        ROWS,
        gradients=("reference",),
    ),
"""
ANY_CALL = """    "scale": Call(
        gdn_triton.scale_channels,
        lambda: {"x": torch.randn(B, T, V), "weight": torch.randn(V)},
        lambda x: {"y": gdn_triton.scale_channels(**x)},
    ),
"""
SECOND = """    "scale_channels": Differentiable(
        gdn_triton.scale_channels,
        lambda: {"x": torch.randn(1, T, K, dtype=FP64), "weight": torch.randn(K, dtype=FP64)},
        None,
        operators=names("scale_channels"),
    ),
"""
# By step: each name in the recipe, with the file of the copy, and where it comes from.
STEPS: tuple[dict[str, tuple[str, str | tuple[Edit, ...]]], ...] = (
    {
        f"{name}.py": (f"gdn_triton/scale/{name}.py", f"{name}.py")
        for name in ("api", "problem", "validation", "backends", "operators", "triton")
    }
    | {"__init__.py": ("gdn_triton/scale/__init__.py", "__init__.py")},
    {"gdn_triton/reference": ("gdn_triton/reference/scale.py", "reference.py")},
    {
        "gdn_triton/__init__.py": (
            "gdn_triton/__init__.py",
            (
                before(
                    "from gdn_triton.step.api",
                    "from gdn_triton.scale.api import scale_channels\n",
                ),
                before('    "warmup",\n', '    "scale_channels",\n'),
            ),
        ),
        "gdn_triton/explanations.py": (
            "gdn_triton/explanations.py",
            (
                before(
                    "from gdn_triton.step.api",
                    "from gdn_triton.scale.api import scale_channels\n"
                    "from gdn_triton.scale.backends import SCALE\n"
                    "from gdn_triton.scale.validation import validate_scale\n",
                ),
                after(
                    "lambda given: validate_norm(**given)),\n",
                    "    scale_channels: (SCALE, lambda given: validate_scale(**given)),\n",
                ),
            ),
        ),
        "docs/reference.md": (
            "docs/reference.md",
            (after("::: gdn_triton.rms_norm_gated\n", "\n::: gdn_triton.scale_channels\n"),),
        ),
        "docs/design.md": (
            "docs/design.md",
            (
                before(
                    "  distributed/             ",
                    "  scale/                   a product with a weight of each channel\n"
                    "    api.py operators.py backends.py problem.py validation.py triton.py\n",
                ),
                after("prep.py norm.py", " scale.py"),
            ),
        ),
        "docs/kernels.md": (
            "docs/kernels.md",
            (
                before(
                    "| `recurrent_fwd_kernel`",
                    "| `scale_fwd_kernel` | `gdn_triton/scale/triton.py` | the product |\n",
                ),
            ),
        ),
        "docs/pictures.py": (
            "docs/pictures.py",
            (
                after('"norm", "conv", "prep"', ', "scale"'),
                after('"conv": 450, "prep": 580}),\n', '        214: ("a", {"scale": 60}),\n'),
            ),
        ),
        "CHANGELOG.md": (
            "CHANGELOG.md",
            (before("- `explain`, `explain_call`", "- `scale_channels`: the product.\n"),),
        ),
        "tests/project/test_arrows.py": (
            "tests/project/test_arrows.py",
            (
                before(f"    {PARTS}", '    "scale": "reference _host _triton constants",\n'),
                after(PARTS, " scale"),
                after('TOP: "explanations warming step chunk recurrent conv prep norm', " scale"),
                after('"conv", "prep", "norm"', ', "scale"'),
            ),
        ),
    },
    {
        "tests/support/function_cases.py": (
            "tests/support/function_cases.py",
            (before('    Function(\n        "layer",\n', FUNCTION),),
        ),
        "tests/support/every_call.py": (
            "tests/support/every_call.py",
            (before('    "norm, gradients": training', ANY_CALL),),
        ),
        "tests/host/test_second_derivatives.py": (
            "tests/host/test_second_derivatives.py",
            (before('    "GatedDeltaNet": Differentiable(', SECOND),),
        ),
    },
    {"tests": ("tests/scale/test_scale.py", "checks.py")},
)
# Files to which the recipe points, and which a new operator does not change.
EXAMPLES = {"gdn_triton/norm/", "reference.py", "tests/functions"}

# The tests that the recipe promises, of all operators or of this one.
FILES = (
    *("tests/scale", "tests/functions", "tests/host/test_far_strides.py"),
    *("tests/host/test_second_derivatives.py", "tests/host/test_explain_call.py"),
    *("tests/project/test_layout.py", "tests/project/test_arrows.py", "tests/project/test_docs.py"),
    *("tests/project/test_release.py", "tests/project/test_quality.py"),
)
CHOSEN = " or ".join(
    (
        *("scale", "every_export", "is_here", "function_is_called", "its_functions"),
        *("test_layout", "test_arrows", "kernels_have", "pictures", "paths_exist"),
        *("reference_shows", "test_lint", "test_types"),
    )
)


def steps() -> list[set[str]]:
    """The paths that each step of the recipe names."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    recipe = text.split("## Add an operator\n\n")[1].split("\n\n")[0]
    found = [re.sub(r"\s+", " ", step) for step in re.split(r"^\d\. ", recipe, flags=re.M)[1:]]
    spans = [re.findall(r"`([^`]+)`|\]\(([^)]+)\)", step) for step in found]
    paths = [{code or link for code, link in some} for some in spans]
    return [{x for x in some if re.search(r"\.(py|md|toml)$|^tests$|/", x)} for some in paths]


def test_the_recipe_names_what_a_new_operator_changes() -> None:
    named = steps()
    assert len(named) == len(STEPS)
    for number, (names, changes) in enumerate(zip(named, STEPS, strict=True), 1):
        assert names - EXAMPLES == changes.keys(), f"step {number}"
    assert set().union(*named) >= EXAMPLES


def follow(tree: Path) -> None:
    """The repository in `tree`, with the new operator."""
    kept = shutil.ignore_patterns("__pycache__", ".*_cache", "*.so", "build", "site")
    for name in ("gdn_triton", "tests", "docs", "benchmarks", "csrc", "examples", "hub", ".ci"):
        shutil.copytree(ROOT / name, tree / name, ignore=kept)
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tree / name)
    for step in STEPS:
        for path, source in step.values():
            file = tree / path
            if isinstance(source, str):
                file.parent.mkdir(exist_ok=True)
                shutil.copy(TOY / source, file)
                continue
            text = file.read_text(encoding="utf-8")
            for old, new in source:
                assert text.count(old) == 1, f"{path} has not one {old!r}"
                text = text.replace(old, new)
            file.write_text(text, encoding="utf-8")


def run(tree: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("GDN_BACKEND", None)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


@pytest.mark.long(60)
def test_the_recipe_makes_an_operator(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the operator has a kernel")
    follow(tmp_path)
    run(tmp_path, "docs/pictures.py")
    pytest_options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", CHOSEN)
    said = run(tmp_path, "-m", "pytest", *FILES, *pytest_options)
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None and int(passed[1]) > 100, said[-2000:]
