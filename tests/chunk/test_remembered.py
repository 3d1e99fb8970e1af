"""Remembered validations: no call gets the problem of another, and a call that is alike is not
judged again."""

import math

import pytest
import torch
from validation_cases import (
    DEFAULTS,
    GATE,
    HV,
    B,
    H,
    K,
    T,
    V,
    offsets,
    packed,
    padded,
    validate,
    zeros,
)

from gdn_triton._host.records import made
from gdn_triton.chunk.problem import ChunkCall
from gdn_triton.chunk.validation import validate_chunk


def judged_anew(arguments):
    """The result of a call validated by itself: a Problem, or the type and words of the error."""
    try:
        return validate_chunk.__wrapped__(made(ChunkCall, {**DEFAULTS, **arguments}))
    except Exception as error:
        return type(error), str(error)


def judged(arguments):
    try:
        return validate(arguments)
    except Exception as error:
        return type(error), str(error)


GATED = {"A_log": zeros(HV), "dt_bias": zeros(HV), **GATE}
# Each beside a good call with every tensor on one device. None of these may be taken for it.
CHANGES = [
    *({"scale": scale} for scale in (1.0, 1, True, -1.0, 0.0, -0.0, math.nan, "1")),
    *({"chunk_size": size} for size in (16, 16.0, 1, True, None)),
    *(
        {name: flag}
        for name in (
            "output_final_state",
            "use_qk_l2norm_in_kernel",
            "use_beta_sigmoid_in_kernel",
            "allow_neg_eigval",
            "state_v_first",
            "use_gate_in_kernel",
        )
        for flag in (True, 1, False, 0, None)
    ),
    *({name: zeros(1)} for name in ("A_log", "dt_bias", "initial_state")),
    *({name: None} for name in ("q", "k", "v", "g", "beta", "A_log")),
    *(
        {name: torch.zeros_like(padded()[name], dtype=dtype)}
        for name in ("q", "k", "v", "g", "beta")
        for dtype in (torch.float16, torch.float64, torch.int32)
    ),
    *(
        {name: torch.zeros_like(padded()[name], device="meta")}
        for name in ("q", "k", "v", "g", "beta")
    ),
    *({name: padded()[name][:1]} for name in ("q", "k", "v", "g", "beta")),
    *({name: padded()[name][:, :-1]} for name in ("q", "k", "v", "g", "beta")),
    *({name: padded()[name].requires_grad_()} for name in ("q", "k", "v", "g", "beta")),
    {"A_log": torch.nn.Parameter(zeros(HV)), **GATE},
    {"initial_state": zeros(B, HV, K, V)},
    {"initial_state": zeros(B, HV, V, K)},
    {"initial_state": zeros(B, HV, V, K), "state_v_first": True},
    {name: x[:1] for name, x in padded().items()},
    {name: x[:, :0] for name, x in padded().items()},
]


@pytest.mark.parametrize("base", [{}, GATED], ids=["plain", "gated"])
def test_no_call_is_taken_for_another(base, monkeypatch):
    """Every call after every other: the same judgement as of the call by itself."""
    calls = [padded(**base), *(padded(**{**base, **change}) for change in CHANGES)]
    expected = [str(judged_anew(call)) for call in calls]
    for _ in range(2):
        assert [str(judged(call)) for call in calls] == expected
    with torch.no_grad():
        assert [str(judged(call)) for call in calls] == [str(judged_anew(call)) for call in calls]
    with monkeypatch.context() as patch:
        patch.setenv("GDN_BATCH_INVARIANT", "1")
        assert [str(judged(call)) for call in calls] == [str(judged_anew(call)) for call in calls]
    assert [str(judged(call)) for call in calls] == expected


def test_a_call_that_is_alike_is_not_judged_again():
    call = padded(initial_state=zeros(B, HV, K, V), scale=0.25, **GATED)
    strided = zeros(B, T, 2 * H, K)[:, :, ::2]
    assert validate(call) is validate({**call, "q": strided})
    device = packed(device="meta", tokens=77)
    assert validate(device) is validate(device)


def test_contents_on_the_host_are_read_each_time():
    cu_seqlens = offsets(0, 2, 5)
    for arguments in (
        packed(cu_seqlens=cu_seqlens),
        packed(device="meta", cu_seqlens_cpu=cu_seqlens),
    ):
        cu_seqlens.copy_(offsets(0, 2, 5))
        validate(arguments)
        cu_seqlens[1] = 6
        for _ in range(2):
            with pytest.raises(ValueError, match="must not decrease, got 6 then 5"):
                validate(arguments)
