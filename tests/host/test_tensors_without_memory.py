"""Tensors without memory: see test_tensors.py."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import same_bits
from tensor_cases import (
    CONV,
    OPS,
    Op,
    T,
    chunk,
    chunk_tensors,
    copied,
    each_backend,
    each_op,
    negative,
    outcome,
    tokens,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from gdn_triton.layers import GatedDeltaNet


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of one rank."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


# ----------------------------------------------------------------------- tensors without memory


def form(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.stride()


@each_backend
@each_op
def test_shapes_without_memory(
    op: Op, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device and among fake tensors, within their mode and outside of it."""
    monkeypatch.setenv("GDN_BACKEND", backend)
    tensors = op.make(device)
    expected = [form(y) for y in op.run(copied(tensors))]
    on_meta = op.run({name: x.to("meta") for name, x in tensors.items()})
    assert all(y.is_meta for y in on_meta)
    assert [form(y) for y in on_meta] == expected
    mode = FakeTensorMode()
    fakes = {name: mode.from_tensor(x) for name, x in tensors.items()}
    assert [form(y) for y in op.run(fakes)] == expected
    with mode:
        assert [form(y) for y in op.run(fakes)] == expected


@pytest.mark.parametrize("device_type", ["meta", "fake"])
@pytest.mark.parametrize("name", ["chunk", "recurrent", "conv", "conv-prep", "post-conv"])
def test_gradients_without_memory(
    name: str, device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GDN_BACKEND", raising=False)
    op = next(op for op in OPS if op.name == name)
    mode = FakeTensorMode()
    inputs = [
        x.to("meta") if device_type == "meta" else mode.from_tensor(x)
        for x in op.make("cpu").values()
    ]
    leaves = {n: x.requires_grad_() for n, x in zip(op.make("cpu"), inputs, strict=True)}
    sum(y.sum() for y in op.run(leaves)).backward()
    assert all(x.grad is not None and form(x.grad)[:2] == form(x)[:2] for x in leaves.values())


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@each_backend
@each_op
def test_make_fx(
    op: Op, backend: str, mode: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace has the call, not its result."""
    monkeypatch.setenv("GDN_BACKEND", backend)
    tensors, others = op.make(device), op.make(device)
    graph = make_fx(op.run, tracing_mode=mode)(copied(tensors))
    traced = copied(others)
    found = [*graph(traced), *(traced[name] for name in op.written)]
    for y, z in zip(found, outcome(op, copied(others)), strict=True):
        assert same_bits(y, z)


def test_offsets_without_memory() -> None:
    """Sizes are judged, contents are not there."""
    offsets = torch.tensor([0, 2, T])
    for name, make in (("chunk", chunk_tensors), ("conv", lambda d: tokens(d, *CONV))):
        op = next(op for op in OPS if op.name == name)
        tensors = make("cpu")
        tensors.pop("initial_state", None)
        expected = [form(y) for y in op.run({**tensors, "cu_seqlens": offsets})]
        with FakeTensorMode() as mode:
            fakes = {n: mode.from_tensor(x) for n, x in {**tensors, "cu_seqlens": offsets}.items()}
            assert [form(y) for y in op.run(fakes)] == expected
    meta = {name: x.to("meta") for name, x in chunk_tensors("cpu").items()}
    del meta["initial_state"]
    wrong = torch.tensor([0, T + 1])
    with pytest.raises(ValueError, match="cu_seqlens_cpu must end at or before"):
        chunk({**meta, "cu_seqlens": wrong.to("meta"), "cu_seqlens_cpu": wrong})
    with pytest.raises(ValueError, match="v must have shape"):
        chunk({**meta, "v": meta["v"][:, 1:]})


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("form_of_call", ["padded", "masked", "packed", "cache"])
def test_the_layer_without_memory(form_of_call: str, grad: bool) -> None:
    def shapes(device: str) -> list[tuple[Any, ...]]:
        layer = GatedDeltaNet(hidden_size=12, head_dim=8, num_heads=2, device=device)
        x = torch.zeros(1, T, 12, device=device)
        more: dict[str, Any] = {}
        if form_of_call == "masked":
            more["attention_mask"] = torch.ones(1, T, device=device)
        if form_of_call == "packed":
            more["cu_seqlens"] = torch.arange(3, device=device)
        if form_of_call == "cache":
            more["cache"] = layer.make_cache(2)
            more["slots"] = torch.arange(1, device=device)
        with torch.set_grad_enabled(grad):
            y = layer(x, **more)
        if grad:
            y.sum().backward()
        return [form(y), *(form(p.grad) for p in layer.parameters() if p.grad is not None)]

    expected = shapes("cpu")
    assert shapes("meta") == expected
    with FakeTensorMode():
        assert shapes("cpu") == expected


def test_a_split_call_has_memory(mesh: Any) -> None:
    from gdn_triton.distributed import build_cp_context

    context = build_cp_context(torch.tensor([0, T]), dist.group.WORLD)
    tensors = chunk_tensors("cpu")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with pytest.raises(ValueError, match="q must have memory with cp_context"):
        chunk({**{n: mode.from_tensor(x) for n, x in tensors.items()}, "cp_context": context})
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tensors["q"], tensors["q"])
        with pytest.raises(NotImplementedError, match="q carries a tangent"):
            chunk({**tensors, "q": dual, "cp_context": context})
    expected = chunk({**tensors, "cp_context": context})
    found = chunk({**tensors, "g": negative(tensors["g"]), "cp_context": context})
    for y, z in zip(found, expected, strict=True):
        torch.testing.assert_close(y, z, rtol=1e-5, atol=1e-6)
