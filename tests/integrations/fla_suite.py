"""Runs flash-linear-attention's own tests of the op on this package's kernels.

    python tests/integrations/fla_suite.py PATH/tests/ops/test_gdn.py [arguments of pytest]

The file is FLA's, unchanged; it is not in this repository. FLA (0.5.2 to 0.6.x), pytest and a GPU
are needed. The file is collected after `gdn_triton.integrations.fla.register()`, so every call of
FLA's two ops in it runs here; what it calls of FLA besides, its reference and its other kernels,
stays FLA's. The last lines say how many calls ran here and which did not, and why.

The process is pytest's, with this file as a plugin, also in the workers of pytest-xdist.
"""

import functools
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OPS = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")

NO_DISPATCH = "FLA_DISABLE_BACKEND_DISPATCH"

counts: Counter[str] = Counter()

# A worker of pytest-xdist has it from the process that started it. FLA reads it as it is imported,
# which its conftest.py does before pytest_configure.
os.environ.pop(NO_DISPATCH, None)


def main(arguments: list[str]) -> None:
    if not arguments or not Path(arguments[0]).is_file():
        sys.exit(__doc__)
    given = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join([str(ROOT), str(Path(__file__).resolve().parent), *given])
    # Without the settings of this repository, in which FLA's file may lie.
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "-p", "fla_suite", "-q"]
    command += ["-p", "no:cacheprovider", "--rootdir", str(Path(arguments[0]).resolve().parent)]
    os.execve(sys.executable, [*command, *arguments], {**os.environ, "PYTHONPATH": path})


def counted(op: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(op)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        counts[op.__name__] += 1
        return op(*args, **kwargs)

    return wrapper


class Refusals(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        counts[record.getMessage()] += 1


def pytest_configure(config: Any) -> None:
    from gdn_triton.integrations import fla

    for name in OPS:
        setattr(fla, name, counted(getattr(fla, name)))
    logging.getLogger("gdn_triton").addHandler(Refusals(logging.WARNING))
    fla.register()
    # FLA has read it by now. Where it is not set, its tests of HV != H skip themselves.
    os.environ[NO_DISPATCH] = "1"


def pytest_sessionfinish(session: Any) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["gdn_triton"] = dict(counts)


class Workers:
    @staticmethod
    def pytest_testnodedown(node: Any, error: object) -> None:
        counts.update(getattr(node, "workeroutput", {}).get("gdn_triton", {}))


def pytest_plugin_registered(plugin: object, manager: Any) -> None:
    # The hook is known where pytest-xdist is, which may be loaded after this file.
    if type(plugin).__name__ == "DSession":
        manager.register(Workers())


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line("Calls on gdn_triton, and warnings of it:")
    for name in OPS:
        terminalreporter.write_line(f"  {counts.pop(name, 0)} {name}")
    for message, times in sorted(counts.items()):
        terminalreporter.write_line(f"  {times} {message}")


if __name__ == "__main__":
    main(sys.argv[1:])
