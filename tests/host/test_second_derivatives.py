"""Second derivatives of every function of the package: right, or refused.

A penalty on a gradient differentiates that gradient. Where kernels find it, it would pass for a
constant, and the penalty would be dropped without a word; torch's `once_differentiable` lets that
pass where the incoming gradient requires none, as that of a sum does. The lists below are compared
with the functions that the package has, so that a new one has to be entered here.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import FP32, FP64
from torch import Tensor

import gdn_triton
import gdn_triton.conv.prep as conv_prep_module
from gdn_triton._host.backends import Choice
from gdn_triton.distributed import build_cp_context, conv_halo
from gdn_triton.layers import GatedDeltaNet

T, K, V, W = 5, 3, 2, 3
D = 3 * K


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=FP64)


def rule_inputs() -> dict[str, Tensor]:
    q, k, v = torch.randn(3, 1, T, 1, K, dtype=FP64)
    k = torch.nn.functional.normalize(k, dim=-1)
    return {"q": q, "k": k, "v": v, "g": -uniform(1, T, 1), "beta": uniform(1, T, 1)}


def conv_inputs() -> dict[str, Tensor]:
    x, weight = torch.randn(1, T, D, dtype=FP64), torch.randn(D, W, dtype=FP64)
    return {"x": x, "weight": weight, "bias": torch.randn(D, dtype=FP64)}


def gate_inputs(*lead: int) -> dict[str, Tensor]:
    names = {"a": (*lead, 1), "b": (*lead, 1), "A_log": (1,), "dt_bias": (1,)}
    return {name: torch.randn(*shape, dtype=FP64) for name, shape in names.items()}


HEADS = {"num_k_heads": 1, "head_k_dim": K, "head_v_dim": K}


def conv_prep(x: Tensor, weight: Tensor, bias: Tensor, **gates: Tensor) -> Any:
    return gdn_triton.fused_conv_prep(x, weight, bias=bias, **gates, **HEADS)


def post_conv(**given: Tensor) -> Any:
    return gdn_triton.fused_post_conv_prep(**given, **HEADS)


def rule(**given: Tensor) -> Any:
    return gdn_triton.chunk_gated_delta_rule(**given, output_final_state=True)


def recurrence(**given: Tensor) -> Any:
    return gdn_triton.fused_recurrent_gated_delta_rule(**given, output_final_state=True)


def layer(x: Tensor, **weights: Tensor) -> Tensor:
    return torch.func.functional_call(LAYER, weights, (x,))  # type: ignore[no-any-return]


def make_layer() -> GatedDeltaNet:
    sizes = {"hidden_size": 4, "head_dim": 4, "num_heads": 1, "expand_v": 1, "conv_size": 2}
    return GatedDeltaNet(**sizes).double()  # type: ignore[arg-type]


LAYER = make_layer()


def layer_inputs() -> dict[str, Tensor]:
    return {"x": torch.randn(1, T, 4, dtype=FP64), **dict(make_layer().named_parameters())}


def norm_inputs() -> dict[str, Tensor]:
    x, gate = torch.randn(2, T, K, dtype=FP64)
    return {"x": x, "gate": gate, "weight": torch.randn(K, dtype=FP64)}


@dataclass(frozen=True)
class Differentiable:
    """A public function, inputs that may all require a gradient, and by their names the autograd
    functions of this package that its result hangs on: of Triton, of the reference, and the
    operators under a compiler. None in `triton`: its kernels refuse inputs that require one."""

    call: Callable[..., Any]
    inputs: Callable[[], dict[str, Tensor]]
    triton: frozenset[str] | None
    reference: frozenset[str] = frozenset()
    operators: frozenset[str] = frozenset()


def names(text: str = "") -> frozenset[str]:
    return frozenset(text.split())


PRODUCTS = names("_Product _TriangularSolve")
CASES = {
    "chunk_gated_delta_rule": Differentiable(
        rule, rule_inputs, names("_Chunk"), PRODUCTS, names("chunk_gated_delta_rule_fwd")
    ),
    "fused_recurrent_gated_delta_rule": Differentiable(
        recurrence,
        rule_inputs,
        None,
        names("_Product"),
        names("fused_recurrent_fwd"),
    ),
    "causal_conv1d": Differentiable(
        gdn_triton.causal_conv1d,
        conv_inputs,
        names("_CausalConv1d"),
        operators=names("causal_conv1d"),
    ),
    "fused_conv_prep": Differentiable(
        conv_prep,
        lambda: {**conv_inputs(), **gate_inputs(1, T)},
        None,
        operators=names("causal_conv1d fused_post_conv_prep"),
    ),
    "fused_post_conv_prep": Differentiable(
        post_conv,
        lambda: {"conv_output": torch.randn(T, D, dtype=FP64), **gate_inputs(T)},
        None,
        operators=names("fused_post_conv_prep"),
    ),
    "rms_norm_gated": Differentiable(
        gdn_triton.rms_norm_gated,
        norm_inputs,
        names("_RMSNormGated"),
        operators=names("rms_norm_gated"),
    ),
    "GatedDeltaNet": Differentiable(
        layer,
        layer_inputs,
        names("_Chunk _CausalConv1d _RMSNormGated"),
        PRODUCTS,
        names("chunk_gated_delta_rule_fwd causal_conv1d rms_norm_gated"),
    ),
}
# Public functions whose inputs may require no gradient, and calls that show it.
GRADLESS: dict[str, Callable[[Tensor], Any]] = {
    "layer_step": lambda x: gdn_triton.layer_step(
        torch.ones(1, 3 * K).to(x) * x,
        *torch.ones(2, 1, 1).to(x),
        torch.zeros(1).to(x),
        state=torch.zeros(1, 1, K, K).to(x),
        read_slots=torch.zeros(1, dtype=torch.int32, device=x.device),
    ),
    "causal_conv1d_update": lambda x: gdn_triton.causal_conv1d_update(
        x.expand(1, 1, D), torch.ones(D, W).to(x), state=torch.zeros(1, D, W - 1).to(x)
    ),
    "chunk_prefill": lambda x: gdn_triton.chunk_prefill(
        torch.zeros(1, 1, K, K).to(x),
        torch.zeros(1, dtype=torch.int32, device=x.device),
        **dict(zip("qkv", torch.ones(3, 1, T, 1, K).to(x) * x, strict=True)),
        g=-torch.ones(1, T, 1).to(x),
        beta=torch.ones(1, T, 1).to(x),
    ),
    "fold_window": lambda x: gdn_triton.fold_window(
        torch.ones(1, 1, K, K).to(x) * x,
        gdn_triton.make_window(1, 1, 1, K, K, torch.float32, x.device),
        *torch.zeros(2, 1, dtype=torch.int32, device=x.device),
    ),
    "recurrent_step": lambda x: gdn_triton.recurrent_step(
        torch.zeros(1, 1, K, K).to(x),
        torch.zeros(1, dtype=torch.int32, device=x.device),
        **dict(zip("qkv", torch.ones(3, 1, 1, 1, K).to(x) * x, strict=True)),
        g=-torch.ones(1, 1, 1).to(x),
        beta=torch.ones(1, 1, 1).to(x),
    ),
}
# Public names that compute no float from tensors, and other names of the functions above.
OTHERS = {
    *("StepWindow", "accept_window", "make_window", "restart_window"),
    *("Explanation", "__version__", "explain", "explain_call", "warmup"),
    *("chunk_gdn", "fused_recurrent_gdn"),
}
OTHERS |= {"PreparedStep", "prepare_step"}
# Autograd functions of calls that are not in CASES; each has a test of its own below.
APART = {"_FoundOnce", "_ContextParallel", "_ConvHalo", "_ForwardOnly"}


# ---------------------------------------------------------------------------------- nothing is left


def subclasses(cls: type) -> Iterator[type]:
    for found in cls.__subclasses__():
        yield found
        yield from subclasses(found)


def test_every_autograd_function_is_here() -> None:
    for module in pkgutil.walk_packages(gdn_triton.__path__, "gdn_triton."):
        # The CUDA library, where it has been built, is a file of this folder and no module.
        if not module.name.endswith(("__main__", "_gdn_fast")):
            importlib.import_module(module.name)
    found = {
        cls.__name__
        for cls in subclasses(torch.autograd.Function)
        if cls.__module__.startswith("gdn_triton.")
    }
    walked = [case.reference | (case.triton or set()) for case in CASES.values()]
    assert found == APART.union(*walked)


def test_every_operator_with_a_gradient_is_here() -> None:
    operators = torch._library.custom_ops.OPDEFS.items()
    with_gradient = {
        name.removeprefix("gdn_triton::")
        for name, operator in operators
        if name.startswith("gdn_triton::") and operator._backward_fn is not None
    }
    walked = set().union(*(case.operators for case in CASES.values()))
    # The gradient of each is an operator too, which is named after it.
    gradients = {f"{name.removesuffix('_fwd')}_bwd" for name in walked}
    assert with_gradient == walked | gradients


def test_every_public_function_is_here() -> None:
    functions = {name for name in gdn_triton.__all__ if name not in OTHERS}
    assert functions == (set(CASES) - {"GatedDeltaNet"}) | set(GRADLESS)
    assert all(inspect.isfunction(getattr(gdn_triton, name)) for name in functions)
    assert OTHERS < set(gdn_triton.__all__)


def test_nothing_is_once_differentiable() -> None:
    """torch's decorator is the wrong form: see above."""
    for path in Path(gdn_triton.__path__[0]).rglob("*.py"):
        imported = [line for line in path.read_text("utf-8").splitlines() if "import" in line]
        text = path.read_text("utf-8")
        assert "@once_differentiable" not in text and "function.once_differ" not in text, path
        assert not any("once_differentiable" in line for line in imported), path


