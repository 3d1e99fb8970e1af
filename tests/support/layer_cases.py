"""Helpers that the tests of layers share."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from helpers import FP64
from torch import Tensor

from gdn_triton.layers import GatedDeltaNet

HIDDEN = 20
# Every option of the constructor that changes the arithmetic.
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "value-groups": {"num_v_heads": 6, "expand_v": 1.5},
    "no-output-gate": {"use_gate": False, "norm_eps": 0.1},
    "sigmoid-gate": {"output_gate_activation": "sigmoid"},
    "no-convolution": {"use_short_conv": False},
    "long-convolution": {"conv_size": 7, "conv_bias": True},
    "convolution-of-one": {"conv_size": 1, "conv_bias": True},
    "reflections": {"allow_neg_eigval": True},
}


def make_layer(
    name: str = "default", dtype: torch.dtype = FP64, device: str = "cpu", **options: Any
) -> GatedDeltaNet:
    torch.manual_seed(1)
    given = {"hidden_size": HIDDEN, "head_dim": 8, "num_heads": 2, **OPTIONS[name], **options}
    layer = GatedDeltaNet(**given)
    with torch.no_grad():
        # Weights as after training: none is left at its initial 1.
        layer.o_norm.weight += 0.3 * torch.randn_like(layer.o_norm.weight)
        layer.dt_bias += 3.0  # time steps long enough to forget
    return layer.to(device, dtype)


def make_input(B: int, T: int, dtype: torch.dtype = FP64, device: str = "cpu") -> Tensor:
    return torch.randn(B, T, HIDDEN, generator=torch.Generator().manual_seed(2)).to(device, dtype)


def written_out(layer: GatedDeltaNet, x: Tensor, state_dtype: torch.dtype | None = None) -> Tensor:
    """The layer on one sequence [T, hidden], computed from its weights without any function of the
    package. The parts that join tokens, and the norm, are computed in state_dtype, the others in
    x's dtype."""
    wide = state_dtype or x.dtype
    w = dict(layer.named_parameters())
    H, HV, K, V = layer.num_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim

    def joined(name: str) -> Tensor:
        y = x @ w[f"{name}_proj.weight"].T
        if layer.use_short_conv:
            taps = w[f"{name}_conv1d.weight"][:, 0]
            W = taps.shape[1]
            before = torch.cat([y.new_zeros(W - 1, y.shape[1]), y])
            y = sum(taps[:, j] * before[j : j + len(x)] for j in range(W))
            if layer.conv_bias:
                y = y + w[f"{name}_conv1d.bias"]
        return (y * torch.sigmoid(y)).to(wide)

    q, k = (joined(name).unflatten(1, (H, K)) for name in "qk")
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    q, k = (y.repeat_interleave(HV // H, 1) for y in (q, k))
    v = joined("v").unflatten(1, (HV, V))
    a, b = ((x @ w[f"{name}_proj.weight"].T).to(wide) for name in "ab")
    decay = torch.exp(-w["A_log"].to(wide).exp() * (1 + (a + w["dt_bias"].to(wide)).exp()).log())
    beta = (2 if layer.allow_neg_eigval else 1) * torch.sigmoid(b)
    state = v.new_zeros(HV, K, V)
    rows = []
    for t in range(len(x)):
        state = decay[t, :, None, None] * state
        change = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,h,hv->hkv", k[t], beta[t], change)
        rows.append(torch.einsum("hkv,hk->hv", state, q[t]) / math.sqrt(K))
    o = torch.stack(rows).to(x.dtype).to(wide) if rows else v
    o = o / (o.square().mean(-1, keepdim=True) + layer.o_norm.eps).sqrt() * w["o_norm.weight"]
    if layer.use_gate:
        z = (x @ w["g_proj.weight"].T).to(wide).unflatten(1, (HV, V))
        o = o * torch.sigmoid(z) * (1 if layer.output_gate_activation == "sigmoid" else z)
    return o.to(x.dtype).flatten(1) @ w["o_proj.weight"].T


def rows_written_out(layer: GatedDeltaNet, x: Tensor, **options: Any) -> Tensor:
    """`written_out` of each row of x [B, T, hidden]."""
    return torch.stack([written_out(layer, row, **options) for row in x])


def offsets_of(lengths: Sequence[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def close(found: Tensor, expected: Tensor) -> None:
    """The result in float64, where only the order of the arithmetic differs."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


MASKS = {
    "left": [[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8, [0] * 7 + [1]],
    "right": [[1, 1, 1, 0, 0, 0, 0, 0], [1] * 8, [0] * 8],
    "between": [[1, 0, 0, 1, 1, 0, 1, 0], [0, 1] * 4, [0, 0, 1, 1, 0, 0, 1, 1]],
}


def gradients(
    layer: GatedDeltaNet, x: Tensor, run: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
    (y * weights).sum().backward()
    found = {name: p.grad for name, p in layer.named_parameters()} | {"x": x.grad}
    assert all(grad is not None for grad in found.values())
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def assert_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, grad in expected.items():
        assert grad.any(), f"{name}: nothing to compare"
        torch.testing.assert_close(found[name], grad, rtol=1e-7, atol=1e-9, msg=name)


def qwen_weights(model: str, H: int, HV: int, K: int, V: int) -> dict[str, Tensor]:
    """Random ones, in the model's shapes."""
    torch.manual_seed(6)
    shapes: dict[str, tuple[int, ...]] = {
        "A_log": (HV,),
        "dt_bias": (HV,),
        "conv1d.weight": (2 * H * K + HV * V, 1, 4),
        "norm.weight": (V,),
        "out_proj.weight": (HIDDEN, HV * V),
    }
    if model == "Qwen3-Next":
        shapes["in_proj_qkvz.weight"] = (2 * H * K + 2 * HV * V, HIDDEN)
        shapes["in_proj_ba.weight"] = (2 * HV, HIDDEN)
    else:
        shapes["in_proj_qkv.weight"] = (2 * H * K + HV * V, HIDDEN)
        shapes["in_proj_z.weight"] = (HV * V, HIDDEN)
        shapes["in_proj_b.weight"] = shapes["in_proj_a.weight"] = (HV, HIDDEN)
    return {name: torch.randn(*shape, dtype=FP64) for name, shape in shapes.items()}


class Graphs:
    """A compiler that runs the given graph, and counts. It begins with no code compiled."""

    def __init__(self) -> None:
        torch.compiler.reset()
        self.seen = 0

    def __call__(self, module: Any, example_inputs: Any) -> Any:
        self.seen += 1
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(module, example_inputs)
