"""ReplaySSM on SGLang's rings: our functions and SGLang's, on the same tensors.

    python -m benchmarks.rings --engines FOLDER [--sequences 64 256] [--rounds 30] [--jsonl FILE]
        [--dry-run]

The calls are one token a sequence, 4 drafts a sequence, and the fold of half a ring; 16/32 heads,
K = V = 128, rings of 16 rows, bfloat16 tokens, pools of float32 and of bfloat16. FOLDER is what
`python -m benchmarks.engines` makes. Without SGLang's files there, its cells are "-", and the
reason is printed.

A time is the median of replays of a CUDA graph, ours and SGLang's in turns, divided by the number
of layers in the graph. A graph has as many layers as exceed the L2 cache, at least 2 and at most 8.
A fold is one call for all layers. Before each replay of a fold its cursors are set again, which is
not timed.

Errors are those of the last layer, on fresh tensors whose o is NaN before the call, against the
float64 recurrence: o; the records u and k of the tokens; and the states that are folded. A state
that a call does not fold has to keep its bits. Another call on equal tensors shows whether all
results are equal. An implementation with a wrong o or state is not timed.
--dry-run times our functions at toy sizes on the CPU.
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import engines
from benchmarks.decode import BEYOND_L2
from benchmarks.layer_calls import Sizes
from benchmarks.machine import commit, header
from benchmarks.measure import (
    GATE,
    Device,
    Record,
    Replay,
    attempt,
    device_for,
    device_line,
    first_line,
    in_a_row,
    relative,
    replay_times,
)
from benchmarks.peers import Ours
from benchmarks.report import append_record
from benchmarks.shapes import Random, gate_parameters
from gdn_triton.integrations.sglang import rings
from gdn_triton.reference.rings import Ring, replayed, ring_tokens

L = 16  # rows of a ring
DRAFTS = 4
ONE, SEVERAL, FOLD = "one token", f"{DRAFTS} drafts", "fold"
OURS, SGLANG = "gdn_triton", "SGLang"
LEGEND = (
    f"Microseconds of a call for one layer in a CUDA graph, rings of {L} rows; errors against "
    "float64,\nand whether the results of two calls are equal."
)

Functions = dict[str, Callable[..., Any]]  # by the kind of call
OWN: Functions = {
    ONE: rings.fused_recurrent_gdn_replayssm_decode,
    SEVERAL: rings.gdn_replayssm_spec_decode,
    FOLD: rings.commit_gdn_replayssm_circular,
}
THEIRS = {
    ONE: "fused_recurrent_linear_replayssm_decode",
    SEVERAL: "gdn_replayssm_spec_decode",
    FOLD: "commit_gdn_replayssm_circular",
}


class Operands(NamedTuple):
    """The tensors of a call: N sequences of T tokens; sequence n has slot n and ring n."""

    q: Tensor  # [N, T, H, K]
    k: Tensor
    v: Tensor  # [N, T, HV, V]
    a: Tensor  # [N, T, HV]
    b: Tensor
    A_log: Tensor  # [HV]
    dt_bias: Tensor
    state: Tensor  # [layers, N, HV, V, K]
    d: Tensor  # [layers, N, HV, L, V]
    k_rows: Tensor  # [layers, N, H, L, K]
    g_rows: Tensor  # [layers, N, HV, L], float32
    d_low: Tensor | None
    k_low: Tensor | None
    slots: Tensor  # [N]
    counts: Tensor
    bases: Tensor
    flags: Tensor
    out: Tensor  # [N, T, HV, V], of the last layer; NaN before the call

    def fresh(self) -> "Operands":
        return Operands(*(None if x is None else x.clone() for x in self))  # type: ignore[arg-type]


def make_operands(
    what: str, sizes: Sizes, N: int, layers: int, pool: torch.dtype, device: torch.device
) -> Operands:
    """The rows of a ring without a record hold finite numbers, because SGLang multiplies them by
    0."""
    H, HV, K, V = sizes
    rand = Random(0, device)
    # The interpreter of Triton multiplies bfloat16 wrongly.
    tokens = torch.bfloat16 if device.type == "cuda" else torch.float16
    T = 1 if what == ONE else DRAFTS
    A, dt_bias = gate_parameters("model", HV, rand)
    n = torch.arange(N, device=device, dtype=torch.int32)
    counts = {ONE: n % L, SEVERAL: n % (L - 2 * DRAFTS + 1), FOLD: torch.full_like(n, L // 2)}
    records: list[Tensor] = []
    lows: list[Tensor | None] = []
    rows = 0.3 * rand.normal(layers, N, HV, L, V)
    keys = torch.nn.functional.normalize(rand.normal(layers, N, H, L, K), dim=-1)
    for x in (rows, keys):
        # Without low parts, the rings have the dtype of the pool.
        high = x.to(pool if what == ONE else tokens)
        records.append(high)
        lows.append(None if what == ONE else (x - high.float()).to(tokens))
    return Operands(
        q=rand.normal(N, T, H, K).to(tokens),
        k=rand.normal(N, T, H, K).to(tokens),
        v=rand.normal(N, T, HV, V).to(tokens),
        a=rand.normal(N, T, HV).to(tokens),
        b=rand.normal(N, T, HV).to(tokens),
        A_log=A.log(),
        dt_bias=dt_bias,
        state=(0.3 * rand.normal(layers, N, HV, V, K)).to(pool),
        d=records[0],
        k_rows=records[1],
        g_rows=-0.2 * rand.uniform(layers, N, HV, L),
        d_low=lows[0],
        k_low=lows[1],
        slots=n,
        counts=counts[what],
        bases=torch.zeros_like(n) if what == ONE else n * 5 % L,
        flags=torch.full((N,), what == FOLD, device=device, dtype=torch.int8),
        out=torch.full((N, T, HV, V), math.nan, device=device, dtype=tokens),
    )


def call_of(what: str, function: Callable[..., Any], x: Operands) -> Callable[[], None]:
    """The calls of all layers, with the arguments that SGLang's layers give."""
    scale = x.q.shape[-1] ** -0.5
    if what == FOLD:
        return partial(
            function,
            checkpoint_state=x.state,
            d_cache=x.d,
            k_cache=x.k_rows,
            g_cache=x.g_rows,
            d_residual_cache=x.d_low,
            k_residual_cache=x.k_low,
            state_batch_indices=x.slots,
            replay_indices=x.slots.long(),
            write_pos=x.counts,
            cache_base=x.bases,
            is_flush=x.flags,
            accept_lens=torch.full_like(x.slots, DRAFTS),
            null_block_id=-1,
        )
    calls = []
    T = x.q.shape[1]
    shared: dict[str, Any] = {"A_log": x.A_log, "dt_bias": x.dt_bias, "scale": scale}
    if what == ONE:
        shared |= {
            "mixed_qkv": torch.cat([y.flatten(1) for y in (x.q, x.k, x.v)], -1),
            "a": x.a[:, 0],
            "b": x.b[:, 0],
            "out": x.out,
            "ssm_state_indices": x.slots,
            "write_pos": x.counts,
            "force_flush": None,
            "use_qk_l2norm_in_kernel": True,
        }
    else:
        tokens = {"q": x.q, "k": x.k, "v": x.v, "a": x.a, "b": x.b, "out": x.out}
        shared |= {name: y.flatten(0, 1) for name, y in tokens.items()} | {
            "query_start_loc": T * torch.arange(len(x.slots) + 1, device=x.q.device).int(),
            "ssm_state_indices": x.slots,
            "replay_indices": x.slots.long(),
            "write_pos": x.counts,
            "cache_base": x.bases,
            "is_flush": x.flags,
            "beta_cache": None,
            "max_cache_len": L,
            "max_spec_len": T,
            "null_block_id": -1,
            "launch_mode": "verify",
        }
    for i in range(len(x.state)):
        own: dict[str, Any] = {"d_cache": x.d[i], "k_cache": x.k_rows[i], "g_cache": x.g_rows[i]}
        if what == ONE:
            own["initial_state"] = x.state[i]
        else:
            assert x.d_low is not None and x.k_low is not None
            own |= {"checkpoint_state": x.state[i]}
            own |= {"rawv_cache": x.d_low[i], "rawk_cache": x.k_low[i]}
        calls.append(partial(function, **shared, **own))
    return in_a_row(calls)


