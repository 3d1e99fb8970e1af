"""Many sequences shorter than a chunk: the chunked form takes rows for their tokens, and gives what
it gives for each of them alone."""

from typing import Any

import pytest
import torch
from helpers import memory_of
from reference_cases import Case, assert_close, make, sequences

from gdn_triton.reference import chunk_gated_delta_rule, recurrent_gated_delta_rule
from gdn_triton.reference.chunk import ChunkResult
from gdn_triton.reference.lengths import SPARE_ROWS, bounds_of, group_by_length, rows_for

# More rows of 64 than two for each token, and SPARE_ROWS.
MIXED = (1, 130, 0, 2, 64, 3, 1, 5, 0, 33, 17, 31, 65) + (1, 7) * 20


@pytest.mark.parametrize("lengths", [MIXED, (1,) * 40, (0, 3) * 20, (64, 1, 1, 1, 1) * 20])
def test_every_token_is_in_one_group(lengths: tuple[int, ...]) -> None:
    inputs = make(Case(lengths=lengths))
    bounds = bounds_of(*inputs.tokens[0].shape[:2], inputs.cu_seqlens)
    groups = group_by_length(bounds, 64)
    assert groups
    for group in groups:
        own = [bounds[n + 1] - bounds[n] for n in group.sequences.tolist()]
        assert group.cu_seqlens.diff().tolist() == own
        assert {rows_for(length, 64) for length in own} == {group.rows}
        assert len(group.chunks) == sum(-(-length // 64) for length in own)
    for name, count in (("sequences", len(lengths)), ("tokens", sum(lengths))):
        every = torch.cat([getattr(group, name) for group in groups])
        assert every.sort().values.tolist() == list(range(count))
    rows = sum(len(group.chunks) * group.rows for group in groups)
    assert rows <= 2 * sum(lengths)


@pytest.mark.parametrize(
    "lengths",
    [(), (0, 0), (20,), (64,) * 100, (33,) * 100, (1,) * (SPARE_ROWS // 64), (500, 1) * 4],
)
def test_calls_of_few_such_rows_are_computed_whole(lengths: tuple[int, ...]) -> None:
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    assert group_by_length(bounds, 64) == []


@pytest.mark.parametrize("rows_of", [64, 48])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("name", ["mixed", "ones", "padded"])
def test_the_same_as_each_sequence_alone(name: str, v_first: bool, rows_of: int) -> None:
    """All steps, of packed sequences with tokens of none after them, and of padded ones."""
    cases = {
        "mixed": Case(lengths=MIXED, HV=4, orphans=3),
        "ones": Case(lengths=(1,) * 40, HV=4),
        "padded": Case(B=60, T=3, HV=4),
    }
    inputs = make(cases[name])
    options = inputs.options()
    if v_first:
        options |= {"initial_state": inputs.initial_state.mT, "state_v_first": True}

    def run(*tokens: Any, **other: Any) -> ChunkResult:
        more = {"chunk_size": rows_of, "keep_intermediates": True}
        return chunk_gated_delta_rule(*tokens, **{**options, **other}, **more)

    assert group_by_length(bounds_of(*inputs.tokens[0].shape[:2], inputs.cu_seqlens), rows_of)
    whole = run(*inputs.tokens)
    assert whole.A is not None and whole.A.shape[-1] == rows_of
    chunk = 0
    for n, (b, tokens) in enumerate(sequences(inputs)):
        state = options["initial_state"][n : n + 1]
        given = (x[b : b + 1, tokens] for x in inputs.tokens)
        one = run(*given, initial_state=state, cu_seqlens=None)
        assert_close(whole.final_state[n : n + 1], one.final_state, 1e-13)
        for field in ("o", "g_cumsum", "A", "A_inv", "w", "u", "v_new"):
            part = getattr(whole, field)[b : b + 1, tokens]
            assert_close(part, getattr(one, field), 1e-13)
        assert one.h is not None and whole.h is not None
        count = one.h.shape[1]
        assert_close(whole.h.flatten(0, 1)[chunk : chunk + count], one.h[0], 1e-13)
        chunk += count
    assert whole.h is not None and chunk == whole.h.shape[0] * whole.h.shape[1]
    orphans = inputs.tokens[0].shape[1] - sum(MIXED)
    if name == "mixed":
        assert orphans == 3 and not whole.o[:, -orphans:].any()


def test_gradients_are_those_of_the_recurrence() -> None:
    inputs = make(Case(lengths=MIXED, HV=4, orphans=3))
    found = []
    for form in (chunk_gated_delta_rule, recurrent_gated_delta_rule):
        leaves = [x.detach().requires_grad_() for x in (*inputs.tokens, inputs.initial_state)]
        options = inputs.options() | {"initial_state": leaves[5]}
        o, state = form(*leaves[:5], **options)[:2]
        generator = torch.Generator().manual_seed(1)
        above = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in (o, state)]
        found.append(torch.autograd.grad((o, state), leaves, above))
    for got, expected in zip(*found, strict=True):
        assert_close(got, expected, 1e-10)
        if got.shape[1] == inputs.tokens[0].shape[1]:
            assert not got[:, -3:].any()


@pytest.mark.parametrize("lengths", [(1,) * 512, (2, 1) * 170, (1,) * 448 + (64,)])
def test_memory_is_that_of_the_tokens(lengths: tuple[int, ...]) -> None:
    """A few times what one sequence of as many tokens takes, with the states beside, of which short
    sequences have more; 64 rows for each sequence take five times the bound and more."""

    def peak(lengths: tuple[int, ...]) -> int:
        inputs = make(Case(lengths=lengths, H=2, HV=4, K=16, V=16))
        return memory_of(lambda: chunk_gated_delta_rule(*inputs.tokens, **inputs.options())).peak

    states = 8 * 4 * 16 * 16 * len(lengths)
    assert peak(lengths) <= 4 * peak((sum(lengths),)) + 8 * states
