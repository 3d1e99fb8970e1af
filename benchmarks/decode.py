"""One decode step from a pool of states, beside FlashInfer and FLA, and the roof of the same run.

    python -m benchmarks.decode [--sequences 1 64 256] [--heads 16/32 16/64] [--pools float32]
        [--gates mild,model] [--peers flashinfer] [--jsonl FILE]

Each row is one token a sequence, q, k and v in bf16, K = V = 128, with the L2 norm, the gate and
the sigmoid in the kernel, updated in place: microseconds of one of 16 calls in a CUDA graph and the
share of the roof, then microseconds of the host for a call from Python. The roof is the faster of a
copy and an in-place product of as many bytes as the states are, read and written. Every
implementation's o is compared with the float64 recurrence first; one that differs is not timed.

FLA's `fused_recurrent_gated_delta_rule` has no pool: it writes its final states to new memory,
which is as many bytes. FlashInfer keeps its pools value-first; its `gated_delta_rule_decode` takes
key-first states without slots. A peer that is not installed is named as such.
"""

import argparse
import importlib
import itertools
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.machine import commit, header
from benchmarks.measure import (
    GATE,
    Device,
    Replay,
    attempt,
    cuda_device,
    host_time,
    in_a_row,
    relative,
    replay_times,
)
from benchmarks.peers import PEERS as IMPLEMENTATIONS
from benchmarks.peers import Ours
from benchmarks.report import append_record
from benchmarks.shapes import Random, add_gates_option, gate_parameters, gates_of, labelled
from gdn_triton import recurrent_step, reference

K = V = 128
CALLS = 16  # of a graph
LEGEND = (
    "Microseconds of a step in a CUDA graph, the share of the roof that it reaches, and "
    "microseconds of\nthe host for a call. The roof is the faster of a copy and an in-place "
    "product of as many bytes as\nthe states are, read and written."
)


