"""How transformers' modeling modules are patched and put back, on modules that are made up here.

They lie in the package of model repositories' code, which is treated like transformers itself, so
nothing here needs transformers. tests/integrations/test_transformers.py has the real models.
"""

import copy
import importlib
import importlib.machinery
import importlib.util
import inspect
import pickle
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_triton import reference
from gdn_triton.integrations import transformers as integration

# The layer calls two functions of its module, and nothing but a closure leads to its forward.
FUNCTIONS = """
    from torch import nn

    def decorated(forward):
        def called(self, *args, **kwargs):
            return forward(self, *args, **kwargs)

        return called

    def causal_conv1d_fn(x):
        return x

    def torch_chunk_gated_delta_rule(*args, **kwargs):
        return "their chunk"

    def torch_recurrent_gated_delta_rule(*args, **kwargs):
        return "their recurrent"

    class StandInGatedDeltaNet(nn.Module):
        @decorated
        def forward(self, *args, decode=False, **kwargs):
            if decode:
                return torch_recurrent_gated_delta_rule(*args, **kwargs)
            return torch_chunk_gated_delta_rule(*args, **kwargs)
"""

# The layer keeps them as attributes.
ATTRIBUTES = """
    from torch import nn

    causal_conv1d_fn = None
    chunk_gated_delta_rule = fused_recurrent_gated_delta_rule = None
    is_fast_path_available = False

    def torch_chunk_gated_delta_rule(*args, **kwargs):
        return "their chunk"

    def torch_recurrent_gated_delta_rule(*args, **kwargs):
        return "their recurrent"

    class StandInGatedDeltaNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.chunk_gated_delta_rule = chunk_gated_delta_rule or torch_chunk_gated_delta_rule
            self.recurrent_gated_delta_rule = (
                fused_recurrent_gated_delta_rule or torch_recurrent_gated_delta_rule
            )

        def forward(self, *args, decode=False, **kwargs):
            if decode:
                return self.recurrent_gated_delta_rule(*args, **kwargs)
            return self.chunk_gated_delta_rule(*args, **kwargs)
"""

# It has a gated delta rule, which no layer reaches in a known way.
UNKNOWN = """
    from torch import nn

    def my_gated_delta_rule(*args, **kwargs):
        return "theirs"

    class StandInGatedDeltaNet(nn.Module):
        def forward(self, *args, **kwargs):
            return my_gated_delta_rule(*args, **kwargs)
"""

PLAIN = "from torch import nn"
BROKEN = "torch_chunk_gated_delta_rule = torch_recurrent_gated_delta_rule = None\n1 / 0"
SOURCES = {
    "functions": FUNCTIONS,
    "attributes": ATTRIBUTES,
    "unknown": UNKNOWN,
    "plain": PLAIN,
    "broken": BROKEN,
}
STYLES = ("functions", "attributes")
both_styles = pytest.mark.parametrize("style", STYLES)


def name_of(style: str) -> str:
    return f"transformers_modules.modeling_{style}"


def load(style: str) -> Any:
    return importlib.import_module(name_of(style))


