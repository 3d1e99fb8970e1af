"""Trains a small hybrid language model on several GPUs. Context parallelism splits the sequences
over the GPUs, and FSDP2 splits the weights.

    torchrun --standalone --nproc-per-node 2 examples/train_parallel.py --cp 2 --out run

The ranks form a mesh of dp x cp. The cp ranks of a row share each sequence, in the zigzag layout,
and different rows have different sequences. Every rank holds a part of each weight and of the
optimizer's state. Without GPUs the same command runs on the CPU with gloo. docs/training.md
explains this script.

Three of four layers are Gated DeltaNet, whose argument `cp_context` describes the layout. Every
fourth layer is attention without position embeddings, on k and v gathered from the cp ranks. A
checkpoint does not depend on the layout, so --resume works with another number of processes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from gdn_triton.demo import read_documents
from gdn_triton.distributed import ContextParallel, build_cp_context
from gdn_triton.layers import GatedDeltaNet, parameter_groups

ROOT = Path(__file__).resolve().parents[1]
BYTES = 256
ATTENTION_EVERY = 4  # the last layer of every four


# ------------------------------------------------------------------------------------------- model


class Attention(nn.Module):
    """Causal attention of this rank's tokens to all earlier tokens of the sequence."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, context: ContextParallel, mesh: DeviceMesh) -> Tensor:
        """Returns [1, T, width] for this rank's T tokens."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        k, v = (in_order(gather(y, mesh), context) for y in (k, v))
        parts, first = [], 0
        for start, end in context.spans:  # this rank's tokens are two ranges
            rows = q[:, :, first : first + end - start]
            mask: Any = causal_lower_right(end - start, end)
            parts.append(
                F.scaled_dot_product_attention(rows, k[:, :, :end], v[:, :, :end], attn_mask=mask)
            )
            first += end - start
        return self.out(torch.cat(parts, 2).transpose(1, 2).flatten(2))


def gather(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Gathers the tokens (dimension 2) of all cp ranks, rank after rank. In the backward, the
    gradient of a rank's tokens is the sum of the gradients from all ranks."""
    return DTensor.from_local(x, mesh, [Shard(2)]).full_tensor(grad_placements=[Partial()])


def in_order(x: Tensor, context: ContextParallel) -> Tensor:
    """Reorders gathered tokens (dimension 2) from rank order to the order of the sequence. In the
    zigzag layout rank r of W holds slots r and 2 W - 1 - r."""
    W = context.world_size
    held = [slot for rank in range(W) for slot in (rank, 2 * W - 1 - rank)]
    slots = x.split([context.lengths[slot] for slot in held], 2)
    return torch.cat([slots[held.index(slot)] for slot in range(2 * W)], 2)


class Block(nn.Module):
    """A block of the model: x + mixer(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, width: int, head_dim: int, attention: bool) -> None:
        super().__init__()
        heads = width // head_dim
        self.mixer_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads) if attention else None
        self.delta = None
        if not attention:
            self.delta = GatedDeltaNet(
                hidden_size=width, head_dim=head_dim, num_heads=heads, expand_v=1
            )
        self.into = nn.Linear(width, 4 * width, bias=False)
        self.out_of = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, context: ContextParallel, mesh: DeviceMesh) -> Tensor:
        y = self.mixer_norm(x)
        if self.attention is not None:
            x = x + self.attention(y, context, mesh)
        elif self.delta is not None:
            x = x + self.delta(y, cp_context=context)
        return x + self.out_of(F.silu(self.into(self.mlp_norm(x))))


class LanguageModel(nn.Module):
    """Predicts the logits of the next byte."""

    def __init__(self, width: int, layers: int, head_dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        attention = [n % ATTENTION_EVERY == ATTENTION_EVERY - 1 for n in range(layers)]
        self.blocks = nn.ModuleList(Block(width, head_dim, x) for x in attention)
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, tokens: Tensor, context: ContextParallel, mesh: DeviceMesh) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, context, mesh)
        return self.head(self.norm(x))


# ---------------------------------------------------------------------------------------- training


def shard_weights(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Shards each block's weights, which FSDP2 gathers for a forward or backward and then frees.

    Autocast computes the products in bf16. MixedPrecisionPolicy(param_dtype=...) would also round
    A_log and dt_bias.
    """
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def draw(text: Tensor, length: int, number: int) -> Tensor:
    """Returns [1, length + 1]: the sequence with this number, which is the same on every rank."""
    generator = torch.Generator().manual_seed(number)
    first = int(torch.randint(len(text) - length, (), generator=generator))
    return text[None, first : first + length + 1].long()


