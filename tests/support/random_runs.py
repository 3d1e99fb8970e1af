"""Runs random cases by number, for a time and in several processes, and counts them.

The scripts `fast_parity.py`, `random_gradients.py` and `random_windows.py` share the arguments of
`add_numbers`. A case is drawn from its number alone, so a case that fails is run again by `--only`
with its number, and another `--seed` gives other cases.

Triton takes 3 to 20 seconds to compile a kernel, and compiles one for each combination of the
constants of a call: sizes, heads, options, dtypes and strides. `--alike` consecutive cases
therefore have the same variant, which is drawn from the number of the first one, and differ in
lengths, gates and other values. A worker takes all cases of a variant, and all workers share
Triton's cache in the file system. `--alike` is part of what draws a case: a line of a failed case
repeats it.

`--seconds` is a limit for the whole run: no case begins after that time. The script then waits
`GRACE` seconds for the cases that have begun, ends processes that still have not returned, and
names their cases. Workers share the GPUs that are visible, and each has one CPU thread.
"""

import argparse
import contextlib
import math
import multiprocessing
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

# The seconds that a case may take after the end of the run. A kernel that never returns takes
# longer, and so does no compilation that has been seen.
GRACE = 90.0

# Consecutive cases of a worker where each case has a variant of its own.
BLOCK = 10

Check = Callable[[int], str | None]  # the fault of the case of that number, or None


class Began(NamedTuple):
    number: int


class Ended(NamedTuple):
    """fault: as `Check` returns it. is_last: the process runs no more cases, because an error that
    is not a failed comparison may leave its GPU unusable."""

    number: int
    fault: str | None
    is_last: bool = False


class Compiled(NamedTuple):
    """The kernels that a process compiled, the seconds that this took, and the kernels that it
    loaded from Triton's cache."""

    compiled: int
    seconds: float
    loaded: int


Message = Began | Ended | Compiled


@contextlib.contextmanager
def listening() -> Iterator[list[tuple[float, bool]]]:
    """Lists the seconds of each compilation, and whether it was found in Triton's cache."""
    from triton import knobs

    found: list[tuple[float, bool]] = []

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        found.append((times.total / 1e6, cache_hit))

    before = knobs.compilation.listener
    knobs.compilation.listener = listen
    try:
        yield found
    finally:
        knobs.compilation.listener = before


class Blocks:
    """The numbers of all cases, in blocks that one process runs. `next` counts the blocks that have
    been taken, in memory that processes share."""

    def __init__(self, numbers: range, alike: int, taken: Any) -> None:
        size = alike if alike > 1 else BLOCK
        first = numbers.start - numbers.start % size  # a variant begins at a multiple of `alike`
        starts = range(first, numbers.stop, size)
        self.blocks = [
            range(max(start, numbers.start), min(start + size, numbers.stop)) for start in starts
        ]
        self.taken = taken

    def __iter__(self) -> Iterator[range]:
        while True:
            with self.taken.get_lock():
                number = self.taken.value
                self.taken.value += 1
            if number >= len(self.blocks):
                return
            yield self.blocks[number]

    @property
    def left(self) -> bool:
        return bool(self.taken.value < len(self.blocks))


def messages(check: Check, blocks: Blocks, end: float) -> Iterator[Message]:
    """Runs cases until none is left, or until the time `end`."""
    for number in (number for block in blocks for number in block):
        if time.time() >= end:
            return
        yield Began(number)
        try:
            fault, is_last = check(number), False
        except Exception as error:
            lines = traceback.format_exception(error)
            fault, is_last = f"FAILED {number}: {''.join(lines[-3:])}", True
        yield Ended(number, fault, is_last)
        if is_last:
            return


def run_worker(
    place: int, connection: Connection, check: Check, blocks: Blocks, end: float, counts: bool
) -> None:
    """One process: sends its messages. counts: the kernels that Triton compiles are counted."""
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(place % torch.cuda.device_count())
    with listening() if counts else contextlib.nullcontext([]) as kernels:
        for message in messages(check, blocks, end):
            connection.send(message)
    connection.send(counted(kernels))
    connection.close()


def counted(kernels: list[tuple[float, bool]]) -> Compiled:
    times = [seconds for seconds, cached in kernels if not cached]
    return Compiled(len(times), sum(times), len(kernels) - len(times))


class Worker:
    """A process, the case that it runs, and when that began."""

    def __init__(self, place: int, *given: Any) -> None:
        fresh = multiprocessing.get_context("spawn")
        self.place = place
        self.connection, there = fresh.Pipe(duplex=False)
        self.process = fresh.Process(target=run_worker, args=(place, there, *given), daemon=True)
        self.process.start()
        there.close()
        self.number: int | None = None
        self.began = 0.0
        self.has_counted = False

    def receive(self) -> Message | None:
        """The next message; None if the process has ended."""
        try:
            message: Message = self.connection.recv()
        except EOFError:
            self.process.join()
            return None
        self.number = None
        if isinstance(message, Began):
            self.number, self.began = message.number, time.time()
        self.has_counted = isinstance(message, Compiled)
        return message


