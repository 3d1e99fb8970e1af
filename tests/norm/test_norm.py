"""`gdn_triton.rms_norm_gated`: the reference against its formula and against the models' own norms,
the kernels against the reference in float64, errors, choices, the operator under a compiler."""

import math
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import BF16, DTYPES, FP16, FP32, FP64, assert_within_budget, same_bits
from torch import Tensor, nn

from gdn_triton import explain_call, rms_norm_gated
from gdn_triton.reference import norm as reference_norm

UNIT32 = 2.0**-24
NAMES = ("x", "gate", "weight")

# One row; fewer rows than a tile, and one more than tiles; few channels; no power of two; a row
# that is a tile by itself.
SHAPES = [(1, 128), (2, 3, 5, 20), (17, 128), (33, 2, 64), (7, 3), (3, 2500)]
REAL = [
    pytest.param(shape, marks=pytest.mark.gpu("a real size, for the compiled kernels"))
    for shape in [(1, 8192, 32, 128), (256, 8, 128), (1000, 3, 96), (65, 8192), (300001, 16)]
]
OPTIONS = [
    pytest.param({"activation": a, "round_norm": r}, id=f"{a}-{'rounded' if r else 'wide'}")
    for a in ("silu", "sigmoid")
    for r in (False, True)
]


@pytest.fixture(autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "kernel" in request.node.name:
        if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("without a GPU, kernels run in Triton's interpreter only")
        monkeypatch.setenv("GDN_BACKEND", "triton")


def make_args(
    shape: tuple[int, ...], dtype: torch.dtype = FP32, device: str = "cpu", **dtypes: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(shape).to(device, dtype)
    gate = (3 * torch.randn(shape)).to(device, dtypes.get("gate", dtype))
    weight = torch.randn(shape[-1:]).to(device, dtypes.get("weight", dtype))
    return x, gate, weight


def gradients(run: Any, args: tuple[Tensor, ...], dy: Tensor, **options: Any) -> tuple[Any, ...]:
    """y, and the gradients of x, gate and weight."""
    leaves = [y.detach().requires_grad_() for y in args]
    y = run(*leaves, **options)
    return (y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype)))


def check_kernel(args: tuple[Tensor, ...], **options: Any) -> tuple[Any, ...]:
    dy = torch.randn(args[0].shape).to(args[0].device, args[0].dtype)
    got = gradients(rms_norm_gated, args, dy, **options)
    assert same_bits(got[0], rms_norm_gated(*args, **options)), "y without gradients"
    exact = gradients(
        reference_norm.rms_norm_gated, tuple(y.to(FP64) for y in args), dy.to(FP64), **options
    )
    narrow = gradients(reference_norm.rms_norm_gated, args, dy, **options)
    for name, y, y64, z in zip(("y", *NAMES), got, exact, narrow, strict=True):
        assert y.is_contiguous() and y.dtype == z.dtype
        assert_within_budget(name, y, y64, z, dtype=z.dtype, unit=UNIT32)
    return got


# ------------------------------------------------------------------------------------ the reference


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_reference_is_its_formula(activation: str) -> None:
    """Value by value, in Python's floats."""
    args = make_args((2, 3, 4), FP64)
    y = reference_norm.rms_norm_gated(*args, 0.25, activation)
    weight = args[2].tolist()
    rows = zip(*(z.flatten(0, -2).tolist() for z in (*args[:2], y)), strict=True)
    for x, gate, got in rows:
        root = math.sqrt(sum(v * v for v in x) / len(x) + 0.25)
        for v, z, w, found in zip(x, gate, weight, got, strict=True):
            act = 1 / (1 + math.exp(-z)) * (z if activation == "silu" else 1)
            assert found == pytest.approx(w * v / root * act, rel=1e-12)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_reference_gradients(activation: str) -> None:
    leaves = [y.requires_grad_() for y in make_args((2, 3, 4), FP64)]
    assert torch.autograd.gradcheck(
        lambda *y: reference_norm.rms_norm_gated(*y, 0.25, activation), leaves
    )


