"""Kernels and precision; torch.compile; weights and their start: see test_layers.py."""

import copy
from typing import Any

import pytest
import torch
from helpers import BF16, DTYPES, FP16, FP32, FP64, assert_within_budget, same_bits
from layer_cases import (
    HIDDEN,
    MASKS,
    Graphs,
    assert_gradients,
    close,
    gradients,
    make_input,
    make_layer,
    offsets_of,
    qwen_weights,
    rows_written_out,
)
from torch import nn

from gdn_triton.layers import GatedDeltaNet, weights_from_qwen
from gdn_triton.layers.gated_deltanet import RECURRENT_TOKENS

# ---------------------------------------------------------------------------- kernels and precision


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad", [True, False], ids=["chunked", "by-token"])
def test_budget(dtype: torch.dtype, grad: bool, device: str) -> None:
    """On the backend that `auto` takes here, beside the same arithmetic in the same precision."""
    layer, x = make_layer("value-groups", dtype, device), make_input(2, 30, dtype, device)
    with torch.set_grad_enabled(grad):
        y = layer(x)
    with torch.no_grad():
        narrow = rows_written_out(layer, x, state_dtype=FP32)
        exact = rows_written_out(copy.deepcopy(layer).double(), x.double())
    unit = torch.finfo(dtype).eps / 2
    assert_within_budget("y", y.detach(), exact, narrow, dtype=dtype, unit=unit)


@pytest.mark.parametrize("name", ["default", "sigmoid-gate", "no-output-gate"])
def test_gradients_of_kernels(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel is Triton's. The gradients are compared with the reference in float64."""
    if device != "cpu":
        pytest.skip("the kernels' products keep 22 bits on a GPU and torch's 24")
    layer = make_layer(name, FP32, device)
    wide = copy.deepcopy(layer).double()
    expected, narrow, found = [], [], []
    # A_log and dt_bias have two numbers each: the error of one input says little of the next one's.
    for _ in range(4):
        x = torch.randn(1, 20, layer.hidden_size, device=device)
        monkeypatch.setenv("GDN_BACKEND", "reference")
        expected.append(gradients(wide, x.double(), wide))
        narrow.append(gradients(layer, x, layer))
        monkeypatch.setenv("GDN_BACKEND", "triton")
        found.append(gradients(layer, x, layer))
    for weight in expected[0]:
        got, exact, own = (torch.stack([x[weight] for x in y]) for y in (found, expected, narrow))
        # Sums of terms that cancel, each with a rounding of its own.
        unit = 8 * torch.finfo(FP32).eps
        assert_within_budget(weight, got, exact, own, dtype=FP32, unit=unit)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_autocast(dtype: torch.dtype, device: str) -> None:
    """Products in the dtype of autocast, weights and gradients in float32."""
    layer, x = make_layer(dtype=FP32, device=device), make_input(2, 20, FP32, device)
    expected = layer(x)
    with torch.autocast(device, dtype):
        y = layer(x)
    assert y.dtype == dtype
    error = (y.double() - expected.double()).norm() / expected.double().norm()
    assert 0 < error < 16 * torch.finfo(dtype).eps
    y.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == FP32 for p in layer.parameters())
    cache = layer.make_cache(2)
    with torch.no_grad(), torch.autocast(device, dtype):
        parts = torch.cat([layer(part, cache=cache) for part in x.split([17, 1, 1, 1], 1)], 1)
    error = (parts.double() - expected.double()).norm() / expected.double().norm()
    assert error < 16 * torch.finfo(dtype).eps


# ------------------------------------------------------------------------------------ torch.compile


