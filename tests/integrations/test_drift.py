"""The adapters' functions have the parameters of those that they stand for, as recorded; and the
record, with digests of the bodies, is what the engines' packages say."""

import ast
import hashlib
import re
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_sources import (
    ALIASES,
    IMITATED,
    VERSIONS,
    bodies,
    definitions,
    digest,
    parameters_of,
    record,
    recorded,
    signatures,
    source,
    wheel_of,
)

import gdn_triton
from gdn_triton.integrations import flashinfer, sglang, vllm
from gdn_triton.integrations._fla_layer import convolution, gated_norm
from gdn_triton.integrations.vllm import layer, norm, warming

VLLM = [
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "fi_chunk_gated_delta_rule",
    "fused_post_conv_prep",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gated_delta_rule_packed_decode",
    "fused_sigmoid_gating_delta_rule_update",
]
PAIRS = [
    *[("vllm", name, getattr(vllm, name)) for name in VLLM],
    ("vllm", "ChunkGatedDeltaRule.forward_native", vllm.forward),
    ("vllm", "ChunkGatedDeltaRule.forward_cuda", vllm.forward),
    ("vllm", "_log_gdn_backend_decision", vllm._log),
    ("vllm", "rmsnorm_fn", norm.gated_norm(lambda: None)),
    *[("sglang", name, ours) for name, ours in sglang.FUNCTIONS.items()],
    *[
        ("flashinfer_python", name, getattr(flashinfer, name))
        for name in IMITATED["flashinfer_python"]["flashinfer/gdn_prefill.py"]
        + IMITATED["flashinfer_python"]["flashinfer/gdn_decode.py"]
    ],
]


@pytest.mark.parametrize(
    "package, name, ours", PAIRS, ids=[f"{package}-{name}" for package, name, _ in PAIRS]
)
def test_parameters(package, name, ours):
    """The names, their order and their defaults."""
    assert parameters_of(ours) == recorded(package, name)


def test_every_function_is_compared():
    """All that is recorded of an engine has ours beside it, or is named here with its reason."""
    compared = {(package, ALIASES.get(name, name)) for package, name, _ in PAIRS}
    methods = {
        ("vllm", "QwenGatedDeltaNetAttention._forward_core"),  # below
        ("vllm", "OlmoHybridGatedDeltaNetAttention._forward_core"),  # below
        ("vllm", "MambaPrefillCheckpointExporter.export"),  # called, and run in a test
    }
    ops = {"transformers", "fla_core", "flash_qla"}  # below
    recorded_ = {
        (package, name)
        for package, files in IMITATED.items()
        for names in files.values()
        for name in names
        if package not in ops
    }
    assert recorded_ == compared | methods


def test_methods():
    core = layer.method(None, warming.warm_up)
    ours = parameters_of(core).removeprefix("self, ")
    for cls in ("QwenGatedDeltaNetAttention", "OlmoHybridGatedDeltaNetAttention"):
        assert ours == recorded("vllm", f"{cls}._forward_core")


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_fla(name):
    """FLA's arguments are ours: what it takes by keyword too."""
    import inspect

    ours = inspect.signature(getattr(gdn_triton, name)).parameters
    theirs = recorded("fla_core", name).split(", ")
    named = [x for x in theirs if not x.startswith("*")]
    for text, parameter in zip(named, ours.values(), strict=False):
        given, _, default = text.partition("=")
        assert given == parameter.name
        if default:
            assert repr(parameter.default) == default


@pytest.mark.parametrize("make", [convolution, gated_norm])
def test_fla_layer(make):
    """The functions of FLA's layers that are replaced."""
    name = {convolution: "causal_conv1d", gated_norm: "rms_norm_gated"}[make]
    assert parameters_of(make(lambda: None, lambda: True)) == recorded("fla_core", name)


@pytest.mark.parametrize("file", IMITATED["transformers"])
def test_transformers(file):
    """The positional parameters of the adapter's functions, which all models' layers share."""
    for name in IMITATED["transformers"][file]:
        first = recorded("transformers", name, file).split(", ")
        assert first[:5] == ["query", "key", "value", "g", "beta"]
        options = {x.partition("=")[0] for x in first[5:]}
        assert options <= {
            *("chunk_size", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel"),
            "**kwargs",
        }


def test_known_texts():
    """The adapter for vLLM replaces methods where their texts are known: those of the wheel are."""
    wheel = wheel_of("vllm")
    known = {(name, f"{vllm.LAYERS[name]}.{vllm.CORE}"): x for name, x in vllm.KNOWN.items()}
    known[vllm.METADATA, f"{vllm.BUILDER}.{vllm.BUILD}"] = vllm.KNOWN_BUILDS
    for (name, method), digests in known.items():
        text = source(wheel, f"{name.replace('.', '/')}.py")
        node = definitions(ast.parse(text))[method]
        lines = text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno]
        assert hashlib.sha256("".join(lines).encode()).hexdigest() in digests, method