# ------------------------------------------------------------------------------------- accuracy


def folds(what: str, x: Operands) -> Tensor:
    """[N]: whether a call folds the ring of a sequence."""
    return (x.counts == L - 1) if what == ONE else x.flags != 0


def exact(what: str, x: Operands) -> dict[str, Tensor]:
    """The results of the last layer in float64: o and u [N, T, HV, V], k [N, T, H, K] and the
    state [N, HV, V, K]. A fold has only the state."""
    found: dict[str, list[Tensor]] = {}
    for n, (count, base) in enumerate(zip(x.counts.tolist(), x.bases.tolist(), strict=True)):
        ring = Ring(
            u=x.d[-1, n],
            k=x.k_rows[-1, n],
            g=x.g_rows[-1, n],
            u_low=x.d_low[-1, n] if x.d_low is not None else None,
            k_low=x.k_low[-1, n] if x.k_low is not None else None,
        )
        state = replayed(x.state[-1, n].double(), ring, base, count)
        values = {"state": state}
        if what != FOLD:
            y = ring_tokens(
                q=x.q[n].double(),
                k=x.k[n].double(),
                v=x.v[n].double(),
                a=x.a[n].double(),
                b=x.b[n].double(),
                A_log=x.A_log.double(),
                dt_bias=x.dt_bias.double(),
                state=state,
                scale=x.q.shape[-1] ** -0.5,
                use_qk_l2norm=True,
            )
            values = {"o": y.o, "u": y.u, "k": y.k, "state": y.state}
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return {name: torch.stack(values) for name, values in found.items()}


