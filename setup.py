"""Metadata of the distribution, and the optional build of the CUDA library.

GDN_BUILD_CUDA unset or "auto" builds the library where a compiler is found, and else installs
without; "1" builds it or fails with the reason; "0" never builds it; the path of a library that
`csrc/build.py` has built, ending in .so, takes that one. Either way the installed
`gdn_triton.fast.why_unavailable()` knows what happened: pip hides what a build prints.
"""

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
LIBRARY = "gdn_triton/fast/_gdn_fast.so"
STATUS = "gdn_triton/fast/_build_status.txt"


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


def decide() -> tuple[object, str]:
    """The toolchain, the library itself, or None where there is to be none; and what happens, in
    words."""
    asked = os.environ.get("GDN_BUILD_CUDA") or "auto"
    if asked.endswith(".so") and Path(asked).is_file():
        return Path(asked).resolve(), f"taken from {asked}"
    if asked not in ("0", "1", "auto"):
        raise SystemExit(
            "GDN_BUILD_CUDA must be 0, 1, auto or the path of a library that is built, got "
            f"{asked!r}"
        )
    if asked == "0":
        return None, "it was installed with GDN_BUILD_CUDA=0"
    try:
        tools = builder.find_toolchain()
    except builder.Unbuildable as why:
        if asked == "1":
            raise SystemExit(
                f"GDN_BUILD_CUDA=1, but the CUDA library cannot be built: {why}."
            ) from why
        return None, str(why)
    return tools, "built with CUDA {}.{}".format(*tools.cuda)


tools, status = decide()


class BuildPy(build_py):
    """Leaves beside the package why it has no CUDA library, or nothing where it has one."""

    def run(self) -> None:
        super().run()
        folder = ROOT if self.editable_mode else Path(self.build_lib)
        if tools is None:
            # One of an earlier build must not pass for this one's.
            (folder / LIBRARY).unlink(missing_ok=True)
            (folder / STATUS).write_text(status + "\n", encoding="utf-8")
        else:
            (folder / STATUS).unlink(missing_ok=True)


class BuildExt(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"  # no tag: it has no Python in it

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name)).resolve()
        if isinstance(tools, Path):
            if library != tools:
                library.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(tools, library)
            return
        try:
            builder.build(tools, library)
        except builder.BuildFailed as why:
            advice = "GDN_BUILD_CUDA=0 installs without it"
            raise SystemExit(f"The build of the CUDA library failed; {advice}.\n{why}") from why


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """For every Python; with the library for one platform, and for a glibc that it runs on."""
        if not tools:
            return "py3", "none", "any"
        built = Path(self.bdist_dir or ".") / LIBRARY
        if isinstance(tools, Path):
            built = tools
        return "py3", "none", builder.manylinux(built) if built.exists() else super().get_tag()[2]


print(f"gdn_triton: CUDA library: {status}", file=sys.stderr)
setup(
    name="gdn_triton",
    version=version(),
    description="Gated DeltaNet on Triton kernels, a drop-in for flash-linear-attention's op",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The gdn_triton authors",
    license="MIT",
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
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    packages=find_packages(include=["gdn_triton", "gdn_triton.*"]),
    package_data={"gdn_triton": ["py.typed"]},
    # Its sources are the builder's business.
    ext_modules=[Extension("gdn_triton.fast._gdn_fast", sources=[])] if tools else [],
    cmdclass={"build_py": BuildPy, "build_ext": BuildExt, "bdist_wheel": Wheel},
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
            "cuda-toolkit[nvcc,cudart,cccl]==13.0.*; platform_system == 'Linux'",
            "setuptools>=77",
            "torch>=2.10",
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
