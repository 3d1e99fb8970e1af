"""The cuda library; which backend runs; errors: see test_prefill.py."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import (
    BF16,
    FP16,
    FP32,
    FP64,
    Case,
    same_bits,
)
from prefill_cases import (
    KEPT,
    SENTINEL,
    Call,
    arguments,
    around,
    ask_for,
    assert_checkpoints,
    assert_prefilled,
    begun,
    checkpoint_of,
    gpu,
    make_call,
    replace_tokens,
    validated,
)
from torch import Tensor

from gdn_triton import chunk_prefill, fast
from gdn_triton.chunk.cuda import calls

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels, wherever a test does not choose."""
    monkeypatch.setenv("GDN_BACKEND", "triton")


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
    """Without the norm, a call has scratch memory for its segments, and 256 bytes for a counter
    where blocks take whole sequences one after another."""
    layout = (None, case.B, case.tokens, case.H, case.HV, case.K, case.V, case.N)
    size = calls.workspace_floats(*layout, True, True, False, False, 0, 0, 0)
    assert size in (0, 64) if "segments" not in case.name else size > 64


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
    from gdn_triton.chunk.cuda import support
    from gdn_triton.fast.architectures import ARCHITECTURES

    monkeypatch.setattr(fast, "why_unavailable", lambda: None)
    monkeypatch.setattr(fast, "why_not_on", lambda device: None)
    monkeypatch.setattr(fast, "architecture_on", lambda device: ARCHITECTURES[9, 0])
    x = arguments("cpu", K=128, V=128, dtype=FP16)
    from gdn_triton.chunk.prefill.validation import validate_prefill
    from gdn_triton.chunk.problem import prefill_call

    problem = replace(validate_prefill(prefill_call(validated(x))), device=torch.device("cuda:0"))
    for pool in (FP32, FP16, BF16):
        assert support.supports(replace(problem, pool_dtype=pool)) is None
    reason = support.supports(replace(problem, pool_dtype=FP64))
    assert reason == "The CUDA library computes in float32 at most; the states are float64."


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
    ({"checkpoint_every_n_tokens": 2**31}, ValueError, "chunk_size=64 below 2.31, got 2147483648"),
    ({"checkpoint_every_n_tokens": 2**70}, ValueError, "chunk_size=64 below 2.31, got 11805916207"),
    (
        {"checkpoint_every_n_tokens": 96},
        ValueError,
        "be 0 or a multiple of chunk_size=64 below 2.31, got 96",
    ),
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
    ({"cu_seqlens_cpu": [0, 64]}, TypeError, "cu_seqlens_cpu must be a torch.Tensor or None"),
    ({"cu_seqlens_cpu": torch.tensor([0, 30])}, ValueError, "cu_seqlens_cpu must have the shape"),
    (
        {"cu_seqlens_cpu": torch.tensor([0, 30, 60, 65])},
        ValueError,
        "cu_seqlens_cpu must end at or before T=64, got 65",
    ),
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
    """Slots that would be refused for a sequence that runs are accepted for a skipped sequence, and
    for a checkpoint that its sequence is too short for."""
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
    """Strides and addresses are checked at every call, because calls that differ in them alone are
    alike."""
    x = arguments(device)
    out = torch.empty_like(x["v"])
    chunk_prefill(**x, out=out)
    with pytest.raises(ValueError, match="out must lie apart from v"):
        chunk_prefill(**x, out=x["v"])
