"""vLLM's `_forward_core` on this package's ops: every kind of step against the specification, and
against vLLM's own method and kernels where its wheel is given."""

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from engine_kernels import GIVEN, be_lenient
from engine_sources import load
from helpers import assert_within_budget, same_bits
from vllm_steps import DRAFTS, HV, SLOTS, D, H, K, Sequence, Step, V, W, conv_state_of, make_layer

from gdn_triton.integrations.vllm import functions
from gdn_triton.integrations.vllm import layer as ours


@pytest.fixture(autouse=True, params=["reference", "triton"])
def backend(request, monkeypatch):
    """On the CPU: the kernels run in Triton's interpreter."""
    if request.param == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("these tensors are on the CPU, where Triton runs in its interpreter only")
    monkeypatch.setenv("GDN_BACKEND", request.param)


def run(step: Step) -> torch.Tensor:
    """o of the step's tokens. Nothing else of the output, and no slot of nobody, is written."""
    layer, metadata = step.layer, step.metadata
    mixed_qkv, b, a, out = step.inputs()
    nobody = [layer.kv_cache[i][0].clone() for i in (0, 1)]
    ours.forward_core(layer, metadata, conv_state_of(layer), mixed_qkv, b, a, out)
    for pool, before in zip(layer.kv_cache, nobody, strict=True):
        assert same_bits(pool[0], before), "slot 0 is written"
    tokens = sum(step.counts)
    assert not out[tokens:].any(), "o of padding"
    return out[:tokens]


def assert_specified(step: Step, o: torch.Tensor) -> None:
    """o, and the states that the step leaves, against the specification."""
    start = 0
    for n, (s, count) in enumerate(zip(step.sequences, step.counts, strict=True)):
        exact, states = s.run(step.layer)
        close, close_state = s.narrow(step.layer, chunked=step.is_prefill(n) or bool(step.drafts))
        first = step.before[n]
        # Five bits for chunks of strong decays, and for what the steps before have rounded.
        budget = {"dtype": torch.float32, "unit": 2**-19}
        got = o[start : start + count]
        assert_within_budget(f"o {n}", got, exact[first:], close[first:], **budget)
        pool = step.layer.kv_cache[1]
        last = s.slots[count - 1 if n in step.drafts else 0]
        assert_within_budget(f"state {n}", pool[last], states[-1], close_state, **budget)
        if n in step.drafts:
            for t in range(count):
                torch.testing.assert_close(
                    pool[s.slots[t]].double(), states[first + t], rtol=2**-16, atol=2**-18
                )
        start += count


def sequences(count: int) -> list[Sequence]:
    width = DRAFTS + 1
    slots = list(range(1, 1 + count * width))[::-1]
    return [Sequence(slots[n * width : (n + 1) * width]) for n in range(count)]


@pytest.mark.parametrize("doubles_beta", [False, True], ids=["Qwen", "OLMo"])
def test_a_service(doubles_beta):
    """Sequences that begin, go on in pieces, decode alone and beside a prefill, verify drafts alone
    and with others: after every step o and states are those of the whole sequence."""
    layer, (a, b, c, d) = make_layer(doubles_beta=doubles_beta), sequences(4)
    # vLLM puts decodes first.
    steps = [
        ([a, b], [5, 70], []),  # two begin
        ([a, b], [1, 33], []),  # one decodes, the other goes on
        ([b, a, c], [1, 1, 2], []),  # a third begins, and two decode
        ([a, b, c], [1, 1, 1], []),  # decodes only, in a padded graph
        ([a, b], [3, 3], [0, 1]),  # the first drafts
        ([a, b], [3, 2], [0, 1]),
        ([d, b, c, a], [9, 3, 1, 2], [1, 3]),  # drafts, a beginning and a decode
        ([b, a], [1, 3], [0, 1]),
    ]
    accepted = iter([2, 1, 3, 2, 1, 2, 1, 1])
    for members, counts, drafts in steps:
        step = Step(layer, members, counts, drafts, padding=2 if counts == [1, 1, 1] else 0)
        assert_specified(step, run(step))
        for n in drafts:
            members[n].accepted = min(next(accepted), counts[n])
            members[n].undo(counts[n] - members[n].accepted)


def test_padded_drafts():
    """A padded graph: sequences without a slot and without tokens."""
    layer, (a, b) = make_layer(), sequences(2)
    run(Step(layer, [a, b], [4, 6], []))
    step = Step(layer, [a, b], [3, 1], [0, 1], padding=2)
    assert_specified(step, run(step))


