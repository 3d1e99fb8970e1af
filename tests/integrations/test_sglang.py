"""SGLang's functions on this package's ops, and where they are put."""

import itertools

import pytest
import torch
from engine_calls import PLACES, B, K, V, at, decoding, step_of
from helpers import assert_within_budget, same_bits

import gdn_triton
from gdn_triton import reference as specification
from gdn_triton.integrations import sglang


@pytest.fixture(autouse=True, params=PLACES)
def place(request, monkeypatch):
    with at(request, monkeypatch):
        yield


def sglang_prefill(offsets, **changes):
    tokens = offsets[-1]
    inputs = {
        "q": torch.randn(1, tokens, 2, K),
        "k": torch.randn(1, tokens, 2, K),
        "v": torch.randn(1, tokens, 4, V),
        "g": -torch.rand(1, tokens, 4),
        "beta": torch.rand(1, tokens, 4),
        "cu_seqlens": torch.tensor(offsets, dtype=torch.int32),
        "use_qk_l2norm_in_kernel": True,
    }
    return {**inputs, **changes}


def tokens_of(inputs, start, end):
    part = {name: inputs[name][:, start:end] for name in ("q", "k", "v", "g", "beta")}
    return {**part, "use_qk_l2norm_in_kernel": True}


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_sglang_prefill(slot_dtype):
    """o and the pool, and the state before every chunk, each as the final state of a call."""
    offsets = (0, 130, 130, 194, 201)
    inputs = sglang_prefill(offsets)
    pool, slots = torch.randn(9, 4, V, K), torch.tensor([5, 0, 8, 2], dtype=slot_dtype)
    before = pool.clone()
    o, final_state, h = sglang.chunk_gated_delta_rule(
        **inputs, initial_state=pool, initial_state_indices=slots, head_first=False
    )
    assert final_state is None and h.shape[0] == 1 and h.shape[2:] == (4, V, K)
    row = 0
    for n, (start, end) in enumerate(itertools.pairwise(offsets)):
        slot = slots[n : n + 1].long()
        if start == end:
            assert same_bits(pool[slot], before[slot])
            continue
        for t in range(start, end, 64):
            state = before[slot]
            if t > start:
                _, state = gdn_triton.chunk_gated_delta_rule(
                    **tokens_of(inputs, start, t),
                    initial_state=state,
                    output_final_state=True,
                    state_v_first=True,
                )
            assert same_bits(h[0, row], state[0]), (n, t)
            row += 1
        expected, state = gdn_triton.chunk_gated_delta_rule(
            **tokens_of(inputs, start, end),
            initial_state=before[slot],
            output_final_state=True,
            state_v_first=True,
        )
        assert same_bits(o[:, start:end], expected) and same_bits(pool[slot], state)
    assert same_bits(pool[[1, 3, 4, 6, 7]], before[[1, 3, 4, 6, 7]])


def assert_specified(narrow, inputs, got, got_states, initial_state, **options):
    """o and the final states against the recurrence in float64; the budget is from `narrow`, one of
    the specification's two forms, in float32."""
    runs = []
    for form, dtype in (
        (specification.recurrent_gated_delta_rule, torch.float64),
        (narrow, torch.float32),
    ):
        wide = {
            name: x.to(dtype) if x.is_floating_point() else x
            for name, x in {**inputs, "initial_state": initial_state}.items()
        }
        runs.append(form(**wide, **options, use_qk_l2norm=True, state_v_first=True)[:2])
    for name, x, exact, close in zip(("o", "state"), (got, got_states), *runs, strict=True):
        assert_within_budget(name, x, exact, close, dtype=torch.float32, unit=2**-24)


