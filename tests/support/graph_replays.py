r"""Replays of CUDA graphs with other lengths, held to eager calls on the same lengths, bit for bit.

    python tests/support/graph_replays.py --count 10000 --backward 500
    python tests/support/graph_replays.py --count 100000 --seed 1 --workers 4
    python tests/support/graph_replays.py --backend triton

A graph holds one call of a backend, by default the CUDA library, with packed sequences, and a graph
of a backward the forward too. Before each replay new offsets are copied into `cu_seqlens` and every
output is filled with NaN. Each graph is first captured at equal lengths, and has a line that says
what it was held to; a replay with other bits, or with a NaN left, is printed with its lengths.
`--only` runs one graph again, with the same offsets.
"""

import argparse
import contextlib
import itertools
import math
import multiprocessing
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from fast_parity import requested
from helpers import BF16, FP32
from torch import Tensor

import gdn_triton

# ---------------------------------------------------------------------------------------- lengths

# The sides of a chunk of 64 tokens and of a block of 16.
EDGES = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129)

# The weight of a sequence among the others of its call, by the kind of lengths.
KINDS: dict[str, Callable[[random.Random, int], list[float]]] = {
    "equal": lambda rng, N: [1.0] * N,
    "log-uniform": lambda rng, N: [2 ** rng.uniform(0, 8) for _ in range(N)],
    "one long": lambda rng, N: one_long(rng, N, rng.uniform(0.5, 1)),
    "one alone": lambda rng, N: one_long(rng, N, 1),
    "some empty": lambda rng, N: [rng.choice((0.0, rng.random())) for _ in range(N)],
}


def one_long(rng: random.Random, N: int, share: float) -> list[float]:
    """One sequence has this share of all tokens, and the others divide the rest at random."""
    weights = [rng.random() for _ in range(N)]
    long = rng.randrange(N)
    weights[long] = 0.0
    whole = sum(weights)
    weights = [(1 - share) * x / whole if whole else 0.0 for x in weights]
    weights[long] = share
    return weights


def draw_offsets(rng: random.Random, N: int, T: int, number: int) -> list[int]:
    """cu_seqlens of N sequences in T tokens; the first draw of a graph has equal lengths.

    Of every four draws the sequences of one end before T, and of one they are at the edges of
    chunks. A single sequence always ends before T or there."""
    last = rng.randint(0, T) if number % 4 == 3 or (N == 1 and number > 0) else T
    if number % 4 == 2 and N > 1:
        lengths = [rng.choice(EDGES) for _ in range(N)]
        lengths[rng.randrange(N)] += max(0, T - sum(lengths))
        return [min(end, T) for end in itertools.accumulate(lengths, initial=0)]
    kind = "equal" if number == 0 else rng.choice(list(KINDS))
    ends = list(itertools.accumulate(KINDS[kind](rng, N), initial=0.0))
    return [round(end / (ends[-1] or 1.0) * last) for end in ends]


# ----------------------------------------------------------------------------------------- graphs


class Shape(NamedTuple):
    """The sizes of a graph's call, with K = V = 128, and which of its options differ."""

    H: int
    HV: int
    T: int
    N: int
    forgets: bool  # gates of a layer when its training begins, else gates that forget little
    norm: bool = True  # of q and k, in the kernels
    backward: bool = False
    told: bool = False  # on the host, that the longest sequence has three quarters of the tokens

    @property
    def words(self) -> str:
        what = "backward" if self.backward else "forward"
        gates = "a model's gates" if self.forgets else "mild gates"
        norm = "" if self.norm else ", no norm"
        told = ", told" if self.told else ""
        return f"{what} {self.H}/{self.HV}, {self.N} in {self.T} tokens, {gates}{norm}{told}"


