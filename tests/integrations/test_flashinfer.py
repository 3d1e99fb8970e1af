"""FlashInfer's functions on this package's ops."""

import math
from types import SimpleNamespace

import pytest
import torch
from engine_calls import PLACES, B, K, N, T, V, at, decoding, expected_of, packed, step_of
from helpers import same_bits, unit_rows

from gdn_triton.integrations import flashinfer
from gdn_triton.integrations.flashinfer import prefill as flashinfer_prefill


@pytest.fixture(autouse=True, params=PLACES)
def place(request, monkeypatch):
    with at(request, monkeypatch):
        yield


def test_log_decay():
    alpha = torch.tensor([0.0, -0.0, 1.0, 0.5, 2.0**-140], dtype=torch.float32)
    g = flashinfer.log_decay(alpha)
    assert g.dtype == torch.float32
    expected = [-math.inf, -math.inf, 0.0, math.log(0.5), -140 * math.log(2)]
    torch.testing.assert_close(g, torch.tensor(expected), rtol=2**-23, atol=0)
    assert flashinfer.log_decay(alpha.to(torch.bfloat16)).dtype == torch.float32
    assert flashinfer.log_decay(alpha.double()).dtype == torch.float64
    with pytest.raises(ValueError, match=r"alpha must be float16, .* got torch.int64"):
        flashinfer.log_decay(torch.ones(3).long())


@pytest.mark.parametrize("heads", [(2, 2, 4), (4, 4, 4), (4, 2, 2)], ids=["GVA", "MHA", "GQA"])
def test_flashinfer_prefill(heads):
    inputs = packed(*heads)
    state = torch.randn(N, 4, V, K)
    options = {"use_qk_l2norm_in_kernel": True, "scale": 0.5}
    expected, expected_state = expected_of(inputs, state, **options)
    o = flashinfer.chunk_gated_delta_rule(**inputs, initial_state=state, **options)
    assert same_bits(o, expected)
    output = torch.full((T, 4, V), math.nan)
    output_state = torch.full((N, 4, V, K), math.nan, dtype=torch.bfloat16)
    o, final_state = flashinfer.chunk_gated_delta_rule(
        **inputs,
        initial_state=state,
        output_final_state=True,
        output=output,
        output_state=output_state,
        max_seqlen=13,
        **options,
    )
    assert o is output and same_bits(output, expected)
    assert final_state is output_state
    assert same_bits(output_state, expected_state.to(torch.bfloat16))


def test_flashinfer_prefill_defaults():
    inputs = packed()
    ones = torch.ones(T, 4)
    expected, expected_state = expected_of({**inputs, "g": ones, "beta": ones})
    o, final_state = flashinfer.chunk_gated_delta_rule(
        **{**inputs, "g": None, "beta": None}, output_final_state=True
    )
    assert same_bits(o, expected) and same_bits(final_state, expected_state)


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_flashinfer_prefill_pool(slot_dtype):
    """Read and written in place; no other slot is touched."""
    inputs = packed()
    pool, slots = torch.randn(9, 4, V, K), torch.tensor([5, 0, 8, 2], dtype=slot_dtype)
    before = pool.clone()
    expected, expected_state = expected_of(inputs, pool[slots.long()])
    o, returned = flashinfer.chunk_gated_delta_rule(
        **inputs,
        initial_state=pool,
        output_final_state=True,
        output_state=pool,
        state_indices=slots,
    )
    assert same_bits(o, expected) and returned is pool
    assert same_bits(pool[slots.long()], expected_state)
    others = [1, 3, 4, 6, 7]
    assert same_bits(pool[others], before[others])
    # From zeros, into a pool.
    expected, expected_state = expected_of(inputs)
    o = flashinfer.chunk_gated_delta_rule(**inputs, output_state=pool, state_indices=slots)
    assert same_bits(o, expected) and same_bits(pool[slots.long()], expected_state)


