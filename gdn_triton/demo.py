"""Runs the op on real text and compares it with the token-by-token recurrence.

    python -m gdn_triton [paths...]

Text documents, read as bytes, go through the projections of a small Gated DeltaNet layer with
seeded random weights and, packed in one row, through `chunk_gated_delta_rule` on the best backend
there is. It prints one line each for the machine, the input, the backend, the error and the time.
The exit status is 0 if the error is within its budget, 1 if it is not, and 2 if there was nothing
to run.
"""

import argparse
import itertools
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor

import gdn_triton
from gdn_triton import reference
from gdn_triton.constants import MAX_K

TEXT_SUFFIXES = (".md", ".py", ".rst", ".toml", ".txt")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

MODEL_WIDTH = 128

# The chunked form rounds three times as many intermediates as the recurrence that the error is
# compared with, and may compute float32 products in three passes of tf32 (docs/numerics.md).
BUDGET_FACTOR = 8.0


class InputError(Exception):
    """The documents or the options leave nothing to run."""


# ---------------------------------------------------------------------------------------- documents


def default_paths() -> list[Path]:
    """The paths of the package's own sources, and in a checkout of its README and docs."""
    package = Path(__file__).resolve().parent
    checkout = package.parent
    extra = [checkout / "README.md", checkout / "docs"]
    in_checkout = (checkout / "setup.py").is_file() and all(path.exists() for path in extra)
    return [package, *extra] if in_checkout else [package]


