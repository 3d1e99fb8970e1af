"""SGLang's Gated DeltaNet layers on this package's ops. `enable` replaces SGLang's functions by
ours.

    from gdn_triton.integrations.sglang import disable, enable, status

    print(enable())  # before or after a model is built
    ...
    disable()

The functions of `gdn_triton.integrations.sglang.functions`,
`gdn_triton.integrations.sglang.convolution` and `gdn_triton.integrations.sglang.rings` may also be
called directly.

SGLang looks up its functions as globals of its modules at every call. Therefore `enable` needs to
run only once per process, from an entry point of the group `sglang.srt.plugins`
(`docs/integrations.md` has an example).
"""

import functools
import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, Final

from gdn_triton.integrations._places import Patches, Place, Status, Target
from gdn_triton.integrations.sglang.convolution import (
    causal_conv1d_fn,
    causal_conv1d_update,
    fused_qkv_split_gdn_prefill,
)
from gdn_triton.integrations.sglang.functions import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule_packed_decode,
    fused_recurrent_gated_delta_rule_update,
    fused_sigmoid_gating_delta_rule_update,
)
from gdn_triton.integrations.sglang.rings import (
    commit_gdn_replayssm_circular,
    fused_recurrent_gdn_replayssm_decode,
    gdn_replayssm_spec_decode,
    is_left_to_sglang,
)
from gdn_triton.integrations.sglang.warming import before_memory

__all__ = [
    "FUNCTIONS",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "commit_gdn_replayssm_circular",
    "disable",
    "enable",
    "fused_qkv_split_gdn_prefill",
    "fused_recurrent_gated_delta_rule_packed_decode",
    "fused_recurrent_gated_delta_rule_update",
    "fused_recurrent_gdn_replayssm_decode",
    "fused_sigmoid_gating_delta_rule_update",
    "gdn_replayssm_spec_decode",
    "status",
]

_LINEAR: Final = "sglang.srt.layers.attention.linear"
# The module in which SGLang's kernel for --linear-attn-backend triton looks up its functions.
MODULE: Final = f"{_LINEAR}.kernels.gdn_triton"
# The functions that are replaced in each module, with the op that runs. Modules after the first may
# lack some of these functions.
PLACES: Final = {
    MODULE: {
        "chunk_gated_delta_rule": "chunk_prefill",
        "fused_recurrent_gated_delta_rule_packed_decode": "recurrent_step",
        "fused_recurrent_gdn_replayssm_decode": "recurrent.rings.ring_step",
        "fused_sigmoid_gating_delta_rule_update": "recurrent_step",
    },
    f"{_LINEAR}.gdn_backend": {
        "causal_conv1d_fn": "causal_conv1d",
        "causal_conv1d_update": "causal_conv1d_update",
        "fused_qkv_split_gdn_prefill": "chunk_prefill",
    },
    "sglang.srt.models.jet_nemotron": {"fused_recurrent_gated_delta_rule_update": "recurrent_step"},
    # SGLang's backend and its workers import these at every call.
    "sglang.kernels.ops.attention.linear.gdn_replayssm_spec_decode": {
        "commit_gdn_replayssm_circular": "recurrent.rings.fold_rings",
        "gdn_replayssm_spec_decode": "recurrent.rings.ring_drafts",
    },
}
# The runner loads the model and then allocates SGLang's pools with this method.
RUNNER: Final = "sglang.srt.model_executor.model_runner"
OWNER, ALLOCATE = "ModelRunner", "alloc_memory_pool"
BACKEND: Final = f"{_LINEAR}.gdn_backend"
# Functions that are not replaced, and the reasons.
OTHERS: Final = {
    BACKEND: {
        "fused_gdn_gating": "a prefill takes g and beta, as SGLang's kernel does",
        "fused_qkvzba_causal_conv1d_update_contiguous": "unpacks z, b and a in the same launch",
        "fused_qkvzba_split_reshape_cat_contiguous": "a view of z would be copied before the norm",
    },
    "sglang.kernels.ops.attention.linear.gdn_replayssm_spec_decode": {
        "commit_gdn_replayssm_spec": "it advances the cursors of rings, and reads no state",
    },
}


