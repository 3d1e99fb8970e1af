"""Times of a decode step from a pool of states, of FlashInfer and FLA, and of the memory's roof.

    python -m benchmarks.decode [--sequences 1 64 256] [--heads 16/32 16/64] [--pools float32]
        [--tokens 1 4] [--gates mild,model] [--peers flashinfer] [--jsonl FILE] [--turns FILE]

Each row is one token a sequence, or several drafted ones, q, k and v in bf16, K = V = 128, with the
L2 norm, the gate and the sigmoid in the kernel. The numbers are the microseconds of one call in a
CUDA graph, the roof's time divided by them, and the host's microseconds for a call from Python. The
roof is the faster of a copy and an in-place product that read and write as many bytes as the states
of N sequences have. The calls of a graph use, one after the other, as many pools as exceed the L2
cache, as the layers of a model do. Every implementation's o is first compared with the float64
recurrence; one that differs is not timed.

A step without a window reads and writes the state of each sequence. With several tokens it writes
one state for each token, and the rows of `LAST_STATE` write the last state alone. A step with a
window reads the state and writes records. Its time is the mean over a fold period, in which every
head is folded once. A replay repeats the positions of the replay before. Its o is therefore
meaningless, but the work of a step depends on its position alone.

`benchmarks/decode_calls.py` says what each peer takes. A peer that is not installed is named as
such.
"""

import argparse
import contextlib
import fcntl
import gc
import itertools
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.decode_calls import (
    PEERS,
    K,
    Maker,
    V,
    WindowSteps,
    exact,
    make_step,
    makers_of,
    output,
)
from benchmarks.machine import commit, header
from benchmarks.measure import (
    GATE,
    Device,
    Replay,
    attempt,
    cuda_device,
    host_time,
    in_a_row,
    relative,
    replay_times,
)
from benchmarks.peers import PEERS as IMPLEMENTATIONS
from benchmarks.peers import Ours
from benchmarks.report import append_record
from benchmarks.shapes import add_gates_option, gates_of, labelled

CALLS = 16  # of a graph, at least
BEYOND_L2 = 300_000_000  # bytes
LEGEND = (
    "Microseconds of a step in a CUDA graph, the roof's time divided by them, and microseconds of "
    "the host\nfor a call. The roof is the faster of a copy and an in-place product of as many "
    "bytes as the states\nare, read and written."
)


class Replays(NamedTuple):
    """`calls` calls in a CUDA graph."""

    replay: Replay
    calls: int


