"""Importing the package, in a bare process: no Triton, no GPU, no extension, and nothing done."""

import os

import pytest
from bare import run_python


def test_import_loads_nothing_heavy():
    out = run_python(
        """
        import sys, time, warnings
        import torch
        before = set(sys.modules)
        environment = dict(__import__("os").environ)
        warnings.simplefilter("error")
        start = time.perf_counter()
        import gdn_triton
        seconds = time.perf_counter() - start
        assert dict(__import__("os").environ) == environment
        assert not torch.cuda.is_initialized()
        new = set(sys.modules) - before
        heavy = sorted(m for m in new if m.split(".")[0] in ("triton", "numpy", "einops"))
        assert not heavy, heavy
        assert "torch._dynamo" not in new
        ours = sorted(m for m in new if m.startswith("gdn_triton."))
        # Kernels, host code of backends, what imports torch's compiler. A `support` judges only,
        # with the rules of the segments on Hopper and the releases of Triton.
        late = {"triton", "cuda", "sharded", "reference", "traces"}
        rules = (".support", ".hopper.segments", ".hopper.releases", ".hopper.walks.segments")
        judges = {m for m in ours if m.endswith(rules)}
        judges |= {m.rpartition(".")[0] for m in judges}
        early = [m for m in ours if late & set(m.split(".")) and m not in judges]
        assert ours and not early, early
        assert "gdn_triton.reference" not in new
        print(f"{seconds * 1e3:.1f} ms")
        """
    )
    # Measured, not asserted: a loaded machine is no fault of the import.
    print("import gdn_triton, after torch:", out.strip())
    assert out.count("\n") == 1, "the import printed something"


def test_import_registers_every_operator():
    """The operators of a saved program are registered, without importing Triton or querying a
    device."""
    out = run_python(
        """
        import sys, torch
        sys.modules["triton"] = None
        import gdn_triton
        names = [name for name in torch._C._dispatch_get_all_op_names() if "gdn_triton::" in name]
        print(*sorted(name.split("::")[1] for name in names))
        """
    )
    assert out.split() == [
        "accept_window",
        "causal_conv1d",
        "causal_conv1d_bwd",
        "causal_conv1d_state",
        "chunk_gated_delta_rule_bwd",
        "chunk_gated_delta_rule_fwd",
        "chunk_prefill",
        "fold_window",
        "fused_conv_prep",
        "fused_conv_prep_state",
        "fused_post_conv_prep",
        "fused_post_conv_prep_bwd",
        "fused_recurrent_bwd",
        "fused_recurrent_fwd",
        "layer_step",
        "layer_step_out",
        "layer_step_window",
        "layer_step_window_out",
        "recurrent_step",
        "recurrent_step_out",
        "recurrent_step_window",
        "recurrent_step_window_out",
        "restart_window",
        "rms_norm_gated",
        "rms_norm_gated_bwd",
    ]


def test_import_of_every_module_that_needs_no_triton():
    run_python(
        """
        import sys
        sys.modules["triton"] = None
        import gdn_triton, gdn_triton.constants, gdn_triton._host.backends, gdn_triton.fast
        import gdn_triton.chunk.cuda.support, gdn_triton.chunk.triton.support
        import gdn_triton.chunk.api, gdn_triton.chunk.problem, gdn_triton.chunk.validation
        import gdn_triton.chunk.operators, gdn_triton.chunk.reference, gdn_triton.reference
        assert gdn_triton.__version__ == "0.1.0"
        assert not gdn_triton.fast.is_available()
        assert gdn_triton.fast.why_unavailable().endswith(".")
        """
    )


CALL = """
import torch, gdn_triton
q = torch.randn(1, 5, 1, 8)
args = (q, q, q, -torch.rand(1, 5, 1), torch.rand(1, 5, 1))
"""


def test_runs_without_triton():
    out = run_python(
        f"""
        import sys
        sys.modules["triton"] = None
        exec({CALL!r})
        o, final_state = gdn_triton.chunk_gated_delta_rule(*args, output_final_state=True)
        assert o.shape == q.shape and final_state.shape == (1, 1, 8, 8)
        print(gdn_triton.explain(*args))
        """
    )
    assert "reference would run" in out
    assert "Triton 3.6 or newer is needed and cannot be imported" in out


