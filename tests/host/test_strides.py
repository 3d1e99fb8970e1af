"""Where the offsets of a layer lie; for other operands see tests/functions/test_views.py."""

import pytest
import torch
from helpers import same_bits

from gdn_triton.layers import GatedDeltaNet

pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = pytest.mark.usefixtures("on_device")


def test_strided_offsets_of_a_layer(backend: str) -> None:
    """Few tokens, which a layer without gradients gives to the recurrence."""
    x, table = torch.randn(1, 9, 32), torch.tensor([[0, 3], [4, 3], [9, 3]])
    dense, column = table[:, 0].contiguous(), table[:, 0]
    layer = GatedDeltaNet(hidden_size=32, head_dim=16, num_heads=1).to(x.device)
    with torch.no_grad():
        assert same_bits(layer(x, cu_seqlens=column), layer(x, cu_seqlens=dense))
        caches = layer.make_cache(2), layer.make_cache(2)
        expected = layer(x, cu_seqlens=dense, cache=caches[0])
        assert same_bits(layer(x, cu_seqlens=column, cache=caches[1]), expected)
        assert same_bits(caches[1].recurrent_state, caches[0].recurrent_state)
