"""The gradients of chunks in Gluon for compute capability 9.0: the calls that the kernel serves,
and on such a GPU its results against float64. tests/host/test_gluon_emulated.py emulates it."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from backward_cases import STRENGTHS, TaskOptions, by_op, check_alone, check_task, make_task
from choice_cases import problem
from gluon_gradients import check_gradients
from helpers import BF16, FP16, FP32, Case, cases, make_inputs, same_bits
from hopper_cases import (
    ODD_STRIDES,
    ONE_TO_ONE,
    ONE_TOKEN,
    PACKED,
    SMALL,
    SMALL_PACKED,
    TAIL,
    hopper,
    hopper_case,
    run_by_gluon,
)
from torch import Tensor

from gdn_triton.chunk import backends
from gdn_triton.chunk.backends import chunk_kernels
from gdn_triton.chunk.triton.gradients.gate import LEAST_BETA, gate_bwd
from gdn_triton.chunk.triton.gradients.state import state_bwd
from gdn_triton.chunk.triton.hopper.support import gradients_refusal
from gdn_triton.chunk.triton.shared.chunks import make_chunks
from gdn_triton.chunk.triton.steps.l2norm import l2norm_fwd, l2norm_with_factors
from gdn_triton.constants import L2NORM_EPS

COMMON = problem(T=300, H=2, HV=4, K=128, V=128, needs_grad=True)


@pytest.mark.usefixtures("on_a_hopper")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"K": 8, "V": 24}, None),
        ({"q_dtype": FP16, "k_dtype": FP16, "v_dtype": FP16}, "chunks .* takes bfloat16"),
        ({"k_dtype": FP32}, "in bfloat16"),
        ({"chunk_size": 32}, "chunk_size is 32"),
        ({"K": 256}, "K is 256"),
        ({"V": 136}, "V up to 128; V is 136"),
        ({"T": 0}, "empty"),
        ({"device": torch.device("cpu")}, "NVIDIA GPU"),
    ],
)
def test_refusals(change: dict[str, Any], words: str | None) -> None:
    refusal = gradients_refusal(replace(COMMON, **change))
    assert refusal is None if words is None else re.search(words, str(refusal))


@pytest.mark.usefixtures("on_a_hopper")
def test_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    said = str(chunk_kernels(COMMON, "triton"))
    assert said.endswith(
        "The gradients of chunks are by the Gluon kernel for compute capability 9.0."
    )
    monkeypatch.setenv("GDN_GLUON", "0")
    said = str(chunk_kernels(COMMON, "triton"))
    assert "The gradients of chunks are by the portable kernels. GDN_GLUON=0 asks" in said
    assert "gradients" not in str(chunk_kernels(replace(COMMON, needs_grad=False), "triton"))


@pytest.mark.parametrize("HV", [2, 9])
def test_gates_take_what_the_kernel_leaves(device: str, HV: int) -> None:
    """dg and dbeta from its four planes of pairs are those from the portable kernels' three. Where
    beta is so small that dv holds dx, dv is completed, and dbeta is found from dx."""
    B, T, V = 1, 70, 24
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    dbeta, queries, later, earlier = normal(4, B, HV, T)
    to_queries, read, behind = normal(3, B, HV, T)
    # v is wider, as rows of whole lines are.
    beta, lines, dx = normal(B, T, HV), normal(B, T, HV, 64), normal(B, T, HV, V)
    lines[..., V:] = 0
    v = lines[..., :V]
    beta[:, 3], beta[:, 66] = 0.0, LEAST_BETA / 2
    beta[:, 5, -1] = LEAST_BETA / 2
    per_head = beta.transpose(1, 2)
    small = per_head.abs() < LEAST_BETA
    dbeta = torch.where(small, (dx * v).sum(-1).transpose(1, 2) + later - read, dbeta)
    chunks = make_chunks(B, T, 64)
    rest = {"across": normal(1, chunks.slots, HV), "beta_used": beta, "beta": beta}
    rest |= {"g": normal(B, T, HV), "chunks": chunks}

    weighted = per_head * later - earlier
    three = torch.stack([dbeta + read, weighted, queries])
    shares = torch.stack([to_queries, read, behind])[None]
    expected = gate_bwd(pair_shares=three, shares=shares, **rest)

    factor = torch.where(small, 1.0, per_head)
    dv = dx * factor.transpose(1, 2)[..., None]
    four = torch.stack([dbeta * per_head * factor, queries, factor * later, earlier])
    shares = torch.stack([to_queries, factor * read, behind])[None]
    found = gate_bwd(pair_shares=four, shares=shares, v=lines, dv=dv, **rest)
    torch.testing.assert_close(found.dg, expected.dg)
    torch.testing.assert_close(found.dbeta, expected.dbeta)
    torch.testing.assert_close(dv, dx * beta[..., None])


def test_factors_of_the_norm(device: str) -> None:
    """They make the normalised rows, which have the bits of a norm that keeps no factors."""
    x = torch.randn(2, 2, 19, 3, 24, generator=torch.Generator().manual_seed(5))
    q, k = x[0].to(device), 3 * x[1].transpose(1, 2).contiguous().transpose(1, 2).to(device)
    normalized_q, normalized_k, factors = l2norm_with_factors(q, k)
    for y, near, alone, factor in zip(
        (q, k), (normalized_q, normalized_k), l2norm_fwd(q, k), factors, strict=True
    ):
        assert same_bits(near, alone)
        assert same_bits(near, y * factor[..., None])
        exact = (y.double().square().sum(-1) + L2NORM_EPS).rsqrt()
        torch.testing.assert_close(factor.double(), exact, rtol=1e-6, atol=0)


def test_walk_stores_dv(device: str) -> None:
    """Beta dx instead of dx, but dx where |beta| is small."""
    B, T, HV, K, V, BT = 1, 40, 2, 16, 16, 16
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    beta = normal(B, T, HV)
    beta[:, 3], beta[:, 20] = 0.0, LEAST_BETA / 2
    x: dict[str, Any] = {"q": normal(B, T, 1, K), "k": normal(B, T, 1, K), "beta": beta}
    x |= {"v": normal(B, T, HV, V), "do": normal(B, T, HV, V), "own": normal(B, T, HV)}
    x |= {"A_inv": 0.1 * normal(B, T, HV, BT), "A_qk": 0.1 * normal(B, T, HV, BT)}
    x |= {"g_cumsum": -normal(B, T, HV).abs(), "chunks": make_chunks(B, T, BT), "scale": 0.3}
    dx, dv = (state_bwd(**x, N=1, K=K, A_is_strict=False, store_dv=on).dx for on in (False, True))
    factor = torch.where(beta.abs() < LEAST_BETA, 1.0, beta)
    torch.testing.assert_close(dv, dx * factor[..., None])


# ------------------------------------------------------------------------------------ on such a GPU


@pytest.fixture
def gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    from gdn_triton.chunk.triton.gradients.query_key import query_key_bwd_kernel

    run_by_gluon(monkeypatch, portable=query_key_bwd_kernel)


@pytest.fixture(params=["portable walks", "Gluon walks"])
def after(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walks that run before the kernel."""
    if request.param == "portable walks":
        monkeypatch.setattr(backends, "walks_refusal", lambda problem: "They are not asked for.")


