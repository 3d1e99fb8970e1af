"""The forward for compute capability 10.0 of studies/blackwell, compiled for a GPU that need not be
there, in a process of its own, since Triton decides on import between its interpreter and its
compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
# Gluon has the names of these releases for tensor memory.
RELEASES = ("3.6.0", "3.7.1")


@pytest.mark.long(20)
def test_code_for_blackwell() -> None:
    release = Version(triton.__version__).base_version
    if release not in RELEASES:
        pytest.skip(f"Triton {release} has other names of Gluon for tensor memory")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), str(ROOT / "tests" / "support"), environment.get("PYTHONPATH", "")]
    )
    done = subprocess.run(
        [sys.executable, "-m", "studies.blackwell.forward", "--compile"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "tcgen05.mma" in done.stdout