def test_sglang_prefill_specification():
    inputs = sglang_prefill((0, 70, 75), scale=0.5)
    pool, slots = torch.randn(3, 4, V, K), torch.tensor([2, 0])
    before = pool.clone()
    o, _, _ = sglang.chunk_gated_delta_rule(
        **inputs, initial_state=pool, initial_state_indices=slots
    )
    names = ("q", "k", "v", "g", "beta", "cu_seqlens")
    x = {name: inputs[name] for name in names}
    chunked = specification.chunk_gated_delta_rule
    assert_specified(chunked, x, o, pool[slots], before[slots], scale=0.5)


def test_sglang_prefill_padded():
    """Without cu_seqlens, and with a padded sequence."""
    inputs = sglang_prefill((0, 140))
    two = {
        name: inputs[name].unflatten(1, (2, 70)).squeeze(0)
        for name in tokens_of(inputs, 0, 0)
        if name != "use_qk_l2norm_in_kernel"
    }
    pool, slots = torch.randn(3, 4, V, K), torch.tensor([2, -1])
    before = pool.clone()
    o, _, h = sglang.chunk_gated_delta_rule(
        **two, initial_state=pool, initial_state_indices=slots, use_qk_l2norm_in_kernel=True
    )
    assert h.shape == (2, 2, 4, V, K) and same_bits(h[0, 0], before[2])
    _, state = gdn_triton.chunk_gated_delta_rule(
        **tokens_of(inputs, 0, 64),
        initial_state=before[2:],
        output_final_state=True,
        state_v_first=True,
    )
    assert same_bits(h[0, 1], state[0])
    # SGLang's padded sequence starts from zeros, and keeps nothing.
    zeros, states, h_zeros = sglang.chunk_gated_delta_rule(
        **{name: x[1:] for name, x in two.items()},
        initial_state=torch.zeros(1, 4, V, K),
        initial_state_indices=torch.tensor([0]),
        use_qk_l2norm_in_kernel=True,
    )
    assert states is None and o[1].any() and same_bits(o[1], zeros[0])
    assert same_bits(h[1], h_zeros[0]) and same_bits(pool[:2], before[:2])


def test_sglang_prefill_without_update():
    """Several sequences go on from one slot, which stays."""
    inputs = sglang_prefill((0, 30, 100))
    pool, slots = torch.randn(3, 4, V, K), torch.tensor([1, 1])
    before = pool.clone()
    o, _, _ = sglang.chunk_gated_delta_rule(
        **inputs, initial_state=pool, initial_state_indices=slots, inplace_update=False
    )
    assert same_bits(pool, before)
    copies = before[slots]
    expected, _, _ = sglang.chunk_gated_delta_rule(
        **inputs, initial_state=copies, initial_state_indices=torch.arange(2)
    )
    assert same_bits(o, expected)


@pytest.mark.of_no_device
@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"head_first": True}, NotImplementedError, "head_first"),
        ({"initial_state": None}, ValueError, "initial_state and initial_state_indices must be"),
        ({"initial_state_indices": None}, ValueError, "initial_state and initial_state_indices"),
        ({"initial_state_indices": torch.arange(3)}, ValueError, r"must have shape \[N=2\]"),
        ({"v": torch.ones(1, 9, 4, V, requires_grad=True)}, NotImplementedError, "gradient"),
    ],
)
def test_sglang_prefill_errors(changes, error, message):
    good = {"initial_state": torch.zeros(4, 4, V, K), "initial_state_indices": torch.arange(2)}
    with pytest.raises(error, match=message):
        sglang.chunk_gated_delta_rule(**{**sglang_prefill((0, 4, 9)), **good, **changes})


SOFTPLUS = {"softplus_beta": 1.0, "softplus_threshold": 20.0, "use_qk_l2norm_in_kernel": True}


def sglang_tokens(tokens):
    """As SGLang splits what its convolution left: packed, a and b without a batch dimension."""
    inputs = decoding(tokens)
    packed_ = {name: inputs[name].flatten(0, 1)[None] for name in ("q", "k", "v")}
    gates = {name: inputs[name].flatten(0, 1) for name in ("a", "b")}
    return inputs, {**inputs, **packed_, **gates}


