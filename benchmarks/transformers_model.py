"""Wall time of a Qwen3-Next of transformers: prefill, and tokens decoded one by one.

    python -m benchmarks.transformers_model             on a GPU
    python -m benchmarks.transformers_model --dry-run   on a CPU at toy sizes, as a trial

The model has real width, few layers and experts, and random bfloat16 weights. Its Gated DeltaNet
layers run in three ways, each in a separate process and with the same weights and tokens:
transformers' torch functions, FLA if it is installed, and this package. All else of the model is
the same, and nothing is captured in a graph. Prints a table in Markdown, with the distance of the
logits after the longest prefill from those of the torch functions (2-norm of the difference,
relative).
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.machine import commit
from benchmarks.run import ANSWER, ROOT

WAYS = ("torch", "fla", "gdn_triton")
LABELS = {"torch": "torch functions", "fla": "FLA", "gdn_triton": "gdn_triton"}
REAL = {
    "vocab_size": 4096,  # small: the head is not what is measured
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
TOY = {
    **REAL,
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


def make_model(args: argparse.Namespace) -> Any:
    """Layers in blocks of three linear layers and one of full attention, as Qwen3-Next has them."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.Qwen3NextConfig(
        **(TOY if args.dry_run else REAL),
        num_hidden_layers=args.layers,
        max_position_embeddings=2 * max(*args.prefill, args.context + args.decode),
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    dtype = torch.float32 if args.dry_run else torch.bfloat16
    with torch.device(args.device):
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return transformers.Qwen3NextForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(default)


def seconds(call: Callable[[], Any], device: str) -> float:
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.no_grad()
def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures one way in this process: `prefill` seconds by T, `decode` seconds a token,
    `logits`."""
    (way,) = args.ways
    if way != "fla":
        sys.modules["fla"] = None  # type: ignore[assignment]  # to transformers, not installed
    model = make_model(args)
    if way == "gdn_triton":
        from gdn_triton.integrations.transformers import enable

        status = enable()
        assert status.places and all(place.op for place in status.places), status
    vocabulary = model.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    longest = max(*args.prefill, args.context)
    ids = torch.randint(0, vocabulary, (1, longest), generator=generator).to(args.device)
    found: dict[str, Any] = {"prefill": {}, "logits": [], "logits_of": None}

    def prefill(T: int) -> Any:
        return model(ids[:, :T], use_cache=True, logits_to_keep=1)

    for T in sorted(args.prefill):
        prefill(T)  # compiles, and tunes, for tens of seconds
        once = seconds(lambda T=T: prefill(T), args.device)  # type: ignore[misc]
        if once > args.limit_seconds:
            found["prefill"][T] = once
            continue
        times = [
            seconds(lambda T=T: prefill(T), args.device)  # type: ignore[misc]
            for _ in range(args.repeats)
        ]
        found["prefill"][T] = statistics.median(times)
        found["logits"], found["logits_of"] = prefill(T).logits.flatten().tolist(), T

    out = prefill(args.context)
    # The name of the argument and of the result's field depends on the version.
    arguments = inspect.signature(type(model).forward).parameters
    name = "cache" if "cache" in arguments else "past_key_values"
    cached, token = {name: getattr(out, name), "use_cache": True}, out.logits.argmax(-1)

    def decode(count: int) -> None:
        nonlocal token
        for _ in range(count):
            step = model(token, **cached)
            token = step.logits.argmax(-1)

    decode(args.repeats)
    found["decode"] = seconds(lambda: decode(args.decode), args.device) / args.decode
    return found


def measure_apart(way: str, argv: Sequence[str]) -> dict[str, Any]:
    """Runs `measure` in a separate process."""
    command = [sys.executable, "-m", "benchmarks.transformers_model", *argv, "--ways", way]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [*command, "--answer"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if done.returncode != 0 or not answers:
        raise RuntimeError(f"{way}: exit status {done.returncode}\n{done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(answers[-1].removeprefix(ANSWER))
    return answer


def distance(result: dict[str, Any], other: dict[str, Any] | None) -> str:
    if other is None or not result["logits"] or result["logits_of"] != other["logits_of"]:
        return "none at the same length"
    return f"{math.dist(result['logits'], other['logits']) / math.hypot(*other['logits']):.1e}"


def table(found: dict[str, dict[str, Any]], args: argparse.Namespace) -> str:
    lengths = sorted(args.prefill)
    head = ["layers on", *(f"prefill {T} tokens, ms" for T in lengths)]
    head += [f"decode after {args.context} tokens, ms a token", "logits' distance"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for way, result in found.items():
        times = {int(T): 1e3 * s for T, s in result["prefill"].items()}
        cells = [LABELS[way], *(f"{times[T]:.1f}" for T in lengths)]
        cells += [f"{1e3 * result['decode']:.2f}", distance(result, found.get("torch"))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def header(args: argparse.Namespace) -> str:
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    names = ("transformers", "torch", "triton", "fla-core", "causal-conv1d")
    versions = []
    for name in names:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    backend = os.environ.get("GDN_BACKEND", "auto")
    return f"{gpu}; {', '.join(versions)}; GDN_BACKEND={backend}; commit {commit()}"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.transformers_model", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--ways", default=None, help=f"comma-separated, of {', '.join(WAYS)} (default: all there)"
    )
    parser.add_argument("--prefill", default=None, help="lengths (default: 8192,32768)")
    parser.add_argument("--context", type=int, default=None, help="tokens before decoding: 1024")
    parser.add_argument("--decode", type=int, default=None, help="tokens to decode: 256")
    parser.add_argument("--layers", type=int, default=4, help="default: 4, one of them attention")
    parser.add_argument("--repeats", type=int, default=None, help="times of which the median: 5")
    parser.add_argument(
        "--limit-seconds", type=float, default=10, help="a prefill that takes longer runs once"
    )
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU, float32")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    real = {"prefill": "8192,32768", "context": 1024, "decode": 256, "repeats": 5}
    toy = {"prefill": "9,40", "context": 9, "decode": 3, "repeats": 1}
    for name, value in (toy if args.dry_run else real).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.prefill = [int(T) for T in args.prefill.split(",")]
    there = [way for way in WAYS if way != "fla" or importlib.util.find_spec("fla")]
    args.ways = args.ways.split(",") if args.ways else there
    if unknown := set(args.ways) - set(there):
        parser.error(f"--ways: expected names of {there}, which are installed, got {unknown}")
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device: use --dry-run to try the plumbing on a CPU")
    args.device = "cpu" if args.dry_run else "cuda"
    return args


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if args.answer:
        print(ANSWER + json.dumps(measure(args)))
        return 0
    print(header(args), end="\n\n", flush=True)
    found = {}
    for way in args.ways:
        found[way] = measure_apart(way, argv)
        print(table(found, args), end="\n\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
