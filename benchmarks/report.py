"""The records of a run, written to disk as they are made, and the tables and the summary of
them."""

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Record
from benchmarks.records import OURS_UNTOLD
from benchmarks.shapes import ACCURACY, HOST, NUMERICS, SPEED, gates_of, kinds_among, label_of

FIRST_CALL = "first_call"
KINDS = (ACCURACY, SPEED, HOST, FIRST_CALL, NUMERICS)
ERROR_ALLOWANCE = 1.05  # of the baseline's error
HOST_LIMIT = 200.0  # us of host time a call
FIRST_CALL_LIMIT = 8.0  # s


def say(text: str) -> None:
    print(text, flush=True)


def us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def table(records: Sequence[Record]) -> str:
    """A table in Markdown of records of one kind: their keys, and a row for each record."""

    def cell(value: Any) -> str:
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    rows = [records[0], ["---"] * len(records[0]), *(map(cell, x.values()) for x in records)]
    return "\n".join(map(row, rows))


def append_record(path: Path | None, record: Record) -> None:
    """Appends a line of JSON to the file, if there is one."""
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def share(value: float) -> str:
    """A share with enough digits to tell it from all."""
    return f"{100 * value:.3f}%"


def empty_cell(result: Record | None) -> str:
    """The text of a cell without a number: an error is shown, and a case that is not served is a
    dash."""
    if result and "error" in result:
        return "error"
    return "-"


def fastest(record: Record, ours: str) -> tuple[float, str, float]:
    """Microseconds of the fastest other implementation with its name, and of ours; infinity if none
    ran."""
    times = {n: r["graph"] for n, r in record["results"].items() if "graph" in r}
    own = times.pop(ours, math.inf)
    times.pop(OURS_UNTOLD, None)
    name = min(times, key=lambda n: times[n], default="")
    return times.get(name, math.inf), name, own


class Report:
    """The records, written to disk as they are made, and the tables of them."""

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

    def has(self, kind: str, label: str) -> bool:
        """label: as `labelled` makes it of a case and its gates."""
        return any(label_of(record) == label for record in self.of(kind))

    def add(self, record: Record) -> None:
        self.records.append(record)
        append_record(self.log, record)
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
        """Our number and the baseline's in one row, if both exist."""
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
            cell = {
                ACCURACY: self.accuracy_cell,
                SPEED: self.speed_cell,
                HOST: self.host_cell,
                NUMERICS: self.numerics_cell,
            }
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
    def numerics_cell(result: Record | None) -> str:
        if not result or "o" not in result:
            return empty_cell(result)
        return ", ".join(" ".join(share(x) for x in result[name]) for name in ("o", "state"))

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
        if self.of(NUMERICS):
            self.write(NUMERICS, self.numerics_table())
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
            yield row([label_of(record), reference, *cells, ", ".join(ratios)])

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
                yield row([label_of(record), reason, *["-"] * (len(names) + 5)])
                continue
            results = record["results"]
            cells = [self.speed_cell(results.get(name)) for name in names]
            pair, graph = self.pair(record, "graph"), results[self.ours]["graph"]
            ratio = f"{pair[1] / pair[0]:.2f}" if pair else "-"
            floor = record["floor"]
            yield row(
                [label_of(record), record["backend"] or "unknown", *cells, ratio,
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
            yield row([label_of(record), *cells])

    def numerics_table(self) -> Iterable[str]:
        names = self.names(NUMERICS)
        tolerances = ", ".join(f"{x:g}" for x in self.of(NUMERICS)[0]["tolerances"])
        yield from self.heading(
            "Equal elements",
            f"The share of elements x of o, of the final state, with |x - y| <= t (1 + |y|), for t "
            f"of {tolerances}, where y is from {self.ours}'s Triton kernels run step by step.",
        )
        yield row(["case", *names])
        yield row(["---"] * (len(names) + 1))
        for record in self.of(NUMERICS):
            yield row(
                [label_of(record), *(self.numerics_cell(record["results"].get(n)) for n in names)]
            )

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
            yield row([label_of(record), *cells])

    def summary(self) -> tuple[list[str], bool]:
        """The run in a few lines, including the losses; and whether every row of ours exists."""
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
                (pair[0] / pair[1], label_of(record))
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
        kinds = kinds_among(self.of(SPEED))
        for gates in kinds:
            rows = [record for record in self.of(SPEED) if gates_of(record) == gates]
            lines += self.speed_summary(rows, "" if kinds == ["mild"] else f"{gates} gates, ")

        hosts = [
            (result["host"], label_of(record))
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
        slow = [(r["empty"]["first"], label_of(r)) for r in firsts if "first" in r["empty"]]
        if slow:
            most, case = max(slow)
            over = [c for value, c in slow if value > FIRST_CALL_LIMIT]
            lines.append(
                f"first call of {ours}, empty cache: at most {most:.2f} s ({case}); "
                f"above {FIRST_CALL_LIMIT:.0f} s: {', '.join(over) or 'none'}"
            )

        rows = [record for kind in KINDS[:3] for record in self.of(kind)] + self.of(NUMERICS)
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

    def speed_summary(self, records: Sequence[Record], where: str) -> Iterable[str]:
        """A line for the rows of one kind of gates. where: names the kind."""
        base, ours = self.baseline, self.ours
        for key, what in (("graph", "graph replay"), ("call", "call from Python")):
            ratios = [
                (pair[1] / pair[0], label_of(record))
                for record in records
                if (pair := self.pair(record, key))
            ]
            if ratios:
                mean = statistics.geometric_mean(x for x, _ in ratios)
                losses = [f"{case} ({x:.2f})" for x, case in sorted(ratios) if x < 1]
                yield (
                    f"{where}{what}, {base} / {ours}: geometric mean {mean:.2f} over "
                    f"{len(ratios)} rows; slower than {base} on {len(losses)}: "
                    f"{', '.join(losses) or 'none'}"
                )
        behind = [
            (best / own, f"{label_of(record)} ({name} {best / own:.2f})")
            for record in records
            for best, name, own in [fastest(record, ours)]
            if best < own
        ]
        named = ", ".join(text for _, text in sorted(behind)) or "none"
        yield f"{where}graph replay slower than the fastest other on {len(behind)}: {named}"
