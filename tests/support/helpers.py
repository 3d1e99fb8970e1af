"""Inputs, the independent narrow computation, and the error budget, for the tests of the kernels.

The budget. A kernel's result is compared with the specification in float64, from the same inputs.
Its error may be at most BUDGET times that of an independent computation in plain torch, which has
the kernel's precision (`Arithmetic`) and rounds where the kernel stores, plus one unit roundoff. So
a tolerance is never a number that happened to pass: it follows the precision and the problem.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gdn_triton import reference
from gdn_triton.constants import LOG2_DECAY_FLOOR, RCP_LN2

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
    sequence; None is padded, B sequences of T tokens. `gpu`: too large for the interpreter."""

    name: str
    why: str
    T: int = 40
    B: int = 1
    lengths: tuple[int, ...] | None = None
    orphans: int = 0
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


# Every way in which a chunk, a sequence or a tile can end, at the least size that shows it.
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


# --------------------------------------------------------------------- the independent computation


def keep_bits(x: Tensor, bits: int) -> Tensor:
    """fp32 x rounded to a significand of `bits` bits (of 24), to nearest."""
    drop = 24 - bits
    as_int = x.float().contiguous().view(torch.int32)
    return ((as_int + (1 << (drop - 1))) & -(1 << drop)).view(FP32)


@dataclass(frozen=True)
class Arithmetic:
    """What the products of a kernel keep of their operands, for inputs of `dtype`.

    16-bit inputs: operands are rounded to the dtype. fp32 inputs: all bits in the interpreter; on
    a GPU a product is three tf32 products, which keep two times 11 bits of an operand.
    Products of fp32 values between 16-bit inputs and outputs (inside the inverse): all bits in the
    interpreter, tf32's 11 on a GPU.
    """

    dtype: torch.dtype
    device: str

    def operand(self, x: Tensor) -> Tensor:
        if self.dtype != FP32:
            return x.to(self.dtype).to(FP32)
        return x if self.device == "cpu" else keep_bits(x, 22)

    def inner(self, x: Tensor) -> Tensor:
        if self.device == "cpu":
            return x
        return keep_bits(x, 22 if self.dtype == FP32 else 11)

    @staticmethod
    def product(a: Tensor, b: Tensor) -> Tensor:
        """a @ b in fp32, added up like an unrolled loop: the even terms, then the odd ones. The
        order of the tokens would be a lucky one where terms cancel from token to token, as under
        reflections; kernels and libraries do not keep it."""
        n = a.shape[-1]
        order = torch.tensor([*range(0, n, 2), *range(1, n, 2)], device=a.device)
        return a[..., order] @ b[..., order, :]

    @property
    def unit(self) -> float:
        """Unit roundoff of what a product keeps."""
        if self.dtype == FP32 and self.device != "cpu":
            return 2.0**-22
        return torch.finfo(self.dtype).eps / 2


