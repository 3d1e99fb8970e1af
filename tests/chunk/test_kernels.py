"""Each Triton kernel alone: fed with the specification's intermediates, against its step of it.

The specification runs in float64 from exactly what the kernel reads. In the interpreter (no GPU)
fp32 and fp16 only: helpers.DTYPES says why.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    FP64,
    REAL,
    SMALL,
    Case,
    Inputs,
    assert_within_budget,
    cases,
    make_inputs,
    same_bits,
)
from kernel_cases import UNIT32, case_named, chunks_of, state_inputs
from narrow import (
    Arithmetic,
    narrow_cumsum,
    narrow_gate_cumsum,
    narrow_inverse,
    narrow_output,
    narrow_state,
    narrow_wy,
)
from torch import Tensor

from gdn_triton import reference
from gdn_triton.chunk.triton.shared.chunks import make_chunks
from gdn_triton.chunk.triton.steps.gate import beta_sigmoid_fwd, chunk_local_cumsum, gate_cumsum_fwd
from gdn_triton.chunk.triton.steps.l2norm import l2norm_fwd
from gdn_triton.chunk.triton.steps.output import output_fwd
from gdn_triton.chunk.triton.steps.state import state_fwd
from gdn_triton.chunk.triton.steps.wy import wy_fwd
from gdn_triton.constants import (
    CHUNK_SIZES,
    LOG2_DECAY_FLOOR,
    RCP_LN2,
    SOFTPLUS_THRESHOLD,
)

FLOOR = LOG2_DECAY_FLOOR[FP32]


def clamped_cumsum(g: Tensor, case: Case, x: Inputs) -> Tensor:
    """gate_cumsum of g in float64, with the floor of the kernel's arithmetic."""
    log2_decay = (g.to(FP64) * RCP_LN2).clamp_min(FLOOR)
    return reference.chunk_local_cumsum(log2_decay, case.chunk_size, cu_seqlens=x.cu_seqlens)


# ------------------------------------------------------------------------------------ gate, cumsum


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("case", cases(SMALL + REAL))
def test_chunk_local_cumsum(case: Case, reverse: bool, device: str) -> None:
    """Any x, of either sign: the reverse sum serves gradients."""
    x = make_inputs(case, FP32, device)
    values = make_inputs(case, FP32, device, raw=True, seed=1).g
    options: dict[str, Any] = {"scale": 0.7, "reverse": reverse, "cu_seqlens": x.cu_seqlens}
    exact = reference.chunk_local_cumsum(values.to(FP64), case.chunk_size, **options)
    narrow = narrow_cumsum(values * 0.7, case, reverse=reverse)
    got = chunk_local_cumsum(values, chunks_of(case, x), scale=0.7, reverse=reverse)
    owned = [case.owned(y) for y in (got, exact, narrow)]
    assert_within_budget("sum", *owned, dtype=FP32, unit=UNIT32)


@pytest.mark.parametrize("case", cases(SMALL + REAL))
def test_gate_cumsum(case: Case, device: str) -> None:
    x = make_inputs(case, FP32, device)
    exact = reference.gate_cumsum(x.g.to(FP64), case.chunk_size, cu_seqlens=x.cu_seqlens)
    narrow = narrow_gate_cumsum(x.g, case)
    got = gate_cumsum_fwd(x.g, chunks_of(case, x))
    owned = [case.owned(y) for y in (got, exact, narrow)]
    assert_within_budget("g_cumsum", *owned, dtype=FP32, unit=UNIT32)


@pytest.mark.parametrize("heads", [1, 7, 8, 9, 30])
def test_gate_cumsum_heads(heads: int, device: str) -> None:
    """A program owns 8 heads: below, at, above, and several with a tail."""
    case = Case("heads", "", T=21, HV=heads)
    x = make_inputs(case, FP32, device)
    exact, narrow = reference.gate_cumsum(x.g.to(FP64), 16), narrow_gate_cumsum(x.g, case)
    got = gate_cumsum_fwd(x.g, chunks_of(case, x))
    assert_within_budget("g_cumsum", got, exact, narrow, dtype=FP32, unit=UNIT32)


