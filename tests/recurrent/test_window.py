"""Decoding with a window: every fill of the window over several fold periods, against the
recurrence in float64 (tests/support/window_cases.py)."""

from dataclasses import replace

import pytest
import torch
from helpers import FP16, FP32, same_bits
from torch import Tensor
from window_cases import (
    DRAFTS,
    LAYOUTS,
    POOLS,
    REAL,
    Case,
    Decoding,
    cloned_window,
    copied,
    tokens_of,
)

import gdn_triton
from gdn_triton import accept_window, fold_window, recurrent_step, restart_window
from gdn_triton.recurrent.problem import fold_period, turns

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture(autouse=True, params=["triton", "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("GDN_BACKEND", request.param)
    return str(request.param)


@LAYOUTS
@pytest.mark.parametrize("pool", POOLS)
def test_one_token(pool: torch.dtype, v_first: bool, device: str) -> None:
    """Each head is folded three times, and each fill of the window comes with each head."""
    case = Case(pool=pool, v_first=v_first, dtype=tokens_of(pool), raw=True, mixed=True)
    run = Decoding(case, device)
    for _ in range(3 * case.period + 2):
        run.step(run.tokens(1))
    fold_window(run.pool, run.window, run.slots, run.positions, state_v_first=v_first)
    run.check_states()
    run.finish()


@LAYOUTS
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(K=20, V=70, H=1, HV=2, rows=2), id="period 1"),
        pytest.param(Case(K=40, V=70, H=2, HV=4, rows=3, index=torch.int64), id="period 2"),
        pytest.param(Case(K=3, V=5, H=1, HV=1, rows=18, l2norm=False), id="18 rows"),
    ],
)
def test_sizes(case: Case, v_first: bool, device: str) -> None:
    run = Decoding(replace(case, v_first=v_first), device)
    for _ in range(case.period + 3):
        run.step(run.tokens(1))
    run.finish()


@LAYOUTS
@pytest.mark.parametrize("pool", POOLS)
def test_drafts(pool: torch.dtype, v_first: bool, device: str) -> None:
    """Any number of tokens in a call, any number of them accepted."""
    run = Decoding(replace(DRAFTS, pool=pool, v_first=v_first, dtype=tokens_of(pool)), device)
    for i in range(12):
        T = 1 + i % 3
        run.step(run.tokens(T), torch.randint(1, T + 1, (DRAFTS.N,)).tolist())
    fold_window(run.pool, run.window, run.slots, run.positions, state_v_first=v_first)
    run.check_states()
    run.finish()


@LAYOUTS
def test_packed_drafts(v_first: bool, device: str) -> None:
    """A sequence has no token, one, two or three; and one token of the call is of no sequence."""
    run = Decoding(replace(DRAFTS, N=4, v_first=v_first, raw=True, mixed=True), device)
    for _ in range(10):
        lengths = torch.randint(0, 4, (4,)).tolist()
        x = run.tokens(3)
        before = [y.clone() for y in (run.pool, *run.window[:5])]
        o = recurrent_step(**run.arguments(x, lengths))
        assert not o[sum(lengths) :].any() and not o[lengths[0] :][: lengths[1]].any()
        rows = torch.zeros(4, 3, *o.shape[1:], dtype=o.dtype, device=device)
        for n, part in enumerate(o[: sum(lengths)].split(lengths)):
            rows[n, : lengths[n]] = part
        if any(lengths[n] for n in run.live):
            run.check(x, rows, lengths)
        for n in run.live:
            if lengths[n] == 0:
                for y, y_before in zip((run.pool, *run.window[:5]), before, strict=True):
                    slot = int(run.slots[n])
                    assert torch.equal(y[slot].nan_to_num(), y_before[slot].nan_to_num())
        run.accept(x, [int(torch.randint(1, m + 1, ())) if m else 0 for m in lengths])
    run.finish()


