"""Seconds of the first call of a process, and what later calls compile.

    python -m benchmarks.first_calls [--select REGEX] [--jsonl FILE] [--dry-run]

A row is two processes, one after the other, which share a Triton cache. It is empty before the
first, and the second finds every kernel in it. A time ends when the GPU has finished the call; the
imports of torch, Triton and this package do not count. The table also has the number of kernels
that the first call compiled, and of those that calls with other lengths, batches and gates compiled
after it. q, k and v are in bf16, K = V = 128, with 16 key heads and 32 value heads; a training step
is a forward and a backward. --dry-run makes the calls with toy sizes on the CPU.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Device, Record, device_for, device_line
from benchmarks.report import append_record, table
from gdn_triton import chunk_gated_delta_rule, recurrent_step

ROOT = Path(__file__).resolve().parent.parent
TOY = 64  # A dry run divides the lengths by this number.

# Sequences of a call. The first call of a row has the first lengths and mild gates; later ones have
# the others, and strong gates.
Lengths = tuple[int, ...]
CALLS: dict[str, tuple[Lengths, ...]] = {
    "forward, 8 x 1024": ((1024,) * 8, (1024,) * 12, (1000,) * 8, (4096,) * 8),
    "forward, packed 8 x 1024": ((1024,) * 8, (300, 700, 1024, 2000, 5000), (2048,) * 16),
    "forward, 1 x 8192": ((8192,), (8000,), (12000,), (32768,)),
    "training step, 4 x 2048": ((2048,) * 4, (2048,) * 6, (2000,) * 4, (8192,) * 4),
    "recurrent_step, 64 sequences": ((1,) * 64, (1,) * 60, (1,) * 70),
}


def make_call(name: str, lengths: Lengths, device: Device, strength: float) -> Callable[[], object]:
    """A call of the row ``name`` with these lengths, whose gates lie in [-strength, 0]."""
    H, HV, K, V = (16, 32, 128, 128) if device.is_cuda else (1, 2, 16, 16)
    if not device.is_cuda:
        lengths = tuple(-(-n // TOY) for n in lengths)
    packed, training = "packed" in name, "training" in name
    lead = (1, sum(lengths)) if packed else (len(lengths), max(lengths))
    rand = partial(torch.rand, device=device.torch)
    x: dict[str, Any] = {
        "q": (rand(*lead, H, K) - 0.5).to(torch.bfloat16),
        "k": (rand(*lead, H, K) - 0.5).to(torch.bfloat16),
        "v": (rand(*lead, HV, V) - 0.5).to(torch.bfloat16),
        "g": -strength * rand(*lead, HV),
        "beta": rand(*lead, HV),
    }
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
    if "recurrent_step" in name:
        slots = torch.arange(len(lengths), device=device.torch, dtype=torch.int32)
        pool = torch.zeros(len(lengths), HV, V, K, device=device.torch)
        token = {key: y[:, 0] for key, y in x.items()}
        return partial(recurrent_step, pool, slots, **token, **options, state_v_first=True)
    if packed:
        ends = torch.tensor(lengths).cumsum(0)
        options["cu_seqlens"] = torch.nn.functional.pad(ends, (1, 0)).to(device.torch, torch.int32)
    call = partial(chunk_gated_delta_rule, **x, **options, output_final_state=not training)
    return partial(train, x, options) if training else torch.no_grad()(call)


def train(x: dict[str, Any], options: dict[str, Any]) -> None:
    leaves = {name: y.detach().requires_grad_() for name, y in x.items()}
    o, _ = chunk_gated_delta_rule(**leaves, **options)
    torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o))


def compiled_kernels() -> list[str]:
    """A list to which Triton adds the name of each kernel that it compiles from now on."""
    from triton import knobs

    names: list[str] = []

    def note(*, fn: Any, **_: Any) -> None:
        names.append(fn.name)

    knobs.runtime.jit_post_compile_hook = note
    return names


def measure_here(name: str, device: Device) -> Record:
    """The first calls of this process."""
    compiled = compiled_kernels() if device.is_cuda else []
    first, *others = CALLS[name]
    call = make_call(name, first, device, strength=0.1)
    device.synchronize()
    seconds, kernels = [], []
    for _ in range(2):
        start = time.perf_counter()
        call()
        device.synchronize()
        seconds.append(time.perf_counter() - start)
        kernels.append(len(compiled))
    for lengths in (first, *others):
        make_call(name, lengths, device, strength=5.0)()
    device.synchronize()
    return {
        "first": seconds[0],
        "second": seconds[1],
        "kernels": kernels[0],
        "later": len(compiled) - kernels[0],
    }


def measure(name: str, *, dry_run: bool) -> Record:
    """A row: a process with an empty cache, and another one with what it left there."""
    answers = []
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "TRITON_CACHE_DIR": cache,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        command = [sys.executable, "-m", "benchmarks.first_calls", "--child", name]
        for _ in range(2):
            done = subprocess.run(
                [*command, *(["--dry-run"] if dry_run else [])],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            answers.append(json.loads(done.stdout.splitlines()[-1]))
    empty, filled = answers
    return {
        "call": name,
        "empty cache, s": empty["first"],
        "filled cache, s": filled["first"],
        "second call, ms": 1e3 * empty["second"],
        "kernels": empty["kernels"],
        "compiled later": empty["later"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--select", default="", help="only rows whose name this regex finds")
    parser.add_argument("--jsonl", type=Path, help="also append a record a row to this file")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    device = device_for(options.dry_run)
    if options.child is not None:
        print(json.dumps(measure_here(options.child, device)))
        return
    records = []
    for name in CALLS:
        if re.search(options.select, name):
            records.append(measure(name, dry_run=options.dry_run))
            append_record(options.jsonl, records[-1])
    if not records:
        parser.error(f"--select: no row has {options.select!r} in its name")
    print(f"{device_line(device)}\n\n{table(records)}")


if __name__ == "__main__":
    main()
