"""The Gated DeltaNet part of a Qwen3-Next layer, beside the kernels of vLLM and SGLang.

    python -m benchmarks.layer [--engines FOLDER] [--heads 16/32 4/8] [--tokens 8192]
        [--prefills 1 8] [--decodes 1 8 64 256] [--kinds decode drafts] [--pools float32]
        [--jsonl FILE] [--turns FILE] [--dry-run]

From mixed_qkv, behind the projection, to what goes into the output's projection: convolution,
preparation, rule, gated norm; K = V = 128, 4 taps, bf16, float32 states and those of other pools
that are named, gates of a model; 16/32 heads are the model's, 4/8 those of one of four ranks. A
prefill is of 8192 tokens of 1 or 8 new sequences, and a decode step of one token of 1 to 256. Only
this package is timed for steps of several tokens: four tokens of each sequence (drafts with a slot
for each state, drafts of which the last state is kept, trees), or packed sequences of 1 to 4
tokens. Such a step is timed as the call chooses its launches, and in three launches. Each row:
microseconds of a replay of the call as a CUDA graph with a cold L2, the implementations in turns,
and the kernels that it launches, with the time of each kernel of an eager call; the median, and
with a window the mean without the slowest 5 of 90 rounds, as the step of some rounds folds.

FOLDER is what `python -m benchmarks.engines` makes. The engines' calls are those of their layers:
vLLM's gathers, zeroing and scatter of states are among them, and what an engine computes once a
step for all layers is not. Where FlashInfer is installed, vLLM has a second row for prefills, with
FlashInfer's rule, vLLM's default on Hopper. SGLang's prefill takes its Triton convolution; on
NVIDIA GPUs its server has one in CUDA. Every o is compared with float64 first; one that differs is
not timed.
--dry-run does all of it with toy sizes on the CPU.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import engines
from benchmarks.decode import add_turns_option, taking_turns
from benchmarks.layer_calls import (
    DECODE,
    DRAFTS,
    PREFILL,
    STEPS,
    Call,
    Sizes,
    Step,
    exact,
    lengths_of,
    make_step,
    sglang,
    vllm,
)
from benchmarks.layer_ours import WindowCall, ours, ours_in_three, ours_with_window
from benchmarks.machine import commit, header
from benchmarks.measure import (
    GATE,
    Device,
    Record,
    Replay,
    attempt,
    device_for,
    first_line,
    relative,
    replay_times,
)
from benchmarks.peers import FlashInfer, Ours
from benchmarks.report import append_record

OURS = "gdn_triton"
IN_THREE = "gdn_triton, three launches"
WITH_WINDOW = "gdn_triton, with a window"
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
WITH_FLASHINFER = "vLLM, FlashInfer"
LEGEND = (
    "Microseconds of the Gated DeltaNet part of a layer in a CUDA graph with a cold L2, from "
    "mixed_qkv to\nthe input of the output's projection, and the kernels that it launches."
)

Maker = Callable[[Step], Call]


def makers_of(folder: Path | None) -> tuple[dict[str, Maker], dict[str, str], list[str]]:
    """Ours and the engines' that are in the folder; their versions; why others are not."""
    found: dict[str, Maker] = {OURS: ours, IN_THREE: ours_in_three, WITH_WINDOW: ours_with_window}
    versions, missing = {OURS: Ours.version()}, []
    for name, make in (("vllm", vllm), ("sglang", sglang)):
        if folder is None:
            missing.append(f"{name}: not measured: --engines names no folder")
            continue
        try:
            theirs = engines.kernels(name, folder)
        except ImportError as error:
            missing.append(f"{name}: not measured: {error}")
            continue
        found[NAMES[name]] = partial(make, theirs=theirs)
        versions[NAMES[name]] = engines.VERSIONS[name]
        if name == "vllm":
            try:
                rule = FlashInfer().package.chunk_gated_delta_rule
            except Exception as error:
                missing.append(f"{WITH_FLASHINFER}: not measured: {first_line(error)}")
                continue
            found[WITH_FLASHINFER] = partial(vllm, theirs=theirs, flashinfer=rule)
            versions[WITH_FLASHINFER] = FlashInfer.version()
    return found, versions, missing


# ---------------------------------------------------------------------------------- measurements


