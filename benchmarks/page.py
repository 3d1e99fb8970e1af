"""Tables and plots of the documents, from the records in benchmarks/results: one command makes all.

    python -m benchmarks.page

The records are `.jsonl` files: a run's results.jsonl, or the file that `--jsonl` of
benchmarks.decode, benchmarks.layer and benchmarks.backward wrote. The command writes the text
between a line `<!-- benchmarks: NAME -->` and a line `<!-- benchmarks end -->` of the documents,
the plots in docs/assets if matplotlib is installed, and a page of rows for each file in build/rows,
which git ignores.

A ratio is the time of another implementation over ours of the same run. If several files have a
call, the file with the latest date counts. Runs of the default install from before `SINCE` are left
out where a later one has the same kind of calls and the same other implementation.
"""

import argparse
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from benchmarks import decode, layer, layer_calls, plot, rows, vllm_engine
from benchmarks.backward import TRITON as BACKWARD_TRITON
from benchmarks.decode_calls import keeps_last_state
from benchmarks.peers import PEERS
from benchmarks.records import (
    DEFAULT,
    EITHER,
    GATES,
    LIBRARY,
    OURS,
    OURS_LIBRARY,
    OURS_TRITON,
    PREFILL,
    RESULTS,
    ROOF,
    ROOT,
    TRAINING,
    UNEVEN,
    Ratio,
    Record,
    Run,
    others,
    read,
)
from benchmarks.shapes import gates_of, labelled, lengths_name

DOCUMENTS = (
    "README.md",
    "docs/backward.md",
    "docs/benchmarks.md",
    "docs/decode.md",
    "docs/engines.md",
)
ROWS = ROOT / "build" / "rows"
# The day of the first runs with the kernels that the default install has now.
SINCE = "2026-11-27"
OTHERS = ("FLA", "FlashInfer", "FlashQLA")
SMALL = "Forward, small and odd shapes too"
KINDS_OF_CALLS = (PREFILL, UNEVEN, SMALL, "Decode step", "Step of", TRAINING, "Backward")
OF_TABLES = {"full": PREFILL, "uneven": UNEVEN}
# The kinds of calls that the tables show, as a regular expression that their names start with.
USUAL = f"({PREFILL}|{UNEVEN}), ({GATES['model']}|{GATES['mild']})|{SMALL}|Decode|Step|Train|Back"
# Four rows of the README, on one card.
SHORT = f"({PREFILL}|{UNEVEN}), {GATES['model']}|Decode step, float32 pool, value-first|Train"
MARKED = re.compile(r"(<!-- benchmarks: (\w+) -->\n).*?(<!-- benchmarks end -->)", re.S)


def device_of(head: Record) -> str:
    return str(head["gpu"]).removeprefix("NVIDIA ")


def head_of(records: Iterable[Record]) -> Record:
    """The last header: a file may have the headers of several runs."""
    heads = [record for record in records if record.get("kind") == "header"]
    if not heads:
        raise ValueError("a file of records must say what it was made on: no record of kind header")
    return heads[-1]


def family(name: str) -> str:
    """The package of an implementation's name, for example FlashInfer for each of its variants. The
    fastest variant counts, because a caller can choose it."""
    return OURS_TRITON if name == OURS_TRITON else name.split(",")[0].split(" ")[0]


def best(times: dict[str, float]) -> dict[str, float]:
    """The least of each family."""
    found: dict[str, float] = {}
    for name, value in times.items():
        found[family(name)] = min(value, found.get(family(name), value))
    return found


def forward_ratios(run: Run) -> Iterator[Ratio]:
    speed = run.of("speed")
    has_library = any(record["backend"] == "cuda" for record in speed.values())
    for record in speed.values():
        gates = gates_of(record)
        what, case = SMALL, labelled(record["case"], gates)
        if run.table in OF_TABLES:
            what = f"{OF_TABLES[run.table]}, {GATES[gates]}"
            case = record["case"].removeprefix(f"{run.table} ")
        place = device_of(run.header), what
        time = record["results"][OURS]["graph"]
        to_ours = best(others(record, "graph"))
        to_ours.pop(OURS, None)  # the same call without its lengths on the host
        for name, value in to_ours.items():
            yield Ratio(*place, LIBRARY if has_library else DEFAULT, name, case, value, time)
        if OURS_TRITON in to_ours:
            own = to_ours.pop(OURS_TRITON)
            for name, value in to_ours.items():
                yield Ratio(*place, DEFAULT, name, case, value / own, own * time)
            yield Ratio(*place, DEFAULT, OURS_LIBRARY, case, 1 / own, own * time)


