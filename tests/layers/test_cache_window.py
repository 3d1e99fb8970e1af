"""A cache of the layer that keeps a window: decoding, prefill between steps, slots, compilers."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from helpers import BF16, FP32, FP64, assert_within_budget, same_bits
from layer_cases import Graphs, make_input, make_layer, offsets_of, rows_written_out
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gdn_triton import make_window
from gdn_triton.layers import GatedDeltaNet, GatedDeltaNetCache, decoding
from gdn_triton.layers import cache as cache_module

# The operators that count the tokens of named slots.
NAMED = ["aten.threshold.default", "aten.index_select.default", "aten.index_add_.default"]
OPTIONS = ["value-groups", "no-output-gate", "no-convolution", "reflections"]


@torch.no_grad()
def assert_rows(layer: GatedDeltaNet, x: Tensor, y: Tensor) -> None:
    """y has the last rows of the layer's results for x, as exactly as float32 gives them."""
    T = y.shape[1]
    exact = rows_written_out(copy.deepcopy(layer).double(), x.double())[:, -T:]
    narrow = rows_written_out(layer, x, state_dtype=FP32)[:, -T:]
    assert_within_budget("y", y, exact, narrow, dtype=x.dtype, unit=torch.finfo(x.dtype).eps / 2)


@torch.no_grad()
@pytest.mark.parametrize("name", OPTIONS)
def test_forty_steps(name: str, device: str) -> None:
    """More steps than a window has rows, and more than one period of folds."""
    layer, x = make_layer(name, FP32, device), make_input(2, 40, FP32, device)
    cache, plain = (layer.make_cache(4, window=window) for window in (True, False))
    assert cache.window is not None and cache.window.u.shape[1] < 40
    slots = torch.tensor([3, 1], device=device)
    for made in (cache, plain):
        steps = [layer(token, cache=made, slots=slots) for token in x.split(1, 1)]
        assert_rows(layer, x, torch.cat(steps, 1))
    cache.fold(slots)
    torch.testing.assert_close(cache.recurrent_state[slots], plain.recurrent_state[slots])
    assert cache.positions is not None and cache.positions.tolist() == [0, 40, 0, 40, 0]


@torch.no_grad()
@pytest.mark.parametrize("lengths", [[20] + [1] * 9 + [70] + [1] * 5, [1] * 9 + [3] + [1] * 20])
@pytest.mark.parametrize("mode", ["chunk", "fused_recurrent"])
def test_prefill_between_steps(mode: str, lengths: list[int]) -> None:
    layer = make_layer(dtype=FP32, mode=mode)
    x = make_input(3, sum(lengths), FP32)
    cache = layer.make_cache(5, window=True)
    slots = torch.tensor([4, 0, 2], dtype=torch.int32)
    calls = [layer(part, cache=cache, slots=slots) for part in x.split(lengths, 1)]
    assert_rows(layer, x, torch.cat(calls, 1))


def test_training_between_steps() -> None:
    """With gradients, from and to the states of a window, as a cache without one."""
    layer, x = make_layer(dtype=FP32), make_input(2, 30, FP32)
    found = []
    for window in (True, False):
        layer.zero_grad()
        cache = layer.make_cache(2, window=window)
        with torch.no_grad():
            steps = [layer(token, cache=cache) for token in x[:, :18].split(1, 1)]
        y = layer(x[:, 18:25], cache=cache)
        y.square().sum().backward()
        with torch.no_grad():
            steps += [y.detach(), *(layer(token, cache=cache) for token in x[:, 25:].split(1, 1))]
        assert_rows(layer, x, torch.cat(steps, 1))
        found.append({name: p.grad.clone() for name, p in layer.named_parameters()})
    for name, grad in found[1].items():
        assert grad.any()
        torch.testing.assert_close(found[0][name], grad, rtol=1e-4, atol=1e-5, msg=name)