@pytest.mark.parametrize("form", ["padded", "packed", "masked"])
def test_compiled_training(form: str, device: str) -> None:
    layer, x = make_layer(dtype=FP32, device=device), make_input(3, 8, FP32, device)
    given: dict[str, Any] = {}
    if form == "packed":
        x = x.view(1, 24, HIDDEN)
        given["cu_seqlens"] = offsets_of([7, 0, 12], device)
    elif form == "masked":
        given["attention_mask"] = torch.tensor(MASKS["between"], device=device)
    graphs = Graphs()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    expected = gradients(layer, x, lambda x: layer(x, **given))
    found = gradients(layer, x, lambda x: compiled(x, **given))
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-4, msg=name)
    assert graphs.seen == 1


def test_masks_of_any_kind_that_are_one_or_zero() -> None:
    layer, x = make_layer(dtype=FP32), make_input(1, 3, FP32)
    mask = torch.tensor([[True, False, True]])
    expected = layer(x, mask)
    for dtype in (torch.int64, FP16, BF16, FP32, FP64):
        assert same_bits(layer(x, mask.to(dtype)), expected)
    # Segments of a packed row have numbers above 1, and columns before the last T are not read.
    assert same_bits(layer(x, mask.long() * 5), expected)
    before = torch.tensor([[torch.nan, -1e9]])
    assert same_bits(layer(x, torch.cat([before, mask.float()], 1)), expected)


@pytest.mark.of_no_device
@pytest.mark.parametrize(("mode", "grad"), [("chunk", True), ("fused_recurrent", False)])
def test_export_of_any_length(mode: str, grad: bool) -> None:
    layer, x = make_layer(dtype=FP32, mode=mode), make_input(1, 20, FP32)
    length = torch.export.Dim("T", min=2, max=200)
    with torch.set_grad_enabled(grad):
        shapes = {"hidden_states": {1: length}}
        exported = torch.export.export(layer, (x,), dynamic_shapes=shapes).module()
        for T in (3, RECURRENT_TOKENS + 10):
            y = make_input(1, T, FP32)
            torch.testing.assert_close(exported(y), layer(y), rtol=1e-4, atol=1e-5)


@pytest.mark.of_no_device
def test_export_across_the_change_of_function_says_so() -> None:
    layer, x = make_layer(dtype=FP32), make_input(1, 20, FP32)
    shapes = {"hidden_states": {1: torch.export.Dim("T", min=2, max=200)}}
    with torch.no_grad(), pytest.raises(Exception, match="Constraints violated"):
        torch.export.export(layer, (x,), dynamic_shapes=shapes)


@pytest.mark.parametrize("named", [False, True], ids=["all-slots", "named-slots"])
def test_compiled_prefill_and_decoding(named: bool, device: str) -> None:
    layer, x = make_layer(dtype=FP32, device=device), make_input(2, 70, FP32, device)
    lengths = [66, 1, 1, 1, 1]
    slots = torch.tensor([2, 1], device=device) if named else None
    graphs = Graphs()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs, dynamic=False)
    with torch.no_grad():
        results = []
        for run in (layer, compiled):
            cache = layer.make_cache(3)
            parts = [run(y, cache=cache, slots=slots) for y in x.split(lengths, 1)]
            results.append((torch.cat(parts, 1), cache.recurrent_state[:-1]))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert graphs.seen == 2  # prefill and one token


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_compiled_gradients_with_a_cache(form: str) -> None:
    """In one graph, from states that the call before left."""
    layer, x = make_layer(), make_input(3, 10)
    given = {"cu_seqlens": offsets_of([7, 0, 3])} if form == "packed" else {}
    past, x = (y.reshape(1, -1, HIDDEN)[:, :10] if given else y for y in x.split(5, 1))
    caches = [layer.make_cache(3), layer.make_cache(3)]
    for cache in caches:
        layer(past, cache=cache, **given)
    graphs = Graphs()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    expected = gradients(layer, x, lambda x: layer(x, cache=caches[0], **given))
    found = gradients(layer, x, lambda x: compiled(x, cache=caches[1], **given))
    assert_gradients(found, expected)
    close(caches[1].conv_state, caches[0].conv_state)
    close(caches[1].recurrent_state, caches[0].recurrent_state)
    assert graphs.seen == 1


