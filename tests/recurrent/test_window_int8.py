"""Pools of int8 with the scales of a window: what is stored, what is refused, how it errs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import FP16, FP32, FP64
from window_cases import LAYOUTS, Case, Decoding, cloned_window

import gdn_triton
from gdn_triton import fold_window, make_window, recurrent_step, restart_window

pytest.importorskip("triton", reason="Triton is not installed")

INT8 = torch.int8
CASE = Case(pool=INT8, max_tokens=2, dtype=FP16)


@pytest.fixture(autouse=True, params=["triton", "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("GDN_BACKEND", request.param)
    return str(request.param)


@LAYOUTS
def test_packed_and_unpacked(v_first: bool, device: str) -> None:
    """No number is off by more than half a step of its channel, and the largest one of a channel is
    stored as 127."""
    window = make_window(5, 1, 2, 8, 6, FP32, device, with_scales=True)
    shape = (6, 8) if v_first else (8, 6)
    pool = torch.full((5, 2, *shape), 99, dtype=INT8, device=device)
    states = torch.randn(2, 2, *shape, device=device)
    slots = torch.tensor([3, 0], device=device)
    window.pack(pool, slots, states, state_v_first=v_first)
    found = window.unpacked(pool, slots, state_v_first=v_first)
    keys = -1 if v_first else -2
    largest = states.abs().amax(keys, keepdim=True)
    assert ((found - states).abs() <= largest / 253.99).all()
    assert (pool[slots].abs().amax(keys) == 127).all()
    assert (pool[[1, 2, 4]] == 99).all() and not window.scales[[1, 2, 4]].any()


def test_a_channel_that_is_zero_or_not_finite(device: str, backend: str) -> None:
    """Zeros stay zeros through a fold, and a channel of magnitudes of at most 1e-30 becomes zero. A
    channel with NaN or an infinity is NaN, the others are as they were."""
    window = make_window(1, 1, 1, 16, 16, FP32, device, with_scales=True)
    pool = torch.empty(1, 1, 16, 16, dtype=INT8, device=device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    states = torch.randn(1, 1, 16, 16, device=device)
    states[..., 3] = 0
    states[..., 4], states[..., 6] = 1e-30, -9e-31
    states[..., 5, 7], states[..., 2, 8] = torch.nan, torch.inf
    window.pack(pool, slots, states)
    restart_window(window, slots, slots)
    others = [i for i in range(16) if i not in (3, 4, 6, 7, 8)]
    before = window.unpacked(pool, slots)
    assert before[..., [7, 8]].isnan().all() and not before[..., [3, 4, 6]].any()
    assert before[..., others].isfinite().all() and before[..., others].any(-2).all()
    token = torch.zeros(1, 1, 16, device=device)
    zero = torch.zeros(1, 1, device=device)
    step = {"q": token, "k": token, "v": token, "g": zero, "beta": zero}
    for position in range(20):
        now = torch.full_like(slots, position)
        recurrent_step(pool, slots, **step, window=window, positions=now)
    fold_window(pool, window, slots, torch.full_like(slots, 20))
    after = window.unpacked(pool, slots)
    torch.testing.assert_close(after, before, equal_nan=True)


@LAYOUTS
def test_a_prefill_goes_on_from_a_pool(v_first: bool, device: str) -> None:
    """Fold, unpack, prefill, pack, restart: the steps after it continue the sequence."""
    case = replace(CASE, dtype=FP32, v_first=v_first)
    run = Decoding(case, device)
    for _ in range(5):
        run.step(run.tokens(2))
    live = run.slots[run.live].long()
    fold_window(run.pool, run.window, run.slots, run.positions, state_v_first=v_first)
    before = run.window.unpacked(run.pool, live, state_v_first=v_first)
    x = run.tokens(9)
    _, after = gdn_triton.chunk_gated_delta_rule(
        **{name: y[run.live] for name, y in x.items()},
        initial_state=before,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        state_v_first=v_first,
    )
    run.window.pack(run.pool, live, after, state_v_first=v_first)
    run.accept(x, [9] * case.N)
    restart_window(run.window, run.slots, run.positions)
    run.check_states()
    for _ in range(5):
        run.step(run.tokens(2))
    run.finish()


def test_errors_do_not_grow(device: str) -> None:
    """A float16 pool is rounded after each token, and an int8 pool in each fold, which is once in
    R + 1 - 2 D tokens. A step of int8 is 16 times as wide at the largest number of a channel. After
    many periods the error with int8 is less than 16 times that with float16."""
    run = Decoding(replace(CASE, dtype=FP32, rows=16, HV=1, max_tokens=1), device)
    other = run.pool.to(FP16).mul_(run.window.scales[..., None, :].to(FP16))
    exact = (run.pool * run.window.scales[..., None, :]).to(FP64)
    errors = []
    for i in range(90):
        x = run.tokens(1)
        given = run.arguments(x)
        mine = recurrent_step(**given)
        run.positions = run.positions + 1
        plain = {name: y for name, y in given.items() if name not in ("window", "positions")}
        theirs = recurrent_step(**{**plain, "state": other})
        x = {name: y[run.live].to(FP64) for name, y in x.items()}
        slots = run.slots[run.live].long()
        o, exact[slots] = gdn_triton.reference.recurrent_gated_delta_rule(
            **x, initial_state=exact[slots], use_qk_l2norm=True
        )
        if i >= 60:
            errors.append([(y[run.live] - o).square().sum() for y in (mine, theirs)])
    wrong, of_float16 = torch.tensor(errors).sum(0).sqrt()
    assert 0 < wrong < 16 * of_float16


def arguments() -> dict[str, Any]:
    q, v = torch.zeros(3, 2, 8), torch.zeros(3, 4, 6)
    return {
        "state": torch.zeros(5, 4, 8, 6, dtype=INT8),
        "read_slots": torch.arange(3),
        **{"q": q, "k": q, "v": v, "g": v[..., 0], "beta": v[..., 0]},
        "window": make_window(5, 2, 4, 8, 6, FP32, "cpu", with_scales=True),
        "positions": torch.zeros(3, dtype=torch.int32),
    }


def test_refusals() -> None:
    x = arguments()
    window = x["window"]
    bare = window._replace(scales=None)
    with pytest.raises(ValueError, match=r"state must be .* or have the scales of a window"):
        recurrent_step(**{**x, "window": bare})
    with pytest.raises(ValueError, match=r"state must be torch.int8 with window.scales, got torch"):
        recurrent_step(**{**x, "state": x["state"].float()})
    with pytest.raises(ValueError, match=r"window.scales must have shape \[slots=5, HV=4, V=6\]"):
        recurrent_step(**{**x, "window": window._replace(scales=torch.zeros(5, 4, 8))})
    half = window._replace(scales=torch.zeros(5, 4, 6, dtype=FP16))
    with pytest.raises(ValueError, match=r"window.scales must be torch.float32"):
        recurrent_step(**{**x, "window": half})
    slots = torch.arange(3)
    with pytest.raises(ValueError, match=r"state must be .* or have the scales of a window"):
        fold_window(x["state"], bare, slots, slots * 0)
    with pytest.raises(TypeError, match="with_scales must be True or False, got 1"):
        make_window(5, 2, 4, 8, 6, FP32, "cpu", with_scales=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"window.scales must be a tensor, of an int8 pool"):
        bare.unpacked(x["state"], slots)
    with pytest.raises(ValueError, match="slots must be at least 0 and less than the 5 slots, got"):
        window.unpacked(x["state"], slots - 1)
    states = torch.zeros(3, 4, 8, 6)
    with pytest.raises(ValueError, match="slots must name no slot twice"):
        window.pack(x["state"], slots * 0, states)
    with pytest.raises(ValueError, match=r"states must have shape \[3, 4, 8, 6\]"):
        window.pack(x["state"], slots, states.mT)
    with pytest.raises(TypeError, match=r"states must be a torch.Tensor, got NoneType"):
        window.pack(x["state"], slots, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"states must be a strided tensor"):
        window.pack(x["state"], slots, states.to_sparse())
    with pytest.raises(NotImplementedError, match=r"pack .* has no gradient; states requires one"):
        window.pack(x["state"], slots, states.requires_grad_())
    with pytest.raises(ValueError, match=r"window.scales must be torch.float32, got torch.float16"):
        half.unpacked(x["state"], slots)
    for scales, error, message in (
        (torch.zeros(5, 4), ValueError, "window.scales must have 3 dimensions"),
        ([1.0], TypeError, "window.scales must be a torch.Tensor, got list"),
    ):
        with pytest.raises(error, match=message):
            window._replace(scales=scales).unpacked(x["state"], slots)  # type: ignore[arg-type]


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_packs(device: str) -> None:
    """Nothing reads the slots in a trace."""
    pools = [torch.zeros(5, 4, 8, 6, dtype=INT8, device=device) for _ in range(2)]
    slots = torch.tensor([3, 0], device=device)
    states = torch.randn(2, 4, 8, 6, device=device)
    found = []
    for pool, is_compiled in zip(pools, (False, True), strict=True):
        window = make_window(5, 2, 4, 8, 6, FP32, device, with_scales=True)
        pack, unpacked = (
            torch.compile(call, fullgraph=True, backend="aot_eager") if is_compiled else call
            for call in (window.pack, window.unpacked)
        )
        pack(pool, slots, states)
        found.append((unpacked(pool, slots), window.scales))
    assert torch.equal(*pools) and pools[0].any()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_compiled(device: str) -> None:
    """A step and a fold on an int8 pool are operators that write the pool and its scales."""
    run = Decoding(CASE, device)
    x = run.arguments(run.tokens(2))
    again = {**x, "state": run.pool.clone(), "window": cloned_window(run.window)}

    def both(x: dict[str, Any]) -> torch.Tensor:
        o = recurrent_step(**x)
        fold_window(x["state"], x["window"], x["read_slots"], x["positions"] + 2)
        return o

    expected = both(x)
    o = torch.compile(both, fullgraph=True, backend="aot_eager")(again)
    assert torch.equal(o, expected) and torch.equal(again["state"], run.pool)
    assert torch.equal(again["window"].scales, run.window.scales)
