"""Measures the time from a checkout and a bare Python to the first correct number.

    python3 -m benchmarks.stranger

The steps are those of README.md's main command, run in a copy of the checkout with nothing
installed and nothing compiled. The number is correct if the command prints the line `error: ...
OK`. If that ran on a GPU, one row of benchmarks.run follows, without peers. A table of seconds is
printed last. The script needs only Python, and deletes what it made.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MARKER = "<!-- main command -->"
ROW = "prefill 16/32 1x8192"

# Files that belong to this checkout only, or to the person who works in it.
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.egg-info", "*.so")
OF_THE_USER = ("PYTHON", "VIRTUAL_ENV", "TRITON_", "GDN_")


class Row(NamedTuple):
    step: str
    seconds: float


def main_command(readme: str) -> list[list[str]]:
    """The steps of the README's main command, each as a list of words."""
    found = re.findall(rf"^{re.escape(MARKER)}\n```bash\n(.*?)\n```$", readme, re.M | re.S)
    if len(found) != 1:
        raise SystemExit(f"README.md must have one bash block after {MARKER}, found {len(found)}")
    return [shlex.split(step) for step in found[0].split("&&")]


def run(step: Sequence[str], cwd: Path, environment: dict[str, str]) -> list[tuple[str, float]]:
    """Yields each line that a step prints and the seconds until it came, and prints the line at
    once."""
    print(f"$ {shlex.join(step)}", flush=True)
    lines, start = [], time.perf_counter()
    with subprocess.Popen(
        step, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((line.rstrip("\n"), time.perf_counter() - start))
            print(lines[-1][0], flush=True)
    if process.returncode != 0:
        raise SystemExit(f"exit status {process.returncode} of {shlex.join(step)}")
    return [*lines, ("", time.perf_counter() - start)]


def measure(folder: Path, row: str) -> tuple[str, list[Row]]:
    """The machine as the main command describes it, and the seconds of each step."""
    checkout = folder / "checkout"
    shutil.copytree(ROOT, checkout, ignore=LEFT_OUT)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(OF_THE_USER)
    }
    # Otherwise kernels that are compiled already would be found.
    environment |= {"TRITON_CACHE_DIR": str(folder / "triton"), "PYTHONUNBUFFERED": "1"}
    *setup, main = main_command(README.read_text(encoding="utf-8"))
    rows = [Row(f"`{shlex.join(s)}`", run(s, checkout, environment)[-1][1]) for s in setup]
    lines = run(main, checkout, environment)
    right = [seconds for line, seconds in lines if re.match(r"error: .*\bOK$", line)]
    machine = [line.removeprefix("machine: ") for line, _ in lines if line.startswith("machine: ")]
    if not right or not machine:
        raise SystemExit(f"{shlex.join(main)} printed no line `machine: ...` or `error: ... OK`")
    rows.append(Row(f"`{shlex.join(main)}`, until its number is right", right[0]))
    if not machine[0].startswith("CPU"):
        rows.append(Row("the rest of it", lines[-1][1] - right[0]))
        # --no-fla leaves none of these peers.
        command = f"-m benchmarks.run --out {folder / 'row'} --speed --peers fla --no-fla"
        step = [main[0], *command.split(), "--prewarm", "0", "--select", f"^{re.escape(row)}$"]
        seconds = run(step, checkout, environment)[-1][1]
        rows.append(Row(f"`benchmarks.run`, the row `{row}`", seconds))
    return machine[0], rows


def table(rows: Sequence[Row]) -> str:
    lines = ["| step | seconds | from the start |", "|---|---|---|"]
    total = 0.0
    for step, seconds in rows:
        total += seconds
        lines.append(f"| {step} | {seconds:.0f} | {total:.0f} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.stranger",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--row", default=ROW, help=f"which case of benchmarks.run, on a GPU (default: {ROW})"
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        machine, rows = measure(Path(folder), args.row)
    print(f"\n{machine}; {os.cpu_count()} cores\n\n{table(rows)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
