"""The Gated DeltaNet part of a Qwen3-Next layer, beside the kernels of vLLM and SGLang.

    python -m benchmarks.layer [--engines FOLDER] [--heads 16/32 4/8] [--tokens 8192]
        [--prefills 1 8] [--decodes 64 256] [--jsonl FILE] [--dry-run]

From mixed_qkv, behind the projection, to what goes into the output's projection: convolution,
preparation, rule, gated norm; K = V = 128, 4 taps, bf16, float32 states, gates of a model; 16/32
heads are the model's, 4/8 those of one of four ranks. A prefill is of 8192 tokens of 1 or 8 new
sequences, a decode step of one token of 64 or 256. Each row: microseconds of a replay of the call
as a CUDA graph with a cold L2, the implementations in turns, and the kernels that it launches.

FOLDER is what `python -m benchmarks.engines` makes. The engines' calls are those of their layers:
vLLM's gathers, zeroing and scatter of states are among them, and what an engine computes once a
step for all layers is not. SGLang's prefill takes its Triton convolution; on NVIDIA GPUs its server
has one in CUDA. Every o is compared with float64 first; one that differs is not timed.
--dry-run does all of it with toy sizes on the CPU.
"""

import argparse
import statistics
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import engines
from benchmarks.machine import commit, header
from benchmarks.measure import (
    GATE,
    Device,
    Record,
    Replay,
    attempt,
    device_for,
    relative,
    replay_times,
)
from benchmarks.peers import Ours
from benchmarks.report import append_record
from benchmarks.shapes import Random, gate_parameters
from gdn_triton import (
    causal_conv1d_update,
    chunk_prefill,
    fused_conv_prep,
    recurrent_step,
    rms_norm_gated,
)
from gdn_triton.reference.chunk import recurrent_gated_delta_rule
from gdn_triton.reference.conv import causal_conv1d
from gdn_triton.reference.norm import rms_norm_gated as exact_norm
from gdn_triton.reference.prep import fused_post_conv_prep

W = 4
EPS = 1e-6
CHECKED = 200  # tokens of a prefill's first sequence, and sequences of a step, that are compared
OURS = "gdn_triton"
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
LEGEND = (
    "Microseconds of the Gated DeltaNet part of a layer in a CUDA graph with a cold L2, from "
    "mixed_qkv to\nthe input of the output's projection, and the kernels that it launches."
)

Call = Callable[[], Tensor]
Maker = Callable[["Step"], Call]


class Sizes(NamedTuple):
    H: int
    HV: int
    K: int = 128
    V: int = 128

    @property
    def D(self) -> int:
        return 2 * self.H * self.K + self.HV * self.V


class Step(NamedTuple):
    """The tensors of a call of one implementation, which it may write. lengths: tokens of each
    sequence. conv_state: [slots, W - 1, D]; state: [slots, HV, V, K]."""

    sizes: Sizes
    lengths: Sequence[int]
    mixed_qkv: Tensor
    a: Tensor
    b: Tensor
    z: Tensor
    weight: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    conv_state: Tensor
    state: Tensor
    slots: Tensor
    cu_seqlens: Tensor
    has_initial_state: Tensor

    @property
    def is_decode(self) -> bool:
        return max(self.lengths) == 1

    def copied(self) -> "Step":
        """The same call on tensors of its own."""
        made: Any = [x.clone() if isinstance(x, Tensor) else x for x in self]
        return Step(*made)


