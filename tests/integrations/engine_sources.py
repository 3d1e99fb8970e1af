"""The sources in the engines' wheels, read without importing them.

`tests/integrations/engine_signatures.json` has the versions that the adapters were written for and,
for every function that an adapter replaces or imitates, its parameters with their defaults and a
digest of its body. It is made by

    python tests/integrations/engine_sources.py FOLDER

from a folder of wheels, as `pip download --no-deps` leaves them. Where the environment variable
ENGINE_WHEELS names such a folder, tests compare the wheels with the record, and run the
engines' own code: `load` executes chosen definitions of a wheel's file, and nothing else of it. A
package that is installed in the recorded version is compared without a wheel.
"""

import ast
import hashlib
import importlib.metadata
import inspect
import json
import linecache
import os
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gdn_triton.integrations.vllm.window import UNPACKING

RECORD = Path(__file__).with_name("engine_signatures.json")
WHEELS = "ENGINE_WHEELS"

VERSIONS = {
    "vllm": "0.33.0",
    "sglang": "0.5.23",
    "flashinfer_python": "0.7.2.post1",
    "transformers": "5.24.0",
    "fla_core": "0.6.0",
    "flash_qla": "0.1.3",
}
_VLLM = "vllm/model_executor/layers/mamba"
_FLA = "vllm/third_party/flash_linear_attention/ops"
_SGLANG = "sglang/kernels/ops"
_QWEN = f"{_VLLM}/gdn/qwen_gdn_linear_attn.py"
_MODELS = "transformers/models"
# The modeling files of transformers with such layers, and how the names of their classes begin.
LAYERS = {
    "qwen3_next": "Qwen3Next",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
    "qwen4_exp": "Qwen4ExpText",
    "olmo_hybrid": "OlmoHybrid",
    "lara_mini": "LaraMini",
}
_TORCH_RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
# Which definitions of which files. A method is named Class.method.
IMITATED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "vllm": {
        _QWEN: (
            *("ChunkGatedDeltaRule.forward_native", "ChunkGatedDeltaRule.forward_cuda"),
            *("fi_chunk_gated_delta_rule", "_log_gdn_backend_decision"),
            "QwenGatedDeltaNetAttention._forward_core",
        ),
        f"{_VLLM}/gdn/olmo_gdn_linear_attn.py": ("OlmoHybridGatedDeltaNetAttention._forward_core",),
        f"{_VLLM}/ops/causal_conv1d.py": ("causal_conv1d_fn", "causal_conv1d_update"),
        f"{_VLLM}/checkpoint.py": ("MambaPrefillCheckpointExporter.export",),
        f"{_FLA}/chunk.py": ("chunk_gated_delta_rule",),
        f"{_FLA}/fused_gdn_prefill_post_conv.py": ("fused_post_conv_prep",),
        f"{_FLA}/fused_recurrent.py": (
            "fused_recurrent_gated_delta_rule",
            "fused_recurrent_gated_delta_rule_packed_decode",
        ),
        f"{_FLA}/fused_sigmoid_gating.py": ("fused_sigmoid_gating_delta_rule_update",),
        f"{_FLA}/layernorm_guard.py": ("rmsnorm_fn",),
    },
    "sglang": {
        f"{_SGLANG}/attention/fla/chunk.py": ("chunk_gated_delta_rule",),
        f"{_SGLANG}/attention/fla/fused_recurrent.py": (
            "fused_recurrent_gated_delta_rule_packed_decode",
            "fused_recurrent_gated_delta_rule_update",
        ),
        f"{_SGLANG}/attention/linear/fused_sigmoid_gating_recurrent.py": (
            "fused_sigmoid_gating_delta_rule_update",
        ),
        f"{_SGLANG}/attention/linear/fused_recurrent_linear_replayssm.py": (
            "fused_recurrent_linear_replayssm_decode",
        ),
        f"{_SGLANG}/attention/linear/gdn_replayssm_spec_decode.py": (
            *("gdn_replayssm_spec_decode", "commit_gdn_replayssm_circular"),
        ),
        f"{_SGLANG}/attention/triton_gdn_fused_proj.py": ("fused_qkv_split_gdn_prefill",),
        f"{_SGLANG}/mamba/causal_conv1d_triton.py": ("causal_conv1d_fn", "causal_conv1d_update"),
    },
    "flashinfer_python": {
        "flashinfer/gdn_prefill.py": ("chunk_gated_delta_rule",),
        "flashinfer/gdn_decode.py": (
            "gated_delta_rule_decode_pretranspose",
            "gated_delta_rule_decode",
            "gated_delta_rule_mtp",
        ),
    },
    "transformers": {f"{_MODELS}/{model}/modeling_{model}.py": _TORCH_RULES for model in LAYERS},
    "fla_core": {
        "fla/ops/gated_delta_rule/chunk.py": ("chunk_gated_delta_rule",),
        "fla/ops/gated_delta_rule/fused_recurrent.py": ("fused_recurrent_gated_delta_rule",),
        "fla/modules/causal_conv1d/ops.py": ("causal_conv1d",),
        "fla/modules/norm/fused_norm_gate.py": ("rms_norm_gated",),
    },
    "flash_qla": {"flash_qla/ops/gated_delta_rule/chunk/__init__.py": ("chunk_gated_delta_rule",)},
}
_LINEAR = "sglang/srt/layers/attention/linear"
# Definitions whose behaviour the adapters count on besides: they call ours, or ours call them.
READ: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "vllm": {
        "vllm/v1/attention/backends/gdn_attn.py": (
            "GDNAttentionMetadataBuilder.build",
            "GDNAttentionMetadataBuilder.update_block_table",
        ),
        "vllm/model_executor/layers/mamba/mamba_utils.py": (
            "MambaStateShapeCalculator.gated_delta_net_state_shape",
            "MambaStateDtypeCalculator.gated_delta_net_state_dtype",
        ),
        _QWEN: tuple(f"QwenGatedDeltaNetAttention.{name}" for name in UNPACKING),
        "vllm/model_executor/layers/mamba/abstract.py": (
            *("MambaBase.bind_kv_cache", "MambaBase.get_kv_cache_spec"),
        ),
    },
    "sglang": {
        f"{_LINEAR}/kernels/gdn_triton.py": ("TritonGDNKernel",),
        f"{_LINEAR}/gdn_backend.py": (
            *("GDNAttnBackend.forward_decode", "GDNAttnBackend.forward_extend"),
            *("GDNAttnBackend._convolve_prefill", "GDNAttnBackend._prefill_gates"),
            "GDNAttnBackend._replayssm_target_verify",
        ),
        f"{_SGLANG}/attention/linear/fused_gdn_gating.py": ("fused_gdn_gating",),
        f"{_SGLANG}/attention/linear/gdn_replayssm_spec_decode.py": ("commit_gdn_replayssm_spec",),
        "sglang/srt/speculative/spec_utils.py": ("commit_mamba_states_after_verify",),
        "sglang/srt/mem_cache/memory_pool.py": ("MambaPool.__init__",),
        "sglang/srt/layers/attention/hybrid_linear_attn_backend.py": (
            *("MambaAttnBackendBase._forward_metadata", "MambaAttnBackendBase._replay_metadata"),
        ),
    },
    "flashinfer_python": {},
    "transformers": {
        **{
            f"{_MODELS}/{model}/modeling_{model}.py": (
                *("causal_conv1d_fn", "causal_conv1d_update"),
                *(f"{prefix}GatedDeltaNet.forward", f"{prefix}RMSNormGated.forward"),
            )
            for model, prefix in LAYERS.items()
        },
        "transformers/data/data_collator.py": ("DataCollatorWithFlattening.__call__",),
    },
    "fla_core": {
        "fla/backends.py": ("BaseBackend", "BackendRegistry", "register", "dispatch"),
        "fla/ops/gated_delta_rule/backends/flash_qla.py": ("FlashQLABackend",),
    },
    "flash_qla": {},
}
Parameters = str  # of a function, in order: "q, k, scale=None"

