"""Metadata of the distribution, and the optional build of the CUDA library.

GDN_BUILD_CUDA unset or "0" builds no CUDA library; "1" builds it or fails with the reason; the path
of a library that `csrc/build.py` has built, ending in .so, takes that one. pip hides what a build
prints, unless it fails or pip runs with -v. The installed package therefore says at its first call
on a GPU that would use the library how to build it (`gdn_triton.fast.why_unavailable`).
"""

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
LIBRARY = "gdn_triton/fast/_gdn_fast.so"
REPOSITORY = "https://github.com/gdn-triton/gdn_triton"


def version() -> str:
    """Read as text: importing the package needs torch, which a build environment has not."""
    text = (ROOT / "gdn_triton" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise SystemExit('gdn_triton/__init__.py must have a line __version__ = "..."')
    return found.group(1)


def load_builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gdn_csrc_build", ROOT / "csrc" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


builder = load_builder()


def asked_library() -> str | Path | None:
    """Returns the request of GDN_BUILD_CUDA: "build", the path of a library, or None for no
    library."""
    asked = os.environ.get("GDN_BUILD_CUDA") or "0"
    if asked.endswith(".so") and Path(asked).is_file():
        return Path(asked).resolve()
    if asked not in ("0", "1"):
        raise SystemExit(
            "GDN_BUILD_CUDA must be 0, 1 or the path of a library that is built, ending in .so, "
            f"got {asked!r}"
        )
    return "build" if asked == "1" else None


asked = asked_library()


def find_toolchain() -> Any:
    """The compilers and torch. They are looked for only when something is built: while a frontend
    asks for the build's needs, they may not be installed yet."""
    try:
        return builder.find_toolchain()
    except builder.Unbuildable as why:
        raise SystemExit(f"GDN_BUILD_CUDA=1, but the CUDA library cannot be built: {why}.") from why


class Build(build):
    def run(self) -> None:
        if asked == "build":
            find_toolchain()  # fails before anything is written
        super().run()


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if asked is None and not self.editable_mode:
            # One of an earlier build must not pass for this one's.
            (Path(self.build_lib) / LIBRARY).unlink(missing_ok=True)


class BuildExt(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"  # no tag: it has no Python in it

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name)).resolve()
        if isinstance(asked, Path):
            if library != asked:
                library.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(asked, library)
            return
        tools = find_toolchain()
        print(f"gdn_triton: the CUDA library is built by {tools.nvcc} for {tools.torch}")
        try:
            builder.build(tools, library)
        except builder.BuildFailed as why:
            advice = "GDN_BUILD_CUDA=0 installs without it"
            raise SystemExit(f"The build of the CUDA library failed; {advice}.\n{why}") from why


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """For every Python; with the library for one platform, and for a glibc that it runs on."""
        if asked is None:
            return "py3", "none", "any"
        built = Path(self.bdist_dir or ".") / LIBRARY
        if isinstance(asked, Path):
            built = asked
        return "py3", "none", builder.manylinux(built) if built.exists() else super().get_tag()[2]


def readme() -> str:
    """The README for a page that does not show the repository's files: every relative link leads
    to the file at this version's tag."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1].startswith("!") else "blob"
        return f"{link[1]}{REPOSITORY}/{kind}/v{version()}/{link[2]})"

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"(!?\[[^\]]*\]\()(?![a-z]+:|#)([^)]+)\)", absolute, text)


if asked is None:
    print(
        "gdn_triton: without the CUDA library; on a machine with an H100 or H200, "
        "`GDN_BUILD_CUDA=1 pip install .` builds it",
        file=sys.stderr,
    )
setup(
    name="gdn_triton",
    version=version(),
    description="Gated DeltaNet on Triton kernels, a drop-in for flash-linear-attention's op",
    long_description=readme(),
    long_description_content_type="text/markdown",
    author="The gdn_triton authors",
    project_urls={
        "Source": REPOSITORY,
        "Documentation": f"{REPOSITORY}/blob/v{version()}/docs/index.md",
        "Changelog": f"{REPOSITORY}/blob/v{version()}/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    },
    license_expression="MIT",
    license_files=["LICENSE"],
    keywords=["Gated DeltaNet", "linear attention", "Triton", "CUDA", "PyTorch", "Qwen3-Next"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    packages=find_packages(include=["gdn_triton", "gdn_triton.*"]),
    package_data={"gdn_triton": ["py.typed"]},
    # Its sources are the builder's business.
    ext_modules=[Extension("gdn_triton.fast._gdn_fast", sources=[])] if asked else [],
    cmdclass={"build": Build, "build_py": BuildPy, "build_ext": BuildExt, "bdist_wheel": Wheel},
    install_requires=[
        "torch>=2.8",
        # There are no Triton wheels elsewhere; the reference runs without.
        "triton>=3.6; platform_system == 'Linux'",
        # Axes by name in the specification and the layer. Before 0.8.2 a first call imports torch's
        # compiler.
        "einops>=0.8.2",
        # torch warns where it finds none.
        "numpy",
        "packaging",
    ],
    extras_require={
        # nvcc and what it needs, for `python csrc/build.py`; no toolkit of the system is needed.
        "cuda": [
            f"{builder.NVCC_REQUIREMENT}; platform_system == 'Linux'",
            "setuptools>=77",
            builder.TORCH_REQUIREMENT,
        ],
        "examples": ["matplotlib"],  # the loss curve of examples/train_bytes.py
        "bench": ["matplotlib"],  # the plots of benchmarks/plot.py; without it there are none
        "docs": [
            "mkdocs",  # the site
            "mkdocs-material",  # its theme, which works without a network
            "mkdocstrings-python",  # the reference, from the docstrings
            "ruff",  # breaks the signatures of the reference into lines
            "latex2mathml",  # formulas at build time, so pages need no script of another host
        ],
        "test": [
            "pytest",
            "pytest-xdist>=3.2",  # the suite in as many processes as there are cores
            "hypothesis",  # how sequences lie on ranks, for any lengths and shards
            "pytest-timeout",  # a kernel that hangs ends its test, not the run
            "ruff",  # lint and format are tests
            "mypy",  # so are the annotations
            # The format of csrc is a test too. Other versions format differently.
            "clang-format==23.1.5",
            "transformers>=4.57,<6",  # its models on this package; 180 MB
            "mkdocs",  # the site builds without a warning; it needs what the extra docs has
            "mkdocs-material",
            "mkdocstrings-python",
            "latex2mathml",
            # Triton's interpreter computes in numpy; before Triton 3.9 it fails with numpy 2.4.
            "numpy<2.4",
        ],
    },
)