@pytest.mark.parametrize(
    "dtype",
    [FP16, FP64, pytest.param(BF16, marks=pytest.mark.gpu("kernels see bf16 on a GPU only"))],
)
def test_gate_cumsum_of_any_dtype(dtype: torch.dtype, device: str) -> None:
    case = case_named("chunks-and-tail")
    x = make_inputs(case, FP32, device)
    g = x.g.to(dtype)
    exact, narrow = reference.gate_cumsum(g.to(FP64), case.chunk_size), narrow_gate_cumsum(g, case)
    got = gate_cumsum_fwd(g, chunks_of(case, x))
    assert_within_budget("g_cumsum", got, exact, narrow, dtype=FP32, unit=UNIT32)


@pytest.mark.parametrize("with_bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("name", ["chunks-and-tail", "groups", "packed", "chunk-64"])
def test_gate_in_kernel(name: str, with_bias: bool, device: str) -> None:
    case = case_named(name)
    x = make_inputs(case, FP32, device, raw=True)
    A_log = torch.randn(case.HV).to(device)
    dt_bias = torch.randn(case.HV).to(device) if with_bias else None
    wide = reference.gate(x.g.to(FP64), A_log, dt_bias)
    exact = reference.gate_cumsum(wide, case.chunk_size, cu_seqlens=x.cu_seqlens)
    narrow = narrow_gate_cumsum(reference.gate(x.g, A_log, dt_bias), case)
    got = gate_cumsum_fwd(x.g, chunks_of(case, x), A_log, dt_bias)
    owned = [case.owned(y) for y in (got, exact, narrow)]
    assert_within_budget("g_cumsum", *owned, dtype=FP32, unit=UNIT32)


def test_gate_in_kernel_of_narrow_parameters(device: str) -> None:
    """A_log and dt_bias in 16 bits, as a model cast as a whole has them."""
    case = case_named("chunks-and-tail")
    x = make_inputs(case, FP32, device, raw=True)
    g, A_log, dt_bias = (y.to(device, FP16) for y in (x.g, torch.randn(2), torch.randn(2)))
    exact = reference.gate_cumsum(reference.gate(g.to(FP64), A_log, dt_bias), case.chunk_size)
    narrow = narrow_gate_cumsum(reference.gate(g, A_log, dt_bias), case)
    got = gate_cumsum_fwd(g, chunks_of(case, x), A_log, dt_bias)
    assert_within_budget("g_cumsum", got, exact, narrow, dtype=FP32, unit=UNIT32)


def test_softplus_far_out(device: str) -> None:
    """Every gate's own relative error, from where softplus is e^x to where it is x.

    The bound: below e^x = 1/16 a series, above it the logarithm of 1 + e^x, at least 0.0606, from a
    fast log2 that is off by up to 2^-22 absolutely; and an exponent of up to 30 / ln 2, rounded to
    2^-19 of itself: together under 2^-17. And the unit of the fixed-point sum, 2^-40.
    """
    edge = SOFTPLUS_THRESHOLD
    points = [edge, math.nextafter(edge, 0), edge + 1e-4, math.log(0.0625), -2.7, -2.8, 0.0]
    raw = torch.cat([torch.linspace(-30, 30, 2000), torch.tensor(points)])
    # 8 gates a head and chunk of 16, on rows of which only the first of a chunk is looked at.
    g_raw = torch.zeros(1, raw.numel() * 16 // 8 + 16, 8)
    g_raw[0, torch.arange(raw.numel()) // 8 * 16, torch.arange(raw.numel()) % 8] = raw
    g_raw = g_raw.to(device)
    chunks = make_chunks(1, g_raw.shape[1], 16)
    A_log = torch.zeros(8, device=device)
    got = gate_cumsum_fwd(g_raw, chunks, A_log)[0, ::16].flatten().to(FP64)
    exact = reference.gate(g_raw[0, ::16].to(FP64), A_log).flatten() * RCP_LN2
    assert got.isfinite().all() and (got <= 0).all()
    assert ((got - exact).abs() < 2.0**-17 * exact.abs() + 2.0**-40).all()


def test_gates_of_minus_infinity(device: str) -> None:
    """-inf forgets all: held at the floor where 2^x is 0, finite, and exact around it."""
    case = case_named("chunks-and-tail")
    x = make_inputs(case, FP32, device)
    g = x.g.clone()
    g[:, [0, 5, 6, 20, 54]] = -torch.inf
    g[:, 8] = -1e30
    exact = clamped_cumsum(g, case, x)
    narrow = narrow_gate_cumsum(g, case)
    got = gate_cumsum_fwd(g, chunks_of(case, x))
    assert_within_budget("g_cumsum", got, exact, narrow, dtype=FP32, unit=UNIT32)
    assert (got[:, 5].exp2() == 0).all() and ((got[:, 6] - got[:, 5]).exp2() == 0).all()


def test_gate_in_kernel_that_forgets_all(device: str) -> None:
    """A raw gate of inf, or a product past fp32's range, is a decay of -inf: also held."""
    g_raw = torch.tensor([0.5, torch.inf, 3e38, 0.5], device=device).reshape(1, 4, 1)
    got = gate_cumsum_fwd(g_raw, make_chunks(1, 4, 16), torch.tensor([5.0], device=device))
    assert got.isfinite().all()
    assert (got[0, 1] - got[0, 0]).item() == FLOOR


def test_nan_gate_stays_in_its_chunk_and_head(device: str) -> None:
    case = case_named("chunks-and-tail")
    x = make_inputs(case, FP32, device)
    g = x.g.clone()
    g[0, 20, 1] = torch.nan
    got = gate_cumsum_fwd(g, chunks_of(case, x)).isnan()
    expected = torch.zeros_like(got)
    expected[0, 20:32, 1] = True
    # A scan may spread it to the chunk's earlier rows as well, never out of the chunk.
    assert got[expected].all() and not got[1].any() and not got[0, :, 0].any()
    assert not got[0, :16].any() and not got[0, 32:].any()


# ------------------------------------------------------------------------------------ beta, l2 norm


@pytest.mark.parametrize("twice", [False, True], ids=["to-1", "to-2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_beta_sigmoid(dtype: torch.dtype, twice: bool, device: str) -> None:
    """Strided logits; more than one block of 1024."""
    beta = (4 * torch.randn(2, 3, 200)).to(device, dtype).transpose(1, 2)
    exact = reference.beta_sigmoid(beta.to(FP64), twice)
    narrow = reference.beta_sigmoid(beta.float(), twice)
    got = beta_sigmoid_fwd(beta, twice)
    assert_within_budget("beta", got, exact, narrow, dtype=FP32, unit=UNIT32)


def test_beta_sigmoid_far_out(device: str) -> None:
    """No overflow on either side."""
    logits = torch.tensor([-torch.inf, -200, -88, -30, 0, 30, 88, 200, torch.inf], device=device)
    got = beta_sigmoid_fwd(logits.reshape(1, -1, 1), True).flatten().to(FP64)
    exact = reference.beta_sigmoid(logits.to(FP64), True)
    assert got.isfinite().all() and ((got - exact).abs() <= 2 * 2.0**-23).all()
    assert got[0] == 0 and got[-1] == 2


# K: one lane, below a power of two, at one, above one, the widest.
@pytest.mark.parametrize("K", [1, 16, 60, 100, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_l2norm(K: int, dtype: torch.dtype, device: str) -> None:
    """Views of one projection; more rows than one program takes."""
    case = Case("norm", "", T=37, B=2, H=3, HV=3, K=K)
    x = make_inputs(case, dtype, device, raw=True)
    got = l2norm_fwd(x.q, x.k)
    for name, y, z in zip("qk", (x.q, x.k), got, strict=True):
        exact = reference.l2norm(y.to(FP64))
        narrow = reference.l2norm(y)
        unit = torch.finfo(dtype).eps / 2
        assert_within_budget(name, z, exact, narrow, dtype=dtype, unit=unit)
        assert z.is_contiguous()


def test_l2norm_of_two_dtypes_and_odd_rows(device: str) -> None:
    """q and k each in its own dtype. Rows of 0 are 0, tiny rows are held down by the epsilon, large
    ones do not overflow in fp16, whose squares do."""
    q = torch.randn(1, 4, 1, 32, device=device)
    q[0, 0], q[0, 1] = 0, 1e-5
    k = (torch.randn(1, 4, 1, 32, device=device) * 1e4).clamp(-6e4, 6e4).to(FP16)
    got_q, got_k = l2norm_fwd(q, k)
    assert (got_q[0, 0] == 0).all()
    for y, z in ((q, got_q), (k, got_k)):
        narrow, exact = reference.l2norm(y), reference.l2norm(y.to(FP64))
        unit = torch.finfo(y.dtype).eps / 2
        assert_within_budget("norm", z, exact, narrow, dtype=y.dtype, unit=unit)


# ----------------------------------------------------------------------------------------------- wy


def check_wy(case: Case, x: Inputs, dtype: torch.dtype, device: str) -> None:
    """A_inv, u and w of one call."""
    arithmetic = Arithmetic(dtype, device)
    g_cumsum = reference.gate_cumsum(x.g, case.chunk_size, cu_seqlens=x.cu_seqlens)
    k, v, g64, beta = (y.to(FP64) for y in (x.k, x.v, g_cumsum, x.beta))
    packing: dict[str, Any] = {"cu_seqlens": x.cu_seqlens}
    A = reference.kkt(k, g64, beta, chunk_size=case.chunk_size, **packing)
    A_inv = reference.solve(A, **packing)
    w, u = reference.wy(k, v, g64, beta, A_inv, **packing)
    narrow_w, narrow_u = narrow_wy(x.k, x.v, g_cumsum, x.beta, case, arithmetic)
    narrow_A_inv = torch.zeros(A_inv.shape, dtype=dtype, device=device)
    inverses = narrow_inverse(x.k, g_cumsum, x.beta, case, arithmetic)
    for (_, b, start, end), inverse in zip(case.spans(), inverses, strict=True):
        narrow_A_inv[b, start:end, :, : end - start] = inverse.movedim(0, 1).to(dtype)

    # The rows of no sequence are the kernel's to leave alone, whatever their g_cumsum.
    got_w, got_u, got_A_inv = wy_fwd(
        x.k, x.v, g_cumsum, x.beta, chunks_of(case, x), dtype, store_A_inv=True
    )
    assert got_A_inv is not None
    for name, got, exact, narrow in (
        ("A_inv", got_A_inv, A_inv, narrow_A_inv),
        ("u", got_u, u, narrow_u),
        ("w", got_w, w, narrow_w),
    ):
        owned = [case.owned(y) for y in (got, exact, narrow)]
        assert_within_budget(name, *owned, dtype=dtype, unit=arithmetic.unit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases(SMALL + REAL))
def test_wy(case: Case, dtype: torch.dtype, device: str) -> None:
    check_wy(case, make_inputs(case, dtype, device), dtype, device)


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_wy_of_identical_keys(
    dtype: torch.dtype, chunk_size: int, beta: float, device: str
) -> None:
    """No decay and one key: A is beta below its whole diagonal, the worst that the inverse meets.
    At beta 2 every entry of the inverse has size 2, with powers of A past 10^18 on the way."""
    case = Case("same-key", "", T=2 * chunk_size + 5, chunk_size=chunk_size)
    x = make_inputs(case, dtype, device)
    # One coordinate: |k| is 1 in every dtype, so that beta 2 is a reflection and nothing grows.
    k = torch.zeros_like(x.k)
    k[..., 3] = 1
    x = x.but(k=k, beta=torch.full_like(x.beta, beta), g=torch.zeros_like(x.g))
    check_wy(case, x, dtype, device)


@pytest.mark.parametrize("g", [0.0, -20.0, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_wy_of_strong_gates(dtype: torch.dtype, g: float, device: str) -> None:
    """Cumulative decays down to 2^-1850, and 64 times the floor: past what 2^-x can hold, also in a
    ragged chunk of many rows, whose missing rows must not be read as decays of 1."""
    case = replace(case_named("chunk-64"), T=120)
    x = make_inputs(case, dtype, device)
    gates = x.g.clone()
    gates[:, :64:2] = g
    gates[:, 50:] = g
    check_wy(case, x.but(g=gates), dtype, device)


def test_wy_without_A_inv(device: str) -> None:
    """Asking for A_inv changes nothing else."""
    case = case_named("chunks-and-tail")
    x = make_inputs(case, FP32, device)
    g_cumsum = reference.gate_cumsum(x.g, case.chunk_size)
    arguments = (x.k, x.v, g_cumsum, x.beta, chunks_of(case, x), FP32)
    w, u, A_inv = wy_fwd(*arguments)
    kept_w, kept_u, _ = wy_fwd(*arguments, store_A_inv=True)
    assert A_inv is None
    assert same_bits(w, kept_w) and same_bits(u, kept_u)


def check_state(
    case: Case, x: Inputs, dtype: torch.dtype, device: str, initial_state: Tensor | None
) -> None:
    arithmetic = Arithmetic(dtype, device)
    g_cumsum, w, u = state_inputs(case, x, dtype)
    k64, w64, u64, g64 = (y.to(FP64) for y in (x.k, w, u, g_cumsum))
    exact = reference.state_pass(
        k64,
        w64,
        u64,
        g64,
        None if initial_state is None else initial_state.to(FP64),
        chunk_size=case.chunk_size,
        cu_seqlens=x.cu_seqlens,
    )
    narrow = narrow_state(x.k, w, u, g_cumsum, initial_state, case, arithmetic)
    chunks = chunks_of(case, x)
    h, v_new, final = state_fwd(
        x.k, w, u, g_cumsum, chunks, initial_state, N=case.N, output_final_state=True
    )
    assert h is not None and final is not None
    assert h.shape == (chunks.slots, case.HV, case.K, case.V)
    exact_h = exact.h.flatten(0, 1)
    used_h = h[: len(exact_h)]
    for name, got, wide, other, to in (
        ("h", used_h, exact_h, narrow[0], dtype),
        ("v_new", case.owned(v_new), case.owned(exact.v_new), case.owned(narrow[1]), dtype),
        ("final_state", final, exact.final_state, narrow[2], FP32),
    ):
        assert_within_budget(name, got, wide, other, dtype=to, unit=arithmetic.unit)


@pytest.mark.parametrize("with_state", [False, True], ids=["from-0", "from-state"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases(SMALL + REAL))
def test_state(case: Case, dtype: torch.dtype, with_state: bool, device: str) -> None:
    x = make_inputs(case, dtype, device)
    check_state(case, x, dtype, device, x.initial_state if with_state else None)


@pytest.mark.parametrize("g", [0.0, -20.0, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_state_of_strong_gates(dtype: torch.dtype, g: float, device: str) -> None:
    case = case_named("chunk-32")
    x = make_inputs(case, dtype, device)
    gates = x.g.clone()
    gates[:, 1::2] = g
    check_state(case, x.but(g=gates), dtype, device, x.initial_state)


@pytest.mark.parametrize("name", ["wide-key", "wide-value", "packed"])
def test_state_layouts(name: str, device: str) -> None:
    """The two layouts, and the states that nobody asked for, change no bit of the rest."""
    case = case_named(name)
    x = make_inputs(case, FP32, device)
    g_cumsum, w, u = state_inputs(case, x, FP32)
    arguments = (x.k, w, u, g_cumsum, chunks_of(case, x))
    options: dict[str, Any] = {"N": case.N}
    h, v_new, final = state_fwd(*arguments, x.initial_state, output_final_state=True, **options)
    h_v, v_new_v, final_v = state_fwd(
        *arguments, x.initial_state.mT, output_final_state=True, state_v_first=True, **options
    )
    no_h, v_new_no_h, no_final = state_fwd(*arguments, x.initial_state, store_h=False, **options)
    assert h is not None and h_v is not None and final is not None and final_v is not None
    C = len(list(case.spans()))
    assert same_bits(h[:C], h_v[:C])
    assert same_bits(final, final_v.mT)
    assert final.is_contiguous() and final_v.is_contiguous()
    assert final_v.shape == (case.N, case.HV, case.V, case.K)
    assert same_bits(case.owned(v_new), case.owned(v_new_v))
    assert same_bits(case.owned(v_new), case.owned(v_new_no_h))
    assert no_h is None and no_final is None


@pytest.mark.parametrize("dtype", [FP16, FP32, FP64])
def test_initial_state_of_any_dtype(dtype: torch.dtype, device: str) -> None:
    """Read as fp32, whatever it is. Expanded over sequences: a stride of 0."""
    case = Case("state-dtype", "", T=20, B=3)
    x = make_inputs(case, FP32, device)
    state = x.initial_state[:1].to(dtype).expand(3, -1, -1, -1)
    check_state(case, x, FP32, device, state)


def test_empty_sequence_passes_its_state_through(device: str) -> None:
    case = case_named("packed")
    x = make_inputs(case, FP32, device)
    g_cumsum, w, u = state_inputs(case, x, FP32)
    _, _, final = state_fwd(
        x.k, w, u, g_cumsum, chunks_of(case, x), x.initial_state, N=case.N, output_final_state=True
    )
    assert final is not None and case.lengths is not None
    for n, length in enumerate(case.lengths):
        assert same_bits(final[n], x.initial_state[n]) == (length == 0)


# ------------------------------------------------------------------------------------------- output


def check_output(
    case: Case, x: Inputs, dtype: torch.dtype, device: str, scale: float, o_dtype: torch.dtype
) -> Tensor:
    arithmetic = Arithmetic(dtype, device)
    g_cumsum, w, u = state_inputs(case, x, dtype)
    q64, k64, w64, u64, g64, start = (
        y.to(FP64) for y in (x.q, x.k, w, u, g_cumsum, x.initial_state)
    )
    state = reference.state_pass(
        k64,
        w64,
        u64,
        g64,
        start,
        chunk_size=case.chunk_size,
        cu_seqlens=x.cu_seqlens,
    )
    h, v_new = state.h.to(dtype), state.v_new.to(dtype)
    exact = reference.output(
        q64,
        k64,
        v_new.to(FP64),
        h.to(FP64),
        g64,
        scale,
        chunk_size=case.chunk_size,
        cu_seqlens=x.cu_seqlens,
    )
    h = h.flatten(0, 1)
    narrow = narrow_output(x.q, x.k, v_new, h, g_cumsum, scale, case, arithmetic, o_dtype)
    chunks = chunks_of(case, x)
    slots = h.new_full((chunks.slots, case.HV, case.K, case.V), torch.nan)
    slots[: len(h)] = h
    # Rows of no sequence hold NaN here as they may in a pipeline: they must be written, not read.
    if case.packed:
        v_new[:, case.offsets()[-1] :] = torch.nan
    got = output_fwd(x.q, x.k, v_new, slots, g_cumsum, chunks, scale, o_dtype)
    assert_within_budget("o", got, exact, narrow, dtype=o_dtype, unit=arithmetic.unit)
    assert got.is_contiguous()
    if case.packed:
        assert (got[:, case.offsets()[-1] :] == 0).all()
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases(SMALL + REAL))
def test_output(case: Case, dtype: torch.dtype, device: str) -> None:
    check_output(case, make_inputs(case, dtype, device), dtype, device, case.K**-0.5, dtype)


@pytest.mark.parametrize("scale", [0.0, -1.0, 1, 3.7])
def test_output_scale(scale: float, device: str) -> None:
    """Taken literally; 1, an int, is what a compiler may specialise on."""
    case = case_named("chunks-and-tail")
    got = check_output(case, make_inputs(case, FP32, device), FP32, device, scale, FP32)
    assert bool((got == 0).all()) == (scale == 0)


@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_output_dtype(dtype: torch.dtype, device: str) -> None:
    """o in q's dtype, although the products are in the widest of the three."""
    case = case_named("chunks-and-tail")
    x = make_inputs(case, FP16, device)
    check_output(case, x, FP32 if dtype == FP16 else FP16, device, 0.25, dtype)


@pytest.mark.parametrize("g", [0.0, -20.0, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_of_strong_gates(dtype: torch.dtype, g: float, device: str) -> None:
    case = case_named("chunk-64")
    x = make_inputs(case, dtype, device)
    gates = x.g.clone()
    gates[:, ::3] = g
    check_output(case, x.but(g=gates), dtype, device, 0.25, dtype)
