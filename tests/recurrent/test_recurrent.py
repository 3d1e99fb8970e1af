"""The recurrence: the kernel against the specification, alone, in pools of states, and as the other
half of the chunked op.

The budget is that of helpers.py. The independent narrow computation is the specification's own line
in float32, whose products are in another order than the kernel's.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from helpers import BF16, DTYPES, FP16, FP32, assert_within_budget, same_bits
from recurrent_cases import (
    SEQUENCES,
    STEPS,
    Sizes,
    assert_matches,
    assert_step_matches,
    exact,
    normal,
    sequence_call,
    step_call,
)
from torch import Tensor

import gdn_triton
from gdn_triton import fused_recurrent_gated_delta_rule, recurrent_step, reference
from gdn_triton.reference.recurrent import recurrent

pytest.importorskip("triton", reason="Triton is not installed")

_BF16_MARK = pytest.mark.gpu("bf16 is not used in Triton's interpreter")
POOLS = [
    pytest.param(FP32, id="pool-fp32"),
    pytest.param(FP16, id="pool-fp16"),
    pytest.param(BF16, id="pool-bf16", marks=_BF16_MARK),
]


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel, wherever a test does not choose."""
    monkeypatch.setenv("GDN_BACKEND", "triton")


# -------------------------------------------------------------------------------------- all pairs


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows that have every two values of two factors together, found greedily."""
    names = list(factors)
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(range(len(factors[a])), range(len(factors[b])))
    }
    rows: list[dict[str, Any]] = []
    while missing:
        a, x, b, y = min(missing)
        row = {a: x, b: y}
        for name in names:
            if name not in row:
                row[name] = max(
                    range(len(factors[name])),
                    key=lambda value: sum(
                        pair in missing
                        for other, chosen in row.items()
                        for pair in ((other, chosen, name, value), (name, value, other, chosen))
                    ),
                )
        missing -= {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}
        rows.append({name: factors[name][row[name]] for name in names})
    return rows


def identified(rows: Sequence[dict[str, Any]]) -> list[Any]:
    """pytest parameters; those with bf16 need a GPU."""
    parameters = []
    for n, row in enumerate(rows):
        marks = [_BF16_MARK] if BF16 in row.values() else []
        parameters.append(pytest.param(row, id=str(n), marks=marks))
    return parameters


def copies(x: Mapping[str, Any]) -> dict[str, Any]:
    return {name: y.clone() if isinstance(y, Tensor) else y for name, y in x.items()}


@pytest.mark.parametrize("row", identified(all_pairs(SEQUENCES)))
def test_sequences_match_the_specification(row: dict[str, Any], device: str) -> None:
    x, options = sequence_call(row, device)
    before = copies(x)
    o, final_state = fused_recurrent_gated_delta_rule(**x, **options)
    assert (final_state is not None) == row["final"]
    assert_matches(x, options, o, final_state)
    if row["packed"]:
        assert not o[:, int(x["cu_seqlens"][-1]) :].any(), "rows of no sequence are 0"
    for name, y in before.items():
        if isinstance(y, Tensor):
            assert torch.equal(y, x[name]), f"{name} was written"


REAL = [
    Sizes(B=3, T=5, H=16, HV=32, K=128, V=128),
    Sizes(B=2, T=3, H=4, HV=4, K=256, V=512),
    Sizes(B=2, T=70, H=2, HV=4, K=64, V=64),
    Sizes(B=2, T=3, H=2, HV=4, K=100, V=300),
]


@pytest.mark.gpu("real sizes, which would take minutes in the interpreter")
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sizes", REAL, ids=lambda s: f"{s.K}-{s.V}-{s.T}")
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_sizes(
    dtype: torch.dtype, sizes: Sizes, packed: bool, v_first: bool, device: str
) -> None:
    row = {name: values[0] for name, values in SEQUENCES.items()}
    row |= {"dtype": dtype, "sizes": sizes, "packed": packed, "v_first": v_first, "l2norm": True}
    row |= {"g": "gate and bias", "beta": "sigmoid", "state": FP32}
    x, options = sequence_call(row, device)
    assert_matches(x, options, *fused_recurrent_gated_delta_rule(**x, **options))


def test_specification_is_the_recurrence_of_the_chunked_op() -> None:
    """Where both have a meaning they are one formula, written twice."""
    row = {name: values[0] for name, values in SEQUENCES.items()}
    row |= {"packed": True, "g": "decay", "beta": "head", "state": FP32}
    x, _ = sequence_call(row, "cpu")
    x = {name: exact(y) for name, y in x.items()}
    o, final_state = reference.recurrent_gated_delta_rule(**x)
    result = recurrent(**x)
    torch.testing.assert_close(result.o, o)
    torch.testing.assert_close(result.final_state, final_state)


@pytest.mark.parametrize("backend_name", ["triton", "reference"])
def test_empty_calls(backend_name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tokens: the state passes through. No sequences: nothing but rows of none."""
    monkeypatch.setenv("GDN_BACKEND", backend_name)
    q, v = torch.zeros(2, 0, 1, 4, device=device), torch.zeros(2, 0, 2, 3, device=device)
    state = normal(2, 2, 4, 3, device=device)
    options = {"initial_state": state, "output_final_state": True}
    o, final_state = fused_recurrent_gated_delta_rule(q, q, v, **options)
    assert o.shape == v.shape
    assert final_state is not None and torch.equal(final_state, state)
    q, v = normal(1, 3, 1, 4, device=device), normal(1, 3, 2, 3, device=device)
    offsets = torch.zeros(1, dtype=torch.int64, device=device)
    o, final_state = fused_recurrent_gated_delta_rule(
        q, q, v, output_final_state=True, cu_seqlens=offsets
    )
    assert final_state is not None and final_state.shape == (0, 2, 4, 3)
    assert torch.equal(o, torch.zeros_like(v))


