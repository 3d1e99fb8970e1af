"""The benchmark's page and plots, of records whose contents are known."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import backward, page, plot, rows
from benchmarks.records import DEFAULT, EITHER, LIBRARY, ROOF, Ratio, Run
from benchmarks.report import Report

HEADER = {
    "kind": "header",
    "date": "2026-01-01 00:00 UTC",
    "command": "python -m benchmarks.run --out DIR --table full --commit x --budget-seconds 9 "
    "--resume --peers fla,flashinfer",
    "commit": "abc",
    "gpu": "a GPU",
    "driver": "1",
    "power limit": "2 W",
    "bytes_per_s": 4e12,
    "flops_per_s": 8e14,
    "python": "3",
    "torch": "2",
    "triton": "3",
    "GDN_BACKEND": "auto",
    "implementations": {"gdn_triton": "0", "FLA": "1", "FlashInfer": "2"},
    "missing": ["FlashQLA: not measured: ImportError: no"],
}


def speed(case: str, ours: float, fla: float, flashinfer: float | None) -> dict[str, Any]:
    def cells(graph: float) -> dict[str, Any]:
        return {"graph": graph, "graph_min": graph, "call": graph + 9, "host": 50.0, "extra": 10**6}

    results: dict[str, Any] = {"gdn_triton": cells(ours), "FLA": cells(fla)}
    results["FlashInfer"] = {"skipped": "no"} if flashinfer is None else cells(flashinfer)
    return {"kind": "speed", "case": case, "backend": "triton", "results": results}


@pytest.fixture
def records(tmp_path: Path) -> Path:
    path = tmp_path / "some.jsonl"
    numerics = {"gdn_triton": {"o": [0.5, 0.75, 1.0], "state": [0.25, 0.75, 1.0]}}
    lines = [
        HEADER,
        speed("full 2/8 1x32768", 100.0, 200.0, 150.0),
        speed("full 2/8 1x16384", 100.0, 200.0, 80.0),
        speed("full 2/8 1x8192", 100.0, 200.0, 50.0),
        speed("full 2/8 1x4096", 100.0, 120.0, None),
        {"kind": "speed", "case": "full 4/16 1x2048", "refused": "o differs", "results": {}},
        {"kind": "numerics", "case": "full 2/8 1x4096", "tolerances": [0.0, 0.001, 0.01],
         "results": numerics},
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_page_lists_losses_first(records: Path) -> None:
    text = rows.section(Run(records))
    graphs = text[text.index("## Time on the GPU") : text.index("## Calls")]
    found = [line.split(" | ") for line in graphs.splitlines() if line.startswith("| full")]
    assert [row[0] for row in found] == [
        "| full 2/8 1x8192",
        "| full 2/8 1x16384",
        "| full 2/8 1x32768",
        "| full 2/8 1x4096",
    ]
    assert [row[5] for row in found] == ["0.50", "0.80", "1.50", "1.20"]
    # 8192 tokens, 8 heads: 10.7 GFLOP in 100 us, of which 8e14 a second would take 13.4 us.
    assert found[0][6] == "107" and found[0][8] == "13% |"
    assert found[3][4] == "", "a number where nothing was measured"


def test_losses_are_named_for_each_kind_of_gates(tmp_path: Path) -> None:
    """In the page, in the plot and in the summary of a run. A row without a kind is mild."""
    path = tmp_path / "results.jsonl"
    lines = [
        HEADER,
        speed("full 2/8 1x8192", 100.0, 200.0, 150.0),
        {**speed("full 2/8 1x8192", 100.0, 90.0, 150.0), "gates": "model"},
        {**speed("full 2/8 1x4096", 100.0, 110.0, 80.0), "gates": "model"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = rows.section(Run(path))
    graphs = text[text.index("## Time on the GPU") : text.index("## Calls")]
    found = [line.split(" | ") for line in graphs.splitlines() if line.startswith("| full")]
    assert [(row[0], row[5]) for row in found] == [
        ("| full 2/8 1x4096, model gates", "0.80"),
        ("| full 2/8 1x8192, model gates", "0.90"),
        ("| full 2/8 1x8192", "1.50"),
    ]
    assert "- With mild gates: On the GPU FLA takes 2.00 times as long" in text
    assert (
        "- With model gates: On the GPU FLA takes 0.99 times as long as gdn_triton in the "
        "geometric mean of 2 rows, 0.90 at the least (full 2/8 1x8192, model gates); it is faster "
        "in 1: full 2/8 1x8192, model gates (0.90)."
    ) in text
    report = Report(tmp_path, "gdn_triton", "FLA", True)
    summary, _ = report.summary()
    assert "mild gates, graph replay slower than the fastest other on 0: none" in summary
    assert (
        "model gates, graph replay slower than the fastest other on 2: full 2/8 1x4096, model "
        "gates (FlashInfer 0.80), full 2/8 1x8192, model gates (FLA 0.90)"
    ) in summary


def test_page_says_what_was_run_and_what_was_not(records: Path) -> None:
    text = rows.section(Run(records))
    command = "python -m benchmarks.run --out DIR --table full --peers fla,flashinfer\n"
    assert command in text
    assert "Refused: speed full 4/16 1x2048: o differs." in text
    assert "Not in this run: FlashQLA. " in text
    assert "On the GPU FlashInfer takes 0.84 times as long as gdn_triton in the geometric" in text
    assert (
        "of 3 rows, 0.50 at the least (full 2/8 1x8192); it is faster in 2: "
        "full 2/8 1x8192 (0.50), full 2/8 1x16384 (0.80)."
    ) in text
    # 1 MB beside 42.9 MB of inputs and outputs.
    assert "| full 2/8 1x8192 | 2% | 2% | 2% |" in text


def alone(name: str, *times: tuple[str, float, float]) -> list[dict[str, Any]]:
    """A run of ours beside one implementation: case, our time, its time."""
    command = f"python -m benchmarks.run --out there --table full --peers {name.lower()}"
    header = HEADER | {"command": command, "implementations": {"gdn_triton": "0", name: "1"}}
    lines = [header]
    for case, ours, other in times:
        lines.append(speed(case, ours, other, None))
        results = lines[-1]["results"]
        lines[-1]["results"] = {"gdn_triton": results["gdn_triton"], name: results["FLA"]}
    return lines


def test_page_of_peers_in_processes_of_their_own(tmp_path: Path) -> None:
    """Ratios are within a process, though the table shows the median of ours."""
    path = tmp_path / "apart.jsonl"
    note = {"kind": "note", "heading": "Each alone", "text": "Because of this."}
    lines = [
        note,
        *alone("FLA", ("full 2/8 1x8192", 100.0, 150.0), ("full 2/8 1x4096", 40.0, 80.0)),
        *alone("FlashInfer split", ("full 2/8 1x8192", 120.0, 108.0)),
        {"kind": "speed", "case": "full 2/8 1x4096", "refused": "o differs", "results": {}},
    ]
    lines[5]["results"]["gdn_triton"]["host"] = 70.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_ = Run(path)
    text = rows.section(run_)
    assert text.startswith("# Each alone\n") and "\nBecause of this.\n" in text
    for peer in ("fla", "flashinfer split"):
        assert f"python -m benchmarks.run --out DIR --table full --peers {peer}\n" in text
    assert "FLA 1, FlashInfer split 1, at abc" in text
    assert "2 runs, each in a process" in text and "most 20.0% in a row" in text
    assert "GPU FLA takes 1.73 times as long" in text, "of 150 / 100 and 80 / 40"
    assert "0.90 at the least (full 2/8 1x8192); it is faster in 1: full 2/8 1x8192 (0.90)" in text
    assert "The most host time of a call is 70 us (full 2/8 1x8192)." in text
    assert "Refused: speed full 2/8 1x4096: o differs." in text
    assert "Not in this run: FlashQLA. " in text
    found = [line.split(" | ")[:6] for line in text.splitlines() if line.startswith("| full")]
    assert found[0] == ["| full 2/8 1x8192", "triton", "110", "150", "108", "0.90"]
    assert found[1] == ["| full 2/8 1x4096", "triton", "40", "80", "", "2.00"]
    ratios = {(x.other, x.case): x.value for x in page.forward_ratios(run_)}
    assert ratios == {
        ("FLA", "2/8 1x8192"): 1.5,
        ("FLA", "2/8 1x4096"): 2.0,
        ("FlashInfer", "2/8 1x8192"): 0.9,
    }


def test_table_of_equal_elements(records: Path) -> None:
    assert rows.numerics_table(Run(records)).splitlines()[2] == (
        "| full 2/8 1x4096 | gdn_triton | 50.000% | 75.000% | 100.000% "
        "| 25.000% | 75.000% | 100.000% |"
    )


def write_records(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """A prefill on the CUDA library and on our Triton kernels, decode steps, and gradients."""
    both = speed("full 16/32 1x8192", 100.0, 300.0, 125.0) | {"backend": "cuda", "gates": "model"}
    both["results"]["gdn_triton Triton"] = both["results"]["FLA"] | {"graph": 200.0}
    both["results"]["FlashInfer split"] = both["results"]["FLA"] | {"graph": 80.0}
    older = json.loads(json.dumps(both))
    older["results"]["FLA"]["graph"] = 900.0
    kinds = {"float32": 5.0, "bfloat16": 4.0}
    steps = [
        {
            "kind": "decode", "sequences": 8, "heads": "16/32", "pool": pool, "roof": 8.0,
            "results": {
                "gdn_triton, key-first": {"time": 10.0},
                "gdn_triton, value-first": {"time": 16.0},
                "FlashInfer, pool, value-first": {"time": 2 * time},
                "FlashInfer, states, key-first": {"time": 40.0},
                "FLA, states": {"skipped": "no"},
            },
        }
        for pool, time in kinds.items()
    ]  # fmt: skip
    names = ("gdn_triton", "triton", "fla", "flashqla")
    times = {name: {"backward": 10.0 * n, "call": 20.0 * n, "kept": 0, "peak": 2**20}
             for n, name in enumerate(names, 1)}  # fmt: skip
    times["flashqla"] = {"error": "no"}
    case = {"case": "backward 16/32 K 128 V 128 8192", "gates": "model"}
    gradients = {"kind": "times", **case, "results": times}
    of_times = {**HEADER, "implementations": dict.fromkeys(names, "1")}
    return [
        write_records(tmp_path / "a.jsonl", [HEADER, both]),
        write_records(tmp_path / "b.jsonl", [{**HEADER, "date": "2025-12-31"}, older]),
        write_records(tmp_path / "c.jsonl", [HEADER, *steps]),
        write_records(tmp_path / "d.jsonl", [of_times, gradients]),
    ]


def test_the_default_install_is_a_peer_of_the_backward_where_the_library_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the CUDA library it is gdn_triton itself, and no second column."""
    monkeypatch.setattr("gdn_triton.fast.why_unavailable", lambda: "It was not built.")
    with pytest.raises(RuntimeError, match=r"without the CUDA library\. It was not built\."):
        backward.load(backward.TRITON)
    monkeypatch.setattr("gdn_triton.fast.why_unavailable", lambda: None)
    assert backward.load(backward.TRITON) is backward.load(backward.OURS)
    assert backward.BACKENDS == {backward.TRITON: "triton"}


