"""vLLM end to end with its own Gated DeltaNet layers and with ours: tokens a second, and agreement.

    python -m benchmarks.vllm_engine [--ways FlashInfer Triton gdn_triton] [--heads 16/32 4/8]
        [--kinds speed cached drafts invariant] [--jsonl FILE] [--logs FOLDER]

vLLM 0.33.0 on one GPU, as it is installed, with the CUDA library of this package where that is
built. The model is a random Qwen3-Next of 12 layers at its width (16/32 heads), or with the heads
of one of four ranks (4/8), whose weights are scaled until every layer moves the logits.

- speed: prompts, decode steps in CUDA graphs and eager ones, launches of a step, log probabilities
  of 16384 given tokens and 64 x 64 greedy ones.
- cached: prefix caching (`mamba_cache_mode="align"`): prompts from the cache and without it.
- drafts: two drafted tokens of a random MTP layer.
- invariant: `VLLM_BATCH_INVARIANT=1` and `GDN_BATCH_INVARIANT=1`: a prompt alone and in a batch.

Each way, kind and heads has a process of its own. Up to --at-once of them start together, and each
measures while the others wait. All else of vLLM is the same in every way: FlashAttention, Triton
for the experts, no compilation. A way whose engine does not start has a row that says so.
"""

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import commit, header
from benchmarks.measure import Record, cuda_device
from benchmarks.report import append_record, us
from benchmarks.vllm_calls import DECODES, KINDS, PROMPTS, WAYS, WITH_WINDOW, Job, work

LEGEND = (
    "Thousands of tokens a second, of prompts or of generated tokens; then launches of a step, and "
    "how far\nthe log probabilities and tokens of each way are from those of the first one."
)
PARTS = {"prompts": PROMPTS, "graphs": DECODES, "eager": DECODES}


# ------------------------------------------------------------------------------------- agreement


def mean_difference(x: Sequence[float], y: Sequence[float]) -> float:
    return statistics.fmean(abs(a - b) for a, b in zip(x, y, strict=True))


def share_equal(x: Sequence[Any], y: Sequence[Any]) -> float:
    return statistics.fmean(a == b for a, b in zip(x, y, strict=True))


def score_agreement(x: Record, y: Record) -> Record:
    """Of the same given tokens: the mean difference of their log probabilities, and the share of
    positions with the same likeliest token."""
    return {
        "difference": mean_difference(x["logprobs"], y["logprobs"]),
        "likeliest": share_equal(x["likeliest"], y["likeliest"]),
    }


def greedy_agreement(x: Record, y: Record) -> Record:
    """The share of sequences with the same tokens, the share of tokens before the first that
    differs, and the mean difference of the log probabilities of those."""
    before, count, differences = 0, 0, []
    for n, (a, b) in enumerate(zip(x["tokens"], y["tokens"], strict=True)):
        same = next((i for i, (s, t) in enumerate(zip(a, b, strict=True)) if s != t), len(a))
        before, count = before + same, count + len(a)
        pairs = zip(x["logprobs"][n][:same], y["logprobs"][n][:same], strict=True)
        differences += [abs(s - t) for s, t in pairs]
    return {
        "sequences": share_equal(x["tokens"], y["tokens"]),
        "before": before / count,
        "difference": statistics.fmean(differences) if differences else float("nan"),
    }


def same_bits(x: Record, y: Record) -> Record:
    """Of one prompt in two batches."""
    agreement = score_agreement(x["scores"], y["scores"])
    return {
        "scores": x["scores"]["logprobs"] == y["scores"]["logprobs"],
        "greedy": x["greedy"] == y["greedy"],
        "difference": agreement["difference"],
    }


# ----------------------------------------------------------------------------------------- rows


def failure(*answers: Record) -> Record | None:
    found = [x["failed"] for x in answers if "failed" in x]
    return {"failed": found[0]} if found else None


def part_of(answer: Record, name: str) -> Record:
    """What a part of a process gave, or the error of the part or of the start."""
    found: Record = failure(answer) or answer.get(name) or {"failed": f"has no {name}"}
    return found


