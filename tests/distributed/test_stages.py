"""The four stages of a rank, by ranks that run one after another in one process, with what they
exchange put together here: against the same call on one device."""

import pytest
import torch
from helpers import BF16, FP16, FP32
from shard_cases import GATE, NORM, SIGMOID, Case, make_call
from stage_cases import check_stages, contexts, local_inputs

from gdn_triton import chunk_gated_delta_rule, fast
from gdn_triton.distributed import build_cp_context, forward_apply, forward_prepare

CASES = [
    Case("reference", "a rank in the middle, ragged chunks", (97,), 3),
    Case("lasting", "states that last over several ranks", (97,), 4, lasting=True),
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
        lasting=name.endswith("lasting"),
        gpu=True,
    )
    for name, why, sequences, world, shards, layout, dtype, K, V, options in [
        ("cuda", "segments", (8192,), 2, None, "contiguous", BF16, 128, 128, NORM),
        ("cuda-lasting", "states that last", (9001,), 4, None, "contiguous", BF16, 128, 128, {}),
        ("cuda-norm-lasting", "the same", (9001,), 3, None, "contiguous", BF16, 128, 128, NORM),
        ("cuda-fp16-lasting", "the same", (5000,), 3, None, "contiguous", FP16, 128, 64, NORM),
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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_stages_equal_one_device(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.backend == "triton" and torch.cuda.is_available():
        check_stages(case, "cuda", monkeypatch)
    else:
        check_stages(case, "cpu", monkeypatch)


@pytest.mark.gpu("the CUDA library")
@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: case.name)
def test_cuda_stages_equal_one_device(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := fast.why_unavailable()) is not None:
        pytest.skip(reason)
    check_stages(case, "cuda", monkeypatch)


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
