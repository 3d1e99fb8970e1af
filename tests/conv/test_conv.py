"""`gdn_triton.causal_conv1d`, its step and `fused_conv_prep`: the reference against torch's conv1d,
the kernels against the reference in float64 and against each other to the last bit, states and
slots, gradients, errors and choices, the operators under a compiler."""

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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

UNIT32 = 2.0**-24
BACKENDS = ["triton", "reference"]
PREPARED = ("q", "k", "v", "g", "beta")

# Packed: empty sequences first, between and last; fewer tokens than taps; boundaries inside of a
# block of tokens, on its last token and on its end; rows of no sequence.
LENGTHS = (0, 1, 2, 61, 5, 0, 3, 57, 64, 0)
ORPHANS = 6
REAL = pytest.mark.gpu("a real size, for the compiled kernel")


def make(
    T: int, D: int, W: int = 4, *, dtype: torch.dtype = FP32, device: str = "cpu", batch: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, D] or [batch, T, D], weight, bias."""
    x = torch.randn(*((batch,) if batch else ()), T, D)
    weight, bias = torch.randn(D, W), torch.randn(D)
    return x.to(device, dtype), weight.to(device, dtype), bias.to(device, dtype)


def packed(device: str = "cpu", dtype: torch.dtype = torch.int32) -> tuple[int, Tensor]:
    """T and cu_seqlens of `LENGTHS`."""
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).to(device, dtype)
    return sum(LENGTHS) + ORPHANS, cu_seqlens


def in_layout(x: Tensor, layout: str) -> Tensor:
    """x [.., T, D], with NaN around it where it is a view."""
    if layout == "dense":
        return x
    if layout == "channel-major":
        return x.mT.contiguous().mT
    if layout == "strided":
        around = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan).to(x)
        around[..., ::2] = x
        return around[..., ::2]
    before, after = {"view": (16, 8), "odd-view": (3, 4)}[layout]
    around = F.pad(x, (before, after), value=torch.nan)
    return around[..., before : before + x.shape[-1]]


def on(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", backend)


def check(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> None:
    """Against `reference_conv` of one sequence or of a padded batch."""
    wide = [None if y is None else y.to(FP64) for y in (x, weight, bias)]
    state = options.get("state")
    exact = reference_conv.causal_conv1d(
        *wide, **{**options, "state": None if state is None else state.to(FP64)}
    )
    narrow = reference_conv.causal_conv1d(x, weight, bias, **options)
    assert got.is_contiguous()
    assert_within_budget("y", got, exact, narrow, dtype=x.dtype, unit=UNIT32)


# ------------------------------------------------------------------------------------ the reference


@pytest.mark.parametrize("W", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_reference_is_torch_s_convolution(W: int, with_bias: bool, with_state: bool) -> None:
    x, weight, bias = make(9, 5, W, dtype=FP64, batch=2)
    state = torch.randn(2, 5, W - 1, dtype=FP64) if with_state else x.new_zeros(2, 5, W - 1)
    b = bias if with_bias else None
    tokens = torch.cat([state, x.mT], -1)
    expected = F.silu(F.conv1d(tokens, weight[:, None], b, groups=5)).mT
    got = reference_conv.causal_conv1d(x, weight, b, state=state if with_state else None)
    assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_reference_rounds_once(dtype: torch.dtype) -> None:
    x, weight, bias = make(20, 7, dtype=dtype)
    exact = reference_conv.causal_conv1d(x.to(FP64), weight, bias)
    got = reference_conv.causal_conv1d(x, weight, bias)
    error = (got.to(FP64) - exact).abs()
    assert got.dtype == dtype
    assert (error <= 0.51 * torch.finfo(dtype).eps * exact.abs() + 1e-6).all()


def test_gradients_of_the_reference() -> None:
    x, weight, bias = (y.requires_grad_() for y in make(6, 3, 3, dtype=FP64))
    cu_seqlens = torch.tensor([0, 1, 1, 5])

    def function(*tensors: Tensor) -> Tensor:
        return causal_conv1d(*tensors, cu_seqlens=cu_seqlens)

    assert torch.autograd.gradcheck(function, (x, weight, bias))


# -------------------------------------------------------------------------------------- the kernels


@pytest.mark.parametrize(
    ("T", "D"),
    # One token; below, at and above a block of 64; channels of no power of two, an odd number.
    [
        (1, 16),
        (63, 40),
        (64, 64),
        (65, 7),
        (130, 20),
        pytest.param(2048, 8192, marks=REAL),
        pytest.param(4099, 1500, marks=REAL),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel(
    T: int, D: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on("triton", monkeypatch)
    x, weight, bias = make(T, D, dtype=dtype, device=device)
    check(causal_conv1d(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("with_bias", [False, True])
def test_options(
    W: int,
    activation: str | None,
    with_bias: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on("triton", monkeypatch)
    x, weight, bias = make(70, 24, W, device=device, batch=2)
    b = bias if with_bias else None
    got = causal_conv1d(x, weight, b, activation)
    check(got, x, weight, b, silu=activation is not None)


@pytest.mark.parametrize("layout", ["dense", "view", "odd-view", "channel-major", "strided"])
@pytest.mark.parametrize("batch", [0, 2])
def test_layouts(layout: str, batch: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of x; and a weight whose channels are dense, which has the same bits."""
    on("triton", monkeypatch)
    x, weight, bias = make(70, 24, dtype=FP16, device=device, batch=batch)
    got = causal_conv1d(in_layout(x, layout), weight.t().contiguous().t(), bias)
    check(got, x, weight, bias)
    assert same_bits(got, causal_conv1d(x, weight, bias))