@pytest.mark.gpu("real sizes, which would take minutes in the interpreter")
@LAYOUTS
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("case", REAL, ids=lambda c: f"{c.K}-{c.V}-{c.max_tokens}")
def test_real_sizes(case: Case, pool: torch.dtype, v_first: bool, device: str) -> None:
    run = Decoding(replace(case, pool=pool, v_first=v_first), device)
    for _ in range(case.period + 3):
        T = case.max_tokens
        run.step(run.tokens(T), torch.randint(1, T + 1, (case.N,)).tolist())
    fold_window(run.pool, run.window, run.slots, run.positions, state_v_first=v_first)
    run.check_states()
    run.finish()


def test_gates_of_minus_infinity_forget(device: str) -> None:
    """In the state, in records and among the tokens of a call."""
    run = Decoding(DRAFTS, device)
    for i in range(10):
        x = run.tokens(1 + i % 3)
        if i % 3 != 1:
            x["g"][:, i % x["g"].shape[1], 1:] = -torch.inf
        run.step(x)
    run.finish()


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_nan_stays_with_its_token_and_later_ones(name: str, device: str) -> None:
    """Tokens before it in the call keep their bits."""
    run = Decoding(DRAFTS, device)
    run.step(run.tokens(2))
    x = run.tokens(3)
    given = run.arguments(x)
    first = {**given, "state": run.pool.clone(), "window": cloned_window(run.window)}
    expected = recurrent_step(**first)
    given[name] = given[name].clone()
    given[name][:, 1] = torch.nan
    o = recurrent_step(**given)
    assert same_bits(o[run.live, 0], expected[run.live, 0])
    assert o[run.live, 1].isnan().any()


def test_a_step_writes_the_heads_whose_turn_it_is(device: str) -> None:
    """In a period each head is written once, and slots of no sequence never."""
    case = Case(HV=7, rows=5)
    run = Decoding(case, device)
    run.step(run.tokens(1))
    written = torch.zeros(case.N, case.HV, dtype=torch.int64)
    for _ in range(case.period):
        before = run.pool.clone()
        run.step(run.tokens(1))
        changed = (run.pool != before).flatten(2).any(2)
        others = [slot for slot in range(len(before)) if slot not in run.slots.tolist()]
        assert not changed[others].any()
        for n in run.live:
            heads = changed[run.slots[n].long()].cpu()
            # The step before this line has moved the position on.
            phase = (int(run.positions[n]) - 1) % case.period
            assert heads.tolist() == [turn == phase for turn in turns(case.HV, case.period)]
            written[n] += heads
    assert (written[run.live] == 1).all()
    run.finish()


def test_turns() -> None:
    assert fold_period(16, 1) == 15 and fold_period(16, 4) == 9 and fold_period(2, 1) == 1
    assert turns(5, 3) == [0, 1, 2, 0, 1] and turns(3, 1) == [0, 0, 0]
    assert turns(5, 15) == [0, 5, 10, 0, 5] and turns(4, 2) == [0, 1, 0, 1]


@LAYOUTS
def test_fold_and_go_on(v_first: bool, device: str) -> None:
    """A fold at any fill leaves the state that the tokens make. Steps go on from it, with the
    window and without."""
    run = Decoding(replace(DRAFTS, v_first=v_first), device)
    options = {"state_v_first": v_first}
    for i in range(9):
        run.step(run.tokens(3), torch.randint(1, 4, (DRAFTS.N,)).tolist())
        if i % 2 == 0:
            calls = run.window.calls.clone()
            fold_window(run.pool, run.window, run.slots, run.positions, **options)
            run.check_states()
            slots = run.slots[run.live].long()
            assert torch.equal(run.window.start[slots], run.positions[run.live].int())
            assert torch.equal(run.window.calls, calls)
    fold_window(run.pool, run.window, run.slots, run.positions, **options)
    x = run.tokens(1)
    given = run.arguments(x) | {"window": None, "positions": None}
    run.check(x, recurrent_step(**given), [1] * DRAFTS.N)
    run.finish()