def test_sglang_packed_decode():
    inputs = decoding(1)
    mixed = torch.cat([inputs[name].flatten(1) for name in ("q", "k", "v")], 1)
    gates = {name: inputs[name][:, 0] for name in ("a", "b")}
    pool, slots = torch.randn(6, 4, V, K), torch.tensor([4, -1, 2], dtype=torch.int32)
    expected, expected_pool = step_of(inputs, pool, slots, scale=0.5)
    call = {"A_log": inputs["A_log"], "dt_bias": inputs["dt_bias"], "scale": 0.5, **gates}
    call |= {"ssm_state_indices": slots, "use_qk_l2norm_in_kernel": True}
    out = torch.full((B, 1, 4, V), 7.0)
    o, returned = sglang.fused_recurrent_gated_delta_rule_packed_decode(
        mixed, **call, initial_state=pool, out=out
    )
    assert o is out and returned is pool
    assert same_bits(out, expected) and same_bits(pool, expected_pool)
    assert not out[1].any(), "a padded sequence has an output"
    with pytest.raises(ValueError, match="out must have shape"):
        sglang.fused_recurrent_gated_delta_rule_packed_decode(
            mixed, **call, initial_state=pool, out=out.squeeze(1)
        )


def test_sglang_decode():
    inputs, call = sglang_tokens(1)
    pool, slots = torch.randn(6, 4, V, K), torch.tensor([4, -1, 2, 0, 0])  # more than sequences
    expected, expected_pool = step_of(inputs, pool, slots[:B])
    before = pool.clone()
    o = sglang.fused_sigmoid_gating_delta_rule_update(
        **call,
        **SOFTPLUS,
        initial_state_source=pool,
        initial_state_indices=slots,
        cu_seqlens=torch.arange(B + 1, dtype=torch.int32),
    )
    assert o.shape == (1, B, 4, V) and same_bits(o[0], expected[:, 0])
    assert same_bits(pool, expected_pool)
    # Against the specification, without padding.
    pool = before.clone()
    o = sglang.fused_sigmoid_gating_delta_rule_update(
        **inputs,
        **SOFTPLUS,
        initial_state_source=pool,
        initial_state_indices=torch.tensor([4, 1, 2]),
    )
    x = {name: inputs[name] for name in ("q", "k", "v", "A_log", "dt_bias")}
    x |= {"g": inputs["a"], "beta": inputs["b"]}
    options = {"use_gate": True, "use_beta_sigmoid": True}
    recurrence = specification.recurrent_gated_delta_rule
    assert_specified(recurrence, x, o, pool[[4, 1, 2]], before[[4, 1, 2]], **options)


@pytest.mark.parametrize("room", [3, 5], ids=["dense", "strided"])
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "padded"])
def test_sglang_verify(room, is_packed):
    """The state after each token goes to the buffer; the pool stays as it is."""
    inputs, call = sglang_tokens(3)
    if is_packed:
        call["cu_seqlens"] = torch.tensor([0, 3, 6, 9], dtype=torch.int32)
    pool, slots = torch.randn(6, 4, V, K), torch.tensor([4, -1, 2], dtype=torch.int32)
    before = pool.clone()
    buffer = torch.full((7, room, 4, V, K), 7.0)[:, :3]
    rows = torch.tensor([5, 1, 0, 6, 6], dtype=torch.int32)
    o = sglang.fused_sigmoid_gating_delta_rule_update(
        **(call if is_packed else inputs),
        **SOFTPLUS,
        initial_state_source=pool,
        initial_state_indices=slots,
        disable_state_update=True,
        intermediate_states_buffer=buffer,
        intermediate_state_indices=rows,
        cache_steps=3,
    )
    assert same_bits(pool, before)
    scratch = torch.cat([before, torch.zeros(9, 4, V, K)])
    per_token = torch.arange(6, 15).view(B, 3)
    expected, scratch = step_of(inputs, scratch, slots, per_token)
    assert same_bits(o.reshape(B, 3, 4, V), expected)
    for n in (0, 2):
        assert same_bits(buffer[rows[n]], scratch[per_token[n]])
    assert (buffer[[2, 3, 4, 6]] == 7).all(), "a row of nobody is written"
    assert (buffer[1] == 7).all(), "a padded sequence has states"


