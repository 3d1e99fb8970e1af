"""Calls split over ranks, against the same call on one: processes on the CPU with gloo, in float64
with the reference and in Triton's interpreter; with NCCL where there are two GPUs.

All cases of a kind run in one start of the processes, as every start costs seconds of imports. A
process reports what is wrong; each case is a test here.
"""

import dataclasses
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import BF16, FP16, FP32, FP64, same_bits
from poison import ALLOCATING, poisoned
from ranks import run_ranks
from runs import made_once
from shard_cases import (
    GATE,
    NORM,
    SIGMOID,
    Case,
    assert_near_whole,
    expect_shard,
    leaves,
    like_fla,
    make_call,
    run_whole,
)
from torch import Tensor

from gdn_triton import chunk_gated_delta_rule, fast
from gdn_triton._ranks.layout import cut_out
from gdn_triton.distributed import ContextParallel, build_cp_context, conv_halo

REFERENCE = [
    Case("one", "one sequence, even shards", (64,)),
    Case("four", "two ranks in the middle, ragged chunks", (150,), world=4),
    Case("uneven", "shards of any length", (97,), world=4, shards=(1, 60, 17, 19)),
    Case("empty-ranks", "ranks without a token, first, between and last", (40,), 4, (0, 23, 0, 17)),
    Case("all-on-one", "three ranks without a token", (40, 9), 4, (0, 0, 49, 0)),
    Case("inside", "sequences that no rank shares", (20, 30), shards=(20, 30)),
    Case(
        "packed",
        "sequences within a rank, over two, over three, and empty ones at every place",
        (0, 7, 0, 30, 0, 90, 3, 0, 25, 0),
        world=4,
        shards=(37, 33, 40, 45),
    ),
    Case("orphans", "tokens of no sequence, on two ranks", (50, 11), 3, (40, 25, 12), orphans=16),
    Case("options", "every option in the kernel", (70, 20), 3, options=GATE | NORM | SIGMOID, H=2),
    Case("v-first", "states value first, groups", (70, 20), 3, H=2, HV=6, v_first=True),
    Case("no-state", "no initial state", (33, 44, 5), 3, with_state=False, options=GATE),
    Case("inner", "gradients of the states at the cuts", (70, 20), 3, (31, 30, 29), inner=True),
    Case("zigzag", "two slots a rank", (33, 60), 2, layout="zigzag"),
    Case("zigzag-uneven", "and empty ones", (80, 40), 3, (20, 0, 30, 31, 0, 39), layout="zigzag"),
    Case("fla", "a context of FLA's attributes", (30, 50, 40), 4, like_fla=True),
    Case("fla-zigzag", "the same, two slots a rank", (30, 51, 39), 4, None, "zigzag", True),
    Case("fp32", "products of fp32", (150,), world=4, dtype=FP32),
    Case("mixed", "states in float64, inputs not", (70, 20), 3, dtype=BF16, with_state=True),
]

# Little, for the interpreter is slow.
TRITON = [
    Case(
        "steps",
        "fp32, a rank in the middle, groups",
        (31, 4),
        3,
        (5, 16, 14),
        dtype=FP32,
        backend="triton",
        options=GATE,
    ),
    Case("fused", "fp16", (3, 20), dtype=FP16, backend="triton", HV=1, options=NORM),
    Case(
        "walks",
        "several walks on a rank, in the middle of a chain too",
        (50,),
        3,
        (16, 17, 17),
        dtype=FP16,
        backend="triton",
        HV=1,
        options=SIGMOID,
        v_first=True,
        pieces=True,
    ),
    Case(
        "walks-zigzag",
        "the same, two slots a rank, one without a token",
        (42, 8),
        2,
        (17, 0, 18, 15),
        "zigzag",
        dtype=FP32,
        backend="triton",
        HV=1,
        pieces=True,
        inner=True,
    ),
]

