"""The caches of transformers' models with a window of records: the tokens of the same models
without one, and whole states for whatever else reads them."""

import copy
from typing import Any

import pytest
import torch
from helpers import FP32
from torch import Tensor
from transformer_cases import LINEAR, QWEN3_NEXT, cache_name, theirs, tokens

from gdn_triton.integrations import _transformers_window as windows
from gdn_triton.integrations import transformers as integration

cache_utils = pytest.importorskip("transformers.cache_utils")
pytestmark = [
    pytest.mark.usefixtures("undone", "quick"),
    pytest.mark.skipif(
        not hasattr(cache_utils, "LinearAttentionLayer"), reason="no layer of a cache to patch"
    ),
]
PROMPT, STEPS = 9, 20  # more steps than a fold period


def decoded(model: Any, device: str, steps: int = STEPS) -> tuple[list[Tensor], Any]:
    """The logits of a prompt and of each further token, and the cache."""
    ids, name = tokens(2, PROMPT + steps, device), cache_name(model)
    with torch.no_grad():
        first = model(ids[:, :PROMPT], use_cache=True)
        cache, logits = getattr(first, name), [first.logits[:, -1]]
        for t in range(PROMPT, PROMPT + steps):
            logits.append(model(ids[:, t : t + 1], **{name: cache}, use_cache=True).logits[:, -1])
    return logits, cache


def states(cache: Any) -> list[Any]:
    return [cache.layers[i].recurrent_states[0] for i in range(LINEAR)]


def test_decoding(device: str) -> None:
    """Over folds, with calls of several tokens between them; off by default."""
    model = QWEN3_NEXT.make(FP32, device)
    with theirs(model):
        expected, exact = decoded(model, device)
    integration.enable()
    _, cache = decoded(model, device, 2)
    assert all(type(x) is Tensor for x in states(cache))
    status = integration.enable(window=True)
    assert "LinearAttentionLayer.update_recurrent_state: gdn_triton.recurrent_step" in str(status)
    found, cache = decoded(model, device)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-4, atol=1e-5)
    held = states(cache)
    assert all(isinstance(x, windows.WindowedState) and not x.is_whole for x in held)
    behind = [x.memory.clone() for x in held]
    for x, before, other in zip(held, behind, states(exact), strict=True):
        assert not torch.equal(before, other.to(before))
        torch.testing.assert_close(x + 0, other, rtol=1e-4, atol=1e-5)
        assert x.is_whole and x.shape == other.shape and type(x + 0) is Tensor

    more, name = tokens(2, 5, device), cache_name(model)
    results = []
    for given in (cache, exact):
        with torch.no_grad():
            if given is exact:
                integration.disable()
            several = model(more[:, :4], **{name: given}, use_cache=True).logits
            one = model(more[:, 4:], **{name: given}, use_cache=True).logits
        results.append(torch.cat([several, one], 1))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def change(cache: Any, how: str) -> Any:
    if how == "copied":
        return copy.deepcopy(cache)
    if how == "reordered":
        cache.reorder_cache(torch.tensor([1, 0]))
    elif how == "offloaded":
        for layer in cache.layers[:LINEAR]:
            layer.offload()
            layer.prefetch()
    elif how == "reset":
        for layer in cache.layers[:LINEAR]:
            layer.recurrent_states[0].zero_()
    else:
        integration.disable()
    return cache


@pytest.mark.parametrize("how", ["copied", "reordered", "offloaded", "reset", "disabled"])
def test_changes_of_a_cache(how: str, device: str) -> None:
    """Code that changes a cache between two steps has the same effect as without a window."""
    model = QWEN3_NEXT.make(FP32, device)
    name, last = cache_name(model), tokens(2, 3, device)

    def after(window: bool) -> list[Tensor]:
        integration.disable()
        integration.enable(window=window)
        cache = change(decoded(model, device, 4)[1], how)
        with torch.no_grad():
            return [
                model(last[:, t : t + 1], **{name: cache}, use_cache=True).logits for t in range(3)
            ]

    expected, found = after(False), after(True)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_generate(device: str) -> None:
    """Greedy tokens and beams, whose states are reordered at every step."""
    model = QWEN3_NEXT.make(FP32, device)
    ids = tokens(2, 12, device)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with theirs(model):
        expected = [model.generate(ids, **options, num_beams=n) for n in (1, 3)]
    integration.enable(window=True)
    found = [model.generate(ids, **options, num_beams=n) for n in (1, 3)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="window must be True or False, got 1"):
        integration.enable(window=1)  # type: ignore[arg-type]
    monkeypatch.setattr(cache_utils.LinearAttentionLayer, "update_recurrent_state", test_generate)
    with pytest.raises(RuntimeError, match="does not know the text"):
        integration.enable(window=True)
    assert not integration.status().enabled
