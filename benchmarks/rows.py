"""The rows of each file of records, as a page in build/rows.

benchmarks.page writes these pages. A file of benchmarks.run is shown as the table ("main" or
"full") whose cases it has. It may hold several runs of the same cases, each with other
implementations, and records {"kind": "note", "heading", "text"}.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks import backward, decode, layer, vllm_engine
from benchmarks.records import OURS, Record, Run, best_ratio, others
from benchmarks.shapes import floor_us, gates_of, kinds_among

OTHERS = ("FLA", "FlashQLA", "FlashInfer")
KNOWN = "FlashQLA and FlashInfer are known to be faster than FLA on long calls with K = V = 128."

HEADINGS = {
    "main": "All kinds of shapes",
    "full": "Prefill: heads by sequences",
    "uneven": "Prefill: uneven lengths",
}

MADE = """\
# {heading}

Made on {date} by

```bash
{commands}
python -m benchmarks.page
```

{gpu}, driver {driver}, power limit {power limit}; Python {python}, torch {torch},
Triton {triton}; {implementations}, at {commit}, GDN_BACKEND={GDN_BACKEND}.
In the same run a large copy moved {copy:.2f} TB/s (read and written) and a large bf16 matrix
product ran at {product:.0f} TFLOP/s. The records are in `{file}`.
Where another one is faster, its row comes first. All in bf16 with fp32 g, beta and states. `H/HV`
or `H` heads, `D` = K = V; "packed 3 in 1000" is three sequences in 1000 tokens, 2x16384 two of that
length.
"""

APART = """
{runs} runs, each in a process of its own; a ratio is between two times of one process. What is
shown of gdn_triton is the median of the {runs}, between which its time on the GPU differed by at
most {spread:.1%} in a row. The rates of the copy and the product are those of the last.
"""

ERRORS = """
## Error

`||x - ref|| / ||ref||` of o and of the final state against float64 on the same inputs: token by
token (r), or in chunks where that takes too long (c); the two differ by {check:.0e}. Fresh memory
was poisoned before.

"""

GRAPHS = """
## Time on the GPU

Microseconds of a replay of the call as a CUDA graph with a cold L2, the median. "best / ours" is
the time of the fastest other implementation over ours. TFLOP/s and GB/s are the fewest operations
(163,840 per token and value head at K = V = 128) and the fewest bytes (inputs read once, outputs
written once) over our time. "roof" is the share of our time that they would take at the rates of
the copy and the matrix product above, whichever takes longer.

"""

CALLS = """
## Calls from Python

Microseconds of a call in a row of calls, and the host's part of that.

"""

MEMORY = """
## Memory

What a call takes at its peak beyond its inputs and outputs, over the size of those.

"""

ELEMENTS = """
## Element by element

The share of elements of o (bf16) and of the final state (fp32) that are what the Triton kernels
give step by step, with a difference of at most the tolerance times (1 + the value). All of these
are right within the errors above; a tolerance of 0 shows how often another order of roundings
reaches the last bit.

"""

FIRST_CALLS = """
## First call

Seconds of the first call in a new process, without the import of torch; compilation included where
the Triton cache is empty.

