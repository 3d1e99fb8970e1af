"""The four stages of a rank, by ranks that run one after another in one process, with what they
exchange put together here: against the same call on one device."""

from typing import Any

import pytest
import torch
from helpers import BF16, FP16, FP32, FP64, same_bits
from shard_cases import (
    GATE,
    NORM,
    SIGMOID,
    Case,
    assert_near_whole,
    expect_shard,
    make_call,
    run_whole,
)
from torch import Tensor

from gdn_triton import chunk_gated_delta_rule, fast
from gdn_triton.distributed import (
    ContextParallel,
    backward_apply,
    backward_prepare,
    build_cp_context,
    forward_apply,
    forward_prepare,
)

TOKENS = ("q", "k", "v", "g", "beta")

CASES = [
    Case("reference", "a rank in the middle, ragged chunks", (97,), 3),
    Case("packed", "sequences within a rank and over several", (7, 0, 60, 25, 0), 3, H=2),
    Case("options", "every option in the kernel", (70, 20), 3, options=GATE | NORM | SIGMOID),
    Case("zigzag", "two slots a rank", (33, 60), 2, layout="zigzag", v_first=True),
    Case("orphans", "tokens of no sequence", (50,), 2, (30, 27), orphans=7),
    Case(
        "fp32",
        "Triton by steps",
        (31, 4),
        3,
        (5, 16, 14),
        dtype=FP32,
        backend="triton",
        options=GATE,
    ),
    Case("fp16", "Triton fused", (3, 20), dtype=FP16, backend="triton", HV=1, options=NORM),
]
ON_GPU = [
    Case(
        name,
        why,
        sequences,
        world,
        shards,
        layout,
        dtype=dtype,
        backend="cuda",
        H=2,
        HV=4,
        K=K,
        V=V,
        chunk_size=64,
        options=options,
        v_first=layout == "zigzag",
        gpu=True,
    )
    for name, why, sequences, world, shards, layout, dtype, K, V, options in [
        ("cuda", "segments", (8192,), 2, None, "contiguous", BF16, 128, 128, NORM),
        ("cuda-middle", "ragged chunks", (9001,), 3, None, "contiguous", BF16, 128, 128, {}),
        (
            "cuda-options",
            "every option in the kernel",
            (6000, 900),
            3,
            None,
            "contiguous",
            BF16,
            128,
            128,
            GATE | NORM | SIGMOID,
        ),
        (
            "cuda-packed",
            "sequences within a rank, before and after one that is split",
            (700, 0, 3000, 1, 1500, 40),
            2,
            (2500, 2741),
            "contiguous",
            BF16,
            128,
            128,
            NORM,
        ),
        (
            "cuda-short",
            "parts of less than a chunk",
            (90,),
            3,
            None,
            "contiguous",
            BF16,
            128,
            128,
            {},
        ),
        ("cuda-zigzag", "two slots", (9000, 1000), 2, None, "zigzag", BF16, 128, 128, NORM),
        ("cuda-fp16", "gradients by Triton", (5000,), 3, None, "contiguous", FP16, 128, 64, NORM),
        ("cuda-64", "room for 64 channels", (4000,), 2, None, "contiguous", BF16, 64, 64, {}),
        ("cuda-96", "channels past K", (4000, 50), 2, None, "contiguous", BF16, 96, 96, NORM),
        ("cuda-wide", "room for 256", (2500,), 2, None, "contiguous", BF16, 256, 128, NORM),
    ]
]


def contexts(case: Case, device: str) -> list[ContextParallel]:
    offsets = torch.tensor(case.offsets, device=device)
    return [
        build_cp_context(
            offsets,
            None,
            lengths=case.shards,
            layout=case.layout,
            place=(rank, case.world),
        )
        for rank in range(case.world)
    ]


def local_inputs(case: Case, context: ContextParallel, x: dict[str, Tensor]) -> dict[str, Any]:
    local: dict[str, Any] = {
        name: context.shard(y) if name in TOKENS else y for name, y in x.items()
    }
    if case.with_state:
        local["initial_state"] = x["initial_state"][list(context.sequences)].clone()
        # The state of a sequence that began elsewhere is not read.
        for i in context.intervals:
            if i.before:
                local["initial_state"][i.first] = torch.nan
    return local


