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


@pytest.mark.parametrize("numbered", [False, True], ids=["offsets", "and-numbers"])
def test_packed(numbered):
    """Sequences in one row, an empty one among them: each as alone. Tokens after them are 0."""
    lengths, T = (3, 1, 0, 5), 11
    x, weight = torch.randn(1, T, D).mT, torch.randn(D, W)
    offsets = torch.tensor([0, 3, 4, 4, 9], dtype=torch.int32)
    numbers = torch.tensor([[7, 7, 7, 1, 3, 3, 3, 3, 3, 5, 5]], dtype=torch.int32)
    options = {"seq_idx": numbers} if numbered else {}
    y = whole(never)(x, weight, None, activation="silu", cu_seq_lens_q=offsets, **options)
    expected = [whole(never)(part, weight, None, "silu") for part in x.split([*lengths, 2], -1)]
    torch.testing.assert_close(y, torch.cat([*expected[:-1], torch.zeros(1, D, 2)], -1))


@pytest.mark.parametrize("T", [5, 9])
def test_a_single_sequence_with_bounds(T):
    """Its offsets are of the new tokens; those from a cache come before them."""
    x, weight = torch.randn(1, T, D).mT, torch.randn(D, W)
    options = {"cu_seq_lens_q": torch.tensor([0, 5]), "seq_idx": torch.zeros(1, 5)}
    y = whole(never)(x, weight, None, "silu", **options)
    torch.testing.assert_close(y, whole(never)(x, weight, None, "silu"))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"cu_seq_lens_q": None}, "cu_seq_lens_q must be given with seq_idx, got seq_idx alone"),
        ({"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]])}, "starts, .* the opposite at token 2"),
        ({"seq_idx": torch.tensor([[0, 0, 1, 1, 2, 2]])}, "starts, .* the opposite at token 4"),
        ({"seq_idx": torch.tensor([[0, 1, 1, 1]])}, r"seq_idx must have shape \[B=1, T=6\]"),
        ({"activation": "gelu"}, "activation must be silu, swish or None with packed sequences"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 9])}, "cu_seqlens must end at or before T=6, got 9"),
        ({"x": torch.randn(2, D, 6), "seq_idx": None}, "x must have shape .* got shape"),
        ({"x": torch.randn(1, D, W), "seq_idx": None}, "seq_idx must be given where packed"),
    ],
)
def test_bad_bounds(changes, message):
    """Before any of them is used."""
    given = {
        "x": torch.randn(1, D, 6),
        "activation": "silu",
        "cu_seq_lens_q": torch.tensor([0, 2, 6]),
        "seq_idx": torch.tensor([[0, 0, 1, 1, 1, 1]]),
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        whole(never)(given.pop("x"), torch.randn(D, W), None, **given)


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
    """A call that is not served goes to transformers' own function, with all its arguments."""
    calls = []

    def theirs(*args, **kwargs):
        calls.append((args, kwargs))
        return "theirs"

    x, weight, state = torch.randn(B, D, 1), torch.randn(D, W), torch.randn(B, D, W)
    assert whole(theirs)(x, weight, None, activation="gelu", max_length_q=3) == "theirs"
    assert calls[-1][1] == {"activation": "gelu", "max_length_q": 3}
    ours = step(theirs)
    assert ours(x, state, weight, None, "gelu") == "theirs"
    assert ours(x.expand(B, D, 2), state, weight) == "theirs"
    assert ours(x, state[..., :1], weight) == "theirs"
    assert ours(x, state.half(), weight) == "theirs"
    assert ours(x, state, weight.requires_grad_()) == "theirs"
    with torch.no_grad():
        assert ours(x, state, weight).shape == x.shape


def test_enabled(modeling, monkeypatch):
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
        # A convolution that has come since may run over the bounds of packed sequences.
        x = [torch.randn(1, 4, 1, 8) for _ in range(3)] + [torch.randn(1, 4, 1) for _ in range(2)]
        offsets = torch.tensor([0, 1, 4])
        rule = modeling.torch_chunk_gated_delta_rule
        assert rule(*x, cu_seqlens=offsets)[0].shape == (1, 4, 1, 8)
        with pytest.raises(ValueError, match="a cache has tokens before them, got 2 sequences"):
            rule(*x, cu_seqlens=offsets, initial_state=torch.zeros(2, 1, 8, 8))
        with pytest.raises(ValueError, match="cu_seq_lens_q must be given with seq_idx"):
            rule(*x, seq_idx=torch.tensor([[0, 1, 1, 1]]))
        monkeypatch.setattr(modeling, names[0], lambda *args, **kwargs: args[0])
        with pytest.raises(ValueError, match="the convolution before the gated delta rule"):
            rule(*x, cu_seqlens=offsets)
        # Ours of the first call is known to the second one.
        monkeypatch.setattr(modeling, names[0], now[0])
        monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", never)
        integration.enable()
        rule = modeling.torch_chunk_gated_delta_rule
        assert rule(*x, cu_seqlens=offsets)[0].shape == (1, 4, 1, 8)
        monkeypatch.undo()
    finally:
        integration.disable()
    assert [getattr(modeling, name) for name in names] == before
