"""The error of o over many decode steps, by the format that the states are stored in.

    python -m benchmarks.state_rounding [--steps 100000] [--gates model,mild,none] [--jsonl FILE]

The steps run in plain torch, in float32 with the states rounded to each format, and again
in float64: one sequence with a few value heads, K = V = 128, normal q, k and v in bf16, and
normal a and b before their activations. A state is rounded after each token, as a step without a
window rounds it, or after each 15 tokens, as a step with a window of 16 rows does. The 8-bit
formats have a float32 scale for each row of 128 numbers: the largest magnitude of the row maps to
the largest number of the format. "stochastic" rounds up with the probability that makes the mean of
the rounded number the number itself; all others round to the nearest.

Each line is the relative error of o against float64, root mean square over the steps of a decade,
as the mean over all heads and as that of the worst head. docs/decode.md shows the records of
benchmarks/results/cpu/state_rounding.jsonl, which `python -m docs.decode_pictures` draws.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import append_record
from benchmarks.shapes import Random, add_gates_option, gate_parameters
from gdn_triton.constants import INT8_MAX
from gdn_triton.reference.window import scaled_to_int8

K = V = 128
HEADS = 4
PERIOD = 15  # tokens between two folds of a window of 16 rows
Rounding = Callable[[Tensor], Tensor]


def to_dtype(dtype: torch.dtype) -> Rounding:
    return lambda x: x.to(dtype).float()


def scaled(largest: float, rounded: Rounding, dim: int) -> Rounding:
    """With a scale for each row; the rows lie along `dim`."""

    def apply(x: Tensor) -> Tensor:
        scale = x.abs().amax(dim, keepdim=True).clamp_min(1e-30) / largest
        return rounded(x / scale) * scale

    return apply


def int8(x: Tensor) -> Tensor:
    """As a window's fold rounds a state."""
    numbers, scales = scaled_to_int8(x)
    return numbers * scales[..., None, :]


def stochastic(x: Tensor) -> Tensor:
    return (x + torch.rand_like(x)).floor().clamp(-INT8_MAX, INT8_MAX)


E4M3 = 448.0
FORMATS: dict[str, Rounding] = {
    "float32": lambda x: x,
    "bfloat16": to_dtype(torch.bfloat16),
    "float16": to_dtype(torch.float16),
    "e4m3, a scale a value": scaled(E4M3, to_dtype(torch.float8_e4m3fn), dim=-2),
    "int8, a scale a key": lambda x: int8(x.mT).mT,
    "int8, a scale a value": int8,
    "int8, a scale a value, stochastic": scaled(INT8_MAX, stochastic, dim=-2),
}


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def advance(state: Tensor, x: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """One token: the states [.., HEADS, K, V] after it, and o [.., HEADS, V]."""
    q, k, v, decay, beta = x
    state = state * decay[:, None, None]
    u = (v - torch.einsum("...hkv,hk->...hv", state, k)) * beta[:, None]
    state = state + k[:, :, None] * u[..., None, :]
    return state, torch.einsum("...hkv,hk->...hv", state, q)


def tokens(A: Tensor, dt_bias: Tensor, count: int) -> list[Tensor]:
    """q, k, v [count, HEADS, 128], and the decay and beta [count, HEADS], float64."""
    q, k, v = (torch.randn(count, HEADS, K).bfloat16().double() for _ in range(3))
    a, b = torch.randn(2, count, HEADS).bfloat16().double()
    decay = torch.exp(-A * torch.nn.functional.softplus(a + dt_bias))
    return [unit(q) / math.sqrt(K), unit(k), v, decay, b.sigmoid()]


def measure(gates: str, steps: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    names = [(name, every) for every in (1, PERIOD) for name in FORMATS]
    A, dt_bias = (x.double() for x in gate_parameters(gates, HEADS, Random(0, torch.device("cpu"))))
    exact = torch.zeros(HEADS, K, V, dtype=torch.float64)
    stored = torch.zeros(len(names), HEADS, K, V)
    wrong = torch.zeros(len(names), HEADS, dtype=torch.float64)
    size = torch.zeros(HEADS, dtype=torch.float64)
    records, begin = [], 0
    for t in range(steps):
        if t % 1000 == 0:
            block = tokens(A, dt_bias, 1000)
            narrow = [x.float() for x in block]
        exact, o = advance(exact, tuple(x[t % 1000] for x in block))
        stored, found = advance(stored, tuple(x[t % 1000] for x in narrow))
        wrong += (found - o).square().sum(-1)
        size += o.square().sum(-1)
        for i, (name, every) in enumerate(names):
            if (t + 1) % every == 0:
                stored[i] = FORMATS[name](stored[i])
        if t + 1 == steps or t + 1 in (100, 1000, 10_000, 100_000):
            errors = (wrong / size).sqrt()
            for (name, every), error in zip(names, errors, strict=True):
                records.append({
                    "kind": "state rounding", "gates": gates, "format": name, "every": every,
                    "steps": [begin, t + 1], "mean": float(error.mean()),
                    "worst": float(error.max()),
                })  # fmt: skip
            wrong.zero_(), size.zero_()
            begin = t + 1
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    add_gates_option(parser)
    parser.add_argument("--jsonl", type=Path, help="also append the records to this file")
    options = parser.parse_args()
    for gates in options.gates:
        print(f"| {gates} gates, steps | rounded every | format | mean | worst head |")
        for record in measure(gates, options.steps):
            append_record(options.jsonl, record)
            first, last = record["steps"]
            print(
                f"| {first} to {last} | {record['every']} | {record['format']} "
                f"| {record['mean']:.1e} | {record['worst']:.1e} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
