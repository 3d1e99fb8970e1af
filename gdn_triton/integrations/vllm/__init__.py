"""vLLM's Gated DeltaNet layers on this package's ops.

    from gdn_triton.integrations.vllm import disable, register, status

    register()
    print(status())

`register` must run in every process of vLLM before a model is built, so call it from an entry point
of the group `vllm.general_plugins` (`docs/integrations.md` has an example, and lists the ops that
run). It replaces

- `_forward_core` of the layers of Qwen and OLMo, if its source text is known here
  (`gdn_triton.integrations.vllm.layer`);
- the functions of those modules (`gdn_triton.integrations.vllm.functions`), for calls from outside
  of that method;
- `rmsnorm_fn`, the gated norm of the layers (`gdn_triton.integrations.vllm.norm`);
- the method that makes a step's metadata, which knows the lengths of prefills on the host
  (`gdn_triton.integrations.vllm.lengths`);
- `supports_batch_invariance` of vLLM's backend for these layers: vLLM's own refuses to start with
  `VLLM_BATCH_INVARIANT=1`, and ours returns true with `GDN_BATCH_INVARIANT=1`;
- the class `ChunkGatedDeltaRule` in vLLM's registry of custom ops. Our class is a subclass of
  vLLM's, because Python would not initialise another class.
"""

import dataclasses
import hashlib
import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final

from gdn_triton._host.environment import batch_invariant
from gdn_triton.integrations._places import ABSENT, Patches, Place, Status, Target
from gdn_triton.integrations.vllm import functions, layer, lengths, norm, warming
from gdn_triton.integrations.vllm import window as windows
from gdn_triton.integrations.vllm.functions import (
    causal_conv1d_fn,
    causal_conv1d_update,
    chunk_gated_delta_rule,
    fi_chunk_gated_delta_rule,
    forward,
    fused_post_conv_prep,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gated_delta_rule_packed_decode,
    fused_sigmoid_gating_delta_rule_update,
)

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "disable",
    "fi_chunk_gated_delta_rule",
    "forward",
    "fused_post_conv_prep",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gated_delta_rule_packed_decode",
    "fused_sigmoid_gating_delta_rule_update",
    "register",
    "status",
]

PACKAGE: Final = "vllm.model_executor.layers.mamba"
QWEN: Final = f"{PACKAGE}.gdn.qwen_gdn_linear_attn"
OLMO: Final = f"{PACKAGE}.gdn.olmo_gdn_linear_attn"
# The modules with Gated DeltaNet layers, and the class of each module. Versions before 0.24 had one
# module.
LAYERS: Final = {
    QWEN: "QwenGatedDeltaNetAttention",
    OLMO: "OlmoHybridGatedDeltaNetAttention",
    f"{PACKAGE}.gdn_linear_attn": "QwenGatedDeltaNetAttention",
}
NORM: Final = "vllm.third_party.flash_linear_attention.ops.layernorm_guard"
METADATA: Final = "vllm.v1.attention.backends.gdn_attn"
NAME: Final = "ChunkGatedDeltaRule"
LOG: Final = "_log_gdn_backend_decision"
CORE: Final = "_forward_core"
INVARIANCE: Final = "supports_batch_invariance"
NORM_NAME: Final = "rmsnorm_fn"
BUILDER, BUILD, UPDATE = "GDNAttentionMetadataBuilder", "build", "update_block_table"
STATES: Final = f"{PACKAGE}.mamba_utils"
SHAPES: Final = ("MambaStateShapeCalculator", "gated_delta_net_state_shape")
DTYPES: Final = ("MambaStateDtypeCalculator", "gated_delta_net_state_dtype")

