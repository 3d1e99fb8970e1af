"""The adapters for serving engines: their signatures as recorded, and what they do with them."""

import importlib
import inspect
import itertools
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers import assert_within_budget, same_bits, unit_rows

import gdn_triton
from gdn_triton import reference as specification
from gdn_triton.integrations import flashinfer, sglang

REQUIRED = inspect.Parameter.empty


GPU = pytest.param(
    ("cuda", "triton"), id="gpu", marks=pytest.mark.gpu("what an engine calls runs there")
)


@pytest.fixture(autouse=True, params=[pytest.param(("cpu", "reference"), id="cpu"), GPU])
def place(request, monkeypatch):
    """What is tested lies around the op: on the CPU on the reference, on a GPU on Triton."""
    device, backend = request.param
    if device == "cuda" and request.node.get_closest_marker("of_no_device"):
        pytest.skip("nothing of this depends on the device")
    monkeypatch.setenv("GDN_BACKEND", backend)
    with torch.device(device):
        yield


# FlashInfer 0.7.2.post1, flashinfer/gdn_prefill.py and flashinfer/gdn_decode.py.
DECODE = {
    **dict.fromkeys(("q", "k", "v", "state", "A_log", "a", "dt_bias", "b"), REQUIRED),
    "scale": None,
    "output": None,
    "use_qk_l2norm": True,
}
FLASHINFER = {
    "chunk_gated_delta_rule": {
        **dict.fromkeys(("q", "k", "v"), REQUIRED),
        "g": None,
        "beta": None,
        "scale": None,
        "initial_state": None,
        "output_final_state": False,
        "cu_seqlens": None,
        "use_qk_l2norm_in_kernel": False,
        "output": None,
        "output_state": None,
        "state_checkpoints": None,
        "checkpoint_cu_starts": None,
        "checkpoint_every_n_tokens": 0,
        "use_cp": "auto",
        "state_indices": None,
        "_cp_chunk_len": None,
        "backend": "auto",
        "max_seqlen": None,
    },
    "gated_delta_rule_decode_pretranspose": {
        **DECODE,
        "initial_state": None,
        "initial_state_indices": None,
        "output_state_indices": None,
        "intermediate_states_buffer": None,
        "disable_state_update": False,
        "backend": "auto",
    },
    "gated_delta_rule_decode": {**DECODE, "backend": "auto"},
    "gated_delta_rule_mtp": {
        **dict.fromkeys(("q", "k", "v", "initial_state", "initial_state_indices"), REQUIRED),
        **dict.fromkeys(("A_log", "a", "dt_bias", "b"), REQUIRED),
        "scale": None,
        "output": None,
        "intermediate_states_buffer": None,
        "ssm_state_indices": None,
        "disable_state_update": None,
        "use_qk_l2norm": True,
        "output_state_indices": None,
        "cache_replayssm": False,
        "replayssm_rawv": None,
        "replayssm_rawk": None,
        "replayssm_g": None,
        "replayssm_beta": None,
    },
}


@pytest.mark.of_no_device
@pytest.mark.parametrize("name", FLASHINFER)
def test_flashinfer_signature(name):
    parameters = inspect.signature(getattr(flashinfer, name)).parameters.values()
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters)
    assert [(p.name, p.default) for p in parameters] == list(FLASHINFER[name].items())


def test_log_decay():
    alpha = torch.tensor([0.0, -0.0, 1.0, 0.5, 2.0**-140], dtype=torch.float32)
    g = flashinfer.log_decay(alpha)
    assert g.dtype == torch.float32
    expected = [-math.inf, -math.inf, 0.0, math.log(0.5), -140 * math.log(2)]
    torch.testing.assert_close(g, torch.tensor(expected), rtol=2**-23, atol=0)
    assert flashinfer.log_decay(alpha.to(torch.bfloat16)).dtype == torch.float32
    assert flashinfer.log_decay(alpha.double()).dtype == torch.float64


OFFSETS = (0, 7, 7, 20, 33)
T, N = OFFSETS[-1], len(OFFSETS) - 1
K, V = 16, 8


