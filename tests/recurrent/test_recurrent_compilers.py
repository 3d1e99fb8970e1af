"""Compilers: see test_recurrent.py."""

import os
from typing import Any

import pytest
import torch
from helpers import BF16, FP32, same_bits
from recurrent_cases import (
    SEQUENCES,
    STEPS,
    Sizes,
    assert_step_matches,
    sequence_call,
    step_arguments,
    step_call,
)

from gdn_triton import fused_recurrent_gated_delta_rule, recurrent_step

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel, wherever a test does not choose."""
    monkeypatch.setenv("GDN_BACKEND", "triton")


# -------------------------------------------------------------------------------------- compilers


def compiled(function: Any) -> Any:
    def call(**x: Any) -> Any:
        return function(**x)

    return torch.compile(call, fullgraph=True, backend="aot_eager")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend_name", ["triton", "reference"])
def test_compiled_sequences(
    backend_name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_BACKEND", backend_name)
    row = {name: values[0] for name, values in SEQUENCES.items()}
    row |= {"packed": True, "g": "gate", "beta": "sigmoid", "state": FP32, "v_first": True}
    x, options = sequence_call({**row, "sizes": Sizes(T=2, H=1, HV=2)}, device)
    expected = fused_recurrent_gated_delta_rule(**x, **options)
    found = compiled(fused_recurrent_gated_delta_rule)(**x, **options)
    for a, b in zip(found, expected, strict=True):
        assert same_bits(a, b) and a.stride() == b.stride()
    options["output_final_state"] = False
    assert compiled(fused_recurrent_gated_delta_rule)(**x, **options)[1] is None


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GDN_BACKEND")
    row = {name: values[0] for name, values in SEQUENCES.items()}
    row |= {"g": "gate", "beta": "value", "state": FP32, "gk": True}
    x, options = sequence_call(row, "cpu")
    x = {name: y for name, y in x.items() if y is not None}
    gradients = []
    for function in (fused_recurrent_gated_delta_rule, compiled(fused_recurrent_gated_delta_rule)):
        leaves = {name: y.clone().requires_grad_() for name, y in x.items()}
        o, state = function(**leaves, **options)
        (o.square().sum() + state.square().sum()).backward()
        gradients.append([y.grad for y in leaves.values()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("backend_name", "form", "out"),
    [
        ("triton", "mixed", True),
        ("triton", "apart", False),
        ("reference", "mixed", False),
        ("reference", "apart", True),
    ],
)
def test_compiled_steps(
    backend_name: str, form: str, out: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool and `out` are written in place, as in the eager call."""
    monkeypatch.setenv("GDN_BACKEND", backend_name)
    row = {name: values[0] for name, values in STEPS.items()}
    row |= {"mixed": form == "mixed", "raw": form == "mixed", "tokens": "several", "out": out}
    row["sizes"] = Sizes(B=3, T=2, H=1, HV=2)
    x = step_call(row, device).arguments
    eager = {**x, "state": x["state"].clone(), "out": x["out"].clone() if out else None}
    expected = recurrent_step(**eager)
    found = compiled(recurrent_step)(**x)
    assert same_bits(found, expected)
    assert same_bits(x["state"], eager["state"])
    if out:
        assert same_bits(x["out"], expected)


@pytest.mark.usefixtures("fresh_compiler")
def test_errors_while_tracing() -> None:
    x = step_arguments()
    with pytest.raises(Exception, match="skip must be one of"):
        compiled(recurrent_step)(**x, skip="none")
    with pytest.raises(Exception, match="g must have shape"):
        compiled(recurrent_step)(**{**x, "g": torch.zeros(3, 1)})


@pytest.mark.gpu("a CUDA graph")
@pytest.mark.parametrize("v_first", [False, True])
def test_cuda_graph(v_first: bool, device: str) -> None:
    """Slots change between replays; the pool goes on from where the last replay left it."""
    row = {name: values[0] for name, values in STEPS.items()}
    row |= {"mixed": True, "raw": True, "dtype": BF16, "v_first": v_first, "out": True}
    x = step_call({**row, "sizes": Sizes(B=4, K=128, V=128)}, device).arguments
    eager = {**x, "state": x["state"].clone(), "out": x["out"].clone()}
    recurrent_step(**{**x, "state": x["state"].clone()})
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recurrent_step(**x)
    for slots in ([3, -1, 5, 0], [-1, 5, 3, 2], [1, 2, 3, 4]):
        x["read_slots"].copy_(torch.tensor(slots))
        x["mixed_qkv"].normal_()
        x["out"].fill_(torch.nan)
        graph.replay()
        recurrent_step(**eager)
        assert same_bits(x["out"], eager["out"])
        assert same_bits(x["state"], eager["state"])


@pytest.mark.two_gpus("tensors on a device that is not the current one")
def test_another_device() -> None:
    row = {name: values[0] for name, values in STEPS.items()}
    call = step_call(row, "cuda:1")
    before = call.arguments["state"].clone()
    for _ in range(2):
        call.arguments["state"].copy_(before)
        assert_step_matches(call, before, recurrent_step(**call.arguments))


def test_interpreter_or_gpu(device: str) -> None:
    """The tests above run in the backend that they name."""
    assert (device == "cpu") == (os.environ.get("TRITON_INTERPRET") == "1")
