"""The public operation on the Triton backend, end to end, against the float64 recurrence.

Without a GPU the kernels run in Triton's interpreter, in fp32 and fp16 (helpers.DTYPES says why).
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from chunk_cases import PACKED, PADDED, call, call_with_state, check
from helpers import (
    BF16,
    FP16,
    FP32,
    FP64,
    REAL,
    RUNS,
    SMALL,
    Case,
    cases,
    make_inputs,
    pieces,
    same_bits,
)


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "triton")


# Fewer programs than PACKED, for questions of bits.
BITS = Case("bits", "", lengths=(0, 18, 1, 17, 16, 0), orphans=5)


# ------------------------------------------------------------------------------------------ regimes


@pytest.mark.parametrize(("dataflow", "dtype"), RUNS, indirect=["dataflow"])
@pytest.mark.parametrize("case", cases(SMALL + REAL))
def test_regimes(case: Case, dtype: torch.dtype, dataflow: str, device: str) -> None:
    check(case, make_inputs(case, dtype, device), device)


# Every option alone, and those together that a layer sets together; on raw inputs.
OPTIONS: dict[str, dict[str, Any]] = {
    "l2norm": {"l2norm": True},
    "sigmoid": {"sigmoid": True},
    "sigmoid-twice": {"sigmoid": True, "negative": True},
    "gate": {"gate": True},
    "gate-bias": {"gate": True, "bias": True},
    "no-state": {"with_state": False},
    "v-first": {"state_v_first": True},
    "v-first-no-state": {"state_v_first": True, "with_state": False},
    "layer": {"l2norm": True, "sigmoid": True, "gate": True, "bias": True},
    "all": {
        "l2norm": True,
        "sigmoid": True,
        "negative": True,
        "gate": True,
        "bias": True,
        "state_v_first": True,
        "scale": 0.3,
    },
}


@pytest.mark.parametrize(("dataflow", "dtype"), RUNS, indirect=["dataflow"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    "case",
    cases(
        [
            replace(PADDED, why="padded, ragged", H=1, HV=2, K=16, V=24),
            replace(PACKED, why="packed, with empty sequences and rows of none"),
            *(case for case in REAL if case.name in ("real", "real-packed", "real-widest")),
        ]
    ),
)
def test_options(case: Case, name: str, dtype: torch.dtype, dataflow: str, device: str) -> None:
    options = dict(OPTIONS[name])
    x = make_inputs(case, dtype, device, raw=True)
    if not options.get("l2norm"):
        x = x.but(k=make_inputs(case, dtype, device).k)
    if not options.get("sigmoid"):
        x = x.but(beta=x.beta.sigmoid())
    if options.pop("gate", False):
        options["A_log"] = torch.randn(case.HV).to(device)
        if options.pop("bias", False):
            options["dt_bias"] = torch.randn(case.HV).to(device)
    else:
        x = x.but(g=-x.g.abs())
    check(case, x, device, **options)


@pytest.mark.parametrize("scale", [0.0, -0.5, 1.0, 2.5])
def test_scale(scale: float, dataflow: str, device: str) -> None:
    """0 and negative numbers are used as given."""
    o, _ = check(PADDED, make_inputs(PADDED, FP16, device), device, scale=scale)
    assert bool((o == 0).all()) == (scale == 0)


def test_default_scale(device: str) -> None:
    x = make_inputs(PADDED, FP32, device)
    assert same_bits(call(x, PADDED)[0], call(x, PADDED, scale=PADDED.K**-0.5)[0])


# q, k, v: narrower and wider than each other; the products are in the widest.
MIXES: list[Any] = [
    (FP16, FP32, FP32),
    (FP32, FP16, FP16),
    (FP16, FP16, FP32),
    (FP32, FP32, FP16),
]
MIXES += [
    pytest.param(mix, marks=pytest.mark.gpu("kernels see bf16 on a GPU only"))
    for mix in [(BF16, FP32, BF16), (FP32, BF16, BF16), (BF16, BF16, FP16), (FP16, BF16, FP32)]
]


@pytest.mark.parametrize("l2norm", [False, True], ids=["plain", "l2norm"])
@pytest.mark.parametrize("dtypes", MIXES)
def test_mixed_dtypes(dtypes: tuple[torch.dtype, ...], l2norm: bool, device: str) -> None:
    x = make_inputs(PADDED, FP32, device)
    q, k, v = (y.to(dtype) for y, dtype in zip(x.tensors[:3], dtypes, strict=True))
    check(PADDED, x.but(q=q, k=k, v=v), device, l2norm=l2norm)


@pytest.mark.parametrize("dtype", [FP16, FP64])
def test_side_inputs_of_any_dtype(dtype: torch.dtype, dataflow: str, device: str) -> None:
    """g, beta, initial_state and the gate's parameters in another dtype than q, k, v."""
    x = make_inputs(PADDED, FP32, device, raw=True)
    x = x.but(
        k=make_inputs(PADDED, FP32, device).k,
        g=x.g.to(dtype),
        beta=x.beta.sigmoid().to(dtype),
        initial_state=x.initial_state.to(dtype),
    )
    A_log, dt_bias = (torch.randn(PADDED.HV).to(device, dtype) for _ in range(2))
    check(PADDED, x, device, A_log=A_log, dt_bias=dt_bias)