# Functions of SGLang that its layers call by another name than that of their definition.
ALIASES = {"fused_recurrent_gdn_replayssm_decode": "fused_recurrent_linear_replayssm_decode"}


@cache
def record() -> dict[str, Any]:
    """{"versions": {package: version}, "signatures": {package: {file: {name: parameters}}},
    "bodies": the same with digests}"""
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def recorded(package: str, name: str, file: str = "") -> Parameters:
    """The parameters of a function, in the file whose path ends so."""
    name = ALIASES.get(name, name)
    files = record()["signatures"][package].items()
    found: list[Parameters] = [
        functions[name] for path, functions in files if path.endswith(file) and name in functions
    ]
    assert len(found) == 1, f"{len(found)} records of {name} in {package}/...{file}"
    return found[0]


def parameters_of(function: Any) -> Parameters:
    """The parameters of a function of ours, in the form of the records."""
    texts: list[str] = []
    for p in inspect.signature(function, follow_wrapped=False).parameters.values():
        text = f"**{p.name}" if p.kind is inspect.Parameter.VAR_KEYWORD else p.name
        if p.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in texts:
            texts.append("*")
        texts.append(text if p.default is inspect.Parameter.empty else f"{text}={p.default!r}")
    return ", ".join(texts)


def wheel_of(package: str, folder: str | None = None) -> Path:
    """The wheel of a package, of the recorded version. Skips a test where there is none."""
    folder = folder or os.environ.get(WHEELS)
    if folder is None:
        pytest.skip(f"{WHEELS} names no folder of the engines' wheels")
    name = f"{package}-{VERSIONS[package]}-*.whl"
    wheels = sorted(Path(folder).glob(name))
    if not wheels:
        pytest.skip(f"{folder} has no {name}")
    return wheels[0]