HEADS = ((16, 32), (16, 64), (4, 16), (2, 8))
FORWARD = (
    *(
        Shape(*heads, T, N, forgets=(i + j + k) % 2 == 0)
        for i, heads in enumerate(HEADS)
        for j, T in enumerate((2048, 8192))
        for k, N in enumerate((2, 8, 48))
    ),
    # The device chooses how these are cut, by lengths and gates.
    Shape(4, 16, 32768, 2, forgets=True),
    Shape(4, 16, 32768, 2, forgets=False),
    Shape(16, 32, 16384, 1, forgets=True),
    # Cut for one long sequence, which most of the lengths have not.
    Shape(2, 8, 16384, 9, forgets=True, told=True),
    Shape(4, 16, 8192, 7, forgets=False, told=True),
)
BACKWARD = (
    *(
        Shape(*heads, 2048, N, forgets=i % 2 == 0, norm=norm, backward=True)
        for i, heads in enumerate(HEADS)
        for N in (2, 48)
        for norm in (True, False)
    ),
    # Both walks go in segments.
    Shape(4, 8, 8192, 1, forgets=True, norm=False, backward=True),
    Shape(4, 8, 8192, 1, forgets=False, backward=True),
    Shape(4, 8, 8192, 7, forgets=True, backward=True, told=True),
    Shape(2, 4, 16384, 5, forgets=False, backward=True, told=True),
    Shape(4, 8, 16384, 5, forgets=True, norm=False, backward=True, told=True),
)


def weight(shape: Shape) -> int:
    """A graph's share of the replays: three times as many for those that take less time."""
    return 3 if shape.T == 2048 else 1