@pytest.fixture(autouse=True)
def modeling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules to import, an installed transformers as far as `enable` looks, and a clean end."""
    package = tmp_path / "transformers_modules"
    package.mkdir()
    for style, source in SOURCES.items():
        (package / f"modeling_{style}.py").write_text(textwrap.dedent(source), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    # Another test of this process may have imported the real one's models.
    for name in [name for name in sys.modules if name.startswith("transformers.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.setenv("GDN_BACKEND", "reference")  # on small CPU tensors the quickest
    finders = list(sys.meta_path)
    yield
    integration.disable()
    assert sys.meta_path == finders
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        del sys.modules[name]


def inputs(T: int = 9) -> tuple[Tensor, ...]:
    """q, k, v, g, beta of two sequences, two value heads for each key head."""
    q, k = torch.randn(2, 2, T, 2, 8)
    v = torch.randn(2, T, 4, 6)
    return q, k, v, -torch.rand(2, T, 4), torch.rand(2, T, 4)


def runs_ours(layer: Any, decode: bool = False) -> bool:
    """Whether a layer's call, spelled as models spell it, gives the recurrence's numbers."""
    q, k, v, g, beta = inputs(1 if decode else 9)
    state = torch.randn(2, 4, 8, 6)
    got = layer(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        decode=decode,
    )
    if isinstance(got, str):
        return False
    exact = reference.recurrent_gated_delta_rule(
        *(x.double() for x in (q, k, v, g, beta)), initial_state=state, use_qk_l2norm=True
    )
    # Ten units of float32 a token: these are sums of a few tokens' numbers of order 1.
    for x, y in zip(got, exact, strict=True):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x.double(), y, rtol=0, atol=10 * 9 * 1.2e-7)
    return True


def contents(module: ModuleType) -> dict[str, Any]:
    """The parts of a module that can be patched: its names, and those of its layer."""
    return {
        **vars(module),
        **{f"layer {k}": v for k, v in vars(module.StandInGatedDeltaNet).items()},
    }


def same_contents(module: ModuleType, before: dict[str, Any]) -> bool:
    now = contents(module)
    return now.keys() == before.keys() and all(now[name] is before[name] for name in now)


def places(status: integration.Status, style: str) -> list[integration.Place]:
    return [place for place in status.places if f"modeling_{style}" in place.name]


@both_styles
@pytest.mark.parametrize("first", ["enable", "import", "make"])
def test_any_order_and_back(style: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """enable() before the import, before a layer is made, and after."""
    if first == "enable":
        integration.enable()
    module = load(style)
    before = None if first == "enable" else contents(module)
    made = [module.StandInGatedDeltaNet()] if first == "make" else []
    status = integration.enable()
    layers = [*made, module.StandInGatedDeltaNet()]
    assert status.enabled and [place.op for place in places(status, style)] == [
        "chunk_gated_delta_rule",
        "fused_recurrent_gated_delta_rule",
    ]
    for layer in layers:
        assert runs_ours(layer) and runs_ours(layer, decode=True)
    status = integration.disable()
    assert not status.enabled and all(place.op is None for place in status.places)
    for layer in layers:
        assert layer(*inputs()) == "their chunk"
        assert layer(*inputs(), decode=True) == "their recurrent"
    if before is not None:
        assert same_contents(module, before)


@both_styles
def test_repeated_calls(style: str) -> None:
    module = load(style)
    before = contents(module)
    layer = module.StandInGatedDeltaNet()
    for _ in range(2):
        integration.enable()
        patched = contents(module)
        assert not same_contents(module, before)
        integration.enable()
        assert same_contents(module, patched)
        assert integration.status() == integration.enable()
        assert runs_ours(layer)
        for _ in range(2):
            integration.disable()
            assert same_contents(module, before)


@both_styles
def test_instances_are_left_alone(style: str) -> None:
    """A copy or a checkpoint that is made meanwhile holds nothing of ours, and what is assigned
    meanwhile waits for disable()."""
    module = load(style)
    old = module.StandInGatedDeltaNet()
    held = dict(vars(old))
    integration.enable()
    for layer in (old, copy.deepcopy(old), module.StandInGatedDeltaNet()):
        assert vars(layer).keys() == held.keys()
        for name in ("chunk_gated_delta_rule", "recurrent_gated_delta_rule"):
            assert vars(layer).get(name) is held.get(name)
    assert b"gdn_triton" not in pickle.dumps(old)
    if style == "attributes":
        old.chunk_gated_delta_rule = print
        assert runs_ours(old)
        del old.recurrent_gated_delta_rule
        assert runs_ours(old, decode=True)
        integration.disable()
        assert old.chunk_gated_delta_rule is print
        assert not hasattr(old, "recurrent_gated_delta_rule")


@both_styles
def test_later_import_leaves_no_trace(style: str) -> None:
    integration.enable()
    module = load(style)
    assert isinstance(module.__loader__, importlib.machinery.SourceFileLoader)
    assert module.__spec__.loader is module.__loader__
    assert "class StandInGatedDeltaNet" in inspect.getsource(module)
    assert runs_ours(module.StandInGatedDeltaNet())
    integration.disable()
    assert load(style).StandInGatedDeltaNet()(*inputs()) == "their chunk"


@both_styles
def test_reloaded_module(style: str) -> None:
    module = load(style)
    integration.enable()
    importlib.reload(module)
    assert runs_ours(module.StandInGatedDeltaNet())
    integration.disable()
    assert module.StandInGatedDeltaNet()(*inputs()) == "their chunk"


def test_failing_import_fails_as_ever() -> None:
    integration.enable()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            load("broken")
        assert name_of("broken") not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformers_modules.modeling_none")


@both_styles
def test_module_past_the_import_system(style: str, tmp_path: Path) -> None:
    """How transformers loads a model repository's code: named in the status, patched if asked."""
    integration.enable()
    path = tmp_path / "transformers_modules" / f"modeling_{style}.py"
    spec = importlib.util.spec_from_file_location(name_of(style), path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[name_of(style)] = module
    spec.loader.exec_module(module)
    found = places(integration.status(), style)
    assert len(found) == 2 and all("call `enable` again" in str(place.reason) for place in found)
    assert all(place.op for place in places(integration.enable(), style))
    assert runs_ours(module.StandInGatedDeltaNet())


@both_styles
def test_named_module(style: str, tmp_path: Path) -> None:
    """A module of another package, with transformers or without."""
    path = tmp_path / "transformers_modules" / f"modeling_{style}.py"
    spec = importlib.util.spec_from_file_location("elsewhere", path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not integration.enable().places
    status = integration.enable(module)
    assert [place.name.split(".")[0] for place in status.places] == ["elsewhere"] * 2
    assert runs_ours(module.StandInGatedDeltaNet())
    integration.disable()
    assert module.StandInGatedDeltaNet()(*inputs()) == "their chunk"
    assert not integration.status().places


@both_styles
def test_replaced_by_another_meanwhile(style: str) -> None:
    module = load(style)
    integration.enable()
    owner = module if style == "functions" else module.StandInGatedDeltaNet
    name = "torch_chunk_gated_delta_rule" if style == "functions" else "chunk_gated_delta_rule"
    setattr(owner, name, print)
    chunk, recurrent = places(integration.status(), style)
    assert chunk.op is None and "replaced by another" in str(chunk.reason)
    assert recurrent.op == "fused_recurrent_gated_delta_rule"
    chunk, recurrent = places(integration.disable(), style)
    assert getattr(owner, name) is print
    assert "replaced by another" in str(chunk.reason) and recurrent.reason == "not enabled."


def test_unknown_module_is_named() -> None:
    module = load("unknown")
    load("plain")
    (place,) = integration.enable().places
    assert place.name == name_of("unknown") and place.op is None
    assert "in a way that is known here" in str(integration.status())
    assert module.StandInGatedDeltaNet()() == "theirs"


def test_status_in_words() -> None:
    assert "no module with a gated delta rule" in str(integration.status())
    load("functions")
    text = str(integration.status())
    assert text.startswith("gdn_triton is disabled in transformers ")
    assert f"{name_of('functions')}.torch_chunk_gated_delta_rule: not ours: not enabled." in text
    text = str(integration.enable())
    assert f"{name_of('functions')}.torch_chunk_gated_delta_rule: gdn_triton.chunk_gated" in text


def test_bad_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="expected modules, got a str"):
        integration.enable("transformers")  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "transformers")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="transformers is not installed"):
        integration.enable()
    assert not integration.status().enabled
    assert integration.enable(ModuleType("another")).enabled


