"""Inputs and the error budget, for the tests of the kernels.

The budget. A kernel's result is compared with the specification in float64, from the same inputs.
Its error may be at most BUDGET times that of an independent computation in plain torch (narrow.py),
which has the kernel's precision (`Arithmetic`) and rounds where the kernel stores, plus one unit
roundoff. A tolerance therefore follows from the precision and the problem.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16

# bf16 goes through kernels only on a GPU: Triton's interpreter keeps bf16 values as integers and
# multiplies those, without an error. gdn_triton._host.backends refuses it there for the same
# reason.
_BF16_MARK = pytest.mark.gpu("bf16 products are wrong in Triton's interpreter")
DTYPES = [
    pytest.param(FP32, id="fp32"),
    pytest.param(FP16, id="fp16"),
    pytest.param(BF16, id="bf16", marks=_BF16_MARK),
]

# (dataflow, dtype), for the fixture `dataflow` of conftest.py. The fused ones take 16 bits only.
RUNS = [
    pytest.param("steps", FP32, id="steps-fp32"),
    pytest.param("steps", FP16, id="steps-fp16"),
    pytest.param("steps", BF16, id="steps-bf16", marks=_BF16_MARK),
    pytest.param("fused", FP16, id="fused-fp16"),
    pytest.param("fused", BF16, id="fused-bf16", marks=_BF16_MARK),
    pytest.param("segments", FP16, id="segments-fp16"),
    pytest.param("segments", BF16, id="segments-bf16", marks=_BF16_MARK),
]


# ------------------------------------------------------------------------------------------- inputs


@dataclass(frozen=True)
class Case:
    """One regime, and why it is in a list. `lengths` is packed, with `orphans` rows after the last
    sequence; None is padded, B sequences of T tokens. `told`: cu_seqlens is on the host too.
    `gpu`: too large for the interpreter."""

    name: str
    why: str
    T: int = 40
    B: int = 1
    lengths: tuple[int, ...] | None = None
    orphans: int = 0
    told: bool = False
    H: int = 1
    HV: int = 2
    K: int = 16
    V: int = 16
    chunk_size: int = 16
    spare: int = 3  # columns of the projection that belong to nobody
    gpu: bool = False

    @property
    def packed(self) -> bool:
        return self.lengths is not None

    @property
    def tokens(self) -> int:
        """T of the tensors."""
        return self.T if self.lengths is None else sum(self.lengths) + self.orphans

    @property
    def N(self) -> int:
        return self.B if self.lengths is None else len(self.lengths)

    def offsets(self) -> list[int]:
        """cu_seqlens as a list."""
        assert self.lengths is not None
        offsets = [0]
        for length in self.lengths:
            offsets.append(offsets[-1] + length)
        return offsets

    def cu_seqlens(self, device: str, dtype: torch.dtype = torch.int32) -> Tensor | None:
        if self.lengths is None:
            return None
        return torch.tensor(self.offsets(), dtype=dtype, device=device)

    def spans(self) -> Iterator[tuple[int, int, int, int]]:
        """(sequence, batch row, first token, end) of each chunk, in the order of chunk slots."""
        if self.lengths is None:
            bounds = [(n, n, 0, self.T) for n in range(self.B)]
        else:
            offsets = self.offsets()
            bounds = [(n, 0, offsets[n], offsets[n + 1]) for n in range(self.N)]
        for n, b, first, end in bounds:
            for start in range(first, end, self.chunk_size):
                yield n, b, start, min(start + self.chunk_size, end)

    def owned(self, x: Tensor) -> Tensor:
        """[B, T, ...] without the rows of no sequence."""
        return x if self.lengths is None else x[:, : sum(self.lengths)]


def cases(regimes: Iterable[Case]) -> list[Any]:
    """pytest parameters of regimes, those for real sizes marked."""
    mark = pytest.mark.gpu("a real size, which would take minutes in the interpreter")
    return [pytest.param(c, id=c.name, marks=[mark] if c.gpu else []) for c in regimes]


# Regimes in which a chunk, a sequence or a tile ends in every possible way, each at the least size
# that shows it.
SMALL = [
    Case("one-token", "the least sequence", T=1),
    Case("below-chunk", "only a ragged chunk", T=15, B=2),
    Case("at-chunk", "no ragged chunk", T=16),
    Case("above-chunk", "a ragged chunk of one token", T=17),
    Case("chunks-and-tail", "state passes through chunks, and B > 1", T=55, B=2),
    Case("groups", "three value heads on each of two key heads", T=20, H=2, HV=6, spare=8),
    Case("chunk-32", "one merge of the inverse's blocks", T=70, K=32, chunk_size=32, spare=0),
    Case("chunk-64", "two merges of the inverse's blocks", T=130, V=32, chunk_size=64),
    Case("wide-key", "K > V, neither a power of two", T=33, K=60, V=36),
    Case("wide-value", "V > K, several ragged value tiles", T=33, K=24, V=100),
    Case("tiny-heads", "K and V below any tile", T=20, K=3, V=5),
    Case(
        "packed",
        "empty sequences first, between and last; one token; each side of a chunk; rows of none",
        lengths=(0, 1, 15, 0, 16, 17, 40, 0),
        orphans=5,
    ),
    Case("packed-64", "packed, ragged, value groups", lengths=(65, 3, 70), chunk_size=64, HV=3),
    Case("packed-one", "one sequence that fills the row", lengths=(33,)),
    Case("packed-orphans", "more rows of no sequence than a chunk", lengths=(5, 18), orphans=40),
    Case("packed-empty", "only empty sequences, and rows of none", lengths=(0, 0), orphans=20),
]

# The sizes of models, and the tiles that the small ones cannot reach.
REAL = [
    Case(
        "real",
        "the common head",
        T=2048,
        B=2,
        H=4,
        HV=8,
        K=128,
        V=128,
        chunk_size=64,
        spare=8,
        gpu=True,
    ),
    Case(
        "real-64",
        "the small head, ragged",
        T=1000,
        H=4,
        HV=4,
        K=64,
        V=64,
        chunk_size=64,
        spare=8,
        gpu=True,
    ),
    Case("real-widest", "FLA's layer", T=600, HV=2, K=256, V=512, chunk_size=64, spare=8, gpu=True),
    Case("real-odd", "ragged tiles", T=600, HV=2, K=100, V=300, chunk_size=64, spare=8, gpu=True),
    Case(
        "real-256-300",
        "widest key, ragged value",
        T=300,
        K=256,
        V=300,
        chunk_size=64,
        spare=8,
        gpu=True,
    ),
    Case("real-chunk-32", "chunk 32", T=1000, H=2, K=128, V=128, chunk_size=32, spare=8, gpu=True),
    Case("real-chunk-16", "chunk 16", T=1000, H=2, K=128, V=128, chunk_size=16, spare=8, gpu=True),
    Case(
        "real-packed",
        "documents of very different lengths",
        lengths=(1, 1500, 63, 0, 64, 65, 700, 2, 128) + (17,) * 40,
        orphans=100,
        H=4,
        HV=8,
        K=128,
        V=128,
        chunk_size=64,
        spare=8,
        gpu=True,
    ),
]


@dataclass
class Inputs:
    """q, k, v are views of one projection; g, beta and initial_state are strided in every
    dimension. `around`: the buffers that they are views of."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor
    cu_seqlens: Tensor | None
    around: list[Tensor] = field(default_factory=list)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.g, self.beta

    def exact(self) -> tuple[Tensor, ...]:
        return tuple(x.to(FP64) for x in self.tensors)

    def but(self, **changes: Any) -> "Inputs":
        return replace(self, **changes)


