"""torch.set_default_device is the caller's: the package makes every tensor on a device that it
names, so that calls on another device than the default one are served."""

import ast
from pathlib import Path

import pytest
import torch
from every_call import CALLS
from helpers import same_bits
from pool_cases import copied
from torch.utils._device import _device_constructors

from gdn_triton.layers import GatedDeltaNet

PACKAGE = Path(__file__).resolve().parents[2] / "gdn_triton"
# Functions of torch that use its default device where none is named.
MAKERS = {function.__name__ for function in _device_constructors()}


def nameless(tree: ast.AST) -> list[int]:
    """The lines of calls that make a tensor and name no device."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in MAKERS
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]


def test_every_tensor_has_a_named_device() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        # Under another name nothing would be seen.
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "torch":
                assert not MAKERS & {alias.name for alias in node.names}, path
        found[str(path.relative_to(PACKAGE))] = nameless(tree)
    assert len(found) > 100
    assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("torch.zeros(3)", [1]),
        ("\ny = x + torch.arange(n).long()", [2]),
        ("torch.zeros(3, device=x.device)", []),
        ("x.new_zeros(3), torch.zeros_like(x), tl.zeros([3]), torch.cat([x])", []),
    ],
)
def test_what_is_found(text: str, lines: list[int]) -> None:
    assert nameless(ast.parse(text)) == lines
    assert {"zeros", "empty", "arange", "tensor", "full", "eye", "randn"} <= MAKERS


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("name", CALLS)
def test_another_default_device(
    name: str, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_BACKEND", backend)
    call = CALLS[name]
    with torch.device(device):
        x = call.make()
        expected = call.run(copied(x))
    given = copied(x)
    with torch.device("meta"):
        got = call.run(given)
    assert got.keys() == expected.keys()
    for result, y in expected.items():
        assert same_bits(got[result], y), result


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_another_default_device_in_a_layer(
    backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_BACKEND", backend)
    layer = GatedDeltaNet(hidden_size=32, head_dim=16, num_heads=1, device=device)
    x, mask = torch.randn(2, 20, 32, device=device), torch.ones(2, 20, device=device)
    mask[0, :5] = 0
    offsets = torch.tensor([0, 7, 20], device=device)
    calls = [
        lambda: layer(x),
        lambda: layer(x, mask),
        lambda: layer(x[:1], cu_seqlens=offsets),
        lambda: layer(x[:1], cu_seqlens=offsets, cache=layer.make_cache(2)),
    ]
    for call in calls:
        expected = call()
        with torch.device("meta"):
            got = call()
        assert same_bits(got, expected)
