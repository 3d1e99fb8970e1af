"""The arguments of the CUDA library's backward, and random calls."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from backward_cases import NAMES, STRENGTHS, Task, TaskOptions, by_op, make_task, run_op
from fast_cases import fast_case
from helpers import BF16, FP16, Case, make_inputs, same_bits
from parity_calls import COUNTS, random_lengths
from torch import Tensor

from gdn_triton.fast import arguments

ARGUMENTS = arguments.ARGUMENTS["chunk_backward"]
WRITTEN = ("dq", "dk", "dv", "dg", "dbeta", "dh0", "gate_sums")

SMALL = Case("small", "", T=70, B=2, H=1, HV=2, K=128, V=128, chunk_size=64, spare=8)

# Calls whose forwards leave states, each with the tokens from one to the next.
KEPT = [
    (128, fast_case("padded", "the last segment in part", T=1000, B=2)),
    (64, fast_case("chunks", "a segment a chunk", T=200, B=3, HV=4)),
    (256, fast_case("multiples", "states that are final too", lengths=(256, 512, 64, 768))),
    (128, fast_case("uneven", "most sequences without a state", orphans=70,
                    lengths=(2100, 1, 0, 300, 1024, 127, 128, 129))),
    (192, fast_case("dealt", "more tiles than multiprocessors", H=8, HV=32,
                    lengths=(1500, 64, 700, 0, 400, 90, 2000))),
    (128, fast_case("three", "without clusters", T=700, B=2, HV=6)),
    # By the model of times both walks go in segments.
    (256, fast_case("cut", "both walks in segments", T=2560, H=1, HV=2)),
    (256, fast_case("cut-two", "the last segment in part", T=2500, B=2, H=1, HV=1)),
    (256, fast_case("cut-packed", "and rows of none", lengths=(2500,), orphans=80, H=1, HV=4)),
    (256, fast_case("cut-several", "and others that are not cut", H=1, HV=2, told=True,
                    lengths=(300, 4100, 0, 64, 900), orphans=80)),
]  # fmt: skip


class Noted:
    """Replaces the operators: notes a backward's arguments, and fills its outputs with distinct
    numbers. A forward whose gradients are wanted leaves states if `checkpoint_interval` is not 0.
    """

    def __init__(self) -> None:
        self.checkpoint_interval = 0
        self.calls: list[dict[str, Any]] = []
        self.left: list[Tensor | None] = []  # of each forward
        self.invariant_forwards: list[bool] = []

    def named(self, name: str) -> Callable[..., None]:
        return self.backward if name == "chunk_backward" else self.forward

    def forward(self, *given: Any) -> None:
        passed = dict(zip(arguments.ARGUMENTS["chunk_forward"], given, strict=True))
        states, interval = passed["states"], passed["checkpoint_interval"]
        assert interval == (0 if states is None else self.checkpoint_interval)
        self.invariant_forwards.append(passed["batch_invariant"])
        self.left.append(states)
        for y in (passed["o"], passed["final_state"], states):
            if y is not None:
                y.zero_()

    def backward(self, *given: Any) -> None:
        passed = dict(zip(ARGUMENTS, given, strict=True))
        self.calls.append(passed)
        for number, name in enumerate(WRITTEN):
            if passed[name] is not None:
                passed[name].fill_(number + 1)


def small_betas(case: Case, dtype: torch.dtype, device: str, strength: str) -> Task:
    """A call with betas among others that are 0, and that are so small that a row of dv would be 0
    or lose its precision where that of dx has it."""
    x = make_inputs(case, dtype, device)
    beta = x.beta.clone()
    for place, value in enumerate((0.0, 1e-38, -1e-30, 0.0, 1e-19, 8e-19, 1e-18)):
        beta[:, place::11] = value
    x = x.but(g=STRENGTHS[strength](x.g), beta=beta)
    return make_task(case, dtype, device, TaskOptions(), x)


def poison(word: float = torch.nan) -> None:
    """Fills all fresh memory of the GPU with `word`: an integer, or NaN as a float."""
    dtype = torch.int32 if isinstance(word, int) else torch.float32
    torch.full((1 << 28,), word, dtype=dtype, device="cuda")


def check_repeats(task: Task, rounds: int = 1) -> None:
    """The gradients have the same bits again, whatever fresh memory holds; 1 and 2 are the words
    that kernels use as signals."""
    expected = by_op(task)
    for word in (torch.nan, 0, 1, 2) * rounds:
        poison(word)
        for name, x in by_op(task).items():
            assert same_bits(x, expected[name]), name


def check_nan_stays(task: Task) -> None:
    """NaN in one packed sequence is in no gradient of another one."""
    case, expected = task.case, by_op(task)
    offsets = case.offsets()
    n = 3
    assert all(end % 64 for end in offsets[n : n + 2])  # neither end is that of 64 rows
    for name in NAMES[:5]:
        x = task.leaves[name].clone()
        x[:, offsets[n] : offsets[n + 1]] = torch.nan
        task.leaves[name] = x
    task.do[:, offsets[n] : offsets[n + 1]] = torch.nan
    others = [m for m in range(case.N) if m != n]
    for name, x in by_op(task).items():
        if name == "initial_state":
            assert same_bits(x[others], expected[name][others])
            continue
        for m in others:
            first, end = offsets[m : m + 2]
            assert same_bits(x[:, first:end], expected[name][:, first:end]), (name, m)


def check_replays(task: Task, lengths: tuple[int, ...]) -> None:
    """A captured call waits for no device, and the same graph serves other lengths."""
    assert task.cu_seqlens is not None
    by_op(task)
    leaves = task.copies()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = task.backward(leaves, *run_op(task, leaves))
    for offsets in (task.case.offsets(), [0, *itertools.accumulate(lengths)]):
        task.cu_seqlens.copy_(torch.tensor(offsets))
        graph.replay()
        alone = replace(task, cu_seqlens=task.cu_seqlens.clone())
        for name, x in by_op(alone).items():
            assert same_bits(x, found[name]), name


class Variant(NamedTuple):
    """What the kernels of a random task are compiled for. sequences: their number. rows: the number
    of rows of q, which the stride of beta's heads equals, so that kernels are compiled for it; or
    None, where the lengths decide the number of rows, and beta is contiguous."""

    sizes: dict[str, int]
    sequences: int
    rows: int | None
    dtype: torch.dtype
    options: TaskOptions


def random_variant(number: int) -> Variant:
    rng = random.Random(f"variant {number}")

    def coin() -> bool:
        return rng.random() < 0.5

    H = rng.choice((1, 2))
    sizes = {"H": H, "HV": H * rng.choice((1, 2, 3, 4))}
    if coin():
        sizes |= {"K": rng.randrange(8, 136, 8), "V": rng.randrange(8, 328, 8)}
    sigmoid, gate = coin(), coin()
    return Variant(
        sizes=sizes,
        sequences=rng.choice(COUNTS),
        rows=rng.choice((None, None, None, 200, 1037)),
        dtype=rng.choice((BF16, FP16)),
        options=TaskOptions(
            l2norm=coin(),
            sigmoid=sigmoid,
            negative=sigmoid and coin(),
            gate=gate,
            dt_bias=coin(),
            state=coin(),
            v_first=coin(),
            dht=coin(),
            scale=rng.choice((None, -0.3)),
        ),
    )


def random_task(
    number: int, device: str, *, longest: int, alike: int = 1
) -> tuple[Task, torch.dtype]:
    """The random call with that number, of any sizes, options and gates, and the dtype of its q, k
    and v. longest: tokens of a sequence. `alike` consecutive numbers have the same variant."""
    rng, variant = random.Random(number), random_variant(number // alike)
    lengths = random_lengths(rng, longest, variant.sequences)
    orphans = rng.choice((0, 1, 64))
    if variant.rows is not None:
        ends = [min(end, variant.rows) for end in itertools.accumulate(lengths, initial=0)]
        lengths = tuple(b - a for a, b in itertools.pairwise(ends))
        orphans = variant.rows - ends[-1]
    case = fast_case("random", "", lengths=lengths, orphans=orphans, **variant.sizes)
    task = make_task(case, variant.dtype, device, variant.options, seed=number)
    if variant.rows is None:
        task.leaves["beta"] = task.leaves["beta"].contiguous()
    if not variant.options.gate:
        change = STRENGTHS[rng.choice(list(STRENGTHS))]
        task.leaves["g"] = change(task.leaves["g"])
    return task, variant.dtype
