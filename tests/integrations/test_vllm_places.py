"""Where vLLM's adapter puts our functions, layers and answers, in a stand-in for the package."""

import hashlib
import importlib
import inspect
import logging
import sys
from importlib.machinery import BuiltinImporter
from types import ModuleType, SimpleNamespace

import pytest
import torch
from engine_calls import K, N, V, expected_of, vllm_call
from engine_sources import recorded
from helpers import same_bits
from vllm_steps import Metadata

OUT_OF_TREE = {}


class CustomOp:
    """As vLLM does, makes the registered class in place of the one of that name."""

    def __new__(cls, *args, **kwargs):
        return super().__new__(OUT_OF_TREE.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, _decorated_op_cls=None, name=None):
        assert name not in OUT_OF_TREE, f"Duplicate op name: {name}"
        OUT_OF_TREE[name] = _decorated_op_cls

    def __call__(self, *args, **kwargs):
        return self._forward_method(*args, **kwargs)


def _their_forward_core(self, mixed_qkv, b, a, core_attn_out):
    raise AssertionError("vLLM's own")


def _their_build(self, common_prefix_len, common_attn_metadata):
    return SimpleNamespace(
        prefill_query_start_loc=common_attn_metadata.query_start_loc,
        spec_sequence_masks_cpu=None,
        num_decodes=0,
        num_decode_tokens=0,
    )


def _their_update(self, metadata, blk_table, slot_mapping):
    return SimpleNamespace()


class _Shapes:
    @classmethod
    def gated_delta_net_state_shape(
        cls,
        tp_world_size,
        num_k_heads,
        num_v_heads,
        head_k_dim,
        head_v_dim,
        conv_kernel_size,
        num_spec=0,
    ):
        return (conv_kernel_size - 1, 2), (num_v_heads, head_v_dim, head_k_dim)


class _Dtypes:
    @classmethod
    def gated_delta_net_state_dtype(
        cls, model_dtype, mamba_cache_dtype, mamba_ssm_cache_dtype="auto"
    ):
        return model_dtype, torch.float32


def function_of(name, parameters):
    """A function of vLLM's with its parameters, that says who was called."""
    namespace = {}
    exec(f"def {name}({parameters}): return {name!r}", namespace)
    return namespace[name]


NAMES = {
    "qwen_gdn_linear_attn": [
        *("fi_chunk_gated_delta_rule", "_log_gdn_backend_decision", "causal_conv1d_fn"),
        *("causal_conv1d_update", "fused_post_conv_prep"),
        "fused_recurrent_gated_delta_rule_packed_decode",
        "fused_sigmoid_gating_delta_rule_update",
    ],
    "olmo_gdn_linear_attn": [
        *("causal_conv1d_fn", "causal_conv1d_update", "chunk_gated_delta_rule"),
        *("fused_recurrent_gated_delta_rule", "_log_gdn_backend_decision"),
    ],
}
CLASSES = {
    "qwen_gdn_linear_attn": "QwenGatedDeltaNetAttention",
    "olmo_gdn_linear_attn": "OlmoHybridGatedDeltaNetAttention",
}


@pytest.fixture
def ours(monkeypatch):
    """The adapter, and with it what holds of its places, anew."""
    for name in [n for n in sys.modules if n.startswith("gdn_triton.integrations.vllm")]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("gdn_triton.integrations.vllm")


