"""The page docs/benchmarks.md, from the records of a run of benchmarks.run.

python -m benchmarks.page benchmarks/results/h200.jsonl > docs/benchmarks.md
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

from benchmarks.shapes import all_cases

OURS, BASELINE = "gdn_triton", "FLA"

INTRODUCTION = """\
# Benchmarks

Made on {date} by

```bash
python -m benchmarks.run --out DIR --peers fla --prewarm 16
python -m benchmarks.page DIR/results.jsonl > docs/benchmarks.md
```

{gpu}, driver {driver}, power limit {power}; Python {python}, torch {torch},
Triton {triton}; gdn_triton {ours} at {commit}, backend {backend}; fla-core {baseline}, its Triton
kernels. In the same run a large copy moved {copy:.2f} TB/s (read and written) and a large bf16
matrix product ran at {product:.0f} TFLOP/s. The records are in `benchmarks/results/h200.jsonl`.

- {gpu_rows} rows were timed. On the GPU FLA takes {graph_mean:.2f} times as long in the geometric
  mean, and {graph_least:.2f} at the least ({graph_least_case}).
- Called from Python it takes {call_mean:.2f} times as long, and {call_least:.2f} at the least.
- Rows slower than FLA: {losses}.
- The error of o is at most {o_worst:.3f} of FLA's, the median {o_median:.3f}.
- The error of the final state is at most {state_worst:.3f} of FLA's, the median {state_median:.3f}.
- The most host time of a call is {host_most:.0f} us.

FlashInfer and FlashQLA were not in this run. Both are known to be faster than FLA on long calls
with K = V = 128, FlashInfer by more than gdn_triton is here.

## Error and time

`H/HV` or `H` heads, `D` = K = V; "packed 3 in 1000" is three sequences in 1000 tokens. All in bf16.
The error is `||x - ref|| / ||ref||` of o and of the final state against float64 on the same inputs:
token by token (r), or in chunks where that takes too long (c); the two differ by {check:.0e}. Fresh
memory was poisoned before. Times are in microseconds: a replay of the call as a CUDA graph with a
cold L2, the median; a call from Python in a row of calls; and the host's part of that. "roof" is
the share of the graph's time that the fewest bytes or operations would take at the rates above.

| {columns} |
|{rule}|
"""

COLUMNS = (
    *("case", "ref", "o", "o FLA", "state", "state FLA", "graph", "graph FLA", "FLA / ours"),
    *("call", "call FLA", "host", "host FLA", "roof"),
)

FIRST_CALLS = """
## First call

Seconds of the first call in a new process, without the import of torch; compilation included where
the Triton cache is empty.

| case | empty cache | filled cache |
|---|---|---|
"""


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def page(records: list[dict[str, Any]]) -> str:
    of_kind: dict[str, dict[str, Any]] = {}
    for record in records:
        of_kind.setdefault(record["kind"], {})[record.get("case", "")] = record
    header = of_kind["header"][""]
    errors = {case: record for case, record in of_kind["accuracy"].items()}
    times = of_kind["speed"]

    def ratio(record: dict[str, Any], what: str) -> float:
        return record["results"][BASELINE][what] / record["results"][OURS][what]

    graph = {case: ratio(record, "graph") for case, record in times.items()}
    call = {case: ratio(record, "call") for case, record in times.items()}
    o = [1 / ratio(record, "o") for record in errors.values()]
    state = [1 / ratio(record, "state") for record in errors.values()]
    losses = [case for case in times if graph[case] < 1 or call[case] < 1]
    least = min(graph, key=lambda case: graph[case])
    text = INTRODUCTION.format(
        date=header["date"],
        gpu=header["gpu"],
        driver=header["driver"],
        power=header["power limit"],
        python=header["python"],
        torch=header["torch"],
        triton=header["triton"],
        ours=header["implementations"][OURS],
        baseline=header["implementations"][BASELINE],
        commit=header["commit"],
        backend=header["GDN_BACKEND"],
        copy=header["bytes_per_s"] / 1e12,
        product=header["flops_per_s"] / 1e12,
        gpu_rows=len(times),
        graph_mean=geometric_mean(list(graph.values())),
        graph_least=graph[least],
        graph_least_case=least,
        call_mean=geometric_mean(list(call.values())),
        call_least=min(call.values()),
        losses=", ".join(losses) or "none",
        o_worst=max(o),
        state_worst=max(state),
        o_median=median(o),
        state_median=median(state),
        host_most=max(record["results"][OURS]["host"] for record in times.values()),
        check=of_kind["check"][""]["difference"],
        columns=" | ".join(COLUMNS),
        rule="---|" * (len(COLUMNS) - 1) + "---",
    )
    for case in (case.name for case in all_cases() if case.name in errors):
        ours, baseline = (errors[case]["results"][name] for name in (OURS, BASELINE))
        cells = [case, errors[case]["reference"][0]]
        cells += [f"{x[what]:.2e}" for what in ("o", "state") for x in (ours, baseline)]
        if case in times:
            ours, baseline = (times[case]["results"][name] for name in (OURS, BASELINE))
            cells += [f"{ours['graph']:.4g}", f"{baseline['graph']:.4g}", f"{graph[case]:.2f}"]
            cells += [f"{x[what]:.0f}" for what in ("call", "host") for x in (ours, baseline)]
            cells.append(f"{times[case]['floor'] / ours['graph']:.0%}")
        else:
            cells += [""] * 8
        text += "| " + " | ".join(cells) + " |\n"
    text += FIRST_CALLS
    for case, record in of_kind["first_call"].items():
        empty, filled = record["empty"]["first"], record["filled"]["first"]
        text += f"| {case} | {empty:.2f} | {filled:.2f} |\n"
    return text


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    sys.stdout.write(page([json.loads(line) for line in lines]))