CASES = [
    TAIL,
    ONE_TOKEN,
    PACKED,
    hopper_case("many", "several items of each program", T=2000, B=2, H=8, HV=16),
    ODD_STRIDES,
    SMALL,
    SMALL_PACKED,
    hopper_case("three", "three value heads a key head", T=130, HV=6),
    ONE_TO_ONE,
]


@hopper
@pytest.mark.usefixtures("gluon")
@pytest.mark.parametrize("case", cases(CASES))
@pytest.mark.parametrize("strength", [0.2, 20.0])
@pytest.mark.parametrize("norm", [False, True])
def test_kernel(case: Case, strength: float, norm: bool) -> None:
    from gdn_triton.chunk.triton.hopper.gradients.launch import chunk_gradients

    check_gradients(case, "cuda", chunk_gradients, strength=strength, seed=0, norm=norm)


@hopper
@pytest.mark.usefixtures("gluon", "after")
@pytest.mark.parametrize("case", cases(CASES))
@pytest.mark.parametrize(
    "options", [TaskOptions(), TaskOptions(l2norm=True, sigmoid=True, negative=True, gate=True)]
)
def test_gradients(case: Case, options: TaskOptions) -> None:
    check_task(make_task(case, BF16, "cuda", options), BF16, "cuda")


@hopper
@pytest.mark.usefixtures("gluon", "after")
@pytest.mark.parametrize("strength", STRENGTHS)
def test_gates(strength: str) -> None:
    x = make_inputs(PACKED, BF16, "cuda")
    g = torch.nn.functional.logsigmoid(torch.randn(x.g.shape, device="cuda"))
    task = make_task(PACKED, BF16, "cuda", TaskOptions(), x.but(g=STRENGTHS[strength](g)))
    check_task(task, BF16, "cuda")


@hopper
@pytest.mark.usefixtures("gluon", "after")
def test_small_betas() -> None:
    """Rows of dv that are dx, and rows with the least beta of the others."""
    x = make_inputs(CASES[0], BF16, "cuda")
    beta = x.beta.clone()
    for place, exponent in enumerate((-126, -24, -18, -13, -12, -11)):
        beta[:, place::11] = 2.0**exponent
    check_task(make_task(CASES[0], BF16, "cuda", TaskOptions(), x.but(beta=beta)), BF16, "cuda")


@hopper
@pytest.mark.usefixtures("gluon", "after")
def test_same_bits() -> None:
    """Again, and each sequence alone."""
    task = make_task(CASES[3], BF16, "cuda", TaskOptions())
    expected = by_op(task)
    for _ in range(10):
        for name, x in by_op(task).items():
            assert same_bits(x, expected[name]), name
    short = hopper_case("short", "", lengths=(70, 0, 130), orphans=5)
    check_alone(short, BF16, "cuda")
