"""Weights that come from elsewhere: the layer has its own."""

import warnings
from itertools import combinations

import pytest
import torch
from layer_cases import make_input, qwen_weights

from gdn_triton.layers import GatedDeltaNet, weights_from_qwen

MODELS = ["Qwen3-Next", "Qwen3.5"]


@pytest.mark.parametrize("H", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_weights_of_qwen_are_copied(model: str, H: int) -> None:
    """Training a layer changes neither the model whose weights it has nor another layer of them."""
    given = qwen_weights(model, H, 6, 5, 3)
    kept = {name: x.clone() for name, x in given.items()}
    layer, other = (GatedDeltaNet.from_qwen(given, H) for _ in range(2))
    x = make_input(1, 5)
    expected = other(x).detach()
    layer(x).square().sum().backward()
    torch.optim.SGD(layer.parameters(), lr=1.0).step()
    assert not torch.equal(layer(x), expected)
    assert torch.equal(other(x), expected)
    for name, x in given.items():
        assert torch.equal(x, kept[name]), name


@pytest.mark.parametrize("model", MODELS)
def test_weights_of_qwen_share_no_memory(model: str) -> None:
    """Neither with the given ones nor with each other, so that each can be saved alone."""
    given = qwen_weights(model, 1, 6, 5, 3)
    weights = weights_from_qwen(given, 1)
    storages = [x.untyped_storage() for x in (*weights.values(), *given.values())]
    for one, another in combinations(storages, 2):
        assert one.data_ptr() != another.data_ptr()
    for name, x in weights.items():
        assert x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes, name


def test_parameters_of_qwen_stay_apart() -> None:
    """From parameters instead of a state dict: the layer has leaves of its own."""
    given = {n: torch.nn.Parameter(x) for n, x in qwen_weights("Qwen3.5", 2, 6, 5, 3).items()}
    layer = GatedDeltaNet.from_qwen(given, 2)
    assert all(p.is_leaf and p.requires_grad for p in layer.parameters())
    layer(make_input(1, 5)).sum().backward()
    assert all(x.grad is None for x in given.values())


@pytest.mark.parametrize("model", MODELS)
def test_doubtful_number_of_heads(model: str) -> None:
    """Said where another number would make K equal to V, and nowhere else."""
    given = qwen_weights(model, 4, 8, 6, 6)
    for wrong, K in ((1, 24), (2, 12), (8, 3)):
        message = f"num_heads={wrong} makes keys of K={K} channels .* V=6; num_heads=4 makes K"
        with pytest.warns(UserWarning, match=message):
            assert GatedDeltaNet.from_qwen(given, wrong).head_k_dim == K
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights_from_qwen(given, 4)
        for H, HV, K, V in ((2, 6, 5, 3), (2, 4, 9, 6)):
            # V does not divide the channels of the keys, or its quotient the value heads.
            weights_from_qwen(qwen_weights(model, H, HV, K, V), H)
