"""Prefill on a pool of states: every dataflow against the specification, beside decoding, and the
contract of slots, flags, outputs and checkpoints.

The budget is that of helpers.py. What a checkpoint should hold is computed from its prefix alone.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import (
    BF16,
    FP16,
    FP32,
    FP64,
    REAL,
    RUNS,
    Case,
    assert_within_budget,
    cases,
    make_inputs,
    same_bits,
)
from narrow import Arithmetic
from prefill_cases import (
    SENTINEL,
    ask_for,
    assert_checkpoints,
    assert_prefilled,
    assert_state,
    begun,
    checkpoint_of,
    expected,
    gpu,
    make_call,
    replace_tokens,
)

from gdn_triton import chunk_gated_delta_rule, chunk_prefill, recurrent_step

pytest.importorskip("triton", reason="Triton is not installed")

POOLS = [
    pytest.param(FP32, id="pool-fp32"),
    pytest.param(FP16, id="pool-fp16"),
    pytest.param(
        BF16, id="pool-bf16", marks=pytest.mark.gpu("bf16 is not used in Triton's interpreter")
    ),
]


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels, wherever a test does not choose."""
    monkeypatch.setenv("GDN_BACKEND", "triton")


LIBRARY = pytest.param("cuda", marks=gpu)


# Every dataflow once in the interpreter, and in bf16 on a GPU.
FLOWS = [RUNS[0], *RUNS[2:]]

# ------------------------------------------------------------------------------------------- a call

PADDED = Case("padded", "a checkpoint after the last token", T=32, B=4, HV=1)
PACKED = Case(
    "packed",
    "empty sequences everywhere; each side of a chunk; rows of none",
    lengths=(0, 33, 15, 0, 17, 48, 0),
    orphans=21,
    HV=1,
)
WIDE = Case("wide", "ragged tiles, value groups", lengths=(20, 37, 16), K=20, V=36)


# ------------------------------------------------------------------------ against the specification


@pytest.mark.parametrize("dataflow,dtype", FLOWS, indirect=["dataflow"])
@pytest.mark.parametrize(
    "case,pool,v_first,skip",
    [
        pytest.param(PADDED, FP32, False, "negative", id="padded"),
        pytest.param(PACKED, FP16, False, "non_positive", id="packed"),
        pytest.param(WIDE, FP32, True, "negative", id="wide"),
    ],
)
def test_matches_the_specification(
    case: Case,
    pool: torch.dtype,
    v_first: bool,
    skip: str,
    dataflow: str,
    dtype: torch.dtype,
    device: str,
) -> None:
    call = make_call(case, dtype, device, pool, v_first=v_first, skip=skip)
    before, initial = call.state.clone(), begun(call)
    copies = [y.clone() for y in call.x.around]
    o, checkpoints = call.run()
    assert checkpoints is None and o.is_contiguous()
    assert_prefilled(call, before, o, initial)
    for y, copy in zip(call.x.around, copies, strict=True):
        assert same_bits(y, copy), "an input was written"


@pytest.mark.parametrize("case", cases(REAL))
@pytest.mark.parametrize("pool", [FP32, BF16], ids=["pool-fp32", "pool-bf16"])
@pytest.mark.parametrize("v_first", [False, True])
def test_real_sizes(case: Case, pool: torch.dtype, v_first: bool, device: str) -> None:
    every = 4 * case.chunk_size
    call = make_call(case, BF16, device, pool, v_first=v_first)
    before, initial = call.state.clone(), begun(call)
    kept = list(checkpoint_of(call, every))
    o, checkpoints = call.run(checkpoint_every_n_tokens=every)
    assert_prefilled(call, before, o, initial)
    assert checkpoints is not None
    assert_checkpoints(call, checkpoints, every, kept)


