"""vLLM's layers with the records of a window in their pages: steps against the specification, and
the pages that vLLM's own code makes where its wheel is given."""

import os
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_sources import load
from helpers import assert_within_budget, same_bits
from torch import Tensor
from vllm_steps import HV, SLOTS, H, K, Sequence, Step, V, W, conv_state_of, make_layer

from gdn_triton.integrations.vllm import layer as ours
from gdn_triton.integrations.vllm import window
from gdn_triton.recurrent.window import fold_window

TENSOR_PARALLEL = 2


@pytest.fixture(params=["reference", "triton"])
def backend(request, monkeypatch):
    """On the CPU: the kernels run in Triton's interpreter."""
    if request.param == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("these tensors are on the CPU, where Triton runs in its interpreter only")
    monkeypatch.setenv("GDN_BACKEND", request.param)


class Calculator:
    """The functions of vLLM that name a layer's states."""

    @classmethod
    def gated_delta_net_state_shape(cls, tp, k_heads, v_heads, k_dim, v_dim, kernel, num_spec=0):
        D = (2 * k_heads * k_dim + v_heads * v_dim) // tp
        return (kernel - 1 + num_spec, D), (v_heads // tp, v_dim, k_dim)

    @classmethod
    def gated_delta_net_state_dtype(cls, model_dtype, cache_dtype, ssm_dtype="auto"):
        return model_dtype, torch.float32


SIZES = (TENSOR_PARALLEL, 2 * H, 2 * HV, K, V, W)
MAMBA = "vllm/model_executor/layers/mamba"


def states_of(shapes: Any = Calculator, dtypes: Any = Calculator) -> list[tuple[Any, torch.dtype]]:
    shape = window.shapes(vars(shapes)["gated_delta_net_state_shape"])
    dtype = window.dtypes(vars(dtypes)["gated_delta_net_state_dtype"])
    found = shape.__get__(None, shapes)(*SIZES), dtype.__get__(None, dtypes)(torch.float32, "auto")
    assert len(found[0]) == len(found[1]) == window.WITH_RECORDS
    return list(zip(*found, strict=True))


def make_pages(states: list[tuple[Any, torch.dtype]]) -> tuple[Tensor, ...]:
    """The views of a layer in pages that hold NaN, as vLLM's `bind_kv_cache` makes them."""
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in states]
    pages = torch.full((SLOTS, sum(sizes) + 64), -1, dtype=torch.int8)
    offset, views = 0, []
    for (shape, dtype), size in zip(states, sizes, strict=True):
        views.append(pages[:, offset : offset + size].view(dtype).view(-1, *shape))
        offset += size
    return tuple(views)


def run(step: Step, with_window: bool = True) -> Tensor:
    layer, metadata = step.layer, step.metadata
    mixed_qkv, b, a, out = step.inputs()
    lengths = [n + count for n, count in zip(step.before, step.counts, strict=True)]
    if with_window:
        lengths = torch.tensor([*lengths, *[0] * step.padding], dtype=torch.int32)
        setattr(metadata, window.POSITIONS, window.positions_of(metadata, lengths))
    nobody = [x[0].clone() for x in layer.kv_cache]
    with torch.no_grad():
        ours.forward_core(layer, metadata, conv_state_of(layer), mixed_qkv, b, a, out)
    for pool, before in zip(layer.kv_cache, nobody, strict=True):
        assert same_bits(pool[0], before), "page 0 is written"
    return out[: sum(step.counts)]


def assert_specified(step: Step, o: Tensor) -> None:
    """o of the step, and the states of its sequences after a fold of copies of their pages."""
    budget = {"dtype": torch.float32, "unit": 2**-19}
    copy = SimpleNamespace(kv_cache=tuple(x.clone() for x in step.layer.kv_cache))
    found = window.window_of(copy, SimpleNamespace(**{window.POSITIONS: "any"}))
    slots = torch.tensor([s.slots[0] for s in step.sequences])
    ends = torch.tensor([s.a.shape[0] + 1 for s in step.sequences])
    fold_window(copy.kv_cache[1], found.window, slots, ends, state_v_first=True)
    start = 0
    for n, (s, count) in enumerate(zip(step.sequences, step.counts, strict=True)):
        exact, states = s.run(step.layer)
        close, close_state = s.narrow(step.layer, chunked=step.is_prefill(n))
        first = step.before[n]
        got = o[start : start + count]
        assert_within_budget(f"o {n}", got, exact[first:], close[first:], **budget)
        state = copy.kv_cache[1][s.slots[0]]
        assert_within_budget(f"state {n}", state, states[-1], close_state, **budget)
        start += count


@pytest.mark.parametrize("doubles_beta", [False, True], ids=["Qwen", "OLMo"])
def test_a_service(doubles_beta, backend):
    """Sequences begin, are prefilled in pieces, decode for more than a fold period alone and with
    prefills, are continued by a prefill after they have decoded, and leave their page to another
    sequence."""
    layer = make_layer(doubles_beta=doubles_beta)
    layer.kv_cache = make_pages(states_of())
    a, b, c = Sequence([5]), Sequence([2]), Sequence([9])
    steps = [([a, b], [5, 70]), ([a, b], [1, 33]), ([b, a, c], [1, 1, 2])]
    steps += [([a, b, c], [1, 1, 1])] * 18
    steps += [([a, c, b], [1, 1, 7]), ([b, a], [1, 1])]
    for i, (members, counts) in enumerate(steps):
        step = Step(layer, members, counts, [], padding=2 if i == 3 else 0)
        o = run(step)
        if i < 6 or i > 17:
            assert_specified(step, o)
    heir = Sequence([5])
    for members, counts in (([b, heir], [1, 1]), ([b, heir], [1, 1]), ([heir], [1])):
        step = Step(layer, members, counts, [])
        assert_specified(step, run(step))


