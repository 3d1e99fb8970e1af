"""torch's proposed `torch.nn.GatedDeltaNet`, on this package's op: against the specification, and
against the proposal's own text where the folder of wheels has it."""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from engine_sources import WHEELS, definitions, parameters_in
from helpers import assert_within_budget

from gdn_triton import reference
from gdn_triton.integrations.torch_nn import EPS, gated_delta_rule

B, T, H, K, V = 2, 70, 3, 16, 8
RULE, MODULE = "torch/nn/attention/gated_delta.py", "torch/nn/modules/gated_delta.py"
SIGNATURE = "query, key, value, decay, beta, *, scale=None, use_qk_l2norm=True"


def inputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Keys and queries among which some are shorter than the least length, and zeros."""
    x = {"query": torch.randn(B, T, H, K), "key": torch.randn(B, T, H, K)}
    x["key"][0, 3] *= 1e-8
    x["query"][0, 4] = 0
    x["key"][1, 5] *= 1e-4
    x |= {"value": torch.randn(B, T, H, V), "decay": -torch.rand(B, T, H)}
    x["beta"] = torch.rand(B, T, H)
    return {name: y.to(dtype) for name, y in x.items()}


def specified(
    x: dict[str, torch.Tensor], wide: torch.dtype, between: torch.dtype, scale: float | None
) -> torch.Tensor:
    """The specification, in float64 that of the recurrence, on q and k that are divided by their
    lengths and rounded to the dtype `between`."""
    q, k, v, g, beta = (x[name].to(wide) for name in ("query", "key", "value", "decay", "beta"))
    q, k = (y / (y * y).sum(-1, keepdim=True).sqrt().clamp_min(EPS) for y in (q, k))
    q, k = (y.to(between).to(wide) for y in (q, k))
    is_exact = wide == torch.float64
    rule = reference.recurrent_gated_delta_rule if is_exact else reference.chunk_gated_delta_rule
    return rule(q, k, v, g, beta, scale=scale)[0]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rule(dtype: torch.dtype, scale: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "reference")
    x = inputs(dtype)
    o = gated_delta_rule(**x, scale=scale)
    assert o.dtype == dtype
    exact = specified(x, torch.float64, torch.float64, scale)
    near = specified(x, torch.float32, dtype, scale).to(dtype)
    assert_within_budget("o", o, exact, near, dtype=dtype, unit=2**-24)
    plain = gated_delta_rule(**x, scale=scale, use_qk_l2norm=False)
    names = {"query": "q", "key": "k", "value": "v", "decay": "g", "beta": "beta"}
    wide = {names[name]: y.double() for name, y in x.items()}
    expected, _ = reference.recurrent_gated_delta_rule(**wide, scale=scale)
    torch.testing.assert_close(plain.double(), expected, rtol=0.02, atol=0.02)


def test_errors() -> None:
    x = inputs(torch.float32)
    with pytest.raises(TypeError, match=r"query must be a torch\.Tensor"):
        gated_delta_rule(**{**x, "query": None})
    with pytest.raises(ValueError, match="query must be float16, bfloat16"):
        gated_delta_rule(**{**x, "query": x["query"].int()})
    with pytest.raises(TypeError, match="use_qk_l2norm must be True or False"):
        gated_delta_rule(**x, use_qk_l2norm=1)
    with pytest.raises(ValueError, match=r"g must have shape"):
        gated_delta_rule(**{**x, "decay": x["decay"][:, 1:]})


def text(file: str) -> str:
    path = Path(os.environ.get(WHEELS, "")) / "torch-197487" / file
    if not path.is_file():
        pytest.skip(f"{WHEELS} names no folder with the proposal's {file}")
    return path.read_text(encoding="utf-8")


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The proposal's two files as modules of torch, without its context parallelism."""
    importlib.import_module("torch.nn.attention")
    importlib.import_module("torch.distributed.tensor.experimental._context_parallel")
    parallel = "torch.distributed.tensor.experimental._context_parallel._gated_delta"
    names = ("a2a_feat_to_seq", "a2a_seq_to_feat", "a2a_seq_to_feat_sections")
    stub = ModuleType(parallel)
    vars(stub).update(dict.fromkeys((*names, "slice_param_cp", "slice_sections_cp")))
    vars(stub)["current_cp_group"] = lambda: None
    monkeypatch.setitem(sys.modules, parallel, stub)
    made = []
    for file in (RULE, MODULE):
        name = file.removesuffix(".py").replace("/", ".")
        module = ModuleType(name)
        module.__package__ = name.rpartition(".")[0]
        exec(compile(text(file), file, "exec"), vars(module))
        monkeypatch.setitem(sys.modules, name, module)
        made.append(module)
    return made


def test_its_signature() -> None:
    import ast

    for name in ("gated_delta_rule", "_gated_delta_rule_impl"):
        assert parameters_in(definitions(ast.parse(text(RULE)))[name], {}) == SIGNATURE


def test_our_signature() -> None:
    import inspect

    ours = str(inspect.signature(gated_delta_rule))
    names = [x.strip().partition(":")[0] for x in ours.partition("(")[2].split(",")]
    assert names == [x.partition("=")[0] for x in SIGNATURE.split(", ")]


def test_its_module(proposed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proposal's layer on ours, as on its own loop: its output and every gradient."""
    monkeypatch.setenv("GDN_BACKEND", "reference")
    rule, module = proposed
    torch.manual_seed(0)
    layer = module.GatedDeltaNet(24, H, K, V).double()
    x = torch.randn(B, T, 24, dtype=torch.float64, requires_grad=True)
    wanted = [x, *layer.parameters()]
    expected = layer(x)
    weights = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * weights).sum(), wanted)
    calls = []

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(len(args))
        return gated_delta_rule(*args, **kwargs)

    monkeypatch.setattr(rule, "_gated_delta_rule_impl", spy)
    y = layer(x)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-10)
    found = torch.autograd.grad((y * weights).sum(), wanted)
    for got, want in zip(found, gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)
    call = inputs(torch.float64)
    torch.testing.assert_close(rule.gated_delta_rule(**call), gated_delta_rule(**call))
    assert calls == [5, 5]