def read_documents(paths: Sequence[Path]) -> list[bytes]:
    """The contents of the files, and of the text files under the directories, in order of name.

    An empty file that is named is an error. An empty file in a directory is skipped.
    """
    documents = []
    for path in paths:
        if path.is_dir():
            found = [file for file in sorted(path.rglob("*")) if file.suffix in TEXT_SUFFIXES]
            contents = [text for file in found if file.is_file() and (text := _read(file))]
            if not contents:
                raise InputError(
                    f"{path} has no text: expected a non-empty {', '.join(TEXT_SUFFIXES)} file "
                    "in it"
                )
            documents += contents
        elif path.exists():
            text = _read(path)
            if not text:
                raise InputError(f"{path} is empty: expected at least one byte")
            documents.append(text)
        else:
            raise InputError(f"{path} does not exist: expected a file or a directory")
    return documents


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def clip(documents: Sequence[bytes], max_tokens: int) -> list[bytes]:
    """Cuts the documents to max_tokens bytes, or slightly more, in total. Each keeps the same
    fraction of its beginning, so that lengths still differ, and none becomes empty."""
    total = sum(map(len, documents))
    if total <= max_tokens:
        return list(documents)
    return [text[: max(1, len(text) * max_tokens // total)] for text in documents]


# -------------------------------------------------------------------------------------- the layer


class Layer(NamedTuple):
    """The weights before the op, in the dtype of the run; A_log and dt_bias [HV] are float32."""

    heads: int  # H; HV is 2 * H
    dim: int  # K; V is 2 * K
    embedding: Tensor  # [256, MODEL_WIDTH], a row for each byte
    qkv: Tensor  # [MODEL_WIDTH, H * K + H * K + HV * V]
    gate: Tensor  # [MODEL_WIDTH, HV]
    beta: Tensor  # [MODEL_WIDTH, HV]
    A_log: Tensor
    dt_bias: Tensor


def make_layer(
    heads: int, dim: int, *, seed: int, dtype: torch.dtype, device: torch.device
) -> Layer:
    """Makes random weights, which are the same for a seed on every device."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, std: float) -> Tensor:
        x = torch.randn(rows, columns, generator=generator, device="cpu")
        return (x * std).to(device, dtype)

    H, HV, K, V = heads, 2 * heads, dim, 2 * dim
    std = MODEL_WIDTH**-0.5
    # The decays are those of a new model: exp(A_log) is from 1 to 16, and the time step
    # softplus(dt_bias) from 0.001 to 0.1 on a logarithmic scale.
    A = torch.rand(HV, generator=generator, device="cpu") * 15 + 1
    dt = 10 ** (torch.rand(HV, generator=generator, device="cpu") * 2 - 3)
    return Layer(
        heads=H,
        dim=K,
        embedding=normal(256, MODEL_WIDTH, 1.0),
        qkv=normal(MODEL_WIDTH, 2 * H * K + HV * V, std),
        gate=normal(MODEL_WIDTH, HV, std),
        beta=normal(MODEL_WIDTH, HV, std),
        A_log=A.log().to(device),
        dt_bias=dt.expm1().log().to(device),
    )


def project(layer: Layer, tokens: Tensor) -> dict[str, Tensor]:
    """Computes the op's q, k, v, g and beta, B = 1, from tokens [T], which are bytes. q, k and v
    are views of one projection. g and beta are not activated yet."""
    x = layer.embedding[tokens].unsqueeze(0)
    HK, HVV = layer.heads * layer.dim, 4 * layer.heads * layer.dim
    q, k, v = (x @ layer.qkv).split((HK, HK, HVV), dim=-1)
    return {
        "q": rearrange(q, "B T (H K) -> B T H K", H=layer.heads),
        "k": rearrange(k, "B T (H K) -> B T H K", H=layer.heads),
        "v": rearrange(v, "B T (HV V) -> B T HV V", HV=2 * layer.heads),
        "g": x @ layer.gate,
        "beta": x @ layer.beta,
    }


# -------------------------------------------------------------------------------------- the judges


class Result(NamedTuple):
    o: Tensor  # [1, T, HV, V]
    final_state: Tensor  # [N, HV, K, V]


def exact(inputs: dict[str, Tensor], layer: Layer, cu_seqlens: Tensor) -> Result:
    """The recurrence in float64 on the same inputs. The op is defined with rounded normalised q and
    k, so these are rounded first."""
    wide: dict[str, Any] = {
        **inputs,
        "q": reference.l2norm(inputs["q"]),
        "k": reference.l2norm(inputs["k"]),
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
    }
    o, final_state = reference.recurrent_gated_delta_rule(
        **{name: x.double() for name, x in wide.items()},
        cu_seqlens=cu_seqlens,
        use_gate=True,
        use_beta_sigmoid=True,
    )
    return Result(o, final_state)


def rounded(inputs: dict[str, Tensor], layer: Layer, offsets: Sequence[int]) -> Result:
    """The recurrence in float32, with each read of the state, each write to it and o rounded to the
    inputs' dtype. Its error is the cost of that precision without chunks."""
    dtype = inputs["v"].dtype

    def round_(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    q, k = (reference.l2norm(inputs[name])[0].float() for name in ("q", "k"))
    # [T, HV, 1, channels]; decay and beta [T, HV, 1, 1].
    q, k = (repeat(x, "T H K -> T (H two) 1 K", two=2) for x in (q * layer.dim**-0.5, k))
    v = rearrange(inputs["v"][0].float(), "T HV V -> T HV 1 V")
    decay = reference.gate(inputs["g"], layer.A_log, layer.dt_bias).exp()
    decay = decay[0, :, :, None, None]
    beta = reference.beta_sigmoid(inputs["beta"])[0, :, :, None, None]
    o = torch.empty_like(v)
    final_state = v.new_zeros(len(offsets) - 1, v.shape[1], k.shape[-1], v.shape[-1])
    for n, state in enumerate(final_state):
        for t in range(offsets[n], offsets[n + 1]):
            state *= decay[t]
            state += k[t].mT * round_(beta[t] * (v[t] - k[t] @ round_(state)))
            o[t] = round_(q[t] @ round_(state))
    return Result(rearrange(o, "T HV 1 V -> 1 T HV V"), final_state)


def relative_error(x: Tensor, expected: Tensor) -> float:
    """|x - expected| / |expected|, both as root mean squares; NaN if x contains NaN."""
    difference = x.double() - expected
    return (difference.norm() / expected.norm().clamp_min(torch.finfo(torch.float64).tiny)).item()


# ------------------------------------------------------------------------------------------ the job


def seconds(function: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Returns the function's result, and the time until the device has computed it."""
    start = time.perf_counter()
    result = function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - start


def report(what: str, text: str) -> None:
    # Flush, so that an error message appears after the lines that it is about.
    print(f"{what}: {text}", flush=True)


def describe_machine(device: torch.device) -> str:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
    try:
        import triton

        triton_version = f"Triton {triton.__version__}"
    except Exception:  # the line on the backend names this
        triton_version = "no Triton that can be imported"
    python = platform.python_version()
    return f"{name}; Python {python}, torch {torch.__version__}, {triton_version}"


def describe_backend(explanation: gdn_triton.Explanation) -> str:
    refusals = " ".join(
        f"Not {name}: {reason}" for name, reason in explanation.reasons.items() if reason
    )
    return f"{explanation.chosen or 'none'} (GDN_BACKEND={explanation.requested}). {refusals}"


@torch.no_grad()
def run(arguments: argparse.Namespace) -> bool:
    """Prints the report, and returns whether the error is within its budget."""
    documents = clip(read_documents(arguments.paths or default_paths()), arguments.max_tokens)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = DTYPES[arguments.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    report("machine", describe_machine(device))

    lengths = [len(text) for text in documents]
    offsets = [0, *itertools.accumulate(lengths)]
    report(
        "input",
        f"{len(lengths)} documents, {offsets[-1]} tokens, "
        f"{min(lengths)} to {max(lengths)} a document; {str(dtype)[6:]}, "
        f"H={arguments.heads} HV={2 * arguments.heads} K={arguments.dim} V={2 * arguments.dim}",
    )
    layer = make_layer(
        arguments.heads, arguments.dim, seed=arguments.seed, dtype=dtype, device=device
    )
    tokens = torch.frombuffer(bytearray(b"".join(documents)), dtype=torch.uint8)
    inputs = project(layer, tokens.to(device, torch.int64))
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
    call: dict[str, Any] = {
        **inputs,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
        "cu_seqlens": cu_seqlens,
    }
    try:
        explanation = gdn_triton.explain(**call)
    except ValueError as error:  # an unknown GDN_BACKEND
        raise InputError(str(error)) from error
    report("backend", describe_backend(explanation))
    if explanation.chosen is None:
        raise InputError(f"GDN_BACKEND={explanation.requested} cannot run this call")

    note = "comparing with the recurrence, token by token: up to a minute"
    print(note, file=sys.stderr, flush=True)
    op = gdn_triton.chunk_gated_delta_rule
    _, first = seconds(lambda: op(**call), device)
    result, again = seconds(lambda: op(**call), device)
    expected, recurrence = seconds(lambda: exact(inputs, layer, cu_seqlens), device)
    beside = rounded(inputs, layer, offsets)

    passed, parts = True, []
    for name, ours, theirs, truth in zip(
        ("o", "final state"), result, beside, expected, strict=True
    ):
        off = relative_error(ours, truth)
        unit_roundoff = torch.finfo(ours.dtype).eps / 2
        budget = BUDGET_FACTOR * relative_error(theirs, truth) + unit_roundoff
        # Do not write `off > budget`, which is false for NaN.
        passed &= off <= budget
        parts.append(f"{name} {off:.1e} (budget {budget:.1e})")
    report("error", f"{', '.join(parts)}: {'OK' if passed else 'FAILED'}")
    report(
        "time",
        f"{again * 1e3:.1f} ms a call, {first * 1e3:.0f} ms the first; "
        f"the recurrence in float64 {recurrence:.1f} s",
    )
    return passed


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m gdn_triton",
        description="Runs text documents, as bytes, through the projections of a small Gated "
        "DeltaNet layer and gdn_triton.chunk_gated_delta_rule, and compares the result with the "
        "token-by-token recurrence in float64. Exit status: 0 within the error budget, 1 over it, "
        "2 nothing could be run.",
    )
    result.add_argument(
        "paths",
        nargs="*",
        type=Path,
        help=f"files, or directories of {' '.join(TEXT_SUFFIXES)} files; the package's own sources "
        "and, in a checkout, README and docs when none are named",
    )
    result.add_argument(
        "--max-tokens",
        type=_positive,
        default=16384,
        metavar="N",
        help="cut all documents to one fraction when they have more bytes in total (%(default)s)",
    )
    result.add_argument(
        "--dtype", choices=DTYPES, help="of q, k, v, g and beta (bfloat16 on a GPU, else float32)"
    )
    result.add_argument(
        "--heads",
        type=_positive,
        default=2,
        metavar="H",
        help="query and key heads; twice as many value heads (%(default)s)",
    )
    result.add_argument(
        "--dim",
        type=_positive,
        default=64,
        metavar="K",
        help="channels of a key; twice as many of a value (%(default)s; the Triton backend takes "
        f"up to {MAX_K})",
    )
    result.add_argument("--seed", type=int, default=0, help="of the weights (%(default)s)")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job; returns the exit status."""
    arguments = parser().parse_args(argv)
    try:
        return 0 if run(arguments) else 1
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
