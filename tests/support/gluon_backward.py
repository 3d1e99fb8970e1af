"""Runs the whole Triton backward with its Gluon kernels on a CPU, looks for races and for accesses
outside of the tensors of a launch, and holds the gradients to float64.

    PYTHONPATH=.:tests/support python -m gluon_backward [--select REGEX]

With the installed Triton, of whose releases the package lists some (RELEASES of
gdn_triton/_host/gluon.py). Needs g++ on x86_64. The portable kernels of such a
call run in the emulator too, except for the one that makes the table of the chunks.
"""

import argparse
import re
import time
from dataclasses import replace
from unittest import mock

import torch
from backward_cases import NAMES, Task, TaskOptions, assert_gradients, make_task
from emulator.gluon import emulated
from gluon_emulated import gluon_case, problem_of
from gluon_walks import WRITES as WALKS_WRITES
from gluon_walks import table_of
from helpers import BF16, Case
from narrow import Arithmetic
from torch import Tensor

from gdn_triton._triton import tiles
from gdn_triton.chunk.problem import Inputs
from gdn_triton.chunk.triton import backward
from gdn_triton.chunk.triton.fused import segments as fused
from gdn_triton.chunk.triton.hopper.gradients import launch as gradients
from gdn_triton.chunk.triton.hopper.walks import launch as walks
from gdn_triton.constants import L2NORM_EPS

WRITES = {
    **WALKS_WRITES,
    "hopper_gradients_kernel": ("dq", "dk", "shares", "across"),
}
# Few multiprocessors, so that a program of the gradients has several chunks.
GPU = tiles.Gpu("cuda", 90, 3)


def normalized(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As ``l2norm_with_factors``, whose kernel has a grid of two dimensions."""
    factors = torch.stack([(x.float().square().sum(-1) + L2NORM_EPS).rsqrt() for x in (q, k)])
    of_q, of_k = factors[..., None]
    return (q * of_q).to(q.dtype), (k * of_k).to(k.dtype), factors


def by_kernels(task: Task, plan: walks.Plan, seed: int) -> dict[str, Tensor]:
    case, options, leaves = task.case, task.options, task.leaves
    problem = replace(
        problem_of(case, BF16, norm=options.l2norm),
        scale=task.scale,
        has_initial_state=options.state,
        needs_grad=True,
    )
    x = Inputs(**{name: leaves.get(name) for name in NAMES}, cu_seqlens=task.cu_seqlens)
    with (
        mock.patch.object(walks, "choose_plan", lambda *_: plan),
        mock.patch.object(walks, "gpu_of", lambda _: GPU),
        mock.patch.object(gradients, "gpu_of", lambda _: GPU),
        mock.patch.object(backward, "make_chunks", table_of),
        mock.patch.object(walks, "make_chunks", table_of),
        mock.patch.object(fused, "gpu_of", lambda _: GPU),
        mock.patch.object(backward, "l2norm_with_factors", normalized),
        emulated(WRITES, seed=seed, races=True),
    ):
        found = backward.gradients(
            problem,
            x,
            task.do,
            task.dht if options.dht else None,
            store_dh0=options.state,
            walks_on_hopper=True,
            gradients_on_hopper=True,
        )
    return {name: getattr(found, name) for name in leaves}


def check_backward(case: Case, options: TaskOptions, plan: walks.Plan, seed: int) -> None:
    task = make_task(case, BF16, "cpu", options)
    # Rows of dv that are dx, most with numbers of T below the normal numbers of fp16.
    for n, beta in enumerate((0.0, 2.0**-70, 2.0**-24)):
        task.leaves["beta"][:, 4 + n :: 11] = beta
    assert_gradients(task, by_kernels(task, plan, seed), Arithmetic(BF16, "cuda"))


OF_TWO = walks.Plan(walks.TWO, walks.TWO)
OF_ONE = walks.Plan(walks.ONE, walks.ONE)
CALLS = {
    "padded": (gluon_case("padded", T=128, B=2, HV=3), TaskOptions(state=False, dht=False), OF_TWO),
    "packed": (gluon_case("packed", lengths=(0, 70, 64, 1), orphans=70), TaskOptions(), OF_ONE),
    "segments": (
        gluon_case("segments", lengths=(200, 0, 70), HV=1),
        TaskOptions(v_first=True),
        OF_TWO._replace(segment=1),
    ),
    "small": (
        gluon_case("small", T=70, B=2, K=40, V=72),
        TaskOptions(dht=False, l2norm=True),
        OF_TWO,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the Triton backward's kernels on a CPU.")
    parser.add_argument("--select", default="", metavar="REGEX", help="some of the calls")
    options = parser.parse_args()
    failed = 0
    torch.set_num_threads(1)
    for seed, (name, call) in enumerate(CALLS.items()):
        if not re.search(options.select, name):
            continue
        start = time.monotonic()
        try:
            check_backward(*call, seed)
            said = "right"
        except (AssertionError, RuntimeError) as error:
            failed += 1
            said = f"FAILED: {error}"
        print(f"backward-{name}: {said} ({time.monotonic() - start:.1f} s)", flush=True)
    print(f"{failed} failed")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
