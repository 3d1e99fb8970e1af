"""The measurements of one case: error, time, memory and equal elements of each implementation."""

import gc
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.peers import Peer
from benchmarks.shapes import CHUNK, Case, Inputs, make_inputs

GATE = 2e-2  # relative difference of o above which two implementations do not compute the same

# Tolerances, absolute and relative at once, within which elements count as equal.
TOLERANCES = (0.0, 1e-3, 1e-2)

Record = dict[str, Any]
Pair = tuple[torch.Tensor, torch.Tensor]


class Effort(NamedTuple):
    """Counts: rounds of replays; calls from Python in a row; and the number of such rows."""

    rounds: int
    calls: int
    repeats: int


class DeviceLost(Exception):
    """A launch failed in a way that ends every later one of this process."""


class Device:
    """The device that is measured: its clock, its memory, and whether it still works."""

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self.is_cuda = device.type == "cuda"
        self.flush_buffer: torch.Tensor | None = None
        if self.is_cuda:
            properties = torch.cuda.get_device_properties(device)
            l2_bytes = getattr(properties, "L2_cache_size", 0) or 64 << 20
            self.flush_buffer = torch.zeros(l2_bytes, device=device)  # float32: four times the L2

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def flush(self) -> None:
        """Fills the L2 with clean lines: a buffer that was written would still be written back
        during the time that is measured. It also runs longer than the launch of the next call
        takes."""
        if self.flush_buffer is not None:
            self.flush_buffer.sum()

    def poison(self, nbytes: int) -> None:
        """Leaves NaN in the memory that the next allocations get, so an element that nothing writes
        is found. The allocator's free list is emptied first, because it would serve them."""
        if not self.is_cuda:
            return
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        count = min(max(nbytes, 64 << 20), free // 3) // 4
        big = torch.full((count,), math.nan, device=self.torch)
        # Allocations of up to 1 MiB have separate blocks.
        small = [torch.full((1 << 17,), math.nan, device=self.torch) for _ in range(64)]
        del big, small

    def check(self) -> None:
        """A launch error is permanent: later measurements would be meaningless."""
        try:
            self.synchronize()
        except RuntimeError as error:
            raise DeviceLost(f"the device no longer answers: {first_line(error)}") from error


def cuda_device(use: str) -> Device:
    """The current GPU; without one the program ends with a message that names the `use`."""
    if not torch.cuda.is_available():
        raise SystemExit(f"{use} a CUDA GPU; torch finds none")
    return Device(torch.device("cuda", torch.cuda.current_device()))


def device_for(dry_run: bool) -> Device:
    """The GPU; the CPU for a dry run."""
    return Device(torch.device("cpu")) if dry_run else cuda_device("times are those of")


def device_line(device: Device) -> str:
    name = torch.cuda.get_device_name() if device.is_cuda else "CPU"
    version = importlib.util.find_spec("triton") and importlib.import_module("triton").__version__
    return f"{name}, torch {torch.__version__}, Triton {version}"


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__


def attempt(device: Device, function: Callable[[], Any]) -> tuple[Any, str | None]:
    """The value, or None and the reason: the failure of one implementation does not end the run."""
    try:
        value = function()
        device.synchronize()
        return value, None
    except Exception as error:
        reason = first_line(error)
    gc.collect()
    device.check()
    if device.is_cuda:
        torch.cuda.empty_cache()
    return None, reason


# ------------------------------------------------------------------------------------- accuracy


def exact(inputs: Inputs, heads: slice, recurrent: bool) -> Pair:
    """o and the final state of some key heads (and their value heads) in float64."""
    reference = importlib.import_module("gdn_triton.reference")
    rule = reference.recurrent_gated_delta_rule if recurrent else reference.chunk_gated_delta_rule
    group = inputs.case.HV // inputs.case.H
    values = slice(heads.start * group, heads.stop * group)
    state = inputs.initial_state
    result = rule(
        inputs.q[:, :, heads].double(),
        inputs.k[:, :, heads].double(),
        inputs.v[:, :, values].double(),
        inputs.g[:, :, values].double(),
        inputs.beta[:, :, values].double(),
        initial_state=None if state is None else state[:, values].double(),
        cu_seqlens=inputs.cu_seqlens,
    )
    return result[0], result[1]


def head_slices(inputs: Inputs, device: Device) -> list[slice]:
    """Key heads in groups whose float64 intermediates fit into memory."""
    case = inputs.case
    per_value_head = 8 * case.tokens * (4 * case.K + 6 * case.V + 6 * 64)
    per_value_head += 8 * case.chunks * case.K * case.V * 3
    available = torch.cuda.mem_get_info()[0] // 3 if device.is_cuda else 1 << 30
    step = max(1, min(16 << 30, available) // (per_value_head * (case.HV // case.H)))
    return [slice(h, min(h + step, case.H)) for h in range(0, case.H, step)]


def relative(x: torch.Tensor, y: torch.Tensor) -> float:
    """||x - y|| / ||y|| in float64; NaN if either has one."""
    y = y.double()
    return float((x.double() - y).norm() / y.norm().clamp_min(1e-300))


def verify_chunked(device: Device, tokens: int) -> float:
    """The chunked form against the recurrence, both float64. Their agreement allows long rows to
    use the chunked form."""
    case = Case(
        "chunked against recurrent", "check", 1, tokens, 2, 4, 128, 128,
        (tokens // 2 + 7, tokens - tokens // 2 - 8, 1),
        gate="mild", initial_state=True, dtype=torch.float32,
    )  # fmt: skip
    inputs = make_inputs(case, device.torch)
    chunked = exact(inputs, slice(0, case.H), recurrent=False)
    recurrent = exact(inputs, slice(0, case.H), recurrent=True)
    difference = max(relative(a, b) for a, b in zip(chunked, recurrent, strict=True))
    if not difference < 1e-10:
        raise SystemExit(f"the chunked reference differs from the recurrence by {difference:.1e}")
    return difference


def measure_accuracy(
    inputs: Inputs, peers: Sequence[Peer], device: Device, recurrent_steps: int
) -> Record:
    case = inputs.case
    group = case.HV // case.H
    recurrent = case.longest <= recurrent_steps
    results: dict[str, Record] = {}
    outputs: dict[str, Pair] = {}
    for peer in peers:
        if reason := peer.supports(case):
            results[peer.name] = {"skipped": reason}
            continue
        call = peer.prepare(inputs)
        with peer.chosen():
            _, reason = attempt(device, call)  # compiles and tunes, which also uses memory
            if reason is None:
                device.poison(6 * inputs.nbytes)
                result, reason = attempt(device, call)
        if reason is not None:
            results[peer.name] = {"error": reason}
            continue
        outputs[peer.name] = peer.unify(inputs, result)
        finite = all(bool(x.isfinite().all()) for x in outputs[peer.name])
        results[peer.name] = {"finite": finite}

    # Squared norms summed over slices of heads, on the device: [difference, reference] of o, state.
    sums = {name: torch.zeros(2, 2, dtype=torch.float64) for name in outputs}
    for heads in head_slices(inputs, device):
        references = exact(inputs, heads, recurrent)
        values = slice(heads.start * group, heads.stop * group)
        for name, (o, state) in outputs.items():
            pairs = ((o[:, :, values], references[0]), (state[:, values], references[1]))
            for i, (x, y) in enumerate(pairs):
                norms = torch.stack([(x.double() - y).square().sum(), y.square().sum()])
                sums[name][i] += norms.cpu()
    for name, sum_ in sums.items():
        o_error, state_error = (sum_[:, 0] / sum_[:, 1].clamp_min(1e-300)).sqrt().tolist()
        results[name] |= {"o": o_error, "state": state_error}
    return {"reference": "recurrence" if recurrent else "chunked", "results": results}


# ----------------------------------------------------------------------------------------- time


class Replay:
    """One call in a CUDA graph; on a CPU, the call itself. `result` is rewritten by each replay.
    before: precedes each timed replay, and is not timed."""

    def __init__(
        self, call: Callable[[], Any], device: Device, before: Callable[[], Any] | None = None
    ) -> None:
        self.before = before
        # The graph reads and writes the memory of its tensors, which the next capture would free.
        self.call = call
        if not device.is_cuda:
            self.result = call()
            self.run = call
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = call()
        self.run = self.graph.replay


def in_a_row(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    """One graph holds all calls, because a single short call takes less time than a graph takes to
    begin."""

    def all_calls() -> None:
        for call in calls:
            call()

    return all_calls


def replay_times(
    replays: dict[str, Replay], device: Device, rounds: int, flush: bool
) -> dict[str, list[float]]:
    """Microseconds of each replay. The implementations take turns, so a drift of the clock affects
    all."""
    warm_up = 3
    if not device.is_cuda:
        times: dict[str, list[float]] = {name: [] for name in replays}
        for _ in range(rounds):
            for name, replay in replays.items():
                if replay.before is not None:
                    replay.before()
                start = time.perf_counter()
                replay.run()
                times[name].append(1e6 * (time.perf_counter() - start))
        return times
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in replays}
    for round_ in range(warm_up + rounds):
        for name, replay in replays.items():
            if replay.before is not None:
                replay.before()
            if flush:
                device.flush()
            start_event = torch.cuda.Event(enable_timing=True)
            end_event = torch.cuda.Event(enable_timing=True)
            start_event.record()
            replay.run()
            end_event.record()
            if round_ >= warm_up:
                events[name].append((start_event, end_event))
    torch.cuda.synchronize()
    return {name: [1e3 * a.elapsed_time(b) for a, b in pairs] for name, pairs in events.items()}


def host_time(call: Callable[[], Any], device: Device, calls: int = 50, repeats: int = 7) -> float:
    """Microseconds until a call from Python returns."""
    found = []
    for _ in range(repeats):
        device.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append(1e6 * (time.perf_counter() - start) / calls)
    device.synchronize()
    return statistics.median(found)


def call_times(
    inputs: Inputs, peers: Sequence[Peer], device: Device, count: int, repeats: int
) -> dict[str, Record]:
    """Microseconds of a call from Python: `call` includes the GPU's part (a synchronisation after
    `count` calls), `host` ends when the call returns. `count` is less than the number of launches
    after which a stream blocks the host."""
    calls = {peer.name: peer.prepare(inputs) for peer in peers}
    call_us: dict[str, list[float]] = {name: [] for name in calls}
    host_us: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            for peer in peers:
                call = calls[peer.name]
                with peer.chosen():
                    call()
                    device.synchronize()
                    start = time.perf_counter()
                    for _ in range(count):
                        call()
                    returned = time.perf_counter()
                    device.synchronize()
                    end = time.perf_counter()
                host_us[peer.name].append(1e6 * (returned - start) / count)
                call_us[peer.name].append(1e6 * (end - start) / count)
    finally:
        gc.enable()
    return {
        name: {
            "call": statistics.median(call_us[name]),
            "host": statistics.median(host_us[name]),
            "host_min": min(host_us[name]),
        }
        for name in calls
    }


def first_heads(inputs: Inputs, device: Device) -> tuple[slice, torch.Tensor]:
    """The value heads of the first key heads that fit, and their exact o."""
    heads = head_slices(inputs, device)[0]
    group = inputs.case.HV // inputs.case.H
    return slice(0, heads.stop * group), exact(inputs, heads, recurrent=False)[0]


def extra_memory(call: Callable[[], Any], device: Device) -> int | None:
    """The peak bytes of a call in addition to its inputs and outputs. The first call is not
    measured, because it includes memory that an implementation keeps permanently."""
    if not device.is_cuda:
        return None
    device.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    device.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    outputs = (x for x in result if isinstance(x, torch.Tensor))
    return peak - sum(x.numel() * x.element_size() for x in outputs)


def measure_speed(
    inputs: Inputs,
    peers: Sequence[Peer],
    baseline: str,
    device: Device,
    effort: Effort,
    flush: bool,
) -> Record:
    """Times and memory of every implementation that computes the same o; nothing if ours does
    not."""
    case, ours = inputs.case, peers[0].name
    results: dict[str, Record] = {}
    replays: dict[str, Replay] = {}
    outputs: dict[str, torch.Tensor] = {}
    for peer in peers:
        if reason := peer.supports(case):
            results[peer.name] = {"skipped": reason}
            continue
        eager_call = peer.prepare(inputs)
        with peer.chosen():
            eager, reason = attempt(device, eager_call)
            if reason is None:
                extra, reason = attempt(device, partial(extra_memory, eager_call, device))
            if reason is None:
                call = peer.prepare(inputs, capture=True)
                replay, reason = attempt(device, partial(Replay, call, device))
        if reason is not None:
            results[peer.name] = {"error": reason}
            continue
        eager_o = peer.unify(inputs, eager)[0]
        if device.is_cuda:
            for x in peer.unify(inputs, replay.result):
                x.fill_(math.nan)
            replay.run()
        o, state = peer.unify(inputs, replay.result)
        if not (bool(o.isfinite().all()) and bool(state.isfinite().all())):
            results[peer.name] = {"error": "the replayed graph left NaN or infinity"}
        elif not (difference := relative(o, eager_o)) <= GATE:
            results[peer.name] = {"error": f"graph and call differ by {difference:.1e}"}
        else:
            results[peer.name] = {} if extra is None else {"extra": extra}
            replays[peer.name], outputs[peer.name] = replay, o.clone()
    if ours not in replays:
        return {"refused": results[ours].get("error", "not run"), "results": results}

    others = [name for name in (baseline, *replays) if name in replays and name != ours]
    if others:
        judge, values, truth = others[0], slice(None), outputs[others[0]]
    else:
        judge = "float64"
        values, truth = first_heads(inputs, device)
    difference = relative(outputs[ours][:, :, values], truth)
    if not difference <= GATE:
        reason = f"o differs from {judge} by {difference:.1e}"
        return {"refused": reason, "results": results}
    for name in others[1:]:
        if not (other := relative(outputs[name], truth)) <= GATE:
            results[name]["error"] = f"o differs from {judge} by {other:.1e}"
            del replays[name]
    del outputs, truth

    for name, times in replay_times(replays, device, effort.rounds, flush).items():
        results[name] |= {"graph": statistics.median(times), "graph_min": min(times)}
    timed = [peer for peer in peers if peer.name in replays]
    longest = max(results[peer.name]["graph"] for peer in timed)
    count = effort.calls if longest < 500 else min(effort.calls, 20)
    for name, cells in call_times(inputs, timed, device, count, effort.repeats).items():
        results[name] |= cells
    return {"difference": difference, "judge": judge, "results": results}


def measure_host(inputs: Inputs, peers: Sequence[Peer], device: Device, effort: Effort) -> Record:
    results: dict[str, Record] = {}
    timed: list[Peer] = []
    for peer in peers:
        if reason := peer.supports(inputs.case):
            results[peer.name] = {"skipped": reason}
            continue
        with peer.chosen():
            _, reason = attempt(device, peer.prepare(inputs))
        if reason is not None:
            results[peer.name] = {"error": reason}
        else:
            timed.append(peer)
    cells = call_times(inputs, timed, device, effort.calls, 3 * effort.repeats)
    return {"results": results | cells}


# -------------------------------------------------------------------------------- equal elements


def by_steps(inputs: Inputs) -> Pair:
    """The Triton kernels with every intermediate in memory: one kernel a mathematical step."""
    chunk_fwd = importlib.import_module("gdn_triton.chunk.triton.forward")
    validation = importlib.import_module("gdn_triton.chunk.validation")
    records = importlib.import_module("gdn_triton._host.records")
    problem_module = importlib.import_module("gdn_triton.chunk.problem")
    given = dict.fromkeys(("scale", "cu_seqlens_cpu", "chunk_indices", "A_log", "dt_bias"))
    for name in ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens"):
        given[name] = getattr(inputs, name)
    flags = dict.fromkeys(records.Options._fields, False)
    sizes = {"output_final_state": True, "chunk_size": CHUNK}
    call = records.made(problem_module.ChunkCall, {**given, **flags, **sizes})
    x = chunk_fwd.readable_inputs(call.inputs)
    o, state = chunk_fwd.forward_by_steps(validation.validate_chunk(call), x)
    return o, state


def equal_share(x: torch.Tensor, y: torch.Tensor, tolerance: float) -> float:
    """The share of elements with |x - y| <= tolerance * (1 + |y|)."""
    x, y = x.float(), y.float()
    return float(((x - y).abs() <= tolerance * (1 + y.abs())).float().mean())


def measure_numerics(inputs: Inputs, peers: Sequence[Peer], device: Device) -> Record:
    """The number of elements that each implementation has in common with our kernels run step by
    step."""
    expected = by_steps(inputs)
    results: dict[str, Record] = {}
    for peer in peers:
        if reason := peer.supports(inputs.case):
            results[peer.name] = {"skipped": reason}
            continue
        with peer.chosen():
            result, reason = attempt(device, peer.prepare(inputs))
        if reason is not None:
            results[peer.name] = {"error": reason}
            continue
        pairs = zip(("o", "state"), peer.unify(inputs, result), expected, strict=True)
        results[peer.name] = {
            name: [equal_share(x, y, tolerance) for tolerance in TOLERANCES] for name, x, y in pairs
        }
    return {"tolerances": list(TOLERANCES), "results": results}
