"""SGLang's layers after a warm-up before its memory is allocated: no call compiles a kernel. With
SGLang's own kernel class, from its wheel."""

import ast
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from compilations import run_watched
from engine_sources import definitions, source, wheel_of

from gdn_triton.integrations import sglang
from gdn_triton.integrations.sglang import warming

MODULES = """
import sys
from types import ModuleType, SimpleNamespace
import torch
from engine_sources import load
from gdn_triton.integrations import sglang
from gdn_triton.integrations.sglang import warming

H, HV, K, V, W, BF16 = 1, 3, 64, 128, 4, torch.bfloat16
D = 2 * H * K + HV * V
SEQUENCES, TOKENS, DRAFTED = 20, 600, 3

class RadixLinearAttention(torch.nn.Module):
    def __init__(self, **given):
        super().__init__()
        self.__dict__.update(given)

def module(name, **names):
    made = sys.modules[name] = ModuleType(name)
    made.__dict__.update(names)
    return made

layer = RadixLinearAttention(
    num_q_heads=H, num_k_heads=H, num_v_heads=HV, head_q_dim=K, head_k_dim=K, head_v_dim=V,
    q_dim=H * K, k_dim=H * K, v_dim=HV * V, conv_weights=torch.empty(D, W, dtype=BF16), bias=None,
    activation="silu", A_log=torch.empty(HV), dt_bias=torch.empty(HV, dtype=BF16))
other = RadixLinearAttention(A_log=torch.empty(1, 1, HV, 1))
states = SimpleNamespace(
    shape=SimpleNamespace(conv=[(D, W - 1)], temporal=(HV, V, K)),
    dtype=SimpleNamespace(conv=BF16, temporal=torch.float32))
config = SimpleNamespace(mamba2_cache_params=states)
schedule = SimpleNamespace(
    chunked_prefill_size=TOKENS, max_prefill_tokens=None, max_running_requests=SEQUENCES)
module("sglang.srt.configs.hybrid_arch", hybrid_gdn_config=lambda model: config)
module("sglang.srt.layers.radix_linear_attention", RadixLinearAttention=RadixLinearAttention)
features = SimpleNamespace(enable_mis=True)
mamba = SimpleNamespace(linear_replayssm_cache_len=16, enable_linear_replayssm="step" in sys.argv,
                        enable_linear_replayssm_spec="drafts" in sys.argv)
module(
    "sglang.srt.runtime_context", get_schedule=lambda: schedule,
    get_exec=lambda: SimpleNamespace(features=features, mamba=mamba),
    get_spec=lambda: SimpleNamespace(speculative_num_draft_tokens=DRAFTED))

module(warming.RINGS, **{name: getattr(sglang, name) for name in sglang.PLACES[warming.RINGS]})
names = ("causal_conv1d_fn", "causal_conv1d_update", "fused_qkv_split_gdn_prefill")
backend = module(
    "sglang.srt.layers.attention.linear.gdn_backend",
    **{name: getattr(sglang, name) for name in names})
functions = {name: getattr(sglang, name) for name in sglang.PLACES[sglang.MODULE]}
false = lambda: False
given = {**functions, "torch": torch, "LinearAttnKernelBase": object,
         "is_cpu": false, "is_npu": false, "is_xpu": false}
file = "sglang/srt/layers/attention/linear/kernels/gdn_triton.py"
module(sglang.MODULE, **load("sglang", file, ["TritonGDNKernel"], given))
runner = SimpleNamespace(
    model_config=None, dtype=BF16, model=torch.nn.ModuleList([layer, other, layer]))
"""
COUNT = f"""
from compilations import asked, watch
watch()
{MODULES}
if sys.argv[1] == "warm":
    assert warming.warm_up(runner) > 0
before = len(asked)
x = warming._Layer(layer, states, BF16, *warming._rings())
for n in range(1, SEQUENCES + 1):
    x.decode(n)
    (x.verify_rings if "drafts" in sys.argv else x.verify)(n, DRAFTED)
    for T in () if len(sys.argv) > 2 else (n, 64, 65, 130, 311, TOKENS):
        x.prefill(n, T)
print(before > 0, len(asked) - before)
"""


def test_calls_compile_nothing() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    wheel_of("sglang")
    assert run_watched(COUNT, "warm") == ["True", "0"]