# ------------------------------------------------------------------------------------- the calls


@both_styles
def test_keywords_of_the_model(style: str) -> None:
    """A layer hands on what its model was called with: our options are used, the rest is not."""
    layer = load(style).StandInGatedDeltaNet()
    integration.enable()
    q, k, v, g, beta = inputs()
    for decode in (False, True):
        o, state = layer(q, k, v, g=g, beta=beta, decode=decode)
        assert state is None
        same, _ = layer(q, k, v, g=g, beta=beta, decode=decode, seq_idx=None, max_length_q=9)
        assert torch.equal(o, same)
        other, _ = layer(q, k, v, g=g, beta=beta, decode=decode, scale=0.0)
        assert o.count_nonzero() and not other.count_nonzero()
    assert not torch.equal(layer(q, k, v, g=g, beta=beta, chunk_size=16)[0], torch.zeros_like(o))
    with pytest.raises(ValueError, match="chunk_size"):
        layer(q, k, v, g=g, beta=beta, chunk_size=17)


@both_styles
def test_packed_needs_a_convolution_that_keeps_sequences_apart(
    style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load(style)
    if importlib.util.find_spec("causal_conv1d") is not None:
        pytest.skip("the package causal_conv1d is installed")
    layer = module.StandInGatedDeltaNet()
    integration.enable()
    packed = tuple(x[:1] for x in inputs())
    two, one = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([0, 9])
    options = {"g": packed[3], "beta": packed[4]}
    with pytest.raises(ValueError, match=r"cu_seqlens must be None or.*got 2 sequences"):
        layer(*packed[:3], **options, cu_seqlens=two)
    alone, _ = layer(*packed[:3], **options)
    assert torch.equal(layer(*packed[:3], **options, cu_seqlens=one)[0], alone)
    integration.disable()

    package = ModuleType("causal_conv1d")
    package.__spec__ = importlib.machinery.ModuleSpec("causal_conv1d", None)
    monkeypatch.setitem(sys.modules, "causal_conv1d", package)
    if style == "attributes":
        monkeypatch.setattr(module, "causal_conv1d_fn", print)
    integration.enable()
    o, _ = layer(*packed[:3], **options, cu_seqlens=two)
    for first, end in ((0, 4), (4, 9)):
        q, k, v, g, beta = (x[:, first:end] for x in packed)
        torch.testing.assert_close(o[:, first:end], layer(q, k, v, g=g, beta=beta)[0])
    assert not torch.equal(o, alone)


def test_packed_with_a_convolution_that_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package `kernels`, a function is a module, whose forward may be replaced later."""
    module = load("functions")
    if importlib.util.find_spec("causal_conv1d") is not None:
        pytest.skip("the package causal_conv1d is installed")
    convolution = torch.nn.Identity()
    monkeypatch.setattr(module, "causal_conv1d_fn", convolution)
    layer = module.StandInGatedDeltaNet()
    integration.enable()
    q, k, v, g, beta = (x[:1] for x in inputs())
    options = {"g": g, "beta": beta, "cu_seqlens": torch.tensor([0, 4, 9])}
    with pytest.raises(ValueError, match="cu_seqlens must be None or"):
        layer(q, k, v, **options)
    convolution.forward = MethodType(torch.nn.ReLU.forward, convolution)
    assert layer(q, k, v, **options)[0].shape == v.shape


@both_styles
def test_compiled_without_a_graph_break(style: str) -> None:
    layer = load(style).StandInGatedDeltaNet()
    integration.enable()
    q, k, v, g, beta = inputs()
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for decode in (False, True):
        o, state = layer(q, k, v, g=g, beta=beta, decode=decode, output_final_state=True, extra=1)
        again = compiled(q, k, v, g=g, beta=beta, decode=decode, output_final_state=True, extra=1)
        torch.testing.assert_close(again, (o, state))
    torch.compiler.reset()
