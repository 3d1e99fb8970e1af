"""SGLang's convolution, jet_nemotron's recurrence, and the places where ours are put; its own
kernels beside ours where its wheel is given."""

import sys
from importlib.machinery import BuiltinImporter
from types import ModuleType
from typing import Optional, Union

import pytest
import ring_calls
import torch
from engine_calls import B, K, V, decoding, step_of
from engine_kernels import GIVEN, be_lenient
from engine_sources import load, recorded
from helpers import same_bits

import gdn_triton
from gdn_triton.integrations import sglang

D, W = 12, 4


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    monkeypatch.setenv("GDN_BACKEND", "reference")


def pools(columns=W - 1):
    state = torch.randn(7, columns, D)
    return state.mT, state.clone().mT


def test_conv():
    weight, bias, x = torch.randn(D, W), torch.randn(D), torch.randn(9, D)
    state, ours = pools(W + 1)
    call = {"read_slots": torch.tensor([4, -1, 2]), "cu_seqlens": torch.tensor([0, 4, 5, 9])}
    flags = torch.tensor([True, True, False])
    y = sglang.causal_conv1d_fn(
        x.mT,
        weight,
        bias,
        activation=True,
        conv_states=state,
        query_start_loc=call["cu_seqlens"],
        seq_lens_cpu=[4, 1, 4],
        cache_indices=call["read_slots"],
        has_initial_state=flags,
    )
    expected = gdn_triton.causal_conv1d(
        x, weight, bias, state=ours[..., : W - 1], **call, has_initial_state=flags
    )
    assert same_bits(y.mT, expected) and same_bits(state, ours)
    with pytest.raises(TypeError, match="does not know tile"):
        sglang.causal_conv1d_fn(x.mT, weight, bias, state, call["cu_seqlens"], [], tile=3)


@pytest.mark.parametrize("form", ["a token", "tokens", "drafts"])
def test_conv_update(form):
    weight, x = torch.randn(D, W), torch.randn(3, 2, D)
    state, ours = pools(W)
    slots = torch.tensor([4, -1, 2])
    step = {"state": ours[..., : W - 1], "read_slots": slots}
    if form == "a token":
        y = sglang.causal_conv1d_update(
            x[:, 0], state, weight, activation="swish", conv_state_indices=slots
        )
        expected = gdn_triton.causal_conv1d_update(x[:, 0], weight, **step)
    else:
        accepted = None if form == "tokens" else torch.tensor([2, 1, 1])
        y = sglang.causal_conv1d_update(
            x.mT,
            state,
            weight,
            activation="silu",
            conv_state_indices=slots,
            num_accept_tokens=accepted,
        )
        if accepted is not None:
            step |= {"state": ours, "num_accepted_tokens": accepted}
        expected = gdn_triton.causal_conv1d_update(x, weight, **step).mT
    assert same_bits(y, expected) and same_bits(state, ours)


@pytest.mark.parametrize(
    "name, value",
    [
        *dict.fromkeys(
            ("intermediate_conv_window", "retrieve_next_token", "cache_seqlens"), torch.zeros(3)
        ).items(),
        ("pad_slot_id", 0),
    ],
)
def test_conv_errors(name, value):
    state, _ = pools()
    with pytest.raises(NotImplementedError, match=name):
        sglang.causal_conv1d_update(torch.randn(3, D), state, torch.randn(D, W), **{name: value})


def test_split():
    mixed = torch.randn(5, 2 * 2 * K + 4 * V)
    q, k, v = sglang.fused_qkv_split_gdn_prefill(mixed, 2, 2, 4, K, K, V)
    assert [x.shape for x in (q, k, v)] == [(1, 5, 2, K), (1, 5, 2, K), (1, 5, 4, V)]
    assert same_bits(torch.cat([x.flatten(2)[0] for x in (q, k, v)], 1), mixed)
    assert v.data_ptr() == mixed.data_ptr() + 4 * 4 * K, "a copy"


