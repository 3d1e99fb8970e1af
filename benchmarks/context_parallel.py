"""Times of one long sequence split over GPUs: forward, and forward and backward, by number of GPUs.

    python -m benchmarks.context_parallel --out DIR     on 1, 2, 4 and 8 GPUs, as there are
    python -m benchmarks.context_parallel --dry-run     two processes on the CPU at a toy size

Each process holds an even shard of the sequence. A row is the median over rounds of the slowest
process of a round, from a barrier to the end of the work; memory is the peak of one process above
what its inputs take. On one GPU the call is the plain one, without a context. `--ways` chooses how
several split the call: maps of the state (cp_context); heads, where a process gets all tokens of
some heads by an all-to-all and sends the output back by another; or fla, by the installed package
of flash-linear-attention and its own context, which gets a row on one GPU too. `--graphs` also
times the calls of `maps` as replays of a captured CUDA graph. `--tokens` chooses shapes by their
tokens, and `--calls forward` leaves the backward out. Rows are printed and written to
DIR/context_parallel.jsonl.
"""

import argparse
import importlib
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.shapes import Random, add_gates_option, make_gates
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
    Shape(262_144, 16, 32),
    Shape(524_288, 16, 32),
    Shape(524_288, 4, 8),
    Shape(1_048_576, 4, 8),
]
TOY = [Shape(256, 2, 4, 16, 16)]
CALLS = ("forward", "both")
HOST = "127.0.0.1"
# Bytes of inputs, results and what a backward has beside them, a token and value head of 128, with
# room to spare: a shape that would not fit on the GPUs of a row is left out.
BYTES_A_TOKEN = 4096


