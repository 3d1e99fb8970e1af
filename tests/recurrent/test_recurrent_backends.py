"""Backends and gradients; memory and time; what is kept; errors: see test_recurrent.py."""

import itertools
import weakref
from typing import Any

import pytest
import torch
from helpers import FP16, FP32, FP64, memory_of, same_bits
from recurrent_cases import (
    SEQUENCES,
    STEPS,
    Sizes,
    assert_matches,
    assert_step_matches,
    exact,
    gradients,
    normal,
    sequence_call,
    step_arguments,
    step_call,
    strided,
    uniform,
)
from torch import Tensor

from gdn_triton import fused_recurrent_gated_delta_rule, recurrent_step
from gdn_triton.recurrent import plans
from gdn_triton.recurrent.api import check_step

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel, wherever a test does not choose."""
    monkeypatch.setenv("GDN_BACKEND", "triton")


# ------------------------------------------------------------------------- backends and gradients


def test_o_has_the_dtype_of_v(device: str) -> None:
    q, v = normal(1, 2, 1, 4, device=device), normal(1, 2, 1, 4, device=device).to(FP16)
    assert fused_recurrent_gated_delta_rule(q, q, v)[0].dtype == FP16
    assert fused_recurrent_gated_delta_rule(q.to(FP16), q, v.to(FP32))[0].dtype == FP32


def test_unknown_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "tritn")
    x = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ValueError, match="GDN_BACKEND must be one of auto, cuda, reference"):
        fused_recurrent_gated_delta_rule(x, x, x)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dtype": FP64}, "one of q, k, v is float64"),
        ({"K": 257}, "keys of up to 256 channels"),
        ({"grad": True}, "has no backward"),
    ],
)
def test_what_the_kernel_refuses(changes: dict[str, Any], sentence: str, device: str) -> None:
    q = torch.zeros(1, 1, 1, changes.get("K", 4), dtype=changes.get("dtype", FP32), device=device)
    q.requires_grad_(changes.get("grad", False))
    with pytest.raises(RuntimeError, match=sentence):
        fused_recurrent_gated_delta_rule(q, q, q)
    if q.requires_grad:
        with torch.no_grad():
            fused_recurrent_gated_delta_rule(q, q, q)


def test_pool_of_float64_is_refused_by_the_kernel(device: str) -> None:
    q = torch.zeros(1, 1, 4, device=device)
    pool = torch.zeros(1, 1, 4, 4, dtype=FP64, device=device)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match="the states are float64"):
        recurrent_step(pool, slots, q=q, k=q, v=q, g=q[..., 0], beta=q[..., 0])


def test_gradients_go_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto: a call that needs them is served, and they are those of the formula."""
    monkeypatch.delenv("GDN_BACKEND")
    row = {name: values[0] for name, values in SEQUENCES.items()}
    row |= {"packed": True, "gk": True, "gv": True, "beta": "value sigmoid", "state": FP32}
    row |= {"sizes": Sizes(T=2, H=1, HV=2, K=3, V=2), "g": "gate and bias", "l2norm": True}
    x, options = sequence_call(row, "cpu")
    offsets = x.pop("cu_seqlens")
    x = {name: exact(y).requires_grad_() for name, y in x.items()}

    def call(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(x, leaves, strict=True))
        o, state = fused_recurrent_gated_delta_rule(**given, **options, cu_seqlens=offsets)
        assert state is not None
        return o, state

    assert torch.autograd.gradcheck(call, tuple(x.values()), fast_mode=True)


