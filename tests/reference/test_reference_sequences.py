"""Sequences, heads and layout; dtypes: see test_reference.py."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from reference_cases import FP32, FP64, REGIMES, Case, Inputs, assert_close, make, sequences

from gdn_triton import reference
from gdn_triton.reference import (
    chunk_gated_delta_rule,
    recurrent_gated_delta_rule,
)


def alone(inputs: Inputs, n: int) -> Inputs:
    """Sequence n as a padded batch of one."""
    b, tokens = sequences(inputs)[n]
    q, k, v, g, beta = (x[b : b + 1, tokens] for x in inputs.tokens)
    return Inputs(q, k, v, g, beta, inputs.initial_state[n : n + 1], None)


# ---------------------------------------------------------------------- sequences, heads and layout


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
@pytest.mark.parametrize("cut", [0, 1, 37, 64, 100, 150])
def test_split_and_carry_is_the_whole(form: Callable[..., tuple], cut: int) -> None:
    inputs = make(Case(B=2, T=150, HV=4))
    o, final_state = form(*inputs.tokens, **inputs.options())[:2]
    head = form(*(x[:, :cut] for x in inputs.tokens), initial_state=inputs.initial_state)
    tail = form(*(x[:, cut:] for x in inputs.tokens), initial_state=head[1])
    assert_close(torch.cat([head[0], tail[0]], dim=1), o)
    assert_close(tail[1], final_state)


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
def test_split_and_carry_is_the_whole_packed(form: Callable[..., tuple]) -> None:
    lengths = (130, 0, 64, 5, 90)
    cuts = (70, 0, 64, 0, 1)  # inside, in an empty one, at the end, at the start, after one token
    inputs = make(Case(lengths=lengths, HV=4))
    o, final_state = form(*inputs.tokens, **inputs.options())[:2]
    spans = [tokens for _, tokens in sequences(inputs)]
    heads = torch.cat(
        [torch.arange(s.start, s.start + c) for s, c in zip(spans, cuts, strict=True)]
    )
    tails = torch.cat([torch.arange(s.start + c, s.stop) for s, c in zip(spans, cuts, strict=True)])
    cu_heads = torch.tensor([0, *np.cumsum(cuts).tolist()])
    assert inputs.cu_seqlens is not None
    head = form(
        *(x[:, heads] for x in inputs.tokens),
        initial_state=inputs.initial_state,
        cu_seqlens=cu_heads,
    )
    tail = form(
        *(x[:, tails] for x in inputs.tokens),
        initial_state=head[1],
        cu_seqlens=inputs.cu_seqlens - cu_heads,
    )
    assert_close(head[0], o[:, heads])
    assert_close(tail[0], o[:, tails])
    assert_close(tail[1], final_state)


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
@pytest.mark.parametrize("name", ["packed", "packed_with_empty", "packed_forget_some"])
def test_packed_is_each_sequence_alone(form: Callable[..., tuple], name: str) -> None:
    inputs = make(REGIMES[name])
    o, final_state = form(*inputs.tokens, **inputs.options())[:2]
    for n, (b, tokens) in enumerate(sequences(inputs)):
        one = alone(inputs, n)
        expected = form(*one.tokens, initial_state=one.initial_state)
        # Not bit for bit: a batched product may choose its blocking by the size of the batch.
        assert_close(o[b : b + 1, tokens], expected[0], 1e-14)
        assert_close(final_state[n : n + 1], expected[1], 1e-14)


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_rows_are_padded_rows(form: Callable[..., tuple], dtype: torch.dtype) -> None:
    inputs = make(Case(B=3, T=39, HV=4))
    o, final_state = form(*inputs.tokens, **inputs.options())[:2]
    packed = form(
        *(x.flatten(0, 1).unsqueeze(0) for x in inputs.tokens),
        initial_state=inputs.initial_state,
        cu_seqlens=torch.arange(4, dtype=dtype) * 39,
    )
    assert torch.equal(packed[0].reshape_as(o), o)
    assert torch.equal(packed[1], final_state)


@pytest.mark.parametrize("lengths", [(0, 17, 1, 0, 40, 16), (32, 16), (16, 16, 0), (0, 0), ()])
@pytest.mark.parametrize("orphans", [0, 5])
def test_chunk_view(lengths: tuple[int, ...], orphans: int) -> None:
    """Where each token goes, by hand; and that every rearrangement has its inverse."""
    total = sum(lengths)
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths, dtype=np.int64).tolist()])
    chunks = reference.Chunks(total + orphans, 1, 16, cu_seqlens)
    x = torch.arange(1.0, 1 + total + orphans).reshape(1, -1, 1)
    rows, held, valid, steps = [], [], [], []
    start = 0
    for n, length in enumerate(lengths):
        for step, first in enumerate(range(0, length, 16)):
            size = min(16, length - first)
            tokens = [1.0 + start + first + i for i in range(size)]
            rows.append(tokens + [0.0] * (16 - size))
            held.append(tokens + tokens[-1:] * (16 - size))
            valid.append([i < size for i in range(16)])
            steps.append((step, -(-length // 16), n))
        start += length
    assert chunks.lengths == list(lengths)
    assert chunks.C == chunks.offsets[-1] == sum(chunks.num_chunks) == len(rows)
    assert chunks.split(x).flatten(1).tolist() == rows
    assert chunks.split(x, hold=True).flatten(1).tolist() == held
    assert chunks.valid.tolist() == valid
    assert chunks.merge(chunks.split(x)).flatten().tolist() == [
        *range(1, 1 + total),
        *[0.0] * orphans,
    ]
    # At each step the chunk's sequence, longest sequence first, ties in order.
    sequence = torch.tensor([n for _, _, n in steps], dtype=FP32)
    by_step = [s.tolist() for s in chunks.steps(sequence)]
    last = max(chunks.num_chunks, default=0)
    assert by_step == [
        [n for _, _, n in sorted((s for s in steps if s[0] == t), key=lambda s: (-s[1], s[2]))]
        for t in range(max(last, 1))
    ]
    assert [len(s) for s in by_step] == chunks.counts
    assert torch.equal(chunks.unsteps(chunks.steps(sequence)), sequence)
    order = torch.arange(len(lengths))
    assert torch.equal(chunks.unsort_sequences(chunks.sort_sequences(order)), order)


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
def test_grouped_heads_are_repeated_key_heads(form: Callable[..., tuple]) -> None:
    inputs = make(Case(H=2, HV=6))
    q, k, v, g, beta = inputs.tokens
    o, final_state = form(*inputs.tokens, **inputs.options())[:2]
    # Value head hv reads key head hv // 3: each key head repeated in place, not the list repeated.
    repeated = form(
        q.repeat_interleave(3, 2), k.repeat_interleave(3, 2), v, g, beta, **inputs.options()
    )
    assert_close(repeated[0], o)
    assert_close(repeated[1], final_state)


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
@pytest.mark.parametrize("poisoned", ["q", "k", "v", "g", "beta", "initial_state"])
def test_nan_stays_in_its_sequence(form: Callable[..., tuple], poisoned: str) -> None:
    inputs = make(Case(lengths=(20, 37, 1, 70), HV=4))
    clean = form(*inputs.tokens, **inputs.options())[:2]
    bad = 1
    _, tokens = sequences(inputs)[bad]
    target = getattr(inputs, poisoned)
    # The last token: the one a ragged chunk repeats past its end.
    target[(bad, 0) if poisoned == "initial_state" else (0, tokens.stop - 1, 0)] = math.nan
    leaves = [x.requires_grad_() for x in (*inputs.tokens, inputs.initial_state)]
    o, final_state = form(*inputs.tokens, **inputs.options())[:2]
    others = torch.ones(o.shape[1], dtype=torch.bool)
    others[tokens] = False
    keep = [0, 2, 3]
    assert torch.isnan(o[:, tokens]).any()
    assert torch.equal(o[:, others], clean[0][:, others])
    assert torch.equal(final_state[keep], clean[1][keep])
    (o.sum() + final_state.sum()).backward()
    for leaf in leaves[:5]:
        assert leaf.grad is not None
        assert torch.isfinite(leaf.grad[:, others]).all()
    assert inputs.initial_state.grad is not None
    assert torch.isfinite(inputs.initial_state.grad[keep]).all()


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
@pytest.mark.parametrize("lengths", [(20, 7), (16, 16), ()])
@pytest.mark.parametrize("fused", [False, True])
def test_tokens_of_no_sequence_are_not_read(
    form: Callable[..., tuple], lengths: tuple[int, ...], fused: bool
) -> None:
    inputs = make(Case(lengths=lengths, orphans=16))
    total = sum(lengths)
    options, parameters = inputs.options(), []
    if fused:
        # Shared by all tokens: one NaN that reached the gate's gradient would spoil it whole.
        parameters = [torch.full((2,), x, dtype=FP64, requires_grad=True) for x in (0.5, -0.5)]
        options |= {"use_qk_l2norm": True, "use_beta_sigmoid": True, "use_gate": True}
        options |= dict(zip(("A_log", "dt_bias"), parameters, strict=True))
    with torch.no_grad():
        clean = form(*inputs.tokens, **options)[:2]
    for x in inputs.tokens:
        x[:, total:] = math.nan
        x.requires_grad_()
    o, final_state = form(*inputs.tokens, **options)[:2]
    assert torch.equal(o, clean[0])
    assert torch.equal(final_state, clean[1])
    assert not o[:, total:].any()
    o.sum().backward()
    for x in inputs.tokens:
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()
        assert not x.grad[:, total:].any()
        assert x.grad[:, :total].any() == (total > 0)
    for x in parameters:
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
def test_strided_views_are_read_where_they_lie(form: Callable[..., tuple]) -> None:
    inputs = make(Case(B=2, T=39))
    expected = form(*inputs.tokens, **inputs.options())[:2]
    joined = torch.cat([inputs.q, inputs.k, inputs.v], dim=-1)
    q, k, v = joined.split(8, dim=-1)
    assert not q.is_contiguous()
    g, beta = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (inputs.g, inputs.beta))
    o, final_state = form(q, k, v, g, beta, **inputs.options())[:2]
    assert torch.equal(o, expected[0])
    assert torch.equal(final_state, expected[1])


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
@pytest.mark.parametrize("case", [Case(), Case(T=0), Case(lengths=(0, 0)), Case(lengths=(0, 30))])
def test_inputs_are_left_alone_and_the_state_is_new(form: Callable[..., tuple], case: Case) -> None:
    inputs = make(case)
    before = [x.clone() for x in (*inputs.tokens, inputs.initial_state)]
    _, final_state = form(*inputs.tokens, **inputs.options())[:2]
    final_state.fill_(7.0)
    for x, y in zip((*inputs.tokens, inputs.initial_state), before, strict=True):
        assert torch.equal(x, y)


# ------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
@pytest.mark.parametrize(
    "dtypes",
    [
        # q, k, v, g, beta, initial_state
        (torch.bfloat16,) * 6,
        (torch.float16,) * 6,
        (FP32,) * 6,
        (FP64,) * 6,
        (torch.bfloat16, torch.float16, FP32, FP32, torch.bfloat16, FP32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, FP32, FP32, FP64),
        (FP32, FP32, FP64, FP32, FP32, FP32),
        (FP64, FP32, FP32, FP32, FP32, FP32),
    ],
)
def test_dtypes(form: Callable[..., tuple], dtypes: tuple[torch.dtype, ...]) -> None:
    """o in q's dtype, the state in the compute dtype, narrow inputs upcast before anything else."""
    inputs = make(Case(lengths=(20, 3), HV=4))
    cast = [
        x.to(dtype) for x, dtype in zip((*inputs.tokens, inputs.initial_state), dtypes, strict=True)
    ]
    compute = FP64 if FP64 in dtypes else FP32
    at = {"cu_seqlens": inputs.cu_seqlens}
    o, final_state = form(*cast[:5], initial_state=cast[5], **at)[:2]
    wide = [x.to(compute) for x in cast]
    expected = form(*wide[:5], initial_state=wide[5], **at)
    assert o.dtype == dtypes[0]
    assert final_state.dtype == compute
    assert torch.equal(o, expected[0].to(dtypes[0]))
    assert torch.equal(final_state, expected[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP32, FP64])