def narrow_heads(x: Tensor, HV: int) -> Tensor:
    """[t, heads, ...] -> [HV, t, ...] in fp32; a key head serves HV / heads value heads."""
    return x.float().repeat_interleave(HV // x.shape[1], 1).movedim(1, 0)


def narrow_decay(g_cumsum: Tensor, diagonal: int) -> Tensor:
    """[HV, t] -> [HV, t, t], 0 above the diagonal."""
    keep = torch.ones(g_cumsum.shape[-1:] * 2, device=g_cumsum.device).tril(diagonal).bool()
    difference = g_cumsum[:, :, None] - g_cumsum[:, None, :]
    return torch.where(keep, difference, -torch.inf).exp2()


def narrow_cumsum(x: Tensor, case: Case, *, reverse: bool = False) -> Tensor:
    """Chunk-local sum of fp32 x [B, T, HV], one addition after the other in fp32: torch.cumsum adds
    up in float64 on a CPU, and is no independent computation in fp32."""
    out = torch.zeros_like(x)
    for _, b, start, end in case.spans():
        total = torch.zeros_like(x[b, start])
        for t in reversed(range(start, end)) if reverse else range(start, end):
            total = total + x[b, t]
            out[b, t] = total
    return out


def narrow_gate_cumsum(g: Tensor, case: Case) -> Tensor:
    """g_cumsum of g [B, T, HV], natural log, in fp32."""
    return narrow_cumsum((g.float() * RCP_LN2).clamp_min(LOG2_DECAY_FLOOR[FP32]), case)


def narrow_inverse(
    k: Tensor, g_cumsum: Tensor, beta: Tensor, case: Case, arithmetic: Arithmetic
) -> list[Tensor]:
    """(I + A)^-1 of each chunk, [HV, t, t], fp32, by forward substitution."""
    HV, product = g_cumsum.shape[2], arithmetic.product
    inverses = []
    for _, b, start, end in case.spans():
        k_c = arithmetic.operand(narrow_heads(k[b, start:end], HV))
        g_c, beta_c = narrow_heads(g_cumsum[b, start:end], HV), narrow_heads(beta[b, start:end], HV)
        A = (beta_c[:, :, None] * product(k_c, k_c.mT) * narrow_decay(g_c, -1)).tril(-1)
        identity = torch.eye(end - start, device=k.device).expand_as(A)
        A = arithmetic.inner(A)
        A_inv = torch.linalg.solve_triangular(A, identity, upper=False, unitriangular=True)
        inverses.append(arithmetic.inner(A_inv))
    return inverses


def narrow_wy(
    k: Tensor,
    v: Tensor,
    g_cumsum: Tensor,
    beta: Tensor,
    case: Case,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Tensor]:
    """w, u in the dtype; the factors of A_inv's columns are applied in fp32, then rounded."""
    B, T, HV, V = v.shape
    w = torch.zeros(B, T, HV, k.shape[-1], dtype=arithmetic.dtype, device=k.device)
    u = torch.zeros(B, T, HV, V, dtype=arithmetic.dtype, device=k.device)
    round_, product = arithmetic.operand, arithmetic.product
    inverses = narrow_inverse(k, g_cumsum, beta, case, arithmetic)
    for (_, b, start, end), A_inv in zip(case.spans(), inverses, strict=True):
        k_c, v_c = (round_(narrow_heads(x[b, start:end], HV)) for x in (k, v))
        g_c, beta_c = (narrow_heads(x[b, start:end], HV) for x in (g_cumsum, beta))
        X = A_inv * beta_c[:, None, :]
        u[b, start:end] = product(round_(X), v_c).movedim(0, 1).to(u.dtype)
        w[b, start:end] = product(round_(X * g_c.exp2()[:, None, :]), k_c).movedim(0, 1).to(w.dtype)
    return w, u


def narrow_state(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g_cumsum: Tensor,
    initial_state: Tensor | None,
    case: Case,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Tensor, Tensor]:
    """h [C, HV, K, V] and v_new in the dtype, the final state [N, HV, K, V] in fp32."""
    HV, V = u.shape[2:]
    round_, product, K = arithmetic.operand, arithmetic.product, k.shape[-1]
    states = torch.zeros(case.N, HV, K, V, device=k.device)
    if initial_state is not None:
        states = initial_state.to(FP32).clone()
    h: list[Tensor] = []
    v_new = torch.zeros(u.shape, dtype=arithmetic.dtype, device=u.device)
    for n, b, start, end in case.spans():
        k_c, w_c, u_c, g_c = (narrow_heads(x[b, start:end], HV) for x in (k, w, u, g_cumsum))
        h.append(states[n].to(arithmetic.dtype))
        v_c = u_c - product(round_(w_c), round_(states[n]))
        v_new[b, start:end] = v_c.movedim(0, 1).to(v_new.dtype)
        to_end = (g_c[:, -1:] - g_c).exp2()[:, :, None]
        g_last = g_c[:, -1, None, None].exp2()
        states[n] = g_last * states[n] + product(round_(k_c).mT, round_(to_end * v_c))
    none = torch.zeros(0, HV, K, V, dtype=arithmetic.dtype, device=k.device)
    return torch.stack(h) if h else none, v_new, states


def narrow_output(
    q: Tensor,
    k: Tensor,
    v_new: Tensor,
    h: Tensor,
    g_cumsum: Tensor,
    scale: float,
    case: Case,
    arithmetic: Arithmetic,
    dtype: torch.dtype,
) -> Tensor:
    """o in `dtype`; h [C, HV, K, V]. The weights of v_new are rounded, as a product's operand."""
    HV = v_new.shape[2]
    round_, product = arithmetic.operand, arithmetic.product
    o = torch.zeros(v_new.shape, dtype=dtype, device=q.device)
    for c, (_, b, start, end) in enumerate(case.spans()):
        q_c, k_c, v_c = (round_(narrow_heads(x[b, start:end], HV)) for x in (q, k, v_new))
        g_c = narrow_heads(g_cumsum[b, start:end], HV)
        weights = round_(product(q_c, k_c.mT) * narrow_decay(g_c, 0))
        o_c = g_c.exp2()[:, :, None] * product(q_c, round_(h[c].float()))
        o_c = o_c + product(weights, v_c)
        o[b, start:end] = (scale * o_c).movedim(0, 1).to(dtype)
    return o


def narrow_forward(
    x: Inputs,
    case: Case,
    arithmetic: Arithmetic,
    *,
    scale: float | None = None,
    with_state: bool = True,
    use_qk_l2norm: bool = False,
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o in q's dtype and the final state [N, HV, K, V], all steps one after the other."""
    q, k, v = x.q, x.k, x.v
    g, beta = x.g.float(), x.beta.float()
    if use_qk_l2norm:
        q, k = reference.l2norm(q), reference.l2norm(k)
    if A_log is not None:
        g = reference.gate(g, A_log.float(), None if dt_bias is None else dt_bias.float())
    if use_beta_sigmoid:
        beta = reference.beta_sigmoid(beta, allow_neg_eigval)
    g_cumsum = narrow_gate_cumsum(g, case)
    w, u = narrow_wy(k, v, g_cumsum, beta, case, arithmetic)
    initial_state = x.initial_state if with_state else None
    h, v_new, final = narrow_state(k, w, u, g_cumsum, initial_state, case, arithmetic)
    scale = case.K**-0.5 if scale is None else scale
    o = narrow_output(q, k, v_new, h, g_cumsum, scale, case, arithmetic, x.q.dtype)
    return o, final


# ------------------------------------------------------------------------------------------- budget

# How much larger than the independent computation's a kernel's error may be. Both are sums of many
# roundings, taken in another order: over a tensor their root mean squares agree within this, while
# the largest single error, a matter of luck, is only held to a multiple that a wrong mask, tile or
# scale exceeds by far.
BUDGET_RMS = 1.5
BUDGET_WORST = 3.0


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
    assert torch.isfinite(exact).all(), f"{name}: the specification is not finite"
    bad = int((~torch.isfinite(got)).sum())
    assert bad == 0, f"{name}: {bad} of {got.numel()} values are not finite"
    if got.numel() == 0:
        return
    unit = max(unit, torch.finfo(dtype).eps / 2)
    error, allowed = (got.to(FP64) - exact).abs(), (narrow.to(FP64) - exact).abs()
    rms = float(error.square().mean().sqrt())
    rms_limit = BUDGET_RMS * float(allowed.square().mean().sqrt())
    rms_limit += unit * float(exact.square().mean().sqrt())
    worst = float(error.max())
    worst_limit = BUDGET_WORST * float(allowed.max()) + unit * float(exact.abs().max())
    message = (
        f"{name}: error {rms:.3e} (rms; at most {rms_limit:.3e}), {worst:.3e} (worst; at most "
        f"{worst_limit:.3e}); values are of size {float(exact.square().mean().sqrt()):.3e}"
    )
    assert rms <= rms_limit and worst <= worst_limit, message


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Equal bit for bit, NaNs included."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.equal(x.contiguous().view(as_int), y.contiguous().view(as_int))


def pieces(x: Tensor, offsets: Sequence[int]) -> list[Tensor]:
    """The sequences of a packed tensor [1, T, ...]."""
    return [x[:, a:b] for a, b in itertools.pairwise(offsets)]


class Memory(NamedTuple):
    """What a run took of the CPU's memory for tensors, in bytes and in pieces."""

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
