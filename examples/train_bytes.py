"""Trains a small Gated DeltaNet language model on text, byte by byte, and samples from it.

    python examples/train_bytes.py [paths...] --out run

Without paths the text is the source code of Python's standard library. The run writes the losses
(losses.csv), their curve (loss.png), a sample of the model (sample.txt) and a checkpoint to the
directory --out. --resume continues from the checkpoint, with the same losses as an uninterrupted
run. docs/training.md reports such runs.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import importlib.util
import math
import os
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gdn_triton.demo import InputError, read_documents
from gdn_triton.layers import GatedDeltaNet, GatedDeltaNetCache

BYTES = 256
SEPARATOR = b"\0"  # between two documents
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
VALIDATION_SHARE = 16  # every 16th document is for validation


@dataclass(frozen=True)
class Settings:
    """The settings of a run. Together with the text they determine the losses. A run with the
    defaults takes one minute on one CPU core."""

    steps: int = 160
    batch: int = 8
    length: int = 256  # bytes of a training text
    width: int = 128
    layers: int = 2
    heads: int = 2
    head_dim: int = 32
    lr: float = 4e-3
    warmup: int = 20  # steps
    weight_decay: float = 0.1
    seed: int = 0
    eval_every: int = 40  # steps between two validations; each also writes the checkpoint
    eval_batches: int = 4


ON_GPU = {
    "steps": 2000,
    "batch": 32,
    "length": 1024,
    "width": 512,
    "layers": 8,
    "heads": 4,
    "head_dim": 64,
    "lr": 1e-3,
    "warmup": 100,
    "eval_every": 100,
    "eval_batches": 8,
}


# -------------------------------------------------------------------------------------------- text


def library_sources() -> list[Path]:
    """Returns the files of Python's standard library, without its tests and without installed
    packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(root.rglob("*.py"))
    return [p for p in found if not LEFT_OUT & set(p.relative_to(root).parts) and p.stat().st_size]


def load_text(paths: Sequence[Path], length: int) -> tuple[Tensor, Tensor]:
    """Returns the bytes for training and the bytes for validation, uint8. Validation uses every
    sixteenth document, or the last sixteenth of a single document."""
    documents = read_documents(paths or library_sources())
    if len(documents) == 1:
        cut = len(documents[0]) * (VALIDATION_SHARE - 1) // VALIDATION_SHARE
        parts = [documents[0][:cut]], [documents[0][cut:]]
    else:
        last = VALIDATION_SHARE - 1 if len(documents) >= VALIDATION_SHARE else len(documents) - 1
        chosen = range(last, len(documents), VALIDATION_SHARE)
        parts = (
            [text for n, text in enumerate(documents) if n not in chosen],
            [documents[n] for n in chosen],
        )
    texts = [SEPARATOR.join(part) for part in parts]
    for name, text in zip(("training", "validation"), texts, strict=True):
        if len(text) <= length:
            raise InputError(
                f"the text has {len(text)} bytes for {name}: expected more than --length={length}"
            )
    train, validation = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts)
    return train, validation


def draw(text: Tensor, settings: Settings, number: int) -> Tensor:
    """Returns [batch, length + 1], int64: random pieces of the text. The same seed and number give
    the same pieces."""
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + number)
    first = torch.randint(len(text) - settings.length, (settings.batch, 1), generator=generator)
    return text[first + torch.arange(settings.length + 1)].long()


# ------------------------------------------------------------------------------------------- model


class Block(nn.Module):
    """A block of the model: x + mixer(norm(x)), then x + MLP(norm(x)) with a gated inner layer."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.mixer_norm = nn.RMSNorm(width, eps=1e-6)
        self.mixer = GatedDeltaNet(
            hidden_size=width, head_dim=settings.head_dim, num_heads=settings.heads
        )
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.into = nn.Linear(width, 4 * width, bias=False)
        self.out_of = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, cache: GatedDeltaNetCache | None = None) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), cache=cache)
        gate, inner = self.into(self.mlp_norm(x)).chunk(2, -1)
        return x + self.out_of(F.silu(gate) * inner)


class LanguageModel(nn.Module):
    """Predicts the logits of the next byte. One matrix is both the embedding and the output
    projection."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, settings.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.width, eps=1e-6)

    def forward(self, tokens: Tensor, caches: Sequence[GatedDeltaNetCache] | None = None) -> Tensor:
        """Returns [B, T, 256] for tokens [B, T]. With caches, one per block, the tokens are the
        next T of their sequences."""
        x = self.embedding(tokens)
        for n, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[n])
        return F.linear(self.norm(x), self.embedding.weight)

    def make_caches(self, slots: int) -> list[GatedDeltaNetCache]:
        mixers = [m for m in self.modules() if isinstance(m, GatedDeltaNet)]
        return [mixer.make_cache(slots) for mixer in mixers]