def test_jet_nemotron():
    inputs = decoding(3)
    qkv = {name: inputs[name].flatten(0, 1)[None] for name in ("q", "k", "v")}
    g, beta = -torch.rand(1, 3 * B, 4), torch.rand(1, 3 * B, 4)
    pool, slots = torch.randn(6, 4, V, K), torch.tensor([4, -1, 2])
    before = pool.clone()
    call = {**qkv, "initial_state_source": pool, "initial_state_indices": slots}
    call |= {"cu_seqlens": torch.arange(0, 3 * B + 1, 3), "use_qk_l2norm_in_kernel": True}
    o = sglang.fused_recurrent_gated_delta_rule_update(**call, g=g, beta=beta)
    tokens = {name: inputs[name] for name in ("q", "k", "v")}
    gates = {"g": g.view(B, 3, 4), "beta": beta.view(B, 3, 4)}
    expected, expected_pool = step_of({**tokens, **gates}, before, slots)
    torch.testing.assert_close(o.view(B, 3, 4, V), expected)
    torch.testing.assert_close(pool, expected_pool)
    with pytest.raises(NotImplementedError, match="retrieve_parent_token"):
        sglang.fused_recurrent_gated_delta_rule_update(
            **call, g=g, retrieve_parent_token=torch.zeros(B, 3)
        )
    with pytest.raises(ValueError, match="initial_state_source and initial_state_indices must"):
        sglang.fused_recurrent_gated_delta_rule_update(
            **{**call, "initial_state_source": None}, g=g
        )


# ---------------------------------------------------------------------------------- the places


def function_of(name):
    """A function of SGLang's with its parameters, that says who was called."""
    namespace = {}
    exec(f"def {name}({recorded('sglang', name)}): return {name!r}", namespace)
    return namespace[name]


@pytest.fixture
def engine(monkeypatch):
    """SGLang's modules, with the functions that its layers look up."""
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    found = {}
    for module, names in sglang.PLACES.items():
        parts = module.split(".")
        for n in range(1, len(parts) + 1):
            path = ".".join(parts[:n])
            if path not in sys.modules:
                package = ModuleType(path)
                package.__path__ = []
                monkeypatch.setitem(sys.modules, path, package)
        found[module] = sys.modules[module]
        for name in names:
            setattr(found[module], name, function_of(name))
        for name in sglang.OTHERS.get(module, ()):
            setattr(found[module], name, object())
    yield found
    monkeypatch.undo()
    sglang._patches.take_back()
    sglang._patches.made.clear()


def functions_in(engine):
    return {(m, n): getattr(engine[m], n) for m, names in sglang.PLACES.items() for n in names}


def test_enable(engine):
    theirs = functions_in(engine)
    report = sglang.enable()
    ours = functions_in(engine)
    assert not set(map(id, ours.values())) & set(map(id, theirs.values()))
    sglang.enable()
    assert functions_in(engine) == ours
    assert len([place for place in report.places if place.op]) == len(theirs)
    assert "causal_conv1d_update with the windows of drafts: not ours: SGLang's own" in str(report)
    assert "fused_gdn_gating: not ours: a prefill takes g and beta" in str(report)
    # The function that the layer's call finds there now.
    inputs = decoding(1)
    call = {**inputs, "softplus_beta": 1.0, "softplus_threshold": 20.0, "is_kda": False}
    call |= {"use_qk_l2norm_in_kernel": True}
    pool, slots = torch.randn(6, 4, V, K), torch.tensor([4, 0, 2])
    expected, expected_pool = step_of(inputs, pool, slots)
    states = {"initial_state_source": pool, "initial_state_indices": slots}
    update = engine[sglang.MODULE].fused_sigmoid_gating_delta_rule_update
    o = update(**call, **states)
    assert same_bits(o, expected) and same_bits(pool, expected_pool)
    # Raw values of drafts are SGLang's still; rings that might have had them are not.
    raw = update(**call, **states, replayssm_rawv=torch.zeros(B, 1))
    assert raw == "fused_sigmoid_gating_delta_rule_update"
    assert update(**call, **states, replayssm_rawv=None).shape == o.shape
    decode = engine[sglang.MODULE].fused_recurrent_gdn_replayssm_decode
    rings = ring_calls.decode()
    longer = {**rings, "d_cache": torch.zeros(1, 1, 33, 1)}
    assert decode(**longer) == "fused_recurrent_gdn_replayssm_decode"
    assert decode(**rings)[0] is rings["out"]
    conv = engine["sglang.srt.layers.attention.linear.gdn_backend"].causal_conv1d_update
    x = torch.randn(3, D), torch.zeros(3, D, W - 1), torch.randn(D, W)
    assert conv(*x, intermediate_conv_window=torch.zeros(1)) == "causal_conv1d_update"
    assert conv(*x, intermediate_conv_window=None).shape == (3, D)
    # Another's replacement is left alone.
    engine[sglang.MODULE].chunk_gated_delta_rule = another = object()
    sglang.disable()
    assert engine[sglang.MODULE].chunk_gated_delta_rule is another
    del theirs[(sglang.MODULE, "chunk_gated_delta_rule")]
    now = functions_in(engine)
    assert all(now[key] is function for key, function in theirs.items())


