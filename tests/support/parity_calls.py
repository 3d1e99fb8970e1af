"""Calls of the forward: options, inputs that fit them, and random calls by number.

A random call is drawn in two parts. The variant is what Triton compiles its kernels for: sizes,
heads, the number of sequences, options, dtypes and strides. The values are lengths, gates and the
contents of all tensors. Consecutive numbers may share a variant (`alike` of `random_call`), because
a kernel takes far longer to compile than to run. Most calls are short, so that many of them run in
a time; every eighth has sequences of up to 2500 tokens.
"""

import math
import random
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from helpers import BF16, FP16, FP32, FP64, Case, Inputs, make_inputs, unit_rows
from torch import Tensor

from gdn_triton.constants import RCP_LN2


@dataclass(frozen=True)
class Options:
    """The options of a call, apart from its tensors."""

    l2norm: bool = False
    sigmoid: bool = False
    negative: bool = False
    gate: bool = False
    bias: bool = False
    with_state: bool = True
    v_first: bool = False
    scale: float | None = None


class Call(NamedTuple):
    """Inputs with the parameters of their gate."""

    case: Case
    options: Options
    x: Inputs
    A_log: Tensor | None
    dt_bias: Tensor | None
    told: tuple[int, ...] | None = None  # cu_seqlens_cpu

    def to(self, device: str) -> "Call":
        """Values only: strides and what lies between them may change."""
        names = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")
        moved = {n: y.to(device) for n in names if (y := getattr(self.x, n)) is not None}
        A_log, dt_bias = (y if y is None else y.to(device) for y in (self.A_log, self.dt_bias))
        return self._replace(x=self.x.but(**moved, around=[]), A_log=A_log, dt_bias=dt_bias)


def make_call(
    case: Case,
    dtype: torch.dtype,
    device: str,
    options: Options,
    *,
    seed: int = 0,
    index_dtype: torch.dtype = torch.int32,
) -> Call:
    """Inputs that fit the options: raw ones for those that the kernel activates or normalises."""
    x = make_inputs(case, dtype, device, seed=seed, raw=True, index_dtype=index_dtype)
    if not options.l2norm:
        x = x.but(k=make_inputs(case, dtype, device, seed=seed).k)
    if not options.sigmoid:
        x = x.but(beta=x.beta.sigmoid())
    A_log = dt_bias = None
    if options.gate:
        generator = torch.Generator().manual_seed(seed + 1)
        A_log = torch.randn(case.HV, generator=generator).to(device)
        if options.bias:
            dt_bias = torch.randn(case.HV, generator=generator).to(device)
    else:
        x = x.but(g=-x.g.abs())
    return Call(case, options, x, A_log, dt_bias)


# ------------------------------------------------------------------------------------- random calls

# The sides of a chunk of 64 tokens, of its blocks of 16, and of two chunks.
LENGTHS = (0, 1, 2, 7, 15, 16, 17, 31, 33, 48, 63, 64, 65, 96, 127, 128, 129, 191, 193, 300)


# (K, V) other than 128 and 128, which has kernels of its own: for the kernels of K up to 64, up to
# 128 and up to 256, whole tiles of 64 channels and less, V below, at and past K.
SIZES = (
    *((64, 64), (64, 128), (8, 8), (40, 200), (128, 64), (128, 256), (96, 192), (72, 40)),
    *((256, 256), (256, 512), (192, 128), (136, 72), (256, 64)),
)

# Sequences of a packed call.
COUNTS = (1, 2, 3, 5, 9)

# More tokens than a call has.
ROOM = 24576

# Tokens times channels of a long call at most, for which the specification takes 3 GB.
MOST_ELEMENTS = 1 << 25


def random_lengths(rng: random.Random, most: int, count: int | None = None) -> tuple[int, ...]:
    """The lengths of `count` sequences, or of a random number of them."""
    edges = [length for length in LENGTHS if length <= most]
    count = count or rng.choice(COUNTS)
    return tuple(rng.choice((rng.choice(edges), rng.randint(0, most))) for _ in range(count))


def random_sizes(number: int, sizes: str) -> tuple[int, int]:
    rng = random.Random(-1 - number)  # of its own: the rest of a case is the same at any size
    other = sizes == "others" or (sizes == "all" and rng.random() < 0.5)
    return rng.choice(SIZES) if other else (128, 128)


