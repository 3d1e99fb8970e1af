"""The page docs/benchmarks.md, from the records of runs of benchmarks.run, one file a run.

    python -m benchmarks.page benchmarks/results/*.jsonl > docs/benchmarks.md
    python -m benchmarks.page --numerics benchmarks/results/h200.jsonl

The second gives the table of equal elements for docs/numerics.md. A file is shown as the table
("main" or "full") whose cases it has. It may hold several runs of the same cases, one after the
other, each beside other implementations; and a record {"kind": "note", "heading", "text"}.
"""

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shapes import (
    GATE_KINDS,
    TABLES,
    all_cases,
    floor_us,
    gates_of,
    kinds_among,
    label_of,
    labelled,
)

OURS = "gdn_triton"
OTHERS = ("FLA", "FlashQLA", "FlashInfer")
KNOWN = "FlashQLA and FlashInfer are known to be faster than FLA on long calls with K = V = 128."
DOCS = Path(__file__).resolve().parent.parent / "docs"

Record = dict[str, Any]

TITLE = """\
# Benchmarks

This package beside others on the same tensors, in one process unless a section says otherwise.
Where another one is faster, its row comes first. All in bf16 with fp32 g, beta and states. `H/HV`
or `H` heads, `D` = K = V; "packed 3 in 1000" is three sequences in 1000 tokens, 2x16384 two of that
length. Each section was made at the commit that it names; the code has changed since.
"""

HEADINGS = {"main": "All kinds of shapes", "full": "Prefill: heads by sequences"}

MADE = """
## {heading}

Made on {date} by

```bash
{commands}
python -m benchmarks.page benchmarks/results/*.jsonl > docs/benchmarks.md
```

{gpu}, driver {driver}, power limit {power limit}; Python {python}, torch {torch},
Triton {triton}; {implementations}, at {commit}, GDN_BACKEND={GDN_BACKEND}.
In the same run a large copy moved {copy:.2f} TB/s (read and written) and a large bf16 matrix
product ran at {product:.0f} TFLOP/s. The records are in `benchmarks/results/{file}`.
"""

APART = """
{runs} runs, each in a process of its own; a ratio is between two times of one process. What is
shown of gdn_triton is the median of the {runs}, between which its time on the GPU differed by at
most {spread:.1%} in a row. The rates of the copy and the product are those of the last.
"""

ERRORS = """
### Error

`||x - ref|| / ||ref||` of o and of the final state against float64 on the same inputs: token by
token (r), or in chunks where that takes too long (c); the two differ by {check:.0e}. Fresh memory
was poisoned before.

"""

GRAPHS = """
### Time on the GPU

Microseconds of a replay of the call as a CUDA graph with a cold L2, the median. "best / ours" is
the time of the fastest other implementation over ours. TFLOP/s and GB/s are the fewest operations
(163,840 per token and value head at K = V = 128) and the fewest bytes (inputs read once, outputs
written once) over our time. "roof" is the share of our time that they would take at the rates of
the copy and the matrix product above, whichever takes longer.

"""

CALLS = """
### Calls from Python

Microseconds of a call in a row of calls, and the host's part of that.

"""

MEMORY = """
### Memory

What a call takes at its peak beyond its inputs and outputs, over the size of those.

"""

FIRST_CALLS = """
### First call

Seconds of the first call in a new process, without the import of torch; compilation included where
the Triton cache is empty.

"""


