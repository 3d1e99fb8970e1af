"""Runs code in a separate process, without a GPU and without a request for a backend."""

import os
import subprocess
import sys
import textwrap


def run_python(code, **environment):
    """Runs code in a fresh interpreter; returns its output."""
    kept = {k: v for k, v in os.environ.items() if k not in ("GDN_BACKEND", "TRITON_INTERPRET")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**kept, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
