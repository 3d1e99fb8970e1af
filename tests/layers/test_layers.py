"""The whole layer: against its arithmetic written out token by token, and against the layers of
other libraries where those are installed."""

import copy
import inspect
import itertools
import math
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import BF16, DTYPES, FP16, FP32, FP64, assert_within_budget, same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gdn_triton import causal_conv1d
from gdn_triton._host import backends
from gdn_triton._host.backends import Backend
from gdn_triton.chunk import reference as reference_chunk
from gdn_triton.chunk.backends import CHUNK
from gdn_triton.layers import GatedDeltaNet, gated_deltanet, weights_from_qwen
from gdn_triton.layers.convolution import conv_from_states
from gdn_triton.layers.gated_deltanet import CONV_STEP_TOKENS, RECURRENT_TOKENS
from gdn_triton.reference import conv as reference_conv

HIDDEN = 20
# Every option of the constructor that changes the arithmetic.
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "value-groups": {"num_v_heads": 6, "expand_v": 1.5},
    "no-output-gate": {"use_gate": False, "norm_eps": 0.1},
    "sigmoid-gate": {"output_gate_activation": "sigmoid"},
    "no-convolution": {"use_short_conv": False},
    "long-convolution": {"conv_size": 7, "conv_bias": True},
    "convolution-of-one": {"conv_size": 1, "conv_bias": True},
    "reflections": {"allow_neg_eigval": True},
}
LENGTHS = (0, 5, 1, 0, 17, 2, 0)
each_option = pytest.mark.parametrize("name", OPTIONS)


def make_layer(
    name: str = "default", dtype: torch.dtype = FP64, device: str = "cpu", **options: Any
) -> GatedDeltaNet:
    torch.manual_seed(1)
    given = {"hidden_size": HIDDEN, "head_dim": 8, "num_heads": 2, **OPTIONS[name], **options}
    layer = GatedDeltaNet(**given)
    with torch.no_grad():
        # As after training: no weight is left at the 1 that it started from.
        layer.o_norm.weight += 0.3 * torch.randn_like(layer.o_norm.weight)
        layer.dt_bias += 3.0  # time steps long enough to forget
    return layer.to(device, dtype)


def make_input(B: int, T: int, dtype: torch.dtype = FP64, device: str = "cpu") -> Tensor:
    return torch.randn(B, T, HIDDEN, generator=torch.Generator().manual_seed(2)).to(device, dtype)