def test_pages_of_vllm():
    """vLLM's own text names the states, sizes a page, and makes the views of a layer."""
    given = {
        "torch": torch,
        "prod": prod,
        "get_dtype_size": lambda dtype: dtype.itemsize,
        "get_kv_cache_torch_dtype": lambda dtype, model_dtype: model_dtype,
        "STR_DTYPE_TO_TORCH_DTYPE": {"float32": torch.float32},
        "is_conv_state_dim_first": lambda: False,
        "divide": lambda x, y: x // y,
        **dict.fromkeys(("MambaBackendEnum", "MambaDType", "ModelDType"), Any),
    }
    names = ("MambaStateShapeCalculator", "MambaStateDtypeCalculator")
    found = load("vllm", f"{MAMBA}/mamba_utils.py", names, given)
    shapes, dtypes = (found[name] for name in names)
    assert states_of(Calculator, dtypes)[1][1] == torch.float32
    states = states_of(shapes, dtypes)
    assert states == states_of()
    bind = load("vllm", f"{MAMBA}/abstract.py", ["MambaBase.bind_kv_cache"], given)
    spec = load(
        "vllm", "vllm/v1/kv_cache_interface.py", ["MambaSpec.state_content_size_bytes"], given
    )
    names, kinds = zip(*states, strict=True)
    size = spec["MambaSpec.state_content_size_bytes"].fget(
        SimpleNamespace(shapes=names, dtypes=kinds)
    )
    assert size % 16 == 0
    pages = torch.full((SLOTS, 1, 1, size), -1, dtype=torch.int8)
    layer = make_layer()
    layer.get_state_shape, layer.get_state_dtype = lambda: names, lambda: kinds
    bind["MambaBase.bind_kv_cache"](layer, pages)
    assert len(layer.kv_cache) == window.WITH_RECORDS
    a = Sequence([7])
    for count in (9, 1, 1, 3, 1):
        step = Step(layer, [a], [count], [])
        assert_specified(step, run(step))
    assert (pages[[n for n in range(SLOTS) if n != 7]] == -1).all(), "another page is written"


def test_without_positions(backend):
    """A step whose metadata has no positions reads and writes the states alone."""
    layer, a = make_layer(), Sequence([3])
    layer.kv_cache = make_pages(states_of())
    for count in (4, 1, 1):
        step = Step(layer, [a], [count], [])
        records = [x.clone() for x in layer.kv_cache[2:]]
        o = run(step, with_window=False)
        exact = a.run(layer)
        close = a.narrow(layer, chunked=count > 1)
        for name, got, i in (("o", o[-1], 0), ("state", layer.kv_cache[1][3], 1)):
            narrow = close[0][-1] if i == 0 else close[1]
            budget = {"dtype": torch.float32, "unit": 2**-19}
            assert_within_budget(name, got[None], exact[i][-1:], narrow[None], **budget)
        assert all(map(same_bits, records, layer.kv_cache[2:]))


CONFIG = {"speculative_config": None, "kv_transfer_config": None}


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({}, None),
        ({"mode": "align"}, "prefix caching"),
        ({"speculative_config": object()}, "drafts"),
        ({"kv_transfer_config": object()}, "connector"),
    ],
)
def test_reasons(changes, reason):
    cache = SimpleNamespace(mamba_cache_mode=changes.pop("mode", "none"))
    found = window.why_not(SimpleNamespace(cache_config=cache, **{**CONFIG, **changes}))
    assert found is None if reason is None else found is not None and reason in found


def test_metadata(caplog):
    """The positions are those of the step, go on to other groups of layers, and are left out, with
    a warning, where vLLM copies states."""
    cache = SimpleNamespace(mamba_cache_mode="none")
    config = SimpleNamespace(cache_config=cache, **CONFIG)
    shapes = tuple(shape for shape, _ in states_of())
    builder = SimpleNamespace(
        vllm_config=config, kv_cache_spec=SimpleNamespace(shapes=shapes), num_spec=0
    )
    a, b = Sequence([5]), Sequence([2])
    layer = make_layer()
    Step(layer, [a], [6], [])
    step = Step(layer, [a, b], [1, 3], [])
    common = SimpleNamespace(seq_lens=torch.tensor([7, 3], dtype=torch.int32))
    build = window.placing(lambda self, prefix, common: step.metadata)
    made = build(builder, 0, common)
    found = getattr(made, window.POSITIONS)
    assert found.lengths is common.seq_lens
    assert found.before.tolist() == [1] and found.after.tolist() == [4]
    other = window.carrying(lambda self, metadata: SimpleNamespace())(builder, made)
    assert getattr(other, window.POSITIONS) is found
    builder.kv_cache_spec.shapes = shapes[:2]
    assert not hasattr(build(builder, 0, common), window.POSITIONS)
    builder.kv_cache_spec.shapes, cache.mamba_cache_mode = shapes, "align"
    assert not hasattr(build(builder, 0, common), window.POSITIONS)
    assert "without a window: prefix caching" in caplog.text


def test_drafts_have_no_records():
    shape = window.shapes(vars(Calculator)["gated_delta_net_state_shape"]).__get__(None, Calculator)
    assert shape(*SIZES, num_spec=2) == Calculator.gated_delta_net_state_shape(*SIZES, 2)
    dtype = window.dtypes(vars(Calculator)["gated_delta_net_state_dtype"])
    with pytest.raises(TypeError, match="model_dtype must be a torch"):
        dtype.__get__(None, Calculator)("bfloat16", "auto")
