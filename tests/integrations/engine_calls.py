"""Helpers of the tests of the engines' adapters: tensors of a call in an engine's form, and direct
calls of our functions."""

import math

import pytest
import torch
from helpers import unit_rows

import gdn_triton

GPU = pytest.param(
    ("cuda", "triton"), id="gpu", marks=pytest.mark.gpu("what an engine calls runs there")
)
PLACES = [pytest.param(("cpu", "reference"), id="cpu"), GPU]


def at(request, monkeypatch):
    """Runs the op in the reference on the CPU, and in Triton on a GPU, because the tests are about
    the code around the op. Returns the device."""
    device, backend = request.param
    if device == "cuda" and request.node.get_closest_marker("of_no_device"):
        pytest.skip("nothing of this depends on the device")
    monkeypatch.setenv("GDN_BACKEND", backend)
    return torch.device(device)


OFFSETS = (0, 7, 7, 20, 33)
T, N = OFFSETS[-1], len(OFFSETS) - 1
K, V = 16, 8


def packed(H=2, HK=2, HV=4, **changes):
    """FlashInfer's tensors for a prefill, and log decays for ours."""
    HO = max(H, HV)
    g = -torch.rand(T, HO) * torch.tensor([0.01, 30.0]).repeat(HO // 2)
    g[3, 0] = g[12, 1] = -math.inf
    inputs = {
        "q": torch.randn(T, H, K),
        "k": unit_rows(T, HK, K),
        "v": torch.randn(T, HV, V),
        "beta": torch.rand(T, HO),
        "cu_seqlens": torch.tensor(OFFSETS, dtype=torch.int32),
    }
    return {**inputs, "g": g.exp(), **changes}


def expected_of(inputs, initial_state=None, **options):
    """Ours, asked directly."""
    x = {name: inputs[name].unsqueeze(0) for name in ("q", "k", "v", "g", "beta")}
    repeats = x["q"].shape[2] // x["v"].shape[2]
    if repeats > 1:
        x |= {name: x[name].repeat_interleave(repeats, 2) for name in ("k", "v")}
    o, final_state = gdn_triton.chunk_gated_delta_rule(
        **{**x, "g": x["g"].log()},
        initial_state=initial_state,
        output_final_state=True,
        state_v_first=True,
        cu_seqlens=inputs["cu_seqlens"],
        **options,
    )
    return o.squeeze(0), final_state


B = 3


def decoding(tokens):
    H, HV = 2, 4
    return {
        "q": torch.randn(B, tokens, H, K),
        "k": torch.randn(B, tokens, H, K),
        "v": torch.randn(B, tokens, HV, V),
        "A_log": torch.randn(HV),
        "a": torch.randn(B, tokens, HV),
        "dt_bias": torch.randn(HV),
        "b": torch.randn(B, tokens, HV),
    }


def mixed_token():
    """One token of each sequence, with q, k and v in one tensor."""
    x = decoding(1)
    return {
        "mixed_qkv": torch.cat([x[name].flatten(1) for name in ("q", "k", "v")], 1),
        "a": x["a"][:, 0],
        "b": x["b"][:, 0],
        "A_log": x["A_log"],
        "dt_bias": x["dt_bias"],
        "scale": 0.5,
    }


def step_of(inputs, pool, slots, write_slots=None, **options):
    """`gdn_triton.recurrent_step`, asked directly, on a copy of the pool."""
    pool = pool.clone()
    options = {"use_qk_l2norm_in_kernel": True, "state_v_first": True, **options}
    return gdn_triton.recurrent_step(pool, slots, write_slots, **inputs, **options), pool


def vllm_call():
    inputs = packed()
    x = {name: inputs[name].unsqueeze(0) for name in ("q", "k", "v", "g", "beta")}
    x |= {"g": x["g"].log(), "cu_seqlens": inputs["cu_seqlens"]}
    return inputs, {**x, "use_qk_l2norm_in_kernel": False, "output_final_state": True}