@torch.no_grad()
def test_packed_and_masked_steps() -> None:
    """Sequences have one token in a call or none."""
    layer, x = make_layer(dtype=FP32), make_input(3, 24, FP32)
    packed, masked = (layer.make_cache(4, window=True) for _ in range(2))
    slots = torch.tensor([2, 3, 0])
    done, rows = [0, 0, 0], [[], [], []]
    masked_rows: list[list[Tensor]] = [[], [], []]
    for t in range(24):
        lengths = [1, int(t % 2 == 0), int(t % 3 > 0)]
        chosen = [
            x[n, d : d + count] for n, (d, count) in enumerate(zip(done, lengths, strict=True))
        ]
        y = layer(
            torch.cat(chosen)[None], cache=packed, slots=slots, cu_seqlens=offsets_of(lengths)
        )
        for n, part in enumerate(y[0].split(lengths)):
            rows[n].append(part)
        token = torch.stack([x[n, d : d + 1] for n, d in enumerate(done)])
        mask = torch.tensor(lengths)[:, None]
        y = layer(token, mask, cache=masked, slots=slots)
        for n, count in enumerate(lengths):
            masked_rows[n].append(y[n, :count])
        done = [d + count for d, count in zip(done, lengths, strict=True)]
    for n, end in enumerate(done):
        assert_rows(layer, x[n : n + 1, :end], torch.cat(rows[n])[None])
        assert_rows(layer, x[n : n + 1, :end], torch.cat(masked_rows[n])[None])
    assert packed.positions is not None and masked.positions is not None
    # A packed row of several tokens may be one sequence's, so only rows of one token are steps.
    assert packed.positions[slots].tolist() == [4, 0, 0]
    assert masked.positions[slots].tolist() == done


@torch.no_grad()
@pytest.mark.parametrize("skip", ["negative", "non_positive"])
@pytest.mark.parametrize("T", [1, 5, 70])
def test_padding(skip: str, T: int) -> None:
    """Skipped sequences change nothing of any slot, in steps and in calls that fold."""
    layer = make_layer(dtype=FP32)
    cache = layer.make_cache(4, skip=skip, window=True)
    assert cache.window is not None and cache.positions is not None
    past = make_input(2, 20, FP32)
    for token in past.split(1, 1):
        layer(token, cache=cache, slots=torch.tensor([3, 2]))
    before = copy.deepcopy(cache)
    assert before.window is not None and before.positions is not None
    nobody = 0 if skip == "non_positive" else -1
    slots = torch.tensor([nobody, -(2**31), 3], dtype=torch.int32)
    x = make_input(3, 20 if T == 1 else T, FP32)
    x[:2] = torch.nan
    y = torch.cat([layer(part, cache=cache, slots=slots) for part in x.split(T, 1)], 1)
    assert not y[:2].any()
    assert_rows(layer, torch.cat([past[:1], x[2:]], 1), y[2:])
    kept = [1, 2]
    for now, was in (
        (cache.recurrent_state, before.recurrent_state),
        (cache.positions, before.positions),
        (cache.window.start, before.window.start),
        (cache.window.calls, before.window.calls),
    ):
        assert torch.equal(now[kept], was[kept])
    cache.fold()
    before.fold()
    assert torch.equal(cache.recurrent_state[kept], before.recurrent_state[kept])
    assert not torch.equal(cache.recurrent_state[3], before.recurrent_state[3])


@torch.no_grad()
def test_reset_forgets_the_records() -> None:
    layer, x = make_layer(dtype=FP32), make_input(3, 20, FP32)
    cache = layer.make_cache(3, window=True)
    tokens = x.split(1, 1)
    expected = torch.cat([layer(token, cache=cache) for token in tokens], 1)
    cache.fold()  # start of each slot is its position
    cache.reset(torch.tensor([2, -1, 0]))
    slots = torch.tensor([0, 2])
    again = [layer(token[[0, 2]], cache=cache, slots=slots) for token in tokens]
    assert torch.equal(torch.cat(again, 1), expected[[0, 2]])
    cache.reset()
    assert torch.equal(torch.cat([layer(token, cache=cache) for token in tokens], 1), expected)