def mean_loss(model: LanguageModel, pieces: Tensor) -> Tensor:
    """Returns the mean loss in nats per byte."""
    with mixed_precision(pieces.device):
        logits = model(pieces[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), pieces[:, 1:].flatten())


def mixed_precision(device: torch.device) -> torch.autocast:
    """Computes products in bf16 on a GPU, and everything in float32 on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu")


@torch.no_grad()
def write(model: LanguageModel, prompt: bytes, count: int, temperature: float, seed: int) -> bytes:
    """Returns the prompt and `count` bytes of the model, by a prefill and one decode step per
    byte."""
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    caches, text = model.make_caches(1), bytearray(prompt)
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(count):
        with mixed_precision(device):
            logits = model(tokens, caches)[0, -1]
        chances = (logits.double().cpu() / temperature).softmax(0)
        tokens = torch.multinomial(chances, 1, generator=generator)[None]
        text.append(int(tokens))
        tokens = tokens.to(device)
    return bytes(text)


# ---------------------------------------------------------------------------------------- training


def make_optimizer(model: LanguageModel, settings: Settings) -> torch.optim.AdamW:
    """Makes an optimizer that decays only matrices, not norms, gates, convolutions and the
    embedding."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        (matrices if p.dim() == 2 and name != "embedding.weight" else others).append(p)
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95))


