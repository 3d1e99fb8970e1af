"""Every operand of every public function with elements 2^31 apart, in each dimension in turn: the
same bits as where it is dense, or an error that says why not.

A kernel that makes an offset in 32 bits, and host code that lets it, show here. What all kernels do
with strides, whatever a call gives them, is judged in their code by compile_targets.py.
"""

import inspect

import pytest
import torch
from every_call import CALLS, NAMES, OTHERS, Call
from far import far, far_strides
from helpers import same_bits
from pool_cases import copied, tensors_of
from torch import Tensor

import gdn_triton

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="only a CPU lends memory that is never touched"
)

# By whom elements 2^31 apart are refused: the state of a pool and an output, in the dimensions that
# a program reads at once.
SPAN = "elements from the first; one is|elements of a slot within 2\\^31"
OUT = "out must have (rows of less than|a dense last dimension)"


def refusal(call: Call, given: str, x: Tensor, dim: int, stride: int) -> str | None:
    """Words of the error if the call must be refused."""
    last = dim == x.dim() - 1
    function = inspect.unwrap(call.function)
    if given.startswith("window."):
        if given in ("window.scales", "window.tickets"):
            return "be contiguous"
        # The slots may lie at any stride.
        return None if given == "window.start" or dim == 0 else "have contiguous slots"
    if function is gdn_triton.chunk_prefill:
        if given in ("state", "state_checkpoints") and dim > 0:
            return SPAN
        return OUT if given == "out" and dim in (1, 3) else None
    if call.function is not function and given in ("mixed_qkv", "b") and last:
        return SPAN
    if function in (gdn_triton.layer_step, gdn_triton.fold_window):
        return SPAN if given == "state" and dim > 1 else None
    if function in (gdn_triton.recurrent_step, gdn_triton.fused_recurrent_gated_delta_rule):
        if given in ("state", "initial_state"):
            return SPAN if dim > 1 else None
        # A program of a step with a window reads all tokens of a sequence at once.
        if function is not call.function and given in (*"qkvab", "out") and dim == 1:
            return SPAN if stride >= 2**31 else None
        if function is not call.function and given == "a" and last:
            return SPAN
        rows = ("q", "k", "v", "gk", "gv", "b", "beta", "out", "mixed_qkv")
        return SPAN if given in rows and last else None
    return None


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "triton")


@pytest.mark.parametrize("name", CALLS)
def test_far_operands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALLS[name]
    if call.segments:
        from gdn_triton.chunk.triton import forward as chunk_fwd

        monkeypatch.setattr(chunk_fwd, "choose_segments", lambda problem: 1)
    x = call.make()
    dense = call.run(copied(x))
    places: dict[str, list[tuple[int, int]]] = {}
    for given in tensors_of(x):
        places[given] = []
        for dim, stride in far_strides(x[given]):
            expected = refusal(call, given, x[given], dim, stride)
            if expected is None:
                places[given].append((dim, stride))
                continue
            with pytest.raises((ValueError, RuntimeError), match=expected):
                call.run({**copied(x), given: far(x[given], dim, stride)})
    # In each run every operand is far in one of its dimensions.
    for i in range(max(map(len, places.values()))):
        turn = {given: some[i % len(some)] for given, some in places.items() if some}
        apart = {given: far(x[given], *place) for given, place in turn.items()}
        got = call.run({**copied(x), **apart})
        assert got.keys() == dense.keys()
        wrong = [result for result in dense if not same_bits(got[result], dense[result])]
        assert not wrong, f"{wrong} differ where (dimension, stride) are {turn}"


def test_every_function_is_called() -> None:
    called = {call.function.__name__ for call in CALLS.values()}
    assert called | OTHERS | NAMES == set(gdn_triton.__all__)