ON_GPUS = [
    Case(
        name,
        "real sizes",
        sequences,
        shards=shards,
        dtype=dtype,
        backend="triton",
        H=H,
        HV=HV,
        K=K,
        V=V,
        chunk_size=64,
        options=GATE | NORM | SIGMOID,
        layout=layout,
        v_first=v_first,
        gpu=True,
    )
    for name, sequences, shards, dtype, H, HV, K, V, layout, v_first in [
        ("nccl-bf16", (4096,), None, BF16, 2, 4, 128, 128, "contiguous", False),
        (
            "nccl-packed",
            (700, 3000, 1, 1500),
            (2500, 2701),
            BF16,
            4,
            8,
            64,
            128,
            "contiguous",
            True,
        ),
        ("nccl-fp16", (3000, 100), (3000, 100), FP16, 2, 2, 128, 64, "contiguous", False),
        ("nccl-fp32", (1500, 600), (1000, 1100), FP32, 2, 4, 128, 128, "contiguous", False),
        ("nccl-wide", (1200, 600), None, BF16, 1, 2, 256, 512, "contiguous", True),
        ("nccl-zigzag", (9000, 1000), None, BF16, 2, 4, 128, 128, "zigzag", False),
    ]
]
# The same by the CUDA library, where it is.
ON_GPUS += [
    dataclasses.replace(case, name=f"{case.name}-cuda", backend="cuda")
    for case in ON_GPUS
    if case.dtype != FP32
]


# ---------------------------------------------------------------------------------- in each process


def run_slots(
    case: Case, x: dict[str, Tensor], do: Tensor, dht: Tensor, dcuts: list[Tensor]
) -> dict[str, Tensor]:
    """The same, slot after slot with the states handed on, for gradients `dcuts` of those after
    each slot: as many rows as a slot has sequences."""
    x = leaves(x)
    lengths = slot_lengths(case)
    states = {n: x["initial_state"][n] for n in range(len(case.sequences))}
    outs, targets, starts = [], [], [0, *itertools.accumulate(lengths)]
    for slot, dcut in enumerate(dcuts):
        part = cut_out(case.offsets, lengths, slot)
        rows = slice(starts[slot], starts[slot + 1])
        local = {name: x[name][:, rows] for name in ("q", "k", "v", "g", "beta")}
        o, ht = chunk_gated_delta_rule(
            **local,
            initial_state=torch.stack(
                [x["initial_state"][0], *(states[n] for n in part.sequences)]
            )[1:],
            cu_seqlens=torch.tensor([0, *itertools.accumulate(part.lengths)], device=do.device),
            output_final_state=True,
            chunk_size=case.chunk_size,
            state_v_first=case.v_first,
        )
        states.update(zip(part.sequences, ht, strict=True))
        outs += [o, ht]
        # The gradients of final states proper are at their places already.
        targets += [do[:, rows].to(o.dtype), dcut.to(ht.dtype)]
    grads = torch.autograd.grad(outs, list(x.values()), targets)
    whole = torch.cat(outs[::2], 1), torch.stack([states[n] for n in sorted(states)])
    return {"o": whole[0], "ht": whole[1], **{f"d{n}": y for n, y in zip(x, grads, strict=True)}}


def slot_lengths(case: Case) -> list[int]:
    if case.shards is not None:
        return list(case.shards)
    slots = case.world * (2 if case.layout == "zigzag" else 1)
    return [len(part) for part in torch.arange(case.tokens).tensor_split(slots)]


def run_shard(
    case: Case, context: ContextParallel, x: dict[str, Tensor], do: Tensor, dht: Tensor
) -> dict[str, Tensor]:
    """This rank's part, and of the parameters the sum over ranks."""
    tokens = ("q", "k", "v", "g", "beta")
    rows = list(context.sequences)
    local = {name: context.shard(y) if name in tokens else y for name, y in x.items()}
    if case.with_state:
        local["initial_state"] = x["initial_state"][rows]
        # The state of a sequence that began on an earlier rank is not read.
        for i in context.intervals:
            if i.before:
                local["initial_state"][i.first] = torch.nan
    local = leaves(local)
    o, ht = chunk_gated_delta_rule(
        **local,
        cp_context=like_fla(context) if case.like_fla else context,
        output_final_state=True,
        chunk_size=case.chunk_size,
        state_v_first=case.v_first,
        **case.options,
    )
    grads = torch.autograd.grad(
        [o, ht], list(local.values()), [context.shard(do).to(o.dtype), dht.to(ht.dtype)]
    )
    found = {"o": o, "ht": ht, **{f"d{n}": y for n, y in zip(local, grads, strict=True)}}
    for name in ("dA_log", "ddt_bias"):
        if name in found:
            dist.all_reduce(found[name], group=context.group)
    return {name: y.detach() for name, y in found.items()}