class Call:
    """The tensors of a call with every option of a layer, and the call itself."""

    def __init__(self, shape: Shape, seed: int, device: str) -> None:
        self.shape = shape
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*sizes: int, dtype: torch.dtype = FP32) -> Tensor:
            return torch.randn(*sizes, generator=generator, device=device, dtype=dtype)

        def key(*sizes: int) -> Tensor:
            x = normal(*sizes)
            x = x if shape.norm else torch.nn.functional.normalize(x, dim=-1)
            return x.to(BF16)

        H, HV, T, N = shape.H, shape.HV, shape.T, shape.N
        largest = 16.0 if shape.forgets else 1 / 16
        rates = torch.rand(HV, generator=generator, device=device) * largest
        self.leaves = {
            "q": key(1, T, H, 128),
            "k": key(1, T, H, 128),
            "v": normal(1, T, HV, 128, dtype=BF16),
            "g": normal(1, T, HV),
            "beta": normal(1, T, HV),
            "initial_state": normal(N, HV, 128, 128),
            "A_log": rates.log(),
            "dt_bias": normal(HV) - 4 if shape.forgets else normal(HV),
        }
        if shape.backward:
            self.do, self.dht = normal(1, T, HV, 128, dtype=BF16), normal(N, HV, 128, 128)
            for x in self.leaves.values():
                x.requires_grad_()
        self.cu_seqlens = torch.zeros(N + 1, dtype=torch.int32, device=device)
        self.on_host = None
        if shape.told:
            self.on_host = torch.tensor([0, *[3 * T // 4] * N], dtype=torch.int32)

    def __call__(self, cu_seqlens: Tensor) -> dict[str, Tensor]:
        """o and the final state; of a backward also the gradients of every input."""
        o, state = gdn_triton.chunk_gated_delta_rule(
            **self.leaves,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=self.on_host,
            output_final_state=True,
            use_qk_l2norm_in_kernel=self.shape.norm,
            use_beta_sigmoid_in_kernel=True,
            use_gate_in_kernel=True,
        )
        assert state is not None
        found = {"o": o.detach(), "final_state": state.detach()}
        if self.shape.backward:
            gradients = torch.autograd.grad(
                (o, state), list(self.leaves.values()), (self.do, self.dht)
            )
            names = (f"gradient of {name}" for name in self.leaves)
            found.update(zip(names, gradients, strict=True))
        return found


class Captured:
    """A call in a CUDA graph, which reads `call.cu_seqlens`."""

    def __init__(self, call: Call) -> None:
        call(call.cu_seqlens)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = call(call.cu_seqlens)

    def replay(self) -> None:
        self.graph.replay()


INTEGERS = {2: torch.int16, 4: torch.int32}


def wrong(found: Tensor, expected: Tensor) -> Tensor:
    """Whether bits differ or a NaN is left, as a tensor on the device: nothing waits for it."""
    integer = INTEGERS[found.element_size()]
    return (found.view(integer) != expected.view(integer)).any() | found.isnan().any()


class Result(NamedTuple):
    words: str
    replays: int
    lines: list[str]  # one a replay that failed


def check_shape(
    shape: Shape,
    count: int,
    seed: int,
    *,
    device: str = "cuda",
    backend: str = "cuda",
    graph: type[Captured] = Captured,
    seconds: float = math.inf,
) -> Result:
    """Runs `count` replays of one graph, each after other offsets, and as many eager calls. No
    replay but the first begins after `seconds`."""
    rng, start = random.Random(f"{seed} {shape}"), time.perf_counter()
    offsets = [draw_offsets(rng, shape.N, shape.T, number) for number in range(count)]
    table = torch.tensor(offsets, dtype=torch.int32).to(device)
    with requested(backend):
        call = Call(shape, seed, device)
        call.cu_seqlens.copy_(table[0])
        captured = graph(call)
        first = {name: x.clone() for name, x in call(table[0]).items()}
        flags = torch.zeros(count, len(first), dtype=torch.bool, device=device)
        for number in range(count):
            if number and number % 16 == 0:
                flags[number - 1].tolist()  # waits: else all calls are queued before the time ends
                if time.perf_counter() - start > seconds:
                    offsets = offsets[:number]
                    break
            for x in captured.outputs.values():
                x.fill_(math.nan)
            call.cu_seqlens.copy_(table[number])
            captured.replay()
            expected = call(table[number].clone())
            for n, (name, x) in enumerate(captured.outputs.items()):
                flags[number, n] = wrong(x, expected[name])
        # A comparison of a tensor with itself, or a graph that read no offsets, would pass above.
        changed = offsets[-1] == offsets[0] or bool(wrong(captured.outputs["o"], first["o"]))
    names = list(first)
    lines = []
    for number, row in enumerate(flags[: len(offsets)].tolist()):
        if any(row):
            which = ", ".join(name for name, bad in zip(names, row, strict=True) if bad)
            lengths = [b - a for a, b in itertools.pairwise(offsets[number])]
            lines.append(f"FAILED {shape.words}, replay {number}: {which}; lengths {lengths}")
    if not changed:
        lines.append(f"FAILED {shape.words}: o of the first and the last lengths are equal")
    took = time.perf_counter() - start
    words = f"{shape.words}: {len(offsets)} replays, {len(lines)} failed, {took:.1f} s"
    return Result(words, len(offsets), lines)


def divided(shapes: tuple[Shape, ...], count: int) -> list[int]:
    """Replays of each shape, `count` together, by their weights."""
    ends = list(itertools.accumulate(map(weight, shapes), initial=0))
    ends = [count * end // ends[-1] for end in ends]
    return [b - a for a, b in itertools.pairwise(ends)]


# ----------------------------------------------------------------------------------------- script


def check_job(job: tuple[Shape, int], seed: int, backend: str, seconds: float) -> Result:
    result = check_shape(*job, seed, backend=backend, seconds=seconds)
    torch.cuda.empty_cache()  # of the graph's own memory
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Replays with other lengths, and eager calls.")
    parser.add_argument("--count", type=int, default=10000, help="replays of forwards")
    parser.add_argument("--backward", type=int, default=500, help="replays of backwards")
    parser.add_argument("--seed", type=int, default=0, help="of the offsets and the inputs")
    parser.add_argument("--backend", choices=("cuda", "triton"), default="cuda")
    parser.add_argument("--only", type=int, help="the graph of this number alone")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the GPU")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="after which a graph has no more replays"
    )
    options = parser.parse_args()
    jobs = [
        *zip(FORWARD, divided(FORWARD, options.count), strict=True),
        *zip(BACKWARD, divided(BACKWARD, options.backward), strict=True),
    ]
    numbered = [
        (number, job)
        for number, job in enumerate(jobs)
        if job[1] and options.only in (None, number)
    ]
    check = partial(check_job, seed=options.seed, backend=options.backend, seconds=options.seconds)
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        results = map(check, [job for _, job in numbered])
        if options.workers > 1:
            fresh = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(options.workers, mp_context=fresh)
            results = stack.enter_context(pool).map(check, [job for _, job in numbered])
        replays = failed = 0
        for (number, _), found in zip(numbered, results, strict=True):
            for line in found.lines:
                print(line, flush=True)
            print(f"{number}: {found.words}", flush=True)
            replays += found.replays
            failed += len(found.lines)
    took = time.perf_counter() - start
    print(f"{replays} replays of {len(numbered)} graphs, {failed} failed, {took:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
