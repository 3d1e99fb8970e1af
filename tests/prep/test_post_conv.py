"""`gdn_triton.fused_post_conv_prep`: the reference against its formulas, the kernel against the
reference in float64, the public function's errors and choices, the operator under a compiler."""

import math
from typing import Any

import pytest
import torch
from helpers import BF16, DTYPES, FP16, FP32, FP64, assert_within_budget, same_bits
from post_conv_cases import make_args
from torch import Tensor

from gdn_triton import fused_post_conv_prep
from gdn_triton.constants import L2NORM_EPS, SOFTPLUS_THRESHOLD
from gdn_triton.reference import prep as reference_post_conv

UNIT32 = 2.0**-24
NAMES = ("q", "k", "v", "g", "beta")

# (L, H, HV, K, V): one token; below, at and above a block of 64 tokens; groups of value heads;
# widths of no power of two, odd ones among them; a value wider than a tile.
SHAPES = [
    (1, 2, 40, 16, 16),
    (63, 2, 4, 32, 16),
    (64, 1, 3, 64, 64),
    (65, 2, 2, 20, 36),
    (70, 3, 6, 100, 12),
    (50, 1, 2, 3, 5),
    (67, 1, 8, 16, 516),
    (2, 40, 80, 8, 8),
]
REAL = [
    pytest.param(shape, marks=pytest.mark.gpu("a real size, for the compiled kernel"))
    for shape in [
        (2048, 16, 32, 128, 128),
        (4099, 16, 32, 128, 128),
        (1000, 4, 12, 96, 112),
        (515, 2, 4, 256, 512),
    ]
]
LAYOUTS = ["dense", "view", "odd-view", "channel-major", "strided"]


def to_exact(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.to(FP64) if isinstance(x, Tensor) else x for x in args)


def check_kernel(args: tuple[Any, ...], **options: bool) -> tuple[Tensor, ...]:
    from gdn_triton.prep.triton import post_conv_fwd

    flags = {"apply_l2norm": True, "output_g_exp": False, **options}
    use_l2norm, g_exp = flags["apply_l2norm"], flags["output_g_exp"]
    got = post_conv_fwd(*args, use_l2norm=use_l2norm, g_exp=g_exp)
    exact = reference_post_conv.fused_post_conv_prep(*to_exact(args), **flags)
    narrow = reference_post_conv.fused_post_conv_prep(*args, **flags)
    for name, y, y64, z in zip(NAMES, got, exact, narrow, strict=True):
        assert y.is_contiguous()
        if name == "v" or (name in "qk" and not use_l2norm):
            assert same_bits(y, z), name
        else:
            assert_within_budget(name, y, y64, z, dtype=z.dtype, unit=UNIT32)
    return got


# ------------------------------------------------------------------------------------ the reference


@pytest.mark.parametrize("g_exp", [False, True])
@pytest.mark.parametrize("l2norm", [False, True])
def test_reference_is_its_formulas(l2norm: bool, g_exp: bool) -> None:
    """Value by value, in Python's floats."""
    L, H, HV, K, V = shape = (4, 2, 6, 3, 2)
    args = to_exact(make_args(shape))
    x, a, b, A_log, dt_bias = (y.tolist() for y in args[:5])
    q, k, v, g, beta = reference_post_conv.fused_post_conv_prep(*args, l2norm, g_exp)
    assert [list(y.shape) for y in (q, k)] == [[L, H, K]] * 2 and list(v.shape) == [L, HV, V]
    for t in range(L):
        for got, first in ((q, 0), (k, H * K)):
            for h in range(H):
                row = x[t][first + h * K : first + (h + 1) * K]
                norm = math.sqrt(sum(y * y for y in row) + L2NORM_EPS) if l2norm else 1.0
                assert got[t, h].tolist() == pytest.approx([y / norm for y in row], rel=1e-12)
        for h in range(HV):
            first = 2 * H * K + h * V
            assert v[t, h].tolist() == x[t][first : first + V]
            decay = -math.exp(A_log[h]) * math.log1p(math.exp(a[t][h] + dt_bias[h]))
            expected = math.exp(decay) if g_exp else decay
            assert g[t, h].item() == pytest.approx(expected, rel=1e-12)
            assert beta[t, h].item() == pytest.approx(1 / (1 + math.exp(-b[t][h])), rel=1e-12)


