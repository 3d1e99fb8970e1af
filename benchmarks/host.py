"""Host time of calls of one shape, of two shapes in turns, and of lengths that never repeat.

    python -m benchmarks.host [--calls 10000] [--steps] [--backend auto] [--dry-run] [--jsonl FILE]

The call is `chunk_gated_delta_rule`, forward, q, k and v in bf16, K = V = 128, 8 heads, three
packed sequences. Such a call is cut into segments, so the host has the most to decide. The times
are microseconds until a call from Python returns, each call timed by itself. The host waits for the
device between rows of calls, so no launch waits for room in the stream. The last column is the
memory of the process that all calls of a row together have left allocated. With --steps the calls
are decode steps of one sequence, with `out`, 16 key and 32 value heads and a value-first float32
pool. --dry-run runs toy sizes on the CPU.
"""

import argparse
import gc
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Device, Record, device_for, device_line
from benchmarks.peers import backend_chosen
from benchmarks.report import append_record, table
from benchmarks.shapes import Case, make_inputs
from gdn_triton import chunk_gated_delta_rule, make_window, prepare_step, recurrent_step

LEAST, MOST = 2048, 32768  # tokens of a call
TOY = (32, 96)
IN_A_ROW = 16  # calls between two waits for the device
WARMUP = 64


def lengths(kind: str, least: int, most: int) -> Iterator[int]:
    """The tokens of each call, one after the other."""
    if kind == "one shape":
        return itertools.repeat(most)
    if kind == "two shapes in turns":
        return itertools.cycle((most, most // 2))
    drawn = list(range(least, most + 1))
    random.Random(0).shuffle(drawn)
    return itertools.cycle(drawn)


KINDS = ("one shape", "two shapes in turns", "fresh lengths")


def resident_bytes() -> int:
    """The bytes of this process; 0 where the system does not report them."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(kind: str, device: Device, calls: int, least: int, most: int) -> Record:
    size = 128 if device.is_cuda else 8
    case = Case(
        "host", "host", 1, most, 4, 8, size, size, (most,),
        dtype=torch.bfloat16 if device.is_cuda else torch.float32,
    )  # fmt: skip
    x = make_inputs(case, device.torch)
    given = (x.q, x.k, x.v, x.g, x.beta)
    # The host does not read offsets on a device, so these offsets serve every length.
    cu_seqlens = torch.tensor([0, 16, 24, least], dtype=torch.int32, device=device.torch)

    def call(T: int) -> Callable[[], object]:
        q, k, v, g, beta = (y[:, :T] for y in given)
        return partial(chunk_gated_delta_rule, q, k, v, g, beta, cu_seqlens=cu_seqlens)

    return timed(kind, map(call, lengths(kind, least, most)), device, calls)


def steps(device: Device) -> dict[str, Callable[[], object]]:
    """Decode steps of one sequence."""
    H, HV, K, V = (16, 32, 128, 128) if device.is_cuda else (1, 2, 16, 16)
    dtype = torch.bfloat16 if device.is_cuda else torch.float32
    zeros = partial(torch.zeros, device=device.torch)
    pool, parameters = zeros(1, HV, V, K), zeros(2, HV)
    options: dict[str, Any] = {
        "A_log": parameters[0],
        "dt_bias": parameters[1],
        "use_qk_l2norm_in_kernel": True,
        "state_v_first": True,
    }
    tokens: dict[str, Any] = {
        "read_slots": zeros(1, dtype=torch.int32),
        "mixed_qkv": zeros(1, 2 * H * K + HV * V, dtype=dtype),
        "a": zeros(1, HV, dtype=dtype),
        "b": zeros(1, HV, dtype=dtype),
        "out": zeros(1, HV, V, dtype=dtype),
    }
    window = make_window(1, H, HV, K, V, dtype, device.torch, max_tokens=1)
    with_window = prepare_step(pool, **options, window=window)
    return {
        "recurrent_step": partial(recurrent_step, pool, **options, **tokens),
        "prepare_step": partial(prepare_step(pool, **options), **tokens),
        "prepare_step, window": partial(with_window, **tokens, positions=tokens["read_slots"]),
    }


def timed(name: str, every: Iterator[Callable[[], object]], device: Device, calls: int) -> Record:
    times: list[float] = []
    for call in itertools.islice(every, min(WARMUP, calls)):  # compiles
        call()
    gc.collect()
    device.synchronize()
    before = resident_bytes()
    gc.disable()
    try:
        for number, call in enumerate(itertools.islice(every, calls)):
            if number % IN_A_ROW == 0:
                device.synchronize()
            start = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - start))
    finally:
        gc.enable()
    device.synchronize()
    gc.collect()
    ordered = sorted(times)
    return {
        "calls": f"{calls}, {name}",
        "median us": statistics.median(times),
        "mean us": statistics.fmean(times),
        "99 % us": ordered[int(0.99 * (calls - 1))],
        "KiB left": (resident_bytes() - before) / 1024,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--steps", action="store_true", help="decode steps")
    parser.add_argument("--backend", default="auto", choices=("auto", "cuda", "triton"))
    parser.add_argument("--jsonl", type=Path, help="also append a record a row to this file")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU")
    options = parser.parse_args(arguments)
    if options.calls < 1:
        parser.error(f"--calls must be at least 1, got {options.calls}")
    device = device_for(options.dry_run)
    least, most = (LEAST, MOST) if device.is_cuda else TOY
    backend = options.backend if device.is_cuda else "reference"
    records = []
    with backend_chosen(backend), torch.no_grad():
        calls = {kind: partial(measure, kind, device, options.calls, least, most) for kind in KINDS}
        if options.steps:
            calls = {
                name: partial(timed, name, itertools.repeat(call), device, options.calls)
                for name, call in steps(device).items()
            }
        for measured in calls.values():
            records.append(measured())
            append_record(options.jsonl, records[-1])
    print(f"{device_line(device)}, GDN_BACKEND={backend}\n\n{table(records)}")


if __name__ == "__main__":
    main()
