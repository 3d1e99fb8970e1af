"""The walks that the CUDA library makes for the Triton backward of K of more than 128: by
themselves, and in the gradients of the op."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch
from backward_cases import STRENGTHS, TaskOptions, check_alone, check_task, make_task
from fast_backward_cases import check_repeats, check_replays, poison
from fast_cases import fast_case, gpu, problem
from helpers import BF16, FP16, Case, make_inputs, same_bits
from torch import Tensor
from walk_cases import CASES, check_walks, make_arguments

from gdn_triton._host import backends
from gdn_triton.chunk.backends import CHUNK
from gdn_triton.chunk.cuda import calls, support
from gdn_triton.chunk.triton.gradients import state as state_gradients

ALL = TaskOptions(l2norm=True, sigmoid=True, negative=True, gate=True, v_first=True)
# Its blocks have 128 channels of V. On a whole GPU those of the cases of walk_cases.py have 64.
MANY = fast_case("many", "", T=130, B=4, H=8, HV=16, K=256, V=256)
LAYER = fast_case("layer", "FLA's layer", T=500, B=2, H=4, HV=4, K=256, V=512)
RAGGED = fast_case("ragged", "", lengths=(65, 0, 1, 127, 64, 63, 200), orphans=70, K=192, V=264)


@pytest.mark.parametrize(("K", "served"), [(128, False), (136, True), (256, True)])
def test_which_calls_have_them(K: int, served: bool, hopper: None) -> None:
    reason = support.walks_support(problem(needs_grad=True, K=K))
    assert (reason is None) == served
    if reason is not None:
        assert (
            reason == "The CUDA library makes a backward's walks for K from 129 to 256; K is 128."
        )


def test_explained(hopper: None, no_interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_triton_missing", lambda: None)
    monkeypatch.setenv("GDN_BACKEND", "auto")
    assert CHUNK.explain(problem(needs_grad=True, K=256)).gradients == (
        "The gradients are by the Triton backward, with the CUDA library's walks. The CUDA "
        "backward takes K up to 128; K is 256."
    )


@gpu
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("case", [*CASES, MANY], ids=lambda case: case.name)
def test_walks(case: Case, dtype: torch.dtype, v_first: bool, cuda: str) -> None:
    poison()
    first = check_walks(case, dtype, cuda, v_first)
    poison()
    again = check_walks(case, dtype, cuda, v_first)
    for name, x, y in zip(first._fields, first, again, strict=True):
        assert x is not None and y is not None
        if name in ("h", "dh"):
            x, y = x[: len(list(case.spans()))], y[: len(list(case.spans()))]
        elif name in ("v_new", "dx"):
            x, y = case.owned(x), case.owned(y)
        assert same_bits(x, y), name


@pytest.fixture
def own(cuda: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device, on which no call may walk by Triton."""

    def forbidden(*args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("Triton walked")

    monkeypatch.setattr(state_gradients.state_bwd_kernel, "run", forbidden)
    monkeypatch.setenv("GDN_BACKEND", "cuda")
    return cuda


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("options", [TaskOptions(state=False, dht=False), ALL], ids=["none", "all"])
@pytest.mark.parametrize("case", [MANY, LAYER, RAGGED], ids=lambda case: case.name)
def test_gradients(case: Case, options: TaskOptions, dtype: torch.dtype, own: str) -> None:
    task = make_task(case, dtype, own, options)
    check_task(task, dtype, own)
    check_repeats(task)


@gpu
@pytest.mark.parametrize("strength", STRENGTHS)
def test_gates(strength: str, own: str) -> None:
    case = replace(RAGGED, K=256)
    x = make_inputs(case, BF16, own)
    x = x.but(g=STRENGTHS[strength](x.g))
    check_task(make_task(case, BF16, own, TaskOptions(), x), BF16, own)


@gpu
def test_a_sequence_alone(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a block with 64 channels of V alone, and with 128 in the batch."""
    monkeypatch.setenv("GDN_BATCH_INVARIANT", "1")
    check_alone(replace(RAGGED, H=8, HV=16, V=256), BF16, own)


@gpu
def test_graph_replay(own: str) -> None:
    check_replays(make_task(RAGGED, BF16, own, ALL), (200, 63, 64, 127, 1, 0, 65))


BAD_ARGUMENTS: list[tuple[str, Callable[[Any], Any], str]] = [
    ("do", lambda x: x[:, 1:], "do must have shape [1, 334, 2, 128], got [1, 333, 2, 128]"),
    ("A_inv", lambda x: x[..., :32], "A_inv must have shape [1, 334, 2, 64]"),
    ("A_qk", lambda x: x.float(), "A_qk must be BFloat16, got Float"),
    ("g_cumsum", lambda x: x.half(), "g_cumsum must be Float, got Half"),
    ("own", lambda x: x.cpu(), "own must be on a CUDA device"),
    ("dht", lambda x: x[:1], "dht must have shape [4, 2, 256, 128]"),
    ("chunk_offsets", lambda x: x[:1], "chunk_offsets must have shape [5], got [1]"),
    ("chunk_offsets", lambda x: None, "chunk_offsets must be a tensor if and only if cu_seqlens"),
]


@gpu
@pytest.mark.parametrize(("name", "change", "words"), BAD_ARGUMENTS)
def test_the_operator_checks_its_arguments(
    name: str, change: Callable[[Any], Any], words: str, cuda: str
) -> None:
    given: dict[str, Any] = make_arguments(CASES[0], BF16, cuda, v_first=False)
    given[name] = change(given[name])
    # The host code makes do readable, and every shape from it.
    made: dict[str, Tensor] = {}
    if name == "do":
        given["do"], made["do"] = given["do"].new_zeros(1, 334, 2, 128), given["do"]
    operator = calls.library_operator("backward_walks")

    def direct(*arguments: Any) -> None:
        operator(*arguments[:3], made.get("do", arguments[3]), *arguments[4:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "library_operator", lambda name: direct)
        with pytest.raises(RuntimeError, match=re.escape(words)):
            calls.walks(**given)
