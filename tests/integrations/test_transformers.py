"""A model of Qwen3-Next of transformers, made small and random, on this package's ops: its logits
and gradients, padded, packed, generating and compiled."""

from typing import Any

import pytest
import torch
from helpers import DTYPES, FP32
from torch import Tensor
from transformer_cases import (
    EXPERTS,
    LINEAR,
    QWEN3_NEXT,
    TERMS,
    TWENTY_TWO_BITS,
    VERSION,
    Result,
    cache_name,
    compare,
    gradients,
    ours,
    prefill_and_decode,
    theirs,
    tokens,
)

pytestmark = pytest.mark.usefixtures("undone")

# Nobody's models are in float16, and the interpreter is slow.
model_dtypes = pytest.mark.parametrize("dtype", [case for case in DTYPES if case.id != "fp16"])


@model_dtypes
def test_logits(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill, over more than one chunk, and cached decoding, on the kernels."""
    monkeypatch.setenv("GDN_BACKEND", "triton")
    # A choice of experts that flips with a rounding is no error of ours: 16 bits take all of them.
    model = QWEN3_NEXT.make(dtype, device, 2 if dtype == FP32 else EXPERTS)
    compare(model, prefill_and_decode(tokens(1, 71, device), 3), device, units=LINEAR)


@model_dtypes
def test_training_step(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of every parameter, on the kernels."""
    if dtype == FP32 and device != "cpu":
        pytest.skip(TWENTY_TWO_BITS)
    monkeypatch.setenv("GDN_BACKEND", "triton")
    model = QWEN3_NEXT.make(dtype, device, 2 if dtype == FP32 else EXPERTS)
    compare(model, gradients(tokens(1, 66, device)), device, units=TERMS * LINEAR)


@pytest.mark.usefixtures("quick")
def test_left_padding(device: str) -> None:
    """Rows of 40 and 23 tokens, padded on the left: the logits, and those of each row alone."""
    ids = tokens(2, 40, device)
    mask = torch.ones_like(ids)
    mask[1, :17] = 0
    ids = ids * mask
    model = QWEN3_NEXT.make(FP32, device)

    @torch.no_grad()
    def compute(model: Any) -> Result:
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        return {"full row": logits[0], "padded row": logits[1, 17:]}

    compare(model, compute, device, units=LINEAR)
    with ours(model), torch.no_grad():
        alone = model(ids[1:, 17:], use_cache=False).logits[0]
        torch.testing.assert_close(compute(model)["padded row"], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
def test_generate(padded: bool, device: str) -> None:
    """Greedy tokens, and the scores that they were chosen by."""
    ids = tokens(2, 20, device)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :9] = 0
    model = QWEN3_NEXT.make(FP32, device)
    options = {"max_new_tokens": 12, "do_sample": False, "output_scores": True}
    options |= {"return_dict_in_generate": True, "attention_mask": mask}
    with theirs(model):
        expected = model.generate(ids * mask, **options)
    with ours(model):
        got = model.generate(ids * mask, **options)
    assert got.sequences.shape == (2, 32)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(
        torch.stack(got.scores), torch.stack(expected.scores), rtol=1e-4, atol=1e-5
    )
    with ours(model):
        beams = model.generate(ids * mask, **{**options, "num_beams": 3, "max_new_tokens": 4})
    with theirs(model):
        expected = model.generate(ids * mask, **{**options, "num_beams": 3, "max_new_tokens": 4})
    assert torch.equal(beams.sequences, expected.sequences)


@pytest.mark.usefixtures("quick")
def test_dtype_of_the_cache(device: str) -> None:
    """The cached states are float32 in a 16-bit model, as they are on transformers' functions."""
    model = QWEN3_NEXT.make(torch.bfloat16, device)

    def states(model: Any) -> list[Tensor]:
        with torch.no_grad():
            name = cache_name(model)
            cache = getattr(model(tokens(1, 9, device), use_cache=True), name)
            found = [state_of(cache, layer) for layer in range(LINEAR)]
            model(tokens(1, 1, device), **{name: cache}, use_cache=True)
            return [*found, *(state_of(cache, layer) for layer in range(LINEAR))]

    with theirs(model):
        expected = states(model)
    with ours(model):
        got = states(model)
    assert [x.dtype for x in got] == [x.dtype for x in expected] == [FP32] * 2 * LINEAR
    assert [x.shape for x in got] == [x.shape for x in expected]


def state_of(cache: Any, layer: int) -> Tensor:
    """A layer's recurrent state, where each version keeps it."""
    if hasattr(cache, "recurrent_states"):
        found = cache.recurrent_states[layer]
    else:
        found = cache.layers[layer].recurrent_states
    while not isinstance(found, Tensor):
        found = found[0]
    return found


LENGTHS = (11, 1, 17)


def packing(device: str) -> dict[str, Any]:
    """The batch of transformers' collator for sequences in one row."""
    offsets = torch.tensor([0, 11, 12, 29], dtype=torch.int32, device=device)
    numbers = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS)).to(device)
    return {
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None].to(device),
        "seq_idx": numbers[None].int(),
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
        "use_cache": False,
    }


