"""The checks that the CUDA library's operators make themselves, for whoever calls them directly."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fast_cases import OPTIONS, PADDED, Operator, gpu, prefill_call
from fast_parity import run
from helpers import BF16
from parity_calls import make_call

from gdn_triton.chunk.cuda import calls
from gdn_triton.fast.arguments import ARGUMENTS, PLAN_SIZES

CSRC = Path(__file__).resolve().parents[2] / "csrc"


def schemas() -> dict[str, tuple[str, ...]]:
    """The names of each operator's arguments, from the strings of csrc/ops.cpp and arguments.h."""
    headers = (CSRC / "arguments.h").read_text(encoding="utf-8")
    parts = {
        name: "".join(re.findall(r'"(.*?)"', text))
        for name, text in re.findall(r"const std::string (k\w+) =(.*?);", headers, re.S)
    }
    parts["call"] = f"{parts['kInputs']}, {parts['kOptions']}"
    text = (CSRC / "ops.cpp").read_text(encoding="utf-8")
    found = {}
    for definition in re.findall(r"^  define\((.*?)\);$", text, re.S | re.M):
        tokens = re.findall(r'"(.*?)"|\b(call|kSizes)\b', definition, re.S)
        schema = "".join(parts[name] if name else words for words, name in tokens)
        name, _, arguments = schema.partition("(")
        arguments = arguments.rpartition(") ->")[0]
        found[name] = tuple(x.split()[-1] for x in arguments.split(", ") if x)
    return found


def test_names_are_in_the_order_of_the_operators() -> None:
    """The library unpacks by position the arguments that the host code passes by name."""
    found = schemas()
    assert {name: found[name] for name in ARGUMENTS} == ARGUMENTS
    assert found["chunk_forward_workspace"] == ("device", "sizes")
    entries = re.findall(
        r"sizes\[(\d+)( \+ i)?\]", (CSRC / "arguments.h").read_text(encoding="utf-8")
    )
    last = int(entries[-1][0]) + 2  # the three of longest
    assert last + 2 == len(PLAN_SIZES)  # and the device


# Each changes one argument of a right call of the operator; words of what it then says.
BAD_ARGUMENTS: list[tuple[str, Any, str]] = [
    ("k", lambda x: x.cpu(), "k must be on a CUDA device"),
    ("k", lambda x: x.half(), "k must be BFloat16, got Half"),
    ("k", lambda x: x[:, :, :1], "k must have shape [2, 150, 2, 128], got [2, 150, 1, 128]"),
    ("v", lambda x: x.mT.contiguous().mT, "the last dimension of v must be dense"),
    ("g", lambda x: x.double(), "g must be bfloat16, float16 or float32, got Double"),
    ("beta", lambda x: x[:, 1:], "beta must have shape [2, 150, 4]"),
    ("initial_state", lambda x: x[:1], "initial_state must have shape [2, 4, 128, 128]"),
    ("o", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "o must be contiguous"),
    ("final_state", lambda x: x.half(), "final_state must be Float, got Half"),
    ("states", lambda x: torch.zeros(4, 4, 128, 128, device="cuda"), "states must be a tensor if"),
    (
        "checkpoint_interval",
        lambda x: 64,
        "states must be a tensor if and only if checkpoint_interval is not 0, got "
        "checkpoint_interval = 64",
    ),
    ("workspace", lambda x: x[:8], "workspace must have "),
]


@gpu
@pytest.mark.parametrize(("name", "change", "words"), BAD_ARGUMENTS)
def test_operator_checks_its_arguments(name: str, change: Any, words: str, cuda: str) -> None:
    """For whoever calls it directly: the op's own checks come before it otherwise."""
    noted = Operator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "library_operator", noted.named)
        run("cuda", make_call(PADDED, BF16, cuda, OPTIONS["l2norm"]))
    judge(noted, name, change, words)


def judge(noted: Operator, name: str, change: Any, words: str) -> None:
    """The noted call runs, and one argument changed it says `words`."""
    (arguments,) = noted.calls
    run_operator = getattr(torch.ops.gdn_fast, noted.name)
    run_operator(*arguments.values())
    arguments[name] = change(arguments[name])
    with pytest.raises(RuntimeError, match=re.escape(words)):
        run_operator(*arguments.values())


BAD_POOLS: list[tuple[str, Any, str]] = [
    ("state", lambda x: x.double(), "state must be bfloat16, float16 or float32, got Double"),
    ("state", lambda x: x[:, :1], "state must have shape [5, 4, 128, 128], got [5, 1, 128, 128]"),
    ("read_slots", lambda x: x[:1], "read_slots must have shape [2], got [1]"),
    ("write_slots", lambda x: x.float(), "write_slots must be Int, got Float"),
    ("has_initial_state", lambda x: x.int(), "has_initial_state must be Bool, got Int"),
    (
        "checkpoint_interval",
        lambda x: 96,
        "checkpoint_interval must be 0 or a multiple of 64 below 2^31, got 96",
    ),
    ("checkpoints", lambda x: None, "checkpoints must be a tensor where checkpoint_interval is"),
    ("checkpoint_slots", lambda x: x[:1], "checkpoint_slots must have shape [2, 1], got [1, 1]"),
    ("o", lambda x: x.cpu(), "o must be on a CUDA device"),
    ("o", lambda x: x.mT.contiguous().mT, "the last dimension of o must be dense"),
]


@gpu
@pytest.mark.parametrize(("name", "change", "words"), BAD_POOLS)
def test_prefill_operator_checks_its_arguments(
    name: str, change: Any, words: str, cuda: str
) -> None:
    noted = Operator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "library_operator", noted.named)
        p, given, pool = prefill_call(device=cuda)
        calls.forward(p, given, pool)
    judge(noted, name, change, words)
