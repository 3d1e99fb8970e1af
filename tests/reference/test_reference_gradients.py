"""Gradients: see test_reference.py."""

import math
from collections.abc import Callable

import pytest
import torch
from reference_cases import (
    FP32,
    FP64,
    REGIMES,
    Case,
    Inputs,
    assert_close,
    make,
    regimes,
    relative_error,
)
from torch import Tensor
from torch.autograd import forward_ad as fwAD

from gdn_triton import reference
from gdn_triton.constants import LOG2_DECAY_FLOOR
from gdn_triton.reference import (
    chunk_gated_delta_rule,
    recurrent_gated_delta_rule,
)

# ---------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
def test_autocast_changes_no_gradient(form: Callable[..., tuple]) -> None:
    """Wherever backward is called, and at second order."""
    inputs = make(Case()).to(FP32)
    leaves = [x.requires_grad_() for x in inputs.tokens]

    def both(autocast_forward: bool, autocast_backward: bool) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast_forward):
            o = form(*leaves)[0]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast_backward):
            first = torch.autograd.grad(o.square().sum(), leaves, create_graph=True)
            loss = sum(x.square().sum() for x in first)
            assert isinstance(loss, Tensor)
            return [*first, *torch.autograd.grad(loss, leaves)]

    expected = both(False, False)
    for where in ((True, True), (False, True), (True, False)):
        for x, y in zip(both(*where), expected, strict=True):
            assert torch.equal(x, y), where


FORMS = pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])


def small_call(form: Callable[..., tuple]) -> tuple[Callable[..., tuple], list[Tensor]]:
    """A packed call as a function of its differentiable inputs, and those."""
    inputs = make(Case(lengths=(2, 0, 1), H=1, HV=2, K=2, V=2, orphans=1))
    options = {"chunk_size": 2} if form is chunk_gated_delta_rule else {}

    def run(*x: Tensor) -> tuple:
        return form(*x[:5], initial_state=x[5], cu_seqlens=inputs.cu_seqlens, **options)[:2]

    return run, [x.requires_grad_() for x in (*inputs.tokens, inputs.initial_state)]


@FORMS
def test_derivatives_of_every_kind(form: Callable[..., tuple]) -> None:
    """Second ones, batched ones, and forward-mode ones of inputs that require no gradient."""
    run, leaves = small_call(form)
    kinds = {"check_forward_ad": True, "check_batched_grad": True}
    assert torch.autograd.gradcheck(run, leaves, **kinds)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@FORMS
def test_forward_mode_of_inputs_that_require_a_gradient(form: Callable[..., tuple]) -> None:
    run, leaves = small_call(form)
    tangents = [torch.randn_like(x) for x in leaves]

    def directional(inputs: list[Tensor]) -> list[Tensor]:
        with fwAD.dual_level():
            results = run(*map(fwAD.make_dual, inputs, tangents))
            return [fwAD.unpack_dual(y).tangent.detach() for y in results]

    expected = directional([x.detach() for x in leaves])
    for got, right in zip(directional(leaves), expected, strict=True):
        assert_close(got, right, 1e-14, at_least=1.0)


def test_derivatives_of_solve() -> None:
    """The derivatives of entries at and above the diagonal are 0, because solve does not read
    them."""
    A = torch.randn(1, 3, 2, 2, dtype=FP64, requires_grad=True)
    assert torch.autograd.gradcheck(reference.solve, (A,), check_forward_ad=True)
    with fwAD.dual_level():
        tangent = torch.randn_like(A)
        of_leaf, of_other = (
            fwAD.unpack_dual(reference.solve(fwAD.make_dual(x, tangent))).tangent
            for x in (A, A.detach())
        )
    assert_close(of_leaf.detach(), of_other, 1e-14, at_least=1.0)