def test_ratios_of_each_install(files: list[Path]) -> None:
    """The default install has the Triton kernels; the fastest variant of a peer counts; of a call
    in two files that of the later one."""
    ratios = page.all_ratios(files)
    assert {x.device for x in ratios} == {"a GPU"}
    found = {x[1:5]: x.value for x in ratios if x.other in page.OTHERS}
    prefill_, training = "Prefill, gates of a model", "Training step (forward and backward)"
    case, step, trained = "16/32 1x8192", "8 sequences, 16/32", "16/32 1x8192, model gates"
    expected = {
        (prefill_, DEFAULT, "FLA", case): 1.5,
        (prefill_, DEFAULT, "FlashInfer", case): 0.4,
        (prefill_, LIBRARY, "FLA", case): 3.0,
        (prefill_, LIBRARY, "FlashInfer", case): 0.8,
        ("Decode step, float32 pool, key-first", EITHER, "FlashInfer", step): 1.0,
        ("Decode step, float32 pool, value-first", EITHER, "FlashInfer", step): 0.625,
        ("Decode step, bfloat16 pool, key-first", EITHER, "FlashInfer", step): 0.8,
        ("Decode step, bfloat16 pool, value-first", EITHER, "FlashInfer", step): 0.5,
        (training, DEFAULT, "FLA", trained): 1.5,
        (training, LIBRARY, "FLA", trained): 3.0,
        ("Backward alone", DEFAULT, "FLA", trained): 1.5,
        ("Backward alone", LIBRARY, "FLA", trained): 3.0,
    }
    assert found == pytest.approx(expected)
    # Prefill first, the default install before the other; then decode, training, the backward.
    assert [x.what.split(" ")[0] for x in ratios if x.other == "FLA"] == (
        ["Prefill,"] * 2 + ["Training"] * 2 + ["Backward"] * 2
    )