def test_gates_of_minus_infinity_forget(device: str) -> None:
    row = {name: values[0] for name, values in SEQUENCES.items()}
    x, options = sequence_call({**row, "g": "decay", "beta": "head", "state": FP32}, device)
    x["g"][:, 1] = -torch.inf
    o, final_state = fused_recurrent_gated_delta_rule(**x, **options)
    assert_matches(x, options, o, final_state)


def test_a_nan_stays_in_its_sequence(device: str) -> None:
    row = {name: values[0] for name, values in SEQUENCES.items()}
    row |= {"packed": True, "g": "decay", "beta": "head", "state": FP32}
    x, options = sequence_call(row, device)
    clean, clean_state = fused_recurrent_gated_delta_rule(**x, **options)
    T = row["sizes"].T
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, :T] = torch.nan  # the first sequence
        x[name][:, 2 * T + 1 :] = torch.nan  # rows of none
    x["initial_state"][0] = torch.nan
    o, final_state = fused_recurrent_gated_delta_rule(**x, **options)
    assert o[:, :T].isnan().all()
    assert same_bits(o[:, T:], clean[:, T:])
    assert clean_state is not None and final_state is not None
    assert final_state[0].isnan().all()
    assert same_bits(final_state[1:], clean_state[1:])


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_has_its_bits_in_any_batch(
    dtype: torch.dtype, v_first: bool, device: str
) -> None:
    """Alone, among others, padded and packed."""
    row = {name: values[0] for name, values in SEQUENCES.items()}
    row |= {"dtype": dtype, "sizes": Sizes(B=3, T=2, H=1, HV=2)}
    row |= {"g": "gate", "beta": "sigmoid", "state": FP32}
    x, options = sequence_call({**row, "v_first": v_first, "l2norm": True}, device)
    together, states = fused_recurrent_gated_delta_rule(**x, **options)
    assert states is not None
    heads = ("A_log", "dt_bias")
    for n in (0, 2):
        one = {k: y if y is None or k in heads else y[n : n + 1] for k, y in x.items()}
        alone, state = fused_recurrent_gated_delta_rule(**one, **options)
        assert same_bits(alone, together[n : n + 1])
        assert state is not None and same_bits(state, states[n : n + 1])
    tokens = ("q", "k", "v", "g", "beta")
    B, T = x["q"].shape[:2]
    flat = {k: y.flatten(0, 1)[None] if k in tokens else y for k, y in x.items()}
    flat["cu_seqlens"] = torch.arange(0, B * T + 1, T, device=device)
    packed, packed_states = fused_recurrent_gated_delta_rule(**flat, **options)
    assert same_bits(packed.view_as(together), together)
    assert packed_states is not None and same_bits(packed_states, states)


