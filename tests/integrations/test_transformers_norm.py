"""The gated norm of transformers' layers, its own class beside ours."""

import importlib
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import BF16, FP16, FP32, FP64, assert_within_budget, same_bits
from torch import Tensor, nn

from gdn_triton.integrations import transformers as integration
from gdn_triton.integrations._transformers_norm import gated, rounds
from gdn_triton.reference.norm import rms_norm_gated

transformers = pytest.importorskip(
    "transformers", minversion="5.17", reason="this text is transformers' from 5.17 on"
)
MODELS = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "qwen4_exp"]
if hasattr(transformers, "LaraMiniConfig"):  # from 5.24 on
    MODELS.append("lara_mini")
D = 32


@pytest.fixture(params=MODELS)
def modeling(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(f"transformers.models.{request.param}.modeling_{request.param}")


def norm_class(modeling: ModuleType) -> Any:
    (found,) = (cls for name, cls in vars(modeling).items() if name.endswith("RMSNormGated"))
    return found


@pytest.fixture
def enabled() -> Iterator[str]:
    yield str(integration.enable())
    integration.disable()


def run(norm: Any, x: Tensor, gate: Tensor, dy: Tensor) -> list[Tensor]:
    """y, and the gradients of x, gate and weight."""
    leaves = [x.detach().requires_grad_(), gate.detach().requires_grad_()]
    y = norm(*leaves)
    return [y.detach(), *torch.autograd.grad(y, [*leaves, norm.weight], dy)]


@pytest.mark.parametrize(
    "backend, dtype",
    [("reference", FP32), ("reference", BF16), ("triton", FP32), ("triton", FP16)],
    ids=str,
)
def test_as_their_class(
    modeling: ModuleType, backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU: the bits of the reference are theirs, and the kernel's errors are no larger."""
    if backend == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("these tensors are on the CPU, where Triton runs in its interpreter only")
    monkeypatch.setenv("GDN_BACKEND", backend)
    norm = norm_class(modeling)(D, eps=1e-5).to(dtype)
    nn.init.normal_(norm.weight)
    x, gate, dy = (torch.randn(70, D).to(dtype) for _ in range(3))
    theirs = run(norm, x, gate, dy)
    round_norm = rounds(type(norm).forward)
    assert round_norm is (not modeling.__name__.endswith("lara_mini"))
    monkeypatch.setattr(type(norm), "forward", gated(type(norm).forward, round_norm))
    ours = run(norm, x, gate, dy)
    wide = [y.detach().to(FP64).requires_grad_() for y in (x, gate, norm.weight)]
    y = rms_norm_gated(*wide, 1e-5)
    exact = [y.detach(), *torch.autograd.grad(y, wide, dy.to(FP64))]
    for name, got, y64, z in zip(("y", "x", "gate", "weight"), ours, exact, theirs, strict=True):
        assert_within_budget(name, got, y64, z, dtype=dtype, unit=2.0**-24)
    if backend == "reference":
        assert all(map(same_bits, ours, theirs))


def test_enabled(modeling: ModuleType) -> None:
    """enable replaces the norm of earlier and of later instances and reports it; disable restores
    it."""
    cls = norm_class(modeling)
    theirs, norm = cls.forward, cls(D)
    try:
        report = str(integration.enable())
        assert f"{modeling.__name__}.{cls.__name__}.forward: gdn_triton.rms_norm_gated" in report
        assert cls.forward is not theirs and norm.forward.__func__ is cls.forward
        now = cls.forward
        integration.enable()
        assert cls.forward is now
    finally:
        integration.disable()
    assert cls.forward is theirs


def test_another_activation() -> None:
    calls = []

    def theirs(*args: Any) -> str:
        calls.append(args)
        return "theirs"

    class Norm(nn.Module):
        weight, variance_epsilon, activation = torch.ones(D), 1e-6, "gelu"

    x, gate, norm = torch.randn(3, D), torch.randn(3, D), Norm()
    ours: Any = gated(theirs, True)  # type: ignore[arg-type]
    assert ours(norm, x, gate) == "theirs" and calls == [(norm, x, gate)]
    norm.activation = "sigmoid"
    expected = rms_norm_gated(x, gate, norm.weight, 1e-6, "sigmoid", True)
    torch.testing.assert_close(ours(norm, x, gate), expected)
    assert len(calls) == 1
    assert ours(norm, x) == "theirs" and calls[1] == (norm, x, None)


def test_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that may do something else is left alone, and named."""
    modeling = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    cls = norm_class(modeling)

    def forward(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return hidden_states

    assert rounds(cls.forward) is True and rounds(forward) is None and rounds(None) is None
    monkeypatch.setattr(cls, "forward", forward)
    try:
        report = str(integration.enable())
        assert cls.forward is forward
        assert f"{cls.__name__}.forward: not ours: its text is of no version" in report
    finally:
        integration.disable()


def test_model_with_both(enabled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer calls it: each of a model's gated norms runs once in a forward pass."""
    import gdn_triton.integrations._transformers_norm as place

    config = transformers.Qwen3NextConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        layer_types=["linear_attention", "full_attention"],
    )
    monkeypatch.setenv("GDN_BACKEND", "reference")
    model = transformers.Qwen3NextForCausalLM(config).eval()
    seen, ours = [], place.rms_norm_gated

    def note(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(args[0].shape)
        return ours(*args, **kwargs)

    monkeypatch.setattr(place, "rms_norm_gated", note)
    tokens = torch.arange(7)[None]
    with torch.no_grad():
        logits = model(tokens).logits
        assert seen == [(7 * 2, 16)]
        integration.disable()
        torch.testing.assert_close(logits, model(tokens).logits, rtol=1e-5, atol=1e-6)
    assert len(seen) == 1 and "rms_norm_gated" in enabled