"""


def row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return row(columns) + row(["---"] * len(columns)) + "".join(map(row, rows))


def losses_first(records: dict[str, Record]) -> list[tuple[str, Record]]:
    """The rows in which another implementation is faster, the worst first; then the other rows in
    their order."""
    lost = [item for item in records.items() if best_ratio(item[1]) < 1]
    return sorted(lost, key=lambda item: best_ratio(item[1])) + [
        item for item in records.items() if best_ratio(item[1]) >= 1
    ]


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def speed_summary(run: Run, speed: dict[str, Record]) -> Iterator[str]:
    """Lines on the rows of one kind of gates, for each other implementation that has some."""
    for name in run.names("speed", "graph")[1:]:
        for key, what in (("graph", "On the GPU"), ("call", "Called from Python")):
            found = {case: others(record, key) for case, record in speed.items()}
            ratios = {case: x[name] for case, x in found.items() if name in x}
            if not ratios:
                continue
            mean = statistics.geometric_mean(ratios.values())
            order = sorted(ratios, key=ratios.__getitem__)
            slower = [f"{case} ({ratios[case]:.2f})" for case in order if ratios[case] < 1]
            yield (
                f"{what} {name} takes {mean:.2f} times as long as {OURS} in the geometric mean of "
                f"{len(ratios)} rows, {ratios[order[0]]:.2f} at the least ({order[0]}); it is "
                f"faster in {len(slower)}" + (": " if slower else "") + ", ".join(slower) + "."
            )


def summary(run: Run) -> Iterator[str]:
    """A summary of the tables in a few lines."""
    speed, accuracy = run.of("speed"), run.of("accuracy")
    kinds = kinds_among(speed.values())
    for gates in kinds:
        rows = {case: record for case, record in speed.items() if gates_of(record) == gates}
        where = "" if kinds == ["mild"] else f"With {gates} gates: "
        yield from (where + line for line in speed_summary(run, rows))
    for name in run.names("accuracy", "o")[1:]:
        for key, what in (("o", "o"), ("state", "the final state")):
            errors = [
                1 / others(record, key)[name]
                for record in accuracy.values()
                if key in record["results"].get(name, {})
            ]
            yield (
                f"The error of {what} is at most {max(errors):.3f} of {name}'s, the median "
                f"{statistics.median(errors):.3f}, in {len(errors)} rows."
            )
    if speed:
        hosts = {case: max(x["host"] for x in own) for case, own in run.own.items()}
        most = max(hosts, key=hosts.__getitem__)
        yield f"The most host time of a call is {hosts[most]:.0f} us ({most})."
    yield from (f"Refused: {text}." for text in run.refused())
    implementations = run.header["implementations"]
    absent = [name for name in OTHERS if not any(x.startswith(name) for x in implementations)]
    if absent:
        yield f"Not in this run: {', '.join(absent)}. {KNOWN}"


def error_table(run: Run) -> str:
    names = run.names("accuracy", "o")
    rows = []
    for case, record in run.of("accuracy").items():
        cells = [record["results"].get(name, {}) for name in names]
        errors = [f"{x['o']:.2e}, {x['state']:.2e}" if "o" in x else "" for x in cells]
        rows.append([case, record["reference"][0], *errors])
    return table(["case", "ref", *names], rows)


def graph_table(run: Run) -> str:
    names = run.names("speed", "graph")
    cases = run.cases
    rows = []
    for case, record in losses_first(run.of("speed")):
        own = record["results"][OURS]["graph"]
        times = [number(record["results"].get(name, {}).get("graph")) for name in names]
        ratio = best_ratio(record)
        rows.append(
            [
                case,
                record["backend"],
                *times,
                f"{ratio:.2f}" if math.isfinite(ratio) else "",
                f"{cases[case].flops / own * 1e-6:.0f}",
                f"{cases[case].bytes / own * 1e-3:.0f}",
                f"{floor_us(cases[case], run.header) / own:.0%}",
            ]
        )
    columns = ["case", "backend", *names, "best / ours", "TFLOP/s", "GB/s", "roof"]
    return table(columns, rows)


def call_table(run: Run) -> str:
    names = run.names("speed", "call")
    rows = []
    for case, record in run.of("speed").items():
        cells = [record["results"].get(name, {}) for name in names]
        rows.append(
            [case, *(f"{x['call']:.0f}, {x['host']:.0f}" if "call" in x else "" for x in cells)]
        )
    return table(["case", *names], rows)


def memory_table(run: Run) -> str:
    names = run.names("speed", "extra")
    cases = run.cases
    rows = []
    for case, record in run.of("speed").items():
        cells = [record["results"].get(name, {}) for name in names]
        rows.append(
            [
                case,
                *(f"{x['extra'] / cases[case].bytes:.0%}" if "extra" in x else "" for x in cells),
            ]
        )
    return table(["case", *names], rows)


def numerics_table(run: Run) -> str:
    """Shares of equal elements, with a row for each case and implementation."""
    records = run.of("numerics")
    tolerances = next(iter(records.values()))["tolerances"] if records else []
    columns = [f"{name}, {tolerance:g}" for name in ("o", "state") for tolerance in tolerances]
    rows = [
        [
            case,
            name,
            *(f"{100 * x:.3f}%" for key in ("o", "state") for x in record["results"][name][key]),
        ]
        for case, record in records.items()
        for name in run.names("numerics", "o")
        if "o" in record["results"].get(name, {})
    ]
    return table(["case", "implementation", *columns], rows)


def section(run: Run) -> str:
    """The page of a file of benchmarks.run."""
    head = run.header
    note = run.kinds.get("note", {}).get("", {})
    named = [f"{name} {version}" for name, version in head["implementations"].items()]
    made = {
        "heading": note.get("heading", HEADINGS[run.table]),
        "commands": "\n".join(run.commands),
        "implementations": ", ".join(named),
        "copy": head["bytes_per_s"] / 1e12,
        "product": head["flops_per_s"] / 1e12,
        "file": run.path.name,
    }
    text = MADE.format(**head | made)
    runs = max(map(len, run.own.values()), default=1)
    if runs > 1:
        times = [[x["graph"] for x in own] for own in run.own.values()]
        text += APART.format(runs=runs, spread=max(max(x) / min(x) - 1 for x in times))
    if note:
        text += f"\n{note['text']}\n"
    text += "\n" + "".join(f"- {line}\n" for line in summary(run))
    if run.of("speed"):
        text += GRAPHS + graph_table(run)
    if run.of("accuracy"):
        text += ERRORS.format(check=run.kinds["check"][""]["difference"]) + error_table(run)
    if run.of("speed"):
        text += CALLS + call_table(run)
    if run.names("speed", "extra"):
        text += MEMORY + memory_table(run)
    if run.of("numerics"):
        text += ELEMENTS + numerics_table(run)
    firsts = run.kinds.get("first_call", {})
    if firsts:
        rows = [
            [case, *(f"{record[cache]['first']:.2f}" for cache in ("empty", "filled"))]
            for case, record in firsts.items()
        ]
        text += FIRST_CALLS + table(["case", "empty cache", "filled cache"], rows)
    return text


PLAIN = """\
# {heading}

