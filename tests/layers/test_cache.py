"""What a cache of the layer may hold, and which slots may be reset."""

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
def test_wrong_slots_of_a_reset(slots: Any, error: type[Exception], message: str) -> None:
    cache = make_layer().make_cache(3)
    cache.recurrent_state.fill_(1)
    with pytest.raises(error, match=message):
        cache.reset(slots)
    assert (cache.recurrent_state == 1).all()


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
