"""A plot of each table of docs/benchmarks.md, drawn by matplotlib where it is installed.

    pip install matplotlib
    python -m benchmarks.plot benchmarks/results/*.jsonl    writes docs/benchmarks-<file>.svg

A panel for each group of cases, a point for each other implementation: its time on the GPU over
ours, so that points below the line are losses. The file says from which records it was drawn.
"""

import argparse
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from benchmarks.page import DOCS, OURS, Run, others
from benchmarks.shapes import gates_of, labelled

MISSING = "Not drawn: matplotlib is not installed (pip install matplotlib)."
MARKERS = "os^vDPX*"


def digest(path: Path) -> str:
    """What a plot says of the records that it was drawn from."""
    return "records sha256 " + hashlib.sha256(path.read_bytes()).hexdigest()


def split(table: str, case: str) -> tuple[str, str]:
    """The panel of a case and its label there."""
    words = case.split(" ")
    count = 2 if table == "full" or words[0] == "prefill" else 1
    return " ".join(words[:count]), " ".join(words[count:])


def ratios(run: Run) -> dict[str, dict[str, dict[str, float]]]:
    """panel -> label -> implementation -> its time over ours."""
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for case, record in run.of("speed").items():
        panel, label = split(run.table, record.get("case", case))
        panels.setdefault(labelled(panel, gates_of(record)), {})[label] = others(record, "graph")
    return panels


def draw(run: Run, target: Path) -> None:
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("svg")
    # Text stays text, and the same records give the same file.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "gdn_triton", "font.size": 7}
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    panels = ratios(run)
    names = run.names("speed", "graph")[1:]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    size = (max(7, 4 * columns), 3 * rows)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (panel, cases) in zip(axes.flat, panels.items(), strict=False):
        for name, marker in zip(names, MARKERS, strict=False):
            points = [(i, x[name]) for i, x in enumerate(cases.values()) if name in x]
            axis.plot(*zip(*points, strict=True), marker, markersize=3, label=name)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_yscale("log", base=2, subs=[1.25, 1.5, 1.75])
        axis.margins(y=0.08)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xticks(range(len(cases)), cases, rotation=90)
        axis.set_title(panel)
        axis.grid(axis="y", linewidth=0.3)
    figure.supylabel(f"time over that of {OURS}")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper right", ncols=8)
    description = {"Date": None, "Description": digest(run.path)}
    figure.savefig(target, format="svg", metadata=description)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.plot", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="records: results.jsonl of a run")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder (default: docs)")
    args = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        print(MISSING)
        return 0
    for run in map(Run, args.files):
        target = args.out / run.plot
        draw(run, target)
        print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