def learning_rate(settings: Settings, step: int) -> float:
    """Returns the learning rate of step 0, 1, ...: it rises for `warmup` steps, then falls along a
    cosine to a tenth."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def validation_loss(model: LanguageModel, text: Tensor, settings: Settings) -> float:
    """Returns the mean loss over fixed pieces of the text."""
    device = model.embedding.weight.device
    losses = [
        mean_loss(model, draw(text, settings, -1 - n).to(device))
        for n in range(settings.eval_batches)
    ]
    return torch.stack(losses).mean().item()


@dataclass
class Run:
    """The contents of a checkpoint. losses: (step, loss of its batch, validation loss or None)."""

    settings: Settings
    text: str  # a digest of the text
    model: LanguageModel
    optimizer: torch.optim.AdamW
    losses: list[tuple[int, float, float | None]]

    def save(self, path: Path) -> None:
        """Writes a checkpoint atomically: an interruption leaves the previous one."""
        new = path.with_suffix(".new")
        torch.save(
            {
                "settings": asdict(self.settings),
                "text": self.text,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "losses": self.losses,
            },
            new,
        )
        new.replace(path)

    def load(self, path: Path) -> None:
        if not path.is_file():
            raise InputError(f"{path} does not exist: there is nothing to resume")
        stored = torch.load(path, map_location=self.model.embedding.weight.device)
        for name, value in asdict(self.settings).items():
            if stored["settings"][name] != value:
                raise InputError(
                    f"--{name.replace('_', '-')} must be that of the run to resume, "
                    f"{stored['settings'][name]}, got {value}"
                )
        if stored["text"] != self.text:
            raise InputError("the text is not that of the run to resume")
        self.model.load_state_dict(stored["model"])
        self.optimizer.load_state_dict(stored["optimizer"])
        self.losses = [(s, loss, validation) for s, loss, validation in stored["losses"]]


class Bar:
    """A progress bar: on a terminal one line that is rewritten, elsewhere a line for each
    validation."""

    def __init__(self, steps: int, first: int) -> None:
        self.steps, self.first, self.start = steps, first, time.perf_counter()
        self.rewrites = sys.stderr.isatty()

    def show(self, step: int, loss: float, validation: float | None, tokens: int) -> None:
        """Shows the progress after `step` steps. tokens: bytes per step."""
        seconds = time.perf_counter() - self.start
        rate = (step - self.first) / seconds
        left = int((self.steps - step) / rate)
        filled = 24 * step // self.steps
        line = (
            f"[{'#' * filled}{'.' * (24 - filled)}] {step}/{self.steps}  loss {loss:.3f}  "
            f"{rate * tokens:,.0f} bytes/s  {left // 60}:{left % 60:02} left"
        )
        if validation is not None:
            line += f"  validation {validation:.3f}"
        if self.rewrites:
            end = "\n" if validation is not None else ""
            print(f"\r{line}\x1b[K", end=end, file=sys.stderr, flush=True)
        elif validation is not None:
            print(line, file=sys.stderr, flush=True)


def train(
    run: Run, train_text: Tensor, validation_text: Tensor, out: Path, seconds: float | None
) -> None:
    """Trains from the run's present step to its last step, or for the given number of seconds."""
    settings, model, optimizer = run.settings, run.model, run.optimizer
    device = model.embedding.weight.device
    first = run.losses[-1][0] if run.losses else 0
    bar, start = Bar(settings.steps, first), time.perf_counter()
    for step in range(first, settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        loss = mean_loss(model, draw(train_text, settings, step).to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        late = seconds is not None and time.perf_counter() - start > seconds
        last = late or step + 1 == settings.steps
        validation = None
        if last or (step + 1) % settings.eval_every == 0:
            validation = validation_loss(model, validation_text, settings)
        run.losses.append((step + 1, loss.item(), validation))
        if validation is not None:
            run.save(out / "checkpoint.pt")
            save_losses(run.losses, out / "losses.csv")
        bar.show(step + 1, run.losses[-1][1], validation, settings.batch * settings.length)
        if last:
            return


# --------------------------------------------------------------------------------------- the report


def save_losses(losses: Sequence[tuple[int, float, float | None]], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("step", "loss", "validation_loss"))
        writer.writerows(losses)


def plot_losses(losses: Sequence[tuple[int, float, float | None]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, values, _ = zip(*losses, strict=True)
    validated = [(step, loss) for step, _, loss in losses if loss is not None]
    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axis.plot(steps, values, linewidth=0.7, alpha=0.6, label="training, a batch")
    axis.plot(*zip(*validated, strict=True), marker="o", markersize=3, label="validation")
    axis.set_xlabel("step")
    axis.set_ylabel("loss, nats a byte")
    axis.set_ylim(0, min(max(values), math.log(BYTES) * 1.05))
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Gives the same bits at every run on the same machine and versions, or an error."""
    # cuBLAS reads this variable at the first matrix product on a GPU.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    memory: Any = torch.utils.deterministic
    fill, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, False
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = fill


def job(arguments: argparse.Namespace) -> None:
    device = torch.device(arguments.device)
    chosen = {f.name: getattr(arguments, f.name) for f in fields(Settings)}
    given = {name: value for name, value in chosen.items() if value is not None}
    settings = Settings(**{**(ON_GPU if device.type != "cpu" else {}), **given})
    out: Path = arguments.out
    checkpoint = out / "checkpoint.pt"
    if checkpoint.exists() and not arguments.resume:
        raise InputError(f"{checkpoint} exists: pass --resume to go on, or another --out")
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "matplotlib, which draws the curve, is not installed: "
            "pip install 'gdn_triton[examples]', or pass --no-plot"
        )
    train_text, validation_text = load_text(arguments.paths, settings.length)
    digest = hashlib.sha256()
    for text in (train_text, validation_text):
        digest.update(bytes(text.tolist()))

    torch.manual_seed(settings.seed)
    model = LanguageModel(settings).to(device)
    run = Run(settings, digest.hexdigest(), model, make_optimizer(model, settings), [])
    if arguments.resume:
        run.load(checkpoint)
    out.mkdir(parents=True, exist_ok=True)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"model: {parameters:,} parameters, on {device}")
    print(f"text: {len(train_text):,} bytes to train on, {len(validation_text):,} to validate on")

    try:
        train(run, train_text, validation_text, out, arguments.seconds)
    except KeyboardInterrupt:
        raise InputError(f"interrupted: --resume goes on from {checkpoint}") from None
    if arguments.plot:
        plot_losses(run.losses, out / "loss.png")
    step, loss, validation = run.losses[-1]
    print(f"loss: {run.losses[0][1]:.3f} at step 1, {loss:.3f} at step {step}, in nats a byte")
    if validation is not None:
        print(f"validation loss: {validation:.3f}, {validation / math.log(2):.3f} bits a byte")
    sample = write(
        model, arguments.prompt.encode(), arguments.sample, arguments.temperature, settings.seed
    )
    (out / "sample.txt").write_bytes(sample)
    print(f"sample:\n{sample.decode(errors='replace')}")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description="Trains a small Gated DeltaNet language model on text, byte by byte."
    )
    result.add_argument("paths", nargs="*", type=Path, help="files or directories of text files")
    result.add_argument("--out", type=Path, default=Path("run"), help="(%(default)s)")
    result.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    result.add_argument(
        "--seconds", type=float, metavar="S", help="train no longer than this; --resume goes on"
    )
    result.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    result.add_argument("--prompt", default="def ", help="of the sample (%(default)r)")
    result.add_argument("--sample", type=int, default=400, metavar="N", help="bytes (%(default)s)")
    result.add_argument(
        "--temperature", type=float, default=0.7, help="of the sample (%(default)s)"
    )
    result.add_argument("--no-plot", dest="plot", action="store_false", help="no loss.png")
    for field in fields(Settings):
        kind = type(field.default)
        on_gpu = ON_GPU.get(field.name, field.default)
        result.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=kind,
            metavar=kind.__name__.upper(),
            help=f"{field.default} on a CPU, {on_gpu} on a GPU",
        )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Trains. Returns 0, or 2 if the run could not start or continue."""
    arguments = parser().parse_args(argv)
    try:
        with deterministic():
            job(arguments)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