def replays_of(calls: Sequence[Callable[[], Any]], device: Device) -> Replays:
    """As many rounds over `calls` as make CALLS calls or the fold period of a window."""
    first = calls[0]
    rounds = first.period if isinstance(first, WindowSteps) else -(-CALLS // len(calls))
    every = [*calls] * rounds
    return Replays(Replay(in_a_row(every), device), len(every))


def roof_time(nbytes: int, device: Device, *, copies: int, rounds: int) -> float:
    """Microseconds of the faster of two ways to read and write `nbytes`."""
    pools = torch.randn(copies + 1, nbytes // 4, device=device.torch)
    ways = {
        "copy": replays_of([partial(pools[-1].copy_, x) for x in pools[:-1]], device),
        "scale": replays_of([partial(x.mul_, 1) for x in pools[:-1]], device),
    }
    return min(medians(ways, device, rounds).values())


@contextlib.contextmanager
def taking_turns(path: Path | None) -> Iterator[None]:
    """The GPU to this process alone among those that have the same file."""
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        yield
        torch.cuda.synchronize()


def add_turns_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--turns", type=Path, metavar="FILE",
        help="processes with the same file use the GPU in turns, and compile at the same time",
    )  # fmt: skip


def medians(replays: Mapping[str, Replays], device: Device, rounds: int) -> dict[str, float]:
    """Microseconds of a call of each."""
    alone = {name: x.replay for name, x in replays.items()}
    times = replay_times(alone, device, rounds, flush=False)
    return {name: statistics.median(x) / replays[name].calls for name, x in times.items()}


def measure(
    N: int,
    T: int,
    H: int,
    HV: int,
    dtype: torch.dtype,
    gates: str,
    device: Device,
    *,
    makers: Mapping[str, Maker],
    rounds: int,
    turns: Path | None,
) -> Any:
    nbytes = N * HV * K * V * dtype.itemsize
    copies = max(1, min(24, BEYOND_L2 // nbytes))
    with taking_turns(turns):
        step = make_step(N, T, H, HV, gates, device.torch)
        expected = exact(step, min(N, 8))
        roof = roof_time(nbytes, device, copies=copies, rounds=rounds)
    rows: dict[str, dict[str, Any]] = {}
    for name, maker in makers.items():
        make = partial(maker, step, dtype)
        rows[name], why = measure_one(
            make, expected, device, copies=copies, rounds=rounds, turns=turns
        )
        if why is not None:
            rows[name] = {"skipped": why}
        gc.collect()
    return {
        "kind": "decode",
        "sequences": N,
        "tokens": T,
        "heads": f"{H}/{HV}",
        "pool": str(dtype).removeprefix("torch."),
        "gates": gates,
        "roof": roof,
        "results": rows,
    }


def measure_one(
    make: Callable[[], Callable[[], Any] | str],
    expected: Tensor,
    device: Device,
    *,
    copies: int,
    rounds: int,
    turns: Path | None,
) -> tuple[dict[str, Any], str | None]:
    """The numbers of an implementation, or the reason why it has none. Only its pools exist at that
    time, because those of all implementations would not fit."""
    with taking_turns(turns):
        call, why = attempt(device, make)
    if why is None and isinstance(call, str):
        why = call
    if why is not None:
        return {}, why
    result, why = attempt(device, call)  # compiles, while another process has its turn
    if why is not None:
        return {}, why
    with taking_turns(turns):
        return timed(call, make, result, expected, device, copies=copies, rounds=rounds)


def timed(
    call: Callable[[], Any],
    make: Callable[[], Any],
    result: Any,
    expected: Tensor,
    device: Device,
    *,
    copies: int,
    rounds: int,
) -> tuple[dict[str, Any], str | None]:
    """The error and the times of a call, of which `make` makes more."""
    o = output(result, expected.shape[1:])[: expected.shape[0]]
    row: dict[str, Any] = {"error": relative(o, expected)}
    if not row["error"] < GATE:
        return row, f"o differs by {row['error']:.1e} from float64"
    row["host"] = host_time(call, device)
    calls = [call, *(make() for _ in range(copies - 1))]
    replays, why = attempt(device, partial(replays_of, calls, device))
    if why is None:
        row["time"] = medians({"": replays}, device, rounds)[""]
    return row, why


def sequences_of(record: Any) -> str:
    tokens = record.get("tokens", 1)
    return f"{record['sequences']}" + (f" x {tokens} tokens" if tokens > 1 else "")


def tables(records: list[Any], names: Collection[str]) -> str:
    """A table in Markdown, whose meaning `LEGEND` explains."""
    lines = [
        f"| sequences, H / HV, pool | roof | {' | '.join(names)} |",
        f"|---|---|{'---|' * len(names)}",
    ]
    for record in records:
        cells = []
        for name in names:
            row = record["results"].get(name, {})
            if "time" not in row:
                cells.append("-")
                continue
            share = 100 * record["roof"] / row["time"]
            host = f", host {row['host']:.0f}" if "host" in row else ""
            cells.append(f"{row['time']:.2f}, {share:.0f} %{host}")
        head = f"{sequences_of(record)}, {record['heads']}, {record['pool']}"
        head = labelled(head, gates_of(record))
        lines.append(f"| {head} | {record['roof']:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1])
    parser.add_argument("--heads", nargs="+", default=["16/32", "16/64"], metavar="H/HV")
    parser.add_argument("--pools", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--rounds", type=int, default=100)
    add_gates_option(parser)
    parser.add_argument("--jsonl", type=Path, help="also append a record a row to this file")
    add_turns_option(parser)
    parser.add_argument("--commit", help="what the records say was measured (default: git's)")
    options = parser.parse_args()
    device = cuda_device("a decode step is timed on")
    makers = makers_of(options.peers)
    versions, missing = {"gdn_triton": Ours.version()}, []
    for key in options.peers:
        try:
            versions[key] = IMPLEMENTATIONS[key].version()
        except ImportError as error:
            missing.append(f"{key}: not measured: {error}")
    head = header("benchmarks.decode", versions, missing, device, options.commit or commit())
    append_record(options.jsonl, head)
    records, whys = [], set()
    rows = itertools.product(
        options.tokens, options.heads, options.sequences, options.pools, options.gates
    )
    for T, heads, N, pool, gates in rows:
        H, HV = map(int, heads.split("/"))
        dtype = getattr(torch, pool)
        record = measure(
            N, T, H, HV, dtype, gates, device,
            makers=makers, rounds=options.rounds, turns=options.turns,
        )  # fmt: skip
        print(tables([record], makers).splitlines()[-1], flush=True)
        records.append(record)
        for name, row in record["results"].items():
            if "skipped" in row:
                whys.add(f"{name}, {pool}: {row['skipped']}")
        append_record(options.jsonl, record)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print(tables(records, makers))
    print("\n".join(["", *sorted(whys)]))


if __name__ == "__main__":
    main()