def speed_rows(answers: Mapping[str, Record]) -> list[Record]:
    rows: list[Record] = []
    for part, calls in PARTS.items():
        for call in calls:
            what = call if part == "prompts" else f"{call}, {part}"
            found = {way: part_of(x, part) for way, x in answers.items()}
            rows.append({"what": what, "results": {w: x.get(call, x) for w, x in found.items()}})
    launched = {way: part_of(x, "launches") for way, x in answers.items()}
    for step in ("prompt", "decode"):
        results = {w: x if "failed" in x else {"launches": x[step]} for w, x in launched.items()}
        rows.append({"what": f"launches, {step}", "results": results})
    first = next(iter(answers))
    agreements = {"scores": score_agreement, "greedy": greedy_agreement}
    for part, agreement in agreements.items():
        base = part_of(answers[first], part)
        results = {}
        for way, answer in answers.items():
            other = part_of(answer, part)
            results[way] = failure(base, other) or agreement(base, other)
        rows.append({"what": f"{part}, against {first}", "results": results})
    silent = {}
    for way, answer in answers.items():
        pair = part_of(answer, "scores"), part_of(answer, "silent")
        silent[way] = failure(*pair) or score_agreement(*pair)
    rows.append({"what": "scores, against no Gated DeltaNet", "results": silent})
    return rows


def cached_rows(answers: Mapping[str, Record]) -> list[Record]:
    rows: list[Record] = []
    for part in ("empty", "again", "longer, cached", "longer, empty"):
        results = {}
        for way, answer in answers.items():
            x = part_of(answer, part)
            results[way] = failure(x) or {"seconds": x["seconds"], "cached": x["cached"]}
        rows.append({"what": f"8 prompts, {part}", "results": results})
    for part, base in (("again", "empty"), ("longer, cached", "longer, empty")):
        results = {}
        for way, answer in answers.items():
            pair = part_of(answer, base), part_of(answer, part)
            results[way] = failure(*pair) or greedy_agreement(*pair)
        rows.append({"what": f"greedy, {part}, against {base}", "results": results})
    return rows


def drafts_rows(answers: Mapping[str, Record], speed: Mapping[str, Record]) -> list[Record]:
    rates = {way: part_of(x, "eager") for way, x in answers.items()}
    results = {w: x.get("decode of 64", x) for w, x in rates.items()}
    rows = [{"what": "decode of 64, drafts, eager", "results": results}]
    compared = {}
    for way, answer in answers.items():
        pair = part_of(speed.get(way, {}), "greedy"), part_of(answer, "greedy")
        compared[way] = failure(*pair) or greedy_agreement(*pair)
    return [*rows, {"what": "greedy, drafts, against none", "results": compared}]


def invariant_rows(answers: Mapping[str, Record]) -> list[Record]:
    results = {}
    for way, answer in answers.items():
        pair = part_of(answer, "alone"), part_of(answer, "among 8")
        results[way] = failure(*pair) or same_bits(*pair)
    return [{"what": "a prompt alone and among 8", "results": results}]


def rows_of(answers: Mapping[Job, Record]) -> list[Record]:
    """The records of all processes."""
    made: list[Record] = []
    for heads in dict.fromkeys(job.heads for job in answers):
        of: dict[str, dict[str, Record]] = {
            kind: {j.way: x for j, x in answers.items() if (j.kind, j.heads) == (kind, heads)}
            for kind in KINDS
        }
        rows = speed_rows(of["speed"]) if of["speed"] else []
        rows += cached_rows(of["cached"]) if of["cached"] else []
        rows += drafts_rows(of["drafts"], of["speed"]) if of["drafts"] else []
        rows += invariant_rows(of["invariant"]) if of["invariant"] else []
        made += [{"kind": "engine", "heads": heads, **row} for row in rows]
    return made


def cell(row: Record) -> str:
    if not row or "failed" in row:
        return "-"
    if "rate" in row:
        return f"{row['rate'] / 1e3:.2f}"
    if "launches" in row:
        return "-" if row["launches"] is None else f"{row['launches']:.0f}"
    if "cached" in row:
        return f"{1e3 * row['seconds']:.0f} ms ({sum(row['cached'])} tokens cached)"
    if "likeliest" in row:
        return f"{row['difference']:.4f} ({100 * row['likeliest']:.1f}%)"
    if "before" in row:
        return (
            f"{row['difference']:.4f} ({100 * row['before']:.1f}%, "
            f"{100 * row['sequences']:.0f}% of sequences)"
        )
    same = "same bits" if row["scores"] and row["greedy"] else "other bits"
    return f"{same} ({row['difference']:.4f})"


