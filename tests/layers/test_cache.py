"""The contents that a cache of the layer may have, and the slots that may be read, written and
reset."""

from functools import partial
from typing import Any

import pytest
import torch
from layer_cases import make_input, make_layer

from gdn_triton.layers import GatedDeltaNetCache


@pytest.mark.parametrize("name", ["dtype", "state_dtype"])
def test_wrong_dtypes_of_a_cache(name: str) -> None:
    """States would be rounded to integers at every write."""
    layer: Any = make_layer()
    for dtype in (torch.int32, torch.uint8, torch.bool, torch.complex64):
        with pytest.raises(ValueError, match=f"^{name} must be float16, .*, got {dtype}"):
            layer.make_cache(2, **{name: dtype})
    with pytest.raises(TypeError, match=f"^{name} must be a torch.dtype, got 'half'"):
        layer.make_cache(2, **{name: "half"})


BAD_POOLS: list[tuple[dict[str, Any], str]] = [
    ({"recurrent_state": torch.zeros(3, 1).int()}, "recurrent_state must be float16"),
    ({"conv_state": torch.zeros(3, 1).bool()}, "conv_state must be float16"),
    ({"conv_state": torch.zeros(3, 1).to_sparse()}, "conv_state must be a strided tensor"),
    ({"conv_state": torch.zeros(2, 1)}, r"conv_state must have as many rows .* \[2, 1\] and"),
    ({"conv_state": torch.zeros(3, 1, device="meta")}, "conv_state must be on the device of rec"),
    ({"conv_state": torch.zeros(1, 1).expand(3, 1)}, "conv_state must have memory of its own"),
]


@pytest.mark.parametrize("changes, message", BAD_POOLS)
def test_wrong_pools(changes: dict[str, Any], message: str) -> None:
    good = {"conv_state": torch.zeros(3, 1), "recurrent_state": torch.zeros(3, 1)}
    with pytest.raises(ValueError, match=message):
        GatedDeltaNetCache(**{**good, **changes})


BAD_SLOTS: list[tuple[Any, type[Exception], str]] = [
    (torch.tensor([1.5]), ValueError, "slots must be int32 or int64, got torch.float32"),
    (torch.tensor([True, False]), ValueError, "slots must be int32 or int64, got torch.bool"),
    ([1], TypeError, "slots must be a torch.Tensor, got list"),
    (torch.tensor([[1]]), ValueError, r"slots must have 1 dimensions \[n\]"),
    (torch.tensor([1], device="meta"), ValueError, "slots must be on the device of the cache"),
    # The row after the last slot is nobody's.
    (torch.tensor([0, 3]), ValueError, "slots must be less than the 3 slots of the cache, got 3"),
]


@pytest.mark.parametrize("slots, error, message", BAD_SLOTS)
def test_wrong_slots(slots: Any, error: type[Exception], message: str) -> None:
    cache = make_layer().make_cache(3)
    cache.recurrent_state.fill_(1)
    states = torch.zeros(2, *cache.recurrent_state.shape[1:])
    for call in (
        cache.reset,
        partial(cache.read, "recurrent_state"),
        partial(cache.write, "recurrent_state", states=states),
    ):
        with pytest.raises(error, match=message):
            call(slots)
    assert (cache.recurrent_state == 1).all()


def test_wrong_reads_and_writes() -> None:
    cache: Any = make_layer().make_cache(3)
    cache.recurrent_state.fill_(1)
    slots = torch.tensor([0, 2])
    states = torch.zeros(2, *cache.recurrent_state.shape[1:])
    for name in ("state", "skip", None):
        for call in (cache.read, partial(cache.write, states=states)):
            with pytest.raises(ValueError, match="name must be conv_state or recurrent_state, got"):
                call(name, slots)
    with pytest.raises(ValueError, match=r"name must be recurrent_state, got 'conv_state' \(str\)"):
        make_layer("no-convolution").make_cache(3).read("conv_state", slots)
    for wrong, error, message in (
        (None, TypeError, "states must be a torch.Tensor, got NoneType"),
        (states[:1], ValueError, r"states must have shape \[2, .*, got shape \[1, "),
        (states.int(), ValueError, "states must be float16, .*, got torch.int32"),
        (states.to("meta"), ValueError, "states must be on the device of the cache, cpu, got meta"),
    ):
        with pytest.raises(error, match=message):
            cache.write("recurrent_state", slots, wrong)
    with pytest.raises(ValueError, match="slots must name no slot twice"):
        cache.write("recurrent_state", slots * 0, states)
    assert (cache.recurrent_state == 1).all()


def test_reads_and_writes_skip_padding() -> None:
    cache = make_layer().make_cache(3)
    slots = torch.tensor([-1, 2, -5])
    states = torch.randn(3, *cache.recurrent_state.shape[1:])
    cache.write("recurrent_state", slots, states)
    found = cache.read("recurrent_state", slots)
    assert torch.equal(found[1], states[1]) and not found[::2].any()
    assert not cache.recurrent_state[:2].any()


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 70])
def test_cache_made_in_inference_mode(tokens: int) -> None:
    """Both pools are written, or none."""
    layer, x = make_layer(), make_input(2, tokens)
    cache = layer.make_cache(2)
    with torch.inference_mode():
        made = layer.make_cache(2)
    assert torch.equal(layer(x, cache=made), layer(x, cache=cache))
    assert made.conv_state is not None and cache.conv_state is not None
    assert torch.equal(made.conv_state, cache.conv_state)
    assert torch.equal(made.recurrent_state, cache.recurrent_state)
    made.reset(torch.tensor([1]))
    assert not made.recurrent_state[1].any() and made.recurrent_state[0].any()
