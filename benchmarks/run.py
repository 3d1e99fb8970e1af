"""Error, time on the GPU, time of a call and time of a first call, of this package and its peers.

    python -m benchmarks.run --out DIR            everything, with whichever peers are installed
    python -m benchmarks.run --out DIR --dry-run  the same on a CPU at toy sizes, as a trial

All implementations get the same tensors in one process. Each row is printed and appended to
DIR/results.jsonl as it is made, and the tables (accuracy.md, speed.md, host.md, first_call.md) are
rewritten with it, so a run that is stopped loses at most a row; --resume goes on from there.
"""

import argparse
import concurrent.futures
import gc
import importlib
import importlib.util
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import DEFAULT_PEERS, PEERS, Ours, Peer, load
from benchmarks.shapes import (
    ACCURACY,
    FIRST_CALL_CASES,
    HOST,
    SPEED,
    Case,
    Inputs,
    Random,
    all_cases,
    make_inputs,
    tiny,
)

ROOT = Path(__file__).resolve().parent.parent
FIRST_CALL = "first_call"
KINDS = (ACCURACY, SPEED, HOST, FIRST_CALL)

GATE = 2e-2  # relative difference of o above which two implementations do not compute the same
ERROR_ALLOWANCE = 1.05  # of the baseline's error
HOST_LIMIT = 200.0  # us of host time a call
FIRST_CALL_LIMIT = 8.0  # s
CHILD_SECONDS = 400
ANSWER = "answer: "

Record = dict[str, Any]
Pair = tuple[torch.Tensor, torch.Tensor]


# ----------------------------------------------------------------------------------- the device


class DeviceLost(Exception):
    """A launch failed in a way that ends every later one of this process."""


