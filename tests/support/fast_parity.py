r"""Runs one case in the backends, and compares each with the float64 specification and with the
others.

`tests/fast` uses this for its cases. As a script it makes random cases, of lengths, heads, gates,
layouts, strides and options, and runs them through one backend, by default the CUDA library:

    python tests/support/fast_parity.py --count 1000 --seed 0 --repeat 20
    python tests/support/fast_parity.py --count 9000 --small --chunked --workers 14 --quiet
    python tests/support/fast_parity.py --count 1000 --backend triton --chunked
    compute-sanitizer --kernel-name kernel_substring=gdn --tool memcheck \
        python tests/support/fast_parity.py --count 8 --small

Each line is a case; one that fails prints its number, which `--only` runs again. `--small` makes
short sequences and computes the specification on the CPU, for a sanitizer, under which kernels take
a hundred times as long. Cases of odd numbers have GDN_BATCH_INVARIANT=1, with which the Triton
backend runs the Gluon kernels for few states too. `--chunked` uses the specification's form in
chunks, which differs in the last bits of float64 and takes less time.
"""

import argparse
import contextlib
import math
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from helpers import (
    BF16,
    BUDGET_RMS,
    FP16,
    FP32,
    FP64,
    Case,
    Inputs,
    assert_within_budget,
    make_inputs,
    same_bits,
    unit_rows,
)
from narrow import Arithmetic, narrow_forward
from torch import Tensor

import gdn_triton
from gdn_triton import reference
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


@contextlib.contextmanager
def set_for_a_while(name: str, value: str) -> Iterator[None]:
    """An environment variable, which gets its former value or none back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield


requested = partial(set_for_a_while, "GDN_BACKEND")  # a backend that refuses raises


def run(backend: str, call: Call, **changes: Any) -> tuple[Tensor, Tensor]:
    """o and the final state [N, HV, K, V] of one backend."""
    x, options = call.x, call.options
    initial_state = None
    if options.with_state:
        initial_state = x.initial_state.mT if options.v_first else x.initial_state
    arguments: dict[str, Any] = {
        "scale": options.scale,
        "initial_state": initial_state,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": options.l2norm,
        "use_beta_sigmoid_in_kernel": options.sigmoid,
        "allow_neg_eigval": options.negative,
        "state_v_first": options.v_first,
        "cu_seqlens": x.cu_seqlens,
        "cu_seqlens_cpu": None if call.told is None else torch.tensor(call.told).int(),
        "use_gate_in_kernel": call.A_log is not None,
        "A_log": call.A_log,
        "dt_bias": call.dt_bias,
        "chunk_size": call.case.chunk_size,
        **changes,
    }
    with requested(backend):
        o, state = gdn_triton.chunk_gated_delta_rule(*x.tensors, **arguments)
    assert state is not None and o.is_contiguous() and state.is_contiguous()
    return o, state.mT if options.v_first else state


def specification(call: Call, chunked: bool = False) -> tuple[Tensor, Tensor]:
    """o and the final state [N, HV, K, V] in float64, token by token or in chunks."""
    x, options = call.x, call.options
    by = reference.chunk_gated_delta_rule if chunked else reference.recurrent_gated_delta_rule
    o, state, *_ = by(
        *x.exact(),
        scale=options.scale,
        initial_state=x.initial_state.to(FP64) if options.with_state else None,
        cu_seqlens=x.cu_seqlens,
        use_qk_l2norm=options.l2norm,
        use_beta_sigmoid=options.sigmoid,
        allow_neg_eigval=options.negative,
        use_gate=options.gate,
        A_log=call.A_log,
        dt_bias=call.dt_bias,
    )
    return o, state


def independent(call: Call) -> tuple[Tensor, Tensor]:
    """The same at the kernels' precision on a GPU, whose error is the budget."""
    options = call.options
    return narrow_forward(
        call.x,
        call.case,
        Arithmetic(call.x.q.dtype, "cuda"),
        scale=options.scale,
        with_state=options.with_state,
        use_qk_l2norm=options.l2norm,
        use_beta_sigmoid=options.sigmoid,
        allow_neg_eigval=options.negative,
        A_log=call.A_log,
        dt_bias=call.dt_bias,
    )


def assert_near(
    name: str, a: Tensor, b: Tensor, exact: Tensor, narrow: Tensor, unit: float
) -> None:
    """Compares two results with independent rounding errors, whose squares add."""
    if a.numel() == 0:
        return
    difference, allowed = a.to(FP64) - b.to(FP64), narrow.to(FP64) - exact
    limit = BUDGET_RMS * float(allowed.square().mean().sqrt())
    limit = 2**0.5 * (limit + unit * float(exact.square().mean().sqrt()))
    found = float(difference.square().mean().sqrt())
    assert found <= limit, f"{name}: they differ by {found:.3e} (rms; at most {limit:.3e})"


