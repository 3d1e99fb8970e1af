"""The files of a release: the wheel, an installation of it alone, and the documentation's site."""

import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from library_wheel import check_library_wheel, make_environment, run_there
from runs import made_once

import gdn_triton

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel without the CUDA library, of a copy of the sources: a build leaves files in them."""
    folder = made_once(tmp_path_factory, "release", make_wheel)
    (found,) = folder.glob("*.whl")
    return found


def skip_without_an_index(folder: Path) -> None:
    """pip takes setuptools, for the environment that it builds in, from an index."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
    done = subprocess.run([*command, "setuptools"], capture_output=True, text=True, check=False)
    if done.returncode != 0 and "connection broken by" in done.stderr:
        pytest.skip(f"pip cannot reach an index: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr


def make_wheel(folder: Path) -> None:
    skip_without_an_index(folder / "index")
    left = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("gdn_triton", "csrc"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=left)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, "./source"]
    environment = {**os.environ, "GDN_BUILD_CUDA": "0"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"gdn_triton-{gdn_triton.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "gdn_triton").rglob("*.py")} | {
        "gdn_triton/py.typed",
    }
    package = {name for name in names if not name.startswith("gdn_triton-")}
    assert package == sources
    assert {name.split("/", 1)[1] for name in names - package} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "licenses/LICENSE",
        "top_level.txt",
    }


def test_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    name = f"gdn_triton-{gdn_triton.__version__}.dist-info/METADATA"
    metadata = Parser().parsestr(archive.read(name).decode())
    needs = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert {re.match(r"[\w-]+", need).group() for need in needs} == {  # type: ignore[union-attr]
        "torch",
        "triton",
        "einops",
        "numpy",
        "packaging",
    }
    assert (metadata["License-Expression"] or metadata["License"]) == "MIT"
    assert metadata["Requires-Python"] == ">=3.10"
    assert {"cuda", "docs", "examples", "bench", "test"} == set(
        metadata.get_all("Provides-Extra", [])
    )
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith("# gdn_triton")


def test_changes_and_citation_name_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", text, re.M)[0] == gdn_triton.__version__
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (\S+)$", text, re.M) == [gdn_triton.__version__]


def test_hosted_ci_and_hooks_run_what_the_tests_run() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert re.findall(r"^ +- run: (.*)$", text, re.M) == [".ci/run"]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    quality = (ROOT / "tests" / "project" / "test_quality.py").read_text(encoding="utf-8")
    types = re.findall(r"entry: python -m (mypy .*)$", hooks, re.M)
    assert types == [" ".join(re.findall(r'"([^"]+)"', quality[quality.index('"mypy"') :]))]


RUN = """
import torch, gdn_triton
q, k, v = torch.randn(3, 1, 70, 2, 16)
g, beta = -torch.rand(1, 70, 2), torch.rand(1, 70, 2)
o, state = gdn_triton.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
print(gdn_triton.__file__, o.isfinite().all().item(), tuple(state.shape))
print(gdn_triton.fast.why_unavailable())
"""


def test_wheel_runs_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    python = make_environment(wheel, tmp_path / "venv")
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    first, second = run_there(python, f"import gdn_triton.fast\n{RUN}").splitlines()
    assert first == f"{site}/gdn_triton/__init__.py True (1, 2, 16, 16)"
    assert second.startswith("The CUDA library is not built: `GDN_BUILD_CUDA=1 pip install .`")


def test_wheel_with_a_library(tmp_path: Path) -> None:
    """The library of `GDN_TEST_LIBRARY`, which csrc/build.py has built, or one that stands in its
    place: what a wheel does with it is the same. tests/fast has what csrc/build.py makes there in
    a wheel too."""
    given = os.environ.get("GDN_TEST_LIBRARY")
    library = tmp_path / "library.so"
    if given is not None:
        library = Path(given)
    elif shutil.which("g++") is None:
        pytest.skip("there is no g++ to make a library with, and GDN_TEST_LIBRARY names none")
    else:
        command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", library]
        subprocess.run(command, input="int nothing() { return 0; }", text=True, check=True)
    python = check_library_wheel(library, tmp_path / "made")
    if given is not None:
        (packed,) = python.parent.parent.glob("lib/python*/site-packages/gdn_triton/fast/*.so")
        load = f"import torch; torch.ops.load_library({str(packed)!r})"
        assert run_there(python, f"{load}; print(torch.ops.gdn_fast.why_unavailable())").strip()


def documented() -> set[str]:
    """The names that the API reference shows."""
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    return set(re.findall(r"^::: gdn_triton\.(\w+)$", text, re.M)) | set(
        re.findall(r"^`(\w+)` is another name of this function\.$", text, re.M)
    )


def test_reference_shows_every_public_name() -> None:
    assert set(gdn_triton.__all__) - {"__version__"} <= documented()


@pytest.mark.parametrize("name", sorted(set(gdn_triton.__all__) - {"__version__"}))
def test_docstrings_say_what_comes_in_and_out(name: str) -> None:
    value = getattr(gdn_triton, name)
    text = inspect.getdoc(value) or ""
    if not inspect.isfunction(value):
        assert text
        return
    for section in ("Args:", "Returns:", "Raises:"):
        assert section in text or "Takes the same arguments" in text, f"{name} has no {section}"
    for parameter in inspect.signature(value).parameters:
        assert re.search(rf"\b{parameter}\b", text) or "same arguments" in text, (name, parameter)


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs, of the extra `test`, is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site" / "reference" / "index.html").read_text(encoding="utf-8")
    assert "use_qk_l2norm_in_kernel" in page
    page = (tmp_path / "site" / "math" / "index.html").read_text(encoding="utf-8")
    assert page.count("<math ") > 20 and "arithmatex" not in page
    page = (tmp_path / "site" / "kernels" / "index.html").read_text(encoding="utf-8")
    path = "gdn_<wbr>triton/<wbr>chunk/<wbr>triton/<wbr>shared/<wbr>chunks.py"
    assert f"<code>{path}</code>" in page
    for path in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r'(?:src|rel="stylesheet" href)="(\w+:[^"]*)"', path.read_text("utf-8"))
        assert not loaded, f"{path.name} loads {loaded} over a network"