def make_step(
    sizes: Sizes, lengths: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Step:
    """Sequences of one token go on from states; longer ones begin."""
    N, T = len(lengths), sum(lengths)
    rand = Random(0, device)

    def normal(*shape: int) -> Tensor:
        return rand.normal(*shape).to(dtype)

    A, dt_bias = gate_parameters("model", sizes.HV, rand)
    decode = max(lengths) == 1
    state = rand.normal(N + 1, sizes.HV, sizes.V, sizes.K)
    conv_state = normal(N + 1, W - 1, sizes.D)
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    return Step(
        sizes=sizes,
        lengths=lengths,
        mixed_qkv=normal(T, sizes.D),
        a=normal(T, sizes.HV),
        b=normal(T, sizes.HV),
        z=normal(T, sizes.HV, sizes.V),
        weight=0.5 * normal(sizes.D, W),
        A_log=A.clamp(min=1e-3).log(),
        dt_bias=dt_bias,
        norm=1 + 0.1 * normal(sizes.V),
        conv_state=conv_state if decode else torch.zeros_like(conv_state),
        state=state if decode else torch.zeros_like(state),
        # Slot 0 is nobody's in vLLM.
        slots=1 + torch.arange(N, device=device).int(),
        cu_seqlens=offsets.int(),
        has_initial_state=torch.full((N,), decode, device=device),
    )


def exact(step: Step) -> Tensor:
    """The result in float64, of the first tokens of a prefill or the first sequences of a step."""
    H, HV, K, V = step.sizes
    n = min(CHECKED, step.lengths[0] if not step.is_decode else len(step.lengths))
    x = step.mixed_qkv[:n, None] if step.is_decode else step.mixed_qkv[None, :n]
    slots = step.slots[: x.shape[0]].long()
    earlier = step.conv_state[slots].mT.double()
    x = causal_conv1d(x.double(), step.weight.double(), None, True, earlier).flatten(0, 1)
    a, b = step.a[:n].double(), step.b[:n].double()
    rule = fused_post_conv_prep(x, a, b, step.A_log, step.dt_bias, H, K, V)
    lead = (n, 1) if step.is_decode else (1, n)
    q, k, v, g, beta = (y.unflatten(0, lead) for y in rule)
    state = step.state[slots].mT.double()
    o, _ = recurrent_gated_delta_rule(q, k, v, g, beta, initial_state=state)
    return exact_norm(o.reshape(n, HV, V), step.z[:n].double(), step.norm.double(), EPS)


# ------------------------------------------------------------------------------ implementations


def ours(step: Step) -> Call:
    H, HV, K, V = step.sizes
    states: dict[str, Any] = {"read_slots": step.slots, "skip": "non_positive"}
    begins: dict[str, Any] = {
        "has_initial_state": step.has_initial_state,
        "cu_seqlens": step.cu_seqlens,
    }
    conv_state = step.conv_state.mT
    out = step.mixed_qkv.new_empty(sum(step.lengths), HV, V)

    def decode() -> Tensor:
        x = causal_conv1d_update(
            step.mixed_qkv, step.weight, None, "silu", state=conv_state, **states
        )
        recurrent_step(
            step.state,
            step.slots,
            mixed_qkv=x,
            a=step.a,
            b=step.b,
            A_log=step.A_log,
            dt_bias=step.dt_bias,
            use_qk_l2norm_in_kernel=True,
            state_v_first=True,
            skip="non_positive",
            out=out,
        )
        return rms_norm_gated(out, step.z, step.norm, EPS)

    def prefill() -> Tensor:
        q, k, v, g, beta = fused_conv_prep(
            step.mixed_qkv,
            step.weight,
            step.a,
            step.b,
            step.A_log,
            step.dt_bias,
            H,
            K,
            V,
            None,
            "silu",
            state=conv_state,
            **states,
            **begins,
        )
        chunk_prefill(
            step.state,
            step.slots,
            q=q[None],
            k=k[None],
            v=v[None],
            g=g[None],
            beta=beta[None],
            state_v_first=True,
            out=out[None],
            skip="non_positive",
            **begins,
        )
        return rms_norm_gated(out, step.z, step.norm, EPS)

    return decode if step.is_decode else prefill


def conv_blocks(step: Step) -> SimpleNamespace:
    """vLLM's metadata of its convolution, which it computes once for all layers: the sequence of
    each block of 8 tokens, and which of the sequence's blocks it is."""
    blocks = [(n, i) for n, length in enumerate(step.lengths) for i in range(-(-length // 8))]
    of, which = torch.tensor(blocks, dtype=torch.int32, device=step.slots.device).unbind(1)
    pad = of.new_full((max(1024, len(blocks)) * 2,), -1)
    batch, offset = pad.clone(), pad.clone()
    batch[: len(blocks)], offset[: len(blocks)] = of, which
    given = {
        "tot": len(blocks),
        "mlist": of,
        "mlist_len": len(blocks),
        "offsetlist": which,
        "batch_ptr": batch,
        "token_chunk_offset_ptr": offset,
    }
    return SimpleNamespace(nums_dict={8: given}, batch_ptr=batch, token_chunk_offset_ptr=offset)


def vllm(step: Step, theirs: dict[str, Callable[..., Any]]) -> Call:
    f = SimpleNamespace(**theirs)
    H, HV, K, V = step.sizes
    gates = {"A_log": step.A_log, "dt_bias": step.dt_bias}
    conv_state = step.conv_state.transpose(-1, -2)
    out = step.mixed_qkv.new_empty(sum(step.lengths), HV, V)
    metadata = None if step.is_decode else conv_blocks(step)

    def norm() -> Tensor:
        y: Tensor = f.rmsnorm_fn(
            out.reshape(-1, V),
            step.norm,
            None,
            z=step.z.reshape(-1, V),
            eps=EPS,
            group_size=None,
            norm_before_gate=True,
            activation="silu",
        )
        return y.view(out.shape)

    def decode() -> Tensor:
        x = f.causal_conv1d_update(
            step.mixed_qkv,
            conv_state,
            step.weight,
            None,
            "silu",
            conv_state_indices=step.slots,
            validate_data=False,
        )
        f.fused_recurrent_gated_delta_rule_packed_decode(
            mixed_qkv=x,
            a=step.a,
            b=step.b,
            **gates,
            scale=K**-0.5,
            initial_state=step.state,
            out=out.unsqueeze(1),
            ssm_state_indices=step.slots,
            use_qk_l2norm_in_kernel=True,
        )
        return norm()

    def prefill() -> Tensor:
        x = f.causal_conv1d_fn(
            step.mixed_qkv.transpose(0, 1),
            step.weight,
            None,
            activation="silu",
            conv_states=conv_state,
            has_initial_state=step.has_initial_state,
            cache_indices=step.slots,
            query_start_loc=step.cu_seqlens,
            metadata=metadata,
        ).transpose(0, 1)
        prepared = f.fused_post_conv_prep(
            conv_output=x,
            a=step.a,
            b=step.b,
            **gates,
            num_k_heads=H,
            head_k_dim=K,
            head_v_dim=V,
            apply_l2norm=True,
            output_g_exp=False,
        )
        q, k, v, g, beta = (y.unsqueeze(0) for y in prepared)
        state = step.state[step.slots].contiguous()
        state[~step.has_initial_state, ...] = 0
        o, state = f.chunk_gated_delta_rule(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            initial_state=state,
            output_final_state=True,
            cu_seqlens=step.cu_seqlens,
            use_qk_l2norm_in_kernel=False,
        )
        step.state[step.slots] = state.to(step.state.dtype)
        out.copy_(o.squeeze(0))
        return norm()

    return decode if step.is_decode else prefill


def sglang(step: Step, theirs: dict[str, Callable[..., Any]]) -> Call:
    f = SimpleNamespace(**theirs)
    H, HV, K, V = step.sizes
    gates = {"A_log": step.A_log, "dt_bias": step.dt_bias}
    conv_state = step.conv_state.transpose(-1, -2).contiguous()
    conv = (conv_state, step.weight, None, "silu")

    def norm(o: Tensor) -> Tensor:
        y: Tensor = f.rms_norm_gated(
            x=o.reshape(-1, V),
            weight=step.norm,
            bias=None,
            z=step.z.reshape(-1, V),
            eps=EPS,
            norm_before_gate=True,
            is_rms_norm=True,
        )
        return y.view(-1, HV, V)

    def decode() -> Tensor:
        x = f.causal_conv1d_update(step.mixed_qkv, *conv, conv_state_indices=step.slots)
        o = x.new_empty(x.shape[0], 1, HV, V)
        f.fused_recurrent_gated_delta_rule_packed_decode(
            mixed_qkv=x,
            a=step.a,
            b=step.b,
            **gates,
            scale=K**-0.5,
            initial_state=step.state,
            out=o,
            ssm_state_indices=step.slots,
            use_qk_l2norm_in_kernel=True,
        )
        return norm(o)

    def prefill() -> Tensor:
        x = f.causal_conv1d_fn(
            step.mixed_qkv.transpose(0, 1),
            step.weight,
            None,
            activation="silu",
            conv_states=conv_state,
            has_initial_state=step.has_initial_state,
            cache_indices=step.slots,
            query_start_loc=step.cu_seqlens,
            seq_lens_cpu=list(step.lengths),
        ).transpose(0, 1)
        q, k, v = f.fused_qkv_split_gdn_prefill(x, H, H, HV, K, K, V)
        g, beta = f.fused_gdn_gating(step.A_log, step.a, step.b, step.dt_bias)
        o = f.chunk_gated_delta_rule(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            initial_state=step.state,
            initial_state_indices=step.slots,
            cu_seqlens=step.cu_seqlens,
            head_first=False,
            use_qk_l2norm_in_kernel=True,
        )[0]
        return norm(o)

    return decode if step.is_decode else prefill


def makers_of(folder: Path | None) -> tuple[dict[str, Maker], dict[str, str], list[str]]:
    """Ours and the engines' that are in the folder; their versions; why others are not."""
    found: dict[str, Maker] = {OURS: ours}
    versions, missing = {OURS: Ours.version()}, []
    for name, make in (("vllm", vllm), ("sglang", sglang)):
        if folder is None:
            missing.append(f"{name}: not measured: --engines names no folder")
            continue
        try:
            theirs = engines.kernels(name, folder)
        except ImportError as error:
            missing.append(f"{name}: not measured: {error}")
            continue
        found[NAMES[name]] = partial(make, theirs=theirs)
        versions[NAMES[name]] = engines.VERSIONS[name]
    return found, versions, missing


# ---------------------------------------------------------------------------------- measurements


def launches(call: Callable[[], Any], device: Device) -> int | None:
    """Kernels, copies and fills of one call; None on the CPU, and where the profiler sees none."""
    if not device.is_cuda:
        return None
    call()
    device.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        device.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profile.events() or ()) or None


def measure(
    sizes: Sizes, lengths: Sequence[int], device: Device, makers: dict[str, Maker], rounds: int
) -> Record:
    # The interpreter of Triton multiplies bfloat16 wrongly.
    dtype = torch.bfloat16 if device.is_cuda else torch.float16
    step = make_step(sizes, lengths, device.torch, dtype)
    expected = exact(step)
    rows: dict[str, Record] = {}
    replays: dict[str, Replay] = {}
    for name, maker in makers.items():
        # The first call writes its states, and vLLM's step its input.
        y, why = attempt(device, lambda: maker(step.copied())())  # noqa: B023
        if why is None:
            difference = relative(y[: expected.shape[0]], expected)
            rows[name] = {"error": difference}
            if not difference < GATE:
                why = f"o differs by {difference:.1e} from float64"
        if why is None:
            call = maker(step.copied())
            rows[name]["launches"], why = attempt(device, partial(launches, call, device))
        if why is None:
            replays[name], why = attempt(device, partial(Replay, call, device))
        if why is not None:
            replays.pop(name, None)
            rows[name] = {"skipped": why}
    for name, times in replay_times(replays, device, rounds, flush=True).items():
        rows[name]["time"] = statistics.median(times)
    return {
        "kind": "layer",
        "what": "decode" if step.is_decode else "prefill",
        "sequences": len(lengths),
        "tokens": sum(lengths),
        "heads": f"{sizes.H}/{sizes.HV}",
        "gates": "model",
        "results": rows,
    }


def tables(records: list[Any], names: Collection[str]) -> str:
    """Markdown, with the meaning that `LEGEND` tells."""
    lines = [
        f"| what | sequences | tokens | H / HV | {' | '.join(names)} |",
        f"|---|---|---|---|{'---|' * len(names)}",
    ]
    for record in records:
        cells = []
        for name in names:
            row = record["results"].get(name, {})
            count = row.get("launches")
            shown = "" if count is None else f" ({count})"
            cells.append(f"{row['time']:.1f}{shown}" if "time" in row else "-")
        head = [str(record[key]) for key in ("what", "sequences", "tokens", "heads")]
        lines.append(f"| {' | '.join([*head, *cells])} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--engines", type=Path, help="what `python -m benchmarks.engines` made")
    parser.add_argument("--heads", nargs="+", default=["16/32", "4/8"], metavar="H/HV")
    parser.add_argument("--tokens", type=int, default=8192, help="of a prefill")
    parser.add_argument("--prefills", type=int, nargs="*", default=[1, 8], help="sequences")
    parser.add_argument("--decodes", type=int, nargs="*", default=[64, 256], help="sequences")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--jsonl", type=Path, help="also append a record a row to this file")
    parser.add_argument("--commit", help="what the records say was measured (default: git's)")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU")
    options = parser.parse_args(arguments)
    device = device_for(options.dry_run)
    sizes = [Sizes(*map(int, heads.split("/"))) for heads in options.heads]
    if options.dry_run:
        sizes = [Sizes(1, 2, 16, 16)]
        options.tokens, options.prefills, options.decodes, options.rounds = 70, [1, 2], [3], 2
    makers, versions, missing = makers_of(options.engines)
    name = options.commit or commit()
    append_record(options.jsonl, header("benchmarks.layer", versions, missing, device, name))
    calls = [[options.tokens // N] * N for N in options.prefills]
    calls += [[1] * N for N in options.decodes]
    records = []
    for of in sizes:
        for lengths in calls:
            records.append(measure(of, lengths, device, makers, options.rounds))
            append_record(options.jsonl, records[-1])
    print(f"{LEGEND}\n\n{tables(records, makers)}\n")
    whys = [
        f"{name}, {record['what']}: {row['skipped']}"
        for record in records
        for name, row in record["results"].items()
        if "skipped" in row
    ]
    print("\n".join(dict.fromkeys([*missing, *whys])))


if __name__ == "__main__":
    main()
