"""The fused kernels; nothing to do; this harness: see test_kernels.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import (
    DTYPES,
    FP16,
    FP32,
    FP64,
    REAL,
    SMALL,
    Case,
    assert_within_budget,
    cases,
    make_inputs,
    same_bits,
    unit_rows,
)
from kernel_cases import UNIT32, case_named, chunks_of, state_inputs
from narrow import (
    Arithmetic,
    keep_bits,
    narrow_decay,
    narrow_gate_cumsum,
    narrow_heads,
    narrow_inverse,
    narrow_output,
    narrow_state,
)
from torch import Tensor

from gdn_triton import reference
from gdn_triton.chunk.triton.fused.prepare import prepare_fwd
from gdn_triton.chunk.triton.fused.walk import fused_fwd
from gdn_triton.chunk.triton.steps.gate import beta_sigmoid_fwd, gate_cumsum_fwd
from gdn_triton.chunk.triton.steps.l2norm import l2norm_fwd
from gdn_triton.chunk.triton.steps.output import output_fwd
from gdn_triton.chunk.triton.steps.state import state_fwd
from gdn_triton.chunk.triton.steps.wy import wy_fwd

# ------------------------------------------------------------------------------ the fused kernels

FUSED = [
    case
    for case in SMALL + REAL
    if case.name
    in ("one-token", "groups", "chunk-32", "chunk-64", "wide-key", "packed", "packed-orphans")
    or case.gpu
]


def diagonal(case: Case, columns: Tensor) -> Tensor:
    """[B, T, HV, BT] -> [B, T, HV]: the column of each token itself."""
    out = columns.new_zeros(columns.shape[:3])
    for _, b, start, end in case.spans():
        out[b, start:end] = columns[b, start:end].diagonal(dim1=0, dim2=2).T
    return out


def exact_A_qk(q: Tensor, k: Tensor, g_cumsum: Tensor, scale: float, case: Case) -> Tensor:
    """The weights of v_new in the output, [B, T, HV, BT] float64: the output of columns of 1."""
    B, T, HV = g_cumsum.shape
    columns = torch.zeros(B, T, HV, case.chunk_size, dtype=FP64, device=q.device)
    spans = list(case.spans())
    for _, b, start, end in spans:
        one = torch.eye(case.chunk_size, dtype=FP64, device=q.device)
        columns[b, start:end] = one[: end - start, None]
    h = columns.new_zeros(B, len(spans) // B, HV, case.K, case.chunk_size)
    cu_seqlens = case.cu_seqlens(str(q.device))
    return reference.output(
        q, k, columns, h, g_cumsum, scale, chunk_size=case.chunk_size, cu_seqlens=cu_seqlens
    )


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("case", cases(FUSED))
def test_prepare(case: Case, dtype: torch.dtype, device: str) -> None:
    """Gate, norm, sigmoid, inverse and weights in one kernel; the diagonals apart, in fp32."""
    arithmetic = Arithmetic(dtype, device)
    x = make_inputs(case, dtype, device, raw=True)
    A_log, dt_bias = torch.randn(2, case.HV).to(device)
    prepared = prepare_fwd(
        x.q,
        x.k,
        x.g,
        x.beta,
        chunks_of(case, x),
        0.3,
        dtype,
        A_log=A_log,
        dt_bias=dt_bias,
        use_qk_l2norm=True,
        use_beta_sigmoid=True,
        allow_neg_eigval=True,
    )
    got_g, got_beta, got_qk = prepared.scalars.transpose(2, 3)

    def check(name: str, got: Tensor, exact: Tensor, narrow: Tensor, to: torch.dtype) -> None:
        owned = [case.owned(y) for y in (got, exact, narrow)]
        unit = UNIT32 if to == FP32 else arithmetic.unit
        assert_within_budget(name, *owned, dtype=to, unit=unit)

    q, k = reference.l2norm(x.q), reference.l2norm(x.k)
    q64, k64 = reference.l2norm(x.q.to(FP64)), reference.l2norm(x.k.to(FP64))
    check("q", prepared.q[..., : case.K], q64, q, dtype)
    check("k", prepared.k[..., : case.K], k64, k, dtype)
    packing: dict[str, Any] = {"cu_seqlens": x.cu_seqlens}
    g64 = reference.gate(x.g.to(FP64), A_log, dt_bias)
    g64 = reference.gate_cumsum(g64, case.chunk_size, **packing)
    g = narrow_gate_cumsum(reference.gate(x.g, A_log, dt_bias), case)
    check("g_cumsum", got_g, g64, g, FP32)
    beta64 = reference.beta_sigmoid(x.beta.to(FP64), True)
    beta = reference.beta_sigmoid(x.beta, True)
    check("beta", got_beta, beta64, beta, FP32)

    A_inv = reference.solve(
        reference.kkt(k64, g64, beta64, chunk_size=case.chunk_size, **packing), **packing
    )
    weights = exact_A_qk(q64, k64, g64, 0.3, case)
    exact_A = torch.zeros_like(A_inv)
    narrow_A, narrow_qk = (torch.zeros(A_inv.shape, device=device) for _ in range(2))
    inverses = narrow_inverse(k, g, beta, case, arithmetic)
    for (_, b, start, end), inverse in zip(case.spans(), inverses, strict=True):
        chunk, n = slice(start, end), end - start
        own = torch.eye(case.chunk_size, device=device).bool()[:n, None]
        exact_A[b, chunk] = A_inv[b, chunk].masked_fill(own, 0)
        narrow_A[b, chunk, :, :n] = inverse.movedim(0, 1)
        narrow_A[b, chunk].masked_fill_(own, 0)
        q_c, k_c, g_c = (narrow_heads(y[b, chunk], case.HV) for y in (q, k, g))
        product = arithmetic.product(arithmetic.operand(q_c), arithmetic.operand(k_c).mT)
        narrow_qk[b, chunk, :, :n] = (0.3 * product * narrow_decay(g_c, 0)).movedim(0, 1)
    # The diagonal comes from q and k in the dtype, summed in fp32.
    own_qk = diagonal(case, weights)
    narrow_own = diagonal(case, narrow_qk)
    assert_within_budget(
        "q k",
        *(case.owned(y) for y in (got_qk, own_qk, narrow_own)),
        dtype=FP32,
        unit=arithmetic.unit,
    )
    for _, b, start, end in case.spans():
        own = torch.eye(case.chunk_size, device=device).bool()[: end - start, None]
        weights[b, start:end].masked_fill_(own, 0)
        narrow_qk[b, start:end].masked_fill_(own, 0)
    check("A_inv", prepared.A_inv, exact_A, narrow_A.to(dtype), dtype)
    check("A_qk", prepared.A_qk, weights, narrow_qk.to(dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("case", cases(FUSED))
def test_fused(case: Case, dtype: torch.dtype, device: str) -> None:
    """The walk alone: against the steps in float64 from what the kernel before it has written. It
    takes 16-bit products only."""
    arithmetic = Arithmetic(dtype, device)
    x = make_inputs(case, dtype, device)
    size: dict[str, Any] = {"chunk_size": case.chunk_size, "cu_seqlens": x.cu_seqlens}
    chunks = chunks_of(case, x)
    prepared = prepare_fwd(x.q, x.k, x.g, x.beta, chunks, 0.3, dtype)
    g_cumsum, beta, _ = prepared.scalars.transpose(2, 3).contiguous()

    q, k, v, g64, state = (y.to(FP64) for y in (x.q, x.k, x.v, g_cumsum, x.initial_state))
    # Rows of no sequence were never written. The diagonal, 1, was left out.
    A_inv, beta64 = (y.to(FP64).nan_to_num() for y in (prepared.A_inv, beta))
    for _, b, start, end in case.spans():
        rows = torch.arange(end - start, device=device)
        A_inv[b, start + rows, :, rows] = 1
    w, u = reference.wy(k, v, g64.nan_to_num(), beta64, A_inv, cu_seqlens=x.cu_seqlens)
    passed = reference.state_pass(k, w, u, g64, state, **size)
    exact = reference.output(q, k, passed.v_new, passed.h, g64, 0.3, **size)
    h, v_new, final = narrow_state(
        x.k, w.to(dtype), u.to(dtype), g_cumsum, x.initial_state, case, arithmetic
    )
    narrow = narrow_output(x.q, x.k, v_new, h, g_cumsum, 0.3, case, arithmetic, dtype)

    got, got_final = fused_fwd(
        prepared,
        x.v,
        chunks,
        0.3,
        dtype,
        x.initial_state,
        N=case.N,
        K=case.K,
        output_final_state=True,
    )
    assert got_final is not None
    assert_within_budget("o", got, exact, narrow, dtype=dtype, unit=arithmetic.unit)
    assert_within_budget(
        "final_state", got_final, passed.final_state, final, dtype=FP32, unit=arithmetic.unit
    )


# ------------------------------------------------------------------------------------ nothing to do


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_no_tokens(packed: bool, device: str) -> None:
    """T = 0 launches nothing that fails: shapes, and states passed through."""
    case = Case("nothing", "", T=0, B=2)
    if packed:
        case = replace(case, B=1, lengths=(0, 0))
    x = make_inputs(case, FP32, device)
    chunks = chunks_of(case, x)
    g_cumsum = gate_cumsum_fwd(x.g, chunks)
    w, u, _ = wy_fwd(x.k, x.v, g_cumsum, x.beta, chunks, FP32)
    h, v_new, final = state_fwd(
        x.k, w, u, g_cumsum, chunks, x.initial_state, N=2, output_final_state=True
    )
    assert h is not None and final is not None
    o = output_fwd(x.q, x.k, v_new, h, g_cumsum, chunks, 1.0, FP32)
    assert o.shape == x.v.shape and h.shape[0] == 0
    assert same_bits(final, x.initial_state)
    assert beta_sigmoid_fwd(x.beta).shape == x.beta.shape
    assert l2norm_fwd(x.q, x.k)[0].shape == x.q.shape


# ------------------------------------------------------------------------------------ this harness


def test_the_budget_notices(device: str) -> None:
    """A factor of 1.01, and one value of 3520 that is off by a thirtieth of their size."""
    case = case_named("chunks-and-tail")
    x = make_inputs(case, FP16, device)
    arithmetic = Arithmetic(FP16, device)
    g_cumsum, w, u = state_inputs(case, x, FP16)
    h, v_new, _ = narrow_state(x.k, w, u, g_cumsum, None, case, arithmetic)
    narrow = narrow_output(x.q, x.k, v_new, h, g_cumsum, 0.25, case, arithmetic, FP16)
    shaped = h.unflatten(0, (case.B, -1))
    q, k, v, h, g = (y.to(FP64) for y in (x.q, x.k, v_new, shaped, g_cumsum))
    exact = reference.output(q, k, v, h, g, 0.25, chunk_size=case.chunk_size)
    unit = arithmetic.unit
    assert_within_budget("o", narrow, exact, narrow, dtype=FP16, unit=unit)
    with pytest.raises(AssertionError, match="error"):
        assert_within_budget("o", narrow * 1.01, exact, narrow, dtype=FP16, unit=unit)
    one_off = narrow.clone()
    one_off[0, 3, 0, 5] += 0.01
    with pytest.raises(AssertionError, match="error"):
        assert_within_budget("o", one_off, exact, narrow, dtype=FP16, unit=unit)
    with pytest.raises(AssertionError, match="not finite"):
        assert_within_budget("o", narrow / 0, exact, narrow, dtype=FP16, unit=unit)


def test_keep_bits() -> None:
    """The stand-in for tf32 rounds to nearest."""
    x = unit_rows(50, 50)
    for bits in (11, 22):
        error = (keep_bits(x, bits) - x).abs()
        assert (error <= x.abs() * 2.0**-bits).all() and (error > 0).any()
    assert keep_bits(torch.tensor([1.0, -0.5, 0.0]), 11).tolist() == [1.0, -0.5, 0.0]
