"""The lines of docs/trainers.md in the layers that they are written for: definitions of a wheel of
TorchTitan, and the layer of Megatron-LM, imported from its wheel in a process of its own."""

import contextlib
import inspect
import itertools
import linecache
import os
import re
import subprocess
import sys
import zipfile
from ast import Module as Body
from ast import parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_sources import definitions, source
from runs import made_once
from torch import nn
from torch.nn import functional as F

import gdn_triton
from gdn_triton.layers import GatedDeltaNet

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "trainers.md"
# The versions in the page's first table.
VERSIONS = dict(re.findall(r"`([\w-]+)==([\d.]+)`", PAGE.read_text(encoding="utf-8")))
HIDDEN, K, V, H, HV, W = 24, 8, 8, 2, 4, 4
LENGTHS = (9, 1, 0, 30)


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "reference")


@pytest.fixture
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By package. They are 4 MB, without the packages that they need."""
    folder = made_once(tmp_path_factory, "trainers", download)
    return {name: next(folder.glob(f"{name.replace('-', '_')}-*.whl")) for name in VERSIONS}


def download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
    # Megatron-LM's wheels are for this Python and newer; what is read here runs on older ones too.
    command += ["--only-binary=:all:", "--python-version=3.12", "--platform=manylinux_2_28_x86_64"]
    packages = [f"{name}=={version}" for name, version in VERSIONS.items()]
    done = subprocess.run([*command, *packages], capture_output=True, text=True, check=False)
    if done.returncode != 0 and "connection broken by" in done.stderr:
        pytest.skip(f"pip cannot reach an index: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr


def block(heading: str) -> str:
    """The code below a heading of the page."""
    text = PAGE.read_text(encoding="utf-8").split(f"# {heading}\n")[1]
    found = re.search(r"```python\n(.*?)```", text, re.S)
    assert found is not None
    return found[1]


def lines_of(heading: str, **given: Any) -> SimpleNamespace:
    """That code, executed."""
    namespace: dict[str, Any] = {"__name__": "trainers", **given}
    exec(compile(block(heading), f"{PAGE}: {heading}", "exec"), namespace)
    return SimpleNamespace(**namespace)


# -------------------------------------------------------------------------------------- TorchTitan


class Module(nn.Module):
    """TorchTitan's, as far as the layer uses it."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        pass


def unchanged(**types: Any) -> Callable[[Any], Any]:
    return lambda function: function


SPMD = SimpleNamespace(
    local_map=unchanged, local=contextlib.nullcontext, S=lambda dim: dim, R=None, V=None
)
MODEL = "torchtitan/models/qwen3_5/model.py"
NAMES = (
    *("_causal_conv1d_varlen", "_unflatten_to_bld", "_fold_bl_dim"),
    *("RMSNormGated", "GatedDeltaKernel", "GatedDeltaNet"),
)


def torchtitan(wheel: Path) -> SimpleNamespace:
    """The layer's definitions, and nothing else of the file: it imports kernels that need a GPU."""
    text = source(wheel, MODEL)
    tree = definitions(parse(text))
    path = f"{wheel}/{MODEL}"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    namespace: dict[str, Any] = {
        **{"torch": torch, "nn": nn, "F": F, "spmd": SPMD, "dataclass": dataclass},
        **{"Module": Module, "Linear": Module, "Conv1d": Module, "GatedDeltaBackend": str},
        **{"Callable": Callable, "DTensor": type("DTensor", (), {}), "VarlenMetadata": Any},
        "get_spmd_backend": lambda: "default",
        "local_head_split": lambda x, dim, dp_shard_dim: x.unflatten(-1, (-1, dim)),
    }
    for name in NAMES:
        exec(compile(Body([tree[name]], type_ignores=[]), path, "exec"), namespace)
    return SimpleNamespace(**namespace, namespace=namespace)


def built(module: nn.Module, **sizes: int) -> SimpleNamespace:
    """A config that builds it."""
    return SimpleNamespace(build=lambda: module, **sizes)


