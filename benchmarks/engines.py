"""Triton files of vLLM and SGLang, imported without the engines.

    python -m benchmarks.engines WHEELS FOLDER

extracts the needed files of the engines' wheels, which `pip download --no-deps` leaves in WHEELS,
to FOLDER: less than a MiB, which can be copied to the machine that measures. `kernels(name,
folder)` imports them from there. Packages are empty modules with a path, so no `__init__` of an
engine runs. `STUBS` has the names that the files import from the rest of the engine.
"""

import argparse
import contextlib
import importlib
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import torch

VERSIONS: Final = {"vllm": "0.33.0", "sglang": "0.5.23"}
_VLLM = "vllm/third_party/flash_linear_attention/ops"
_SGLANG = "sglang/kernels/ops/attention"
# Files, and folders whose files are all taken.
FILES: Final[Mapping[str, tuple[str, ...]]] = {
    "vllm": (
        f"{_VLLM}/",
        "vllm/model_executor/layers/mamba/ops/causal_conv1d.py",
        "vllm/model_executor/warmup/jit_warmup.py",
        "vllm/model_executor/warmup/jit_warmup_triton_helper.py",
        "vllm/utils/math_utils.py",
    ),
    "sglang": (
        f"{_SGLANG}/fla/",
        f"{_SGLANG}/linear/fused_gdn_gating.py",
        f"{_SGLANG}/linear/fused_recurrent_linear_replayssm.py",
        f"{_SGLANG}/linear/gdn_replayssm_spec_decode.py",
        f"{_SGLANG}/triton_gdn_fused_proj.py",
        "sglang/kernels/ops/mamba/causal_conv1d_triton.py",
    ),
}
# The functions that a layer or benchmarks.rings calls, by the module of each.
FUNCTIONS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "vllm": {
        "vllm.model_executor.layers.mamba.ops.causal_conv1d": (
            "causal_conv1d_fn",
            "causal_conv1d_update",
        ),
        f"{_VLLM.replace('/', '.')}.fused_gdn_prefill_post_conv": ("fused_post_conv_prep",),
        f"{_VLLM.replace('/', '.')}.chunk": ("chunk_gated_delta_rule",),
        f"{_VLLM.replace('/', '.')}.fused_recurrent": (
            "fused_recurrent_gated_delta_rule_packed_decode",
        ),
        f"{_VLLM.replace('/', '.')}.layernorm_guard": ("rmsnorm_fn",),
    },
    "sglang": {
        "sglang.kernels.ops.mamba.causal_conv1d_triton": (
            "causal_conv1d_fn",
            "causal_conv1d_update",
        ),
        f"{_SGLANG.replace('/', '.')}.triton_gdn_fused_proj": ("fused_qkv_split_gdn_prefill",),
        f"{_SGLANG.replace('/', '.')}.linear.fused_gdn_gating": ("fused_gdn_gating",),
        f"{_SGLANG.replace('/', '.')}.linear.fused_recurrent_linear_replayssm": (
            "fused_recurrent_linear_replayssm_decode",
        ),
        f"{_SGLANG.replace('/', '.')}.linear.gdn_replayssm_spec_decode": (
            "gdn_replayssm_spec_decode",
            "commit_gdn_replayssm_circular",
        ),
        f"{_SGLANG.replace('/', '.')}.fla.chunk": ("chunk_gated_delta_rule",),
        f"{_SGLANG.replace('/', '.')}.fla.fused_recurrent": (
            "fused_recurrent_gated_delta_rule_packed_decode",
        ),
        f"{_SGLANG.replace('/', '.')}.fla.layernorm_gated": ("rms_norm_gated",),
    },
}


def pack(wheels: Path, folder: Path) -> list[str]:
    """Writes the files of every engine that has a wheel. Returns the engines without a wheel."""
    missing = []
    for name, version in VERSIONS.items():
        found = sorted(wheels.glob(f"{name}-{version}-*.whl"))
        if not found:
            missing.append(f"{wheels} has no wheel of {name} {version}")
            continue
        with zipfile.ZipFile(found[0]) as wheel:
            for file in wheel.namelist():
                wanted = (file.startswith(p) if p.endswith("/") else file == p for p in FILES[name])
                if file.endswith(".py") and any(wanted):
                    wheel.extract(file, folder)
    return missing


# ------------------------------------------------------------------------------- what they import


def _never() -> bool:
    return False