def test_values_far_out(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """silu of very large and very small sums; NaN stays within W tokens of its channel."""
    on("triton", monkeypatch)
    weight = torch.tensor([[0.0, 0.0, 0.0, 1.0]], device=device)
    x = torch.tensor([-3e38, -200.0, -88.0, -20.0, 0.0, 20.0, 3e38], device=device)[:, None]
    y = causal_conv1d(x, weight)
    exact = F.silu(x.to(FP64))
    assert ((y - exact).abs() <= 2.0**-20 * exact.abs() + 1e-35).all()
    x, weight, bias = make(70, 8, device=device)
    x[30, 5] = torch.nan
    bad = torch.zeros(70, 8, dtype=torch.bool, device=device)
    bad[30:34, 5] = True
    assert torch.equal(causal_conv1d(x, weight, bias).isnan(), bad)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_packed_is_each_sequence_alone(
    backend: str, index_dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, also between neighbours of NaN; the rows of no sequence are 0."""
    on(backend, monkeypatch)
    T, cu_seqlens = packed(device, index_dtype)
    x, weight, bias = make(T, 20, device=device)
    ends = cu_seqlens.tolist()
    spans = [slice(*span) for span in itertools.pairwise(ends) if span[0] < span[1]]
    alone = [causal_conv1d(x[span], weight, bias) for span in spans]
    x[ends[-1] :] = torch.nan
    for kept in (0, 1):
        others = x.clone()
        for span in spans[1 - kept :: 2]:
            others[span] = torch.nan
        got = causal_conv1d(others, weight, bias, cu_seqlens=cu_seqlens)
        for span, expected in list(zip(spans, alone, strict=True))[kept::2]:
            assert same_bits(got[span], expected), span
        assert (got[ends[-1] :] == 0).all()


@pytest.mark.parametrize("most", [1, 3, 9])
def test_sequences_of_few_tokens(most: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many in a block, so that they start at all of its rows, each from its state. Results
    and states are those of the update, which walks over each sequence by itself."""
    on("triton", monkeypatch)
    lengths = torch.full((70,), 1) if most == 1 else torch.randint(0, most + 1, (180 // most,))
    N = len(lengths)
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(device)
    x, weight, bias = make(int(cu_seqlens[-1]) + 3, 12, dtype=FP16, device=device)
    slots = torch.randperm(N).to(device)
    slots[::7] = -1
    flags = torch.arange(N, device=device) % 3 != 0
    options = {"read_slots": slots, "has_initial_state": flags, "cu_seqlens": cu_seqlens}
    pool = torch.randn(N, 12, 3).to(device, FP16)
    state, expected_state = pool.clone(), pool.clone()
    y = causal_conv1d(x, weight, bias, state=state, **options)
    expected = causal_conv1d_update(x, weight, bias, state=expected_state, **options)
    assert same_bits(y, expected) and same_bits(state, expected_state)
    assert (y != 0).any() and not same_bits(state, pool)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_do(backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on(backend, monkeypatch)
    x, weight, bias = make(0, 6, device=device)
    assert causal_conv1d(x, weight, bias).shape == (0, 6)
    state = torch.randn(4, 6, 3, device=device)
    before = state.clone()
    cu_seqlens = torch.zeros(3, dtype=torch.int32, device=device)
    slots = torch.tensor([[0, 1], [2, 3]], device=device)
    # Two empty sequences: their states go from slot to slot, the second one from zeros.
    flags = torch.tensor([True, False], device=device)
    options = {"read_slots": slots[0], "write_slots": slots[1], "has_initial_state": flags}
    y = causal_conv1d(x, weight, bias, state=state, cu_seqlens=cu_seqlens, **options)
    assert y.shape == (0, 6)
    assert torch.equal(state[:3], before[[0, 1, 0]]) and (state[3] == 0).all()


# ------------------------------------------------------------------------------------------- states


def make_pool(slots: int, D: int, W: int, dtype: torch.dtype, layout: str, device: str) -> Tensor:
    pool = torch.randn(slots, D, W - 1).to(device, dtype)
    return pool if layout == "taps dense" else pool.mT.contiguous().mT


@pytest.mark.parametrize("function", [causal_conv1d, causal_conv1d_update])
@pytest.mark.parametrize(
    ("W", "layout"),
    [(2, "taps dense"), (3, "channels dense"), (4, "taps dense"), (4, "channels dense")],
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_states(
    function: Callable[..., Tensor],
    W: int,
    layout: str,
    is_packed: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slots in any order, some of them padding, some sequences from zeros: result and pool are the
    reference's, and slots that nobody names are untouched."""
    if is_packed:
        T, cu_seqlens = packed(device)
        x, weight, bias = make(T, 12, W, dtype=FP16, device=device)
        N = len(LENGTHS)
    else:
        cu_seqlens, N = None, 4
        x, weight, bias = make(67, 12, W, dtype=FP16, device=device, batch=N)
    pool = make_pool(3 * N, 12, W, FP16, layout, device)
    order = torch.randperm(3 * N)
    read, write = order[:N].clone(), order[N : 2 * N].clone()
    read[1] = write[2] = -1
    read, write = read.to(device), write.to(device)
    flags = torch.arange(N, device=device) % 3 != 0
    options = {"read_slots": read, "write_slots": write, "has_initial_state": flags}
    results = []
    for backend in BACKENDS:
        on(backend, monkeypatch)
        # A copy has the strides of what it copies.
        state = pool.clone()
        assert state.stride() == pool.stride()
        y = function(x, weight, bias, state=state, cu_seqlens=cu_seqlens, **options)
        results.append((y, state))
    (y, state), (expected, expected_state) = results
    assert torch.allclose(y, expected, rtol=2.0**-10, atol=1e-4)
    assert same_bits(state.contiguous(), expected_state.contiguous())
    untouched = torch.ones(3 * N, dtype=torch.bool, device=device)
    untouched[write[(write >= 0) & (read >= 0)]] = False
    assert torch.equal(state[untouched], pool[untouched])
    skipped = y[int(cu_seqlens[1]) : int(cu_seqlens[2])] if cu_seqlens is not None else y[1]
    assert (skipped == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wide", [False, True])
def test_tokens_one_by_one(
    backend: str, wide: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt, then tokens one by one, in place, have the bits of all at once, and leave the same
    state; also in a state of a wider dtype."""
    on(backend, monkeypatch)
    N, T, D = 3, 9, 20
    x, weight, bias = make(T, D, dtype=FP16, device=device, batch=N)
    whole = causal_conv1d(x, weight, bias)
    pool = torch.zeros(5, D, 3, dtype=FP32 if wide else FP16, device=device)
    options = {"state": pool, "read_slots": torch.tensor([3, 0, 4], device=device)}
    parts = [causal_conv1d(x[:, :2], weight, bias, **options)]
    for t in range(2, 5):
        parts.append(causal_conv1d_update(x[:, t], weight, bias, **options)[:, None])
    parts.append(causal_conv1d_update(x[:, 5:8], weight, bias, **options))
    parts.append(causal_conv1d(x[:, 8:], weight, bias, **options))
    assert same_bits(torch.cat(parts, 1), whole)
    assert torch.equal(pool[[3, 0, 4]], x[:, -3:].mT.to(pool.dtype))
    assert (pool[[1, 2]] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [causal_conv1d, causal_conv1d_update])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_state_after_each_token(
    backend: str,
    function: Callable[..., Tensor],
    is_packed: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slot of a token has what a call up to that token leaves; the first overwrites the slot
    that is read."""
    on(backend, monkeypatch)
    N, T, D = 2, 5, 12
    x, weight, bias = make(T, D, device=device, batch=N)
    pool = torch.randn(N + N * T, D, 3, device=device)
    read = torch.arange(N, device=device)
    every = N + torch.arange(N * T, device=device).view(N, T)
    every[:, 0] = read
    every[0, 2] = -1
    expected = pool.clone()
    for t in range(T):
        after = pool.clone()
        write = every[:, t]
        causal_conv1d_update(x[:, : t + 1], weight, state=after, read_slots=read, write_slots=write)
        expected[write[write >= 0]] = after[write[write >= 0]]
    options: dict[str, Any] = {"read_slots": read, "write_slots": every}
    if is_packed:
        options["write_slots"] = every.view(1, -1)
        options["cu_seqlens"] = torch.arange(0, N * T + 1, T, device=device)
        x = x.flatten(0, 1)
    function(x, weight, bias, state=pool, **options)
    assert same_bits(pool, expected)


@pytest.mark.parametrize("function", [causal_conv1d, causal_conv1d_update])
def test_slot_zero_is_nobody_s(function: Callable[..., Tensor], device: str) -> None:
    x, weight, bias = make(2, 6, device=device, batch=3)
    pool = torch.randn(3, 6, 3, device=device)
    before = pool.clone()
    slots = torch.tensor([2, 0, 1], device=device)
    y = function(x, weight, bias, state=pool, read_slots=slots, skip="non_positive")
    assert (y[1] == 0).all() and torch.equal(pool[0], before[0])
    assert y[0].all() and not torch.equal(pool[2], before[2])


def test_states_without_slots(device: str) -> None:
    x, weight, bias = make(5, 6, device=device, batch=3)
    pool = torch.randn(3, 6, 3, device=device)
    expected = pool.clone()
    y = causal_conv1d(x, weight, bias, state=pool)
    slots = torch.arange(3, device=device)
    assert same_bits(y, causal_conv1d(x, weight, bias, state=expected, read_slots=slots))
    assert same_bits(pool, expected)


# ---------------------------------------------------------------------------- with the preparation


def make_prep(
    shape: tuple[int, ...], *, device: str = "cpu", dtype: torch.dtype = FP32, batch: int = 0
) -> tuple[Any, ...]:
    """mixed_qkv, weight, a, b, A_log, dt_bias, H, K, V; a and b are strided in both dimensions."""
    T, H, HV, K, V = shape
    x, weight, _ = make(T, 2 * H * K + HV * V, dtype=dtype, device=device, batch=batch)
    gates = torch.randn(*x.shape[:-1], 2, HV, 2, device=device)
    a, b = gates[..., 0, :, 1], gates[..., 1, :, 1]
    A_log, dt_bias = torch.randn(2, HV, device=device)
    return x, weight, a, b, A_log, dt_bias, H, K, V


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
    """What it writes to memory: twice for twice as many sequences."""
    on("reference", monkeypatch)

    def made(N: int) -> int:
        x, weight, bias = (y.requires_grad_() for y in make(4 * N, 32))
        y = causal_conv1d(x, weight, bias, cu_seqlens=torch.arange(0, 4 * N + 1, 4))
        return memory_of(y.sum().backward).made

    made(2)  # what is made once in a process
    assert made(64) < 2.2 * made(32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_changes_no_gradient(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the convolution, and of it and the preparation, wherever backward is called."""
    on(backend, monkeypatch)
    x, weight, bias = make(9, 6)
    args = make_prep((9, 1, 2, 4, 4), dtype=FP32)

    def both(autocast: bool) -> list[Tensor]:
        leaves = [y.detach().requires_grad_() for y in (x, weight, bias, *args[:6])]
        y = causal_conv1d(*leaves[:3])
        monkeypatch.setenv("GDN_BACKEND", "reference")  # the preparation's gradients are its
        prepared = fused_conv_prep(*leaves[3:], *args[6:])
        monkeypatch.setenv("GDN_BACKEND", backend)
        with torch.autocast("cpu", BF16, enabled=autocast):
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


# ------------------------------------------------------------------------------------- the contract


def call_args() -> dict[str, Any]:
    x, weight, bias = make(4, 6, batch=2)
    state, slots = torch.randn(5, 6, 3), torch.tensor([3, 1])
    return {"x": x, "weight": weight, "bias": bias, "state": state, "read_slots": slots}


def test_signatures() -> None:
    ours = inspect.signature(causal_conv1d).parameters
    required = inspect.Parameter.empty
    assert [(p.name, p.default) for p in ours.values()] == [
        ("x", required),
        ("weight", required),
        ("bias", None),
        ("activation", "silu"),
        ("state", None),
        ("read_slots", None),
        ("write_slots", None),
        ("has_initial_state", None),
        ("skip", "negative"),
        ("cu_seqlens", None),
    ]
    update = inspect.signature(causal_conv1d_update).parameters
    assert list(update) == list(ours) and update["state"].default is required
    fused = inspect.signature(fused_conv_prep).parameters
    assert [fused[name].default for name in list(ours)[2:]] == [p.default for p in ours.values()][
        2:
    ]


WRONG = [
    ("x", None, TypeError, "x must be a torch.Tensor, got NoneType"),
    ("x", torch.zeros(4), ValueError, r"x must have shape \[T, D\] or \[B, T, D\], got"),
    (
        "x",
        torch.zeros(2, 4, 6, dtype=torch.int32),
        ValueError,
        "x must be float16, .* got torch.int",
    ),
    ("weight", torch.zeros(6), ValueError, r"weight must have 2 dimensions \[D, W\]"),
    ("weight", torch.zeros(5, 4), ValueError, r"weight must have shape \[D=6, W >= 1\], got"),
    (
        "weight",
        torch.zeros(6, 4, device="meta"),
        ValueError,
        "weight must be on the device of x, cpu",
    ),
    ("bias", torch.zeros(5), ValueError, r"bias must have shape \[D=6\], got shape \[5\]"),
    ("bias", 0.0, TypeError, "bias must be a torch.Tensor or None, got float"),
    ("activation", "swish", ValueError, "activation must be \"silu\" or None, got 'swish'"),
    ("activation", True, ValueError, "activation must be"),
    ("skip", "zero", ValueError, "skip must be one of negative, non_positive, got 'zero'"),
    ("state", torch.zeros(5, 6, 2), ValueError, r"state must have shape \[slots, D=6, W - 1=3\]"),
    ("state", torch.zeros(5, 6, 3, dtype=FP16), ValueError, "state must have a dtype that holds"),
    (
        "state",
        torch.zeros(1, 6, 3).expand(5, 6, 3),
        ValueError,
        "state must have memory of its own",
    ),
    ("state", None, ValueError, "read_slots must be None without state"),
    ("state", torch.zeros(5, 6, 3).requires_grad_(), NotImplementedError, "state is updated in pl"),
    ("read_slots", None, ValueError, "state must have a slot for each of the N=2 sequences"),
    ("read_slots", torch.tensor([1]), ValueError, r"read_slots must have shape \[N=2\]"),
    ("read_slots", torch.tensor([1.0, 2.0]), ValueError, "read_slots must be int32 or int64"),
    ("read_slots", torch.tensor([1, 5]), ValueError, "read_slots must be less than the 5 slots"),
    ("read_slots", torch.tensor([1, 1]), ValueError, "read_slots must name no slot twice"),
    ("write_slots", torch.tensor([1, 4]), ValueError, "read_slots must read no slot that another"),
    (
        "write_slots",
        torch.zeros(2, 3),
        ValueError,
        r"write_slots must have shape \[2\], .* \[2, 4\]",
    ),
    ("has_initial_state", torch.ones(3), ValueError, r"has_initial_state must have shape \[N=2\]"),
    ("has_initial_state", torch.ones(2), ValueError, "has_initial_state must be bool, got"),
    ("cu_seqlens", torch.tensor([0, 4]), ValueError, r"x must have shape .* with cu_seqlens"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), WRONG)
def test_wrong_arguments(name: str, value: Any, error: type[Exception], message: str) -> None:
    args = call_args()
    causal_conv1d(**args)
    before = args["state"].clone()
    given = {**args, name: value}
    with pytest.raises(error, match=message):
        causal_conv1d(**given)
    assert torch.equal(args["state"], before)


def test_wrong_offsets() -> None:
    x, weight, _ = make(8, 6)
    with pytest.raises(ValueError, match="cu_seqlens must end at or before T=8, got 9"):
        causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 9]))
    with pytest.raises(ValueError, match=r"cu_seqlens must have shape \[N \+ 1\]"):
        causal_conv1d(x, weight, cu_seqlens=torch.zeros(1, 2, dtype=torch.int32))


def test_wrong_arguments_of_the_others() -> None:
    args = call_args()
    with pytest.raises(TypeError, match="state"):
        causal_conv1d_update(args["x"], args["weight"])
    with pytest.raises(ValueError, match=r"x must have shape \[N, D\] or \[N, T, D\]"):
        causal_conv1d_update(**{**args, "x": torch.zeros(6)})
    args["x"].requires_grad_()
    with pytest.raises(NotImplementedError, match="causal_conv1d_update has no gradient"):
        causal_conv1d_update(**args)
    prep = list(make_prep((5, 1, 2, 4, 4), batch=2))
    with pytest.raises(ValueError, match=r"a must have shape \[B=2, T=5, HV=2\], got"):
        fused_conv_prep(*prep[:2], torch.zeros(2, 4, 2), *prep[3:])
    with pytest.raises(ValueError, match=r"mixed_qkv must have 2 .* = 18 columns"):
        fused_conv_prep(*prep[:8], 5)
    with pytest.raises(TypeError, match="apply_l2norm must be True or False"):
        fused_conv_prep(*prep, apply_l2norm=1)
    with pytest.raises(ValueError, match="mixed_qkv must have shape"):
        fused_conv_prep(torch.zeros(16), *prep[1:])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("float64", "one of the inputs is float64"),
        ("weight64", "one of the inputs is float64"),
        ("W", "take 2, 3 or 4 taps; the weight has 5"),
        ("grad", "The Triton backward starts from no state"),
    ],
)
def test_triton_refuses(
    change: str, reason: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    W = 5 if change == "W" else 4
    x, weight, bias = make(5, 6, W, device=device, batch=2)
    x = x.to(FP64) if change == "float64" else x
    weight = weight.to(FP64) if change == "weight64" else weight
    x.requires_grad_(change == "grad")
    pool = torch.randn(2, 6, W - 1, dtype=x.dtype, device=device)
    before = pool.clone()
    on("triton", monkeypatch)
    with pytest.raises(RuntimeError, match=f"GDN_BACKEND=triton cannot run this call.*{reason}"):
        causal_conv1d(x, weight, bias, state=pool)
    assert torch.equal(pool, before)
    on("auto", monkeypatch)
    y = causal_conv1d(x, weight, bias, state=pool)
    assert torch.equal(y, reference_conv.causal_conv1d(x, weight, bias, state=before))


def test_named_triton_and_gradients_of_the_preparation(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before the states are written."""
    args = make_prep((5, 1, 2, 4, 4), device=device)
    args[0].requires_grad_()
    pool = torch.randn(1, 16, 3, device=device)
    before = pool.clone()
    on("triton", monkeypatch)
    with pytest.raises(RuntimeError, match="GDN_BACKEND=triton cannot run this call"):
        fused_conv_prep(*args, state=pool)
    assert torch.equal(pool, before)


@pytest.mark.parametrize("function", [causal_conv1d, causal_conv1d_update, fused_conv_prep])
def test_backends_by_name(
    function: Callable[..., Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = make_prep((5, 1, 2, 4, 4), device=device)
    given = args if function is fused_conv_prep else args[:2]
    options = {}
    if function is causal_conv1d_update:
        options["state"] = torch.zeros(5, 16, 3, device=device)
    on("tritn", monkeypatch)
    with pytest.raises(ValueError, match=r"GDN_BACKEND must be one of .*, got 'tritn'"):
        function(*given, **options)


# ----------------------------------------------------------------------------------- on the device


@pytest.mark.gpu("a CUDA graph")
def test_replay_of_a_graph_follows_its_inputs(device: str) -> None:
    """Contents, slots, flags and offsets, each read on the device."""
    T, cu_seqlens = packed(device)
    args = make_prep((T, 2, 4, 64, 64), dtype=BF16, device=device)
    N, D = len(LENGTHS), args[0].shape[1]
    pool = torch.randn(2 * N, 3, D, dtype=BF16, device=device).mT
    slots, flags = torch.arange(N, device=device), torch.ones(N, dtype=torch.bool, device=device)
    options = {"read_slots": slots, "has_initial_state": flags, "cu_seqlens": cu_seqlens}
    step = {"read_slots": slots}
    token = torch.randn(N, D, dtype=BF16, device=device)

    def run(state: Tensor) -> list[Tensor]:
        y = causal_conv1d_update(token, args[1], state=state, **step)
        return [*fused_conv_prep(*args, state=state, **options), y]

    run(pool.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(pool)
    for _ in range(2):
        for x in (*args[:6], token):
            x.normal_()
        slots.copy_(torch.randperm(2 * N)[:N])
        flags.copy_(torch.rand(N) < 0.5)
        cu_seqlens[1:-1] = torch.randint(0, T, (N - 1,)).sort().values
        cu_seqlens[-1] = T
        expected_pool = pool.clone()
        expected = run(expected_pool)
        graph.replay()
        assert all(same_bits(y, z) for y, z in zip(got, expected, strict=True))
        assert same_bits(pool.contiguous(), expected_pool.contiguous())


@pytest.mark.gpu("more than 2^31 elements")
@pytest.mark.parametrize("layout", ["dense", "channel-major"])
def test_offsets_above_32_bits(layout: str, device: str) -> None:
    T, H, HV, K, V = 300_000, 16, 32, 128, 128
    D = 2 * H * K + HV * V
    x = torch.zeros(T, D, dtype=BF16, device=device)
    if layout == "channel-major":
        x = torch.zeros(D, T, dtype=BF16, device=device).t()
    small = make_prep((64, H, HV, K, V), dtype=BF16, device=device)
    a, b = torch.zeros(2, T, HV, device=device)
    x[-64:], a[-64:], b[-64:] = small[0], small[2], small[3]
    got = fused_conv_prep(x, small[1], a, b, *small[4:])
    expected = fused_conv_prep(*small)
    for name, y, z in zip(PREPARED, got, expected, strict=True):
        assert torch.allclose(y[-64:].float(), z.float(), rtol=2.0**-7, atol=0), name


@pytest.mark.gpu("a pool of more than 2^31 elements")
@pytest.mark.parametrize("layout", ["taps dense", "channels dense"])
def test_pools_above_32_bits(layout: str, device: str) -> None:
    slots, D = 100_000, 8192
    pool = torch.zeros(slots, D, 3, dtype=BF16, device=device)
    if layout == "channels dense":
        pool = torch.zeros(slots, 3, D, dtype=BF16, device=device).mT
    x, weight, bias = make(2, D, dtype=BF16, device=device, batch=2)
    small = torch.randn(2, D, 3, device=device).to(BF16)
    pool[-2:] = small
    read = torch.tensor([slots - 2, slots - 1], device=device)
    y = causal_conv1d_update(x, weight, bias, state=pool, read_slots=read)
    assert same_bits(y, causal_conv1d(x, weight, bias, state=small))
    assert torch.equal(pool[-2:], small)


@pytest.mark.two_gpus("tensors on a device that is not the current one")
def test_on_another_device() -> None:
    args = make_prep((70, 2, 4, 16, 16), dtype=BF16, device="cuda:1")
    with torch.cuda.device(0):
        got = fused_conv_prep(*args)
        assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        expected = fused_conv_prep(*args)
    assert all(same_bits(y, z) for y, z in zip(got, expected, strict=True))


# ------------------------------------------------------------------------------------- the compiler


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return torch.compile(call, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("with_state", [False, True])
def test_compiled_equals_eager(
    backend: str,
    with_state: bool,
    device: str,
    fresh_compiler: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(backend, monkeypatch)
    args = make_prep((6, 1, 2, 4, 4), device=device, batch=2)
    slots = torch.tensor([2, 0], device=device)
    pool = torch.randn(3, 16, 3, device=device)
    pools = [pool, pool.clone()]
    functions = [(causal_conv1d, args[:2]), (fused_conv_prep, args)]
    if with_state:
        functions.append((causal_conv1d_update, args[:2]))
    for function, given in functions:
        results = []
        for run, pool in ((function, pools[0]), (compiled(function), pools[1])):
            options = {"state": pool, "read_slots": slots} if with_state else {}
            y = run(*given, **options)
            results.append([y] if isinstance(y, Tensor) else list(y))
        for y, z in zip(*results, strict=True):
            assert y.stride() == z.stride() and same_bits(y, z)
        assert same_bits(*pools)


def test_compiled_gradients(device: str, fresh_compiler: None) -> None:
    """Of the convolution, and through the preparation, which are then an operator each."""
    args = make_prep((6, 1, 2, 4, 4), device=device)

    def of(function: Callable[..., Any]) -> list[Tensor | None]:
        tensors = [x.detach().requires_grad_(i != 1) for i, x in enumerate(args[:6])]
        q, k, v, g, beta = function(*tensors, *args[6:])
        (q.sin().sum() + (k * 2).sum() + v.square().sum() + (g * beta).sum()).backward()
        return [x.grad for x in tensors]

    for y, z in zip(of(compiled(fused_conv_prep)), of(fused_conv_prep), strict=True):
        assert (y is None) == (z is None)
        if y is not None and z is not None:
            assert torch.allclose(y, z, rtol=1e-5, atol=1e-6)


def test_one_graph_for_every_length(device: str, fresh_compiler: None) -> None:
    """With a state, which is written."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(fused_conv_prep, fullgraph=True, backend=counter)
    pools = [torch.randn(1, 16, 3, device=device) for _ in range(2)]
    pools[1].copy_(pools[0])
    for T in (9, 5, 7):
        args = make_prep((T, 1, 2, 4, 4), device=device)
        expected = fused_conv_prep(*args, state=pools[0])
        got = run(*args, state=pools[1])
        assert all(same_bits(y, z) for y, z in zip(got, expected, strict=True))
        assert same_bits(*pools)
    # The first T is a constant until there is a second.
    assert counter.frame_count == 2


def test_no_gradient_from_a_state_under_a_compiler(fresh_compiler: None) -> None:
    args = call_args()
    args["x"].requires_grad_()
    with pytest.raises(Exception, match="with a state has no gradient under a compiler"):
        compiled(causal_conv1d)(**args)


def test_operators_pass_the_library_s_checks(device: str) -> None:
    import gdn_triton.conv.operators  # noqa: F401  (registers the operators)

    x, weight, bias = make(9, 6, device=device)
    cu_seqlens = torch.tensor([0, 4, 9], device=device)
    operators = torch.ops.gdn_triton
    leaves = [y.clone().requires_grad_() for y in (x, weight, bias)]
    torch.library.opcheck(operators.causal_conv1d.default, (*leaves, "silu", cu_seqlens))
    state = torch.randn(2, 6, 3, device=device)
    stateful = (x, weight, bias, None, state, None, None, None, "negative", cu_seqlens, False)
    torch.library.opcheck(operators.causal_conv1d_state.default, stateful)
    prep = make_prep((6, 1, 2, 4, 4), device=device)
    rest = (*prep[2:6], *prep[6:], True, False)
    torch.library.opcheck(operators.fused_conv_prep.default, (*prep[:2], None, "silu", None, *rest))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("skip", 1, "skip must be one of"),
        ("activation", "relu", "activation must be"),
        ("bias", torch.zeros(4), "bias must have shape"),
    ],
)
def test_wrong_arguments_under_a_compiler(
    name: str, value: Any, message: str, fresh_compiler: None
) -> None:
    with pytest.raises(Exception, match=message):
        compiled(causal_conv1d)(**{**call_args(), name: value})