@pytest.mark.parametrize("pool", [FP32, FP16, BF16, FP64], ids=str)
@pytest.mark.parametrize("case", [PADDED, PACKED], ids=lambda case: case.name)
@pytest.mark.parametrize("v_first", [False, True])
def test_reference(
    case: Case, pool: torch.dtype, v_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDN_BACKEND", "reference")
    call = make_call(case, FP32, "cpu", pool, v_first=v_first, skip="non_positive")
    before, initial = call.state.clone(), begun(call)
    kept = list(checkpoint_of(call, 16))
    o, checkpoints = call.run(checkpoint_every_n_tokens=16)
    assert_prefilled(call, before, o, initial)
    assert checkpoints is not None
    assert_checkpoints(call, checkpoints, 16, kept)


@pytest.mark.parametrize("dataflow,dtype", FLOWS, indirect=["dataflow"])
def test_options(dataflow: str, dtype: torch.dtype, device: str) -> None:
    """Norm, gate, sigmoid and scale reach the kernels: the bits are those of the chunked op from
    gathered states, which has tests of its own for what they mean."""
    case = Case("options", "raw inputs", lengths=(20, 0, 17), orphans=3)
    x = make_inputs(case, dtype, device, raw=True)
    q, k, v, g, beta = x.tensors
    A_log, dt_bias = torch.randn(2, case.HV).to(device)
    options = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "scale": 0.3,
        "cu_seqlens": x.cu_seqlens,
        "chunk_size": 16,
    }
    state = torch.randn(7, case.HV, case.K, case.V).to(device)
    slots = torch.tensor([4, 0, 2], device=device)
    expected_o, final_state = chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state=state[slots], output_final_state=True, **options
    )
    o, _ = chunk_prefill(state, slots, q=q, k=k, v=v, g=g, beta=beta, **options)
    assert final_state is not None
    assert same_bits(o, expected_o)
    assert same_bits(state[slots], final_state)


# ------------------------------------------------------------------------------- beside decoding


@pytest.mark.parametrize("dataflow,dtype", [RUNS[0], RUNS[3], RUNS[4]], indirect=["dataflow"])
@pytest.mark.parametrize("pool", POOLS)
def test_prefill_then_decode_is_prefill(
    pool: torch.dtype, dataflow: str, dtype: torch.dtype, device: str
) -> None:
    """A prefill computes the first 20 of 25 tokens, and five steps the others. Each step rounds the
    state to the pool's dtype. The narrow computation rounds it once less: the budget has that unit
    too."""
    case = Case("decode", "tokens on both sides of a chunk", T=25, B=2)
    call = make_call(case, dtype, device, pool)
    (exact_o, exact_final), (narrow_o, narrow_final) = expected(call, begun(call))
    q, k, v, g, beta = (y[:, :20] for y in call.x.tensors)
    read, write = torch.tensor(call.read).to(device), torch.tensor(call.write).to(device)
    started = torch.tensor([not fresh for fresh in call.fresh]).to(device)
    options = {"has_initial_state": started, "chunk_size": 16}
    o, _ = chunk_prefill(call.state, read, write, q=q, k=k, v=v, g=g, beta=beta, **options)
    rows = [o]
    for t in range(20, 25):
        q, k, v, g, beta = (y[:, t] for y in call.x.tensors)
        rows.append(recurrent_step(call.state, write, q=q, k=k, v=v, g=g, beta=beta)[:, None])
    unit = max(Arithmetic(dtype, device).unit, torch.finfo(pool).eps / 2)
    o, flat = torch.cat(rows, 1), (2, 25, case.HV, case.V)
    exact_o, narrow_o = exact_o.reshape(flat), narrow_o.reshape(flat)
    assert_within_budget("o", o, exact_o, narrow_o, dtype=dtype, unit=unit)
    got, narrow = call.state[write], narrow_final.to(pool)
    assert_within_budget("state", got, exact_final, narrow, dtype=pool, unit=unit)


