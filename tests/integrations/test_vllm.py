"""vLLM's functions on this package's ops. `_forward_core` and the places have other files."""

import pytest
import torch
from engine_calls import (
    PLACES,
    B,
    K,
    N,
    T,
    V,
    at,
    decoding,
    expected_of,
    step_of,
    vllm_call,
)
from helpers import same_bits

import gdn_triton
from gdn_triton.integrations.vllm import functions


@pytest.fixture(autouse=True, params=PLACES)
def place(request, monkeypatch):
    with at(request, monkeypatch):
        yield


@pytest.mark.parametrize("function", [functions.chunk_gated_delta_rule, functions.forward])
def test_prefill(function):
    """From gathered states, which stay; o to the first rows of a buffer."""
    inputs, call = vllm_call()
    state = torch.randn(N, 4, V, K)
    before = state.clone()
    expected, expected_state = expected_of(inputs, state)
    o, final_state = function(**call, initial_state=state)
    assert same_bits(o.squeeze(0), expected) and same_bits(final_state, expected_state)
    assert same_bits(state, before)
    buffer = torch.full((T + 5, 4, V), 7.0)
    o, final_state = function(
        **{**call, "output_final_state": False},
        initial_state=state.bfloat16(),
        core_attn_out=buffer,
    )
    expected, _ = expected_of(inputs, state.bfloat16())
    assert final_state is None and o.data_ptr() == buffer.data_ptr()
    assert same_bits(buffer[:T], expected) and (buffer[T:] == 7).all()


def test_checkpoints():
    """As vLLM calls FlashInfer's prefill: with states after every so many tokens."""
    tokens = 200
    inputs = {"q": torch.randn(tokens, 2, K), "k": torch.randn(tokens, 2, K)}
    inputs |= {"v": torch.randn(tokens, 4, V), "beta": torch.rand(tokens, 4)}
    inputs |= {"g": torch.rand(tokens, 4), "cu_seqlens": torch.tensor([0, 130, 200])}
    x = {name: inputs[name][None] for name in ("q", "k", "v", "g", "beta")}
    states, starts = torch.full((4, 4, V, K), 7.0), torch.tensor([0, 2, 3])
    initial = torch.randn(2, 4, V, K)
    o, final_state = functions.fi_chunk_gated_delta_rule(
        **{**x, "g": x["g"].log()},
        cu_seqlens=inputs["cu_seqlens"],
        initial_state=initial,
        output_final_state=True,
        state_checkpoints=states,
        checkpoint_cu_starts=starts,
        checkpoint_every_n_tokens=64,
    )
    options = {"use_qk_l2norm_in_kernel": True}
    expected, expected_state = expected_of(inputs, initial, **options)
    assert same_bits(o[0], expected) and same_bits(final_state, expected_state)
    for row, (n, first, end) in enumerate([(0, 0, 64), (0, 0, 128), (1, 130, 194)]):
        part = {name: inputs[name][first:end] for name in ("q", "k", "v", "g", "beta")}
        part["cu_seqlens"] = torch.tensor([0, end - first])
        assert same_bits(states[row], expected_of(part, initial[n : n + 1], **options)[1][0])
    assert (states[3] == 7).all()


def test_packed_decode():
    inputs = decoding(1)
    mixed = torch.cat([inputs[name].flatten(1) for name in ("q", "k", "v")], 1)
    gates = {name: inputs[name][:, 0] for name in ("a", "b")}
    pool, slots = torch.randn(6, 4, V, K), torch.tensor([4, 0, 2], dtype=torch.int32)
    expected, expected_pool = step_of(inputs, pool, slots, skip="non_positive", scale=0.5)
    call = {"A_log": inputs["A_log"], "dt_bias": inputs["dt_bias"], "scale": 0.5, **gates}
    out = torch.full((B, 1, 4, V), 7.0)
    o, returned = functions.fused_recurrent_gated_delta_rule_packed_decode(
        mixed,
        **call,
        initial_state=pool,
        out=out,
        ssm_state_indices=slots,
        use_qk_l2norm_in_kernel=True,
    )
    assert o is out and returned is pool and not out[1].any()
    assert same_bits(out, expected) and same_bits(pool, expected_pool)