def packed(H=2, HK=2, HV=4, **changes):
    """FlashInfer's tensors for a prefill, and log decays for ours."""
    HO = max(H, HV)
    g = -torch.rand(T, HO) * torch.tensor([0.01, 30.0]).repeat(HO // 2)
    g[3, 0] = g[12, 1] = -math.inf
    inputs = {
        "q": torch.randn(T, H, K),
        "k": unit_rows(T, HK, K),
        "v": torch.randn(T, HV, V),
        "beta": torch.rand(T, HO),
        "cu_seqlens": torch.tensor(OFFSETS, dtype=torch.int32),
    }
    return {**inputs, "g": g.exp(), **changes}


def expected_of(inputs, initial_state=None, **options):
    """Ours, asked directly."""
    x = {name: inputs[name].unsqueeze(0) for name in ("q", "k", "v", "g", "beta")}
    repeats = x["q"].shape[2] // x["v"].shape[2]
    if repeats > 1:
        x |= {name: x[name].repeat_interleave(repeats, 2) for name in ("k", "v")}
    o, final_state = gdn_triton.chunk_gated_delta_rule(
        **{**x, "g": x["g"].log()},
        initial_state=initial_state,
        output_final_state=True,
        state_v_first=True,
        cu_seqlens=inputs["cu_seqlens"],
        **options,
    )
    return o.squeeze(0), final_state


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
        # What the adapter does where the offsets are on a GPU.
        there = SimpleNamespace(dim=lambda: 1, shape=(4,), device=torch.device("cuda"))
        flashinfer._check_max_seqlen(86, T, there)
        monkeypatch.setattr(flashinfer, "_check_max_seqlen", lambda *_: None)
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
        ({"use_cp": True}, NotImplementedError, "use_cp"),
        ({"_cp_chunk_len": 64}, NotImplementedError, "_cp_chunk_len"),
        ({"backend": "cudnn"}, ValueError, "backend must be"),
        ({"max_seqlen": -1}, ValueError, "max_seqlen"),
        ({"checkpoint_every_n_tokens": 64}, ValueError, "must be given with checkpoint_every"),
        ({"state_checkpoints": torch.zeros(1)}, ValueError, "must be given with checkpoint_every"),
        ({"g": torch.ones(T, 2)}, ValueError, r"g must have shape \[T=33, heads=4\]"),
        ({"beta": torch.ones(T, 2)}, ValueError, "beta must have shape"),
        ({"q": torch.ones(1, T, 2, K)}, ValueError, "q must have 3 dimensions"),
        ({"q": torch.ones(T, 6, K)}, ValueError, "k must have the heads of v"),
        ({"output": torch.ones(T, 4, K)}, ValueError, "output must have shape"),
        ({"output": torch.ones(T, 4, V).half()}, ValueError, "tensor for o must be"),
        ({"output_state": torch.ones(N, 4, K, V)}, ValueError, "the final states must have shape"),
        (
            {"state_indices": torch.arange(N), "output_final_state": True},
            ValueError,
            "output_state",
        ),
        ({"initial_state": torch.ones(1, 4, V, K)}, ValueError, "the initial states must have"),
        ({"v": torch.ones(T, 4, V, requires_grad=True)}, NotImplementedError, "gradient"),
    ],
)
def test_flashinfer_prefill_errors(changes, error, message):
    with pytest.raises(error, match=message):
        flashinfer.chunk_gated_delta_rule(**packed(**changes))


B = 3


def decoding(tokens):
    H, HV = 2, 4
    return {
        "q": torch.randn(B, tokens, H, K),
        "k": torch.randn(B, tokens, H, K),
        "v": torch.randn(B, tokens, HV, V),
        "A_log": torch.randn(HV),
        "a": torch.randn(B, tokens, HV),
        "dt_bias": torch.randn(HV),
        "b": torch.randn(B, tokens, HV),
    }