# Our functions by vLLM's names, each with the op of ours that runs.
OPS: Final = {
    "causal_conv1d_fn": "causal_conv1d",
    "causal_conv1d_update": "causal_conv1d_update",
    "chunk_gated_delta_rule": "chunk_prefill",
    "fi_chunk_gated_delta_rule": "chunk_prefill",
    "fused_post_conv_prep": "fused_post_conv_prep",
    "fused_recurrent_gated_delta_rule": "recurrent_step",
    "fused_recurrent_gated_delta_rule_packed_decode": "recurrent_step",
    "fused_sigmoid_gating_delta_rule_update": "recurrent_step",
}
# The known source texts of vLLM's `_forward_core`, by their sha256.
KNOWN: Final = {
    QWEN: ("1c37fd8f806e6c01ee4d8aec92b33ad81a7ab87953669903831306ddba3f0700",),  # 0.33.0
    OLMO: ("cb7c5d20f4741ea7741080e32d4c2cbce47ea3b65f1b188083ae56a580c38d9d",),  # 0.33.0
}
# The known source texts of the method that makes the metadata.
KNOWN_BUILDS: Final = (
    "e2e6c60cbf1dedd7e2aedf82b7ea3b71e781c9b23cf0c31147c3fa2db979ecd1",
)  # 0.33.0
# Functions that are not replaced, and the reasons.
OTHERS: Final = (
    (QWEN, "fused_mtp_decode_impl", "recurrence and gated norm in one launch, for drafts"),
    (OLMO, "fused_olmo_hybrid_gdn_gating", "reached past our `_forward_core` only"),
)
# The line of `status` about decode steps with a window of records.
WINDOW: Final = "decode steps with a window"
NO_WINDOW: Final = "`register(window=True)` adds the records to vLLM's pages of states."

_logger = logging.getLogger("gdn_triton")
_patches = Patches()
_registered: dict[Any, type[Any]] = {}  # vLLM's class: our class


def register(*, window: bool = False) -> type[Any]:
    """Replaces vLLM's functions wherever its Gated DeltaNet layers call an op, registers a subclass
    of vLLM's `ChunkGatedDeltaRule` with vLLM, and returns that subclass.

    A second call changes nothing. Existing models continue to use their own `ChunkGatedDeltaRule`,
    but all other replacements take effect in them. vLLM's choice of a prefill kernel does not
    change: if the choice is FlashInfer, vLLM plans the checkpoints of a prefill, and our functions
    write them.

    window: vLLM's pages have the records of a window, with which decode steps write few states.
    There is none with prefix caching, with drafts and with a connector that moves states; vLLM's
    log then names the reason. Once the pages have records, a later call does not take them back.

    Raises:
        ImportError: vLLM, or the class in one of `LAYERS`, is missing.
        RuntimeError: a function has an argument that is not known here, or window is True and a
            text of vLLM is of no version that is known here.
        AssertionError: raised by vLLM, if another package has registered a replacement of this
            class.
    """
    modules = _modules()
    in_tree = getattr(_main(modules), NAME)
    if type(window) is not bool:
        raise TypeError(f"window must be True or False, got {window!r}")
    reason = _why_no_window(modules) if window else None
    if reason is not None:
        raise RuntimeError(f"vLLM cannot decode with a window: {reason}")
    for target, ours in _targets(modules, window):
        _check_known(target, ours)
        if not _patches.is_ours(target):
            _patches.put(target, ours)
    if in_tree not in _registered:
        ours = _subclass(in_tree)
        custom_op = importlib.import_module("vllm.model_executor.custom_op").CustomOp
        custom_op.register_oot(ours, name=NAME)
        _registered[in_tree] = ours
    _logger.info("vLLM runs Gated DeltaNet layers with gdn_triton.")
    return _registered[in_tree]


def disable() -> Status:
    """Restores the functions that `register` replaced in vLLM's modules. A place that has another
    replacement by now is not changed, and the returned status names it. The registered class
    remains, because vLLM's registry removes no class."""
    _patches.take_back()
    found = status()
    _patches.made.clear()
    return found


