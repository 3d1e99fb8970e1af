"""The lines of docs/engines.md against the interfaces that they are written for."""

import ast
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_calls import K, V, decoding, step_of
from engine_sources import definitions, parameters_in, source, wheel_of
from helpers import same_bits
from vllm_steps import HV, Sequence, Step, make_layer

from gdn_triton.integrations import sglang

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engines.md"


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    monkeypatch.setenv("GDN_BACKEND", "reference")


def lines_of(engine: str, **given: Any) -> SimpleNamespace:
    """The block below an engine's heading, executed."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {engine}\n")[1]
    found = re.search(r"```python\n(.*?)```", text, re.S)
    assert found is not None
    namespace: dict[str, Any] = {"__name__": "engines", **given}
    exec(compile(found[1], f"{PAGE}: {engine}", "exec"), namespace)
    return SimpleNamespace(**namespace)


def test_vllm():
    """A prefill and a decode through the method; tests of the layer have the rest."""
    layer, sequence = make_layer(), Sequence([1, 2, 3])
    layer.gdn_prefill_backend = "gdn_triton"
    context = SimpleNamespace(attn_metadata=None)
    page = lines_of("vLLM", get_forward_context=lambda: context)
    for count in (9, 1):
        step = Step(layer, [sequence], [count], [])
        context.attn_metadata = {layer.prefix: step.metadata}
        mixed_qkv, b, a, out = step.inputs()
        page._forward_core(layer, mixed_qkv, b, a, out)
        exact, states = sequence.run(layer)
        torch.testing.assert_close(out[:count].double(), exact[-count:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.kv_cache[1][1].double(), states[-1], rtol=1e-4, atol=1e-5)


def test_sglang():
    kernel = lines_of("SGLang").GdnTritonKernel()
    inputs = decoding(1)
    mixed = torch.cat([inputs[name].flatten(1) for name in ("q", "k", "v")], 1)
    pool, slots = torch.randn(6, 4, V, K), torch.tensor([4, -1, 2])
    expected, expected_pool = step_of(inputs, pool, slots, scale=0.5)
    o = kernel.packed_decode(
        mixed,
        inputs["a"][:, 0],
        inputs["b"][:, 0],
        A_log=inputs["A_log"],
        dt_bias=inputs["dt_bias"],
        scale=0.5,
        ssm_states=pool,
        cache_indices=slots,
        num_v_heads=4,
        head_v_dim=V,
        replayssm_d=None,
    )
    assert same_bits(o.transpose(0, 1), expected) and same_bits(pool, expected_pool)
    x = [torch.randn(1, 9, 2, K) for _ in "qk"] + [torch.randn(1, 9, 4, V)]
    x += [-torch.rand(1, 9, 4), torch.rand(1, 9, 4)]
    call = {"cache_indices": torch.tensor([3, 0]), "query_start_loc": torch.tensor([0, 4, 9])}
    before = pool.clone()
    o, _, _ = kernel.extend(*x, ssm_states=pool, **call, layer_id=3, inplace_update=True)
    expected, _, _ = sglang.chunk_gated_delta_rule(
        *x, None, before, *call.values(), use_qk_l2norm_in_kernel=True
    )
    assert same_bits(o, expected) and same_bits(pool, before)


@pytest.mark.parametrize("method", ["packed_decode", "extend"])
def test_sglang_interface(method):
    """Whatever SGLang's kernel class is called with, ours takes."""
    text = source(wheel_of("sglang"), f"{sglang.MODULE.replace('.', '/')}.py")
    node = definitions(ast.parse(text))[f"TritonGDNKernel.{method}"]
    theirs = {x.partition("=")[0] for x in parameters_in(node, {}).split(", ")}
    ours = inspect.signature(getattr(lines_of("SGLang").GdnTritonKernel, method)).parameters
    assert any(p.kind is inspect.Parameter.VAR_KEYWORD for p in ours.values())
    positional = [n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    assert set(positional) <= theirs


def test_lightllm():
    """A prefill, and a decode that goes on from it, on pools with slots by request."""
    page, layer, sequence = lines_of("LightLLM"), make_layer(), Sequence([2, 0, 0])
    weight = SimpleNamespace(
        conv1d=SimpleNamespace(weight=layer.conv1d.weight[:, 0].mT, bias=None),
        A_log=SimpleNamespace(weight=layer.A_log),
        dt_bias=SimpleNamespace(weight=layer.dt_bias),
    )
    heads = SimpleNamespace(tp_num_k_heads=2, head_k_dim=K, head_v_dim=V)
    conv_states = torch.zeros(4, 3, layer.conv1d.weight.shape[0])
    ssm_states = torch.zeros(4, HV, K, V)
    for count in (9, 1):
        tokens = sequence.draw(count, torch.float32)
        sequence.extend(tokens)
        info = SimpleNamespace(
            is_prefill=count > 1,
            b_req_idx=torch.tensor([2]),
            b1_cu_q_seq_len=torch.tensor([0, count]),
        )
        o = page.core(heads, info, weight, *tokens, conv_states, ssm_states)
        exact, states = sequence.run(layer)
        torch.testing.assert_close(o.double(), exact[-count:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ssm_states[2].mT.double(), states[-1], rtol=1e-4, atol=1e-5)