def check_case(case: Case, group: Any, device: str) -> None:
    """Raises AssertionError only after the last word with the other ranks."""
    os.environ["GDN_BACKEND"] = case.backend
    cut_into_chunks(case.pieces)
    offsets = torch.tensor(case.offsets, device=device)
    context = build_cp_context(offsets, group, 4, lengths=case.shards, layout=case.layout)
    x, do, dht = make_call(case, device)
    lengths = slot_lengths(case)
    dcuts = []
    for slot in range(len(lengths)):
        part = cut_out(case.offsets, lengths, slot)
        dcut = dht[list(part.sequences)].clone()
        after = part.interval.after
        if after:
            dcut[part.interval.last] = dcut[part.interval.last].flip(-1) * int(case.inner)
        dcuts.append(dcut)
    mine = torch.cat([dcuts[i.slot] for i in context.intervals])
    got = run_shard(case, context, x, do, mine)
    again = run_shard(case, context, x, do, mine) if case.name == "walks" or case.gpu else got

    def whole(x: dict[str, Tensor]) -> dict[str, Tensor]:
        """By one rank for all of them."""
        found: list[Any] = [None]
        if dist.get_rank(group) == 0:
            y = run_slots(case, x, do, dht, dcuts) if case.inner else run_whole(case, x, do, dht)
            found = [{name: z.detach().cpu() for name, z in y.items()}]
        dist.broadcast_object_list(found, 0, group)
        return expect_shard(case, context, {name: z.to(device) for name, z in found[0].items()})

    narrow = exact = whole(x)
    if case.dtype != FP64:
        os.environ["GDN_BACKEND"] = "reference"
        exact = whole({name: y.double() for name, y in x.items()})
    for name, y in got.items():
        assert same_bits(y, again[name]), f"{name} differs between two runs"
        if name == "ht":
            # States at cuts are no result of the whole call; `inner` is about them.
            ends = [
                n for n in range(len(y)) if n not in {i.last for i in context.intervals if i.after}
            ]
            y, narrow[name], exact[name] = y[ends], narrow[name][ends], exact[name][ends]
        if case.dtype == FP64:
            error = (y - exact[name]).abs().max().item() if y.numel() else 0.0
            size = max(1.0, exact[name].abs().max().item()) if y.numel() else 1.0
            assert y.shape == exact[name].shape, f"{name}: {y.shape}, {exact[name].shape}"
            assert error <= 1e-12 * size, f"{name}: {error:.1e} of {size:.1e}"
        else:
            assert_near_whole(case, name, y, exact[name], narrow[name])


def check_halo(group: Any, device: str) -> None:
    """The convolution's halo, of shards shorter than it too, and its gradient."""
    wrong = []
    world = dist.get_world_size(group)
    for sequences, shards, layout in [
        ((40, 24), None, "contiguous"),
        ((40, 24), None, "zigzag"),
        ((30, 3, 31), (20, 1, 0, 2, 21, 20)[-world:], "contiguous"),
        ((3, 2, 1, 40), (1, 1, 1, 1, 1, 2, 0, 3)[: 2 * world], "zigzag"),
    ]:
        total = sum(sequences)
        if shards is not None:
            shards = (*shards[:-1], shards[-1] + total - sum(shards))
        offsets = [0, *itertools.accumulate(sequences)]
        cu_seqlens = torch.tensor(offsets, device=device)
        context = build_cp_context(cu_seqlens, group, lengths=shards, layout=layout)
        x = torch.randn(1, total, 5, generator=torch.Generator().manual_seed(3)).to(device)
        for width in (0, 1, 3):
            local = context.shard(x).clone().requires_grad_()
            halo = conv_halo(local, context, width + 1)
            weight = torch.randn(
                2, 64, width, 5, generator=torch.Generator().manual_seed(dist.get_rank(group))
            ).to(device)
            dhalo = weight[0, : len(halo)]
            (dx,) = torch.autograd.grad(halo, local, dhalo)
            # Every rank's halo, token by token.
            expected, expected_dx = torch.zeros_like(halo), torch.zeros_like(x)
            for rank in range(world):
                generator = torch.Generator().manual_seed(rank)
                dhalo = torch.randn(2, 64, width, 5, generator=generator).to(device)[0]
                other = rank == dist.get_rank(group)
                n = 0
                for slot in (rank, 2 * world - 1 - rank) if layout == "zigzag" else (rank,):
                    part = cut_out(offsets, context.lengths, slot)
                    start = sum(context.lengths[:slot])
                    for sequence in part.sequences:
                        bos = offsets[sequence]
                        if bos < start and part.sequences.index(sequence) == 0:
                            for place in range(width):
                                token = start - width + place
                                if token >= bos:
                                    expected_dx[0, token] += dhalo[n, place]
                                    if other:
                                        expected[n, place] = x[0, token]
                        n += 1
            if not torch.equal(halo, expected):
                wrong.append(f"halo {sequences} {shards} {layout} {width}")
            if not torch.equal(dx, context.shard(expected_dx)):
                wrong.append(f"gradient {sequences} {shards} {layout} {width}")
    assert not wrong, wrong


