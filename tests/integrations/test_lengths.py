"""The host's lengths of packed sequences reach the plan of a prefill, from the engines' own code:
the methods of vLLM's, SGLang's and transformers' packages that know them run here."""

import inspect
import pickle
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from engine_sources import load
from torch import Tensor
from vllm_steps import K, Sequence, Step, V, conv_state_of, make_layer

from gdn_triton.chunk.prefill import operators
from gdn_triton.integrations import sglang
from gdn_triton.integrations._lengths import offsets_on_host, tell_offsets
from gdn_triton.integrations.vllm import functions, layer, window
from gdn_triton.integrations.vllm.lengths import telling


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The longest three lengths of each prefill, as its problem has them."""
    from gdn_triton.chunk.prefill import api

    monkeypatch.setenv("GDN_BACKEND", "reference")
    found: list[tuple[int, int, int]] = []
    run = api.run_prefill

    def spy(x: Any) -> Any:
        found.append(operators.validate_prefill(x).longest)
        return run(x)

    monkeypatch.setattr(api, "run_prefill", spy)
    return found


def test_an_entry_ends_with_its_tensor() -> None:
    offsets, on_host = torch.tensor([0, 3, 4]), torch.tensor([0, 3, 4])
    assert offsets_on_host(offsets) is offsets_on_host(None) is None
    tell_offsets(offsets, on_host)
    assert offsets_on_host(offsets) is on_host
    # An equal tensor may be that of another batch.
    assert offsets_on_host(offsets.clone()) is None
    tell_offsets(offsets, None)
    assert offsets_on_host(offsets) is None
    from gdn_triton.integrations import _lengths

    before = len(_lengths._on_host)
    tell_offsets(offsets, on_host)
    del offsets
    assert len(_lengths._on_host) == before


# ------------------------------------------------------------------------------------------- vLLM

BUILDER = "GDNAttentionMetadataBuilder"
METADATA = "vllm/v1/attention/backends/gdn_attn.py"


@dataclass
class Common:
    """The fields of vLLM's CommonAttentionMetadata that its method reads."""

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    seq_lens_cpu_upper_bound: Tensor
    block_table_tensor: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    is_prefilling: Tensor | None = None

    def replace(self, **changes: Any) -> "Common":
        return replace(self, **changes)

    def compute_num_computed_tokens(self) -> Tensor:
        return self.seq_lens - self.query_start_loc.diff()


@pytest.fixture
def build() -> Any:
    """vLLM's own method, with what it calls of its package, as the adapter wraps it."""
    given: dict[str, Any] = {"torch": torch, "Any": Any, "Literal": Literal, "replace": replace}
    given |= {"dataclass": dataclass, "NULL_BLOCK_ID": 0}
    annotations = ("CommonAttentionMetadata", "MambaPrefillCheckpointMetadata")
    given |= dict.fromkeys(annotations, Any)
    utils = ("split_decodes_and_prefills",)
    given |= load("vllm", "vllm/v1/attention/backends/utils.py", utils, given)
    given["mamba_get_block_table_tensor"] = lambda table, *rest: table
    given["compute_causal_conv1d_metadata"] = lambda *args, **kwargs: (None, None, None)
    given["async_tensor_h2d"] = lambda x, device, dtype=None: torch.as_tensor(x, dtype=dtype)
    plan = ("GDNFlashInferCheckpointPlan", "GDNAttentionMetadata")
    given |= load("vllm", METADATA, plan, given)
    names = [f"{BUILDER}.{name}" for name in ("build", "update_block_table")]
    found = load("vllm", METADATA, names, given)
    no_buffers = {"_stage_decode": lambda *args: False, "_stage_spec_decode": lambda *args: False}
    builder = SimpleNamespace(
        use_spec_decode=True,
        num_spec=2,
        gdn_prefill_backend="flashinfer",
        plan_flashinfer_checkpoints=False,
        kv_cache_spec=SimpleNamespace(shapes=(None,) * window.WITH_RECORDS),
        vllm_config=SimpleNamespace(
            cache_config=SimpleNamespace(mamba_cache_mode="none"), kv_transfer_config=None
        ),
        checkpoint_builder=SimpleNamespace(build=lambda *args: None),
        **no_buffers,
    )
    told = window.placing(telling(found[f"{BUILDER}.build"]))

    def run(common: Common, drafted: list[int] | None) -> Any:
        drafts: dict[str, Any] = {}
        builder.vllm_config.speculative_config = drafted
        if drafted is not None:
            drafts = {"num_decode_draft_tokens_cpu": torch.tensor(drafted)}
            drafts["num_accepted_tokens"] = torch.ones(len(drafted), dtype=torch.int32)
        metadata = told(builder, common_prefix_len=0, common_attn_metadata=common, **drafts)
        # The metadata of another group of layers has the same batch.
        update = window.carrying(found[f"{BUILDER}.update_block_table"])
        return update(builder, metadata, common.block_table_tensor, None)

    return run