def decode_ratios(records: list[Record]) -> Iterator[Ratio]:
    """Ratios for each of our layouts to the fastest variant that another package has for such a
    pool. Variants that write only the last of several states are compared with one another."""
    device = device_of(head_of(records))
    for record in records:
        if record["kind"] != "decode":
            continue
        times = {name: x["time"] for name, x in record["results"].items() if "time" in x}
        for name, own in times.items():
            if family(name) != OURS:
                continue
            tokens = record.get("tokens", 1)
            step = "Decode step" if tokens == 1 else f"Step of {tokens} drafts"
            what = f"{step}, {record['pool']} pool, {name.split(', ', 1)[1]}"
            case = f"{record['sequences']} sequences, {record['heads']}"
            case = labelled(case, gates_of(record))
            last = keeps_last_state(name, tokens)
            alike = {x: t for x, t in times.items() if keeps_last_state(x, tokens) == last}
            for other, value in best(alike | {ROOF: record["roof"]}).items():
                if other != OURS:
                    yield Ratio(device, what, EITHER, other, case, value / own, own)


def short_case(name: str) -> str:
    """ "16/32 1x8192" from "backward 16/32 K 128 V 128 8192". Other head sizes stay, and names of
    random lengths too."""
    _, heads, _, K, _, V, lengths = name.split(" ", 6)
    size = "" if K == V == "128" else f" K {K} V {V}"
    if " " not in lengths:
        lengths = lengths_name(tuple(map(int, lengths.split("+"))))
    return f"{heads} {lengths}{size}"


def backward_ratios(records: list[Record]) -> Iterator[Ratio]:
    head = head_of(records)
    has_library = BACKWARD_TRITON in head["implementations"] or head["GDN_BACKEND"] == "auto"
    for record in records:
        if record["kind"] != "times":
            continue
        for what, key in ((TRAINING, "call"), ("Backward alone", "backward")):
            times = {name: x[key] for name, x in record["results"].items() if key in x}
            of_ours = {LIBRARY if has_library else DEFAULT: times.pop(OURS)}
            if BACKWARD_TRITON in times:
                of_ours[DEFAULT] = times.pop(BACKWARD_TRITON)
            case = labelled(short_case(record["case"]), gates_of(record))
            for install, own in of_ours.items():
                for name, value in times.items():
                    place = device_of(head), what, install, PEERS[name].name, case
                    yield Ratio(*place, value / own, own)
            if DEFAULT in of_ours and LIBRARY in of_ours:
                own = of_ours[LIBRARY]
                place = device_of(head), what, LIBRARY, OURS_TRITON, case
                yield Ratio(*place, of_ours[DEFAULT] / own, own)
                own = of_ours[DEFAULT]
                place = device_of(head), what, DEFAULT, OURS_LIBRARY, case
                yield Ratio(*place, of_ours[LIBRARY] / own, own)


def kind_of(records: list[Record]) -> str:
    kinds = {record["kind"] for record in records}
    named = ("decode", "layer", "engine", "times", "errors")
    return next((kind for kind in named if kind in kinds), "run")