def test_unknown(engine, monkeypatch):
    def later(*, q, tile):
        raise AssertionError

    module = engine[sglang.MODULE]
    monkeypatch.setattr(module, "chunk_gated_delta_rule", later)
    with pytest.raises(RuntimeError, match="takes tile, which gdn_triton does not know"):
        sglang.enable()
    monkeypatch.delattr(module, "chunk_gated_delta_rule")
    with pytest.raises(ImportError, match="finds no chunk_gated_delta_rule"):
        sglang.enable()
    monkeypatch.setitem(sys.modules, sglang.MODULE, None)
    with pytest.raises(ImportError, match=f"finds no {sglang.MODULE}"):
        sglang.enable()
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [BuiltinImporter])
    with pytest.raises(ImportError, match="needs SGLang, which is not installed in this"):
        sglang.status()


def test_without_jet_nemotron(engine, monkeypatch):
    name = "sglang.srt.models.jet_nemotron"
    monkeypatch.setitem(sys.modules, name, None)
    assert f"{name}: not ours: not imported" in str(sglang.enable())


# ------------------------------------------------------------------------------ SGLang's own


@pytest.mark.parametrize("tokens", [1, 3])
def test_conv_as_sglang(tokens, monkeypatch):
    be_lenient(monkeypatch)
    given = {**GIVEN, "PAD_SLOT_ID": -1, "Optional": Optional, "Union": Union}
    given |= {"List": list, "is_arch_support_pdl": lambda: False}
    names = ("_causal_conv1d_update_kernel", "causal_conv1d_update")
    theirs = load("sglang", "sglang/kernels/ops/mamba/causal_conv1d_triton.py", names, given)
    weight, x = torch.randn(D, W), torch.randn(3, D, tokens)
    x = x[..., 0] if tokens == 1 else x
    state, other = pools()
    slots = torch.tensor([4, 6, 2])
    call = {"activation": "silu", "conv_state_indices": slots}
    y = sglang.causal_conv1d_update(x, state, weight, **call)
    expected = theirs["causal_conv1d_update"](x, other, weight, **call)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    assert same_bits(state, other)


def test_decode_as_sglang():
    name = "fused_recurrent_gated_delta_rule_packed_decode"
    theirs = load(
        "sglang",
        "sglang/kernels/ops/attention/fla/fused_recurrent.py",
        (f"{name}_kernel", name),
        {**GIVEN, "is_arch_support_pdl": lambda: False},
    )
    inputs = decoding(1)
    mixed = torch.cat([inputs[x].flatten(1) for x in ("q", "k", "v")], 1)
    gates = {x: inputs[x][:, 0] for x in ("a", "b")}
    pool, slots = torch.randn(6, 4, V, K), torch.tensor([4, 1, 2], dtype=torch.int32)
    other = pool.clone()
    call = {"A_log": inputs["A_log"], "dt_bias": inputs["dt_bias"], "scale": 0.5, **gates}
    call |= {"ssm_state_indices": slots, "use_qk_l2norm_in_kernel": True}
    o, expected = torch.empty(2, B, 1, 4, V)
    getattr(sglang, name)(mixed, **call, initial_state=pool, out=o)
    theirs[name](mixed, **call, initial_state=other, out=expected)
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pool, other, rtol=1e-5, atol=1e-6)
