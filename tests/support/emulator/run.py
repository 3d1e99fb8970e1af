r"""Runs the CUDA library's kernels on a CPU, and compares them with the float64 specification.

    PYTHONPATH=.:tests/support python -m emulator.build
    PYTHONPATH=.:tests/support python -m emulator.run --races --random 100

A case of K = V = 128 takes about a second for each 40 chunks of a value head, and ten seconds more
the first time that a kernel is needed. `--select` selects the cases whose name a regular expression
finds. `--random` adds random calls of the forward, of every size, layout and option, and a quarter
as many each of prefills on a pool and of the backward. `--seeds` runs each case in that many orders
of its warps and copies. `--multiprocessors` is the number that the library is told: few give a
block several sequences, many cut long ones into segments. Half of the random calls are
batch-invariant.
"""

import argparse
import itertools
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

# Set before Triton is imported: only the CUDA library matters here.
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from backward_cases import STRENGTHS, Task, TaskOptions, check_forgetting, check_task, make_task
from fast_backward_cases import KEPT, random_task, small_betas
from fast_cases import EDGES, fast_case
from fast_parity import check_parity
from helpers import BF16, FP16, FP32, Case, make_inputs
from parity_calls import Options, make_call, random_call, random_case, random_variant
from prefill_cases import Call as Prefill
from prefill_cases import assert_checkpoints, assert_prefilled, begun, checkpoint_of
from prefill_cases import make_call as make_prefill
from shard_cases import GATE, NORM, SIGMOID
from shard_cases import Case as ShardCase
from stage_cases import check_stages
from torch import Tensor
from walk_cases import CASES as WALKS
from walk_cases import check_walks

from emulator.build import FOLDER
from emulator.library import use
from gdn_triton.chunk.cuda import calls

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
    # On four multiprocessors each block has a tile of the skipped sequence between two others.
    fast_case("skipped", "", T=70, B=3, H=1, HV=4),
    fast_case("segments", "", lengths=(3200,), H=1, HV=1),
]
BACKWARD = [
    fast_case("heads", "", lengths=(70, 0, 130), H=2, HV=4),
    fast_case("alone", "", lengths=(130, 70), H=2, HV=2),
    fast_case("four", "", lengths=(70, 130), H=1, HV=4),
    fast_case("orphans", "", lengths=(5, 80), orphans=200, H=1, HV=2),
    EMPTIES,
    # Tiles that are dealt, on fewer multiprocessors than tiles.
    fast_case("uneven", "", lengths=(70, 0, 400, 130, 0, 64, 1, 200), orphans=70, H=2, HV=4),
    fast_case("uneven-four", "", lengths=(300, 70, 0, 130), H=1, HV=4),
    # On 16 to 20 multiprocessors the host wants segments for both, and the device for the first.
    fast_case("dealt-segments", "", lengths=(130, 3900, 0), H=1, HV=2),
    # The walk back goes over halves of slices where one sequence is long.
    fast_case("dealt-halves", "", lengths=(20, 700, 64, 0, 130), H=1, HV=2),
    fast_case("dealt-whole", "", lengths=(*(770,) * 7, 700), H=1, HV=2),
    fast_case("segments", "", T=1500, H=1, HV=2),
    fast_case("cut", "both walks in segments, on 132 multiprocessors", T=8191, H=1, HV=1),
]
CUT_PACKED = fast_case("cut-packed", "as cut", lengths=(8000,), orphans=130, H=1, HV=1)
CUT_SEVERAL = fast_case(
    "cut-several", "as cut", lengths=(900, 0, 8000, 130), orphans=130, H=1, HV=1, told=True
)


# One and two slices of V, whole and in part; fewer channels than a tile has, and more.
BACKWARD_SIZES = [(128, 128), (96, 192), (40, 24), (128, 72), (64, 256)]
SOME_STRENGTHS = ("mild", "strong")


def forward_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for case, dtype in itertools.product(FORWARD, (BF16, FP16)):
        options = ALL if case.name == "edges" else Options()
        call = partial(make_call, case, dtype, "cpu", options)
        name = f"forward-{case.name}-{str(dtype).removeprefix('torch.')}"
        yield name, lambda call=call: check_parity(call(), ("cuda",), on="cpu")


def check_prefill(call: Prefill, every: int) -> None:
    """every: tokens between checkpoints, or 0 for none."""
    kept = list(checkpoint_of(call, every)) if every else []
    before, initial = call.state.clone(), begun(call)
    o, checkpoints = call.run(checkpoint_every_n_tokens=every)
    assert_prefilled(call, before, o, initial)
    if kept:
        assert checkpoints is not None
        assert_checkpoints(call, checkpoints, every, kept)


def prefill_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """On a pool of states, with checkpoints."""
    pools = ((BF16, FP32, False), (FP16, BF16, True))
    for case, (dtype, pool, v_first) in itertools.product(PREFILL, pools):
        call = partial(make_prefill, case, dtype, "cpu", pool, v_first=v_first)
        name = f"prefill-{case.name}-{str(dtype).removeprefix('torch.')}"
        yield name, lambda call=call: check_prefill(call(), every=64)