@torch.no_grad()
def test_states_are_copied_to_other_slots() -> None:
    """Reading folds and writing restarts. A slot's former owner does not change a bit."""
    layer, x = make_layer(dtype=FP32), make_input(2, 40, FP32)
    cache = layer.make_cache(3, window=True)
    past, rest = (y.split(1, 1) for y in x.split([21, 19], 1))
    steps = [layer(token, cache=cache, slots=torch.tensor([0, 1]))[:1] for token in past]
    source, target = torch.tensor([0, -1, 0]), torch.tensor([1, -1, 2])
    for name, slots in (("conv_state", source), ("recurrent_state", source[:2])):
        states = cache.read(name, slots)[[0, 1, 0]]
        assert states[0].any() and not states[1].any()
        cache.write(name, target, states)
    used, unused = (
        torch.cat([layer(token[:1], cache=cache, slots=slot) for token in rest], 1)
        for slot in (target[:1], target[2:])
    )
    assert same_bits(used, unused)
    assert_rows(layer, x[:1], torch.cat([*steps, used], 1))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_tokens_narrower_than_the_weights(dtype: torch.dtype) -> None:
    """Autocast: the records hold the keys in the weights' dtype, and y has that of autocast."""
    layer, x = make_layer(dtype=FP32), make_input(2, 20, FP32)
    cache, plain = (layer.make_cache(2, dtype=dtype, window=window) for window in (True, False))
    with torch.autocast("cpu", BF16):
        ys = [
            torch.cat([layer(token, cache=made) for token in x.split(1, 1)], 1)
            for made in (cache, plain)
        ]
    assert ys[0].dtype == BF16
    exact = rows_written_out(copy.deepcopy(layer).double(), x.double())
    assert_within_budget("y", ys[0], exact, ys[1], dtype=BF16, unit=torch.finfo(BF16).eps / 2)


@torch.no_grad()
def test_tokens_wider_than_the_window_are_refused() -> None:
    layer, x = make_layer(dtype=FP32), make_input(1, 1)
    cache = layer.make_cache(1, dtype=FP64, window=False)
    narrow = layer.make_cache(1, window=True)
    layer.double()
    cache = GatedDeltaNetCache(
        cache.conv_state, cache.recurrent_state, "negative", narrow.window, narrow.positions
    )
    message = "cache must have a window whose keys hold the tokens' torch.float64, got keys of"
    with pytest.raises(ValueError, match=message):
        layer(x, cache=cache)
    assert cache.conv_state is not None and cache.positions is not None
    assert not cache.conv_state.any() and not cache.positions.any()


