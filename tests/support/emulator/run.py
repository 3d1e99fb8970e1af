r"""Runs the CUDA library's kernels on a CPU, and holds them to the float64 specification.

    PYTHONPATH=.:tests/support python -m emulator.build
    PYTHONPATH=.:tests/support python -m emulator.run --races --random 100

A case of K = V = 128 takes a second or so for each 40 chunks of a value head, and ten seconds more
the first time that a kernel is needed. `--select` takes the cases whose name a regular expression
finds; `--random` adds random calls of the forward, of every size, layout and option; `--seeds` runs
each case in that many orders of its warps and copies. `--multiprocessors` is what the library is
told: few give a block several sequences, many cut long ones into segments.
"""

import argparse
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

# Before Triton is imported: only the CUDA library is of interest here.
os.environ["TRITON_INTERPRET"] = "1"

import torch
from backward_cases import STRENGTHS, check_task, make_task
from backward_cases import Options as Gradients
from fast_cases import EDGES, fast_case
from fast_parity import Options, check_parity, make_call, random_call
from helpers import BF16, FP16, FP32, Case, make_inputs
from prefill_cases import assert_checkpoints, assert_prefilled, begun, checkpoint_of
from prefill_cases import make_call as make_prefill
from torch import Tensor

from emulator.build import FOLDER
from emulator.library import use

ALL = Options(l2norm=True, sigmoid=True, negative=True, gate=True, bias=True, v_first=True)
# On four multiprocessors a block has tiles with tokens, and then more empty ones than it can look
# ahead.
EMPTIES = fast_case("empties", "", lengths=(130, 70, *(0,) * 9, 65), H=1, HV=2)
FORWARD = [
    fast_case("edges", "", lengths=(*EDGES, *EDGES[::-1]), orphans=70, H=1, HV=2),
    EMPTIES,
    fast_case("padded", "", T=200, B=2, H=1, HV=2, spare=3),
    fast_case("segments", "", lengths=(3200,), H=1, HV=1),
]
PREFILL = [
    fast_case("packed", "", lengths=(70, 0, 65, 130, *(0,) * 6, 1, 200), orphans=70, H=1, HV=2),
    fast_case("padded", "", T=150, B=4, H=1, HV=1),
    fast_case("segments", "", lengths=(3200,), H=1, HV=1),
]
BACKWARD = [
    fast_case("heads", "", lengths=(70, 0, 130), H=2, HV=4),
    fast_case("alone", "", lengths=(130, 70), H=2, HV=2),
    fast_case("four", "", lengths=(70, 130), H=1, HV=4),
    fast_case("orphans", "", lengths=(5, 80), orphans=200, H=1, HV=2),
    EMPTIES,
    fast_case("segments", "", T=1500, H=1, HV=2),
]


def forward_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for case, dtype in itertools.product(FORWARD, (BF16, FP16)):
        options = ALL if case.name == "edges" else Options()
        call = partial(make_call, case, dtype, "cpu", options)
        name = f"forward-{case.name}-{str(dtype).removeprefix('torch.')}"
        yield name, lambda call=call: check_parity(call(), ("cuda",), on="cpu")


def prefill_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """On a pool of states, with checkpoints."""
    pools = ((BF16, FP32, False), (FP16, BF16, True))
    for case, (dtype, pool, v_first) in itertools.product(PREFILL, pools):

        def check(
            case: Case = case,
            dtype: torch.dtype = dtype,
            pool: torch.dtype = pool,
            v_first: bool = v_first,
        ) -> None:
            call = make_prefill(case, dtype, "cpu", pool, v_first=v_first)
            kept = list(checkpoint_of(call, 64))
            before, initial = call.state.clone(), begun(call)
            o, checkpoints = call.run(checkpoint_every_n_tokens=64)
            assert_prefilled(call, before, o, initial)
            assert checkpoints is not None
            assert_checkpoints(call, checkpoints, 64, kept)

        yield f"prefill-{case.name}-{str(dtype).removeprefix('torch.')}", check


def backward_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for case in BACKWARD:
        task = partial(make_task, case, BF16, "cpu", Gradients())
        yield f"backward-{case.name}", lambda task=task: check_task(task(), BF16, "cpu")
    everything = Gradients(l2norm=True, sigmoid=True, negative=True, gate=True, v_first=True)
    task = partial(make_task, replace(BACKWARD[0], name="options"), BF16, "cpu", everything)
    yield "backward-options", lambda: check_task(task(), BF16, "cpu")
    gated = fast_case("gates", "", T=260, H=1, HV=2)
    for name, change in STRENGTHS.items():

        def check(change: Callable[[Tensor], Tensor] = change) -> None:
            x = make_inputs(gated, BF16, "cpu")
            check_task(
                make_task(gated, BF16, "cpu", Gradients(), x.but(g=change(x.g))), BF16, "cpu"
            )

        yield f"backward-gates-{name}", check


def random_cases(first: int, count: int, small: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    for number in range(first, first + count):

        def check(number: int = number) -> None:
            call, _ = random_call(number, "cpu", small=small)
            check_parity(call, ("cuda",), on="cpu")

        yield f"random-{number}", check


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the CUDA library's kernels on a CPU.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: %(default)s")
    parser.add_argument("--select", default="", metavar="REGEX")
    parser.add_argument("--random", type=int, default=0, metavar="COUNT")
    parser.add_argument("--first", type=int, default=0, help="the number of the first random case")
    parser.add_argument("--large", action="store_true", help="random cases of up to 2500 tokens")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--races", action="store_true", help="look for accesses that race")
    parser.add_argument("--multiprocessors", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["EMULATOR_RACES"] = str(int(options.races))
    os.environ["EMULATOR_MULTIPROCESSORS"] = str(options.multiprocessors)
    os.environ["GDN_BACKEND"] = "cuda"
    use(options.folder.resolve())
    cases = [
        *forward_cases(),
        *prefill_cases(),
        *backward_cases(),
        *random_cases(options.first, options.random, not options.large),
    ]
    failed = 0
    for name, check in cases:
        if not re.search(options.select, name):
            continue
        for seed in range(options.seeds):
            os.environ["EMULATOR_SEED"] = str(seed)
            began = time.monotonic()
            try:
                check()
                said = "ok"
            except (AssertionError, RuntimeError) as error:
                failed += 1
                said = f"FAILED: {error}"
            print(f"{name}, seed {seed}: {time.monotonic() - began:.1f} s, {said}", flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
