"""Processes without TRITON_INTERPRET, in which Triton compiles kernels for a GPU that is not
present, or lists the kernels that it would compile.

`watch` lists them. It needs a process of its own, because it changes Triton and the choice of
backends permanently. Afterwards a kernel's launch asks for its variant, as on an H200, and nothing
is compiled or launched. The contents of the tensors are then meaningless.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]

asked: list[str] = []  # the name of a kernel for every variant that would have been compiled


def watch(*, gluon: bool = False) -> None:
    """gluon: the Gluon kernels for compute capability 9.0 run where they would on an H200."""
    import torch
    from target_code import AbsentDevice
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from gdn_triton._host import backends
    from gdn_triton.chunk.triton.hopper import support
    from gdn_triton.recurrent import backends as recurrent_backends
    from gdn_triton.recurrent import rings
    from gdn_triton.step import backends as step_backends

    def compile_nothing(self: Any, key: Any, *args: Any) -> object:
        asked.append(self.fn.__name__)
        kernel = self.device_caches[0][0][key] = object()
        return kernel

    run = JITFunction.run
    JITFunction._do_compile = compile_nothing
    JITFunction.run = lambda self, *args, grid, warmup, **kwargs: run(
        self, *args, grid=grid, warmup=True, **kwargs
    )
    driver.set_active(AbsentDevice(GPUTarget("cuda", 90, 32)))

    def nothing(*args: object) -> None:
        return None

    for module in (backends, recurrent_backends, rings, step_backends):
        module.triton_refusal = nothing  # type: ignore[attr-defined]
    if gluon:
        support._any_refusal = support.sizes_refusal
        support._multiprocessors = lambda device: 132  # type: ignore[assignment]

    zeros = torch.zeros

    def unread(*shape: Any, dtype: torch.dtype = torch.float32, **more: Any) -> torch.Tensor:
        """Contents of numbers are not read; those of slots and offsets are, on the CPU."""
        make = torch.empty if dtype.is_floating_point else zeros
        return make(*shape, dtype=dtype, **more)

    torch.zeros = unread


def run_watched(script: str, *arguments: str) -> list[str]:
    """The words that a script prints, in a process where Triton compiles."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "GDN_BACKEND": "triton"}
    paths = (TESTS / "support", TESTS / "integrations", TESTS.parent)
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def check_compiled(script: str, *arguments: str) -> None:
    """Runs a script of tests/support that compiles kernels for a GPU that need not be there, prints
    a line with WRONG for each fault, and ends with 1 if there is one."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # The tiles and blocks of a machine without a GPU, wherever this runs.
    environment["CUDA_VISIBLE_DEVICES"] = ""
    # One kernel is compiled at a time, and the compiler's threads would mostly wait for each other.
    environment["MLIR_DISABLE_MULTITHREADING"] = "1"
    done = subprocess.run(
        [sys.executable, TESTS / "support" / script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    wrong = [line for line in done.stdout.splitlines() if line.startswith("WRONG")]
    assert done.returncode == 0, "\n".join([*wrong, done.stderr[-4000:]])