def check_parity(
    call: Call,
    backends: Sequence[str] = ("triton", "cuda"),
    on: str = "cuda",
    chunked: bool = False,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Runs the backends, and compares each with the specification and with the others.

    `on` is the device of the specification, which is computed in chunks if `chunked`. Returns every
    backend's o and final state.
    """
    there = call.to(on)
    exact, narrow = specification(there, chunked), independent(there)
    arithmetic = Arithmetic(call.x.q.dtype, "cuda")
    dtypes = (call.x.q.dtype, FP32)
    results = {backend: run(backend, call) for backend in backends}
    for backend, result in results.items():
        for name, got, want, budget, dtype in zip(
            ("o", "final_state"), result, exact, narrow, dtypes, strict=True
        ):
            assert_within_budget(
                f"{name} of {backend}",
                got.to(on),
                want,
                budget,
                dtype=dtype,
                unit=arithmetic.unit,
            )
        if call.case.packed:
            rest = result[0][:, call.case.offsets()[-1] :]
            assert (rest == 0).all(), f"{backend}: tokens of no sequence"
    for i, one in enumerate(backends):
        for other in backends[:i]:
            for j, name in enumerate(("o", "final_state")):
                near = (x[j].to(on) for x in (results[one], results[other]))
                who = f"{name} of {one} and {other}"
                assert_near(who, *near, exact[j], narrow[j], arithmetic.unit)
    return results


# ------------------------------------------------------------------------------------- random cases

# The sides of a chunk of 64 tokens, of its blocks of 16, and of two chunks.
LENGTHS = (0, 1, 2, 7, 15, 16, 17, 31, 33, 48, 63, 64, 65, 96, 127, 128, 129, 191, 193, 300)


# (K, V), beside 128 and 128, which has kernels of its own: for those of K up to 64, up to 128 and
# up to 256, whole tiles of 64 channels and less, V below, at and past K.
SIZES = (
    *((64, 64), (64, 128), (8, 8), (40, 200), (128, 64), (128, 256), (96, 192), (72, 40)),
    *((256, 256), (256, 512), (192, 128), (136, 72), (256, 64)),
)


def random_lengths(rng: random.Random, most: int) -> tuple[int, ...]:
    edges = [length for length in LENGTHS if length <= most]
    count = rng.choice((1, 2, 3, 5, 9))
    return tuple(rng.choice((rng.choice(edges), rng.randint(0, most))) for _ in range(count))


def random_sizes(number: int, sizes: str) -> tuple[int, int]:
    rng = random.Random(-1 - number)  # of its own: the rest of a case is the same at any size
    other = sizes == "others" or (sizes == "all" and rng.random() < 0.5)
    return rng.choice(SIZES) if other else (128, 128)


def random_case(rng: random.Random, small: bool, K: int, V: int) -> Case:
    most, heads = (130, (1, 2)) if small else (rng.choice((700, 700, 2500)), (1, 2, 3, 4))
    H = rng.choice(heads)
    HV = H * rng.choice((1, 2) if small else (1, 2, 3, 4, 8))
    sizes: dict[str, Any] = {"H": H, "HV": HV, "K": K, "V": V, "chunk_size": 64}
    # 8: rows that TMA can read; 3: rows aligned to nothing.
    sizes["spare"] = rng.choice((0, 8, 8, 3))
    if rng.random() < 0.6:
        orphans = rng.choice((0, 0, 1, 64, 70))
        return Case("packed", "", lengths=random_lengths(rng, most), orphans=orphans, **sizes)
    T = rng.choice((rng.choice([x for x in LENGTHS if 0 < x <= most]), rng.randint(1, most)))
    return Case("padded", "", T=T, B=rng.choice((1, 2, 3)), **sizes)


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


def random_layouts(rng: random.Random, call: Call) -> Call:
    """Tokens or heads outside, dense or with gaps; side inputs of any dtype."""
    changes: dict[str, Tensor] = {}
    for name in ("q", "k", "v"):
        x = getattr(call.x, name)
        match rng.choice(("as it is", "dense", "heads first", "shifted")):
            case "dense":
                changes[name] = x.contiguous()
            case "heads first":
                changes[name] = x.transpose(1, 2).contiguous().transpose(1, 2)
            case "shifted":
                wide = x.new_full((*x.shape[:3], x.shape[3] + 8), torch.nan)
                changes[name] = wide[..., 1 : 1 + x.shape[3]].copy_(x)
    for name in ("g", "beta", "initial_state"):
        dtype = rng.choice((FP32, FP32, FP16, BF16, FP64))
        changes[name] = getattr(call.x, name).to(dtype)
    return call._replace(x=call.x.but(**changes))


def random_call(
    number: int, device: str, small: bool, sizes: str = "all"
) -> tuple[Call, torch.dtype]:
    """`sizes`: "128" for K = V = 128, "others" for all but that, or "all"."""
    rng = random.Random(number)
    case = random_case(rng, small, *random_sizes(number, sizes))
    options = random_options(rng)
    dtype = rng.choice((BF16, FP16))
    index_dtype = rng.choice((torch.int32, torch.int64))
    call = make_call(case, dtype, device, options, seed=number, index_dtype=index_dtype)
    if not options.gate:
        call = random_gates(rng, call)
    if not options.l2norm and rng.random() < 0.2:
        # One key for all tokens: the inverse at its worst.
        key = unit_rows(case.H, case.K, seed=number).to(device, dtype)
        call = call._replace(x=call.x.but(k=key.expand_as(call.x.k).contiguous()))
    told = tuple(case.offsets()) if case.packed and number % 3 == 0 else None
    return random_layouts(rng, call)._replace(told=told), dtype


def describe(call: Call) -> str:
    case, dtype = call.case, str(call.x.q.dtype).removeprefix("torch.")
    tokens = f"{case.B} x {case.T}"
    if case.packed:
        tokens = f"{list(case.lengths or ())} + {case.orphans}"
    chosen = [f"{k}={v}" for k, v in asdict(call.options).items() if v not in (False, None)]
    heads = f"{case.H}/{case.HV} heads of {case.K} and {case.V}"
    return f"{dtype}, {tokens} tokens, {heads}, {' '.join(chosen)}"


def check_random(number: int, options: argparse.Namespace) -> str | None:
    """The fault of a random case, or None."""
    device = "cpu" if options.copied else "cuda"
    call, _ = random_call(number, device, options.small, options.sizes)
    call = call.to("cuda") if options.copied else call
    words = f"{number}: {describe(call)}"
    backend, invariant = options.backend, str(number % 2)
    try:
        on = "cpu" if options.small else options.on
        with set_for_a_while("GDN_BATCH_INVARIANT", invariant):
            results = check_parity(call, (backend,), on=on, chunked=options.chunked)
            for again in range(options.repeat):
                same = map(same_bits, run(backend, call), results[backend])
                assert all(same), f"run {again + 2} has other bits than the first"
    except AssertionError as why:
        return f"FAILED {words}\n    {why}"
    if not options.quiet:
        print(f"ok {words}", flush=True)
    return None


NOT_RUN = "not run"


def check_until(number: int, check: Callable[[int], str | None], end: float) -> str | None:
    """The fault of a case that begins before the time `end`, or None; else NOT_RUN."""
    return check(number) if time.time() < end else NOT_RUN


def check_numbers(check: Callable[[int], str | None], options: argparse.Namespace) -> bool:
    """Whether one of the cases that `options` ask for has a fault, by `check`. Each fault is
    printed, and the number of cases that ran, and of faults."""
    check = partial(check_until, check=check, end=time.time() + options.seconds)
    numbers = range(options.seed, options.seed + options.count)
    if options.only is not None:
        numbers = range(options.only, options.only + 1)
    with contextlib.ExitStack() as stack:
        if options.workers == 1:
            found = map(check, numbers)
        else:
            fresh = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(options.workers, mp_context=fresh)
            found = stack.enter_context(pool).map(check, numbers, chunksize=10)
        failed, done = [], 0
        for number, wrong in zip(numbers, found, strict=True):
            if wrong == NOT_RUN:
                continue
            done += 1
            if wrong is not None:
                failed.append(number)
                print(wrong, flush=True)
            if done % 500 == 0:
                print(f"{done} cases, {len(failed)} failed", flush=True)
    print(f"{done} cases of {len(numbers)}, {len(failed)} failed {failed or ''}")
    return bool(failed)


def add_numbers(parser: argparse.ArgumentParser) -> None:
    """The arguments of `check_numbers`, and the backend."""
    parser.add_argument("--backend", choices=("cuda", "triton"), default="cuda")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, help="this case alone")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the GPU")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="after which no case begins"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Random cases through one backend.")
    add_numbers(parser)
    parser.add_argument("--sizes", choices=("128", "others", "all"), default="all", help="K and V")
    parser.add_argument("--small", action="store_true", help="short, and specified on the CPU")
    parser.add_argument("--on", choices=("cuda", "cpu"), default="cuda", help="the specification")
    parser.add_argument("--chunked", action="store_true", help="specified in chunks")
    parser.add_argument(
        "--copied",
        action="store_true",
        help="dense inputs, made on the CPU: for initcheck, which does not see what kernels write "
        "that its filter leaves out",
    )
    parser.add_argument("--repeat", type=int, default=0, help="runs more, of the same bits")
    parser.add_argument("--quiet", action="store_true", help="no line for a case that passes")
    options = parser.parse_args()
    sys.exit(check_numbers(partial(check_random, options=options), options))


if __name__ == "__main__":
    main()
