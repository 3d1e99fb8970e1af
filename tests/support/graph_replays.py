r"""Replays of CUDA graphs with other lengths, held to eager calls on the same lengths, bit for bit.

    python tests/support/graph_replays.py --count 10000 --backward 500
    python tests/support/graph_replays.py --count 100000 --seed 1 --workers 4
    python tests/support/graph_replays.py --backend triton --workers 16 --seconds 120
    python tests/support/graph_replays.py --backend triton --only 24-28 --no-overlap --poison 1

A graph holds one call of a backend, by default the CUDA library, with packed sequences, and a graph
of a backward the forward too. Before each replay new offsets are copied into `cu_seqlens` and every
output is filled with NaN. Each graph is first captured at equal lengths, and has a line that says
what it was held to. Workers share the GPUs that are visible. `--seconds` is divided among the
graphs; each of them makes at least 16 replays, and its first eager calls compile the kernels.

A replay with other bits, or with a NaN left, is printed with its lengths. The first wrong replay of
each 16 in a row is also printed with the places, the largest difference and the NaNs of each wrong
output; a second replay and a second eager call with the same lengths show which of the two was
wrong.

`--only` runs some graphs again, with the same offsets: 24, a list 24,25, or a range 24-28.
`--no-overlap` launches every kernel of Triton without programmatic dependent launch, so that no
kernel begins before the previous one has ended. `--poison` fills free memory with a word, by
default 0x5A5A5A5A, before the capture, and the memory of the graph that holds no output before
each replay: a kernel that reads memory that nothing has written then finds neither a zero nor what
an earlier replay has left. The kernels use the words 1 and 2 as signals.
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
from typing import Any, NamedTuple

import torch
from fast_parity import requested
from helpers import BF16, FP32
from replay_reports import Evidence, Outputs, differs, numbers_of, verdict
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

    def __call__(self, cu_seqlens: Tensor) -> Outputs:
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


class Poison:
    """A pool of memory for one graph, which holds a word wherever nothing else is. The allocator
    gives a block again only on the stream of its first use, so that the pool has a stream."""

    def __init__(self, word: int) -> None:
        self.word = word
        self.pool, self.stream = torch.cuda.MemPool(), torch.cuda.Stream()
        self.free: list[int] = []

    def fill(self, sizes: list[int]) -> None:
        """Fills blocks of so many bytes, which are free again afterwards."""
        before = torch.cuda.current_stream()
        self.stream.wait_stream(before)
        with torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(self.pool):
            blocks = [
                torch.full((size // 4,), self.word, dtype=torch.int32, device="cuda")
                for size in sizes
            ]
            del blocks
        before.wait_stream(self.stream)

    def fill_before(self, call: "Call") -> None:
        """Fills enough for the call in the pool, and free memory of eager calls."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(call.cu_seqlens)
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated() - before
        # The allocator has other blocks for tensors of at most 1 MiB.
        self.fill([*[1 << 20] * 64, (2 * most + (64 << 20)) // 4 * 4])
        torch.full((1 << 28,), self.word, dtype=torch.int32, device="cuda")

    def find_free(self) -> None:
        """Notes the blocks of the pool that hold no output. In blocks for large tensors a smaller
        rest than 1 MiB cannot be allocated."""
        blocks = [block for segment in self.pool.snapshot() for block in segment["blocks"]]
        sizes = [block["size"] for block in blocks if block["state"] == "inactive"]
        self.free = sorted((size for size in sizes if size > 1 << 20), reverse=True)


class Captured:
    """A call in a CUDA graph, which reads `call.cu_seqlens`. word: of `Poison`, or None."""

    def __init__(self, call: Call, word: int | None = None) -> None:
        call(call.cu_seqlens)
        # The graph is the first attribute, because the pool has to outlive it.
        self.graph = torch.cuda.CUDAGraph()
        self.poison = None if word is None else Poison(word)
        where: dict[str, Any] = {}
        if self.poison is not None:
            self.poison.fill_before(call)
            where = {"pool": self.poison.pool.id, "stream": self.poison.stream}
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, **where):
            self.outputs = call(call.cu_seqlens)
        if self.poison is not None:
            self.poison.find_free()

    def replay(self) -> None:
        if self.poison is not None:
            self.poison.fill(self.poison.free)
        self.graph.replay()


class Result(NamedTuple):
    words: str
    replays: int
    lines: list[str]  # one a replay that failed, and more lines inside of it


# Replays between two waits of the host: without them all calls would be queued before the time
# ends, and with more of them the GPU would have less to do at the same time.
BETWEEN_WAITS = 16


class Replays:
    """Replays of one graph, each after the offsets of a row of `table`."""

    def __init__(self, call: Call, captured: Captured, table: Tensor) -> None:
        self.call, self.captured, self.table = call, captured, table
        outputs = captured.outputs
        self.flags = torch.zeros(
            len(table), len(outputs), dtype=torch.bool, device=call.cu_seqlens.device
        )
        self.evidence = Evidence(outputs)

    def replay(self, number: int) -> Outputs:
        for x in self.captured.outputs.values():
            x.fill_(math.nan)
        self.call.cu_seqlens.copy_(self.table[number])
        self.captured.replay()
        return self.captured.outputs

    def check(self, number: int) -> None:
        found, expected = self.replay(number), self.call(self.table[number].clone())
        wrong = torch.stack([differs(x, expected[name]).any() for name, x in found.items()])
        self.flags[number] = wrong
        self.evidence.note(found, expected, wrong.any())

    def lines(self, replays: range) -> list[str]:
        """A line for each of these replays that failed; waits for them."""
        lines: list[str] = []
        for number, row in zip(
            replays, self.flags[replays.start : replays.stop].tolist(), strict=True
        ):
            if any(row):
                pairs = zip(self.captured.outputs, row, strict=True)
                which = ", ".join(name for name, is_bad in pairs if is_bad)
                offsets = self.table[number].tolist()
                lengths = [b - a for a, b in itertools.pairwise(offsets)]
                line = f"FAILED {self.call.shape.words}, replay {number}: {which}; "
                line += f"lengths {lengths}"
                if not lines:
                    details = [*self.evidence.lines(offsets), self.again(number)]
                    line = "\n    ".join([line, *details])
                lines.append(line)
        self.evidence.clear()
        return lines

    def again(self, number: int) -> str:
        second = {name: x.clone() for name, x in self.replay(number).items()}
        eager = self.call(self.table[number].clone())
        return verdict((self.evidence.found, second), (self.evidence.expected, eager))


def check_shape(
    shape: Shape,
    count: int,
    seed: int,
    *,
    device: str = "cuda",
    backend: str = "cuda",
    graph: Callable[[Call], Captured] = Captured,
    seconds: float = math.inf,
) -> Result:
    """Runs `count` replays of one graph, each after other offsets, and as many eager calls. No
    replay but the first begins after `seconds`."""
    rng, start = random.Random(f"{seed} {shape}"), time.perf_counter()
    offsets = [draw_offsets(rng, shape.N, shape.T, number) for number in range(count)]
    table = torch.tensor(offsets, dtype=torch.int32).to(device)
    lines: list[str] = []
    with requested(backend):
        call = Call(shape, seed, device)
        call.cu_seqlens.copy_(table[0])
        replays = Replays(call, graph(call), table)
        first = call(table[0])["o"].clone()
        done = 0
        while done < count and (done == 0 or time.perf_counter() - start <= seconds):
            some = range(done, min(done + BETWEEN_WAITS, count))
            for number in some:
                replays.check(number)
            last = replays.captured.outputs["o"].clone()
            lines += replays.lines(some)
            done = some.stop
        # A comparison of a tensor with itself, or a graph that read no offsets, would pass above.
        changed = offsets[done - 1] == offsets[0] or bool(differs(last, first).any())
    if not changed:
        lines.append(f"FAILED {shape.words}: o of the first and the last lengths are equal")
    took = time.perf_counter() - start
    words = f"{shape.words}: {done} replays, {len(lines)} failed, {took:.1f} s"
    return Result(words, done, lines)


def divided(shapes: tuple[Shape, ...], count: int) -> list[int]:
    """Replays of each shape, `count` together, by their weights."""
    ends = list(itertools.accumulate(map(weight, shapes), initial=0))
    ends = [count * end // ends[-1] for end in ends]
    return [b - a for a, b in itertools.pairwise(ends)]


# ----------------------------------------------------------------------------------------- script


def forbid_overlap() -> None:
    """From now on, each kernel that Triton compiles in this process is launched without
    programmatic dependent launch. What a kernel waits for has then happened before it begins."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def run_alone(kernel: Any, *args: Any, **options: Any) -> Any:
        if "launch_pdl" in options:
            options["launch_pdl"] = False
        return run(kernel, *args, **options)

    JITFunction.run = run_alone


def begin_process(started: Any, overlap: bool) -> None:
    """started: the number of processes that have begun, in memory that they share."""
    with started.get_lock():
        place = started.value
        started.value += 1
    torch.cuda.set_device(place % torch.cuda.device_count())
    if not overlap:
        forbid_overlap()


def check_job(
    job: tuple[Shape, int], seed: int, backend: str, seconds: float, word: int | None
) -> Result:
    graph = partial(Captured, word=word)
    result = check_shape(*job, seed, backend=backend, graph=graph, seconds=seconds)
    torch.cuda.empty_cache()  # of the graph's own memory
    return result


def word_of(words: str) -> int:
    """A word of memory, as 1 or 0x5A5A5A5A."""
    return int(words, 0)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Replays with other lengths, and eager calls.")
    parser.add_argument("--count", type=int, default=10000, help="replays of forwards")
    parser.add_argument("--backward", type=int, default=500, help="replays of backwards")
    parser.add_argument("--seed", type=int, default=0, help="of the offsets and the inputs")
    parser.add_argument("--backend", choices=("cuda", "triton"), default="cuda")
    parser.add_argument("--only", type=numbers_of, help="the graphs of these numbers, as 24,26-28")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the GPUs")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="for all graphs, which have equal parts"
    )
    parser.add_argument(
        "--no-overlap",
        action="store_true",
        help="no programmatic dependent launch; of the triton backend",
    )
    parser.add_argument(
        "--poison",
        type=word_of,
        nargs="?",
        const=0x5A5A5A5A,
        metavar="WORD",
        help="what free memory holds before a replay",
    )
    options = parser.parse_args()
    most = len(FORWARD) + len(BACKWARD) - 1
    if options.only is not None and options.only[-1] > most:
        parser.error(f"--only: the graphs have the numbers 0 to {most}")
    if options.no_overlap and options.backend != "triton":
        parser.error("--no-overlap: the CUDA library has no such option")
    return options


def main() -> None:
    options = parsed()
    jobs = [
        *zip(FORWARD, divided(FORWARD, options.count), strict=True),
        *zip(BACKWARD, divided(BACKWARD, options.backward), strict=True),
    ]
    numbered = [
        (number, job)
        for number, job in enumerate(jobs)
        if job[1] and (options.only is None or number in options.only)
    ]
    check = partial(
        check_job,
        seed=options.seed,
        backend=options.backend,
        seconds=options.seconds * min(options.workers / max(len(numbered), 1), 1.0),
        word=options.poison,
    )
    start = time.perf_counter()
    fresh = multiprocessing.get_context("spawn")
    begin = fresh.Value("q", 0), not options.no_overlap
    with contextlib.ExitStack() as stack:
        if options.workers > 1:
            pool = ProcessPoolExecutor(
                options.workers, mp_context=fresh, initializer=begin_process, initargs=begin
            )
            results = stack.enter_context(pool).map(check, [job for _, job in numbered])
        else:
            begin_process(*begin)
            results = map(check, [job for _, job in numbered])
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
