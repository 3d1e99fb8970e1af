"""Launches on Triton's compiler with a driver that writes down what it is asked to run, for a GPU
that need not be there. They run in a child process, because Triton chooses between its interpreter
and its compiler when it is imported."""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch


def said_by_child(path: str) -> dict[str, str]:
    """The output of a test file, run as a program: a text for each of its checks."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), str(root / "tests" / "support"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(
        [sys.executable, path], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, str] = json.loads(done.stdout)
    return said


def say_outcomes(checks: Iterable[Callable[[], None]]) -> None:
    """Prints what `said_by_child` reads: "held" or the traceback, by the name of each check."""
    said = {}
    for check in checks:
        try:
            check()
            said[check.__name__] = "held"
        except Exception:
            said[check.__name__] = traceback.format_exc()
    print(json.dumps(said))


def plain(x: Any) -> Any:
    """An argument, with the address of a tensor in its place."""
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    if hasattr(x, "base"):
        return x.base.data_ptr(), tuple(x.shape), tuple(x.strides), x.padding
    return x


class Recorder:
    """A driver that writes down what a launch was given; a handle is one compiled variant."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", 90, 32)
        self.device, self.stream = 0, 11
        self.launches: list[tuple[Any, ...]] = []
        self.loaded = 0
        self.utils = self
        self.launcher_cls = self.launcher

    def launcher(self, src: Any, metadata: Any) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            *head, metadata, launch_metadata, enter, leave = args[:9]
            for hook in (enter, leave):
                if hook is not None:
                    hook(launch_metadata)
            self.launches.append((*head, metadata, *args[9:]))

        return launch

    def load_binary(self, *_: Any) -> tuple[Any, ...]:
        self.loaded += 1
        return object(), 1000 + self.loaded, 32, 0, 1024

    def unload_module(self, module: Any) -> None: ...

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024}

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def last(self) -> tuple[Any, ...]:
        """The last launch, with addresses in the place of tensors and descriptors."""
        return tuple(map(plain, self.launches[-1]))


class Counted:
    """How often Triton's own launch ran."""

    def __enter__(self) -> "Counted":
        from triton.runtime.jit import JITFunction

        self.count, self.run = 0, JITFunction.run

        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return self.run(kernel, *args, **kwargs)

        JITFunction.run = run  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: Any) -> None:
        from triton.runtime.jit import JITFunction

        JITFunction.run = self.run  # type: ignore[method-assign]


class EncodingRecorder(Recorder):
    """The driver of a release whose launches of descriptors the package makes itself. It writes
    down the arguments of the driver's function in C, with the arguments of the encoding in place of
    each descriptor."""

    def __init__(self) -> None:
        from triton.backends.nvidia import driver

        super().__init__()
        record = self

        class Launcher(driver.CudaLauncher):  # type: ignore[misc]
            def __init__(self, src: Any, metadata: Any) -> None:
                tiles = metadata.tensordesc_meta
                self.launch = driver.wrap_handle_tensordesc(record.write, src.signature, tiles)
                self.arg_annotations, self.kernel_signature = "annotations", "signature"
                self.num_ctas = metadata.num_ctas
                self.gsan_enabled = False  # a sanitizer, from 3.8 on
                for name in ("global_scratch", "profile_scratch"):
                    for what in ("size", "align"):
                        setattr(self, f"{name}_{what}", getattr(metadata, f"{name}_{what}"))
                self.launch_cooperative_grid = metadata.launch_cooperative_grid
                self.launch_pdl = metadata.launch_pdl

        self.encodings = 0
        self.launcher_cls = Launcher
        self.fill_tma_descriptor = self.fill_tma_descriptor_tiled = self.encode

    def encode(self, *given: Any) -> Any:
        self.encodings += 1
        return tuple(tuple(x) if isinstance(x, list | torch.Size) else x for x in given)

    def write(self, *args: Any) -> None:
        if isinstance(args[-1], list | tuple):
            args = *args[:-1], *args[-1]
        metadata = [x for x in args if hasattr(x, "extras")]
        hooks = [x for x in args if hasattr(x, "calls") and x.calls]
        for hook in hooks:
            hook(metadata[0])
        # Triton's own launch passes its hooks and what it tells them even if nothing is called.
        self.launches.append(
            tuple(None if hasattr(x, "extras") or hasattr(x, "calls") else x for x in args)
        )
