"""The contract; gradients, compiler: see test_post_conv.py."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import FP16, FP32, FP64, same_bits
from post_conv_cases import compiled, make_args
from torch import Tensor

from gdn_triton import fused_post_conv_prep
from gdn_triton._host.backends import Backend
from gdn_triton.constants import MAX_K
from gdn_triton.reference import prep as reference_post_conv

# ------------------------------------------------------------------------------------- the contract


def test_signature() -> None:
    parameters = inspect.signature(fused_post_conv_prep).parameters.values()
    required = inspect.Parameter.empty
    assert [(p.name, p.default) for p in parameters] == [
        ("conv_output", required),
        ("a", required),
        ("b", required),
        ("A_log", required),
        ("dt_bias", required),
        ("num_k_heads", required),
        ("head_k_dim", required),
        ("head_v_dim", required),
        ("apply_l2norm", True),
        ("output_g_exp", False),
    ]


WRONG = [
    ("conv_output", [1.0], TypeError, "conv_output must be a torch.Tensor, got list"),
    ("b", None, TypeError, "b must be a torch.Tensor, got NoneType"),
    ("num_k_heads", 2.0, TypeError, r"num_k_heads must be an int, got 2.0 \(float\)"),
    ("head_k_dim", True, TypeError, r"head_k_dim must be an int, got True \(bool\)"),
    ("head_v_dim", 0, ValueError, "head_v_dim must be at least 1, got 0"),
    ("apply_l2norm", 1, TypeError, r"apply_l2norm must be True or False, got 1 \(int\)"),
    ("output_g_exp", None, TypeError, "output_g_exp must be True or False, got None"),
    ("dt_bias", torch.empty(4, device="meta"), ValueError, "dt_bias must be on the device of conv"),
    ("conv_output", torch.zeros(1, 5, 56), ValueError, "conv_output must have 2 dimensions"),
    ("conv_output", torch.zeros(5, 55), ValueError, r"conv_output must have 2 .* = 56 columns"),
    ("A_log", torch.zeros(4, 1), ValueError, r"A_log must have 1 dimension \[HV\]"),
    ("A_log", torch.zeros(3), ValueError, "A_log must have a positive multiple of H=2 heads, got"),
    ("a", torch.zeros(4, 4), ValueError, r"a must have shape \[L=5, HV=4\], got shape \[4, 4\]"),
    ("b", torch.zeros(5, 8), ValueError, r"b must have shape \[L=5, HV=4\], got shape \[5, 8\]"),
    ("dt_bias", torch.zeros(2), ValueError, r"dt_bias must have shape \[HV=4\], got shape \[2\]"),
    (
        "a",
        torch.zeros(5, 4, dtype=torch.int32),
        ValueError,
        "a must be float16, .* got torch.int32",
    ),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), WRONG)
def test_wrong_arguments(name: str, value: Any, error: type[Exception], message: str) -> None:
    names = list(inspect.signature(fused_post_conv_prep).parameters)
    args = dict(zip(names, make_args((5, 2, 4, 6, 8)), strict=False))
    fused_post_conv_prep(**args)
    args[name] = value
    with pytest.raises(error, match=message):
        fused_post_conv_prep(**args)


def test_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="apply_12norm"):
        fused_post_conv_prep(*make_args((5, 2, 4, 6, 8)), apply_12norm=True)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_triton_is_called(backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And by auto, where the kernels run at all: on a GPU, or in the interpreter."""
    from gdn_triton.prep.backends import POST_CONV

    loaded = []

    def noted(one: Backend) -> Backend:
        return dataclasses.replace(one, load=lambda: loaded.append(one.name) or one.load())

    monkeypatch.setattr(POST_CONV, "backends", tuple(map(noted, POST_CONV.backends)))
    monkeypatch.setenv("GDN_BACKEND", backend)
    fused_post_conv_prep(*make_args((5, 2, 4, 6, 8), device=device))
    assert loaded == ["triton"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("float64", "one of the inputs is float64"),
        ("gate64", "one of the inputs is float64"),
        ("K", f"keys of up to {MAX_K} channels"),
        ("grad", "no backward"),
    ],
)
def test_triton_refuses(
    change: str, reason: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    K = MAX_K + 1 if change == "K" else 6
    dtypes = {
        "dtype": FP64 if change == "float64" else FP32,
        "gate_dtype": FP64 if change == "gate64" else FP32,
    }
    args = make_args((5, 2, 4, K, 8), device=device, **dtypes)
    args[4].requires_grad_(change == "grad")
    monkeypatch.setenv("GDN_BACKEND", "triton")
    with pytest.raises(RuntimeError, match=f"GDN_BACKEND=triton cannot run this call.*{reason}"):
        fused_post_conv_prep(*args)
    monkeypatch.setenv("GDN_BACKEND", "auto")
    expected = reference_post_conv.fused_post_conv_prep(*args)
    for y, z in zip(fused_post_conv_prep(*args), expected, strict=True):
        assert torch.equal(y, z)
    if change == "grad":
        with torch.no_grad():
            monkeypatch.setenv("GDN_BACKEND", "triton")
            fused_post_conv_prep(*args)


def test_unknown_backend(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "tritn")
    with pytest.raises(ValueError, match=r"GDN_BACKEND must be one of .*, got 'tritn'"):
        fused_post_conv_prep(*make_args((5, 2, 4, 6, 8), device=device))


def test_feeds_the_chunked_op(device: str) -> None:
    """Preparation and plain op give what the op gives with its own norm, gate and sigmoid."""
    from gdn_triton import chunk_gated_delta_rule

    L, H, HV, K, V = 70, 1, 2, 16, 16
    x, a, b, A_log, dt_bias, *sizes = make_args((L, H, HV, K, V), device=device)
    q, k, v = x.split([H * K, H * K, HV * V], 1)
    raw = (q.reshape(L, H, K)[None], k.reshape(L, H, K)[None], v.reshape(L, HV, V)[None])
    expected, state = chunk_gated_delta_rule(
        *raw,
        a[None],
        b[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
    )
    prepared = fused_post_conv_prep(x, a, b, A_log, dt_bias, *sizes)
    o, final = chunk_gated_delta_rule(*(y[None] for y in prepared), output_final_state=True)
    assert state is not None and final is not None
    for y, z in ((o, expected), (final, state)):
        assert torch.allclose(y, z, rtol=0, atol=1e-5 * z.abs().max().item())


# ------------------------------------------------------------------------------ gradients, compiler


def test_gradients_of_the_reference() -> None:
    args = make_args((3, 1, 2, 3, 2), dtype=FP64, gate_dtype=FP64)
    tensors = [x.contiguous().requires_grad_() for x in args[:5]]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        return fused_post_conv_prep(*tensors, *args[5:])

    assert torch.autograd.gradcheck(function, tensors)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("layout", ["dense", "channel-major"])
def test_compiled_equals_eager(
    backend: str,
    layout: str,
    device: str,
    fresh_compiler: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GDN_BACKEND", backend)
    run = compiled()
    for flags in ((True, False), (False, True)):
        args = make_args((9, 2, 4, 6, 8), layout=layout, dtype=FP16, device=device)
        expected = fused_post_conv_prep(*args, *flags)
        for y, z in zip(run(*args, *flags), expected, strict=True):
            assert y.stride() == z.stride() and same_bits(y, z)


def test_one_graph_for_every_length(device: str, fresh_compiler: None) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(fused_post_conv_prep, fullgraph=True, backend=counter)
    for L in (9, 5, 70, 64):
        args = make_args((L, 2, 4, 6, 8), device=device)
        expected = fused_post_conv_prep(*args)
        assert all(same_bits(y, z) for y, z in zip(run(*args), expected, strict=True))
    # The first L is a constant until there is a second.
    assert counter.frame_count == 2
    (graph, _) = counter.graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert [x for x in called if "getitem" not in x] == ["gdn_triton.fused_post_conv_prep"]


@pytest.mark.parametrize("wanted", [(0, 1, 2, 3, 4), (1,)], ids=["all", "a"])
def test_compiled_gradients(wanted: tuple[int, ...], device: str, fresh_compiler: None) -> None:
    args = make_args((9, 2, 4, 6, 8), device=device)

    def gradients(function: Callable[..., Any]) -> list[Tensor | None]:
        tensors = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(args[:5])]
        q, _, v, g, beta = function(*tensors, *args[5:])
        (q.square().sum() + v.sum() + (g * beta).sum() + q.sin().sum()).backward()
        return [x.grad for x in tensors]

    expected = gradients(fused_post_conv_prep)
    for i, (x, y) in enumerate(zip(gradients(compiled()), expected, strict=True)):
        assert (x is None) == (y is None) == (i not in wanted)
        if x is not None and y is not None:
            assert torch.allclose(x, y, rtol=1e-5, atol=1e-6)


def test_operator_passes_the_library_s_checks(device: str) -> None:
    args = make_args((9, 2, 4, 6, 8), device=device)
    for x in args[:5]:
        x.requires_grad_()
    operator = torch.ops.gdn_triton.fused_post_conv_prep.default
    torch.library.opcheck(operator, (*args, True, False, True))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_k_heads", 2.0, "num_k_heads must be an int"),
        ("apply_l2norm", 1, "apply_l2norm must be True or False"),
        ("a", torch.zeros(4, 4), "a must have shape"),
    ],
)
def test_wrong_arguments_under_a_compiler(
    name: str, value: Any, message: str, fresh_compiler: None
) -> None:
    names = list(inspect.signature(fused_post_conv_prep).parameters)
    args = dict(zip(names, make_args((5, 2, 4, 6, 8)), strict=False))
    args[name] = value
    with pytest.raises(Exception, match=message):
        compiled()(**args)