def drafted(tokens):
    """As vLLM passes what its convolution left: packed, a and b without a batch dimension."""
    inputs = decoding(tokens)
    qkv = {name: inputs[name].flatten(0, 1)[None] for name in ("q", "k", "v")}
    gates = {name: inputs[name].flatten(0, 1) for name in ("a", "b")}
    offsets = torch.arange(0, B * tokens + 1, tokens, dtype=torch.int32)
    parameters = {name: inputs[name] for name in ("A_log", "dt_bias")}
    return inputs, {**qkv, **gates, **parameters, "cu_seqlens": offsets}


def test_decode():
    inputs, call = drafted(1)
    pool, slots = torch.randn(6, 4, V, K), torch.tensor([4, 0, 2, 5])  # more than sequences
    expected, expected_pool = step_of(inputs, pool, slots[:B], skip="non_positive")
    o, returned = functions.fused_sigmoid_gating_delta_rule_update(
        **call, initial_state=pool, ssm_state_indices=slots, use_qk_l2norm_in_kernel=True
    )
    assert returned is pool and same_bits(o[0], expected[:, 0])
    assert same_bits(pool, expected_pool)


@pytest.mark.parametrize("is_given", [True, False], ids=["accepted", "first column"])
def test_verify(is_given):
    """From the column of the last accepted token; the state after each token to its column."""
    inputs, call = drafted(3)
    accepted = torch.tensor([2, 1, 3], dtype=torch.int32) if is_given else None
    slots = torch.tensor([[1, 2, 3], [0, 0, 0], [9, 8, 7]], dtype=torch.int32)
    start = slots[torch.arange(B), accepted.long() - 1] if is_given else slots[:, 0]
    pool = torch.randn(10, 4, V, K)
    scratch = torch.cat([pool, torch.zeros(9, 4, V, K)])
    per_token = torch.arange(10, 19).view(B, 3)
    options = {"skip": "non_positive"}
    expected, scratch = step_of(inputs, scratch, start, per_token, **options)
    before = pool.clone()
    o, _ = functions.fused_sigmoid_gating_delta_rule_update(
        **call,
        initial_state=pool,
        ssm_state_indices=slots,
        num_accepted_tokens=accepted,
        use_qk_l2norm_in_kernel=True,
    )
    assert same_bits(o.view(B, 3, 4, V), expected) and not o.view(B, 3, 4, V)[1].any()
    for n in (0, 2):
        assert same_bits(pool[slots[n]], scratch[per_token[n]])
    assert same_bits(pool[[0, 4, 5, 6]], before[[0, 4, 5, 6]])


def test_olmo_step():
    """From g and beta."""
    inputs, call = drafted(2)
    g, beta = -torch.rand(1, 2 * B, 4), torch.rand(1, 2 * B, 4)
    qkv = {name: call[name] for name in ("q", "k", "v")}
    pool, slots = torch.randn(9, 4, V, K), torch.tensor([[1, 2], [3, 4], [5, 6]])
    accepted, before = torch.tensor([1, 2, 1]), pool.clone()
    o, _ = functions.fused_recurrent_gated_delta_rule(
        **qkv,
        g=g,
        beta=beta,
        initial_state=pool,
        cu_seqlens=call["cu_seqlens"],
        ssm_state_indices=slots,
        num_accepted_tokens=accepted,
        use_qk_l2norm_in_kernel=True,
    )
    expected = gdn_triton.recurrent_step(
        before,
        slots,
        num_accepted_tokens=accepted,
        **{name: inputs[name] for name in ("q", "k", "v")},
        g=g.view(B, 2, 4),
        beta=beta.view(B, 2, 4),
        use_qk_l2norm_in_kernel=True,
        state_v_first=True,
    )
    assert same_bits(o.view(B, 2, 4, V), expected) and same_bits(pool, before)