def run_stages(
    case: Case, x: dict[str, Tensor], do: Tensor, dht: Tensor
) -> list[dict[str, Tensor]]:
    """The results and gradients of every rank, by name."""
    ranks = contexts(case, str(do.device))
    inputs = [local_inputs(case, context, x) for context in ranks]
    begun = [
        forward_prepare(
            **local,
            cp_context=context,
            output_final_state=True,
            chunk_size=case.chunk_size,
            state_v_first=case.v_first,
            **case.options,
        )
        for context, local in zip(ranks, inputs, strict=True)
    ]
    gathered = torch.cat([summary for summary, _ in begun])
    applied = [forward_apply(local, gathered) for _, local in begun]
    back = []
    for context, (o, ht, saved) in zip(ranks, applied, strict=True):
        assert ht is not None
        mine = dht[list(context.sequences)].to(ht.dtype)
        for i in context.intervals:
            if i.after:  # the state at a cut is no result of the whole call
                mine[i.last] = 0
        back.append(backward_prepare(saved, context.shard(do).to(o.dtype), mine))
    gathered = torch.cat([summary for summary, _ in back])
    found = []
    for (o, ht, _), (_, local) in zip(applied, back, strict=True):
        gradients = backward_apply(local, gathered)
        named = {f"d{n}": y for n, y in gradients._asdict().items() if y is not None}
        found.append({"o": o, "ht": ht, **named})
    for name in ("dA_log", "ddt_bias"):
        if name in found[0]:
            total = torch.stack([y[name] for y in found]).sum(0)
            for y in found:
                y[name] = total
    return found


def check(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", case.backend)
    x, do, dht = make_call(case, device)
    got = run_stages(case, x, do, dht)
    again = run_stages(case, x, do, dht) if case.gpu else got
    narrow = exact = {n: y.detach() for n, y in run_whole(case, x, do, dht).items()}
    if case.dtype != FP64:
        monkeypatch.setenv("GDN_BACKEND", "reference")
        wide = {name: y.double() for name, y in x.items()}
        exact = {n: y.detach() for n, y in run_whole(case, wide, do, dht).items()}
    for rank, context in enumerate(contexts(case, device)):
        parts = [expect_shard(case, context, whole) for whole in (narrow, exact)]
        cut = {i.last for i in context.intervals if i.after}
        for name, y in got[rank].items():
            assert same_bits(y, again[rank][name]), f"{name} differs between two runs"
            expected_narrow, expected = (part[name] for part in parts)
            if name == "ht":
                ends = [n for n in range(len(y)) if n not in cut]
                y, expected_narrow, expected = y[ends], expected_narrow[ends], expected[ends]
            if case.dtype == FP64:
                torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
            else:
                assert_near_whole(case, name, y, expected, expected_narrow)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_stages_equal_one_device(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.backend == "triton" and torch.cuda.is_available():
        check(case, "cuda", monkeypatch)
    else:
        check(case, "cpu", monkeypatch)


@pytest.mark.gpu("the CUDA library")
@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: case.name)
def test_cuda_stages_equal_one_device(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := fast.why_unavailable()) is not None:
        pytest.skip(reason)
    check(case, "cuda", monkeypatch)


def test_summaries_of_another_shape_are_refused() -> None:
    case = CASES[0]
    x, _, _ = make_call(case, "cpu")
    (context, *_) = contexts(case, "cpu")
    summary, local = forward_prepare(**local_inputs(case, context, x), cp_context=context)
    assert summary.shape == (1, case.HV, case.V + case.K, case.K)
    with pytest.raises(ValueError, match=r"summaries must have shape \[3, 2, 20, 8\]"):
        forward_apply(local, summary)


def test_a_context_without_a_group_is_for_the_stages() -> None:
    case = CASES[0]
    x, _, _ = make_call(case, "cpu")
    (context, *_) = contexts(case, "cpu")
    with pytest.raises(ValueError, match=r"cp_context\.group must be"):
        chunk_gated_delta_rule(**local_inputs(case, context, x), cp_context=context)
    offsets = torch.tensor(case.offsets)
    for place in ((1, 1), (0,), [0, 1], (-1, 2)):
        with pytest.raises(ValueError, match=r"place must be \(rank, number of ranks\)"):
            build_cp_context(offsets, None, place=place)  # type: ignore[arg-type]
