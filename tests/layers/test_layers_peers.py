"""The layers of other libraries; wrong arguments: see test_layers.py."""

import copy
import inspect
import math
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from helpers import BF16, FP16, FP32, assert_within_budget
from layer_cases import HIDDEN, make_input, make_layer
from torch import Tensor, nn

from gdn_triton._host import backends
from gdn_triton._host.backends import Backend
from gdn_triton.chunk import reference as reference_chunk
from gdn_triton.chunk.backends import CHUNK
from gdn_triton.layers import GatedDeltaNet, weights_from_qwen
from gdn_triton.layers.gated_deltanet import RECURRENT_TOKENS

# -------------------------------------------------------------------- the layers of other libraries


@pytest.mark.parametrize("model", ["qwen3_next", "qwen3_5"])
def test_equals_transformers(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, gradients, left padding and decoding, beside the model's own layer in torch."""
    reason = "the cross-check needs transformers with this model"
    name = f"transformers.models.{model}"
    configuration = pytest.importorskip(f"{name}.configuration_{model}", reason=reason)
    modeling = pytest.importorskip(f"{name}.modeling_{model}", reason=reason)
    for function in (
        "torch_chunk_gated_delta_rule",
        "torch_recurrent_gated_delta_rule",
        "causal_conv1d_fn",
        "causal_conv1d_update",
    ):
        # Without the kernels of other packages that took their places when they were imported.
        monkeypatch.setattr(modeling, function, inspect.unwrap(getattr(modeling, function)))
    prefix, text = ("Qwen3Next", "") if model == "qwen3_next" else ("Qwen3_5", "Text")
    config = getattr(configuration, f"{prefix}{text}Config")(
        hidden_size=HIDDEN,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        linear_conv_kernel_dim=4,
        num_hidden_layers=4,
        rms_norm_eps=1e-5,
        hidden_act="silu",
    )
    torch.manual_seed(0)
    theirs = getattr(modeling, f"{prefix}GatedDeltaNet")(config, 0)
    nn.init.normal_(theirs.norm.weight)
    ours = GatedDeltaNet.from_qwen(theirs.state_dict(), 2, norm_eps=1e-5)
    x = make_input(2, 70, FP32)
    mask = torch.ones(2, 70, dtype=torch.int64)
    mask[0, :9] = 0
    expected, found = theirs(x, attention_mask=mask), ours(x, mask)
    torch.testing.assert_close(found[mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-5)
    found.square().sum().backward()
    (expected * mask[..., None]).square().sum().backward()
    wanted = weights_from_qwen({n: p.grad for n, p in theirs.named_parameters()}, 2)
    for weight, grad in wanted.items():
        ours_grad = ours.get_parameter(weight).grad
        torch.testing.assert_close(ours_grad, grad, rtol=1e-3, atol=1e-4, msg=weight)
    cache = ours.make_cache(2)
    with torch.no_grad():
        parts = [ours(x[:, :67], mask[:, :67], cache=cache)]
        parts += [ours(x[:, t : t + 1], mask[:, : t + 1], cache=cache) for t in range(67, 70)]
    torch.testing.assert_close(
        torch.cat(parts, 1)[mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-5
    )


FLA_OPTIONS = [
    pytest.param({}, id="default"),
    pytest.param({"num_v_heads": 4, "use_gate": False, "conv_bias": True}, id="no-gate"),
    pytest.param({"use_short_conv": False, "allow_neg_eigval": True}, id="no-convolution"),
    pytest.param({"output_gate_activation": "sigmoid", "expand_v": 1.5}, id="sigmoid"),
]


def fla_layer(options: dict[str, Any]) -> tuple[nn.Module, GatedDeltaNet]:
    """Theirs and ours, with the weights of theirs."""
    module = pytest.importorskip(
        "fla.layers.gated_deltanet",
        reason="the cross-check needs flash-linear-attention",
        exc_type=ImportError,
    )
    given = {"hidden_size": HIDDEN, "head_dim": 16, "num_heads": 2, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of use_short_conv=False
        theirs = module.GatedDeltaNet(**given)
    ours = GatedDeltaNet(**given)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


@pytest.mark.parametrize("options", FLA_OPTIONS)
def test_loads_weights_of_fla(options: dict[str, Any]) -> None:
    theirs, ours = fla_layer(options)
    theirs.load_state_dict(ours.state_dict(), strict=True)


@pytest.mark.gpu("FLA's kernels")
@pytest.mark.parametrize("options", FLA_OPTIONS)
@pytest.mark.parametrize("T", [40, 100])
def test_equals_fla(options: dict[str, Any], T: int, device: str) -> None:
    theirs, ours = (layer.to(device).eval() for layer in fla_layer(options))
    x = make_input(2, T, FP32, device)
    mask = torch.ones(2, T, dtype=torch.int64, device=device)
    mask[0, :9] = 0
    with torch.no_grad():
        expected = theirs(x, attention_mask=mask)[0]
        found = ours(x, mask)
    # Both in products of tf32 at worst.
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())


# ---------------------------------------------------------------------------------- wrong arguments


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_size": 0}, ValueError, "hidden_size must be at least 1, got 0"),
        ({"head_dim": 8.0}, TypeError, "head_dim must be an int, got 8.0"),
        ({"num_v_heads": 3}, ValueError, "num_v_heads must be a multiple of num_heads=2, got 3"),
        ({"num_v_heads": 1}, ValueError, "num_v_heads must be a multiple of num_heads=2, got 1"),
        ({"expand_v": 1.3}, ValueError, "expand_v must make expand_v"),
        ({"expand_v": 0}, ValueError, "expand_v must make expand_v"),
        ({"expand_v": math.nan}, ValueError, "expand_v must make expand_v .*, got nan"),
        ({"expand_v": None}, TypeError, "expand_v must be a real number, got None"),
        ({"expand_v": "2"}, TypeError, "expand_v must be a real number or None, got '2'"),
        ({"use_gate": None}, TypeError, "use_gate must be True or False, got None"),
        ({"conv_bias": 1}, TypeError, r"conv_bias must be True or False, got 1 \(int\)"),
        ({"dtype": torch.int32}, ValueError, "dtype must be float16, .*, got torch.int32"),
        ({"mode": "parallel"}, ValueError, "mode must be one of chunk, fused_recurrent"),
        ({"output_gate_activation": "relu"}, ValueError, "must be one of swish, silu, sigmoid"),
        ({"conv_size": 0}, ValueError, "conv_size must be at least 1"),
        ({"norm_eps": -1}, ValueError, r"norm_eps must be finite and at least 0, got -1 \(int\)"),
        ({"norm_eps": math.nan}, ValueError, "norm_eps must be finite and at least 0, got nan"),
        ({"norm_eps": math.inf}, ValueError, "norm_eps must be finite and at least 0, got inf"),
        ({"norm_eps": None}, ValueError, "norm_eps must be finite and at least 0, got None"),
        ({"norm_eps": "1"}, TypeError, "norm_eps must be a real number"),
    ],
)
def test_wrong_layers(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"hidden_size": 12, "head_dim": 8, "num_heads": 2, **changes}
    with pytest.raises(error, match=message):
        GatedDeltaNet(**given)


def test_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="use_sort_conv"):
        GatedDeltaNet(use_sort_conv=False)  # type: ignore[call-arg]