D, W = 12, 4


def conv_pools(columns=W - 1):
    state = torch.randn(7, columns, D)
    return state.mT, state.clone().mT  # as vLLM's, channels dense


def test_conv():
    weight, bias, x = torch.randn(D, W), torch.randn(D), torch.randn(9, D)
    state, ours = conv_pools(W + 1)
    call = {"read_slots": torch.tensor([4, 0, 2]), "cu_seqlens": torch.tensor([0, 4, 5, 9])}
    flags = torch.tensor([True, True, False])
    y = functions.causal_conv1d_fn(
        x.mT,
        weight,
        bias,
        state,
        call["cu_seqlens"],
        cache_indices=call["read_slots"],
        has_initial_state=flags,
        activation="swish",
        metadata=object(),
    )
    expected = gdn_triton.causal_conv1d(
        x,
        weight,
        bias,
        state=ours[..., : W - 1],
        **call,
        has_initial_state=flags,
        skip="non_positive",
    )
    assert same_bits(y.mT, expected) and same_bits(state, ours)
    with pytest.raises(ValueError, match="has_initial_state must be given"):
        functions.causal_conv1d_fn(x.mT, weight, bias, state, call["cu_seqlens"])
    with pytest.raises(NotImplementedError, match="null_block_id 0"):
        functions.causal_conv1d_fn(
            x.mT, weight, bias, state, call["cu_seqlens"], None, flags, null_block_id=-1
        )


@pytest.mark.of_no_device
@pytest.mark.parametrize("form", ["a token", "tokens", "drafts"])
def test_conv_update(form):
    weight, x = torch.randn(D, W), torch.randn(3, 2, D)
    state, ours = conv_pools(W)
    slots = torch.tensor([4, 0, 2, 6])
    step = {"state": ours[..., : W - 1], "read_slots": slots[:3], "skip": "non_positive"}
    given = {}
    if form == "a token":
        y = functions.causal_conv1d_update(
            x[:, 0], state, weight, activation=True, conv_state_indices=slots[:3]
        )
        expected = gdn_triton.causal_conv1d_update(x[:, 0], weight, **step)
    elif form == "tokens":
        out = torch.empty(3, D, 2)
        y = functions.causal_conv1d_update(
            x.mT, state, weight, activation="silu", conv_state_indices=slots[:3], out=out
        )
        assert y is out
        expected = gdn_triton.causal_conv1d_update(x, weight, **step).mT
    else:
        given = {"num_accepted_tokens": torch.tensor([2, 1, 1])}
        y = functions.causal_conv1d_update(
            x.flatten(0, 1),
            state,
            weight,
            activation="silu",
            conv_state_indices=slots[:3],
            query_start_loc=torch.tensor([0, 2, 4, 6, 6]),
            max_query_len=2,
            **given,
        )
        step |= {"state": ours, **given}
        expected = gdn_triton.causal_conv1d_update(x, weight, **step).flatten(0, 1)
    # Torch's own activation may differ in the last bit between shapes.
    torch.testing.assert_close(y, expected)
    assert same_bits(state, ours)


@pytest.mark.of_no_device
@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"is_kda": True}, NotImplementedError, "is_kda is not served"),
        ({"threshold": 10.0}, NotImplementedError, "beta must be 1.0 and threshold 20.0"),
        ({"inplace_final_state": False}, NotImplementedError, "states are updated in a pool"),
        ({"initial_state": None}, NotImplementedError, "initial_state and ssm_state_indices must"),
        ({"ssm_state_indices": None}, NotImplementedError, "initial_state and ssm_state_indices"),
    ],
)
def test_step_errors(changes, error, message):
    _, call = drafted(1)
    call |= {"initial_state": torch.zeros(6, 4, V, K), "ssm_state_indices": torch.arange(1, 4)}
    with pytest.raises(error, match=message):
        functions.fused_sigmoid_gating_delta_rule_update(**{**call, **changes})