class ModelNorm(nn.Module):
    """The torch code of transformers 5.17.0's Qwen3-Next, Qwen3.5, Qwen4-Exp and OlmoHybrid."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight), eps

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        wide = hidden_states.to(FP32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        y = self.weight * wide.to(dtype)
        y = y * F.silu(gate.to(FP32))
        return y.to(dtype)


@pytest.mark.parametrize("weight_dtype", [None, FP32], ids=["same", "fp32 weight"])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_reference_rounds_as_the_models(dtype: torch.dtype, weight_dtype: Any) -> None:
    x, gate, weight = make_args((5, 4, 64), dtype, weight=weight_dtype or dtype)
    theirs = ModelNorm(weight, 1e-6)(x, gate)
    assert same_bits(
        reference_norm.rms_norm_gated(x, gate, weight, 1e-6, "silu", True), theirs.detach()
    )
    wide = reference_norm.rms_norm_gated(x, gate, weight)
    assert same_bits(wide, theirs.detach()) == (dtype == FP32)


# ---------------------------------------------------------------------------------- the kernels


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, *REAL], ids=str)
def test_kernel(
    shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any], device: str
) -> None:
    check_kernel(make_args(shape, dtype, device), **options)


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("round_norm", [False, True])
def test_kernel_with_mixed_dtypes(weight_dtype: torch.dtype, round_norm: bool, device: str) -> None:
    args = make_args((9, 2, 32), FP16, device, weight=weight_dtype, gate=FP32)
    check_kernel(args, eps=1e-3, round_norm=round_norm)


def test_kernel_rounds_as_the_models(device: str) -> None:
    """In every place: half of the values would differ in a bit without a rounding."""
    x, gate, weight = make_args((65, 4, 128), FP16, device)
    theirs = ModelNorm(weight, 1e-6)(x, gate).detach()
    ours = rms_norm_gated(x, gate, weight, 1e-6, round_norm=True)
    assert (ours != theirs).float().mean() < 0.01
    assert (rms_norm_gated(x, gate, weight, 1e-6) != theirs).float().mean() > 0.1


@pytest.mark.parametrize("name", ["reference", "kernel"])
def test_gates_that_are_open_or_closed(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The derivative of a sigmoid near 1 is e^-z, which 1 minus the rounded sigmoid is not. Every
    gradient by itself: z is rounded in its exponential, to |z| 2^-24 of that."""
    monkeypatch.setenv("GDN_BACKEND", "reference" if name == "reference" else "triton")
    x, _, weight = make_args((40, 32), FP32, device)
    gate = torch.linspace(-80, 80, 40 * 32, device=device).view(40, 32)
    args, dy = (x, gate, weight), torch.randn(40, 32, device=device)
    _, _, found, _ = gradients(rms_norm_gated, args, dy, activation="sigmoid")
    wide = tuple(y.to(FP64) for y in args)
    # sigmoid(0) is 1 / 2.
    half = reference_norm.rms_norm_gated(wide[0], 0 * wide[1], wide[2], activation="sigmoid")
    z = wide[1].abs()
    exact = dy.to(FP64) * 2 * half * (-z).exp() / (1 + (-z).exp()).square()
    assert ((found - exact).abs() <= UNIT32 * (2 * z + 32) * exact.abs()).all()


