"""The CUDA library's backward: which calls it serves, who says so, and its host code."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from backward_cases import (
    NAMES,
)
from fast_backward_cases import SMALL, Noted
from fast_cases import problem
from helpers import BF16, FP16, FP32, make_inputs

import gdn_triton
from gdn_triton._host import backends
from gdn_triton.chunk.backends import CHUNK
from gdn_triton.chunk.cuda import calls, support
from gdn_triton.chunk.problem import Inputs

# ----------------------------------------------------------------------------- what it serves

TRAINED: dict[str, Any] = {"needs_grad": True, "T": 8192, "H": 16, "HV": 32}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"B": 1, "N": 9, "is_varlen": True},
        {"H": 3, "HV": 24},
        {"state_v_first": True, "has_initial_state": False, "use_gate": True},
        {"T": 1, "B": 1, "N": 1, "H": 1, "HV": 1},
        {"T": 0},
        {"B": 1, "N": 0, "is_varlen": True},
        {"K": 8, "V": 1024},
        {"K": 96, "V": 192, "dtype": FP16},
    ],
)
def test_takes(changes: dict[str, Any], hopper: None) -> None:
    assert support.backward_supports(problem(**{**TRAINED, **changes})) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"K": 136}, "K up to 128; K is 136"),
        ({"T": 2**31 - 1, "H": 64, "HV": 64}, "less than 268435456 chunks of slices"),
        ({"T": 2**26, "V": 1024}, "less than 268435456 chunks of slices"),
        ({"T": 2**20, "B": 2**11, "H": 1, "HV": 1}, "tokens; B * T is 2147483648"),
    ],
)
def test_leaves_to_triton(changes: dict[str, Any], words: str, hopper: None) -> None:
    reason = support.backward_supports(problem(**{**TRAINED, **changes}))
    assert reason is not None and words in reason and reason.endswith(".")


def test_explained(
    hopper: None,
    no_interpreter: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`explain` has a sentence on the gradients if the call has some and the CUDA backend is
    chosen."""
    monkeypatch.setattr(backends, "_triton_missing", lambda: None)
    monkeypatch.setenv("GDN_BACKEND", "auto")
    own = CHUNK.explain(problem(**TRAINED))
    assert own.chosen == "cuda"
    assert own.gradients == "The gradients are by the CUDA library's backward."
    assert str(own).endswith("\n  The gradients are by the CUDA library's backward.")
    other = CHUNK.explain(problem(**{**TRAINED, "K": 136}))
    assert other.chosen == "cuda" and other.gradients is not None
    assert other.gradients.startswith("The gradients are by the Triton backward, with the CUDA")
    assert CHUNK.explain(problem()).gradients is None
    wasteful = problem(**{**TRAINED, "K": 40})
    said = CHUNK.explain(wasteful).gradients
    assert said is not None and "Triton backward. The CUDA backward computes with" in said
    monkeypatch.setenv("GDN_BACKEND", "cuda")
    assert CHUNK.explain(wasteful).gradients == own.gradients
    monkeypatch.setenv("GDN_BACKEND", "triton")
    assert CHUNK.explain(problem(**TRAINED)).gradients is None


