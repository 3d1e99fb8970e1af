"""Every family of models of transformers with a gated delta rule, on this package's ops."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import FP32
from transformer_cases import (
    LINEAR,
    MIXTURE,
    OPS,
    QWEN3_NEXT,
    TERMS,
    TWENTY_TWO_BITS,
    Family,
    compare,
    gradients,
    prefill_and_decode,
    tokens,
    transformers,
)

from gdn_triton.integrations import transformers as integration

pytestmark = pytest.mark.usefixtures("undone")

FAMILIES = [
    QWEN3_NEXT,
    Family(
        "qwen3_5",
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        {"intermediate_size": 64, "head_dim": 16},
    ),
    Family("qwen3_5_moe", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", MIXTURE),
    Family("olmo_hybrid", "OlmoHybridForCausalLM", "OlmoHybridConfig", {"intermediate_size": 64}),
    Family("lara_mini", "LaraMiniForCausalLM", "LaraMiniConfig", MIXTURE),
]
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def available(family: Family) -> Any:
    """The family's modeling module, or a skip."""
    if not hasattr(transformers, family.config):
        pytest.skip(f"transformers {transformers.__version__} has no {family.name}")
    module = family.modeling
    if family.name == "olmo_hybrid" and not hasattr(module, "causal_conv1d_fn"):
        pytest.skip("before 5.15 OlmoHybrid needs the convolution of FLA")
    return module


@each_family
@pytest.mark.usefixtures("quick")
def test_families(family: Family, device: str) -> None:
    available(family)
    model = family.make(FP32, device)
    compare(model, prefill_and_decode(tokens(2, 24, device), 2), device, units=LINEAR)


@each_family
@pytest.mark.usefixtures("quick")
def test_training_step_of_families(family: Family, device: str) -> None:
    available(family)
    if device != "cpu":
        pytest.skip(TWENTY_TWO_BITS)
    model = family.make(FP32, device)
    compare(model, gradients(tokens(1, 20, device)), device, units=TERMS * LINEAR)


def test_no_model_is_missed() -> None:
    """Every modeling file of this transformers that names a gated delta rule: all ops are ours."""
    models = Path(transformers.__file__).parent / "models"
    files = [
        path
        for path in sorted(models.glob("*/modeling_*.py"))
        if "gated_delta_rule" in path.read_text(encoding="utf-8")
    ]
    assert files
    integration.enable()
    for path in files:
        importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
    found = integration.status().places
    for path in files:
        ops = [place.op for place in found if f".{path.stem}." in place.name]
        assert sorted(map(str, ops)) == sorted(OPS), path.stem


def test_in_a_fresh_process() -> None:
    """Enabled before transformers is imported: nothing of it is, and the model is ours."""
    from bare import run_python

    out = run_python(
        f"""
        import sys
        from gdn_triton.integrations.transformers import disable, enable, status
        assert enable().places == ()
        assert "transformers" not in sys.modules
        from transformers import Qwen3NextForCausalLM
        assert [place.op for place in status().places] == {OPS}
        print(disable())
        """
    )
    assert "is disabled in transformers" in out and out.count("not enabled") == len(OPS)


@pytest.mark.long(11)
def test_dry_run_of_the_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    """One way, in a process of its own, at toy sizes on the CPU."""
    from benchmarks import transformers_model

    assert transformers_model.main(["--dry-run", "--ways", "gdn_triton", "--decode", "1"]) == 0
    out = capsys.readouterr().out
    assert "| prefill 9 tokens, ms | prefill 40 tokens, ms |" in out
    assert re.search(r"^\| gdn_triton( \| [0-9.]+){3} \| none at the same length \|$", out, re.M)
