"""Tensors that are more, or less, than elements in memory, in every public function: the negative
bit, tangents of forward-mode AD, the transforms of torch.func, subclasses of Tensor, DTensors, and
tensors without memory. Each is served as it should be or refused by name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

import gdn_triton
from gdn_triton.layers import GatedDeltaNet

H, HV, K, V, T, W = 1, 2, 8, 8, 5, 4
D = 2 * H * K + HV * V
SLOTS = 3


@dataclass(frozen=True)
class Op:
    """run(tensors): what the function returns, None left out, with `tensors` by name. Those of
    `written` are written in place."""

    name: str
    make: Callable[[str], dict[str, Tensor]]
    run: Callable[[dict[str, Tensor]], list[Tensor]]
    written: tuple[str, ...] = ()

    def inputs(self, tensors: dict[str, Tensor]) -> list[str]:
        """The floats that are not written."""
        floats = [name for name, x in tensors.items() if x.is_floating_point()]
        return [name for name in floats if name not in self.written]


def listed(result: Any) -> list[Tensor]:
    results = result if isinstance(result, tuple) else (result,)
    return [x for x in results if x is not None]


def tokens(device: str, *sizes: tuple[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Random tensors by name; a g is at most 0, a beta between 0 and 1."""
    made = {name: torch.randn(*shape, device=device) for name, shape in sizes}
    if "g" in made:
        made["g"] = -made["g"].abs()
    if "beta" in made:
        made["beta"] = made["beta"].sigmoid()
    return made


HEADS = [("q", (1, T, H, K)), ("k", (1, T, H, K)), ("v", (1, T, HV, V))]
GATES = [("g", (1, T, HV)), ("beta", (1, T, HV))]
RAW = [("A_log", (HV,)), ("dt_bias", (HV,))]


def chunk_tensors(device: str) -> dict[str, Tensor]:
    return tokens(device, *HEADS, *GATES, *RAW, ("initial_state", (1, HV, K, V)))


def chunk(x: dict[str, Tensor]) -> list[Tensor]:
    options = {"use_gate_in_kernel": True, "output_final_state": True}
    return listed(gdn_triton.chunk_gated_delta_rule(**x, **options, use_qk_l2norm_in_kernel=True))


def recurrent_tensors(device: str) -> dict[str, Tensor]:
    more = [("gk", (1, T, HV, K)), ("gv", (1, T, HV, V)), ("initial_state", (1, HV, K, V))]
    return tokens(device, *HEADS, *GATES, *RAW, *more)


def recurrent(x: dict[str, Tensor]) -> list[Tensor]:
    options = {"use_gate_in_kernel": True, "output_final_state": True}
    return listed(
        gdn_triton.fused_recurrent_gated_delta_rule(**x, **options, use_qk_l2norm_in_kernel=True)
    )


def slots(device: str) -> dict[str, Tensor]:
    return {"read_slots": torch.tensor([1], device=device)}


def step_tensors(device: str) -> dict[str, Tensor]:
    pool = tokens(device, *HEADS, *GATES, ("state", (SLOTS, HV, K, V)), ("out", (1, T, HV, V)))
    return pool | slots(device)


def step(x: dict[str, Tensor]) -> list[Tensor]:
    return listed(gdn_triton.recurrent_step(**x))


def mixed_tensors(device: str) -> dict[str, Tensor]:
    gates = [("a", (1, T, HV)), ("b", (1, T, HV)), *RAW]
    mixed = tokens(device, ("mixed_qkv", (1, T, D)), *gates, ("state", (SLOTS, HV, K, V)))
    return mixed | slots(device)


def prefill_tensors(device: str) -> dict[str, Tensor]:
    x = tokens(device, *HEADS, *GATES, *RAW, ("state", (SLOTS, HV, K, V)), ("out", (1, T, HV, V)))
    return x | slots(device)


def prefill(x: dict[str, Tensor]) -> list[Tensor]:
    return listed(gdn_triton.chunk_prefill(**x, use_gate_in_kernel=True))


CONV = [("x", (1, T, D)), ("weight", (D, W)), ("bias", (D,))]
POOL = [("state", (SLOTS, D, W - 1))]
PREP = [("a", (1, T, HV)), ("b", (1, T, HV)), *RAW]


def conv(x: dict[str, Tensor]) -> list[Tensor]:
    return listed(gdn_triton.causal_conv1d(**x))


def conv_update(x: dict[str, Tensor]) -> list[Tensor]:
    return listed(gdn_triton.causal_conv1d_update(**x))


def conv_prep(x: dict[str, Tensor]) -> list[Tensor]:
    rest = {name: y for name, y in x.items() if name != "x"}
    sizes = {"num_k_heads": H, "head_k_dim": K, "head_v_dim": V}
    return listed(gdn_triton.fused_conv_prep(x["x"], **rest, **sizes))


