"""With the preparation; gradients: see test_conv.py."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conv_cases import (
    BACKENDS,
    LENGTHS,
    PREPARED,
    REAL,
    UNIT32,
    in_layout,
    make,
    make_prep,
    on,
    packed,
)
from helpers import BF16, DTYPES, FP16, FP32, FP64, assert_within_budget, memory_of, same_bits
from torch import Tensor

from gdn_triton import (
    causal_conv1d,
    causal_conv1d_update,
    chunk_gated_delta_rule,
    fused_conv_prep,
    fused_post_conv_prep,
    recurrent_step,
)
from gdn_triton.reference import conv as reference_conv


def apart(args: tuple[Any, ...], flags: tuple[bool, ...] = (), **options: Any) -> list[Tensor]:
    """The convolution, then the preparation."""
    x, weight, a, b, *rest = args
    y = causal_conv1d(x, weight, **options)
    gates = (z.flatten(0, -2) for z in (a, b))
    parts = fused_post_conv_prep(y.flatten(0, -2), *gates, *rest, *flags)
    return [z.unflatten(0, x.shape[:-1]) for z in parts]


@pytest.mark.parametrize(
    "shape",
    # Heads of no power of two, narrower than a tile, and wider; group sizes.
    [
        (66, 2, 4, 16, 16),
        (20, 1, 3, 36, 20),
        (9, 3, 3, 5, 3),
        (9, 1, 1, 160, 8),
        pytest.param((2048, 16, 32, 128, 128), marks=REAL),
        pytest.param((1000, 4, 12, 96, 112), marks=REAL),
        pytest.param((515, 2, 4, 256, 512), marks=REAL),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("l2norm", [False, True])
def test_fused_has_the_bits_of_the_two(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    l2norm: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on("triton", monkeypatch)
    args = make_prep(shape, dtype=dtype, device=device)
    got = fused_conv_prep(*args, apply_l2norm=l2norm)
    for name, y, z in zip(PREPARED, got, apart(args, (l2norm,)), strict=True):
        assert y.is_contiguous() and y.shape == z.shape
        assert same_bits(y, z), name


@pytest.mark.parametrize("layout", ["view", "odd-view", "channel-major", "strided"])
def test_fused_layouts(layout: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout may change the order of a norm's sum, and nothing else."""
    on("triton", monkeypatch)
    args = make_prep((35, 2, 2, 12, 20), dtype=FP16, device=device, batch=2)
    got = fused_conv_prep(in_layout(args[0], layout), *args[1:], output_g_exp=True)
    expected = fused_conv_prep(*args, output_g_exp=True)
    for name, y, z in zip(PREPARED, got, expected, strict=True):
        if name in "qk":
            assert torch.allclose(y, z, rtol=2.0**-9, atol=0), name
        else:
            assert same_bits(y, z), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_fused_with_states(
    backend: str, is_packed: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two, one after the other, leave the same states too. A variant's layout may change the
    order of a norm's sum of 8 squares, and nothing else."""
    on(backend, monkeypatch)
    if is_packed:
        T, cu_seqlens = packed(device)
        args, N = make_prep((T, 1, 2, 8, 8), device=device), len(LENGTHS)
        options = {"cu_seqlens": cu_seqlens}
    else:
        N, options = 3, {}
        args = make_prep((66, 1, 2, 8, 8), device=device, batch=N)
    pool = torch.randn(N + 2, 32, 3, device=device)
    slots = torch.randperm(N + 2)[:N].to(device)
    slots[N // 2] = -1
    flags = torch.arange(N, device=device) % 2 == 0
    options |= {"read_slots": slots, "has_initial_state": flags, "bias": torch.randn(32).to(device)}
    ours, theirs = pool.clone(), pool.clone()
    got = fused_conv_prep(*args, state=ours, **options)
    for name, y, z in zip(PREPARED, got, apart(args, state=theirs, **options), strict=True):
        if name in "qk":
            assert torch.allclose(y, z, rtol=8 * 2.0**-24, atol=0), name
        else:
            assert same_bits(y, z), name
    assert same_bits(ours, theirs)


def test_prefill_then_decode(device: str) -> None:
    """A layer's way: a prompt through the fused kernel and the chunked op, then tokens through the
    update and the step, on pools; against the whole through the chunked op."""
    T, S, H, HV, K, V = 21, 3, 1, 2, 16, 16
    x, weight, a, b, A_log, dt_bias, *sizes = make_prep((T + S, H, HV, K, V), device=device)
    parts = fused_conv_prep(x, weight, a, b, A_log, dt_bias, *sizes)
    expected, _ = chunk_gated_delta_rule(*(y[None] for y in parts))

    slots = torch.tensor([2], device=device)
    conv_pool, pool = (torch.zeros(4, *s, device=device) for s in ((x.shape[1], 3), (HV, K, V)))
    conv = {"state": conv_pool, "read_slots": slots}
    prompt = fused_conv_prep(x[:T], weight, a[:T], b[:T], A_log, dt_bias, *sizes, **conv)
    o, final = chunk_gated_delta_rule(*(y[None] for y in prompt), output_final_state=True)
    assert final is not None
    pool[slots] = final
    outputs = [o[0]]
    for t in range(T, T + S):
        y = causal_conv1d_update(x[t : t + 1], weight, **conv)
        gates = {"a": a[t : t + 1], "b": b[t : t + 1], "A_log": A_log, "dt_bias": dt_bias}
        outputs.append(
            recurrent_step(pool, slots, mixed_qkv=y, **gates, use_qk_l2norm_in_kernel=True)
        )
    assert torch.allclose(torch.cat(outputs), expected[0], rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------------- gradients


def gradients(function: Callable[..., Tensor], *tensors: Tensor, dy: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    return list(torch.autograd.grad(function(*leaves), leaves, dy.to(leaves[0].dtype)))


@pytest.mark.parametrize(("W", "is_packed"), [(2, True), (3, False), (4, False), (4, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_the_kernel(
    W: int, is_packed: bool, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    T, cu_seqlens = packed(device) if is_packed else (70, None)
    batch = 0 if is_packed else 2
    x, weight, bias = make(T, 12, W, dtype=dtype, device=device, batch=batch)
    activation = None if W == 3 else "silu"
    dy = torch.randn(x.shape).to(device, dtype)

    def function(*tensors: Tensor) -> Tensor:
        return causal_conv1d(*tensors, activation=activation, cu_seqlens=cu_seqlens)

    on("triton", monkeypatch)
    got = gradients(function, x, weight, bias, dy=dy)
    on("reference", monkeypatch)
    exact = gradients(function, x.to(FP64), weight.to(FP64), bias.to(FP64), dy=dy)
    narrow = gradients(function, x, weight, bias, dy=dy)
    names = ("dx", "dweight", "dbias")
    for name, y, y64, z in zip(names, got, exact, narrow, strict=True):
        assert_within_budget(name, y, y64, z, dtype=dtype, unit=UNIT32)


@pytest.mark.gpu("real sizes, more runs of tokens than one, a strided gradient")
def test_gradients_at_a_real_size(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = make(9000, 1500, dtype=BF16, device=device)
    dy = torch.randn(1500, 9000).to(device, BF16).t()
    cu_seqlens = torch.tensor([0, 1000, 1003, 8950], device=device)

    def function(*tensors: Tensor) -> Tensor:
        return causal_conv1d(*tensors, cu_seqlens=cu_seqlens)

    on("triton", monkeypatch)
    got = gradients(function, x, weight, bias, dy=dy)
    again = gradients(function, x, weight, bias, dy=dy)
    assert all(same_bits(y, z) for y, z in zip(got, again, strict=True))
    on("reference", monkeypatch)
    exact = gradients(function, x.to(FP64), weight.to(FP64), bias.to(FP64), dy=dy)
    narrow = gradients(function, x, weight, bias, dy=dy)
    for name, y, y64, z in zip(("dx", "dweight", "dbias"), got, exact, narrow, strict=True):
        assert_within_budget(name, y, y64, z, dtype=BF16, unit=UNIT32)


def test_gradients_from_a_state(device: str) -> None:
    """By the reference, with the state a constant; it is written."""
    x, weight, bias = make(5, 6, dtype=FP64, device=device, batch=2)
    state = torch.randn(2, 6, 3, dtype=FP64, device=device)
    dy = torch.randn_like(x)
    before = state.clone()

    def with_state(*tensors: Tensor) -> Tensor:
        return causal_conv1d(*tensors, state=state)

    def earlier(*tensors: Tensor) -> Tensor:
        return reference_conv.causal_conv1d(*tensors, state=before)

    got = gradients(with_state, x, weight, bias, dy=dy)
    for y, z in zip(got, gradients(earlier, x, weight, bias, dy=dy), strict=True):
        assert torch.allclose(y, z, rtol=1e-12, atol=1e-12)
    assert torch.equal(state, x[:, -3:].mT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [0, 5])
def test_gradients_without_sequences(
    T: int, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are 0: y hangs on every input."""
    on(backend, monkeypatch)
    offsets = torch.zeros(1, dtype=torch.int32, device=device)

    def function(*tensors: Tensor) -> Tensor:
        return causal_conv1d(*tensors, cu_seqlens=offsets)

    tensors = make(T, 6, device=device, batch=1)
    for x, dx in zip(
        tensors, gradients(function, *tensors, dy=torch.ones(1, T, 6, device=device)), strict=True
    ):
        assert dx.shape == x.shape and not dx.any()


def test_what_skipped_sequences_hold_reaches_no_gradient(device: str) -> None:
    x, weight, bias = make(5, 6, device=device, batch=3)
    state = torch.randn(3, 6, 3, device=device)
    slots = torch.tensor([2, -1, 0], device=device)
    dy = torch.randn(3, 5, 6, device=device)

    def function(*tensors: Tensor) -> Tensor:
        return causal_conv1d(*tensors, state=state.clone(), read_slots=slots)

    expected = gradients(function, x, weight, bias, dy=dy)
    x[1], dy[1] = torch.nan, torch.nan
    for y, z in zip(gradients(function, x, weight, bias, dy=dy), expected, strict=True):
        assert same_bits(y, z)
    assert not expected[0][1].any()


def test_the_reference_s_backward_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that it writes to memory are twice as many for twice as many sequences."""
    on("reference", monkeypatch)

    def made(N: int) -> int:
        x, weight, bias = (y.requires_grad_() for y in make(4 * N, 32))
        y = causal_conv1d(x, weight, bias, cu_seqlens=torch.arange(0, 4 * N + 1, 4))
        return memory_of(y.sum().backward).made

    made(2)  # what is made once in a process
    assert made(64) < 2.2 * made(32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_changes_no_gradient(
    backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The convolution alone, and with the preparation, with backward inside and outside of
    autocast."""
    on(backend, monkeypatch)
    x, weight, bias = make(9, 6, device=device)
    args = make_prep((9, 1, 2, 4, 4), dtype=FP32, device=device)

    def both(autocast: bool) -> list[Tensor]:
        leaves = [y.detach().requires_grad_() for y in (x, weight, bias, *args[:6])]
        y = causal_conv1d(*leaves[:3])
        monkeypatch.setenv("GDN_BACKEND", "reference")  # the preparation's gradients are its
        prepared = fused_conv_prep(*leaves[3:], *args[6:])
        monkeypatch.setenv("GDN_BACKEND", backend)
        with torch.autocast(device, BF16, enabled=autocast):
            loss = y.square().sum() + sum(z.square().sum() for z in prepared)
            return list(torch.autograd.grad(loss, leaves))

    for got, expected in zip(both(True), both(False), strict=True):
        assert same_bits(got, expected)


def test_gradients_through_the_preparation(device: str) -> None:
    """Those of the reference, whatever runs."""
    args = make_prep((9, 1, 2, 4, 4), dtype=FP32, device=device, batch=2)

    def loss(*tensors: Tensor, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).detach().requires_grad_() for x in tensors]
        q, k, v, g, beta = fused_conv_prep(*leaves, *args[6:])
        (q.sin().sum() + (k[..., :2] * v[..., :1, :2]).sum() + (g * beta).sum()).backward()
        return [x.grad for x in leaves if x.grad is not None]

    got, exact = loss(*args[:6], dtype=FP32), loss(*args[:6], dtype=FP64)
    assert len(got) == len(exact) == 6
    for y, z in zip(got, exact, strict=True):
        assert torch.allclose(y.to(FP64), z, rtol=1e-4, atol=1e-5)
