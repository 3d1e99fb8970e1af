"""The host code around the CUDA library's operators, which an object that notes its arguments
stands in for: what is passed as it is, copied, narrowed, or never launched."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from fast_cases import Operator, host_call, prefill_call
from helpers import BF16, FP16, FP32, FP64, Case, make_inputs, same_bits

from gdn_triton import fast
from gdn_triton._host.records import Options
from gdn_triton.chunk.cuda import calls
from gdn_triton.chunk.problem import ChunkCall, Inputs
from gdn_triton.chunk.validation import validate_chunk


def test_host_passes_views_as_they_are(operator: Operator) -> None:
    p, given = host_call(use_qk_l2norm=True, scale=0.25)
    o, state = calls.forward(p, given)
    (passed,) = operator.calls
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        assert passed[name] is getattr(given, name), name
    assert passed["o"] is o and passed["final_state"] is state
    assert o.shape == given.v.shape and o.dtype == BF16 and o.is_contiguous()
    assert state is not None
    assert state.shape == (2, 4, 128, 128) and state.dtype == FP32 and state.is_contiguous()
    assert passed["scale"] == 0.25 and passed["use_qk_l2norm"] is True
    assert passed["use_beta_sigmoid"] is passed["state_v_first"] is False
    assert passed["batch_invariant"] is False
    assert passed["workspace"].numel() == 2 + 100 + 2 + 4 + 128 + 128 + 2 + True + False + True


def test_host_batch_invariance(operator: Operator) -> None:
    """Asked for by the problem, and so by scratch memory of another size."""
    for asked in (False, True):
        p, given = host_call(batch_invariant=asked)
        calls.forward(p, given)
        assert operator.calls[-1]["batch_invariant"] is asked
    sizes = [passed["workspace"].numel() for passed in operator.calls]
    assert sizes[1] == sizes[0] + 1


def test_host_passes_the_longest_sequences(operator: Operator) -> None:
    """As the caller says them, to the prefill too."""
    for longest in ((0, 0, 0), (70, 20, 10)):
        p, given = host_call(longest=longest)
        calls.forward(p, given)
        p, given, pool = prefill_call(longest=longest)
        calls.forward(p, given, pool)
        for passed in operator.calls[-2:]:
            assert passed["longest"] == longest


@pytest.mark.parametrize(
    ("lengths", "longest"),
    [((5, 0, 31, 4), (31, 5, 4)), ((0, 7), (7, 0, 0)), ((), (0, 0, 0))],
    ids=str,
)
def test_the_longest_sequences_are_those_of_the_offsets_on_the_cpu(
    lengths: tuple[int, ...], longest: tuple[int, int, int]
) -> None:
    x = make_inputs(Case("longest", "", lengths=lengths, orphans=3), FP32, "cpu")
    assert x.cu_seqlens is not None
    for told, expected in ((None, (0, 0, 0)), (x.cu_seqlens.clone(), longest)):
        call = ChunkCall(
            inputs=Inputs(x.q, x.k, x.v, x.g, x.beta, cu_seqlens=x.cu_seqlens),
            options=Options(False, False, False, False, False),
            cu_seqlens_cpu=told,
            chunk_indices=None,
            scale=None,
            output_final_state=False,
            chunk_size=16,
        )
        assert validate_chunk(call).longest == expected


def test_host_copies_what_tma_cannot_read(operator: Operator) -> None:
    """Copies are dense and equal: of an odd base, of odd rows, of a strided last dimension, and of
    a dense tensor that begins at an odd address."""
    p, given = host_call()
    q, k, v = given.q, given.k, given.v
    wide = torch.zeros(*q.shape[:3], 136, dtype=BF16)
    odd_base = wide[..., 4:132].copy_(q)
    odd_rows = torch.zeros(2, 100, 2 * 128 + 3, dtype=BF16)[..., :256].unflatten(-1, (2, 128))
    odd_rows.copy_(k)
    columns = v.mT.contiguous().mT
    flat = torch.zeros(q.numel() + 1, dtype=BF16)[1:].view(q.shape).copy_(q)
    assert flat.is_contiguous()
    for name, x in (("q", odd_base), ("k", odd_rows), ("v", columns), ("q", flat)):
        calls.forward(p, given._replace(**{name: x}))
        passed = operator.calls.pop()[name]
        assert passed is not x and same_bits(passed, x), name
        assert passed.is_contiguous() and passed.data_ptr() % 16 == 0


def test_host_narrows_side_inputs(operator: Operator) -> None:
    p, given = host_call(use_gate=True, dtype=BF16)
    for dtype in (FP16, BF16, FP32, FP64):
        sides = {name: getattr(given, name).to(dtype) for name in ("g", "beta", "initial_state")}
        heads = {"A_log": torch.rand(8, dtype=dtype)[::2], "dt_bias": torch.rand(4, dtype=dtype)}
        calls.forward(p, given._replace(**sides, **heads))
        passed = operator.calls.pop()
        for name, x in sides.items():
            assert passed[name].dtype == (FP32 if dtype == FP64 else dtype)
            assert (passed[name] is x) == (dtype != FP64)
        for name, x in heads.items():
            assert passed[name].is_contiguous() and torch.equal(passed[name], x.float())


def test_host_state_layout(operator: Operator) -> None:
    p, given = host_call(V=256, state_v_first=True)
    _, state = calls.forward(p, given._replace(initial_state=given.initial_state.mT))
    assert state is not None and state.shape == (2, 4, 256, 128)
    p, given = host_call(output_final_state=False)
    _, state = calls.forward(p, given._replace(initial_state=None))
    assert state is None and operator.calls[-1]["final_state"] is None
    assert operator.calls[-1]["initial_state"] is None


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(
    "changes", [{"T": 0}, {"B": 0, "N": 0}, {"B": 1, "N": 0, "is_varlen": True}], ids=str
)
def test_host_launches_nothing_for_nothing(
    changes: dict[str, Any], with_state: bool, operator: Operator
) -> None:
    p, given = host_call(**changes)
    initial_state = torch.rand(p.N, 4, 128, 128, dtype=FP16) if with_state else None
    given = given._replace(initial_state=initial_state)
    o, state = calls.forward(p, given)
    assert not operator.calls
    assert o.shape == given.v.shape and (o == 0).all()
    assert state is not None and state.dtype == FP32
    expected = torch.zeros(p.N, 4, 128, 128) if initial_state is None else initial_state.float()
    assert same_bits(state, expected)


def test_host_passes_a_pool_as_it_is(operator: Operator) -> None:
    p, given, pool = prefill_call(use_qk_l2norm=True, scale=0.25)
    o, state = calls.forward(p, given, pool)
    (passed,) = operator.calls
    assert operator.name == "chunk_prefill" and o is pool.out and state is None
    for name in ("q", "k", "v", "g", "beta"):
        assert passed[name] is getattr(given, name), name
    for name in (
        "state",
        "read_slots",
        "write_slots",
        "has_initial_state",
        "last_skipped",
    ):
        assert passed[name] is getattr(pool, name), name
    assert passed["checkpoint_interval"] == pool.every
    assert passed["checkpoints"] is pool.state
    assert passed["checkpoint_slots"] is pool.checkpoint_slots
    assert passed["o"] is pool.out and passed["scale"] == 0.25 and passed["use_qk_l2norm"] is True
    assert passed["workspace"].numel() == 2 + 100 + 2 + 4 + 128 + 128 + 2 + True + False + True
    calls.forward(p, given, replace(pool, has_initial_state=None, checkpoint_slots=None))
    assert operator.calls[1]["has_initial_state"] is operator.calls[1]["checkpoint_slots"] is None


def test_host_copies_an_o_that_tma_cannot_write(operator: Operator) -> None:
    """Rows apart are written where they lie; an odd base is not, and gets what was written."""
    p, given, pool = prefill_call()
    around = torch.zeros(p.B, p.T, p.HV, p.V + 8, dtype=BF16)
    for first, lies_right in ((8, True), (3, False)):
        out = around[..., first : first + p.V]
        o, _ = calls.forward(p, given, replace(pool, out=out))
        written = operator.calls.pop()["o"]
        assert o is out and (written is out) == lies_right
        assert written.is_contiguous() or lies_right
        assert same_bits(written, out)


@pytest.mark.parametrize("changes", [{"T": 0}, {"B": 0, "N": 0}, {"B": 1, "N": 0}], ids=str)
def test_host_moves_states_without_tokens(changes: dict[str, Any], operator: Operator) -> None:
    """The kernel is called where there is a sequence, and only there."""
    p, given, pool = prefill_call(**changes)
    o, _ = calls.forward(p, given, pool)
    assert o is pool.out and len(operator.calls) == (p.N > 0)
    assert p.N > 0 or not o.any()


def test_operator_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "why_unavailable", lambda: "Not built.")
    with pytest.raises(RuntimeError, match=r"Not built\."):
        calls.library_operator.__wrapped__("chunk_forward")