def make_inputs(
    shape: Shape, rows: int, gates: str, device: torch.device
) -> dict[str, torch.Tensor]:
    """One shard, on the device; the seed is the process's own."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k = torch.randn(2, 1, rows, shape.H, shape.K, device=device, dtype=dtype)
    v = torch.randn(1, rows, shape.HV, shape.V, device=device, dtype=dtype)
    g = make_gates(gates, (1, rows, shape.HV), Random(torch.initial_seed(), device))
    beta = torch.rand(1, rows, shape.HV, device=device)
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return {name: x.requires_grad_() for name, x in tensors.items()}


class ByHeads(torch.autograd.Function):
    """From a shard of the tokens and all heads to all tokens and a share of the heads, or back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, back: bool) -> torch.Tensor:
        ctx.back, world = back, dist.get_world_size()
        B, T, heads, *rest = x.shape
        if back:
            parts = x.reshape(B * world, T // world, heads, *rest)
        else:
            parts = x.reshape(B * T, world, heads // world, *rest).transpose(0, 1)
        sent = parts.contiguous()
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent)
        if back:
            return got.transpose(0, 1).reshape(B, T // world, heads * world, *rest)
        return got.reshape(B, T * world, heads // world, *rest)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> Any:
        return exchange_heads(dx, not ctx.back), None


# torch types neither.
exchange_heads: Any = ByHeads.apply
TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]


def by_heads(q: Any, k: Any, v: Any, g: Any, beta: Any, **options: Any) -> torch.Tensor:
    """The call on a share of the heads, between two exchanges."""
    q, k, v, g, beta = (exchange_heads(x, False) for x in (q, k, v, g, beta))
    o, _ = chunk_gated_delta_rule(q, k, v, g, beta, **options)
    found: torch.Tensor = exchange_heads(o, True)
    return found


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


def way_of(way: str, shape: Shape, device: torch.device) -> Callable[..., Any]:
    """A function of the inputs of one process, which returns o."""
    world, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    if world > 1 and way == "heads":
        return partial(by_heads, use_qk_l2norm_in_kernel=True)
    offsets = torch.tensor([0, shape.T])
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
    rule, build = chunk_gated_delta_rule, build_cp_context
    if way == "fla":
        # Without it FLA hands calls to other packages that it finds.
        os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
        rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        build = importlib.import_module("fla.ops.cp").build_cp_context
    if world > 1:
        options["cp_context"] = build(offsets.to(device), group=group, cu_seqlens_cpu=offsets)

    def call(**x: Any) -> Any:
        return rule(**x, **options)[0]

    return call


def captured(run: Callable[[], Any], device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph of `run`, which has run before."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def measure(
    shape: Shape, way: str, gates: str, device: torch.device, plan: "Plan"
) -> dict[str, Any]:
    world, rounds = dist.get_world_size(), plan.rounds
    call = way_of(way, shape, device)
    x = make_inputs(shape, shape.T // world, gates, device)
    do = torch.randn_like(x["v"])
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)

    def forward() -> Any:
        with torch.no_grad():
            return call(**x)

    def both() -> Any:
        return torch.autograd.grad(call(**x), list(x.values()), do)

    record: dict[str, Any] = {"gpus": world, "way": way, "gates": gates, **asdict(shape)}
    runs = {name: {"forward": forward, "both": both}[name] for name in plan.calls}
    for name, run in runs.items():
        try:
            # Compiles, and opens NCCL's connections.
            seconds(run, device, 2)
        except RuntimeError as error:
            # FLA refuses its backward for some releases of Triton, on all ranks alike.
            if way != "fla" or isinstance(error, torch.OutOfMemoryError):
                raise
            record[f"{name}_refused"] = str(error)
            continue
        times = seconds(run, device, rounds)
        record[f"{name}_ms"] = 1e3 * statistics.median(times)
        record[f"{name}_ms_least"] = 1e3 * min(times)
    if device.type == "cuda":
        record["peak_gib"] = (torch.cuda.max_memory_allocated(device) - before) / 2**30
    if plan.graphs and way == "maps" and device.type == "cuda":
        for name, run in runs.items():
            graph = captured(run, device)
            seconds(graph.replay, device, 2)
            times = seconds(graph.replay, device, rounds)
            record[f"{name}_graph_ms"] = 1e3 * statistics.median(times)
            # NCCL waits for the graph when the process group ends.
            del graph
    return record


class Plan(NamedTuple):
    """What the processes of one number of GPUs do. port: of the store."""

    world: int
    port: int
    trial: bool
    rounds: int
    ways: tuple[str, ...]
    graphs: bool
    gates: tuple[str, ...]
    calls: tuple[str, ...]
    shapes: tuple[Shape, ...]
    out: Path | None


def work(rank: int, plan: Plan) -> None:
    trial, world = plan.trial, plan.world
    device = torch.device("cpu") if trial else torch.device("cuda", rank)
    if trial:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo" if trial else "nccl",
        store=TCPStore(HOST, plan.port, is_master=False),
        rank=rank,
        world_size=world,
        device_id=None if trial else device,
    )
    ways = [way for way in plan.ways if world > 1 or way != "heads"]
    for shape, gates, way in itertools.product(plan.shapes, plan.gates, ways):
        if not trial:
            memory = torch.cuda.get_device_properties(device).total_memory
            if shape.T * shape.HV * BYTES_A_TOKEN > memory * world:
                continue
        try:
            record = measure(shape, way, gates, device, plan)
        except torch.OutOfMemoryError:
            if world > 1:
                raise
            record = {"gpus": world, "way": way, "gates": gates, **asdict(shape), "memory": "out"}
        if rank == 0:
            line = json.dumps(record)
            print(line, flush=True)
            if plan.out is not None:
                with (plan.out / "context_parallel.jsonl").open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
        if not trial:
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="folder of the records")
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2, 4, 8], help="how many")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds of each row")
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=("maps", "heads", "fla"),
        default=["maps"],
        help="how a call is split",
    )
    parser.add_argument("--graphs", action="store_true", help="replays of CUDA graphs too")
    parser.add_argument("--tokens", nargs="+", type=int, help="of the shapes (default: all)")
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS))
    parser.add_argument("--dry-run", action="store_true", help="two processes on the CPU")
    add_gates_option(parser)
    args = parser.parse_args(arguments)
    shapes = [shape for shape in SHAPES if args.tokens is None or shape.T in args.tokens]
    if not shapes:
        sizes = sorted({shape.T for shape in SHAPES})
        parser.error(f"--tokens: expected some of {sizes}, got {args.tokens}")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    # Its names are not exported in the eyes of a type checker.
    processes: Any = torch.multiprocessing
    gpus = torch.cuda.device_count()
    if args.dry_run:
        # Read by the children, which have no GPU to find then.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for world in (2,) if args.dry_run else (n for n in args.gpus if n <= gpus):
        # The server chooses a free port, and holds it until the processes have ended.
        store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        plan = Plan(
            world=world,
            port=store.port,
            trial=args.dry_run,
            rounds=args.rounds,
            ways=tuple(args.ways),
            graphs=args.graphs,
            gates=args.gates,
            calls=tuple(args.calls),
            shapes=tuple(TOY if args.dry_run else shapes),
            out=args.out,
        )
        processes.spawn(work, (plan,), nprocs=world)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
