"""The shapes that are measured, their gates and their random inputs, each list with its reason."""

import argparse
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

ACCURACY, SPEED, HOST, NUMERICS = "accuracy", "speed", "host", "numerics"
CHUNK = 64  # tokens of a chunk, for the counts below
DTYPES = ("bfloat16", "float16")  # that `--dtype` takes, of q, k and v


@dataclass(frozen=True)
class Case:
    """One row of the tables. `seqlens` set means packed: B = 1 and T is their sum."""

    name: str
    group: str
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    seqlens: tuple[int, ...] | None = None
    gate: str = "norm"  # logsigmoid(x) / gate_norm, masked by mask_p; or one of GATE_KINDS
    gate_norm: float = 1.0
    mask_p: float = 0.0  # fraction of (token, head) pairs whose g is 0
    initial_state: bool = False
    measures: tuple[str, ...] = (ACCURACY, SPEED)
    gates: str = "mild"  # the kind that its rows are of; "mild" also where a case has its own
    dtype: torch.dtype = torch.bfloat16

    @property
    def N(self) -> int:
        return self.B if self.seqlens is None else len(self.seqlens)

    @property
    def tokens(self) -> int:
        return self.B * self.T

    @property
    def longest(self) -> int:
        return self.T if self.seqlens is None else max(self.seqlens)

    @property
    def chunks(self) -> int:
        lengths = [self.T] * self.B if self.seqlens is None else list(self.seqlens)
        return sum(-(-length // CHUNK) for length in lengths)

    @property
    def family(self) -> tuple[object, ...]:
        """The sizes that an autotuner or a compiler sees: cases of one family share their
        kernels."""
        packed = self.seqlens is not None
        return (packed, self.H, self.HV, self.K, self.V, self.initial_state, self.dtype)

    @property
    def flops(self) -> float:
        """The least number of operations of the chunked form: three K x V products and four of the
        chunk's."""
        per_token_head = 6 * self.K * self.V + 4 * CHUNK * (self.K + self.V)
        return float(self.tokens * self.HV * per_token_head)

    @property
    def bytes(self) -> float:
        """The least number of bytes: every input read once, o and the final state written once."""
        size = self.dtype.itemsize
        token = size * (2 * self.H * self.K + 2 * self.HV * self.V) + 4 * 2 * self.HV
        states = (2 if self.initial_state else 1) * self.N * self.HV * self.K * self.V
        return float(self.tokens * token + 4 * states)


def floor_us(case: Case, rates: Mapping[str, Any]) -> float | None:
    """The least time of the case at the measured rates of this machine, if there are any."""
    if "flops_per_s" not in rates:
        return None
    return 1e6 * max(case.flops / rates["flops_per_s"], case.bytes / rates["bytes_per_s"])


@dataclass(frozen=True)
class Inputs:
    """The tensors every implementation gets; none is written to."""

    case: Case
    q: torch.Tensor  # [B, T, H, K], unit length along K
    k: torch.Tensor  # [B, T, H, K], unit length along K
    v: torch.Tensor  # [B, T, HV, V]
    g: torch.Tensor  # [B, T, HV] float32, natural log
    beta: torch.Tensor  # [B, T, HV] float32
    initial_state: torch.Tensor | None  # [N, HV, K, V] float32
    cu_seqlens: torch.Tensor | None  # [N + 1] int64

    @property
    def nbytes(self) -> int:
        tensors = (self.q, self.k, self.v, self.g, self.beta, self.initial_state)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def cut(total: int, parts: int, seed: int = 0) -> tuple[int, ...]:
    """`total` tokens cut into `parts` sequences of at least one token at random points."""
    points = sorted(random.Random(seed).sample(range(1, total), parts - 1))
    return tuple(b - a for a, b in zip([0, *points], [*points, total], strict=True))


class Random:
    """Seeded float32 draws on one device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.device)


# Kinds of gates, for any benchmark: "mild" forgets little, with a quarter of the heads nothing;
# "model" is a layer at initialisation, A in (0, 16) and time steps of 1e-3 to 1e-1; "strong"
# forgets nearly all from token to token; "none" nothing.
GATE_KINDS = ("mild", "model", "strong", "none")


def gate_parameters(kind: str, HV: int, rand: Random) -> tuple[torch.Tensor, torch.Tensor]:
    """A and dt_bias [HV] of gates of a kind: g = -A softplus(x + dt_bias) for normal x."""
    A, dt_bias = torch.zeros(2, HV, device=rand.device)
    if kind == "mild":
        A += 1 / 16
        A[::4] = 0
    elif kind == "model":
        A = rand.uniform(HV) * 16
        dt = 1e-3 * 100 ** rand.uniform(HV)
        dt_bias = dt + torch.log(-torch.expm1(-dt))
    elif kind == "strong":
        A += 10
    elif kind != "none":
        raise ValueError(f"kind must be one of {', '.join(GATE_KINDS)}, got {kind!r}")
    return A, dt_bias


def make_gates(kind: str, shape: tuple[int, ...], rand: Random) -> torch.Tensor:
    """g [.., HV] of a kind, float32, natural logarithms."""
    A, dt_bias = gate_parameters(kind, shape[-1], rand)
    return -A * F.softplus(rand.normal(*shape) + dt_bias)


def gate_kinds(text: str) -> tuple[str, ...]:
    """The kinds of gates that the option `--gates` names: the type of that option for argparse."""
    kinds = tuple(dict.fromkeys(text.split(",")))
    if unknown := [kind for kind in kinds if kind not in GATE_KINDS]:
        known = ",".join(GATE_KINDS)
        raise argparse.ArgumentTypeError(f"expected some of {known}, got {','.join(unknown)}")
    return kinds


def add_gates_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gates", type=gate_kinds, default=("mild",), metavar="KIND,...",
        help=f"kinds of gates, comma-separated, of {', '.join(GATE_KINDS)} (default: mild)",
    )  # fmt: skip


def gates_of(record: Mapping[str, Any]) -> str:
    """The kind of gates of a row; mild where it has none."""
    return str(record.get("gates", "mild"))


def labelled(case: str, gates: str) -> str:
    """The name of a row in a table."""
    return case if gates == "mild" else f"{case}, {gates} gates"


def label_of(record: Mapping[str, Any]) -> str:
    return labelled(record.get("case", ""), gates_of(record))


def kinds_among(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """The kinds of gates that there are rows of."""
    found = set(map(gates_of, records))
    return [kind for kind in GATE_KINDS if kind in found]


def _case_gates(case: Case, rand: Random) -> torch.Tensor:
    shape = case.B, case.T, case.HV
    if case.gate != "norm":
        return make_gates(case.gate, shape, rand)
    g = F.logsigmoid(rand.normal(*shape)) / case.gate_norm
    if case.mask_p > 0:
        g = g.masked_fill(rand.uniform(*shape) < case.mask_p, 0.0)
    return g


def with_gates(cases: Iterable[Case], kind: str) -> list[Case]:
    """The cases with gates of a kind. With "mild" a case keeps its own gates; with another kind,
    cases that exist for their gates are left out."""
    if kind == "mild":
        return list(cases)
    return [replace(case, gate=kind, gates=kind) for case in cases if case.group != "gates"]


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """The same tensors for a case's name on a device, whichever other cases are run."""
    rand = Random(zlib.crc32(case.name.encode()), device)
    q = F.normalize(rand.normal(case.B, case.T, case.H, case.K), dim=-1).to(case.dtype)
    k = F.normalize(rand.normal(case.B, case.T, case.H, case.K), dim=-1).to(case.dtype)
    v = rand.normal(case.B, case.T, case.HV, case.V).to(case.dtype)
    beta = rand.normal(case.B, case.T, case.HV).sigmoid()
    g = _case_gates(case, rand)
    state = rand.normal(case.N, case.HV, case.K, case.V) if case.initial_state else None
    cu_seqlens = None
    if case.seqlens is not None:
        lengths = torch.tensor([0, *case.seqlens], dtype=torch.int64)
        cu_seqlens = lengths.cumsum(0).to(device)
    return Inputs(case, q, k, v, g, beta, state, cu_seqlens)


# The shapes in which a published CUDA port of this operator was compared with FLA, H = HV and
# K = V = D: small, odd and many-sequence ones. Padded: B, T, H, D, gate_norm, mask_p.
PADDED = (
    (1, 63, 1, 64, 1.0, 0.0),
    (2, 500, 3, 60, 1.0, 0.0),
    (2, 1000, 3, 64, 1.0, 0.5),
    (3, 1024, 4, 100, 0.1, 0.0),
    (4, 1024, 4, 128, 1.0, 0.0),
    (2, 1500, 4, 128, 10.0, 0.0),
    (4, 2048, 8, 64, 1.0, 0.0),
    (8, 512, 8, 64, 1.0, 0.0),
    (16, 512, 8, 64, 1.0, 0.0),
    (32, 256, 8, 64, 1.0, 0.0),
    (64, 128, 8, 64, 1.0, 0.0),
    (8, 512, 8, 128, 1.0, 0.0),
    (16, 256, 8, 128, 1.0, 0.0),
    (32, 128, 8, 128, 1.0, 0.0),
    (64, 64, 8, 128, 1.0, 0.0),
)
# Packed: sequences, total tokens, H, D, mask_p. Only the totals were published; the cuts are ours.
PACKED = (
    (1, 15, 4, 60, 0.0),
    (3, 1000, 4, 64, 0.0),
    (3, 1000, 4, 64, 0.5),
    (5, 2000, 4, 100, 0.0),
    (1, 8192, 4, 60, 0.0),
    (8, 4096, 4, 64, 0.0),
    (16, 8192, 4, 64, 0.0),
    (32, 8192, 4, 64, 0.0),
    (64, 8192, 4, 64, 0.0),
    (32, 4096, 4, 128, 0.0),
    (64, 6656, 4, 128, 0.0),
    (128, 4608, 4, 64, 0.5),
)

# Prefill of models in use: H, HV, sequence lengths; few long, two unequal, many short.
ONE_32K, ONE_8K, ONE_2K = (32768,), (8192,), (2048,)
TWO_16K, UNEQUAL_32K, UNEQUAL_8K = (16384,) * 2, (4096, 28672), (1024, 7168)
FOUR_8K, EIGHT_4K, EIGHT_1K = (8192,) * 4, (4096,) * 8, (1024,) * 8
EVERY = (ONE_32K, ONE_8K, ONE_2K, TWO_16K, UNEQUAL_32K, UNEQUAL_8K, FOUR_8K, EIGHT_4K, EIGHT_1K)
PREFILL = (
    (16, 32, (ONE_32K, ONE_8K, ONE_2K, TWO_16K)),
    (16, 64, EVERY),
    (2, 8, EVERY),
    (4, 16, (ONE_32K, ONE_8K, ONE_2K, FOUR_8K, EIGHT_4K, EIGHT_1K)),
)

# The full table, with the head counts and sequences of FlashQLA's own benchmark: H, HV of common
# models at one, two, four and eight GPUs, and batches of a server.
HEADS = ((2, 8), (4, 16), (8, 32), (16, 64), (16, 32), (8, 24), (16, 48), (16, 16), (32, 32))
MIXES = (
    *((32768,), (16384,), (8192,), (4096,), (2048,)),
    *((28672, 4096), (24576, 8192), (16384, 16384), (8192, 24576), (4096, 28672)),
    *((12288, 4096), (6144, 2048), (4096, 4096), (2048, 6144), (1024, 7168)),
    *((8192,) * 4, (4096,) * 8, (2048,) * 4, (1024,) * 8),
)

# The uneven table: lengths that serving engines send, at the head counts of common models.
UNEVEN_HEADS = ((16, 64), (16, 32), (8, 16), (4, 16), (2, 8))
UNEVEN_SEQUENCES = (16, 32, 48)  # of lengths drawn log-uniformly
UNEVEN_SHARES = (0.5, 0.75)  # of all tokens, in the longest sequence of nine
UNEVEN_BUDGETS = (8192, 16384)  # tokens of a batch of chunked prefill
UNEVEN_BATCHES = 6  # of each budget

# Lengths around a chunk's edges and far from them, 1 to 1155.
RAGGED = (1, 15, 63, 64, 65, 127, 128, 300, 577, 1155)

# Head sizes of a layer in common use, K 256 and V 512: H, B, T.
WIDE_HEADS = ((4, 1, 4096), (4, 4, 2048), (8, 1, 4096), (8, 4, 2048))

# Small cases, in which the host's time is the time of a call.
HOST_CASES = (
    "padded B1 T63 H1 D64",
    "padded B2 T500 H3 D60",
    "padded B4 T1024 H4 D128",
    "packed 1 in 15 H4 D60",
    "packed 3 in 1000 H4 D64",
    "prefill 2/8 1x2048",
    "prefill 16/32 1x2048",
)

# Cases in which the dataflows are compared element by element: gates of all kinds, long and ragged.
NUMERICS_CASES = (
    "gates mixed 1x2048",
    "gates mixed ragged 1..1155",
    "gates model init 1x2048",
    "gates strong 1x2048",
    "prefill 16/32 1x8192",
    "padded B2 T500 H3 D60",
)

# One call of each with an empty compiler cache, and again with a filled one.
FIRST_CALL_CASES = (
    "packed 3 in 1000 H4 D64",
    "prefill 16/32 1x2048",
    "wide H4 K256 V512 1x4096",
)


def lengths_name(seqlens: tuple[int, ...]) -> str:
    if len(set(seqlens)) == 1:
        return f"{len(seqlens)}x{seqlens[0]}"
    return "+".join(map(str, seqlens))


def _padded() -> Iterator[Case]:
    for B, T, H, D, gate_norm, mask_p in PADDED:
        name = f"padded B{B} T{T} H{H} D{D}"
        name += f" norm{gate_norm:g}" if gate_norm != 1.0 else ""
        name += f" mask{mask_p:g}" if mask_p else ""
        yield Case(name, "padded", B, T, H, H, D, D, gate_norm=gate_norm, mask_p=mask_p)


def _packed() -> Iterator[Case]:
    for parts, total, H, D, mask_p in PACKED:
        name = f"packed {parts} in {total} H{H} D{D}" + (f" mask{mask_p:g}" if mask_p else "")
        seqlens = cut(total, parts)
        yield Case(name, "packed", 1, total, H, H, D, D, seqlens, mask_p=mask_p)


def _prefill() -> Iterator[Case]:
    for H, HV, lists in PREFILL:
        for seqlens in lists:
            name = f"prefill {H}/{HV} {lengths_name(seqlens)}"
            yield Case(
                name, "prefill", 1, sum(seqlens), H, HV, 128, 128, seqlens,
                gate="mild", initial_state=True,
            )  # fmt: skip


def _gates() -> Iterator[Case]:
    for name, gate in (("mixed", "mild"), ("model init", "model"), ("strong", "strong")):
        for label, seqlens in (("1x2048", ONE_2K), ("ragged 1..1155", RAGGED)):
            yield Case(
                f"gates {name} {label}", "gates", 1, sum(seqlens), 4, 8, 128, 128, seqlens,
                gate=gate, initial_state=True, measures=(ACCURACY,),
            )  # fmt: skip
    odd = "gates mixed 2x500 D60"
    yield Case(odd, "gates", 2, 500, 3, 3, 60, 60, gate="mild", measures=(ACCURACY,))


def _wide() -> Iterator[Case]:
    for H, B, T in WIDE_HEADS:
        name = f"wide H{H} K256 V512 {B}x{T}"
        yield Case(name, "wide", B, T, H, H, 256, 512, gate="mild")


def _full() -> list[Case]:
    return [
        Case(
            f"full {H}/{HV} {lengths_name(seqlens)}", "full", 1, sum(seqlens), H, HV, 128, 128,
            seqlens, gate="mild", initial_state=True, measures=(SPEED,),
        )
        for H, HV in HEADS
        for seqlens in MIXES
    ]  # fmt: skip


def log_uniform(parts: int, least: int, most: int, seed: int) -> tuple[int, ...]:
    """`parts` lengths, their logarithms drawn uniformly from `least` to `most`."""
    rng = random.Random(seed)
    return tuple(round(least * (most / least) ** rng.random()) for _ in range(parts))


def scheduled(budget: int, batches: int, seed: int) -> list[tuple[int, ...]]:
    """Batches of chunked prefill: prompts of 64 to 16384 tokens (log-uniform) in the order of their
    arrival, each batch filled up to `budget` tokens. Its last prompt is cut there, and continues in
    the next batch."""
    prompts = iter(log_uniform(1000, 64, 16384, seed))
    left = 0  # tokens of the prompt that was cut
    found = []
    for _ in range(batches):
        batch: list[int] = []
        while sum(batch) < budget:
            length = left or next(prompts)
            taken = min(length, budget - sum(batch))
            batch.append(taken)
            left = length - taken
        found.append(tuple(batch))
    return found


def uneven_mixes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and lengths of each mix of the uneven table."""
    for parts in UNEVEN_SEQUENCES:
        yield f"log-uniform {parts}", log_uniform(parts, 32, 2048, seed=parts)
    for share in UNEVEN_SHARES:
        others = log_uniform(8, 64, 2048, seed=8)
        longest = round(sum(others) * share / (1 - share))
        yield f"longest {share:g} of 9", (*others[:4], longest, *others[4:])
    for budget in UNEVEN_BUDGETS:
        for number, lengths in enumerate(scheduled(budget, UNEVEN_BATCHES, seed=budget), 1):
            yield f"batch {budget} no {number}", lengths


def _uneven() -> list[Case]:
    return [
        Case(
            f"uneven {H}/{HV} {name}", "uneven", 1, sum(seqlens), H, HV, 128, 128, seqlens,
            gate="mild", initial_state=True, measures=(SPEED,),
        )
        for H, HV in UNEVEN_HEADS
        for name, seqlens in uneven_mixes()
    ]  # fmt: skip


def all_cases(table: str = "main") -> list[Case]:
    """Every case of a table (of `TABLES`); cases that share an implementation's tuning come
    together.

    main: all kinds of shapes and all measurements, the most important first. full: every count of
    heads with every mix of sequences, only times. uneven: lengths that differ as a server's do,
    only times.
    """
    return TABLES[table]()


def _main() -> list[Case]:
    published = [*_padded(), *_packed()]

    def of_head_size(*sizes: int) -> list[Case]:
        chosen = [case for case in published if case.K in sizes]
        return sorted(chosen, key=lambda case: (case.K, case.seqlens is not None, case.H))

    *gates, odd_gates = _gates()
    cases = [*gates, *_prefill(), *of_head_size(128), *of_head_size(64), *_wide()]
    cases += [*of_head_size(60, 100), odd_gates]
    also = {HOST: HOST_CASES, NUMERICS: NUMERICS_CASES}
    more = {x.name: [kind for kind, names in also.items() if x.name in names] for x in cases}
    return [replace(x, measures=(*x.measures, *more[x.name])) for x in cases]


TABLES: dict[str, Callable[[], list[Case]]] = {"main": _main, "full": _full, "uneven": _uneven}


def tiny(case: Case) -> Case:
    """A case of the same kind, small enough for a CPU, in float32."""
    H = min(case.H, 2)
    small = replace(
        case, B=min(case.B, 2), T=min(case.T, 70), H=H, HV=H * min(case.HV // case.H, 2),
        K=min(case.K, 16), V=min(case.V, 32), dtype=torch.float32,
    )  # fmt: skip
    if case.seqlens is None:
        return small
    seqlens = tuple(min(length, 70) for length in case.seqlens[:3])
    return replace(small, B=1, T=sum(seqlens), seqlens=seqlens)
