"""`gdn_triton.causal_conv1d`, its step and `fused_conv_prep`: the reference against torch's conv1d,
the kernels against the reference in float64 and against each other to the last bit, states and
slots, gradients, errors and choices, the operators under a compiler."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conv_cases import BACKENDS, LENGTHS, REAL, UNIT32, in_layout, make, on, packed
from helpers import BF16, DTYPES, FP16, FP32, FP64, assert_within_budget, same_bits
from torch import Tensor

from gdn_triton import (
    causal_conv1d,
    causal_conv1d_update,
)
from gdn_triton.reference import conv as reference_conv


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
    """x has each layout, and the weight is transposed in memory."""
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


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float16, torch.float16),
                                    (torch.float16, torch.float32)])  # fmt: skip
@pytest.mark.parametrize("W", [2, 3, 4])
def test_where_states_and_taps_lie_changes_no_bit(
    W: int, dtypes: tuple[torch.dtype, torch.dtype], device: str
) -> None:
    """D is no multiple of a thread's run of channels, and more than one program has."""
    D, N, T = 267, 3, 2
    x, weight, bias = make(T, D, W, dtype=dtypes[0], device=device, batch=N)
    pool = torch.randn(N + 1, D, W - 1).to(device, dtypes[1])
    slots = torch.tensor([3, -1, 0], device=device)
    apart = torch.zeros(N + 1, D, W, dtype=dtypes[1], device=device)[..., : W - 1]
    layouts: list[Tensor] = [pool.clone(), pool.mT.clone().mT, apart.copy_(pool)]
    found = [
        (causal_conv1d_update(x, taps, bias, state=state, read_slots=slots), state)
        for state, taps in zip(layouts, (weight, weight.t().contiguous().t(), weight), strict=True)
    ]
    for y, after in found[1:]:
        assert same_bits(y, found[0][0]) and same_bits(after, found[0][1])
    assert not torch.equal(found[0][1], pool) and torch.equal(found[0][1][1], pool[1])


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
