"""The operation under torch.compile and torch.export: one operator in the graph, no break in it,
and the results of the eager call bit for bit.

`aot_eager` is everything of the compiler but its code generator, which never sees inside of the
operator; one test runs that too. Most take the reference, since what the backends compute is tested
elsewhere, and compiling is what takes the time.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from compile_cases import assert_same, compiled, dense
from helpers import BF16, FP16, FP32, FP64, Case, make_inputs, unit_rows
from torch import Tensor

from gdn_triton import chunk_gated_delta_rule
from gdn_triton._host.records import Options
from gdn_triton.chunk.problem import DIFFERENTIABLE
from gdn_triton.constants import CHUNK_SIZES

FORWARD = torch.ops.gdn_triton.chunk_gated_delta_rule_fwd.default
BACKWARD = torch.ops.gdn_triton.chunk_gated_delta_rule_bwd.default

DENSE = Case("dense", "two rows, chunks and a tail", T=40, B=2, V=24)
PACKED = Case("packed", "an empty sequence, rows of none", lengths=(17, 0, 1, 20), orphans=3, V=24)


pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(autouse=True)
def reference_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test does not choose another one."""
    monkeypatch.setenv("GDN_BACKEND", "reference")


class Graphs:
    """A compiler backend that keeps the graphs it was asked to compile."""

    def __init__(self, backend: str = "aot_eager") -> None:
        self.seen: list[torch.fx.GraphModule] = []
        self.backend = backend

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.seen.append(graph)
        compile_graph = torch._dynamo.lookup_backend(self.backend)
        return compile_graph(graph, inputs)


def all_options(case: Case, device: str) -> dict[str, Any]:
    heads = torch.linspace(-1, 1, case.HV, device=device)
    return {
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
        "state_v_first": True,
        "use_gate_in_kernel": True,
        "A_log": heads,
        "dt_bias": heads.flip(0),
        "chunk_size": 16,
    }


