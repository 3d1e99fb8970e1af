"""States that a forward leaves for the library's backward on a Hopper GPU: which, with which bits,
and the gradients found with them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from backward_cases import NAMES, STRENGTHS, Task, TaskOptions, by_op, check_task, make_task, run_op
from fast_backward_cases import ARGUMENTS, KEPT, check_nan_stays, check_repeats, check_replays
from fast_cases import fast_case, gpu
from helpers import BF16, Case, make_inputs, same_bits
from torch import Tensor

import gdn_triton
from gdn_triton._host import backends
from gdn_triton.chunk.cuda import calls

Keep = Callable[[int], None]


@pytest.fixture
def keep(cuda: str, monkeypatch: pytest.MonkeyPatch) -> Keep:
    """A function that makes every forward leave a state after each so many tokens."""
    monkeypatch.setenv("GDN_BACKEND", "cuda")
    return lambda every: monkeypatch.setattr(
        calls, "best_checkpoint_interval", lambda *sizes: every
    )


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each backward."""
    found: list[dict[str, Any]] = []
    operators = calls.library_operator

    def noting(name: str) -> Callable[..., None]:
        run = operators(name)
        if name != "chunk_backward":
            return run

        def note(*arguments: Any) -> None:
            found.append(dict(zip(ARGUMENTS, arguments, strict=True)))
            run(*arguments)

        return note

    monkeypatch.setattr(calls, "library_operator", noting)
    return found


def replace_forward(monkeypatch: pytest.MonkeyPatch, forward: Callable[..., Any]) -> None:
    """A choice keeps the forward that was there when it was made, so the choices are made again."""
    monkeypatch.setattr(backends, "_choices", {})
    monkeypatch.setattr(calls, "forward_for_gradients", forward)


def kept(name: str) -> tuple[int, Case]:
    return next((every, case) for every, case in KEPT if case.name == name)


OPTIONS = {
    "none": TaskOptions(state=False, dht=False),
    "state": TaskOptions(v_first=True),
    "all": TaskOptions(l2norm=True, sigmoid=True, negative=True, gate=True),
}


@gpu
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("every", "case"), KEPT, ids=[case.name for _, case in KEPT])
def test_gradients(
    every: int, case: Case, name: str, keep: Keep, passed: list[dict[str, Any]]
) -> None:
    keep(every)
    task = make_task(case, BF16, "cuda", OPTIONS[name])
    check_task(task, BF16, "cuda")
    check_repeats(task)
    for call in passed:
        assert (
            call["checkpoint_interval"] == every
            and len(call["states"]) == case.B * case.tokens // every
        )


@gpu
@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("name", ["padded", "uneven", "cut", "cut-packed"])
def test_gates(name: str, strength: str, keep: Keep) -> None:
    every, case = kept(name)
    keep(every)
    x = make_inputs(case, BF16, "cuda")
    x = x.but(g=STRENGTHS[strength](x.g))
    check_task(make_task(case, BF16, "cuda", TaskOptions(), x), BF16, "cuda")


