"""The machine and the versions of a run: the first record of its file."""

import importlib
import importlib.util
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Device, Record
from benchmarks.shapes import Random

ROOT = Path(__file__).resolve().parent.parent


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> str:
    git = ("git", "-C", str(ROOT))
    # Without its own .git, an exported tree would get the commit of a repository around it.
    revision = _output(*git, "rev-parse", "HEAD") if (ROOT / ".git").exists() else None
    if not revision:
        return "unknown"
    changed = _output(*git, "status", "--short", "--untracked-files=no")
    return revision + (" with changes" if changed else "")


def ceilings(device: Device) -> Record:
    """The rates that this machine reaches: a large copy (read + written) and a large bf16 matrix
    product."""

    def seconds(function: Callable[..., Any], *tensors: torch.Tensor) -> float:
        samples = []
        for _ in range(15):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function(*tensors)
            end.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(end) * 1e-3)
        return statistics.median(samples[5:])

    if not device.is_cuda:
        return {}
    count = min(2 << 30, torch.cuda.mem_get_info()[0] // 8)
    source = torch.empty(count, dtype=torch.uint8, device=device.torch).fill_(1)
    target = torch.empty_like(source)
    bytes_per_s = 2 * count / seconds(torch.Tensor.copy_, target, source)
    del source, target
    n = 8192
    rand = Random(0, device.torch)
    a, b = (rand.normal(n, n).bfloat16() for _ in range(2))
    flops_per_s = 2 * n**3 / seconds(torch.matmul, a, b)
    return {"bytes_per_s": bytes_per_s, "flops_per_s": flops_per_s}


def header(
    module: str,
    implementations: dict[str, str],
    missing: Sequence[str],
    device: Device,
    name: str,
) -> Record:
    """The first record of a run of a benchmark module; `name` is the commit's."""
    triton_version = "not installed"
    if importlib.util.find_spec("triton") is not None:
        triton_version = importlib.import_module("triton").__version__
    machine: Record = {"gpu": "none (CPU)"}
    if device.is_cuda:
        properties = torch.cuda.get_device_properties(device.torch)
        machine = {"gpu": properties.name, "multiprocessors": properties.multi_processor_count}
        query = "driver_version,power.limit,clocks.sm,clocks.max.sm"
        uuid = f"GPU-{getattr(properties, 'uuid', '')}"
        read = _output("nvidia-smi", "-i", uuid, f"--query-gpu={query}", "--format=csv,noheader")
        labels = ("driver", "power limit", "SM clock now", "SM clock at most")
        cells = read.split(", ") if read else ["unknown"] * len(labels)
        machine |= dict(zip(labels, cells, strict=False))
    return {
        "kind": "header",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": f"python -m {module} " + shlex.join(sys.argv[1:]),
        "commit": name,
        **machine,
        **ceilings(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
        "GDN_BACKEND": os.environ.get("GDN_BACKEND", "auto"),
        "implementations": implementations,
        "missing": list(missing),
    }
