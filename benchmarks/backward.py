"""Error, time and memory of the gradients, compared with FLA's and FlashQLA's.

    python -m benchmarks.backward [--peers triton fla flashqla] [--select TEXT] [--draws 8]
        [--gates mild,model] [--jsonl FILE]

An error is the norm of the error divided by the norm of the gradient, against float64 autograd of
the specification, in bf16, as the root mean square over several draws of the inputs. A time is the
median in microseconds for the gradients of q, k, v, g, beta and the initial state from those of o
and the final state. The implementations take turns. `call` adds the forward that made the graph.
GPU times are measured between two events, with the host's launches ahead of the device. Host times
are separate, because a model's other work can hide them. Memory is the memory that a forward keeps
for the backward in addition to its inputs and outputs, and the peak of both together in addition to
these and the gradients.

FLA's Triton backward refuses Hopper with Triton 3.4 to 3.7.0, so its TileLang backward runs where
that package is installed. FlashQLA is a separate peer, and FLA is kept from calling it. The peer
`triton` is this package without its CUDA library.
"""

import argparse
import importlib
import inspect
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.machine import commit, header
from benchmarks.measure import Device, attempt, cuda_device, relative
from benchmarks.peers import PEERS, Ours, backend_chosen
from benchmarks.report import append_record
from benchmarks.shapes import (
    DTYPES,
    Case,
    Inputs,
    add_gates_option,
    label_of,
    log_uniform,
    make_inputs,
    with_gates,
)
from gdn_triton import reference

NAMES = ("dq", "dk", "dv", "dg", "dbeta", "dh0")
LEGEND = (
    "Errors of the gradients over their norm, against float64; then microseconds of the backward "
    "/ of a\nforward and a backward: on the GPU, whose launches lie ready, and in brackets of the "
    "host; and MiB\nthat a forward keeps / that both take at their peak beside inputs, outputs and "
    "gradients. In\nrecords without times of the host, which are older, the host's launches count "
    "where the GPU waited for\nthem."
)
OURS, TRITON = "gdn_triton", "triton"
BACKENDS = {TRITON: "triton"}  # of implementations that are one backend of this package

Rule = Callable[..., tuple[Tensor, Tensor]]


def packed(H: int, HV: int, K: int, V: int, *seqlens: int) -> Case:
    return Case(
        f"backward {H}/{HV} K {K} V {V} {'+'.join(map(str, seqlens))}", "backward",
        1, sum(seqlens), H, HV, K, V, seqlens, gate="mild", initial_state=True,
    )  # fmt: skip


def in_dtype(case: Case, dtype: str) -> Case:
    """The same case with q, k and v in another dtype, which its name says."""
    if getattr(torch, dtype) == case.dtype:
        return case
    return replace(case, name=f"{case.name} {dtype}", dtype=getattr(torch, dtype))


# Short enough for float64 autograd.
ERROR_CASES = (
    packed(2, 4, 128, 128, 700, 1, 64, 331),
    packed(4, 8, 128, 128, 2048),
    packed(2, 2, 256, 512, 700, 1, 64, 331),
    packed(2, 4, 64, 64, 700, 1, 64, 331),
    packed(2, 2, 96, 192, 700, 1, 64, 331),
)
HEADS = ((16, 32), (16, 64), (8, 16), (4, 8), (2, 8))
SEQUENCES = (
    (8192,),
    (1000, 4000, 92, 3100),
    (32768,),
    (8192, 8192, 8192, 8192),
    (4000, 16000, 368, 12400),
)
# Documents of all lengths, one after the other: their number, and the bounds of their lengths.
MIXES = ((48, 32, 2048), (16, 64, 8192))


def mixed(H: int, HV: int, parts: int, least: int, most: int) -> Case:
    """`parts` sequences at K = V = 128, of lengths drawn log-uniformly, the same for all heads."""
    lengths = log_uniform(parts, least, most, seed=parts)
    name = f"backward {H}/{HV} K 128 V 128 {parts} of {least} to {most}"
    return replace(packed(H, HV, 128, 128, *lengths), name=name)


