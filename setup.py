"""Metadata of the distribution. The default install compiles nothing."""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def version() -> str:
    """Read as text: importing the package needs torch, which a build environment has not."""
    text = (ROOT / "gdn_triton" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise SystemExit('gdn_triton/__init__.py must have a line __version__ = "..."')
    return found.group(1)


def refuse_cuda_build() -> None:
    """Whoever asks for the CUDA library must not get an install without it."""
    asked = os.environ.get("GDN_BUILD_CUDA", "0")
    if asked == "1":
        raise SystemExit(
            "GDN_BUILD_CUDA=1 cannot be served: this version has no CUDA sources to build. "
            "Unset GDN_BUILD_CUDA to install the Triton and reference backends."
        )
    if asked not in ("", "0"):
        raise SystemExit(f"GDN_BUILD_CUDA must be 0 or 1, got {asked!r}")


refuse_cuda_build()
setup(
    name="gdn_triton",
    version=version(),
    description="Gated DeltaNet on Triton kernels, a drop-in for flash-linear-attention's op",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The gdn_triton authors",
    license="MIT",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["gdn_triton", "gdn_triton.*"]),
    package_data={"gdn_triton": ["py.typed"]},
    install_requires=[
        "torch>=2.8",
        # There are no Triton wheels elsewhere; the reference runs without.
        "triton>=3.6; platform_system == 'Linux'",
        "einops",
        "packaging",
    ],
    extras_require={
        "test": [
            "pytest",
            "pytest-xdist",  # the suite in as many processes as there are cores
            "pytest-timeout",  # a kernel that hangs ends its test, not the run
            "ruff",  # lint and format are tests
            "mypy",  # so are the annotations
            # Triton's interpreter computes in numpy; before Triton 3.9 it fails with numpy 2.4.
            "numpy<2.4",
        ],
    },
)
