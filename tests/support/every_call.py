"""A call of every public function that computes, with gradients if it has some, for tests of all
operands."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from helpers import FP16
from pool_cases import OPS, run
from shard_cases import GATE, SIGMOID
from torch import Tensor

import gdn_triton

B, T, H, HV, K, V = 2, 20, 1, 3, 16, 16
D, W = 2 * H * K + HV * V, 4


@dataclass(frozen=True)
class Call:
    """run(tensors): all results by name, with what was written. function: the public one."""

    function: Callable[..., Any]
    make: Callable[[], dict[str, Any]]
    run: Callable[[dict[str, Any]], dict[str, Tensor]]
    segments: bool = False


def of_pools(name: str, dtype: torch.dtype | None = None, *, segments: bool = False) -> Call:
    """A call of pool_cases.py, with q, k, v and an output of that dtype."""
    op = OPS[name]

    def make() -> dict[str, Any]:
        x = op.make()
        narrow = {n: y.to(dtype) for n, y in x.items() if n in ("q", "k", "v", "out")}
        return x | narrow

    return Call(op.call, make, lambda x: run(op, x), segments)


def training(
    function: Callable[..., Any], make: Callable[[], dict[str, Any]], results: tuple[str, ...]
) -> Call:
    """Results and gradients of all floats. results: the names of what comes back, whose gradients
    are given as `d` and the name."""

    def run(x: dict[str, Any]) -> dict[str, Tensor]:
        above = [x[f"d{name}"] for name in results]
        given = {n: y for n, y in x.items() if n[1:] not in results}
        floats = {n: y for n, y in given.items() if isinstance(y, Tensor)}
        leaves = {n: y.detach().requires_grad_() for n, y in floats.items()}
        found = function(**{**given, **leaves})
        found = found if isinstance(found, tuple) else (found,)
        gradients = torch.autograd.grad(found, list(leaves.values()), above)
        named = {f"gradient of {n}": y for n, y in zip(leaves, gradients, strict=True)}
        return dict(zip(results, found, strict=True)) | named

    return Call(function, make, run)


def make_chunk(dtype: torch.dtype | None = None, **options: Any) -> dict[str, Any]:
    narrow = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, V), "do": (B, T, HV, V)}
    x: dict[str, Any] = {n: torch.randn(shape) for n, shape in narrow.items()}
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    x = {n: y.to(dtype) for n, y in x.items()}
    x |= {"g": -torch.rand(B, T, HV), "beta": torch.rand(B, T, HV)}
    if "use_gate_in_kernel" in options:
        x |= {"A_log": torch.randn(HV), "dt_bias": torch.randn(HV)}
    states = {"initial_state": torch.randn(B, HV, K, V), "dstate": torch.randn(B, HV, K, V)}
    return {**x, **states, "output_final_state": True, "chunk_size": 16, **options}


def make_conv() -> dict[str, Any]:
    x = {"x": torch.randn(B, T, D), "weight": torch.randn(D, W), "bias": torch.randn(D)}
    return {**x, "dy": torch.randn(B, T, D)}


def make_norm() -> dict[str, Any]:
    x = {n: torch.randn(T, HV, V) for n in ("x", "gate", "dy")}
    return {**x, "weight": torch.randn(V)}


RULE, RAW = ("o", "state"), {**GATE, **SIGMOID, "use_qk_l2norm_in_kernel": True}
CHUNK = gdn_triton.chunk_gated_delta_rule
CALLS = {
    **{name: of_pools(name) for name in OPS},
    "chunk, fused": of_pools("chunk", FP16),
    "chunk, segments": of_pools("chunk", FP16, segments=True),
    "prefill, fused": of_pools("prefill", FP16),
    "prefill, segments": of_pools("prefill", FP16, segments=True),
    "chunk, gradients": training(CHUNK, make_chunk, RULE),
    "chunk, raw gradients": training(CHUNK, lambda: make_chunk(**RAW), RULE),
    "chunk, fused gradients": training(CHUNK, lambda: make_chunk(FP16), RULE),
    "conv, gradients": training(gdn_triton.causal_conv1d, make_conv, ("y",)),
    "norm, gradients": training(gdn_triton.rms_norm_gated, make_norm, ("y",)),
}
# Functions that launch no kernel themselves.
OTHERS = {"Explanation", "__version__", "explain", "explain_call", "warmup"}
OTHERS |= {"PreparedStep", "prepare_step", "StepWindow", "make_window"}
# Other names of the same functions.
NAMES = {"chunk_gdn", "fused_recurrent_gdn"}