def random_options(rng: random.Random) -> Options:
    def coin() -> bool:
        return rng.random() < 0.5

    sigmoid, gate = coin(), coin()
    return Options(
        l2norm=coin(),
        sigmoid=sigmoid,
        negative=sigmoid and coin(),
        gate=gate,
        bias=gate and coin(),
        with_state=coin(),
        v_first=coin(),
        scale=rng.choice((None, None, 1.0, -0.3)),
    )


class Variant(NamedTuple):
    """What kernels are compiled for. spare: as in `Case`. layouts: of q, k and v. sides: the dtype
    and the layout of g and of beta. room: the tokens that a head of them has memory for, where
    heads are outside: strides that depend on T would make a variant of every length."""

    H: int
    HV: int
    K: int
    V: int
    packed: bool
    N: int
    spare: int
    options: Options
    dtype: torch.dtype
    index: torch.dtype
    layouts: tuple[str, str, str]
    sides: tuple[tuple[torch.dtype, str], tuple[torch.dtype, str]]
    room: int
    state: torch.dtype


def random_variant(number: int, small: bool, sizes: str = "all") -> Variant:
    """`sizes`: "128" for K = V = 128, "others" for all but that, or "all"."""
    rng = random.Random(f"variant {number}")
    K, V = random_sizes(number, sizes)
    H = rng.choice((1, 2) if small else (1, 1, 2, 3, 4))
    packed = rng.random() < 0.6

    def side() -> tuple[torch.dtype, str]:
        dtype = rng.choice((FP32, FP32, FP16, BF16, FP64))
        return dtype, rng.choice(("dense", "gaps", "heads first"))

    q, k, v = (rng.choice(("as it is", "dense", "heads first", "shifted")) for _ in range(3))
    return Variant(
        H=H,
        HV=H * rng.choice((1, 2) if small else (1, 2, 2, 3, 4, 8)),
        K=K,
        V=V,
        packed=packed,
        N=rng.choice(COUNTS if packed else (1, 2, 3)),
        # 8: rows that TMA can read; 3: rows aligned to nothing.
        spare=rng.choice((0, 8, 8, 3)),
        options=random_options(rng),
        dtype=rng.choice((BF16, FP16)),
        index=rng.choice((torch.int32, torch.int64)),
        layouts=(q, k, v),
        sides=(side(), side()),
        room=rng.choice((ROOM, ROOM + 1)),
        state=rng.choice((FP32, FP32, FP16, BF16, FP64)),
    )