@pytest.fixture
def engine(monkeypatch, ours):
    """vLLM's modules, of what its layers for Qwen and OLMo look up."""
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys.modules[__name__], "OUT_OF_TREE", {})

    def module(name):
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            path = ".".join(parts[:n])
            if path not in sys.modules:
                package = ModuleType(path)
                package.__path__ = []
                monkeypatch.setitem(sys.modules, path, package)
        return sys.modules[name]

    module("vllm.model_executor.custom_op").CustomOp = CustomOp
    metadata = module("vllm.v1.attention.backends.gdn_attn")
    metadata.GDNAttentionMetadata = Metadata
    refuses = {"supports_batch_invariance": classmethod(lambda cls: False)}
    metadata.GDNAttentionBackend = type("Backend", (type("Base", (), refuses),), {})
    methods = {"build": _their_build, "update_block_table": _their_update}
    own = {**methods, "kv_cache_spec": SimpleNamespace(shapes=())}
    metadata.GDNAttentionMetadataBuilder = type("Builder", (), own)
    states = module("vllm.model_executor.layers.mamba.mamba_utils")
    states.MambaStateShapeCalculator = type("Shapes", (), dict(vars(_Shapes)))
    states.MambaStateDtypeCalculator = type("Dtypes", (), dict(vars(_Dtypes)))
    digest = hashlib.sha256(inspect.getsource(_their_build).encode())
    monkeypatch.setattr(ours, "KNOWN_BUILDS", (digest.hexdigest(),))
    found = SimpleNamespace()
    guard = module("vllm.third_party.flash_linear_attention.ops.layernorm_guard")
    guard.rmsnorm_fn = function_of("rmsnorm_fn", recorded("vllm", "rmsnorm_fn"))
    found.norm = guard
    for name, functions_ in NAMES.items():
        made = module(f"vllm.model_executor.layers.mamba.gdn.{name}")
        for function in functions_:
            setattr(made, function, function_of(function, recorded("vllm", function)))
        names = {"_forward_core": _their_forward_core, "__module__": made.__name__}
        layer = type(CLASSES[name], (), names)
        setattr(made, CLASSES[name], layer)
        setattr(found, name.partition("_")[0], made)
        digest = hashlib.sha256(inspect.getsource(_their_forward_core).encode())
        monkeypatch.setitem(ours.KNOWN, made.__name__, (digest.hexdigest(),))

    class ChunkGatedDeltaRule(CustomOp):
        chosen = "flashinfer"

        def __init__(self):
            found.qwen._log_gdn_backend_decision(None, "auto", self.chosen)
            self.gdn_prefill_backend = self.chosen
            self._forward_method = None

    found.qwen.ChunkGatedDeltaRule = ChunkGatedDeltaRule
    yield found
    ours.disable()


@pytest.mark.of_no_device
def test_register(ours, engine, caplog):
    """Every place, and back."""
    names = {key: list(vars(module)) for key, module in vars(engine).items()}
    before = {key: dict(vars(module)) for key, module in vars(engine).items()}
    registered = ours.register()
    assert ours.register() is registered  # vLLM's own assertion would say twice
    for module in vars(engine).values():
        for name in ours.OPS:
            if hasattr(module, name):
                assert getattr(module, name) is getattr(ours.functions, name)
    places = {place.name.rpartition("gdn_linear_attn.")[2]: place for place in ours.status().places}
    assert places["QwenGatedDeltaNetAttention._forward_core"].op.endswith("forward_core")
    assert places["fi_chunk_gated_delta_rule"].op == "chunk_prefill"
    assert places["ChunkGatedDeltaRule"].op == "chunk_prefill"
    assert places[f"{engine.norm.__name__}.rmsnorm_fn"].op == "rms_norm_gated"
    assert [name for name, place in places.items() if not place.op] == [ours.WINDOW]
    assert engine.olmo.OlmoHybridGatedDeltaNetAttention._forward_core is not _their_forward_core
    # vLLM would log a line about FlashInfer here.
    with caplog.at_level(logging.INFO, "gdn_triton"):
        op = engine.qwen.ChunkGatedDeltaRule()
    assert isinstance(op, registered) and "Using gdn_triton for GDN prefill" in caplog.text
    # The checkpoints of a prefill are planned where vLLM chose FlashInfer.
    assert op.gdn_prefill_backend == "flashinfer"
    registered.chosen = "cutedsl"
    assert engine.qwen.ChunkGatedDeltaRule().gdn_prefill_backend == "triton"
    inputs, call = vllm_call()
    state = torch.randn(N, 4, V, K)
    expected, _ = expected_of(inputs, state)
    assert same_bits(op(**call, initial_state=state)[0].squeeze(0), expected)
    # Another's replacement is left alone.
    engine.qwen.fused_post_conv_prep = another = object()
    report = ours.disable()
    assert engine.qwen.fused_post_conv_prep is another
    assert "fused_post_conv_prep: not ours: replaced by another" in str(report)
    engine.qwen.fused_post_conv_prep = before["qwen"]["fused_post_conv_prep"]
    assert {key: list(vars(module)) for key, module in vars(engine).items()} == names
    assert all(vars(m)[n] is before[key][n] for key, m in vars(engine).items() for n in names[key])
    assert engine.qwen.QwenGatedDeltaNetAttention._forward_core is _their_forward_core


