"""A rank's call in a CUDA graph, its exchange by NCCL included: a replay reads what its inputs hold
by then, and gives the bits of the eager call."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import BF16, FP32, same_bits
from ranks import run_ranks
from torch import Tensor

from gdn_triton import chunk_gated_delta_rule, fast
from gdn_triton.distributed import build_cp_context

WORLD = 2
OPTIONS = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
# Backends and layouts.
CASES = [("triton", "contiguous"), ("cuda", "contiguous"), ("cuda", "zigzag")]


def draw(rank: int, seed: int, rows: int) -> tuple[dict[str, Tensor], Tensor]:
    """This rank's inputs and the gradient of o."""
    generator = torch.Generator(f"cuda:{rank}").manual_seed(seed)

    def normal(heads: int, *width: int) -> Tensor:
        return torch.randn(
            1, rows, heads, *width, generator=generator, device=f"cuda:{rank}", dtype=FP32
        )

    x = {
        "q": normal(2, 128).to(BF16),
        "k": normal(2, 128).to(BF16),
        "v": normal(4, 128).to(BF16),
        "g": -normal(4).square() / 16,
        "beta": normal(4).sigmoid(),
    }
    return x, normal(4, 128).to(BF16)


def check(rank: int, backend: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", backend)
    T = 6000
    offsets = torch.tensor([0, 700, T])
    context = build_cp_context(
        offsets.to(f"cuda:{rank}"), dist.group.WORLD, cu_seqlens_cpu=offsets, layout=layout
    )
    fixed, do = draw(rank, rank, T // WORLD)
    leaves = {name: y.requires_grad_() for name, y in fixed.items()}

    def step() -> list[Tensor]:
        o, state = chunk_gated_delta_rule(**leaves, cp_context=context, **OPTIONS)
        loss = [o, state], list(leaves.values()), [do, torch.ones_like(state)]
        return [o, state, *torch.autograd.grad(*loss)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for seed in (10, 20):
        other, other_do = draw(rank, seed + rank, T // WORLD)
        with torch.no_grad():
            for name, y in other.items():
                leaves[name].copy_(y)
            do.copy_(other_do)
            for y in found:
                y.fill_(torch.nan)
        graph.replay()
        for y, eager in zip(found, step(), strict=True):
            assert same_bits(y, eager), (backend, layout, seed)
            assert y.isfinite().all()
    # NCCL waits for the graph when the process group ends.
    del graph, found


def work(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    device: Any = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        device_id=device,
    )
    for backend, layout in CASES:
        if backend == "cuda" and not fast.is_available():
            continue
        with pytest.MonkeyPatch.context() as patch:
            check(rank, backend, layout, patch)
    Path(folder, f"done-{rank}").touch()


@pytest.mark.two_gpus("NCCL in a CUDA graph")
def test_replays_equal_eager_calls(tmp_path: Path) -> None:
    run_ranks(WORLD, work, str(tmp_path))
    assert all((tmp_path / f"done-{rank}").exists() for rank in range(WORLD))