def backward_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    for case in BACKWARD:
        task = partial(make_task, case, BF16, "cpu", TaskOptions())
        yield f"backward-{case.name}", lambda task=task: check_task(task(), BF16, "cpu")

    def check_cut(case: Case) -> None:
        # Gates of 0, because other gates would forget within a segment, and nothing would depend on
        # its map.
        x = make_inputs(case, BF16, "cpu")
        task = make_task(case, BF16, "cpu", TaskOptions(), x.but(g=STRENGTHS["none"](x.g)))
        check_task(task, BF16, "cpu")

    for case in (CUT_PACKED, CUT_SEVERAL):
        yield f"backward-{case.name}", partial(check_cut, case)
        yield f"backward-{case.name}-forgets", partial(check_forgetting, case, "cpu")
    for every, case in KEPT:
        if case.tokens * case.B * case.HV <= 20_000:
            task = partial(make_task, case, BF16, "cpu", TaskOptions())
            yield f"backward-kept-{case.name}", partial(check_kept, every, task)
    for dtype, (K, V), strength in itertools.product((BF16, FP16), BACKWARD_SIZES, SOME_STRENGTHS):
        case = replace(BACKWARD[0], name="small-betas", K=K, V=V)
        task = partial(small_betas, case, dtype, "cpu", strength)
        yield (
            f"backward-small-betas-{K}-{V}-{strength}-{str(dtype).removeprefix('torch.')}",
            lambda task=task, dtype=dtype: check_task(task(), dtype, "cpu"),
        )
    everything = TaskOptions(l2norm=True, sigmoid=True, negative=True, gate=True, v_first=True)
    for dtype, (K, V) in itertools.product((BF16, FP16), BACKWARD_SIZES):
        size = f"{K}-{V}-{str(dtype).removeprefix('torch.')}"
        case = replace(BACKWARD[0], name="options", K=K, V=V)
        task = partial(make_task, case, dtype, "cpu", everything)
        yield (
            f"backward-options-{size}",
            lambda task=task, dtype=dtype: check_task(task(), dtype, "cpu"),
        )
    gated = fast_case("gates", "", T=260, H=1, HV=2)
    for dtype, (name, change) in itertools.product((BF16, FP16), STRENGTHS.items()):

        def check(change: Callable[[Tensor], Tensor] = change, dtype: torch.dtype = dtype) -> None:
            x = make_inputs(gated, dtype, "cpu")
            task = make_task(gated, dtype, "cpu", TaskOptions(), x.but(g=change(x.g)))
            check_task(task, dtype, "cpu")

        yield f"backward-gates-{name}-{str(dtype).removeprefix('torch.')}", check


def check_kept(every: int, task: Callable[[], Task]) -> None:
    """The forward leaves a state after each `every` tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "best_checkpoint_interval", lambda *sizes: every)
        check_task(task(), BF16, "cpu")


def walk_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Those of wide keys: blocks of two states on few multiprocessors, of one on many."""
    for case, dtype in itertools.product(WALKS, (BF16, FP16)):
        name = f"walks-{case.name}-{str(dtype).removeprefix('torch.')}"
        yield name, partial(check_walks, case, dtype, "cpu", v_first=dtype == FP16)


# A part in one segment and in several, with a chunk that ends early; a middle one; segments that
# forget; every option.
PARTS = [
    ShardCase("one", "", (150,), 2),
    ShardCase("several", "", (1500,), 3, lasting=True),
    ShardCase("forgets", "", (3100,), 2, options=NORM),
    ShardCase("options", "", (900, 70), 2, options=GATE | NORM | SIGMOID, v_first=True),
]


def part_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Ranks of a split call, one after another."""
    sizes = {"dtype": BF16, "backend": "cuda", "K": 128, "V": 128, "chunk_size": 64}

    def check(case: ShardCase) -> None:
        with pytest.MonkeyPatch.context() as patch:
            check_stages(case, "cpu", patch)

    for case in PARTS:
        yield f"parts-{case.name}", partial(check, replace(case, **sizes))


def random_cases(first: int, count: int, small: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    for number in range(first, first + count):

        def check(number: int = number) -> None:
            call, _ = random_call(number, "cpu", small=small)
            check_parity(call, ("cuda",), on="cpu")

        yield f"random-{number}", check
        if number % 4 == 0:
            yield f"random-prefill-{number}", partial(random_prefill, number, small)
            yield f"random-backward-{number}", partial(random_backward, number, small)


def random_prefill(number: int, small: bool) -> None:
    rng = random.Random(number)
    case = random_case(number, small, random_variant(number, small))
    call = make_prefill(
        case,
        rng.choice((BF16, FP16)),
        "cpu",
        rng.choice((FP32, BF16, FP16)),
        v_first=rng.random() < 0.5,
        skip=rng.choice(("negative", "non_positive")),
    )
    check_prefill(call, rng.choice((0, 64, 128)))


def random_backward(number: int, small: bool) -> None:
    task, dtype = random_task(number, "cpu", longest=130 if small else 700)
    check_task(task, dtype, "cpu")


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
        *walk_cases(),
        *part_cases(),
        *random_cases(options.first, options.random, not options.large),
    ]
    failed = 0
    for name, check in cases:
        if not re.search(options.select, name):
            continue
        invariant = name.startswith("random") and int(name.rpartition("-")[2]) % 8 >= 4
        os.environ["GDN_BATCH_INVARIANT"] = str(int(invariant))
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
