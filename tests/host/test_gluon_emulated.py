"""The Gluon kernels without a GPU: tests/support/gluon_emulated.py, gluon_walks.py,
gluon_backward.py, gluon_window.py and gluon_several.py run the PTX that Triton makes of them on a
CPU, in a process of its own, since Triton decides on import between its interpreter and its
compiler. emulated_layer.py does the same for the forms of a layer's step. gluon_launches.py holds
the emulator to what it finds between launches. Needs g++."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from packaging.version import Version

from gdn_triton._host.gluon import RELEASES

SUPPORT = Path(__file__).resolve().parents[1] / "support"


@pytest.mark.long(60)
@pytest.mark.timeout(1800)  # g++ takes most of the time
@pytest.mark.parametrize(
    "module",
    [
        "gluon_launches",
        "gluon_emulated",
        "gluon_walks",
        "gluon_backward",
        "gluon_window",
        "gluon_several",
        "emulated_layer",
    ],
)
def test_emulated(module: str) -> None:
    if platform.machine() != "x86_64":
        pytest.skip(f"the emulator changes stacks on x86_64 only, this is {platform.machine()}")
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++, which is not found")
    release = Version(triton.__version__).base_version
    if release not in RELEASES:
        pytest.skip(f"with Triton {release} the portable kernels run: not in RELEASES")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(SUPPORT), str(SUPPORT.parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, "-m", module],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