def all_ratios(files: Iterable[Path]) -> list[Ratio]:
    readers: dict[str, Callable[[list[Record]], Iterator[Ratio]]] = {
        "decode": decode_ratios,
        # The rows of these are separate pages, and give no ratios of an operator.
        "layer": lambda records: iter(()),
        "engine": lambda records: iter(()),
        "times": backward_ratios,
    }
    found: dict[tuple[str, ...], Ratio] = {}
    for path in sorted(files, key=lambda path: str(head_of(read(path))["date"])):
        records = read(path)
        reader = readers.get(kind_of(records))
        ratios = reader(records) if reader else forward_ratios(Run(path))
        date = str(head_of(records)["date"]).split(" ")[0]
        for ratio in ratios:
            found.pop(ratio[:5], None)  # those of later dates come last
            found[ratio[:5]] = ratio._replace(date=date)
    # The files are in the order of their dates.
    latest = {(x.what, x.other): x.date for x in found.values() if x.install == DEFAULT}
    shown = [
        x
        for x in found.values()
        if x.install != DEFAULT or x.date >= min(latest[x.what, x.other], SINCE)
    ]

    def place(ratio: Ratio) -> tuple[str, int, str, bool]:
        kind = next(i for i, kind in enumerate(KINDS_OF_CALLS) if ratio.what.startswith(kind))
        gates = [text for text in GATES.values() if ratio.what.endswith(text)]
        order = str(list(GATES.values()).index(gates[0])) if gates else ratio.what
        return ratio.device, kind, order, ratio.install != DEFAULT

    return sorted(shown, key=place)


def groups(ratios: Iterable[Ratio]) -> dict[tuple[str, str, str], dict[str, dict[str, float]]]:
    """Device, what and install -> other implementation -> case -> ratio."""
    found: dict[tuple[str, str, str], dict[str, dict[str, float]]] = {}
    for x in ratios:
        if x.other in OTHERS:
            of_others = found.setdefault((x.device, x.what, x.install), {})
            of_others.setdefault(x.other, {})[x.case] = x.value
    return found


def cell(values: dict[str, float] | None) -> str:
    if not values:
        return "-"
    mean = f"{statistics.geometric_mean(values.values()):.2f}"
    faster = sum(value < 1 for value in values.values())
    shown = f"**{mean}**" if float(mean) < 1 else mean
    return f"{shown} ({faster} of {len(values)})"


def summary_table(ratios: Iterable[Ratio], only: str) -> str:
    found = {key: x for key, x in groups(ratios).items() if only is None or re.match(only, key[1])}
    columns = ["device", "call", "install", *OTHERS]
    return rows.table(
        columns,
        (
            [*key, *(cell(of_others.get(name)) for name in OTHERS)]
            for key, of_others in found.items()
        ),
    )


def short_table(ratios: Iterable[Ratio]) -> str:
    """For the default install and for the CUDA library a table of one card, that with the most
    calls: a row for each kind of call. Both installs have the same decode step, which is in the
    first table."""
    shown = [x for x in ratios if re.match(SHORT, x.what) and x.other in OTHERS]
    texts = []
    for install, others_too in ((DEFAULT, (EITHER,)), (LIBRARY, ())):
        of_install = [x for x in shown if x.install == install]
        if not of_install:
            continue
        card = statistics.mode(x.device for x in of_install)
        of_card = [x for x in shown if x.device == card and x.install in (install, *others_too)]
        dates = sorted({x.date for x in of_card})
        made = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        lines = [
            [what, *(cell(of_others.get(name)) for name in OTHERS)]
            for (_, what, _), of_others in groups(of_card).items()
        ]
        head = "Default install" if install == DEFAULT else "With the CUDA library"
        texts.append(f"{head}, one {card}, {made}:\n\n" + rows.table(["call", *OTHERS], lines))
    return "\n".join(texts)


def losses_table(ratios: Iterable[Ratio]) -> str:
    """A row for each implementation that is faster somewhere, with its three best calls. Calls with
    other kinds of gates have rows only with the CUDA library."""
    lines = []
    for key, of_others in groups(ratios).items():
        device, what, install = key
        if install == DEFAULT and not re.match(USUAL, what):
            continue
        for name in OTHERS:
            values = of_others.get(name, {})
            lost = sorted((value, case) for case, value in values.items() if value < 1)
            if lost:
                most = "; ".join(f"{case}: {value:.2f}" for value, case in lost[:3])
                share = f"{len(lost)} of {len(values)}"
                lines.append([device, what, install, name, share, most])
    columns = ["device", "call", "install", "faster", "calls it wins", "largest losses"]
    return rows.table(columns, lines)


