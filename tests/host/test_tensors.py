"""Tensors that are more, or less, than elements in memory, in every public function: tangents of
forward-mode AD, the transforms of torch.func, DTensors, and tensors without memory. Each is served
as it should be or refused by name. More of the kind is in tests/functions/test_views.py."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import same_bits
from tensor_cases import (
    OPS,
    Op,
    T,
    Wrapped,
    copied,
    each_backend,
    each_op,
    outcome,
)
from torch import Tensor
from torch.autograd import forward_ad

from gdn_triton.layers import GatedDeltaNet


def argument(op: Op, name: str) -> str:
    """As the function calls it."""
    return "mixed_qkv" if (op.name, name) == ("conv-prep", "x") else name


@each_backend
@pytest.mark.parametrize("name", ["chunk", "conv"])
def test_a_negative_bit_of_incoming_gradients_is_seen(
    name: str, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_BACKEND", backend)
    op = next(op for op in OPS if op.name == name)
    inputs = {n: x.requires_grad_() for n, x in op.make(device).items()}
    results = op.run(inputs)
    given = [torch.randn_like(y) for y in results]

    def gradients(from_above: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(results, list(inputs.values()), from_above, retain_graph=True)

    expected = gradients(given)
    for i in range(len(given)):
        from_above = [torch._neg_view(-x) if i == j else x for j, x in enumerate(given)]
        assert from_above[i].is_neg()
        for dx, dy in zip(gradients(from_above), expected, strict=True):
            assert same_bits(dx, dy)


# -------------------------------------------------------------------------------- forward-mode AD


@each_op
def test_kernels_refuse_tangents(op: Op, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "triton")
    tensors = op.make(device)
    expected = outcome(op, copied(tensors))
    with forward_ad.dual_level():
        for name in op.inputs(tensors):
            given = copied(tensors)
            dual = forward_ad.make_dual(given[name], torch.ones_like(given[name]))
            message = f"no forward-mode derivative; {argument(op, name)} carries a tangent"
            with pytest.raises(RuntimeError, match=message):
                op.run({**given, name: dual})
            assert all(torch.equal(given[y], tensors[y]) for y in op.written)
        # Tensors without a tangent are served.
        for y, z in zip(outcome(op, copied(tensors)), expected, strict=True):
            assert same_bits(y, z)


@each_op
def test_tangents_are_right_by_default(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` finds the backend that has them, whatever the kernels would serve."""
    monkeypatch.delenv("GDN_BACKEND", raising=False)
    tensors = {n: x.double() if x.is_floating_point() else x for n, x in op.make("cpu").items()}
    # The states of a convolution are constants, those that it reads and those that it leaves.
    results = (lambda op, x: op.run(x)) if op.name in ("conv-state", "update") else outcome
    step = 1e-6
    for name in op.inputs(tensors):
        tangent = torch.randn_like(tensors[name])
        up, down = (
            results(op, {**copied(tensors), name: tensors[name] + sign * step * tangent})
            for sign in (1, -1)
        )
        single = op.name in ("chunk", "post-conv")  # in float32 for the kernels to take it
        with forward_ad.dual_level():
            given = copied(tensors)
            given[name] = forward_ad.make_dual(given[name], tangent)
            if single:
                given = {n: x.float() for n, x in given.items()}
            found = [forward_ad.unpack_dual(y).tangent for y in results(op, given)]
        tolerances = {"rtol": 1e-3, "atol": 1e-4} if single else {"rtol": 1e-6, "atol": 1e-7}
        for y, z, dy in zip(up, down, found, strict=True):
            difference = (y - z) / (2 * step)
            dy = torch.zeros_like(difference) if dy is None else dy.double()
            torch.testing.assert_close(dy, difference, **tolerances)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", ["chunk", "recurrent", "conv", "post-conv"])
def test_a_compiled_call_refuses_tangents(
    name: str, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_BACKEND", backend)
    op = next(op for op in OPS if op.name == name)
    tensors = op.make(device)
    first = next(iter(tensors))
    compiled = torch.compile(op.run, backend="aot_eager", fullgraph=True)
    before = compiled(tensors)
    message = r"no forward-mode derivative .* under a compiler"
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tensors[first], torch.ones_like(tensors[first]))
        with pytest.raises(NotImplementedError, match=message):
            compiled({**tensors, first: dual})
    for y, z in zip(compiled(tensors), before, strict=True):
        assert same_bits(y, z)

    def derivative(x: Tensor) -> Tensor:
        def run(y: Tensor) -> Tensor:
            return op.run({**tensors, first: y})[0]

        return torch.func.jvp(run, (x,), (torch.ones_like(x),))[1]

    with pytest.raises(Exception, match=message):
        torch.compile(derivative, backend="aot_eager", fullgraph=True)(tensors[first])