def tables(records: Sequence[Record], names: Collection[str]) -> str:
    """Markdown, with the meaning that `LEGEND` tells, and the reasons of what has no number."""
    lines = [f"| heads | what | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    whys = []
    for record in records:
        cells = [cell(record["results"].get(name, {})) for name in names]
        lines.append(f"| {record['heads']} | {record['what']} | {' | '.join(cells)} |")
        for name, row in record["results"].items():
            if "failed" in row:
                whys.append(f"{name}, {record['heads']}, {record['what']}: {row['failed']}")
    return "\n".join([*lines, *(["", *whys] if whys else [])])


# ------------------------------------------------------------------------------------ processes


def run_jobs(jobs: Sequence[Job], folder: Path, limit: float) -> dict[Job, Record]:
    """The answers of processes that start together. Each has a log in the folder."""
    processes = {}
    for job in jobs:
        command = [sys.executable, "-m", "benchmarks.vllm_engine", "--job", json.dumps(job)]
        with (folder / f"{job.name}.log").open("w") as log:
            processes[job] = subprocess.Popen(
                [*command, "--logs", str(folder)], stdout=log, stderr=subprocess.STDOUT
            )
    answers: dict[Job, Record] = {}
    for job, process in processes.items():
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        path = folder / f"{job.name}.json"
        last = (folder / f"{job.name}.log").read_text(errors="replace").strip().splitlines()[-1:]
        ended = {"failed": f"ended with {process.returncode}: {''.join(last)[:200]}"}
        answers[job] = json.loads(path.read_text()) if path.exists() else ended
    return answers


def versions() -> dict[str, str]:
    found = {}
    for name in ("vllm", "flashinfer-python", "gdn-triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), help="default: all but the window")
    parser.add_argument("--heads", nargs="+", default=["16/32", "4/8"], metavar="H/HV")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--attention", default="FLASH_ATTN", help="vLLM's attention backend")
    parser.add_argument("--repeats", type=int, default=5, help="of which the fastest counts")
    parser.add_argument("--at-once", type=int, default=6, help="engines that share the GPU")
    parser.add_argument("--limit-seconds", type=float, default=900, help="of a group of engines")
    parser.add_argument("--jsonl", type=Path, help="also append a record a row to this file")
    parser.add_argument("--logs", type=Path, help="a folder for the logs of the processes")
    parser.add_argument("--resume", action="store_true", help="take answers that --logs holds")
    parser.add_argument("--commit", help="what the records say was measured (default: git's)")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.resume and options.logs is None:
        parser.error("--resume needs --logs, the folder of an earlier run")
    if options.ways is None:
        has_flashinfer = importlib.util.find_spec("flashinfer") is not None
        left_out = {WITH_WINDOW} if has_flashinfer else {WITH_WINDOW, "FlashInfer"}
        options.ways = [way for way in WAYS if way not in left_out]
    return options


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Kinds other than speed at the first number of heads alone."""
    made = []
    for kind, heads, way in itertools.product(options.kinds, options.heads, options.ways):
        if kind == "speed" or heads == options.heads[0]:
            made.append(Job(kind, way, heads, options.attention, options.repeats))
    return made


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    if options.job is not None:
        job = Job(*json.loads(options.job))
        answer = json.dumps(work(job, options.logs))
        (options.logs / f"{job.name}.json").write_text(answer)
        return
    device = cuda_device("vLLM's engine needs")
    if importlib.util.find_spec("vllm") is None:
        raise SystemExit("vLLM is not installed: pip install vllm==0.33.0")
    others = [way for way in WAYS if way not in options.ways]
    missing = [f"{way}: not measured" for way in others if way != WITH_WINDOW]
    name = options.commit or commit()
    head = header("benchmarks.vllm_engine", versions(), missing, device, name)
    append_record(options.jsonl, head)
    del device
    torch.cuda.empty_cache()  # for the engines
    answers: dict[Job, Record] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        jobs = jobs_of(options)
        if options.resume:
            paths = {job: folder / f"{job.name}.json" for job in jobs}
            answers = {j: json.loads(x.read_text()) for j, x in paths.items() if x.exists()}
            jobs = [job for job in jobs if job not in answers]
        for first in range(0, len(jobs), options.at_once):
            group = jobs[first : first + options.at_once]
            answers |= run_jobs(group, folder, options.limit_seconds)
    records = rows_of(answers)
    for record in records:
        append_record(options.jsonl, record)
    starts = {job.name: us(x["start"]) for job, x in answers.items() if "start" in x}
    print(f"{LEGEND}\n\n{tables(records, options.ways)}\n\nSeconds of a start: {starts}")


if __name__ == "__main__":
    main()