TIME_CASES = (
    *(packed(*heads, 128, 128, *lengths) for heads in HEADS for lengths in SEQUENCES),
    *(mixed(*heads, *mix) for heads in HEADS for mix in MIXES),
    packed(8, 8, 256, 512, 2048, 2048, 2048, 2048),
    packed(16, 16, 96, 192, 8192, 8192, 8192, 8192),
    packed(8, 8, 128, 256, 8192, 8192, 8192, 8192),
    packed(16, 16, 64, 128, 8192, 8192, 8192, 8192),
    packed(16, 16, 128, 64, 8192, 8192, 8192, 8192),
    packed(16, 16, 64, 64, 8192, 8192, 8192, 8192),
)


def load(key: str) -> Rule:
    """An implementation's `chunk_gated_delta_rule`. Raises the errors of its import."""
    if key == "fla":
        os.environ["FLA_FLASH_QLA"] = "0"
        key = "fla.ops.gated_delta_rule"
    if key == TRITON:
        missing = importlib.import_module("gdn_triton.fast").why_unavailable()
        if missing is not None:
            raise RuntimeError(f"the same as gdn_triton here, without the CUDA library. {missing}")
    module = {TRITON: OURS, "flashqla": "flash_qla"}.get(key, key)
    rule: Rule = importlib.import_module(module).chunk_gated_delta_rule
    return rule


def specification(*x: Tensor, output_final_state: bool, **options: Any) -> tuple[Tensor, Tensor]:
    """The reference, which always returns the final state."""
    assert output_final_state
    result = reference.chunk_gated_delta_rule(*x, **options)
    return result[0], result[1]


def leaves(inputs: Inputs, dtype: torch.dtype | None = None) -> list[Tensor]:
    """q, k, v, g, beta and the initial state, which require gradients."""
    tensors = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.initial_state)
    found = [x.to(dtype) if dtype else x for x in tensors if x is not None]
    return [x.detach().clone().requires_grad_() for x in found]


def options_of(rule: Rule, inputs: Inputs) -> dict[str, Any]:
    """The lengths, also on the host if the implementation takes them. All timed calls share the
    tensors, because FLA keeps its chunk indices for the last tensors of lengths."""
    options: dict[str, Any] = {"cu_seqlens": inputs.cu_seqlens}
    if inputs.cu_seqlens is not None and "cu_seqlens_cpu" in inspect.signature(rule).parameters:
        options["cu_seqlens_cpu"] = on_host(inputs)
    return options