class Tally:
    """What has run. Each fault is printed at once."""

    def __init__(self, again: str) -> None:
        self.again, self.start = again, time.time()
        self.done = 0
        self.failed: list[int] = []
        self.kernels = Compiled(0, 0.0, 0)
        self.variants: Counter[int] = Counter()

    def add(self, message: Message, alike: int) -> None:
        if isinstance(message, Compiled):
            self.kernels = Compiled(*map(sum, zip(self.kernels, message, strict=True)))
        if not isinstance(message, Ended):
            return
        self.done += 1
        self.variants[message.number // alike] += 1
        if message.fault is not None:
            self.fail(message.number, message.fault)
        if self.done % 500 == 0:
            print(self.words, flush=True)

    def fail(self, number: int, fault: str) -> None:
        self.failed.append(number)
        print(f"{fault}\n    again: --only {number} {self.again}", flush=True)

    @property
    def words(self) -> str:
        took = time.time() - self.start
        return f"{self.done} cases, {len(self.failed)} failed, {took:.0f} s"


def run_alone(check: Check, blocks: Blocks, end: float, counts: bool) -> Iterator[Message]:
    """All cases in this process, which a tool as compute-sanitizer watches."""
    with listening() if counts else contextlib.nullcontext([]) as kernels:
        yield from messages(check, blocks, end)
    yield counted(kernels)


def run_workers(options: argparse.Namespace, tally: Tally, given: tuple[Any, ...]) -> None:
    """All cases in processes. given: the arguments of `run_worker` after its connection."""
    _, blocks, end, _ = given
    count = min(options.workers, len(blocks.blocks))
    workers = [Worker(place, *given) for place in range(count)]
    while workers:
        waits = max(end + GRACE - time.time(), 0.0) if end < math.inf else None
        ready = wait([worker.connection for worker in workers], waits)
        for worker in [worker for worker in workers if worker.connection in ready]:
            before = worker.number
            message = worker.receive()
            if message is not None:
                tally.add(message, options.alike)
                continue
            workers.remove(worker)
            code = worker.process.exitcode
            if before is not None:
                tally.fail(before, f"FAILED {before}: its process ended with exit code {code}")
            elif not worker.has_counted:
                raise RuntimeError(f"a process ended before its first case, exit code {code}")
            if blocks.left and time.time() < end:
                workers.append(Worker(worker.place, *given))
        if not ready:
            for worker in workers:
                worker.process.kill()
                if worker.number is not None:
                    took = time.time() - worker.began
                    words = f"FAILED {worker.number}: it has not ended after {took:.0f} s"
                    tally.fail(worker.number, words)
            return


def check_numbers(check: Check, options: argparse.Namespace) -> bool:
    """Whether one of the cases that `options` ask for has a fault, by `check`. Each fault is
    printed, and at the end the numbers of cases, faults, variants and compiled kernels."""
    end = time.time() + options.seconds
    numbers = range(options.seed, options.seed + options.count)
    if options.only is not None:
        numbers = range(options.only, options.only + 1)
    tally = Tally(f"--alike {options.alike} --backend {options.backend}")
    counts = options.backend == "triton"
    blocks = Blocks(numbers, options.alike, multiprocessing.get_context("spawn").Value("q", 0))
    if options.workers == 1:
        for message in run_alone(check, blocks, end, counts):
            tally.add(message, options.alike)
    else:
        run_workers(options, tally, (check, blocks, end, counts))
    failed, kernels = sorted(tally.failed), tally.kernels
    print(f"{tally.done} cases of {len(numbers)}, {len(failed)} failed {failed or ''}")
    took = time.time() - tally.start
    print(f"{len(tally.variants)} variants in {took:.0f} s", end="")
    if counts:
        print(
            f": {kernels.compiled} kernels compiled in {kernels.seconds:.0f} s of all processes, "
            f"{kernels.loaded} loaded from Triton's cache",
            end="",
        )
    print(flush=True)
    return bool(failed)


def add_numbers(
    parser: argparse.ArgumentParser, *, alike: int, backend: str = "cuda"
) -> argparse.ArgumentParser:
    """The arguments of `check_numbers`, and the backend. alike: the default for Triton; the other
    backends compile nothing, and each of their cases has a variant of its own."""
    parser.add_argument("--backend", choices=("cuda", "triton"), default=backend)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, help="this case alone")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the GPUs")
    parser.add_argument(
        "--alike",
        type=int,
        help=f"consecutive cases of one variant: {alike} for triton, 1 for cuda",
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="after which no case begins"
    )
    parser.set_defaults(alike_for_triton=alike)
    return parser


def options_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = parser.parse_args()
    if options.alike is None:
        options.alike = options.alike_for_triton if options.backend == "triton" else 1
    return options
