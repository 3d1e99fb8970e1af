"""A backward is batch-invariant where its forward was, whatever is asked for by the time that the
gradients are."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from fast_backward_cases import SMALL, Noted
from helpers import BF16, make_inputs
from torch import Tensor

import gdn_triton
from gdn_triton._host.environment import invariant_calls

Call = Callable[..., Tensor]


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def inputs() -> list[Tensor]:
    """q, k, v, g, beta; of v there is a gradient."""
    q, k, v, g, beta = make_inputs(SMALL, BF16, "cpu").tensors
    return [q, k, v.detach().requires_grad_(), g, beta]


def call(*given: Tensor) -> Tensor:
    return gdn_triton.chunk_gated_delta_rule(*given)[0]


def called_within(*given: Tensor) -> Tensor:
    with invariant_calls():
        return call(*given)


def differentiate(o: Tensor, given: list[Tensor]) -> None:
    torch.autograd.grad(o.float().sum(), given[2])


def made(how: str, function: Call = call) -> Call:
    """The function as it is, or compiled."""
    if how == "eager":
        return function
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def asked_by(
    means: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> AbstractContextManager[None]:
    if means == "context":
        return invariant_calls(asked)
    if asked:
        monkeypatch.setenv("GDN_BATCH_INVARIANT", "1")
    else:
        monkeypatch.delenv("GDN_BATCH_INVARIANT", raising=False)
    return nullcontext()


@pytest.mark.parametrize("means", ["variable", "context"])
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_as_the_forward(
    how: str, means: str, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as it is when the gradients are asked for, nor as it was when the call was compiled."""
    run = made(how)
    for asked in (False, True, False, True):
        given = inputs()
        with asked_by(means, asked, monkeypatch):
            o = run(*given)
        with asked_by(means, not asked, monkeypatch):
            differentiate(o, given)
        assert noted.invariant_forwards.pop() is asked
        passed = noted.calls.pop()
        assert passed["batch_invariant"] is asked
        sizes = 2 + 70 + 1 + 2 + 128 + 128 + 2
        assert passed["workspace"].numel() == sizes + True + False + False + asked


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_backward_of_another_thread(how: str, noted: Noted) -> None:
    """As autograd runs that of a GPU: it sees no context of the thread that called the forward."""
    given = inputs()
    with invariant_calls(), ThreadPoolExecutor(1) as threads:
        o = made(how)(*given)
        threads.submit(differentiate, o, given).result()
    assert noted.invariant_forwards == [True] and noted.calls[0]["batch_invariant"] is True


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_context_in_what_is_traced(how: str, noted: Noted) -> None:
    given = inputs()
    differentiate(made(how, called_within)(*given), given)
    assert noted.invariant_forwards == [True] and noted.calls[0]["batch_invariant"] is True


@pytest.mark.parametrize("saved, later", [(True, False), (False, True), (False, False)])
def test_exported_program(
    saved: bool, later: bool, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch-invariant if that is asked for when it is exported or when it runs."""

    class Program(torch.nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return call(*given)

    with invariant_calls(saved):
        program = torch.export.export(Program(), tuple(inputs())).module()
    noted.invariant_forwards.clear()
    given = inputs()
    monkeypatch.setenv("GDN_BATCH_INVARIANT", str(int(later)))
    o = program(*given)
    monkeypatch.setenv("GDN_BATCH_INVARIANT", str(int(not later)))
    differentiate(o, given)
    asked = saved or later
    assert noted.invariant_forwards == [asked] and noted.calls[0]["batch_invariant"] is asked
