"""The plots of docs/benchmarks.md, which benchmarks.page draws if matplotlib is installed.

Each plot has the width of a page, 8 inches, so its letters are as large as those of the text. The
file contains a digest of the numbers that it was drawn from.
"""

import hashlib
import importlib
import importlib.util
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.records import DEFAULT, GATES, OURS_LIBRARY, PREFILL, ROOF, ROOT, TRAINING, Ratio
from benchmarks.shapes import labelled

ASSETS = ROOT / "docs" / "assets"
MISSING = "Plots not drawn: matplotlib is not installed (pip install matplotlib)."
# Heads of Qwen3-Next and Qwen3.5, on one GPU and on one of several, by batches of a server.
CASES = [
    f"{heads} {batch}"
    for heads in ("16/32", "16/64", "4/16", "2/8")
    for batch in ("1x2048", "1x8192", "1x32768", "4x8192", "8x1024")
]
STYLES = {
    "FLA": ("tab:blue", "o"),
    "FlashInfer": ("tab:orange", "s"),
    "FlashQLA": ("tab:green", "^"),
    OURS_LIBRARY: ("tab:red", "D"),
    "gdn_triton, key-first": ("black", "o"),
    "gdn_triton, value-first": ("tab:red", "D"),
    "gdn_triton, key-first, with a window": ("tab:gray", "o"),
    "gdn_triton, value-first, with a window": ("tab:purple", "D"),
}
NAMES = {OURS_LIBRARY: "gdn_triton, CUDA library"}

# Cases of the training step. The title has the properties that they share.
MODEL = labelled("", "model")
TRAINED = [
    f"{heads} {sequences}{MODEL}"
    for heads in ("16/32", "8/16")
    for sequences in ("1x8192", "4x8192", "1x32768", "4000+16000+368+12400")
]

Data = dict[str, Any]


def digest(data: Data) -> str:
    """The digest of a plot's numbers, which the plot contains."""
    return "numbers sha256 " + hashlib.sha256(json.dumps(data).encode()).hexdigest()


def dots(ratios: Iterable[Ratio], what: str, cases: list[str], title: str) -> Data:
    """Time over ours of the default install, on the card with the most other implementations: case
    -> implementation -> ratio. Only the last run of a case counts, because its ratios are to its
    own time of ours."""
    there = [x for x in ratios if x.what == what and x.install == DEFAULT and x.case in cases]
    of_cards: dict[str, set[str]] = {}
    for x in there:
        of_cards.setdefault(x.device, set()).add(x.other)
    card = max(of_cards, key=lambda device: len(of_cards[device]), default=None)
    found: dict[str, dict[str, float]] = {}
    own: dict[str, float] = {}
    for x in (x for x in there if x.device == card):
        if own.get(x.case) != x.own:
            found[x.case] = {}
        found[x.case][x.other] = round(x.value, 3)
        own[x.case] = x.own
    order = [case for case in cases if case in found]
    rows = {f"{case.removesuffix(MODEL)}, {own[case]:.0f} us": found[case] for case in order}
    return {"title": title, "rows": rows}


def decode(ratios: Iterable[Ratio], heads: str = "16/32") -> Data:
    """Share of the roof: pool -> implementation -> sequences -> percent."""
    roofs: dict[tuple[str, str], float] = {}
    rest: list[Ratio] = []
    for x in ratios:
        if x.what.startswith("Decode step,") and x.case.removesuffix(MODEL).endswith(f", {heads}"):
            if x.other == ROOF:
                roofs[x.what, x.case] = x.value
            else:
                rest.append(x)
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for (what, case), value in roofs.items():
        _, pool, layout = what.split(", ", 2)
        series = panels.setdefault(pool, {}).setdefault(f"gdn_triton, {layout}", {})
        series[case.split(" ")[0]] = round(100 * value, 1)
    for x in rest:
        series = panels.setdefault(x.what.split(", ")[1], {}).setdefault(x.other, {})
        share = 100 * roofs[x.what, x.case] / x.value
        series[x.case.split(" ")[0]] = round(share, 1)
    return {"title": f"Decode step, {heads} heads: percent of the memory's roof", "panels": panels}


def plots(ratios: list[Ratio]) -> dict[str, Data]:
    """File name -> the data that the plot shows."""
    kinds = [f"{PREFILL}, {text}" for text in GATES.values()]
    there = {ratio.what for ratio in ratios}
    prefill = next((what for what in kinds if what in there), kinds[0])
    packed = "heads, sequences x tokens, our time"
    found = {
        "prefill.svg": dots(ratios, prefill, CASES, f"{prefill} ({packed})"),
        "decode.svg": decode(ratios),
        "training.svg": dots(ratios, TRAINING, TRAINED, f"{TRAINING}{MODEL} ({packed})"),
    }
    return {name: data for name, data in found.items() if data.get("rows") or data.get("panels")}


def draw_dots(pyplot: Any, data: Data) -> Any:
    rows = data["rows"]
    figure, axis = pyplot.subplots(figsize=(8, 1.6 + 0.32 * len(rows)), layout="constrained")
    for name in STYLES:
        points = [(x[name], i) for i, x in enumerate(rows.values()) if name in x]
        if points:
            color, marker = STYLES[name]
            label = NAMES.get(name, name)
            axis.plot(*zip(*points, strict=True), marker, color=color, markersize=8, label=label)
    axis.axvline(1, color="black", linewidth=1.5)
    axis.set_yticks(range(len(rows)), rows)
    axis.invert_yaxis()
    axis.margins(y=0.08)
    low, high = axis.get_xlim()
    axis.set_xlim(min(0.8, low), high)
    axis.set_xlabel("time over ours of the default install")
    axis.grid(linewidth=0.4)
    return figure


def draw_panels(pyplot: Any, data: Data) -> Any:
    panels = data["panels"]
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(8, 3.8), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (pool, series) in zip(axes.flat, panels.items(), strict=True):
        for name, points in series.items():
            color, marker = STYLES[name]
            xs = sorted(points, key=int)
            ys = [points[x] for x in xs]
            axis.plot(xs, ys, marker, linestyle="-", color=color, markersize=7, label=name)
        axis.axhline(100, color="black", linewidth=1)
        axis.set_title(pool)
        axis.set_xlabel("sequences")
        axis.grid(linewidth=0.4)
    axes[0, 0].set_ylabel("percent of the roof")
    return figure


def draw(data: Data, target: Path) -> None:
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("svg")
    # The same numbers give the same file.
    matplotlib.rcParams |= {"svg.hashsalt": "gdn_triton", "font.size": 11}
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure = (draw_dots if "rows" in data else draw_panels)(pyplot, data)
    figure.suptitle(data["title"], fontsize=11)
    handles = {
        label: handle
        for axis in figure.axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)
    description = {"Date": None, "Description": digest(data)}
    figure.savefig(target, format="svg", metadata=description)
    pyplot.close(figure)


def write(data: dict[str, Data], folder: Path = ASSETS) -> Iterator[str]:
    """Draws the plots. Returns lines that say what was done."""
    if importlib.util.find_spec("matplotlib") is None:
        yield MISSING
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, of_plot in data.items():
        draw(of_plot, folder / name)
        yield str(folder / name)
