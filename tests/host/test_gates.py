"""The activation of the gate in every backend and operator, where its factors leave float32 and
where decays are strong: values and gradients, against float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gate_cases import (
    TINY,
    UNIT,
    GateCall,
    Gates,
    check_values,
    exact_gate,
    far_gates,
    relative_error,
    strong_gates,
)
from helpers import DTYPES, FP32, FP64
from torch import Tensor

import gdn_triton
from gdn_triton import reference
from gdn_triton.constants import SOFTPLUS_THRESHOLD

GATES = pytest.mark.parametrize("make", [far_gates, strong_gates], ids=["far", "strong"])
BACKENDS = pytest.mark.parametrize("backend", ["reference", "triton"])


@GATES
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunked_form_in_triton(
    dtype: torch.dtype, make: Callable[[], Gates], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_BACKEND", "triton")
    call = GateCall(make(), dtype, device)
    call.check(call.by_op())


@GATES
@pytest.mark.parametrize("recurrent", [False, True], ids=["chunk", "recurrence"])
def test_reference(
    recurrent: bool, make: Callable[[], Gates], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_BACKEND", "reference")
    call = GateCall(make(), FP32, "cpu")
    call.check(call.by_op(recurrent=recurrent))


@GATES
def test_recurrence_in_triton(
    make: Callable[[], Gates], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_BACKEND", "triton")
    call = GateCall(make(), FP32, device)
    call.check(call.by_op(recurrent=True, gradients=False), gradients=False)


@GATES
@BACKENDS
def test_one_step(
    backend: str, make: Callable[[], Gates], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token is a sequence here: its state decays by its gate, and nothing is written to it."""
    monkeypatch.setenv("GDN_BACKEND", backend)
    device = "cpu" if backend == "reference" else device
    gates = make()
    T, HV = gates.raw.shape
    state = torch.ones(T, HV, 1, 1, device=device)
    mixed = torch.zeros(T, 2 * HV + HV, device=device)
    raw = {"a": gates.raw, "b": gates.raw, "A_log": gates.A_log, "dt_bias": gates.dt_bias}
    slots = torch.arange(T, device=device, dtype=torch.int32)
    gdn_triton.recurrent_step(
        state, slots, mixed_qkv=mixed, **{name: x.to(device) for name, x in raw.items()}
    )
    g = exact_gate(gates.raw + gates.dt_bias, gates.A_log)
    # The error of g is one of its exponential, which has its own roundings.
    allowed = (relative_error(gates, device) * g.abs() + 8 * UNIT) * g.exp() + TINY
    assert ((state.cpu().view(T, HV).to(FP64) - g.exp()).abs() <= allowed).all()


def prepared(backend: str, gates: Gates, device: str, **options: Any) -> Tensor:
    T, HV = gates.raw.shape
    raw = {"a": gates.raw, "b": gates.raw, "A_log": gates.A_log, "dt_bias": gates.dt_bias}
    sizes = {"num_k_heads": 1, "head_k_dim": 4, "head_v_dim": 4}
    x = torch.zeros(T, 8 + 4 * HV, device=device)
    given = {name: y.to(device) for name, y in raw.items()}
    alone = gdn_triton.fused_post_conv_prep(x, **given, **sizes, **options)[3]
    weight = torch.ones(x.shape[1], 3, device=device)
    given |= {name: given[name][None] for name in ("a", "b")}
    behind = gdn_triton.fused_conv_prep(x[None], weight, **given, **sizes, **options)[3]
    torch.testing.assert_close(behind.view_as(alone), alone, rtol=2.0**-20, atol=0)
    return alone


@GATES
@BACKENDS
def test_preparation(
    backend: str, make: Callable[[], Gates], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_BACKEND", backend)
    device = "cpu" if backend == "reference" else device
    gates = make()
    check_values(prepared(backend, gates, device), gates, device)
    decay = prepared(backend, gates, device, output_g_exp=True)
    assert ((decay >= 0) & (decay <= 1)).all()


@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_gradients_of_the_activation(dtype: torch.dtype) -> None:
    """exp(g) has a gradient of 0 where g is -inf. Elsewhere softplus' = e^x / (1 + e^x)."""
    gates = far_gates()
    x, A_log = gates.raw.to(dtype).requires_grad_(), gates.A_log.to(dtype).requires_grad_()
    reference.gate(x, A_log).exp().sum().backward()
    assert x.grad is not None and A_log.grad is not None
    z, rate = gates.raw.to(FP64), gates.A_log.to(FP64).exp()
    g = exact_gate(z, gates.A_log)
    slope = torch.where(z > SOFTPLUS_THRESHOLD, 1, z.exp() / (1 + z.exp()))
    dx, dA = -rate * slope * g.exp(), g * g.exp()
    unit = torch.finfo(dtype).eps / 2
    error = unit * (gates.A_log.abs() + z.abs() + 8)  # of the exponents
    allowed = 2 * error * (1 + g.abs())
    tiny = torch.finfo(dtype).tiny
    assert ((x.grad - dx).abs() <= allowed * dx.abs() + tiny).all()
    assert ((A_log.grad - dA.sum(0)).abs() <= (allowed * dA.abs()).sum(0) + tiny).all()


def test_gates_that_overflow_have_no_gradient() -> None:
    x = torch.tensor([[1.0, 3e38, torch.inf, -1.0, -torch.inf]]).T.requires_grad_()
    A_log = torch.tensor([100.0, 5.0]).requires_grad_()
    g = reference.gate(x, A_log)
    assert g[:, 0].tolist() == [-torch.inf] * 4 + [0.0]
    assert g[1:3, 1].tolist() == [-torch.inf] * 2
    g.exp().sum().backward()
    assert x.grad is not None and A_log.grad is not None
    assert x.grad[1:3].count_nonzero() == 0 and x.grad.isfinite().all()
    assert A_log.grad[0] == 0 and A_log.grad.isfinite().all()


def test_nan_stays() -> None:
    for x, A_log in ((torch.nan, 100.0), (-200.0, torch.nan), (1.0, torch.nan)):
        assert reference.gate(torch.tensor([x]), torch.tensor([A_log])).isnan().all()


def test_sigmoid_has_a_derivative_on_both_sides() -> None:
    """s (1 - s) loses e^-x to the rounding of s."""
    x = torch.linspace(-87, 87, 999).requires_grad_()
    (found,) = torch.autograd.grad(reference.beta_sigmoid(x).sum(), x)
    wide = x.detach().to(FP64)
    exact = (-wide.abs()).exp() / (1 + (-wide.abs()).exp()).square()
    assert ((found - exact).abs() <= 8 * 2.0**-24 * exact).all()
