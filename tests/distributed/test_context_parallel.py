"""Calls split over ranks, against the same call on one: processes on the CPU with gloo, in float64
with the reference and in Triton's interpreter; with NCCL where there are two GPUs.

All cases of a kind run in one start of the processes, as every start costs seconds of imports. A
process reports what is wrong; each case is a test here.
"""

import itertools
import json
import math
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import _poisoned
from helpers import BF16, FP16, FP32, FP64, assert_within_budget, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch import Tensor

from gdn_triton import chunk_gated_delta_rule, explain
from gdn_triton.chunk.problem import Inputs, Problem
from gdn_triton.chunk.sharded import Exchange
from gdn_triton.distributed import ContextParallel, build_cp_context, conv_halo
from gdn_triton.distributed.context import shard_layout
from gdn_triton.distributed.layout import Interval, ShardLayout, any_crosses, cut_out

# ---------------------------------------------------------------------------------------- the cases

GATE = {"use_gate_in_kernel": True}
NORM = {"use_qk_l2norm_in_kernel": True}
SIGMOID = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}


@dataclass(frozen=True)
class Case:
    """One call. sequences: their lengths. shards: tokens of each slot; None: even. like_fla: by a
    context that has FLA's attributes only. inner: the states at the cuts get gradients too. pieces:
    cut every local sequence into walks of one chunk."""

    name: str
    why: str
    sequences: tuple[int, ...]
    world: int = 2
    shards: tuple[int, ...] | None = None
    layout: str = "contiguous"
    like_fla: bool = False
    dtype: torch.dtype = FP64
    backend: str = "reference"
    H: int = 1
    HV: int = 2
    K: int = 8
    V: int = 12
    chunk_size: int = 16
    options: dict[str, Any] = field(default_factory=dict)
    v_first: bool = False
    with_state: bool = True
    inner: bool = False
    pieces: bool = False
    orphans: int = 0
    gpu: bool = False

    @property
    def offsets(self) -> list[int]:
        return [0, *itertools.accumulate(self.sequences)]

    @property
    def tokens(self) -> int:
        return sum(self.sequences) + self.orphans


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


# ---------------------------------------------------------------------------------- in each process


def make_call(case: Case, device: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """All tensors of the whole call, and the gradients of o and of the final states."""
    generator = torch.Generator().manual_seed(sum(map(ord, case.name)))
    T, H, HV, K, V, N = case.tokens, case.H, case.HV, case.K, case.V, len(case.sequences)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=FP64)

    raw_gate = "use_gate_in_kernel" in case.options
    k = normal(1, T, H, K)
    beta = normal(1, T, HV)
    x = {
        "q": normal(1, T, H, K),
        "k": k if case.options.keys() & NORM else torch.nn.functional.normalize(k, dim=-1),
        "v": normal(1, T, HV, V),
        "g": normal(1, T, HV) if raw_gate else -(10 ** (-3 * normal(1, T, HV).sigmoid())),
        "beta": beta if case.options.keys() & SIGMOID else beta.sigmoid(),
    }
    x = {name: y.to(device, case.dtype) for name, y in x.items()}
    state = (N, HV, V, K) if case.v_first else (N, HV, K, V)
    wide = FP64 if case.dtype == FP64 or case.name == "mixed" else FP32
    if case.with_state:
        x["initial_state"] = normal(*state).to(device, wide)
    if raw_gate:
        x["A_log"] = (normal(HV) / 4).to(device, wide)
        x["dt_bias"] = normal(HV).to(device, wide)
    out = FP64 if case.dtype == FP64 else FP32
    return x, normal(1, T, HV, V).to(device, case.dtype), normal(*state).to(device, out)