def make_inputs(
    case: Case,
    dtype: torch.dtype,
    device: str,
    *,
    seed: int = 0,
    index_dtype: torch.dtype = torch.int32,
    raw: bool = False,
) -> Inputs:
    """Unit keys, gates from -1e-3 to -1 (log-uniform), beta in (0, 1), a state of order 1.

    raw: keys, gates and beta as they come before the norm, the gate and the sigmoid. The values
    come from the CPU's generator, so they are the same on every machine.
    """
    generator = torch.Generator().manual_seed(seed)
    B, T, H, HV, K, V = case.B, case.tokens, case.H, case.HV, case.K, case.V

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)
    if not raw:
        k = torch.nn.functional.normalize(k, dim=-1)
    # An odd number of spare columns leaves rows aligned to nothing.
    parts = [q.flatten(2), k.flatten(2), v.flatten(2), torch.full((B, T, case.spare), torch.nan)]
    projection = torch.cat(parts, -1).to(device, dtype)
    q, k, v, _ = projection.split([H * K, H * K, HV * V, case.spare], -1)
    gates = normal(B, T, HV, 2) if raw else -(10 ** (-3 * uniform(B, T, HV, 2)))
    betas = normal(B, HV, T) if raw else uniform(B, HV, T)
    states = normal(HV, case.N, V, K).to(device)
    gates, betas = gates.to(device), betas.to(device)
    return Inputs(
        q=q.unflatten(-1, (H, K)),
        k=k.unflatten(-1, (H, K)),
        v=v.unflatten(-1, (HV, V)),
        g=gates[..., 1],
        beta=betas.transpose(1, 2),
        initial_state=states.permute(1, 0, 3, 2),
        cu_seqlens=case.cu_seqlens(device, index_dtype),
        around=[projection, gates, betas, states],
    )