Made on {date} by

```bash
{command}
python -m benchmarks.page
```

{gpu}, torch {torch}, Triton {triton}; {implementations}, at {commit}. The records are in `{file}`.
"""

# For each kind of record the heading of its page, and the module that prints its table.
PLAIN_KINDS: dict[str, tuple[str, Any]] = {
    "decode": ("Decode steps", decode),
    "layer": ("The Gated DeltaNet part of a layer", layer),
    "engine": ("vLLM end to end", vllm_engine),
    "times": ("Gradients", backward),
}


def plain_section(file: str, records: Sequence[Record]) -> str:
    """The page of a file of one of the modules of `PLAIN_KINDS`."""
    head = [x for x in records if x["kind"] == "header"][-1]
    rows = [x for x in records if x["kind"] not in ("header", "note")]
    kinds = {x["kind"] for x in rows}
    heading, module = next(of for kind, of in PLAIN_KINDS.items() if kind in kinds)
    named = [f"{name} {version}" for name, version in head["implementations"].items()]
    made = {
        "heading": heading,
        "implementations": ", ".join(named),
        "file": file,
    }
    text = PLAIN.format(**head | made)
    text += "".join(f"\n{x['text']}\n" for x in records if x["kind"] == "note")
    names = list(dict.fromkeys(name for x in rows for name in x["results"]))
    return f"{text}\n{module.LEGEND}\n\n{module.tables(rows, names).strip()}\n"
