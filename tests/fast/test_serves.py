"""Which calls the CUDA library serves, and the words of every refusal."""

from typing import Any

import pytest
import torch
from fast_cases import problem
from helpers import BF16, FP16, FP32, FP64

from gdn_triton import fast
from gdn_triton._host import backends as backend
from gdn_triton.chunk.backends import CHUNK
from gdn_triton.chunk.cuda import support


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": FP16},
        {"B": 1, "N": 7, "is_varlen": True},
        {"H": 3, "HV": 24},
        {"T": 0},
        {"B": 1, "N": 0, "is_varlen": True},
        {"state_v_first": True, "has_initial_state": False, "output_final_state": False},
        {
            "use_qk_l2norm": True,
            "use_beta_sigmoid": True,
            "allow_neg_eigval": True,
            "use_gate": True,
        },
        {"scale": -3.0},
        {"K": 8, "V": 8},
        {"K": 96, "V": 192},
        {"K": 256, "V": 4096},
        {"needs_grad": True},
        {"device": torch.device("cuda:1")},
        {"pool_dtype": FP32},
        {"pool_dtype": BF16, "dtype": FP16},
        {"pool_dtype": FP16},
    ],
)
def test_takes(changes: dict[str, Any], hopper: None) -> None:
    assert support.supports(problem(**changes)) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": torch.device("cpu")}, "on NVIDIA GPUs; the tensors are on cpu"),
        ({"device": torch.device("xpu")}, "on NVIDIA GPUs; the tensors are on xpu"),
        ({"dtype": FP32}, "bfloat16 or all in float16; they are float32, float32 and float32"),
        ({"dtype": FP64}, "they are float64, float64 and float64"),
        ({"k_dtype": FP16}, "they are bfloat16, float16 and bfloat16"),
        ({"v_dtype": FP32}, "they are bfloat16, bfloat16 and float32"),
        ({"K": 264}, "K and V in multiples of 8, K up to 256; K is 264, V is 128"),
        ({"K": 100}, "K is 100, V is 128"),
        ({"V": 84}, "K is 128, V is 84"),
        ({"chunk_size": 32}, "in chunks of 64; 32 is asked for"),
        ({"pool_dtype": FP64}, "in float32 at most; the states are float64"),
        ({"T": 2**30}, "less than 1073741824 tokens; T is 1073741824"),
    ],
)
def test_refuses(changes: dict[str, Any], words: str, hopper: None) -> None:
    reason = support.supports(problem(**changes))
    assert reason is not None and words in reason and reason.endswith(".")


def test_refuses_where_it_cannot_run(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "why_not_on", {1: "Not on that one."}.get)
    assert support.supports(problem(device=torch.device("cuda:1"))) == "Not on that one."
    monkeypatch.setattr(fast, "why_unavailable", lambda: "Not built.")
    assert support.supports(problem()) == "Not built."


def test_gradients_are_served_where_triton_serves_them(
    hopper: None, no_interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = problem(needs_grad=True, K=136)
    monkeypatch.setattr(backend, "_triton_missing", lambda: None)
    assert CHUNK.explain(trained).chosen == "cuda"
    monkeypatch.setattr(backend, "_triton_missing", lambda: "No Triton here.")
    reason = CHUNK.explain(trained).reasons["cuda"]
    assert reason is not None
    assert "the Triton backward cannot run: No Triton here. Nor does the library's own" in reason
    assert reason.endswith(support.backward_supports(trained) or "?")
    for served in (problem(needs_grad=True), problem()):
        assert CHUNK.explain(served).chosen == "cuda"
    refused = CHUNK.explain(problem(needs_grad=True, chunk_size=32)).reasons["cuda"]
    assert refused == support.supports(problem(chunk_size=32))
