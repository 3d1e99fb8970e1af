"""Mistakes that are valid calls: what `explain` says of the contents, and what a call on the CPU
warns of, once."""

import math
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import FP32, Case, make_inputs, unit_rows

from gdn_triton import (
    chunk_gated_delta_rule,
    chunk_prefill,
    explain,
    fused_recurrent_gated_delta_rule,
    recurrent_step,
)
from gdn_triton._host import contents as module
from gdn_triton._host.contents import Contents

CASE = Case("right", "", T=40, B=2, H=2, HV=4, K=16, V=16)


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_warned", set())
    monkeypatch.setenv("GDN_BACKEND", "reference")


def right(device: str = "cpu", case: Case = CASE) -> dict[str, Any]:
    x = make_inputs(case, FP32, device)
    call = dict(zip(("q", "k", "v", "g", "beta"), x.tensors, strict=True))
    return {**call, "cu_seqlens": x.cu_seqlens}


def contents_of(call: dict[str, Any]) -> Contents:
    found = explain(**call, contents=True).contents
    assert found is not None
    return found


Change = dict[str, Callable[[torch.Tensor], torch.Tensor]]

# The change of the inputs, the name of the mistake, and words of its sentence.
MISTAKES: dict[str, tuple[Change, str, str]] = {
    "alpha": ({"g": torch.exp}, "gate", r"looks like alpha.*alpha\.log\(\)"),
    "sign": ({"g": lambda g: -3 * g}, "gate", "wrong sign.*use_gate_in_kernel=True"),
    "keys": ({"k": lambda k: 8 * k}, "keys", "longest key is 8,.*use_qk_l2norm_in_kernel=True"),
    "logits": ({"beta": torch.logit}, "beta", "logits.*use_beta_sigmoid_in_kernel=True"),
    "infinity": ({"v": lambda v: v / 0}, "not finite", "v already has NaN or infinities"),
    "nan": (
        {"q": lambda q: q * math.nan, "g": lambda g: g * math.nan},
        "not finite",
        "g and q already have NaN",
    ),
}


def wrong(change: Change, device: str = "cpu") -> dict[str, Any]:
    call = right(device)
    return call | {name: make(call[name]) for name, make in change.items()}


