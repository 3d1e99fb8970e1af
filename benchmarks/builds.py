"""Compares builds of the CUDA library: times in turns, and whether bits are equal.

    python csrc/build.py --library before.so --objects build/before
    (change something)
    python csrc/build.py --library after.so --objects build/after
    python -m benchmarks.builds before.so after.so [--table full uneven backward]
        [--gates mild,model] [--dtype float16] [--select REGEX] [--turns 4] [--budget-seconds 200]
        [--jsonl FILE]

A process can load only one library, so each build has its own process. The processes take turns at
each case, so a drift of the clock affects all builds. A table is one of `benchmarks.run`, whose
calls are timed as replays of a CUDA graph with a cold L2, or `backward`, the cases of
`benchmarks.backward`, whose gradients are timed between two events. A ratio is the time of a build
divided by that of the first build. The memory of two processes lies at different addresses, which
changes rows by up to a few percent; the same library given twice shows how much.
"""

import argparse
import math
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import backward
from benchmarks.machine import commit
from benchmarks.measure import Device, Record, Replay, device_for, device_line, replay_times
from benchmarks.peers import Ours, backend_chosen
from benchmarks.report import append_record
from benchmarks.rows import table
from benchmarks.shapes import (
    DTYPES,
    TABLES,
    Case,
    add_gates_option,
    all_cases,
    labelled,
    make_inputs,
    tiny,
    with_gates,
)
from gdn_triton import explain

BACKWARD = "backward"
BY_LIBRARY = "The gradients are by the CUDA library's backward."  # in the words of `explain`
SAMPLES = 5  # of a turn, whose time is their median
# Between the factors of two words. Even, so that all factors are odd: no difference of two words
# becomes 0 in 64 bits by its factor.
STEP = 2 * 0x9E3779B1


class Job(NamedTuple):
    """A case, and the call that is timed."""

    case: Case
    is_backward: bool

    @property
    def label(self) -> str:
        return labelled(self.case.name, self.case.gates)


def fingerprint(tensors: Iterable[torch.Tensor]) -> list[int]:
    """A number for each tensor, which differs, but for rare chance, if a bit of the tensor
    differs."""
    found = []
    for x in tensors:
        words = x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32).flatten()
        places = torch.arange(len(words), device=x.device).mul_(STEP).add_(1)
        found.append(int(places.mul_(words).sum()))
    return found


class Timer:
    """Runs a job in the process of a build: returns the fingerprint of its results when it is made,
    then its time in microseconds at each `turn`."""

    def __init__(self, job: Job, device: Device) -> None:
        inputs = make_inputs(job.case, device.torch)
        ours = Ours()
        backend = ours.served_by(inputs)
        if device.is_cuda and backend != "cuda":
            raise ValueError(f"{job.label}: served by {backend}, expected cuda")
        device.poison(2 * inputs.nbytes)
        self.turn: Callable[[], float]
        if job.is_backward:
            timed = backward.Backward(backward.load(backward.OURS), inputs)
            q, k, v, g, beta, state = timed.x
            made_by = explain(
                q, k, v, g, beta, initial_state=state, cu_seqlens=inputs.cu_seqlens
            ).gradients
            if made_by != BY_LIBRARY:
                raise ValueError(f"{job.label}: {made_by}")
            self.fingerprint = fingerprint(timed.run())
            self.turn = partial(_backward_turn, timed)
        else:
            replay = Replay(ours.prepare(inputs, capture=True), device)
            replay.run()
            self.fingerprint = fingerprint(replay.result[:2])
            self.turn = partial(_replay_turn, replay, device)


def _backward_turn(timed: backward.Backward) -> float:
    return backward.event_times({"": timed.run}, SAMPLES)[""].gpu


def _replay_turn(replay: Replay, device: Device) -> float:
    return statistics.median(replay_times({"": replay}, device, SAMPLES, flush=True)[""])


def serve(connection: Connection, library: Path, dry_run: bool) -> None:
    """The process of a build: answers a job with the fingerprint of its results, and None with the
    time of a turn of the last job, until it is told to stop."""
    from gdn_triton import fast

    fast.LIBRARY = library
    device = device_for(dry_run)
    timer: Timer | None = None
    while (asked := connection.recv()) != "stop":
        try:
            if isinstance(asked, Job):
                timer = None  # The tensors of the job before are free for this one.
                timer = Timer(asked, device)
                connection.send(timer.fingerprint)
            else:
                assert timer is not None
                connection.send(timer.turn())
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")


class Build:
    """A build and its process, as the parent sees them."""

    def __init__(self, name: str, library: Path, dry_run: bool) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self.connection, far = context.Pipe()
        self.process = context.Process(target=serve, args=(far, library, dry_run), daemon=True)
        self.process.start()
        far.close()

    def ask(self, what: Any) -> None:
        try:
            self.connection.send(what)
        except BrokenPipeError:
            raise RuntimeError(self._ended()) from None

    def _ended(self) -> str:
        self.process.join()
        return f"{self.name}: its process ended with status {self.process.exitcode}"

    def answer(self) -> Any:
        """The answer of the process. Raises RuntimeError if it met an error or has ended."""
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError(self._ended()) from None
        if isinstance(answer, str):
            raise RuntimeError(f"{self.name}: {answer}")
        return answer

    def stop(self) -> None:
        if self.process.is_alive():
            self.connection.send("stop")
        self.process.join()