def test_flashinfer_checkpoints():
    """Each is the final state of the tokens before it; other rows are left alone."""
    offsets, every = (0, 130, 130, 200, 328), 64
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    inputs = {
        "q": torch.randn(offsets[-1], 1, K),
        "k": unit_rows(offsets[-1], 1, K),
        "v": torch.randn(offsets[-1], 2, V),
        "g": torch.rand(offsets[-1], 2),
        "beta": torch.rand(offsets[-1], 2),
    }
    rows = torch.tensor([0, 2, 2, 3, 5])  # 130, 0, 70 and 128 tokens
    for longest in (None, 130):
        checkpoints = torch.full((7, 2, V, K), 7.0)
        flashinfer.chunk_gated_delta_rule(
            **inputs,
            cu_seqlens=cu_seqlens,
            state_checkpoints=checkpoints,
            checkpoint_cu_starts=rows,
            checkpoint_every_n_tokens=every,
            max_seqlen=longest,
        )
        for n, start in enumerate(offsets[:-1]):
            for j, row in enumerate(range(rows[n], rows[n + 1])):
                part = {name: x[start : start + (j + 1) * every] for name, x in inputs.items()}
                part["cu_seqlens"] = torch.tensor([0, (j + 1) * every])
                assert same_bits(checkpoints[row], expected_of(part)[1][0]), (n, j)
        assert (checkpoints[5:] == 7).all()


@pytest.mark.parametrize("readable", [True, False], ids=["read", "not read"])
def test_flashinfer_max_seqlen(readable, monkeypatch):
    """Less than T / N is an error, as in FlashInfer. Less than the longest sequence is one where
    the host reads the offsets, and where it does not, no checkpoint is lost."""
    T, every = 256, 64
    call = {
        "q": torch.randn(T, 1, K),
        "k": unit_rows(T, 1, K),
        "v": torch.randn(T, 2, V),
        "cu_seqlens": torch.tensor([0, 200, 200, 256], dtype=torch.int32),
        "state_checkpoints": torch.zeros(5, 2, V, K),
        "checkpoint_cu_starts": torch.tensor([0, 3, 3, 3]),
        "checkpoint_every_n_tokens": every,
    }
    with pytest.raises(ValueError, match="max_seqlen must be at least T / N, the mean of N=3"):
        flashinfer.chunk_gated_delta_rule(**call, max_seqlen=85)
    if not readable:
        # The adapter does this where the offsets are on a GPU.
        there = SimpleNamespace(dim=lambda: 1, shape=(4,), device=torch.device("cuda"))
        flashinfer_prefill._check_max_seqlen(86, T, there)
        monkeypatch.setattr(flashinfer_prefill, "_check_max_seqlen", lambda *_: None)
    elif call["cu_seqlens"].is_cpu:
        with pytest.raises(ValueError, match="max_seqlen must be at least 200, the length of the"):
            flashinfer.chunk_gated_delta_rule(**call, max_seqlen=199)
        assert not call["state_checkpoints"].any()
    found = []
    for longest in (None, 200) if readable else (None, 86):
        call["state_checkpoints"] = torch.zeros(5, 2, V, K)
        flashinfer.chunk_gated_delta_rule(**call, max_seqlen=longest)
        found.append(call["state_checkpoints"])
    assert found[0][:3].any((1, 2, 3)).all() and not found[0][3:].any()
    assert same_bits(*found)