class Run:
    """The records of one file, by kind and case."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = [
            json.loads(line) for line in path.read_text("utf-8").splitlines()
        ]
        headers = [x for x in self.records if x["kind"] == "header"]
        implementations: dict[str, str] = {}
        for header in headers:
            implementations |= header["implementations"]
        # A run that went on after a stop has several headers; the last names what is there now.
        self.header: Record = headers[-1] | {"implementations": implementations}
        self.commands = list(dict.fromkeys(asked(header["command"]) for header in headers))
        found: dict[str, dict[str, list[Record]]] = {}
        for record in self.records:
            if "refused" not in record:
                cases = found.setdefault(record["kind"], {})
                cases.setdefault(label_of(record), []).append(record)
        self.kinds = {
            kind: {case: joined(records) for case, records in cases.items()}
            for kind, cases in found.items()
        }
        # Our times of a case, one a run.
        self.own = {
            case: [record["results"][OURS] for record in records]
            for case, records in found.get("speed", {}).items()
        }
        names = {record.get("case") for record in self.records}
        self.table = next(
            table for table in TABLES if names & {case.name for case in all_cases(table)}
        )
        self.cases = {
            labelled(case.name, gates): case
            for gates in GATE_KINDS
            for case in all_cases(self.table)
        }

    @property
    def plot(self) -> str:
        return f"benchmarks-{self.path.stem}.svg"

    def of(self, kind: str) -> dict[str, Record]:
        """In the order of the kinds of gates, then of the table's cases; rows that were refused are
        not among them."""
        found = self.kinds.get(kind, {})
        return {label: found[label] for label in self.cases if label in found}

    def refused(self) -> Iterator[str]:
        for record in self.records:
            if "refused" in record:
                yield f"{record['kind']} {label_of(record)}: {record['refused']}"

    def names(self, kind: str, key: str) -> list[str]:
        """Implementations with at least one number, ours first."""
        used = [r["results"] for r in self.of(kind).values()]
        implementations = dict.fromkeys((OURS, *self.header["implementations"]))
        return [n for n in implementations if any(key in results.get(n, {}) for results in used)]


def asked(command: str) -> str:
    """Where a run was stopped and what it was told of itself is not how to make it again."""
    command = re.sub(r" --resume| --(out|commit|budget-seconds) \S+", "", command)
    return command.replace("benchmarks.run", "benchmarks.run --out DIR", 1)


def joined(records: Sequence[Record]) -> Record:
    """One record of those of a case, from runs beside others: each other implementation keeps
    ours of its run as "beside". Ours alone is the median of times, and the last run's errors."""
    last = records[-1]
    if last["kind"] not in ("speed", "accuracy") or len(records) == 1:
        return last
    results: dict[str, Record] = {}
    own = [record["results"][OURS] for record in records]
    for beside, record in zip(own, records, strict=True):
        for name, cells in record["results"].items():
            results[name] = cells | {"beside": beside}
    results[OURS] = own[-1]
    if last["kind"] == "speed":
        results[OURS] = {key: statistics.median(cells[key] for cells in own) for key in own[0]}
    return last | {"results": results}


def row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return row(columns) + row(["---"] * len(columns)) + "".join(map(row, rows))


def others(record: Record, key: str) -> dict[str, float]:
    """Each other implementation's number over ours of the same run."""
    results = record["results"]
    return {
        name: cells[key] / cells.get("beside", results[OURS])[key]
        for name, cells in results.items()
        if key in cells and name != OURS
    }


def best_ratio(record: Record) -> float:
    """The fastest other implementation's time on the GPU over ours; infinity if there is none."""
    return min(others(record, "graph").values(), default=math.inf)


def losses_first(records: dict[str, Record]) -> list[tuple[str, Record]]:
    """Rows in which another one is faster, the worst first; then the rest in their order."""
    lost = [item for item in records.items() if best_ratio(item[1]) < 1]
    return sorted(lost, key=lambda item: best_ratio(item[1])) + [
        item for item in records.items() if best_ratio(item[1]) >= 1
    ]


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def speed_summary(run: Run, speed: dict[str, Record]) -> Iterator[str]:
    """Of rows of one kind of gates, for each other implementation that has some."""
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
    """What the tables say, in a few lines."""
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
    """Shares of equal elements: a row a case and implementation."""
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
    if (DOCS / run.plot).exists():
        text += f"\n![Time of each other implementation over ours, case by case]({run.plot})\n"
    if run.of("speed"):
        text += GRAPHS + graph_table(run)
    if run.of("accuracy"):
        text += ERRORS.format(check=run.kinds["check"][""]["difference"]) + error_table(run)
    if run.of("speed"):
        text += CALLS + call_table(run)
    if run.names("speed", "extra"):
        text += MEMORY + memory_table(run)
    firsts = run.kinds.get("first_call", {})
    if firsts:
        rows = [
            [case, *(f"{record[cache]['first']:.2f}" for cache in ("empty", "filled"))]
            for case, record in firsts.items()
        ]
        text += FIRST_CALLS + table(["case", "empty cache", "filled cache"], rows)
    return text


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.page", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="records: results.jsonl of a run")
    parser.add_argument("--numerics", action="store_true", help="only the table of equal elements")
    args = parser.parse_args()
    runs = sorted(
        map(Run, args.files), key=lambda run: (list(TABLES).index(run.table), run.path.stem)
    )
    if args.numerics:
        sys.stdout.write("".join(map(numerics_table, runs)))
    else:
        sys.stdout.write(TITLE + "".join(map(section, runs)))


if __name__ == "__main__":
    main()