def like_fla(context: ContextParallel) -> SimpleNamespace:
    """What FLA 0.6.0 would have made of the same arguments, of even shards without empty
    sequences: from one rank's tokens, counted one by one."""
    kernel = context.conv1d_kernel_size
    both = {
        "group": context.group,
        "cu_seqlens": context.cu_seqlens,
        "cu_seqlens_cpu": context.cu_seqlens_cpu,
        "conv1d_kernel_size": kernel,
        "layout": context.layout,
    }
    slots = context.intervals
    numbers = [(len(i.before), len(i.after), not i.before, not i.after, i.history) for i in slots]
    names = ("pre_num_ranks", "post_num_ranks", "is_first", "is_last", "pre_num_conv_tokens")
    columns = dict(zip(names, zip(*numbers, strict=True), strict=True))
    if context.layout == "zigzag":
        by_part = {f"{name}_by_part": column for name, column in columns.items()}
        first = slots[0].last - slots[0].first + 1
        part = {"part_len": context.lengths[0], "front_num_seqs": first}
        return SimpleNamespace(**both, **by_part, **part)
    return SimpleNamespace(**both, **{name: column[0] for name, column in columns.items()})


def leaves(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: y.detach().clone().requires_grad_() for name, y in x.items()}


def run_whole(case: Case, x: dict[str, Tensor], do: Tensor, dht: Tensor) -> dict[str, Tensor]:
    """The call on one rank: its results and gradients by name."""
    x = leaves(x)
    offsets = torch.tensor(case.offsets, device=do.device)
    o, ht = chunk_gated_delta_rule(
        **x,
        cu_seqlens=offsets,
        output_final_state=True,
        chunk_size=case.chunk_size,
        state_v_first=case.v_first,
        **case.options,
    )
    grads = torch.autograd.grad([o, ht], list(x.values()), [do.to(o.dtype), dht.to(ht.dtype)])
    return {"o": o, "ht": ht, **{f"d{name}": y for name, y in zip(x, grads, strict=True)}}


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
        # Of a sequence that began elsewhere: not read.
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


def expect_shard(
    case: Case, context: ContextParallel, whole: dict[str, Tensor]
) -> dict[str, Tensor]:
    """This rank's part of the results of the whole call."""
    rows = list(context.sequences)
    part = {}
    for name, y in whole.items():
        if name in ("ht", "dinitial_state"):
            part[name] = y[rows].clone()
        else:
            part[name] = y if name in ("dA_log", "ddt_bias") else context.shard(y)
    for i in context.intervals:
        if i.before and "dinitial_state" in part:
            part["dinitial_state"][i.first] = 0
    return part


def assert_near_whole(case: Case, name: str, y: Tensor, exact: Tensor, narrow: Tensor) -> None:
    """y as near to `exact` as the whole call on one rank, `narrow`."""
    unit = torch.finfo(case.dtype).eps / 2
    if name in ("dA_log", "ddt_bias"):
        # A few sums over all tokens, of either sign: as many roundings in a row.
        unit *= case.tokens**0.5
    assert_within_budget(name, y, exact.double(), narrow, dtype=narrow.dtype, unit=unit)


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