@pytest.mark.parametrize("padding", [(0,), (0, 1, 3), (0, 1, 2, 3)])
def test_sglang_rows_of_padding(padding):
    """Padded rows of a batch that name the row of another sequence, or none, write no row."""
    inputs = {name: x if x.dim() == 1 else torch.cat([x, x[:1]]) for name, x in decoding(2).items()}
    pool = torch.randn(6, 4, V, K)
    rows, slots = torch.tensor([3, 1, 2, 0]), torch.tensor([4, 1, 2, 5])
    found = []
    for others in (None, 2, -9, 99):
        asked = rows.clone()
        if others is not None:
            asked[list(padding)] = others
        buffer = torch.full((4, 2, 4, V, K), 7.0)
        o = sglang.fused_sigmoid_gating_delta_rule_update(
            **inputs,
            **SOFTPLUS,
            initial_state_source=pool,
            initial_state_indices=slots.index_fill(0, torch.tensor(padding), -1),
            disable_state_update=True,
            intermediate_states_buffer=buffer,
            intermediate_state_indices=asked,
        )
        live = [n for n in range(4) if n not in padding]
        assert (buffer[rows[list(padding)]] == 7).all() and (buffer[rows[live]] != 7).all()
        found.append((o, buffer))
    for o, buffer in found[1:]:
        assert same_bits(o, found[0][0]) and same_bits(buffer, found[0][1])


def test_sglang_verify_ragged():
    """Drafts of different lengths; more tokens than steps, and tokens of no sequence."""
    _, call = sglang_tokens(3)
    offsets, steps, tokens = (0, 1, 1, 6), 4, 3 * B
    pool, slots = torch.randn(6, 4, V, K), torch.tensor([4, 1, 2])
    buffer = torch.full((4, steps, 4, V, K), 7.0)
    o = sglang.fused_sigmoid_gating_delta_rule_update(
        **call,
        **SOFTPLUS,
        initial_state_source=pool,
        initial_state_indices=slots,
        cu_seqlens=torch.tensor(offsets),
        disable_state_update=True,
        intermediate_states_buffer=buffer,
        intermediate_state_indices=torch.tensor([3, 0, 1]),
    )
    asked = {**call, **{name: call[name][None] for name in ("a", "b")}}
    scratch = torch.cat([pool, torch.zeros(tokens, 4, V, K)])
    per_token = torch.full((1, tokens), -1)
    per_token[:, : offsets[-1]] = torch.arange(6, 6 + offsets[-1])
    expected, scratch = step_of(asked, scratch, slots, per_token, cu_seqlens=torch.tensor(offsets))
    assert same_bits(o, expected) and not o[:, offsets[-1] :].any()
    for n, row in ((0, 3), (2, 1)):
        start, end = offsets[n : n + 2]
        kept = min(end - start, steps)
        assert same_bits(buffer[row, :kept], scratch[6 + start : 6 + start + kept])
    assert (buffer[3, 1:] == 7).all() and (buffer[2] == 7).all()