def step_of(inputs, pool, slots, write_slots=None, **options):
    """`gdn_triton.recurrent_step`, asked directly, on a copy of the pool."""
    pool = pool.clone()
    options = {"use_qk_l2norm_in_kernel": True, "state_v_first": True, **options}
    return gdn_triton.recurrent_step(pool, slots, write_slots, **inputs, **options), pool


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
        ({"intermediate_states_buffer": torch.ones(1)}, NotImplementedError, "intermediate_states"),
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
        decode(**inputs, state=state, backend="rubin")


# vLLM, vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py, the forward methods of
# ChunkGatedDeltaRule without self. Its layer passes every argument by name.
VLLM_BASE = {
    **dict.fromkeys(("q", "k", "v", "g", "beta", "initial_state", "output_final_state"), REQUIRED),
    "cu_seqlens": None,
    "chunk_indices": None,
    "chunk_offsets": None,
    "use_qk_l2norm_in_kernel": True,
    "core_attn_out": None,
}
VLLM = {
    "forward_native": VLLM_BASE,  # commit 00545a8acc22
    "forward_cuda": {  # later in 2026: FlashInfer on the pool
        **VLLM_BASE,
        "state_indices": None,
        "max_seqlen": 0,
        "cu_seqlens_i32": None,
    },
    "aiter": {**VLLM_BASE, "aiter_prefill_metadata": None},  # 0.33
}


def fresh(name):
    sys.modules.pop(name, None)
    return importlib.import_module(name)


@pytest.fixture
def vllm():
    return fresh("gdn_triton.integrations.vllm")


@pytest.mark.of_no_device
@pytest.mark.parametrize("signature", VLLM.values(), ids=VLLM)
def test_vllm_signature(vllm, signature):
    parameters = inspect.signature(vllm.chunk_gated_delta_rule).parameters
    assert {name: parameters[name].default for name in signature} == signature
    positional = [name for name in parameters if name in VLLM_BASE]
    assert positional == list(VLLM_BASE)


OUT_OF_TREE = {}


class CustomOp:
    """What vLLM's does to a registered class: makes it in place of the one of that name."""

    def __new__(cls, *args, **kwargs):
        return super().__new__(OUT_OF_TREE.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, _decorated_op_cls=None, name=None):
        assert name not in OUT_OF_TREE, f"Duplicate op name: {name}"
        OUT_OF_TREE[name] = _decorated_op_cls

    def __call__(self, *args, **kwargs):
        return self._forward_method(*args, **kwargs)