def _has(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda given: any(given.get(name) is not None for name in names)


_RINGS: Final = ("with more than 32 rows or 8 drafts, or raw values", is_left_to_sglang)
# Calls of a function that SGLang's own function runs, by their keywords: a description and a test.
# SGLang passes these arguments by name.
THEIRS: Final[dict[str, tuple[str, Callable[[Mapping[str, Any]], bool]]]] = {
    "fused_sigmoid_gating_delta_rule_update": (
        "with ReplaySSM's raw values of drafts",
        _has("replayssm_rawv"),
    ),
    "causal_conv1d_update": (
        "with the windows of drafts",
        _has("intermediate_conv_window", "retrieve_next_token"),
    ),
    "commit_gdn_replayssm_circular": _RINGS,
    "fused_recurrent_gdn_replayssm_decode": _RINGS,
    "gdn_replayssm_spec_decode": _RINGS,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        chunk_gated_delta_rule,
        fused_recurrent_gated_delta_rule_packed_decode,
        fused_sigmoid_gating_delta_rule_update,
        fused_recurrent_gated_delta_rule_update,
        fused_recurrent_gdn_replayssm_decode,
        gdn_replayssm_spec_decode,
        commit_gdn_replayssm_circular,
        causal_conv1d_fn,
        causal_conv1d_update,
        fused_qkv_split_gdn_prefill,
    )
}

_logger = logging.getLogger("gdn_triton")
_patches = Patches()


def enable() -> Status:
    """Replaces SGLang's functions by ours where its layers call them, and returns `status()`. A
    second call changes nothing that is already replaced.

    SGLang's own code runs the convolution's windows of drafts and SGLang's other kernels; `status`
    lists these places. Before a runner allocates its pools, every kind of call of its model's
    layers runs once, so no request compiles a kernel (`gdn_triton.integrations.sglang.warming`).

    Raises:
        ImportError: SGLang, or one of the functions of its kernel for "triton", is missing.
        RuntimeError: one of these functions has an argument that is not known here.
    """
    targets = list(_targets())
    for target in targets:
        _check_known(target)
    for target in targets:
        if not _patches.is_ours(target):
            ours, left = FUNCTIONS[target.name], THEIRS.get(target.name)
            _patches.put(target, _unless(left[1], ours, target.now) if left else ours)
    for target in _allocations():
        if not _patches.is_ours(target):
            _patches.put(target, before_memory(target.now))
    _logger.info("SGLang runs Gated DeltaNet layers with gdn_triton, where it asks for triton.")
    return status()


def disable() -> Status:
    """Restores the functions that `enable` replaced. A place that has another replacement by now is
    not changed, and the returned status names it."""
    _patches.take_back()
    found = status()
    _patches.made.clear()
    return found


def status() -> Status:
    """Returns a report of every place in SGLang's modules. Changes nothing, but imports the
    modules.

    Raises:
        ImportError: as for `enable`.
    """
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        version = None
    enabled = bool(_patches.made)
    missed = "not there when `enable` ran: call it again."
    targets = (*_targets(), *_allocations())
    places = [*_patches.places(targets, enabled, missed)]
    for target in targets:
        if _patches.is_ours(target) and target.name in THEIRS:
            when = THEIRS[target.name][0]
            places.append(Place(f"{target.path} {when}", None, "SGLang's own runs."))
    for name in (*PLACES, RUNNER):
        module = _module(name)
        if isinstance(module, ImportError):
            places.append(Place(name, None, f"not imported: {module}"))
            continue
        for other, reason in OTHERS.get(name, {}).items():
            if hasattr(module, other):
                places.append(Place(f"{name}.{other}", None, reason))
    return Status("SGLang", enabled, version, tuple(places))


def _module(name: str) -> ModuleType | ImportError:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        return error


def _targets() -> Iterator[Target]:
    for name, functions in PLACES.items():
        module = _module(name)
        if isinstance(module, ImportError):
            if module.name == "sglang":
                raise ImportError(
                    "gdn_triton.integrations.sglang needs SGLang, which is not installed in this "
                    f"environment: {module}"
                )
            if name == MODULE:
                raise ImportError(f"gdn_triton.integrations.sglang finds no {name}: {module}")
            continue
        for function, op in functions.items():
            if hasattr(module, function):
                yield Target(module, function, op)
            elif name == MODULE:
                raise ImportError(f"gdn_triton.integrations.sglang finds no {function} in {MODULE}")


def _allocations() -> Iterator[Target]:
    owner = getattr(_module(RUNNER), OWNER, None)
    if hasattr(owner, ALLOCATE):
        yield Target(owner, ALLOCATE, "integrations.sglang.warming")


def _check_known(target: Target) -> None:
    if _patches.is_ours(target):
        return
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    theirs = inspect.signature(target.now).parameters
    named = {name for name, parameter in theirs.items() if parameter.kind not in kinds}
    unknown = sorted(named - inspect.signature(FUNCTIONS[target.name]).parameters.keys())
    if unknown:
        raise RuntimeError(
            f"SGLang's {target.name} takes {', '.join(unknown)}, which gdn_triton does not know: "
            "it was written for SGLang 0.5.23"
        )


def _unless(
    is_left: Callable[[Mapping[str, Any]], bool],
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
) -> Callable[..., Any]:
    @functools.wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (theirs if is_left(kwargs) else ours)(*args, **kwargs)

    return call
