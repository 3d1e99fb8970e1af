"""Times of the prefill on a pool of states, and of the chunked op between a gather and a scatter of
its states.

    python -m benchmarks.prefill [--rounds 30] [--gates mild,model] [--dry-run] [--jsonl FILE]

q, k and v in bf16, K = V = 128, packed sequences of one length from random slots of a pool. Each
time is in microseconds, of a CUDA graph, as the median of replays after a flush of the L2 cache:

- `call`: `chunk_gated_delta_rule` from gathered states, its final states in new memory;
- `gather, call, scatter`: the same between `index_select` of the pool and `index_copy_` into it;
- `pool`: `chunk_prefill`;
- `pool, every n`: the same, with the state after every n tokens kept.

o and the pool of the second and the third are compared bit by bit. --dry-run runs toy sizes on the
CPU.
"""

import argparse
import itertools
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import Device, Record, Replay, device_for, device_line, replay_times
from benchmarks.report import append_record, table
from benchmarks.shapes import Random, add_gates_option, make_gates
from gdn_triton import chunk_gated_delta_rule, chunk_prefill


class Batch(NamedTuple):
    N: int
    T: int  # tokens of a sequence
    H: int
    HV: int
    K: int  # and V
    pool: torch.dtype
    every: int  # tokens between two states that are kept


FP32, BF16 = torch.float32, torch.bfloat16
BATCHES = [
    Batch(1, 8192, 16, 32, 128, FP32, 256),
    Batch(8, 1024, 16, 32, 128, FP32, 256),
    Batch(64, 128, 16, 32, 128, FP32, 256),
    Batch(64, 128, 16, 32, 128, BF16, 256),
    Batch(128, 32, 16, 32, 128, FP32, 256),
    Batch(1, 32768, 2, 8, 128, FP32, 256),
]
TOY = [Batch(1, 128, 1, 2, 16, FP32, 64), Batch(3, 20, 1, 2, 16, BF16, 64)]


def measure(batch: Batch, gates: str, device: Device, rounds: int) -> Record:
    N, T, H, HV, K, dtype, every = batch
    D = device.torch
    q, k = F.normalize(torch.randn(2, 1, N * T, H, K, device=D), dim=-1).bfloat16()
    v = torch.randn(1, N * T, HV, K, device=D).bfloat16()
    g = make_gates(gates, (1, N * T, HV), Random(0, D))
    beta = torch.rand(1, N * T, HV, device=D)
    cu_seqlens = torch.arange(0, N * T + 1, T, dtype=torch.int32, device=D)
    pool = torch.randn(2 * N + 1, HV, K, K, device=D).to(dtype)
    slots = torch.randperm(2 * N, device=D)[:N] + 1
    started = torch.ones(N, dtype=torch.bool, device=D)
    kept = torch.empty(N * T // every, HV, K, K, device=D, dtype=dtype)
    gathered, out = pool.index_select(0, slots).float(), torch.empty_like(v)

    def call(state: Tensor = gathered) -> tuple[Tensor, Tensor]:
        o, final = chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens
        )
        assert final is not None
        return o, final

    def around() -> Tensor:
        o, final = call(pool.index_select(0, slots).float())
        pool.index_copy_(0, slots, final.to(dtype))
        return o

    x = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "out": out}
    x |= {"cu_seqlens": cu_seqlens, "has_initial_state": started}

    def on_pool() -> None:
        chunk_prefill(pool, slots, **x)

    def keeping() -> None:
        chunk_prefill(pool, slots, **x, checkpoint_every_n_tokens=every, state_checkpoints=kept)

    before = pool.clone()
    o, after = around().clone(), pool.clone()
    pool.copy_(before)
    on_pool()
    same = torch.equal(o, out) and torch.equal(after, pool)
    calls: dict[str, Callable[[], Any]] = {
        "call": call,
        "gather, call, scatter": around,
        "pool": on_pool,
        f"pool, every {every}": keeping,
    }
    replays = {name: Replay(function, device) for name, function in calls.items()}
    times = replay_times(replays, device, rounds, flush=True)
    return {
        "sequences": f"{N} x {T}",
        "H/HV": f"{H}/{HV}",
        "states": str(dtype).removeprefix("torch."),
        **{name: statistics.median(found) for name, found in times.items()},
        "same bits": same,
        "gates": gates,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--jsonl", type=Path, help="also append a record a row to this file")
    add_gates_option(parser)
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU")
    options = parser.parse_args(arguments)
    device = device_for(options.dry_run)
    if device.is_cuda:
        os.environ.setdefault("GDN_BACKEND", "triton")
    batches, rounds = (TOY, 1) if options.dry_run else (BATCHES, options.rounds)
    records = []
    with torch.no_grad():
        for batch, gates in itertools.product(batches, options.gates):
            records.append(measure(batch, gates, device, rounds))
            append_record(options.jsonl, records[-1])
    print(f"{device_line(device)}\n\n{table(records)}")


if __name__ == "__main__":
    main()
