"""Host time of calls from several checkouts, in turns.

    python -m benchmarks.trees before=FOLDER after=. [--library before after] [--processes 6]
        [--turns 2] [--batches 16] [--dry-run]

Each checkout has `--processes` processes. All of them start and compile at once. Then one process
measures at a time while the others wait, in the order of the checkouts, and in reverse in every
second turn. A number is the time until a call from Python returns, in microseconds, as the median
of a turn. The table has the median of all turns and their least and largest number, which show the
noise. The calls are so small that the device is never the bound, and the host waits for it after
every eighth call. --library names the checkouts whose CUDA library is built. --dry-run runs the
reference on a CPU.
"""

import argparse
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

IN_A_ROW = 8  # calls between two waits for the device
Case = tuple[str, str, Callable[[], object]]  # its name, its backend, the call


def cases(dry_run: bool, library: bool) -> list[Case]:
    """The calls, on the package that this process imports."""
    import torch

    from gdn_triton import chunk_gated_delta_rule, recurrent_step
    from gdn_triton.layers import GatedDeltaNet

    device, dtype, size = ("cpu", torch.float32, 16) if dry_run else ("cuda", torch.bfloat16, 128)
    torch.manual_seed(0)
    T, H, HV = 80, 4, 8  # the layer runs fewer tokens token by token

    def tensors(H: int, HV: int) -> dict[str, Any]:
        q, k = torch.randn(2, 1, T, H, size, device=device, dtype=dtype)
        v = torch.randn(1, T, HV, size, device=device, dtype=dtype)
        g, beta = -torch.rand(1, T, HV, device=device), torch.rand(1, T, HV, device=device)
        return {"q": q, "k": k, "v": v, "g": g, "beta": beta}

    def with_gradients(x: dict[str, Any]) -> Callable[[], object]:
        learned = {name: y.clone().requires_grad_() for name, y in x.items()}
        do = torch.randn_like(x["v"])

        def both() -> object:
            o, _ = chunk_gated_delta_rule(**learned, **options)
            return torch.autograd.grad(o, tuple(learned.values()), do)

        return both

    plain = tensors(H, HV)
    # So many heads run the Gluon kernels on Hopper.
    wide = tensors(16, 32)
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    packed = torch.tensor([0, 16, 24, T], dtype=torch.int32, device=device)
    pool = torch.zeros(8, HV, size, size, device=device)
    slots = torch.arange(8, device=device)
    one = {name: x[0, :8] for name, x in plain.items()}
    layer = GatedDeltaNet(
        64, head_dim=size, num_heads=H, num_v_heads=HV, expand_v=1, device=device, dtype=dtype
    )
    cache = layer.make_cache(8, device=device)
    prompt, tokens = (torch.randn(*x, 64, device=device, dtype=dtype) for x in ((1, T), (8, 1)))

    step = functools.partial(recurrent_step, pool, slots, **one, use_qk_l2norm_in_kernel=True)
    found: list[Case] = []
    for name in ("reference",) if dry_run else ("triton", "cuda") if library else ("triton",):
        forward = functools.partial(chunk_gated_delta_rule, **plain, **options)
        calls: dict[str, Callable[[], object]] = {
            "forward": forward,
            "forward, packed": functools.partial(forward, cu_seqlens=packed),
            "forward, 32 heads": functools.partial(forward, **wide),
            "forward, 32 heads, packed": functools.partial(forward, **wide, cu_seqlens=packed),
            "layer, a prompt": functools.partial(layer, prompt),
        }
        if name != "cuda":
            calls["recurrent_step"] = step
            calls["layer, a token"] = functools.partial(layer, tokens, cache=cache, slots=slots)
        found += [(f"{name}: {what}", name, torch.no_grad()(call)) for what, call in calls.items()]
        found.append((f"{name}: forward and backward", name, with_gradients(plain)))
        found.append((f"{name}: forward and backward, 32 heads", name, with_gradients(wide)))
    return found


def measure(calls: Sequence[Case], batches: int, wait: Callable[[], None]) -> dict[str, float]:
    """Microseconds of each call: the median over `batches` rows of calls."""
    found = {}
    gc.collect()
    gc.disable()
    for name, backend, call in calls:
        os.environ["GDN_BACKEND"] = backend
        for _ in range(IN_A_ROW):
            call()
        times = []
        for _ in range(batches):
            wait()
            for _ in range(IN_A_ROW):
                start = time.perf_counter()
                call()
                times.append(1e6 * (time.perf_counter() - start))
        wait()
        found[name] = statistics.median(times)
    gc.enable()
    return found


def work(dry_run: bool, library: bool) -> None:
    """The process of a checkout: measures once for each line, which has the number of batches."""
    import torch

    wait = (lambda: None) if dry_run else torch.cuda.synchronize
    calls = cases(dry_run, library)
    measure(calls, 1, wait)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(calls, int(line), wait)), flush=True)


def start(tree: Path, dry_run: bool, library: bool) -> subprocess.Popen[str]:
    flags = [*(["--dry-run"] if dry_run else []), *(["--library", "own"] if library else [])]
    return subprocess.Popen(
        [sys.executable, __file__, "--worker", *flags],
        env={**os.environ, "PYTHONPATH": str(tree.resolve())},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a process has ended; its error is above")
    return line


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("trees", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--library", nargs="*", default=[], help="names with the CUDA library")
    parser.add_argument("--processes", type=int, default=6, help="of each checkout")
    parser.add_argument("--turns", type=int, default=2, help="of each process")
    parser.add_argument("--batches", type=int, default=16, help=f"rows of {IN_A_ROW} calls")
    parser.add_argument("--dry-run", action="store_true", help="the reference on a CPU")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        return work(options.dry_run, bool(options.library))
    if not options.trees or not all("=" in tree for tree in options.trees):
        parser.error("at least one NAME=FOLDER is needed")
    trees = {name: Path(folder) for name, folder in (x.split("=", 1) for x in options.trees)}
    # The first process of each checkout fills the cache of compiled kernels for the others.
    processes: list[tuple[str, subprocess.Popen[str]]] = []
    for count in (1, options.processes - 1):
        new = [
            (name, start(tree, options.dry_run, name in options.library))
            for _ in range(count)
            for name, tree in trees.items()
        ]
        for _, process in new:
            answer(process)
        processes += new
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for turn in range(options.turns):
        for name, process in processes[:: -1 if turn % 2 else 1]:
            assert process.stdin is not None
            process.stdin.write(f"{options.batches}\n")
            process.stdin.flush()
            found[name].append(json.loads(answer(process)))
    for _, process in processes:
        process.communicate()
    print(f"| us of the host | {' | '.join(trees)} |")
    print(f"|---|{'---|' * len(trees)}")
    for call in dict.fromkeys(call for turns in found.values() for call in turns[0]):
        cells = []
        for turns in found.values():
            times = [turn[call] for turn in turns if call in turn]
            middle = f"{statistics.median(times):.0f}" if times else "-"
            cells.append(f"{middle} ({min(times):.0f} to {max(times):.0f})" if times else middle)
        print(f"| {call} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