def test_step_dtypes(dtype: torch.dtype) -> None:
    inputs = make(Case()).to(dtype)
    q, k, v, g, beta = inputs.tokens
    compute = FP64 if dtype == FP64 else FP32
    A_log = torch.zeros(2, dtype=dtype)
    h = torch.zeros(1, 3, 2, 8, 8, dtype=dtype)
    A = torch.zeros(1, 40, 2, 16, dtype=dtype)
    results = [
        reference.gate(g, A_log, A_log),
        reference.beta_sigmoid(beta),
        reference.chunk_local_cumsum(g, 16),
        reference.gate_cumsum(g, 16),
        reference.kkt(k, g, beta, chunk_size=16),
        reference.solve(A),
        *reference.wy(k, v, g, beta, A),
        *reference.state_pass(k, k, v, g, inputs.initial_state, chunk_size=16),
        reference.output(q, k, v, h, g, chunk_size=16),
    ]
    assert [x.dtype for x in results] == [compute] * len(results)


@pytest.mark.parametrize("form", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
def test_autocast_changes_nothing(form: Callable[..., tuple]) -> None:
    inputs = make(Case()).to(FP32)
    expected = form(*inputs.tokens, **inputs.options())[:2]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (inputs.q @ inputs.k.mT).dtype == torch.bfloat16
        actual = form(*inputs.tokens, **inputs.options())[:2]
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
