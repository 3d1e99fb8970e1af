"""The layer on a rank's tokens: y and the gradients of the layer on all tokens, by three processes
with gloo in float64; and the error of every argument that does not go with a context."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from gdn_triton.distributed import build_cp_context
from gdn_triton.layers import GatedDeltaNet

WORLD = 3
HIDDEN = 12
# The sequences' lengths, the tokens of each slot or None, the layout, tokens of no sequence, and
# options of the layer.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None, str, int, dict[str, Any]]] = {
    "one": ((50,), None, "contiguous", 0, {}),
    "zigzag": ((50,), None, "zigzag", 0, {}),
    "packed": ((7, 0, 30, 1, 0, 20), (9, 31, 20), "contiguous", 2, {}),
    "short-shards": ((3, 20), (2, 1, 20), "contiguous", 0, {"conv_bias": True}),
    "empty-rank": ((33,), (20, 0, 13), "contiguous", 0, {}),
    "nothing-first": ((33,), (0, 33, 0), "contiguous", 0, {}),
    "wide-convolution": ((40, 9), None, "zigzag", 0, {"conv_size": 6}),
    "no-convolution": ((40, 9), None, "contiguous", 0, {"use_short_conv": False}),
    "by-token": ((40,), None, "contiguous", 0, {"mode": "fused_recurrent"}),
}


def make(name: str) -> tuple[GatedDeltaNet, Tensor, Tensor, Tensor]:
    """The layer, all its inputs, a gradient of its result, and the offsets."""
    sequences, _, _, orphans, options = CASES[name]
    torch.manual_seed(0)
    layer = GatedDeltaNet(hidden_size=HIDDEN, head_dim=8, num_heads=1, num_v_heads=2, **options)
    x, dy = torch.randn(2, 1, sum(sequences) + orphans, HIDDEN, dtype=torch.float64)
    offsets = torch.tensor([0, *itertools.accumulate(sequences)])
    return layer.double(), x, dy, offsets


def run(layer: GatedDeltaNet, x: Tensor, dy: Tensor, **options: Any) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x, **options)
    inputs = {"x": x, **dict(layer.named_parameters())}
    grads = torch.autograd.grad(y, list(inputs.values()), dy)
    with torch.no_grad():
        served = layer(x, **options)
    return {"y": y.detach(), "served": served, **dict(zip(inputs, grads, strict=True))}


def work(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    for name, (_, lengths, layout, orphans, _) in CASES.items():
        layer, x, dy, offsets = make(name)
        group = dist.group.WORLD
        context = build_cp_context(offsets, group, lengths=lengths, layout=layout)
        assert sum(context.lengths) == x.shape[1], (name, orphans)
        found = run(layer, context.shard(x), context.shard(dy), cp_context=context)
        found["spans"] = torch.tensor(context.spans)
        torch.save(found, f"{folder}/{name}-{rank}.pt")


def test_ranks_give_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "reference")
    run_ranks(WORLD, work, str(tmp_path))
    for name in CASES:
        layer, x, dy, offsets = make(name)
        expected = run(layer, x, dy, cu_seqlens=offsets)
        parts = [torch.load(tmp_path / f"{name}-{rank}.pt") for rank in range(WORLD)]
        for key, whole in expected.items():
            if key in ("y", "served", "x"):
                found = torch.full_like(whole, torch.nan)
                for part in parts:
                    ends = [0, *itertools.accumulate(int(b - a) for a, b in part["spans"])]
                    for (a, b), i, j in zip(part["spans"], ends, ends[1:], strict=False):
                        found[:, a:b] = part[key][:, i:j]
            else:
                found = sum(part[key] for part in parts)
            assert whole.any(), f"{name}, {key}: nothing to compare"
            torch.testing.assert_close(
                found, whole, rtol=0, atol=1e-11, msg=lambda why, at=(name, key): f"{at}: {why}"
            )


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_what_does_not_go_with_a_context(group: Any) -> None:
    layer, x, _, offsets = make("one")
    context = build_cp_context(offsets, group)
    for name, given in {
        "attention_mask": torch.ones(1, 50),
        "cache": layer.make_cache(2),
        "slots": torch.tensor([0]),
        "cu_seqlens": offsets,
        "cu_seqlens_cpu": offsets,
    }.items():
        with pytest.raises(ValueError, match=f"^{name} must be None with cp_context"):
            layer(x, cp_context=context, **{name: given})
    with pytest.raises(ValueError, match="hidden_states must have batch size B=1 with cp_context"):
        layer(x.expand(2, -1, -1), cp_context=context)
    for name in ("one", "no-convolution"):
        with pytest.raises(ValueError, match="T=50"):
            make(name)[0](x[:, 1:], cp_context=context)
    with pytest.raises(TypeError, match=r"cp_context must be a gdn_triton\.distributed\.Context"):
        layer(x, cp_context="everyone")