def titan_layer(titan: SimpleNamespace) -> nn.Module:
    sizes = {"q": H * K, "k": H * K, "v": HV * V, "z": HV * V, "a": HV, "b": HV}
    projections = {
        f"in_proj_{name}": built(nn.Linear(HIDDEN, n, bias=False), out_features=n)
        for name, n in sizes.items()
    }
    convolutions = {
        f"conv_{name}": built(
            nn.Conv1d(sizes[name], sizes[name], W, groups=sizes[name], bias=False)
        )
        for name in "qkv"
    }
    config = SimpleNamespace(
        key_head_dim=K,
        value_head_dim=V,
        conv_kernel_size=W,
        kernel=built(titan.GatedDeltaKernel(SimpleNamespace(backend="gdn_triton"))),
        norm=built(titan.RMSNormGated(SimpleNamespace(dim=V, eps=1e-6))),
        out_proj=built(nn.Linear(HV * V, HIDDEN, bias=False)),
        **projections,
        **convolutions,
    )
    layer = titan.GatedDeltaNet(config)
    for weight in (layer.A_log, layer.dt_bias, layer.norm.weight):
        nn.init.uniform_(weight)
    return layer


def test_torchtitan(wheels: dict[str, Path]) -> None:
    """TorchTitan's own layer around the page's functions, beside ours with its weights by the
    page's names: results and gradients, as one stream and packed."""
    titan = torchtitan(wheels["torchtitan"])
    page = lines_of("TorchTitan")
    titan.GatedDeltaKernel.forward = page.forward
    titan.RMSNormGated.forward = page.norm
    titan.namespace["_causal_conv1d_varlen"] = page._causal_conv1d_varlen
    theirs = titan_layer(titan)
    ours = GatedDeltaNet(HIDDEN, V / K, K, H, HV, norm_eps=1e-6)
    rows = re.findall(r"\| `(\w+)` \| `(\w+)` \|", PAGE.read_text(encoding="utf-8"))
    names = dict(rows)
    weights = {}
    for name, weight in theirs.state_dict().items():
        first, _, rest = name.partition(".")
        weights[f"{names.get(first, first)}{rest and '.'}{rest}"] = weight
    ours.load_state_dict(weights)

    offsets = [0, *itertools.accumulate(LENGTHS)]
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    packed = SimpleNamespace(cu_seq_q=cu_seqlens, cu_seq_q_host=tuple(offsets))
    x = torch.randn(1, sum(LENGTHS), HIDDEN)
    for masks, given in ((None, {}), (packed, {"cu_seqlens": cu_seqlens})):
        found, expected = theirs(x, masks), ours(x, **given)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        dy = torch.randn_like(found)
        grads = torch.autograd.grad(found, list(theirs.parameters()), dy)
        by_name = dict(ours.named_parameters())
        renamed = dict(zip((n for n, _ in theirs.named_parameters()), grads, strict=True))
        for name, grad in renamed.items():
            first, _, rest = name.partition(".")
            weight = by_name[f"{names.get(first, first)}{rest and '.'}{rest}"]
            (whole,) = torch.autograd.grad(expected, weight, dy, retain_graph=True)
            torch.testing.assert_close(grad, whole, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("name", ["GatedDeltaKernel.forward", "_causal_conv1d_varlen"])
def test_torchtitan_interface(wheels: dict[str, Path], name: str) -> None:
    """Their parameters, by name and in order."""
    titan = torchtitan(wheels["torchtitan"])
    attribute = name.rpartition(".")[2]
    owner = titan.GatedDeltaKernel if "." in name else titan
    theirs = inspect.signature(getattr(owner, attribute)).parameters
    ours = inspect.signature(getattr(lines_of("TorchTitan"), attribute)).parameters
    assert list(ours) == list(theirs)
    assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()]