@pytest.mark.parametrize("name", ["chunk", "conv"])
def test_backward_by_kernels_refuses_what_it_cannot_read(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_BACKEND", "triton")
    op = next(op for op in OPS if op.name == name)
    inputs = {n: x.requires_grad_() for n, x in op.make(device).items()}
    y, *_ = op.run(inputs)
    first = next(iter(inputs.values()))
    with forward_ad.dual_level():
        dy = forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y))
        with pytest.raises(RuntimeError, match=r"the gradient of [oy] carries a tangent"):
            torch.autograd.grad(y, first, dy, retain_graph=True)
    batch = torch.ones(2, *y.shape, device=device)
    with pytest.raises(RuntimeError, match=r"The gradient of [oy] is a batch of several"):
        torch.autograd.grad(y, first, batch, is_grads_batched=True, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"inside of the transforms .* the gradient of [oy] is"):
        torch.func.vmap(lambda dy: torch.autograd.grad(y, first, dy, retain_graph=True))(batch)


# ------------------------------------------------------------------------ transforms of torch.func


def by_grad(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.grad(lambda y: f(y).square().sum())(x)


def by_jvp(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]


def by_vmap(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.vmap(f)(torch.stack([x, -x]))


TRANSFORMS = [by_grad, by_jvp, by_vmap]
# Those that write nothing: the functions of torch.func take functions without side effects.
PURE = [op for op in OPS if not op.written]


@pytest.mark.parametrize("transform", TRANSFORMS)
@each_op
def test_kernels_refuse_transforms(
    op: Op, transform: Callable[..., Tensor], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_BACKEND", "triton")
    tensors = op.make(device)
    op.run(copied(tensors))
    for name in op.inputs(tensors):
        given = copied(tensors)
        message = f"transforms of torch.func .*; {argument(op, name)} is a tensor of one"
        # A function without gradients refuses for that reason first.
        refusal = "has no gradient" if op.written and transform is by_grad else message
        with pytest.raises((RuntimeError, NotImplementedError), match=f"{refusal}|{message}"):
            transform(lambda y, x=given, n=name: op.run({**x, n: y})[0], given[name])


@pytest.mark.parametrize("op", PURE, ids=lambda op: op.name)
def test_transforms_by_default(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = op.make("cpu")
    for name in op.inputs(tensors):

        def run(y: Tensor, name: str = name) -> Tensor:
            return op.run({**tensors, name: y})[0]

        monkeypatch.setenv("GDN_BACKEND", "reference")
        x = tensors[name].clone().requires_grad_()
        if not run(x).requires_grad:
            continue  # the first output does not depend on it
        (expected,) = torch.autograd.grad(run(x).square().sum(), x)
        both = torch.stack([run(tensors[name]), run(-tensors[name])])
        monkeypatch.delenv("GDN_BACKEND")
        close = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(by_grad(run, tensors[name]), expected, **close)
        torch.testing.assert_close(by_vmap(run, tensors[name]), both, **close)


# --------------------------------------------------------------------------- subclasses of Tensor


@pytest.mark.parametrize("op", PURE, ids=lambda op: op.name)
def test_the_reference_takes_what_torch_takes(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GDN_BACKEND", raising=False)
    tensors = op.make("cpu")
    expected = op.run(tensors)
    found = op.run({name: Wrapped(x) for name, x in tensors.items()})
    for y, z in zip(found, expected, strict=True):
        assert isinstance(y, Wrapped)
        torch.testing.assert_close(y.inner, z, rtol=1e-4, atol=1e-4)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of one rank."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@each_backend
def test_distributed_tensors_are_refused_by_name(
    mesh: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    monkeypatch.setenv("GDN_BACKEND", backend)
    for op in OPS:
        tensors = op.make("cpu")
        for name in op.inputs(tensors):
            given = copied(tensors)
            given[name] = distribute_tensor(given[name], mesh, [Replicate()])
            message = f"^{argument(op, name)} must be a tensor of this process alone.*DTensor"
            with pytest.raises(TypeError, match=message):
                op.run(given)
    layer = GatedDeltaNet(hidden_size=12, head_dim=8, num_heads=2)
    x = distribute_tensor(torch.randn(1, T, 12), mesh, [Replicate()])
    with pytest.raises(TypeError, match=r"^hidden_states must be a tensor of this process alone"):
        layer(x)
