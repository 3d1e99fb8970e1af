"""The records of runs in benchmarks/results, one `.jsonl` a file, and the ratios between them."""

import json
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shapes import (
    GATE_KINDS,
    TABLES,
    all_cases,
    label_of,
    labelled,
)

OURS = "gdn_triton"
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

# The ways to install this package, and the kinds of calls that are compared.
DEFAULT, LIBRARY, EITHER = "default (Triton)", "with the CUDA library", "either"
GATES = {
    "model": "gates of a model",
    "mild": "mild gates",
    "strong": "strong gates",
    "none": "no decay",
}
PREFILL = "Prefill"
UNEVEN = "Uneven prefill"
TRAINING = "Training step (forward and backward)"
OURS_TRITON = "gdn_triton Triton"
# Our CUDA library, where the default install is what others are compared with.
OURS_LIBRARY = "gdn_triton CUDA"
# This package without the lengths on the host: it is shown, but is no peer.
OURS_UNTOLD = "gdn_triton untold"
ROOF = "roof"

Record = dict[str, Any]


class Ratio(NamedTuple):
    """The time of another implementation divided by ours, for one call."""

    device: str
    what: str
    install: str
    other: str
    case: str
    value: float
    own: float  # microseconds of ours
    date: str = ""  # of the run


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


class Run:
    """The records of one file, by kind and case."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records = read(path)
        headers = [x for x in self.records if x["kind"] == "header"]
        implementations: dict[str, str] = {}
        for header in headers:
            implementations |= header["implementations"]
        # A run that was continued after a stop has several headers; the last one names the
        # implementations that are present.
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
        # Our times of a case, one for each run.
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

    def of(self, kind: str) -> dict[str, Record]:
        """The cases in the order of the kinds of gates, then of the table, without the rows that
        were refused."""
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
    """The options that tell a run where to stop and what it is called are not part of the command
    that repeats it."""
    command = re.sub(r" --resume| --(out|commit|budget-seconds) \S+", "", command)
    return command.replace("benchmarks.run", "benchmarks.run --out DIR", 1)


def joined(records: Sequence[Record]) -> Record:
    """One record from the records of a case in several runs: each other implementation keeps our
    time in its own run as "beside". Our own time is the median, with the errors of the last run."""
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


def others(record: Record, key: str) -> dict[str, float]:
    """Each other implementation's number divided by ours of the same run."""
    results = record["results"]
    return {
        name: cells[key] / cells.get("beside", results[OURS])[key]
        for name, cells in results.items()
        if key in cells and name != OURS
    }


def best_ratio(record: Record) -> float:
    """The fastest other implementation's time on the GPU divided by ours; infinity without one."""
    ratios = others(record, "graph")
    ratios.pop(OURS_UNTOLD, None)
    return min(ratios.values(), default=math.inf)