@torch.no_grad()
def test_calls_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps fold nothing, and calls of several tokens fold once and take no window."""
    layer, x = make_layer(dtype=FP32), make_input(2, 70, FP32)
    calls: list[tuple[str, bool]] = []
    for module, name in ((decoding, "layer_step"), (decoding, "recurrent_step")):
        inner = getattr(module, name)

        def called(*args: Any, name: str = name, inner: Any = inner, **given: Any) -> Tensor:
            calls.append((name, given["window"] is not None))
            return inner(*args, **given)

        monkeypatch.setattr(module, name, called)
    fold = cache_module.fold_window

    def folded(*args: Any, **given: Any) -> None:
        calls.append(("fold_window", True))
        fold(*args, **given)

    monkeypatch.setattr(cache_module, "fold_window", folded)
    cache = layer.make_cache(2, window=True)
    for T, mask, expected in (
        (1, None, [("layer_step", True)]),
        (1, torch.ones(2, 1), [("recurrent_step", True)]),
        (2, None, [("fold_window", True), ("recurrent_step", False)]),
        (70, None, [("fold_window", True)]),
    ):
        calls.clear()
        layer(x[:, :T], mask, cache=cache)
        assert calls == expected


class Launched(TorchDispatchMode):
    """Counts the operators of torch that launch a kernel on a GPU: all but those of views."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators[str(func)] += not func.is_view
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("skip", ["negative", "non_positive"])
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(None, ["aten.add_.Tensor"]), (torch.int32, NAMED), (torch.int64, NAMED)],
    ids=["all-slots", "int32", "int64"],
)
def test_launches_that_count_tokens(
    dtype: torch.dtype | None, expected: list[str], skip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with a window launches the operators of a step without one, and these in addition."""
    monkeypatch.setattr(decoding, "layer_step", lambda *args, gate, **given: gate)
    layer, x = make_layer(dtype=FP32), make_input(2, 1, FP32)
    slots = None if dtype is None else torch.tensor([3, 1], dtype=dtype)
    found = []
    for window in (True, False):
        cache = layer.make_cache(4, skip=skip, window=window)
        with Launched() as launched:
            layer(x, cache=cache, slots=slots)
        found.append(launched.operators)
    assert found[0] - found[1] == Counter(expected)
    assert not found[1] - found[0]


@torch.no_grad()
@pytest.mark.parametrize("slots", [None, [3, 1], [3, -7]], ids=["all-slots", "named", "padding"])
@pytest.mark.parametrize("skip", ["negative", "non_positive"])
def test_positions_after_calls_of_drafts(slots: list[int] | None, skip: str) -> None:
    """The window takes several tokens a call, and one of the calls has a mask."""
    layer, x = make_layer(dtype=FP32), make_input(2, 8, FP32)
    given = None if slots is None else torch.tensor(slots, dtype=torch.int32)
    plain, cache = (layer.make_cache(4, skip=skip) for _ in range(2))
    H, HV, K, V = layer.num_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    cache = GatedDeltaNetCache(
        *(cache.conv_state, cache.recurrent_state, skip),
        make_window(5, H, HV, K, V, FP32, "cpu", max_tokens=3),
        torch.zeros(5, dtype=torch.int32),
    )
    for part, mask in zip(
        x.split([3, 1, 2, 2], 1), [None, None, [[1, 1], [0, 1]], None], strict=True
    ):
        kept = None if mask is None else torch.tensor(mask)
        y = layer(part, kept, cache=cache, slots=given)
        expected = layer(part, kept, cache=plain, slots=given)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    first = 1 if skip == "non_positive" else 0
    counted = dict(zip(slots or [first, first + 1], [8, 7], strict=True))
    assert cache.positions is not None
    assert cache.positions[:4].tolist() == [counted.get(slot, 0) for slot in range(4)]


@torch.no_grad()
@pytest.mark.parametrize("named", [False, True], ids=["all-slots", "named-slots"])
def test_compiled_steps(named: bool, device: str) -> None:
    layer, x = make_layer(dtype=FP32, device=device), make_input(2, 100, FP32, device)
    slots = torch.tensor([2, 1], device=device) if named else None
    graphs = Graphs()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs, dynamic=False)
    cache = layer.make_cache(3, window=True)
    lengths = [1] * 5 + [66] + [1] * 20 + [4] + [1] * 5
    calls = [compiled(part, cache=cache, slots=slots) for part in x.split(lengths, 1)]
    assert_rows(layer, x, torch.cat(calls, 1))
    assert graphs.seen == 3  # one token, prefill, several tokens


@torch.no_grad()
@pytest.mark.parametrize("slots", [None, torch.tensor([1, 0])], ids=["all-slots", "named-slots"])
def test_made_in_inference_mode(slots: Tensor | None) -> None:
    layer, x = make_layer(dtype=FP32), make_input(2, 20, FP32)
    with torch.inference_mode():
        cache = layer.make_cache(2, window=True)
    steps = [layer(token, cache=cache, slots=slots) for token in x.split(1, 1)]
    assert_rows(layer, x, torch.cat(steps, 1))
    cache.reset()
    assert not cache.recurrent_state.any()


def wrong_caches() -> list[tuple[dict[str, Any], type[Exception], str]]:
    window = make_window(3, 1, 1, 2, 2, FP32, "cpu")
    scaled = make_window(3, 1, 1, 2, 2, FP32, "cpu", with_scales=True)
    positions = torch.zeros(3, dtype=torch.int32)
    return [
        ({"positions": positions}, ValueError, "positions must be None without window"),
        ({"window": True}, TypeError, "window must be a gdn_triton.StepWindow, got bool"),
        ({"window": window}, TypeError, "positions must be a torch.Tensor, got NoneType"),
        ({"window": window, "positions": positions.long()}, ValueError, "positions must be int32"),
        ({"window": window, "positions": positions[:2]}, ValueError, r"int32 \[slots \+ 1 = 3\]"),
        (
            {"window": make_window(2, 1, 1, 2, 2, FP32, "cpu"), "positions": positions},
            ValueError,
            r"window.u must have slots \+ 1 = 3 rows",
        ),
        ({"window": scaled, "positions": positions}, ValueError, "window.scales must be None"),
        (
            {"window": window, "positions": positions.to("meta")},
            ValueError,
            "positions must be on the device of recurrent_state",
        ),
        (
            {"window": window, "positions": positions[:1].expand(3)},
            ValueError,
            "positions must have memory of its own",
        ),
    ]


@pytest.mark.parametrize("case", range(len(wrong_caches())))
def test_wrong_windows(case: int) -> None:
    given, error, message = wrong_caches()[case]
    with pytest.raises(error, match=message):
        GatedDeltaNetCache(None, torch.zeros(3, 1, 2, 2), **given)


def test_wrong_choice() -> None:
    layer: Any = make_layer()
    expected = 'window must be True, False or "auto"'
    with pytest.raises(TypeError, match=rf"{expected}, got 1 \(int\)"):
        layer.make_cache(2, window=1)
    with pytest.raises(ValueError, match=f"{expected}, got 'always'"):
        layer.make_cache(2, window="always")


@pytest.mark.parametrize(("dtype", "states"), [(FP32, 1024), (FP64, 1024), (BF16, 2048)])
def test_window_by_the_number_of_states(dtype: torch.dtype, states: int) -> None:
    layer = make_layer(dtype=FP32)
    HV = layer.num_v_heads
    for slots, has_window in ((states // HV - 1, False), (-(-states // HV), True)):
        cache = layer.make_cache(slots, state_dtype=dtype, window="auto")
        assert (cache.window is not None) == has_window
        assert (cache.counters is None) == has_window


@torch.no_grad()
def test_wrong_slots_of_a_fold() -> None:
    cache = make_layer(dtype=FP32).make_cache(3, window=True)
    for call in (cache.fold, cache.restart):
        with pytest.raises(ValueError, match="slots must be less than the 3 slots of the cache"):
            call(torch.tensor([0, 3]))


@pytest.mark.gpu("CUDA graphs")
@torch.no_grad()
def test_cuda_graph_of_a_step(device: str) -> None:
    """Captured for the largest batch: slots and tokens change in place, positions by the replay."""
    layer, x = make_layer(dtype=BF16, device=device), make_input(3, 60, BF16, device)
    cache, expected_cache = (layer.make_cache(4, window=True) for _ in range(2))
    token, slots = x[:, :1].clone(), torch.tensor([-1, -1, -1], device=device)
    layer(token, cache=cache, slots=slots)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(token, cache=cache, slots=slots)
    for t in range(60):
        token.copy_(x[:, t : t + 1])
        slots.copy_(torch.tensor(([3, 0, 1], [3, -1, 1], [-1, 0, 2])[t % 3]))
        expected = layer(token, cache=expected_cache, slots=slots)
        graph.replay()
        assert same_bits(y, expected)
    for made in (cache, expected_cache):
        made.fold()
    assert same_bits(cache.recurrent_state[:-1], expected_cache.recurrent_state[:-1])
