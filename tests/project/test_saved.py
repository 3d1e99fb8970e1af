"""Programs that are saved in one process, by torch.export and by AOTInductor, and loaded in another
one, which has imported gdn_triton and nothing else of it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import FP32, Case, make_inputs
from torch import Tensor

import gdn_triton

CASE = Case("saved", "", T=20, H=1, HV=2, K=8, V=8)
WIDTH = 2 * CASE.H * CASE.K + CASE.HV * CASE.V


class Program(torch.nn.Module):
    """A call of every operator that a call without gradients is."""

    def forward(self, x: Tensor, taps: Tensor, gates: Tensor, *rule: Tensor) -> Any:
        sizes = (CASE.H, CASE.K, CASE.V)
        A_log = dt_bias = gates[0, 0]
        q, k, v, g, beta = rule
        pool, slots = x.new_zeros(3, CASE.HV, CASE.K, CASE.V), torch.tensor([1])
        last = x.new_zeros(3, WIDTH, taps.shape[1] - 1)
        y = gdn_triton.causal_conv1d(x, taps)
        now = gdn_triton.causal_conv1d_update(x[:, 0], taps, state=last, read_slots=slots)
        prepared = gdn_triton.fused_post_conv_prep(y[0], gates[0], gates[0], A_log, dt_bias, *sizes)
        both = gdn_triton.fused_conv_prep(x, taps, gates, gates, A_log, dt_bias, *sizes)
        chunked = gdn_triton.chunk_gated_delta_rule(*rule, output_final_state=True)
        walked, _ = gdn_triton.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta)
        filled, _ = gdn_triton.chunk_prefill(pool, slots, q=q, k=k, v=v, g=g, beta=beta)
        token = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        step = gdn_triton.recurrent_step(pool, slots, **{n: y[:, 0] for n, y in token.items()})
        normed = gdn_triton.rms_norm_gated(walked, v, v[0, 0, 0])
        return y, now, *prepared, *both, *chunked, walked, filled, step, normed, pool, last


LOAD = """
import sys, torch, gdn_triton
assert "torch._dynamo" not in sys.modules
"""
EXPORTED = "program = torch.export.load(sys.argv[1]).module()\n"
PACKAGE = "program = torch._inductor.aoti_load_package(sys.argv[1])\n"
COMPARE = """
args, expected = torch.load(sys.argv[2])
results = program(*args)
assert len(results) == len(expected) == 20, len(results)
for x, y in zip(results, expected):
    assert y.isfinite().all() and torch.equal(x, y)
print("same bits")
"""


@pytest.fixture(scope="module")
def exported() -> torch.export.ExportedProgram:
    return torch.export.export(Program(), arguments())


def arguments() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x, taps = torch.randn(1, CASE.T, WIDTH), torch.randn(WIDTH, 4)
    return x, taps, torch.randn(1, CASE.T, CASE.HV), *make_inputs(CASE, FP32, "cpu").tensors


@pytest.fixture(autouse=True)
def reference_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_BACKEND", "reference")


def check_in_a_fresh_process(load: str, program: Path, **settings: str) -> None:
    contents = program.with_name("contents.pt")
    torch.save((arguments(), Program()(*arguments())), contents)
    done = subprocess.run(
        [sys.executable, "-c", LOAD + load + COMPARE, program, contents],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "same bits\n"


def test_exported_program(exported: torch.export.ExportedProgram, tmp_path: Path) -> None:
    called = {str(node.target) for node in exported.graph.nodes if "gdn_triton" in str(node.target)}
    assert len(called) == 9, called
    torch.export.save(exported, tmp_path / "program.pt2")
    check_in_a_fresh_process(EXPORTED, tmp_path / "program.pt2", CUDA_VISIBLE_DEVICES="")


@pytest.mark.long(25)
def test_package_of_aotinductor(exported: torch.export.ExportedProgram, tmp_path: Path) -> None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"AOTInductor compiles C++ for the CPU, and {compiler} is not installed")
    package = tmp_path / "program.pt2"
    torch._inductor.aoti_compile_and_package(exported, package_path=str(package))
    # The process that loads the package sees the same devices as this one: in torch 2.11
    # aoti_load_package ends with signal 11 where no GPU is seen and the package, of whatever
    # program, was compiled where one is.
    check_in_a_fresh_process(PACKAGE, package)