def work(rank: int, world: int, kind: str, out: str, kernels: bool) -> None:
    """One process: all cases of a kind, what is wrong with each into a file. kernels: on a CPU, in
    the interpreter too, which a process that sees no GPU would always choose."""
    on_gpu = kind == "nccl"
    if on_gpu:
        torch.cuda.set_device(rank)
    for owner, name in ALLOCATING:
        setattr(owner, name, poisoned(getattr(owner, name)))
    store = dist.FileStore(str(Path(out, "store")), world)
    dist.init_process_group(kind, store=store, rank=rank, world_size=world)
    groups = {n: dist.new_group(list(range(n))) for n in range(1, world + 1)}
    device = f"cuda:{rank}" if on_gpu else "cpu"
    checks: dict[str, tuple[int, Callable[[], None]]] = {}
    cases = ON_GPUS if on_gpu else [*REFERENCE, *(TRITON if kernels else [])]
    if not fast.is_available():
        cases = [case for case in cases if case.backend != "cuda"]
    for case in cases:
        group = groups[case.world]
        checks[case.name] = case.world, lambda c=case, g=group: check_case(c, g, device)
    checks["halo"] = world, lambda: check_halo(groups[world], device)
    report: dict[str, str] = {}
    for name, (ranks, check) in checks.items():
        if rank >= ranks:
            continue
        try:
            check()
        except AssertionError as error:
            report[name] = str(error)
    Path(out, f"{kind}-{rank}.json").write_text(json.dumps({"seen": list(checks), **report}))


def cut_into_chunks(on: bool) -> None:
    """Walks of one chunk, wherever a call could be cut."""
    if not interpreted():
        return
    from gdn_triton.chunk.triton import forward as chunk_fwd

    if not hasattr(cut_into_chunks, "before"):
        cut_into_chunks.before = chunk_fwd.choose_segments
    chunk_fwd.choose_segments = (lambda problem: 1) if on else cut_into_chunks.before


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


# -------------------------------------------------------------------------------- the tests of them


def start(kind: str, world: int, factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    def run(folder: Path) -> None:
        hidden = {} if kind == "nccl" else {"CUDA_VISIBLE_DEVICES": ""}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in hidden.items():
                patch.setenv(name, value)
            patch.delenv("GDN_BACKEND", raising=False)
            run_ranks(world, work, world, kind, str(folder), interpreted())

    folder = made_once(factory, kind, run)
    return [json.loads((folder / f"{kind}-{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return start("gloo", 4, tmp_path_factory)


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return start("nccl", 2, tmp_path_factory)


def verdict(reports: list[dict[str, Any]], name: str) -> None:
    assert all(name in report["seen"] for report in reports)
    wrong = {rank: report[name] for rank, report in enumerate(reports) if name in report}
    assert not wrong, wrong


@pytest.mark.parametrize("name", [*(case.name for case in REFERENCE), "halo"])
def test_reference_equals_one_rank(on_cpu: list[dict[str, Any]], name: str) -> None:
    verdict(on_cpu, name)


@pytest.mark.skipif(not interpreted(), reason="on a GPU the kernels are tested with NCCL")
@pytest.mark.parametrize("name", [case.name for case in TRITON])
def test_triton_equals_one_rank(on_cpu: list[dict[str, Any]], name: str) -> None:
    verdict(on_cpu, name)


@pytest.mark.two_gpus("NCCL between two ranks")
@pytest.mark.parametrize("name", [*(case.name for case in ON_GPUS), "halo"])
def test_nccl_equals_one_rank(on_gpus: list[dict[str, Any]], name: str) -> None:
    if name.endswith("-cuda") and (reason := fast.why_unavailable()) is not None:
        pytest.skip(reason)
    verdict(on_gpus, name)
