"""The reference backend through the public op: what the op promises of dtypes, shapes and the
edges. The numbers are judged in the specification's own tests."""

import itertools

import pytest
import torch

import gdn_triton

pytestmark = pytest.mark.usefixtures("bare")

H, HV, K, V = 2, 4, 8, 6


def arguments(B=2, T=20, dtype=torch.float32):
    torch.manual_seed(0)
    return {
        "q": torch.randn(B, T, H, K, dtype=dtype),
        "k": torch.randn(B, T, H, K, dtype=dtype) * K**-0.5,
        "v": torch.randn(B, T, HV, V, dtype=dtype),
        "g": -torch.rand(B, T, HV),
        "beta": torch.rand(B, T, HV),
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes_and_shapes(dtype, autocast):
    given = arguments(dtype=dtype)
    with torch.autocast("cpu", enabled=autocast):
        o, state = gdn_triton.chunk_gated_delta_rule(**given, output_final_state=True)
    assert o.dtype == dtype and o.shape == (2, 20, HV, V) and o.is_contiguous()
    assert state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert state.shape == (2, HV, K, V) and state.is_contiguous()
    plain = gdn_triton.chunk_gated_delta_rule(**given)
    assert plain[1] is None
    assert torch.equal(plain[0], o), "autocast or output_final_state changed the numbers"


def test_state_v_first():
    initial = torch.randn(2, HV, K, V)
    given = arguments()
    o, state = gdn_triton.chunk_gdn(**given, initial_state=initial, output_final_state=True)
    first = initial.transpose(-1, -2).contiguous()
    again = {"initial_state": first, "output_final_state": True}
    o_first, state_first = gdn_triton.chunk_gdn(**given, **again, state_v_first=True)
    assert state_first.shape == (2, HV, V, K) and state_first.is_contiguous()
    torch.testing.assert_close(o_first, o)
    torch.testing.assert_close(state_first.transpose(-1, -2), state)
    with pytest.warns(DeprecationWarning):
        o_old, state_old = gdn_triton.chunk_gdn(**given, **again, transpose_state_layout=True)
    assert torch.equal(o_old, o_first) and torch.equal(state_old, state_first)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_is_each_sequence_alone(dtype):
    given = arguments(B=1, T=40)
    bounds = [0, 17, 17, 18, 35]  # one empty, one of a single token; 5 tokens of no sequence
    initial = torch.randn(4, HV, K, V)
    o, state = gdn_triton.chunk_gdn(
        **given,
        initial_state=initial,
        output_final_state=True,
        cu_seqlens=torch.tensor(bounds, dtype=dtype),
        cu_seqlens_cpu=torch.tensor(bounds),
        chunk_size=16,
    )
    assert o.shape == (1, 40, HV, V) and state.shape == (4, HV, K, V)
    assert not o[:, 35:].any()
    assert torch.equal(state[1], initial[1])
    for n, (bos, eos) in enumerate(itertools.pairwise(bounds)):
        alone = {name: x[:, bos:eos] for name, x in given.items()}
        o_n, state_n = gdn_triton.chunk_gdn(
            **alone, initial_state=initial[n : n + 1], output_final_state=True, chunk_size=16
        )
        torch.testing.assert_close(o[:, bos:eos], o_n)
        torch.testing.assert_close(state[n : n + 1], state_n)


@pytest.mark.parametrize("with_state", [False, True])
def test_no_token(with_state):
    initial = torch.randn(2, HV, K, V) if with_state else None
    o, state = gdn_triton.chunk_gdn(
        **arguments(T=0), initial_state=initial, output_final_state=True
    )
    assert o.shape == (2, 0, HV, V)
    assert torch.equal(state, initial if with_state else torch.zeros(2, HV, K, V))
    assert not with_state or state.data_ptr() != initial.data_ptr(), "the caller's own state"


def test_no_sequence():
    o, state = gdn_triton.chunk_gdn(
        **arguments(B=1), output_final_state=True, cu_seqlens=torch.tensor([0])
    )
    assert o.shape == (1, 20, HV, V) and not o.any()
    assert state.shape == (0, HV, K, V)
    o, state = gdn_triton.chunk_gdn(**arguments(B=0), output_final_state=True)
    assert o.shape == (0, 20, HV, V) and state.shape == (0, HV, K, V)


@pytest.mark.parametrize("bounds", [None, [0, 0, 9, 20]])
def test_final_state_is_a_new_tensor(bounds):
    B = 2 if bounds is None else 1
    N = 2 if bounds is None else 3
    initial = torch.randn(N, HV, K, V)
    kept = initial.clone()
    _, state = gdn_triton.chunk_gdn(
        **arguments(B=B),
        initial_state=initial,
        output_final_state=True,
        cu_seqlens=None if bounds is None else torch.tensor(bounds),
    )
    state.add_(1)
    assert torch.equal(initial, kept)


def test_inputs_are_not_touched():
    given = arguments()
    kept = {name: x.clone() for name, x in given.items()}
    gdn_triton.chunk_gdn(
        **given,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=torch.zeros(HV),
    )
    for name, x in given.items():
        assert torch.equal(x, kept[name]), name


def test_gradients_reach_every_input():
    given = arguments()
    given["initial_state"] = torch.randn(2, HV, K, V)
    given["A_log"] = torch.rand(HV)
    given["dt_bias"] = torch.rand(HV)
    for x in given.values():
        x.requires_grad_()
    o, state = gdn_triton.chunk_gdn(
        **given,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        use_gate_in_kernel=True,
    )
    (o.sum() + state.sum()).backward()
    for name, x in given.items():
        assert x.grad is not None and x.grad.isfinite().all() and x.grad.any(), name
