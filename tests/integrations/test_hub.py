"""The kernel for the package `kernels` that `hub/build.py` makes: imported by its path, beside the
package itself, and in the place of transformers' functions."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernel")
    subprocess.run([sys.executable, ROOT / "hub" / "build.py", folder], check=True)
    return folder


def run(code: str, repository: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), repository],
        env={**os.environ, "PYTHONPATH": kernels_path(), "GDN_BACKEND": "reference"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def kernels_path() -> str:
    """Where the package `kernels` is, if not in this environment: transformers takes other paths
    where it is installed, so a folder of its own is better."""
    return os.pathsep.join([str(ROOT), os.environ.get("GDN_TEST_KERNELS", "")])


LOAD = """
    import importlib.util, sys
    from pathlib import Path
    import torch
    path = Path(sys.argv[1]) / "build" / "torch-universal" / "__init__.py"
    spec = importlib.util.spec_from_file_location("some_kernel", path)
    kernel = sys.modules["some_kernel"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernel)
    def inputs(T=70):
        q, k = torch.nn.functional.normalize(torch.randn(2, 1, T, 2, 16), dim=-1)
        return q, k, torch.randn(1, T, 4, 8), -torch.rand(1, T, 4), torch.rand(1, T, 4)
"""


def test_is_a_module_of_its_own(repository: Path) -> None:
    """Without the package, then beside it: two sets of operators, the same bits."""
    said = run(
        LOAD
        + """
    assert not [name for name in sys.modules if name.split(".")[0] == "gdn_triton"]
    x = inputs()
    o, state = kernel.chunk_gated_delta_rule(*x, output_final_state=True)
    q, k, v, g, beta = x
    walked, _ = kernel.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta)
    assert (o - walked).abs().max() < 1e-4
    compiled = torch.compile(kernel.chunk_gated_delta_rule, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*x)[0], o)
    import gdn_triton
    assert torch.equal(gdn_triton.chunk_gated_delta_rule(*x)[0], o)
    print(Path(gdn_triton.__file__).parent.parent, kernel.fast.why_unavailable())
    """,
        repository,
    )
    assert said == (
        f"{ROOT} The CUDA library is not built: a universal kernel has no machine code, the "
        "installed package may have.\n"
    )


def test_advises_no_build(repository: Path) -> None:
    """With a GPU that the CUDA library is for: a build helps the package, and not a kernel."""
    said = run(
        LOAD
        + """
    import gdn_triton.fast
    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
    torch.cuda.get_device_name = lambda device: "This GPU"
    torch.cuda.get_device_capability = lambda device: (9, 0)
    gdn_triton.fast.LIBRARY = path.with_name("no library")
    for fast in (gdn_triton.fast, kernel.fast):
        print("This GPU would run faster with it" in fast.why_unavailable())
    """,
        repository,
    )
    assert said == "True\nFalse\n"


def test_layers_are_transformers_functions(repository: Path) -> None:
    """Their keywords, results, and those that belong to other parts of a model."""
    run(
        LOAD
        + """
    q, k, v, g, beta = inputs()
    options = dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
    for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
        layer = getattr(kernel.layers, name)()
        o, state = layer(q, k, v, g=g, beta=beta, **options, seq_idx=None, max_length_q=70)
        expected = getattr(kernel, name)(q, k, v, g=g, beta=beta, **options)
        assert torch.equal(o, expected[0]) and torch.equal(state, expected[1])
        packed = dict(cu_seqlens=torch.tensor([0, 30, 70]))
        apart = layer(q, k, v, g=g, beta=beta, **packed)[0]
        assert not torch.equal(apart, o)
        numbers = torch.arange(70)[None] // 30
        assert torch.equal(layer(q, k, v, g=g, beta=beta, **packed, seq_idx=numbers)[0], apart)
        try:
            layer(q, k, v, g=g, beta=beta, seq_idx=numbers)
        except ValueError as error:
            assert "cu_seqlens must be given with seq_idx" in str(error)
        else:
            raise AssertionError("not refused")
    assert kernel.layers.recurrent_gated_delta_rule is type(layer)
    """,
        repository,
    )


def test_metadata_and_imports(repository: Path) -> None:
    variant = repository / "build" / "torch-universal"
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["name"] == "gdn-triton" and metadata["python-depends"] == ["einops"]
    for path in variant.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "torch.ops.gdn_triton." not in text and '"gdn_triton::' not in text, path
    text = (variant / "chunk" / "operators.py").read_text(encoding="utf-8")
    assert f'"{metadata["id"]}::chunk_gated_delta_rule_fwd"' in text


KERNELIZE = """
    import sys, torch
    from pathlib import Path
    from kernels import (
        LocalLayerRepository, Mode, get_local_kernel, kernelize, use_kernel_forward_from_hub,
        use_kernel_mapping, use_kernelized_func,
    )
    import inspect
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling
    kernel = get_local_kernel(Path(sys.argv[1]))
    names = {
        "chunk_gated_delta_rule": ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule"),
        "fused_recurrent_gated_delta_rule": (
            "torch_recurrent_gated_delta_rule", "recurrent_gated_delta_rule"
        ),
    }
    q, k = torch.nn.functional.normalize(torch.randn(2, 1, 70, 4, 16), dim=-1)
    call = dict(g=-torch.rand(1, 70, 4), beta=torch.rand(1, 70, 4), output_final_state=True)
    v = torch.randn(1, 70, 4, 8)
    for name, (theirs, ours) in names.items():
        own = inspect.unwrap(getattr(modeling, theirs))
        function = use_kernel_forward_from_hub(name)(own)

        @use_kernelized_func(function)
        class Model(torch.nn.Module):
            def forward(self):
                return function(q, k, v, **call)

        model = Model().eval()
        expected = model()
        layer = LocalLayerRepository(Path(sys.argv[1]), layer_name=ours)
        with use_kernel_mapping({name: {"cpu": {Mode.INFERENCE: layer}}}, inherit_mapping=False):
            kernelize(model, mode=Mode.INFERENCE, device="cpu", use_fallback=False)
        o, state = model()
        assert torch.equal(o, getattr(kernel, name)(q, k, v, **call)[0]), name
        assert (o - expected[0]).abs().max() < 1e-4
        assert (state - expected[1]).abs().max() < 1e-4
    print("replaced")
"""


def test_loads_and_replaces_with_kernels(repository: Path) -> None:
    folder = os.environ.get("GDN_TEST_KERNELS")
    if folder is None and importlib.util.find_spec("kernels") is None:
        pytest.skip("the package kernels is neither installed nor in GDN_TEST_KERNELS")
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers, of the extra `test`, is not installed")
    assert run(KERNELIZE, repository).endswith("replaced\n")