def errors_of(what: str, before: Operands, x: Operands, truth: dict[str, Tensor]) -> Record:
    """The relative errors of the last layer of `x`, the tensors after a call on a copy of
    `before`."""
    folded = folds(what, before)
    if not torch.equal(x.state[:, ~folded], before.state[:, ~folded]):
        raise RuntimeError("a state changed whose ring was not to be folded")
    found: Record = {}
    if what != FOLD:
        found["o"] = relative(x.out, truth["o"])
        T = x.q.shape[1]
        n = torch.arange(len(folded), device=folded.device)[:, None]
        rows = (before.bases + before.counts)[:, None] + torch.arange(T, device=n.device)
        for name, high, low in (("u", x.d, x.d_low), ("k", x.k_rows, x.k_low)):
            written = high.double() if low is None else high.double() + low.double()
            records = written[-1].transpose(1, 2)[n, rows.long() % L]
            found[name] = relative(records[~folded], truth[name][~folded])
    elif (
        x.counts.any()
        or x.flags.any()
        or not torch.equal(x.bases, (before.bases + before.counts) % L)
    ):
        raise RuntimeError("the cursors after the fold are not those of empty rings")
    if folded.any():
        found["state"] = relative(x.state[-1, folded], truth["state"][folded])
    wrong = {name: error for name, error in found.items() if not error < GATE}
    if wrong:
        raise RuntimeError(f"differs from float64: {wrong}")
    return found


def same_bits(x: Operands, y: Operands) -> bool:
    """Bytes are compared, because NaN differs from itself: a fold leaves o as it is."""
    pairs = zip(x, y, strict=True)
    return all(
        a is None or b is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in pairs
    )


# ---------------------------------------------------------------------------------- measurements


def functions_of(folder: Path | None) -> tuple[dict[str, Functions], dict[str, str], list[str]]:
    """Ours and SGLang's if the folder has them; their versions; why SGLang's are missing."""
    versions = {OURS: Ours.version()}
    if folder is None:
        return {OURS: OWN}, versions, [f"{SGLANG}: not measured: --engines names no folder"]
    try:
        theirs = engines.kernels("sglang", folder)
    except ImportError as error:
        return {OURS: OWN}, versions, [f"{SGLANG}: not measured: {first_line(error)}"]
    versions[SGLANG] = engines.VERSIONS["sglang"]
    named = {what: theirs[name] for what, name in THEIRS.items()}
    return {OURS: OWN, SGLANG: named}, versions, []