@pytest.fixture(params=["gdn.qwen_gdn_linear_attn", "gdn_linear_attn"])
def engine(request, monkeypatch):
    """The module of vLLM that has the class, in one of its places."""
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys.modules[__name__], "OUT_OF_TREE", {})

    class ChunkGatedDeltaRule(CustomOp):
        def __init__(self):
            self.gdn_prefill_backend = "flashinfer"
            self.expects_exp_g = True
            self._forward_method = None

        def updates_state_in_place(self, state_dtype):
            return False

    layers = "vllm.model_executor.layers.mamba"
    parts = f"{layers}.{request.param}".split(".")
    for n in range(1, len(parts) + 1):
        package = ModuleType(".".join(parts[:n]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    custom_op = ModuleType("vllm.model_executor.custom_op")
    custom_op.CustomOp = CustomOp
    monkeypatch.setitem(sys.modules, custom_op.__name__, custom_op)
    package.ChunkGatedDeltaRule = ChunkGatedDeltaRule
    return package


def vllm_call():
    inputs = packed()
    x = {name: inputs[name].unsqueeze(0) for name in ("q", "k", "v", "g", "beta")}
    x |= {"g": x["g"].log(), "cu_seqlens": inputs["cu_seqlens"]}
    return inputs, {**x, "use_qk_l2norm_in_kernel": False, "output_final_state": True}


def test_vllm_runs_ours(vllm, engine):
    registered = vllm.register()
    assert vllm.register() is registered  # vLLM's own assertion would say twice
    op = engine.ChunkGatedDeltaRule()
    assert isinstance(op, registered)
    # FlashInfer's conventions, which vLLM chooses by the hardware, are not ours.
    assert op.gdn_prefill_backend == "triton" and op.expects_exp_g is False
    assert op.updates_state_in_place(torch.bfloat16)
    inputs, call = vllm_call()
    state = torch.randn(N, 4, V, K)
    expected, expected_state = expected_of(inputs, state)
    o, final_state = op(**call, initial_state=state)
    assert same_bits(o.squeeze(0), expected) and same_bits(final_state, expected_state)
    # vLLM's buffer may have more rows than there are tokens.
    buffer = torch.full((T + 5, 4, V), 7.0)
    o, final_state = op(
        **{**call, "output_final_state": False},
        initial_state=state,
        core_attn_out=buffer,
        chunk_indices=torch.zeros(2, 2, dtype=torch.int32),
        chunk_offsets=torch.zeros(2, dtype=torch.int32),
    )
    assert final_state is None
    assert same_bits(buffer[:T], expected) and same_bits(o.squeeze(0), expected)
    assert o.data_ptr() == buffer.data_ptr()
    assert (buffer[T:] == 7).all()


def test_vllm_pool(vllm):
    inputs, call = vllm_call()
    pool, slots = torch.randn(9, 4, V, K), torch.tensor([5, 1, 8, 2], dtype=torch.int32)
    expected, expected_state = expected_of(inputs, pool[slots])
    o, returned = vllm.chunk_gated_delta_rule(
        **call, initial_state=pool, state_indices=slots, max_seqlen=13
    )
    assert returned is pool
    assert same_bits(o.squeeze(0), expected) and same_bits(pool[slots], expected_state)


@pytest.mark.of_no_device
def test_vllm_errors(vllm, engine):
    _, call = vllm_call()
    state = torch.zeros(N, 4, V, K)
    with pytest.raises(ValueError, match="tensor for o must be"):
        vllm.chunk_gated_delta_rule(**call, initial_state=state, core_attn_out=torch.empty(3))
    with pytest.raises(NotImplementedError, match="gradient"):
        vllm.chunk_gated_delta_rule(**call, initial_state=state.requires_grad_())
    del engine.ChunkGatedDeltaRule
    with pytest.raises(ImportError, match="has no ChunkGatedDeltaRule"):
        vllm.register()


@pytest.mark.of_no_device
def test_vllm_absent(vllm, monkeypatch):
    for name in ("vllm", *vllm.MODULES):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="finds no ChunkGatedDeltaRule in vLLM"):
        vllm.register()


# SGLang 0.5.23, sglang/kernels/ops/attention/: fla/chunk.py, fla/fused_recurrent.py and
# linear/fused_sigmoid_gating_recurrent.py.
SGLANG = {
    "chunk_gated_delta_rule": {
        **dict.fromkeys(("q", "k", "v", "g", "beta"), REQUIRED),
        "scale": None,
        "initial_state": None,
        "initial_state_indices": None,
        "cu_seqlens": None,
        "head_first": False,
        "use_qk_l2norm_in_kernel": False,
        "inplace_update": True,
    },
    "fused_recurrent_gated_delta_rule_packed_decode": {
        **dict.fromkeys(("mixed_qkv", "a", "b", "A_log", "dt_bias", "scale"), REQUIRED),
        **dict.fromkeys(("initial_state", "out", "ssm_state_indices"), REQUIRED),
        "use_qk_l2norm_in_kernel": False,
    },
    "fused_sigmoid_gating_delta_rule_update": {
        **dict.fromkeys(("A_log", "a", "dt_bias", "softplus_beta", "softplus_threshold"), REQUIRED),
        **dict.fromkeys(("q", "k", "v", "b"), REQUIRED),
        **dict.fromkeys(("initial_state_source", "initial_state_indices"), REQUIRED),
        "scale": None,
        "use_qk_l2norm_in_kernel": False,
        "cu_seqlens": None,
        "is_kda": False,
        "lower_bound": None,
        "disable_state_update": False,
        "intermediate_states_buffer": None,
        "intermediate_state_indices": None,
        "cache_steps": None,
        "retrieve_parent_token": None,
        "cache_ring": False,
        "replayssm_rawv": None,
        "replayssm_rawk": None,
        "replayssm_g": None,
        "replayssm_beta": None,
        "match_cutedsl_decode": False,
    },
}
SGLANG_MODULE = "sglang.srt.layers.attention.linear.kernels.gdn_triton"


@pytest.mark.of_no_device
@pytest.mark.parametrize("name", SGLANG)
def test_sglang_signature(name):
    assert SGLANG.keys() == sglang.FUNCTIONS.keys()
    parameters = inspect.signature(sglang.FUNCTIONS[name]).parameters.values()
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters)
    assert [(p.name, p.default) for p in parameters] == list(SGLANG[name].items())


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
    assert not o[1].any() and same_bits(pool[:2], before[:2])


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
    assert (buffer[1, 1:] == 7).all(), "a padded sequence has states"


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