def test_folds_pass_padding_over(device: str) -> None:
    run = Decoding(DRAFTS, device)
    run.step(run.tokens(2))
    before, start = run.pool.clone(), run.window.start.clone()
    none = torch.full_like(run.slots, -1)
    fold_window(run.pool, run.window, none, run.positions)
    fold_window(run.pool, run.window, torch.zeros_like(none), run.positions, skip="non_positive")
    restart_window(run.window, none, run.positions)
    restart_window(run.window, torch.zeros_like(none), run.positions, skip="non_positive")
    fold_window(run.pool, run.window, none[:0], run.positions[:0])
    assert same_bits(run.pool, before) and torch.equal(run.window.start, start)


@pytest.mark.parametrize("calls", [-(2**31), -1, 0, 6, 1000, 2**31 - 1])
def test_a_call_that_another_sequence_left(calls: int, device: str) -> None:
    """At `start` nothing is folded, whichever call the row before it names."""
    run = Decoding(DRAFTS, device)
    run.window.calls.fill_(calls)
    before = run.pool.clone()
    fold_window(run.pool, run.window, run.slots, run.positions)
    run.step(run.tokens(2))
    assert same_bits(run.pool, before)
    for _ in range(4):
        run.step(run.tokens(2))
    run.finish()


def test_a_slot_gets_a_new_sequence(device: str) -> None:
    """From zeros at position 0, and from a prefill of some tokens, in slots whose records are those
    of sequences that were longer, or shorter."""
    run = Decoding(Case(), device)
    for _ in range(8):
        run.step(run.tokens(1))
    slots = run.slots[run.live].long()
    run.pool[slots[0]] = 0
    run.pool[slots[1]] = run.pool[slots[1]] + 1
    run.positions = torch.tensor([0, 0, 200], device=device)
    run.exact[run.live] = run.pool[slots].double()
    run.narrow[run.live] = run.pool[slots]
    restart_window(run.window, run.slots, run.positions)
    for _ in range(8):
        run.step(run.tokens(1))
    run.finish()


