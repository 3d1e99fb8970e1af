"""Errors and warnings; eager and cost: see test_compile.py."""

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_cases import assert_same, compiled, dense
from torch import Tensor

from gdn_triton import chunk_gated_delta_rule
from gdn_triton._host import remembered

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(autouse=True)
def reference_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test does not choose another one."""
    monkeypatch.setenv("GDN_BACKEND", "reference")


# ------------------------------------------------------------------------------ errors and warnings


def but(index: int, change: Callable[[Tensor], Any]) -> Callable[[list[Any]], None]:
    def apply(args: list[Any]) -> None:
        args[index] = change(args[index])

    return apply


def same(args: list[Any]) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (but(1, lambda k: k[..., :8]), {}, r"k must have the shape of q, \[B=1, T=40"),
        (but(2, lambda v: v[..., 0]), {}, r"v must have 4 dimensions \[B, T, HV, V\]"),
        (but(3, lambda g: g.long()), {}, "g must be float16, bfloat16, float32 or float64"),
        (but(0, lambda q: 1), {}, "q must be a torch.Tensor, got int"),
        (same, {"scale": True}, "scale must be a real number or None"),
        (same, {"scale": torch.ones(())}, "scale must be a real number or None"),
        (same, {"output_final_state": 1}, "output_final_state must be True or False"),
        (same, {"chunk_size": 48}, r"chunk_size must be one of \(16, 32, 64\), got 48"),
        (same, {"chunk_size": 16.0}, "chunk_size must be an int"),
        (same, {"initial_state": torch.ones(2, 2, 16, 16)}, "initial_state must have shape"),
        (same, {"A_log": torch.ones(2)}, "A_log must be None without use_gate_in_kernel"),
        (same, {"cu_seqlens_cpu": torch.tensor([0])}, "cu_seqlens_cpu must come with cu_seqlens"),
        (same, {"cu_seqlens": torch.ones(2)}, "cu_seqlens must be int32 or int64"),
        (same, {"transpose_state_layout": 1}, "transpose_state_layout must be True, False or None"),
    ],
    ids=lambda value: next(iter(value), "inputs") if isinstance(value, dict) else "",
)
def test_errors_while_tracing(
    change: Callable[[list[Any]], None], options: dict[str, Any], message: str, device: str
) -> None:
    """The eager call's words, within the compiler's own error."""
    args = dense(device, B=1)
    change(args)
    options = {
        name: x.to(device) if isinstance(x, Tensor) and name != "cu_seqlens_cpu" else x
        for name, x in options.items()
    }
    with pytest.raises(Exception, match=message) as eager:
        chunk_gated_delta_rule(*args, **options)
    with pytest.raises(
        Exception, match=message + r"|raised exception ExceptionVariable\("
    ) as traced:
        compiled("eager")(*args, **options)
    # torch 2.8 does not repeat the words of an error that is raised in what it traces: types, which
    # a schema would convert.
    assert re.search(message, str(traced.value)) or eager.type.__name__ in str(traced.value)


def test_a_trace_compares_with_no_other_call(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 cannot trace all that a comparison does, and would show an error of its own."""

    def compared(names: object, values: object) -> None:
        raise AssertionError("compared")

    monkeypatch.setattr(remembered, "likeness", compared)
    args = dense(device, B=1)
    with pytest.raises(AssertionError, match="compared"):
        chunk_gated_delta_rule(*args)
    with pytest.raises(Exception, match="TypeError") as traced:
        compiled("eager")(*args, scale="much")
    assert "compared" not in str(traced.value)


def test_contents_are_judged_at_every_run(device: str) -> None:
    """A graph that was traced with good offsets refuses bad ones."""
    args = dense(device, B=1)
    run = compiled()
    for offsets, message in (
        ([0, 7, 40], None),
        ([0, 7, 41], "end at or before T=40, got 41"),
        ([0, 7, 3], "not decrease, got 7 then 3 at index 2"),
        ([1, 7, 40], "start at 0, got 1"),
        ([0, 9, 40], None),
    ):
        on_host = torch.tensor(offsets)
        options = {"cu_seqlens": on_host.to(device), "cu_seqlens_cpu": on_host}
        if message is None:
            assert_same(run(*args, **options), chunk_gated_delta_rule(*args, **options))
            continue
        with pytest.raises(ValueError, match=message):
            run(*args, **options)


def test_deprecated_layout_warns_once_a_compilation(device: str) -> None:
    args = dense(device, V=8)
    run = compiled()
    options = {"output_final_state": True}
    with pytest.warns(DeprecationWarning, match="use state_v_first") as caught:
        for _ in range(2):
            actual = run(*args, **options, transpose_state_layout=True)
    assert len([w for w in caught if "state_v_first" in str(w.message)]) == 1
    assert_same(actual, chunk_gated_delta_rule(*args, **options, state_v_first=True))


# ----------------------------------------------------------------------------------- eager and cost


def test_eager_call_knows_nothing_of_it() -> None:
    """A call outside of a compiler does not import the compiler, and no traced one a kernel."""
    code = """
        import sys, torch, gdn_triton
        x = torch.randn(1, 5, 1, 8)
        args = (x, x, x, -torch.rand(1, 5, 1), torch.rand(1, 5, 1))
        expected = gdn_triton.chunk_gated_delta_rule(*args)[0]
        assert "torch._dynamo" not in sys.modules
        run = torch.compile(gdn_triton.chunk_gated_delta_rule, fullgraph=True, backend="eager")
        assert torch.equal(run(*args)[0], expected)
        assert "gdn_triton.chunk.triton.forward" not in sys.modules
        assert "gdn_triton._triton.launch" not in sys.modules
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