def written_out(layer: GatedDeltaNet, x: Tensor, state_dtype: torch.dtype | None = None) -> Tensor:
    """One sequence [T, hidden] through the layer, from its weights alone: nothing of the package is
    called. What joins tokens, and the norm, is computed in state_dtype, the rest in x's dtype."""
    wide = state_dtype or x.dtype
    w = dict(layer.named_parameters())
    H, HV, K, V = layer.num_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim

    def joined(name: str) -> Tensor:
        y = x @ w[f"{name}_proj.weight"].T
        if layer.use_short_conv:
            taps = w[f"{name}_conv1d.weight"][:, 0]
            W = taps.shape[1]
            before = torch.cat([y.new_zeros(W - 1, y.shape[1]), y])
            y = sum(taps[:, j] * before[j : j + len(x)] for j in range(W))
            if layer.conv_bias:
                y = y + w[f"{name}_conv1d.bias"]
        return (y * torch.sigmoid(y)).to(wide)

    q, k = (joined(name).unflatten(1, (H, K)) for name in "qk")
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    q, k = (y.repeat_interleave(HV // H, 1) for y in (q, k))
    v = joined("v").unflatten(1, (HV, V))
    a, b = ((x @ w[f"{name}_proj.weight"].T).to(wide) for name in "ab")
    decay = torch.exp(-w["A_log"].to(wide).exp() * (1 + (a + w["dt_bias"].to(wide)).exp()).log())
    beta = (2 if layer.allow_neg_eigval else 1) * torch.sigmoid(b)
    state = v.new_zeros(HV, K, V)
    rows = []
    for t in range(len(x)):
        state = decay[t, :, None, None] * state
        change = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,h,hv->hkv", k[t], beta[t], change)
        rows.append(torch.einsum("hkv,hk->hv", state, q[t]) / math.sqrt(K))
    o = torch.stack(rows).to(x.dtype).to(wide) if rows else v
    o = o / (o.square().mean(-1, keepdim=True) + layer.o_norm.eps).sqrt() * w["o_norm.weight"]
    if layer.use_gate:
        z = (x @ w["g_proj.weight"].T).to(wide).unflatten(1, (HV, V))
        o = o * torch.sigmoid(z) * (1 if layer.output_gate_activation == "sigmoid" else z)
    return o.to(x.dtype).flatten(1) @ w["o_proj.weight"].T


def rows_written_out(layer: GatedDeltaNet, x: Tensor, **options: Any) -> Tensor:
    """`written_out` of each row of x [B, T, hidden]."""
    return torch.stack([written_out(layer, row, **options) for row in x])


def packed_written_out(layer: GatedDeltaNet, x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Of sequences one after the other in x [1, T, hidden]; 0 after the last."""
    ends = [0, *itertools.accumulate(lengths)]
    parts = [written_out(layer, x[0, a:b]) for a, b in itertools.pairwise(ends)]
    return torch.cat([*parts, torch.zeros_like(x[0, ends[-1] :])])[None]


def masked_written_out(layer: GatedDeltaNet, x: Tensor, mask: Tensor) -> Tensor:
    """Each row's tokens under its mask as one sequence; 0 elsewhere."""
    y = torch.zeros_like(x)
    for n in range(len(x)):
        kept = mask[n].bool()
        y[n, kept] = written_out(layer, x[n, kept])
    return y


def offsets_of(lengths: Sequence[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def close(found: Tensor, expected: Tensor) -> None:
    """In float64, where only the order of the arithmetic differs."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


MASKS = {
    "left": [[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8, [0] * 7 + [1]],
    "right": [[1, 1, 1, 0, 0, 0, 0, 0], [1] * 8, [0] * 8],
    "between": [[1, 0, 0, 1, 1, 0, 1, 0], [0, 1] * 4, [0, 0, 1, 1, 0, 0, 1, 1]],
}

# ---------------------------------------------------------------------------------- whole sequences


@each_option
@pytest.mark.parametrize("T", [1, 2, 21])
def test_padded(name: str, T: int) -> None:
    layer, x = make_layer(name), make_input(2, T)
    expected = rows_written_out(layer, x)
    close(layer(x), expected)
    with torch.no_grad():  # token by token
        close(layer(x), expected)


@each_option
def test_packed(name: str) -> None:
    """With empty sequences, some shorter than the convolution, and rows of no sequence."""
    layer, x = make_layer(name), make_input(1, sum(LENGTHS) + 3)
    x[0, -1] = torch.nan
    expected = packed_written_out(layer, x, LENGTHS)
    cu_seqlens = offsets_of(LENGTHS)
    close(layer(x, cu_seqlens=cu_seqlens), expected)
    with torch.no_grad():
        close(layer(x, cu_seqlens=cu_seqlens), expected)


def test_packed_without_sequences() -> None:
    layer, x = make_layer(), make_input(1, 3)
    assert not layer(x, cu_seqlens=offsets_of(())).any()


@pytest.mark.parametrize("where", MASKS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_masked(where: str, dtype: torch.dtype) -> None:
    layer, mask = make_layer(), torch.tensor(MASKS[where]).to(dtype)
    x = make_input(3, 8)
    x[mask == 0] = torch.nan
    expected = masked_written_out(layer, x, mask)
    close(layer(x, mask), expected)
    with torch.no_grad():
        close(layer(x, mask), expected)
        # A mask that also covers what came before the call.
        close(layer(x, torch.cat([torch.zeros_like(mask), mask], 1)), expected)


@pytest.mark.parametrize("shape", [(2, 0), (0, 4)])
def test_no_tokens(shape: tuple[int, int]) -> None:
    layer = make_layer()
    y = layer(make_input(*shape).requires_grad_())
    assert y.shape == (*shape, HIDDEN)
    y.sum().backward()


def watch(names: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those of the names that the layer calls, in order."""
    ran = []

    def watched(name: str) -> Callable[..., Any]:
        function = getattr(gated_deltanet, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            ran.append(name)
            return function(*args, **kwargs)

        return call

    for name in names:
        monkeypatch.setattr(gated_deltanet, name, watched(name))
    return ran


def run_all(layer: GatedDeltaNet) -> None:
    """Short with gradients, then without any short, long, and both with a cache."""
    short, long = make_input(1, RECURRENT_TOKENS), make_input(1, RECURRENT_TOKENS + 1)
    layer(short)
    with torch.no_grad():
        layer(short)
        layer(long)
        layer(short, cache=layer.make_cache(1))
        layer(long, cache=layer.make_cache(1))


@pytest.mark.parametrize("mode", ["chunk", "fused_recurrent"])
def test_which_rule_runs(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the docstring of `mode` says."""
    chunked, by_token = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"
    ran = watch((chunked, by_token, "recurrent_step"), monkeypatch)
    run_all(make_layer(mode=mode))
    if mode == "chunk":
        assert ran == [chunked, by_token, chunked, "recurrent_step", chunked]
    else:
        assert ran == [chunked, by_token, by_token, "recurrent_step", "recurrent_step"]


def test_which_convolution_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, step, from_states = "causal_conv1d", "causal_conv1d_update", "conv_from_states"
    ran = watch((plain, step, from_states), monkeypatch)
    layer = make_layer()
    run_all(layer)
    layer(make_input(1, 2), cache=layer.make_cache(1))
    with torch.no_grad():
        layer(make_input(1, CONV_STEP_TOKENS), cache=layer.make_cache(1))
    assert ran == [plain, plain, plain, plain, plain, from_states, step]


# ---------------------------------------------------------------------------------------- gradients


def gradients(
    layer: GatedDeltaNet, x: Tensor, run: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
    (y * weights).sum().backward()
    found = {name: p.grad for name, p in layer.named_parameters()} | {"x": x.grad}
    assert all(grad is not None for grad in found.values())
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def assert_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, grad in expected.items():
        assert grad.any(), f"{name}: nothing to compare"
        torch.testing.assert_close(found[name], grad, rtol=1e-7, atol=1e-9, msg=name)


@each_option
def test_gradients(name: str) -> None:
    layer, x = make_layer(name), make_input(2, 19)
    expected = gradients(layer, x, lambda x: rows_written_out(layer, x))
    assert_gradients(gradients(layer, x, layer), expected)


def test_gradients_packed_and_masked() -> None:
    layer, x = make_layer(), make_input(1, sum(LENGTHS) + 3)
    cu_seqlens = offsets_of(LENGTHS)
    expected = gradients(layer, x, lambda x: packed_written_out(layer, x, LENGTHS))
    assert_gradients(gradients(layer, x, lambda x: layer(x, cu_seqlens=cu_seqlens)), expected)
    x, mask = make_input(3, 8), torch.tensor(MASKS["between"])
    expected = gradients(layer, x, lambda x: masked_written_out(layer, x, mask))
    assert_gradients(gradients(layer, x, lambda x: layer(x, mask)), expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("form", ["masked", "packed", "skipped", "packed and skipped"])
def test_what_padding_holds_reaches_no_gradient(form: str, value: float) -> None:
    """As if it held zeros, to the last bit: y, all parameters' gradients and those of x, which are
    0 for the padding."""
    layer = make_layer()
    x = make_input(1, 12) if "packed" in form else make_input(3, 4)
    given: dict[str, Any] = {}
    padding = torch.zeros(x.shape[:2], dtype=torch.bool)
    if form == "masked":
        padding = torch.tensor(MASKS["between"])[:, :4] == 0
        given["attention_mask"] = ~padding
    if "packed" in form:
        padding[:, 9:] = True
        given["cu_seqlens"] = offsets_of([4, 3, 2])
    if "skipped" in form:
        given["slots"] = torch.tensor([1, -1, 0])
        padding[(0, slice(4, 7)) if "packed" in form else 1] = True
    assert padding.any() and not padding.all()

    def run(x: Tensor) -> Tensor:
        if "slots" not in given:
            return layer(x, **given)
        cache = layer.make_cache(2)
        cache.recurrent_state.copy_(torch.ones_like(cache.recurrent_state))
        return layer(x, cache=cache, **given)

    hollow = x.masked_fill(padding[..., None], 0)
    expected = gradients(layer, hollow, run)
    y = run(hollow)
    hostile = x.masked_fill(padding[..., None], value)
    found = gradients(layer, hostile, run)
    assert same_bits_64(run(hostile), y)
    assert expected.keys() == found.keys()
    for name, gradient in found.items():
        assert same_bits_64(gradient, expected[name]), name
    assert not found["x"][padding].any()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool) -> None:
    layer, x = make_layer(), make_input(2, 9)
    expected = gradients(layer, x, layer)
    found = gradients(
        layer,
        x,
        lambda x: checkpoint(layer, x, use_reentrant=use_reentrant, preserve_rng_state=False),
    )
    for name, grad in expected.items():
        assert same_bits_64(found[name], grad), name


def same_bits_64(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.view(torch.int64), y.view(torch.int64))


def test_no_gradient_through_the_cache() -> None:
    """What came before a call is constant in it."""
    layer, x = make_layer(), make_input(1, 6)
    cache = layer.make_cache(1)
    layer(x[:, :3], cache=cache)
    assert not cache.recurrent_state.requires_grad
    layer(x[:, 3:], cache=cache).sum().backward()
    assert layer.q_proj.weight.grad is not None


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("W", [2, 4])
def test_convolution_from_states(
    backend: str, packed: bool, W: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the specification from a state, and the states of the call without gradients."""
    monkeypatch.setenv("GDN_BACKEND", backend)
    lengths = LENGTHS if packed else (9, 9)
    N, D, T = len(lengths), 70, sum(lengths)
    x, weight, bias, state = (
        torch.randn(shape, device=device) for shape in ((1, T + 2, D), (D, W), (D,), (N, D, W - 1))
    )
    if not packed:
        x = x[:, :T].reshape(N, -1, D)
    cu_seqlens = offsets_of(lengths, device) if packed else None
    weights = torch.randn_like(x)
    weights.view(-1, D)[T:] = 0  # of tokens of no sequence
    ends = [0, *itertools.accumulate(lengths)]
    before = state.clone()

    def specified(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        parts = [
            reference_conv.causal_conv1d(rows[a:b], weight, bias, state=before[n])
            for n, (a, b) in enumerate(itertools.pairwise(ends))
        ]
        return torch.cat([*parts, rows[T:]]).view_as(x)

    def with_gradients(
        function: Callable[..., Tensor], dtype: torch.dtype = FP32
    ) -> tuple[Tensor, ...]:
        leaves = [y.to(dtype).detach().requires_grad_() for y in (x, weight, bias)]
        y = function(*leaves)
        rows = y.detach().reshape(-1, D)[:T]
        return rows, *torch.autograd.grad(y, leaves, weights.to(dtype))

    found = with_gradients(lambda *leaves: conv_from_states(*leaves, state, cu_seqlens)[0])
    exact, narrow = with_gradients(specified, FP64), with_gradients(specified)
    names = ("y", "dx", "dweight", "dbias")
    for name, got, y64, z in zip(names, found, exact, narrow, strict=True):
        assert_within_budget(name, got, y64, z, dtype=FP32, unit=torch.finfo(FP32).eps / 2)
    after = conv_from_states(x, weight, bias, state, cu_seqlens)[1]
    assert same_bits(state, before)
    causal_conv1d(x, weight, bias, state=state, cu_seqlens=cu_seqlens)
    assert same_bits(after, state)


# -------------------------------------------------------------------------------------------- cache


def splits(T: int) -> list[list[int]]:
    """Lengths of the calls that T tokens come in: alone, in a few, and mixed."""
    return [[T], [1] * T, [T - 2, 1, 1], [2, T - 3, 1]]


@each_option
@pytest.mark.parametrize("grad", [False, True])
def test_calls_go_on(name: str, grad: bool) -> None:
    """However the tokens are cut into calls, prefill and decoding, the rows are those of one."""
    layer, x = make_layer(name), make_input(3, 7)
    expected = rows_written_out(layer, x)
    slots = torch.tensor([4, 0, 2])
    for lengths in splits(7):
        cache = layer.make_cache(5)
        with torch.set_grad_enabled(grad):
            parts = [layer(y, cache=cache, slots=slots) for y in x.split(lengths, 1)]
        close(torch.cat(parts, 1), expected)
        assert not cache.recurrent_state[[1, 3]].any()
        if cache.conv_state is not None:
            assert not cache.conv_state[[1, 3]].any()


@pytest.mark.parametrize("grad", [False, True])
def test_packed_calls_go_on(grad: bool) -> None:
    """Sequences of any lengths, 0 included, in each call."""
    layer, x = make_layer(), make_input(3, 9)
    expected = rows_written_out(layer, x)
    cache = layer.make_cache(4)
    slots = torch.tensor([2, 3, 0], dtype=torch.int32)
    done = [0, 0, 0]
    for lengths in ([5, 0, 1], [0, 2, 1], [4, 7, 7]):
        ends = [d + n for d, n in zip(done, lengths, strict=True)]
        row = torch.cat([x[n, a:b] for n, (a, b) in enumerate(zip(done, ends, strict=True))])
        with torch.set_grad_enabled(grad):
            y = layer(row[None], cache=cache, slots=slots, cu_seqlens=offsets_of(lengths))
        for n, part in enumerate(y[0].split(lengths)):
            close(part, expected[n, done[n] : ends[n]])
        done = ends


@pytest.mark.parametrize("grad", [False, True])
def test_masked_calls_go_on(grad: bool) -> None:
    layer, x = make_layer(), make_input(3, 8)
    for rows in MASKS.values():
        mask = torch.tensor(rows)
        expected = masked_written_out(layer, x, mask)
        cache = layer.make_cache(3)
        with torch.set_grad_enabled(grad):
            parts = [
                layer(x[:, a:b], mask[:, :b], cache=cache) for a, b in ((0, 5), (5, 7), (7, 8))
            ]
        close(torch.cat(parts, 1), expected)


@pytest.mark.parametrize("skip", ["negative", "non_positive"])
@pytest.mark.parametrize("form", ["decode", "prefill", "packed"])
def test_skipped_sequences(form: str, skip: str) -> None:
    """Their rows are 0 and no slot of the cache changes, whatever they hold."""
    layer = make_layer()
    cache = layer.make_cache(4, skip=skip)
    for pool in (cache.conv_state, cache.recurrent_state):
        assert pool is not None
        pool.normal_()
    before = copy.deepcopy(cache)
    slots = torch.tensor([3, 0 if skip == "non_positive" else -1, -7, 2])
    x = make_input(4, 1 if form == "decode" else 3)
    x[1:3] = torch.nan
    alone = copy.deepcopy(cache)
    grad = form == "prefill"
    with torch.set_grad_enabled(grad):
        expected = layer(x[[0, 3]], cache=alone, slots=slots[[0, 3]])
        if form == "packed":
            y = layer(
                x.view(1, 12, HIDDEN), cache=cache, slots=slots, cu_seqlens=offsets_of([3] * 4)
            )
            y = y.view(4, 3, HIDDEN)
        else:
            y = layer(x, cache=cache, slots=slots)
    assert not y[1:3].any()
    close(y[[0, 3]], expected)
    for pool, was, want in (
        (cache.conv_state, before.conv_state, alone.conv_state),
        (cache.recurrent_state, before.recurrent_state, alone.recurrent_state),
    ):
        assert pool is not None and was is not None and want is not None
        assert torch.equal(pool[:2], was[:2])
        close(pool[2:4], want[2:4])
        assert not torch.equal(pool[2], was[2])


@pytest.mark.parametrize("skip", ["negative", "non_positive"])
def test_first_slots_are_the_default(skip: str) -> None:
    layer, x = make_layer(), make_input(2, 3)
    first = 1 if skip == "non_positive" else 0
    named, unnamed = layer.make_cache(4, skip=skip), layer.make_cache(4, skip=skip)
    y = layer(x, cache=named, slots=torch.tensor([first, first + 1]))
    assert torch.equal(layer(x, cache=unnamed), y)
    assert torch.equal(named.recurrent_state[:-1], unnamed.recurrent_state[:-1])


def test_reset() -> None:
    layer, x = make_layer(), make_input(3, 4)
    cache = layer.make_cache(3)
    expected = layer(x, cache=cache)
    kept = cache.recurrent_state[1].clone()
    cache.reset(torch.tensor([2, -1, 0]))
    assert torch.equal(cache.recurrent_state[1], kept)
    slots = torch.tensor([0, 2])
    assert torch.equal(layer(x[[0, 2]], cache=cache, slots=slots), expected[[0, 2]])
    cache.reset()
    assert torch.equal(layer(x, cache=cache), expected)


@pytest.mark.parametrize("state_dtype", [FP32, FP16])
def test_dtypes_of_a_cache(state_dtype: torch.dtype) -> None:
    """One token or several a call: the recurrence rounds after every token."""
    layer, x = make_layer(dtype=FP32), make_input(2, 5, FP32)
    cache = layer.make_cache(2, dtype=FP16, state_dtype=state_dtype)
    assert cache.conv_state is not None
    assert (cache.conv_state.dtype, cache.recurrent_state.dtype) == (FP16, state_dtype)
    assert cache.slots == 2
    with torch.no_grad():
        y = torch.cat([layer(part, cache=cache) for part in x.split(1, 1)], 1)
        torch.testing.assert_close(y, layer(x), rtol=2e-2, atol=2e-2)


# ---------------------------------------------------------------------------- kernels and precision


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad", [True, False], ids=["chunked", "by-token"])
def test_budget(dtype: torch.dtype, grad: bool, device: str) -> None:
    """On the backend that `auto` takes here, beside the same arithmetic in the same precision."""
    layer, x = make_layer("value-groups", dtype, device), make_input(2, 30, dtype, device)
    with torch.set_grad_enabled(grad):
        y = layer(x)
    with torch.no_grad():
        narrow = rows_written_out(layer, x, state_dtype=FP32)
        exact = rows_written_out(copy.deepcopy(layer).double(), x.double())
    unit = torch.finfo(dtype).eps / 2
    assert_within_budget("y", y.detach(), exact, narrow, dtype=dtype, unit=unit)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_autocast(dtype: torch.dtype, device: str) -> None:
    """Products in the dtype of autocast, weights and gradients in float32."""
    layer, x = make_layer(dtype=FP32, device=device), make_input(2, 20, FP32, device)
    expected = layer(x)
    with torch.autocast(device, dtype):
        y = layer(x)
    assert y.dtype == dtype
    error = (y.double() - expected.double()).norm() / expected.double().norm()
    assert 0 < error < 16 * torch.finfo(dtype).eps
    y.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == FP32 for p in layer.parameters())
    cache = layer.make_cache(2)
    with torch.no_grad(), torch.autocast(device, dtype):
        parts = torch.cat([layer(part, cache=cache) for part in x.split([17, 1, 1, 1], 1)], 1)
    error = (parts.double() - expected.double()).norm() / expected.double().norm()
    assert error < 16 * torch.finfo(dtype).eps


# ------------------------------------------------------------------------------------ torch.compile


class Graphs:
    """A compiler that runs what it is given, and counts. It begins with no code compiled."""

    def __init__(self) -> None:
        torch.compiler.reset()
        self.seen = 0

    def __call__(self, module: Any, example_inputs: Any) -> Any:
        self.seen += 1
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(module, example_inputs)


@pytest.mark.parametrize("form", ["padded", "packed", "masked"])
def test_compiled_training(form: str, device: str) -> None:
    layer, x = make_layer(dtype=FP32, device=device), make_input(3, 8, FP32, device)
    given: dict[str, Any] = {}
    if form == "packed":
        x = x.view(1, 24, HIDDEN)
        given["cu_seqlens"] = offsets_of([7, 0, 12], device)
    elif form == "masked":
        given["attention_mask"] = torch.tensor(MASKS["between"], device=device)
    graphs = Graphs()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    expected = gradients(layer, x, lambda x: layer(x, **given))
    found = gradients(layer, x, lambda x: compiled(x, **given))
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-4, msg=name)
    assert graphs.seen == 1


def test_masks_of_any_kind_that_are_one_or_zero() -> None:
    layer, x = make_layer(dtype=FP32), make_input(1, 3, FP32)
    mask = torch.tensor([[True, False, True]])
    expected = layer(x, mask)
    for dtype in (torch.int64, FP16, BF16, FP32, FP64):
        assert same_bits(layer(x, mask.to(dtype)), expected)
    # Segments of a packed row have numbers above 1, and columns before the last T are not read.
    assert same_bits(layer(x, mask.long() * 5), expected)
    before = torch.tensor([[torch.nan, -1e9]])
    assert same_bits(layer(x, torch.cat([before, mask.float()], 1)), expected)


@pytest.mark.of_no_device
@pytest.mark.parametrize(("mode", "grad"), [("chunk", True), ("fused_recurrent", False)])
def test_export_of_any_length(mode: str, grad: bool) -> None:
    layer, x = make_layer(dtype=FP32, mode=mode), make_input(1, 20, FP32)
    length = torch.export.Dim("T", min=2, max=200)
    with torch.set_grad_enabled(grad):
        shapes = {"hidden_states": {1: length}}
        exported = torch.export.export(layer, (x,), dynamic_shapes=shapes).module()
        for T in (3, RECURRENT_TOKENS + 10):
            y = make_input(1, T, FP32)
            torch.testing.assert_close(exported(y), layer(y), rtol=1e-4, atol=1e-5)


@pytest.mark.of_no_device
def test_export_across_the_change_of_function_says_so() -> None:
    layer, x = make_layer(dtype=FP32), make_input(1, 20, FP32)
    shapes = {"hidden_states": {1: torch.export.Dim("T", min=2, max=200)}}
    with torch.no_grad(), pytest.raises(Exception, match="Constraints violated"):
        torch.export.export(layer, (x,), dynamic_shapes=shapes)


@pytest.mark.parametrize("named", [False, True], ids=["all-slots", "named-slots"])
def test_compiled_prefill_and_decoding(named: bool, device: str) -> None:
    layer, x = make_layer(dtype=FP32, device=device), make_input(2, 70, FP32, device)
    lengths = [66, 1, 1, 1, 1]
    slots = torch.tensor([2, 1], device=device) if named else None
    graphs = Graphs()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs, dynamic=False)
    with torch.no_grad():
        results = []
        for run in (layer, compiled):
            cache = layer.make_cache(3)
            parts = [run(y, cache=cache, slots=slots) for y in x.split(lengths, 1)]
            results.append((torch.cat(parts, 1), cache.recurrent_state[:-1]))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert graphs.seen == 2  # prefill and one token


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_compiled_gradients_with_a_cache(form: str) -> None:
    """In one graph, from states that the call before left."""
    layer, x = make_layer(), make_input(3, 10)
    given = {"cu_seqlens": offsets_of([7, 0, 3])} if form == "packed" else {}
    past, x = (y.reshape(1, -1, HIDDEN)[:, :10] if given else y for y in x.split(5, 1))
    caches = [layer.make_cache(3), layer.make_cache(3)]
    for cache in caches:
        layer(past, cache=cache, **given)
    graphs = Graphs()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    expected = gradients(layer, x, lambda x: layer(x, cache=caches[0], **given))
    found = gradients(layer, x, lambda x: compiled(x, cache=caches[1], **given))
    assert_gradients(found, expected)
    close(caches[1].conv_state, caches[0].conv_state)
    close(caches[1].recurrent_state, caches[0].recurrent_state)
    assert graphs.seen == 1


@pytest.mark.gpu("Inductor needs a C++ compiler here, and minutes")
def test_inductor(device: str) -> None:
    layer, x = make_layer(dtype=FP32, device=device), make_input(2, 70, FP32, device)
    expected = gradients(layer, x, layer)
    found = gradients(layer, x, torch.compile(layer, fullgraph=True))
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.gpu("CUDA graphs")
def test_cuda_graph_of_a_step(device: str) -> None:
    """Captured for the largest batch; slots and tokens change in place."""
    layer, x = make_layer(dtype=BF16, device=device), make_input(3, 6, BF16, device)
    cache, expected_cache = layer.make_cache(4), layer.make_cache(4)
    token, slots = x[:, :1].clone(), torch.tensor([-1, -1, -1], device=device)
    with torch.no_grad():
        layer(token, cache=cache, slots=slots)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(token, cache=cache, slots=slots)
        for t, now in enumerate(([3, 0, 1], [3, -1, 1], [-1, 0, 2])):
            token.copy_(x[:, t : t + 1])
            slots.copy_(torch.tensor(now))
            expected = layer(token, cache=expected_cache, slots=slots)
            graph.replay()
            assert same_bits(y, expected)
    assert same_bits(cache.recurrent_state[:-1], expected_cache.recurrent_state[:-1])


# -------------------------------------------------------------------------- weights and their start


def test_start() -> None:
    torch.manual_seed(5)
    layer = GatedDeltaNet(hidden_size=32, head_dim=4, num_heads=500, num_v_heads=1000)
    rates, steps = layer.A_log.exp(), nn.functional.softplus(layer.dt_bias)
    assert 0 < rates.min() and rates.max() <= 16 and abs(rates.mean() - 8) < 0.5
    assert 1e-3 * 0.99 < steps.min() and steps.max() < 1e-1 * 1.01
    middle = steps.log().mean().exp()
    assert abs(middle - 1e-2) < 1e-3
    assert layer.A_log._no_weight_decay and layer.dt_bias._no_weight_decay


def test_meta_device() -> None:
    """Made without memory, then given some: the weights of a seed are those of the constructor."""
    options = {"hidden_size": 12, "head_dim": 4, "num_heads": 2, "conv_bias": True}
    torch.manual_seed(5)
    expected = GatedDeltaNet(**options).state_dict()
    layer = GatedDeltaNet(**options, device="meta")
    assert all(p.is_meta for p in layer.parameters())
    layer.to_empty(device="cpu")
    torch.manual_seed(5)
    layer.reset_parameters()
    found = layer.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def test_dtype_of_the_weights() -> None:
    layer = GatedDeltaNet(hidden_size=12, head_dim=4, num_heads=2, dtype=BF16)
    narrow = {name for name, p in layer.named_parameters() if p.dtype == BF16}
    assert {name for name, _ in layer.named_parameters()} - narrow == {"A_log", "dt_bias"}
    assert layer.A_log.dtype == layer.dt_bias.dtype == FP32


def test_names_and_shapes_of_the_weights() -> None:
    """Those of flash-linear-attention 0.6.0."""
    layer = GatedDeltaNet(
        hidden_size=12, head_dim=4, num_heads=2, num_v_heads=4, expand_v=1.5, conv_bias=True
    )
    assert {name: tuple(x.shape) for name, x in layer.state_dict().items()} == {
        "A_log": (4,),
        "dt_bias": (4,),
        "q_proj.weight": (8, 12),
        "k_proj.weight": (8, 12),
        "v_proj.weight": (24, 12),
        "a_proj.weight": (4, 12),
        "b_proj.weight": (4, 12),
        "q_conv1d.weight": (8, 1, 4),
        "q_conv1d.bias": (8,),
        "k_conv1d.weight": (8, 1, 4),
        "k_conv1d.bias": (8,),
        "v_conv1d.weight": (24, 1, 4),
        "v_conv1d.bias": (24,),
        "g_proj.weight": (24, 12),
        "o_norm.weight": (6,),
        "o_proj.weight": (12, 24),
    }


def qwen_weights(model: str, H: int, HV: int, K: int, V: int) -> dict[str, Tensor]:
    """Random ones, in the model's shapes."""
    torch.manual_seed(6)
    shapes: dict[str, tuple[int, ...]] = {
        "A_log": (HV,),
        "dt_bias": (HV,),
        "conv1d.weight": (2 * H * K + HV * V, 1, 4),
        "norm.weight": (V,),
        "out_proj.weight": (HIDDEN, HV * V),
    }
    if model == "Qwen3-Next":
        shapes["in_proj_qkvz.weight"] = (2 * H * K + 2 * HV * V, HIDDEN)
        shapes["in_proj_ba.weight"] = (2 * HV, HIDDEN)
    else:
        shapes["in_proj_qkv.weight"] = (2 * H * K + HV * V, HIDDEN)
        shapes["in_proj_z.weight"] = (HV * V, HIDDEN)
        shapes["in_proj_b.weight"] = shapes["in_proj_a.weight"] = (HV, HIDDEN)
    return {name: torch.randn(*shape, dtype=FP64) for name, shape in shapes.items()}


@pytest.mark.parametrize("model", ["Qwen3-Next", "Qwen3.5"])
def test_qwen_weights(model: str) -> None:
    """Every row of every projection, found by its place in the stored one."""
    H, HV, K, V = 2, 6, 5, 3
    G = HV // H
    given = qwen_weights(model, H, HV, K, V)
    layer = GatedDeltaNet.from_qwen({f"a.{name}": x for name, x in given.items()}, H, prefix="a.")
    assert (layer.num_heads, layer.num_v_heads) == (H, HV)
    assert (layer.head_k_dim, layer.head_v_dim, layer.conv_size) == (K, V, 4)
    assert layer.o_norm.eps == 1e-6
    found = layer.state_dict()
    taken = dict.fromkeys(("q", "k", "v", "g", "a", "b"), 0)
    for h in range(H):
        # Row of head h, channel c, in the stored projection of Qwen3-Next.
        block = 2 * K + 2 * G * V
        expected = {
            "q": (h * K, K, h * block),
            "k": (h * K, K, h * block + K),
            "v": (h * G * V, G * V, h * block + 2 * K),
            "g": (h * G * V, G * V, h * block + 2 * K + G * V),
            "b": (h * G, G, h * 2 * G),
            "a": (h * G, G, h * 2 * G + G),
        }
        if model == "Qwen3.5":
            starts = {"q": 0, "k": H * K, "v": 2 * H * K}
            expected = {n: (a, c, starts.get(n, 0) + a) for n, (a, c, _) in expected.items()}
        for name, (row, count, stored) in expected.items():
            if model == "Qwen3-Next":
                source = "in_proj_ba" if name in "ab" else "in_proj_qkvz"
            else:
                source = {"g": "in_proj_z", "a": "in_proj_a", "b": "in_proj_b"}.get(
                    name, "in_proj_qkv"
                )
            rows = given[f"{source}.weight"][stored : stored + count]
            assert torch.equal(found[f"{name}_proj.weight"][row : row + count], rows), (name, h)
            taken[name] += count
    assert taken == {"q": H * K, "k": H * K, "v": HV * V, "g": HV * V, "a": HV, "b": HV}
    convolution = torch.cat([found[f"{name}_conv1d.weight"] for name in "qkv"])
    assert torch.equal(convolution, given["conv1d.weight"])
    for ours, theirs in (("o_norm", "norm"), ("o_proj", "out_proj")):
        assert torch.equal(found[f"{ours}.weight"], given[f"{theirs}.weight"])
    assert torch.equal(found["A_log"], given["A_log"])
    assert torch.equal(found["dt_bias"], given["dt_bias"])
    x = make_input(1, 5)
    close(layer(x), rows_written_out(layer, x))


@pytest.mark.parametrize(
    ("change", "num_heads", "message"),
    [
        ({"conv1d.bias": (4,)}, 2, "state_dict must have the linear-attention weights"),
        ({"norm.weight": None}, 2, "state_dict must have the linear-attention weights"),
        ({}, 4, "num_heads must divide the HV=6 value heads"),
        ({}, 0, "num_heads must divide the HV=6 value heads"),
        (
            {"in_proj_ba.weight": (11, HIDDEN)},
            2,
            r"p\.in_proj_ba\.weight must have shape \[12, 20\]",
        ),
    ],
)
def test_wrong_qwen_weights(change: dict[str, Any], num_heads: int, message: str) -> None:
    given = qwen_weights("Qwen3-Next", 2, 6, 5, 3)
    for name, shape in change.items():
        if shape is None:
            del given[name]
        else:
            given[name] = torch.zeros(shape)
    with pytest.raises(ValueError, match=message):
        weights_from_qwen({f"p.{name}": x for name, x in given.items()}, num_heads, "p.")


# -------------------------------------------------------------------- the layers of other libraries


@pytest.mark.parametrize("model", ["qwen3_next", "qwen3_5"])
def test_equals_transformers(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, gradients, left padding and decoding, beside the model's own layer in torch."""
    reason = "the cross-check needs transformers with this model"
    name = f"transformers.models.{model}"
    configuration = pytest.importorskip(f"{name}.configuration_{model}", reason=reason)
    modeling = pytest.importorskip(f"{name}.modeling_{model}", reason=reason)
    for function in (
        "torch_chunk_gated_delta_rule",
        "torch_recurrent_gated_delta_rule",
        "causal_conv1d_fn",
        "causal_conv1d_update",
    ):
        # Without the kernels of other packages that took their places when they were imported.
        monkeypatch.setattr(modeling, function, inspect.unwrap(getattr(modeling, function)))
    prefix, text = ("Qwen3Next", "") if model == "qwen3_next" else ("Qwen3_5", "Text")
    config = getattr(configuration, f"{prefix}{text}Config")(
        hidden_size=HIDDEN,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        linear_conv_kernel_dim=4,
        num_hidden_layers=4,
        rms_norm_eps=1e-5,
        hidden_act="silu",
    )
    torch.manual_seed(0)
    theirs = getattr(modeling, f"{prefix}GatedDeltaNet")(config, 0)
    nn.init.normal_(theirs.norm.weight)
    ours = GatedDeltaNet.from_qwen(theirs.state_dict(), 2, norm_eps=1e-5)
    x = make_input(2, 70, FP32)
    mask = torch.ones(2, 70, dtype=torch.int64)
    mask[0, :9] = 0
    expected, found = theirs(x, attention_mask=mask), ours(x, mask)
    torch.testing.assert_close(found[mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-5)
    found.square().sum().backward()
    (expected * mask[..., None]).square().sum().backward()
    wanted = weights_from_qwen({n: p.grad for n, p in theirs.named_parameters()}, 2)
    for weight, grad in wanted.items():
        ours_grad = ours.get_parameter(weight).grad
        torch.testing.assert_close(ours_grad, grad, rtol=1e-3, atol=1e-4, msg=weight)
    cache = ours.make_cache(2)
    with torch.no_grad():
        parts = [ours(x[:, :67], mask[:, :67], cache=cache)]
        parts += [ours(x[:, t : t + 1], mask[:, : t + 1], cache=cache) for t in range(67, 70)]
    torch.testing.assert_close(
        torch.cat(parts, 1)[mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-5
    )


FLA_OPTIONS = [
    pytest.param({}, id="default"),
    pytest.param({"num_v_heads": 4, "use_gate": False, "conv_bias": True}, id="no-gate"),
    pytest.param({"use_short_conv": False, "allow_neg_eigval": True}, id="no-convolution"),
    pytest.param({"output_gate_activation": "sigmoid", "expand_v": 1.5}, id="sigmoid"),
]


def fla_layer(options: dict[str, Any]) -> tuple[nn.Module, GatedDeltaNet]:
    """Theirs and ours, with the weights of theirs."""
    module = pytest.importorskip(
        "fla.layers.gated_deltanet",
        reason="the cross-check needs flash-linear-attention",
        exc_type=ImportError,
    )
    given = {"hidden_size": HIDDEN, "head_dim": 16, "num_heads": 2, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of use_short_conv=False
        theirs = module.GatedDeltaNet(**given)
    ours = GatedDeltaNet(**given)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


@pytest.mark.parametrize("options", FLA_OPTIONS)
def test_loads_weights_of_fla(options: dict[str, Any]) -> None:
    theirs, ours = fla_layer(options)
    theirs.load_state_dict(ours.state_dict(), strict=True)


@pytest.mark.gpu("FLA's kernels")
@pytest.mark.parametrize("options", FLA_OPTIONS)
@pytest.mark.parametrize("T", [40, 100])
def test_equals_fla(options: dict[str, Any], T: int, device: str) -> None:
    theirs, ours = (layer.to(device).eval() for layer in fla_layer(options))
    x = make_input(2, T, FP32, device)
    mask = torch.ones(2, T, dtype=torch.int64, device=device)
    mask[0, :9] = 0
    with torch.no_grad():
        expected = theirs(x, attention_mask=mask)[0]
        found = ours(x, mask)
    # Both in products of tf32 at worst.
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())


# ---------------------------------------------------------------------------------- wrong arguments


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_size": 0}, ValueError, "hidden_size must be at least 1, got 0"),
        ({"head_dim": 8.0}, TypeError, "head_dim must be an int, got 8.0"),
        ({"num_v_heads": 3}, ValueError, "num_v_heads must be a multiple of num_heads=2, got 3"),
        ({"num_v_heads": 1}, ValueError, "num_v_heads must be a multiple of num_heads=2, got 1"),
        ({"expand_v": 1.3}, ValueError, "expand_v must make expand_v"),
        ({"expand_v": 0}, ValueError, "expand_v must make expand_v"),
        ({"mode": "parallel"}, ValueError, "mode must be one of chunk, fused_recurrent"),
        ({"output_gate_activation": "relu"}, ValueError, "must be one of swish, silu, sigmoid"),
        ({"conv_size": 0}, ValueError, "conv_size must be at least 1"),
        ({"norm_eps": -1}, ValueError, r"norm_eps must be finite and at least 0, got -1 \(int\)"),
        ({"norm_eps": math.nan}, ValueError, "norm_eps must be finite and at least 0, got nan"),
        ({"norm_eps": math.inf}, ValueError, "norm_eps must be finite and at least 0, got inf"),
        ({"norm_eps": None}, ValueError, "norm_eps must be finite and at least 0, got None"),
        ({"norm_eps": "1"}, TypeError, "norm_eps must be a real number"),
    ],
)
def test_wrong_layers(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"hidden_size": 12, "head_dim": 8, "num_heads": 2, **changes}
    with pytest.raises(error, match=message):
        GatedDeltaNet(**given)


def test_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="use_sort_conv"):
        GatedDeltaNet(use_sort_conv=False)  # type: ignore[call-arg]


WRONG_CALLS = [
    (
        {"hidden_states": torch.zeros(2, 3, 4)},
        ValueError,
        r"hidden_size=20\], got shape \[2, 3, 4\]",
    ),
    ({"hidden_states": torch.zeros(2, 20)}, ValueError, "hidden_states must have shape"),
    ({"hidden_states": None}, TypeError, "hidden_states must be a torch.Tensor"),
    ({"hidden_states": torch.zeros(2, 3, 20).int()}, ValueError, "hidden_states must be float16"),
    ({"attention_mask": torch.ones(2, 2)}, ValueError, "attention_mask must have shape"),
    ({"attention_mask": torch.ones(2, 3, 3)}, ValueError, "attention_mask must have shape"),
    ({"attention_mask": [[1]]}, TypeError, "attention_mask must be a torch.Tensor or None"),
    (
        {"attention_mask": torch.tensor([[0, -1e9, -1e9], [0, 0, -1e9]])},
        ValueError,
        "attention_mask must hold 1 for a token and 0 for none, where it is float, got -1000000000",
    ),
    (
        {"attention_mask": torch.tensor([[1, torch.nan, 1], [1, 1, 1]])},
        ValueError,
        "attention_mask must hold 1 for a token and 0 for none, where it is float, got nan",
    ),
    ({"slots": torch.tensor([0, 1])}, ValueError, "slots must be None without a cache"),
    ({"cu_seqlens": torch.tensor([0, 3])}, ValueError, "batch size B=1 with cu_seqlens"),
    ({"cu_seqlens": torch.tensor([0.0, 3])}, ValueError, "cu_seqlens must be int32 or int64"),
    ({"cu_seqlens": torch.zeros(2, 1).long()}, ValueError, "cu_seqlens must have shape"),
    ({"cache": 4, "slots": 3}, TypeError, "slots must be a torch.Tensor or None"),
    ({"cache": {}}, TypeError, "cache must be a GatedDeltaNetCache or None"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG_CALLS)
def test_wrong_calls(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    layer = make_layer(dtype=FP32)
    with pytest.raises(error, match=message):
        layer(**{"hidden_states": make_input(2, 3, FP32), **changes})


def test_wrong_offsets() -> None:
    layer, x = make_layer(dtype=FP32), make_input(1, 3, FP32)
    for offsets, message in (([0, 4], "end at or before T=3"), ([0, 2, 1], "not decrease")):
        with pytest.raises(ValueError, match=message):
            layer(x, cu_seqlens=torch.tensor(offsets))
    with pytest.raises(ValueError, match="attention_mask must be None with cu_seqlens"):
        layer(x, torch.ones(1, 3), cu_seqlens=torch.tensor([0, 3]))


def test_wrong_caches() -> None:
    layer, x = make_layer(dtype=FP32), make_input(2, 3, FP32)
    cache = layer.make_cache(3)
    for slots, message in (
        ([0], r"slots must have shape \[N=2\]"),
        ([0, 3], "be less than the 3 slots of the cache, got 3"),
        ([1, 1], "name no slot twice, got 1 twice"),
        ([0.0, 1.0], "slots must be int32 or int64"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(x, cache=cache, slots=torch.tensor(slots))
    with pytest.raises(ValueError, match="cache must have room for N=2 sequences, got 1 slots"):
        layer(x, cache=layer.make_cache(1))
    with pytest.raises(ValueError, match="got 1 slots"):
        layer(x, cache=layer.make_cache(2, skip="non_positive"))
    for other in ("value-groups", "no-convolution", "long-convolution"):
        with pytest.raises(ValueError, match="cache must have states of this layer's shapes"):
            layer(x, cache=make_layer(other).make_cache(3))
    with pytest.raises(ValueError, match="skip must be one of negative, non_positive"):
        layer.make_cache(3, skip="zero")
    with pytest.raises(ValueError, match="slots must be at least 0"):
        layer.make_cache(-1)
    with pytest.raises(TypeError, match="slots must be an int"):
        layer.make_cache(2.0)  # type: ignore[arg-type]
    assert not cache.recurrent_state.any()


@pytest.mark.parametrize(
    ("backend", "head_dim", "reason"),
    [
        pytest.param("triton", 8, "take 2, 3 or 4 taps; the weight has 7", id="convolution"),
        pytest.param("triton", 264, "keys of up to 256 channels; K is 264", id="rule"),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_a_refused_call_changes_no_state(
    backend: str,
    head_dim: int,
    reason: str,
    grad: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the convolution refuses it, or the rule after it."""
    monkeypatch.setenv("GDN_BACKEND", backend)
    name = "long-convolution" if "taps" in reason else "default"
    layer = make_layer(name, dtype=FP32, device=device, head_dim=head_dim, num_heads=1)
    cache = layer.make_cache(2)
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=reason):
        layer(make_input(2, 3, FP32, device), cache=cache)
    assert cache.conv_state is not None
    assert not any(pool.any() for pool in (cache.conv_state, cache.recurrent_state))


def prefill_and_decode(layer: GatedDeltaNet, x: Tensor) -> tuple[Tensor, Tensor]:
    """y of x: all tokens but three in one call, these one by one; and the states after them."""
    cache = layer.make_cache(len(x))
    with torch.no_grad():
        first = x.shape[1] - 3
        parts = [layer(x[:, :first], cache=cache)]
        parts += [layer(x[:, t : t + 1], cache=cache) for t in range(first, x.shape[1])]
    return torch.cat(parts, 1), cache.recurrent_state


def test_a_name_that_only_the_chunked_op_has(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The chunked op runs on the backend that is named; what has no such backend runs as with auto,
    which is logged once for each of them."""
    ran = []

    def load() -> Any:
        def forward(problem: Any, *rest: Any) -> Any:
            ran.append(problem.T)
            return reference_chunk.forward(problem, *rest)

        return forward

    named = Backend("cuda", lambda problem: None, load)
    monkeypatch.setattr(CHUNK, "backends", (named, *CHUNK.backends[1:]))
    monkeypatch.setattr(backends, "_logged", set())
    caplog.set_level("INFO", logger="gdn_triton")
    layer = make_layer(dtype=FP32, device=device)
    x = make_input(2, RECURRENT_TOKENS + 4, FP32, device)
    monkeypatch.setenv("GDN_BACKEND", "reference")
    expected = prefill_and_decode(layer, x)
    monkeypatch.setenv("GDN_BACKEND", "cuda")
    for _ in range(2):
        for found, y in zip(prefill_and_decode(layer, x), expected, strict=True):
            torch.testing.assert_close(found, y, rtol=1e-4, atol=1e-5)
    assert ran == [RECURRENT_TOKENS + 1] * 2
    said = [record.getMessage() for record in caplog.records]
    for name in ("causal_conv1d", "causal_conv1d_update", "recurrent_step"):
        (message,) = (m for m in said if f"which {name} does not have" in m)
        assert message.startswith("GDN_BACKEND=cuda, which") and "Not cuda: The CUDA lib" in message

    layer(x).sum().backward()
    assert layer.q_proj.weight.grad is not None and len(ran) == 3


@pytest.mark.gpu("the CUDA library runs there only")
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_on_the_cuda_library(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill, decoding and training under GDN_BACKEND=cuda, beside the same layer in float64."""
    from gdn_triton import fast
    from gdn_triton.fast import chunk

    if not fast.is_available():
        pytest.skip(str(fast.why_unavailable()))
    calls = []
    operator = chunk._operator
    monkeypatch.setattr(chunk, "_operator", lambda name: calls.append(name) or operator(name))
    layer, x = make_layer(dtype=dtype, device=device), make_input(2, 200, dtype, device)
    monkeypatch.setenv("GDN_BACKEND", "reference")
    wide = prefill_and_decode(copy.deepcopy(layer).double(), x.double())
    narrow = prefill_and_decode(layer, x)
    monkeypatch.setenv("GDN_BACKEND", "cuda")
    found = prefill_and_decode(layer, x)
    assert calls == ["chunk_forward"]
    for name, a, b, c in zip(("y", "states"), found, wide, narrow, strict=True):
        unit = torch.finfo(dtype).eps / 2
        assert_within_budget(name, a, b.double(), c, dtype=a.dtype, unit=unit)
    layer(x).sum().backward()
    assert calls == ["chunk_forward"] * 2
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_a_bare_process() -> None:
    """The package does not import its layers, they import no Triton, and the device of a context,
    which the suite's poisoned allocations would hide, is theirs."""
    code = """
import sys, torch, gdn_triton
assert not [m for m in sys.modules if m.startswith("gdn_triton.layers")]
from gdn_triton.layers import GatedDeltaNet
assert "triton" not in sys.modules and "transformers" not in sys.modules
with torch.device("meta"):
    layer = GatedDeltaNet(hidden_size=12, head_dim=4, num_heads=2)
assert all(p.is_meta for p in layer.parameters())
"""
    subprocess.run([sys.executable, "-c", code], check=True)
