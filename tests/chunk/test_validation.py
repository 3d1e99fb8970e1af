"""Bad input: every message names the argument, what was expected and what came."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from validation_cases import GATE, HV, META, B, H, K, T, V, offsets, packed, padded, validate, zeros

import gdn_triton
from gdn_triton.chunk.backends import CHUNK

pytestmark = pytest.mark.usefixtures("reference")

ROWS = "rows (N=2 sequences, T=5, chunk_size=64), got shape"


def state_message(expected, state_v_first, given):
    return (
        f"initial_state must have shape {expected} (state_v_first={state_v_first})"
        f", got shape {given}"
    )


# (arguments, error, whole message). One row for each way to be wrong.
BAD = [
    # Types.
    (padded(q=[1.0]), TypeError, "q must be a torch.Tensor, got list"),
    (padded(k=None), TypeError, "k must be a torch.Tensor, got NoneType"),
    (padded(v=np.zeros(3)), TypeError, "v must be a torch.Tensor, got ndarray"),
    (padded(g=None), TypeError, "g must be a torch.Tensor, got NoneType"),
    (padded(beta=1.0), TypeError, "beta must be a torch.Tensor, got float"),
    (padded(initial_state=0), TypeError, "initial_state must be a torch.Tensor or None, got int"),
    (padded(cu_seqlens=[0, 5]), TypeError, "cu_seqlens must be a torch.Tensor or None, got list"),
    (
        packed(cu_seqlens_cpu=[0, 5]),
        TypeError,
        "cu_seqlens_cpu must be a torch.Tensor or None, got list",
    ),
    (
        packed(chunk_indices=()),
        TypeError,
        "chunk_indices must be a torch.Tensor or None, got tuple",
    ),
    (padded(A_log=1.0, **GATE), TypeError, "A_log must be a torch.Tensor or None, got float"),
    (padded(dt_bias=1.0, **GATE), TypeError, "dt_bias must be a torch.Tensor or None, got float"),
    (
        padded(output_final_state=1),
        TypeError,
        "output_final_state must be True or False, got 1 (int)",
    ),
    (
        padded(use_qk_l2norm_in_kernel=None),
        TypeError,
        "use_qk_l2norm_in_kernel must be True or False, got None (NoneType)",
    ),
    (
        padded(use_beta_sigmoid_in_kernel="no"),
        TypeError,
        "use_beta_sigmoid_in_kernel must be True or False, got 'no' (str)",
    ),
    (padded(allow_neg_eigval=0), TypeError, "allow_neg_eigval must be True or False, got 0 (int)"),
    (
        padded(state_v_first=zeros(1)),
        TypeError,
        "state_v_first must be True or False, got a tensor of shape [1]",
    ),
    (
        padded(use_gate_in_kernel=1),
        TypeError,
        "use_gate_in_kernel must be True or False, got 1 (int)",
    ),
    (padded(scale=True), TypeError, "scale must be a real number or None, got True (bool)"),
    (padded(scale="1"), TypeError, "scale must be a real number or None, got '1' (str)"),
    (
        padded(scale=10**400),
        ValueError,
        "scale must be within the range of float64, 1.8e+308, got one beyond it (int)",
    ),
    # It has more digits than Python prints.
    (
        padded(scale=Fraction(-(10**5000))),
        ValueError,
        "scale must be within the range of float64, 1.8e+308, got one beyond it (Fraction)",
    ),
    (padded(scale=1j), TypeError, "scale must be a real number or None, got 1j (complex)"),
    (
        padded(scale=torch.tensor(1.0)),
        TypeError,
        "scale must be a real number or None, got a tensor of shape []",
    ),
    (
        padded(chunk_size=64.0),
        TypeError,
        "chunk_size must be an int, one of (16, 32, 64), got 64.0 (float)",
    ),
    (
        padded(chunk_size=None),
        TypeError,
        "chunk_size must be an int, one of (16, 32, 64), got None (NoneType)",
    ),
    # Devices.
    (
        padded(k=zeros(B, T, H, K, **META)),
        ValueError,
        "k must be on the device of q, cpu, got meta",
    ),
    (
        padded(v=zeros(B, T, HV, V, **META)),
        ValueError,
        "v must be on the device of q, cpu, got meta",
    ),
    (padded(g=zeros(B, T, HV, **META)), ValueError, "g must be on the device of q, cpu, got meta"),
    (
        padded(q=zeros(B, T, H, K, **META)),
        ValueError,
        "k must be on the device of q, meta, got cpu",
    ),
    (
        padded(beta=zeros(B, T, HV, **META)),
        ValueError,
        "beta must be on the device of q, cpu, got meta",
    ),
    (
        padded(initial_state=zeros(B, HV, K, V, **META)),
        ValueError,
        "initial_state must be on the device of q, cpu, got meta",
    ),
    (
        packed(cu_seqlens=zeros(3, dtype=torch.int64, **META)),
        ValueError,
        "cu_seqlens must be on the device of q, cpu, got meta",
    ),
    (
        packed(cu_seqlens_cpu=zeros(3, dtype=torch.int64, **META)),
        ValueError,
        "cu_seqlens_cpu must be on the CPU, got meta",
    ),
    (
        packed(chunk_indices=zeros(2, 2, dtype=torch.int64, **META)),
        ValueError,
        "chunk_indices must be on the device of q, cpu, got meta",
    ),
    (
        padded(A_log=zeros(HV, **META), **GATE),
        ValueError,
        "A_log must be on the device of q, cpu, got meta",
    ),
    (
        padded(A_log=zeros(HV), dt_bias=zeros(HV, **META), **GATE),
        ValueError,
        "dt_bias must be on the device of q, cpu, got meta",
    ),
    # Ranks.
    (
        padded(q=zeros(T, H, K)),
        ValueError,
        "q must have 4 dimensions [B, T, H, K], got shape [5, 2, 8]",
    ),
    (
        padded(k=zeros(T, H, K)),
        ValueError,
        "k must have 4 dimensions [B, T, H, K], got shape [5, 2, 8]",
    ),
    (
        padded(v=zeros(1, B, T, HV, V)),
        ValueError,
        "v must have 4 dimensions [B, T, HV, V], got shape [1, 2, 5, 4, 16]",
    ),
    (padded(g=zeros(B, T)), ValueError, "g must have 3 dimensions [B, T, HV], got shape [2, 5]"),
    (
        padded(beta=zeros(B, T, HV, V)),
        ValueError,
        "beta must have 3 dimensions [B, T, HV], got shape [2, 5, 4, 16]",
    ),
    # Head counts.
    (padded(k=zeros(B, T, 1, K)), ValueError, "k must have the heads of q, H=2, got 1 heads"),
    (
        padded(q=zeros(B, T, 0, K), k=zeros(B, T, 0, K)),
        ValueError,
        "q must have at least one head, got H=0",
    ),
    (
        padded(v=zeros(B, T, 3, V)),
        ValueError,
        "v must have a positive multiple of H=2 heads, got HV=3",
    ),
    (
        padded(v=zeros(B, T, 1, V)),
        ValueError,
        "v must have a positive multiple of H=2 heads, got HV=1",
    ),
    (
        padded(v=zeros(B, T, 0, V)),
        ValueError,
        "v must have a positive multiple of H=2 heads, got HV=0",
    ),
    # Sizes.
    (
        padded(q=zeros(B, T, H, 0), k=zeros(B, T, H, 0)),
        ValueError,
        "q must have a key size K of at least 1, got K=0",
    ),
    (
        padded(v=zeros(B, T, HV, 0)),
        ValueError,
        "v must have a value size V of at least 1, got V=0",
    ),
    (
        padded(k=zeros(B, T, H, 7)),
        ValueError,
        "k must have the shape of q, [B=2, T=5, H=2, K=8], got shape [2, 5, 2, 7]",
    ),
    (
        padded(k=zeros(B, 4, H, K)),
        ValueError,
        "k must have the shape of q, [B=2, T=5, H=2, K=8], got shape [2, 4, 2, 8]",
    ),
    (
        padded(v=zeros(1, T, HV, V)),
        ValueError,
        "v must have shape [B=2, T=5, HV=4, V=16], got shape [1, 5, 4, 16]",
    ),
    (
        padded(v=zeros(B, 6, HV, V)),
        ValueError,
        "v must have shape [B=2, T=5, HV=4, V=16], got shape [2, 6, 4, 16]",
    ),
    (
        padded(q=zeros(B, H, T, K), k=zeros(B, H, T, K), v=zeros(B, HV, T, V)),
        ValueError,
        "v must have shape [B=2, T=2, HV=5, V=16], got shape [2, 4, 5, 16]. They look like "
        "[B, H, T, ...]: q, k, v, g and beta are [B, T, H, ...], tokens before heads, which "
        "x.transpose(1, 2) makes",
    ),
    (
        padded(q=zeros(B, 0, H, K), k=zeros(B, 0, H, K), v=zeros(B, T, H, V)),
        ValueError,
        "v must have shape [B=2, T=0, HV=2, V=16], got shape [2, 5, 2, 16]",
    ),
    (
        padded(g=zeros(B, T, H)),
        ValueError,
        "g must have shape [B=2, T=5, HV=4], got shape [2, 5, 2]",
    ),
    (
        padded(beta=zeros(B, HV, T)),
        ValueError,
        "beta must have shape [B=2, T=5, HV=4], got shape [2, 4, 5]",
    ),
    # Dtypes.
    *(
        (
            padded(**{name: torch.zeros_like(padded()[name], dtype=dtype)}),
            ValueError,
            f"{name} must be float16, bfloat16, float32 or float64, got {dtype}",
        )
        for name in ("q", "k", "v", "g", "beta")
        for dtype in (torch.int64, torch.complex64, torch.float8_e4m3fn)
    ),
    (
        padded(initial_state=zeros(B, HV, K, V, dtype=torch.int32)),
        ValueError,
        "initial_state must be float16, bfloat16, float32 or float64, got torch.int32",
    ),
    (
        padded(A_log=zeros(HV, dtype=torch.int32), **GATE),
        ValueError,
        "A_log must be float16, bfloat16, float32 or float64, got torch.int32",
    ),
    (
        padded(A_log=zeros(HV), dt_bias=zeros(HV, dtype=torch.bool), **GATE),
        ValueError,
        "dt_bias must be float16, bfloat16, float32 or float64, got torch.bool",
    ),
    (
        packed(cu_seqlens=torch.tensor([0.0, 5.0])),
        ValueError,
        "cu_seqlens must be int32 or int64, got torch.float32",
    ),
    (
        packed(cu_seqlens_cpu=offsets(0, 2, 5, dtype=torch.int16)),
        ValueError,
        "cu_seqlens_cpu must be int32 or int64, got torch.int16",
    ),
    (
        packed(chunk_indices=zeros(2, 2)),
        ValueError,
        "chunk_indices must be int32 or int64, got torch.float32",
    ),
    # chunk_size.
    *(
        (padded(chunk_size=size), ValueError, f"chunk_size must be one of (16, 32, 64), got {size}")
        for size in (0, -64, 48, 128)
    ),
    # cu_seqlens.
    (
        packed(cu_seqlens=offsets(0, 5)[None]),
        ValueError,
        "cu_seqlens must have shape [N + 1], N >= 0, got shape [1, 2]",
    ),
    (
        packed(cu_seqlens=offsets()),
        ValueError,
        "cu_seqlens must have shape [N + 1], N >= 0, got shape [0]",
    ),
    (
        padded(cu_seqlens=offsets(0, 5)),
        ValueError,
        "q must have batch size B=1 with cu_seqlens, got B=2",
    ),
    (packed(cu_seqlens=offsets(1, 5)), ValueError, "cu_seqlens must start at 0, got 1"),
    (
        packed(cu_seqlens=offsets(0, 3, 2, 5)),
        ValueError,
        "cu_seqlens must not decrease, got 3 then 2 at index 2",
    ),
    (
        packed(cu_seqlens=offsets(0, 2, 6)),
        ValueError,
        "cu_seqlens must end at or before T=5, got 6",
    ),
    # cu_seqlens_cpu.
    (
        padded(cu_seqlens_cpu=offsets(0, 5)),
        ValueError,
        "cu_seqlens_cpu must come with cu_seqlens, got cu_seqlens=None",
    ),
    (
        packed(cu_seqlens_cpu=offsets(0, 5)),
        ValueError,
        "cu_seqlens_cpu must have the shape of cu_seqlens, [3], got shape [2]",
    ),
    (
        packed(cu_seqlens_cpu=offsets(0, 3, 5)),
        ValueError,
        "cu_seqlens_cpu must equal cu_seqlens, which has 2 at index 1, got 3",
    ),
    # The contents of the host copy are the only ones seen when cu_seqlens is on another device.
    *(
        (packed(device="meta", cu_seqlens_cpu=values), ValueError, f"cu_seqlens_cpu must {words}")
        for values, words in (
            (offsets(1, 2, 5), "start at 0, got 1"),
            (offsets(0, 4, 3), "not decrease, got 4 then 3 at index 2"),
            (offsets(0, 4, 9), "end at or before T=5, got 9"),
        )
    ),
    # chunk_indices.
    (
        padded(chunk_indices=zeros(2, 2, dtype=torch.int64)),
        ValueError,
        "chunk_indices must come with cu_seqlens, got cu_seqlens=None",
    ),
    (
        packed(chunk_indices=zeros(2, 3, dtype=torch.int64)),
        ValueError,
        "chunk_indices must have shape [NT, 2], got shape [2, 3]",
    ),
    (
        packed(chunk_indices=zeros(4, dtype=torch.int64)),
        ValueError,
        "chunk_indices must have shape [NT, 2], got shape [4]",
    ),
    (
        packed(chunk_indices=zeros(1, 2, dtype=torch.int64)),
        ValueError,
        f"chunk_indices must have between 2 and 2 {ROWS} [1, 2]",
    ),
    (
        packed(chunk_indices=zeros(3, 2, dtype=torch.int64)),
        ValueError,
        f"chunk_indices must have between 2 and 2 {ROWS} [3, 2]",
    ),
    (
        packed(device="meta", chunk_indices=zeros(3, 2, dtype=torch.int64, **META)),
        ValueError,
        f"chunk_indices must have between 0 and 2 {ROWS} [3, 2]",
    ),
    # initial_state.
    (
        padded(initial_state=zeros(1, HV, K, V)),
        ValueError,
        state_message("[N=2, HV=4, K=8, V=16]", False, "[1, 4, 8, 16]"),
    ),
    (
        padded(initial_state=zeros(B, HV, K, V), state_v_first=True),
        ValueError,
        state_message("[N=2, HV=4, V=16, K=8]", True, "[2, 4, 8, 16]"),
    ),
    (
        packed(initial_state=zeros(3, HV, K, V)),
        ValueError,
        state_message("[N=2, HV=4, K=8, V=16]", False, "[3, 4, 8, 16]"),
    ),
    # Gate and beta.
    (padded(**GATE), ValueError, "A_log must be given with use_gate_in_kernel=True, got None"),
    (
        padded(A_log=zeros(H), **GATE),
        ValueError,
        "A_log must have shape [HV=4], got shape [2]",
    ),
    (
        padded(A_log=zeros(HV), dt_bias=zeros(1, HV), **GATE),
        ValueError,
        "dt_bias must have shape [HV=4], got shape [1, 4]",
    ),
    (
        padded(A_log=zeros(HV)),
        ValueError,
        "A_log must be None without use_gate_in_kernel=True, got a tensor",
    ),
    (
        padded(dt_bias=zeros(HV)),
        ValueError,
        "dt_bias must be None without use_gate_in_kernel=True, got a tensor",
    ),
    (
        padded(allow_neg_eigval=True),
        ValueError,
        "allow_neg_eigval must come with use_beta_sigmoid_in_kernel=True, got False",
    ),
]


@pytest.mark.parametrize("arguments, error, message", BAD, ids=[row[2][:60] for row in BAD])
def test_bad_input(arguments, error, message):
    with pytest.raises(error) as caught:
        validate(arguments)
    assert type(caught.value) is error
    assert str(caught.value) == message


@pytest.mark.parametrize("error, message", [row[1:] for row in BAD], ids=[r[2][:60] for r in BAD])
def test_bad_input_never_reaches_a_backend(monkeypatch, error, message):
    monkeypatch.setattr(CHUNK, "backends", ())
    arguments = next(row[0] for row in BAD if row[2] == message)
    for call in (gdn_triton.chunk_gated_delta_rule, gdn_triton.explain):
        with pytest.raises(error, match="must"):
            call(**arguments)


def test_order_of_checks():
    """Repairing the first fault reveals the next one, in the documented order."""
    arguments = {
        **padded(q=zeros(B, T, 3, 9, 1, dtype=torch.int32), k=zeros(B, T, 5, K, **META), v=None),
        "chunk_size": 5,
        "cu_seqlens": offsets(0, 9),
        "initial_state": zeros(7, HV, K, V),
        "A_log": zeros(1),
        "allow_neg_eigval": True,
    }
    repairs = [
        ("v must be a torch.Tensor", {"v": zeros(B, T, HV, V)}),
        ("k must be on the device", {"k": zeros(B, T, 5, 9)}),
        ("q must have 4 dimensions", {"q": zeros(B, T, H, K, dtype=torch.int32)}),
        ("k must have the heads of q", {"k": zeros(B, T, H, 9)}),
        ("k must have the shape of q", {"k": zeros(B, T, H, K)}),
        ("q must be float16", {"q": zeros(B, T, H, K)}),
        ("chunk_size must be one of", {"chunk_size": 16}),
        ("q must have batch size", {"cu_seqlens": None}),
        ("initial_state must have shape", {"initial_state": None}),
        ("A_log must be None", {"use_gate_in_kernel": True}),
        ("A_log must have shape", {"A_log": zeros(HV)}),
        ("allow_neg_eigval must come", {"allow_neg_eigval": False}),
    ]
    for words, repair in repairs:
        with pytest.raises((TypeError, ValueError), match=words):
            validate(arguments)
        arguments.update(repair)
    assert validate(arguments).chunk_size == 16