WRONG_CALLS = [
    (
        {"hidden_states": torch.zeros(2, 3, 4)},
        ValueError,
        r"hidden_size=20\], got shape \[2, 3, 4\]",
    ),
    ({"hidden_states": torch.zeros(2, 20)}, ValueError, "hidden_states must have shape"),
    ({"hidden_states": None}, TypeError, "hidden_states must be a torch.Tensor"),
    ({"hidden_states": torch.zeros(2, 3, 20).int()}, ValueError, "hidden_states must be float16"),
    ({"attention_mask": torch.ones(2, 2)}, ValueError, "attention_mask must have shape"),
    ({"attention_mask": torch.ones(2, 3, 3)}, ValueError, "attention_mask must have shape"),
    ({"attention_mask": [[1]]}, TypeError, "attention_mask must be a torch.Tensor or None"),
    (
        {"attention_mask": torch.tensor([[0, -1e9, -1e9], [0, 0, -1e9]])},
        ValueError,
        "attention_mask must hold 1 for a token and 0 for none, where it is float, got -1000000000",
    ),
    (
        {"attention_mask": torch.tensor([[1, torch.nan, 1], [1, 1, 1]])},
        ValueError,
        "attention_mask must hold 1 for a token and 0 for none, where it is float, got nan",
    ),
    ({"slots": torch.tensor([0, 1])}, ValueError, "slots must be None without a cache"),
    ({"cu_seqlens": torch.tensor([0, 3])}, ValueError, "batch size B=1 with cu_seqlens"),
    ({"cu_seqlens": torch.tensor([0.0, 3])}, ValueError, "cu_seqlens must be int32 or int64"),
    ({"cu_seqlens_cpu": torch.tensor([0, 3])}, ValueError, "must come with cu_seqlens, got"),
    ({"cu_seqlens_cpu": [0, 3]}, TypeError, "cu_seqlens_cpu must be a torch.Tensor or None"),
    ({"cu_seqlens": torch.zeros(2, 1).long()}, ValueError, "cu_seqlens must have shape"),
    ({"cache": 4, "slots": 3}, TypeError, "slots must be a torch.Tensor or None"),
    ({"cache": {}}, TypeError, "cache must be a GatedDeltaNetCache or None"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG_CALLS)
def test_wrong_calls(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    layer = make_layer(dtype=FP32)
    with pytest.raises(error, match=message):
        layer(**{"hidden_states": make_input(2, 3, FP32), **changes})


def test_wrong_offsets() -> None:
    layer, x = make_layer(dtype=FP32), make_input(1, 3, FP32)
    for offsets, message in (([0, 4], "end at or before T=3"), ([0, 2, 1], "not decrease")):
        with pytest.raises(ValueError, match=message):
            layer(x, cu_seqlens=torch.tensor(offsets))
    with pytest.raises(ValueError, match="attention_mask must be None with cu_seqlens"):
        layer(x, torch.ones(1, 3), cu_seqlens=torch.tensor([0, 3]))
    for on_host, message in (
        (torch.tensor([0, 2, 3]), r"cu_seqlens_cpu must have the shape of cu_seqlens, \[2\]"),
        (torch.tensor([0.0, 3]), "cu_seqlens_cpu must be int32 or int64"),
        (torch.tensor([0, 4]), "cu_seqlens_cpu must end at or before T=3"),
        (torch.tensor([0, 3], device="meta"), "cu_seqlens_cpu must be on the CPU, got meta"),
        (torch.tensor([0, 2]), "cu_seqlens_cpu must equal cu_seqlens, which has 3 at index 1, got"),
    ):
        # Without gradients the rule of so few tokens does not take cu_seqlens_cpu.
        with torch.no_grad(), pytest.raises(ValueError, match=message):
            layer(x, cu_seqlens=torch.tensor([0, 3]), cu_seqlens_cpu=on_host)


def test_wrong_caches() -> None:
    layer, x = make_layer(dtype=FP32), make_input(2, 3, FP32)
    cache = layer.make_cache(3)
    for slots, message in (
        ([0], r"slots must have shape \[N=2\]"),
        ([0, 3], "be less than the 3 slots of the cache, got 3"),
        ([1, 1], "name no slot twice, got 1 twice"),
        ([0.0, 1.0], "slots must be int32 or int64"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(x, cache=cache, slots=torch.tensor(slots))
    with pytest.raises(ValueError, match="cache must have room for N=2 sequences, got 1 slots"):
        layer(x, cache=layer.make_cache(1))
    with pytest.raises(ValueError, match="got 1 slots"):
        layer(x, cache=layer.make_cache(2, skip="non_positive"))
    for other in ("value-groups", "no-convolution", "long-convolution"):
        with pytest.raises(ValueError, match="cache must have states of this layer's shapes"):
            layer(x, cache=make_layer(other).make_cache(3))
    with pytest.raises(ValueError, match="skip must be one of negative, non_positive"):
        layer.make_cache(3, skip="zero")
    with pytest.raises(ValueError, match="slots must be at least 0"):
        layer.make_cache(-1)
    with pytest.raises(TypeError, match="slots must be an int"):
        layer.make_cache(2.0)  # type: ignore[arg-type]
    assert not cache.recurrent_state.any()


@pytest.mark.parametrize(
    ("backend", "head_dim", "reason"),
    [
        pytest.param("triton", 8, "take 2, 3 or 4 taps; the weight has 7", id="convolution"),
        pytest.param("triton", 264, "keys of up to 256 channels; K is 264", id="rule"),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_a_refused_call_changes_no_state(
    backend: str,
    head_dim: int,
    reason: str,
    grad: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the convolution refuses it, or the rule after it."""
    monkeypatch.setenv("GDN_BACKEND", backend)
    name = "long-convolution" if "taps" in reason else "default"
    layer = make_layer(name, dtype=FP32, device=device, head_dim=head_dim, num_heads=1)
    cache = layer.make_cache(2)
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=reason):
        layer(make_input(2, 3, FP32, device), cache=cache)
    assert cache.conv_state is not None
    assert not any(pool.any() for pool in (cache.conv_state, cache.recurrent_state))


def prefill_and_decode(layer: GatedDeltaNet, x: Tensor) -> tuple[Tensor, Tensor]:
    """y of x: all tokens but three in one call, these one by one; and the states after them."""
    cache = layer.make_cache(len(x))
    with torch.no_grad():
        first = x.shape[1] - 3
        parts = [layer(x[:, :first], cache=cache)]
        parts += [layer(x[:, t : t + 1], cache=cache) for t in range(first, x.shape[1])]
    return torch.cat(parts, 1), cache.recurrent_state


def test_a_name_that_only_the_chunked_op_has(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The chunked op runs on the backend that is named; what has no such backend runs as with auto,
    which is logged once for each of them."""
    ran = []

    def load() -> Any:
        def forward(problem: Any, *rest: Any) -> Any:
            ran.append(problem.T)
            return reference_chunk.forward(problem, *rest)

        return forward

    named = Backend("cuda", lambda problem: None, load)
    monkeypatch.setattr(CHUNK, "backends", (named, *CHUNK.backends[1:]))
    monkeypatch.setattr(backends, "_choices", {})
    caplog.set_level("INFO", logger="gdn_triton")
    layer = make_layer(dtype=FP32, device=device)
    x = make_input(2, RECURRENT_TOKENS + 4, FP32, device)
    monkeypatch.setenv("GDN_BACKEND", "reference")
    expected = prefill_and_decode(layer, x)
    monkeypatch.setenv("GDN_BACKEND", "cuda")
    for _ in range(2):
        for found, y in zip(prefill_and_decode(layer, x), expected, strict=True):
            torch.testing.assert_close(found, y, rtol=1e-4, atol=1e-5)
    assert ran == [RECURRENT_TOKENS + 1] * 2
    said = [record.getMessage() for record in caplog.records]
    for name in ("causal_conv1d", "rms_norm_gated", "layer_step"):
        (message,) = (m for m in said if f"which {name} does not have" in m)
        assert message.startswith("GDN_BACKEND=cuda, which") and "Not cuda: The CUDA lib" in message

    layer(x).sum().backward()
    assert layer.q_proj.weight.grad is not None and len(ran) == 3


@pytest.mark.gpu("the CUDA library runs there only")
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_on_the_cuda_library(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill, decoding and training under GDN_BACKEND=cuda, beside the same layer in float64."""
    from gdn_triton import fast
    from gdn_triton.chunk.cuda import calls

    if not fast.is_available():
        pytest.skip(str(fast.why_unavailable()))
    ran: list[str] = []
    operator = calls.library_operator
    monkeypatch.setattr(calls, "library_operator", lambda name: ran.append(name) or operator(name))
    layer, x = make_layer(dtype=dtype, device=device), make_input(2, 200, dtype, device)
    monkeypatch.setenv("GDN_BACKEND", "reference")
    wide = prefill_and_decode(copy.deepcopy(layer).double(), x.double())
    narrow = prefill_and_decode(layer, x)
    monkeypatch.setenv("GDN_BACKEND", "cuda")
    found = prefill_and_decode(layer, x)
    assert ran == ["chunk_forward"]
    for name, a, b, c in zip(("y", "states"), found, wide, narrow, strict=True):
        unit = torch.finfo(dtype).eps / 2
        assert_within_budget(name, a, b.double(), c, dtype=a.dtype, unit=unit)
    layer(x).sum().backward()
    assert ran == ["chunk_forward", "chunk_forward", "chunk_backward"]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_a_bare_process() -> None:
    """The package does not import its layers, they import no Triton, and the device of a context,
    which the suite's poisoned allocations would hide, is theirs."""
    code = """
import sys, torch, gdn_triton
assert not [m for m in sys.modules if m.startswith("gdn_triton.layers")]
from gdn_triton.layers import GatedDeltaNet
assert "triton" not in sys.modules and "transformers" not in sys.modules
with torch.device("meta"):
    layer = GatedDeltaNet(hidden_size=12, head_dim=4, num_heads=2)
assert all(p.is_meta for p in layer.parameters())
"""
    subprocess.run([sys.executable, "-c", code], check=True)