def work(rank: int, world: int, kind: str, port: int, out: str, kernels: bool) -> None:
    """One process: all cases of a kind, what is wrong with each into a file. kernels: on a CPU, in
    the interpreter too, which a process that sees no GPU would always choose."""
    on_gpu = kind == "nccl"
    if on_gpu:
        torch.cuda.set_device(rank)
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        setattr(owner, name, _poisoned(getattr(owner, name)))
    dist.init_process_group(
        kind, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    groups = {n: dist.new_group(list(range(n))) for n in range(1, world + 1)}
    device = f"cuda:{rank}" if on_gpu else "cpu"
    checks: dict[str, tuple[int, Callable[[], None]]] = {}
    cases = ON_GPUS if on_gpu else [*REFERENCE, *(TRITON if kernels else [])]
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


def start(kind: str, world: int, folder: Path) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    hidden = {} if kind == "nccl" else {"CUDA_VISIBLE_DEVICES": ""}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in hidden.items():
            patch.setenv(name, value)
        patch.delenv("GDN_BACKEND", raising=False)
        run_ranks(world, work, world, kind, port, str(folder), interpreted())
    return [json.loads((folder / f"{kind}-{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return start("gloo", 4, tmp_path_factory.mktemp("gloo"))


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return start("nccl", 2, tmp_path_factory.mktemp("nccl"))


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
    verdict(on_gpus, name)


# ------------------------------------------------------------------------- one rank without others

ALONE = [
    Case("fp32", "one walk", (50,), dtype=FP32),
    Case("fp16", "one walk, fused", (50,), dtype=FP16),
    Case("walks", "the rank composes maps", (50,), dtype=FP16, pieces=True),
    Case("options", "all in the kernel", (20,), dtype=FP32, options=GATE | NORM | SIGMOID),
    *(
        Case(
            name,
            "real sizes",
            (T,),
            dtype=dtype,
            H=H,
            HV=HV,
            K=K,
            V=V,
            chunk_size=64,
            options=GATE | NORM | SIGMOID if name == "real-options" else {},
            pieces=pieces,
            gpu=True,
        )
        for name, T, dtype, H, HV, K, V, pieces in [
            # As many chunks as a call is cut at: several walks, of several chunks, by choice.
            ("real-bf16", 2085, BF16, 2, 4, 128, 128, False),
            ("real-fp32", 1100, FP32, 2, 4, 128, 128, False),
            ("real-fp32-walks", 1100, FP32, 2, 4, 128, 128, True),
            ("real-64", 1000, BF16, 4, 8, 64, 128, False),
            ("real-fp16", 1100, FP16, 2, 4, 128, 64, False),
            ("real-wide", 900, BF16, 1, 2, 256, 512, False),
            ("real-options", 1100, BF16, 2, 4, 128, 128, False),
        ]
    ),
]


def alone(cases: list[Case]) -> list[Any]:
    """As pytest parameters."""
    mark = pytest.mark.gpu("real sizes")
    return [pytest.param(case, id=case.name, marks=[mark] if case.gpu else []) for case in cases]


def make_lasting_call(case: Case, device: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """As `make_call`, but the state that comes in is still there after the last token, so an error
    in the map it takes is no smaller than one in what the tokens add."""
    x, do, dht = make_call(case, device)
    if case.options:
        x["dt_bias"] -= math.log(case.tokens)
        x["beta"] -= math.log(case.tokens / case.K)
    else:
        x["g"] *= 10 / case.tokens
        x["beta"] *= case.K / case.tokens
    return x, do, dht


def run_alone(
    case: Case, x: dict[str, Tensor], do: Tensor, dht: Tensor, *, begun: bool, unfinished: bool
) -> dict[str, Tensor]:
    """The call as the part of one rank, with the others' part played here: they send the initial
    state where the sequence has `begun`, and dht where it is `unfinished`. Beside the results and
    gradients, what the maps that this rank sends make of those: the final state (`sent`) and the
    gradient of the initial state (`dsent`)."""
    from gdn_triton.chunk.triton import sharded as shard_triton

    T, state = case.tokens, x["initial_state"]
    before, after = (0,) * begun, (2,) * unfinished
    interval = Interval(1, 0, 0, before, after, T * begun)
    offsets = torch.tensor([0, T], dtype=torch.int32, device=do.device)
    layout = ShardLayout(None, offsets, (0, T), (interval,), (T, T, T), (0, 1, 2), True)
    # Where it comes from another rank, that in the arguments is not read.
    mine = x | {"initial_state": torch.full_like(state, torch.nan)} if begun else x
    inputs = Inputs(**{name: mine.get(name) for name in Inputs._fields})
    problem = Problem(
        B=1,
        T=T,
        H=case.H,
        HV=case.HV,
        K=case.K,
        V=case.V,
        N=1,
        q_dtype=case.dtype,
        k_dtype=case.dtype,
        v_dtype=case.dtype,
        device=do.device,
        scale=case.K**-0.5,
        chunk_size=case.chunk_size,
        is_varlen=True,
        has_initial_state=True,
        output_final_state=True,
        state_v_first=False,
        use_qk_l2norm=bool(case.options.keys() & NORM),
        use_beta_sigmoid=bool(case.options.keys() & SIGMOID),
        allow_neg_eigval=bool(case.options.keys() & SIGMOID),
        use_gate=bool(case.options.keys() & GATE),
        needs_grad=True,
    )
    sent: list[tuple[Tensor, Tensor]] = []

    def exchange(coming: Tensor | None) -> Exchange:
        def call(b: Tensor, M: Tensor) -> list[Tensor | None]:
            sent.append((b.double(), M.double()))
            return [coming]

        return call

    o, ht, kept = shard_triton.forward(
        problem, layout, inputs, exchange(state[0] if begun else None)
    )
    grads = shard_triton.gradients(
        problem,
        layout,
        inputs,
        kept,
        do,
        torch.zeros_like(dht) if unfinished else dht,
        {name: y is not None for name, y in inputs._asdict().items()},
        exchange(dht[0] if unfinished else None),
    )
    found = {f"d{n}": y for n, y in zip(Inputs._fields, grads, strict=True) if y is not None}
    (b, M), (c, M_back) = sent
    if unfinished:
        found["sent"] = (b + M @ state.double()).to(ht.dtype)
    if begun:
        found["dsent"] = (c + M_back.mT @ dht.double()).to(dht.dtype)
        assert not found.pop("dinitial_state").any()
    return {"o": o, "ht": ht, **found}


def check_alone(
    case: Case, device: str, monkeypatch: pytest.MonkeyPatch, *, begun: bool, unfinished: bool
) -> None:
    """One rank's part against the same tokens in one call on one device."""
    from gdn_triton.chunk.triton import forward as chunk_fwd

    x, do, dht = make_lasting_call(case, device)
    monkeypatch.setenv("GDN_BACKEND", "triton")
    narrow = run_whole(case, x, do, dht)
    monkeypatch.setenv("GDN_BACKEND", "reference")
    exact = run_whole(case, {name: y.double() for name, y in x.items()}, do, dht)
    for whole in (narrow, exact):
        whole |= {"sent": whole["ht"], "dsent": whole["dinitial_state"]}
        whole |= {name: y.detach() for name, y in whole.items()}
    if case.pieces:
        monkeypatch.setattr(chunk_fwd, "choose_segments", lambda problem: 1)
    got = run_alone(case, x, do, dht, begun=begun, unfinished=unfinished)
    again = got
    if case.gpu or case.name == "fp16":
        again = run_alone(case, x, do, dht, begun=begun, unfinished=unfinished)
    for name, y in got.items():
        assert same_bits(y, again[name]), f"{name} differs between two runs"
        assert_near_whole(case, name, y, exact[name], narrow[name])


@pytest.mark.parametrize("case", alone(ALONE))
def test_middle_rank_alone(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_alone(case, device, monkeypatch, begun=True, unfinished=True)


@pytest.mark.parametrize("begun", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("case", alone([case for case in ALONE if case.pieces or case.gpu]))
def test_outer_rank_alone(
    case: Case, begun: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_alone(case, device, monkeypatch, begun=begun, unfinished=not begun)


# ------------------------------------------------------------------------------- which tokens whose


@given(st.lists(st.integers(0, 5), max_size=6), st.lists(st.integers(0, 6), min_size=1, max_size=5))
@settings(deadline=None)
def test_cut_out_token_by_token(sequences: list[int], lengths: list[int]) -> None:
    offsets = [0, *itertools.accumulate(sequences)]
    if sum(lengths) < offsets[-1]:
        lengths = [*lengths[:-1], lengths[-1] + offsets[-1] - sum(lengths)]
    owner = [n for n, length in enumerate(sequences) for _ in range(length)]
    slots = [slot for slot, length in enumerate(lengths) for _ in range(length)]
    held = [
        {slot for token, slot in enumerate(slots) if token < len(owner) and owner[token] == n}
        for n in range(len(sequences))
    ]
    assert any_crosses(offsets, lengths) == any(len(h) > 1 for h in held)
    seen = []
    for slot in range(len(lengths)):
        part = cut_out(offsets, lengths, slot)
        tokens = [t for t, s in enumerate(slots) if s == slot and t < len(owner)]
        counts = [sum(owner[t] == n for t in tokens) for n in part.sequences]
        assert list(part.lengths) == counts
        assert sum(counts) == len(tokens)
        assert list(part.sequences) == sorted(part.sequences)
        seen += [n for n in part.sequences if sequences[n] == 0]
        interval = part.interval
        if not tokens:
            assert not interval.before and not interval.after and interval.history == 0
            continue
        first, last = owner[tokens[0]], owner[tokens[-1]]
        assert interval.before == tuple(sorted(s for s in held[first] if s < slot))
        assert interval.after == tuple(sorted(s for s in held[last] if s > slot))
        assert interval.history == sum(o == first for o in owner[: tokens[0]])
        if interval.before:
            assert part.sequences[interval.first] == first
        if interval.after:
            assert part.sequences[interval.last] == last
    # Every sequence without tokens lies on one rank.
    assert sorted(seen) == [n for n, length in enumerate(sequences) if length == 0]


# --------------------------------------------------------------------------------- on a single rank


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def small_call(T: int = 20) -> dict[str, Tensor]:
    q, k, v = torch.randn(3, 1, T, 1, 8, dtype=FP64)
    return {"q": q, "k": k, "v": v, "g": -torch.rand(1, T, 1), "beta": torch.rand(1, T, 1)}


def test_context_of_one_rank(group: Any) -> None:
    context = build_cp_context(torch.tensor([0, 5, 5, 20]), group, conv1d_kernel_size=4)
    assert context.cu_seqlens.tolist() == [0, 5, 5, 20] and context.num_seqs == 3
    assert context.cu_seqlens.dtype == torch.int32
    assert context.is_first_rank and context.is_last_rank and context.is_cp_enabled
    assert context.pre_num_ranks == context.post_num_ranks == context.pre_num_conv_tokens == 0
    assert context.spans == ((0, 20),) and not context.crosses
    assert conv_halo(torch.randn(1, 20, 3), context).shape == (3, 3, 3)
    x = small_call()
    whole = chunk_gated_delta_rule(**x, cu_seqlens=context.cu_seqlens, output_final_state=True)
    for either in (context, like_fla(context)):
        # The context's offsets are used, whatever else is given.
        offsets = torch.tensor([0, 20])
        found = chunk_gated_delta_rule(
            **x, cu_seqlens=offsets, cp_context=either, output_final_state=True
        )
        assert all(map(torch.equal, found, whole))
        assert explain(**x, cp_context=either).chosen == "reference"
    assert chunk_gated_delta_rule(**x, cp_context=context)[1] is None
    assert "cp_context" in explain(**x, cp_context=context).reasons["cuda"]


def test_zigzag_has_no_single_interval(group: Any) -> None:
    context = build_cp_context(torch.tensor([0, 20]), group, layout="zigzag")
    assert context.lengths == (10, 10) and context.cu_seqlens.tolist() == [0, 10, 20]
    with pytest.raises(AttributeError, match="two slots"):
        _ = context.pre_num_ranks


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (TypeError, "cu_seqlens must be a torch.Tensor, got list", {"cu_seqlens": [0, 4]}),
        (
            ValueError,
            r"cu_seqlens must have shape \[N \+ 1\]",
            {"cu_seqlens": torch.zeros(1, 2).int()},
        ),
        (ValueError, "cu_seqlens must be int32 or int64", {"cu_seqlens": torch.tensor([0.0, 4.0])}),
        (ValueError, "cu_seqlens must start at 0", {"cu_seqlens": torch.tensor([1, 4])}),
        (ValueError, "cu_seqlens must not decrease", {"cu_seqlens": torch.tensor([0, 4, 2])}),
        (ValueError, r"cu_seqlens must end at or before T=3", {"lengths": [3]}),
        (ValueError, "cu_seqlens_cpu must have the shape", {"cu_seqlens_cpu": torch.tensor([0])}),
        (ValueError, "lengths must be 1 ints >= 0", {"lengths": [2, 2]}),
        (ValueError, "lengths must be 1 ints >= 0", {"lengths": [-4]}),
        (ValueError, "layout must be one of", {"layout": "ring"}),
        (ValueError, "group must be a torch.distributed.ProcessGroup, got None", {"group": None}),
        (TypeError, "group must be a torch.distributed.ProcessGroup, got str", {"group": "cp"}),
    ],
)
def test_bad_arguments_of_the_builder(
    group: Any, error: type[Exception], message: str, changes: dict[str, Any]
) -> None:
    arguments = {"cu_seqlens": torch.tensor([0, 4]), "group": group} | changes
    with pytest.raises(error, match=message):
        build_cp_context(**arguments)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, "cp_context.group must be a torch.distributed.ProcessGroup", {"group": None}),
        (ValueError, r"cp_context.cu_seqlens must be a tensor \[N \+ 1\]", {"cu_seqlens": None}),
        (ValueError, "cp_context.layout must be one of", {"layout": "ring"}),
        (ValueError, "cp_context.pre_num_ranks must be an int from 0 to 0", {"pre_num_ranks": 1}),
        (ValueError, "cp_context.post_num_ranks must be an int", {"post_num_ranks": None}),
        (
            ValueError,
            "cp_context.front_num_seqs must be an int",
            {"layout": "zigzag", "front_num_seqs": 1},
        ),
        (
            NotImplementedError,
            "cp_context.pre_num_ranks_dev",
            {"pre_num_ranks_dev": torch.zeros(1)},
        ),
    ],
)
def test_bad_contexts(
    group: Any, error: type[Exception], message: str, changes: dict[str, Any]
) -> None:
    context = like_fla(build_cp_context(torch.tensor([0, 20]), group))
    vars(context).update(changes)
    with pytest.raises(error, match=message):
        shard_layout(context)
    with pytest.raises(error, match=message):
        chunk_gated_delta_rule(**small_call(), cp_context=context)


def test_bad_calls(group: Any) -> None:
    context = build_cp_context(torch.tensor([0, 20]), group)
    with pytest.raises(TypeError, match="str has no group"):
        chunk_gated_delta_rule(**small_call(), cp_context="ring")
    with pytest.raises(ValueError, match=r"q must have the T=20 tokens of this rank's part"):
        chunk_gated_delta_rule(**small_call(19), cp_context=context)
    with pytest.raises(ValueError, match=r"initial_state must have shape \[N=1"):
        chunk_gated_delta_rule(
            **small_call(), cp_context=context, initial_state=torch.zeros(2, 1, 8, 8)
        )
    for wrong, message in ((torch.zeros(1, 19, 3), "T=20"), (torch.zeros(20, 3), "shape")):
        with pytest.raises(ValueError, match=message):
            conv_halo(wrong, context, 4)
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor"):
        conv_halo(None, context, 4)  # type: ignore[arg-type]
    for kernel_size in (None, 0, 4.0):
        with pytest.raises(ValueError, match="kernel_size must be an int >= 1"):
            conv_halo(torch.zeros(1, 20, 3), context, kernel_size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x must have all 20 tokens in dimension 0"):
        context.shard(torch.zeros(3, 20), 0)


def test_cuda_by_name_refuses(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "cuda")
    context = build_cp_context(torch.tensor([0, 20]), group)
    with pytest.raises(RuntimeError, match="does not serve cp_context"):
        chunk_gated_delta_rule(**small_call(), cp_context=context)


def test_differentiable_once(group: Any) -> None:
    context = build_cp_context(torch.tensor([0, 20]), group)
    x = leaves(small_call())
    o, _ = chunk_gated_delta_rule(**x, cp_context=context)
    (dv,) = torch.autograd.grad(o.square().sum(), x["v"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dv.sum().backward()


def test_final_state_of_q_alone_has_no_gradient(group: Any) -> None:
    context = build_cp_context(torch.tensor([0, 20]), group)
    x = small_call()
    x["q"].requires_grad_()
    o, ht = chunk_gated_delta_rule(**x, cp_context=context, output_final_state=True)
    assert o.requires_grad and not ht.requires_grad


def test_compiled_with_a_break(group: Any) -> None:
    context = build_cp_context(torch.tensor([0, 20]), group)
    x = small_call()

    def call(v: Tensor) -> Tensor:
        return chunk_gated_delta_rule(**x | {"v": v * 2}, cp_context=context)[0] + 1

    torch.compiler.reset()
    assert torch.equal(torch.compile(call, backend="eager")(x["v"]), call(x["v"]))
    torch.compiler.reset()
    with pytest.raises(Exception, match="talks to other ranks"):
        torch.compile(call, backend="eager", fullgraph=True)(x["v"])
    torch.compiler.reset()