# ------------------------------------------------------------------------------------------ forward


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("case", [DENSE, PACKED], ids=lambda case: case.name)
@pytest.mark.parametrize("options", ["none", "all"])
def test_equals_eager(
    backend: str, case: Case, options: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend != "reference":
        pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv("GDN_BACKEND", backend)
    dtype = FP16 if options == "all" else FP32
    x = make_inputs(case, dtype, device, raw=options == "all")
    chosen: dict[str, Any] = {"chunk_size": 16, "cu_seqlens": x.cu_seqlens}
    if options == "all":
        chosen |= all_options(case, device)
        chosen["initial_state"] = x.initial_state.mT
        if x.cu_seqlens is not None:
            rows = sum(-(-length // 16) for length in case.lengths or ())
            chosen["cu_seqlens_cpu"] = x.cu_seqlens.cpu()
            chosen["chunk_indices"] = torch.zeros(rows, 2, dtype=torch.int32, device=device)
    assert_same(compiled()(*x.tensors, **chosen), chunk_gated_delta_rule(*x.tensors, **chosen))


def test_graph_is_one_operator(device: str) -> None:
    """Nothing of ours is traced through: neither validation nor a backend leaves a node."""
    graphs = Graphs("eager")
    x = make_inputs(PACKED, FP32, device)
    options = {"cu_seqlens": x.cu_seqlens, "initial_state": x.initial_state, "scale": 0.5}
    results = compiled(graphs)(*x.tensors, **options)
    assert results[1] is None
    (graph,) = graphs.seen
    called = [str(node.target) for node in graph.graph.nodes if node.op.startswith("call")]
    assert [name for name in called if "getitem" not in name] == [
        "gdn_triton.chunk_gated_delta_rule_fwd"
    ]


@pytest.mark.parametrize("marked", [False, True], ids=["automatic", "marked"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_one_compilation_for_every_length(marked: bool, grad: bool, device: str) -> None:
    graphs = Graphs()
    run = compiled(graphs)
    for T in (40, 17, 64, 130):
        args = [x.detach().clone().requires_grad_(grad) for x in dense(device, T=T)]
        if marked:
            for x in args:
                torch._dynamo.mark_dynamic(x, 1)
        with torch.set_grad_enabled(grad):
            actual = run(*args, output_final_state=True)
        assert_same(actual, chunk_gated_delta_rule(*args, output_final_state=True))
        if grad:
            actual[0].sum().backward()
            assert all(x.grad is not None and x.grad.shape == x.shape for x in args)
    # Without a mark the first T is a constant until there is a second.
    assert len(graphs.seen) == (1 if marked else 2)


def test_one_compilation_for_every_packing(device: str) -> None:
    graphs = Graphs()
    run = compiled(graphs)
    # The last has more sequences than tokens, which changes the bounds of the chunk table.
    for lengths in ((20, 17), (5, 0, 60), (1, 2, 3, 4, 5, 6), (0,) * 9 + (1, 1)):
        case = Case("packing", "", lengths=lengths, orphans=2)
        x = make_inputs(case, FP32, device, index_dtype=torch.int64)
        options: dict[str, Any] = {
            "cu_seqlens": x.cu_seqlens,
            "cu_seqlens_cpu": case.cu_seqlens("cpu"),
            "chunk_indices": torch.zeros(
                sum(-(-length // 16) for length in lengths), 2, dtype=torch.int32, device=device
            ),
            "initial_state": x.initial_state,
            "output_final_state": True,
            "chunk_size": 16,
        }
        assert_same(run(*x.tensors, **options), chunk_gated_delta_rule(*x.tensors, **options))
    assert len(graphs.seen) == 2


def test_scales_and_chunk_sizes(device: str) -> None:
    """A number that changes between calls is symbolic in a trace, until the operator fixes it."""
    args = dense(device, K=24)
    run = compiled()
    scales = ({"scale": scale} for scale in (None, 0.5, -0.25, 2))
    chunk_sizes = ({"chunk_size": chunk_size} for chunk_size in CHUNK_SIZES)
    for options in (*scales, *chunk_sizes):
        if "chunk_size" in options:
            # Each is a graph, and the compiler keeps no more than eight of a function.
            torch.compiler.reset()
        assert_same(run(*args, **options), chunk_gated_delta_rule(*args, **options))


def test_autocast_changes_nothing(device: str) -> None:
    args = dense(device, FP16)
    expected = chunk_gated_delta_rule(*args)

    def inside(*args: Tensor) -> Any:
        with torch.autocast(device, BF16):
            return chunk_gated_delta_rule(*args)

    assert_same(torch.compile(inside, fullgraph=True, backend="aot_eager")(*args), expected)
    with torch.autocast(device, BF16):
        assert_same(compiled()(*args), expected)


def test_backend_is_chosen_at_every_run(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    args = dense(device)
    graphs = Graphs()
    run = compiled(graphs)
    results = {}
    for name in ("reference", "triton", "auto", "reference"):
        monkeypatch.setenv("GDN_BACKEND", name)
        results[name] = run(*args)
        assert_same(results[name], chunk_gated_delta_rule(*args))
    assert not torch.equal(results["reference"][0], results["triton"][0])
    monkeypatch.setenv("GDN_BACKEND", "cuda")
    with pytest.raises(RuntimeError, match="GDN_BACKEND=cuda cannot run this call"):
        run(*args)
    monkeypatch.setenv("GDN_BACKEND", "fastest")
    with pytest.raises(ValueError, match="GDN_BACKEND must be one of auto"):
        run(*args)
    assert len(graphs.seen) == 1


def test_inductor(device: str) -> None:
    """Its generated code around the operator, forward and backward."""
    from torch._inductor.codecache import CacheBase

    try:
        CacheBase.get_system()
    except ImportError as error:
        pytest.skip(f"this torch's inductor cannot work with the Triton installed: {error}")
    args, twins = ([x.clone().requires_grad_() for x in dense(device)] for _ in range(2))
    run = compiled("inductor")
    with torch.no_grad():
        assert_same(run(*args), chunk_gated_delta_rule(*args))
    o, final_state = run(*args, output_final_state=True)
    expected = chunk_gated_delta_rule(*twins, output_final_state=True)
    assert_same((o, final_state), expected)
    torch.autograd.backward((o, final_state), (o.detach(), final_state.detach()))
    torch.autograd.backward(expected, [x.detach() for x in expected])
    assert_gradients(args, twins)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool, device: str) -> None:
    class Layer(torch.nn.Module):
        def forward(self, *args: Tensor) -> Any:
            return chunk_gated_delta_rule(*args, output_final_state=True)

    T = torch.export.Dim("T", min=2, max=4096)
    exported = torch.export.export(
        Layer(), tuple(dense(device)), dynamic_shapes=(({1: T},) * 5,), strict=strict
    )
    args = dense(device, T=77)
    expected = chunk_gated_delta_rule(*args, output_final_state=True)
    assert_same(exported.module()(*args), expected)


# ---------------------------------------------------------------------------------------- gradients


def assert_gradients(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    for x, y in zip(actual, expected, strict=True):
        if x is None or y is None or not y.requires_grad:
            continue
        assert x.grad is not None and y.grad is not None
        assert x.grad.dtype == y.grad.dtype
        assert x.grad.isfinite().all()
        if x.is_cuda:
            # Autograd's sums over gathered rows are atomic there: their order is no one's.
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("case", [DENSE, PACKED], ids=lambda case: case.name)
@pytest.mark.parametrize("outputs", ["both", "o", "final_state"])
def test_gradients_equal_eager(case: Case, outputs: str, device: str) -> None:
    def differentiate(run: Callable[..., Any]) -> tuple[list[Tensor], Any]:
        x = make_inputs(case, FP32, device, raw=True)
        options = all_options(case, device)
        options["initial_state"] = x.initial_state.mT
        names = ("A_log", "dt_bias", "initial_state")
        leaves = [y.detach().clone().requires_grad_() for y in x.tensors]
        for name in names:
            options[name] = options[name].detach().clone().requires_grad_()
        results = run(*leaves, **options, cu_seqlens=x.cu_seqlens)
        generator = torch.Generator().manual_seed(1)
        upstream = [torch.randn(y.shape, generator=generator).to(device) for y in results]
        used = {"both": (0, 1), "o": (0,), "final_state": (1,)}[outputs]
        torch.autograd.backward([results[i] for i in used], [upstream[i] for i in used])
        return leaves + [options[name] for name in names], results

    actual, results = differentiate(compiled())
    expected, expected_results = differentiate(chunk_gated_delta_rule)
    assert_same(
        [x.detach() for x in results],
        [x.detach() for x in expected_results],
    )
    if outputs == "final_state":
        # The final state does not depend on q: no gradient, or a zero one.
        assert expected[0].grad is None or not expected[0].grad.any()
        expected[0].grad = torch.zeros_like(expected[0])
    assert_gradients(actual, expected)


@pytest.mark.parametrize("wanted", [0, 1, 3], ids=["q", "k", "g"])
def test_one_gradient(wanted: int, device: str) -> None:
    """A result that does not depend on the one input with a gradient has no gradient either."""

    def differentiate(run: Callable[..., Any]) -> tuple[Tensor, list[bool]]:
        args = dense(device)
        args[wanted] = args[wanted].clone().requires_grad_()
        results = run(*args, output_final_state=True)
        torch.autograd.backward(
            [y for y in results if y.requires_grad],
            [torch.ones_like(y) for y in results if y.requires_grad],
        )
        return args[wanted], [y.requires_grad for y in results]

    (x, has_gradient), (y, expected) = map(differentiate, (compiled(), chunk_gated_delta_rule))
    assert has_gradient == expected
    assert_gradients([x], [y])


def test_gradients_in_a_layer(device: str) -> None:
    """Views of one projection, autograd on both sides of the operator, a graph for each mode."""
    projection = torch.nn.Linear(24, 2 * 16 + 2 * 16 + 2 * 16 + 2 + 2, device=device)

    def layer(x: Tensor) -> Tensor:
        q, k, v, g, beta = projection(x).split([32, 32, 32, 2, 2], -1)
        q, k, v = (y.unflatten(-1, (2, 16)) for y in (q, k, v))
        options = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        o, _ = chunk_gated_delta_rule(q, k, v, -g.exp(), beta, **options)
        return torch.nn.functional.silu(o.flatten(2))

    def differentiate(run: Callable[..., Any]) -> list[Tensor]:
        projection.zero_grad()
        run(x).square().sum().backward()
        return [y.grad.clone() for y in projection.parameters() if y.grad is not None]

    graphs = Graphs()
    run = torch.compile(layer, fullgraph=True, backend=graphs)
    x = unit_rows(2, 40, 24).to(device)
    for actual, expected in zip(differentiate(run), differentiate(layer), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(run(x), layer(x))
    assert len(graphs.seen) == 2


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_gradients_come_from_the_backend_named(
    backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit the eager ones of that backend, and not those of the other."""
    pytest.importorskip("triton", reason="Triton is not installed")

    def differentiate(run: Callable[..., Any], name: str) -> Tensor:
        monkeypatch.setenv("GDN_BACKEND", name)
        args = [x.clone().requires_grad_() for x in dense(device, FP16)]
        (dk,) = torch.autograd.grad(run(*args)[0].square().sum(), args[1])
        return dk

    other = {"reference": "triton", "triton": "reference"}[backend]
    actual = differentiate(compiled(), backend)
    assert torch.equal(actual, differentiate(chunk_gated_delta_rule, backend))
    assert not torch.equal(actual, differentiate(chunk_gated_delta_rule, other))


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("eager", "chunk_gated_delta_rule has no second derivative under a compiler"),
        # The compiler's own.
        ("aot_eager", "does not currently support double backward"),
    ],
)
def test_second_derivative_is_an_error(backend: str, message: str, device: str) -> None:
    args = [x.clone().requires_grad_() for x in dense(device)]
    o, _ = compiled(backend)(*args)
    (dq,) = torch.autograd.grad(o.sum(), args[0], create_graph=True)
    with pytest.raises(RuntimeError, match=message):
        dq.sum().backward()


# ------------------------------------------------------------------------------------- the operator


def operands(
    case: Case, device: str, *, grad: bool = False, state: bool = True, everything: bool = False
) -> list[Any]:
    """The operator's arguments, without needs_grad."""
    x = make_inputs(case, FP32, device, raw=everything)
    options = all_options(case, device) if everything else {"chunk_size": 16}
    options["output_final_state"] = state
    options["initial_state"] = x.initial_state.mT if everything else x.initial_state
    options["cu_seqlens"] = x.cu_seqlens
    if x.cu_seqlens is not None:
        options["cu_seqlens_cpu"] = x.cu_seqlens.cpu()
    given = dict(zip(("q", "k", "v", "g", "beta"), x.tensors, strict=True)) | options
    names = [
        argument.name for argument in FORWARD._schema.arguments if argument.name != "needs_grad"
    ]
    for name in Options._fields:
        given.setdefault(name, False)
    if grad:
        for name in DIFFERENTIABLE:
            if given.get(name) is not None:
                given[name] = given[name].detach().clone().requires_grad_()
    return [given.get(name) for name in names]


EMPTY = Case("empty", "no token: a state passes through, and must come out as a new tensor", T=0)
NONE = Case("none", "no sequence, rows of none", lengths=(), orphans=3)


@pytest.mark.parametrize(
    ("case", "grad", "state", "everything"),
    [
        pytest.param(DENSE, True, True, True, id="dense-all"),
        pytest.param(PACKED, True, False, False, id="packed"),
        pytest.param(DENSE, False, True, False, id="inference"),
        pytest.param(EMPTY, True, True, False, id="empty"),
        pytest.param(NONE, False, True, False, id="none"),
    ],
)
def test_opcheck(case: Case, grad: bool, state: bool, everything: bool, device: str) -> None:
    """Schema, aliasing, fake against real, and the gradient compiled with symbolic sizes."""
    args = operands(case, device, grad=grad, state=state, everything=everything)
    torch.library.opcheck(FORWARD, (*args, grad))


@pytest.mark.parametrize("case", [DENSE, EMPTY], ids=lambda case: case.name)
def test_opcheck_backward(case: Case, device: str) -> None:
    args = operands(case, device)
    do, dht = torch.randn_like(args[2]), torch.randn(case.N, 2, 16, case.V, device=device)
    wanted = [True, True, False, True, True, True, False, False]
    torch.library.opcheck(BACKWARD, (do, dht, *args, wanted))
    torch.library.opcheck(BACKWARD, (do, None, *args, wanted), test_utils="test_faketensor")


@pytest.mark.gpu("Triton's fake and real results on CUDA tensors, offsets on both sides")
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_opcheck_triton(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "triton")
    for case, everything in itertools.product((DENSE, PACKED), (False, True)):
        args = operands(case, device, everything=everything)
        args[:3] = [x.to(dtype) for x in args[:3]]
        torch.library.opcheck(FORWARD, (*args, False))


@pytest.mark.parametrize("q_dtype", [FP16, BF16, FP64])
def test_dtypes(q_dtype: torch.dtype, device: str) -> None:
    """o is of q's dtype, the state of float32 or q's float64, whatever the others are."""
    args = dense(device)
    args[0] = args[0].to(q_dtype)
    options = {"output_final_state": True}
    assert_same(compiled()(*args, **options), chunk_gated_delta_rule(*args, **options))