def trained_call() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A call with everything that has a gradient, whose last row belongs to no sequence."""
    row = {name: values[0] for name, values in SEQUENCES.items()}
    row |= {"packed": True, "gk": True, "gv": True, "beta": "value sigmoid", "state": FP32}
    x, options = sequence_call({**row, "g": "gate and bias", "l2norm": True}, "cpu")
    assert int(x["cu_seqlens"][-1]) < x["q"].shape[1]
    return x, options


def test_what_tokens_of_no_sequence_hold_reaches_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GDN_BACKEND", "reference")
    x, options = trained_call()
    expected = gradients(x, options)
    end = int(x["cu_seqlens"][-1])
    for name in ("q", "k", "v", "g", "gk", "gv", "beta"):
        x[name] = x[name].clone()
        x[name][:, end:] = torch.nan
    found = gradients(x, options)
    assert found.keys() == expected.keys() == x.keys() - {"cu_seqlens"}
    for name, gradient in found.items():
        assert same_bits(gradient, expected[name]), name
        if name not in ("A_log", "dt_bias", "initial_state"):
            assert not gradient[:, end:].any(), name


def test_autocast_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "reference")
    x, options = trained_call()
    expected = gradients(x, options)
    for name, gradient in gradients(x, options, autocast=True).items():
        assert same_bits(gradient, expected[name]), name


@pytest.mark.parametrize("T", [0, 3])
def test_gradients_without_sequences(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are 0: the results hang on every input."""
    monkeypatch.setenv("GDN_BACKEND", "reference")
    x, options = trained_call()
    leaves = {
        name: (y[:, :T] if name not in ("A_log", "dt_bias") else y).clone().requires_grad_()
        for name, y in x.items()
        if name not in ("cu_seqlens", "initial_state")
    }
    offsets = torch.zeros(1, dtype=torch.int64)
    o, _ = fused_recurrent_gated_delta_rule(**leaves, **options, cu_seqlens=offsets)
    found = torch.autograd.grad(o.sum(), list(leaves.values()))
    for name, gradient in zip(leaves, found, strict=True):
        assert gradient.shape == leaves[name].shape and not gradient.any(), name


# --------------------------------------------------------------------------------- memory and time


