"""Where tensors may lie: any operand may be a strided view."""

import random

import pytest
import torch
from helpers import FP32, FP64, assert_within_budget, same_bits
from pool_cases import OPS, copied, run, tensors_of
from torch import Tensor

from gdn_triton.layers import GatedDeltaNet

pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = pytest.mark.usefixtures("on_device")


def viewed(x: Tensor, rng: random.Random, *, dense_last: bool) -> Tensor:
    """The values of x in memory whose dimensions are in another order and have gaps, all of it
    poison but for the values."""
    order = list(range(x.dim()))
    if dense_last:
        order = rng.sample(order[:-1], x.dim() - 1) + order[-1:]
    else:
        rng.shuffle(order)
    steps = [rng.choice((1, 2, 3)) for _ in order]
    if dense_last:
        steps[-1] = 1
    elif x.dim() == 1:
        steps[0] = rng.choice((2, 3))
    firsts = [rng.randrange(3) for _ in order]
    shape = [f + x.shape[d] * s for f, d, s in zip(firsts, order, steps, strict=True)]
    poison = torch.nan if x.is_floating_point() else True if x.dtype == torch.bool else -(2**28)
    around = torch.full(shape, poison, dtype=x.dtype, device=x.device)
    cuts = [slice(f, f + x.shape[d] * s, s) for f, d, s in zip(firsts, order, steps, strict=True)]
    view = around[tuple(cuts)].permute([order.index(d) for d in range(x.dim())])
    assert view.shape == x.shape
    return view.copy_(x)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", OPS)
def test_strided_operands(
    name: str, seed: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor at random strides, those of integers and flags among them."""
    op, rng = OPS[name], random.Random(seed)
    x = op.make()
    dense = run(op, copied(x))
    views = copied(x)
    for given in tensors_of(x):
        views[given] = viewed(x[given], rng, dense_last=name == "prefill" and given == "out")
    before = copied(views)
    got = run(op, views)
    for given in set(tensors_of(x)) - set(op.written):
        assert torch.equal(views[given], before[given]), f"{given} was written"
    monkeypatch.setenv("GDN_BACKEND", "reference")
    wide = {k: y.to(FP64) if isinstance(y, Tensor) and y.dtype == FP32 else y for k, y in x.items()}
    exact = run(op, copied(wide))
    assert got.keys() == dense.keys() == exact.keys()
    for result, y in got.items():
        options = {"dtype": FP32, "unit": torch.finfo(FP32).eps / 2}
        assert_within_budget(result, y, exact[result].to(FP64), dense[result], **options)


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