@pytest.mark.parametrize(
    "counts, past, drafted, expected",
    [
        ([5, 70, 3], [0, 0, 0], None, [0, 5, 75, 78]),
        ([1, 1, 9, 0], [4, 8, 0, 0], None, [0, 9]),  # decodes first, and padding last
        ([1, 3, 40, 1], [9, 9, 0, 9], [-1, 2, -1, -1], [0, 1, 41, 42]),
    ],
    ids=["prefills", "after-decodes", "with-drafts"],
)
def test_vllm(build: Any, counts: Any, past: Any, drafted: Any, expected: Any) -> None:
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    common = Common(
        query_start_loc=offsets,
        query_start_loc_cpu=offsets.clone(),
        seq_lens=torch.tensor(counts) + torch.tensor(past),
        seq_lens_cpu_upper_bound=torch.tensor(counts) + torch.tensor(past),
        block_table_tensor=torch.arange(3 * len(counts)).view(-1, 3) + 1,
        num_reqs=len(counts),
        num_actual_tokens=int(offsets[-1]),
        max_query_len=max(counts),
        is_prefilling=torch.tensor([n == 0 for n in past]),
    )
    metadata = build(common, drafted)
    device = metadata.prefill_query_start_loc
    on_host = offsets_on_host(device)
    assert on_host is not None
    assert on_host.tolist()[: len(expected)] == expected
    assert torch.equal(on_host, device.cpu())
    # The positions of a step with a window, which has no drafts.
    positions = getattr(metadata, window.POSITIONS, None)
    assert (positions is None) == (drafted is not None)
    if positions is not None:
        prefills = [n for n, count in enumerate(counts) if count > 0 and past[n] == 0]
        assert positions.lengths is common.seq_lens
        assert positions.before.tolist() == [past[n] + 1 for n in prefills]
        assert positions.after.tolist() == [past[n] + counts[n] + 1 for n in prefills]
    # vLLM writes the next step's offsets to the memory of this step's.
    common.query_start_loc_cpu.zero_()
    assert torch.equal(on_host, device.cpu())


def test_vllm_layer(planned: Any) -> None:
    """Both ways to a prefill: the layer's own, and the function that is called past it."""
    model, sequences = make_layer(), [Sequence([2, 0, 0]), Sequence([5, 0, 0])]
    step = Step(model, sequences, [70, 9], [])
    metadata = step.metadata
    call = (conv_state_of(model), *step.inputs())
    layer.forward_core(model, metadata, *call)
    tell_offsets(metadata.prefill_query_start_loc, metadata.prefill_query_start_loc.clone())
    layer.forward_core(model, metadata, *call)
    assert planned == [(0, 0, 0), (70, 9, 0)]
    x = [torch.randn(1, 79, heads, size) for heads, size in ((2, K), (2, K), (4, V))]
    gates = [-torch.rand(1, 79, 4), torch.rand(1, 79, 4)]
    functions.chunk_gated_delta_rule(
        *x,
        *gates,
        initial_state=None,
        cu_seqlens=metadata.prefill_query_start_loc,
        use_qk_l2norm_in_kernel=True,
    )
    assert planned[2:] == [(70, 9, 0)]


# ----------------------------------------------------------------------------------------- SGLang