def status() -> Status:
    """Returns a report of every place in vLLM's modules. Changes nothing, but imports the modules.

    Raises:
        ImportError: as for `register`.
    """
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = None
    modules = _modules()
    enabled = bool(_patches.made)
    missed = "not there when `register` ran: call it again."
    with_window = any(p.in_place for p in _patches.made if p.target.name == SHAPES[1])
    targets = [target for target, _ in _targets(modules, with_window)]
    places = [*_patches.places(targets, enabled, missed)]
    main = _main(modules)
    name, registered = f"{main.__name__}.{NAME}", getattr(main, NAME) in _registered
    places.append(Place(name, *(("chunk_prefill",) if registered else (None, "not enabled."))))
    for module in modules:
        reason = _why_not_core(module)
        if reason is not None:
            places.append(
                Place(f"{module.__name__}.{LAYERS[module.__name__]}.{CORE}", None, reason)
            )
        for where, other, why in OTHERS:
            if module.__name__ == where and hasattr(module, other):
                places.append(Place(f"{where}.{other}", None, why))
    if _norm() is None:
        places.append(Place(f"{NORM}.{NORM_NAME}", None, "there is no such function to replace."))
    reason = _why_not_build()
    if reason is not None:
        places.append(Place(f"{METADATA}.{BUILDER}.{BUILD}", None, reason))
    if with_window:
        places.append(Place(WINDOW, "recurrent_step"))
    else:
        places.append(Place(WINDOW, None, NO_WINDOW))
    return Status("vLLM", enabled, version, tuple(places))


def _modules() -> list[ModuleType]:
    """Returns vLLM's modules with Gated DeltaNet layers."""
    found, failures = [], []
    for name in LAYERS:
        try:
            found.append(importlib.import_module(name))
        except ImportError as error:
            if error.name == "vllm":
                raise ImportError(
                    "gdn_triton.integrations.vllm needs vLLM, which is not installed in this "
                    f"environment: {error}"
                ) from error
            failures.append(f"{name}: {error}")
    if not any(hasattr(module, NAME) for module in found):
        failures += [f"{module.__name__} has no {NAME}" for module in found]
        raise ImportError(
            f"gdn_triton.integrations.vllm finds no {NAME} in vLLM: {'; '.join(failures)}"
        )
    return found


def _main(modules: list[ModuleType]) -> ModuleType:
    return next(module for module in modules if hasattr(module, NAME))


def _targets(modules: list[ModuleType], with_window: bool = False) -> Iterator[tuple[Target, Any]]:
    """Returns every place that may have a replacement, with the replacement."""
    for module in modules:
        if _why_not_core(module) is None:
            owner = getattr(module, LAYERS[module.__name__])
            op = "integrations.vllm.layer.forward_core"
            yield Target(owner, CORE, op), layer.method(module, warming.warm_up)
        for name, op in OPS.items():
            if hasattr(module, name):
                yield Target(module, name, op), getattr(functions, name)
        if hasattr(module, LOG):
            yield Target(module, LOG, "integrations.vllm"), _log
    if all(_why_not_core(module) is None for module in modules):
        backend = importlib.import_module(METADATA).GDNAttentionBackend
        # Versions of vLLM that have their own answer are not changed.
        if vars(backend).get(INVARIANCE, _invariance) is _invariance:
            yield Target(backend, INVARIANCE, "integrations.vllm.layer"), _invariance
    target = _norm()
    if target is not None:
        yield target, norm.gated_norm(target.now)
    if _why_not_build() is None:
        owner = getattr(importlib.import_module(METADATA), BUILDER)
        target = Target(owner, BUILD, "integrations.vllm.lengths")
        yield target, windows.placing(lengths.telling(target.now))
        if with_window:
            yield from _window_targets(owner, modules)


def _window_targets(builder: Any, modules: list[ModuleType]) -> Iterator[tuple[Target, Any]]:
    states = importlib.import_module(STATES)
    for (owner, name), wrap in ((SHAPES, windows.shapes), (DTYPES, windows.dtypes)):
        target = Target(getattr(states, owner), name, "recurrent_step")
        yield target, target.now if _patches.is_ours(target) else wrap(target.now)
    target = Target(builder, UPDATE, "integrations.vllm.window")
    if target.now is not ABSENT:
        yield target, windows.carrying(target.now)
    for module in modules:
        owner = getattr(module, LAYERS[module.__name__])
        for name in windows.UNPACKING:
            if name in vars(owner):
                target = Target(owner, name, "integrations.vllm.window")
                yield target, windows.with_own_dtypes(target.now)


