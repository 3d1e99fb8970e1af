"""Decoding with a window: the kernels and forms of Triton, of which a call runs the fastest, have
the same bits."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers import BF16, FP16, FP32, same_bits
from torch import Tensor
from window_cases import (
    DRAFTS,
    LAYOUTS,
    POOLS,
    REAL,
    TOKENS,
    Case,
    Decoding,
    copied,
    parts,
    same_windows,
    tokens_of,
)

from gdn_triton import recurrent_step
from gdn_triton.recurrent import plans
from gdn_triton.recurrent.validation import validate_step

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "triton")


@pytest.mark.gpu("real sizes, which would take minutes in the interpreter")
@LAYOUTS
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("case", REAL, ids=lambda c: f"{c.K}-{c.V}-{c.max_tokens}")
def test_bits_in_a_large_batch(case: Case, pool: torch.dtype, v_first: bool, device: str) -> None:
    """The programs of a large batch have other sizes. Here it is the small one, many times."""
    from gdn_triton.recurrent.triton.window_form import FEW_NARROW_COPIED_STATES

    run = Decoding(replace(case, pool=pool, v_first=v_first), device)
    copies = -(-(FEW_NARROW_COPIED_STATES + 1) // (case.N * case.HV))
    count = len(run.pool)

    def repeated(y: Tensor) -> Tensor:
        return y.repeat(copies, *[1] * (y.dim() - 1))

    others = {name: repeated(y) for name, y in parts(run).items()}
    many = {"state": repeated(run.pool), "window": run.window._replace(**others)}
    shift = count * torch.arange(copies, device=device).repeat_interleave(case.N)
    for _ in range(case.period + 3):
        x = run.tokens(case.max_tokens)
        given = run.arguments(x)
        slots = repeated(run.slots)
        many["read_slots"] = torch.where(slots < 0, slots, slots + shift).to(slots.dtype)
        many["positions"] = repeated(run.positions)
        tokens = {name: repeated(given[name]) for name in given if name in TOKENS}
        o = recurrent_step(**given)
        assert same_bits(recurrent_step(**{**given, **tokens, **many}), repeated(o))
        run.positions = run.positions + 1
    assert same_bits(many["state"], repeated(run.pool))
    for mine, theirs in zip(run.window[:5], many["window"][:5], strict=True):
        assert same_bits(theirs, repeated(mine))


@LAYOUTS
@pytest.mark.parametrize("pool", [FP32, FP16, torch.int8])
@pytest.mark.parametrize("states", [1, 256, 1024, 2**20])
def test_kernels_of_one_token(
    pool: torch.dtype,
    v_first: bool,
    states: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernels for K = V = 128 have the bits of the kernel for all sizes."""
    from gdn_triton.recurrent.triton import window_plan
    from gdn_triton.recurrent.triton.window_form import (
        WindowForm,
        copied_form,
        early_form,
        few_form,
    )

    sizes = {"K": 128, "V": 128, "H": 2, "HV": 4} if device == "cuda" else {}
    dtype = tokens_of(pool)
    if device == "cuda":
        # The kernels are chosen for bf16 tokens, which the interpreter lacks.
        pool, dtype = BF16 if pool is FP16 else pool, BF16
    case = Case(N=2, pool=pool, v_first=v_first, dtype=dtype, raw=True)
    run = Decoding(replace(case, **sizes), device)
    of_states = pool.itemsize, v_first, states
    form = few_form(*of_states) or early_form(*of_states)
    if form is not None and device == "cpu":
        # numpy's products of 16 rows round otherwise than those of 32 rows.
        form = form._replace(BV=max(form.BV, 32))

    def use(early: WindowForm | None, in_shared: WindowForm | None) -> None:
        monkeypatch.setattr(plans, "_plans", {})
        monkeypatch.setattr(window_plan, "_early_form", lambda _: early)
        monkeypatch.setattr(window_plan, "copied_form", lambda *_: in_shared)

    others = copied(run), copied(run)
    for _ in range(run.case.period + 3):
        x = run.tokens(1)
        use(None, None)
        o = recurrent_step(**{**run.arguments(x), **others[0]})
        use(None, copied_form(*of_states))
        assert same_bits(recurrent_step(**{**run.arguments(x), **others[1]}), o)
        use(form, None)
        assert same_bits(run.step(x), o)
    for other in others:
        assert same_bits(run.pool, other["state"])
        assert same_windows(run.window, other["window"])
    run.finish()


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("pieces", [16, 128])
def test_both_forms_of_drafts(
    pieces: int,
    pool: torch.dtype,
    v_first: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The form that issues all loads first, with its state in registers or in shared memory, has
    the bits of the other form, for packed tokens and trees too. On a GPU a 16-bit state in
    registers has the bits of pieces of 32 channels; the interpreter adds these in another order."""
    from gdn_triton.recurrent.triton import window_plan

    sizes = {"K": 128, "V": 128, "H": 2, "HV": 4} if device == "cuda" else {}
    case = replace(DRAFTS, pool=pool, v_first=v_first, dtype=tokens_of(pool), raw=True, **sizes)
    run = Decoding(case, device)
    other = copied(run)
    chosen = window_plan._step_form
    of_other = 32 if device == "cuda" and pool.itemsize == 2 else pieces
    for i in range(9):
        x = run.tokens(3)
        given = run.arguments(x, [3] * case.N if i % 3 == 1 else None)
        if i % 3 == 2:
            given["parents"] = torch.tensor([[-1, 0, 0]], device=device).repeat(case.N, 1)
        results = []
        for early, KI, states in ((False, of_other, other), (True, pieces, {})):
            monkeypatch.setattr(plans, "_plans", {})
            form = {"early": early, "KI": KI}
            patched = lambda p, form=form: chosen(p)._replace(**form)  # noqa: E731
            monkeypatch.setattr(window_plan, "_step_form", patched)
            results.append(recurrent_step(**{**given, **states}))
        assert same_bits(*results)
        run.positions = run.positions + (1 if i % 3 == 2 else 3)
        assert same_bits(run.pool, other["state"])
        assert same_windows(run.window, other["window"])


@pytest.mark.gpu("bf16 is not used in Triton's interpreter")
@LAYOUTS
@pytest.mark.parametrize("pool", [FP32, BF16])
@pytest.mark.parametrize("mixed", [False, True])
def test_drafts_that_copy(
    mixed: bool, pool: torch.dtype, v_first: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of drafts in Gluon has the bits of the other kernel."""
    from gdn_triton.recurrent.triton import window_plan
    from gdn_triton.recurrent.triton.window_form import copied_drafts_form

    case = Case(K=128, V=128, H=2, HV=4, N=5, rows=16, max_tokens=4, dtype=BF16, raw=True)
    run = Decoding(replace(case, pool=pool, v_first=v_first, mixed=mixed), device)
    other = copied(run)
    for i in range(24):
        T = 2 + i % 3
        x = run.tokens(T)
        given = run.arguments(x, [T, 1, 0, T, 2] if i % 2 == 1 else None)
        results = []
        for copies, own in ((False, other), (True, {})):
            monkeypatch.setattr(plans, "_plans", {})
            form = copied_drafts_form if copies else lambda *_: None
            monkeypatch.setattr(window_plan, "copied_drafts_form", form)
            results.append(recurrent_step(**{**given, **own}))
        assert same_bits(*results)
        run.positions = run.positions + 1
    assert same_bits(run.pool, other["state"])
    assert same_windows(run.window, other["window"])


def spread(elements: int) -> Callable[[Tensor], Tensor]:
    """Puts so many elements between slots."""

    def apart(x: Tensor) -> Tensor:
        rows = torch.zeros(len(x), x[0].numel() + elements, dtype=x.dtype)
        return rows[:, : x[0].numel()].unflatten(1, x.shape[1:])

    return apart


@pytest.mark.parametrize(
    ("changes", "copies"),
    [
        ({}, True),
        ({"state": spread(16)}, True),
        ({"state": spread(4)}, False),
        ({"state": lambda x: x.mT}, False),
        ({"u_rows": spread(4), "k_rows": spread(8), "g_rows": spread(1)}, True),
        ({"u_rows": spread(2)}, False),
        ({"k_rows": spread(4)}, False),
        (dict.fromkeys(("q", "k", "v", "k_rows"), Tensor.half), False),
    ],
)
def test_which_steps_copy(
    changes: dict[str, Callable[[Tensor], Tensor]], copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Gluon kernel copies 16 bytes at once, and the compiler must see that they are aligned."""
    from gluon_window import make_call

    from gdn_triton.recurrent.triton import window_plan

    call = make_call(FP32, v_first=False, norm=False, seed=0)
    given = {name: change(getattr(call.inputs, name)) for name, change in changes.items()}
    call = call._replace(inputs=call.inputs._replace(**given))
    monkeypatch.setattr(window_plan, "gluon_refusal", lambda device: None)
    assert (window_plan._copied_form(validate_step(call), call.inputs) is not None) == copies
    monkeypatch.undo()
    monkeypatch.setenv("GDN_GLUON", "0")
    assert window_plan._copied_form(validate_step(call), call.inputs) is None