@cache
def source(wheel: Path, file: str) -> str:
    with zipfile.ZipFile(wheel) as files:
        return files.read(file).decode("utf-8")


def reader_of(package: str, folder: str | None = None) -> Callable[[str], str]:
    """The text of a package's file by its path: installed in the recorded version, or from its
    wheel. Skips a test where there is neither."""
    try:
        installed = importlib.metadata.distribution(package.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        installed = None
    if folder is None and installed is not None and installed.version == VERSIONS[package]:
        return lambda file: Path(str(installed.locate_file(file))).read_text(encoding="utf-8")
    wheel = wheel_of(package, folder)
    return lambda file: source(wheel, file)


def definitions(tree: ast.Module) -> dict[str, ast.stmt]:
    """Functions and classes of a file, and methods as Class.method; the last of a name counts."""
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{m.name}": m for m in node.body if isinstance(m, ast.FunctionDef)
            }
    return found


def parameters_in(node: ast.stmt, constants: Mapping[str, str]) -> Parameters:
    """The parameters of a definition. A default that is a module's constant has its value."""
    assert isinstance(node, ast.FunctionDef)
    a = node.args
    names = [x.arg for x in (*a.posonlyargs, *a.args)]
    defaults = [None] * (len(names) - len(a.defaults)) + a.defaults
    found = list(zip(names, defaults, strict=True))
    if a.vararg:
        found.append((f"*{a.vararg.arg}", None))
    elif a.kwonlyargs:
        found.append(("*", None))
    found += zip((x.arg for x in a.kwonlyargs), a.kw_defaults, strict=True)
    if a.kwarg:
        found.append((f"**{a.kwarg.arg}", None))
    if found and found[0][0] == "self":
        del found[0]
    texts = ((name, d and ast.unparse(d)) for name, d in found)
    return ", ".join(name if d is None else f"{name}={constants.get(d, d)}" for name, d in texts)


