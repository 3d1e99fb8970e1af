"""vLLM's layers after a run that sizes memory: no step compiles a kernel."""

import ast
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compilations import run_watched
from engine_sources import definitions, source, wheel_of
from helpers import same_bits
from vllm_steps import DRAFTS, HV, Sequence, Step, V, conv_state_of, make_layer

from gdn_triton.integrations.vllm import layer as ours
from gdn_triton.integrations.vllm import warming

COUNT = """
import sys
from types import ModuleType, SimpleNamespace
from compilations import asked, watch
watch()
import torch
import vllm_steps
from gdn_triton.integrations.vllm import layer as ours, warming, window
kind, warms = sys.argv[1], sys.argv[2] == "warm"
drafted = {"drafts": 2}.get(kind, 0)
HV, D = 3, 2 * 64 + 3 * 128
vars(vllm_steps).update(H=1, HV=HV, K=64, V=128, D=D, DRAFTS=drafted)
from vllm_steps import Sequence, Step, make_layer
ROWS, SEQUENCES = 700, 24
layer = make_layer(torch.bfloat16, doubles_beta=kind == "OLMo")
layer.num_spec = drafted
layer.num_k_heads, layer.tp_size = 2, 2
shapes = [x.shape[1:] for x in layer.kv_cache]
dtypes = [x.dtype for x in layer.kv_cache]
layer.get_state_shape, layer.get_state_dtype = lambda: shapes, lambda: dtypes
PAGE = 1 << 19
if kind == "window":
    rows = ((16, HV, 128), torch.float32), ((16, 1, 64), torch.bfloat16), ((16, HV), torch.float32)
    rows = *zip(shapes, dtypes), *rows, ((16,), torch.int32), ((4,), torch.int32)
    shapes, dtypes = zip(*rows)
    layer.kv_cache = window.page_views(list(rows), 16, PAGE, torch.device("cpu"))
    layer.cache_config = SimpleNamespace(mamba_page_size_padded=PAGE)
layer._exports_checkpoints = kind == "checkpoints"
layer._checkpoint_exporter = SimpleNamespace(export=lambda *args, **kwargs: None)

def tokens(rows):
    "Views of the projections, as vLLM has them."
    bf16 = torch.bfloat16
    mixed_qkv = torch.empty(rows, D + HV * 128, dtype=bf16)[:, :D]
    b, a = torch.empty(rows, 2 * HV, dtype=bf16).chunk(2, -1)
    return mixed_qkv, b, a, torch.empty(rows, HV, 128, dtype=bf16)

context = SimpleNamespace(attn_metadata=None)
config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=SEQUENCES))
module = SimpleNamespace(get_forward_context=lambda: context, is_conv_state_dim_first=lambda: False)
sys.modules["vllm"] = ModuleType("vllm")
sys.modules["vllm.config"] = SimpleNamespace(get_current_vllm_config_or_none=lambda: config)
core = ours.method(module, warming.warm_up if warms else lambda *args, **kwargs: 1)
core(layer, *tokens(ROWS))
before = len(asked)
core(layer, *tokens(ROWS))
again = len(asked) - before

def steps():
    for n in (1, 2, 3, 9, 17, 24):
        yield [1] * n, []
        for first in (0, 1, 2, 3, 4, 5, 8):
            for lengths in ([7], [64, 1, 3], [300], [9] * n):
                if kind != "checkpoints" or first < n:
                    yield [1] * first + lengths, []
        if drafted:
            yield [3] * n, list(range(n))
            yield [3] * n + [5, 100], list(range(n))
            yield [1, 3, 40] + [2] * n, [1, 3]

for counts, drafts in steps():
    if len(counts) > SEQUENCES:
        continue
    members = [Sequence([0] * (drafted + 1)) for _ in counts]
    places = {}
    if kind == "checkpoints" and len(counts) > 1 and not drafts:
        places = {n: (64, 1) for n, c in enumerate(counts) if c > 64}
    metadata = Step(layer, members, counts, drafts, checkpoints=places).metadata
    context.attn_metadata = {layer.prefix: metadata}
    if kind == "window":
        lengths = torch.zeros(len(counts), dtype=torch.int32)
        setattr(metadata, window.POSITIONS, window.positions_of(metadata, lengths))
    core(layer, *tokens(sum(counts)))
print(before > 0, again, len(asked) - before)
"""