def longest(number: int, small: bool, variant: Variant) -> int:
    """The tokens of a sequence at most."""
    most = {0: 2500, 4: 700}.get(number % 8, 300)
    channels = variant.N * variant.HV * max(variant.K, variant.V)
    return 130 if small else min(most, MOST_ELEMENTS // channels)


def random_case(number: int, small: bool, variant: Variant) -> Case:
    rng = random.Random(f"lengths {number}")
    most = longest(number, small, variant)
    names = ("H", "HV", "K", "V", "spare")
    given: dict[str, Any] = {name: getattr(variant, name) for name in names}
    given |= {"chunk_size": 64}
    if variant.packed:
        orphans = rng.choice((0, 0, 1, 64, 70))
        lengths = random_lengths(rng, most, variant.N)
        return Case("packed", "", lengths=lengths, orphans=orphans, **given)
    edges = [length for length in LENGTHS if 0 < length <= most]
    T = rng.choice((rng.choice(edges), rng.randint(1, most)))
    return Case("padded", "", T=T, B=variant.N, **given)


# Log2 units that a chunk may decay by before the CUDA forward leaves some of it in its triangles.
FRAME = {BF16: 96.0, FP16: 8.0}


def decay_of(kind: str, g: Tensor, rng: random.Random, frame: float) -> Tensor:
    """The gates [B, T] of one head, of the given kind, made from mild random gates."""
    T = g.shape[1]
    token = torch.arange(T, device=g.device)
    # A chunk, or the 16 tokens of a block, just inside of the frame or just outside.
    edge = -(frame + rng.choice((-0.1, 0.1))) / RCP_LN2
    match kind:
        case "mild":
            return g
        case "none":
            return torch.zeros_like(g)
        case "strong":
            return 30 * g
        case "model":  # as a layer is initialised: -A softplus(a + dt_bias)
            dt = math.exp(rng.uniform(math.log(1e-3), math.log(0.1)))
            bias = dt + math.log(-math.expm1(-dt))
            return -rng.uniform(0, 16) * torch.nn.functional.softplus(2 * g + 1 + bias)
        case "holes":
            g = g.clone()
            for _ in range(3 if T else 0):
                g[:, rng.randrange(T)] = -torch.inf
            return g
        case "swing":
            return g * 60 * (token % 2)
        case "chunk's edge":
            return torch.full_like(g, edge / 64)
        case "block's edge":
            every, block = rng.choice((1, 2, 3)), rng.randrange(4)
            steep = (token // 64 % every == 0) & (token // 16 % 4 == block)
            return torch.where(steep, edge / 16, 0.0).expand_as(g)
        case "token's edge":
            return torch.where(token % 64 == rng.randrange(64), edge, 0.0).expand_as(g)
    raise ValueError(kind)


DECAYS = (
    *("mild", "none", "strong", "model", "holes", "swing"),
    *("chunk's edge", "block's edge", "token's edge"),
)


def random_gates(rng: random.Random, call: Call) -> Call:
    """Without the gate's activation: decays of one kind, or of another one for each value head."""
    g, kind = call.x.g, rng.choice((None, *DECAYS))
    frame = FRAME[call.x.q.dtype]
    heads = [
        decay_of(kind or rng.choice(DECAYS), g[..., hv], rng, frame) for hv in range(g.shape[2])
    ]
    return call._replace(x=call.x.but(g=torch.stack(heads, dim=-1)))


def placed(x: Tensor, dtype: torch.dtype, layout: str, room: int) -> Tensor:
    """x [B, T, HV] with NaNs around it, and strides of tokens and heads that do not depend on T."""
    B, T, HV = x.shape
    if layout == "dense":
        return x.to(dtype).contiguous()
    sizes = (B, HV, room) if layout == "heads first" else (B, T, HV, 2)
    wide = x.new_full(sizes, torch.nan, dtype=dtype)
    y = wide[..., :T].transpose(1, 2) if layout == "heads first" else wide[..., 1]
    return y.copy_(x)


def with_layouts(call: Call, variant: Variant) -> Call:
    """q, k, v with tokens or heads outside, dense or with gaps; side inputs of any dtype."""
    changes: dict[str, Tensor] = {}
    for name, layout in zip(("q", "k", "v"), variant.layouts, strict=True):
        x = getattr(call.x, name)
        match layout:
            case "dense":
                changes[name] = x.contiguous()
            case "heads first":
                changes[name] = x.transpose(1, 2).contiguous().transpose(1, 2)
            case "shifted":
                wide = x.new_full((*x.shape[:3], x.shape[3] + 8), torch.nan)
                changes[name] = wide[..., 1 : 1 + x.shape[3]].copy_(x)
    for name, (dtype, layout) in zip(("g", "beta"), variant.sides, strict=True):
        changes[name] = placed(getattr(call.x, name), dtype, layout, variant.room)
    changes["initial_state"] = call.x.initial_state.to(variant.state)
    return call._replace(x=call.x.but(**changes))


def random_call(
    number: int, device: str, small: bool, sizes: str = "all", alike: int = 1
) -> tuple[Call, torch.dtype]:
    """The call of this number, and the dtype of q, k and v. `alike` consecutive numbers have the
    same variant; `sizes` as `random_variant` takes them."""
    variant = random_variant(number // alike, small, sizes)
    case, options = random_case(number, small, variant), variant.options
    rng = random.Random(number)
    call = make_call(case, variant.dtype, device, options, seed=number, index_dtype=variant.index)
    if not options.gate:
        call = random_gates(rng, call)
    if not options.l2norm and rng.random() < 0.2:
        # One key for all tokens: the inverse at its worst.
        key = unit_rows(case.H, case.K, seed=number).to(device, variant.dtype)
        call = call._replace(x=call.x.but(k=key.expand_as(call.x.k).contiguous()))
    told = tuple(case.offsets()) if case.packed and number % 3 == 0 else None
    return with_layouts(call, variant)._replace(told=told), variant.dtype


def describe(call: Call) -> str:
    case, dtype = call.case, str(call.x.q.dtype).removeprefix("torch.")
    tokens = f"{case.B} x {case.T}"
    if case.packed:
        tokens = f"{list(case.lengths or ())} + {case.orphans}"
    chosen = [f"{k}={v}" for k, v in asdict(call.options).items() if v not in (False, None)]
    heads = f"{case.H}/{case.HV} heads of {case.K} and {case.V}"
    return f"{dtype}, {tokens} tokens, {heads}, {' '.join(chosen)}"