def gradients(form: Callable[..., tuple], inputs: Inputs, **options: int) -> list[Tensor]:
    """The gradients of q, k, v, g, beta and initial_state, for random gradients of both outputs."""
    leaves = [x.clone().requires_grad_() for x in (*inputs.tokens, inputs.initial_state)]
    o, final_state = form(
        *leaves[:5], initial_state=leaves[5], cu_seqlens=inputs.cu_seqlens, **options
    )[:2]
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(o.shape, generator=generator, dtype=o.dtype)
    dht = torch.randn(final_state.shape, generator=generator, dtype=o.dtype)
    return list(torch.autograd.grad([o, final_state], leaves, [do, dht]))


@regimes
def test_chunk_gradients_are_recurrent_gradients(case: Case) -> None:
    inputs = make(case)
    expected = gradients(recurrent_gated_delta_rule, inputs)
    actual = gradients(chunk_gated_delta_rule, inputs, chunk_size=case.chunk_size)
    for ours, right in zip(actual, expected, strict=True):
        # Strong decay leaves a gradient of g near 1e-9, as a difference of terms near 1; -inf gates
        # round the sums.
        assert_close(ours, right, 1e-10, at_least=1.0)


@pytest.mark.parametrize(
    "name", ["forget_all", "forget_some", "packed_forget_some", "strong_decay"]
)
def test_float32_gradients_are_finite(name: str) -> None:
    case = REGIMES[name]
    inputs = make(case).to(FP32)
    for gradient in gradients(chunk_gated_delta_rule, inputs, chunk_size=case.chunk_size):
        assert torch.isfinite(gradient).all()
        assert gradient.any() or name == "forget_all"


@pytest.mark.parametrize("n", [0, 1, 8, 32, 56])
def test_what_gates_of_minus_infinity_cost_in_float32(n: int) -> None:
    """The rest of their chunk: each adds the floor to sums of which differences are taken, so a
    decay's logarithm is off by the unit roundoff of the sum. The recurrence takes no differences.
    """
    inputs = make(Case(T=64, chunk_size=64))
    others = -inputs.g[:, n:].sum(1).min().item()
    inputs.g[:, :n] = -torch.inf
    exact = recurrent_gated_delta_rule(*inputs.tokens)
    narrow = inputs.to(FP32).tokens
    unit = 2.0**-24
    lost = unit * (math.log(2) * -LOG2_DECAY_FLOOR[FP32] * n + others)
    for form, allowed in ((recurrent_gated_delta_rule, 0.0), (chunk_gated_delta_rule, lost)):
        o, final_state = form(*narrow)[:2]
        assert relative_error(o[:, n:], exact[0][:, n:]) < allowed + 16 * unit
        assert relative_error(final_state, exact[1]) < allowed + 16 * unit


@pytest.mark.parametrize(
    "case",
    [
        Case(T=5, H=1, HV=2, K=3, V=2, chunk_size=4),
        Case(lengths=(3, 0, 5), H=1, K=2, V=3, chunk_size=2, orphans=1),
    ],
    ids=["padded", "packed"],
)
def test_gradcheck(case: Case) -> None:
    inputs = make(case)

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple:
        return chunk_gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            initial_state=state,
            cu_seqlens=inputs.cu_seqlens,
            chunk_size=case.chunk_size,
        )[:2]

    leaves = [x.requires_grad_() for x in (*inputs.tokens, inputs.initial_state)]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=False)


def test_gradcheck_through_norm_sigmoid_and_gate() -> None:
    inputs = make(Case(T=5, H=1, HV=2, K=3, V=2))
    generator = torch.Generator().manual_seed(2)
    A_log, dt_bias = torch.randn(2, 2, generator=generator, dtype=FP64).unbind()

    def run(*x: Tensor) -> tuple:
        return chunk_gated_delta_rule(
            *x[:5],
            A_log=x[5],
            dt_bias=x[6],
            use_gate=True,
            use_qk_l2norm=True,
            use_beta_sigmoid=True,
            allow_neg_eigval=True,
            chunk_size=4,
        )[:2]

    leaves = [x.clone().requires_grad_() for x in (*inputs.tokens, A_log, dt_bias)]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=False)