before_5_15 = pytest.mark.skipif(
    VERSION < (5, 15),
    reason="before 5.15 the layer hands on no bounds of sequences, or to FLA only",
)


@before_5_15
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("numbered", [True, False], ids=["and-numbers", "offsets"])
def test_packed(numbered: bool, device: str) -> None:
    """Three sequences in one row, without the package causal_conv1d: the logits of each alone, and
    the gradients of all."""
    ids = tokens(1, sum(LENGTHS), device)
    given = packing(device)
    if not numbered:
        del given["seq_idx"]
    model = QWEN3_NEXT.make(FP32, device)
    weights = torch.randn(1, sum(LENGTHS), model.config.vocab_size, device=device)
    with ours(model):
        packed = model(ids, **given).logits
        packed.mul(weights).sum().backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        alone = [model(part, use_cache=False).logits for part in ids.split(LENGTHS, 1)]
        torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)
        torch.cat(alone, 1).mul(weights).sum().backward()
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(found[name], p.grad, rtol=1e-3, atol=1e-4, msg=name)
    assert any("conv1d" in name for name in found)


@before_5_15
@pytest.mark.usefixtures("quick")
def test_packed_that_cannot_be_kept_apart(device: str) -> None:
    """Numbers without offsets, and sequences that would go on from one sequence's cache."""
    ids, given = tokens(1, sum(LENGTHS), device), packing(device)
    model = QWEN3_NEXT.make(FP32, device)
    with ours(model), torch.no_grad():
        del given["cu_seq_lens_q"]
        with pytest.raises(ValueError, match="cu_seq_lens_q must be given with seq_idx"):
            model(ids, **given)
        name = cache_name(model)
        cache = getattr(model(ids[:, :9], use_cache=True), name)
        given = packing(device) | {"use_cache": True, name: cache}
        given["position_ids"] = given["position_ids"] + 9
        with pytest.raises(ValueError, match="and no cache before them"):
            model(ids, **given)
        del given["seq_idx"]
        with pytest.raises(ValueError, match="a cache has tokens before them, got 3 sequences"):
            model(ids, **given)


@before_5_15
@pytest.mark.usefixtures("quick")
def test_compiled_packed_layer(device: str) -> None:
    """No graph break where sequences are packed."""
    model = QWEN3_NEXT.make(FP32, device)
    layer = next(x for x in model.modules() if type(x).__name__.endswith("GatedDeltaNet"))
    x = torch.randn(1, sum(LENGTHS), model.config.hidden_size, device=device)
    given = {name: packing(device)[name] for name in ("seq_idx", "cu_seq_lens_q")}
    given["cu_seqlens_cpu"] = given["cu_seq_lens_q"].cpu()
    with ours(model):
        torch.compiler.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x, **given), layer(x, **given))
        torch.compiler.reset()


@pytest.mark.usefixtures("quick")
def test_compiled_layer(device: str) -> None:
    """No graph break in a layer, training or decoding."""
    model = QWEN3_NEXT.make(FP32, device)
    layer = next(x for x in model.modules() if type(x).__name__.endswith("GatedDeltaNet"))
    x = torch.randn(1, 9, model.config.hidden_size, device=device)
    with ours(model):
        torch.compiler.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), layer(x))
        torch.compiler.reset()
