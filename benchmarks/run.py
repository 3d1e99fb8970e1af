"""Error, time on the GPU, time of a call and time of a first call, of this package and its peers.

    python -m benchmarks.run --out DIR            everything, with whichever peers are installed
    python -m benchmarks.run --out DIR --table full   all heads with all sequences, times only
    python -m benchmarks.run --out DIR --table uneven   lengths that differ as a server's do
    python -m benchmarks.run --out DIR --gates mild,model   every case with gates of both kinds
    python -m benchmarks.run --out DIR --dry-run  the same on a CPU at toy sizes, as a trial

All implementations get the same tensors in one process. Each row is printed and appended to
DIR/results.jsonl as it is made, and the tables (accuracy.md, speed.md, host.md, first_call.md) are
rewritten with it, so a run that is stopped loses at most a row; --resume goes on from there.
With --gates a row carries its kind. "mild", the default, leaves a case its own gates, which are of
that kind wherever the case is not there for others; with another kind all cases have those.
"""

import argparse
import concurrent.futures
import gc
import importlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import commit, header
from benchmarks.measure import (
    Device,
    DeviceLost,
    Effort,
    Record,
    attempt,
    first_line,
    measure_accuracy,
    measure_host,
    measure_numerics,
    measure_speed,
    verify_chunked,
)
from benchmarks.peers import DEFAULT_PEERS, PEERS, Ours, Peer, load
from benchmarks.report import FIRST_CALL, KINDS, Report, say
from benchmarks.shapes import (
    ACCURACY,
    FIRST_CALL_CASES,
    NUMERICS,
    SPEED,
    TABLES,
    Case,
    add_gates_option,
    all_cases,
    floor_us,
    labelled,
    make_inputs,
    tiny,
    with_gates,
)

ROOT = Path(__file__).resolve().parent.parent
CHILD_SECONDS = 400
THOROUGH = Effort(rounds=30, calls=50, repeats=5)
FAST = Effort(rounds=8, calls=20, repeats=3)
TRIAL = Effort(rounds=2, calls=2, repeats=1)
ANSWER = "answer: "


# ---------------------------------------------------------------------------- other processes


def child(args: argparse.Namespace, options: Sequence[str], **environment: str) -> Record:
    """Runs this module in another process, and returns the JSON among its output."""
    command = [sys.executable, "-m", "benchmarks.run", "--out", str(args.out), *options]
    command += ["--table", args.table]
    command += ["--dry-run"] if args.dry_run else []
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, check=False, timeout=CHILD_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {CHILD_SECONDS} s"}
    answers = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if done.returncode != 0 or not answers:
        lines = (done.stderr or done.stdout).strip().splitlines()
        return {"error": lines[-1][:200] if lines else f"exit status {done.returncode}"}
    answer: Record = json.loads(answers[-1].removeprefix(ANSWER))
    return answer


def first_call_child(case: Case, device: Device) -> Record:
    """Seconds of the first and the second call of this process, without the import of torch."""
    inputs = make_inputs(case, device.torch)
    device.synchronize()
    call = Ours().prepare(inputs)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        call()
        device.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"first": seconds[0], "second": seconds[1]}


def measure_first_call(case: Case, args: argparse.Namespace) -> Record:
    with tempfile.TemporaryDirectory() as cache:
        option = ["--child-first-call", case.name]
        empty = child(args, option, TRITON_CACHE_DIR=cache)
        filled = child(args, option, TRITON_CACHE_DIR=cache)
    return {"empty": empty, "filled": filled}


def prewarm_child(case: Case, peers: Iterable[Peer], device: Device) -> Record:
    """Compiles what one case needs into the compilers' own caches, without timing anything."""
    testing: Any = importlib.import_module("triton.testing")

    def once(fn: Callable[[], Any], **options: Any) -> Any:
        fn()
        return [1.0, 1.0, 1.0] if options.get("quantiles") else 1.0

    testing.do_bench = once  # an autotuner compiles its candidates by timing them
    inputs = make_inputs(case, device.torch)
    failed = {}
    for peer in peers:
        if peer.supports(case) is None:
            with peer.chosen():
                _, reason = attempt(device, peer.prepare(inputs))
            if reason is not None:
                failed[peer.name] = reason
    return {"failed": failed}