@pytest.mark.parametrize("row", identified(all_pairs(STEPS)))
@pytest.mark.parametrize("backend_name", ["triton", "reference"])
def test_steps_match_the_specification(
    row: dict[str, Any], backend_name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_BACKEND", backend_name)
    call = step_call(row, device)
    x = call.arguments
    before = x["state"].clone()
    copied = copies({name: y for name, y in x.items() if name not in ("state", "out")})
    o = recurrent_step(**x)
    assert_step_matches(call, before, o)
    if row["out"]:
        assert o is x["out"]
    for name, y in copied.items():
        if isinstance(y, Tensor):
            assert torch.equal(y, x[name]), f"{name} was written"
    # Skipped rows are 0, and so are those of no sequence.
    b, start, end = call.spans[1]
    rows = o if o.dim() == 4 else o[None] if x["cu_seqlens"] is not None else o[:, None]
    assert not rows[b, start:end].any()
    if x["cu_seqlens"] is not None:
        assert not rows[0, call.spans[-1][2] :].any()
    if row["strided"]:
        between = x["state"]._base
        assert between is not None and between[:, -7:].isnan().all()


@pytest.mark.gpu("real sizes, which would take minutes in the interpreter")
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("tokens", ["one", "several"])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(
    "sizes",
    [Sizes(B=70, T=4, H=16, HV=32, K=128, V=128), Sizes(B=3, T=3, H=2, HV=2, K=256, V=512)],
    ids=["128", "256"],
)
def test_real_steps(
    sizes: Sizes, pool: torch.dtype, tokens: str, v_first: bool, device: str
) -> None:
    row = {name: values[0] for name, values in STEPS.items()}
    row |= {"dtype": BF16, "pool": pool, "sizes": sizes, "tokens": tokens, "v_first": v_first}
    row |= {"mixed": True, "raw": True, "l2norm": True, "bias": True}
    call = step_call(row, device)
    before = call.arguments["state"].clone()
    assert_step_matches(call, before, recurrent_step(**call.arguments))


def one_token(x: Mapping[str, Any], t: int) -> dict[str, Any]:
    """The step call of token t alone."""
    tokens = ("q", "k", "v", "mixed_qkv", "g", "beta", "a", "b")
    one = {name: y[:, t] if name in tokens and y is not None else y for name, y in x.items()}
    return {**one, "out": None, "write_slots": None}


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(Sizes(B=2, T=3, H=1, HV=2), id="small"),
        pytest.param(Sizes(B=2, T=3, H=1, HV=1, K=20, V=70), id="tiles"),
        pytest.param(
            Sizes(B=5, T=4, H=16, HV=32, K=128, V=128),
            id="real",
            marks=pytest.mark.gpu("a real size, which would take minutes in the interpreter"),
        ),
    ],
)
def test_verifying_is_decoding(
    sizes: Sizes, dtype: torch.dtype, pool: torch.dtype, v_first: bool, device: str
) -> None:
    """Bit for bit: after k of T tokens are accepted, the state kept for token k - 1 and the o up to
    it are those of k calls of one token. Padded and packed; and a call of T tokens that keeps the
    last state only."""
    row = {name: values[0] for name, values in STEPS.items()}
    row |= {"dtype": dtype, "pool": pool, "sizes": sizes, "tokens": "several", "write": "token"}
    row |= {"mixed": True, "raw": True, "l2norm": True, "v_first": v_first}
    call = step_call(row, device)
    x = call.arguments
    N, T = sizes.B, sizes.T
    x["read_slots"] = torch.arange(N, device=device)
    x["write_slots"] = N + torch.arange(N * T, device=device).view(N, T)
    decoded = x["state"].clone()
    last_only = x["state"].clone()
    o = recurrent_step(**x)
    for t in range(T):
        o_t = recurrent_step(**{**one_token(x, t), "state": decoded})
        assert same_bits(o[:, t], o_t)
        assert same_bits(x["state"][x["write_slots"][:, t]], decoded[:N])

    o_last = recurrent_step(**{**x, "state": last_only, "write_slots": None})
    assert same_bits(o_last, o)
    assert same_bits(last_only[:N], decoded[:N])

    flat = {k: x[k].flatten(0, 1) for k in ("mixed_qkv", "a", "b")}
    flat["cu_seqlens"] = torch.arange(0, N * T + 1, T, device=device)
    flat["write_slots"] = x["write_slots"].view(1, -1)
    packed = last_only.clone()
    packed[:N] = x["state"][:N]
    o_packed = recurrent_step(**{**x, **flat, "state": packed})
    assert same_bits(o_packed.view_as(o), o)
    assert same_bits(packed[N : N + N * T], x["state"][N : N + N * T])


