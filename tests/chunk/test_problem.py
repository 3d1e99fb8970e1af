"""The problems of good calls, the parts of their tensors that validation reads, and the older name
of state_v_first."""

import functools
import math
import warnings

import numpy as np
import pytest
import torch
from validation_cases import (
    GATE,
    HALF,
    HV,
    META,
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

import gdn_triton

pytestmark = pytest.mark.usefixtures("reference")


def test_problem_of_a_padded_call():
    problem = validate(padded(q=zeros(B, T, H, K, **HALF), v=zeros(B, T, HV, V).bfloat16()))
    assert (problem.B, problem.T, problem.H, problem.HV) == (B, T, H, HV)
    assert (problem.K, problem.V, problem.N) == (K, V, B)
    assert (problem.q_dtype, problem.k_dtype) == (torch.float16, torch.float32)
    assert problem.v_dtype == torch.bfloat16
    assert problem.device == torch.device("cpu")
    assert problem.scale == K**-0.5
    assert problem.chunk_size == 64
    assert not problem.is_varlen and not problem.has_initial_state
    assert not problem.output_final_state and not problem.state_v_first
    assert not problem.use_gate and not problem.needs_grad


def test_problem_of_a_packed_call():
    problem = validate(
        packed(
            offsets=(0, 0, 2, 4),
            scale=-2,
            initial_state=zeros(3, HV, V, K, dtype=torch.bfloat16),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=True,
            state_v_first=True,
            use_gate_in_kernel=True,
            A_log=zeros(HV, dtype=torch.float64),
            chunk_size=16,
        )
    )
    assert problem.N == 3 and problem.is_varlen and problem.has_initial_state
    assert problem.scale == -2.0 and type(problem.scale) is float
    assert problem.output_final_state and problem.state_v_first
    assert problem.use_qk_l2norm and problem.use_beta_sigmoid and problem.allow_neg_eigval
    assert problem.use_gate and problem.chunk_size == 16


@pytest.mark.parametrize("scale", [0, 0.0, -1.5, 3, np.float32(0.5), np.float64(2), math.inf])
def test_scale_is_taken_literally(scale):
    problem = validate(padded(scale=scale))
    assert problem.scale == scale and type(problem.scale) is float


@pytest.mark.parametrize(
    "arguments",
    [
        packed(offsets=(0, 5)),
        packed(offsets=(0,)),  # no sequence: every token is left over
        packed(offsets=(0, 0, 0)),
        packed(offsets=(0, 3)),  # two tokens left over
        packed(offsets=(0,), tokens=0),
        packed(cu_seqlens=offsets(0, 2, 5), cu_seqlens_cpu=offsets(0, 2, 5, dtype=torch.int64)),
        packed(device="meta", cu_seqlens_cpu=offsets(0, 1, 4)),
        packed(device="meta"),
        packed(chunk_indices=zeros(2, 2, dtype=torch.int32)),
        packed(offsets=(0, 0, 3), chunk_indices=zeros(1, 2, dtype=torch.int32)),
        packed(offsets=(0, 0, 0), chunk_indices=zeros(0, 2, dtype=torch.int64)),
        packed(device="meta", chunk_indices=zeros(0, 2, dtype=torch.int64, **META)),
        packed(
            offsets=(0, 33, 66),
            tokens=70,
            chunk_size=32,
            chunk_indices=zeros(4, 2, dtype=torch.int32),
        ),
        padded(**{name: x[:0] for name, x in padded().items()}),  # no batch entry
        padded(**{name: x[:, :0] for name, x in padded().items()}),  # no token
        padded(**{name: x.double() for name, x in padded().items()}),
        padded(q=zeros(B, T, 2 * H, K)[:, :, ::2], k=zeros(B, H, T, K).transpose(1, 2)),
        padded(q=zeros(B, T, H, 300), k=zeros(B, T, H, 300)),  # a limit of backends only
        padded(A_log=zeros(HV), dt_bias=zeros(HV, **HALF), **GATE),
    ],
)
def test_good_input(arguments):
    validate(arguments)


def test_contents_on_another_device_are_not_read(monkeypatch):
    """Reading them would stop the host until the device is done."""

    def read(*_):
        raise AssertionError("the contents were read")

    arguments = packed(device="meta", offsets=(0, 2, 5))
    for name in ("tolist", "item", "cpu", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, read)
    assert validate(arguments).N == 2


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"])
def test_needs_grad(name):
    arguments = padded(initial_state=zeros(B, HV, K, V), A_log=zeros(HV), dt_bias=zeros(HV), **GATE)
    assert not validate(arguments).needs_grad
    arguments[name].requires_grad_()
    assert validate(arguments).needs_grad
    with torch.no_grad():
        assert not validate(arguments).needs_grad
    with torch.inference_mode():
        assert not validate(arguments).needs_grad


CALLS = [
    gdn_triton.chunk_gated_delta_rule,
    gdn_triton.explain,
    functools.partial(gdn_triton.explain_call, gdn_triton.chunk_gated_delta_rule),
]


@pytest.mark.parametrize("call", CALLS)
def test_transpose_state_layout_warns_its_caller(call):
    for old in (True, False):
        with pytest.warns(DeprecationWarning, match="use state_v_first") as record:
            call(**padded(), transpose_state_layout=old)
        assert [w.filename for w in record] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(**padded(), state_v_first=True)


@pytest.mark.parametrize("call", CALLS)
def test_transpose_state_layout_is_state_v_first(call):
    state = zeros(B, HV, V, K)
    with pytest.warns(DeprecationWarning):
        call(**padded(initial_state=state), transpose_state_layout=True)
    with (
        pytest.warns(DeprecationWarning),
        pytest.raises(ValueError, match=r"initial_state must have shape .* K=8, V=16"),
    ):
        call(**padded(initial_state=state), transpose_state_layout=False)


@pytest.mark.parametrize("call", CALLS)
def test_transpose_state_layout_bad(call):
    for old in (True, False):
        with pytest.raises(ValueError, match=r"transpose_state_layout must not .* state_v_first"):
            call(**padded(), transpose_state_layout=old, state_v_first=True)
    with pytest.raises(TypeError, match="transpose_state_layout must be True, False or None, got"):
        call(**padded(), transpose_state_layout="yes")