def prewarm(cases: Sequence[Case], args: argparse.Namespace) -> None:
    """Autotuners compile their candidates one by one; here all families are compiled at once."""
    smallest: dict[tuple[object, ...], Case] = {}
    for case in cases:
        best = smallest.setdefault(case.family, case)
        if case.tokens < best.tokens:
            smallest[case.family] = case
    start = time.perf_counter()

    def compile_one(case: Case) -> tuple[Case, Record]:
        option = ["--child-prewarm", case.name, "--peers", ",".join(args.peers)]
        # An autotuner's result here is meaningless, and must not be kept.
        return case, child(args, option, FLA_CACHE_RESULTS="0", TRITON_CACHE_AUTOTUNING="0")

    with concurrent.futures.ThreadPoolExecutor(args.prewarm) as pool:
        for case, answer in pool.map(compile_one, smallest.values()):
            reason = answer.get("error") or answer.get("failed")
            if reason:
                say(f"prewarm {case.name}: {reason}")
    took = time.perf_counter() - start
    say(f"prewarm: {len(smallest)} families compiled by {args.prewarm} processes in {took:.0f} s")


# --------------------------------------------------------------------------------------- header


# ------------------------------------------------------------------------------------------ main


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.run", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="folder for tables and records")
    for kind in KINDS:
        parser.add_argument(
            "--" + kind.replace("_", "-"), dest="kinds", action="append_const", const=kind,
            help=f"measure {kind.replace('_', ' ')} (default: everything)",
        )  # fmt: skip
    parser.add_argument("--select", default="", help="only cases whose name this regex finds")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument(
        "--peers", default=None, help=f"comma-separated, of {', '.join(PEERS)} "
        f"(default: {','.join(DEFAULT_PEERS)}; dry run: reference)",
    )  # fmt: skip
    parser.add_argument("--no-fla", action="store_true", help="leave FLA out, and its tuning")
    parser.add_argument("--budget-seconds", type=float, default=math.inf, help="start no row after")
    parser.add_argument("--resume", action="store_true", help="keep what --out has, do the rest")
    parser.add_argument(
        "--table", choices=tuple(TABLES), default="main",
        help="main: shapes of all kinds; full: the heads and sequences of FlashQLA's benchmark, "
        "times only; uneven: lengths as serving engines send them, times only (default: main)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=int, default=None, help="graph replays a row (default: 30 of main, else 8)"
    )
    parser.add_argument(
        "--calls", type=int, default=None,
        help="calls from Python in a row (default: 50 of main, else 20)",
    )  # fmt: skip
    add_gates_option(parser)
    parser.add_argument("--warm-l2", action="store_true", help="do not flush the L2 before replays")
    parser.add_argument(
        "--prewarm", type=int, default=min(16, (os.cpu_count() or 1) // 2),
        help="processes that compile every family first; 0: none (default: half the CPUs, to 16)",
    )  # fmt: skip
    parser.add_argument(
        "--recurrent-steps", type=int, default=4096,
        help="longest sequence for which the token-by-token reference is used (default: 4096)",
    )  # fmt: skip
    parser.add_argument("--commit", default=None, help="what to print when there is no .git")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU, float32")
    parser.add_argument("--child-first-call", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--child-prewarm", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    default = ("reference",) if args.dry_run else DEFAULT_PEERS
    args.peers = [p for p in (args.peers or ",".join(default)).split(",") if p]
    if unknown := set(args.peers) - set(PEERS):
        parser.error(f"--peers: expected names of {sorted(PEERS)}, got {sorted(unknown)}")
    if args.no_fla:
        args.peers = [p for p in args.peers if p != "fla"]
    args.kinds = tuple(dict.fromkeys(args.kinds or KINDS))
    args.effort = THOROUGH if args.table == "main" else FAST
    if args.dry_run:
        args.effort = TRIAL
    if args.rounds is not None:
        args.effort = args.effort._replace(rounds=args.rounds)
    if args.calls is not None:
        args.effort = args.effort._replace(calls=args.calls)
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device: use --dry-run to try the plumbing on a CPU")
    return args


def load_peers(names: Sequence[str]) -> tuple[list[Peer], list[str]]:
    """The implementations that are installed, and a line for each of the others."""
    peers, missing = [], []
    for name in names:
        peer = load(name)
        if isinstance(peer, str):
            missing.append(peer)
        else:
            peers.append(peer)
    return peers, missing


def measure_rows(
    cases: Sequence[Case], ours: Ours, others: Sequence[Peer], report: Report, device: Device,
    args: argparse.Namespace,
) -> list[str]:  # fmt: skip
    """Makes every kind of measurement of one case after the other. Returns the rows that the budget
    left out."""
    peers = [ours, *others]
    left_out = []
    for case in cases:
        label = labelled(case.name, case.gates)
        kinds = [k for k in case.measures if k in args.kinds and not report.has(k, label)]
        if not kinds:
            continue
        if time.perf_counter() - report.start > args.budget_seconds:
            left_out.append(label)
            continue
        inputs = make_inputs(case, device.torch)
        for kind in kinds:
            record: Record = {"kind": kind, "case": case.name, "gates": case.gates}
            try:
                if kind == ACCURACY:
                    record |= measure_accuracy(inputs, peers, device, args.recurrent_steps)
                elif kind == SPEED:
                    record |= measure_speed(
                        inputs, peers, report.baseline, device, args.effort, not args.warm_l2
                    )
                    record |= {"flops": case.flops, "bytes": case.bytes}
                    record["floor"] = floor_us(case, report.of("header")[-1])
                elif kind == NUMERICS:
                    record |= measure_numerics(inputs, peers, device)
                else:
                    record |= measure_host(inputs, peers, device, args.effort)
            except DeviceLost as error:
                # This record is kept, so --resume does not meet the error again.
                report.add(record | {"refused": str(error), "results": {}})
                raise
            except RuntimeError as error:  # out of memory, in the reference above all
                reason = first_line(error)
                device.check()
                record |= {"refused": reason, "results": {}}
            record["backend"], _ = attempt(device, partial(ours.served_by, inputs))
            report.add(record)
        del inputs
        gc.collect()
        if device.is_cuda:
            torch.cuda.empty_cache()
    return left_out


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    selected = [case for case in all_cases(args.table) if re.search(args.select, case.name)]
    if args.dry_run:
        selected = [tiny(case) for case in selected]
    cases = [case for kind in args.gates for case in with_gates(selected, kind)]
    if args.list:
        say("\n".join(labelled(case.name, case.gates) for case in cases))
        return 0
    device = Device(torch.device("cpu" if args.dry_run else "cuda"))
    by_name = {case.name: case for case in selected}
    if args.child_first_call:
        say(ANSWER + json.dumps(first_call_child(by_name[args.child_first_call], device)))
        return 0
    ours = Ours()
    others, missing = load_peers(args.peers)
    peers: list[Peer] = [ours, *others]
    if args.child_prewarm:
        say(ANSWER + json.dumps(prewarm_child(by_name[args.child_prewarm], peers, device)))
        return 0

    args.out.mkdir(parents=True, exist_ok=True)
    baseline = PEERS[args.peers[0]].name if args.peers else "FLA"
    report = Report(args.out, ours.name, baseline, args.resume)
    head = header(
        "benchmarks.run",
        {peer.name: peer.version() for peer in peers},
        missing,
        device,
        args.commit or commit(),
    )
    if args.dry_run:
        head["dry run"] = "toy sizes, float32, and a plain call where a graph's replay would be"
    report.add(head)
    for key, value in head.items():
        say(f"{key}: {value}")

    if FIRST_CALL in args.kinds:
        for name in FIRST_CALL_CASES:
            if name in by_name and not report.has(FIRST_CALL, name):
                record = {"kind": FIRST_CALL, "case": name}
                report.add(record | measure_first_call(by_name[name], args))
    wanted = [
        case for case in cases
        if any(
            k in args.kinds and not report.has(k, labelled(case.name, case.gates))
            for k in case.measures
        )
    ]  # fmt: skip
    if wanted and args.prewarm > 0 and device.is_cuda:
        prewarm(wanted, args)
    if ACCURACY in args.kinds and any(ACCURACY in case.measures for case in wanted):
        difference = verify_chunked(device, 200 if args.dry_run else 2048)
        report.add({"kind": "check", "difference": difference})
        say(f"float64 chunked and recurrent references differ by {difference:.1e}")
    left_out: list[str] = []
    lost: list[str] = []
    try:
        left_out = measure_rows(wanted, ours, others, report, device, args)
    except DeviceLost as error:
        lost = [f"stopped: {error}; go on with --resume"]

    lines, sound = report.summary()
    lines += lost
    if left_out:
        lines.append(f"not run, out of budget ({len(left_out)}): {', '.join(left_out)}")
    lines += missing
    (args.out / "summary.md").write_text("\n".join(f"- {line}" for line in lines) + "\n")
    say("\nSummary")
    say("\n".join(lines))
    return 0 if sound and not lost else 1


if __name__ == "__main__":
    sys.exit(main())