@pytest.mark.parametrize("layout", ["view", "heads first", "strided", "expanded", "negative"])
def test_kernel_layouts(layout: str, device: str) -> None:
    """The values and gradients of contiguous tensors, from others; what lies around is NaN."""
    shape = (2, 9, 4, 32)
    dense = make_args(shape, FP32, device)
    dy = torch.randn(shape, device=device)

    def laid(y: Tensor) -> Tensor:
        if layout == "view":
            around = torch.full((2, 9, 3 + 4 * 32 + 8), torch.nan, device=device)
            around[..., 3 : 3 + 4 * 32] = y.flatten(-2)
            return around[..., 3 : 3 + 4 * 32].unflatten(-1, (4, 32))
        if layout == "heads first":
            return y.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "strided":
            around = torch.full((2, 9, 4, 64), torch.nan, device=device)
            around[..., ::2] = y
            return around[..., ::2]
        if layout == "negative":
            return torch._neg_view(-y)
        return y[:, :1].expand(shape)

    args = tuple(y.clone() for y in dense)
    if layout == "expanded":
        args = (args[0][:, :1].expand(shape).clone(), args[1][:, :1].expand(shape).clone(), args[2])
    expected = gradients(rms_norm_gated, args, dy)
    got = gradients(
        rms_norm_gated,
        (laid(args[0]), laid(args[1]), args[2]),
        laid(dy) if layout != "expanded" else dy,
    )
    assert all(map(same_bits, got, expected))
    weight = torch.stack([args[2], args[2]], 1)[:, 0]
    assert same_bits(rms_norm_gated(args[0], args[1], weight), expected[0])


@pytest.mark.parametrize("shape", [(0, 128), (2, 0, 4, 16)], ids=str)
def test_kernel_of_nothing(shape: tuple[int, ...], device: str) -> None:
    args = make_args(shape, FP32, device)
    y, dx, dgate, dweight = gradients(rms_norm_gated, args, torch.randn(shape, device=device))
    assert [list(z.shape) for z in (y, dx, dgate)] == [list(shape)] * 3
    assert not dweight.any() and dweight.shape == shape[-1:]


def test_kernel_without_eps(device: str) -> None:
    """The rows of a tile behind the last one have a mean square of 0, and reach no gradient."""
    check_kernel(make_args((5, 3, 128), FP32, device), eps=0.0)


def test_kernel_bits_of_a_row(device: str) -> None:
    """A row's values do not depend on the others, and dweight has the same bits again: there are
    more tiles than parts of the sum."""
    from gdn_triton.norm import triton as kernels

    x, gate, weight = make_args((40, 2048), FP32, device)
    y = rms_norm_gated(x, gate, weight)
    for n in (0, 17, 39):
        assert same_bits(rms_norm_gated(x[n], gate[n], weight), y[n])
    runs = kernels.MOST_RUNS
    try:
        kernels.MOST_RUNS = 3  # type: ignore[misc]
        check_kernel((x, gate, weight))
        dy = torch.randn_like(x)
        twice = [gradients(rms_norm_gated, (x, gate, weight), dy) for _ in range(2)]
    finally:
        kernels.MOST_RUNS = runs  # type: ignore[misc]
    assert all(map(same_bits, *twice))


