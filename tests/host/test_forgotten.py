"""The choice of a backend in one test does not reach the next test, although the package keeps its
choices."""

import pytest
import torch
from choice_cases import not_interpreted
from helpers import unit_rows

import gdn_triton
from gdn_triton._host import backends
from gdn_triton.conv import backends as conv
from gdn_triton.prep import backends as prep
from gdn_triton.recurrent import plans


def call_each() -> None:
    """A call of each operator that keeps something of the choice of its backend, on the CPU."""
    q, v, gate = unit_rows(1, 5, 1, 7), torch.rand(1, 5, 1, 7), torch.rand(1, 5, 1)
    gdn_triton.fused_recurrent_gated_delta_rule(q, q, v, -gate, beta=gate)
    token = {"q": q[:, 0], "k": q[:, 0], "v": v[:, 0], "g": -gate[:, 0], "beta": gate[:, 0]}
    gdn_triton.recurrent_step(torch.rand(1, 1, 7, 7), torch.arange(1), **token)
    mixed, parameter = torch.rand(5, 21), torch.rand(1)
    gdn_triton.causal_conv1d(mixed, torch.rand(21, 4))
    sizes = {"num_k_heads": 1, "head_k_dim": 7, "head_v_dim": 7}
    gates = (gate[0], gate[0], parameter, parameter)
    gdn_triton.fused_post_conv_prep(mixed, *gates, **sizes)


def kept() -> tuple[int, ...]:
    caches = (conv._limits, prep.triton_refusal)
    return (len(plans._plans), *(cache.cache_info().currsize for cache in caches))


def test_choices_without_the_interpreter_are_forgotten() -> None:
    plans_before = dict(plans._plans)
    with pytest.MonkeyPatch.context() as patch, not_interpreted(patch):
        patch.setenv("GDN_BACKEND", "auto")
        assert not any(kept()), "choices of before"
        call_each()
        assert all(kept()), "nothing is kept, so this test is of no use"
        assert "TRITON_INTERPRET" in str(backends.triton_refusal((torch.float32,), "cpu", 7))
    assert plans._plans == plans_before
    assert kept()[1:] == (0, 0)