def unit_rows(*shape: int, seed: int = 7) -> Tensor:
    """Random rows of length 1, fp32, the same on every device; on the default one."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(*shape, generator=generator, device="cpu").to(torch.get_default_device())
    return torch.nn.functional.normalize(rows, dim=-1)


# ------------------------------------------------------------------------------------------- budget


# The most that a kernel's error may exceed the error of the independent computation. Both are sums
# of many roundings in different orders. Over a tensor their root mean squares agree within this
# factor. The largest single error is random, and only has to be below a multiple that a wrong mask,
# tile or scale exceeds by far.
BUDGET_RMS = 1.5
BUDGET_WORST = 3.0
# An activation and a decay have an exponential or a logarithm each. In fp32 the functions of NumPy,
# which Triton's interpreter calls, err by up to 4.3 units of roundoff, and the instruction of a GPU
# errs by up to 4 units, 2^-22.
TRANSCENDENTALS = 2 * 4.3 * 2.0**-24


def assert_within_budget(
    name: str,
    got: Tensor,
    exact: Tensor,
    narrow: Tensor,
    *,
    dtype: torch.dtype,
    unit: float,
) -> None:
    """`got`, of `dtype`, is finite and as near to `exact` (float64) as the budget says. `unit` is
    the unit roundoff of the arithmetic, or of `dtype` where that is larger."""
    assert got.dtype == dtype, f"{name}: {got.dtype}, expected {dtype}"
    assert got.shape == exact.shape == narrow.shape, f"{name}: {got.shape}, {exact.shape}"
    assert exact.dtype == FP64
    if got.numel() == 0:
        return
    # One copy to the host: each of them waits for the GPU.
    error, allowed = (got.to(FP64) - exact).abs(), (narrow.to(FP64) - exact).abs()
    measured = [x.square().mean().sqrt() for x in (error, allowed, exact)]
    measured += [x.max() for x in (error, allowed, exact.abs())]
    measured += [(~torch.isfinite(x)).sum().to(FP64) for x in (got, exact)]
    rms, rms_allowed, size, worst, worst_allowed, largest, bad, inexact = torch.stack(
        measured
    ).tolist()
    assert inexact == 0, f"{name}: the specification is not finite"
    assert bad == 0, f"{name}: {bad:.0f} of {got.numel()} values are not finite"
    unit = max(unit, torch.finfo(dtype).eps / 2)
    rms_limit = BUDGET_RMS * rms_allowed + unit * size
    worst_limit = BUDGET_WORST * worst_allowed + unit * largest
    message = (
        f"{name}: error {rms:.3e} (rms; at most {rms_limit:.3e}), {worst:.3e} (worst; at most "
        f"{worst_limit:.3e}); values are of size {size:.3e}"
    )
    assert rms <= rms_limit and worst <= worst_limit, message


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Equal bit for bit, NaNs included."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    as_int = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.equal(x.contiguous().view(as_int), y.contiguous().view(as_int))


def pieces(x: Tensor, offsets: Sequence[int]) -> list[Tensor]:
    """The sequences of a packed tensor [1, T, ...]."""
    return [x[:, a:b] for a, b in itertools.pairwise(offsets)]


class Memory(NamedTuple):
    """The CPU memory of a run's tensors, in bytes and in pieces."""

    made: int  # bytes of all pieces
    peak: int  # the most bytes at one time, beyond those before the run
    pieces: int  # the most pieces at one time, in the same way


def memory_of(run: Callable[[], Any]) -> Memory:
    """Every allocation of torch on a CPU is counted, those inside of its operators too."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        kept = run()
    del kept
    events = list(profile.kineto_results.experimental_event_tree())
    for event in events:  # the list grows: each event's children come after it
        events.extend(event.children)
    kind = torch._C._profiler._EventType.Allocation
    found = [event for event in events if event.typed[0] == kind]
    found.sort(key=lambda event: event.start_time_ns)
    sizes = [event.typed[1].alloc_size for event in found]
    assert sizes, "the profiler saw no allocation"
    return Memory(
        made=sum(size for size in sizes if size > 0),
        peak=max(itertools.accumulate(sizes)),
        pieces=max(itertools.accumulate((size > 0) - (size < 0) for size in sizes)),
    )
