"""Bits of the CUDA library on a Hopper GPU: those of every run, of a sequence or a head alone, of
strided inputs; and what a token, a NaN or a row of no sequence cannot reach."""

import itertools
from dataclasses import replace

import pytest
import torch
from fast_cases import (
    DTYPES,
    LESS,
    OPTIONS,
    PADDED,
    RAGGED,
    SEGMENTS,
    WHOLE,
    fast_case,
    gpu,
    same,
    sized,
)
from fast_parity import independent, run, specification
from helpers import BF16, Case, assert_within_budget, pieces, same_bits
from parity_calls import Options, make_call
from torch import Tensor

LARGE = fast_case(
    "large", "", lengths=(700, 1, 64, 129, 0, 1000, 3000), orphans=70, H=4, HV=16
)  # fmt: skip


@gpu
@DTYPES
@pytest.mark.parametrize(
    "case",
    [LARGE, SEGMENTS, *(sized(case, *s) for case in (LARGE, SEGMENTS) for s in (*WHOLE, *LESS))],
    ids=lambda case: case.name,
)
def test_fifty_runs_one_result(case: Case, dtype: torch.dtype, cuda: str) -> None:
    call = make_call(case, dtype, cuda, OPTIONS["layer"])
    first = run("cuda", call)
    assert all(same(first, run("cuda", call)) for _ in range(50))


@gpu
@DTYPES
def test_alone(dtype: torch.dtype, cuda: str, batch_invariant: None) -> None:
    """A sequence's bits do not depend on what else is in the batch, packed or padded."""
    call = make_call(LARGE, dtype, cuda, Options())
    o, state = run("cuda", call)
    offsets = LARGE.offsets()
    for n, (first, end) in enumerate(itertools.pairwise(offsets)):
        tokens = {m: getattr(call.x, m)[:, first:end] for m in ("q", "k", "v", "g", "beta")}
        one = call.x.but(**tokens, initial_state=call.x.initial_state[n : n + 1])
        for cu_seqlens in (None, torch.tensor([0, end - first], device=cuda)):
            alone, alone_state = run("cuda", call._replace(x=one.but(cu_seqlens=cu_seqlens)))
            assert same_bits(alone, o[:, first:end]), f"o of sequence {n}"
            assert same_bits(alone_state[0], state[n]), f"final state of sequence {n}"


@gpu
@DTYPES
@pytest.mark.parametrize("HV", [1, 3, 40, 200])
def test_heads_know_nothing_of_each_other(
    HV: int, dtype: torch.dtype, cuda: str, batch_invariant: None
) -> None:
    """However many there are, the last is what it is alone."""
    case = fast_case("heads", "", T=200, B=1, H=1, HV=HV)
    call = make_call(case, dtype, cuda, Options())
    o, state = run("cuda", call)
    last = {n: getattr(call.x, n)[:, :, -1:] for n in ("v", "g", "beta")}
    x = call.x.but(**last, initial_state=call.x.initial_state[:, -1:])
    alone, alone_state = run("cuda", call._replace(x=x))
    assert same_bits(alone[:, :, 0], o[:, :, -1]) and same_bits(alone_state[:, 0], state[:, -1])


@gpu
@DTYPES
@pytest.mark.parametrize("cut", [64, 128])
def test_later_chunks(cut: int, dtype: torch.dtype, cuda: str) -> None:
    """o up to a chunk's end depends on nothing after it."""
    call, other = (make_call(PADDED, dtype, cuda, Options(), seed=seed) for seed in (0, 1))
    mixed = {
        n: torch.cat([getattr(call.x, n)[:, :cut], getattr(other.x, n)[:, cut:]], 1)
        for n in ("q", "k", "v", "g", "beta")
    }
    o, _ = run("cuda", call)
    changed, _ = run("cuda", call._replace(x=call.x.but(**mixed)))
    assert same_bits(changed[:, :cut], o[:, :cut])


@gpu
@DTYPES
@pytest.mark.parametrize("decay", [1, 30])
@pytest.mark.parametrize("cut", [3, 63, 70, 149])
def test_later_tokens_of_a_chunk(cut: int, decay: int, dtype: torch.dtype, cuda: str) -> None:
    """They change no more than the rounding of the tokens before them, however strong their gates
    are: the kernel scales a chunk by the decay of the whole of it."""
    call = make_call(PADDED, dtype, cuda, Options())
    tokens = {n: getattr(call.x, n).clone() for n in ("q", "k", "v", "g", "beta")}
    before = {n: x[:, :cut].clone() for n, x in tokens.items()}
    tokens["g"][:, cut:] *= decay
    for n in ("k", "v"):
        tokens[n][:, cut:] = tokens[n][:, cut:].flip(1)
    o, _ = run("cuda", call._replace(x=call.x.but(**tokens)))
    alone = call._replace(case=replace(PADDED, T=cut), x=call.x.but(**before))
    exact, narrow = specification(alone)[0], independent(alone)[0]
    unit = torch.finfo(dtype).eps / 2
    assert_within_budget("o", o[:, :cut], exact, narrow, dtype=dtype, unit=unit)