def test_kernel_has_no_second_derivative(device: str) -> None:
    x, gate, weight = (y.requires_grad_() for y in make_args((3, 8), FP32, device))
    dy = torch.ones(3, 8, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(rms_norm_gated(x, gate, weight), x, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="rms_norm_gated has no second derivative"):
        dx.sum().backward()


# ------------------------------------------------------------------------- the choice, and errors


def test_explained(monkeypatch: pytest.MonkeyPatch, no_interpreter: None) -> None:
    args = make_args((3, 8))
    monkeypatch.setenv("GDN_BACKEND", "cuda")
    told = explain_call(rms_norm_gated, *args)
    assert told.chosen == "reference" and told.as_auto
    assert told.reasons["cuda"] == "The CUDA library has no norm."
    assert "CPU" in str(told.reasons["triton"])
    monkeypatch.setenv("GDN_BACKEND", "triton")
    with pytest.raises(RuntimeError, match="GDN_BACKEND=triton cannot run this call"):
        rms_norm_gated(*args)


@pytest.mark.parametrize(
    "args, words",
    [
        (make_args((3, 8), FP64), "float64"),
        (make_args((1, 8193)), "rows of up to 8192 channels; D is 8193"),
    ],
    ids=["float64", "wide"],
)
def test_refused(args: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "triton")
    with pytest.raises(RuntimeError, match=words):
        rms_norm_gated(*args)
    monkeypatch.setenv("GDN_BACKEND", "auto")
    assert same_bits(rms_norm_gated(*args), reference_norm.rms_norm_gated(*args))


X = torch.randn(3, 8)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "type": ({"gate": [1.0]}, TypeError, "gate must be a torch.Tensor, got list"),
    "rank": ({"x": torch.ones(())}, ValueError, r"x must have at least 1 dimension \[..., D\]"),
    "channels": ({"x": X[:, :0]}, ValueError, "gate must have the shape of x"),
    "no channels": (
        {"x": X[:, :0], "gate": X[:, :0]},
        ValueError,
        "x must have at least 1 channel",
    ),
    "gate": ({"gate": X[:2]}, ValueError, r"gate must have the shape of x, \[3, 8\], got shape"),
    "weight": ({"weight": X[0, :5]}, ValueError, r"weight must have shape \[D=8\], got shape \[5"),
    "dtype": ({"weight": torch.ones(8).int()}, ValueError, "weight must be float16, bfloat16"),
    "device": (
        {"weight": torch.ones(8, device="meta")},
        ValueError,
        "weight must be on the device of x, cpu, got meta",
    ),
    "eps": ({"eps": -1.0}, ValueError, "eps must be finite and at least 0, got -1.0"),
    "infinite": ({"eps": math.inf}, ValueError, "eps must be finite"),
    "eps type": ({"eps": "1"}, TypeError, "eps must be a real number"),
    "no eps": ({"eps": None}, TypeError, "eps must be a real number, got None"),
    "activation": ({"activation": "gelu"}, ValueError, "activation must be 'silu' or 'sigmoid'"),
    "flag": ({"round_norm": 1}, TypeError, "round_norm must be True or False, got 1"),
}


@pytest.mark.parametrize("changes, error, words", BAD.values(), ids=BAD)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    args: dict[str, Any] = {"x": X, "gate": X, "weight": X[0], **changes}
    with pytest.raises(error, match=words):
        rms_norm_gated(**args)


# ----------------------------------------------------------------------------------- the operator


def compiled(**options: Any) -> Any:
    torch.compiler.reset()

    def call(*args: Any) -> Tensor:
        return rms_norm_gated(*args, 1e-5, "sigmoid", True)

    return torch.compile(call, fullgraph=True, backend="aot_eager", **options)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_kernel(dynamic: bool, device: str) -> None:
    call = compiled(dynamic=dynamic)
    for rows in (3, 20):
        args = make_args((rows, 2, 16), FP16, device)
        dy = torch.randn(args[0].shape, device=device, dtype=FP16)
        expected = gradients(
            rms_norm_gated, args, dy, eps=1e-5, activation="sigmoid", round_norm=True
        )
        assert all(map(same_bits, gradients(call, args, dy), expected))


def test_opcheck() -> None:
    args = (*make_args((3, 2, 8)), 1e-6, "silu", False)
    torch.library.opcheck(torch.ops.gdn_triton.rms_norm_gated, args)
    leaves = (*(y.requires_grad_() for y in args[:3]), *args[3:])
    torch.library.opcheck(torch.ops.gdn_triton.rms_norm_gated, leaves)


def test_without_memory() -> None:
    args = [y.to("meta") for y in make_args((3, 2, 8), BF16)]
    y = rms_norm_gated(args[0].transpose(0, 1), args[1].transpose(0, 1), args[2])
    assert y.is_meta and y.shape == (2, 3, 8) and y.is_contiguous() and y.dtype == BF16


@pytest.mark.gpu("a CUDA graph")
def test_in_a_graph_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "triton")
    args = make_args((64, 8, 128), BF16, "cuda")
    expected = rms_norm_gated(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rms_norm_gated(*args)
    y.zero_()
    graph.replay()
    assert same_bits(y, expected)