def run(rule: Rule, x: list[Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return rule(*x[:5], initial_state=x[5], output_final_state=True, **options)


def on_host(inputs: Inputs) -> Tensor:
    """The offsets, without a wait for the device."""
    lengths = inputs.case.seqlens
    assert lengths is not None and inputs.cu_seqlens is not None
    offsets = [0, *itertools.accumulate(lengths)]
    return torch.tensor(offsets, dtype=inputs.cu_seqlens.dtype)


def output_gradients(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Gradients of o [1, T, HV, V] and of the final state [N, HV, K, V]."""
    assert inputs.initial_state is not None
    generator = torch.Generator(inputs.q.device).manual_seed(1)
    like = partial(torch.randn, generator=generator, device=inputs.q.device)
    return like(inputs.v.shape).to(inputs.v.dtype), like(inputs.initial_state.shape)


def gradients(rule: Rule, inputs: Inputs, dtype: torch.dtype | None = None) -> list[Tensor]:
    x = leaves(inputs, dtype)
    outputs = run(rule, x, options_of(rule, inputs))
    seeds = [y.to(z.dtype) for y, z in zip(output_gradients(inputs), outputs, strict=True)]
    return list(torch.autograd.grad(outputs, x, seeds))


def errors_of(rule: Rule, inputs: Inputs, expected: list[Tensor], device: Device) -> list[float]:
    gradients(rule, inputs)  # compiles, and leaves memory that the second run finds dirty
    device.poison(8 * inputs.nbytes)
    return [relative(x, y) for x, y in zip(gradients(rule, inputs), expected, strict=True)]


def measure_errors(
    case: Case, rules: dict[str, Rule], device: Device, draws: int
) -> dict[str, Any]:
    errors: dict[str, list[list[float]]] = {name: [] for name in rules}
    whys: dict[str, str] = {}
    for draw in range(draws):
        inputs = make_inputs(replace(case, name=f"{case.name}, {draw}"), device.torch)
        expected = gradients(specification, inputs, torch.float64)
        for name, rule in rules.items():
            if name in whys:
                continue
            with backend_chosen(BACKENDS.get(name)):
                found, why = attempt(device, partial(errors_of, rule, inputs, expected, device))
            if why is None:
                errors[name].append(found)
            else:
                whys[name] = why
    results: dict[str, Any] = {}
    for name, of_draws in errors.items():
        if name in whys:
            results[name] = {"error": whys[name]}
        else:
            of_keys = zip(NAMES, zip(*of_draws, strict=True), strict=True)
            results[name] = {key: math.hypot(*found) / draws**0.5 for key, found in of_keys}
    return {
        "case": case.name,
        "gates": case.gates,
        "kind": "errors",
        "draws": draws,
        "results": results,
    }


class Backward:
    """One implementation after its forward, with a backward that can run repeatedly."""

    def __init__(self, rule: Rule, inputs: Inputs, backend: str | None = None) -> None:
        self.backend = backend  # `GDN_BACKEND` of every call
        self.x = leaves(inputs)
        self.forward = partial(run, rule, self.x, options_of(rule, inputs))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with backend_chosen(backend):
            self.outputs = self.forward()
        torch.cuda.synchronize()
        self.kept = torch.cuda.memory_allocated() - before - nbytes(self.outputs)
        self.seeds = output_gradients(inputs)

    def run(self) -> tuple[Tensor, ...]:
        with backend_chosen(self.backend):
            return torch.autograd.grad(self.outputs, self.x, self.seeds, retain_graph=True)

    def both(self) -> None:
        with backend_chosen(self.backend):
            torch.autograd.grad(self.forward(), self.x, self.seeds)

    def peak(self) -> int:
        """The peak bytes of a forward and a backward in addition to inputs, outputs and
        gradients."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.both()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - nbytes(self.outputs) - nbytes(self.x)


def nbytes(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


class Times(NamedTuple):
    """Medians in microseconds: between two events of the GPU, with all launches of the call ready
    before the first event; and the host's time for the launches."""

    gpu: float
    host: float


HOST_ROUNDS, CLOCKS_PER_US, AHEAD = 5, 2000, 1.5  # the host is given so much more than it takes


def host_time(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


def event_times(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Times]:
    """The times of each call, in turns."""
    hosts: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(HOST_ROUNDS):
        for name, call in calls.items():
            hosts[name].append(host_time(call))
    host = {name: statistics.median(found) for name, found in hosts.items()}
    events: dict[str, list[Any]] = {name: [] for name in calls}
    for round_ in range(rounds + 2):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            # The launches of a call run ahead of the device only while the device is busy.
            torch.cuda._sleep(int(AHEAD * CLOCKS_PER_US * host[name]))
            start.record()
            call()
            end.record()
            if round_ >= 2:
                events[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: Times(1e3 * statistics.median(a.elapsed_time(b) for a, b in pairs), host[name])
        for name, pairs in events.items()
    }


def measure_times(
    case: Case, rules: dict[str, Rule], device: Device, rounds: int
) -> dict[str, Any]:
    inputs = make_inputs(case, device.torch)
    results: dict[str, Any] = {}
    made: dict[str, Backward] = {}
    for name, rule in rules.items():
        backend = BACKENDS.get(name)
        with backend_chosen(backend):
            _, why = attempt(device, partial(gradients, rule, inputs))
        if why is not None:
            results[name] = {"error": why}
            continue
        made[name] = Backward(rule, inputs, backend)
        results[name] = {"kept": made[name].kept, "peak": made[name].peak()}
    for key, method in (("backward", "run"), ("call", "both")):
        times = event_times({name: getattr(b, method) for name, b in made.items()}, rounds)
        for name, value in times.items():
            results[name] |= {key: value.gpu, f"{key}_host": value.host}
    return {"case": case.name, "gates": case.gates, "kind": "times", "results": results}


def times_cell(row: dict[str, Any]) -> str:
    """The times of one implementation. A record may lack the host's times, and the times of a
    call."""

    def both(suffix: str) -> str:
        call = f"call{suffix}"
        of_call = f"{row[call]:.0f}" if call in row else "-"
        return f"{row[f'backward{suffix}']:.0f} / {of_call}"

    host = f" ({both('_host')})" if "backward_host" in row else ""
    return f"{both('')}{host}, {row['kept'] / 2**20:.0f} / {row['peak'] / 2**20:.0f} MiB"


def tables(records: list[dict[str, Any]], names: list[str]) -> str:
    lines = [f"| case | | {' | '.join(NAMES)} |", f"|---|---|{'---|' * len(NAMES)}"]
    for record in records:
        if record["kind"] != "errors":
            continue
        for name in names:
            row = record["results"].get(name, {})
            cells = [f"{row[key]:.2e}" if key in row else "-" for key in NAMES]
            lines.append(f"| {label_of(record)[9:]} | {name} | {' | '.join(cells)} |")
    lines += ["", f"| case | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for record in records:
        if record["kind"] != "times":
            continue
        cells = []
        for name in names:
            row = record["results"].get(name, {})
            cells.append(times_cell(row) if "backward" in row else "-")
        lines.append(f"| {label_of(record)[9:]} | {' | '.join(cells)} |")
    whys = {
        f"{label_of(record)}, {name}: {row['error']}"
        for record in records
        for name, row in record["results"].items()
        if "error" in row
    }
    return "\n".join([*lines, "", *sorted(whys)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--peers", nargs="*", default=[TRITON, "fla", "flashqla"])
    parser.add_argument("--select", default="", help="only cases whose name holds this")
    parser.add_argument("--draws", type=int, default=8, help="of the inputs, for errors")
    parser.add_argument("--rounds", type=int, default=20)
    add_gates_option(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of q, k and v")
    parser.add_argument("--jsonl", type=Path, help="also append a record a case to this file")
    parser.add_argument("--commit", help="what the records say was measured (default: git's)")
    options = parser.parse_args()
    if options.draws < 1:
        parser.error(f"--draws must be at least 1, got {options.draws}")
    device = cuda_device("gradients are timed on")
    rules: dict[str, Rule] = {OURS: load(OURS)}
    missing = []
    for key in options.peers:
        try:
            rules[key] = load(key)
        except Exception as error:
            missing.append(f"{key}: not measured: {type(error).__name__}: {error}")
            print(missing[-1])
    versions = {key: PEERS.get(key, Ours).version() for key in rules}
    head = header("benchmarks.backward", versions, missing, device, options.commit or commit())
    append_record(options.jsonl, head)
    records = []
    jobs = []
    for gates in options.gates:
        error_cases, time_cases = (
            with_gates([in_dtype(x, options.dtype) for x in cases], gates)
            for cases in (ERROR_CASES, TIME_CASES)
        )
        jobs += [partial(measure_errors, case, draws=options.draws) for case in error_cases]
        jobs += [partial(measure_times, case, rounds=options.rounds) for case in time_cases]
    for job in jobs:
        if options.select not in job.args[0].name:
            continue
        record = job(rules=rules, device=device)
        records.append(record)
        append_record(options.jsonl, record)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print(tables(records, list(rules)))


if __name__ == "__main__":
    main()
