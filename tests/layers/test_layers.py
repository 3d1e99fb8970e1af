"""The whole layer: against its arithmetic written out token by token, and against the layers of
other libraries where those are installed."""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import FP16, FP32, FP64, assert_within_budget, same_bits
from layer_cases import (
    HIDDEN,
    MASKS,
    OPTIONS,
    assert_gradients,
    close,
    gradients,
    make_input,
    make_layer,
    offsets_of,
    rows_written_out,
    written_out,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gdn_triton import causal_conv1d, chunk_gated_delta_rule, rms_norm_gated
from gdn_triton.layers import GatedDeltaNet, convolution, decoding, gated_deltanet
from gdn_triton.layers.convolution import CONV_STEP_TOKENS, conv_from_states
from gdn_triton.layers.gated_deltanet import RECURRENT_TOKENS
from gdn_triton.reference import conv as reference_conv

LENGTHS = (0, 5, 1, 0, 17, 2, 0)
each_option = pytest.mark.parametrize("name", OPTIONS)


def packed_written_out(layer: GatedDeltaNet, x: Tensor, lengths: Sequence[int]) -> Tensor:
    """The layer written out for sequences in a row in x [1, T, hidden]. y is 0 after the last."""
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


@each_option
def test_the_gated_norm_is_the_package_s(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is an output gate, with its activation; once a call, in a compiled graph too."""
    seen = []

    def note(*args: Any) -> Tensor:
        seen.append(args[3:])
        return rms_norm_gated(*args)

    layer, x = make_layer(name), make_input(2, 5)
    expected = rows_written_out(layer, x)
    monkeypatch.setattr(decoding, "rms_norm_gated", note)
    gate = "sigmoid" if name == "sigmoid-gate" else "silu"
    once = [(layer.o_norm.eps, gate)] if layer.use_gate else []
    close(layer(x), expected)
    assert seen == once
    torch.compiler.reset()
    close(torch.compile(layer, fullgraph=True, backend="eager")(x), expected)
    assert seen == once * 2
    torch.compiler.reset()


def test_the_rule_is_told_the_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """By themselves and in a compiled graph; the rule of single tokens takes none."""
    told: list[Tensor | None] = []

    def rule(*, cu_seqlens_cpu: Tensor | None, **given: Any) -> tuple[Tensor, Tensor | None]:
        told.append(cu_seqlens_cpu)
        return chunk_gated_delta_rule(**given, cu_seqlens_cpu=cu_seqlens_cpu)

    monkeypatch.setattr(gated_deltanet, "chunk_gated_delta_rule", rule)
    layer, x = make_layer(), make_input(1, 70)
    cu_seqlens = offsets_of([66, 4])
    expected = layer(x, cu_seqlens=cu_seqlens)
    on_host = cu_seqlens.clone()
    close(layer(x, cu_seqlens=cu_seqlens, cu_seqlens_cpu=on_host), expected)
    assert told[0] is None and told[1] is on_host
    monkeypatch.undo()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    close(compiled(x, cu_seqlens=cu_seqlens, cu_seqlens_cpu=on_host), expected)
    with torch.no_grad():
        few = offsets_of([3, 1])
        y = layer(x[:, :4], cu_seqlens=few, cu_seqlens_cpu=few)
        close(y, layer(x[:, :4], cu_seqlens=few))


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

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            ran.append(name)
            return function(*args, **kwargs)

        return call

    for name in names:
        (module,) = (m for m in (gated_deltanet, convolution, decoding) if hasattr(m, name))
        monkeypatch.setattr(module, name, watched(name, getattr(module, name)))
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
    """The choice that the docstring of `mode` describes."""
    chunked, by_token = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"
    ran = watch((chunked, by_token, "recurrent_step"), monkeypatch)
    run_all(make_layer(mode=mode))
    if mode == "chunk":
        assert ran == [chunked, by_token, chunked, "recurrent_step", chunked]
    else:
        assert ran == [chunked, by_token, by_token, "recurrent_step", "recurrent_step"]


def test_which_convolution_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, from_states, step = "causal_conv1d", "conv_from_states", "layer_step"
    ran = watch((plain, "causal_conv1d_update", from_states, step), monkeypatch)
    layer = make_layer()
    run_all(layer)
    layer(make_input(1, 2), cache=layer.make_cache(1))
    with torch.no_grad():
        layer(make_input(1, CONV_STEP_TOKENS), cache=layer.make_cache(1))
    # conv_from_states calls the plain one itself, and `layer_step` convolves.
    assert ran == [plain, plain, plain, plain, plain, from_states, plain, step]


def test_one_token_is_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients and from a cache that holds the tokens' dtype; else the parts."""
    names = ("layer_step", "causal_conv1d_update", "recurrent_step", "rms_norm_gated")
    ran, parts = watch(names, monkeypatch), list(names[1:])
    layer, x = make_layer(), make_input(2, 1)
    mask = torch.ones(2, 1)
    with torch.no_grad():
        for cache, more, expected in (
            (layer.make_cache(2), {}, ["layer_step"]),
            (layer.make_cache(2), {"slots": torch.tensor([1, -1])}, ["layer_step"]),
            (layer.make_cache(2), {"attention_mask": mask}, parts),
            (layer.make_cache(2, dtype=torch.float16), {}, parts),
        ):
            ran.clear()
            layer(x, cache=cache, **more)
            assert ran == expected


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
@pytest.mark.parametrize("norm_eps", [1e-5, 0.0])
def test_what_padding_holds_reaches_no_gradient(norm_eps: float, form: str, value: float) -> None:
    """As if it held zeros, to the last bit: y, all parameters' gradients and those of x, which are
    0 for the padding. Without an epsilon the norm divides the zeros of the padding by 0; one of
    1e-30 does not change a float64 row of any token."""
    layer = make_layer()
    layer.o_norm.eps = norm_eps or 1e-30
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
    assert all(gradient.isfinite().all() for gradient in expected.values())
    layer.o_norm.eps = norm_eps
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
    """The states from earlier calls are constants."""
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