def train(options: argparse.Namespace, device: torch.device) -> list[float]:
    """Returns the loss of every step, in nats per byte."""
    world = dist.get_world_size()
    # Weights are split over all ranks. The second mesh defines the ranks that share a sequence.
    everyone = init_device_mesh(device.type, (world,), mesh_dim_names=("fsdp",))
    mesh = init_device_mesh(
        device.type, (world // options.cp, options.cp), mesh_dim_names=("dp", "cp")
    )
    offsets = torch.tensor([0, options.length], device=device)
    context = build_cp_context(offsets, mesh["cp"].get_group(), layout="zigzag")

    torch.manual_seed(options.seed)
    model = LanguageModel(options.width, options.layers, options.head_dim).to(device)
    shard_weights(model, everyone)
    # Collect the parameters here, because fully_shard replaces them.
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=options.lr)

    text = torch.frombuffer(bytearray(b"\0".join(read_documents(options.text))), dtype=torch.uint8)
    losses: list[float] = []
    if options.resume:
        load(latest(options.out), model, optimizer, losses)
    mine = range(mesh["dp"].get_local_rank(), options.batch, mesh["dp"].size())
    for step in range(len(losses), options.steps):
        start = time.perf_counter()
        loss = torch.zeros((), device=device)
        for sequence in mine:
            tokens = draw(text, options.length, step * options.batch + sequence).to(device)
            inputs, targets = context.shard(tokens[:, :-1]), context.shard(tokens[:, 1:])
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(inputs, context, mesh["cp"])
                part = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / len(mine)
            part.backward()  # FSDP2 averages over ranks, which all have as many tokens
            loss += part.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        losses.append(loss.item() / world)
        if dist.get_rank() == 0:
            rate = options.batch * options.length / (time.perf_counter() - start)
            print(f"step {step + 1}: loss {losses[-1]:.4f}, {rate:,.0f} tokens/s", flush=True)
    save(options.out / f"step-{len(losses)}", model, optimizer, losses)
    return losses


def save(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]
) -> None:
    """Saves the weights. Every rank writes its own part."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "losses": losses}, checkpoint_id=path)


def latest(out: Path) -> Path:
    """Returns the checkpoint with the most steps. A directory without .metadata is incomplete."""
    found = [path.parent for path in out.glob("step-*/.metadata")]
    if not found:
        raise FileNotFoundError(f"{out} must have a checkpoint step-*, to resume from, got none")
    return max(found, key=lambda path: int(path.name.removeprefix("step-")))


def load(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]
) -> None:
    """Loads a checkpoint. Every rank reads its own part, however many ranks wrote the
    checkpoint."""
    weights, moments = get_state_dict(model, optimizer)
    stored: dict[str, Any] = {"model": weights, "optimizer": moments, "losses": losses}
    dcp.load(stored, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=stored["model"],
        optim_state_dict=stored["optimizer"],
    )
    losses[:] = stored["losses"]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small hybrid model on several GPUs.")
    parser.add_argument("text", nargs="*", type=Path, default=[ROOT / "docs"])
    parser.add_argument("--out", type=Path, default=Path("run"))
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint in --out"
    )
    parser.add_argument("--cp", type=int, default=1, help="ranks that share a sequence")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2, help="sequences a step")
    parser.add_argument("--length", type=int, default=512, help="bytes of a sequence")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--head-dim", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if "WORLD_SIZE" not in os.environ:
        parser.error("start it by torchrun, also for one process")
    world = int(os.environ["WORLD_SIZE"])
    for name, value, divisor in (
        ("processes", world, options.cp),
        ("--batch", options.batch, world // options.cp),
        ("--length", options.length, 2 * options.cp),  # equal parts, for FSDP's mean
    ):
        if divisor < 1 or value % divisor:
            parser.error(f"{name} must be a multiple of {divisor}, got {value}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        device_id=device if device.type == "cuda" else None,
    )
    train(options, device)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