@pytest.mark.parametrize("since", ["2026-01-01", "2026-01-02"])
def test_old_runs_of_the_default_install(
    since: str, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are left out where a later run has the same kind of calls and other implementation."""
    monkeypatch.setattr(page, "SINCE", since)
    later = {**HEADER, "gpu": "NVIDIA new", "date": "2026-02-01"}
    row = speed("full 16/32 1x8192", 100.0, 50.0, None) | {"gates": "model"}
    added = write_records(tmp_path / "e.jsonl", [later, row])
    ratios = page.all_ratios([*files, added])
    places = {(x.device, x.install, x.other) for x in ratios if x.what.startswith("Prefill")}
    old = {("a GPU", DEFAULT, "FLA")} if since == "2026-01-01" else set()
    assert places == old | {
        ("new", DEFAULT, "FLA"),
        ("a GPU", DEFAULT, "FlashInfer"),
        ("a GPU", LIBRARY, "FLA"),
        ("a GPU", LIBRARY, "FlashInfer"),
        ("a GPU", DEFAULT, page.OURS_LIBRARY),
        ("a GPU", LIBRARY, page.OURS_TRITON),
    }


def test_tables_name_every_loss(files: list[Path]) -> None:
    made = page.parts(files)
    prefill_ = "| a GPU | Prefill, gates of a model |"
    assert (
        f"{prefill_} default (Triton) | 1.50 (0 of 1) | **0.40** (1 of 1) | - |\n"
        in (made["summary"])
    )
    assert (
        f"{prefill_} with the CUDA library | 3.00 (0 of 1) | **0.80** (1 of 1) | - |\n"
        in (made["summary"])
    )
    assert made["short"] == (
        "Default install, one a GPU, 2026-01-01:\n\n"
        "| call | FLA | FlashInfer | FlashQLA |\n| --- | --- | --- | --- |\n"
        "| Prefill, gates of a model | 1.50 (0 of 1) | **0.40** (1 of 1) | - |\n"
        "| Decode step, float32 pool, value-first | - | **0.62** (1 of 1) | - |\n"
        "| Training step (forward and backward) | 1.50 (0 of 1) | - | - |\n"
        "\nWith the CUDA library, one a GPU, 2026-01-01:\n\n"
        "| call | FLA | FlashInfer | FlashQLA |\n| --- | --- | --- | --- |\n"
        "| Prefill, gates of a model | 3.00 (0 of 1) | **0.80** (1 of 1) | - |\n"
        "| Training step (forward and backward) | 3.00 (0 of 1) | - | - |\n"
    )
    lost = [line.split(" | ")[:4] for line in made["losses"].splitlines()[2:]]
    assert [line[1] for line in lost] == [
        "Prefill, gates of a model",
        "Prefill, gates of a model",
        "Decode step, bfloat16 pool, key-first",
        "Decode step, bfloat16 pool, value-first",
        "Decode step, float32 pool, value-first",
    ]
    assert "| FlashInfer | 1 of 1 | 16/32 1x8192: 0.40 |\n" in made["losses"]


def test_table_of_decode_steps(files: list[Path]) -> None:
    """A package counts with its faster function, and the least time of a row is bold."""
    lines = page.decode_table(files).splitlines()
    assert lines[0].startswith("a GPU, 2026-01-01")
    assert lines[2] == (
        "| sequences | H / HV | states | roof | value-first | key-first | value-first, window "
        "| key-first, window | FlashInfer | FLA |"
    )
    assert lines[4:] == [
        "| 8 | 16/32 | float32 | 8.0 | 16.0 | **10.0** | - | - | **10.0** | - |",
        "| 8 | 16/32 | bfloat16 | 8.0 | 16.0 | 10.0 | - | - | **8.0** | - |",
    ]
    assert page.decode_table(files[:1]) == ""


def test_rows_of_decode_steps_have_one_kind_of_gates(files: list[Path], tmp_path: Path) -> None:
    """The first by name, as no instruction of a step depends on the gates."""
    head, *steps = page.read(files[2])
    others = [{**step, "gates": "strong"} for step in steps]
    path = write_records(tmp_path / "gates.jsonl", [head, *others, *steps])
    assert page.decode_table([path]) == page.decode_table(files)
    mixed = write_records(tmp_path / "mixed.jsonl", [head, others[0], *steps[1:]])
    assert page.decode_table([mixed]) == page.decode_table(files)


def test_drafts_come_after_decode_steps(files: list[Path], tmp_path: Path) -> None:
    head, step, _ = page.read(files[2])
    path = write_records(tmp_path / "drafts.jsonl", [head, step, {**step, "tokens": 4}])
    found = [x.what for x in page.all_ratios([path]) if x.other == "FlashInfer"]
    layouts = [f"float32 pool, {layout}" for layout in ("key-first", "value-first")]
    assert found == [
        f"{call}, {x}" for call in ("Decode step", "Step of 4 drafts") for x in layouts
    ]
    assert "| 8 x 4 tokens | 16/32 | float32 |" in page.decode_table([path])


def test_last_states_are_compared_with_last_states(files: list[Path], tmp_path: Path) -> None:
    """Of several tokens FLA writes the last state alone, as a row of ours does."""
    head, step, _ = page.read(files[2])
    last = {
        "gdn_triton, key-first, last state": {"time": 6.0},
        "FlashInfer, last state, value-first": {"time": 9.0},
        "FLA, states": {"time": 3.0},
    }
    drafts = {**step, "tokens": 4, "results": step["results"] | last}
    path = write_records(tmp_path / "drafts.jsonl", [head, drafts])
    found = {(x.what.split(", ", 2)[2], x.other): x.value for x in page.all_ratios([path])}
    assert found == {
        ("key-first", "FlashInfer"): 1.0,
        ("key-first", ROOF): 0.8,
        ("value-first", "FlashInfer"): 0.625,
        ("value-first", ROOF): 0.5,
        ("key-first, last state", "FlashInfer"): 1.5,
        ("key-first, last state", "FLA"): 0.5,
        ("key-first, last state", ROOF): 8 / 6,
    }
    row = "| 8 x 4 tokens{} | 16/32 | float32 | 8.0 | {} |"
    assert page.decode_table([path]).splitlines()[4:] == [
        row.format("", "16.0 | **10.0** | - | - | **10.0** | -"),
        row.format(", last state", "- | 6.0 | - | - | 9.0 | **3.0**"),
    ]


def test_records_need_a_header(tmp_path: Path) -> None:
    """Those of benchmarks.conv, host and prefill have none: no page shows them."""
    path = write_records(tmp_path / "a.jsonl", [{"sequences": "1 x 2"}])
    with pytest.raises(ValueError, match="no record of kind header"):
        page.all_ratios([path])


def test_marked_places_are_filled() -> None:
    text = "a\n<!-- benchmarks: x -->\nold\n<!-- benchmarks end -->\nb\n"
    once = page.filled(text, {"x": "| 1 |\n"})
    assert once == "a\n<!-- benchmarks: x -->\n\n| 1 |\n\n<!-- benchmarks end -->\nb\n"
    assert page.filled(once, {"x": "| 1 |\n"}) == once
    with pytest.raises(KeyError):
        page.filled(text, {"y": ""})


def test_rows_of_steps_and_gradients(files: list[Path]) -> None:
    text = page.rows_page(files[2])
    assert text.startswith("# Decode steps\n") and "The records are in `c.jsonl`." in text
    assert "| 8, 16/32, float32 | 8.00 | 10.00, 80 % | 16.00, 50 % | 10.00, 80 % |" in text
    text = page.rows_page(files[3])
    assert (
        "| 16/32 K 128 V 128 8192, model gates | 10 / 20, 0 / 1 MiB | 20 / 40, 0 / 1 MiB |" in text
    )


def test_plots_show_the_ratios(files: list[Path]) -> None:
    data = plot.plots(page.all_ratios(files))
    assert list(data) == ["prefill.svg", "decode.svg", "training.svg"]
    assert data["prefill.svg"]["rows"] == {
        "16/32 1x8192, 200 us": {"FLA": 1.5, "FlashInfer": 0.4, "gdn_triton CUDA": 0.5}
    }
    assert data["decode.svg"]["panels"]["float32 pool"] == {
        "gdn_triton, key-first": {"8": 80.0},
        "gdn_triton, value-first": {"8": 50.0},
        "FlashInfer": {"8": 80.0},
    }
    assert data["training.svg"]["rows"] == {
        "16/32 1x8192, 40 us": {"FLA": 1.5, "gdn_triton CUDA": 0.5}
    }
    mild = Ratio("GPU", "Prefill, mild gates", DEFAULT, "FLA", "2/16 1x2048", 2.0, 1.0)
    assert plot.plots([mild]) == {}, "a call that is not among those that are plotted"


def test_a_plotted_case_is_of_its_last_run() -> None:
    """Another run's ratio would stand beside a time of ours that it has nothing to do with."""
    place = "GPU", "Prefill, gates of a model", DEFAULT
    case = "16/32 4x8192, model gates"
    before = Ratio(*place, "FLA", case, 3.0, 200.0)
    last = Ratio(*place, "FlashQLA", case, 2.0, 100.0)
    data = plot.dots([before, last], place[1], [case], "")
    assert data["rows"] == {"16/32 4x8192, 100 us": {"FlashQLA": 2.0}}


def test_a_plot_is_of_the_card_with_the_most_implementations() -> None:
    place, case = ("Prefill, gates of a model", DEFAULT), "16/32 4x8192, model gates"
    first = [Ratio("H100", *place, name, case, 3.0, 200.0) for name in ("FLA", "FlashQLA")]
    other = Ratio("H200", *place, "FlashInfer", case, 2.0, 100.0)
    data = plot.dots([*first, other], place[0], [case], "")
    assert data["rows"] == {"16/32 4x8192, 200 us": {"FLA": 3.0, "FlashQLA": 3.0}}


@pytest.mark.parametrize(
    "name, short",
    [
        ("backward 16/32 K 128 V 128 8192", "16/32 1x8192"),
        ("backward 8/8 K 128 V 256 64+64", "8/8 2x64 K 128 V 256"),
        ("backward 4/8 K 128 V 128 48 of 32 to 2048", "4/8 48 of 32 to 2048"),
    ],
)
def test_short_names_of_calls(name: str, short: str) -> None:
    assert page.short_case(name) == short


def test_plots_without_matplotlib(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert list(plot.write(plot.plots(page.all_ratios(files)), tmp_path / "x")) == [plot.MISSING]
    assert not (tmp_path / "x").exists()


def test_plots_with_matplotlib(files: list[Path], tmp_path: Path) -> None:
    """The same numbers give the same file, which says so."""
    pytest.importorskip("matplotlib", reason="matplotlib draws the plots and is not installed")
    data = plot.plots(page.all_ratios(files))
    drawn = []
    for _ in range(2):
        assert len(list(plot.write(data, tmp_path))) == 3
        drawn.append({name: (tmp_path / name).read_text() for name in data})
    assert drawn[0] == drawn[1]
    for name, text in drawn[0].items():
        assert plot.digest(data[name]) in text and "gdn_triton" in text


def layer_records(path: Path, date: str, what: str, results: dict[str, Any]) -> Path:
    head = HEADER | {"date": date, "implementations": {"gdn_triton": "0", "vLLM": "2"}}
    row = {"kind": "layer", "what": what, "sequences": 1, "tokens": 1000, "heads": "16/32"}
    path.write_text(f"{json.dumps(head)}\n{json.dumps({**row, 'results': results})}\n")
    return path


def test_prefills_and_steps_of_a_layer_come_from_separate_records(tmp_path: Path) -> None:
    """By hand: 8192 channels and 1000 tokens are 33.2 MB of the convolution, and 24.6 of the norm,
    at 4 TB/s in 8.3 and 6.1 us."""
    ours = {"time": 50.4, "launches": 5, "kernels": {"conv_kernel": 9.0, "conv_state_kernel": 1.0}}
    ours["kernels"] |= {"hopper_fwd_kernel": 25.0, "norm_fwd_kernel": 12.3}
    other = {"time": 100.0, "launches": 16}
    files = [
        layer_records(tmp_path / "new.jsonl", "2026-02-01", "prefill", {"gdn_triton": ours}),
        layer_records(tmp_path / "old.jsonl", "2026-01-01", "decode", {"gdn_triton": other}),
    ]
    drafts = {"kind": "layer", "what": "drafts", "sequences": 1, "tokens": 4, "heads": "4/8"}
    drafts["results"] = {"gdn_triton": {"time": 8.0, "launches": 1}, "vLLM": {"skipped": "no"}}
    with files[1].open("a") as file:
        file.writelines(f"{json.dumps(x)}\n" for x in (drafts, {"kind": "note", "text": "A note."}))
    steps = page.layer_table(files)
    assert "| decode | 1 | 1000 | 16/32 | float32 | 100.0 (16) |" in steps
    assert "| states | gdn_triton |\n" in steps and steps.endswith("\nA note.\n")
    text = page.prefill_table(files)
    assert "| 16/32 | 1 | 50 (5) | 10 (83%) | 12 (50%) | 28 |" in text
    assert page.layer_table(files[:1]) == page.prefill_table(files[1:]) == ""
