"""Checks a wheel with the CUDA library as a user gets it: contents, tags, size, and the answers of
an environment that has nothing else of this package."""

import importlib.util
import os
import platform
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from types import ModuleType

import gdn_triton

ROOT = Path(__file__).resolve().parent.parent.parent
LIBRARY = "gdn_triton/fast/_gdn_fast.so"
# The largest file that a registry accepts without a request.
MOST_BYTES = 100 * 2**20


def load_script(stem: str, csrc: Path = ROOT / "csrc") -> ModuleType:
    """A script of `csrc`, which is in no package."""
    name = f"csrc_{stem}"
    spec = importlib.util.spec_from_file_location(name, csrc / f"{stem}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_builder(csrc: Path = ROOT / "csrc") -> ModuleType:
    return load_script("build", csrc)


def check_library_wheel(library: Path, folder: Path) -> Path:
    """The python of an environment in `folder` that has such a wheel."""
    wheel: Path = load_builder().make_wheel(library, folder)
    version, machine = gdn_triton.__version__, platform.machine()
    name = rf"gdn_triton-{version}-(py3-none-manylinux_2_(\d+)_{machine})\.whl"
    found = re.fullmatch(name, wheel.name)
    assert found, wheel.name
    assert int(found[2]) >= 28
    assert wheel.stat().st_size < MOST_BYTES
    archive = zipfile.ZipFile(wheel)
    package = {name for name in archive.namelist() if not name.startswith("gdn_triton-")}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "gdn_triton").rglob("*.py")}
    # The wheel has the package's sources and the library, and no other file of the build.
    assert package == sources | {"gdn_triton/py.typed", LIBRARY}
    assert archive.read(LIBRARY) == library.read_bytes()
    tags = archive.read(f"gdn_triton-{version}.dist-info/WHEEL").decode()
    assert f"Tag: {found[1]}\n" in tags and "Root-Is-Purelib: false\n" in tags

    python = make_environment(wheel, folder / "venv")
    said = run_there(python, "import gdn_triton.fast as x; print(x.LIBRARY, x.why_unavailable())")
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    assert said == f"{site}/{LIBRARY} The CUDA library needs a GPU; torch finds no CUDA device.\n"
    return python


def make_environment(wheel: Path, folder: Path) -> Path:
    """Returns the environment's python. The dependencies come from this environment, the package
    from the wheel alone."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", wheel], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # A plain path: the additions of this environment's own .pth files, the checkout among them, are
    # left out.
    (site / "needs.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def run_there(python: Path, code: str) -> str:
    """The output of the code in a process without a GPU and without this process's settings."""
    unset = ("GDN_BACKEND", "TRITON_INTERPRET", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [python, "-c", code],
        cwd=python.parent,
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
