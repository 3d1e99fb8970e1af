"""The convolution of transformers' layers, its own functions beside ours."""

import importlib

import pytest
import torch
from helpers import same_bits

from gdn_triton.integrations import transformers as integration
from gdn_triton.integrations._transformers_conv import step, whole

transformers = pytest.importorskip(
    "transformers", minversion="5.15", reason="transformers 5.15 or newer has these functions"
)
MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "qwen4_exp")
B, D, W = 2, 6, 4


@pytest.fixture(params=MODELS)
def modeling(request):
    name = f"transformers.models.{request.param}.modeling_{request.param}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        pytest.skip(f"transformers {transformers.__version__} has no {request.param}")


def never(*args, **kwargs):
    raise AssertionError("transformers' own")


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whole(modeling, dtype, activation):
    x = torch.randn(B, 9, D, dtype=dtype).mT  # as the layer transposes it
    weight, bias = torch.randn(D, W, dtype=dtype), torch.randn(D, dtype=dtype)
    inputs = [y.requires_grad_() for y in (x, weight, bias)]
    expected = modeling.causal_conv1d_fn(x, weight, bias, activation=activation)
    y = whole(never)(x, weight, bias, activation=activation, max_length_q=3, seq_idx=None)
    assert y.shape == expected.shape and y.dtype == dtype
    torch.testing.assert_close(y, expected)
    do = torch.randn_like(y)
    for got, want in zip(
        torch.autograd.grad(y, inputs, do), torch.autograd.grad(expected, inputs, do), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("columns", [W - 1, W, W + 2])
@torch.no_grad()
def test_step(modeling, columns):
    """A token after a cached state, of as many columns as there are: o, and all of the state."""
    weight, state = torch.randn(D, W), torch.randn(B, D, columns)
    other = state.clone()
    for _ in range(3):
        x = torch.randn(B, D, 1)
        y = step(never)(x, state, weight, None, "silu")
        expected = modeling.causal_conv1d_update(x, other, weight, None, "silu")
        torch.testing.assert_close(y, expected)
        assert same_bits(state, other)


def test_theirs():
    """What is not served goes to transformers' own function, with all its arguments."""
    calls = []

    def theirs(*args, **kwargs):
        calls.append((args, kwargs))
        return "theirs"

    x, weight, state = torch.randn(B, D, 1), torch.randn(D, W), torch.randn(B, D, W)
    for options in (
        {"seq_idx": torch.zeros(B, 1)},
        {"cu_seq_lens_q": torch.tensor([0, 1])},
        {"activation": "gelu"},
    ):
        assert whole(theirs)(x, weight, None, **options) == "theirs"
        assert calls[-1][1] == {"activation": None, **options}
    ours = step(theirs)
    assert ours(x, state, weight, None, "gelu") == "theirs"
    assert ours(x.expand(B, D, 2), state, weight) == "theirs"
    assert ours(x, state[..., :1], weight) == "theirs"
    assert ours(x, state.half(), weight) == "theirs"
    assert ours(x, state, weight.requires_grad_()) == "theirs"
    with torch.no_grad():
        assert ours(x, state, weight).shape == x.shape


def test_enabled(modeling):
    """Both functions are ours in the module, and named; and theirs again afterwards."""
    names = ("causal_conv1d_fn", "causal_conv1d_update")
    before = [getattr(modeling, name) for name in names]
    try:
        report = str(integration.enable())
        now = [getattr(modeling, name) for name in names]
        assert all(a is not b for a, b in zip(before, now, strict=True))
        assert f"{modeling.__name__}.causal_conv1d_fn: gdn_triton.causal_conv1d" in report
        assert f"{modeling.__name__}.causal_conv1d_update: gdn_triton.causal_conv1d_up" in report
        integration.enable()
        assert [getattr(modeling, name) for name in names] == now
        # Packed sequences are still judged by the convolution that runs over their bounds.
        x = [torch.randn(1, 4, 1, 8) for _ in range(3)] + [torch.randn(1, 4, 1) for _ in range(2)]
        with pytest.raises(ValueError, match="the convolution before the gated delta rule"):
            modeling.torch_chunk_gated_delta_rule(*x, cu_seqlens=torch.tensor([0, 1, 4]))
    finally:
        integration.disable()
    assert [getattr(modeling, name) for name in names] == before