@pytest.mark.parametrize("rings", ["step", "drafts"])
def test_calls_on_rings_compile_nothing(rings: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    wheel_of("sglang")
    assert run_watched(COUNT, "warm", rings) == ["True", "0"]


def test_without_it_they_compile() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    wheel_of("sglang")
    before, new = run_watched(COUNT, "cold")
    assert before == "False" and int(new) > 0


def test_before_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner's layers are warm when its own method runs."""
    events: list[Any] = []
    monkeypatch.setattr(warming, "warm_up", lambda runner: events.append(("warm", runner)))

    class ModelRunner:
        def alloc_memory_pool(self, config: Any, *, layout: Any = None) -> str:
            events.append((config, layout))
            return "done"

    ModelRunner.alloc_memory_pool = warming.before_memory(ModelRunner.alloc_memory_pool)  # type: ignore[method-assign]
    runner = ModelRunner()
    assert runner.alloc_memory_pool(1, layout=2) == "done"
    assert events == [("warm", runner), (1, 2)]


def test_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "sglang.srt.configs.hybrid_arch"
    module = ModuleType(name)
    vars(module)["hybrid_gdn_config"] = lambda config: None
    monkeypatch.setitem(sys.modules, name, module)
    assert warming.warm_up(SimpleNamespace(model_config=object())) == 0


@pytest.mark.parametrize(
    "chunked, running, drafted, expected",
    [
        (2048, 24, 4, (2048, 24, 4)),
        (-1, None, None, (16384, 160, 0)),
        (None, 24, None, (16384, 24, 0)),
    ],
)
def test_sizes(
    chunked: Any, running: Any, drafted: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "sglang.srt.runtime_context"
    module = ModuleType(name)
    schedule = SimpleNamespace(
        chunked_prefill_size=chunked, max_prefill_tokens=16384, max_running_requests=running
    )
    graphs = SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(max_bs=160)))
    vars(module).update(
        get_schedule=lambda: schedule,
        get_exec=lambda: SimpleNamespace(graph=graphs),
        get_spec=lambda: SimpleNamespace(speculative_num_draft_tokens=drafted),
    )
    monkeypatch.setitem(sys.modules, name, module)
    assert warming._sizes() == expected


def text(file: str, name: str = "") -> str:
    whole = source(wheel_of("sglang"), file)
    return ast.unparse(definitions(ast.parse(whole))[name]) if name else whole


def test_where_sglang_allocates_memory() -> None:
    """The model is there when `alloc_memory_pool` of a runner is called, and no pool."""
    file = "sglang/srt/model_executor/model_runner.py"
    initialize = text(file, "ModelRunner.initialize")
    assert "self.load_model()" in initialize and "memory_pool(" not in initialize
    loads = text(file, "ModelRunner.load_model")
    assert "self.model = loaded.model" in loads and "self.dtype = " in loads
    allocates = text(file, f"{sglang.OWNER}.{sglang.ALLOCATE}")
    assert "self.kv_cache_configurator.configure(" in allocates
    context = text("sglang/srt/runtime_context.py")
    assert all(f"def get_{name}()" in context for name in ("schedule", "exec", "spec"))
    assert "get_exec().graph.cuda_graph_config.decode.max_bs" in context
    flags = text("sglang/srt/mem_cache/kv_cache_configurator.py")
    assert all(
        f"get_exec().mamba.{name}" in flags
        for name in (
            "linear_replayssm_cache_len",
            "enable_linear_replayssm",
            "enable_linear_replayssm_spec",
        )
    )
    assert "self.enable_mis = get_exec().features.enable_mis" in text(
        "sglang/srt/layers/attention/linear/gdn_backend.py", "GDNAttnBackend.__init__"
    )
    assert "def hybrid_gdn_config(model_config" in text("sglang/srt/configs/hybrid_arch.py")


def test_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `enable` puts it; SGLang's platforms without that runner have none."""
    module = ModuleType(sglang.RUNNER)
    monkeypatch.setitem(sys.modules, sglang.RUNNER, module)
    assert not list(sglang._allocations())
    vars(module)["ModelRunner"] = type("ModelRunner", (), {"alloc_memory_pool": lambda self: 0})
    (target,) = sglang._allocations()
    assert target.owner is module.ModelRunner and target.name == "alloc_memory_pool"
