"""Bad input: every message names the argument, what was expected and what came."""

import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch

import gdn_triton
from gdn_triton._host.records import made
from gdn_triton.chunk.backends import CHUNK
from gdn_triton.chunk.problem import ChunkCall
from gdn_triton.chunk.validation import MOST_REMEMBERED, likeness, remembered, validate_chunk

B, T, H, HV, K, V = 2, 5, 2, 4, 8, 16


@pytest.fixture(autouse=True)
def reference(monkeypatch):
    """The shell does not decide which backend runs the good calls."""
    monkeypatch.setenv("GDN_BACKEND", "reference")


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
    # Of more digits than Python prints.
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


# ------------------------------------------------------------------------- calls that are alike


def judged_anew(arguments):
    """What validation says of a call by itself: a Problem, or the type and words of the error."""
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
def test_no_call_is_taken_for_another(base):
    """Every call after every other: the same judgement as of the call by itself."""
    calls = [padded(**base), *(padded(**{**base, **change}) for change in CHANGES)]
    expected = [str(judged_anew(call)) for call in calls]
    for _ in range(2):
        assert [str(judged(call)) for call in calls] == expected
    with torch.no_grad():
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


def test_a_bad_call_is_judged_each_time():
    asked = []

    @remembered
    def judge(x, *, flag):
        asked.append(flag)
        if not flag:
            raise ValueError("flag")
        return object()

    x = zeros(2)
    first = judge(x, flag=True)
    assert judge(zeros(2), flag=True) is first and asked == [True]
    for _ in range(2):
        with pytest.raises(ValueError, match="flag"):
            judge(x, flag=False)
    assert asked == [True, False, False]


def test_what_is_remembered_does_not_grow_without_end():
    asked = []
    judge = remembered(lambda n: asked.append(n) or n + 1)
    for n in range(MOST_REMEMBERED + 1):
        assert judge(n) == judge(n) == n + 1
    assert len(asked) == MOST_REMEMBERED + 1
    assert judge(0) == 1 and len(asked) == MOST_REMEMBERED + 2, "it forgot nothing"


def test_likeness():
    """Equal forms for what is alike, and none for what has more to it."""
    assert likeness(("a",), (zeros(2, 3),)) == likeness(("a",), (zeros(3, 2).T,))
    assert likeness(("a",), (1.5, None)) == likeness(("a",), (1.5, None))
    assert likeness(("a", "b"), (1, 2)) != likeness(("b", "a"), (1, 2))
    assert likeness(("a",), ("x",)) != likeness(("a",), ("y",))
    subclass = zeros(1).as_subclass(type("Subclass", (torch.Tensor,), {}))
    for x in (offsets(0, 5), b"text", [], np.float32(1), object(), subclass):
        assert likeness(("a",), (x,)) is None, x
    with torch._subclasses.FakeTensorMode():
        assert likeness(("a",), (torch.empty(3),)) is None


CALLS = [gdn_triton.chunk_gated_delta_rule, gdn_triton.explain]


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
