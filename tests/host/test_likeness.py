"""Calls that are alike share one judgement, and no others do."""

import numpy as np
import pytest
import torch
from validation_cases import offsets, zeros

from gdn_triton._host.remembered import MOST_COMPARED, MOST_REMEMBERED, likeness, remembered


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
    assert likeness(("a",), (offsets(0, 5),)) == likeness(("a",), (offsets(0, 5),))
    assert likeness(("a",), (offsets(0, 5),)) != likeness(("a",), (offsets(0, 4),))
    assert likeness(("a",), (offsets(0, 5),)) != likeness(("a",), (offsets(0, 5).long(),))
    many = torch.zeros(MOST_COMPARED + 1, dtype=torch.int32)
    assert likeness(("a",), (many[1:],)) is not None
    for x in (many, b"text", [], np.float32(1), object(), subclass):
        assert likeness(("a",), (x,)) is None, x
    with torch._subclasses.FakeTensorMode():
        assert likeness(("a",), (torch.empty(3),)) is None
