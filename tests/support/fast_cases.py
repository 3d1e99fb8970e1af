"""Helpers that the tests of the CUDA library share: its problems, calls of its host code, and the
cases of its numbers."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from choice_cases import problem as triton_problem
from helpers import (
    BF16,
    FP16,
    FP32,
    Case,
    make_inputs,
    same_bits,
)
from parity_calls import Options
from torch import Tensor

from gdn_triton import fast
from gdn_triton.chunk.problem import Inputs, Pool, Problem
from gdn_triton.fast.arguments import ARGUMENTS

ROOT = Path(__file__).resolve().parents[2]


def output(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def ask_again() -> str | None:
    """`why_unavailable` as at a process's first call."""
    return fast.why_unavailable.__wrapped__()


def problem(**changes: Any) -> Problem:
    """A problem that the library serves, on a device that need not be present."""
    sizes = {"B": 2, "T": 100, "H": 2, "HV": 4, "K": 128, "V": 128, "N": 2}
    options = {"device": "cuda:0", "scale": 0.1, "has_initial_state": True}
    given: Problem = triton_problem(**{**sizes, **options, **changes})
    return given


class Operator:
    """Notes its arguments, and writes values as a kernel would."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.name = ""

    def named(self, name: str) -> "Operator":
        """Replaces `chunk._operator`."""
        self.name = name
        return self

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(dict(zip(ARGUMENTS[self.name], arguments, strict=True)))


def host_call(**changes: Any) -> tuple[Problem, Inputs]:
    """A problem on the CPU and its tensors."""
    p = problem(device=torch.device("cpu"), **changes)
    case = Case("host", "", T=p.T, B=p.B, H=p.H, HV=p.HV, K=p.K, V=p.V, spare=8)
    x = make_inputs(case, BF16, "cpu")
    return p, Inputs(x.q, x.k, x.v, x.g, x.beta, x.initial_state, None, None)


def prefill_call(device: str = "cpu", **changes: Any) -> tuple[Problem, Inputs, Pool]:
    """As `host_call`, from slot 3 and zeros to slots 4 and 0, one checkpoint kept in slot 1."""
    p, given = host_call(pool_dtype=FP32, output_final_state=False, **changes)
    p = replace(p, device=torch.device(device))
    given = Inputs(*(None if x is None else x.to(device) for x in given))
    given = given._replace(initial_state=None)
    state = torch.rand(5, 4, p.K, p.V, device=device)
    pool = Pool(
        state=state,
        read_slots=torch.tensor([3, 2], device=device)[: p.N],
        write_slots=torch.tensor([4, 0], device=device, dtype=torch.int32)[: p.N],
        has_initial_state=torch.tensor([True, False], device=device)[: p.N],
        last_skipped=-1,
        out=torch.full((p.B, p.T, p.HV, p.V), torch.nan, dtype=BF16, device=device),
        every=64,
        checkpoints=state,
        checkpoint_slots=torch.tensor([[1], [-1]], device=device)[: p.N],
    )
    return p, given, pool


gpu = pytest.mark.gpu("the CUDA library runs on GPUs only")


def fast_case(name: str, why: str, **sizes: Any) -> Case:
    """A case that the library serves, with rows that TMA can read."""
    usual = {"H": 2, "HV": 4, "K": 128, "V": 128, "spare": 8}
    return Case(name, why, **{**usual, **sizes}, chunk_size=64)


def sized(case: Case, K: int, V: int) -> Case:
    return replace(case, name=f"{case.name}-K{K}-V{V}", K=K, V=V)


EDGES = (0, 1, 63, 64, 65, 127)

DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
OPTIONS = {
    "l2norm": Options(l2norm=True),
    "sigmoid": Options(sigmoid=True),
    "sigmoid-twice": Options(sigmoid=True, negative=True),
    "gate": Options(gate=True),
    "gate-bias": Options(gate=True, bias=True),
    "no-state": Options(with_state=False),
    "v-first": Options(v_first=True),
    "v-first-no-state": Options(v_first=True, with_state=False),
    "layer": Options(l2norm=True, sigmoid=True, gate=True, bias=True),
    "all": Options(
        l2norm=True, sigmoid=True, negative=True, gate=True, bias=True, v_first=True, scale=0.3
    ),
}
RAGGED = fast_case("ragged", "", lengths=(65, 0, 1, 127, 64, 63, 200), orphans=70, HV=8)
PADDED = fast_case("padded", "", T=150, B=2)
# Few heads and many chunks: long sequences are cut into segments.
SEGMENTS = fast_case("segments", "", lengths=(9000, 0, 6000), orphans=70, H=1, HV=1)
# (K, V) for each kind of kernels, in whole tiles of 64 channels and not.
WHOLE, LESS = ((64, 64), (128, 256), (256, 512)), ((40, 200), (96, 192), (136, 72))


def same(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(first, second, strict=True))