def _has_pdl() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def _is_of_family(capability: int, device_id: int = 0) -> bool:
    """capability: ten times the major version, in the form of vLLM's platform."""
    if not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device_id)[0] * 10 == capability


def _multiprocessors(device: int = 0) -> int:
    cuda = torch.cuda.is_available()
    return torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1


def _to_device(data: Any, device: Any = None, dtype: Any = None, out: Any = None) -> Any:
    x = torch.as_tensor(data, dtype=dtype)
    return x.to(device) if out is None else out.copy_(x)


@contextlib.contextmanager
def _nothing_around(*args: Any, **kwargs: Any) -> Any:
    yield


def _module(name: str, **names: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(names)
    return made


def stubs(name: str) -> dict[str, ModuleType]:
    """The names that an engine's files import from the rest of the engine."""
    triton: Any = importlib.import_module("triton")
    language: Any = importlib.import_module("triton.language")
    libdevice: Any = importlib.import_module("triton.language.extra.libdevice")
    if name == "vllm":
        platform = SimpleNamespace(
            is_cuda=torch.cuda.is_available,
            is_cuda_alike=torch.cuda.is_available,
            is_rocm=_never,
            is_cpu=_never,
            is_xpu=_never,
            is_device_capability_family=_is_of_family,
            is_arch_support_pdl=_has_pdl,
            num_compute_units=_multiprocessors,
        )
        found = [
            _module("vllm.platforms", current_platform=platform),
            _module(
                "vllm.triton_utils",
                triton=triton,
                tl=language,
                tldevice=libdevice,
                HAS_TRITON=True,
                LOG2E=1.4426950408889634,
            ),
            _module("vllm.envs"),
            _module("vllm.utils.gpu_sync_debug", gpu_sync_allowed=_nothing_around),
            _module("vllm.utils.torch_utils", async_tensor_h2d=_to_device),
            _module("vllm.utils.platform_utils", num_compute_units=_multiprocessors),
            _module("vllm.v1.attention.backends.utils", NULL_BLOCK_ID=0, PAD_SLOT_ID=-1),
        ]
    else:
        release = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])
        found = [
            _module("sglang.kernels.jit.utils", is_arch_support_pdl=_has_pdl),
            _module("sglang.srt.utils.common", torch_release=release),
            _module(
                "sglang.srt.utils",
                is_gfx95_supported=_never,
                is_hip=_never,
                is_npu=_never,
                is_cpu=_never,
                is_xpu=_never,
                cpu_has_amx_support=_never,
                cdiv=triton.cdiv,
                next_power_of_2=triton.next_power_of_2,
                device_context=_nothing_around,
                get_bool_env_var=lambda name, default="false": default == "true",
            ),
            _module("sglang.srt.batch_invariant_ops", is_batch_invariant_mode_enabled=_never),
            _module("sglang.srt.environ", envs=_Environment()),
            _module(
                "sglang.srt.model_executor.cuda_graph_config",
                Backend=_Environment(),
                Phase=_Environment(),
                check_cuda_graph_backend=lambda *args: False,
            ),
        ]
    return {module.__name__: module for module in found}


class _Environment:
    """SGLang's variables, none of which is set."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(get=lambda: None)


def kernels(name: str, folder: Path) -> dict[str, Callable[..., Any]]:
    """The functions of `FUNCTIONS` of an engine. An installed engine is not imported: its name
    is replaced in this process.

    Raises ImportError if the folder lacks a file, or a file imports a name without a stub.
    """
    given = stubs(name)
    for file in FILES[name]:
        parts = Path(file).parts if file.endswith("/") else Path(file).parts[:-1]
        for n in range(1, len(parts) + 1):
            _package(".".join(parts[:n]), folder.joinpath(*parts[:n]))
    for module in given.values():
        parts = tuple(module.__name__.split("."))
        for n in range(1, len(parts)):
            _package(".".join(parts[:n]), folder.joinpath(*parts[:n]))
        sys.modules[module.__name__] = module
        setattr(sys.modules[".".join(parts[:-1])], parts[-1], module)
    found: dict[str, Callable[..., Any]] = {}
    for path, names in FUNCTIONS[name].items():
        module = importlib.import_module(path)
        found |= {function: getattr(module, function) for function in names}
    return found


def _package(name: str, path: Path) -> None:
    if name not in sys.modules:
        made = ModuleType(name)
        made.__path__ = [str(path)]
        sys.modules[name] = made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("wheels", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    for line in pack(options.wheels, options.folder):
        print(line)


if __name__ == "__main__":
    main()