@pytest.mark.gpu("Inductor needs a C++ compiler here, and minutes")
def test_inductor(device: str) -> None:
    layer, x = make_layer(dtype=FP32, device=device), make_input(2, 70, FP32, device)
    expected = gradients(layer, x, layer)
    found = gradients(layer, x, torch.compile(layer, fullgraph=True))
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.gpu("CUDA graphs")
def test_cuda_graph_of_a_step(device: str) -> None:
    """Captured for the largest batch; slots and tokens change in place."""
    layer, x = make_layer(dtype=BF16, device=device), make_input(3, 6, BF16, device)
    cache, expected_cache = layer.make_cache(4), layer.make_cache(4)
    token, slots = x[:, :1].clone(), torch.tensor([-1, -1, -1], device=device)
    with torch.no_grad():
        layer(token, cache=cache, slots=slots)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(token, cache=cache, slots=slots)
        for t, now in enumerate(([3, 0, 1], [3, -1, 1], [-1, 0, 2])):
            token.copy_(x[:, t : t + 1])
            slots.copy_(torch.tensor(now))
            expected = layer(token, cache=expected_cache, slots=slots)
            graph.replay()
            assert same_bits(y, expected)
    assert same_bits(cache.recurrent_state[:-1], expected_cache.recurrent_state[:-1])


# -------------------------------------------------------------------------- weights and their start


def test_start() -> None:
    torch.manual_seed(5)
    layer = GatedDeltaNet(hidden_size=32, head_dim=4, num_heads=500, num_v_heads=1000)
    rates, steps = layer.A_log.exp(), nn.functional.softplus(layer.dt_bias)
    assert 0 < rates.min() and rates.max() <= 16 and abs(rates.mean() - 8) < 0.5
    assert 1e-3 * 0.99 < steps.min() and steps.max() < 1e-1 * 1.01
    middle = steps.log().mean().exp()
    assert abs(middle - 1e-2) < 1e-3
    assert layer.A_log._no_weight_decay and layer.dt_bias._no_weight_decay


def test_meta_device() -> None:
    """Made without memory, then given some: the weights of a seed are those of the constructor."""
    options = {"hidden_size": 12, "head_dim": 4, "num_heads": 2, "conv_bias": True}
    torch.manual_seed(5)
    expected = GatedDeltaNet(**options).state_dict()
    layer = GatedDeltaNet(**options, device="meta")
    assert all(p.is_meta for p in layer.parameters())
    layer.to_empty(device="cpu")
    torch.manual_seed(5)
    layer.reset_parameters()
    found = layer.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def test_dtype_of_the_weights() -> None:
    layer = GatedDeltaNet(hidden_size=12, head_dim=4, num_heads=2, dtype=BF16)
    narrow = {name for name, p in layer.named_parameters() if p.dtype == BF16}
    assert {name for name, _ in layer.named_parameters()} - narrow == {"A_log", "dt_bias"}
    assert layer.A_log.dtype == layer.dt_bias.dtype == FP32


def test_names_and_shapes_of_the_weights() -> None:
    """Those of flash-linear-attention 0.6.0."""
    layer = GatedDeltaNet(
        hidden_size=12, head_dim=4, num_heads=2, num_v_heads=4, expand_v=1.5, conv_bias=True
    )
    assert {name: tuple(x.shape) for name, x in layer.state_dict().items()} == {
        "A_log": (4,),
        "dt_bias": (4,),
        "q_proj.weight": (8, 12),
        "k_proj.weight": (8, 12),
        "v_proj.weight": (24, 12),
        "a_proj.weight": (4, 12),
        "b_proj.weight": (4, 12),
        "q_conv1d.weight": (8, 1, 4),
        "q_conv1d.bias": (8,),
        "k_conv1d.weight": (8, 1, 4),
        "k_conv1d.bias": (8,),
        "v_conv1d.weight": (24, 1, 4),
        "v_conv1d.bias": (24,),
        "g_proj.weight": (24, 12),
        "o_norm.weight": (6,),
        "o_proj.weight": (12, 24),
    }