@gpu
@DTYPES
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "case",
    [RAGGED, SEGMENTS, *(sized(RAGGED, *s) for s in LESS)],
    ids=lambda case: case.name,
)
def test_nan_stays_in_its_sequence(
    case: Case, bad: float, name: str, dtype: torch.dtype, cuda: str
) -> None:
    """Neighbours that share its tiles keep every bit, whichever sequence is sick."""
    call = make_call(case, dtype, cuda, Options())
    clean_o, clean_state = run("cuda", call)
    offsets = case.offsets()
    for sick, (first, end) in enumerate(itertools.pairwise(offsets)):
        if first == end:
            continue
        poisoned = getattr(call.x, name).clone()
        if name == "initial_state":
            poisoned[sick] = bad
        else:
            poisoned[:, first:end] = bad
        o, state = run("cuda", call._replace(x=call.x.but(**{name: poisoned})))
        parts = zip(pieces(o, offsets), pieces(clean_o, offsets), strict=True)
        for n, (got, expected) in enumerate(parts):
            if n != sick:
                assert same_bits(got, expected), f"{sick} is sick, o of {n}"
                assert same_bits(state[n], clean_state[n]), f"{sick} is sick, state of {n}"
        assert not o[:, first:end].isfinite().all()
        assert (o[:, offsets[-1] :] == 0).all()


@gpu
@DTYPES
def test_nan_in_tokens_of_no_sequence(dtype: torch.dtype, cuda: str) -> None:
    call = make_call(RAGGED, dtype, cuda, Options())
    changes = {n: getattr(call.x, n).clone() for n in ("q", "k", "v", "g", "beta")}
    for x in changes.values():
        x[:, RAGGED.offsets()[-1] :] = torch.nan
    assert same(run("cuda", call), run("cuda", call._replace(x=call.x.but(**changes))))


@gpu
@pytest.mark.parametrize("with_state", [False, True], ids=["from-0", "from-state"])
@pytest.mark.parametrize("v_first", [False, True], ids=["k-first", "v-first"])
@pytest.mark.parametrize(
    "case",
    [
        fast_case("no-tokens", "", T=0, B=2),
        fast_case("no-batch", "", T=5, B=0),
        fast_case("no-sequence", "", lengths=()),
        fast_case("only-orphans", "", lengths=(), orphans=200),
        fast_case("only-empty", "", lengths=(0, 0)),
        fast_case("empty-and-orphans", "", lengths=(0, 0), orphans=90),
    ],
    ids=lambda case: case.name,
)
def test_no_tokens(case: Case, v_first: bool, with_state: bool, cuda: str) -> None:
    call = make_call(case, BF16, cuda, Options(v_first=v_first, with_state=with_state))
    o, state = run("cuda", call)
    assert o.shape == call.x.v.shape and (o == 0).all()
    initial = call.x.initial_state
    assert same_bits(state, initial if with_state else torch.zeros_like(initial))


@gpu
@DTYPES
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("size", [(128, 128), *LESS], ids=lambda size: "K{}-V{}".format(*size))
def test_empty_sequences_keep_their_state(
    size: tuple[int, int], with_state: bool, dtype: torch.dtype, cuda: str
) -> None:
    """First, in the middle and last; bit for bit in both layouts."""
    case = sized(fast_case("empty", "", lengths=(0, 70, 0, 0, 5, 0), orphans=3), *size)
    for v_first in (False, True):
        call = make_call(case, dtype, cuda, Options(with_state=with_state, v_first=v_first))
        _, state = run("cuda", call)
        for n in (0, 2, 3, 5):
            expected = call.x.initial_state[n] if with_state else torch.zeros_like(state[n])
            assert same_bits(state[n], expected)


@gpu
@DTYPES
def test_strides_change_no_bit(dtype: torch.dtype, cuda: str) -> None:
    """Splits of a projection, dense tensors, heads outside, odd addresses, an expanded batch."""
    call = make_call(PADDED, dtype, cuda, Options())
    expected = run("cuda", call)
    names = ("q", "k", "v", "g", "beta")
    views: dict[str, dict[str, Tensor]] = {"dense": {}, "heads": {}, "columns": {}, "odd": {}}
    for n in names:
        x = getattr(call.x, n)
        views["dense"][n] = x.contiguous()
        views["heads"][n] = x.transpose(1, 2).contiguous().transpose(1, 2)
        views["columns"][n] = x.mT.contiguous().mT
        wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 8)
        views["odd"][n] = wide[..., 1 : 1 + x.shape[-1]].copy_(x)
    for how, changes in views.items():
        assert same(expected, run("cuda", call._replace(x=call.x.but(**changes)))), how
    one = {n: getattr(call.x, n)[:1] for n in (*names, "initial_state")}
    twice = {n: x.expand(2, *x.shape[1:]) for n, x in one.items()}
    o, state = run("cuda", call._replace(x=call.x.but(**twice)))
    for row in range(2):
        assert same_bits(o[row], expected[0][0]) and same_bits(state[row], expected[1][0])


@gpu
def test_offsets_of_either_dtype_and_stride(cuda: str) -> None:
    call = make_call(RAGGED, BF16, cuda, Options())
    cu_seqlens = call.x.cu_seqlens
    assert cu_seqlens is not None
    expected = run("cuda", call)
    column = torch.stack([cu_seqlens, cu_seqlens - 1000], 1)[:, 0]
    for offsets in (cu_seqlens.long(), column):
        assert same(expected, run("cuda", call._replace(x=call.x.but(cu_seqlens=offsets))))