def test_counters_of_drafts(monkeypatch):
    """A layer keeps its counters while its pool has as many slots, and makes none in a capture."""
    layer, (a,) = make_layer(), sequences(1)
    run(Step(layer, [a], [4], []))
    run(Step(layer, [a], [3], [0]))
    kept = layer.gdn_triton_counters
    assert kept.shape == (SLOTS, H) and kept.dtype == torch.int32 and not kept.any()
    run(Step(layer, [a], [2], [0]))
    assert layer.gdn_triton_counters is kept
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    larger = SimpleNamespace(shape=(SLOTS + 1,), device=kept.device, is_cuda=True)
    layer.kv_cache = (layer.kv_cache[0], larger)
    assert ours._counters(layer) is None and layer.gdn_triton_counters is kept
    monkeypatch.undo()
    larger.is_cuda = False
    assert ours._counters(layer).shape == (SLOTS + 1, H)


def test_no_tokens():
    layer = make_layer()
    metadata = Step(layer, sequences(1), [1], []).metadata
    metadata.num_actual_tokens = metadata.num_prefills = metadata.num_decodes = 0
    before = [x.clone() for x in layer.kv_cache]
    out = torch.zeros(3, HV, V)
    x = torch.randn(3, D), torch.randn(3, HV), torch.randn(3, HV)
    ours.forward_core(layer, metadata, conv_state_of(layer), *x, out)
    assert not out.any() and all(map(same_bits, before, layer.kv_cache))


class Exporter:
    """Writes what vLLM's does: of each row with a checkpoint the W - 1 tokens before it."""

    def export(self, checkpoint, *, raw_qkv, conv_state, cu_seqlens):
        for n, offset in enumerate(checkpoint.offsets):
            if offset:
                end = int(cu_seqlens[n]) + offset
                slot = int(checkpoint.state_indices[n])
                conv_state[slot, :, : W - 1] = raw_qkv[end - W + 1 : end].mT


@pytest.mark.parametrize("decodes", [0, 1])
def test_checkpoints(decodes):
    """Prefix caching: the state in the middle of a prefill goes to a slot of its own, whence a
    sequence goes on as if it had ended there."""
    layer, members = make_layer(), sequences(3)
    layer._checkpoint_exporter = Exporter()
    if decodes:
        run(Step(layer, members[:1], [3], []))
    chosen = members[1 - decodes :]
    counts = [1] * decodes + [200, 70]
    places = {decodes: (128, 14), decodes + 1: (64, 15)}
    step = Step(layer, chosen, counts, [], checkpoints=places)
    before = layer.kv_cache[1].clone()
    assert_specified(step, run(step))
    used = {s.slots[0] for s in chosen} | {14, 15}
    others = [slot for slot in range(SLOTS) if slot not in used]
    assert same_bits(layer.kv_cache[1][others], before[others]), "a slot of nobody is written"
    for n, (offset, slot) in places.items():
        at = Sequence([slot, 0, 0])
        at.extend((chosen[n].mixed_qkv[:offset], chosen[n].a[:offset], chosen[n].b[:offset]))
        going_on = Step(layer, [at], [5], [])
        assert_specified(going_on, run(going_on))


def test_inference_mode_and_parameters():
    """vLLM's parameters require gradients, and its steps run in inference mode."""
    layer, (a,) = make_layer(), sequences(1)
    layer.A_log = torch.nn.Parameter(layer.A_log)
    layer.conv1d.weight = torch.nn.Parameter(layer.conv1d.weight)
    with torch.inference_mode():
        for counts, drafts in (([9], []), ([1], []), ([3], [0])):
            step = Step(layer, [a], counts, drafts)
            assert_specified(step, run(step))


def test_method(monkeypatch):
    """The metadata of the layer's name is found; without any, memory is being sized, or FlashInfer
    tuned, when vLLM has no current config and nothing is left to warm up."""
    layer, (a,) = make_layer(), sequences(1)
    warmed = []
    layer._warmup_prefill_kernels = lambda *args: warmed.append(args)
    context = SimpleNamespace(attn_metadata=None)
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=5))
    module = SimpleNamespace(
        get_forward_context=lambda: context,
        is_conv_state_dim_first=lambda: False,
    )
    current = SimpleNamespace(get_current_vllm_config_or_none=lambda: config)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.config", current)
    made = []
    method = ours.method(module, lambda *args, **kwargs: made.append((args, kwargs)))
    step = Step(layer, [a], [9], [])
    mixed_qkv, b, a_, out = step.inputs()
    method(layer, mixed_qkv, b, a_, out)
    context.attn_metadata = {"another": None}
    method(layer, mixed_qkv, b, a_, out)
    assert [x.shape for x, _ in warmed] == [mixed_qkv.shape] * 2 and not out.any()
    for (of, tokens), options in made:
        assert of is layer and tokens.mixed_qkv is mixed_qkv and tokens.b is b and tokens.a is a_
        assert tokens.out.shape == out.shape and tokens.out.data_ptr() != out.data_ptr()
        assert options == {"max_sequences": 5, "is_conv_state_dim_first": False}
    assert len(made) == 2
    config = None
    method(layer, mixed_qkv, b, a_, out)
    assert len(made) == 2 and not out.any()
    context.attn_metadata = {layer.prefix: step.metadata}
    method(layer, mixed_qkv, b, a_, out)
    assert_specified(step, out[:9])
    # The other layout of vLLM's convolution states.
    first, (b2,) = make_layer(), sequences(1)
    first.kv_cache = (first.kv_cache[0].mT.contiguous(), first.kv_cache[1])
    module.is_conv_state_dim_first = lambda: True
    begin = Step(first, [b2], [4], [])
    context.attn_metadata = {first.prefix: begin.metadata}
    mixed_qkv, b, a_, out = begin.inputs()
    method(first, mixed_qkv, b, a_, out)
    assert_specified(begin, out[:4])


