"""The build backend: setuptools, which requests torch and the CUDA compilers if GDN_BUILD_CUDA=1
builds the CUDA library and these are not found.

pip builds a package in an isolated environment, into which it installs the requests of a backend.
`csrc/build.py` therefore looks for torch and nvcc in that environment, on the PATH, and in the
environment that pip installs into. Only parts that are in none of them are requested and
downloaded.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Config = dict[str, Any] | None


def get_requires_for_build_wheel(config_settings: Config = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *cuda_requirements()]


def get_requires_for_build_editable(config_settings: Config = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *cuda_requirements()]


def cuda_requirements() -> list[str]:
    """The missing parts of a build of the CUDA library that pip can install."""
    if os.environ.get("GDN_BUILD_CUDA") != "1":
        return []
    # By its path: `build` is also the name of a program that calls this backend.
    path = Path(__file__).with_name("build.py")
    spec = importlib.util.spec_from_file_location("gdn_csrc_build", path)
    assert spec is not None and spec.loader is not None
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    found: list[str] = builder.missing_requirements()
    return found