@pytest.mark.parametrize(
    ("dtype", "gate_dtype", "wide"),
    [(FP16, FP16, FP32), (BF16, FP32, FP32), (FP32, FP64, FP64), (FP64, BF16, FP64)],
)
def test_reference_dtypes(dtype: torch.dtype, gate_dtype: torch.dtype, wide: torch.dtype) -> None:
    args = make_args((3, 1, 2, 4, 4), dtype=dtype, gate_dtype=gate_dtype)
    got = reference_post_conv.fused_post_conv_prep(*args)
    assert [y.dtype for y in got] == [dtype] * 3 + [wide] * 2


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("l2norm", [False, True])
def test_outputs_are_new(
    backend: str, l2norm: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No output shares memory with an input, not where a slice of one token is dense by itself
    either; and no input is written."""
    monkeypatch.setenv("GDN_BACKEND", backend)
    args = make_args((1, 1, 1, 4, 4), device=device)
    before = [x.clone() for x in args[:5]]
    got = fused_post_conv_prep(*args, l2norm)
    owners = [x.untyped_storage().data_ptr() for x in (*args[:5], *got)]
    assert len(set(owners[5:])) == 5 and not set(owners[:5]) & set(owners[5:])
    assert all(y.is_contiguous() for y in got)
    assert all(same_bits(x, y) for x, y in zip(before, args[:5], strict=True))


# --------------------------------------------------------------------------------------- the kernel


@pytest.mark.parametrize("shape", SHAPES + REAL, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    check_kernel(make_args(shape, dtype=dtype, device=device))


@pytest.mark.parametrize("shape", [(130, 2, 4, 36, 20), *REAL], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("l2norm", [False, True])
def test_layouts(shape: tuple[int, ...], layout: str, l2norm: bool, device: str) -> None:
    args = make_args(shape, layout=layout, dtype=FP16, device=device)
    check_kernel(args, apply_l2norm=l2norm)


@pytest.mark.parametrize("L", [64, 72, 130, 131])
@pytest.mark.parametrize("dtype", DTYPES)
def test_channel_major_lengths(L: int, dtype: torch.dtype, device: str) -> None:
    """Each alignment of the runs of tokens."""
    check_kernel(make_args((L, 1, 2, 24, 40), layout="channel-major", dtype=dtype, device=device))


def test_channel_major_part_of_the_tokens(device: str) -> None:
    """A run of tokens inside longer channels: the columns' distance is not L."""
    x, a, b, *rest = make_args((160, 1, 2, 16, 16), layout="channel-major", device=device)
    check_kernel((x[16:96], a[16:96], b[16:96], *rest))
    check_kernel((x[3:80], a[3:80], b[3:80], *rest))


@pytest.mark.parametrize("gate_dtype", DTYPES)
def test_gates_of_any_dtype(gate_dtype: torch.dtype, device: str) -> None:
    check_kernel(make_args((70, 1, 4, 16, 16), gate_dtype=gate_dtype, device=device))


def test_gates_of_halves_of_a_projection(device: str) -> None:
    """a and b side by side, dense heads; parameters that are columns of a table."""
    x, _, _, _, _, *sizes = make_args((70, 2, 4, 16, 16), device=device)
    b, a = torch.randn(70, 8, device=device).split(4, 1)
    A_log, dt_bias = torch.randn(4, 2, device=device).unbind(1)
    check_kernel((x, a, b, A_log, dt_bias, *sizes))


def test_decay_in_place_of_its_logarithm(device: str) -> None:
    args = make_args((70, 1, 4, 16, 16), device=device)
    g = check_kernel(args)[3]
    decay = check_kernel(args, output_g_exp=True)[3]
    assert ((decay > 0) & (decay < 1)).all()
    assert torch.allclose(decay, g.exp(), rtol=1e-5, atol=0)


def test_gates_far_out(device: str) -> None:
    """Each gate's own relative error, on both sides of the threshold and far out; the bound is
    derived in tests/chunk/test_kernels.py."""
    edge = SOFTPLUS_THRESHOLD
    a = torch.cat([torch.linspace(-30, 30, 997), torch.tensor([edge, math.nextafter(edge, 0), 80])])
    a = a.reshape(-1, 1).to(device)
    b = torch.linspace(-200, 200, 1000, device=device).reshape(-1, 1)
    b[0], b[-1] = -torch.inf, torch.inf
    x, zero = torch.zeros(1000, 3, device=device), torch.zeros(1, device=device)
    *_, g, beta = check_kernel((x, a, b, zero, zero, 1, 1, 1))
    exact = reference_post_conv.fused_post_conv_prep(*to_exact((x, a, b, zero, zero)), 1, 1, 1)
    assert ((g - exact[3]).abs() <= 2.0**-17 * exact[3].abs()).all()
    assert ((beta - exact[4]).abs() <= 2.0**-22).all()
    assert beta[0] == 0 and beta[-1] == 1


def test_gates_that_are_not_finite(device: str) -> None:
    """inf forgets all, -inf nothing; a NaN stays in its token and head, in g or in beta."""
    from gdn_triton.prep.triton import post_conv_fwd

    args = make_args((4, 1, 2, 4, 4), device=device)
    a, b = args[1].clone(), args[2].clone()
    a[0, 0], a[1, 0], a[2, 1], b[3, 1] = torch.inf, -torch.inf, torch.nan, torch.nan
    args = (args[0], a, b, *args[3:])
    for got in (
        post_conv_fwd(*args, use_l2norm=True, g_exp=False),
        reference_post_conv.fused_post_conv_prep(*args),
    ):
        *qkv, g, beta = got
        assert g[0, 0] == -torch.inf and g[1, 0] == 0
        assert torch.equal(g.isnan().nonzero().cpu(), torch.tensor([[2, 1]]))
        assert torch.equal(beta.isnan().nonzero().cpu(), torch.tensor([[3, 1]]))
        assert all(y.isfinite().all() for y in qkv)
    decay = post_conv_fwd(*args, use_l2norm=True, g_exp=True)[3]
    assert decay[0, 0] == 0 and decay[1, 0] == 1 and decay[2, 1].isnan()


def test_rows_of_zeros_and_of_large_values(device: str) -> None:
    """0 stays 0; fp16 rows whose squares overflow fp16 are normalised."""
    args = make_args((3, 1, 1, 32, 4), dtype=FP16, device=device)
    x = args[0]
    x[0] = 0
    x[1] = (x[1] * 1e4).clamp(-6e4, 6e4)
    q, k, *_ = check_kernel((x, *args[1:]))
    assert (q[0] == 0).all() and (k[0] == 0).all()
    assert abs(q[1].float().norm().item() - 1) < 1e-2


def test_nan_stays_in_its_row(device: str) -> None:
    from gdn_triton.prep.triton import post_conv_fwd

    args = make_args((67, 2, 2, 16, 16), device=device)
    args[0][65, 16 + 3] = torch.nan  # q's second head
    q, *others = post_conv_fwd(*args, use_l2norm=True, g_exp=False)
    bad = torch.zeros_like(q, dtype=torch.bool)
    bad[65, 1] = True
    assert torch.equal(q.isnan(), bad)
    assert all(y.isfinite().all() for y in others)


@pytest.mark.parametrize("layout", ["dense", "channel-major"])
def test_a_token_has_the_same_bits_anywhere(layout: str, device: str) -> None:
    from gdn_triton.prep.triton import post_conv_fwd

    args = make_args((176, 2, 4, 16, 16), layout=layout, dtype=FP16, device=device)
    whole = post_conv_fwd(*args, use_l2norm=True, g_exp=False)
    for rows in (slice(16, 32), slice(16, 176), slice(80, 144)):
        part = tuple(x[rows] for x in args[:3])
        got = post_conv_fwd(*part, *args[3:], use_l2norm=True, g_exp=False)
        assert all(same_bits(y, z[rows]) for y, z in zip(got, whole, strict=True))


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_no_tokens(backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", backend)
    got = fused_post_conv_prep(*make_args((0, 2, 4, 16, 8), device=device))
    assert [list(y.shape) for y in got] == [[0, 2, 16], [0, 2, 16], [0, 4, 8], [0, 4], [0, 4]]


@pytest.mark.gpu("more than 2^31 elements")
@pytest.mark.parametrize("layout", ["dense", "channel-major"])
def test_offsets_above_32_bits(layout: str, device: str) -> None:
    L, H, HV, K, V = 300_000, 16, 32, 128, 128
    D = 2 * H * K + HV * V
    x = torch.zeros(L, D, dtype=BF16, device=device)
    if layout == "channel-major":
        x = torch.zeros(D, L, dtype=BF16, device=device).t()
    small = make_args((64, H, HV, K, V), dtype=BF16, device=device)
    a, b = torch.zeros(2, L, HV, device=device)
    x[-64:], a[-64:], b[-64:] = small[:3]
    got = fused_post_conv_prep(x, a, b, *small[3:])
    expected = fused_post_conv_prep(*small)
    # The alignment of the runs may change the order of the norm's sum.
    for name, y, z in zip(NAMES, got, expected, strict=True):
        assert torch.allclose(y[-64:].float(), z.float(), rtol=2.0**-7, atol=0), name


@pytest.mark.gpu("a CUDA graph")
def test_replay_of_a_graph_follows_its_inputs(device: str) -> None:
    args = make_args((300, 2, 4, 64, 64), dtype=BF16, device=device)
    fused_post_conv_prep(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fused_post_conv_prep(*args)
    for _ in range(2):
        for x in args[:5]:
            x.normal_()
        for y in got:
            y.fill_(torch.nan)
        graph.replay()
        expected = fused_post_conv_prep(*args)
        assert all(same_bits(y, z) for y, z in zip(got, expected, strict=True))


@pytest.mark.two_gpus("tensors on a device that is not the current one")
def test_on_another_device() -> None:
    args = make_args((70, 2, 4, 16, 16), dtype=BF16, device="cuda:1")
    with torch.cuda.device(1):
        expected = fused_post_conv_prep(*args)
    with torch.cuda.device(0):
        got = fused_post_conv_prep(*args)
        assert torch.cuda.current_device() == 0
    assert all(y.device.index == 1 for y in got)
    assert all(same_bits(y, z) for y, z in zip(got, expected, strict=True))