def test_sglang(planned: Any) -> None:
    """SGLang's own methods: its backend's convolution, which has the lengths on the host, and its
    kernel's `extend`, which has not."""
    base = "sglang/srt/layers/attention/linear"
    given: dict[str, Any] = {"torch": torch, "LinearAttnKernelBase": object}
    given |= dict.fromkeys(("RadixLinearAttention", "ForwardBatch"), Any)
    given |= {name: lambda: False for name in ("is_cpu", "is_npu", "is_xpu")}
    given |= sglang.FUNCTIONS
    name = "GDNAttnBackend._convolve_prefill"
    convolve = load("sglang", f"{base}/gdn_backend.py", [name], given)[name]
    kernel = load("sglang", f"{base}/kernels/gdn_triton.py", ["TritonGDNKernel"], given)
    extend = kernel["TritonGDNKernel"]().extend
    D, lengths = 2 * 2 * K + 4 * V, [70, 1, 9]
    offsets = torch.tensor([0, 70, 71, 80], dtype=torch.int32)
    slots = torch.tensor([2, 5, 1])
    parts = SimpleNamespace(conv_weights=torch.randn(D, 4), bias=None, activation="silu")
    metadata = SimpleNamespace(conv_block_table=None, query_start_loc=offsets)
    backend = SimpleNamespace(forward_metadata=metadata)

    def step(seq_lens_cpu: list[int] | None) -> None:
        batch = SimpleNamespace(
            extend_prefix_lens=torch.zeros(3, dtype=torch.int32), extend_seq_lens_cpu=seq_lens_cpu
        )
        x = torch.randn(80, D)
        convolved = convolve(backend, parts, batch, x, torch.zeros(6, D, 3), slots)
        q, k, v = sglang.fused_qkv_split_gdn_prefill(convolved, 2, 2, 4, K, K, V)
        extend(
            q,
            k,
            v,
            -torch.rand(1, 80, 4),
            torch.rand(1, 80, 4),
            ssm_states=torch.zeros(6, 4, V, K),
            cache_indices=slots,
            query_start_loc=metadata.query_start_loc,
        )

    step(lengths)
    # In a batch that SGLang has padded the host knows other sequences than the device has.
    step([*lengths, 0])
    step(None)
    assert planned == [(70, 9, 1), (0, 0, 0), (0, 0, 0)]


# ----------------------------------------------------------------------------------- transformers


@pytest.mark.usefixtures("undone")
@pytest.mark.parametrize("form", ["list", "tensor"])
@torch.no_grad()
def test_transformers(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From transformers' own collator through a whole model, with its attention layers."""
    transformers = pytest.importorskip(
        "transformers", minversion="5.15", reason="earlier layers hand on no bounds"
    )
    from helpers import FP32
    from transformer_cases import LINEAR, QWEN3_NEXT, ours

    from gdn_triton.chunk import api
    from gdn_triton.integrations.transformers import with_host_offsets

    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    samples = [{"input_ids": list(range(n))} for n in (11, 1, 17)]
    batch = pickle.loads(pickle.dumps(with_host_offsets(collator)))(samples)
    assert batch["cu_seqlens_cpu"] == [0, 11, 12, 29]
    # A trainer moves every tensor, and nothing else.
    batch = {name: x.to("cpu") if isinstance(x, Tensor) else x for name, x in batch.items()}
    labels = batch.pop("labels")
    if form == "tensor":
        batch["cu_seqlens_cpu"] = torch.tensor(batch["cu_seqlens_cpu"])
    monkeypatch.setenv("GDN_BACKEND", "reference")
    found, judge = [], api.validate_chunk

    def spy(x: Any) -> Any:
        problem = judge(x)
        found.append(problem.longest)
        return problem

    monkeypatch.setattr(api, "validate_chunk", spy)
    model = QWEN3_NEXT.make(FP32, "cpu")
    with ours(model):
        assert model(**batch, labels=labels, use_cache=False).logits.shape[1] == 29
    assert found == [(17, 11, 1)] * LINEAR


def test_collators_without_offsets() -> None:
    from gdn_triton.integrations.transformers import with_host_offsets

    assert "cu_seqlens_cpu" in inspect.getdoc(with_host_offsets)
    with pytest.raises(ValueError, match="cu_seq_lens_q must be in the collator's batches"):
        with_host_offsets(lambda features: {"input_ids": features})([1])
    there = {"cu_seq_lens_q": torch.zeros(2, dtype=torch.int32, device="meta")}
    with pytest.raises(ValueError, match="cu_seq_lens_q must be on the CPU, got meta"):
        with_host_offsets(lambda features: there)([1])