def long_call(T: int, packed: bool = False) -> dict[str, Tensor]:
    """With all kinds of decays. The state is as large as what some fifty tokens hold."""
    HV, K = 2, 64
    x = {name: normal(1, T, HV, K) / 8 for name in ("q", "k", "v")}
    x |= {name: -uniform(1, T, HV, K) for name in ("gk", "gv")}
    x |= {"g": -uniform(1, T, HV), "beta": uniform(1, T, HV)}
    if packed:  # one long sequence and many short ones
        lengths = [T // 2] + [2] * (T // 4)
        x["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(lengths)])
    return x


@pytest.mark.parametrize("packed", [False, True])
def test_the_reference_keeps_one_state(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a gradient: the peak has the memory of all tokens and a few states of each sequence,
    and no memory of each token remains allocated."""
    monkeypatch.setenv("GDN_BACKEND", "reference")
    T = 128
    x = long_call(T, packed)
    N = x["cu_seqlens"].shape[0] - 1 if packed else 1
    state = 2 * 64 * 64 * 4
    memory = memory_of(lambda: fused_recurrent_gated_delta_rule(**x))
    tokens = sum(y.nbytes for name, y in x.items() if name != "cu_seqlens")
    assert memory.peak < 4 * tokens + 5 * N * state
    assert packed or memory.peak < T * state / 2
    assert memory.pieces < 64


@pytest.mark.parametrize("packed", [False, True])
def test_the_reference_s_backward_is_linear(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that it writes to memory, which bound its time, are twice as many for twice as many
    tokens."""
    monkeypatch.setenv("GDN_BACKEND", "reference")

    def made(T: int) -> int:
        x = long_call(T, packed)
        leaves = {name: y.requires_grad_() if y.is_floating_point() else y for name, y in x.items()}
        o, _ = fused_recurrent_gated_delta_rule(**leaves)
        return memory_of(o.sum().backward).made

    made(8)  # what is made once in a process
    assert made(256) < 2.2 * made(128)


def test_a_step_has_no_gradient(device: str) -> None:
    row = {name: values[0] for name, values in STEPS.items()}
    x = step_call(row, device).arguments
    x["q"] = x["q"].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="has no gradient"):
        recurrent_step(**x)
    with torch.no_grad():
        recurrent_step(**x)


# ------------------------------------------------------------------------------------ what is kept


def test_a_plan_keeps_no_tensor(device: str) -> None:
    row = {name: values[0] for name, values in STEPS.items()}
    x = step_call({**row, "mixed": True, "raw": True}, device).arguments
    recurrent_step(**x)
    held = [weakref.ref(y) for y in x.values() if isinstance(y, Tensor)]
    del x
    assert not any(ref() is not None for ref in held)


def test_plans_are_kept_and_bounded(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_plans", {})
    monkeypatch.setattr(plans, "MOST_PLANS", 2)
    for length in (1, 2, 1, 3):
        x = normal(1, length, 1, 4, device=device)
        fused_recurrent_gated_delta_rule(x, x, x)
    assert len(plans._plans) == 1, "two plans were dropped for the third"
    fused_recurrent_gated_delta_rule(x, x, x)
    fused_recurrent_gated_delta_rule(x.clone(), x, x)
    assert len(plans._plans) == 1


def test_the_check_of_a_step_refuses_an_unknown_argument(device: str) -> None:
    row = {name: values[0] for name, values in STEPS.items()}
    x = step_call(row, device).arguments
    with pytest.raises(TypeError, match="has no argument decay, window_size"):
        check_step(**x, window_size=4, decay=None)


@pytest.mark.parametrize("change", ["dtype", "stride", "backend", "option", "alignment"])
def test_another_call_has_another_plan(
    change: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a plan depends on is looked at again in the next call."""
    row = {name: values[0] for name, values in SEQUENCES.items()}
    x, options = sequence_call({**row, "g": "decay", "beta": "head", "state": FP32}, device)
    for _ in range(2):
        o, final_state = fused_recurrent_gated_delta_rule(**x, **options)
    if change == "dtype":
        x["q"] = x["q"].to(FP16)
    elif change == "stride":
        x["v"] = strided(x["v"])
    elif change == "backend":
        monkeypatch.setenv("GDN_BACKEND", "reference")
    elif change == "option":
        options["use_qk_l2norm_in_kernel"] = True
    else:
        k = x["k"]
        x["k"] = torch.zeros(k.numel() + 1, device=device)[1:].view_as(k).copy_(k)
    for _ in range(2):
        o, final_state = fused_recurrent_gated_delta_rule(**x, **options)
        assert_matches(x, options, o, final_state)


# ------------------------------------------------------------------------------------------ errors


def sequence_arguments() -> dict[str, Any]:
    q, v = torch.zeros(2, 3, 2, 8), torch.zeros(2, 3, 4, 6)
    return {"q": q, "k": q, "v": v, "g": v[..., 0], "beta": v[..., 0]}


OFFSETS = torch.tensor([0, 2, 3])
ONE_ROW = {"q": torch.zeros(1, 3, 2, 8), "k": torch.zeros(1, 3, 2, 8)}
ONE_ROW |= {"v": torch.zeros(1, 3, 4, 6), "g": None, "beta": None}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": [1]}, TypeError, "q must be a torch.Tensor, got list"),
        ({"g": 1.0}, TypeError, "g must be a torch.Tensor or None, got float"),
        ({"state_v_first": 1}, TypeError, "state_v_first must be True or False, got 1"),
        ({"scale": True}, TypeError, "scale must be a real number or None, got True"),
        ({"scale": 10**400}, ValueError, "scale must be within the range of float64"),
        ({"scale": torch.ones(())}, TypeError, "scale must be a real number or None, got a tensor"),
        ({"k": torch.zeros(2, 3, 2, 8, device="meta")}, ValueError, "k must be on the device"),
        ({"q": torch.zeros(2, 3, 8)}, ValueError, "q must have 4 dimensions"),
        ({"k": torch.zeros(2, 3, 1, 8)}, ValueError, "k must have the heads of q, H=2, got 1"),
        ({"k": torch.zeros(2, 3, 2, 9)}, ValueError, "k must have the shape of q"),
        ({"v": torch.zeros(2, 3, 3, 6)}, ValueError, "v must have a positive multiple of H=2"),
        ({"v": torch.zeros(2, 4, 4, 6)}, ValueError, "v must have shape"),
        ({"g": torch.zeros(2, 3, 3)}, ValueError, "g must have shape"),
        ({"gk": torch.zeros(2, 3, 4, 6)}, ValueError, "gk must have shape .*K=8"),
        ({"gv": torch.zeros(2, 3, 4, 8)}, ValueError, "gv must have shape .*V=6"),
        ({"beta": torch.zeros(2, 3, 4, 8)}, ValueError, "beta must have shape .* or .*V=6"),
        ({"v": torch.zeros(2, 3, 4, 6).int()}, ValueError, "v must be float16"),
        ({"initial_state": torch.zeros(2, 4, 6, 8)}, ValueError, "initial_state must have shape"),
        ({"use_gate_in_kernel": True}, ValueError, "A_log must be given"),
        ({"use_gate_in_kernel": True, "g": None}, ValueError, "g must be given"),
        ({"A_log": torch.zeros(4)}, ValueError, "A_log must be None without use_gate_in_kernel"),
        ({"use_beta_sigmoid_in_kernel": True, "beta": None}, ValueError, "beta must be given"),
        ({"allow_neg_eigval": True}, ValueError, "allow_neg_eigval must come with"),
        ({"cu_seqlens": OFFSETS}, ValueError, "q must have batch size B=1 with cu_seqlens"),
        (
            ONE_ROW | {"cu_seqlens": OFFSETS.float()},
            ValueError,
            "cu_seqlens must be int32 or int64",
        ),
        (ONE_ROW | {"cu_seqlens": OFFSETS + 1}, ValueError, "cu_seqlens must start at 0, got 1"),
        (ONE_ROW | {"cu_seqlens": OFFSETS * 2}, ValueError, "cu_seqlens must end at or before T=3"),
        (ONE_ROW | {"cu_seqlens": OFFSETS[None]}, ValueError, "cu_seqlens must have shape"),
    ],
)
def test_wrong_sequences(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    for _ in range(2):
        with pytest.raises(error, match=message):
            fused_recurrent_gated_delta_rule(**{**sequence_arguments(), **changes})


MIXED = {"q": None, "k": None, "v": None, "mixed_qkv": torch.zeros(3, 2 * 2 * 8 + 4 * 6)}
RAW = {"g": None, "beta": None, "a": torch.zeros(3, 4), "b": torch.zeros(3, 4)}
RAW |= {"A_log": torch.zeros(4)}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"state": None}, TypeError, "state must be a torch.Tensor, got NoneType"),
        ({"read_slots": [0, 1, 2]}, TypeError, "read_slots must be a torch.Tensor, got list"),
        ({"q": None}, TypeError, "q must be a torch.Tensor, got NoneType"),
        ({"mixed_qkv": torch.zeros(3, 56)}, ValueError, "q must be None with mixed_qkv"),
        (RAW | {"g": torch.zeros(3, 4)}, ValueError, "g must be None with a, got a Tensor"),
        ({"b": torch.zeros(3, 4)}, ValueError, "b must be None with g, got a Tensor"),
        (RAW | {"b": None}, TypeError, "b must be a torch.Tensor, got NoneType"),
        (RAW | {"A_log": None}, ValueError, "A_log must be given with a and b"),
        ({"A_log": torch.zeros(4)}, ValueError, "A_log must be None without a and b"),
        ({"allow_neg_eigval": True}, ValueError, "allow_neg_eigval must come with b"),
        ({"skip": "none"}, ValueError, "skip must be one of negative, non_positive, got 'none'"),
        ({"state": torch.zeros(5, 4, 8)}, ValueError, "state must have 4 dimensions"),
        ({"state": torch.zeros(5, 4, 6, 8)}, ValueError, "q must have the K=6 channels of state"),
        ({"state": torch.zeros(5, 4, 8, 7)}, ValueError, "v must have the HV=4 heads of V=7"),
        ({"state": torch.zeros(5, 4, 8, 6).long()}, ValueError, "state must be float16"),
        ({"state": torch.zeros(1, 4, 8, 6).expand(5, 4, 8, 6)}, ValueError, "state must have mem"),
        ({"q": torch.zeros(2, 8)}, ValueError, r"q must have shape \[N, H, K\] or \[N, T, H, K\]"),
        ({"read_slots": torch.arange(4)}, ValueError, "q must have a row for each of the N=4"),
        ({"read_slots": torch.zeros(3)}, ValueError, "read_slots must be int32 or int64"),
        ({"read_slots": torch.zeros(3, 1).int()}, ValueError, r"read_slots must have shape \[N\]"),
        (
            {"read_slots": torch.tensor([0, 5, 1])},
            ValueError,
            "less than the 5 slots of state, got",
        ),
        ({"read_slots": torch.tensor([0, 1, 0])}, ValueError, "read_slots must name no slot twice"),
        ({"write_slots": torch.zeros(4).int()}, ValueError, r"write_slots must have shape \[3\]"),
        (
            {"write_slots": torch.tensor([3, 4, 3])},
            ValueError,
            "write_slots must name no slot twice",
        ),
        ({"write_slots": torch.tensor([1, 3, 4])}, ValueError, "slot 1, read by sequence 1 and wr"),
        (
            {"write_slots": torch.tensor([3, 4, 5])},
            ValueError,
            "write_slots must be less than the 5",
        ),
        ({"g": torch.zeros(3, 1)}, ValueError, "g must have shape"),
        ({"g": torch.zeros(3, 4).int()}, ValueError, "g must be float16"),
        (MIXED | {"mixed_qkv": torch.zeros(3, 57)}, ValueError, "mixed_qkv must have 2 . H . K"),
        (
            MIXED | {"mixed_qkv": torch.zeros(2, 56)},
            ValueError,
            "mixed_qkv must have a row for each",
        ),
        ({"out": torch.zeros(3, 4, 7)}, ValueError, "out must have shape"),
        ({"out": torch.zeros(3, 4, 6, dtype=FP16)}, ValueError, "out must be torch.float32, as v"),
        ({"cu_seqlens": torch.tensor([0, 3])}, ValueError, r"cu_seqlens must have shape \[4\]"),
        ({"scale": "1"}, TypeError, "scale must be a real number"),
        ({"A_log": 3}, TypeError, "A_log must be a torch.Tensor or None"),
    ],
)
def test_wrong_steps(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    for _ in range(2):
        x = {**step_arguments(), **changes}
        with pytest.raises(error, match=message):
            recurrent_step(**x)


def test_read_and_write_of_one_sequence_may_meet(device: str) -> None:
    """With a slot for each token, the state after the first token may go to the slot that its
    sequence reads."""
    row = {name: values[0] for name, values in STEPS.items()}
    call = step_call({**row, "tokens": "several", "write": "token"}, device)
    x = call.arguments
    x["write_slots"][:, 0] = torch.where(x["read_slots"] < 0, -1, x["read_slots"])
    before = x["state"].clone()
    assert_step_matches(call, before, recurrent_step(**x))


@pytest.mark.parametrize("function", [fused_recurrent_gated_delta_rule, recurrent_step])
def test_unknown_keyword(function: Any) -> None:
    with pytest.raises(TypeError, match="head_first"):
        function(torch.zeros(1), torch.zeros(1), torch.zeros(1), head_first=True)


def test_deprecated_layout(device: str) -> None:
    x = normal(1, 2, 1, 4, device=device)
    state = normal(1, 1, 4, 4, device=device)
    options = {"initial_state": state, "output_final_state": True}
    with pytest.warns(DeprecationWarning, match="use state_v_first"):
        old = fused_recurrent_gated_delta_rule(x, x, x, **options, transpose_state_layout=True)
    new = fused_recurrent_gated_delta_rule(x, x, x, **options, state_v_first=True)
    for a, b in zip(old, new, strict=True):
        assert a is not None and b is not None and same_bits(a, b)