@pytest.mark.of_no_device
def test_lengths(ours, engine):
    """The engine's builder of metadata, as it is called, tells the offsets on the host."""
    from gdn_triton.integrations._lengths import offsets_on_host

    ours.register()
    builder = sys.modules["vllm.v1.attention.backends.gdn_attn"].GDNAttentionMetadataBuilder
    offsets = torch.tensor([0, 3, 4])
    common = SimpleNamespace(query_start_loc=offsets, query_start_loc_cpu=offsets.clone())
    builder().build(common_prefix_len=0, common_attn_metadata=common)
    assert offsets_on_host(offsets).tolist() == [0, 3, 4]
    ours.disable()
    assert builder.build is _their_build


@pytest.mark.of_no_device
def test_window(ours, engine, monkeypatch):
    """With a window vLLM's functions name the records as states, until they are restored."""
    states = sys.modules["vllm.model_executor.layers.mamba.mamba_utils"]
    builder = sys.modules["vllm.v1.attention.backends.gdn_attn"].GDNAttentionMetadataBuilder
    shape = states.MambaStateShapeCalculator.gated_delta_net_state_shape
    dtype = states.MambaStateDtypeCalculator.gated_delta_net_state_dtype
    ours.register()
    assert f"{ours.WINDOW}: not ours: `register(window=True)`" in str(ours.status())
    sizes = (2, 4, 8, 16, 32, 4)
    own = shape(*sizes)
    assert states.MambaStateShapeCalculator.gated_delta_net_state_shape(*sizes) == own
    ours.register(window=True)
    ours.register()  # takes nothing back
    status = str(ours.status())
    assert f"{ours.WINDOW}: gdn_triton.recurrent_step" in status
    assert "Builder.update_block_table: gdn_triton" in status
    found = states.MambaStateShapeCalculator.gated_delta_net_state_shape(*sizes)
    assert found == (*own, (16, 4, 32), (16, 2, 16), (16, 4), (16,), (4,))
    kinds = states.MambaStateDtypeCalculator.gated_delta_net_state_dtype(torch.bfloat16, "auto")
    floats = (torch.float32, torch.bfloat16, torch.float32)
    assert kinds == (*dtype(torch.bfloat16, "auto"), *floats, torch.int32, torch.int32)
    ours.disable()
    assert states.MambaStateShapeCalculator.gated_delta_net_state_shape(*sizes) == own
    assert builder.update_block_table is _their_update and builder.build is _their_build
    monkeypatch.setattr(ours, "KNOWN_BUILDS", ())
    with pytest.raises(RuntimeError, match="cannot decode with a window: its text is of no"):
        ours.register(window=True)
    with pytest.raises(TypeError, match="window must be True or False, got 1"):
        ours.register(window=1)


@pytest.mark.of_no_device
def test_methods_that_take_two_dtypes(ours, engine):
    """With a window such a method of vLLM's layers gets the dtypes of vLLM's own states."""
    layer_class = engine.qwen.QwenGatedDeltaNetAttention
    states = sys.modules["vllm.model_executor.layers.mamba.mamba_utils"]
    dtypes = states.MambaStateDtypeCalculator
    names = ours.windows.UNPACKING

    def their_method(self, *args):
        _, of_rule = self.get_state_dtype()
        if args:
            raise ValueError(*args)
        return of_rule

    layer_class.get_state_dtype = lambda self: dtypes.gated_delta_net_state_dtype(
        torch.bfloat16, "auto"
    )
    setattr(layer_class, names[0], their_method)
    ours.register(window=True)
    layer = layer_class()
    assert len(layer.get_state_dtype()) == ours.windows.WITH_RECORDS
    assert getattr(layer, names[0])() == torch.float32
    with pytest.raises(ValueError, match="theirs"):
        getattr(layer, names[0])("theirs")
    assert len(layer.get_state_dtype()) == ours.windows.WITH_RECORDS
    assert not hasattr(layer, names[1])
    assert f"{names[0]}: gdn_triton" in str(ours.status())
    ours.disable()
    assert vars(layer_class)[names[0]] is their_method