def test_versions():
    assert record()["versions"] == VERSIONS


@pytest.mark.parametrize("package", VERSIONS)
def test_wheels(package):
    """Red when the record is not what the pinned version says."""
    assert signatures(package) == record()["signatures"][package]


@pytest.mark.parametrize("package", VERSIONS)
def test_bodies(package):
    """Red when a body differs: read the change, and record it anew."""
    now, before = bodies(package), record()["bodies"][package]
    assert now.keys() == before.keys()
    assert all(now[file].keys() == before[file].keys() for file in now)
    changed = [
        f"{file}: {name}"
        for file, names in now.items()
        for name, found in names.items()
        if found != before[file][name]
    ]
    assert not changed


TEXT = """
SIZE = 64

@triton.jit
def kernel(x, n):
    tl.store(x, n * 2)  # twice

def helper(x):
    kernel[(1,)](x, SIZE)

def rule(x):
    "The rule."
    helper(x)

class Layer:
    def forward(self, x):
        return self.step(x)

    def step(self, x):
        return rule(x)

def other(x):
    return x
"""


@pytest.mark.parametrize(
    "old, new, changes",
    [
        ("n * 2", "n * 3", True),  # a kernel below two functions
        ("SIZE = 64", "SIZE = 32", True),
        ("return self.step(x)", "return self.step(x + 1)", True),
        ("@triton.jit", "@triton.autotune", True),
        ('"The rule."', '"A rule."', False),
        ("    helper(x)", "\n    # Why.\n    helper(x)", False),
        ("return x\n", "return -x\n", False),  # not used by the layer
    ],
)
def test_digest(old, new, changes):
    assert old in TEXT
    before, after = (digest(text, "Layer.forward") for text in (TEXT, TEXT.replace(old, new)))
    assert (before != after) == changes


def test_flash_qla():
    """The benchmark's call of FlashQLA."""
    from benchmarks.peers import FlashQLA

    parameters = recorded("flash_qla", "chunk_gated_delta_rule").split(", ")
    known = [x.partition("=")[0] for x in parameters]
    peer = object.__new__(FlashQLA)
    peer.package = SimpleNamespace(chunk_gated_delta_rule=lambda *args, **kwargs: None)
    names = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")
    call = peer.prepare(SimpleNamespace(**dict.fromkeys(names, torch.zeros(1))))
    assert known[: len(call.args)] == list(names[:5])
    assert call.keywords.keys() <= set(known)


# Files of vLLM and SGLang whose models make the layers that the adapters replace, each with the
# name that docs/integrations.md has for them.
MODELS = {
    "vllm": {
        "qwen3_next": "Qwen3-Next",
        "qwen3_5": "Qwen3.5",
        "qwen4_exp": "Qwen4-Exp",
        "interns2_mobius": "Intern-S2",
        "olmo_hybrid": "OLMo Hybrid",
    },
    "sglang": {
        "qwen3_next": "Qwen3-Next",
        "qwen3_5": "Qwen3.5",
        "qwen4_exp": "Qwen4-Exp",
        "interns2_mobius": "Intern-S2",
        "gigachat35": "GigaChat 3.5",
        "jet_nemotron": "Jet-Nemotron",
    },
}
MADE = {
    "vllm": rb"\b(Qwen|OlmoHybrid)GatedDeltaNetAttention\(",
    "sglang": rb"\bQwen3(_5)?GatedDeltaNet\b|\bfused_recurrent_gated_delta_rule_update\(",
}


@pytest.mark.parametrize("package", MODELS)
def test_models(package):
    """Every model with such layers has its name on the page."""
    wheel = wheel_of(package)
    with zipfile.ZipFile(wheel) as files:
        found = {
            Path(x).parts[-3] if Path(x).stem == "model" else Path(x).stem
            for x in files.namelist()
            if re.search(r"/models/.*\.py$", x) and re.search(MADE[package], files.read(x))
        }
    assert found == MODELS[package].keys()
    page = (Path(__file__).resolve().parents[2] / "docs" / "integrations.md").read_text("utf-8")
    assert [name for name in MODELS[package].values() if name not in page] == []