# Defaults that a file imports from another one, or that depend on the GPU.
IMPORTED = {
    "NULL_BLOCK_ID": "0",
    "PAD_SLOT_ID": "-1",
    "'tf32' if is_tf32_supported else 'ieee'": "'tf32'",
}


def signatures(package: str, folder: str | None = None) -> dict[str, dict[str, Parameters]]:
    """The functions that `IMITATED` names, from the package's files."""
    read = reader_of(package, folder)
    found: dict[str, dict[str, Parameters]] = {}
    for file, names in IMITATED[package].items():
        tree = definitions(ast.parse(read(file)))
        missing = [name for name in names if name not in tree]
        assert not missing, f"{file} of {package} has no {', '.join(missing)}"
        found[file] = {name: parameters_in(tree[name], IMPORTED) for name in names}
    return found


def bodies(package: str, folder: str | None = None) -> dict[str, dict[str, str]]:
    """The digest of each definition that `IMITATED` or `READ` names."""
    read = reader_of(package, folder)
    named: dict[str, tuple[str, ...]] = dict(IMITATED[package])
    for file, names in READ[package].items():
        named[file] = (*named.get(file, ()), *names)
    return {
        file: {name: digest(read(file), name) for name in names} for file, names in named.items()
    }


def digest(text: str, name: str) -> str:
    """A digest of a definition, and of all definitions and constants of its file that it uses,
    directly or not: a function's kernels are among them. Comments, docstrings and blank lines do
    not count, and neither does the version of Python that reads them."""
    tree = ast.parse(text)
    known: dict[str, ast.stmt] = definitions(tree)
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            known |= {x.id: node for x in targets if isinstance(x, ast.Name)}
    assert name in known, f"there is no {name}"
    used, new = set[str](), {name}
    while new:
        used |= new
        owners = {x.partition(".")[0] for x in new if "." in x}
        found = {y for x in new for y in _names_in(known[x], owners)}
        new = {x for x in found if x in known} - used
    lines = text.splitlines()
    parts = [f"{x}\n{_code(lines, known[x])}" for x in sorted(used)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _names_in(node: ast.AST, owners: Iterable[str]) -> Iterator[str]:
    """Names that a definition uses; of `self.method` that of each class of its file."""
    for x in ast.walk(node):
        if isinstance(x, ast.Name):
            yield x.id
        elif (
            isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name) and x.value.id == "self"
        ):
            yield from (f"{owner}.{x.attr}" for owner in owners)


def _code(lines: list[str], node: ast.stmt) -> str:
    first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", ()))])
    docstrings = {
        line
        for x in ast.walk(node)
        if isinstance(x, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(x) is not None
        for line in range(x.body[0].lineno, (x.body[0].end_lineno or 0) + 1)
    }
    kept = [
        lines[n - 1].rstrip()
        for n in range(first, (node.end_lineno or first) + 1)
        if n not in docstrings and lines[n - 1].strip() and lines[n - 1].strip()[0] != "#"
    ]
    return "\n".join(kept)


def load(package: str, file: str, names: Iterable[str], given: dict[str, Any]) -> dict[str, Any]:
    """Executes definitions of a wheel's file, with what they need `given` by name, and returns
    them. A Class.method comes as a function. Triton kernels run in the interpreter, which reads
    their text."""
    wheel = wheel_of(package)
    text = source(wheel, file)
    path = f"{wheel}/{file}"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    tree = definitions(ast.parse(text))
    namespace = {"__name__": file.removesuffix(".py").replace("/", "."), **given}
    for name in names:
        body = ast.Module([tree[name]], type_ignores=[])
        exec(compile(body, path, "exec"), namespace)
    return {name: namespace[name.rpartition(".")[2]] for name in names}


def main() -> None:
    (folder,) = sys.argv[1:]
    found = {package: signatures(package, folder) for package in VERSIONS}
    digests = {package: bodies(package, folder) for package in VERSIONS}
    made = {"versions": VERSIONS, "signatures": found, "bodies": digests}
    RECORD.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
