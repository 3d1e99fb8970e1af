"""Helpers that the tests of validation share: the arguments of valid calls, with changes."""

import torch

from gdn_triton._host.records import made
from gdn_triton.chunk.problem import ChunkCall
from gdn_triton.chunk.validation import validate_chunk

B, T, H, HV, K, V = 2, 5, 2, 4, 8, 16

DEFAULTS = {
    "scale": None,
    "initial_state": None,
    "output_final_state": False,
    "use_qk_l2norm_in_kernel": False,
    "use_beta_sigmoid_in_kernel": False,
    "allow_neg_eigval": False,
    "state_v_first": False,
    "cu_seqlens": None,
    "cu_seqlens_cpu": None,
    "chunk_indices": None,
    "use_gate_in_kernel": False,
    "A_log": None,
    "dt_bias": None,
    "chunk_size": 64,
}


def zeros(*shape, **options):
    return torch.zeros(*shape, **options)


def padded(**changes):
    """Arguments of a good padded call, with changes."""
    good = {
        "q": zeros(B, T, H, K),
        "k": zeros(B, T, H, K),
        "v": zeros(B, T, HV, V),
        "g": zeros(B, T, HV),
        "beta": zeros(B, T, HV),
    }
    return {**good, **changes}


def packed(offsets=(0, 2, 5), tokens=T, device=None, **changes):
    """Arguments of a good packed call of two sequences, with changes."""
    good = {
        "q": zeros(1, tokens, H, K, device=device),
        "k": zeros(1, tokens, H, K, device=device),
        "v": zeros(1, tokens, HV, V, device=device),
        "g": zeros(1, tokens, HV, device=device),
        "beta": zeros(1, tokens, HV, device=device),
        "cu_seqlens": torch.tensor(offsets, dtype=torch.int64, device=device),
    }
    return {**good, **changes}


def validate(arguments):
    return validate_chunk(made(ChunkCall, {**DEFAULTS, **arguments}))


def offsets(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


META = {"device": "meta"}
HALF = {"dtype": torch.float16}
GATE = {"use_gate_in_kernel": True}