# ------------------------------------------------------------------------------ gates, betas, keys


@pytest.mark.parametrize("g", [0.0, -1e-4, -20.0, -1e30, -math.inf])
@pytest.mark.parametrize(("dataflow", "dtype"), RUNS, indirect=["dataflow"])
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_one_gate_everywhere(
    chunk_size: int, dtype: torch.dtype, g: float, dataflow: str, device: str
) -> None:
    """From a state that never forgets to one that keeps nothing, in full and ragged chunks."""
    case = Case("gate", "", T=2 * chunk_size + 40, chunk_size=chunk_size)
    x = make_inputs(case, dtype, device)
    check(case, x.but(g=torch.full_like(x.g, g)), device)


@pytest.mark.parametrize(("dataflow", "dtype"), RUNS, indirect=["dataflow"])
def test_some_gates_forget_all(dtype: torch.dtype, dataflow: str, device: str) -> None:
    """-inf among mild gates: at a chunk's start, end, twice in a row, and in the ragged end."""
    case = Case("holes", "", T=120, chunk_size=64)
    x = make_inputs(case, dtype, device)
    gates = x.g.clone()
    gates[:, [0, 5, 6, 63, 64, 100]] = -torch.inf
    o, _ = check(case, x.but(g=gates), device)
    # The tokens before are forgotten: token 64 and later ones are as in a call that begins there.
    late = Case("late", "", T=56, chunk_size=64)
    rest = x.but(**{n: getattr(x, n)[:, 64:] for n in ("q", "k", "v", "beta")}, g=gates[:, 64:])
    alone, _ = call_with_state(rest, late, initial_state=None)
    assert same_bits(o[:, 64:], alone)


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize(("dataflow", "dtype"), RUNS, indirect=["dataflow"])
def test_one_key_and_one_beta(dtype: torch.dtype, beta: float, dataflow: str, device: str) -> None:
    """No decay, one key for all tokens: beta 0 writes nothing, 1 replaces, 2 reflects."""
    case = Case("same-key", "", T=100, chunk_size=32)
    x = make_inputs(case, dtype, device)
    # One coordinate, so that |k| is 1 in every dtype and a reflection does not grow.
    k = torch.zeros_like(x.k)
    k[..., 3] = 1
    x = x.but(k=k, beta=torch.full_like(x.beta, beta), g=torch.zeros_like(x.g))
    _, state = check(case, x, device)
    if beta == 0 and dataflow != "segments":
        assert same_bits(state, x.initial_state.float())
    elif beta == 0:
        # The map of a segment is then the identity, and its product with a state keeps the 22 bits
        # of two tf32 parts.
        torch.testing.assert_close(state, x.initial_state.float(), rtol=2**-21, atol=0)


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize(("dataflow", "dtype"), RUNS, indirect=["dataflow"])
def test_random_keys_and_one_beta(
    dtype: torch.dtype, beta: float, dataflow: str, device: str
) -> None:
    x = make_inputs(PADDED, dtype, device)
    check(PADDED, x.but(beta=torch.full_like(x.beta, beta)), device)


@pytest.mark.parametrize(("dataflow", "dtype"), RUNS, indirect=["dataflow"])
def test_zero_keys(dtype: torch.dtype, dataflow: str, device: str) -> None:
    """Rows of zeros under the norm: no NaN, nothing written."""
    x = make_inputs(PADDED, dtype, device)
    k = x.k.clone()
    k[:, ::2] = 0
    check(PADDED, x.but(k=k), device, l2norm=True)


# --------------------------------------------------------------------------------- packed sequences


def test_offsets_of_either_dtype(dataflow: str, device: str) -> None:
    results = [
        call_with_state(make_inputs(BITS, FP16, device, index_dtype=dtype), BITS)
        for dtype in (torch.int32, torch.int64)
    ]
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_strided_offsets(dataflow: str, device: str) -> None:
    x = make_inputs(BITS, FP16, device)
    assert x.cu_seqlens is not None
    column = torch.stack([x.cu_seqlens, x.cu_seqlens - 1000], 1)[:, 0]
    expected = call_with_state(x, BITS)
    got = call_with_state(x.but(cu_seqlens=column), BITS)
    assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))