def _why_no_window(modules: list[ModuleType]) -> str | None:
    """Returns the reason why vLLM's pages cannot have the records of a window, or None."""
    reasons = [_why_not_core(module) for module in modules]
    found = [reason for reason in (*reasons, _why_not_build()) if reason is not None]
    return found[0] if found else None


def _norm() -> Target | None:
    """Returns the place of the gated norm, which some versions of vLLM do not have."""
    try:
        module = importlib.import_module(NORM)
    except ModuleNotFoundError:
        return None
    return Target(module, NORM_NAME, "rms_norm_gated") if hasattr(module, NORM_NAME) else None


def _log(vllm_config: object, requested_backend: str, active_backend: str) -> None:
    """Replaces vLLM's log line about its own kernel."""
    _logger.info("Using gdn_triton for GDN prefill (requested=%s).", requested_backend)


def _supports_batch_invariance(cls: type[Any]) -> bool:
    """Returns whether the layers are batch-invariant: with our layers a sequence gives the same
    bits in any batch if no sequence is split. Another kind of layer has a backend derived from this
    one, but kernels of its own."""
    return INVARIANCE in vars(cls) and batch_invariant()


_invariance: Final[Any] = classmethod(_supports_batch_invariance)


def _why_not_core(module: ModuleType) -> str | None:
    """Returns the reason why `_forward_core` of a module's layer is not replaced, or None."""
    owner = getattr(module, LAYERS[module.__name__], None)
    if _is_ours(owner, CORE):
        return None
    reason = _why_unknown(owner, CORE, KNOWN.get(module.__name__, ()))
    if reason is not None:
        return f"{reason}; only the functions that it calls are ours."
    fields = {f.name for f in dataclasses.fields(_metadata_class())}
    missing = sorted(set(layer.METADATA) - fields)
    return f"its metadata has no {', '.join(missing)}." if missing else None


def _why_not_build() -> str | None:
    """Returns the reason why the method that makes the metadata reports no lengths, or None."""
    owner = getattr(importlib.import_module(METADATA), BUILDER, None)
    if _is_ours(owner, BUILD):
        return None
    reason = _why_unknown(owner, BUILD, KNOWN_BUILDS)
    return f"{reason}; the host's lengths reach no plan." if reason else None


def _is_ours(owner: Any, name: str) -> bool:
    return owner is not None and _patches.is_ours(Target(owner, name, ""))


def _why_unknown(owner: Any, name: str, known: tuple[str, ...]) -> str | None:
    """Returns the reason why a method's source text is not one of the known ones, by their sha256,
    or None."""
    theirs: Any = ABSENT if owner is None else vars(owner).get(name, ABSENT)
    if theirs is ABSENT:
        return f"there is no {name} to replace"
    digest = hashlib.sha256(inspect.getsource(theirs).encode()).hexdigest()
    return None if digest in known else "its text is of no version that is known here"


def _metadata_class() -> Any:
    return importlib.import_module(METADATA).GDNAttentionMetadata


def _check_known(target: Target, ours: Callable[..., Any]) -> None:
    if target.now is ABSENT or _patches.is_ours(target):
        return
    # A class method in a class's dictionary cannot be called.
    theirs, known = (
        inspect.signature(getattr(function, "__func__", function)).parameters
        for function in (target.now, ours)
    )
    unknown = sorted(theirs.keys() - known.keys())
    if unknown:
        raise RuntimeError(
            f"vLLM's {target.path} takes {', '.join(unknown)}, which gdn_triton does not know: it "
            "was written for vLLM 0.33.0"
        )


def _subclass(in_tree: Any) -> type[Any]:
    class GdnTritonChunkGatedDeltaRule(in_tree):  # type: ignore[misc,valid-type]
        gdn_prefill_backend: str

        def __init__(self) -> None:
            super().__init__()
            # vLLM has chosen a kernel by the hardware. Its layer plans the checkpoints of a prefill
            # if the choice is FlashInfer; for other choices it prepares inputs of their kernels.
            if self.gdn_prefill_backend != "flashinfer":
                self.gdn_prefill_backend = "triton"
            # forward() calls this attribute.
            self._forward_method = forward

    return GdnTritonChunkGatedDeltaRule