class Device:
    """The device measured on: its clock, its memory, and whether it still answers."""

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self.is_cuda = device.type == "cuda"
        self.flush_buffer: torch.Tensor | None = None
        if self.is_cuda:
            properties = torch.cuda.get_device_properties(device)
            l2_bytes = getattr(properties, "L2_cache_size", 0) or 64 << 20
            self.flush_buffer = torch.zeros(l2_bytes, device=device)  # float32: four times the L2

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def flush(self) -> None:
        """Fills the L2 with clean lines: a buffer that was written would still be written back
        inside the time that follows. It also runs longer than the launch that comes next takes."""
        if self.flush_buffer is not None:
            self.flush_buffer.sum()

    def poison(self, nbytes: int) -> None:
        """Leaves NaN in the memory that the next allocations get, so that an element nobody
        writes is seen. The allocator would serve from its free list, so that is emptied first."""
        if not self.is_cuda:
            return
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        count = min(max(nbytes, 64 << 20), free // 3) // 4
        big = torch.full((count,), math.nan, device=self.torch)
        # Allocations of up to 1 MiB come from blocks of their own.
        small = [torch.full((1 << 17,), math.nan, device=self.torch) for _ in range(64)]
        del big, small

    def check(self) -> None:
        """A launch error stays: nothing measured after it would mean anything."""
        try:
            self.synchronize()
        except RuntimeError as error:
            raise DeviceLost(f"the device no longer answers: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__


def attempt(device: Device, function: Callable[[], Any]) -> tuple[Any, str | None]:
    """The value, or None and why there is none: one implementation's failure is not the end."""
    try:
        value = function()
        device.synchronize()
        return value, None
    except Exception as error:
        reason = _first_line(error)
    gc.collect()
    device.check()
    if device.is_cuda:
        torch.cuda.empty_cache()
    return None, reason


# ------------------------------------------------------------------------------------- accuracy


def exact(inputs: Inputs, heads: slice, recurrent: bool) -> Pair:
    """o and the final state of some key heads (and their value heads) in float64."""
    reference = importlib.import_module("gdn_triton.reference")
    rule = reference.recurrent_gated_delta_rule if recurrent else reference.chunk_gated_delta_rule
    group = inputs.case.HV // inputs.case.H
    values = slice(heads.start * group, heads.stop * group)
    state = inputs.initial_state
    result = rule(
        inputs.q[:, :, heads].double(),
        inputs.k[:, :, heads].double(),
        inputs.v[:, :, values].double(),
        inputs.g[:, :, values].double(),
        inputs.beta[:, :, values].double(),
        initial_state=None if state is None else state[:, values].double(),
        cu_seqlens=inputs.cu_seqlens,
    )
    return result[0], result[1]


def head_slices(inputs: Inputs, device: Device) -> list[slice]:
    """Key heads, a few at a time, so that the float64 intermediates fit."""
    case = inputs.case
    per_value_head = 8 * case.tokens * (4 * case.K + 6 * case.V + 6 * 64)
    per_value_head += 8 * case.chunks * case.K * case.V * 3
    available = torch.cuda.mem_get_info()[0] // 3 if device.is_cuda else 1 << 30
    step = max(1, min(16 << 30, available) // (per_value_head * (case.HV // case.H)))
    return [slice(h, min(h + step, case.H)) for h in range(0, case.H, step)]


def relative(x: torch.Tensor, y: torch.Tensor) -> float:
    """||x - y|| / ||y|| in float64; NaN if either has one."""
    y = y.double()
    return float((x.double() - y).norm() / y.norm().clamp_min(1e-300))


def verify_chunked(device: Device, tokens: int) -> float:
    """The chunked form against the recurrence, both float64: what lets long rows use the first."""
    case = Case(
        "chunked against recurrent", "check", 1, tokens, 2, 4, 128, 128,
        (tokens // 2 + 7, tokens - tokens // 2 - 8, 1),
        gate="mixed", initial_state=True, dtype=torch.float32,
    )  # fmt: skip
    inputs = make_inputs(case, device.torch)
    chunked = exact(inputs, slice(0, case.H), recurrent=False)
    recurrent = exact(inputs, slice(0, case.H), recurrent=True)
    difference = max(relative(a, b) for a, b in zip(chunked, recurrent, strict=True))
    if not difference < 1e-10:
        raise SystemExit(f"the chunked reference differs from the recurrence by {difference:.1e}")
    return difference


def measure_accuracy(
    inputs: Inputs, peers: Sequence[Peer], device: Device, recurrent_steps: int
) -> Record:
    case = inputs.case
    group = case.HV // case.H
    recurrent = case.longest <= recurrent_steps
    results: dict[str, Record] = {}
    outputs: dict[str, Pair] = {}
    for peer in peers:
        if reason := peer.supports(case):
            results[peer.name] = {"skipped": reason}
            continue
        call = peer.prepare(inputs)
        _, reason = attempt(device, call)  # compiles and tunes, which also uses memory
        if reason is None:
            device.poison(6 * inputs.nbytes)
            result, reason = attempt(device, call)
        if reason is not None:
            results[peer.name] = {"error": reason}
            continue
        outputs[peer.name] = peer.unify(inputs, result)
        finite = all(bool(x.isfinite().all()) for x in outputs[peer.name])
        results[peer.name] = {"finite": finite}

    # Squared norms summed over slices of heads, on the device: [difference, reference] of o, state.
    sums = {name: torch.zeros(2, 2, dtype=torch.float64) for name in outputs}
    for heads in head_slices(inputs, device):
        references = exact(inputs, heads, recurrent)
        values = slice(heads.start * group, heads.stop * group)
        for name, (o, state) in outputs.items():
            pairs = ((o[:, :, values], references[0]), (state[:, values], references[1]))
            for i, (x, y) in enumerate(pairs):
                norms = torch.stack([(x.double() - y).square().sum(), y.square().sum()])
                sums[name][i] += norms.cpu()
    for name, sum_ in sums.items():
        o_error, state_error = (sum_[:, 0] / sum_[:, 1].clamp_min(1e-300)).sqrt().tolist()
        results[name] |= {"o": o_error, "state": state_error}
    return {"reference": "recurrence" if recurrent else "chunked", "results": results}


# ----------------------------------------------------------------------------------------- time


class Replay:
    """One call in a CUDA graph; on a CPU, the call itself. `result` is rewritten by each replay."""

    def __init__(self, call: Callable[[], Any], device: Device) -> None:
        if not device.is_cuda:
            self.result = call()
            self.run = call
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = call()
        self.run = self.graph.replay


def replay_times(
    replays: dict[str, Replay], device: Device, rounds: int, flush: bool
) -> dict[str, list[float]]:
    """us of each replay. The implementations take turns, so that a drift of the clock hits all."""
    warm_up = 3
    if not device.is_cuda:
        times: dict[str, list[float]] = {name: [] for name in replays}
        for _ in range(rounds):
            for name, replay in replays.items():
                start = time.perf_counter()
                replay.run()
                times[name].append(1e6 * (time.perf_counter() - start))
        return times
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in replays}
    for round_ in range(warm_up + rounds):
        for name, replay in replays.items():
            if flush:
                device.flush()
            start_event = torch.cuda.Event(enable_timing=True)
            end_event = torch.cuda.Event(enable_timing=True)
            start_event.record()
            replay.run()
            end_event.record()
            if round_ >= warm_up:
                events[name].append((start_event, end_event))
    torch.cuda.synchronize()
    return {name: [1e3 * a.elapsed_time(b) for a, b in pairs] for name, pairs in events.items()}


def call_times(
    calls: Mapping[str, Callable[[], Any]], device: Device, count: int, repeats: int
) -> dict[str, Record]:
    """us of a call from Python: `call` with the GPU's part (a sync after `count` calls), `host`
    until it returns. `count` stays under the launches a stream takes before it blocks the host."""
    call_us: dict[str, list[float]] = {name: [] for name in calls}
    host_us: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            for name, call in calls.items():
                call()
                device.synchronize()
                start = time.perf_counter()
                for _ in range(count):
                    call()
                returned = time.perf_counter()
                device.synchronize()
                end = time.perf_counter()
                host_us[name].append(1e6 * (returned - start) / count)
                call_us[name].append(1e6 * (end - start) / count)
    finally:
        gc.enable()
    return {
        name: {
            "call": statistics.median(call_us[name]),
            "host": statistics.median(host_us[name]),
            "host_min": min(host_us[name]),
        }
        for name in calls
    }


def first_heads(inputs: Inputs, device: Device) -> tuple[slice, torch.Tensor]:
    """The value heads of the first key heads that fit, and their exact o."""
    heads = head_slices(inputs, device)[0]
    group = inputs.case.HV // inputs.case.H
    return slice(0, heads.stop * group), exact(inputs, heads, recurrent=False)[0]


def measure_speed(
    inputs: Inputs, peers: Sequence[Peer], baseline: str, device: Device, args: argparse.Namespace
) -> Record:
    """Times of every implementation that computes the same o; nothing at all if ours does not."""
    case, ours = inputs.case, peers[0].name
    results: dict[str, Record] = {}
    replays: dict[str, Replay] = {}
    outputs: dict[str, torch.Tensor] = {}
    for peer in peers:
        if reason := peer.supports(case):
            results[peer.name] = {"skipped": reason}
            continue
        eager, reason = attempt(device, peer.prepare(inputs))
        if reason is None:
            call = peer.prepare(inputs, capture=True)
            replay, reason = attempt(device, partial(Replay, call, device))
        if reason is not None:
            results[peer.name] = {"error": reason}
            continue
        eager_o = peer.unify(inputs, eager)[0]
        if device.is_cuda:
            for x in peer.unify(inputs, replay.result):
                x.fill_(math.nan)
            replay.run()
        o, state = peer.unify(inputs, replay.result)
        if not (bool(o.isfinite().all()) and bool(state.isfinite().all())):
            results[peer.name] = {"error": "the replayed graph left NaN or infinity"}
        elif not (difference := relative(o, eager_o)) <= GATE:
            results[peer.name] = {"error": f"graph and call differ by {difference:.1e}"}
        else:
            results[peer.name], replays[peer.name], outputs[peer.name] = {}, replay, o.clone()
    if ours not in replays:
        return {"refused": results[ours].get("error", "not run"), "results": results}

    others = [name for name in (baseline, *replays) if name in replays and name != ours]
    if others:
        judge, values, truth = others[0], slice(None), outputs[others[0]]
    else:
        judge = "float64"
        values, truth = first_heads(inputs, device)
    difference = relative(outputs[ours][:, :, values], truth)
    if not difference <= GATE:
        reason = f"o differs from {judge} by {difference:.1e}"
        return {"refused": reason, "results": results}
    for name in others[1:]:
        if not (other := relative(outputs[name], truth)) <= GATE:
            results[name]["error"] = f"o differs from {judge} by {other:.1e}"
            del replays[name]
    del outputs, truth

    for name, times in replay_times(replays, device, args.rounds, not args.warm_l2).items():
        results[name] |= {"graph": statistics.median(times), "graph_min": min(times)}
    short = max(results[name]["graph"] for name in replays) < 500
    calls = {peer.name: peer.prepare(inputs) for peer in peers if peer.name in replays}
    timed = call_times(calls, device, count=50 if short else 20, repeats=5)
    for name, cells in timed.items():
        results[name] |= cells
    return {"difference": difference, "judge": judge, "results": results}


def measure_host(inputs: Inputs, peers: Sequence[Peer], device: Device) -> Record:
    results: dict[str, Record] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for peer in peers:
        if reason := peer.supports(inputs.case):
            results[peer.name] = {"skipped": reason}
            continue
        call = peer.prepare(inputs)
        _, reason = attempt(device, call)
        if reason is not None:
            results[peer.name] = {"error": reason}
        else:
            calls[peer.name] = call
    return {"results": results | call_times(calls, device, count=50, repeats=15)}


# ---------------------------------------------------------------------------- other processes


def child(args: argparse.Namespace, options: Sequence[str], **environment: str) -> Record:
    """This module in a process of its own, and the JSON it answers with among what it prints."""
    command = [sys.executable, "-m", "benchmarks.run", "--out", str(args.out), *options]
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
    """Seconds of the first and the second call of this process, the import of torch not counted."""
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
            _, reason = attempt(device, peer.prepare(inputs))
            if reason is not None:
                failed[peer.name] = reason
    return {"failed": failed}


def prewarm(cases: Sequence[Case], args: argparse.Namespace) -> None:
    """Autotuners compile their candidates one by one; here all families compile at once."""
    smallest: dict[tuple[object, ...], Case] = {}
    for case in cases:
        best = smallest.setdefault(case.family, case)
        if case.tokens < best.tokens:
            smallest[case.family] = case
    start = time.perf_counter()

    def compile_one(case: Case) -> tuple[Case, Record]:
        option = ["--child-prewarm", case.name, "--peers", ",".join(args.peers)]
        # What an autotuner finds here means nothing, so it must not be kept.
        return case, child(args, option, FLA_CACHE_RESULTS="0", TRITON_CACHE_AUTOTUNING="0")

    with concurrent.futures.ThreadPoolExecutor(args.prewarm) as pool:
        for case, answer in pool.map(compile_one, smallest.values()):
            reason = answer.get("error") or answer.get("failed")
            if reason:
                say(f"prewarm {case.name}: {reason}")
    took = time.perf_counter() - start
    say(f"prewarm: {len(smallest)} families compiled by {args.prewarm} processes in {took:.0f} s")


# --------------------------------------------------------------------------------------- header


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> str:
    git = ("git", "-C", str(ROOT))
    # Without its own .git, an exported tree would get the commit of a repository around it.
    revision = _output(*git, "rev-parse", "HEAD") if (ROOT / ".git").exists() else None
    if not revision:
        return "unknown"
    changed = _output(*git, "status", "--short", "--untracked-files=no")
    return revision + (" with changes" if changed else "")


def ceilings(device: Device) -> Record:
    """What this machine reaches: a large copy (read + written) and a large bf16 matrix product."""

    def seconds(function: Callable[..., Any], *tensors: torch.Tensor) -> float:
        samples = []
        for _ in range(15):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function(*tensors)
            end.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(end) * 1e-3)
        return statistics.median(samples[5:])

    if not device.is_cuda:
        return {}
    count = min(2 << 30, torch.cuda.mem_get_info()[0] // 8)
    source = torch.empty(count, dtype=torch.uint8, device=device.torch).fill_(1)
    target = torch.empty_like(source)
    bytes_per_s = 2 * count / seconds(torch.Tensor.copy_, target, source)
    del source, target
    n = 8192
    rand = Random(0, device.torch)
    a, b = (rand.normal(n, n).bfloat16() for _ in range(2))
    flops_per_s = 2 * n**3 / seconds(torch.matmul, a, b)
    return {"bytes_per_s": bytes_per_s, "flops_per_s": flops_per_s}


def header(peers: Sequence[Peer], missing: Sequence[str], device: Device, name: str) -> Record:
    triton_version = "not installed"
    if importlib.util.find_spec("triton") is not None:
        triton_version = importlib.import_module("triton").__version__
    machine: Record = {"gpu": "none (CPU)"}
    if device.is_cuda:
        properties = torch.cuda.get_device_properties(device.torch)
        machine = {"gpu": properties.name, "multiprocessors": properties.multi_processor_count}
        query = "driver_version,power.limit,clocks.sm,clocks.max.sm"
        uuid = f"GPU-{getattr(properties, 'uuid', '')}"
        read = _output("nvidia-smi", "-i", uuid, f"--query-gpu={query}", "--format=csv,noheader")
        labels = ("driver", "power limit", "SM clock now", "SM clock at most")
        cells = read.split(", ") if read else ["unknown"] * len(labels)
        machine |= dict(zip(labels, cells, strict=False))
    return {
        "kind": "header",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": "python -m benchmarks.run " + " ".join(sys.argv[1:]),
        "commit": name,
        **machine,
        **ceilings(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
        "GDN_BACKEND": os.environ.get("GDN_BACKEND", "auto"),
        "implementations": {peer.name: peer.version() for peer in peers},
        "missing": list(missing),
    }


# --------------------------------------------------------------------------------------- tables


def say(text: str) -> None:
    print(text, flush=True)


def us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def empty_cell(result: Record | None) -> str:
    """What stands where there is no number: an error shows, a case not served is a dash."""
    if result and "error" in result:
        return "error"
    return "-"


class Report:
    """The records, on disk as they are made, and the tables of them."""

    def __init__(self, out: Path, ours: str, baseline: str, resume: bool) -> None:
        self.out, self.ours, self.baseline = out, ours, baseline
        self.records: list[Record] = []
        self.start = time.perf_counter()
        self.log = out / "results.jsonl"
        if resume and self.log.exists():
            lines = self.log.read_text().splitlines()
            self.records = [json.loads(line) for line in lines if line.endswith("}")]

    def of(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]

    def has(self, kind: str, case: str) -> bool:
        return any(record["case"] == case for record in self.of(kind))

    def add(self, record: Record) -> None:
        self.records.append(record)
        with self.log.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if record["kind"] in KINDS:
            self.write_tables()
            say(f"[{time.perf_counter() - self.start:5.0f} s] {self.line(record)}")

    def names(self, kind: str) -> list[str]:
        seen: dict[str, None] = {self.ours: None, self.baseline: None}
        for record in self.of(kind):
            seen |= dict.fromkeys(record["results"])
        used = [r["results"] for r in self.of(kind)]
        return [n for n in seen if any(not r.get(n, {"skipped": 1}).get("skipped") for r in used)]

    def pair(self, record: Record, key: str) -> tuple[float, float] | None:
        """Ours and the baseline's number of one row, if both are there."""
        results = record.get("results", {})
        values = [results.get(name, {}).get(key) for name in (self.ours, self.baseline)]
        return None if None in values else (values[0], values[1])

    def line(self, record: Record) -> str:
        kind, parts = record["kind"], []
        if kind == FIRST_CALL:
            parts = [f"{k} cache {self.first_call_cell(record[k])}" for k in ("empty", "filled")]
        elif "refused" in record:
            parts = [f"REFUSED: {record['refused']}"]
        else:
            cell = {ACCURACY: self.accuracy_cell, SPEED: self.speed_cell, HOST: self.host_cell}
            for name, result in record["results"].items():
                if "skipped" not in result:
                    error = result.get("error")
                    parts.append(f"{name} {'error: ' + error if error else cell[kind](result)}")
        return f"{kind} {record['case']}: " + "; ".join(parts)

    @staticmethod
    def accuracy_cell(result: Record | None) -> str:
        if not result or "o" not in result:
            return empty_cell(result)
        return f"{result['o']:.2e}, {result['state']:.2e}" + ("" if result["finite"] else " NaN!")

    @staticmethod
    def speed_cell(result: Record | None) -> str:
        if not result or "call" not in result:
            return empty_cell(result)
        graph = f"{us(result['graph'])} ({us(result['graph_min'])})"
        return f"{graph} / {us(result['call'])} / {us(result['host'])}"

    @staticmethod
    def host_cell(result: Record | None) -> str:
        if not result or "host" not in result:
            return empty_cell(result)
        return f"{us(result['host'])} ({us(result['host_min'])}) / {us(result['call'])}"

    @staticmethod
    def first_call_cell(result: Record) -> str:
        return f"{result['first']:.2f} s" if "first" in result else f"error: {result['error']}"

    def heading(self, title: str, legend: str) -> list[str]:
        lines = [f"# {title}", ""]
        for head in self.of("header"):
            facts = {k: v for k, v in head.items() if k not in ("kind", "implementations")}
            for key, unit, scale in (("bytes_per_s", "TB/s copied", 1e12),
                                     ("flops_per_s", "TFLOP/s bf16", 1e12)):  # fmt: skip
                if key in facts:
                    facts[key] = f"{facts[key] / scale:.2f} {unit}"
            packages = ", ".join(f"{n} {v}" for n, v in head["implementations"].items())
            facts["missing"] = "; ".join(facts["missing"]) or "none"
            lines += [f"- {key}: {value}" for key, value in facts.items()]
            lines += [f"- implementations: {packages}", ""]
        return [*lines, legend, ""]

    def write(self, kind: str, lines: Iterable[str]) -> None:
        (self.out / f"{kind}.md").write_text("\n".join(lines) + "\n")

    def write_tables(self) -> None:
        if self.of(ACCURACY):
            self.write(ACCURACY, self.accuracy_table())
        if self.of(SPEED):
            self.write(SPEED, self.speed_table())
        if self.of(HOST):
            self.write(HOST, self.host_table())
        if self.of(FIRST_CALL):
            self.write(FIRST_CALL, self.first_call_table())

    def accuracy_table(self) -> Iterable[str]:
        names = self.names(ACCURACY)
        legend = (
            "Relative error ||x - ref|| / ||ref|| of o, of the final state, against float64 on the "
            "same inputs: the token-by-token recurrence, or the chunked form where that would take "
            "too long"
        )
        checks = [f"{r['difference']:.1e}" for r in self.of("check")]
        legend += f" (the two differ by {', '.join(checks)} at the check)." if checks else "."
        yield from self.heading("Accuracy", legend)
        yield row(["case", "reference", *names, f"{self.ours} / {self.baseline}"])
        yield row(["---"] * (len(names) + 3))
        for record in self.of(ACCURACY):
            cells = [self.accuracy_cell(record["results"].get(name)) for name in names]
            ratios = []
            for key in ("o", "state"):
                pair = self.pair(record, key)
                ratios.append(f"{pair[0] / pair[1]:.3f}" if pair and pair[1] else "-")
            reference = record.get("reference", "refused")
            yield row([record["case"], reference, *cells, ", ".join(ratios)])

    def speed_table(self) -> Iterable[str]:
        names = self.names(SPEED)
        yield from self.heading(
            "Speed",
            "Microseconds: a CUDA graph's replay with a cold L2, median (least) / a call from "
            "Python in a row of calls, the GPU's part included / the host's part of that call. "
            "Floor: the larger of the fewest operations over the rate of a large matrix product "
            "and the fewest bytes over the rate of a large copy, both measured in this run.",
        )
        yield row(
            ["case", "backend", *names, f"{self.baseline} / {self.ours}", "floor", "of the floor",
             "GB/s", "TFLOP/s"]
        )  # fmt: skip
        yield row(["---"] * (len(names) + 7))
        for record in self.of(SPEED):
            if "refused" in record:
                reason = f"refused: {record['refused']}"
                yield row([record["case"], reason, *["-"] * (len(names) + 5)])
                continue
            results = record["results"]
            cells = [self.speed_cell(results.get(name)) for name in names]
            pair, graph = self.pair(record, "graph"), results[self.ours]["graph"]
            ratio = f"{pair[1] / pair[0]:.2f}" if pair else "-"
            floor = record["floor"]
            yield row(
                [record["case"], record["backend"] or "unknown", *cells, ratio,
                 us(floor) if floor else "-", f"{floor / graph:.0%}" if floor else "-",
                 f"{record['bytes'] / graph * 1e-3:.0f}", f"{record['flops'] / graph * 1e-6:.1f}"]
            )  # fmt: skip

    def host_table(self) -> Iterable[str]:
        names = self.names(HOST)
        yield from self.heading(
            "Host time",
            "Microseconds of one call from Python until it returns, median (least) / of one call "
            "in a row of 50 with a sync after the last.",
        )
        yield row(["case", *names])
        yield row(["---"] * (len(names) + 1))
        for record in self.of(HOST):
            cells = [self.host_cell(record["results"].get(name)) for name in names]
            yield row([record["case"], *cells])

    def first_call_table(self) -> Iterable[str]:
        yield from self.heading(
            "First call",
            f"Seconds of {self.ours}'s first call in a new process, compilation included, the "
            "import of torch not; the second call of the same process.",
        )
        yield row(["case", "empty Triton cache", "filled Triton cache", "second call"])
        yield row(["---"] * 4)
        for record in self.of(FIRST_CALL):
            empty, filled = record["empty"], record["filled"]
            second = f"{1e3 * filled['second']:.2f} ms" if "second" in filled else "-"
            cells = [self.first_call_cell(empty), self.first_call_cell(filled), second]
            yield row([record["case"], *cells])

    def summary(self) -> tuple[list[str], bool]:
        """The run in a few lines, the losses among them; and whether every row of ours is there."""
        lines, sound = [], True
        base, ours = self.baseline, self.ours

        for record in self.of(ACCURACY):
            result = record["results"].get(ours, {})
            if not result.get("finite"):
                sound = False
                reason = record.get("refused") or result.get("error", "not finite")
                lines.append(f"accuracy {record['case']}: {reason}")
        for key in ("o", "state"):
            ratios = [
                (pair[0] / pair[1], record["case"])
                for record in self.of(ACCURACY)
                if (pair := self.pair(record, key)) and pair[1]
            ]
            if ratios:
                worst, case = max(ratios)
                above = [f"{case} ({x:.3f})" for x, case in ratios if not x <= ERROR_ALLOWANCE]
                lines.append(
                    f"error of {key}, {ours} / {base}: at most {worst:.3f} ({case}), median "
                    f"{statistics.median(x for x, _ in ratios):.3f}, {len(ratios)} rows; above "
                    f"{ERROR_ALLOWANCE}: {', '.join(above) or 'none'}"
                )

        for record in self.of(SPEED):
            if "refused" in record:
                sound = False
                lines.append(f"speed {record['case']}: refused: {record['refused']}")
        for key, what in (("graph", "graph replay"), ("call", "call from Python")):
            ratios = [
                (pair[1] / pair[0], record["case"])
                for record in self.of(SPEED)
                if (pair := self.pair(record, key))
            ]
            if ratios:
                mean = math.exp(statistics.fmean(math.log(x) for x, _ in ratios))
                losses = [f"{case} ({x:.2f})" for x, case in sorted(ratios) if x < 1]
                lines.append(
                    f"{what}, {base} / {ours}: geometric mean {mean:.2f} over {len(ratios)} rows; "
                    f"slower than {base} on {len(losses)}: {', '.join(losses) or 'none'}"
                )

        hosts = [
            (result["host"], record["case"])
            for record in [*self.of(SPEED), *self.of(HOST)]
            if "host" in (result := record["results"].get(ours, {}))
        ]
        if hosts:
            most, case = max(hosts)
            over = sorted({c for value, c in hosts if value > HOST_LIMIT})
            lines.append(
                f"host time of a call of {ours}: at most {us(most)} us ({case}); above "
                f"{HOST_LIMIT:.0f} us: {', '.join(over) or 'none'}"
            )
        firsts = self.of(FIRST_CALL)
        for record in firsts:
            for cache in ("empty", "filled"):
                if "error" in record[cache]:
                    sound = False
                    reason = record[cache]["error"]
                    lines.append(f"first call {record['case']}, {cache} cache: {reason}")
        slow = [(r["empty"]["first"], r["case"]) for r in firsts if "first" in r["empty"]]
        if slow:
            most, case = max(slow)
            over = [c for value, c in slow if value > FIRST_CALL_LIMIT]
            lines.append(
                f"first call of {ours}, empty cache: at most {most:.2f} s ({case}); "
                f"above {FIRST_CALL_LIMIT:.0f} s: {', '.join(over) or 'none'}"
            )

        rows = [*self.of(ACCURACY), *self.of(SPEED), *self.of(HOST)]
        backends = Counter(str(record["backend"]) for record in rows if "backend" in record)
        if backends:
            used = ", ".join(f"{name} ({count} rows)" for name, count in backends.items())
            lines.append(f"backend of {ours}: {used}")
        failures = Counter(
            f"{name}: {result['error']}"
            for record in rows
            for name, result in record["results"].items()
            if "error" in result
        )
        lines += [f"error of {what} ({count} times)" for what, count in failures.items()]
        return lines, sound


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
    parser.add_argument("--rounds", type=int, default=30, help="graph replays a row (default: 30)")
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
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device: use --dry-run to try the plumbing on a CPU")
    return args


def load_peers(names: Sequence[str]) -> tuple[list[Peer], list[str]]:
    """Those that are there, and a line for each of the others."""
    peers, missing = [], []
    for name in names:
        peer = load(name)
        if isinstance(peer, str):
            missing.append(peer)
        else:
            peers.append(peer)
    return peers, missing


def floor_us(case: Case, rates: Record) -> float | None:
    """Least time of the case at the rates that this machine was seen to reach."""
    if "flops_per_s" not in rates:
        return None
    return 1e6 * max(case.flops / rates["flops_per_s"], case.bytes / rates["bytes_per_s"])


def measure_rows(
    cases: Sequence[Case], ours: Ours, others: Sequence[Peer], report: Report, device: Device,
    args: argparse.Namespace,
) -> list[str]:  # fmt: skip
    """Every kind of measurement of one case after the other; returns what the budget left out."""
    peers = [ours, *others]
    left_out = []
    for case in cases:
        kinds = [k for k in case.measures if k in args.kinds and not report.has(k, case.name)]
        if not kinds:
            continue
        if time.perf_counter() - report.start > args.budget_seconds:
            left_out.append(case.name)
            continue
        inputs = make_inputs(case, device.torch)
        for kind in kinds:
            record: Record = {"kind": kind, "case": case.name}
            try:
                if kind == ACCURACY:
                    record |= measure_accuracy(inputs, peers, device, args.recurrent_steps)
                elif kind == SPEED:
                    record |= measure_speed(inputs, peers, report.baseline, device, args)
                    record |= {"flops": case.flops, "bytes": case.bytes}
                    record["floor"] = floor_us(case, report.of("header")[-1])
                else:
                    record |= measure_host(inputs, peers, device)
            except DeviceLost as error:
                # Kept, so that --resume does not run into it again.
                report.add(record | {"refused": str(error), "results": {}})
                raise
            except RuntimeError as error:  # out of memory, in the reference above all
                reason = _first_line(error)
                device.check()
                record |= {"refused": reason, "results": {}}
            record["backend"], _ = attempt(device, partial(ours.backend, inputs))
            report.add(record)
        del inputs
        gc.collect()
        if device.is_cuda:
            torch.cuda.empty_cache()
    return left_out


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    cases = [case for case in all_cases() if re.search(args.select, case.name)]
    if args.list:
        say("\n".join(case.name for case in cases))
        return 0
    if args.dry_run:
        cases = [tiny(case) for case in cases]
    device = Device(torch.device("cpu" if args.dry_run else "cuda"))
    by_name = {case.name: case for case in cases}
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
    head = header(peers, missing, device, args.commit or commit())
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
        if any(k in args.kinds and not report.has(k, case.name) for k in case.measures)
    ]  # fmt: skip
    if wanted and args.prewarm > 0 and device.is_cuda:
        prewarm(wanted, args)
    if ACCURACY in args.kinds and wanted:
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