def test_slots_and_neighbours_change_no_bits(device: str) -> None:
    """A sequence's o and state are the same wherever its state lies and whoever is beside it."""
    row = {name: values[0] for name, values in STEPS.items()}
    call = step_call({**row, "mixed": True, "raw": True, "sizes": Sizes(B=5)}, device)
    x = call.arguments
    x["read_slots"] = torch.tensor([6, 2, 0, 3, 1], device=device)
    before = x["state"].clone()
    o = recurrent_step(**x)
    for n, slot in enumerate(x["read_slots"].tolist()):
        tokens = ("mixed_qkv", "a", "b")
        alone = {name: y[n : n + 1] if name in tokens else y for name, y in x.items()}
        alone["state"] = before[slot : slot + 1].clone()
        alone["read_slots"] = torch.zeros(1, dtype=torch.int32, device=device)
        assert same_bits(recurrent_step(**alone), o[n : n + 1])
        assert same_bits(alone["state"][0], x["state"][slot])


def test_unread_memory_may_hold_anything(device: str) -> None:
    """NaN in slots that no sequence reads, and in the tokens of skipped ones, reaches nobody."""
    row = {name: values[0] for name, values in STEPS.items()}
    call = step_call({**row, "mixed": True, "raw": True, "tokens": "several"}, device)
    x = call.arguments
    clean = recurrent_step(**{**x, "state": x["state"].clone()})
    read = [slot for slot in x["read_slots"].tolist() if slot >= 0]
    unread = [slot for slot in range(len(x["state"])) if slot not in read]
    x["state"][unread] = torch.nan
    for name in ("mixed_qkv", "a", "b"):
        x[name][1] = torch.nan
    assert same_bits(recurrent_step(**x), clean)
    assert x["state"][unread].isnan().all()
    assert x["state"][read].isfinite().all()


def test_everything_skipped(device: str) -> None:
    row = {name: values[0] for name, values in STEPS.items()}
    x = step_call(row, device).arguments
    x["read_slots"] = torch.full_like(x["read_slots"], -1)
    before = x["state"].clone()
    assert not recurrent_step(**x).any()
    assert same_bits(x["state"], before)


# ------------------------------------------------------------------------- beside the chunked op


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_then_decode_is_prefill(dtype: torch.dtype, pool: torch.dtype, device: str) -> None:
    """n tokens by the chunked op and m by steps, against all n + m in float64. The narrow
    computation takes the same way: the chunked form, the state rounded to the pool's dtype."""
    n, m, N = 20, 3, 2
    row = {name: values[0] for name, values in SEQUENCES.items()}
    row |= {"dtype": dtype, "sizes": Sizes(B=N, T=n + m, H=1, HV=2), "g": "decay", "beta": "head"}
    x, _ = sequence_call(row, device)
    whole = recurrent(**{name: exact(y) for name, y in x.items()})
    prompt = {name: y[:, :n] for name, y in x.items()}
    o, final_state = gdn_triton.chunk_gated_delta_rule(
        **prompt, output_final_state=True, chunk_size=16
    )
    assert final_state is not None
    narrow = reference.chunk_gated_delta_rule(
        *(prompt[name].to(dtype).float() for name in ("q", "k", "v", "g", "beta")), chunk_size=16
    )
    narrow_state = narrow.final_state.to(dtype).to(pool)
    slots = torch.tensor([3, 1], device=device)
    state = torch.zeros(5, *final_state.shape[1:], dtype=pool, device=device)
    state[slots] = final_state.to(pool)
    unit = max(torch.finfo(pool).eps, torch.finfo(dtype).eps) / 2
    for t in range(n, n + m):
        token = {name: y[:, t] for name, y in x.items()}
        o = recurrent_step(state, slots, **token)
        step = {name: y[:, t : t + 1] for name, y in x.items()}
        narrow_step = recurrent(**step, initial_state=narrow_state, kept=pool)
        narrow_state = narrow_step.final_state.to(pool)
        assert_within_budget(
            f"o of token {t}",
            o,
            whole.o[:, t],
            narrow_step.o[:, 0].to(dtype),
            dtype=dtype,
            unit=2 * unit,
        )
    assert_within_budget(
        "state", state[slots], whole.final_state, narrow_state, dtype=pool, unit=2 * unit
    )