@gpu
@pytest.mark.parametrize("name", ["uneven", "cut"])
def test_states_are_read(name: str, cuda: str, keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other states give other gradients of the tokens after them."""
    every, case = kept(name)
    keep(every)
    task = make_task(case, BF16, cuda, TaskOptions())
    expected = by_op(task)
    forward = calls.forward_for_gradients

    def other(*given: Any) -> Any:
        o, final_state, states = forward(*given)
        return o, final_state, torch.zeros_like(states)

    replace_forward(monkeypatch, other)
    found = by_op(task)
    for name in NAMES[:5]:
        x, y = found[name], expected[name]
        assert same_bits(x[:, :every], y[:, :every]), name
        # That of v follows from the gradient of the state alone.
        assert same_bits(x[:, every:], y[:, every:]) == (name == "v"), name


@gpu
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("name", ["padded", "multiples", "uneven"])
def test_what_is_left(
    name: str,
    state: bool,
    v_first: bool,
    keep: Keep,
    batch_invariant: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The forward has the bits that it has without a gradient, and each state those of the final
    state of as many tokens."""
    every, case = kept(name)
    keep(every)
    task = make_task(case, BF16, "cuda", TaskOptions(state=state, v_first=v_first))
    left: list[Tensor] = []
    forward = calls.forward_for_gradients

    def noting(*given: Any) -> Any:
        left.append(forward(*given)[2])
        return forward(*given)

    replace_forward(monkeypatch, noting)
    o, final_state = run_op(task, task.copies())
    (states,) = left
    plain = {n: y.detach() for n, y in task.copies().items() if y is not None}
    with torch.no_grad():
        without = run_op(task, plain)
    assert same_bits(o, without[0]) and final_state is not None and without[1] is not None
    assert same_bits(final_state, without[1])
    seen = 0
    for n in range(case.N):
        b, first, length = n, 0, case.T
        if case.lengths is not None:
            b, first, length = 0, case.offsets()[n], case.lengths[n]
        for j in range(length // every):
            end = first + (j + 1) * every
            part = {name: plain[name][b : b + 1, first:end] for name in NAMES[:5]}
            if state:
                part["initial_state"] = plain["initial_state"][n : n + 1]
            alone = replace(task, cu_seqlens=None)
            with torch.no_grad():
                _, expected = run_op(alone, part)
            assert expected is not None
            row = (b * case.T + first) // every + j
            assert same_bits(states[row], expected[0].mT), (n, j)
            seen += 1
    assert seen > 2


@gpu
def test_nan_stays_in_its_sequence(keep: Keep) -> None:
    every, case = kept("uneven")
    keep(every)
    check_nan_stays(make_task(case, BF16, "cuda", TaskOptions()))


@gpu
def test_graph_replay(keep: Keep) -> None:
    every, case = kept("dealt")
    keep(every)
    assert case.lengths is not None
    check_replays(make_task(case, BF16, "cuda", TaskOptions()), case.lengths[::-1])


# Sizes of which some leave states: B, T, H, HV, N, and whether they are packed.
SHAPES = [
    (B, T, H, HV, N, packed)
    for H, HV in ((16, 32), (16, 64), (8, 16), (4, 8), (2, 8))
    for B, T, N, packed in (
        *((1, 8192, 1, False), (4, 8192, 4, False), (1, 32768, 1, False)),
        *((1, 8192, 4, True), (1, 32768, 4, True), (1, 32768, 16, True), (1, 100, 1, False)),
    )
]


@gpu
def test_how_many_are_left(cuda: str) -> None:
    """At most 32 bytes a token and value head; none of a batch-invariant call, nor of other sizes
    and dtypes."""
    kept = 0
    for B, T, H, HV, N, packed in SHAPES:

        def every(
            *options: bool, K: int = 128, sizes: tuple[int, ...] = (B, T, H, HV), N: int = N
        ) -> int:
            device = torch.cuda.current_device()
            return calls.best_checkpoint_interval(device, *sizes, K, 128, N, *options, 0, 0, 0)

        tokens = every(True, packed, False, False)
        kept += tokens > 0
        assert tokens % 64 == 0 and (tokens == 0 or 128 * 128 * 4 <= 32 * tokens)
        assert every(True, packed, False, False, K=96) == 0  # of other sizes
        assert every(False, packed, False, False) == 0  # of fp16
        assert every(True, packed, False, True) == 0  # batch-invariant
    assert 5 < kept < len(SHAPES)


@gpu
@pytest.mark.parametrize(
    ("sizes", "dtype", "words"),
    [
        ({"V": 64}, BF16, "only with K = V = 128 in bfloat16"),
        ({}, torch.float16, "only with K = V = 128 in bfloat16"),
    ],
)
def test_other_kinds_take_none(
    sizes: dict[str, int], dtype: torch.dtype, words: str, keep: Keep
) -> None:
    keep(64)
    case = fast_case("other", "", T=200, **sizes)
    with pytest.raises(RuntimeError, match=words):
        by_op(make_task(case, dtype, "cuda", TaskOptions()))


@gpu
@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("states", lambda x: x.half(), "states must be Float, got Half"),
        ("states", lambda x: x[1:], "states must have shape"),
        ("states", lambda x: x.mT, "states must be contiguous"),
        ("states", lambda x: x.cpu(), "states must be on a CUDA device"),
        (
            "checkpoint_interval",
            lambda x: 256,
            "checkpoint_interval must be at most the 200 tokens of the call, got 256",
        ),
    ],
)
def test_checks_the_states(
    name: str, change: Any, words: str, keep: Keep, passed: list[dict[str, Any]]
) -> None:
    keep(64)
    by_op(make_task(fast_case("checked", "", T=200), BF16, "cuda", TaskOptions()))
    (call,) = passed
    with pytest.raises(RuntimeError, match=words):
        calls.library_operator("chunk_backward")(*{**call, name: change(call[name])}.values())


@gpu
def test_checkpointed(keep: Keep) -> None:
    """A forward that is run again in the backward leaves them again."""
    keep(128)
    task = make_task(fast_case("again", "", T=500), BF16, "cuda", TaskOptions())
    expected = by_op(task)

    def by_checkpoint(task: Task) -> dict[str, Tensor]:
        leaves = task.copies()
        run = torch.utils.checkpoint.checkpoint(run_op, task, leaves, use_reentrant=False)
        return task.backward(leaves, *run)

    for name, x in by_checkpoint(task).items():
        assert same_bits(x, expected[name]), name


@gpu
def test_compiled_leaves_none(keep: Keep, passed: list[dict[str, Any]]) -> None:
    keep(64)
    x = make_inputs(fast_case("compiled", "", T=200), BF16, "cuda")
    leaves = [y.detach().requires_grad_() for y in (x.q, x.k, x.v, x.g, x.beta)]
    run = torch.compile(gdn_triton.chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    o, _ = run(*leaves)
    torch.autograd.grad(o.sum(), leaves)
    (call,) = passed
    assert call["states"] is None and call["checkpoint_interval"] == 0