def test_needs_no_triton(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_triton_missing", lambda: "No Triton here.")
    monkeypatch.setenv("GDN_BACKEND", "auto")
    by_library = "The gradients are by the CUDA library's backward."
    assert CHUNK.explain(problem(**TRAINED)).gradients == by_library
    reason = CHUNK.explain(problem(**{**TRAINED, "K": 136})).reasons["cuda"]
    assert reason is not None and "No Triton here." in reason
    wasteful = CHUNK.explain(problem(**{**TRAINED, "K": 40}))
    assert wasteful.chosen == "cuda" and wasteful.gradients == by_library


@pytest.mark.parametrize(
    ("changes", "find"),
    [({}, "gradients"), ({"K": 136}, "gradients with walks"), ({"K": 40}, "gradients of triton")],
    ids=["library", "walks", "triton"],
)
def test_a_choice_has_the_gradients_that_it_explains(
    changes: dict[str, Any],
    find: str,
    hopper: None,
    no_interpreter: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward, gradients and words are of one decision, for which each limit is asked once."""
    backward = pytest.importorskip("gdn_triton.chunk.triton.backward", reason="needs Triton")
    monkeypatch.setattr(backends, "_triton_missing", lambda: None)
    monkeypatch.setenv("GDN_BACKEND", "auto")
    asked = []
    limits = support.backward_supports
    monkeypatch.setattr(support, "backward_supports", lambda p: asked.append(p) or limits(p))
    trained = problem(**{**TRAINED, **changes})
    choice = CHUNK.choose(trained)
    by = choice.gradients
    assert len(asked) == 1
    assert choice.name == "cuda" and choice.made_by is not None and not choice.refusals
    assert choice.made_by.sentence == CHUNK.explain(trained).gradients
    known = {calls.gradients: "gradients", backward.gradients: "gradients of triton"}
    assert known.get(by.find, "gradients with walks") == find
    assert (by.run is calls.forward_for_gradients) == (find == "gradients")
    assert CHUNK.choose(replace(trained)) is choice
    alone = CHUNK.choose(replace(trained, needs_grad=False))
    assert alone.gradients is None and alone.run is choice.run


# -------------------------------------------------------------------------------- the host code


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_are_the_operators(compiled: bool, noted: Noted) -> None:
    """In the shapes, dtypes and places of the inputs; views go in as they are."""
    x = make_inputs(SMALL, BF16, "cpu", raw=True)
    given = {n: y.detach().requires_grad_() for n, y in zip(NAMES, x.tensors, strict=False)}
    given["g"] = x.g.to(BF16).requires_grad_()
    given["initial_state"] = x.initial_state.to(BF16).requires_grad_()
    given["A_log"] = torch.zeros(2).requires_grad_()
    given["dt_bias"] = torch.zeros(2, dtype=BF16).requires_grad_()
    op: Callable[..., Any] = gdn_triton.chunk_gated_delta_rule
    by = torch.compile(op, fullgraph=True, backend="aot_eager") if compiled else op
    o, state = by(
        **given, output_final_state=True, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True
    )
    found = torch.autograd.grad([o, state], list(given.values()), [o + 1, state + 1])
    (passed,) = noted.calls
    for number, (y, dy) in enumerate(zip(given.values(), found, strict=True)):
        assert dy.shape == y.shape and dy.dtype == y.dtype
        assert (dy == min(number + 1, 7)).all()
    assert passed["dg"].dtype == BF16 and passed["dbeta"].dtype == FP32
    assert passed["dh0"].shape == passed["initial_state"].shape and passed["dh0"].dtype == FP32
    assert passed["gate_sums"].shape == (2, 2)
    assert passed["use_qk_l2norm"] is True and passed["use_beta_sigmoid"] is False
    for name in ("q", "k", "v"):
        assert passed[name].data_ptr() == given[name].data_ptr()
    sizes = 2 + 70 + 1 + 2 + 128 + 128 + 2
    assert passed["workspace"].numel() == sizes + True + False + True + False


def test_only_what_is_there(noted: Noted) -> None:
    """Without a state and a gate there is no gradient of either; one of the state alone leaves that
    of o zero."""
    x = make_inputs(SMALL, BF16, "cpu")
    v = x.v.detach().requires_grad_()
    _, state = gdn_triton.chunk_gated_delta_rule(
        *(x.q, x.k, v, x.g, x.beta), output_final_state=True
    )
    torch.autograd.grad(state.sum(), v)
    (passed,) = noted.calls
    assert passed["dh0"] is passed["gate_sums"] is passed["initial_state"] is None
    assert not passed["do"].any() and (passed["dht"] == 1).all()


@pytest.mark.parametrize("with_dht", [True, False])
def test_nothing_to_walk(with_dht: bool, noted: Noted) -> None:
    """Without a token no kernel runs: the state's gradient passes through."""
    case = replace(SMALL, T=0)
    p = problem(device=torch.device("cpu"), needs_grad=True, T=0, H=1, HV=2)
    x = make_inputs(case, BF16, "cpu")
    dht = torch.randn(2, 2, 128, 128) if with_dht else None
    inputs = Inputs(x.q, x.k, x.v, x.g, x.beta, x.initial_state)
    found = calls.gradients(p, inputs, None, dht, store_dh0=True)
    assert not noted.calls and found.q.shape == x.q.shape and found.initial_state is not None
    assert torch.equal(found.initial_state, torch.zeros(2, 2, 128, 128) if dht is None else dht)


@pytest.mark.parametrize("every", [0, 64])
@pytest.mark.parametrize("v_first", [False, True])
def test_what_a_forward_leaves(every: int, v_first: bool, noted: Noted) -> None:
    """Is what its backward is given: nothing, or a state after so many tokens each."""
    noted.checkpoint_interval = every
    case = replace(SMALL, T=200)
    x = make_inputs(case, BF16, "cpu")
    given = [y.detach().requires_grad_() for y in (x.q, x.k, x.v, x.g, x.beta)]
    o, _ = gdn_triton.chunk_gated_delta_rule(*given, state_v_first=v_first)
    (states,) = noted.left
    torch.autograd.grad(o.sum(), given)
    (passed,) = noted.calls
    assert passed["states"] is states and passed["checkpoint_interval"] == every
    if every == 0:
        assert states is None
    else:
        assert states is not None and states.shape == (400 // every, 2, 128, 128)
    sizes = 2 + 200 + 1 + 2 + 128 + 128 + 2 + True
    assert passed["workspace"].numel() == sizes + 1000 * every


def test_without_a_gradient_nothing_is_left(noted: Noted) -> None:
    noted.checkpoint_interval = 64
    x = make_inputs(replace(SMALL, T=200), BF16, "cpu")
    gdn_triton.chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta)
    v = x.v.detach().requires_grad_()
    run = torch.compile(gdn_triton.chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    o, _ = run(x.q, x.k, v, x.g, x.beta)
    torch.autograd.grad(o.sum(), v)
    assert noted.left == [None, None]
    assert noted.calls[0]["states"] is None and noted.calls[0]["checkpoint_interval"] == 0