def backward_table(files: Iterable[Path]) -> str:
    """A row for each file of gradients with the CUDA library: the mean and the least ratio of each
    other implementation, for the backward alone and for a step."""
    calls = {"backward": "Backward alone", "step": TRAINING}
    columns = [(name, short) for name in ("FlashQLA", "FLA") for short in calls]
    lines = []
    for path in files:
        records = read(path)
        if kind_of(records) != "times":
            continue
        found = groups(x for x in backward_ratios(records) if x.install == LIBRARY)
        cells = []
        for name, short in columns:
            of_others = found.get((device_of(head_of(records)), calls[short], LIBRARY), {})
            if values := list(of_others.get(name, {}).values()):
                cells.append(f"{statistics.geometric_mean(values):.2f}, {min(values):.2f}")
        if len(cells) == len(columns):
            lines.append([f"`benchmarks/results/{path.name}`", *cells])
    return rows.table(["records", *(f"{name}, {short}" for name, short in columns)], lines)


def runs_table(files: Iterable[Path]) -> str:
    lines = []
    for path in files:
        records = read(path)
        head = head_of(records)
        commits = list(dict.fromkeys(x["commit"] for x in records if x["kind"] == "header"))
        versions = f"torch {head['torch']}, Triton {head['triton']}"
        name = f"`benchmarks/results/{path.name}`"
        lines.append([name, device_of(head), head["date"], ", ".join(commits), versions])
    return rows.table(["records", "device", "date", "commit", "versions"], lines)


def newest_layer(files: Iterable[Path], *whats: str) -> list[Record]:
    """The newest records of a layer that have such calls, or none."""
    runs = [records for path in files if kind_of(records := read(path)) == "layer"]
    runs = [x for x in runs if any(record.get("what") in whats for record in x)]
    return max(runs, key=lambda records: str(head_of(records)["date"]), default=[])


def made_on(records: list[Record]) -> str:
    head = head_of(records)
    versions = [f"{name} {v}" for name, v in head["implementations"].items() if name != OURS]
    return f"{device_of(head)}, {head['date']}, {', '.join(versions)}:\n\n"


def layer_table(files: Iterable[Path]) -> str:
    """The steps of the newest records of a layer that have some."""
    records = newest_layer(files, *layer_calls.STEPS)
    if not records:
        return ""
    texts = []
    # The engines' kernels are timed for one token only.
    several = [what for what in layer_calls.STEPS if what != layer_calls.DECODE]
    for whats in ([layer_calls.DECODE], several):
        steps = [x for x in records if x.get("what") in whats]
        timed = (name for x in steps for name, row in x["results"].items() if "time" in row)
        if names := list(dict.fromkeys(timed)):
            texts.append(layer.tables(steps, names) + "\n")
    notes = (f"{x['text']}\n" for x in records if x["kind"] == "note")
    return made_on(records) + "\n".join([*texts, *notes])


def prefill_table(files: Iterable[Path]) -> str:
    """The prefills of the newest records of a layer that have some, and the kernels of ours."""
    records = newest_layer(files, "prefill")
    if not records:
        return ""
    rate = head_of(records)["bytes_per_s"]
    found = [x for x in records if x.get("what") == "prefill"]
    return made_on(records) + layer.prefills(found, rate)


def kinds_table(files: Iterable[Path]) -> str:
    """The newest records of vLLM's other kinds of calls: prefix caching, drafts, one prompt in two
    batches."""
    runs = [records for path in files if kind_of(records := read(path)) == "engine"]
    runs = [x for x in runs if any(row.get("what") == "8 prompts, empty" for row in x)]
    if not runs:
        return ""
    records = max(runs, key=lambda records: str(head_of(records)["date"]))
    found = [x for x in records if x["kind"] == "engine"]
    names = list(dict.fromkeys(name for x in found for name in x["results"]))
    lines = vllm_engine.tables(found, names).splitlines()
    return "".join(f"{line}\n" for line in lines if line.startswith("|"))  # no reasons


# The columns of the table of decode steps: ours, and the packages that it names.
STEPS = {
    "gdn_triton, value-first": "value-first",
    "gdn_triton, key-first": "key-first",
    "gdn_triton, value-first, last state": "value-first",
    "gdn_triton, key-first, last state": "key-first",
    "gdn_triton, value-first, with a window": "value-first, window",
    "gdn_triton, key-first, with a window": "key-first, window",
}
STEP_HEADS = ("16/32", "4/8")


