"""Plans of calls: a call gets the plan of an earlier call only if the plan fits."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import same_bits

from gdn_triton import fused_recurrent_gated_delta_rule, layer_step, recurrent_step
from gdn_triton.recurrent import plans as recurrent_plans
from gdn_triton.step import plans as layer_plans

N, H, HV, K, V = 2, 1, 2, 8, 4


def sequences() -> dict[str, Any]:
    q, k = torch.randn(2, N, 3, H, K) / K
    v, g = torch.randn(N, 3, HV, V), -torch.rand(N, 3, HV)
    return {"q": q, "k": k, "v": v, "g": g, "beta": torch.rand(N, 3, HV)}


def step() -> dict[str, Any]:
    tokens = {name: x[:, 0] for name, x in sequences().items()}
    return {"state": torch.randn(4, HV, K, V), "read_slots": torch.tensor([0, 2]), **tokens}


def layer() -> dict[str, Any]:
    a, b = torch.randn(2, N, HV)
    return {
        "mixed_qkv": torch.randn(N, 2 * H * K + HV * V),
        **{"a": a, "b": b, "A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV)},
        **{"state": torch.randn(4, HV, K, V), "read_slots": torch.tensor([0, 2])},
    }


FUNCTIONS = {
    "sequences": (fused_recurrent_gated_delta_rule, sequences, "v"),
    "step": (recurrent_step, step, "v"),
    "layer": (layer_step, layer, "mixed_qkv"),
}
Function = tuple[Callable[..., Any], dict[str, Any], str]


@pytest.fixture(params=FUNCTIONS)
def function(
    request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Function]:
    """A function, arguments of which it has a plan, and the name of its tokens. The backend is
    Triton, because the kernels rely on the plan."""
    monkeypatch.setenv("GDN_BACKEND", "triton")
    torch.manual_seed(0)
    call, make, name = FUNCTIONS[request.param]
    with torch.device(device):
        given = make()
        call(**given)
        yield call, given, name


def test_another_backend(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    call, given, _ = function
    monkeypatch.setenv("GDN_BACKEND", "none")
    with pytest.raises(ValueError, match="GDN_BACKEND must be one of"):
        call(**given)


def test_other_kernels(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    call, given, _ = function
    plans = (recurrent_plans if call is not layer_step else layer_plans)._plans
    counts = []
    for value in ("1", "0", "1"):
        monkeypatch.setenv("GDN_GLUON", value)
        call(**given)
        counts.append(len(plans))
    assert counts == [counts[0], counts[0] + 1, counts[0] + 1]


def test_with_and_without_gradients(function: Function) -> None:
    call, given, name = function
    given[name] = given[name].requires_grad_()
    with torch.no_grad():
        call(**given)
    with pytest.raises((NotImplementedError, RuntimeError), match=r"has no (gradient|backward)"):
        call(**given)


def test_a_flag_of_another_type(function: Function) -> None:
    call, given, _ = function
    for flag in (True, 1):
        given["use_qk_l2norm_in_kernel"] = flag
        if flag is True:
            call(**given)
        else:
            with pytest.raises(TypeError, match="use_qk_l2norm_in_kernel must be True or False"):
                call(**given)


def test_a_negative_bit(function: Function) -> None:
    call, given, name = function
    numbers = torch.randn(*given[name].shape, dtype=torch.complex64)
    plain, negative = numbers.imag, numbers.conj().imag
    assert plain.stride() == negative.stride() and negative.is_neg()
    found = []
    for tokens in (plain, negative, negative.resolve_neg()):
        x = {n: y.clone() if n == "state" else y for n, y in given.items()}
        o = call(**{**x, name: tokens})
        found.append(o[0] if isinstance(o, tuple) else o)
    assert same_bits(found[1], found[2]) and not same_bits(found[0], found[1])
