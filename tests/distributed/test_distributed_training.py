"""The layer trained by two processes: DDP and FSDP2 have the gradients, and after a few steps of an
optimizer the weights, of one process with the whole batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from gdn_triton.layers import GatedDeltaNet

WORLD = 2
STEPS = 2
PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"wrap": "ddp"},
    "ddp-packed": {"wrap": "ddp", "packed": True},
    "ddp-checkpoint": {"wrap": "ddp", "recompute": True},
    "fsdp": {"wrap": "fsdp"},
    "fsdp-packed-checkpoint": {"wrap": "fsdp", "packed": True, "recompute": True},
}


class Model(nn.Module):
    """Two layers with residuals, as in a language model."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            GatedDeltaNet(hidden_size=16, head_dim=16, num_heads=1, num_v_heads=2) for _ in range(2)
        )
        self.recompute = recompute

    def forward(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        for layer in self.layers:
            if self.recompute:
                x = x + checkpoint(layer, x, cu_seqlens=cu_seqlens, use_reentrant=False)
            else:
                x = x + layer(x, cu_seqlens=cu_seqlens)
        return x


def make(plan: dict[str, Any], device: str) -> tuple[Model, list[tuple[Tensor, Tensor | None]]]:
    """A model, and for each rank its batch."""
    torch.manual_seed(0)
    model = Model(plan.get("recompute", False))
    batches: list[tuple[Tensor, Tensor | None]] = []
    for rank in range(WORLD):
        if plan.get("packed", False):
            # Ranks differ in everything but the number of tokens.
            cu_seqlens = torch.tensor([[0, 5, 5, 24], [0, 1, 20, 24]][rank], device=device)
            batches.append((torch.randn(1, 24, 16).to(device), cu_seqlens))
        else:
            batches.append((torch.randn(2, 12, 16).to(device), None))
    return model.to(device), batches


def train(run: nn.Module, batches: list[tuple[Tensor, Tensor | None]]) -> list[dict[str, Tensor]]:
    """The gradients of each of a few steps on the mean of the batches' losses, then the weights."""
    optimizer = torch.optim.SGD(run.parameters(), lr=0.01, momentum=0.9)
    seen = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        sum(run(*batch).square().sum() for batch in batches).div(len(batches)).backward()
        seen.append({name: p.grad for name, p in run.named_parameters()})
        seen[-1] = {name: whole(grad).clone() for name, grad in seen[-1].items()}
        optimizer.step()
    return [*seen, {name: whole(p).detach().clone() for name, p in run.named_parameters()}]


def whole(x: Any) -> Tensor:
    """A shard's tensor, put together; a tensor of one process."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def train_in_parallel(rank: int, device_type: str, directory: str) -> None:
    """One of the processes, with its batch, through all plans."""
    device, options = "cpu", {}
    if device_type == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
        options = {"device_id": torch.device(device)}
    backend = "gloo" if device_type == "cpu" else "nccl"
    store = f"file://{directory}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=WORLD, **options)
    mesh = init_device_mesh(device_type, (WORLD,))
    for name, plan in PLANS.items():
        model, batches = make(plan, device)
        run: nn.Module = model
        if plan["wrap"] == "ddp":
            run = nn.parallel.DistributedDataParallel(model)
        else:
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        found = train(run, [batches[rank]])
        found = [{n.removeprefix("module."): x.cpu() for n, x in part.items()} for part in found]
        torch.save(found, f"{directory}/{name}-{rank}.pt")


def check(device_type: str, tmp_path: Path, tolerance: float) -> None:
    """Every plan's gradients and weights, on every rank, beside those of this process."""
    run_ranks(WORLD, train_in_parallel, device_type, str(tmp_path))
    for name, plan in PLANS.items():
        model, batches = make(plan, device_type)
        expected = train(model, batches)
        for rank in range(WORLD):
            found = torch.load(tmp_path / f"{name}-{rank}.pt")
            assert len(found) == STEPS + 1
            for when, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
                assert ours.keys() == theirs.keys()
                for weight, x in theirs.items():
                    assert x.any(), f"{weight}: nothing to compare"
                    message = f"{name}, rank {rank}, {weight}, after {when} steps"
                    bound = tolerance * x.abs().max().item()
                    torch.testing.assert_close(
                        ours[weight], x.cpu(), rtol=0, atol=bound, msg=message
                    )


def test_gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "reference")
    check("cpu", tmp_path, 1e-5)


@pytest.mark.two_gpus("NCCL between two GPUs")
def test_nccl(tmp_path: Path) -> None:
    # Products of float32 in three passes of tf32, in batches of other sizes.
    check("cuda", tmp_path, 1e-3)
