"""Prefill on a pool of states: every dataflow against the specification, beside decoding, and the
contract of slots, flags, outputs and checkpoints.

The budget is that of helpers.py. What a checkpoint should hold is computed from its prefix alone.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
    Arithmetic,
    Case,
    Inputs,
    assert_within_budget,
    cases,
    make_inputs,
    narrow_forward,
    same_bits,
)
from torch import Tensor

import gdn_triton
from gdn_triton import chunk_gated_delta_rule, chunk_prefill, fast, recurrent_step, reference
from gdn_triton.fast import chunk as fast_chunk

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


gpu = pytest.mark.gpu("the CUDA library runs on GPUs only")
LIBRARY = pytest.param("cuda", marks=gpu)


def ask_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend; skips where the CUDA library is asked for and not there."""
    reason = fast.why_unavailable() if name == "cuda" else None
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setenv("GDN_BACKEND", name)


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
SENTINEL = 123.0


@dataclass
class Call:
    """The tensors of a call, and what each sequence does. Skipped, unkept: sequences whose read and
    whose write slot is padding."""

    case: Case
    x: Inputs
    state: Tensor
    read: list[int]
    write: list[int]
    fresh: list[bool]
    v_first: bool
    skip: str
    given: dict[str, Any] = field(default_factory=dict)

    @property
    def padding(self) -> int:
        return 0 if self.skip == "non_positive" else -1

    @property
    def lengths(self) -> tuple[int, ...]:
        case = self.case
        return (case.T,) * case.B if case.lengths is None else case.lengths

    @property
    def starts(self) -> list[int]:
        return list(itertools.accumulate(self.lengths, initial=0))[:-1]

    def live(self, n: int) -> bool:
        return self.read[n] > self.padding

    def k_first(self, states: Tensor) -> Tensor:
        return states.transpose(-1, -2) if self.v_first else states

    def run(self, **more: Any) -> tuple[Tensor, Tensor | None]:
        device = self.x.q.device
        q, k, v, g, beta = self.x.tensors
        return chunk_prefill(
            self.state,
            torch.tensor(self.read, device=device),
            torch.tensor(self.write, device=device, dtype=torch.int32),
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            has_initial_state=torch.tensor([not fresh for fresh in self.fresh], device=device),
            cu_seqlens=self.x.cu_seqlens,
            chunk_size=self.case.chunk_size,
            state_v_first=self.v_first,
            skip=self.skip,
            **self.given,
            **more,
        )


def make_call(
    case: Case,
    dtype: torch.dtype,
    device: str,
    pool: torch.dtype = FP32,
    *,
    v_first: bool = False,
    skip: str = "negative",
    spare: int = 0,
) -> Call:
    """Sequence 1 is skipped, sequence 2 keeps nothing, every third is fresh, and a slot that no
    sequence may read holds NaN. Slots lie apart in memory. spare: slots after all others."""
    x = make_inputs(case, dtype, device)
    N, shape = case.N, (case.HV, case.V, case.K) if v_first else (case.HV, case.K, case.V)
    around = torch.full((2 * N + 2 + spare, 3 + math.prod(shape)), torch.nan, dtype=pool)
    around = around.to(device)
    state = around[:, 3:].unflatten(1, shape)
    # Slot 0 is nobody's.
    generator = torch.Generator().manual_seed(1)
    slots = torch.randperm(2 * N, generator=generator).add(1).tolist()
    read, write = slots[:N], slots[N:]
    fresh = [n % 3 == 0 for n in range(N)]
    padding = 0 if skip == "non_positive" else -1
    if N > 2:
        read[1], write[2] = padding, padding
    for n in range(N):
        if read[n] > 0 and not fresh[n]:
            state[read[n]] = torch.randn(shape, generator=generator).to(device, pool)
    return Call(case, x, state, read, write, fresh, v_first, skip)


# --------------------------------------------------------------------------- what should come of it


def begun(call: Call) -> Tensor:
    """The states that sequences start from, [N, HV, K, V], K first, fp32."""
    case = call.case
    found = torch.zeros(case.N, case.HV, case.K, case.V, device=call.state.device)
    for n in range(case.N):
        if call.live(n) and not call.fresh[n]:
            found[n] = call.k_first(call.state)[call.read[n]].float()
    return found