@pytest.mark.parametrize("kind", ["Qwen", "OLMo", "checkpoints", "drafts", "window"])
def test_steps_compile_nothing(kind: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    assert run_watched(COUNT, kind, "warm") == ["True", "0", "0"]


def test_without_it_they_compile() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    before, again, new = run_watched(COUNT, "Qwen", "cold")
    assert (before, again) == ("False", "0") and int(new) > 0


def test_writes_nothing_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer's own pools, and the tokens, stay; a second call makes no step."""
    monkeypatch.setenv("GDN_BACKEND", "reference")
    monkeypatch.setattr(warming, "_rows", {})
    layer = make_layer()
    layer.num_spec = DRAFTS
    shapes, dtypes = ([f(x) for x in layer.kv_cache] for f in (lambda x: x.shape[1:], _dtype))
    layer.get_state_shape, layer.get_state_dtype = lambda: shapes, lambda: dtypes
    step = Step(layer, [Sequence([1, 2, 3])], [9], [])
    mixed_qkv, b, a, out = step.inputs()
    kept = [*layer.kv_cache, mixed_qkv, b, a]
    before = [x.clone() for x in kept]
    x = ours.Tokens(mixed_qkv, a, b, torch.empty_like(out))
    options: dict[str, Any] = {"max_sequences": 2, "is_conv_state_dim_first": False}
    assert warming.warm_up(layer, x, **options) > 0
    assert all(map(same_bits, before, kept))
    assert warming.warm_up(layer, x, **options) == 0
    # More tokens, and a layer with other dtypes of states, are new.
    dtypes[1] = torch.float16
    assert warming.warm_up(layer, x, **options) > 0
    assert warming.warm_up(layer, x.part(0, 5), **options) == 0
    twice = [torch.cat([y, y]) for y in (mixed_qkv, a, b, out)]
    assert warming.warm_up(layer, ours.Tokens(*twice), **options) > 0
    assert conv_state_of(layer).shape[1] == mixed_qkv.shape[1] and out.shape[1:] == (HV, V)


def _dtype(x: torch.Tensor) -> torch.dtype:
    return x.dtype


# -------------------------------------------------------------------------------- vLLM's own text


def text(file: str, name: str) -> str:
    return ast.unparse(definitions(ast.parse(source(wheel_of("vllm"), file)))[name])


def test_where_vllm_sizes_memory() -> None:
    """A forward without metadata, in the process of the model, before caches are allocated, where
    the configuration can be asked for."""
    sizing = text("vllm/v1/worker/gpu_worker.py", "Worker.determine_available_memory")
    assert "set_current_vllm_config(self.vllm_config)" in sizing
    assert "self.model_runner.profile_run(" in sizing
    mamba = "vllm/model_executor/layers/mamba"
    for model, owner in (("qwen_gdn", "Qwen"), ("olmo_gdn", "OlmoHybrid")):
        file = f"{mamba}/gdn/{model}_linear_attn.py"
        core = text(file, f"{owner}GatedDeltaNetAttention._forward_core")
        assert "if attn_metadata is None:" in core
        whole = source(wheel_of("vllm"), file)
        assert "is_conv_state_dim_first," in whole
    config = text("vllm/config/vllm.py", "get_current_vllm_config_or_none")
    assert "return _current_vllm_config" in config
    base = text(f"{mamba}/gdn/base.py", "GatedDeltaNetAttention")
    assert "self.num_spec =" in base and "def get_state_dtype(" in base
    assert "max_num_seqs: int" in text("vllm/config/scheduler.py", "SchedulerConfig")
    exports = text(
        f"{mamba}/gdn/qwen_gdn_linear_attn.py", "QwenGatedDeltaNetAttention._exports_checkpoints"
    )
    assert "bool" in exports


def test_states_as_vllm_shapes_them() -> None:
    """Its own function says how the pools of the stand-in layer are shaped."""
    file = "vllm/model_executor/layers/mamba/mamba_utils.py"
    node = definitions(ast.parse(source(wheel_of("vllm"), file)))[
        "MambaStateShapeCalculator.gated_delta_net_state_shape"
    ]
    assert isinstance(node, ast.FunctionDef)
    node.decorator_list = []
    module = ast.Module([node], type_ignores=[])
    given: dict[str, Any] = {"divide": lambda a, b: a // b}
    exec(compile(module, file, "exec"), given)
    oriented = SimpleNamespace(_orient_conv_shape=lambda dim, length: (length, dim))
    layer = make_layer()
    sizes = (layer.tp_size, layer.num_k_heads, layer.num_v_heads, layer.head_k_dim)
    shapes = given[node.name](oriented, *sizes, layer.head_v_dim, 4, DRAFTS)
    assert list(shapes) == [tuple(x.shape[1:]) for x in layer.kv_cache]