def test_named_triton_without_triton():
    run_python(
        f"""
        import sys
        sys.modules["triton"] = None
        exec({CALL!r})
        try:
            gdn_triton.chunk_gated_delta_rule(*args)
        except RuntimeError as error:
            assert "cannot be imported" in str(error), error
        else:
            raise SystemExit("it fell back")
        """,
        GDN_BACKEND="triton",
    )


# Files of a package triton, and the error that its import ends with.
BROKEN = {
    "raises": ({"__init__": "raise RuntimeError('0 active drivers')"}, "RuntimeError: 0 active"),
    "library": ({"__init__": "import ctypes; ctypes.CDLL('/no/libtriton.so')"}, "OSError: /no/lib"),
    "syntax": ({"__init__": "print 3"}, "SyntaxError: Missing parentheses"),
    "empty": ({"__init__": ""}, "AttributeError: module 'triton' has no attribute '__version__'"),
    "version": ({"__init__": "__version__ = 'unknown'"}, "packaging.version.InvalidVersion: Inv"),
    "knobs": ({"__init__": "__version__ = '9.0'", "knobs": "1 / 0"}, "ZeroDivisionError: division"),
}


def test_broken_triton(tmp_path):
    """A Triton whose import raises is one that is not there, by a reason that names the error."""
    for kind, (files, _) in BROKEN.items():
        (tmp_path / kind / "triton").mkdir(parents=True)
        for name, text in files.items():
            (tmp_path / kind / "triton" / f"{name}.py").write_text(text)
    out = run_python(
        f"""
        import os, sys
        exec({CALL!r})
        from gdn_triton._host.backends import _triton_missing
        for kind in {list(BROKEN)}:
            sys.path.insert(0, {str(tmp_path)!r} + "/" + kind)
            for name in [x for x in sys.modules if x.split(".")[0] == "triton"]:
                del sys.modules[name]
            _triton_missing.cache_clear()
            os.environ["GDN_BACKEND"] = "auto"
            inputs = [x.clone().requires_grad_() for x in args]
            o, _ = gdn_triton.chunk_gated_delta_rule(*inputs)
            o.sum().backward()
            assert all(x.grad.isfinite().all() for x in inputs)
            gdn_triton.fused_recurrent_gated_delta_rule(*args[:4], beta=args[4])
            explanation = gdn_triton.explain(*args)
            print(explanation.chosen, explanation.reasons["triton"])
            os.environ["GDN_BACKEND"] = "triton"
            try:
                gdn_triton.chunk_gated_delta_rule(*args)
            except RuntimeError as error:
                print(error)
        """
    )
    lines = iter(out.splitlines())
    for _, error in BROKEN.values():
        start = "Triton 3.6 or newer is needed and cannot be imported ("
        explained = next(lines)
        assert explained.startswith(f"reference {start}{error}") and explained.endswith(").")
        reason = explained.removeprefix("reference ")
        assert next(lines) == f"GDN_BACKEND=triton cannot run this call. {reason}"


def test_job_with_a_broken_triton(tmp_path):
    """As it is installed: every module of torch that asks for Triton finds this one too."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise RuntimeError('0 active drivers')")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    out = run_python("from gdn_triton.demo import main; main(['LICENSE'])", PYTHONPATH=path)
    assert "no Triton that can be imported" in out
    assert "reference (GDN_BACKEND=auto)" in out and "(RuntimeError: 0 active drivers)" in out


def test_call_on_cpu_leaves_triton_kernels_alone():
    run_python(
        f"""
        exec({CALL!r})
        import sys
        gdn_triton.chunk_gated_delta_rule(*args)
        found = [m for m in sys.modules if m[:4] == "gdn_" and "triton" in m.split(".")]
        # The folders, and the judges that import no Triton.
        base = "gdn_triton.chunk.triton"
        hopper, walks = base + ".hopper", base + ".hopper.walks"
        judges = [hopper + name for name in (".releases", ".segments", ".support")]
        judges += [walks, walks + ".segments", base + ".support"]
        assert sorted(found) == [base, hopper, *judges]
        """
    )


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_interpreter_switch_is_read(interpret):
    pytest.importorskip("triton", reason="Triton is not installed")
    out = run_python(
        f"exec({CALL!r}); print(gdn_triton.explain(*args).chosen)", TRITON_INTERPRET=interpret
    )
    assert out.strip() == {"0": "reference", "1": "triton"}[interpret]
