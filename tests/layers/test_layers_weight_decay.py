"""Which weights an optimizer leaves undecayed, after all that torch does to a module."""

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layer_cases import qwen_weights
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim.swa_utils import AveragedModel

from gdn_triton.layers import GatedDeltaNet, parameter_groups


def make(device: str = "cpu") -> GatedDeltaNet:
    return GatedDeltaNet(hidden_size=12, head_dim=4, num_heads=2, device=device)


class Scaled(nn.Module):
    """A module of somebody else, which names a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(3, 4))
        self.weight = nn.Parameter(torch.ones(4, 4))

    def no_weight_decay(self) -> set[str]:
        return {"table", "no_such_name"}


class Tied(nn.Module):
    """A module with two names of one matrix, which names the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Parameter(torch.ones(3, 4))

    def no_weight_decay(self) -> set[str]:
        return {"second"}


def assigned() -> GatedDeltaNet:
    layer = make("meta")
    layer.load_state_dict(make().state_dict(), assign=True)
    return layer


def emptied() -> GatedDeltaNet:
    layer = make("meta").to_empty(device="cpu")
    layer.load_state_dict(make().state_dict())
    return layer


WAYS: dict[str, Callable[[], nn.Module]] = {
    "constructor": make,
    "deepcopy": lambda: copy.deepcopy(make()),
    "deepcopy of a model": lambda: copy.deepcopy(nn.Sequential(make()))[0],
    "pickle": lambda: pickle.loads(pickle.dumps(make())),
    "load_state_dict(assign=True)": assigned,
    "to_empty": emptied,
    "from_qwen": lambda: GatedDeltaNet.from_qwen(qwen_weights("Qwen3.5", 2, 6, 5, 3), 2),
    "averaged": lambda: AveragedModel(make()).module,
    "dtype": lambda: make().double(),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_attribute_stays(way: str) -> None:
    """Where torch makes new parameters: of A_log and dt_bias, and of no other one."""
    layer: Any = WAYS[way]()
    marked = {n for n, p in layer.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert marked == {"A_log", "dt_bias"} == layer.no_weight_decay()


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda model: model,
    "averaged": AveragedModel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "data-parallel": nn.DataParallel,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_groups_of_a_model(wrapper: str) -> None:
    """All parameters, each once, by the names of the modules that have them."""
    model = nn.Sequential(make(), nn.LayerNorm(12), Scaled(), nn.Linear(12, 2))
    model.add_module("again", model[0])
    model[3].weight.requires_grad_(False)
    run = WRAPPERS[wrapper](model)
    decayed, others = parameter_groups(run, 0.1)
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0.0
    names = {id(p): name.rpartition("module.")[2] for name, p in run.named_parameters()}
    found = [
        [names[id(p)].removeprefix("_orig_mod.") for p in g["params"]] for g in (decayed, others)
    ]
    matrices = [f"0.{x}_proj.weight" for x in "qkvab"]
    matrices += [f"0.{x}_conv1d.weight" for x in "qkv"]
    assert found[0] == [*matrices, "0.g_proj.weight", "0.o_proj.weight", "2.weight"]
    gains = ["0.A_log", "0.dt_bias", "0.o_norm.weight", "1.weight", "1.bias", "2.table", "3.bias"]
    assert found[1] == gains


def test_an_attribute_and_shared_parameters() -> None:
    """Either name of a shared parameter is enough; and the attribute of any parameter."""
    model: Any = nn.ModuleList([nn.Linear(4, 3, bias=False), Scaled(), nn.Linear(4, 4, bias=False)])
    model[0].weight = model[1].table
    model[2].weight._no_weight_decay = True
    decayed, others = parameter_groups(model, 0.1)
    assert [id(p) for p in decayed["params"]] == [id(model[1].weight)]
    assert [id(p) for p in others["params"]] == [id(model[0].weight), id(model[2].weight)]
    tied = Tied()
    decayed, others = parameter_groups(tied, 0.1)
    assert decayed["params"] == [] and others["params"][0] is tied.first


@pytest.mark.parametrize("way", WAYS)
def test_steps_of_an_optimizer(way: str) -> None:
    """With gradients of zero, decay alone changes a weight."""
    layer: Any = WAYS[way]()
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    for p in layer.parameters():
        p.grad = torch.zeros_like(p)
    torch.optim.AdamW(parameter_groups(layer, 0.5), lr=0.1).step()
    changed = {name for name, p in layer.named_parameters() if not torch.equal(p, before[name])}
    assert changed == before.keys() - {"A_log", "dt_bias", "o_norm.weight"}


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got list"):
        parameter_groups([make()], 0.1)  # type: ignore[arg-type]
    for bad in (-0.1, math.nan, math.inf, None):
        with pytest.raises(ValueError, match="weight_decay must be finite and at least 0, got"):
            parameter_groups(make(), bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="weight_decay must be a real number"):
        parameter_groups(make(), "0.1")  # type: ignore[arg-type]


def group_shards(rank: int, directory: str) -> None:
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    model = nn.Sequential(make(), Scaled())
    for module in (*model, model):
        fully_shard(module)
    shards = {id(p): name for name, p in model.named_parameters()}
    decayed, others = parameter_groups(model, 0.1)
    assert [shards[id(p)] for p in decayed["params"]][-1] == "1.weight"
    found = [shards[id(p)] for p in others["params"]]
    assert found == ["0.A_log", "0.dt_bias", "0.o_norm.weight", "1.table"]
    for use_orig_params in (False, True):
        options = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
        flat = FullyShardedDataParallel(make(), **options)
        with pytest.raises(ValueError, match="which FullyShardedDataParallel has flattened"):
            parameter_groups(flat, 0.1)


def test_groups_of_shards(tmp_path: Path) -> None:
    """`fully_shard` leaves no attribute of a parameter: names are found nevertheless. A parameter
    that the older FSDP has flattened has no dimensions to go by."""
    run_ranks(2, group_shards, str(tmp_path))