# --------------------------------------------------------------------------------- right or refused


def flat(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [y for y in found if y is not None]


def leaves_of(case: Differentiable, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    given = case.inputs().items()
    return {name: x.detach().to(device, dtype).requires_grad_() for name, x in given}


def first(results: Iterable[Tensor], leaves: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of the sum of all results: the incoming ones are ones, which require none."""
    loss = sum((y.sum() for y in results), torch.zeros(()))
    return torch.autograd.grad(
        loss, list(leaves), create_graph=True, allow_unused=True, materialize_grads=True
    )


def walked(results: Iterable[Tensor]) -> list[Any]:
    """The nodes of the graph that these results hang on."""
    seen: dict[Any, None] = {}
    ahead = [y.grad_fn for y in results if y.grad_fn is not None]
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen[node] = None
            ahead += [following for following, _ in node.next_functions if following is not None]
    return list(seen)


def functions_of(results: Iterable[Tensor]) -> frozenset[str]:
    """Names of this package's autograd functions among them."""
    classes = {getattr(type(node), "_forward_cls", None) for node in walked(results)}
    return frozenset(
        cls.__name__
        for cls in classes
        if cls is not None and cls.__module__.startswith("gdn_triton.")
    )


def refuses_a_penalty(results: list[Tensor], leaves: list[Tensor], match: str) -> None:
    once = torch.autograd.grad(
        results, leaves, [torch.ones_like(y) for y in results], retain_graph=True, allow_unused=True
    )
    found = first(results, leaves)
    for x, y in zip(found, once, strict=True):
        torch.testing.assert_close(x.detach(), torch.zeros_like(x) if y is None else y)
    penalty = sum((x.square().sum() for x in found), torch.zeros(()))
    with pytest.raises(RuntimeError, match=match):
        penalty.backward()


@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "reference")
    case = CASES[name]
    leaves = leaves_of(case, "cpu", FP64)

    def gradients(*given: Tensor) -> tuple[Tensor, ...]:
        results = flat(case.call(**dict(zip(leaves, given, strict=True))))
        assert functions_of(results) == case.reference
        found = first(results, given)
        return tuple(x for x in found if x.requires_grad)

    assert torch.autograd.gradcheck(gradients, tuple(leaves.values()), fast_mode=True)


@pytest.mark.parametrize("name", CASES)
def test_kernels_refuse(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "triton")
    case = CASES[name]
    leaves = leaves_of(case, device, FP32)
    if case.triton is None:
        with pytest.raises(RuntimeError, match="backward"):
            case.call(**leaves)
        return
    results = flat(case.call(**leaves))
    assert functions_of(results) == case.triton
    refuses_a_penalty(results, list(leaves.values()), "has no second derivative in the Triton")


def test_convolution_before_a_preparation_refuses(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `auto` on a GPU: the convolution in Triton, the preparation in the reference."""
    *_, reference = conv_prep_module.POST_CONV.backends
    chosen = SimpleNamespace(choose=lambda sizes: Choice(reference, None))
    monkeypatch.setattr(conv_prep_module, "POST_CONV", chosen)
    monkeypatch.setenv("GDN_BACKEND", "triton")
    leaves = leaves_of(CASES["fused_conv_prep"], device, FP32)
    results = flat(conv_prep(**leaves))
    assert functions_of(results) == names("_CausalConv1d")
    refuses_a_penalty(results, list(leaves.values()), "causal_conv1d has no second derivative in")


@pytest.mark.parametrize("name", CASES)
def test_operators_refuse(name: str, monkeypatch: pytest.MonkeyPatch, fresh_compiler: None) -> None:
    monkeypatch.setenv("GDN_BACKEND", "reference")
    case = CASES[name]
    leaves = leaves_of(case, "cpu", FP32)
    compiled = torch.compile(case.call, fullgraph=True, backend="eager")
    results = flat(compiled(**leaves))
    nodes = " ".join(node.name() for node in walked(results))
    for operator in case.operators:
        assert f"gdn_triton_{operator}_default" in nodes, nodes
    refuses_a_penalty(results, list(leaves.values()), "no second derivative under a compiler")


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("name", GRADLESS)
def test_no_first_derivative(
    name: str, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_BACKEND", backend)
    x = torch.ones((), device=device)
    GRADLESS[name](x)
    with pytest.raises(NotImplementedError, match="gradient"):
        GRADLESS[name](x.requires_grad_())


# -------------------------------------------------------------------------------------- the others


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_split_calls_refuse(
    backend: str, device: str, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "triton" and device != "cpu":
        pytest.skip("gloo takes CPU tensors, and Triton interprets no kernel where a GPU is")
    monkeypatch.setenv("GDN_BACKEND", backend)
    leaves = {name: x.float().requires_grad_() for name, x in rule_inputs().items()}
    context = build_cp_context(torch.tensor([0, T]), group)
    results = flat(rule(**leaves, cp_context=context))
    assert functions_of(results) == names("_ContextParallel")
    refuses_a_penalty(results, list(leaves.values()), "cp_context has no second derivative in any")


def test_halo_refuses(group: Any) -> None:
    """The halo is linear: only an incoming gradient that requires one has a second derivative."""
    x = torch.randn(1, T, 2, requires_grad=True)
    halo = conv_halo(x, build_cp_context(torch.tensor([0, T]), group), W)
    assert functions_of([halo]) == names("_ConvHalo")
    above = torch.ones_like(halo, requires_grad=True)
    (dx,) = torch.autograd.grad(halo, x, above, create_graph=True)
    with pytest.raises(RuntimeError, match="conv_halo has no second derivative in any backend"):
        dx.sum().backward()


def test_forward_only_refuses_the_first() -> None:
    from gdn_triton.integrations.fla import _ForwardOnly

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(NotImplementedError, match="has no backward on this device"):
        _ForwardOnly.apply(lambda: 2 * x, x).sum().backward()