def rank(step: Record) -> tuple[int, bool, int, int]:
    """The place of a decode step in its table."""
    pool, heads = step["pool"] != "float32", STEP_HEADS.index(step["heads"])
    return step.get("tokens", 1), pool, heads, step["sequences"]


def case_of(record: Record) -> tuple[object, ...]:
    """What a row of the decode steps has besides the gates."""
    return record["sequences"], record.get("tokens", 1), record["heads"], record["pool"]


def decode_table(files: Iterable[Path]) -> str:
    """The decode steps of the newest records, in microseconds; the least of each row is bold."""
    runs = [records for path in files if kind_of(records := read(path)) == "decode"]
    if not runs:
        return ""
    records = max(runs, key=lambda records: head_of(records)["date"])
    head = head_of(records)
    steps = [x for x in records if x["kind"] == "decode" and x["heads"] in STEP_HEADS]
    steps.sort(key=rank)
    # No instruction of a step depends on the gates. One kind of them is shown.
    chosen = {case_of(x): x for x in sorted(steps, key=gates_of, reverse=True)}
    shown_columns = (*dict.fromkeys(STEPS.values()), "FlashInfer", "FLA")
    lines = []
    for x in steps:
        if x is not chosen[case_of(x)]:
            continue
        tokens = x.get("tokens", 1)
        times = {name: y["time"] for name, y in x["results"].items() if "time" in y}
        for last in (False, True):
            alike = {name: t for name, t in times.items() if keeps_last_state(name, tokens) == last}
            shown = {STEPS[name]: t for name, t in alike.items() if name in STEPS}
            if not shown:
                continue
            shown |= {name: t for name, t in best(alike).items() if name in OTHERS}
            least = min(shown.values())
            cells = [decode.sequences_of(x) + (", last state" if last else "")]
            cells += [x["heads"], x["pool"], f"{x['roof']:.1f}"]
            for name in shown_columns:
                cell = f"{shown[name]:.1f}" if name in shown else "-"
                cells.append(f"**{cell}**" if shown.get(name) == least else cell)
            lines.append(cells)
    columns = ["sequences", "H / HV", "states", "roof", *shown_columns]
    names = {key: peer.name for key, peer in PEERS.items()}
    versions = [f"{names.get(x, x)} {v}" for x, v in head["implementations"].items() if x != OURS]
    text = f"{device_of(head)}, {head['date']}, {', '.join(versions)}:\n\n"
    notes = "".join(f"\n{x['text']}\n" for x in records if x["kind"] == "note")
    return text + rows.table(columns, lines) + notes


def parts(files: list[Path]) -> dict[str, str]:
    """The text of each marked place in a document, by the name of the place."""
    ratios = all_ratios(files)
    return {
        "summary": summary_table(ratios, USUAL),
        "short": short_table(ratios),
        "losses": losses_table(ratios),
        "backward": backward_table(files),
        "runs": runs_table(files),
        "layer": layer_table(files),
        "prefills": prefill_table(files),
        "kinds": kinds_table(files),
        "decode": decode_table(files),
    }


def filled(text: str, made: dict[str, str]) -> str:
    """A document with the marked places filled from the records."""
    return MARKED.sub(lambda m: f"{m[1]}\n{made[m[2]]}\n{m[3]}", text)


def rows_page(path: Path) -> str:
    records = read(path)
    if kind_of(records) == "run":
        return rows.section(Run(path))
    return rows.plain_section(path.name, records)


def documents(files: list[Path]) -> dict[Path, str]:
    """The documents of the repository, with the tables made from these records."""
    made = parts(files)
    return {ROOT / name: filled((ROOT / name).read_text("utf-8"), made) for name in DOCUMENTS}


def main() -> None:
    argparse.ArgumentParser("python -m benchmarks.page", description=__doc__).parse_args()
    files = sorted(RESULTS.glob("*.jsonl"))
    ROWS.mkdir(parents=True, exist_ok=True)
    made = documents(files) | {ROWS / f"{path.stem}.md": rows_page(path) for path in files}
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
    for line in plot.write(plot.plots(all_ratios(files))):
        print(line)


if __name__ == "__main__":
    main()