@pytest.mark.of_no_device
@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"cu_seqlens": None}, ValueError, "cu_seqlens must be given"),
        ({"scale": 0.0}, ValueError, "scale must not be 0"),
        ({"use_cp": 1}, ValueError, 'use_cp must be "auto", True or False, got 1'),
        ({"use_cp": "never"}, ValueError, "use_cp must be"),
        ({"_cp_chunk_len": 64}, NotImplementedError, "_cp_chunk_len"),
        ({"backend": "rubin"}, ValueError, "backend must be one of auto, flashinfer, cake_gdn, cu"),
        ({"max_seqlen": -1}, ValueError, "max_seqlen"),
        ({"checkpoint_every_n_tokens": 64}, ValueError, "must be given with checkpoint_every"),
        ({"state_checkpoints": torch.zeros(1)}, ValueError, "must be given with checkpoint_every"),
        ({"g": torch.ones(T, 2)}, ValueError, r"g must have shape \[T=33, heads=4\]"),
        ({"beta": torch.ones(T, 2)}, ValueError, "beta must have shape"),
        ({"q": torch.ones(1, T, 2, K)}, ValueError, "q must have 3 dimensions"),
        ({"q": torch.ones(T, 6, K)}, ValueError, "k must have the heads of v"),
        ({"output": torch.ones(T, 4, K)}, ValueError, "output must have shape"),
        ({"output_state": torch.ones(N, 4, K, V)}, ValueError, "output_state must have shape"),
        (
            {"state_indices": torch.arange(N), "output_final_state": True},
            ValueError,
            "output_state",
        ),
        ({"initial_state": torch.ones(1, 4, V, K)}, ValueError, "initial_state must have shape"),
        ({"v": torch.ones(T, 4, V, requires_grad=True)}, NotImplementedError, "gradient"),
        ({"output": torch.ones(T, 4, V).int()}, ValueError, "output must be float16, bfloat16"),
        ({"output_state": torch.ones(N, 4, V, K).int()}, ValueError, "output_state must be float"),
        ({"initial_state": torch.ones(N, 4, V, K).int()}, ValueError, "initial_state must be flo"),
        ({"g": torch.ones(T, 4).int()}, ValueError, "g must be float16, bfloat16"),
        *(
            (
                {"output_state": torch.ones(N, 4, V, K), "state_indices": torch.tensor(slots)},
                ValueError,
                f"state_indices must {words}",
            )
            for slots, words in {
                (0, 1, 1, 2): "name no slot twice, got 1 twice",
                (0, 1, -1, 2): "be 0 or more, got -1",
                (0, 1, 4, 2): "be less than the 4 slots of output_state, got 4",
                (0, 1, 2): r"have shape \[N=4\]",
            }.items()
        ),
        (
            {
                "checkpoint_every_n_tokens": 64,
                "state_checkpoints": torch.ones(1, 4, V, K),
                "checkpoint_cu_starts": torch.ones(N + 1),
            },
            ValueError,
            "checkpoint_cu_starts must be int32 or int64",
        ),
    ],
)
def test_flashinfer_prefill_errors(changes, error, message):
    with pytest.raises(error, match=message):
        flashinfer.chunk_gated_delta_rule(**packed(**changes))


def test_flashinfer_decode():
    inputs = decoding(1)
    rows = torch.arange(B)
    for function, shape, v_first in (
        (flashinfer.gated_delta_rule_decode, (B, 4, K, V), False),
        (flashinfer.gated_delta_rule_decode_pretranspose, (B, 4, V, K), True),
    ):
        state = torch.randn(shape)
        expected, expected_state = step_of(inputs, state, rows, state_v_first=v_first, scale=0.25)
        output = torch.full((B, 1, 4, V), math.nan)
        o, returned = function(**inputs, state=state, scale=0.25, output=output)
        assert o is output and returned is state
        assert same_bits(o, expected) and same_bits(state, expected_state)


def test_flashinfer_decode_pool():
    inputs = decoding(1)
    slots, write_slots = torch.tensor([4, -1, 2]), torch.tensor([0, 1, -1])
    pool = torch.randn(6, 4, V, K)
    expected, expected_pool = step_of(
        inputs, pool, slots, write_slots, use_qk_l2norm_in_kernel=False
    )
    o, returned = flashinfer.gated_delta_rule_decode_pretranspose(
        **inputs,
        state=None,
        use_qk_l2norm=False,
        initial_state=pool,
        initial_state_indices=slots,
        output_state_indices=write_slots,
    )
    assert returned is pool
    assert same_bits(o, expected) and same_bits(pool, expected_pool)
    assert not o[1].any(), "a padded sequence has an output"


