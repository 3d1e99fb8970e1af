"""No public function, and no argument of one, is missing from the table of functions."""

import inspect
import typing

import pytest
import torch
from function_cases import TABLE, Function, copied, each, each_function, wide
from torch import Tensor, nn

import gdn_triton
from gdn_triton import layers

# Public names that run nothing, or only functions of the table.
OTHERS = {
    "Explanation": "a record",
    "PreparedStep": "its calls are those of recurrent_step",
    "StepWindow": "a record",
    "__version__": "a text",
    "chunk_gdn": "another name",
    "explain": "judges as chunk_gated_delta_rule does",
    "explain_call": "judges as the function that it is given",
    "fused_recurrent_gdn": "another name",
    "make_window": "makes tensors",
    "prepare_step": "runs nothing",
    "warmup": "makes its tensors itself",
}


def is_module(x: object) -> bool:
    return isinstance(x, type) and issubclass(x, nn.Module)


def test_every_export_is_in_the_table() -> None:
    inside = {function.exports for function in TABLE}
    exported = set(gdn_triton.__all__)
    modules = {name for name in layers.__all__ if is_module(getattr(layers, name))}
    exported |= {f"layers.{name}" for name in modules}
    assert inside == exported - OTHERS.keys()
    assert OTHERS.keys() <= exported
    assert gdn_triton.chunk_gdn is gdn_triton.chunk_gated_delta_rule
    assert gdn_triton.fused_recurrent_gdn is gdn_triton.fused_recurrent_gated_delta_rule


@pytest.mark.parametrize("name", sorted({function.exports for function in TABLE}))
def test_every_tensor_is_in_a_call(name: str) -> None:
    entries = [function for function in TABLE if function.exports == name]
    public = layers.GatedDeltaNet.forward if "." in name else getattr(gdn_triton, name)
    given = {argument for entry in entries for argument in entry.arguments("cpu")}
    given |= {entry.known_as(argument) for entry in entries for argument in given}
    kinds = typing.get_type_hints(public)
    wanted = {
        argument
        for argument, kind in kinds.items()
        if argument != "return" and Tensor in (kind, *typing.get_args(kind))
    }
    assert wanted and wanted <= given
    fields = {argument for entry in entries for argument in entry.named}
    assert given - {"layer"} - fields <= set(inspect.signature(public).parameters)


@each_function
def test_calls_are_valid(function: Function, backend: str, device: str) -> None:
    """Each is served, is the same at every time, and writes what the table says."""
    x = function.arguments(device)
    given = copied(x)
    found = function.run(given)
    again = function.run(function.arguments(device))
    assert all(torch.equal(y, again[name]) for name, y in found.items())
    changed = {n for n, y in x.items() if isinstance(y, Tensor) and not torch.equal(y, given[n])}
    assert changed == set(function.written)
    assert all(y.isfinite().all() for y in found.values())


@each(function for function in TABLE if function.gradients)
def test_gradients_reach_every_input(
    function: Function, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table says which backends have them; in float64, for all inputs at once."""
    monkeypatch.setenv("GDN_BACKEND", "reference")
    x = wide(function.arguments(device))
    for name in function.floats(x):
        x[name].requires_grad_()
    results = [y for y in function.run(x).values() if y.requires_grad]
    leaves = [x[name] for name in function.floats(x)]
    for dx in torch.autograd.grad(sum(y.square().sum() for y in results), leaves):
        assert dx.isfinite().all() and dx.any()
