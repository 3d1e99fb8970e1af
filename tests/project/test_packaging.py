"""How the package is built: what the backend asks for, one command for the CUDA library in pip's
isolation, the source distribution, and what a registry shows. No compiler of CUDA is needed."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from types import ModuleType

import pytest
from library_wheel import LIBRARY, load_script

import gdn_triton

ROOT = Path(__file__).resolve().parents[2]
NVCC = "cuda-toolkit[nvcc,cudart,cccl]==13.0.*"
TORCH = "torch>=2.10"
FOLDERS = (".ci", ".github", "benchmarks", "csrc", "docs", "examples", "gdn_triton", "hub", "tests")

# Stands for nvcc and g++: says its version, makes empty objects, and links a library of its own.
COMPILER = """\
#!/bin/sh
output= previous=
for word in "$@"; do
    [ "$previous" = -o ] && output=$word
    previous=$word
done
case " $* " in
    *" --version "*) echo "Cuda compilation tools, release 13.0, V13.0.1" ;;
    *" --dryrun "*) echo '#$ INCLUDES="-I/cuda/include"' >&2 ;;
    *" -shared "*) echo 'int nothing;' | "$LINKER" -shared -fPIC -x c - -o "$output" ;;
    *) : > "$output"; echo "$output:" > "${output%.o}.d" ;;
esac
"""


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("setuptools", reason="the backend is setuptools, which is not installed")
    for name in ("NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)
    return load_script("backend")


def copy_of_the_sources(folder: Path) -> Path:
    """A build leaves files in its sources."""
    for name in FOLDERS:
        left = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, folder / name, ignore=left)
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, folder)
    return folder


def test_backend_asks_for_nothing_unless_told(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for asked in ("", "0", "/nowhere/library.so"):
        monkeypatch.setenv("GDN_BUILD_CUDA", asked)
        assert backend.cuda_requirements() == []


def test_backend_asks_for_what_is_not_there(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_BUILD_CUDA", "1")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(subprocess, "run", fails)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert backend.cuda_requirements() == [NVCC, TORCH]
    # A compiler that is named is never replaced: the build says what is wrong with it.
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert backend.cuda_requirements() == [TORCH]
    header = tmp_path / "torch/include/torch/csrc/stable/c/shim.h"
    header.parent.mkdir(parents=True)
    assert backend.cuda_requirements() == [TORCH], "a torch without the stable ABI"
    header.touch()
    assert backend.cuda_requirements() == []


def fails(*command: object, **options: object) -> None:
    raise FileNotFoundError(command)


def pip_wheel(source: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Built as `pip install .` builds it: in an environment of its own, which has setuptools."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", source.parent, source]
    kept = {x: y for x, y in os.environ.items() if x not in ("PYTHONPATH", "CUDA_HOME")}
    done = subprocess.run(
        command, env={**kept, **environment}, capture_output=True, text=True, check=False
    )
    if "connection broken by" in done.stderr:
        pytest.skip(f"pip cannot reach an index: {done.stderr.splitlines()[-1]}")
    return done


def test_one_command_builds_the_library(tmp_path: Path) -> None:
    """In pip's isolation, where nothing of this environment can be imported: torch is found in it
    all the same, and the wheel has the library."""
    linker = shutil.which("gcc")
    if linker is None:
        pytest.skip("there is no gcc to make a library with")
    source = copy_of_the_sources(tmp_path / "source")
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    chosen = {"NVCC": str(compiler), "CXX": str(compiler), "LINKER": linker}
    done = pip_wheel(source, GDN_BUILD_CUDA="1", **chosen)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert re.search(r"-py3-none-manylinux_2_\d+_\w+\.whl$", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        assert LIBRARY in archive.namelist()
        assert archive.read(LIBRARY)[:4] == b"\x7fELF"
    # The same tree without the variable: a wheel without what the build above left there.
    wheel.unlink()
    done = pip_wheel(source, GDN_BUILD_CUDA="")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert LIBRARY not in zipfile.ZipFile(wheel).namelist()


def test_one_command_says_what_is_missing(tmp_path: Path) -> None:
    source = copy_of_the_sources(tmp_path / "source")
    done = pip_wheel(source, GDN_BUILD_CUDA="1", NVCC="/nowhere/nvcc")
    assert done.returncode != 0
    assert "cannot be built: there is no CUDA compiler (tried /nowhere/nvcc)" in done.stderr


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    pytest.importorskip("setuptools", reason="the backend is setuptools, which is not installed")
    folder = tmp_path_factory.mktemp("sdist")
    source = copy_of_the_sources(folder / "source")
    build = f"import backend; backend.build_sdist({str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", build],
        cwd=source,
        env={**os.environ, "PYTHONPATH": str(source / "csrc"), "GDN_BUILD_CUDA": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def test_sdist_has_the_repository(sdist: Path) -> None:
    """Everything that the tests, the benchmarks and a build of the CUDA library need."""
    packed = {str(x.relative_to(sdist)) for x in sdist.rglob("*") if x.is_file()}
    source = sdist.parent / "source"
    there = {str(x.relative_to(source)) for x in source.rglob("*") if x.is_file()}
    made = {x for x in there if re.search(r"\.egg-info/|^build/|__pycache__", x)}
    assert not there - made - packed
    assert {x.split("/")[0] for x in packed - there} <= {"PKG-INFO", "setup.cfg"}


def metadata(sdist: Path) -> Message:
    return Parser().parsestr((sdist / "PKG-INFO").read_text(encoding="utf-8"))


def test_metadata_of_a_registry(sdist: Path) -> None:
    found = metadata(sdist)
    assert found["License-Expression"] == "MIT" and found["License"] is None
    classifiers = found.get_all("Classifier", [])
    # PEP 639: one or the other.
    assert not [x for x in classifiers if x.startswith("License ::")]
    versions = [x.rsplit(" ", 1)[1] for x in classifiers if " :: Python :: 3." in x]
    assert versions == [f"3.{minor}" for minor in range(10, 15)]
    urls = dict(x.split(", ", 1) for x in found.get_all("Project-URL", []))
    assert urls.keys() == {"Source", "Documentation", "Changelog", "Issues"}
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^repository-code: (\S+)$", citation, re.M) == [urls["Source"]]
    tag = f"{urls['Source']}/blob/v{gdn_triton.__version__}/"
    for name in ("Documentation", "Changelog"):
        assert (ROOT / urls[name].removeprefix(tag)).is_file()


def test_every_link_of_the_shown_readme_is_absolute(sdist: Path) -> None:
    text = metadata(sdist).get_payload()
    source = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"(!?)\[[^\]]*\]\(([^)]*)\)", text)
    written = re.findall(r"(!?)\[[^\]]*\]\(([^)]*)\)", source)
    assert len(shown) == len(written) > 10
    address = re.findall(r"Source, (\S+)", (sdist / "PKG-INFO").read_text(encoding="utf-8"))[0]
    for (image, link), (_, path) in zip(shown, written, strict=True):
        kind = "raw" if image else "blob"
        assert link == f"{address}/{kind}/v{gdn_triton.__version__}/{path}"
        assert (ROOT / path.split("#")[0]).exists()
    assert re.sub(r"\]\([^)]*\)", "", text).strip() == re.sub(r"\]\([^)]*\)", "", source).strip()