def test_torchtitan_after_the_release() -> None:
    """The function for tokens without a batch is the other one."""
    q, k = torch.randn(2, 40, H, K)
    v, g, beta = torch.randn(40, HV, V), -torch.rand(40, HV), torch.rand(40, HV)
    x = (q, k, v, g, beta)
    cu_seqlens = torch.tensor([0, 13, 40], dtype=torch.int32)
    given = SimpleNamespace(backend="gdn_triton")
    expected = lines_of("TorchTitan").forward(
        given, *(y[None] for y in x), cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens
    )
    assert torch.equal(
        lines_of("After the release").forward(given, *x, cu_seqlens=cu_seqlens), expected[0]
    )


# ------------------------------------------------------------------------------------- Megatron-LM

MEGATRON = """
import itertools, sys
import torch, torch.distributed as dist

torch.cuda.current_device = lambda: "cpu"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import common, gdn
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig

common.HAVE_FLA = True
exec(open(sys.argv[1]).read())
gdn.causal_conv1d = causal_conv1d
# FLA's norm, for Megatron's own torch form, with which the test compares.
common.l2norm = lambda x, dim=-1, eps=1e-6: x * torch.rsqrt(x.square().sum(dim, True) + eps)


class Norm(torch.nn.RMSNorm):
    def __init__(self, config, hidden_size, eps):
        super().__init__(hidden_size, eps)


def make(layer, deterministic):
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True,
        linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=8,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_attention_freq=1,
        experimental_attention_variant="gated_delta_net", perform_initialization=False,
        activation_func=torch.nn.functional.silu, deterministic_mode=deterministic,
    )
    parts = common.GatedDeltaNetSubmodules(ColumnParallelLinear, Norm, RowParallelLinear)
    group = dist.group.WORLD
    return layer(config, parts, 1, pg_collection=ProcessGroupCollection(tp=group, cp=group))


def run(layer, x, **given):
    out, _ = layer(x, None, **given)
    torch.manual_seed(1)
    return [out, *torch.autograd.grad(out, list(layer.parameters()), torch.randn_like(out))]


torch.manual_seed(0)
whole = make(gdn.GatedDeltaNet, True)
ours = make(type("GatedDeltaNet", (GdnTriton, gdn.GatedDeltaNet), {}), False)
for name, weight in whole.named_parameters():
    torch.nn.init.uniform_(weight, -0.4, 0.4)
ours.load_state_dict(whole.state_dict())
x = torch.randn(70, 2, 32)
for a, b in zip(run(ours, x), run(whole, x), strict=True):
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
# Packed, which their torch form does not take: each sequence is as it is alone.
lengths, x = [30, 1, 39], x[:, :1]
offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
given = PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
packed, _ = ours(x, None, packed_seq_params=given)
alone = torch.cat([whole(part, None)[0] for part in x.split(lengths)])
torch.testing.assert_close(packed, alone, rtol=1e-3, atol=1e-4)
print("right")
"""


@pytest.mark.long(15)
def test_megatron(wheels: dict[str, Path], tmp_path: Path) -> None:
    """Megatron-LM's own layer with the page's lines, beside the same layer on its torch form."""
    with zipfile.ZipFile(wheels["megatron-core"]) as files:
        files.extractall(tmp_path / "site")
    (tmp_path / "page.py").write_text(block("Megatron-LM"), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEGATRON, tmp_path / "page.py"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith("right\n")


def test_megatron_provider() -> None:
    """The call of its layer, packed; the slot's variants are by name."""
    provider = lines_of("A provider of operators").Provider()
    rule = provider.gated_delta_rule("gdn")
    assert rule is gdn_triton.chunk_gated_delta_rule
    x = [torch.randn(1, 9, 2, K) for _ in "qk"] + [torch.randn(1, 9, 4, V)]
    gates = {"g": -torch.rand(1, 9, 4), "beta": torch.rand(1, 9, 4)}
    o, state = rule(
        *x,
        **gates,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.tensor([0, 4, 9]),
    )
    alone, _ = rule(
        *(y[:, 4:] for y in x),
        **{name: y[:, 4:] for name, y in gates.items()},
        use_qk_l2norm_in_kernel=True,
    )
    assert state is None
    torch.testing.assert_close(o[:, 4:], alone)
    with pytest.raises(NotImplementedError, match="no kda"):
        provider.gated_delta_rule("kda")