def test_flashinfer_verify():
    inputs = decoding(3)
    slots = torch.tensor([4, 0, 2])
    common = {**inputs, "initial_state_indices": slots}
    pool = torch.randn(14, 4, V, K)
    # Nothing is kept.
    expected, expected_pool = step_of(inputs, pool, slots)
    kept = pool.clone()
    o, _ = flashinfer.gated_delta_rule_mtp(**common, initial_state=kept, disable_state_update=True)
    assert same_bits(o, expected) and same_bits(kept, pool)
    # The last states are.
    o, _ = flashinfer.gated_delta_rule_mtp(**common, initial_state=kept, disable_state_update=False)
    assert same_bits(o, expected) and same_bits(kept, expected_pool)
    # Every state is, and nothing at the slots that were read.
    per_token = torch.tensor([[1, 3, 5], [6, 7, 8], [9, 10, 11]], dtype=torch.int32)
    expected, expected_pool = step_of(inputs, pool, slots, per_token)
    kept = pool.clone()
    o, _ = flashinfer.gated_delta_rule_mtp(
        **common, initial_state=kept, disable_state_update=False, ssm_state_indices=per_token
    )
    assert same_bits(o, expected) and same_bits(kept, expected_pool)
    assert same_bits(kept[slots], pool[slots])


@pytest.mark.of_no_device
@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"disable_state_update": None}, ValueError, "disable_state_update must be given"),
        (
            {"intermediate_states_buffer": torch.zeros(2, 1, 4, V, K)},
            ValueError,
            r"must have at least 3 rows of 1 steps, got \[2, 1",
        ),
        (
            {"intermediate_states_buffer": torch.zeros(3, 1, 4, V, K).half()},
            ValueError,
            "torch.float32 of the pool",
        ),
        (
            {
                "intermediate_states_buffer": torch.zeros(3, 1, 4, V, K),
                "ssm_state_indices": torch.zeros(B, 1),
            },
            ValueError,
            "ssm_state_indices must come with",
        ),
        ({"cache_replayssm": True}, NotImplementedError, "ReplaySSM"),
        ({"replayssm_g": torch.ones(1)}, NotImplementedError, "ReplaySSM"),
        (
            {"ssm_state_indices": torch.zeros(B, 1), "disable_state_update": True},
            ValueError,
            "ssm_state_indices must come with",
        ),
    ],
)
def test_flashinfer_verify_errors(changes, error, message):
    good = {"initial_state": torch.zeros(4, 4, V, K), "initial_state_indices": torch.arange(B)}
    good |= {"disable_state_update": False, **decoding(1)}
    with pytest.raises(error, match=message):
        flashinfer.gated_delta_rule_mtp(**{**good, **changes})


@pytest.mark.of_no_device
def test_flashinfer_decode_errors():
    decode, inputs = flashinfer.gated_delta_rule_decode_pretranspose, decoding(1)
    state, slots = torch.zeros(B, 4, V, K), torch.arange(B)
    with pytest.raises(ValueError, match="either state or initial_state"):
        decode(**inputs, state=None)
    with pytest.raises(ValueError, match="either state or initial_state"):
        decode(**inputs, state=state, initial_state=state, initial_state_indices=slots)
    with pytest.raises(ValueError, match="must be given together"):
        decode(**inputs, state=None, initial_state=state)
    with pytest.raises(ValueError, match="output_state_indices must be None"):
        decode(**inputs, state=state, output_state_indices=slots)
    with pytest.raises(ValueError, match="one row a sequence, 3, got 5"):
        decode(**inputs, state=torch.zeros(5, 4, V, K))
    with pytest.raises(ValueError, match="backend must be"):
        decode(**inputs, state=state, backend="cudnn")


@pytest.mark.of_no_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_flashinfer_output_dtype(dtype):
    """An output of another dtype, or with gaps, receives o rounded once."""
    inputs = packed()
    expected, _ = expected_of(inputs)
    wide = torch.full((T, 4, 2 * V), 7.0, dtype=dtype)
    output = wide[..., :V]
    o = flashinfer.chunk_gated_delta_rule(**inputs, output=output)
    assert o is output and same_bits(output, expected.to(dtype))
    assert (wide[..., V:] == 7).all()
    inputs, state = decoding(1), torch.randn(B, 4, V, K)
    expected, _ = step_of(inputs, state, torch.arange(B))
    output = torch.empty(B, 1, 4, V, dtype=torch.float64)
    o, _ = flashinfer.gated_delta_rule_decode_pretranspose(**inputs, state=state, output=output)
    assert o is output and same_bits(o, expected.double())
    with pytest.raises(ValueError, match=r"output must have shape \[3, 1, 4, 8\]"):
        flashinfer.gated_delta_rule_decode_pretranspose(
            **inputs, state=state, output=output.expand(B, 1, 4, V).repeat(1, 2, 1, 1)
        )