@pytest.mark.parametrize("model", ["Qwen3-Next", "Qwen3.5"])
def test_qwen_weights(model: str) -> None:
    """Every row of every projection, found by its place in the stored one."""
    H, HV, K, V = 2, 6, 5, 3
    G = HV // H
    given = qwen_weights(model, H, HV, K, V)
    layer = GatedDeltaNet.from_qwen({f"a.{name}": x for name, x in given.items()}, H, prefix="a.")
    assert (layer.num_heads, layer.num_v_heads) == (H, HV)
    assert (layer.head_k_dim, layer.head_v_dim, layer.conv_size) == (K, V, 4)
    assert layer.o_norm.eps == 1e-6
    found = layer.state_dict()
    taken = dict.fromkeys(("q", "k", "v", "g", "a", "b"), 0)
    for h in range(H):
        # Row of head h, channel c, in the stored projection of Qwen3-Next.
        block = 2 * K + 2 * G * V
        expected = {
            "q": (h * K, K, h * block),
            "k": (h * K, K, h * block + K),
            "v": (h * G * V, G * V, h * block + 2 * K),
            "g": (h * G * V, G * V, h * block + 2 * K + G * V),
            "b": (h * G, G, h * 2 * G),
            "a": (h * G, G, h * 2 * G + G),
        }
        if model == "Qwen3.5":
            starts = {"q": 0, "k": H * K, "v": 2 * H * K}
            expected = {n: (a, c, starts.get(n, 0) + a) for n, (a, c, _) in expected.items()}
        for name, (row, count, stored) in expected.items():
            if model == "Qwen3-Next":
                source = "in_proj_ba" if name in "ab" else "in_proj_qkvz"
            else:
                source = {"g": "in_proj_z", "a": "in_proj_a", "b": "in_proj_b"}.get(
                    name, "in_proj_qkv"
                )
            rows = given[f"{source}.weight"][stored : stored + count]
            assert torch.equal(found[f"{name}_proj.weight"][row : row + count], rows), (name, h)
            taken[name] += count
    assert taken == {"q": H * K, "k": H * K, "v": HV * V, "g": HV * V, "a": HV, "b": HV}
    convolution = torch.cat([found[f"{name}_conv1d.weight"] for name in "qkv"])
    assert torch.equal(convolution, given["conv1d.weight"])
    for ours, theirs in (("o_norm", "norm"), ("o_proj", "out_proj")):
        assert torch.equal(found[f"{ours}.weight"], given[f"{theirs}.weight"])
    assert torch.equal(found["A_log"], given["A_log"])
    assert torch.equal(found["dt_bias"], given["dt_bias"])
    x = make_input(1, 5)
    close(layer(x), rows_written_out(layer, x))


@pytest.mark.parametrize(
    ("change", "num_heads", "message"),
    [
        ({"conv1d.bias": (4,)}, 2, "state_dict must have the linear-attention weights"),
        ({"norm.weight": None}, 2, "state_dict must have the linear-attention weights"),
        ({}, 4, "num_heads must divide the HV=6 value heads"),
        ({}, 0, "num_heads must divide the HV=6 value heads"),
        (
            {"in_proj_ba.weight": (11, HIDDEN)},
            2,
            r"p\.in_proj_ba\.weight must have shape \[12, 20\]",
        ),
    ],
)
def test_wrong_qwen_weights(change: dict[str, Any], num_heads: int, message: str) -> None:
    given = qwen_weights("Qwen3-Next", 2, 6, 5, 3)
    for name, shape in change.items():
        if shape is None:
            del given[name]
        else:
            given[name] = torch.zeros(shape)
    with pytest.raises(ValueError, match=message):
        weights_from_qwen({f"p.{name}": x for name, x in given.items()}, num_heads, "p.")