@pytest.mark.parametrize("packed", [False, True])
def test_sglang_verify_trees(packed):
    """Each node has the bits of its path, and its state is in the buffer; padding has neither."""
    paths = [[[0, 1], [0, 2]], [], [[0, 1, 2]]]
    parents = torch.tensor([[0, 0, 0], [7, 7, 7], [0, 0, 1]], dtype=torch.int32)
    inputs, call = sglang_tokens(3)
    pool, slots = torch.randn(6, 4, V, K), torch.tensor([4, -1, 2, 5])
    rows, buffer = torch.tensor([3, 0, 1, 2]), torch.full((4, 3, 4, V, K), 7.0)
    if packed:
        call["cu_seqlens"] = torch.arange(0, 3 * B + 1, 3)
    before = pool.clone()
    o = sglang.fused_sigmoid_gating_delta_rule_update(
        **(call if packed else inputs),
        **SOFTPLUS,
        initial_state_source=pool,
        initial_state_indices=slots,
        disable_state_update=True,
        intermediate_states_buffer=buffer,
        intermediate_state_indices=rows,
        retrieve_parent_token=parents,
    ).reshape(B, 3, 4, V)
    assert same_bits(pool, before) and not o[1].any() and (buffer[[0, 2]] == 7).all()
    for n, found in enumerate(paths):
        for path in found:
            one = {m: x if x.dim() == 1 else x[n : n + 1, path] for m, x in inputs.items()}
            expected, states = step_of(one, pool, slots[n : n + 1])
            assert same_bits(o[n : n + 1, path], expected)
            assert same_bits(buffer[rows[n], path[-1]], states[slots[n]])


@pytest.mark.of_no_device
@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"is_kda": True}, NotImplementedError, "is_kda is not served"),
        ({"lower_bound": -5.0}, NotImplementedError, "lower_bound is not served"),
        ({"retrieve_parent_token": torch.zeros(B, 1)}, ValueError, "retrieve_parent_token must be"),
        (
            {"retrieve_parent_token": torch.zeros(B, 2).int()},
            ValueError,
            "have a row of all tokens",
        ),
        ({"cache_ring": True}, NotImplementedError, "cache_ring is not served"),
        ({"replayssm_g": torch.zeros(1)}, NotImplementedError, "cache_ring is not served"),
        ({"match_cutedsl_decode": True}, NotImplementedError, "match_cutedsl_decode"),
        ({"softplus_beta": 2.0}, NotImplementedError, "softplus_beta must be 1.0"),
        ({"softplus_threshold": 10.0}, NotImplementedError, "softplus_threshold 20.0"),
        ({"disable_state_update": False}, NotImplementedError, "intermediate_states_buffer must"),
        ({"intermediate_state_indices": None}, NotImplementedError, "intermediate_states_buffer"),
        (
            {"intermediate_states_buffer": torch.zeros(4, 2, 4, K, V)},
            ValueError,
            r"\[rows, steps, HV, V, K\]",
        ),
        (
            {"intermediate_states_buffer": torch.zeros(4, 2, 4, V, K).half()},
            ValueError,
            "torch.float32 of the pool",
        ),
        (
            {"intermediate_states_buffer": torch.zeros(2, 4, 4, V, K).transpose(0, 1)},
            ValueError,
            "a whole number of steps apart",
        ),
    ],
)
def test_sglang_verify_errors(changes, error, message):
    good = {"initial_state_source": torch.zeros(4, 4, V, K), **SOFTPLUS, **decoding(1)}
    good |= {"initial_state_indices": torch.arange(B), "disable_state_update": True}
    good |= {"intermediate_states_buffer": torch.zeros(4, 2, 4, V, K)}
    good |= {"intermediate_state_indices": torch.arange(B)}
    with pytest.raises(error, match=message):
        sglang.fused_sigmoid_gating_delta_rule_update(**{**good, **changes})


def test_sglang_nothing_kept():
    inputs = decoding(2)
    pool, slots = torch.randn(6, 4, V, K), torch.tensor([4, 1, 2])
    expected, _ = step_of(inputs, pool, slots)
    before = pool.clone()
    o = sglang.fused_sigmoid_gating_delta_rule_update(
        **inputs,
        **SOFTPLUS,
        initial_state_source=pool,
        initial_state_indices=slots,
        disable_state_update=True,
    )
    assert same_bits(o, expected) and same_bits(pool, before)
