"""Autograd's count of writes in place: a call increments the version of the tensors that it writes,
and of no others."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import same_bits
from pool_cases import HV, OPS, WRITING, Op, T, copied, make_step, run, states, tensors_of, tokens
from torch import Tensor

import gdn_triton

pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.mark.parametrize("name", WRITING)
def test_versions_of_what_is_written(name: str, backend: str) -> None:
    """Raised by a kernel as by torch's own operations, and by nothing for what is only read."""
    op = OPS[name]
    x = op.make()
    op.call(**copied(x))
    before = {given: x[given]._version for given in tensors_of(x)}
    op.call(**x)
    for given, version in before.items():
        rise = x[given]._version - version
        if given not in op.written:
            assert rise == 0, f"{given} was not written"
        elif backend == "triton":
            assert rise == 1, given
        else:
            assert rise > 0, given


@pytest.mark.parametrize("name", WRITING)
def test_versions_of_views_and_checkpoints_in_the_pool(name: str, backend: str) -> None:
    """A view has its base's version, and so a saved slot of the pool has."""
    op = OPS[name]
    x = op.make()
    written = x["state" if "state" in x else op.written[0]]
    slot, version = written[:1], written._version
    if name == "prefill":
        x["state_checkpoints"], x["checkpoint_slots"] = None, x["checkpoint_slots"] + 5
    op.call(**x)
    assert slot._version > version


def test_a_saved_state_that_is_overwritten(backend: str) -> None:
    x = make_step()
    call = {**tokens(1, T), "g": -torch.rand(1, T, HV), "beta": torch.rand(1, T, HV)}
    call["k"].requires_grad_()
    pool = x["state"]
    o, _ = gdn_triton.chunk_gated_delta_rule(**call, initial_state=pool[3:4])
    with torch.no_grad():
        gdn_triton.recurrent_step(**x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("name", WRITING)
def test_versions_under_a_compiler(name: str, backend: str) -> None:
    """The operator's schema says what is written: torch raises the version once, and a kernel's
    caller does not once more."""
    op = OPS[name]
    x = op.make()
    torch.compiler.reset()

    def call(x: dict[str, Any]) -> Any:
        return op.call(**x)

    version = {given: x[given]._version for given in op.written}
    torch.compile(call, fullgraph=True, backend="eager")(x)
    torch.compiler.reset()
    for given in op.written:
        rise = x[given]._version - version[given]
        assert rise == 1 if backend == "triton" else rise > 0, given


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("name", WRITING)
def test_what_was_made_in_inference_mode(name: str, how: str, backend: str) -> None:
    """A server makes its pools in that mode, and may make steps outside of it: they are written as
    others are. What is new is a tensor of the mode that the call is made in."""
    op = OPS[name]
    x = op.make()
    expected = run(op, copied(x))
    with torch.inference_mode():
        made = {given: x[given].clone() for given in op.written}
    call: Op = op
    if how == "compiled":
        torch.compiler.reset()
        compiled = torch.compile(lambda y: op.call(**y), fullgraph=True, backend="eager")
        call = Op(lambda **y: compiled(y), op.make, op.written)
    found = run(call, {**copied(x), **made})
    torch.compiler.reset()
    assert all(same_bits(y, expected[result]) for result, y in found.items())
    for result, y in found.items():
        if result.startswith("result") and not any(y is made[given] for given in made):
            assert not y.is_inference(), result


@pytest.mark.of_no_device
def test_versions_with_the_cuda_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is not here; its caller raises the versions before it runs."""
    from gdn_triton.chunk.cuda import autograd

    seen: list[int] = []
    pool = SimpleNamespace(state=states(2), out=torch.zeros(3), checkpoints=torch.zeros(4))
    written = (pool.state, pool.out, pool.checkpoints)

    def forward(*args: Any) -> tuple[Tensor, None]:
        seen.extend(x._version for x in written)
        return pool.out, None

    before = [x._version for x in written]
    monkeypatch.setattr(autograd, "calls", SimpleNamespace(forward=forward))
    autograd.forward(SimpleNamespace(), None, pool)  # type: ignore[arg-type]
    assert seen == [version + 1 for version in before]