@pytest.mark.of_no_device
@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"is_kda": True}, NotImplementedError, "is_kda is not served"),
        ({"lower_bound": -5.0}, NotImplementedError, "lower_bound is not served"),
        ({"retrieve_parent_token": torch.zeros(B, 1)}, NotImplementedError, "retrieve_parent"),
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


@pytest.fixture
def sglang_module(monkeypatch):
    """SGLang's module: functions with its signatures, that say which of them was called."""
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    parts = SGLANG_MODULE.split(".")
    for n in range(1, len(parts) + 1):
        package = ModuleType(".".join(parts[:n]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    for name, parameters in SGLANG.items():
        signature = inspect.Signature(
            inspect.Parameter(p, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
            for p, default in parameters.items()
        )

        def theirs(name=name, **kwargs):
            return f"SGLang's {name}"

        theirs.__signature__ = signature
        setattr(package, name, theirs)
    yield package
    sglang.disable()


@pytest.mark.of_no_device
def test_sglang_enable(sglang_module):
    theirs = {name: getattr(sglang_module, name) for name in SGLANG}
    sglang.enable()
    ours = {name: getattr(sglang_module, name) for name in SGLANG}
    sglang.enable()
    assert {name: getattr(sglang_module, name) for name in SGLANG} == ours
    # What the layer's call finds there now.
    inputs, call = sglang_tokens(1)
    call |= {**SOFTPLUS, "cu_seqlens": torch.arange(B + 1), "is_kda": False}
    pool, slots = torch.randn(6, 4, V, K), torch.tensor([4, 0, 2])
    expected, expected_pool = step_of(inputs, pool, slots)
    update = sglang_module.fused_sigmoid_gating_delta_rule_update
    o = update(**call, initial_state_source=pool, initial_state_indices=slots)
    assert same_bits(o[0], expected[:, 0]) and same_bits(pool, expected_pool)
    # A draft that is a tree is SGLang's still; one that might have been is not.
    states = {"initial_state_source": pool, "initial_state_indices": slots}
    tree = update(**call, **states, retrieve_parent_token=torch.zeros(B, 1))
    assert tree == "SGLang's fused_sigmoid_gating_delta_rule_update"
    assert update(**call, **states, retrieve_parent_token=None).shape == o.shape
    # Another's replacement is left alone.
    sglang_module.chunk_gated_delta_rule = another = object()
    sglang.disable()
    assert sglang_module.chunk_gated_delta_rule is another
    names = [name for name in SGLANG if name != "chunk_gated_delta_rule"]
    assert all(getattr(sglang_module, name) is theirs[name] for name in names)


@pytest.mark.of_no_device
def test_sglang_unknown(sglang_module, monkeypatch):
    def later(*, q, tile):
        raise AssertionError

    monkeypatch.setattr(sglang_module, "chunk_gated_delta_rule", later)
    with pytest.raises(RuntimeError, match="takes tile, which gdn_triton does not know"):
        sglang.enable()
    monkeypatch.delattr(sglang_module, "chunk_gated_delta_rule")
    with pytest.raises(ImportError, match="finds no chunk_gated_delta_rule"):
        sglang.enable()
    monkeypatch.setitem(sys.modules, SGLANG_MODULE, None)
    with pytest.raises(ImportError, match=f"finds no {SGLANG_MODULE}"):
        sglang.enable()