@LAYOUTS
@pytest.mark.parametrize("T", [1, 3])
def test_bits_alone_and_in_a_batch(
    T: int, v_first: bool, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """o, the records and the states have the same bits, padded and packed too. Padded calls of one
    token have a kernel of their own, and are compared only with each other."""
    if backend == "reference":
        pytest.skip("torch's products depend on the size of a batch")
    run = Decoding(replace(DRAFTS, N=4, dtype=FP16, pool=FP16, v_first=v_first), device)
    alone, packed = copied(run), copied(run)
    for _ in range(6):
        x = run.tokens(T)
        given = run.arguments(x)
        o = recurrent_step(**given)
        o_packed = recurrent_step(**{**run.arguments(x, [T] * 4), **packed})
        if T > 1:
            assert same_bits(o_packed[: 4 * T].view_as(o), o)
        for n in run.live:
            one = {name: y[n : n + 1] for name, y in x.items()}
            one |= {"read_slots": run.slots[n : n + 1], "positions": run.positions[n : n + 1]}
            assert same_bits(recurrent_step(**{**given, **one, **alone}), o[n : n + 1])
        for other in (alone, packed) if T > 1 else (alone,):
            assert same_bits(other["state"], run.pool)
            for mine, theirs in zip(run.window[:5], other["window"][:5], strict=True):
                assert same_bits(mine, theirs)
        run.positions = run.positions + 1


@pytest.mark.parametrize("max_tokens", [1, 2])
@pytest.mark.parametrize("pool", POOLS)
def test_records_in_pages(pool: torch.dtype, max_tokens: int, device: str) -> None:
    """Records that lie apart from slot to slot, as in pages, give the bits of dense ones, in steps,
    paths of trees, folds and restarts."""
    case = Case(pool=pool, dtype=tokens_of(pool), max_tokens=max_tokens, raw=True, mixed=True)
    run = Decoding(case, device)
    pages: dict[str, Tensor] = {}
    for i, name in enumerate(("u", "k", "g", "calls")):
        y = getattr(run.window, name)
        page = torch.full((len(y), y[0].numel() + 8 * i + 8), -7, dtype=y.dtype, device=device)
        pages[name] = page[:, 8:][:, : y[0].numel()].unflatten(1, y.shape[1:]).copy_(y)
    before = copied(run)
    dense, apart = before["window"], before["window"]._replace(**pages)
    pools = [before["state"].clone(), before["state"].clone()]
    scales = None if dense.scales is None else dense.scales.clone()
    apart = apart._replace(start=dense.start.clone(), scales=scales)
    positions = run.positions.clone()
    path = torch.arange(max_tokens, device=device).expand(case.N, max_tokens)
    for i in range(case.period + 4):
        x = run.tokens(max_tokens)
        found = []
        for state, window in zip(pools, (dense, apart), strict=True):
            given = run.arguments(x) | {"state": state, "window": window, "positions": positions}
            found.append(recurrent_step(**given))
            accept_window(window, run.slots, positions, path)
            if i == case.period:
                fold_window(state, window, run.slots, positions + 1)
                restart_window(window, run.slots, positions + 1)
        assert same_bits(*found) and same_bits(*pools)
        positions += 1
    for name, page in pages.items():
        assert same_bits(page, getattr(dense, name))
        assert page._base is not None and (page._base[:, :8] == -7).all()


def test_out_and_strides(device: str) -> None:
    """Pools whose slots lie apart, `out` at odd strides; and only o if it is given."""
    run = Decoding(Case(), device)
    case = run.case
    size = case.HV * case.K * case.V
    page = torch.full((len(run.pool), size + 5), torch.nan, device=device)[:, :size]
    page = page.unflatten(1, run.pool.shape[1:])
    run.pool = page.copy_(run.pool)
    start = torch.zeros(2 * len(run.pool), dtype=torch.int32, device=device)
    run.window = run.window._replace(start=start[::2].copy_(run.window.start))
    for _ in range(case.period + 2):
        x = run.tokens(1)
        out = torch.full((case.N, 1, case.HV, case.V + 2), torch.nan, device=device)[..., :-2]
        o = recurrent_step(**run.arguments(x), out=out)
        assert o is out
        run.check(x, o, [1] * case.N)
        run.accept(x, [1] * case.N)
    run.finish()
    assert page._base is not None and page._base[:, size:].isnan().all()
    assert not start[1::2].any()


def test_empty_calls(device: str) -> None:
    run = Decoding(DRAFTS, device)
    run.step(run.tokens(1))
    before = copied(run)
    x = run.tokens(1)
    none = {name: y[:0] for name, y in x.items()}
    given = run.arguments(none) | {"read_slots": run.slots[:0], "positions": run.positions[:0]}
    assert recurrent_step(**given).shape == (0, 1, DRAFTS.HV, DRAFTS.V)
    assert recurrent_step(**run.arguments({n: y[:, :0] for n, y in x.items()})).numel() == 0
    assert same_bits(run.pool, before["state"])
    assert same_bits(run.window.u, before["window"].u)


def test_make_window() -> None:
    window = gdn_triton.make_window(3, 2, 4, 16, 8, FP16, "cpu", rows=5, max_tokens=2)
    assert window.u.shape == (3, 5, 4, 8) and window.u.dtype == FP32
    assert window.k.shape == (3, 5, 2, 16) and window.k.dtype == FP16
    assert window.g.shape == (3, 5, 4) and window.g.dtype == FP32
    assert window.calls.shape == (3, 5) and window.calls.dtype == torch.int32
    assert window.start.tolist() == [0, 0, 0] and window.start.dtype == torch.int32
    assert window.max_tokens == 2