def prefix(call: Call, initial: Tensor, tokens: int | None) -> tuple[Inputs, Case]:
    """The call packed, of each sequence its first `tokens` tokens or, if it has less, none."""
    lengths, rows = [], []
    for start, length in zip(call.starts, call.lengths, strict=True):
        kept = length if tokens is None else tokens * (length >= tokens)
        lengths.append(kept)
        rows += range(start, start + kept)
    index = torch.tensor(rows, dtype=torch.long, device=initial.device)
    case = replace(call.case, B=1, lengths=tuple(lengths), orphans=0)
    flat = [y.flatten(0, 1)[index][None] for y in call.x.tensors]
    return Inputs(*flat, initial, case.cu_seqlens(str(initial.device))), case


def expected(
    call: Call, initial: Tensor, tokens: int | None = None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """o of the tokens of all sequences, packed, and final states K first: exact, and narrow."""
    x, case = prefix(call, initial, tokens)
    exact = reference.chunk_gated_delta_rule(
        *x.exact(),
        initial_state=initial.to(FP64),
        cu_seqlens=x.cu_seqlens,
        chunk_size=case.chunk_size,
    )
    arithmetic = Arithmetic(x.q.dtype, "cpu" if initial.device.type == "cpu" else "cuda")
    narrow = narrow_forward(x, case, arithmetic)
    return (exact.o, exact.final_state), narrow


def assert_state(
    name: str, call: Call, got: Tensor, exact: Tensor, narrow: Tensor, dtype: torch.dtype
) -> None:
    unit = Arithmetic(call.x.q.dtype, call.state.device.type).unit
    got = call.k_first(got)
    assert_within_budget(name, got, exact, narrow.to(dtype), dtype=dtype, unit=unit)


def assert_prefilled(call: Call, before: Tensor, o: Tensor, initial: Tensor) -> None:
    """o and the pool. `before`: the pool before the call, `initial` as `begun` found it then."""
    (exact_o, exact_final), (narrow_o, narrow_final) = expected(call, initial)
    case, dtype = call.case, call.x.q.dtype
    flat = o.flatten(0, 1)
    unit = Arithmetic(dtype, call.state.device.type).unit
    first = 0
    for n, (start, length) in enumerate(zip(call.starts, call.lengths, strict=True)):
        of_n, rows = slice(first, first + length), flat[start : start + length]
        first += length
        if not call.live(n):
            assert not rows.any(), "o of a skipped sequence is 0"
            continue
        assert_within_budget(
            f"o of {n}", rows, exact_o[0, of_n], narrow_o[0, of_n], dtype=dtype, unit=unit
        )
        if call.write[n] > call.padding:
            got, pool = call.state[call.write[n]], call.state.dtype
            assert_state(f"state {n}", call, got, exact_final[n], narrow_final[n], pool)
    assert not flat[sum(call.lengths) :].any() or case.lengths is None, "o of no sequence is 0"
    written = {call.write[n] for n in range(case.N) if call.live(n)}
    for slot in range(call.state.shape[0]):
        if slot not in written:
            assert same_bits(call.state[slot], before[slot]), f"slot {slot} was written"


def checkpoint_of(call: Call, every: int) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """(sequence, its checkpoint, exact, narrow) of all, from `call` before it has run."""
    initial = begun(call)
    for j in range(max(call.lengths) // every):
        (_, exact), (_, narrow) = expected(call, initial, (j + 1) * every)
        for n, length in enumerate(call.lengths):
            if call.live(n) and length >= (j + 1) * every:
                yield n, j, exact[n], narrow[n]


def assert_checkpoints(
    call: Call, checkpoints: Tensor, every: int, kept: list[tuple[int, int, Tensor, Tensor]]
) -> None:
    """All at once: after few tokens, the error of one state is a matter of luck."""
    found = [
        (checkpoints[call.starts[n] // every + j], exact, narrow) for n, j, exact, narrow in kept
    ]
    got, exact, narrow = (torch.stack(states) for states in zip(*found, strict=True))
    assert_state("checkpoints", call, got, exact, narrow, call.state.dtype)


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
    """Of 25 tokens the first 20 by prefill and five by steps, which round the state to the pool's
    dtype after each. The narrow computation rounds it once less: the budget has that unit too."""
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
        # What follows judges the slots before these.
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


def replace_tokens(x: Inputs, tokens: list[Tensor]) -> Inputs:
    return x.but(**dict(zip(("q", "k", "v", "g", "beta"), tokens, strict=True)))


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


# -------------------------------------------------------------------------------- the CUDA library

large = functools.partial(Case, H=2, HV=4, K=128, V=128, chunk_size=64, spare=8)
L_PADDED = large("padded", "a checkpoint after the last token", T=192, B=4)
L_PACKED = large("packed", "chunks' sides", lengths=(0, 130, 65, 0, 64, 193, 300), orphans=70)
# One head and many chunks: long sequences are cut into segments, at all of these sizes.
L_SEGMENTS = large("segments", "", lengths=(3000, 1300, 8000), orphans=70, H=1, HV=1)
# The same with more heads, and so fewer and longer segments.
L_WIDE = large("wide segments", "", lengths=(7000, 6000, 5000), orphans=70, H=1)
L_CASES = [
    *(L_PADDED, L_PACKED, L_SEGMENTS, L_WIDE),
    *(
        replace(case, name=f"{case.name}-K{K}-V{V}", K=K, V=V)
        for K, V in ((40, 200), (96, 192), (256, 512), (136, 72))
        for case in (L_PACKED, L_SEGMENTS)
    ),
]
over_cases = pytest.mark.parametrize("case", L_CASES, ids=lambda case: case.name)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> str:
    """The device, with the CUDA library asked for."""
    ask_for("cuda", monkeypatch)
    return "cuda"


@gpu
@over_cases
def test_library_cuts_long_sequences(case: Case, library: str) -> None:
    """Without the norm, a call has scratch memory for its segments only."""
    layout = (None, case.B, case.tokens, case.H, case.HV, case.K, case.V, case.N)
    size = fast_chunk.workspace_floats(*layout, True, True, False, invariant=False)
    assert (size > 0) == ("segments" in case.name)


def around(call: Call) -> tuple[Tensor, Tensor]:
    """o and the final states of the chunked op, from states that are gathered before it."""
    initial = begun(call)
    o, state = chunk_gated_delta_rule(
        *call.x.tensors,
        initial_state=initial.mT if call.v_first else initial,
        output_final_state=True,
        state_v_first=call.v_first,
        cu_seqlens=call.x.cu_seqlens,
        chunk_size=call.case.chunk_size,
    )
    assert state is not None
    return o, state


def assert_same_as(plain: tuple[Tensor, Tensor], call: Call, before: Tensor, o: Tensor) -> None:
    """The bits of `around`, scattered; what is skipped, and every other slot, left out."""
    flat, plain_flat = o.flatten(0, 1), plain[0].flatten(0, 1)
    expected_state = before.clone()
    for n, (start, length) in enumerate(zip(call.starts, call.lengths, strict=True)):
        rows = slice(start, start + length)
        if call.live(n):
            assert same_bits(flat[rows], plain_flat[rows]), f"o of {n}"
            if call.write[n] > call.padding:
                expected_state[call.write[n]] = plain[1][n].to(call.state.dtype)
        else:
            assert not flat[rows].any(), "o of a skipped sequence is 0"
    assert not flat[sum(call.lengths) :].any(), "o of no sequence is 0"
    assert same_bits(call.state, expected_state)


@gpu
@over_cases
@pytest.mark.parametrize(
    "dtype,pool,v_first,skip",
    [
        pytest.param(BF16, FP32, False, "negative", id="bf16-fp32"),
        pytest.param(FP16, FP16, True, "non_positive", id="fp16-fp16-v-first"),
        pytest.param(BF16, BF16, True, "negative", id="bf16-bf16-v-first"),
    ],
)
def test_library_matches_the_specification(
    case: Case, dtype: torch.dtype, pool: torch.dtype, v_first: bool, skip: str, library: str
) -> None:
    """o, final states and checkpoints, the bits of the chunked op, and no slot but its own."""
    every = 64 if max(case.lengths or (0,)) < 1000 else 2048
    call = make_call(case, dtype, library, pool, v_first=v_first, skip=skip)
    before, initial, plain = call.state.clone(), begun(call), around(call)
    kept = list(checkpoint_of(call, every))
    o, checkpoints = call.run(checkpoint_every_n_tokens=every)
    assert_prefilled(call, before, o, initial)
    assert_same_as(plain, call, before, o)
    assert checkpoints is not None and kept
    assert_checkpoints(call, checkpoints, every, kept)
    # Without them, in place of other memory for o.
    call.state.copy_(before)
    wide = torch.full((case.B, case.tokens, case.HV, 2 * case.V + 8), SENTINEL, dtype=dtype)
    wide = wide.to(library)
    for first in (8, 3):  # TMA can write there, or not
        out = wide.fill_(SENTINEL)[..., first : first + case.V]
        assert call.run(out=out)[0] is out
        assert same_bits(out, o)
        between = torch.cat([wide[..., :first], wide[..., first + case.V :]], -1)
        assert (between == SENTINEL).all()
        call.state.copy_(before)


@gpu
@over_cases
@pytest.mark.parametrize("pool", [FP32, BF16], ids=["pool-fp32", "pool-bf16"])
def test_library_in_place(case: Case, pool: torch.dtype, library: str) -> None:
    """Each sequence writes the slot that it reads: a part of it that is done early must not
    overwrite what another part has still to read. Again and again, with the same bits."""
    call = make_call(case, BF16, library, pool)
    before, plain = call.state.clone(), around(call)
    assert any(call.live(n) and not call.fresh[n] for n in range(case.N))
    call.write = [slot if call.live(n) else -1 for n, slot in enumerate(call.read)]
    for _ in range(20):
        call.state.copy_(before)
        o, _ = call.run()
        assert_same_as(plain, call, before, o)


@gpu
def test_library_one_slot_for_several_readers(library: str) -> None:
    for case in (L_PADDED, L_SEGMENTS):
        call = make_call(case, BF16, library)
        shared = call.read[0]
        call.state[shared] = torch.randn(call.state.shape[1:]).to(library)
        call.read, call.fresh = [shared] * case.N, [False] * case.N
        before, plain = call.state.clone(), around(call)
        for _ in range(5):
            call.state.copy_(before)
            o, _ = call.run()
            assert_same_as(plain, call, before, o)


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kept_in", ["rows-fp16", "rows-fp64", "pool"])
@pytest.mark.parametrize("case", [L_PADDED, L_PACKED, L_SEGMENTS], ids=lambda case: case.name)
def test_library_checkpoints(case: Case, kept_in: str, dtype: torch.dtype, library: str) -> None:
    """In rows of a tensor of another dtype, and in slots of the pool, one of which is padding; the
    last one of the longest sequence has no column. What they are is known from new ones."""
    every = 64 if case is not L_SEGMENTS else 192
    N, M = case.N, max(case.lengths or (case.T,)) // every - 1
    call = make_call(case, dtype, library, spare=N * M)
    before = call.state.clone()
    first_o, new = call.run(checkpoint_every_n_tokens=every)
    assert new is not None
    places = {
        (n, j): call.starts[n] // every + j
        for n, length in enumerate(call.lengths)
        for j in range(length // every)
        if call.live(n)
    }
    final = call.state.clone()
    call.state.copy_(before)
    more: dict[str, Any] = {"checkpoint_every_n_tokens": every}
    if kept_in == "pool":
        table = 2 * N + 2 + torch.arange(N * M).view(N, M).flip(0)
        table[2, 0] = -1
        o, _ = call.run(**more, checkpoint_slots=table.to(library))
        for (n, j), row in places.items():
            if j < M and table[n, j] >= 0:
                final[table[n, j]] = new[row]
        assert same_bits(call.state, final)
    else:
        rows = torch.full((len(new) + 2, *new.shape[1:]), SENTINEL, device=library)
        rows = rows.to(FP16 if kept_in == "rows-fp16" else FP64)
        wanted = rows.clone()
        for row in places.values():
            wanted[row] = new[row].to(rows.dtype)
        o, _ = call.run(**more, state_checkpoints=rows)
        assert same_bits(rows, wanted) and same_bits(call.state, final)
    assert same_bits(o, first_o)


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_library_checkpoints_are_final_states_of_prefixes(
    dtype: torch.dtype, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, where no sequence is cut."""
    monkeypatch.setenv("GDN_BATCH_INVARIANT", "1")
    call = make_call(L_SEGMENTS, dtype, library)
    call.write[2] = call.write[1]  # of a sequence that is skipped
    start = call.state.clone()
    _, checkpoints = call.run(checkpoint_every_n_tokens=128)
    assert checkpoints is not None
    for n, j in ((0, 0), (0, 22), (2, 1), (2, 61)):
        call.state.copy_(start)
        before, length = call.starts[n], 128 * (j + 1)
        tokens = [y[:, before : before + length] for y in call.x.tensors]
        x = replace_tokens(call.x, tokens).but(cu_seqlens=None)
        case = replace(call.case, T=length, B=1, lengths=None, orphans=0)
        one = {name: [getattr(call, name)[n]] for name in ("read", "write", "fresh")}
        replace(call, case=case, x=x, **one).run()
        assert same_bits(call.state[call.write[n]], checkpoints[before // 128 + j]), f"{j} of {n}"


@gpu
@pytest.mark.parametrize("case", [L_PADDED, L_PACKED, L_SEGMENTS], ids=lambda case: case.name)
def test_library_skipped_tokens_may_be_anything(case: Case, library: str) -> None:
    call = make_call(case, BF16, library)
    before, plain = call.state.clone(), around(call)
    first = call.starts[1]
    for y in call.x.tensors:
        rows = y[1] if case.lengths is None else y[0, first : first + call.lengths[1]]
        rows.fill_(torch.nan)
    o, _ = call.run()
    assert_same_as(plain, call, before, o)


# ------------------------------------------------------------------------------- which backend runs


def test_refusals(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = arguments(device)
    with pytest.raises(RuntimeError, match="Triton kernels compute in float32 at most; the states"):
        chunk_prefill(**{**x, "state": x["state"].double()})
    monkeypatch.setenv("GDN_BACKEND", "cuda")
    with pytest.raises(RuntimeError, match="GDN_BACKEND=cuda cannot run this call"):
        chunk_prefill(**x)


def test_the_cuda_library_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    from gdn_triton.fast import support

    monkeypatch.setattr(fast, "why_unavailable", lambda: None)
    monkeypatch.setattr(fast, "why_not_on", lambda device: None)
    x = arguments("cpu", K=128, V=128, dtype=FP16)
    from gdn_triton.chunk.problem import prefill_call
    from gdn_triton.chunk.validation_prefill import validate_prefill

    problem = replace(validate_prefill(prefill_call(validated(x))), device=torch.device("cuda:0"))
    for pool in (FP32, FP16, BF16):
        assert support.supports(replace(problem, pool_dtype=pool)) is None
    reason = support.supports(replace(problem, pool_dtype=FP64))
    assert reason == "The CUDA library computes in float32 at most; the states are float64."


# ------------------------------------------------------------------------------------------- errors


def arguments(
    device: str = "cpu", K: int = 16, V: int = 16, dtype: torch.dtype = FP32
) -> dict[str, Any]:
    """A good call: 3 sequences packed in 64 tokens, 8 slots."""
    q = torch.randn(1, 64, 1, K, device=device).to(dtype)
    return {
        "state": torch.zeros(8, 2, K, V, device=device),
        "read_slots": torch.arange(3, device=device),
        "q": q,
        "k": q.clone(),
        "v": torch.randn(1, 64, 2, V, device=device).to(dtype),
        "g": -torch.rand(1, 64, 2, device=device),
        "beta": torch.rand(1, 64, 2, device=device),
        "cu_seqlens": torch.tensor([0, 10, 26, 64], device=device),
    }


def validated(x: dict[str, Any]) -> dict[str, Any]:
    defaults = inspect.signature(chunk_prefill).parameters.values()
    return {p.name: p.default for p in defaults if p.default is not p.empty} | x


KEPT = {"checkpoint_every_n_tokens": 16, "chunk_size": 16}
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"state": None}, TypeError, "state must be a torch.Tensor, got NoneType"),
    ({"read_slots": [0, 1, 2]}, TypeError, "read_slots must be a torch.Tensor, got list"),
    ({"write_slots": 3}, TypeError, "write_slots must be a torch.Tensor or None, got int"),
    ({"has_initial_state": True}, TypeError, "has_initial_state must be a torch.Tensor or None"),
    ({"skip": "zero"}, ValueError, "skip must be one of negative, non_positive, got 'zero'"),
    ({"checkpoint_every_n_tokens": 16.0}, TypeError, "checkpoint_every_n_tokens must be an int"),
    ({"checkpoint_every_n_tokens": True}, TypeError, "checkpoint_every_n_tokens must be an int"),
    ({"q": torch.zeros(1, 64, 16)}, ValueError, r"q must have 4 dimensions \[B, T, H, K\]"),
    ({"state": torch.zeros(8, 2, 16)}, ValueError, r"have 4 dimensions \[slots, HV, K, V\]"),
    ({"state": torch.zeros(8, 2, 16, 8)}, ValueError, r"state must have shape \[slots=8, HV=2"),
    ({"state": torch.zeros(8, 2, 16, 16).long()}, ValueError, "state must be float16, bfloat16"),
    ({"read_slots": torch.arange(2)}, ValueError, r"read_slots must have shape \[N=3\]"),
    ({"read_slots": torch.zeros(3)}, ValueError, "read_slots must be int32 or int64"),
    ({"write_slots": torch.zeros(3, 64).long()}, ValueError, r"write_slots must have shape \[N=3"),
    ({"has_initial_state": torch.ones(3)}, ValueError, "has_initial_state must be torch.bool"),
    ({"has_initial_state": torch.ones(4).bool()}, ValueError, "has_initial_state must have shape"),
    ({"out": torch.zeros(1, 64, 2, 16).half()}, ValueError, "out must be torch.float32, as q is"),
    ({"out": torch.zeros(64, 2, 16)}, ValueError, r"out must have shape \[B=1, T=64, HV=2, V=16\]"),
    ({"out": torch.zeros(1, 64, 2, 32)[..., ::2]}, ValueError, "out must have a dense last"),
    ({"out": torch.zeros(1, 64, 1, 16).expand(1, 64, 2, 16)}, ValueError, "out must have memory"),
    ({"out": torch.zeros(1, 64, 2, 16, device="meta")}, ValueError, "out must be on the device"),
    ({"state": torch.zeros(1, 2, 16, 16).expand(8, -1, -1, -1)}, ValueError, "state must have mem"),
    ({"checkpoint_every_n_tokens": -64}, ValueError, "be 0 or a multiple of chunk_size=64"),
    ({"checkpoint_every_n_tokens": 96}, ValueError, "be 0 or a multiple of chunk_size=64, got 96"),
    (
        {"state_checkpoints": torch.zeros(4, 2, 16, 16)},
        ValueError,
        "state_checkpoints must be None without checkpoint_every_n_tokens",
    ),
    (
        {"checkpoint_slots": torch.zeros(3, 4).long()},
        ValueError,
        "checkpoint_slots must be None without checkpoint_every_n_tokens",
    ),
    (
        {**KEPT, "checkpoint_slots": torch.zeros(4, 3).long()},
        ValueError,
        r"checkpoint_slots must have shape \[N=3, M\]",
    ),
    (
        {**KEPT, "state_checkpoints": torch.zeros(3, 2, 16, 16)},
        ValueError,
        "state_checkpoints must have at least B [*] T // checkpoint_every_n_tokens = 4 rows",
    ),
    (
        {**KEPT, "state_checkpoints": torch.zeros(4, 2, 16, 8)},
        ValueError,
        r"state_checkpoints must have shape \[rows=4, HV=2, K=16, V=16\]",
    ),
    # Contents, which only a CPU tensor shows.
    ({"read_slots": torch.tensor([0, 8, 1])}, ValueError, "read_slots must be less than the 8"),
    ({"read_slots": torch.tensor([0, 1, 1])}, ValueError, "read_slots must name no slot twice"),
    ({"write_slots": torch.tensor([0, 9, 1])}, ValueError, "write_slots must be less than the 8"),
    ({"write_slots": torch.tensor([4, 5, 4])}, ValueError, "write_slots must name no slot twice"),
    (
        {"write_slots": torch.tensor([4, 0, 5])},
        ValueError,
        "slot that another sequence writes, got slot 0, read by sequence 0 and written by 1",
    ),
    (
        {**KEPT, "checkpoint_slots": torch.tensor([[7, 7], [-1, -1], [7, 6]])[:, :2] * 2},
        ValueError,
        r"must be less than the 8 slots or rows that there are, got 14 at \[2, 0\]",
    ),
    (
        {**KEPT, "checkpoint_slots": torch.tensor([[9, 9], [7, 9], [7, 6]])},
        ValueError,
        "checkpoint_slots must name no slot twice: each is written, got 7 twice",
    ),
    (
        {**KEPT, "checkpoint_slots": torch.tensor([[9, 9], [7, 9], [2, 6]])},
        ValueError,
        "checkpoint_slots must name no slot twice: each is written, got 2 twice",
    ),
    (
        {
            **KEPT,
            "write_slots": torch.tensor([3, 4, 5]),
            "checkpoint_slots": torch.tensor([[9, 9], [0, 9], [7, 6]]),
        },
        ValueError,
        "got slot 0, read by sequence 0 and written by 1",
    ),
    ({"cu_seqlens": torch.tensor([0, 30, 20, 64])}, ValueError, "cu_seqlens must not decrease"),
]


@pytest.mark.parametrize("changes,error,message", WRONG)
def test_errors(
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GDN_BACKEND", "reference")
    x = {**arguments(), **changes}
    before = x["state"].clone() if isinstance(x["state"], Tensor) else None
    with pytest.raises(error, match=message):
        chunk_prefill(**x)
    assert before is None or torch.equal(x["state"], before)


def test_rules_of_skipped_and_unused_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be wrong of a sequence that runs is not of one that is skipped, nor of a
    checkpoint that its sequence is too short for."""
    monkeypatch.setenv("GDN_BACKEND", "reference")
    x = arguments()
    x["read_slots"] = torch.tensor([0, -1, 2])
    x["write_slots"] = torch.tensor([3, 3, 4])
    table = torch.tensor([[99, 99], [99, 99], [5, 6]])
    chunk_prefill(**x, **KEPT, checkpoint_slots=table)
    assert x["state"][3:7].any((1, 2, 3)).all() and not x["state"][7].any()


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "state"])
def test_out_over_an_input(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "reference")
    x = arguments()
    x["k"] = x["k"].repeat(1, 1, 2, 1)
    x["q"] = x["q"].repeat(1, 1, 2, 1)
    size = x[name].numel()
    memory = torch.zeros(size + 2048)
    x[name] = memory[:size].view(x[name].shape).copy_(x[name])
    out = memory[size - 1 : size + 2047].view(1, 64, 2, 16)
    with pytest.raises(ValueError, match=f"out must lie apart from {name} in memory"):
        chunk_prefill(**x, out=out)
    chunk_prefill(**x, out=memory[size:].view(1, 64, 2, 16))


@pytest.mark.parametrize("name", ["q", "g", "state", "out"])
def test_no_gradient(name: str, device: str) -> None:
    x = arguments(device)
    x["out"] = torch.empty_like(x["v"])
    x[name].requires_grad_()
    with pytest.raises(NotImplementedError, match="chunk_prefill updates states in place"):
        chunk_prefill(**x)
    with torch.no_grad():
        chunk_prefill(**x)


def test_a_remembered_call_is_still_judged(device: str) -> None:
    """What the memory of accepted calls does not know: strides and addresses."""
    x = arguments(device)
    out = torch.empty_like(x["v"])
    chunk_prefill(**x, out=out)
    with pytest.raises(ValueError, match="out must lie apart from v"):
        chunk_prefill(**x, out=x["v"])


# -------------------------------------------------------------------------- compilers, CUDA graphs


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kept_in", ["none", "new", "rows", "pool"])
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled(kept_in: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        monkeypatch.setenv("GDN_BACKEND", "reference")
    more: dict[str, Any] = {} if kept_in == "none" else dict(KEPT)
    if kept_in == "rows":
        more["state_checkpoints"] = torch.full((4, 2, 16, 16), SENTINEL, device=device)
    if kept_in == "pool":
        table = torch.tensor([[-1, -1], [3, -1], [4, 5]], device=device)
        more["checkpoint_slots"] = table

    def function(x: dict[str, Any], more: dict[str, Any]) -> Any:
        q = x["q"] * 1
        o, checkpoints = chunk_prefill(**{**x, "q": q}, **more)
        return o + 1, checkpoints, x["state"].sum()

    x = arguments(device)
    if kept_in != "none":
        x["out"] = torch.empty_like(x["v"])
    y = {name: given.clone() for name, given in x.items()}
    more_y = {name: z.clone() if isinstance(z, Tensor) else z for name, z in more.items()}
    eager = function(x, more)
    traced = torch.compile(function, fullgraph=True, backend="aot_eager")(y, more_y)
    assert torch.equal(eager[0], traced[0]) and torch.equal(eager[2], traced[2])
    assert same_bits(x["state"], y["state"])
    assert (eager[1] is None) == (traced[1] is None)
    if kept_in == "new":
        # Rows of no checkpoint hold anything.
        assert same_bits(eager[1][[0, 1, 2]], traced[1][[0, 1, 2]])
    if kept_in == "rows":
        assert same_bits(eager[1], traced[1]) and same_bits(eager[1], more_y["state_checkpoints"])
    if "out" in x:
        assert same_bits(x["out"], y["out"])


@pytest.mark.usefixtures("fresh_compiler")
def test_errors_while_tracing() -> None:
    x = arguments()
    x["read_slots"] = x["read_slots"][:2]
    with pytest.raises(Exception, match=r"read_slots must have shape \[N=3\]"):
        torch.compile(chunk_prefill, fullgraph=True, backend="eager")(**x)


def test_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schema, fake and mutations, as torch's own checker sees them."""
    import gdn_triton.chunk.prefill_operators  # noqa: F401

    operator = torch.ops.gdn_triton.chunk_prefill.default
    names = [argument.name for argument in operator._schema.arguments]
    monkeypatch.setenv("GDN_BACKEND", "reference")
    for more in ({}, {"out": torch.empty(1, 64, 2, 16), **KEPT}):
        given = validated({**arguments(), **more})
        tests = ("test_schema", "test_faketensor")
        call = tuple(given[name] for name in names)
        torch.library.opcheck(operator, call, test_utils=tests)


@pytest.mark.gpu("CUDA graphs")
@pytest.mark.parametrize("name,dtype", [("triton", FP32), ("triton", BF16), ("cuda", BF16)])
def test_cuda_graph(
    name: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots, flags, offsets and the table of checkpoints change in place between replays."""
    ask_for(name, monkeypatch)
    T, N, HV, K = 700, 4, 2, 64
    q, k = torch.nn.functional.normalize(torch.randn(2, 1, T, 1, K, device=device), dim=-1)
    v = torch.randn(1, T, HV, K, device=device)
    q, k, v = (y.to(dtype) for y in (q, k, v))
    g, beta = -torch.rand(1, T, HV, device=device), torch.rand(1, T, HV, device=device)
    start = torch.randn(16, HV, K, K, device=device)
    state, out = start.clone(), torch.empty_like(v)
    batches = [
        ([0, 100, 100, 400, 650], [0, 1, 2, 3], [4, 5, -1, 7], [True, False, True, True]),
        ([0, 0, 64, 65, 700], [9, -1, 3, 2], [9, 8, 10, 2], [True, True, False, True]),
    ]
    tables = [torch.full((N, 5), -1, device=device) for _ in range(2)]
    tables[0][2], tables[1][3, :3] = torch.arange(11, 16), torch.arange(11, 14)

    def inputs(batch: int) -> list[Tensor]:
        offsets, read, write, started = batches[batch]
        return [*(torch.tensor(y, device=device) for y in (offsets, read, write, started))]

    offsets, read, write, started = inputs(0)
    table = tables[0].clone()

    def call() -> None:
        chunk_prefill(
            state,
            read,
            write,
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            has_initial_state=started,
            cu_seqlens=offsets,
            out=out,
            checkpoint_every_n_tokens=128,
            checkpoint_slots=table,
        )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for batch in (1, 0):
        for now, then in zip((offsets, read, write, started), inputs(batch), strict=True):
            now.copy_(then)
        table.copy_(tables[batch])
        state.copy_(start)
        out.fill_(torch.nan)
        graph.replay()
        replayed_state, replayed_out = state.clone(), out.clone()
        state.copy_(start)
        call()
        assert same_bits(replayed_state, state) and same_bits(replayed_out, out)
        assert out.isfinite().all() and not same_bits(state, start)


@pytest.mark.gpu("a wait for the device has to be one")
@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_no_wait_for_the_device(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_for(name, monkeypatch)
    x = arguments(device, dtype=BF16)
    more: dict[str, Any] = {"checkpoint_every_n_tokens": 64}
    more["has_initial_state"] = torch.ones(3, dtype=torch.bool, device=device)
    chunk_prefill(**x, **more)
    torch.cuda.set_sync_debug_mode("error")
    try:
        chunk_prefill(**x, **more)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_public() -> None:
    assert gdn_triton.chunk_prefill is chunk_prefill
