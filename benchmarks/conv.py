"""Times of the convolution at Qwen3-Next's sizes, of the calls that it replaces, and of a copy of
its bytes.

    python -m benchmarks.conv [--tokens 2048 16384] [--sequences 1 64 256] [--dry-run]

bf16, 16 key and 32 value heads of 128, 4 taps; microseconds of a call. A CUDA graph runs the call
on 2 to 12 buffers, so that only the smallest input can stay in the L2 cache. Times are medians of
its replays. The copy is the faster of `Tensor.copy_` and `torch.add(x, 0, out=y)` of as many bytes
as the call reads and writes. The host's time ends when a call from Python returns. --dry-run runs
all of it with toy sizes on the CPU.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import (
    Device,
    Record,
    Replay,
    device_for,
    device_line,
    host_time,
    in_a_row,
    replay_times,
)
from benchmarks.report import append_record, table
from gdn_triton import (
    causal_conv1d,
    causal_conv1d_update,
    fused_conv_prep,
    fused_post_conv_prep,
)

W = 4
BUFFERED = 260_000_000  # bytes that the calls of a graph read and write, if 12 are enough
MOST_BUFFERS = 12
MOST_TIME = 1e6  # us that the replays of a graph may take

Call = Callable[[], Any]


class Sizes(NamedTuple):
    H: int
    HV: int
    K: int
    V: int

    @property
    def D(self) -> int:
        return 2 * self.H * self.K + self.HV * self.V

    def bytes(self, tokens: int) -> int:
        """The bytes that `fused_conv_prep` reads and writes."""
        return tokens * (2 * self.D * 2 + 2 * self.HV * 2 + 8 * self.HV)


MODEL, TOY = Sizes(16, 32, 128, 128), Sizes(1, 2, 8, 8)


class Bench:
    """The parameters of a layer, and functions that time calls on them."""

    def __init__(self, sizes: Sizes, device: Device, rounds: int) -> None:
        self.sizes, self.device, self.rounds = sizes, device, rounds
        self.weight = 0.5 * self.normal(sizes.D, W)
        self.A_log, self.dt_bias = torch.randn(2, sizes.HV, device=device.torch)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device.torch).bfloat16()

    def buffers(self, tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """x, a, b, again and again."""
        count = min(MOST_BUFFERS, BUFFERED // self.sizes.bytes(tokens) + 1)
        HV = self.sizes.HV
        return [
            (self.normal(tokens, self.sizes.D), *self.normal(tokens, 2 * HV).split(HV, 1))
            for _ in range(max(2, count))
        ]

    def time(self, calls: Sequence[Call]) -> float:
        """Microseconds of one of the calls, all of which are captured in one graph."""
        replays = {"": Replay(in_a_row(calls), self.device)}
        once = replay_times(replays, self.device, 1, flush=False)[""][0]
        rounds = max(1, min(self.rounds, int(MOST_TIME / once)))
        times = replay_times(replays, self.device, rounds, flush=False)[""]
        return statistics.median(times) / len(calls)

    def copy_time(self, nbytes: int) -> float:
        """Microseconds for a copy that reads and writes `nbytes` in all."""
        count = max(2, min(MOST_BUFFERS, BUFFERED // nbytes + 1))
        pairs = [
            torch.empty(2, nbytes // 4, dtype=torch.bfloat16, device=self.device.torch)
            for _ in range(count)
        ]
        copies = [partial(y.copy_, x) for x, y in pairs]
        sums = [partial(torch.add, x, 0, out=y) for x, y in pairs]
        return min(self.time(copies), self.time(sums))

    # ------------------------------------------------------------------------------------- calls

    def fused(self, x: Tensor, a: Tensor, b: Tensor, **options: Any) -> tuple[Tensor, ...]:
        H, _, K, V = self.sizes
        return fused_conv_prep(x, self.weight, a, b, self.A_log, self.dt_bias, H, K, V, **options)

    def prep(self, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        H, _, K, V = self.sizes
        return fused_post_conv_prep(y, a, b, self.A_log, self.dt_bias, H, K, V)

    def two_calls(self, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return self.prep(causal_conv1d(x, self.weight), a, b)

    def torch_conv(self, x: Tensor, weight: Tensor) -> Tensor:
        """[T, D], by torch's convolution."""
        D = self.sizes.D
        y = F.conv1d(x.t()[None], weight[:, None], padding=W - 1, groups=D)[0, :, : x.shape[0]]
        return F.silu(y).t()

    def torch_then_prep(self, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return self.prep(self.torch_conv(x, self.weight), a, b)

    def gradients(self, function: Callable[..., Tensor], x: Tensor, dy: Tensor) -> Call:
        """Forward and gradients of x and the weight."""
        leaves = x.requires_grad_(), self.weight.detach().clone().requires_grad_()
        return lambda: torch.autograd.grad(function(*leaves), leaves, dy)

    # ------------------------------------------------------------------------------------ tables

    def whole(self, tokens: int) -> Record:
        """One sequence."""
        inputs = self.buffers(tokens)
        both = zip(self.fused(*inputs[0]), self.two_calls(*inputs[0]), strict=True)
        return {
            "tokens": tokens,
            "MB": round(self.sizes.bytes(tokens) / 1e6),
            "copy": self.copy_time(self.sizes.bytes(tokens)),
            "fused": self.time([partial(self.fused, *x) for x in inputs]),
            "conv": self.time([partial(causal_conv1d, x[0], self.weight) for x in inputs]),
            "conv, prep": self.time([partial(self.two_calls, *x) for x in inputs]),
            "torch conv1d, prep": self.time(
                [partial(self.torch_then_prep, *x) for x in inputs[:2]]
            ),
            "same bits": all(torch.equal(y, z) for y, z in both),
        }

    def packed(self, tokens: int, length: int) -> Record:
        """As many sequences of one length as fit."""
        inputs = self.buffers(tokens)
        N = tokens // length
        ends = range(0, N * length + 1, length)
        cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=self.device.torch)
        states = {
            "state": self.normal(N, W - 1, self.sizes.D).mT,
            "read_slots": torch.arange(N, dtype=torch.int32, device=self.device.torch),
        }
        parts = [self.fused(*(y[i:j] for y in inputs[0])) for i, j in itertools.pairwise(ends)]
        got = self.fused(*inputs[0], cu_seqlens=cu_seqlens)
        same = all(
            torch.equal(y[: ends[-1]], torch.cat(z))
            for y, z in zip(got, zip(*parts, strict=True), strict=True)
        )
        packed = partial(self.fused, cu_seqlens=cu_seqlens)
        return {
            "tokens": tokens,
            "sequences": f"{N} x {length}",
            "one sequence": self.time([partial(self.fused, *x) for x in inputs]),
            "packed": self.time([partial(packed, *x) for x in inputs]),
            "packed, states": self.time([partial(packed, *x, **states) for x in inputs]),
            "bits of each alone": same,
        }

    def trained(self, tokens: int) -> Record:
        D = self.sizes.D
        inputs = [(self.normal(tokens, D), self.normal(tokens, D)) for _ in range(3)]
        functions = {"ours": causal_conv1d, "torch": self.torch_conv}
        with torch.enable_grad():
            times = {
                f"forward, gradients: {name}": self.time(
                    [self.gradients(function, *x) for x in inputs]
                )
                for name, function in functions.items()
            }
        copy = self.copy_time(5 * 2 * tokens * D)
        return {"tokens": tokens, **times, "copy of both": copy}

    def update(self, N: int, layout: str) -> Record:
        """One token of each of N sequences, on a pool."""
        D = self.sizes.D
        count = 6 if N > 1 else 2
        pools = [self.normal(N, W - 1, D).mT for _ in range(count)]
        if layout == "taps dense":
            pools = [pool.contiguous() for pool in pools]
        slots = torch.randperm(N, device=self.device.torch).int()
        calls = [
            partial(
                causal_conv1d_update, self.normal(N, D), self.weight, state=pool, read_slots=slots
            )
            for pool in pools
        ]
        # A token, its result, and the W - 1 tokens of the state, read and written.
        nbytes = 2 * W * 2 * N * D
        copy = self.copy_time(nbytes)
        kB = round(nbytes / 1e3)
        return {"sequences": N, "pool": layout, "update": self.time(calls), "kB": kB, "copy": copy}

    def host(self) -> Record:
        x, a, b = self.buffers(64)[0]
        pool = self.normal(64, self.sizes.D, W - 1)
        calls: dict[str, Call] = {
            "fused": partial(self.fused, x, a, b),
            "conv": partial(causal_conv1d, x, self.weight),
            "update": partial(causal_conv1d_update, x, self.weight, state=pool),
            "prep": partial(self.prep, x, a, b),
        }
        for call in calls.values():
            call()
        times = {name: host_time(call, self.device) for name, call in calls.items()}
        return {"tokens": 64, **times}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[64, 512, 2048, 4096, 8192, 16384, 65536]
    )
    parser.add_argument("--packed", type=int, nargs="+", default=[2048, 16384], metavar="TOKENS")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--jsonl", type=Path, help="also append a record a row to this file")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU")
    options = parser.parse_args(arguments)
    device = device_for(options.dry_run)
    sizes, trained = MODEL, 8192
    if options.dry_run:
        sizes, trained, options.rounds = TOY, 20, 1
        options.tokens, options.packed, options.sequences = [9, 20], [20], [1, 3]
    bench = Bench(sizes, device, options.rounds)
    layouts = ("taps dense", "channels dense")

    print(device_line(device))
    tables: dict[str, Iterable[Callable[[], Record]]] = {
        "one sequence": (partial(bench.whole, T) for T in options.tokens),
        "packed": (
            partial(bench.packed, T, length)
            for T in options.packed
            for length in (T // 8, min(100, T // 4))
        ),
        "gradients": [partial(bench.trained, trained)],
        "a token of each sequence": (
            partial(bench.update, N, layout) for N in options.sequences for layout in layouts
        ),
        "until a call returns": [bench.host],
    }
    with torch.no_grad():
        for title, rows in tables.items():
            records = [row() for row in rows]
            print(f"\n{title}\n\n{table(records)}", flush=True)
            for record in records:
                append_record(options.jsonl, {"table": title, **record})


if __name__ == "__main__":
    main()