@pytest.mark.parametrize("change, name, words", MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_named(change: Change, name: str, words: str, device: str) -> None:
    call = wrong(change, device)
    found = contents_of(call)
    assert list(found.mistakes) == [name]
    assert re.search(words, found.mistakes[name])
    assert found.mistakes[name] in str(explain(**call, contents=True))
    # A mistake of contents is none of the call.
    assert explain(**call).contents is None


def test_right_call(device: str) -> None:
    call = right(device)
    found = contents_of(call)
    assert found.largest_g == call["g"].max().item() < 0
    assert found.longest_key == pytest.approx(1, abs=1e-5)
    ends = call["beta"].min().item(), call["beta"].max().item()
    assert (found.smallest_beta, found.largest_beta) == ends
    assert (found.T, found.H, found.mistakes, found.unseen) == (40, 2, {}, ())
    assert str(found).endswith("No mistake shows in them.")


def test_reflections_and_long_keys_with_small_steps_are_right() -> None:
    """The limit is on beta |k|^2, which may be 2, of each head."""
    call = right()
    assert not contents_of(call | {"beta": 1.99 * torch.ones_like(call["beta"])}).mistakes
    long = call | {"k": 8 * call["k"], "beta": call["beta"] / 64}
    assert not contents_of(long).mistakes
    mixed = {"k": call["k"].clone(), "beta": call["beta"].clone()}
    mixed["k"][:, :, 0] *= 8
    mixed["beta"][:, :, :2] /= 64  # the value heads of key head 0
    assert not contents_of(call | mixed).mistakes
    mixed["beta"][0, 7, 1] = 0.1
    assert list(contents_of(call | mixed).mistakes) == ["keys"]


def test_what_the_call_computes_itself_is_not_judged() -> None:
    call = wrong({"k": lambda k: 8 * k, "g": lambda g: -g, "beta": torch.logit})
    assert set(contents_of(call).mistakes) == {"gate", "beta"}
    heads = torch.zeros(CASE.HV)
    activated = contents_of(
        call
        | {"use_gate_in_kernel": True, "A_log": heads, "use_qk_l2norm_in_kernel": True}
        | {"use_beta_sigmoid_in_kernel": True}
    )
    assert activated.mistakes == {}
    assert activated.largest_g is activated.longest_key is activated.largest_beta is None
    # A sigmoid is at most 1, and for most of them these keys are too long.
    logits = call | {"g": -call["g"], "use_beta_sigmoid_in_kernel": True}
    assert list(contents_of(logits).mistakes) == ["keys"]


def test_rates_in_the_place_of_their_logarithms(device: str) -> None:
    """Only where no gate can be right any more: float32 has exp(88), and not exp(89)."""
    call = {**right(device), "use_gate_in_kernel": True}
    for largest, mistakes in ((88.0, []), (89.0, ["A_log"]), (math.inf, ["A_log"])):
        A_log = torch.tensor([0.0, 2.8, largest, -math.inf], device=device)
        found = contents_of({**call, "A_log": A_log})
        assert list(found.mistakes) == mistakes
        for sentence in found.mistakes.values():
            assert re.search(rf"A_log is up to {largest:.3g}, .* looks like the rate", sentence)
    A_log = torch.full((4,), math.nan, device=device)
    found = contents_of({**call, "A_log": A_log, "dt_bias": A_log})
    assert list(found.mistakes) == ["not finite"]
    assert found.mistakes["not finite"].startswith("A_log and dt_bias already have NaN")


def test_tokens_of_no_sequence_are_not_judged() -> None:
    call = right(case=Case("packed", "", lengths=(17, 0, 20), orphans=3))
    call["g"][:, 37:] = math.nan
    call["k"][:, 37:] = 9e9
    assert contents_of(call).mistakes == {}
    call["g"][:, 36] = math.nan
    assert list(contents_of(call).mistakes) == ["not finite"]


def test_heads_before_tokens() -> None:
    """[B, H, T, ...], which is valid where HV = H."""
    call = {
        "q": unit_rows(1, 4, 300, 16),
        "k": unit_rows(1, 4, 300, 16),
        "v": torch.randn(1, 4, 300, 16),
        "g": -torch.rand(1, 4, 300),
        "beta": torch.rand(1, 4, 300),
    }
    found = contents_of(call)
    assert list(found.mistakes) == ["layout"]
    assert "T=4 is less than H=300" in found.mistakes["layout"]
    with pytest.warns(UserWarning, match=r"T=4 is less than H=300.*\[B, H, T, ...\]"):
        chunk_gated_delta_rule(**call)
    # `explain` reports T below H as a mistake, but a call with at most 64 heads does not warn,
    # because it may be a short sequence.
    short = {name: x[:, :, :16] for name, x in call.items()}
    assert list(contents_of(short).mistakes) == ["layout"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chunk_gated_delta_rule(**short)


def test_square_state_cannot_be_judged() -> None:
    call = right()
    square = call | {"initial_state": torch.zeros(2, 4, 16, 16)}
    (sentence,) = contents_of(square).unseen
    assert "K = V = 16" in sentence and "state_v_first=True" in sentence
    wide = call | {"v": torch.randn(2, 40, 4, 8), "initial_state": torch.zeros(2, 4, 16, 8)}
    assert contents_of(wide).unseen == ()


def test_no_tokens() -> None:
    found = contents_of(right(case=Case("empty", "", T=0)))
    assert found.largest_g is found.longest_key is found.smallest_beta is None
    assert found.mistakes == {}


def test_bad_contents_argument() -> None:
    with pytest.raises(TypeError, match="contents must be True or False, got 1"):
        explain(**right(), contents=1)  # type: ignore[arg-type]
    meta = {name: x if x is None else x.to("meta") for name, x in right().items()}
    assert explain(**meta).contents is None
    with pytest.raises(ValueError, match="contents must be False where tensors have no memory"):
        explain(**meta, contents=True)


# ---------------------------------------------------------------------------------------- warnings


@pytest.mark.parametrize("change, name, words", MISTAKES.values(), ids=MISTAKES)
@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_call_on_the_cpu_warns_once(
    function: Callable[..., Any], change: Change, name: str, words: str
) -> None:
    call = wrong(change)
    with pytest.warns(UserWarning, match="docs/wrong_numbers.md") as caught:
        function(**call)
    (warning,) = caught
    assert re.search(words, str(warning.message))
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(**call)
        function(**right())


def test_right_call_is_silent_and_a_second_mistake_is_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chunk_gated_delta_rule(**right())
    with pytest.warns(UserWarning, match="alpha"):
        chunk_gated_delta_rule(**wrong({"g": torch.exp}))
    with pytest.warns(UserWarning, match="logits"):
        chunk_gated_delta_rule(**wrong({"g": torch.exp, "beta": torch.logit}))


def test_transforms_are_left_alone() -> None:
    """There is no number to read inside of one."""
    call = wrong({"g": torch.exp})
    del call["cu_seqlens"]

    def summed(g: torch.Tensor) -> torch.Tensor:
        return chunk_gated_delta_rule(**{**call, "g": g})[0].sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.func.grad(summed)(call["g"]).isfinite().all()


def test_compiled_call_warns_too() -> None:
    """In a process of its own: a compiler that another test has used keeps what it knows."""
    code = """
        import torch, gdn_triton, warnings
        q = torch.nn.functional.normalize(torch.randn(1, 5, 1, 8), dim=-1)
        args = (q, q, q, torch.rand(1, 5, 1), torch.rand(1, 5, 1))
        run = torch.compile(gdn_triton.chunk_gated_delta_rule, fullgraph=True, backend="eager")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(*args)
            run(*args)
        print([str(w.message)[:40] for w in caught if "alpha" in str(w.message)])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("gdn_triton: g is between 0 and 1") == 1, done.stdout


# ---------------------------------------------------------------------- warnings of calls on a pool


def on_pool(function: Callable[..., Any], call: dict[str, Any]) -> None:
    """`function` on the sequences of a call, and on one before them that is skipped, which holds
    anything, as the states of nobody do."""
    given = {
        name: torch.cat([torch.full_like(x[:1], math.nan), x])
        for name, x in call.items()
        if x is not None
    }
    pool = torch.zeros(4, CASE.HV, CASE.K, CASE.V)
    pool[3] = math.inf
    function(pool, torch.tensor([-1, 2, 0]), **given)


POOLED = {
    "alpha": r"looks like alpha.*alpha\.log\(\)",
    "keys": "longest key is 8,.*use_qk_l2norm_in_kernel=True",
    "infinity": "v already has NaN or infinities",
    "nan": "g and q already have NaN",
}
INSTEAD = {
    chunk_prefill: {"sign": "which use_gate_in_kernel=True", "logits": "use_beta_sigmoid_in_ke"},
    recurrent_step: {"sign": "which the argument a, in", "logits": "of which the argument b, in"},
}


@pytest.mark.parametrize("mistake", [*POOLED, "sign", "logits"])
@pytest.mark.parametrize("function", INSTEAD)
def test_call_on_a_pool_warns_once(function: Callable[..., Any], mistake: str) -> None:
    words = {**POOLED, **INSTEAD[function]}[mistake]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_pool(function, right())
    with pytest.warns(UserWarning, match="docs/wrong_numbers.md") as caught:
        on_pool(function, wrong(MISTAKES[mistake][0]))
    (warning,) = caught
    assert re.search(words, str(warning.message))
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_pool(function, wrong(MISTAKES[mistake][0]))


@pytest.mark.parametrize("function", INSTEAD)
def test_states_of_a_pool(function: Callable[..., Any]) -> None:
    """Those that are read, and no others; an error in a warning's place has written nothing."""
    call = {name: x[:1] for name, x in right().items() if x is not None}
    pool, slots = torch.zeros(3, CASE.HV, CASE.K, CASE.V), torch.tensor([1])
    pool[0] = pool[2] = math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(pool, slots, **call)
        pool[1] = math.nan
        before = pool.clone()
        with pytest.raises(UserWarning, match="state already has NaN or infinities"):
            function(pool, slots, **call)
    torch.testing.assert_close(pool, before, rtol=0, atol=0, equal_nan=True)


def test_step_of_one_token_from_raw_gates() -> None:
    heads = {
        "A_log": torch.zeros(CASE.HV),
        "a": torch.randn(2, CASE.HV),
        "b": torch.randn(2, CASE.HV),
    }
    mixed = torch.nn.functional.normalize(torch.randn(2, 2 * CASE.H * CASE.K + CASE.HV * CASE.V))
    pool, slots = torch.zeros(2, CASE.HV, CASE.K, CASE.V), torch.arange(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recurrent_step(pool, slots, mixed_qkv=mixed, **heads)
        heads["b"][0] = math.nan
        with pytest.raises(UserWarning, match="b already has NaN or infinities"):
            recurrent_step(pool, slots, mixed_qkv=mixed, **heads)
