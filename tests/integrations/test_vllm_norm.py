"""The gated norm of vLLM's layers: ours where it has a counterpart, vLLM's own otherwise."""

import pytest
import torch
from engine_sources import load
from helpers import same_bits

from gdn_triton.integrations.vllm import norm
from gdn_triton.reference.norm import rms_norm_gated

T, HV, V = 7, 4, 32


def call_of(dtype=torch.float32):
    """x, weight and a gate that is a view of a projection, as in the layers of Qwen3.5."""
    rand = torch.Generator().manual_seed(0)
    x = torch.randn(T, HV, V, generator=rand).to(dtype)
    projection = torch.randn(T, 100 + HV * V, generator=rand).to(dtype)
    return x, torch.randn(V, generator=rand), projection[:, 100:].reshape(T, HV, V)


def never(*args):
    raise AssertionError("vLLM's own")


@pytest.mark.of_no_device
@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
@pytest.mark.parametrize("group_size", [None, V])
def test_ours(activation, group_size):
    x, weight, z = call_of(torch.bfloat16)
    assert not z.is_contiguous() and z._base is not None
    ours = norm.gated_norm(never)
    options = {"eps": 1e-3, "group_size": group_size, "activation": activation}
    y = ours(x, weight, None, z=z, **options)
    gate = "sigmoid" if activation == "sigmoid" else "silu"
    assert same_bits(y, rms_norm_gated(x, z, weight, 1e-3, gate))
    mean = x.double().square().mean(-1, keepdim=True)
    act = z.double().sigmoid() * (1 if gate == "sigmoid" else z.double())
    expected = weight.double() * x.double() / (mean + 1e-3).sqrt() * act
    # Half a unit in the last place of bfloat16, and the rounding of float32 before it.
    assert ((y.double() - expected).abs() <= (2**-8 + 1e-5) * expected.abs()).all()


@pytest.mark.of_no_device
@pytest.mark.parametrize(
    "changed",
    [
        {"z": None},
        {"bias": torch.zeros(V)},
        {"group_size": V // 2},
        {"norm_before_gate": False},
        {"activation": "relu"},
    ],
    ids=lambda x: next(iter(x)),
)
def test_theirs(changed):
    """Every argument of the call reaches vLLM's own function, in its place."""
    x, weight, z = call_of()
    names = ("x", "weight", "bias", "z", "eps", "group_size", "norm_before_gate", "activation")
    given = dict(zip(names, (x, weight, None, z, 1e-5, None, True, "swish"), strict=True))
    given |= changed
    found = norm.gated_norm(lambda *args: args)(**given)
    assert all(a is b for a, b in zip(found, given.values(), strict=True))


@pytest.mark.of_no_device
@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
def test_as_in_plain_torch_of_vllm(activation):
    """vLLM's own class without its kernel, from its wheel."""
    file, name = "vllm/model_executor/layers/layernorm.py", "RMSNormGated.forward_static"
    given = {"torch": torch, "F": torch.nn.functional}
    theirs = load("vllm", file, [name], given)[name]
    x, weight, z = call_of()
    expected = theirs(x, z, weight, 1e-6, x.dtype, V, True, activation)
    ours = norm.gated_norm(never)
    y = ours(x, weight, None, z=z, group_size=V, activation=activation)
    assert ((y - expected).abs() <= 1e-5 * expected.abs()).all()
