"""Which tokens are whose: the cut of packed sequences into shards, token by token."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from gdn_triton._ranks.layout import any_crosses, cut_out


@given(st.lists(st.integers(0, 5), max_size=6), st.lists(st.integers(0, 6), min_size=1, max_size=5))
@settings(deadline=None)
def test_cut_out_token_by_token(sequences: list[int], lengths: list[int]) -> None:
    offsets = [0, *itertools.accumulate(sequences)]
    if sum(lengths) < offsets[-1]:
        lengths = [*lengths[:-1], lengths[-1] + offsets[-1] - sum(lengths)]
    owner = [n for n, length in enumerate(sequences) for _ in range(length)]
    slots = [slot for slot, length in enumerate(lengths) for _ in range(length)]
    held = [
        {slot for token, slot in enumerate(slots) if token < len(owner) and owner[token] == n}
        for n in range(len(sequences))
    ]
    assert any_crosses(offsets, lengths) == any(len(h) > 1 for h in held)
    seen = []
    for slot in range(len(lengths)):
        part = cut_out(offsets, lengths, slot)
        tokens = [t for t, s in enumerate(slots) if s == slot and t < len(owner)]
        counts = [sum(owner[t] == n for t in tokens) for n in part.sequences]
        assert list(part.lengths) == counts
        assert sum(counts) == len(tokens)
        assert list(part.sequences) == sorted(part.sequences)
        seen += [n for n in part.sequences if sequences[n] == 0]
        interval = part.interval
        if not tokens:
            assert not interval.before and not interval.after and interval.history == 0
            continue
        first, last = owner[tokens[0]], owner[tokens[-1]]
        assert interval.before == tuple(sorted(s for s in held[first] if s < slot))
        assert interval.after == tuple(sorted(s for s in held[last] if s > slot))
        assert interval.history == sum(o == first for o in owner[: tokens[0]])
        if interval.before:
            assert part.sequences[interval.first] == first
        if interval.after:
            assert part.sequences[interval.last] == last
    # Every sequence without tokens lies on one rank.
    assert sorted(seen) == [n for n, length in enumerate(sequences) if length == 0]