def launches(call: Callable[[], Any], device: Device) -> int | None:
    """Kernels, copies and fills of one call; None on the CPU, and where the profiler sees none."""
    if not device.is_cuda:
        return None
    call()
    device.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        device.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profile.events() or ()) or None


def kernel_times(call: Callable[[], Any], device: Device, calls: int = 8) -> dict[str, float]:
    """us of each kernel, copy or fill of a call with a cold L2, by name: the median of its sums in
    several calls. Empty on the CPU, and where the profiler sees none."""
    if not device.is_cuda:
        return {}
    sums: list[dict[str, float]] = []
    call()
    for _ in range(calls):
        device.flush()
        device.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            device.synchronize()
        found: dict[str, float] = {}
        for event in profile.events() or ():
            if event.device_type.name == "CUDA":
                name = event.name.split("(")[0][:100]
                found[name] = found.get(name, 0.0) + event.device_time
        sums.append(found)
    return {name: statistics.median(x.get(name, 0.0) for x in sums) for name in sums[0]}


def measure(
    sizes: Sizes,
    what: str,
    lengths: Sequence[int],
    device: Device,
    makers: dict[str, Maker],
    rounds: int,
    pool: str = "float32",
    turns: Path | None = None,
) -> Record:
    # The interpreter of Triton multiplies bfloat16 wrongly.
    dtype = torch.bfloat16 if device.is_cuda else torch.float16
    with taking_turns(turns):
        step = make_step(sizes, what, lengths, device.torch, dtype)
        step = step._replace(state=step.state.to(getattr(torch, pool)))
        expected = exact(step)
    rows: dict[str, Record] = {}
    calls: dict[str, Call] = {}
    for name, maker in makers.items():
        # The first call compiles, while another process has its turn. It writes its states, and
        # vLLM's step its input.
        y, why = attempt(device, lambda: maker(step.copied())())  # noqa: B023
        if why is None:
            difference = relative(y[: expected.shape[0]], expected)
            rows[name] = {"error": difference}
            if not difference < GATE:
                why = f"o differs by {difference:.1e} from float64"
        if why is None:
            calls[name] = maker(step.copied())
        else:
            rows[name] = {"skipped": why}
    with taking_turns(turns):
        add_times(rows, calls, device, rounds)
    return {
        "kind": "layer",
        "what": what,
        "sequences": len(lengths),
        "tokens": sum(lengths),
        "heads": f"{sizes.H}/{sizes.HV}",
        "pool": pool,
        "gates": "model",
        "results": rows,
    }