# -------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("dataflow,dtype", FLOWS, indirect=["dataflow"])
@pytest.mark.parametrize(
    "case,every,kept_in,v_first",
    [
        pytest.param(PADDED, 16, "new", True, id="padded-new"),
        pytest.param(PACKED, 16, "rows", False, id="packed-rows"),
        pytest.param(PACKED, 32, "pool", False, id="packed-pool"),
    ],
)
def test_checkpoints(
    case: Case,
    every: int,
    kept_in: str,
    v_first: bool,
    dataflow: str,
    dtype: torch.dtype,
    device: str,
) -> None:
    """In a new tensor, in rows of a given one of another dtype, and in slots of the pool; the last
    checkpoint of each sequence has no column, and one slot is padding."""
    N, M = case.N, max(1, max(PADDED.T, *(case.lengths or (0,))) // every - 1)
    call = make_call(case, dtype, device, v_first=v_first, spare=N * M)
    kept = list(checkpoint_of(call, every))
    before, initial = call.state.clone(), begun(call)
    more: dict[str, Any] = {"checkpoint_every_n_tokens": every}
    table = torch.full((N, M), -1)
    if kept_in == "rows":
        rows = case.B * case.tokens // every
        more["state_checkpoints"] = torch.full(
            (rows + 2, *call.state.shape[1:]), SENTINEL, dtype=FP16, device=device
        )
    if kept_in == "pool":
        table = 2 * N + 2 + torch.arange(N * M).view(N, M).flip(0)
        table[4] = -1
        more["checkpoint_slots"] = table.to(device)
    o, checkpoints = call.run(**more)
    if kept_in == "pool":
        assert checkpoints is None
        checkpoints = call.state
        used = [int(table[n, j]) for n, j, _, _ in kept if j < M and table[n, j] >= 0]
        untouched = sorted({*range(2 * N + 2, len(call.state))} - {*used})
        assert used and untouched, "the test has no such slots"
        assert same_bits(call.state[untouched], before[untouched])
        # The checks below judge the other slots.
        call.state, before = call.state[: 2 * N + 2], before[: 2 * N + 2]
    assert_prefilled(call, before, o, initial)
    assert checkpoints is not None
    written = set()
    for n, j, exact, narrow in kept:
        row = call.starts[n] // every + j
        if kept_in == "pool":
            row = int(table[n, j]) if j < M else -1
        if row < 0:
            continue
        written.add(row)
        name = f"checkpoint {j} of {n}"
        assert_state(name, call, checkpoints[row], exact, narrow, checkpoints.dtype)
    if kept_in == "rows":
        assert checkpoints is more["state_checkpoints"]
        for row in {*range(len(checkpoints))} - written:
            assert (checkpoints[row] == SENTINEL).all(), f"row {row} was written"


@pytest.mark.parametrize("dataflow,dtype", [RUNS[0], RUNS[3]], indirect=["dataflow"])
def test_checkpoints_are_final_states_of_prefixes(
    dataflow: str, dtype: torch.dtype, device: str
) -> None:
    """Bit for bit, in one dtype; so a cached prefix goes on as if it had never been left."""
    case = Case("prefix", "a part of a chunk after three whole ones", T=55, B=2)
    call = make_call(case, dtype, device)
    start = call.state.clone()
    _, checkpoints = call.run(checkpoint_every_n_tokens=16)
    assert checkpoints is not None
    whole = call.state.clone()
    for j in range(3):
        call.state.copy_(start)
        tokens = [y[:, : 16 * (j + 1)] for y in call.x.tensors]
        short = replace(call, case=replace(case, T=16 * (j + 1)), x=replace_tokens(call.x, tokens))
        short.run(checkpoint_every_n_tokens=16)
        for n in range(2):
            got = checkpoints[55 * n // 16 + j]
            assert same_bits(got, call.state[call.write[n]]), f"{j} of {n}"
    # On from the last one.
    rest = [y[:, 48:] for y in call.x.tensors]
    call.state[call.read] = checkpoints[[55 * n // 16 + 2 for n in range(2)]]
    on = replace(call, case=replace(case, T=7), x=replace_tokens(call.x, rest), fresh=[False] * 2)
    on.run()
    assert same_bits(call.state[call.write], whole[call.write])


def test_checkpoint_of_the_last_token_may_be_the_final_state(device: str) -> None:
    """An engine gives the state after a whole block one slot, whichever way it came there."""
    case = Case("both", "a whole number of chunks", T=32, B=1)
    call = make_call(case, FP16, device)
    table = torch.tensor([[0, call.write[0]]], device=device)
    call.run(checkpoint_every_n_tokens=16, checkpoint_slots=table)
    alone = make_call(case, FP16, device)
    alone.run()
    assert same_bits(call.state[call.write[0]], alone.state[call.write[0]])
    assert call.state[0].isfinite().all()


# ------------------------------------------------------------------------ slots, flags, output


def test_one_slot_may_serve_several_readers(device: str) -> None:
    """As a cached prefix does."""
    case = Case("shared", "two continuations", lengths=(17, 5))
    call = make_call(case, FP16, device)
    call.fresh = [False, False]
    call.read = [3, 3]
    call.write = [1, 2]
    call.state[3] = 0.1
    before, initial = call.state.clone(), begun(call)
    o, _ = call.run()
    assert_prefilled(call, before, o, initial)


@pytest.mark.parametrize("dataflow,dtype", [RUNS[0], RUNS[3], RUNS[4]], indirect=["dataflow"])
@pytest.mark.parametrize("case", [PADDED, PACKED], ids=lambda case: case.name)
def test_out_of_any_strides(case: Case, dataflow: str, dtype: torch.dtype, device: str) -> None:
    """Heads apart and rows apart; what is between stays as it was."""
    B, T, HV, V = case.B, case.tokens, case.HV, case.V
    around = torch.full((B, T, HV, 2 * V + 3), SENTINEL, dtype=dtype, device=device)
    out = around[..., 1 : V + 1]
    call = make_call(case, dtype, device)
    o, _ = call.run(out=out)
    assert o is out
    plain, _ = make_call(case, dtype, device).run()
    assert same_bits(out, plain)
    between = torch.cat([around[..., :1], around[..., V + 1 :]], -1)
    assert (between == SENTINEL).all()


@pytest.mark.parametrize("dataflow", ["steps", "segments"], indirect=True)
def test_skipped_tokens_may_be_anything(dataflow: str, device: str) -> None:
    """Not even NaN in the tokens of a skipped sequence reaches o, or another sequence."""
    for case in (PADDED, PACKED):
        call = make_call(case, FP16, device)
        before, initial = call.state.clone(), begun(call)
        first = call.starts[1]
        for y in call.x.tensors:
            rows = y[1] if case.lengths is None else y[0, first : first + call.lengths[1]]
            rows.fill_(torch.nan)
        o, _ = call.run()
        for y in call.x.tensors:
            y.nan_to_num_(0.0)
        assert_prefilled(call, before, o, initial)


@pytest.mark.parametrize("name", ["triton", "reference", LIBRARY])
def test_empty_calls(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No sequence, no token, no slot: states go from their read to their write slots."""
    ask_for(name, monkeypatch)
    for B, T, N in ((0, 5, 0), (2, 0, 2), (1, 0, 3), (1, 4, 0)):
        q = torch.randn(B, T, 1, 16, device=device).half()
        g = torch.zeros(B, T, 2, device=device)
        v = torch.randn(B, T, 2, 16, device=device).half()
        state = torch.randn(8, 2, 16, 16, device=device)
        before = state.clone()
        offsets = None if N == B else torch.zeros(N + 1, dtype=torch.int32, device=device)
        read = torch.arange(N, device=device)
        started = torch.arange(N, device=device) != 1
        o, checkpoints = chunk_prefill(
            state,
            read,
            read + 4,
            q=q,
            k=q,
            v=v,
            g=g,
            beta=g,
            has_initial_state=started,
            cu_seqlens=offsets,
            checkpoint_every_n_tokens=64,
        )
        assert o.shape == v.shape and not o.any()
        assert checkpoints is not None and checkpoints.shape == (0, 2, 16, 16)
        for n in range(N):
            copied = before[n] if started[n] else torch.zeros_like(before[n])
            assert same_bits(state[4 + n], copied)
        assert same_bits(state[:4], before[:4])


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> str:
    """The device, with the CUDA library asked for."""
    ask_for("cuda", monkeypatch)
    return "cuda"