def post_conv(x: dict[str, Tensor]) -> list[Tensor]:
    sizes = {"num_k_heads": H, "head_k_dim": K, "head_v_dim": V}
    return listed(gdn_triton.fused_post_conv_prep(**x, **sizes))


def post_conv_tensors(device: str) -> dict[str, Tensor]:
    return tokens(device, ("conv_output", (T, D)), ("a", (T, HV)), ("b", (T, HV)), *RAW)


STATE = ("state",)
OPS = [
    Op("chunk", chunk_tensors, chunk),
    Op("recurrent", recurrent_tensors, recurrent),
    Op("step", step_tensors, step, ("state", "out")),
    Op("step-mixed", mixed_tensors, step, STATE),
    Op("prefill", prefill_tensors, prefill, ("state", "out")),
    Op("conv", lambda device: tokens(device, *CONV), conv),
    Op("conv-state", lambda device: tokens(device, *CONV, *POOL) | slots(device), conv, STATE),
    Op("update", lambda device: tokens(device, *CONV, *POOL) | slots(device), conv_update, STATE),
    Op("conv-prep", lambda device: tokens(device, *CONV, *PREP), conv_prep),
    Op("post-conv", post_conv_tensors, post_conv),
]
each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
each_backend = pytest.mark.parametrize("backend", ["triton", "reference"])


def argument(op: Op, name: str) -> str:
    """As the function calls it."""
    return "mixed_qkv" if (op.name, name) == ("conv-prep", "x") else name


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in tensors.items()}


def outcome(op: Op, tensors: dict[str, Tensor]) -> list[Tensor]:
    """What is returned, and what was written."""
    return [*op.run(tensors), *(tensors[name] for name in op.written)]


# --------------------------------------------------------------------------------- the negative bit


def negative(x: Tensor) -> Tensor:
    """x, of which memory holds -x."""
    y = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert y.is_neg() and torch.equal(y, x)
    return y


@each_backend
@each_op
def test_a_negative_bit_is_seen(
    op: Op, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_BACKEND", backend)
    tensors = op.make(device)
    expected = outcome(op, copied(tensors))
    for name in op.inputs(tensors):
        given = copied(tensors)
        given[name] = negative(given[name])
        # The plan of a call without the bit, made above, is no other's.
        for y, z in zip(outcome(op, given), expected, strict=True):
            torch.testing.assert_close(
                y, z, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


@each_backend
@pytest.mark.parametrize("op", [op for op in OPS if op.written], ids=lambda op: op.name)
def test_what_is_written_has_no_negative_bit(
    op: Op, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_BACKEND", backend)
    tensors = op.make(device)
    op.run(copied(tensors))  # a plan of the same shapes is known
    for name in op.written:
        given = copied(tensors)
        given[name] = torch._neg_view(given[name])
        with pytest.raises(ValueError, match=f"^{name} must be written where it lies, got .*neg"):
            op.run(given)


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
        # What carries none is served.
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
        # What has no gradient at all says that first.
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


class Wrapped(torch.Tensor):
    """A tensor in another one, with no memory of its own."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapped":
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(unwrapped, (args, kwargs or {}))
        return tree_map(
            lambda y: Wrapped(y) if isinstance(y, Tensor) else y, operation(*args, **kwargs)
        )


def unwrapped(x: Any) -> Any:
    return x.inner if isinstance(x, Wrapped) else x


class Named(torch.Tensor):
    """A tensor of another type, with memory like any other."""


@each_op
def test_kernels_refuse_tensors_without_memory_of_their_own(
    op: Op, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_BACKEND", "triton")
    tensors = op.make(device)
    op.run(copied(tensors))
    for name in op.inputs(tensors):
        given = copied(tensors)
        given[name] = Wrapped(given[name])
        message = f"{argument(op, name)} is a Wrapped, a subclass of torch.Tensor with operations"
        with pytest.raises(RuntimeError, match=message):
            op.run(given)


@pytest.mark.parametrize("op", PURE, ids=lambda op: op.name)
def test_the_reference_takes_what_torch_takes(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GDN_BACKEND", raising=False)
    tensors = op.make("cpu")
    expected = op.run(tensors)
    found = op.run({name: Wrapped(x) for name, x in tensors.items()})
    for y, z in zip(found, expected, strict=True):
        assert isinstance(y, Wrapped)
        torch.testing.assert_close(y.inner, z, rtol=1e-4, atol=1e-4)


@each_op
def test_a_subclass_with_memory_runs_on_kernels(
    op: Op, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_BACKEND", "triton")
    tensors = op.make(device)
    expected = outcome(op, copied(tensors))
    given = {name: x.as_subclass(Named) for name, x in copied(tensors).items()}
    for y, z in zip(outcome(op, given), expected, strict=True):
        assert same_bits(y.as_subclass(Tensor), z)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of one rank."""
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
    """What is traced is the call, not its result."""
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