# ------------------------------------------------------------------------------ vLLM's own


def their_module() -> SimpleNamespace:
    """vLLM's method and the kernels that it calls, from the wheel. Its chunked prefill, of a dozen
    tuned kernels, is ours."""
    platform = SimpleNamespace(
        is_arch_support_pdl=lambda: False, is_cuda=lambda: False, is_cpu=lambda: False
    )
    common = {
        **GIVEN,
        **{"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1, "current_platform": platform},
    }
    fla = "vllm/third_party/flash_linear_attention/ops"
    mamba = "vllm/model_executor/layers/mamba"
    calls = {}
    for file, names in (
        (
            f"{mamba}/ops/causal_conv1d.py",
            ("_causal_conv1d_update_kernel", "causal_conv1d_update"),
        ),
        (
            f"{fla}/fused_sigmoid_gating.py",
            (
                "fused_sigmoid_gating_delta_rule_update_kernel",
                "fused_sigmoid_gating_delta_rule_update",
            ),
        ),
        (
            f"{fla}/fused_recurrent.py",
            (
                "fused_recurrent_gated_delta_rule_packed_decode_kernel",
                "fused_recurrent_gated_delta_rule_packed_decode",
            ),
        ),
    ):
        calls |= load("vllm", file, names, common)
    calls["causal_conv1d_fn"] = functions.causal_conv1d_fn
    calls["fused_post_conv_prep"] = functions.fused_post_conv_prep
    context = SimpleNamespace(attn_metadata=None)
    given = {
        **common,
        **calls,
        "GDNAttentionMetadata": object,
        "get_forward_context": lambda: context,
        "is_conv_state_dim_first": lambda: False,
    }
    methods = (
        "QwenGatedDeltaNetAttention._forward_core",
        "QwenGatedDeltaNetAttention._forward_core_decode_non_spec",
        "QwenGatedDeltaNetAttention.rearrange_mixed_qkv",
    )
    found = load("vllm", f"{mamba}/gdn/qwen_gdn_linear_attn.py", methods, given)
    return SimpleNamespace(context=context, **{n.partition(".")[2]: m for n, m in found.items()})


def run_theirs(module: Any, step: Step, layer: Any) -> torch.Tensor:
    mixed_qkv, b, a, out = step.inputs()
    module.context.attn_metadata = {layer.prefix: step.metadata}
    layer.enable_packed_recurrent_decode = True
    layer.chunk_gated_delta_rule = functions.forward
    for name in ("_forward_core_decode_non_spec", "rearrange_mixed_qkv"):
        setattr(layer, name, getattr(module, name).__get__(layer))
    module._forward_core(layer, mixed_qkv, b, a, out)
    return out


@pytest.mark.parametrize(
    "counts, drafts, padding",
    [
        pytest.param([1, 1], [], 2, id="decode"),
        pytest.param([1, 9, 70], [], 0, id="mixed"),
        pytest.param([3, 2], [0, 1], 0, id="drafts"),
        pytest.param([3, 3], [0, 1], 2, id="padded drafts"),
        pytest.param([9, 3, 1], [1], 0, id="drafts beside others"),
    ],
)
def test_as_vllm(counts, drafts, padding, monkeypatch):
    """On the same pools vLLM's method with its kernels, and ours: the same o and the same states,
    but for the rounding of float32."""
    be_lenient(monkeypatch)
    module = their_module()
    layer, members = make_layer(), sequences(len(counts))
    begun = [n for n in range(len(counts)) if n in drafts or counts[n] == 1]
    run(Step(layer, [members[n] for n in begun], [6] * len(begun), []))
    for n in drafts:
        members[n].accepted = 1
    theirs = make_layer()
    theirs.__dict__.update(layer.__dict__)
    theirs.kv_cache = tuple(x.clone() for x in layer.kv_cache)
    step = Step(layer, members, counts, drafts, padding=padding)
    o = run(step)
    tokens = sum(counts)
    got = run_theirs(module, step, theirs)
    torch.testing.assert_close(o, got[:tokens], rtol=1e-4, atol=1e-5)
    for pool, other in zip(layer.kv_cache, theirs.kv_cache, strict=True):
        # Slot 0 is nobody's, and vLLM writes the columns that it reads no more.
        torch.testing.assert_close(pool[1:], other[1:], rtol=1e-4, atol=1e-5)
    assert K and D