def add_times(rows: dict[str, Record], calls: dict[str, Call], device: Device, rounds: int) -> None:
    """Adds the launches, the kernels and the time of each call to its row."""
    replays: dict[str, Replay] = {}
    for name, call in calls.items():
        rows[name]["launches"], why = attempt(device, partial(launches, call, device))
        if why is None:
            rows[name]["kernels"], why = attempt(device, partial(kernel_times, call, device))
        if why is None:
            before = call.advance if isinstance(call, WindowCall) else None
            replays[name], why = attempt(device, partial(Replay, call, device, before))
        if why is not None:
            replays.pop(name, None)
            rows[name] = {"skipped": why}
    for name, times in replay_times(replays, device, rounds, flush=True).items():
        rows[name]["time"] = statistics.median(times)
        if name == WITH_WINDOW:
            rows[name]["time"] = statistics.mean(sorted(times)[: len(times) - len(times) // 18])


def tables(records: list[Any], names: Collection[str]) -> str:
    """Markdown, with the meaning that `LEGEND` tells."""
    lines = [
        f"| what | sequences | tokens | H / HV | states | {' | '.join(names)} |",
        f"|---|---|---|---|---|{'---|' * len(names)}",
    ]
    for record in records:
        cells = []
        for name in names:
            row = record["results"].get(name, {})
            count = row.get("launches")
            shown = "" if count is None else f" ({count})"
            cells.append(f"{row['time']:.1f}{shown}" if "time" in row else "-")
        head = [str(record[key]) for key in ("what", "sequences", "tokens", "heads")]
        # Records without a pool were made when all states were float32.
        head.append(record.get("pool", "float32"))
        lines.append(f"| {' | '.join([*head, *cells])} |")
    return "\n".join(lines)


# Kernels of our prefill, by how their names begin.
PARTS = {"conv": "convolution and preparation", "norm": "gated norm"}


def prefills(records: list[Any], rate: float) -> str:
    """Markdown: the time of each implementation, then the parts of ours with the share of `rate`,
    bytes a second, at which the convolution and the norm move their tensors. The rule has the rest
    of the time: its kernels overlap, so the sum of their times is larger."""
    names = [n for n in records[0]["results"] if any("time" in x["results"][n] for x in records)]
    has_kernels = any(x["results"][OURS].get("kernels") for x in records)
    parts = [*PARTS.values(), "rule"] if has_kernels else []
    columns = ["heads", "sequences", *names, *parts]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for record in records:
        T, sizes = record["tokens"], Sizes(*map(int, record["heads"].split("/")))
        moved = {
            "conv": 2 * 2 * T * sizes.D + T * sizes.HV * (2 * 2 + 2 * 4),  # a and b; g and beta
            "norm": 3 * 2 * T * sizes.HV * sizes.V,
        }
        cells = [record["heads"], str(record["sequences"])]
        for name in names:
            row = record["results"].get(name, {})
            cells.append(f"{row['time']:.0f} ({row['launches']})" if "time" in row else "-")
        kernels = record["results"][OURS].get("kernels", {})
        sums = {part: sum(t for k, t in kernels.items() if k.startswith(part)) for part in PARTS}
        for part, us in sums.items():
            cells.append(f"{us:.0f} ({1e6 * moved[part] / us / rate:.0%})" if us else "-")
        cells.append(f"{record['results'][OURS]['time'] - sum(sums.values()):.0f}")
        lines.append(f"| {' | '.join(cells[: len(columns)])} |")
    return "\n".join(lines) + "\n"


def kernel_lines(records: list[Any], name: str) -> list[str]:
    """The kernels of one implementation, a line a call."""
    lines = []
    for record in records:
        found = record["results"].get(name, {}).get("kernels", {})
        shown = ", ".join(f"{kernel} {time:.1f}" for kernel, time in found.items())
        if shown:
            call = f"{record['what']} of {record['sequences']}, {record['heads']}"
            lines.append(f"{name}, {call}: {shown}")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--engines", type=Path, help="what `python -m benchmarks.engines` made")
    parser.add_argument("--heads", nargs="+", default=["16/32", "4/8"], metavar="H/HV")
    parser.add_argument("--tokens", type=int, default=8192, help="of a prefill")
    parser.add_argument("--prefills", type=int, nargs="*", default=[1, 8], help="sequences")
    parser.add_argument("--decodes", type=int, nargs="*", default=[1, 8, 64, 256], help="sequences")
    parser.add_argument("--kinds", nargs="+", default=[DECODE, DRAFTS], choices=STEPS, help="steps")
    parser.add_argument("--pools", nargs="+", default=["float32"], help="dtypes of a step's states")
    parser.add_argument("--rounds", type=int, default=90)
    parser.add_argument("--jsonl", type=Path, help="also append a record a row to this file")
    add_turns_option(parser)
    parser.add_argument("--commit", help="what the records say was measured (default: git's)")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU")
    options = parser.parse_args(arguments)
    device = device_for(options.dry_run)
    sizes = [Sizes(*map(int, heads.split("/"))) for heads in options.heads]
    if options.dry_run:
        sizes = [Sizes(1, 2, 16, 16)]
        options.tokens, options.prefills, options.decodes, options.rounds = 70, [1, 2], [3], 2
    makers, versions, missing = makers_of(options.engines)
    name = options.commit or commit()
    append_record(options.jsonl, header("benchmarks.layer", versions, missing, device, name))
    calls = [(PREFILL, [options.tokens // N] * N, "float32") for N in options.prefills]
    steps = itertools.product(options.decodes, options.kinds, options.pools)
    calls += [(what, lengths_of(what, N), pool) for N, what, pool in steps]
    records = []
    for of, (what, lengths, pool) in itertools.product(sizes, calls):
        found = measure(
            of, what, lengths, device, makers, options.rounds, pool=pool, turns=options.turns
        )
        records.append(found)
        append_record(options.jsonl, found)
    print(f"{LEGEND}\n\n{tables(records, makers)}\n")
    whys = [
        f"{name}, {record['what']}: {row['skipped']}"
        for record in records
        for name, row in record["results"].items()
        if "skipped" in row
    ]
    print("\n".join(dict.fromkeys([*kernel_lines(records, OURS), *missing, *whys])))


if __name__ == "__main__":
    main()