def measure(
    what: str,
    sizes: Sizes,
    N: int,
    pool: torch.dtype,
    device: Device,
    functions: dict[str, Functions],
    rounds: int,
) -> Record:
    size = N * sizes.HV * sizes.K * sizes.V * pool.itemsize
    layers = max(2, min(8, BEYOND_L2 // size + 1)) if device.is_cuda else 2
    given = make_operands(what, sizes, N, layers, pool, device.torch)
    truth = exact(what, given)
    rows: dict[str, Record] = {}
    replays: dict[str, Replay] = {}

    def once(function: Callable[..., Any]) -> Operands:
        x = given.fresh()
        call_of(what, function, x)()
        return x

    def compared(function: Callable[..., Any]) -> Record:
        x = once(function)
        errors = errors_of(what, given, x, truth)
        return {"errors": errors, "same bits": same_bits(x, once(function))}

    def replay_of(function: Callable[..., Any]) -> Replay:
        x = given.fresh()

        def set_again() -> None:
            for field in ("counts", "bases", "flags"):
                getattr(x, field).copy_(getattr(given, field))

        return Replay(call_of(what, function, x), device, set_again if what == FOLD else None)

    for name, functions_of_one in functions.items():
        function = functions_of_one[what]
        row, why = attempt(device, partial(compared, function))
        if why is None:
            replays[name], why = attempt(device, partial(replay_of, function))
        if why is not None:
            replays.pop(name, None)
        rows[name] = row if why is None else {"skipped": why}
    for name, times in replay_times(replays, device, rounds, flush=True).items():
        rows[name]["time"] = statistics.median(times) / layers
    return {
        "kind": "rings",
        "what": what,
        "states": str(pool).removeprefix("torch."),
        "sequences": N,
        "layers": layers,
        "heads": f"{sizes.H}/{sizes.HV}",
        "results": rows,
    }


def table(records: Sequence[Record]) -> str:
    """Markdown, with the meaning that `LEGEND` tells."""
    names = (OURS, SGLANG)
    columns = ["call", "states", "sequences", *(f"{name}: us" for name in names)]
    columns += [f"{name}: {what}" for name in names for what in ("error", "equal bits")]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for record in records:
        found = [record["results"].get(name, {}) for name in names]
        cells = [str(record[key]) for key in ("what", "states", "sequences")]
        cells += [f"{row['time']:.1f}" if "time" in row else "-" for row in found]
        for row in found:
            errors = (f"{name} {error:.1e}" for name, error in row.get("errors", {}).items())
            cells.append(", ".join(errors) or "-")
            cells.append({True: "yes", False: "no"}.get(row.get("same bits"), "-"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--engines", type=Path, help="what `python -m benchmarks.engines` made")
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--jsonl", type=Path, help="also append a record a row to this file")
    parser.add_argument("--commit", help="what the records say was measured (default: git's)")
    parser.add_argument("--dry-run", action="store_true", help="ours at toy sizes on the CPU")
    options = parser.parse_args(arguments)
    if options.dry_run and options.engines is not None:
        parser.error("--dry-run times our functions alone, and has no --engines")
    device = device_for(options.dry_run)
    sizes = Sizes(16, 32)
    pools = (torch.float32, torch.bfloat16)
    if options.dry_run:
        # As for the tokens, the CPU has float16 in the place of bfloat16.
        sizes, pools = Sizes(1, 2, 16, 16), (torch.float32, torch.float16)
        options.sequences, options.rounds = [17], 2
    functions, versions, missing = functions_of(options.engines)
    name = options.commit or commit()
    append_record(options.jsonl, header("benchmarks.rings", versions, missing, device, name))
    records = []
    with torch.no_grad():
        for what, pool, N in itertools.product(OWN, pools, options.sequences):
            found = measure(what, sizes, N, pool, device, functions, options.rounds)
            records.append(found)
            append_record(options.jsonl, found)
    shown = ", ".join(f"{x} {version}" for x, version in versions.items())
    print(f"{device_line(device)}, commit {name}, {shown}\n\n{LEGEND}\n\n{table(records)}\n")
    whys = [
        f"{x}, {record['what']}, {record['states']}: {row['skipped']}"
        for record in records
        for x, row in record["results"].items()
        if "skipped" in row
    ]
    print("\n".join([*missing, *whys]))


if __name__ == "__main__":
    main()