@pytest.mark.of_no_device
def test_flashinfer_hints(monkeypatch):
    """Arguments that callers pass for FlashInfer's own kernels: vLLM names a backend, and warms
    both of its forms. Without a cut a sequence has the same bits in any batch."""
    from gdn_triton._host.environment import batch_invariant

    inputs = packed()
    asked = []
    prefill = flashinfer_prefill.prefill

    def noted(*args, **kwargs):
        asked.append(batch_invariant())
        return prefill(*args, **kwargs)

    monkeypatch.setattr(flashinfer_prefill, "prefill", noted)
    expected, _ = expected_of(inputs)
    for hints in ({"backend": "flashinfer"}, {"use_cp": True}, {"use_cp": False}):
        assert same_bits(flashinfer.chunk_gated_delta_rule(**inputs, **hints), expected)
    assert asked == [False, False, True] and not batch_invariant()
    compiled = torch.compile(flashinfer.chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    for use_cp in (True, False):
        assert same_bits(compiled(**inputs, use_cp=use_cp), expected)
    inputs, state = decoding(1), torch.randn(B, 4, V, K)
    expected, _ = step_of(inputs, state, torch.arange(B))
    for backend in ("flashinfer", "rubin"):
        o, _ = flashinfer.gated_delta_rule_decode_pretranspose(
            **inputs, state=state.clone(), backend=backend
        )
        assert same_bits(o, expected)


@pytest.mark.parametrize("steps", [3, 5], ids=["dense", "more steps"])
@pytest.mark.parametrize("kept", [False, True], ids=["verify", "update"])
def test_flashinfer_buffer(kept, steps):
    """The state after each token, in rows of a buffer; the pool's last states as without it."""
    inputs = decoding(3)
    pool, slots = torch.randn(6, 4, V, K), torch.tensor([4, -1, 2])
    before = pool.clone()
    buffer = torch.full((B + 1, steps, 4, V, K), 7.0)
    o, returned = flashinfer.gated_delta_rule_mtp(
        **inputs,
        initial_state=pool,
        initial_state_indices=slots,
        intermediate_states_buffer=buffer,
        disable_state_update=not kept,
    )
    per_token = torch.arange(6, 15).view(B, 3)
    scratch = torch.cat([before, torch.zeros(9, 4, V, K)])
    expected, scratch = step_of(inputs, scratch, slots, per_token)
    assert returned is pool and same_bits(o, expected)
    for n in (0, 2):
        assert same_bits(buffer[n, :3], scratch[per_token[n]])
        assert (buffer[n, 3:] == 7).all()
        assert same_bits(pool[slots[n]], scratch[per_token[n, 2]] if kept else before[slots[n]])
    assert (buffer[1] == 7).all() and (buffer[B] == 7).all()
    assert same_bits(pool[[0, 1, 3, 5]], before[[0, 1, 3, 5]])


@pytest.mark.of_no_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["direct", "copied"])
def test_flashinfer_buffer_compiled(dtype):
    """One graph, with the copies that a buffer and an output of another dtype take."""
    call = decoding(3) | {"initial_state_indices": torch.tensor([4, -1, 2])}
    pool, found = torch.randn(6, 4, V, K), []
    mtp = flashinfer.gated_delta_rule_mtp
    for function in (mtp, torch.compile(mtp, fullgraph=True, backend="aot_eager")):
        x = {"initial_state": pool.clone(), "output": torch.zeros(B, 3, 4, V, dtype=dtype)}
        x["intermediate_states_buffer"] = torch.full((B, 3, 4, V, K), 7.0)
        with torch.no_grad():
            function(**call, **x, disable_state_update=False)
        found.append(x)
    assert all(same_bits(x, found[1][name]) for name, x in found[0].items())