@pytest.mark.of_no_device
def test_unknown_text(ours, engine, monkeypatch):
    """In another version only the functions that the method calls are replaced."""
    monkeypatch.setitem(ours.KNOWN, engine.qwen.__name__, ("another",))
    monkeypatch.setattr(ours, "KNOWN_BUILDS", ())
    ours.register()
    assert "build: not ours: its text is of no version that is known here; the host's" in str(
        ours.status()
    )
    assert engine.qwen.QwenGatedDeltaNetAttention._forward_core is _their_forward_core
    assert engine.qwen.causal_conv1d_fn is ours.functions.causal_conv1d_fn
    assert "QwenGatedDeltaNetAttention._forward_core: not ours: its text is of no" in str(
        ours.status()
    )


@pytest.mark.of_no_device
def test_no_norm(ours, engine):
    """A version of vLLM without the function, or without its module."""
    del engine.norm.rmsnorm_fn
    ours.register()
    assert "layernorm_guard.rmsnorm_fn: not ours: there is no such function" in str(ours.status())
    del sys.modules[engine.norm.__name__]
    assert "layernorm_guard.rmsnorm_fn: not ours: there is no such function" in str(ours.status())


@pytest.mark.of_no_device
def test_batch_invariance(ours, engine, monkeypatch):
    """vLLM's backend claims it with our layers alone, where `GDN_BATCH_INVARIANT` asks for it. A
    backend that is derived from it, for another kind of layer, claims nothing."""
    backend = sys.modules["vllm.v1.attention.backends.gdn_attn"].GDNAttentionBackend
    derived = type("Derived", (backend,), {})
    monkeypatch.setenv("GDN_BATCH_INVARIANT", "1")
    assert not backend.supports_batch_invariance()
    ours.register()
    assert backend.supports_batch_invariance() and not derived.supports_batch_invariance()
    monkeypatch.setenv("GDN_BATCH_INVARIANT", "0")
    assert not backend.supports_batch_invariance()
    ours.disable()
    assert "supports_batch_invariance" not in vars(backend)
    monkeypatch.setenv("GDN_BATCH_INVARIANT", "1")
    monkeypatch.setitem(ours.KNOWN, engine.olmo.__name__, ("another",))
    ours.register()
    assert not backend.supports_batch_invariance()
    ours.disable()
    # A version of vLLM that has an answer of its own keeps it.
    digest = ours.KNOWN[engine.qwen.__name__]
    monkeypatch.setitem(ours.KNOWN, engine.olmo.__name__, digest)
    backend.supports_batch_invariance = own = classmethod(lambda cls: False)
    ours.register()
    assert vars(backend)["supports_batch_invariance"] is own


@pytest.mark.of_no_device
def test_unknown_argument(ours, engine):
    engine.qwen.causal_conv1d_fn = function_of("causal_conv1d_fn", "x, tile")
    with pytest.raises(
        RuntimeError, match="causal_conv1d_fn takes tile, which gdn_triton does not"
    ):
        ours.register()


@pytest.mark.of_no_device
def test_absent(ours, engine, monkeypatch):
    del engine.qwen.ChunkGatedDeltaRule
    with pytest.raises(ImportError, match="has no ChunkGatedDeltaRule"):
        ours.register()
    with monkeypatch.context() as patch:
        for name in ("vllm", *ours.LAYERS):
            patch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match="finds no ChunkGatedDeltaRule in vLLM"):
            ours.register()
    with monkeypatch.context() as patch:
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            patch.delitem(sys.modules, name)
        patch.setattr(sys, "meta_path", [BuiltinImporter])
        with pytest.raises(ImportError, match="needs vLLM, which is not installed in this"):
            ours.status()
    engine.qwen.ChunkGatedDeltaRule = CustomOp
