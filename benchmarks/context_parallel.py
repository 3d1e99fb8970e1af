"""Times of one long sequence split over GPUs: forward, and forward and backward, by number of GPUs.

    python -m benchmarks.context_parallel --out DIR     on all GPUs, 1, 2 and 4 of them as there are
    python -m benchmarks.context_parallel --dry-run     two processes on the CPU at a toy size

Each process holds an even shard of the sequence. A row is the median over rounds of the slowest
process of a round, from a barrier to the end of the work; memory is the peak of one process above
what its inputs take. On one GPU the call is the plain one, without a context. Rows are printed and
written to DIR/context_parallel.jsonl.
"""

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.shapes import Random, make_gates
from gdn_triton import chunk_gated_delta_rule
from gdn_triton.distributed import build_cp_context


@dataclass(frozen=True)
class Shape:
    """One sequence of T tokens."""

    T: int
    H: int
    HV: int
    K: int = 128
    V: int = 128


SHAPES = [
    Shape(131_072, 16, 32),
    Shape(131_072, 4, 8),
    Shape(524_288, 16, 32),
    Shape(524_288, 4, 8),
    Shape(1_048_576, 4, 8),
]
TOY = [Shape(256, 1, 2, 16, 16)]
# Bytes of inputs, results and what a backward has beside them, a token and value head of 128, with
# room to spare: a shape that would not fit on the GPUs of a row is left out.
BYTES_A_TOKEN = 8192


def make_inputs(shape: Shape, rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    """One shard, on the device; the seed is the process's own."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k = torch.randn(2, 1, rows, shape.H, shape.K, device=device, dtype=dtype)
    v = torch.randn(1, rows, shape.HV, shape.V, device=device, dtype=dtype)
    g = make_gates("mild", (1, rows, shape.HV), Random(torch.initial_seed(), device))
    beta = torch.rand(1, rows, shape.HV, device=device)
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return {name: x.requires_grad_() for name, x in tensors.items()}


def seconds(run: Callable[[], object], device: torch.device, rounds: int) -> list[float]:
    """Of the slowest process, round by round."""
    times = []
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    found: list[float] = slowest.tolist()
    return found


def measure(shape: Shape, device: torch.device, rounds: int) -> dict[str, Any]:
    world = dist.get_world_size()
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
    offsets, group = torch.tensor([0, shape.T]), dist.group.WORLD
    assert group is not None
    if world > 1:
        options["cp_context"] = build_cp_context(offsets.to(device), group, cu_seqlens_cpu=offsets)
    x = make_inputs(shape, shape.T // world, device)
    do = torch.randn_like(x["v"])
    options |= x
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)

    def forward() -> None:
        with torch.no_grad():
            chunk_gated_delta_rule(**options)

    def both() -> None:
        o, _ = chunk_gated_delta_rule(**options)
        torch.autograd.grad(o, list(x.values()), do)

    record: dict[str, Any] = {"gpus": world, **asdict(shape)}
    for name, run in (("forward", forward), ("both", both)):
        # Compiles, and opens NCCL's connections.
        seconds(run, device, 2)
        times = seconds(run, device, rounds)
        record[f"{name}_ms"] = 1e3 * statistics.median(times)
        record[f"{name}_ms_least"] = 1e3 * min(times)
    if device.type == "cuda":
        record["peak_gib"] = (torch.cuda.max_memory_allocated(device) - before) / 2**30
    return record


def work(rank: int, world: int, port: int, trial: bool, rounds: int, out: str | None) -> None:
    device = torch.device("cpu") if trial else torch.device("cuda", rank)
    if trial:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo" if trial else "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        device_id=None if trial else device,
    )
    for shape in TOY if trial else SHAPES:
        if not trial:
            memory = torch.cuda.get_device_properties(device).total_memory
            if shape.T * shape.HV * BYTES_A_TOKEN > memory * world:
                continue
        record = measure(shape, device, rounds)
        if rank == 0:
            line = json.dumps(record)
            print(line, flush=True)
            if out is not None:
                with Path(out, "context_parallel.jsonl").open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
        if not trial:
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="folder of the records")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds of each row")
    parser.add_argument("--dry-run", action="store_true", help="two processes on the CPU")
    args = parser.parse_args(arguments)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    # Its names are not exported in the eyes of a type checker.
    processes: Any = torch.multiprocessing
    gpus = torch.cuda.device_count()
    if args.dry_run:
        # Read by the children, which have no GPU to find then.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for world in (2,) if args.dry_run else (n for n in (1, 2, 4, 8) if n <= gpus):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        out = None if args.out is None else str(args.out)
        processes.spawn(work, (world, port, args.dry_run, args.rounds, out), nprocs=world)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