def gather(builds: list[Build]) -> dict[str, Any]:
    """Every build's answer. Raises the first error once all builds have answered."""
    answers: dict[str, Any] = {}
    errors = []
    for build in builds:
        try:
            answers[build.name] = build.answer()
        except RuntimeError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return answers


def measure(job: Job, builds: list[Build], turns: int) -> Record:
    """Microseconds of each build, and which of them have other bits than the first."""
    for build in builds:
        build.ask(job)
    prints = gather(builds)
    times: dict[str, list[float]] = {build.name: [] for build in builds}
    for _ in range(turns):
        for build in builds:
            build.ask(None)
            times[build.name] += gather([build]).values()
    first = prints[builds[0].name]
    return {
        "case": job.case.name,
        "gates": job.case.gates,
        "dtype": str(job.case.dtype).removeprefix("torch."),
        "is_backward": job.is_backward,
        "us": {name: statistics.median(found) for name, found in times.items()},
        "other_bits": [name for name, found in prints.items() if found != first],
    }


def summary(records: list[Record], names: list[str], extremes: int) -> str:
    """A line for each family of rows, then the rows with the largest and the least ratios."""
    first, parts = names[0], []
    for name in names[1:]:
        rows = []
        families: dict[str, list[float]] = {}
        for record in records:
            label, us = labelled(record["case"], record["gates"]), record["us"]
            ratio = us[name] / us[first]
            families.setdefault(" ".join(label.split()[:2]), []).append(ratio)
            bits = "other" if name in record["other_bits"] else "same"
            cells = (label, f"{us[first]:.1f}", f"{us[name]:.1f}", f"{ratio:.3f}", bits)
            rows.append((ratio, cells))
        rows.sort()
        families["all"] = [ratio for ratio, _ in rows]
        means = [
            (family, str(len(x)), f"{statistics.geometric_mean(x):.3f}", f"{max(x):.3f}")
            for family, x in families.items()
        ]
        other = sum(name in record["other_bits"] for record in records)
        parts.append(
            table(("rows", "count", f"{name} over {first}", "most"), means)
            + f"\n{other} of {len(records)} rows have other bits."
        )
        shown = rows if len(rows) <= 2 * extremes else [*rows[:extremes], *rows[-extremes:]]
        columns = ("row", first, name, "ratio", "bits")
        parts.append(table(columns, [cells for _, cells in shown]))
    return "\n\n".join(parts)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.builds", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("libraries", type=Path, nargs="+", help="files of csrc/build.py --library")
    tables = (*TABLES, BACKWARD)
    parser.add_argument("--table", nargs="+", choices=tables, default=["full"])
    parser.add_argument("--select", default="", help="only cases whose name this regex finds")
    add_gates_option(parser)
    parser.add_argument("--dtype", choices=DTYPES, help="of q, k and v (default: the table's)")
    parser.add_argument("--turns", type=int, default=4, help=f"of {SAMPLES} runs each")
    parser.add_argument("--budget-seconds", type=float, default=math.inf, help="start no row after")
    parser.add_argument("--extremes", type=int, default=12, help="rows shown at each end")
    parser.add_argument("--jsonl", type=Path, help="also append a record a case to this file")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU, no library")
    args = parser.parse_args(argv)
    if len(args.libraries) < 2:
        parser.error(f"expected at least two libraries, got {len(args.libraries)}")
    if args.turns < 1:
        parser.error(f"--turns must be at least 1, got {args.turns}")
    if not args.dry_run:
        missing = [str(x) for x in args.libraries if not x.exists()]
        if missing:
            parser.error(f"no such library: {', '.join(missing)}")
    if args.dry_run and BACKWARD in args.table:
        parser.error("--dry-run has no times of gradients, which lie between events of a GPU")
    return args


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """The selected cases of the tables, in that order."""
    jobs = []
    for name in args.table:
        is_backward = name == BACKWARD
        cases = backward.TIME_CASES if is_backward else all_cases(name)
        for gates in args.gates:
            chosen = [x for x in with_gates(cases, gates) if re.search(args.select, x.name)]
            if args.dtype is not None:
                chosen = [replace(x, dtype=getattr(torch, args.dtype)) for x in chosen]
            jobs += [Job(tiny(x) if args.dry_run else x, is_backward) for x in chosen]
    return jobs


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    # The processes inherit it: what the library does not serve is refused, not timed on another
    # backend.
    with backend_chosen("reference" if args.dry_run else "cuda"):
        builds = [
            Build(f"{i} {path.stem}", path.absolute(), args.dry_run)
            for i, path in enumerate(args.libraries, 1)
        ]
    names = [build.name for build in builds]
    records: list[Record] = []
    refused = []
    start = time.perf_counter()
    for job in jobs_of(args):
        if time.perf_counter() - start > args.budget_seconds:
            print(f"out of time before {job.label}")
            break
        try:
            record = measure(job, builds, args.turns)
        except RuntimeError as error:
            refused.append(f"{job.label}: {error}")
            if all(build.process.is_alive() for build in builds):
                continue
            break
        records.append(record)
        append_record(args.jsonl, record)
    for build in builds:
        build.stop()
    print(device_line(device_for(args.dry_run)), commit())
    if records:
        print(summary(records, names, args.extremes))
    for line in refused:
        print("REFUSED", line)
    return 1 if refused or not records else 0


if __name__ == "__main__":
    raise SystemExit(main())