class Step(NamedTuple):
    """One token of N sequences; `slots` leads to every state of the pool once, in random order."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    slots: Tensor
    states: Tensor  # [N, HV, K, V], float32


def make_step(N: int, H: int, HV: int, gates: str, device: torch.device) -> Step:
    make = partial(torch.randn, device=device)
    q, k = (make(N, H, K).bfloat16() for _ in range(2))
    v, a, b = make(N, HV, V).bfloat16(), make(N, HV).bfloat16(), make(N, HV).bfloat16()
    A, dt_bias = gate_parameters(gates, HV, Random(0, device))
    slots = torch.randperm(N, device=device).int()
    return Step(q, k, v, a, b, A.log(), dt_bias, slots, make(N, HV, K, V))


def exact(step: Step, heads: int) -> Tensor:
    """o of the first `heads` sequences in float64: [heads, HV, V]."""
    q, k, v, a, b = (x[:heads, None].double() for x in step[:5])
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    g = -step.A_log.double().exp() * torch.nn.functional.softplus(a + step.dt_bias.double())
    state = step.states[step.slots[:heads].long()].double()
    o, _ = reference.recurrent_gated_delta_rule(q, k, v, g, b.sigmoid(), initial_state=state)
    return o[:, 0]


# An implementation: from a step and the pool's dtype to a call that returns o, or a sentence.
Maker = Callable[[Step, torch.dtype], Callable[[], Any] | str]


def ours(step: Step, dtype: torch.dtype, v_first: bool) -> Callable[[], Any] | str:
    states = step.states.mT if v_first else step.states
    pool = states.to(dtype, copy=True, memory_format=torch.contiguous_format)
    mixed = torch.cat([x.flatten(1) for x in step[:3]], 1)
    return partial(
        recurrent_step,
        pool,
        step.slots,
        mixed_qkv=mixed,
        a=step.a,
        b=step.b,
        A_log=step.A_log,
        dt_bias=step.dt_bias,
        use_qk_l2norm_in_kernel=True,
        state_v_first=v_first,
    )


def flashinfer_pool(step: Step, dtype: torch.dtype) -> Callable[[], Any] | str:
    run = importlib.import_module("flashinfer.gdn_decode").gated_delta_rule_decode_pretranspose
    return partial(
        run,
        *(x.unsqueeze(1) for x in step[:3]),
        None,
        step.A_log,
        step.a.unsqueeze(1),
        step.dt_bias,
        step.b.unsqueeze(1),
        use_qk_l2norm=True,
        initial_state=step.states.mT.to(dtype).contiguous(),
        initial_state_indices=step.slots,
    )


def flashinfer_states(step: Step, dtype: torch.dtype) -> Callable[[], Any] | str:
    if dtype != torch.float32:
        return "takes float32 states only"
    run = importlib.import_module("flashinfer.gdn_decode").gated_delta_rule_decode
    return partial(
        run,
        *(x.unsqueeze(1) for x in step[:3]),
        step.states[step.slots.long()].clone(),
        step.A_log,
        step.a.unsqueeze(1),
        step.dt_bias,
        step.b.unsqueeze(1),
        use_qk_l2norm=True,
    )


def fla(step: Step, dtype: torch.dtype) -> Callable[[], Any] | str:
    if dtype != torch.float32:
        return "returns float32 states only"
    run = importlib.import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
    return partial(
        run,
        *(x.unsqueeze(1) for x in step[:4]),
        beta=step.b.unsqueeze(1),
        initial_state=step.states[step.slots.long()].clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=step.A_log,
        dt_bias=step.dt_bias,
        use_beta_sigmoid_in_kernel=True,
    )


MAKERS: dict[str, Maker] = {
    "gdn_triton, key-first": partial(ours, v_first=False),
    "gdn_triton, value-first": partial(ours, v_first=True),
    "FlashInfer, pool, value-first": flashinfer_pool,
    "FlashInfer, states, key-first": flashinfer_states,
    "FLA, states": fla,
}
PEERS = ("flashinfer", "fla")


def output(result: Any) -> Tensor:
    """o as [N, HV, V], of any of them."""
    o: Tensor = result[0] if isinstance(result, tuple) else result
    return o.reshape(o.shape[0], o.shape[-2], o.shape[-1])


def graph_of(call: Callable[[], Any], device: Device) -> Replay:
    """CALLS of them."""
    return Replay(in_a_row([call] * CALLS), device)


def roof_time(nbytes: int, device: Device, rounds: int) -> float:
    """us of the faster of two ways to read and write `nbytes`."""
    x, y = torch.randn(2, nbytes // 4, device=device.torch)
    ways = {
        "copy": graph_of(partial(y.copy_, x), device),
        "scale": graph_of(partial(x.mul_, 1), device),
    }
    times = replay_times(ways, device, rounds, flush=False).values()
    return min(map(statistics.median, times)) / CALLS


def makers_of(peers: Sequence[str]) -> dict[str, Maker]:
    """Ours, and those of the peers, by the first word of their names."""
    wanted = {"gdn_triton", *peers}
    return {name: maker for name, maker in MAKERS.items() if name.split(",")[0].lower() in wanted}


def measure(
    N: int,
    H: int,
    HV: int,
    dtype: torch.dtype,
    gates: str,
    device: Device,
    *,
    makers: Mapping[str, Maker],
    rounds: int,
) -> Any:
    step = make_step(N, H, HV, gates, device.torch)
    checked = min(N, 8)
    expected = exact(step, checked)
    rows: dict[str, dict[str, Any]] = {}
    replays: dict[str, Replay] = {}
    for name, maker in makers.items():
        call, why = attempt(device, partial(maker, step, dtype))
        if why is None and isinstance(call, str):
            why = call
        if why is None:
            result, why = attempt(device, call)
        if why is None:
            difference = relative(output(result)[:checked], expected)
            rows[name] = {"error": difference}
            if not difference < GATE:
                why = f"o differs by {difference:.1e} from float64"
        if why is None:
            rows[name]["host"] = host_time(call, device)
            replays[name], why = attempt(device, partial(graph_of, call, device))
        if why is not None:
            replays.pop(name, None)
            rows[name] = {"skipped": why}
    nbytes = N * HV * K * V * dtype.itemsize
    roof = roof_time(nbytes, device, rounds)
    for name, times in replay_times(replays, device, rounds, flush=False).items():
        rows[name]["time"] = statistics.median(times) / CALLS
    return {
        "kind": "decode",
        "sequences": N,
        "heads": f"{H}/{HV}",
        "pool": str(dtype).removeprefix("torch."),
        "gates": gates,
        "roof": roof,
        "results": rows,
    }


def tables(records: list[Any], names: Collection[str]) -> str:
    """Markdown, with the meaning that `LEGEND` tells."""
    lines = [
        f"| sequences, H / HV, pool | roof | {' | '.join(names)} |",
        f"|---|---|{'---|' * len(names)}",
    ]
    for record in records:
        cells = []
        for name in names:
            row = record["results"].get(name, {})
            if "time" not in row:
                cells.append("-")
                continue
            share = 100 * record["roof"] / row["time"]
            host = f", host {row['host']:.0f}" if "host" in row else ""
            cells.append(f"{row['time']:.2f}, {share:.0f} %{host}")
        head = f"{record['sequences']}, {record['heads']}, {record['pool']}"
        head = labelled(head, gates_of(record))
        lines.append(f"| {head} | {record['roof']:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--heads", nargs="+", default=["16/32", "16/64"], metavar="H/HV")
    parser.add_argument("--pools", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--rounds", type=int, default=100)
    add_gates_option(parser)
    parser.add_argument("--jsonl", type=Path, help="also append a record a row to this file")
    parser.add_argument("--commit", help="what the records say was measured (default: git's)")
    options = parser.parse_args()
    device = cuda_device("a decode step is timed on")
    makers = makers_of(options.peers)
    versions, missing = {"gdn_triton": Ours.version()}, []
    for key in options.peers:
        try:
            versions[key] = IMPLEMENTATIONS[key].version()
        except ImportError as error:
            missing.append(f"{key}: not measured: {error}")
    head = header("benchmarks.decode", versions, missing, device, options.commit or commit())
    append_record(options.jsonl, head)
    records, whys = [], set()
    rows = itertools.product(options.heads, options.sequences, options.pools, options.gates)
    for heads, N, pool, gates in rows:
        H, HV = map(int, heads.split("/"))
        dtype = getattr(torch, pool)
        record = measure(N, H, HV, dtype, gates, device, makers=makers, rounds=options.rounds)
        records.append(record)
        for name, row in record["results"].items():
            if "skipped" in row:
                whys.add(f"{name}, {pool}: {row['skipped']}")
        append_record(options.jsonl, record)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print(tables(records, makers))
    print("\n".join(["", *sorted(whys)]))


if __name__ == "__main__":
    main()