def test_offsets_changed_in_place(dataflow: str, device: str) -> None:
    """Nothing is remembered by the tensor's identity."""
    x = make_inputs(BITS, FP16, device)
    assert x.cu_seqlens is not None
    call_with_state(x, BITS)
    other = replace(BITS, lengths=(3, 0, 20, 16, 0, 10), orphans=8)
    x.cu_seqlens.copy_(torch.tensor(other.offsets()))
    expected = call_with_state(x.but(cu_seqlens=x.cu_seqlens.clone()), other)
    got = call_with_state(x, other)
    assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))
    assert other.tokens == BITS.tokens
    check(other, x, device)


def test_helper_tables_change_nothing(device: str) -> None:
    """cu_seqlens_cpu and chunk_indices, which other callers compute ahead."""
    x = make_inputs(BITS, FP32, device)
    assert BITS.lengths is not None
    indices = [[n, c] for n, length in enumerate(BITS.lengths) for c in range(-(-length // 16))]
    tables: dict[str, Any] = {
        "cu_seqlens_cpu": torch.tensor(BITS.offsets()),
        "chunk_indices": torch.tensor(indices, device=device),
    }
    expected, got = call_with_state(x, BITS), call_with_state(x, BITS, **tables)
    assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))


# Every way in: a value, a key, a query, the side inputs, and the state.
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_stays_in_its_sequence(name: str, bad: float, dataflow: str, device: str) -> None:
    """Neighbours that share its tiles and tables keep every bit."""
    x = make_inputs(BITS, FP16, device)
    clean_o, clean_state = call_with_state(x, BITS)
    poisoned = getattr(x, name).clone()
    sick = 3  # 17 tokens, of which 1 is alone in its chunk
    first, end = BITS.offsets()[sick : sick + 2]
    if name == "initial_state":
        poisoned[sick] = bad
    else:
        poisoned[:, first + 3] = bad
    o, state = call_with_state(x.but(**{name: poisoned}), BITS)
    for n, (got, expected) in enumerate(
        zip(pieces(o, BITS.offsets()), pieces(clean_o, BITS.offsets()), strict=True)
    ):
        if n != sick:
            assert same_bits(got, expected), f"o of sequence {n}"
            assert same_bits(state[n], clean_state[n]), f"state of sequence {n}"
    assert not o[:, first:end].isfinite().all()
    assert (o[:, BITS.offsets()[-1] :] == 0).all()


def test_nan_in_tokens_of_no_sequence(dataflow: str, device: str) -> None:
    """They are not read."""
    x = make_inputs(BITS, FP16, device)
    changes = {}
    for name in ("q", "k", "v", "g", "beta"):
        changes[name] = getattr(x, name).clone()
        changes[name][:, BITS.offsets()[-1] :] = torch.nan
    expected, got = call_with_state(x, BITS), call_with_state(x.but(**changes), BITS)
    assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))


# ------------------------------------------------------------------------------------ nothing to do


@pytest.mark.parametrize("v_first", [False, True], ids=["k-first", "v-first"])
@pytest.mark.parametrize("with_state", [False, True], ids=["from-0", "from-state"])
@pytest.mark.parametrize(
    "case",
    cases(
        [
            Case("no-tokens", "T = 0", T=0, B=2, K=8, V=12),
            Case("no-batch", "B = 0", T=5, B=0, K=8, V=12),
            Case("no-sequence", "N = 0 and T = 0", lengths=(), K=8, V=12),
            Case("only-orphans", "N = 0, rows of none", lengths=(), orphans=20, K=8, V=12),
            Case("only-empty", "N = 2 without a token", lengths=(0, 0), K=8, V=12),
            Case("empty-and-orphans", "N = 2, rows of none", lengths=(0, 0), orphans=9, K=8, V=12),
        ]
    ),
)
def test_no_tokens(case: Case, with_state: bool, v_first: bool, dataflow: str, device: str) -> None:
    """An empty or all-zero o; the states are the initial ones, or zeros, and a new tensor."""
    x = make_inputs(case, FP16, device)
    given = (x.initial_state.mT if v_first else x.initial_state) if with_state else None
    o, state = call_with_state(x, case, initial_state=given, state_v_first=v_first)
    assert o.shape == x.v.shape and (o == 0).all()
    expected = torch.zeros_like(x.initial_state.mT if v_first else x.initial_state)
    assert same_bits(state, expected if given is None else given)
    if given is not None and state.numel():
        assert state.data_ptr() != given.data_ptr()


def test_no_state_asked_for(dataflow: str, device: str) -> None:
    x = make_inputs(PADDED, FP16, device)
    o, state = call(x, PADDED, initial_state=x.initial_state)
    assert state is None
    assert same_bits(o, call_with_state(x, PADDED)[0])
